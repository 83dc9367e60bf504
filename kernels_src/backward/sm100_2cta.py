"""FlashAttention backward for SM100 and SM103 with two CTAs for 256 keys, which share every matrix instruction.

What the kernels with pairs of CTAs have in common; the order of loads and products, and what lies where, is in
backward/sm100_2cta_hd128.py (head dimension 128) and backward/sm100_2cta_hd192.py (192, 128).

As backward/sm100.py, whose compute and store code it uses; each CTA of the pair owns 128 of the keys and their dK and
dV. What a pair saves: an instruction takes half of operand B from either CTA, so each loads half of Q, dO, K^T for it;
and dQ of a tile sums over 256 keys at once, so half as much is added to global memory. For that each CTA gets the dS of
its 64 queries (rank r: queries 64 r .. 64 r + 63) for all 256 keys: half of what a CTA computes goes to the other by a
copy from shared memory to shared memory.

P takes the first half of S, as soon as all of S is in registers; the second half of S is then reused by another product
while P is still being computed.

Every barrier that the issuing warp waits for lies in CTA 0, the leader, and counts both CTAs; products are issued by
the leader alone and their commits arrive in both. Who waits for whom: `BackwardSm100TwoCta._barriers`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory as mem
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int16, Int32, const_expr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import LayoutEnum

from kernels_src.backward.sm100 import (
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
    WARP,
    WARPS_PER_GROUP,
    BackwardSm100,
    Problem,
    Tiles,
    Work,
    _copy_views,
    _retyped,
)
from kernels_src.integers import maximum, select
from kernels_src.mma.umma import accumulator_at, fence_after_wait, fence_before_arrive, multiply, operand_a_at
from kernels_src.pipelines import named_barriers
from kernels_src.pipelines.barriers import Barrier, allocate, initialise
from kernels_src.pipelines.ring import Cursor
from kernels_src.scheduling import turns, varlen_tiles
from kernels_src.softmax import correction
from kernels_src.softmax.softcap import cap_factor

PAIR = 2
PAIR_N = PAIR * TILE_N
RELAY_WARP = 14  # 15 ends the tiles of packed sequences
LEADER = 0
BOTH = 3  # mask of a commit that arrives in both CTAs
PART = TILE_N * HALF  # elements of the dS of one CTA's keys for the queries of one CTA
STAGING = 2  # the part of shared dS that waits to be sent


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
    """Backward attention with pairs of CTAs; arguments as BackwardSm100, but no stages.

    A kernel adds its plan of tensor memory (`_plan_tmem`) and of the queries in shared memory (`_allocate_queries`),
    and its roles of the warps that load (`_load_role`, `_tail_role`) and issue products (`_mma_role`).
    """

    cluster_keys = PAIR_N
    probability_step = HALF // 2  # P takes the first half of S
    dq_columns = FRAGMENT  # of dQ that a reducing warp stages at a time
    hands_over_late = False  # whether a tile of dQ is handed over only when the next one is in registers

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
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=None,
        window_left: Int32,
        window_right: Int32,
        num_sms: Int32,
        softcap=None,
        stream,
    ):
        num_heads, num_heads_kv = q.shape[-2], k.shape[-2]
        maps = self._maps(q, k, v, dout, dq_accum, dk, dv)
        if const_expr(self.is_packed):
            num_n_blocks = varlen_tiles.max_tiles(k.shape[0], cu_seqlens_k.shape[0] - 1, PAIR_N)
            num_tiles = num_n_blocks * num_heads_kv
            tiles = Tiles(num_n_blocks, num_heads_kv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        else:
            num_n_blocks = cute.ceil_div(k.shape[1], PAIR_N)
            num_tiles = num_n_blocks * num_heads_kv * k.shape[0]
            divisor = cute.FastDivmodDivisorV2
            tiles = Tiles(num_n_blocks=divisor(num_n_blocks), num_heads_kv=divisor(num_heads_kv))
        problem = Problem(
            seqlen_q=None if const_expr(self.is_packed) else q.shape[1],
            seqlen_k=None if const_expr(self.is_packed) else k.shape[1],
            window_left=window_left,
            window_right=window_right,
            scale=softmax_scale,
            heads_per_kv=num_heads // num_heads_kv,
            softcap=softcap,
            cap_factor=None if const_expr(softcap is None) else cap_factor(softmax_scale, softcap),
        )
        rows = (dk, dv) if const_expr(self.is_packed) else None
        self.kernel(maps, dpsum, lse_log2, dq_semaphore, rows, problem, tiles).launch(
            grid=(num_tiles * PAIR, 1, 1),
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
        """(M, N, K) of S, dP, dV, dK, dQ."""
        return (
            (PAIR_N, TILE_M, self.head_dim),
            (PAIR_N, TILE_M, self.head_dim_v),
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
        s_mnk, dp_mnk, dv_mnk, dk_mnk, dq_mnk = self._tiles_mnk()
        layout_a, layout_b = blackwell.make_smem_layout_a, blackwell.make_smem_layout_b

        def stores(dtype, tiles, columns=FRAGMENT):
            return blackwell.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, (FRAGMENT, columns), tiles)

        return Layouts(
            k=layout_a(scores, s_mnk, self.dtype, 1),
            k_t=layout_b(dq, dq_mnk, self.dtype, 1),
            v=layout_a(scores, dp_mnk, self.dtype, 1),
            q=layout_b(scores, s_mnk, self.dtype, 1),
            q_t=layout_b(dk, dk_mnk, self.dtype, 1),
            do=layout_b(scores, dp_mnk, self.dtype, 1),
            do_t=layout_b(dv, dv_mnk, self.dtype, 1),
            ds=layout_a(dq, dq_mnk, self.dtype, 1),
            dq=stores(Float32, WARPS_PER_GROUP, self.dq_columns),
            dk=stores(self.dtype, WARPS_PER_GROUP * (self.head_dim // FRAGMENT)),
            dv=stores(self.dtype, WARPS_PER_GROUP * (self.head_dim_v // FRAGMENT)),
        )

    def _maps(self, q, k, v, dout, dq_accum, dk, dv) -> Maps:
        """Tensor maps over (sequence, dim, head, batch); `*_t` over (dim, sequence, head, batch). Packed sequences:
        without batch, and what warp 15 ends arrives in the CTA itself."""
        layouts = self._layouts()
        scores, dv_mma, dk_mma, dq_mma = (
            self._mma_scores(),
            self._mma_accumulate(self.head_dim_v),
            self._mma_accumulate(self.head_dim),
            self._mma_dq(),
        )
        s_mnk, dp_mnk, dv_mnk, dk_mnk, dq_mnk = self._tiles_mnk()
        rows, columns, accumulator_rows = (
            ([0, 2, 1], [2, 0, 1], [1, 2, 0]) if self.is_packed else ([1, 3, 2, 0], [3, 1, 2, 0], [2, 3, 1, 0])
        )
        of_pair = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        own = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE) if self.is_packed else of_pair
        cluster = cute.tiled_divide(cute.make_layout((PAIR, 1, 1)), (scores.thr_id.shape,)).shape

        def reordered(tensor, modes):
            return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))

        def operand(make, tensor, modes, layout, tile, mma, load=own):
            return make(load, reordered(tensor, modes), cute.select(layout, mode=[0, 1, 2]), tile, mma, cluster)

        def result(op, tensor, layout, columns=FRAGMENT):
            return cpasync.make_tiled_tma_atom(op, tensor, cute.select(layout, mode=[0, 1]), (FRAGMENT, columns))

        map_a, map_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        add, store = cpasync.CopyReduceBulkTensorTileS2GOp(), cpasync.CopyBulkTensorTileS2GOp()
        return Maps(
            *operand(map_b, q, rows, layouts.q, s_mnk, scores),
            *operand(map_b, q, columns, layouts.q_t, dk_mnk, dk_mma),
            *operand(map_a, k, rows, layouts.k, s_mnk, scores, of_pair),
            *operand(map_b, k, columns, layouts.k_t, dq_mnk, dq_mma),
            *operand(map_a, v, rows, layouts.v, dp_mnk, scores),
            *operand(map_b, dout, rows, layouts.do, dp_mnk, scores),
            *operand(map_b, dout, columns, layouts.do_t, dv_mnk, dv_mma),
            *result(add, reordered(dq_accum, accumulator_rows), layouts.dq, self.dq_columns),
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
        rows,
        problem: Problem,
        tiles: Tiles,
    ):
        smem = mem.SmemAllocator()
        bars = allocate(smem, self._barriers())
        tmem_pointer = smem.allocate_array(Int32, 1)
        shared = self._allocate_tiles(smem)

        warp = arch.make_warp_uniform(arch.warp_idx())
        if warp == MMA_WARP:
            initialise(self._barriers(), bars)
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
            work = self._work(problem, tiles)
            if self._has_steps(work):
                self._reduce_role(bars, maps, shared, tmem, dq_semaphore, problem, work)
        elif warp < MMA_WARP:
            arch.setmaxregister_increase(self.registers[0])
            work = self._work(problem, tiles)
            if self._has_steps(work):
                self._compute_role(bars, maps, shared, tmem, rows, problem, work)
            if const_expr(self.is_packed):
                if work.is_valid & (work.num_steps == 0):
                    self._store_zeros(rows, work)
        else:
            arch.setmaxregister_decrease(self.registers[2])
            if warp == MMA_WARP:
                if _rank() == LEADER:
                    work = self._work(problem, tiles)
                    if self._has_steps(work):
                        self._mma_role(bars, shared, tmem, work)
            elif warp == LOAD_WARP:
                work = self._work(problem, tiles)
                if self._has_steps(work):
                    self._load_role(bars, maps, shared, dpsum, lse_log2, problem, work)
            elif warp == RELAY_WARP:
                work = self._work(problem, tiles)
                if self._has_steps(work):
                    self._relay_role(bars, work)
            elif const_expr(self.is_packed):
                work = self._work(problem, tiles)
                if self._has_steps(work):
                    self._tail_role(bars, shared, problem, work)
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
        k, k_t, v = tile(layouts.k, self.dtype), tile(layouts.k_t, self.dtype), tile(layouts.v, self.dtype)
        q, q_t, do, do_t, dq = self._allocate_queries(tile, layouts)
        return Shared(
            k=k,
            k_t=k_t,
            v=v,
            q=q,
            q_t=q_t,
            do=do,
            do_t=do_t,
            ds=cute.make_tensor(parts.iterator, layouts.ds.outer),
            dq=dq,
            lse_log2=vector(),
            dpsum=vector(),
        )

    def _barriers(self) -> dict[str, Barrier]:
        """Who waits for whom: `full` says that something may be read, `empty` that it may be written again.

        Those of loaded tiles, of P and dS, of dQ and exchange_ready lie in the leader and count both CTAs. Loads
        announce their bytes: to `landed`, each CTA's own, in packed sequences, whose `full` is then the arrival of warp
        15 of both CTAs.
        """
        landed, loaded = int(self.is_packed), PAIR if self.is_packed else 1
        computed, read = PAIR * COMPUTE_WARPS, PAIR * WARPS_PER_GROUP
        return {
            "k_full": Barrier(1, 1),  # K is loaded
            "kt_full": Barrier(1, loaded),  # K^T is loaded
            "v_full": Barrier(1, loaded),  # V is loaded
            "q_full": Barrier(1, loaded),  # Q is loaded
            "q_empty": Barrier(1, 1),  # ... and read by its product
            "qt_full": Barrier(1, loaded),  # Q^T is loaded
            "qt_empty": Barrier(1, 1),  # ... and read
            "do_full": Barrier(1, loaded),  # dO is loaded
            "do_empty": Barrier(1, 1),  # ... and read
            "dot_full": Barrier(1, loaded),  # dO^T is loaded
            "dot_empty": Barrier(1, 1),  # ... and read
            "lse_full": Barrier(1, 1),  # lse_log2 is loaded, each CTA's own copy
            "lse_empty": Barrier(1, COMPUTE_WARPS),  # ... and read
            "dpsum_full": Barrier(1, 1),  # dpsum is loaded, each CTA's own copy
            "dpsum_empty": Barrier(1, COMPUTE_WARPS),  # ... and read
            "s_full": Barrier(1, 1),  # S^T is complete
            "p_ready": Barrier(1, computed),  # P^T is stored, over the first half of S^T
            "dp_full": Barrier(1, 1),  # dP^T is complete
            "ds_ready": Barrier(1, computed),  # dS^T is stored, to tensor and to shared memory
            "exchange_full": Barrier(1, 1),  # the peer's part of dS has landed in this CTA
            "exchange_ready": Barrier(1, PAIR),  # ... in both
            "dq_full": Barrier(1, 1),  # dQ is complete and dS read
            "dq_empty": Barrier(1, read),  # dQ is read from tensor memory
            "dv_full": Barrier(1, 1),  # dV is complete, once
            "dk_full": Barrier(1, 1),  # dK is complete, once
            "s_read": Barrier(1, read),  # the warps whose half of S is reused have it in registers
            "v_landed": Barrier(landed, 1),
            "kt_landed": Barrier(landed, 1),
            "q_landed": Barrier(landed, 1),
            "qt_landed": Barrier(landed, 1),
            "do_landed": Barrier(landed, 1),
            "dot_landed": Barrier(landed, 1),
        }

    def _landing(self, bars, name: str):
        """Where the bytes of an operand are counted."""
        return getattr(bars, f"{name}_landed" if self.is_packed else f"{name}_full")

    def _cluster(self):
        return arch.block_idx()[0] // PAIR

    def _tile_of(self, cluster_tile):
        return cluster_tile * PAIR + _rank()

    def _cluster_tile(self, n_block):
        return n_block // PAIR

    def _row_tiles(self, coordinates, shape, head, work: Work, first_row):
        """Tiles of one head of a sequence along its rows. first_row: where packed ones start."""
        if self.is_packed:
            return cute.local_tile(cute.domain_offset((first_row, 0, 0), coordinates), shape, (None, 0, head))
        return cute.local_tile(coordinates, shape, (None, 0, head, work.batch))

    def _column_tiles(self, coordinates, shape, head, work: Work, first_row):
        """The same of a transposed tensor map."""
        if self.is_packed:
            return cute.local_tile(cute.domain_offset((0, first_row, 0), coordinates), shape, (0, None, head))
        return cute.local_tile(coordinates, shape, (0, None, head, work.batch))

    @cute.jit
    def _arrive_mma(self, barrier):
        """The warp's arrival at a barrier of the leader."""
        arch.sync_warp()
        with arch.elect_one():
            arch.mbarrier_arrive(barrier, LEADER)

    # --- load -------------------------------------------------------------------------------------------------------

    def _key_copies(self, maps, shared, work):
        """(tiles, target) of this CTA's 128 rows of K, of its half of the columns of all 256, and of its rows of V."""
        scores, dq = self._mma_scores().get_slice(_rank()), self._mma_dq().get_slice(_rank())
        head, first = work.head_kv, work.first_key
        gK = self._row_tiles(maps.k_coordinates, (PAIR_N, self.head_dim), head, work, first)
        gKt = self._column_tiles(maps.k_t_coordinates, (self.head_dim, PAIR_N), head, work, first)
        gV = self._row_tiles(maps.v_coordinates, (PAIR_N, self.head_dim_v), head, work, first)
        ks, gK = _copy_views(maps.k, shared.k, scores.partition_A(gK))
        kts, gKt = _copy_views(maps.k_t, shared.k_t, dq.partition_B(gKt))
        vs, gV = _copy_views(maps.v, shared.v, scores.partition_A(gV))
        return (gK, ks), (gKt, kts), (gV, vs)

    def _load_k(self, bars, maps, copy, pair):
        self._load_keys(bars.k_full, maps.k, copy, pair, self.head_dim, False)

    def _load_k_t(self, bars, maps, copy, pair):
        self._load_keys(self._landing(bars, "kt"), maps.k_t, copy, pair, self.head_dim, self.is_packed)

    def _load_v(self, bars, maps, copy, pair):
        self._load_keys(self._landing(bars, "v"), maps.v, copy, pair, self.head_dim_v, self.is_packed)

    def _load_keys(self, full, atom, copy, pair, columns: int, is_own: bool):
        tiles, target = copy
        self._load_tile(full, atom, tiles[None, pair], target[None, 0], self._bytes(columns), is_own)

    def _load_q(self, bars, maps, shared, step, work, free, phase):
        self._load_queries(
            self._landing(bars, "q"), free, phase, maps.q, maps.q_coordinates, shared.q, step, work, self.head_dim
        )

    def _load_do(self, bars, maps, shared, step, work, free, phase):
        self._load_queries(
            self._landing(bars, "do"), free, phase, maps.do, maps.do_coordinates, shared.do, step, work, self.head_dim_v
        )

    def _load_q_t(self, bars, maps, shared, step, work, free, phase):
        self._load_transposed(
            self._landing(bars, "qt"), free, phase, maps.q_t, maps.q_t_coordinates, shared.q_t, step, work,
            self.head_dim,
        )  # fmt: skip

    def _load_do_t(self, bars, maps, shared, step, work, free, phase):
        self._load_transposed(
            self._landing(bars, "dot"), free, phase, maps.do_t, maps.do_t_coordinates, shared.do_t, step, work,
            self.head_dim_v,
        )  # fmt: skip

    @cute.jit
    def _load_tile(
        self, full, atom, source, target, num_bytes: cutlass.Constexpr[int], is_own: cutlass.Constexpr[bool]
    ):
        """This CTA's part of a tile; the leader announces both parts, unless they are counted where they land."""
        if const_expr(is_own):
            with arch.elect_one():
                arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
        elif _rank() == LEADER:
            with arch.elect_one():
                arch.mbarrier_arrive_and_expect_tx(full, PAIR * num_bytes)
        cute.copy(atom, source, target, tma_bar_ptr=full)

    @cute.jit
    def _load_queries(self, full, free, phase, atom, coordinates, target, step, work, columns: cutlass.Constexpr[int]):
        """This CTA's 64 rows of Q or dO, when phase `phase` of `free` is over."""
        source = self._row_tiles(coordinates, (TILE_M, columns), step.head, work, work.first_query)
        target, source = _copy_views(atom, target, self._mma_scores().get_slice(_rank()).partition_B(source))
        arch.mbarrier_wait(free, phase)
        num_bytes = self._bytes(columns) // PAIR
        self._load_tile(full, atom, source[None, step.m_block], target[None, 0], num_bytes, self.is_packed)

    @cute.jit
    def _load_transposed(
        self, full, free, phase, atom, coordinates, target, step, work, columns: cutlass.Constexpr[int]
    ):
        """This CTA's half of the columns of Q or dO, all 128 rows, in the same way."""
        source = self._column_tiles(coordinates, (columns, TILE_M), step.head, work, work.first_query)
        target, source = _copy_views(atom, target, self._mma_accumulate(columns).get_slice(_rank()).partition_B(source))
        arch.mbarrier_wait(free, phase)
        num_bytes = self._bytes(columns) // PAIR
        self._load_tile(full, atom, source[None, step.m_block], target[None, 0], num_bytes, self.is_packed)

    @cute.jit
    def _load_vector(self, full, empty, vector, target, step, work, phase):
        """The per-query values of a tile, for this CTA alone."""
        arch.mbarrier_wait(empty, phase ^ 1)
        rows, place = cpasync.group_bulk_copy_modes(
            cute.local_tile(self._rows_of(vector, step.head, work), (TILE_M,), (step.m_block,)), target[None, 0]
        )
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(full, TILE_M * 4)
            cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32), rows, place, mbar_ptr=full)

    # --- rows behind a sequence -------------------------------------------------------------------------------------

    def _end_v(self, bars, shared, work):
        keys = work.seqlen_k - work.n_block * TILE_N
        self._end_part(bars, "v", shared.v, keys, self.head_dim_v, TILE_N, Int32(0))

    def _end_k_t(self, bars, shared, work):
        keys = work.seqlen_k - work.n_block // PAIR * PAIR_N
        self._end_part(bars, "kt", shared.k_t, keys, self.head_dim // PAIR, PAIR_N, Int32(0))

    def _end_q(self, bars, shared, step, work, phase):
        queries = work.seqlen_q - step.m_block * TILE_M - _rank() * HALF
        self._end_part(bars, "q", shared.q, queries, self.head_dim, HALF, phase)

    def _end_do(self, bars, shared, step, work, phase):
        queries = work.seqlen_q - step.m_block * TILE_M - _rank() * HALF
        self._end_part(bars, "do", shared.do, queries, self.head_dim_v, HALF, phase)

    def _end_q_t(self, bars, shared, step, work, phase):
        queries = work.seqlen_q - step.m_block * TILE_M
        self._end_part(bars, "qt", shared.q_t, queries, self.head_dim // PAIR, TILE_M, phase)

    def _end_do_t(self, bars, shared, step, work, phase):
        queries = work.seqlen_q - step.m_block * TILE_M
        self._end_part(bars, "dot", shared.do_t, queries, self.head_dim_v // PAIR, TILE_M, phase)

    def _end_part(self, bars, name: str, part, end, columns: int, rows: int, phase):
        """Waits for this CTA's part of an operand, ends it and tells the leader."""
        arch.mbarrier_wait(getattr(bars, f"{name}_landed"), phase)
        self._end_tile(part, 0, maximum(end, 0), columns, getattr(bars, f"{name}_full"), rows)

    # --- matrix products --------------------------------------------------------------------------------------------

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
        mma = self._mma_accumulate(self.head_dim_v)
        arch.mbarrier_wait(bars.dot_full, turn & 1)
        arch.mbarrier_wait(bars.p_ready, turn & 1)
        fence_after_wait()
        target = accumulator_at(mma, (PAIR_N, self.head_dim_v), tmem, self.tmem.dv)
        weights = operand_a_at(mma, (PAIR_N, TILE_M), tmem, self.tmem.scores, self.dtype)
        fO = mma.make_fragment_B(shared.do_t)
        multiply(mma, target, weights, fO[None, None, None, 0], 0, TILE_M // 16, accumulate)
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
    def _compute_role(self, bars, maps, shared, tmem, rows, problem, work):
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
        dk_rows, dv_rows = rows if const_expr(self.is_packed) else (None, None)
        arch.mbarrier_wait(bars.dv_full, 0)
        self._store_gradient(
            dv_rows, maps.dv, maps.dv_coordinates, _retyped(shared.v, layouts.dv, self.dtype), tmem + self.tmem.dv,
            self.head_dim_v, Float32(1.0), work, row, half,
        )  # fmt: skip
        arch.mbarrier_wait(bars.dk_full, 0)
        self._store_gradient(
            dk_rows, maps.dk, maps.dk_coordinates, _retyped(shared.k, layouts.dk, self.dtype), tmem + self.tmem.dk,
            self.head_dim, problem.scale, work, row, half,
        )  # fmt: skip
        with arch.elect_one():
            arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def _scores_are_read(self, bars, row, half):
        """P of the second half of the queries goes where the warp with the same keys reads S of the first half; what
        the second half lies in is free for another product."""
        barrier = named_barriers.turn_barrier(arch.make_warp_uniform(row // WARP))
        fence_before_arrive()
        if half == 0:
            arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARP)
        else:
            self._arrive_mma(bars.s_read)
            arch.barrier(barrier_id=barrier, number_of_threads=2 * WARP)
            fence_after_wait()

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
        counter = self._counter(dq_semaphore, step, work)
        turn = Int32(0)
        columns = self.head_dim // PAIR
        pieces = columns // self.dq_columns
        while turn < work.num_steps:
            arch.mbarrier_wait(bars.dq_full, turn & 1)
            fence_after_wait()
            if const_expr(self.deterministic and not self.hands_over_late):
                if is_adding & (turn > 0):
                    self._end_turn(counter)
            load, source = correction.row_copies(self._columns_at(tmem, self.tmem.dq, columns), FRAGMENT, row, False)
            values = cute.make_rmem_tensor((columns,), Float32)
            for piece in cutlass.range_constexpr(columns // FRAGMENT):
                cute.copy(load, source[None, None, piece], self._piece(values, piece, FRAGMENT))
            arch.fence_view_async_tmem_load()
            fence_before_arrive()
            self._arrive_mma(bars.dq_empty)
            if is_adding:
                if const_expr(self.deterministic):
                    if const_expr(self.hands_over_late):
                        if turn > 0:
                            self._end_turn(counter)
                    counter = self._counter(dq_semaphore, step, work)
                    turns.wait_turn(counter, PAIR * WARPS_PER_GROUP * self._rank(step.m_block, work, problem))
                target = self._tiles_of(
                    maps.dq_coordinates, (FRAGMENT, self.dq_columns), step.head, work, work.first_row
                )
                m_tile = step.m_block * WARPS_PER_GROUP + _rank() * PAIR + quarter % PAIR
                for piece in cutlass.range_constexpr(pieces):
                    with arch.elect_one():
                        arch.cp_async_bulk_wait_group(0, read=True)
                    arch.sync_warp()
                    chunk = cute.make_tensor(
                        values.iterator + piece * self.dq_columns, cute.make_layout(self.dq_columns)
                    )
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
