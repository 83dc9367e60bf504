"""FlashAttention backward for SM100 and SM103, one CTA a tile of 128 keys: warp roles wired together.

A CTA owns the dK and dV of its keys and walks over the tiles of 128 queries that see them, for every query head that
shares the key head. Scores are transposed (keys along the lanes of tensor memory), so that P^T and dS^T are operand A
straight from tensor memory:
    S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, dQ = dS K (summed over key tiles in global memory).
Warps 0-3 add dQ to global memory, 4-11 compute P and dS (a thread owns a key and half of the queries) and write dK and
dV at the end, 12 issues matrix products, 13 loads, 14 and 15 idle. K, Q, dO are loaded once and read by products in two
orientations. Which tensor-memory columns are reused: memory/tmem_layout.py.

Order of products for query tiles t: S(t+1), dK(t), dQ(t), dP(t+1), dV(t+1): the exponentials of t+1 run beside dK(t)
and dQ(t). Products of one warp complete in the order they are issued: a barrier that tells of one tells of all before.

Packed sequences: a CTA finds the sequence of its keys (scheduling.packed_tiles), and the workspaces have whole tiles of
each (scheduling.padded_tiles). Rows behind a sequence belong to another, so warp 14 puts zeros in their place before a
product reads them, and dK and dV leave by rows.

Who waits for whom: `BackwardSm100._barriers`.
Every tensor-memory access that crosses threads has its tcgen05 fences; every generic write that the copy engine or the
tensor core reads has its proxy fence.
Source: FlashAttention-2 (arXiv 2307.08691) algorithm 2; FlashAttention-4 (arXiv 2603.05451), backward pass.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory as mem
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32, const_expr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import LayoutEnum

from kernels_src.integers import ceil_div, maximum, select
from kernels_src.masking.block_range import FULL, LOCAL
from kernels_src.masking.query_range import query_range
from kernels_src.memory import value_tail
from kernels_src.memory.tmem_layout import backward_tmem
from kernels_src.mma.umma import accumulator_at, commit, fence_after_wait, fence_before_arrive, multiply, operand_a_at
from kernels_src.pipelines.barriers import Barrier, allocate, initialise
from kernels_src.pipelines.ring import Cursor
from kernels_src.scheduling import padded_tiles, single_tile, turns, varlen_tiles
from kernels_src.softmax import correction, gradients, score_rows
from kernels_src.softmax.softcap import cap_factor, cap_scores

NUM_THREADS = 512
LAUNCH_REGISTERS = 128  # a thread starts with an equal share of 65536
TILE_M, TILE_N = 128, 128
HALF = TILE_M // 2  # queries of one compute thread
FRAGMENT = 32  # columns a tensor-memory access or a bulk store moves at a time
WARPS_PER_GROUP, COMPUTE_WARPS = 4, 8
COMPUTE_WARP, MMA_WARP, LOAD_WARP, TAIL_WARP = 4, 12, 13, 14
DQ_SLOTS = 2  # staging slots of every reducing warp
DENSE, VARLEN = "dense", "varlen"
WARP = 32
TMEM_LANE = 65536  # step of a tensor-memory address from lane to lane
LOG2_E = 1.4426950408889634
NO_QUERY = 1 << 30  # first visible query of a key beyond the sequence


class Problem(NamedTuple):
    """Runtime facts of the launch that every role reads. The last two are None without softcap."""

    seqlen_q: Int32
    seqlen_k: Int32
    window_left: Int32
    window_right: Int32
    scale: Float32
    heads_per_kv: Int32
    softcap: object
    cap_factor: object


class Tiles(NamedTuple):
    """The order of work: divisors, or, for packed sequences, the lists of lengths and the number of key heads."""

    num_n_blocks: object
    num_heads_kv: object
    cu_seqlens_q: object = None
    cu_seqlens_k: object = None
    seqused_q: object = None
    seqused_k: object = None


class Maps(NamedTuple):
    """Tensor maps and their coordinate tensors."""

    q: cute.CopyAtom
    q_coordinates: cute.Tensor
    k: cute.CopyAtom
    k_coordinates: cute.Tensor
    v: cute.CopyAtom
    v_coordinates: cute.Tensor
    do: cute.CopyAtom
    do_coordinates: cute.Tensor
    dq: cute.CopyAtom
    dq_coordinates: cute.Tensor
    dk: cute.CopyAtom
    dk_coordinates: cute.Tensor
    dv: cute.CopyAtom
    dv_coordinates: cute.Tensor


class Layouts(NamedTuple):
    """Shared-memory layouts; `*_t` are the transposed views of the same bytes."""

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
    """Shared-memory tensors."""

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    dq: cute.Tensor
    lse_log2: cute.Tensor
    dpsum: cute.Tensor


class Work(NamedTuple):
    """What one CTA does: a tile of keys, and the tiles of queries that it visits for every query head of the group.

    seqlen_q, seqlen_k: of its sequence; num_steps: 0 without queries, and for a CTA without keys (not is_valid).
    first_query, first_key, first_row: where the sequence starts in q, in k and in the workspaces; None if dense.
    """

    n_block: Int32
    head_kv: Int32
    batch: Int32
    begin: Int32
    inner_begin: Int32
    inner_end: Int32
    end: Int32
    num_steps: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    first_query: object = None
    first_key: object = None
    first_row: object = None
    is_valid: object = True


class Step(NamedTuple):
    """A tile of queries: its query head and index."""

    head: Int32
    m_block: Int32


def _copy_views(atom, shared, global_parts):
    """(shared view, global view) for cute.copy of operand tiles: modes (one tile, stage) and (one tile, tile index)."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(global_parts, 0, 3)
    )


def _retyped(tensor, layout, dtype):
    """The bytes of a shared-memory tensor under another swizzled layout."""
    return cute.make_tensor(cute.recast_ptr(tensor.iterator, layout.inner, dtype=dtype), layout.outer)


