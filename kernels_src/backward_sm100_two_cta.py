"""FlashAttention backward for SM100 and SM103 with two CTAs for 256 keys, which share every matrix instruction.

As backward_sm100.py, whose compute and store code it uses; each CTA of the pair owns 128 of the keys and their dK and
dV. What a pair saves: an instruction takes half of operand B from either CTA, so each loads half of Q, dO, K^T for it;
and dQ of a tile sums over 256 keys at once, so half as much is added to global memory. For that each CTA gets the dS of
its 64 queries (rank r: queries 64 r .. 64 r + 63) for all 256 keys: half of what a CTA computes goes to the other by a
copy from shared memory to shared memory.

Every barrier that the issuing warp waits for lies in CTA 0, the leader, and counts both CTAs; products are issued by
the leader alone and their commits arrive in both. Barriers besides those of the one-CTA kernel, or different:
    q, qt, do, dot, k, v, kt: `full` in the leader (bytes of both CTAs); `empty` in either (1).
    lse_full, dpsum_full (1 + bytes), lse_empty, dpsum_empty (8): each CTA's own copy of the per-query vectors.
    exchange_full (1 + bytes): the peer's part of dS has landed here. exchange_ready (2, leader): in both CTAs.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory as mem
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int16, Int32, Int64, const_expr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import LayoutEnum

from kernels_src.backward_sm100 import (
    COMPUTE_WARP,
    COMPUTE_WARPS,
    FRAGMENT,
    HALF,
    LAUNCH_REGISTERS,
    LOAD_WARP,
    MMA_WARP,
    NUM_THREADS,
    TILE_M,
    TILE_N,
    WARPS_PER_GROUP,
    BackwardSm100,
    Problem,
    Tiles,
    Work,
    _copy_views,
    _retyped,
)
from kernels_src.integers import select
from kernels_src.masking.query_range import query_range
from kernels_src.mma.umma import accumulator_at, fence_after_wait, fence_before_arrive, multiply
from kernels_src.pipelines.ring import Cursor
from kernels_src.scheduling import single_tile, turns
from kernels_src.softmax import correction
from kernels_src.softmax.softcap import cap_factor

PAIR = 2
PAIR_N = PAIR * TILE_N
RELAY_WARP = 14
LEADER = 0
BOTH = 3  # mask of a commit that arrives in both CTAs
PART = TILE_N * HALF  # elements of the dS of one CTA's keys for the queries of one CTA
STAGING = 2  # the part of shared dS that waits to be sent


class Barriers(NamedTuple):
    """Shared-memory addresses of the mbarriers."""

    k_full: cute.Pointer
    kt_full: cute.Pointer
    v_full: cute.Pointer
    q_full: cute.Pointer
    q_empty: cute.Pointer
    qt_full: cute.Pointer
    qt_empty: cute.Pointer
    do_full: cute.Pointer
    do_empty: cute.Pointer
    dot_full: cute.Pointer
    dot_empty: cute.Pointer
    lse_full: cute.Pointer
    lse_empty: cute.Pointer
    dpsum_full: cute.Pointer
    dpsum_empty: cute.Pointer
    s_full: cute.Pointer
    p_ready: cute.Pointer
    dp_full: cute.Pointer
    ds_ready: cute.Pointer
    exchange_full: cute.Pointer
    exchange_ready: cute.Pointer
    dq_full: cute.Pointer
    dq_empty: cute.Pointer
    dv_full: cute.Pointer
    dk_full: cute.Pointer


class Maps(NamedTuple):
    """Tensor maps and their coordinate tensors; `*_t` with the head dimension split between the CTAs."""

    q: cute.CopyAtom
    q_coordinates: cute.Tensor
    q_t: cute.CopyAtom
    q_t_coordinates: cute.Tensor
    k: cute.CopyAtom
    k_coordinates: cute.Tensor
    k_t: cute.CopyAtom
    k_t_coordinates: cute.Tensor
    v: cute.CopyAtom
    v_coordinates: cute.Tensor
    do: cute.CopyAtom
    do_coordinates: cute.Tensor
    do_t: cute.CopyAtom
    do_t_coordinates: cute.Tensor
    dq: cute.CopyAtom
    dq_coordinates: cute.Tensor
    dk: cute.CopyAtom
    dk_coordinates: cute.Tensor
    dv: cute.CopyAtom
    dv_coordinates: cute.Tensor


class Layouts(NamedTuple):
    """Shared-memory layouts of one CTA."""

    k: cute.ComposedLayout
    k_t: cute.ComposedLayout
    v: cute.ComposedLayout
    q: cute.ComposedLayout
    q_t: cute.ComposedLayout
    do: cute.ComposedLayout
    do_t: cute.ComposedLayout
    ds: cute.ComposedLayout
    dq: cute.ComposedLayout
    dk: cute.ComposedLayout
    dv: cute.ComposedLayout


class Shared(NamedTuple):
    """Shared-memory tensors of one CTA."""

    k: cute.Tensor
    k_t: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    q_t: cute.Tensor
    do: cute.Tensor
    do_t: cute.Tensor
    ds: cute.Tensor
    dq: cute.Tensor
    lse_log2: cute.Tensor
    dpsum: cute.Tensor


@cute.jit
def _commit(barrier):
    """Arrive once on `barrier` in both CTAs when every product issued so far is complete. The whole warp calls."""
    with arch.elect_one():
        tcgen05.commit(barrier, Int16(BOTH), tcgen05.CtaGroup.TWO)


def _rank():
    return arch.make_warp_uniform(arch.block_idx_in_cluster())


class BackwardSm100TwoCta(BackwardSm100):
    """Backward attention with pairs of CTAs, one specialization; arguments as BackwardSm100, but no stages.

    head_dim = head_dim_v = 128.
    """

    dq_slots = 1  # staging slots of every reducing warp

    def __init__(self, **arguments):
        super().__init__(q_stages=1, do_stages=1, **arguments)

    # ------------------------------------------------------------------------------------------------------------
    # Host

    @cute.jit
    def __call__(
        self,
        *,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        dpsum: cute.Tensor,
        lse_log2: cute.Tensor,
        dq_accum: cute.Tensor,
        dq_semaphore: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        softmax_scale: Float32,
        window_left: Int32,
        window_right: Int32,
        num_sms: Int32,
        softcap=None,
        stream,
    ):
        batch, seqlen_q, num_heads, _ = q.shape
        seqlen_k, num_heads_kv = k.shape[1], k.shape[2]
        maps = self._maps(q, k, v, dout, dq_accum, dk, dv)
        num_n_blocks = cute.ceil_div(seqlen_k, PAIR_N)
        tiles = Tiles(
            num_n_blocks=cute.FastDivmodDivisorV2(num_n_blocks), num_heads_kv=cute.FastDivmodDivisorV2(num_heads_kv)
        )
        problem = Problem(
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            window_left=window_left,
            window_right=window_right,
            scale=softmax_scale,
            heads_per_kv=num_heads // num_heads_kv,
            softcap=softcap,
            cap_factor=None if const_expr(softcap is None) else cap_factor(softmax_scale, softcap),
        )
        self.kernel(maps, dpsum, lse_log2, dq_semaphore, problem, tiles).launch(
            grid=(num_n_blocks * num_heads_kv * batch * PAIR, 1, 1),
            block=(NUM_THREADS, 1, 1),
            cluster=(PAIR, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def _mma_scores(self):
        return blackwell.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32,
            tcgen05.CtaGroup.TWO, (PAIR_N, TILE_M), tcgen05.OperandSource.SMEM,
        )  # fmt: skip

    def _mma_accumulate(self, columns: int):
        return blackwell.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32,
            tcgen05.CtaGroup.TWO, (PAIR_N, columns), tcgen05.OperandSource.TMEM,
        )  # fmt: skip

    def _mma_dq(self):
        return blackwell.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.MN, OperandMajorMode.MN, Float32,
            tcgen05.CtaGroup.TWO, (TILE_M, self.head_dim), tcgen05.OperandSource.SMEM,
        )  # fmt: skip

    def _tiles_mnk(self):
        """(M, N, K) of S and of dV, dK, dQ; dP is as S."""
        return (
            (PAIR_N, TILE_M, self.head_dim),
            (PAIR_N, self.head_dim_v, TILE_M),
            (PAIR_N, self.head_dim, TILE_M),
            (TILE_M, self.head_dim, PAIR_N),
        )

    def _layouts(self) -> Layouts:
        scores, dv, dk, dq = (
            self._mma_scores(),
            self._mma_accumulate(self.head_dim_v),
            self._mma_accumulate(self.head_dim),
            self._mma_dq(),
        )
        s_mnk, dv_mnk, dk_mnk, dq_mnk = self._tiles_mnk()
        layout_a, layout_b = blackwell.make_smem_layout_a, blackwell.make_smem_layout_b

        def stores(dtype, tiles):
            return blackwell.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, (FRAGMENT, FRAGMENT), tiles)

        return Layouts(
            k=layout_a(scores, s_mnk, self.dtype, 1),
            k_t=layout_b(dq, dq_mnk, self.dtype, 1),
            v=layout_a(scores, s_mnk, self.dtype, 1),
            q=layout_b(scores, s_mnk, self.dtype, 1),
            q_t=layout_b(dk, dk_mnk, self.dtype, 1),
            do=layout_b(scores, s_mnk, self.dtype, 1),
            do_t=layout_b(dv, dv_mnk, self.dtype, 1),
            ds=layout_a(dq, dq_mnk, self.dtype, 1),
            dq=stores(Float32, WARPS_PER_GROUP * self.dq_slots),
            dk=stores(self.dtype, WARPS_PER_GROUP * (self.head_dim // FRAGMENT)),
            dv=stores(self.dtype, WARPS_PER_GROUP * (self.head_dim_v // FRAGMENT)),
        )

    def _maps(self, q, k, v, dout, dq_accum, dk, dv) -> Maps:
        """Tensor maps over (sequence, dim, head, batch); `*_t` over (dim, sequence, head, batch)."""
        layouts = self._layouts()
        scores, dv_mma, dk_mma, dq_mma = (
            self._mma_scores(),
            self._mma_accumulate(self.head_dim_v),
            self._mma_accumulate(self.head_dim),
            self._mma_dq(),
        )
        s_mnk, dv_mnk, dk_mnk, dq_mnk = self._tiles_mnk()
        rows, columns = [1, 3, 2, 0], [3, 1, 2, 0]
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        cluster = cute.tiled_divide(cute.make_layout((PAIR, 1, 1)), (scores.thr_id.shape,)).shape

        def reordered(tensor, modes):
            return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))

        def operand(make, tensor, modes, layout, tile, mma):
            return make(load, reordered(tensor, modes), cute.select(layout, mode=[0, 1, 2]), tile, mma, cluster)

        def result(op, tensor, layout):
            return cpasync.make_tiled_tma_atom(op, tensor, cute.select(layout, mode=[0, 1]), (FRAGMENT, FRAGMENT))

        map_a, map_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        add, store = cpasync.CopyReduceBulkTensorTileS2GOp(), cpasync.CopyBulkTensorTileS2GOp()
        return Maps(
            *operand(map_b, q, rows, layouts.q, s_mnk, scores),
            *operand(map_b, q, columns, layouts.q_t, dk_mnk, dk_mma),
            *operand(map_a, k, rows, layouts.k, s_mnk, scores),
            *operand(map_b, k, columns, layouts.k_t, dq_mnk, dq_mma),
            *operand(map_a, v, rows, layouts.v, s_mnk, scores),
            *operand(map_b, dout, rows, layouts.do, s_mnk, scores),
            *operand(map_b, dout, columns, layouts.do_t, dv_mnk, dv_mma),
            *result(add, reordered(dq_accum, [2, 3, 1, 0]), layouts.dq),
            *result(store, reordered(dk, rows), layouts.dk),
            *result(store, reordered(dv, rows), layouts.dv),
        )

    # ------------------------------------------------------------------------------------------------------------
    # Device

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        dpsum: cute.Tensor,
        lse_log2: cute.Tensor,
        dq_semaphore: cute.Tensor,
        problem: Problem,
        tiles: Tiles,
    ):
        smem = mem.SmemAllocator()
        bars = self._allocate_barriers(smem)
        tmem_pointer = smem.allocate_array(Int32, 1)
        shared = self._allocate_tiles(smem)

        warp = arch.make_warp_uniform(arch.warp_idx())
        if warp == MMA_WARP:
            self._init_barriers(bars)
            arch.alloc_tmem(self.tmem.num_columns, tmem_pointer, is_two_cta=True)
        if warp == LOAD_WARP:
            for tensor_map in (
                maps.q,
                maps.q_t,
                maps.k,
                maps.k_t,
                maps.v,
                maps.do,
                maps.do_t,
                maps.dq,
                maps.dk,
                maps.dv,
            ):
                cpasync.prefetch_descriptor(tensor_map)
        fence_before_arrive()
        arch.sync_threads()
        arch.cluster_arrive()
        arch.cluster_wait()
        fence_after_wait()
        tmem = arch.retrieve_tmem_ptr(Float32, 16, tmem_pointer)

        if warp < COMPUTE_WARP:
            if const_expr(self.registers[1] > LAUNCH_REGISTERS):
                arch.setmaxregister_increase(self.registers[1])
            elif const_expr(self.registers[1] < LAUNCH_REGISTERS):
                arch.setmaxregister_decrease(self.registers[1])
            self._reduce_role(bars, maps, shared, tmem, dq_semaphore, problem, self._work(problem, tiles))
        elif warp < MMA_WARP:
            arch.setmaxregister_increase(self.registers[0])
            self._compute_role(bars, maps, shared, tmem, problem, self._work(problem, tiles))
        else:
            arch.setmaxregister_decrease(self.registers[2])
            if warp == MMA_WARP:
                if _rank() == LEADER:
                    self._mma_role(bars, shared, tmem, self._work(problem, tiles))
            elif warp == LOAD_WARP:
                self._load_role(bars, maps, shared, dpsum, lse_log2, problem, self._work(problem, tiles))
            elif warp == RELAY_WARP:
                self._relay_role(bars, self._work(problem, tiles))
        fence_before_arrive()
        arch.sync_threads()
        arch.cluster_arrive()
        arch.cluster_wait()
        fence_after_wait()
        if warp == MMA_WARP:
            arch.relinquish_tmem_alloc_permit(is_two_cta=True)
            arch.dealloc_tmem(tmem, self.tmem.num_columns, is_two_cta=True)

    def _allocate_tiles(self, smem) -> Shared:
        layouts = self._layouts()

        def tile(layout, dtype):
            return smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

        def vector():
            return smem.allocate_tensor(Float32, cute.make_layout((TILE_M, 1)), byte_alignment=16)

        # dS of 256 keys for this CTA's queries, and behind it the part that goes to the other CTA.
        parts = smem.allocate_tensor(
            self.dtype, cute.make_layout(PART * (PAIR + 1)), byte_alignment=1024, swizzle=layouts.ds.inner
        )
        return Shared(
            k=tile(layouts.k, self.dtype),
            k_t=tile(layouts.k_t, self.dtype),
            v=tile(layouts.v, self.dtype),
            q=tile(layouts.q, self.dtype),
            q_t=tile(layouts.q_t, self.dtype),
            do=tile(layouts.do, self.dtype),
            do_t=tile(layouts.do_t, self.dtype),
            ds=cute.make_tensor(parts.iterator, layouts.ds.outer),
            dq=tile(layouts.dq, Float32),
            lse_log2=vector(),
            dpsum=vector(),
        )

    def _barrier_counts(self):
        """(number of barriers, arrivals a phase) for each field of Barriers."""
        loaded = [(1, 1)] * 11
        vectors = [(1, 1), (1, COMPUTE_WARPS)] * 2
        from_compute = (1, PAIR * COMPUTE_WARPS)
        return (
            *loaded, *vectors, (1, 1), from_compute, (1, 1), from_compute, (1, 1), (1, PAIR),
            (1, 1), (1, PAIR * WARPS_PER_GROUP), (1, 1), (1, 1),
        )  # fmt: skip

    def _allocate_barriers(self, smem) -> Barriers:
        return Barriers(*[smem.allocate_array(Int64, number) for number, _ in self._barrier_counts()])

    @cute.jit
    def _work(self, problem: Problem, tiles: Tiles) -> Work:
        """The keys of this CTA; both CTAs of a pair visit the same queries."""
        tile = single_tile.tile_at(arch.block_idx()[0] // PAIR, tiles.num_n_blocks, tiles.num_heads_kv)
        pair = tile.m_block
        if const_expr(self.deterministic and turns.starts_with_last_keys(self.mask)):
            pair = tiles.num_n_blocks.divisor - 1 - pair
        queries = query_range(
            pair,
            tile_m=TILE_M,
            tile_n=PAIR_N,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            mask=self.mask,
            window_left=problem.window_left,
            window_right=problem.window_right,
        )
        begin, end = Int32(queries.begin), Int32(queries.end)
        return Work(
            n_block=pair * PAIR + _rank(), head_kv=tile.head, batch=tile.batch, begin=begin,
            inner_begin=Int32(queries.inner_begin), inner_end=Int32(queries.inner_end), end=end,
            num_steps=(end - begin) * problem.heads_per_kv, seqlen_q=problem.seqlen_q, seqlen_k=problem.seqlen_k,
        )  # fmt: skip

    @cute.jit
    def _arrive_mma(self, barrier):
        """The warp's arrival at a barrier of the leader."""
        arch.sync_warp()
        with arch.elect_one():
            arch.mbarrier_arrive(barrier, LEADER)

    # --- load -------------------------------------------------------------------------------------------------------

    @cute.jit
    def _load_role(self, bars, maps, shared, dpsum, lse_log2, problem, work):
        """Warp 13 of either CTA: its halves of everything. Bytes of both CTAs complete the leader's barriers."""
        scores, dq = self._mma_scores().get_slice(_rank()), self._mma_dq().get_slice(_rank())
        pair = work.n_block // PAIR
        gK = cute.local_tile(maps.k_coordinates, (PAIR_N, self.head_dim), (None, 0, work.head_kv, work.batch))
        gKt = cute.local_tile(maps.k_t_coordinates, (self.head_dim, PAIR_N), (0, None, work.head_kv, work.batch))
        gV = cute.local_tile(maps.v_coordinates, (PAIR_N, self.head_dim_v), (None, 0, work.head_kv, work.batch))
        ks, gK = _copy_views(maps.k, shared.k, scores.partition_A(gK))
        kts, gKt = _copy_views(maps.k_t, shared.k_t, dq.partition_B(gKt))
        vs, gV = _copy_views(maps.v, shared.v, scores.partition_A(gV))
        step, phase = self._first_step(problem, work), Int32(0)
        remaining = work.num_steps
        while remaining > 0:
            is_first = remaining == work.num_steps
            if is_first:
                self._load_tile(bars.k_full, maps.k, gK[None, pair], ks[None, 0], self._bytes(self.head_dim))
            self._load_queries(
                bars.q_full, bars.q_empty, maps.q, maps.q_coordinates, shared.q, step, work, phase, self.head_dim
            )
            self._load_vector(bars.lse_full, bars.lse_empty, lse_log2, shared.lse_log2, step, work, phase)
            if is_first:
                self._load_tile(bars.v_full, maps.v, gV[None, pair], vs[None, 0], self._bytes(self.head_dim_v))
            self._load_queries(
                bars.do_full, bars.do_empty, maps.do, maps.do_coordinates, shared.do, step, work, phase, self.head_dim_v
            )
            self._load_transposed(
                bars.dot_full,
                bars.dot_empty,
                maps.do_t,
                maps.do_t_coordinates,
                shared.do_t,
                step,
                work,
                phase,
                self.head_dim_v,
            )
            self._load_vector(bars.dpsum_full, bars.dpsum_empty, dpsum, shared.dpsum, step, work, phase)
            self._load_transposed(
                bars.qt_full,
                bars.qt_empty,
                maps.q_t,
                maps.q_t_coordinates,
                shared.q_t,
                step,
                work,
                phase,
                self.head_dim,
            )
            if is_first:
                self._load_tile(bars.kt_full, maps.k_t, gKt[None, pair], kts[None, 0], self._bytes(self.head_dim))
            step, phase = self._next_step(step, work), phase ^ 1
            remaining = remaining - 1

    @cute.jit
    def _load_tile(self, full, atom, source, target, num_bytes: cutlass.Constexpr[int]):
        """This CTA's part of a tile; the leader announces both parts."""
        if _rank() == LEADER:
            with arch.elect_one():
                arch.mbarrier_arrive_and_expect_tx(full, PAIR * num_bytes)
        cute.copy(atom, source, target, tma_bar_ptr=full)

    @cute.jit
    def _load_queries(self, full, empty, atom, coordinates, target, step, work, phase, columns: cutlass.Constexpr[int]):
        """This CTA's 64 rows of Q or dO."""
        source = cute.local_tile(coordinates, (TILE_M, columns), (None, 0, step.head, work.batch))
        target, source = _copy_views(atom, target, self._mma_scores().get_slice(_rank()).partition_B(source))
        arch.mbarrier_wait(empty, phase ^ 1)
        self._load_tile(full, atom, source[None, step.m_block], target[None, 0], self._bytes(columns) // PAIR)

    @cute.jit
    def _load_transposed(
        self, full, empty, atom, coordinates, target, step, work, phase, columns: cutlass.Constexpr[int]
    ):
        """This CTA's half of the columns of Q or dO, all 128 rows."""
        source = cute.local_tile(coordinates, (columns, TILE_M), (0, None, step.head, work.batch))
        target, source = _copy_views(atom, target, self._mma_accumulate(columns).get_slice(_rank()).partition_B(source))
        arch.mbarrier_wait(empty, phase ^ 1)
        self._load_tile(full, atom, source[None, step.m_block], target[None, 0], self._bytes(columns) // PAIR)

    @cute.jit
    def _load_vector(self, full, empty, vector, target, step, work, phase):
        """The per-query values of a tile, for this CTA alone."""
        arch.mbarrier_wait(empty, phase ^ 1)
        rows, place = cpasync.group_bulk_copy_modes(
            cute.local_tile(vector[work.batch, step.head, None], (TILE_M,), (step.m_block,)), target[None, 0]
        )
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(full, TILE_M * 4)
            cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32), rows, place, mbar_ptr=full)

    # --- matrix products --------------------------------------------------------------------------------------------

    @cute.jit
    def _mma_role(self, bars, shared, tmem, work):
        """Warp 12 of the leader: the order of products of the one-CTA kernel."""
        turn, accumulate = Int32(0), cutlass.Boolean(False)
        arch.mbarrier_wait(bars.k_full, 0)
        self._pair_scores(bars, shared, tmem, turn)
        arch.mbarrier_wait(bars.v_full, 0)
        self._pair_dp(bars, shared, tmem, turn)
        self._pair_dv(bars, shared, tmem, turn, accumulate)
        arch.mbarrier_wait(bars.kt_full, 0)
        remaining = work.num_steps - 1
        while remaining > 0:
            self._pair_scores(bars, shared, tmem, turn + 1)
            self._pair_dk(bars, shared, tmem, turn, accumulate)
            self._pair_dq(bars, shared, tmem, turn)
            accumulate = cutlass.Boolean(True)
            arch.mbarrier_wait(bars.dq_empty, turn & 1)
            fence_after_wait()
            turn = turn + 1
            self._pair_dp(bars, shared, tmem, turn)
            self._pair_dv(bars, shared, tmem, turn, accumulate)
            remaining = remaining - 1
        _commit(bars.dv_full)
        self._pair_dk(bars, shared, tmem, turn, accumulate)
        _commit(bars.dk_full)
        self._pair_dq(bars, shared, tmem, turn)

    @cute.jit
    def _pair_scores(self, bars, shared, tmem, turn):
        mma = self._mma_scores()
        arch.mbarrier_wait(bars.q_full, turn & 1)
        fK, fQ = mma.make_fragment_A(shared.k), mma.make_fragment_B(shared.q)
        scores = accumulator_at(mma, (PAIR_N, TILE_M), tmem, self.tmem.scores)
        multiply(mma, scores, fK[None, None, None, 0], fQ[None, None, None, 0], 0, self.head_dim // 16, False)
        _commit(bars.s_full)
        _commit(bars.q_empty)

    @cute.jit
    def _pair_dp(self, bars, shared, tmem, turn):
        mma = self._mma_scores()
        arch.mbarrier_wait(bars.do_full, turn & 1)
        fV, fO = mma.make_fragment_A(shared.v), mma.make_fragment_B(shared.do)
        target = accumulator_at(mma, (PAIR_N, TILE_M), tmem, self.tmem.dprobabilities)
        multiply(mma, target, fV[None, None, None, 0], fO[None, None, None, 0], 0, self.head_dim_v // 16, False)
        _commit(bars.dp_full)
        _commit(bars.do_empty)

    @cute.jit
    def _pair_dv(self, bars, shared, tmem, turn, accumulate):
        arch.mbarrier_wait(bars.dot_full, turn & 1)
        arch.mbarrier_wait(bars.p_ready, turn & 1)
        fence_after_wait()
        slot = Cursor(Int32(0), Int32(0))
        self._multiply_halves(tmem, self.tmem.dv, self.tmem.scores, shared.do_t, self.head_dim_v, slot, accumulate)
        _commit(bars.dot_empty)

    @cute.jit
    def _pair_dk(self, bars, shared, tmem, turn, accumulate):
        arch.mbarrier_wait(bars.qt_full, turn & 1)
        arch.mbarrier_wait(bars.ds_ready, turn & 1)
        fence_after_wait()
        slot = Cursor(Int32(0), Int32(0))
        self._multiply_halves(tmem, self.tmem.dk, self.tmem.dprobabilities, shared.q_t, self.head_dim, slot, accumulate)
        _commit(bars.qt_empty)

    @cute.jit
    def _pair_dq(self, bars, shared, tmem, turn):
        """dQ = dS K over the 256 keys of the pair, when the exchange is done in both CTAs."""
        mma = self._mma_dq()
        arch.mbarrier_wait(bars.exchange_ready, turn & 1)
        fS, fK = mma.make_fragment_A(shared.ds), mma.make_fragment_B(shared.k_t)
        target = accumulator_at(mma, (TILE_M, self.head_dim), tmem, self.tmem.dq)
        multiply(mma, target, fS[None, None, None, 0], fK[None, None, None, 0], 0, PAIR_N // 16, False)
        _commit(bars.dq_full)

    def _pair_rows(self):
        """M of the products whose A is in tensor memory."""
        return PAIR_N

    # --- compute ----------------------------------------------------------------------------------------------------

    @cute.jit
    def _compute_role(self, bars, maps, shared, tmem, problem, work):
        """Warps 4 - 11 of either CTA: thread t owns key t of the CTA, warpgroup h the queries of rank h."""
        row = arch.thread_idx()[0] % TILE_N
        half = arch.make_warp_uniform((arch.warp_idx() - COMPUTE_WARP) // WARPS_PER_GROUP)
        key = work.n_block * TILE_N + row
        step = self._first_step(problem, work)
        turn = Int32(0)
        while turn < work.num_steps:
            slot = Cursor(Int32(0), turn & 1)
            weights = self._probabilities(
                bars, bars.lse_full, bars.lse_empty, shared, tmem, problem, work, step, key, row, half, slot, turn
            )
            self._score_gradients(bars, bars.dpsum_full, bars.dpsum_empty, shared, tmem, weights, row, half, slot, turn)
            if half != _rank():
                self._send(bars, shared, row)
            step = self._next_step(step, work)
            turn = turn + 1
        layouts = self._layouts()
        arch.mbarrier_wait(bars.dv_full, 0)
        self._store_gradient(
            None, maps.dv, maps.dv_coordinates, _retyped(shared.v, layouts.dv, self.dtype), tmem + self.tmem.dv,
            self.head_dim_v, Float32(1.0), work, row, half,
        )  # fmt: skip
        arch.mbarrier_wait(bars.dk_full, 0)
        self._store_gradient(
            None, maps.dk, maps.dk_coordinates, _retyped(shared.k, layouts.dk, self.dtype), tmem + self.tmem.dk,
            self.head_dim, problem.scale, work, row, half,
        )  # fmt: skip
        with arch.elect_one():
            arch.cp_async_bulk_wait_group(0, read=False)

    def _ds_rows(self, shared, half):
        """This CTA's own queries: in place, behind the keys of lower rank. The other's: where it is sent from."""
        rank = _rank()
        part = select(half == rank, rank, STAGING)
        parts = cute.make_layout((TILE_N, HALF, PAIR + 1), stride=(HALF, 1, PART))
        return cute.make_tensor(shared.ds.iterator, parts)[None, None, part]

    @cute.jit
    def _send(self, bars, shared, row):
        """This warp's 32 keys of the other CTA's queries, to where they would lie had that CTA computed them."""
        rank = _rank()
        first = arch.make_warp_uniform(row // FRAGMENT) * (FRAGMENT * HALF)
        source = shared.ds.iterator + STAGING * PART + first
        target = shared.ds.iterator + rank * PART + first
        with arch.elect_one():
            arch.inline_ptx(
                "{ .reg .b32 d, b; mapa.shared::cluster.u32 d, {$r0}, {$r4}; mapa.shared::cluster.u32 b, {$r3}, {$r4}; "
                "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d], [{$r1}], {$r2}, [b]; }",
                read_only_args=[
                    target.toint(), source.toint(), Int32(FRAGMENT * HALF * self.dtype.width // 8),
                    bars.exchange_full.toint(), rank ^ 1,
                ],
            )  # fmt: skip

    # --- relay ------------------------------------------------------------------------------------------------------

    @cute.jit
    def _relay_role(self, bars, work):
        """Warp 14 of either CTA: tells the leader when the peer's part of dS has landed here."""
        turn = Int32(0)
        num_bytes = PART * self.dtype.width // 8
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(bars.exchange_full, num_bytes)
        while turn < work.num_steps:
            arch.mbarrier_wait(bars.exchange_full, turn & 1)
            turn = turn + 1
            if turn < work.num_steps:
                with arch.elect_one():
                    arch.mbarrier_arrive_and_expect_tx(bars.exchange_full, num_bytes)
            self._arrive_mma(bars.exchange_ready)

    # --- dQ ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def _reduce_role(self, bars, maps, shared, tmem, dq_semaphore, problem, work):
        """Warps 0 - 3: add this CTA's 64 queries of each dQ tile to global memory. The product leaves columns 0 ..
        head_dim / 2 - 1 of them in lanes 0 - 63 and the rest in lanes 64 - 127: a warp has 32 queries and half the
        columns."""
        row = arch.thread_idx()[0] % TILE_M
        quarter = arch.make_warp_uniform(arch.warp_idx())
        step = self._first_step(problem, work)
        is_adding = self._is_adding(work, problem)
        counter = dq_semaphore[work.batch, step.head, None].iterator + step.m_block
        turn = Int32(0)
        pieces = self.head_dim // PAIR // FRAGMENT
        while turn < work.num_steps:
            arch.mbarrier_wait(bars.dq_full, turn & 1)
            fence_after_wait()
            if const_expr(self.deterministic):
                if is_adding & (turn > 0):
                    self._end_turn(counter)
            load, source = correction.row_copies(
                self._columns_at(tmem, self.tmem.dq, self.head_dim // PAIR), FRAGMENT, row, False
            )
            values = cute.make_rmem_tensor((self.head_dim // PAIR,), Float32)
            for piece in cutlass.range_constexpr(pieces):
                cute.copy(load, source[None, None, piece], self._piece(values, piece, FRAGMENT))
            arch.fence_view_async_tmem_load()
            fence_before_arrive()
            self._arrive_mma(bars.dq_empty)
            if is_adding:
                if const_expr(self.deterministic):
                    counter = dq_semaphore[work.batch, step.head, None].iterator + step.m_block
                    turns.wait_turn(counter, PAIR * WARPS_PER_GROUP * self._rank_of(step.m_block, work, problem))
                target = cute.local_tile(maps.dq_coordinates, (FRAGMENT, FRAGMENT), (None, None, step.head, work.batch))
                m_tile = step.m_block * WARPS_PER_GROUP + _rank() * PAIR + quarter % PAIR
                for piece in cutlass.range_constexpr(pieces):
                    with arch.elect_one():
                        arch.cp_async_bulk_wait_group(0, read=True)
                    arch.sync_warp()
                    chunk = cute.make_tensor(values.iterator + piece * FRAGMENT, cute.make_layout(FRAGMENT))
                    cute.autovec_copy(chunk, shared.dq[row % FRAGMENT, None, quarter])
                    arch.fence_proxy("async.shared", space="cta")
                    arch.sync_warp()
                    n_tile = quarter // PAIR * pieces + piece
                    self._store_box(maps.dq, shared.dq[None, None, quarter], target[None, None, m_tile, n_tile], True)
            step = self._next_step(step, work)
            turn = turn + 1
        with arch.elect_one():
            arch.cp_async_bulk_wait_group(0, read=False)
        if const_expr(self.deterministic):
            if is_adding:
                self._end_turn(counter)

    def _rank_of(self, m_block, work, problem):
        return turns.rank(
            work.n_block // PAIR, m_block, tile_n=PAIR_N, seqlen_q=problem.seqlen_q, seqlen_k=problem.seqlen_k,
            mask=self.mask, window_right=problem.window_right,
        )  # fmt: skip

    def _is_adding(self, work, problem):
        if not self.deterministic:
            return True
        return turns.is_seen(
            work.n_block // PAIR, tile_n=PAIR_N, seqlen_q=problem.seqlen_q, seqlen_k=problem.seqlen_k, mask=self.mask,
            window_left=problem.window_left, window_right=problem.window_right,
        )  # fmt: skip