class BackwardSm100:
    """Backward attention, one specialization; calling it is the host function `bwd` of docs/formats.md.

    Args:
        symbol: prefix of the device entry, which is `<symbol>_0`.
        dtype: cutlass.BFloat16 or cutlass.Float16, of all tensors but the float32 workspaces.
        head_dim, head_dim_v: multiples of 32; 256 + head_dim + head_dim_v tensor-memory columns must fit 512.
        mask: "full", "causal" or "local".
        layout: "dense", or "varlen" for packed sequences.
        q_stages, do_stages: slots of Q and of dO.
        compute_registers, reduce_registers, other_registers: a thread, multiples of 8.
        deterministic: dQ is summed in a fixed order, see scheduling.turns. (dK and dV always are: one CTA sums them.)
    Raises: ValueError for a combination that cannot run.
    """

    probability_step = HALF  # columns from P of one half of the queries to P of the other
    cluster_keys = TILE_N  # keys of all CTAs that visit the same queries together

    def __init__(
        self,
        *,
        symbol: str,
        dtype,
        head_dim: int,
        head_dim_v: int,
        mask: str,
        q_stages: int,
        do_stages: int,
        compute_registers: int,
        reduce_registers: int,
        other_registers: int,
        deterministic: bool = False,
        layout: str = DENSE,
    ):
        self.dtype, self.head_dim, self.head_dim_v, self.mask = dtype, head_dim, head_dim_v, mask
        self.q_stages, self.do_stages = q_stages, do_stages
        self.registers = (compute_registers, reduce_registers, other_registers)
        self.deterministic, self.is_packed = deterministic, layout == VARLEN
        self.tmem = self._plan_tmem()
        self.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)

    def _plan_tmem(self):
        return backward_tmem(TILE_M, self.head_dim, self.head_dim_v)

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
            num_n_blocks = varlen_tiles.max_tiles(k.shape[0], cu_seqlens_k.shape[0] - 1, TILE_N)
            num_tiles = num_n_blocks * num_heads_kv
            tiles = Tiles(num_n_blocks, num_heads_kv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        else:
            num_n_blocks = cute.ceil_div(k.shape[1], TILE_N)
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
            grid=(num_tiles, 1, 1),
            block=(NUM_THREADS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    # Products. Made anew wherever they are issued: an instruction's accumulate flag is state, and state must not leave
    # a loop of the device code.

    def _mma_scores(self):
        """S^T = K Q^T and dP^T = V dO^T: both operands from shared memory, summed over the contiguous dimension."""
        return blackwell.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32,
            tcgen05.CtaGroup.ONE, (TILE_N, TILE_M), tcgen05.OperandSource.SMEM,
        )  # fmt: skip

    def _mma_accumulate(self, columns: int):
        """dV += P^T dO and dK += dS^T Q: A from tensor memory, B with the head dimension contiguous."""
        return blackwell.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32,
            tcgen05.CtaGroup.ONE, (TILE_N, columns), tcgen05.OperandSource.TMEM,
        )  # fmt: skip

    def _mma_dq(self):
        """dQ = dS K: dS from shared memory with queries contiguous, K with the head dimension contiguous."""
        return blackwell.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.MN, OperandMajorMode.MN, Float32,
            tcgen05.CtaGroup.ONE, (TILE_M, self.head_dim), tcgen05.OperandSource.SMEM,
        )  # fmt: skip

    def _layouts(self) -> Layouts:
        scores, dv, dk, dq = (
            self._mma_scores(),
            self._mma_accumulate(self.head_dim_v),
            self._mma_accumulate(self.head_dim),
            self._mma_dq(),
        )
        qk, vdo = (TILE_N, TILE_M, self.head_dim), (TILE_N, TILE_M, self.head_dim_v)
        layout_a, layout_b = blackwell.make_smem_layout_a, blackwell.make_smem_layout_b

        def stores(dtype, tiles):
            """Tiles of one warp's 32 rows and 32 columns."""
            return blackwell.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, (FRAGMENT, FRAGMENT), tiles)

        return Layouts(
            k=layout_a(scores, qk, self.dtype, 1),
            k_t=layout_b(dq, (TILE_M, self.head_dim, TILE_N), self.dtype, 1),
            v=layout_a(scores, vdo, self.dtype, 1),
            q=layout_b(scores, qk, self.dtype, self.q_stages),
            q_t=layout_b(dk, (TILE_N, self.head_dim, TILE_M), self.dtype, self.q_stages),
            do=layout_b(scores, vdo, self.dtype, self.do_stages),
            do_t=layout_b(dv, (TILE_N, self.head_dim_v, TILE_M), self.dtype, self.do_stages),
            ds=layout_a(dq, (TILE_M, self.head_dim, TILE_N), self.dtype, 1),
            dq=stores(Float32, WARPS_PER_GROUP * DQ_SLOTS),
            dk=stores(self.dtype, WARPS_PER_GROUP * (self.head_dim // FRAGMENT)),
            dv=stores(self.dtype, WARPS_PER_GROUP * (self.head_dim_v // FRAGMENT)),
        )

    def _maps(self, q, k, v, dout, dq_accum, dk, dv) -> Maps:
        """Tensor maps over (sequence, dim, head, batch), packed sequences without batch."""
        layouts, mma = self._layouts(), self._mma_scores()

        def reordered(tensor, modes):
            return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))

        rows, accumulator_rows = ([0, 2, 1], [1, 2, 0]) if self.is_packed else ([1, 3, 2, 0], [2, 3, 1, 0])
        qk, vdo = (TILE_N, TILE_M, self.head_dim), (TILE_N, TILE_M, self.head_dim_v)
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        cluster = cute.tiled_divide(cute.make_layout((1, 1, 1)), (mma.thr_id.shape,)).shape

        def operand(make, tensor, layout, tile):
            return make(load, reordered(tensor, rows), cute.select(layout, mode=[0, 1, 2]), tile, mma, cluster)

        def result(op, tensor, layout):
            return cpasync.make_tiled_tma_atom(op, tensor, cute.select(layout, mode=[0, 1]), (FRAGMENT, FRAGMENT))

        map_a, map_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        add, store = cpasync.CopyReduceBulkTensorTileS2GOp(), cpasync.CopyBulkTensorTileS2GOp()
        return Maps(
            *operand(map_b, q, layouts.q, qk),
            *operand(map_a, k, layouts.k, qk),
            *operand(map_a, v, layouts.v, vdo),
            *operand(map_b, dout, layouts.do, vdo),
            *result(add, reordered(dq_accum, accumulator_rows), layouts.dq),
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
            arch.alloc_tmem(self.tmem.num_columns, tmem_pointer)
        if warp == LOAD_WARP:
            for tensor_map in (maps.q, maps.k, maps.v, maps.do, maps.dq, maps.dk, maps.dv):
                cpasync.prefetch_descriptor(tensor_map)
        fence_before_arrive()
        arch.sync_threads()
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
                work = self._work(problem, tiles)
                if self._has_steps(work):
                    self._mma_role(bars, shared, tmem, work)
            elif warp == LOAD_WARP:
                work = self._work(problem, tiles)
                if self._has_steps(work):
                    self._load_role(bars, maps, shared, dpsum, lse_log2, problem, work)
            elif const_expr(self.is_packed):
                if warp == TAIL_WARP:
                    work = self._work(problem, tiles)
                    if self._has_steps(work):
                        self._tail_role(bars, shared, problem, work)
        fence_before_arrive()
        arch.sync_threads()
        fence_after_wait()
        if warp == MMA_WARP:
            arch.relinquish_tmem_alloc_permit()
            arch.dealloc_tmem(tmem, self.tmem.num_columns)

    def _allocate_tiles(self, smem) -> Shared:
        layouts = self._layouts()

        def tile(layout, dtype):
            return smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

        def vector(stages):
            return smem.allocate_tensor(Float32, cute.make_layout((TILE_M, stages)), byte_alignment=16)

        return Shared(
            k=tile(layouts.k, self.dtype),
            v=tile(layouts.v, self.dtype),
            q=tile(layouts.q, self.dtype),
            do=tile(layouts.do, self.dtype),
            ds=tile(layouts.ds, self.dtype),
            dq=tile(layouts.dq, Float32),
            lse_log2=vector(self.q_stages),
            dpsum=vector(self.do_stages),
        )

    def _barriers(self) -> dict[str, Barrier]:
        """Who waits for whom: `full` says that something may be read, `empty` that it may be written again.

        Indexed by the slot where there are several. Loads announce their bytes: to `landed` in packed sequences, whose
        `full` is then the arrival of warp 14.
        """
        landed, q_slots, do_slots, warps = int(self.is_packed), self.q_stages, self.do_stages, COMPUTE_WARPS
        return {
            "k_full": Barrier(1, 1),  # K is loaded
            "v_full": Barrier(1, 1),  # V is loaded
            "q_full": Barrier(q_slots, 1),  # Q and lse_log2 are loaded
            "q_empty": Barrier(q_slots, 1 + warps),  # ... and read: Q by dK, lse_log2 by the compute warps
            "do_full": Barrier(do_slots, 1),  # dO and dpsum are loaded
            "do_empty": Barrier(do_slots, 1 + warps),  # ... and read: dO by dV, dpsum by the compute warps
            "s_full": Barrier(1, 1),  # S^T is complete
            "p_ready": Barrier(1, warps),  # P^T is stored, over S^T
            "dp_full": Barrier(1, 1),  # dP^T is complete
            "ds_ready": Barrier(1, warps),  # dS^T is stored over dP^T, and to shared memory
            "dq_full": Barrier(1, 1),  # dQ is complete and dS read
            "dq_empty": Barrier(1, WARPS_PER_GROUP),  # dQ is read from tensor memory
            "dv_full": Barrier(1, 1),  # dV is complete, once
            "dk_full": Barrier(1, 1),  # dK is complete, once
            "k_landed": Barrier(landed, 1),
            "v_landed": Barrier(landed, 1),
            "q_landed": Barrier(landed * q_slots, 1),
            "do_landed": Barrier(landed * do_slots, 1),
        }

    @cute.jit
    def _work(self, problem: Problem, tiles: Tiles) -> Work:
        """The tile of keys of this CTA. Every role computes it anew: values that lived across the branch to the roles
        would count against the registers of all of them (seen as spills)."""
        if const_expr(self.is_packed):
            return self._packed_work(problem, tiles)
        tile = single_tile.tile_at(self._cluster(), tiles.num_n_blocks, tiles.num_heads_kv)
        n_block = tile.m_block
        if const_expr(self.deterministic and turns.starts_with_last_keys(self.mask)):
            n_block = tiles.num_n_blocks.divisor - 1 - n_block
        return self._visits(problem, n_block, tile.head, tile.batch, problem.seqlen_q, problem.seqlen_k)

    @cute.jit
    def _packed_work(self, problem: Problem, tiles: Tiles) -> Work:
        """The same among packed sequences: tiles of keys of a head are neighbours."""
        batch = tiles.cu_seqlens_k.shape[0] - 1
        is_valid, sequence, rest = varlen_tiles.find_sequence(
            self._cluster(), tiles.cu_seqlens_k, tiles.seqused_k, batch, 1, tiles.num_heads_kv, self.cluster_keys
        )
        seqlen_q = varlen_tiles.sequence_length(tiles.cu_seqlens_q, tiles.seqused_q, sequence)
        seqlen_k = varlen_tiles.sequence_length(tiles.cu_seqlens_k, tiles.seqused_k, sequence)
        num_n_blocks = maximum(ceil_div(seqlen_k, self.cluster_keys), 1)
        head = rest // num_n_blocks
        n_block = rest - head * num_n_blocks
        if const_expr(self.deterministic and turns.starts_with_last_keys(self.mask)):
            n_block = num_n_blocks - 1 - n_block
        first_query = tiles.cu_seqlens_q[sequence]
        work = self._visits(problem, n_block, head, Int32(0), maximum(seqlen_q, 1), seqlen_k)
        return work._replace(
            num_steps=select(is_valid & (seqlen_q > 0), work.num_steps, 0),
            seqlen_q=seqlen_q,
            first_query=first_query,
            first_key=tiles.cu_seqlens_k[sequence],
            first_row=padded_tiles.first_tile(first_query, sequence) * padded_tiles.TILE,
            is_valid=is_valid,
        )

    def _cluster(self):
        """Number of this CTA's cluster."""
        return arch.block_idx()[0]

    def _tile_of(self, cluster_tile):
        """This CTA's tile of keys, where the cluster takes `cluster_tile`."""
        return cluster_tile

    def _cluster_tile(self, n_block):
        """What the cluster takes, where this CTA has tile `n_block` of keys."""
        return n_block

    def _visits(self, problem: Problem, cluster_tile, head_kv, batch, seqlen_q, seqlen_k) -> Work:
        """The work of one tile of keys."""
        queries = query_range(
            cluster_tile,
            tile_m=TILE_M,
            tile_n=self.cluster_keys,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            mask=self.mask,
            window_left=problem.window_left,
            window_right=problem.window_right,
        )
        begin, end = Int32(queries.begin), Int32(queries.end)
        return Work(
            n_block=self._tile_of(cluster_tile), head_kv=head_kv, batch=batch, begin=begin,
            inner_begin=Int32(queries.inner_begin), inner_end=Int32(queries.inner_end), end=end,
            num_steps=(end - begin) * problem.heads_per_kv, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        )  # fmt: skip

    def _has_steps(self, work: Work):
        """Dense problems always have some."""
        return work.num_steps > 0 if self.is_packed else True

    def _tiles_of(self, coordinates, shape, head, work: Work, first_row):
        """Tiles of one head of a sequence, all rows and columns of them. first_row: where packed ones start."""
        if self.is_packed:
            return cute.local_tile(cute.domain_offset((first_row, 0, 0), coordinates), shape, (None, None, head))
        return cute.local_tile(coordinates, shape, (None, None, head, work.batch))

    def _rows_of(self, statistics, head, work: Work):
        """Per-query values of one head of a sequence."""
        if self.is_packed:
            return cute.domain_offset((work.first_row,), statistics[head, None])
        return statistics[work.batch, head, None]

    def _counter(self, dq_semaphore, step, work: Work):
        """The counter of a tile of queries."""
        if self.is_packed:
            return dq_semaphore[step.head, None].iterator + work.first_row // padded_tiles.TILE + step.m_block
        return dq_semaphore[work.batch, step.head, None].iterator + step.m_block

    def _first_step(self, problem: Problem, work: Work) -> Step:
        return Step(work.head_kv * problem.heads_per_kv, work.begin)

    @cute.jit
    def _next_step(self, step: Step, work: Work) -> Step:
        """Queries upwards, then the next query head of the group."""
        m_block = step.m_block + 1
        wraps = m_block == work.end
        return Step(step.head + 1 if wraps else step.head, work.begin if wraps else m_block)

    @cute.jit
    def _arrive_warp(self, barrier):
        """One arrival for the whole warp, after all its lanes."""
        arch.sync_warp()
        with arch.elect_one():
            arch.mbarrier_arrive(barrier)

    @cute.jit
    def _arrive_mma(self, barrier):
        """The warp's arrival at a barrier that the warp which issues products waits for."""
        self._arrive_warp(barrier)

    # --- load -------------------------------------------------------------------------------------------------------

    @cute.jit
    def _load_role(self, bars, maps, shared, dpsum, lse_log2, problem, work):
        """Warp 13: K Q V dO, then Q and dO of every further tile. The whole warp runs along; each copy elects."""
        thread = self._mma_scores().get_slice(0)
        gK = self._tiles_of(maps.k_coordinates, (TILE_N, self.head_dim), work.head_kv, work, work.first_key)
        gV = self._tiles_of(maps.v_coordinates, (TILE_N, self.head_dim_v), work.head_kv, work, work.first_key)
        ks, gK = _copy_views(maps.k, shared.k, thread.partition_A(gK[None, None, None, 0]))
        vs, gV = _copy_views(maps.v, shared.v, thread.partition_A(gV[None, None, None, 0]))
        q_slot, do_slot = Cursor(Int32(0), Int32(0)), Cursor(Int32(0), Int32(0))
        step = self._first_step(problem, work)
        self._load_once(
            bars.k_landed if self.is_packed else bars.k_full,
            maps.k,
            gK[None, work.n_block],
            ks[None, 0],
            self._bytes(self.head_dim),
        )
        self._load_q(bars, maps, shared, lse_log2, step, work, q_slot)
        self._load_once(
            bars.v_landed if self.is_packed else bars.v_full,
            maps.v,
            gV[None, work.n_block],
            vs[None, 0],
            self._bytes(self.head_dim_v),
        )
        self._load_do(bars, maps, shared, dpsum, step, work, do_slot)
        remaining = work.num_steps - 1
        while remaining > 0:
            step = self._next_step(step, work)
            q_slot, do_slot = q_slot.next(self.q_stages), do_slot.next(self.do_stages)
            self._load_q(bars, maps, shared, lse_log2, step, work, q_slot)
            self._load_do(bars, maps, shared, dpsum, step, work, do_slot)
            remaining = remaining - 1

    def _bytes(self, columns: int) -> int:
        """Bytes of a tile of 128 rows in the input type."""
        return TILE_M * columns * self.dtype.width // 8

    @cute.jit
    def _load_once(self, barrier, atom, source, target, num_bytes: cutlass.Constexpr[int]):
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(barrier, num_bytes)
        cute.copy(atom, source, target, tma_bar_ptr=barrier)

    @cute.jit
    def _load_q(self, bars, maps, shared, lse_log2, step, work, slot):
        """Q and lse_log2 of one tile of queries into their slot once its last readers are done."""
        gQ = self._tiles_of(maps.q_coordinates, (TILE_M, self.head_dim), step.head, work, work.first_query)
        qs, gQ = _copy_views(maps.q, shared.q, self._mma_scores().get_slice(0).partition_B(gQ[None, None, None, 0]))
        full = bars.q_landed if const_expr(self.is_packed) else bars.q_full
        self._load_rows(
            full, bars.q_empty, slot, maps.q, gQ[None, step.m_block], qs[None, slot.stage],
            self._rows_of(lse_log2, step.head, work), shared.lse_log2, step.m_block, self._bytes(self.head_dim),
        )  # fmt: skip

    @cute.jit
    def _load_do(self, bars, maps, shared, dpsum, step, work, slot):
        """dO and dpsum of one tile of queries, in the same way."""
        gO = self._tiles_of(maps.do_coordinates, (TILE_M, self.head_dim_v), step.head, work, work.first_query)
        dos, gO = _copy_views(maps.do, shared.do, self._mma_scores().get_slice(0).partition_B(gO[None, None, None, 0]))
        full = bars.do_landed if const_expr(self.is_packed) else bars.do_full
        self._load_rows(
            full, bars.do_empty, slot, maps.do, gO[None, step.m_block], dos[None, slot.stage],
            self._rows_of(dpsum, step.head, work), shared.dpsum, step.m_block, self._bytes(self.head_dim_v),
        )  # fmt: skip

    @cute.jit
    def _load_rows(
        self, full, empty, slot, atom, source, target, vector, vectors, m_block, num_bytes: cutlass.Constexpr[int]
    ):
        arch.mbarrier_wait(empty + slot.stage, slot.phase ^ 1)
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(full + slot.stage, num_bytes + TILE_M * 4)
        cute.copy(atom, source, target, tma_bar_ptr=full + slot.stage)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        rows, place = cpasync.group_bulk_copy_modes(
            cute.local_tile(vector, (TILE_M,), (m_block,)), vectors[None, slot.stage]
        )
        with arch.elect_one():
            cute.copy(bulk, rows, place, mbar_ptr=full + slot.stage)

    # --- rows behind a sequence -------------------------------------------------------------------------------------

    @cute.jit
    def _tail_role(self, bars, shared, problem, work):
        """Warp 14: zeros to rows of K, V, Q and dO behind the sequence, in the order in which they are loaded."""
        keys = work.seqlen_k - work.n_block * TILE_N
        arch.mbarrier_wait(bars.k_landed, 0)
        self._end_tile(shared.k, 0, keys, self.head_dim, bars.k_full)
        q_slot, do_slot = Cursor(Int32(0), Int32(0)), Cursor(Int32(0), Int32(0))
        step = self._first_step(problem, work)
        turn = Int32(0)
        while turn < work.num_steps:
            queries = work.seqlen_q - step.m_block * TILE_M
            arch.mbarrier_wait(bars.q_landed + q_slot.stage, q_slot.phase)
            self._end_tile(shared.q, q_slot.stage, queries, self.head_dim, bars.q_full + q_slot.stage)
            if turn == 0:
                arch.mbarrier_wait(bars.v_landed, 0)
                self._end_tile(shared.v, 0, keys, self.head_dim_v, bars.v_full)
            arch.mbarrier_wait(bars.do_landed + do_slot.stage, do_slot.phase)
            self._end_tile(shared.do, do_slot.stage, queries, self.head_dim_v, bars.do_full + do_slot.stage)
            q_slot, do_slot = q_slot.next(self.q_stages), do_slot.next(self.do_stages)
            step = self._next_step(step, work)
            turn = turn + 1

    @cute.jit
    def _end_tile(
        self, tiles, stage, end, columns: cutlass.Constexpr[int], full, rows: cutlass.Constexpr[int] = TILE_M
    ):
        """Zeros to rows `end` .. of a tile of `rows`, and the arrival that hands it on."""
        if end < rows:
            address = tiles.iterator.toint() + stage * self._bytes(columns)
            value_tail.zero_rows(address, end, arch.lane_idx(), rows, columns, WARP)
            arch.fence_proxy("async.shared", space="cta")
        self._arrive_mma(full)

    # --- matrix products --------------------------------------------------------------------------------------------

    @cute.jit
    def _mma_role(self, bars, shared, tmem, work):
        """Warp 12: see the order of products above."""
        q_slot, do_slot = Cursor(Int32(0), Int32(0)), Cursor(Int32(0), Int32(0))
        turn, accumulate = Int32(0), cutlass.Boolean(False)
        arch.mbarrier_wait(bars.k_full, 0)
        self._multiply_scores(bars, shared, tmem, q_slot)
        arch.mbarrier_wait(bars.v_full, 0)
        self._multiply_dp(bars, shared, tmem, do_slot)
        self._multiply_dv(bars, shared, tmem, do_slot, turn, accumulate)
        remaining = work.num_steps - 1
        while remaining > 0:
            next_slot = q_slot.next(self.q_stages)
            do_slot = do_slot.next(self.do_stages)
            self._multiply_scores(bars, shared, tmem, next_slot)
            self._multiply_dk(bars, shared, tmem, q_slot, turn, accumulate)
            self._multiply_dq(bars, shared, tmem)
            accumulate = cutlass.Boolean(True)
            arch.mbarrier_wait(bars.dq_empty, turn & 1)
            fence_after_wait()
            self._multiply_dp(bars, shared, tmem, do_slot)
            turn = turn + 1
            self._multiply_dv(bars, shared, tmem, do_slot, turn, accumulate)
            q_slot = next_slot
            remaining = remaining - 1
        commit(bars.dv_full)
        self._multiply_dk(bars, shared, tmem, q_slot, turn, accumulate)
        commit(bars.dk_full)
        self._multiply_dq(bars, shared, tmem)

    @cute.jit
    def _multiply_scores(self, bars, shared, tmem, slot):
        """S^T = K Q^T."""
        mma = self._mma_scores()
        arch.mbarrier_wait(bars.q_full + slot.stage, slot.phase)
        fK, fQ = mma.make_fragment_A(shared.k), mma.make_fragment_B(shared.q)
        scores = accumulator_at(mma, (TILE_N, TILE_M), tmem, self.tmem.scores)
        multiply(mma, scores, fK[None, None, None, 0], fQ[None, None, None, slot.stage], 0, self.head_dim // 16, False)
        commit(bars.s_full)

    @cute.jit
    def _multiply_dp(self, bars, shared, tmem, slot):
        """dP^T = V dO^T."""
        mma = self._mma_scores()
        arch.mbarrier_wait(bars.do_full + slot.stage, slot.phase)
        fV, fO = mma.make_fragment_A(shared.v), mma.make_fragment_B(shared.do)
        target = accumulator_at(mma, (TILE_N, TILE_M), tmem, self.tmem.dprobabilities)
        multiply(
            mma, target, fV[None, None, None, 0], fO[None, None, None, slot.stage], 0, self.head_dim_v // 16, False
        )
        commit(bars.dp_full)

    @cute.jit
    def _multiply_dv(self, bars, shared, tmem, slot, turn, accumulate):
        """dV += P^T dO; frees the slot of dO."""
        arch.mbarrier_wait(bars.p_ready, turn & 1)
        fence_after_wait()
        self._multiply_halves(
            tmem, self.tmem.dv, self.tmem.scores, _retyped(shared.do, self._layouts().do_t, self.dtype),
            self.head_dim_v, slot, accumulate,
        )  # fmt: skip
        commit(bars.do_empty + slot.stage)

    @cute.jit
    def _multiply_dk(self, bars, shared, tmem, slot, turn, accumulate):
        """dK += dS^T Q; frees the slot of Q."""
        arch.mbarrier_wait(bars.ds_ready, turn & 1)
        fence_after_wait()
        self._multiply_halves(
            tmem, self.tmem.dk, self.tmem.dprobabilities, _retyped(shared.q, self._layouts().q_t, self.dtype),
            self.head_dim, slot, accumulate,
        )  # fmt: skip
        commit(bars.q_empty + slot.stage)

    @cute.jit
    def _multiply_halves(
        self, tmem, target_column: cutlass.Constexpr[int], source_column: cutlass.Constexpr[int], operand_b,
        columns: cutlass.Constexpr[int], slot, accumulate,
    ):  # fmt: skip
        """accumulator (+)= A B, where A lies over the fp32 columns it was computed from, each half of the queries in
        the first half of its own columns (so that no compute warpgroup writes what the other still reads)."""
        mma = self._mma_accumulate(columns)
        target = accumulator_at(mma, (self._pair_rows(), columns), tmem, target_column)
        fB = mma.make_fragment_B(operand_b)[None, None, None, slot.stage]
        steps = TILE_M // 16
        low = operand_a_at(mma, (self._pair_rows(), TILE_M), tmem, source_column, self.dtype)
        high = operand_a_at(mma, (self._pair_rows(), TILE_M), tmem, source_column + HALF // 2, self.dtype)
        multiply(mma, target, low, fB, 0, steps // 2, accumulate)
        multiply(mma, target, high, fB, steps // 2, steps, True)

    def _pair_rows(self):
        """M of the products whose A is in tensor memory."""
        return TILE_N

    @cute.jit
    def _multiply_dq(self, bars, shared, tmem):
        """dQ = dS K, behind dK of the same tile, which has waited for dS."""
        mma = self._mma_dq()
        fS = mma.make_fragment_A(shared.ds)
        fK = mma.make_fragment_B(_retyped(shared.k, self._layouts().k_t, self.dtype))
        target = accumulator_at(mma, (TILE_M, self.head_dim), tmem, self.tmem.dq)
        multiply(mma, target, fS[None, None, None, 0], fK[None, None, None, 0], 0, TILE_N // 16, False)
        commit(bars.dq_full)

    # --- compute ----------------------------------------------------------------------------------------------------

    @cute.jit
    def _compute_role(self, bars, maps, shared, tmem, rows, problem, work):
        """Warps 4 - 11: thread t of either warpgroup owns key t, warpgroup h queries 64 h .. 64 h + 63 of a tile."""
        row = arch.thread_idx()[0] % TILE_N
        half = arch.make_warp_uniform((arch.warp_idx() - COMPUTE_WARP) // WARPS_PER_GROUP)
        key = work.n_block * TILE_N + row
        q_slot, do_slot = Cursor(Int32(0), Int32(0)), Cursor(Int32(0), Int32(0))
        step = self._first_step(problem, work)
        turn = Int32(0)
        while turn < work.num_steps:
            weights = self._probabilities(
                bars, bars.q_full, bars.q_empty, shared, tmem, problem, work, step, key, row, half, q_slot, turn
            )
            self._score_gradients(bars, bars.do_full, bars.do_empty, shared, tmem, weights, row, half, do_slot, turn)
            q_slot, do_slot = q_slot.next(self.q_stages), do_slot.next(self.do_stages)
            step = self._next_step(step, work)
            turn = turn + 1
        layouts = self._layouts()
        dk_rows, dv_rows = rows if const_expr(self.is_packed) else (None, None)
        arch.mbarrier_wait(bars.dv_full, 0)
        self._store_gradient(
            dv_rows, maps.dv, maps.dv_coordinates, _retyped(shared.do, layouts.dv, self.dtype), tmem + self.tmem.dv,
            self.head_dim_v, Float32(1.0), work, row, half,
        )  # fmt: skip
        arch.mbarrier_wait(bars.dk_full, 0)
        self._store_gradient(
            dk_rows, maps.dk, maps.dk_coordinates, _retyped(shared.q, layouts.dk, self.dtype), tmem + self.tmem.dk,
            self.head_dim, problem.scale, work, row, half,
        )  # fmt: skip
        with arch.elect_one():
            arch.cp_async_bulk_wait_group(0, read=False)

    def _columns_at(self, tmem, column, columns: int):
        """View of fp32 columns of tensor memory, a lane a row."""
        return cute.make_tensor(
            tmem + column, cute.make_layout(((TILE_N, columns), 1, 1), stride=((TMEM_LANE, 1), 0, 0))
        )

    @cute.jit
    def _probabilities(self, bars, full, empty, shared, tmem, problem, work, step, key, row, half, slot, turn):
        """S^T -> P^T of one tile; returns what dP - dpsum is multiplied by, in float32: this thread's P, times the
        derivative of the soft cap. full, empty: barriers of lse_log2."""
        arch.mbarrier_wait(full + slot.stage, slot.phase)
        arch.mbarrier_wait(bars.s_full, turn & 1)
        fence_after_wait()
        load, source = correction.row_copies(
            self._columns_at(tmem, self.tmem.scores + half * HALF, HALF), FRAGMENT, row, False
        )
        values = cute.make_rmem_tensor((HALF,), Float32)
        for piece in cutlass.range_constexpr(HALF // FRAGMENT):
            cute.copy(load, source[None, None, piece], self._piece(values, piece, FRAGMENT))
        arch.fence_view_async_tmem_load()
        self._scores_are_read(bars, row, half)
        if const_expr(problem.softcap is not None):
            cap_scores(values, problem.cap_factor)
        if (step.m_block < work.inner_begin) | (step.m_block >= work.inner_end):
            first_query = step.m_block * TILE_M + half * HALF
            begin, end = self._visible_queries(key, problem, work)
            score_rows.mask_row(values, begin - first_query, end - first_query, True, self.mask == LOCAL)
        lse = cute.local_tile(shared.lse_log2[None, slot.stage], (HALF,), (half,))
        column = self.tmem.scores + half * self.probability_step
        if const_expr(problem.softcap is None):
            gradients.probabilities(values, lse, -(problem.scale * Float32(LOG2_E)))
            self._arrive_warp(empty + slot.stage)
            for piece in cutlass.range_constexpr(HALF // FRAGMENT):
                self._store_operand(values, piece, tmem, column, row)
        else:
            for piece in cutlass.range_constexpr(HALF // FRAGMENT):
                mine = cute.make_tensor(values.iterator + piece * FRAGMENT, cute.make_layout(FRAGMENT))
                capped = mine.load()
                of_piece = cute.local_tile(lse, (FRAGMENT,), (piece,))
                gradients.probabilities(mine, of_piece, -(problem.softcap * Float32(LOG2_E)))
                self._store_operand(values, piece, tmem, column, row)
                gradients.damp(mine, capped)
            self._arrive_warp(empty + slot.stage)
        arch.fence_view_async_tmem_store()
        fence_before_arrive()
        self._arrive_mma(bars.p_ready)
        return values

    def _scores_are_read(self, bars, row, half):
        """This thread has its scores in registers; here nobody waits for that."""

    @cute.jit
    def _visible_queries(self, key, problem: Problem, work: Work):
        """[begin, end) of the queries that see a key."""
        begin, end = Int32(0), Int32(0)
        if const_expr(self.mask != FULL):
            right = problem.window_right if const_expr(self.mask == LOCAL) else Int32(0)
            begin = key - (work.seqlen_k - work.seqlen_q) - right
        if const_expr(self.mask == LOCAL):
            end = key - (work.seqlen_k - work.seqlen_q) + problem.window_left + 1
        return Int32(NO_QUERY) if key >= work.seqlen_k else begin, end

    def _piece(self, values, piece: int, size: int):
        """Registers of one tensor-memory access."""
        return cute.make_tensor(values.iterator + piece * size, cute.make_layout(((size, 1), 1)))

    @cute.jit
    def _store_operand(self, values, piece: cutlass.Constexpr[int], tmem, column, row):
        """Rounds 32 values to the input type and stores them as 16 columns; returns them."""
        chunk = cute.make_tensor(values.iterator + piece * FRAGMENT, cute.make_layout(FRAGMENT))
        converted = cute.make_rmem_tensor((FRAGMENT,), self.dtype)
        converted.store(chunk.load().to(self.dtype))
        words = cute.recast_tensor(converted, Float32)
        store, target = correction.row_copies(self._columns_at(tmem, column, HALF // 2), FRAGMENT // 2, row, True)
        cute.copy(store, self._piece(words, 0, FRAGMENT // 2), target[None, None, piece])
        return converted

    @cute.jit
    def _score_gradients(self, bars, full, empty, shared, tmem, weights, row, half, slot, turn):
        """dP^T -> dS^T of one tile, to tensor memory for dK and to shared memory for dQ. The previous tile's dQ no
        longer reads there: it was issued before this dP. full, empty: barriers of dpsum."""
        arch.mbarrier_wait(full + slot.stage, slot.phase)
        arch.mbarrier_wait(bars.dp_full, turn & 1)
        fence_after_wait()
        column = self.tmem.dprobabilities + half * HALF
        load, source = correction.row_copies(self._columns_at(tmem, column, HALF), FRAGMENT, row, False)
        keys = self._ds_rows(shared, half)
        for piece in cutlass.range_constexpr(HALF // FRAGMENT):
            values = cute.make_rmem_tensor((FRAGMENT,), Float32)
            cute.copy(load, source[None, None, piece], self._piece(values, 0, FRAGMENT))
            arch.fence_view_async_tmem_load()
            dpsum = cute.local_tile(shared.dpsum[None, slot.stage], (FRAGMENT,), (half * (HALF // FRAGMENT) + piece,))
            mine = cute.make_tensor(weights.iterator + piece * FRAGMENT, cute.make_layout(FRAGMENT))
            gradients.score_gradients(values, mine, dpsum)
            converted = self._store_operand(values, 0, tmem, column + piece * (FRAGMENT // 2), row)
            line = cute.local_tile(keys[row, None], (FRAGMENT,), (piece,))
            cute.autovec_copy(converted, line)
        arch.fence_view_async_tmem_store()
        arch.fence_proxy("async.shared", space="cta")
        fence_before_arrive()
        self._arrive_warp(empty + slot.stage)
        self._arrive_mma(bars.ds_ready)

    def _ds_rows(self, shared, half):
        """The dS of one half of the queries in shared memory, (keys, queries). (Indexed, not by pointer arithmetic,
        which would lose the alignment that 16-byte stores need.)"""
        parts = cute.make_layout((TILE_N, HALF, 2), stride=(HALF, 1, TILE_N * HALF))
        return cute.make_tensor(shared.ds.iterator, parts)[None, None, half]

    @cute.jit
    def _store_gradient(
        self,
        gradient,
        atom,
        coordinates,
        staging,
        accumulator,
        columns: cutlass.Constexpr[int],
        factor,
        work,
        row,
        half,
    ):
        """dK or dV of this warp's 32 keys and every second 32 columns: tensor memory -> registers -> shared -> global.

        Every warp stores its own boxes, so no warp waits for another; the tensor map clips keys beyond the sequence.
        Packed sequences: every thread stores the row of its key to `gradient`, the tensor itself.
        """
        fence_after_wait()
        quarter = arch.make_warp_uniform(row // FRAGMENT)
        for turn in cutlass.range_constexpr((columns // FRAGMENT + 1) // 2):
            fragment = turn * 2 + half
            if fragment < columns // FRAGMENT:
                load, source = correction.row_copies(
                    self._columns_at(accumulator, fragment * FRAGMENT, FRAGMENT), FRAGMENT, row, False
                )
                values = cute.make_rmem_tensor((FRAGMENT,), Float32)
                cute.copy(load, source[None, None, 0], self._piece(values, 0, FRAGMENT))
                arch.fence_view_async_tmem_load()
                for i in cutlass.range_constexpr(0, FRAGMENT, 2):
                    values[i], values[i + 1] = arch.mul_packed_f32x2((values[i], values[i + 1]), (factor, factor))
                converted = cute.make_rmem_tensor((FRAGMENT,), self.dtype)
                converted.store(values.load().to(self.dtype))
                if const_expr(self.is_packed):
                    self._store_row(gradient, converted, fragment, work, row)
                else:
                    target = cute.local_tile(coordinates, (FRAGMENT, FRAGMENT), (None, None, work.head_kv, work.batch))
                    tile = fragment * WARPS_PER_GROUP + quarter
                    cute.autovec_copy(converted, staging[row % FRAGMENT, None, tile])
                    arch.fence_proxy("async.shared", space="cta")
                    arch.sync_warp()
                    self._store_box(
                        atom,
                        staging[None, None, tile],
                        target[None, None, work.n_block * WARPS_PER_GROUP + quarter, fragment],
                        False,
                    )

    @cute.jit
    def _store_row(self, gradient, values, fragment, work, row):
        """32 columns of the gradient of this thread's key, if the key exists."""
        key = work.n_block * TILE_N + row
        if key < work.seqlen_k:
            line = gradient[work.first_key + key, work.head_kv, None]
            cute.autovec_copy(values, cute.local_tile(line, (FRAGMENT,), (fragment,)))

    @cute.jit
    def _store_zeros(self, rows, work):
        """dK and dV of keys whose sequence has no queries."""
        row = arch.thread_idx()[0] % TILE_N
        half = arch.make_warp_uniform((arch.warp_idx() - COMPUTE_WARP) // WARPS_PER_GROUP)
        zeros = cute.make_rmem_tensor((FRAGMENT,), self.dtype)
        zeros.fill(0)
        for gradient in rows:
            for turn in cutlass.range_constexpr((gradient.shape[-1] // FRAGMENT + 1) // 2):
                if turn * 2 + half < gradient.shape[-1] // FRAGMENT:
                    self._store_row(gradient, zeros, turn * 2 + half, work, row)

    @cute.jit
    def _store_box(self, atom, source, target, elects: cutlass.Constexpr[bool]):
        """Starts one 32 x 32 box as a bulk group of its own. `elects`: the copy elects its thread itself."""
        source, target = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(target, 0, 2)
        )
        if const_expr(elects):
            cute.copy(atom, source, target)
            with arch.elect_one():
                arch.cp_async_bulk_commit_group()
        else:
            with arch.elect_one():
                cute.copy(atom, source, target)
                arch.cp_async_bulk_commit_group()

    # --- dQ ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def _reduce_role(self, bars, maps, shared, tmem, dq_semaphore, problem, work):
        """Warps 0 - 3: add each dQ tile to global memory, every warp its own 32 queries."""
        row = arch.thread_idx()[0] % TILE_M
        quarter = arch.make_warp_uniform(arch.warp_idx())
        step = self._first_step(problem, work)
        is_adding = self._is_adding(work, problem)
        counter = self._counter(dq_semaphore, step, work)
        turn = Int32(0)
        while turn < work.num_steps:
            arch.mbarrier_wait(bars.dq_full, turn & 1)
            fence_after_wait()
            if const_expr(self.deterministic):
                if is_adding & (turn > 0):
                    self._end_turn(counter)
            rest = self._read_tile(shared, tmem, row, quarter)
            fence_before_arrive()
            self._arrive_warp(bars.dq_empty)
            if is_adding:
                if const_expr(self.deterministic):
                    counter = self._counter(dq_semaphore, step, work)
                    turns.wait_turn(counter, WARPS_PER_GROUP * self._rank(step.m_block, work, problem))
                self._add_tile(maps, shared, rest, work, step, row, quarter)
            step = self._next_step(step, work)
            turn = turn + 1
        with arch.elect_one():
            arch.cp_async_bulk_wait_group(0, read=False)
        if const_expr(self.deterministic):
            if is_adding:
                self._end_turn(counter)

    @cute.jit
    def _end_turn(self, counter):
        """Hands a tile over. Called only when the next dQ is there, by when the additions have long been performed; and
        before it is read, since the counter's address would cost registers that the tile needs (seen as spills)."""
        with arch.elect_one():
            arch.cp_async_bulk_wait_group(0, read=False)
        turns.end_turn(counter)

    def _rank(self, m_block, work, problem):
        return turns.rank(
            self._cluster_tile(work.n_block), m_block, tile_n=self.cluster_keys, seqlen_q=work.seqlen_q,
            seqlen_k=work.seqlen_k, mask=self.mask, window_right=problem.window_right,
        )  # fmt: skip

    def _is_adding(self, work, problem):
        """Whether this CTA adds to dQ at all. Without an order, adding zeros does no harm."""
        if not self.deterministic:
            return True
        return turns.is_seen(
            self._cluster_tile(work.n_block), tile_n=self.cluster_keys, seqlen_q=work.seqlen_q,
            seqlen_k=work.seqlen_k, mask=self.mask, window_left=problem.window_left,
            window_right=problem.window_right,
        )  # fmt: skip

    @cute.jit
    def _read_tile(self, shared, tmem, row, quarter):
        """This warp's 32 rows of dQ: the first columns to the staging slots, which are free by now, the rest to
        registers, so that tensor memory is free before anything is added. Returns the registers."""
        pieces = self.head_dim // FRAGMENT
        load, source = correction.row_copies(self._columns_at(tmem, self.tmem.dq, self.head_dim), FRAGMENT, row, False)
        with arch.elect_one():
            arch.cp_async_bulk_wait_group(0, read=True)
        arch.sync_warp()
        values = cute.make_rmem_tensor((FRAGMENT * DQ_SLOTS,), Float32)
        for piece in cutlass.range_constexpr(DQ_SLOTS):
            cute.copy(load, source[None, None, piece], self._piece(values, piece, FRAGMENT))
        arch.fence_view_async_tmem_load()
        for piece in cutlass.range_constexpr(DQ_SLOTS):
            self._stage(shared, values, piece, row, quarter, piece)
        rest = cute.make_rmem_tensor((FRAGMENT * max(pieces - DQ_SLOTS, 1),), Float32)
        for piece in cutlass.range_constexpr(DQ_SLOTS, pieces):
            cute.copy(load, source[None, None, piece], self._piece(rest, piece - DQ_SLOTS, FRAGMENT))
        arch.fence_view_async_tmem_load()
        return rest

    @cute.jit
    def _stage(self, shared, values, piece: cutlass.Constexpr[int], row, quarter, slot: cutlass.Constexpr[int]):
        """32 columns of this warp's rows to one of its staging slots."""
        chunk = cute.make_tensor(values.iterator + piece * FRAGMENT, cute.make_layout(FRAGMENT))
        cute.autovec_copy(chunk, shared.dq[row % FRAGMENT, None, quarter * DQ_SLOTS + slot])
        arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def _add_tile(self, maps, shared, rest, work, step, row, quarter):
        """Adds this warp's rows of dQ to global memory, 32 columns at a time: what is staged, then the rest."""
        target = self._tiles_of(maps.dq_coordinates, (FRAGMENT, FRAGMENT), step.head, work, work.first_row)
        for piece in cutlass.range_constexpr(self.head_dim // FRAGMENT):
            slot = piece % DQ_SLOTS
            if const_expr(piece >= DQ_SLOTS):
                with arch.elect_one():
                    arch.cp_async_bulk_wait_group(DQ_SLOTS - 1, read=True)
                arch.sync_warp()
                self._stage(shared, rest, piece - DQ_SLOTS, row, quarter, slot)
            arch.sync_warp()
            m_tile = step.m_block * WARPS_PER_GROUP + quarter
            source = shared.dq[None, None, quarter * DQ_SLOTS + slot]
            self._store_box(maps.dq, source, target[None, None, m_tile, piece], True)
