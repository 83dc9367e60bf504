"""FlashAttention backward for SM100 and SM103 and head_dim 256: one kernel for each gradient, with pairs of CTAs.

An accumulator of 128 rows takes half of tensor memory, and S and dP the other half, so a CTA has room for one gradient.
Each kernel computes the scores anew: eight products instead of five. In exchange nothing is summed in global memory:
a pair owns 256 rows of its gradient, every tile has its place in the order, and all three are deterministic.

All three are one kernel whose operands differ. A pair owns 256 rows of the scores, 128 a CTA, and walks over tiles of
128 of their columns:
    scores = A B^T    dscores = A' B'^T    gradient += X B"
         rows     A    A'   columns    B    B'    X      B"
    dV   keys     K         queries    Q          P^T    dO
    dK   keys     K    V    queries    Q    dO    dS^T   Q
    dQ   queries  Q    dO   keys       K    V     dS     K
X goes from registers to tensor memory, over the accumulator it was computed from. Operands B of all products go through
one ring of slots in the order in which the products are issued; a CTA loads half of each (64 rows, or 128 columns).

Order of products for tiles t: scores(t + 1), gradient(t), dscores(t + 1): the exponentials of t + 1 run beside
gradient(t). dV has two tiles of scores instead, so that those of t + 1 run beside P of t.

Warps 0 - 7 compute X (a thread owns a row and half of the columns) and store the gradient, 8 issues products (of the
leader, CTA 0), 9 loads operands, 10 the per-query values where queries are the columns.

Packed sequences: a CTA finds the sequence of its rows (scheduling.packed_tiles), and the workspaces have whole tiles of
each (scheduling.padded_tiles). Rows of B operands behind a sequence belong to another, so warp 11 puts zeros in their
place before a product reads them; rows of A operands reach only rows of the gradient that nobody stores.

Barriers that the issuing warp waits for lie in the leader and count both CTAs; its commits arrive in both. Who waits
for whom: `_Gradient._barriers`.
Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2; FlashAttention-4 (arXiv 2603.05451), the pairs of CTAs.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory as mem
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32, const_expr
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.utils import LayoutEnum

from kernels_src.backward.sm100 import (
    COMPUTE_WARPS,
    FRAGMENT,
    HALF,
    LOG2_E,
    TILE_M,
    TILE_N,
    WARPS_PER_GROUP,
    Problem,
    Step,
    Tiles,
    Work,
    _copy_views,
    _retyped,
)
from kernels_src.backward.sm100_2cta import LEADER, PAIR, PAIR_N, BackwardSm100TwoCta, _commit, _rank
from kernels_src.integers import ceil_div, maximum, minimum, select
from kernels_src.masking.block_range import CAUSAL, FULL, LOCAL, block_range
from kernels_src.memory import value_tail
from kernels_src.memory.tmem_layout import TMEM_COLUMNS
from kernels_src.mma.umma import accumulator_at, fence_after_wait, fence_before_arrive, multiply, operand_a_at
from kernels_src.pipelines.barriers import Barrier, allocate, initialise
from kernels_src.pipelines.ring import Cursor
from kernels_src.scheduling import padded_tiles, single_tile, varlen_tiles
from kernels_src.softmax import correction, gradients, score_rows
from kernels_src.softmax.softcap import cap_factor, cap_scores

NUM_THREADS = 384
MMA_WARP, LOAD_WARP, STATISTICS_WARP = 8, 9, 10  # 11 ends the tiles of packed sequences
STATISTICS_SLOTS = 2
LSE, DPSUM = 0, 1  # places in the shared per-query values
SCORES, DSCORES = 0, 1  # places of A and A'
BOTH_WARPS = PAIR * COMPUTE_WARPS
WARP = 32


class Columns(NamedTuple):
    """Columns of tensor memory: tiles of scores, dP, the gradient; num_columns to allocate."""

    scores: int
    dscores: int
    gradient: int
    num_columns: int


def columns_of(score_tiles: int, has_dscores: bool, head_dim: int) -> Columns:
    """Plan the columns of one kernel.

    Args: score_tiles: tiles of 128 columns of scores; has_dscores: whether there is a tile of dP; head_dim: columns of
        the gradient. Raises: ValueError when they do not fit.
    """
    dscores = score_tiles * TILE_M
    gradient = dscores + has_dscores * TILE_M
    used = gradient + head_dim
    if used > TMEM_COLUMNS:
        raise ValueError(f"{score_tiles} tiles of scores and head_dim {head_dim} need {used} tensor-memory columns")
    return Columns(0, dscores, gradient, 1 << (used - 1).bit_length())


class Map(NamedTuple):
    """A tensor map and its coordinate tensor."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor


class Maps(NamedTuple):
    """Of A, B, B", the gradient, A', B'; the last two None in the kernel of dV."""

    a: Map
    b: Map
    b_sum: Map
    gradient: Map
    a_prime: object
    b_prime: object


class Layouts(NamedTuple):
    """Shared-memory layouts: A and A' (of 256 rows, 128 here); B and B' as a slot; B" as a slot; boxes of the gradient,
    each of a warp's 32 rows and 32 columns, over A and A'."""

    own: cute.ComposedLayout
    rows: cute.ComposedLayout
    columns: cute.ComposedLayout
    boxes: cute.ComposedLayout


class Shared(NamedTuple):
    """Shared-memory tensors. statistics: (query, LSE or DPSUM, slot), or None."""

    own: cute.Tensor
    ring: cute.Tensor
    statistics: object


@cute.jit
def _row_probabilities(scores, lse_log2: Float32, negative_scale_log2: Float32):
    """As softmax.gradients.probabilities, of one query: scores = 2^(score * scale_log2 - lse_log2), in place."""
    for i in cutlass.range_constexpr(0, cute.size(scores), 2):
        x0, x1 = arch.fma_packed_f32x2(
            (scores[i], scores[i + 1]), (negative_scale_log2, negative_scale_log2), (lse_log2, lse_log2)
        )
        scores[i] = arch.exp2(-x0)
        scores[i + 1] = arch.exp2(-x1)


@cute.jit
def _row_score_gradients(dprobabilities, weights, dpsum: Float32):
    """As softmax.gradients.score_gradients, of one query: dprobabilities = weights * (dprobabilities - dpsum)."""
    for i in cutlass.range_constexpr(0, cute.size(dprobabilities), 2):
        difference = arch.sub_packed_f32x2((dprobabilities[i], dprobabilities[i + 1]), (dpsum, dpsum))
        dprobabilities[i], dprobabilities[i + 1] = arch.mul_packed_f32x2(difference, (weights[i], weights[i + 1]))


class _Gradient(BackwardSm100TwoCta):
    """One gradient. Subclasses say which operands are what, and where the per-query values lie.

    Of `Work`: n_block is this CTA's tile of 128 rows, head_kv their head, begin .. end the tiles of columns. A Step is
    a tile of columns and its head.
    """

    score_tiles = 1
    has_dscores = True
    columns_are_queries = True
    accumulates_float32 = False  # the type of the gradient: float32, or that of the operands

    def __init__(self, *, slots: int, compute_registers: int, other_registers: int, **arguments):
        self.slots = slots
        super().__init__(
            compute_registers=compute_registers, reduce_registers=0, other_registers=other_registers, **arguments
        )

    def _plan_tmem(self):
        return columns_of(self.score_tiles, self.has_dscores, self.head_dim)

    # ------------------------------------------------------------------------------------------------------------
    # Host

    def _operands(self, q, k, v, dout, dq_accum, dk, dv):
        """(A, A', B, B', B", gradient)."""
        raise NotImplementedError

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
        dk: cute.Tensor,
        dv: cute.Tensor,
        softmax_scale: Float32,
        window_left: Int32,
        window_right: Int32,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        softcap,
        stream,
    ):
        operands = self._operands(q, k, v, dout, dq_accum, dk, dv)
        own = operands[0]
        if const_expr(self.is_packed):
            num_tiles = varlen_tiles.max_tiles(own.shape[0], cu_seqlens_q.shape[0] - 1, PAIR_N) * own.shape[1]
            tiles = Tiles(None, own.shape[1], cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        else:
            num_pairs, divisor = cute.ceil_div(own.shape[1], PAIR_N), cute.FastDivmodDivisorV2
            num_tiles = num_pairs * own.shape[2] * own.shape[0]
            tiles = Tiles(num_n_blocks=divisor(num_pairs), num_heads_kv=divisor(own.shape[2]))
        problem = Problem(
            seqlen_q=None if const_expr(self.is_packed) else q.shape[1],
            seqlen_k=None if const_expr(self.is_packed) else k.shape[1],
            window_left=window_left,
            window_right=window_right,
            scale=softmax_scale,
            heads_per_kv=q.shape[-2] // k.shape[-2],
            softcap=softcap,
            cap_factor=None if const_expr(softcap is None) else cap_factor(softmax_scale, softcap),
        )
        rows = operands[-1] if const_expr(self.is_packed) else None
        self.kernel(self._maps(*operands), dpsum, lse_log2, rows, problem, tiles).launch(
            grid=(num_tiles * PAIR, 1, 1),
            block=(NUM_THREADS, 1, 1),
            cluster=(PAIR, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def _layouts(self) -> Layouts:
        scores, gradient = self._mma_scores(), self._mma_accumulate(self.head_dim)
        scores_mnk, gradient_mnk = (PAIR_N, TILE_M, self.head_dim), (PAIR_N, self.head_dim, TILE_M)
        boxes = WARPS_PER_GROUP * (self.head_dim // FRAGMENT)
        return Layouts(
            own=blackwell.make_smem_layout_a(scores, scores_mnk, self.dtype, 1 + self.has_dscores),
            rows=blackwell.make_smem_layout_b(scores, scores_mnk, self.dtype, self.slots),
            columns=blackwell.make_smem_layout_b(gradient, gradient_mnk, self.dtype, self.slots),
            boxes=blackwell.make_smem_layout_epi(
                self._gradient_type(), LayoutEnum.ROW_MAJOR, (FRAGMENT, FRAGMENT), boxes
            ),
        )

    def _gradient_type(self):
        return Float32 if self.accumulates_float32 else self.dtype

    def _maps(self, a, a_prime, b, b_prime, b_sum, gradient) -> Maps:
        """Tensor maps over (sequence, dim, head, batch); of B" over (dim, sequence, head, batch). Packed sequences:
        without batch, and what warp 11 ends arrives in the CTA itself."""
        layouts, scores = self._layouts(), self._mma_scores()
        scores_mnk, gradient_mnk = (PAIR_N, TILE_M, self.head_dim), (PAIR_N, self.head_dim, TILE_M)
        rows, columns, accumulator_rows = (
            ([0, 2, 1], [2, 0, 1], [1, 2, 0]) if self.is_packed else ([1, 3, 2, 0], [3, 1, 2, 0], [2, 3, 1, 0])
        )
        of_pair = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE) if self.is_packed else of_pair
        cluster = cute.tiled_divide(cute.make_layout((PAIR, 1, 1)), (scores.thr_id.shape,)).shape
        map_a, map_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B

        def reordered(tensor, modes):
            return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))

        def operand(make, tensor, modes, layout, tile, mma):
            if tensor is None:
                return None
            stage, copy = cute.select(layout, mode=[0, 1, 2]), of_pair if make is map_a else load
            return Map(*make(copy, reordered(tensor, modes), stage, tile, mma, cluster))

        box = cute.select(layouts.boxes, mode=[0, 1])
        gradient_rows = accumulator_rows if self.accumulates_float32 else rows
        store = cpasync.CopyBulkTensorTileS2GOp()
        return Maps(
            a=operand(map_a, a, rows, layouts.own, scores_mnk, scores),
            b=operand(map_b, b, rows, layouts.rows, scores_mnk, scores),
            b_sum=operand(map_b, b_sum, columns, layouts.columns, gradient_mnk, self._mma_accumulate(self.head_dim)),
            gradient=Map(
                *cpasync.make_tiled_tma_atom(store, reordered(gradient, gradient_rows), box, (FRAGMENT, FRAGMENT))
            ),
            a_prime=operand(map_a, a_prime, rows, layouts.own, scores_mnk, scores),
            b_prime=operand(map_b, b_prime, rows, layouts.rows, scores_mnk, scores),
        )

    # ------------------------------------------------------------------------------------------------------------
    # Device

    @cute.kernel
    def kernel(self, maps: Maps, dpsum: cute.Tensor, lse_log2: cute.Tensor, rows, problem: Problem, tiles: Tiles):
        smem = mem.SmemAllocator()
        bars = allocate(smem, self._barriers())
        tmem_pointer = smem.allocate_array(Int32, 1)
        shared = self._allocate_tiles(smem)

        warp = arch.make_warp_uniform(arch.warp_idx())
        if warp == MMA_WARP:
            initialise(self._barriers(), bars)
            arch.alloc_tmem(self.tmem.num_columns, tmem_pointer, is_two_cta=True)
        if warp == LOAD_WARP:
            for tensor_map in maps:
                if const_expr(tensor_map is not None):
                    cpasync.prefetch_descriptor(tensor_map.atom)
        fence_before_arrive()
        arch.sync_threads()
        arch.cluster_arrive()
        arch.cluster_wait()
        fence_after_wait()
        tmem = arch.retrieve_tmem_ptr(Float32, 16, tmem_pointer)

        if warp < MMA_WARP:
            arch.setmaxregister_increase(self.registers[0])
            work = self._work(problem, tiles)
            if self._has_steps(work):
                self._compute_role(bars, maps, shared, tmem, dpsum, lse_log2, rows, problem, work)
            if const_expr(self.is_packed and self.columns_are_queries):
                if work.is_valid & (work.num_steps == 0):
                    self._store_nothing(rows, work)
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
                    self._load_role(bars, maps, shared, problem, work)
            elif warp == STATISTICS_WARP:
                if const_expr(self.columns_are_queries):
                    work = self._work(problem, tiles)
                    if self._has_steps(work):
                        self._statistics_role(bars, shared, dpsum, lse_log2, problem, work)
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
        layouts, statistics = self._layouts(), None
        if self.columns_are_queries:
            layout = cute.make_layout((TILE_M, 1 + self.has_dscores, STATISTICS_SLOTS))
            statistics = smem.allocate_tensor(Float32, layout, byte_alignment=16)

        def tile(layout):
            return smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

        return Shared(own=tile(layouts.own), ring=tile(layouts.rows), statistics=statistics)

    def _barriers(self) -> dict[str, Barrier]:
        """Who waits for whom: `full` says that something may be read, `empty` that it may be written again.

        Indexed by the operand, the slot or the tile. Loads announce their bytes: to `ring_landed`, each CTA's own, in
        packed sequences, whose ring_full is then the arrival of warp 11 of both CTAs.
        """
        slots, tiles, dscores = self.slots, self.score_tiles, int(self.has_dscores)
        statistics = STATISTICS_SLOTS * self.columns_are_queries
        return {
            "own_full": Barrier(1 + dscores, 1),  # A and A' are loaded
            "ring_full": Barrier(slots, PAIR if self.is_packed else 1),  # a slot of the ring is loaded
            "ring_empty": Barrier(slots, 1),  # ... and read by its product
            "scores_full": Barrier(tiles, 1),  # the scores are complete
            "scores_done": Barrier(tiles, BOTH_WARPS),  # P is stored over them, or they are in registers
            "gradient_full": Barrier(1, 1),  # the gradient is complete, once
            "dscores_full": Barrier(dscores, 1),  # dP is complete
            "dscores_done": Barrier(dscores, BOTH_WARPS),  # dS is stored over it
            "statistics_full": Barrier(statistics, 1),  # lse_log2 and dpsum of a tile are loaded, each CTA's own
            "statistics_empty": Barrier(statistics, COMPUTE_WARPS),  # ... and read
            "ring_landed": Barrier(slots * self.is_packed, 1),
        }

    def _score_place(self, turn):
        """(tile of scores, parity of its use) of a tile of columns."""
        if self.score_tiles == 1:
            return Int32(0), turn & 1
        return turn & 1, (turn >> 1) & 1

    # --- load -------------------------------------------------------------------------------------------------------

    @cute.jit
    def _load_role(self, bars, maps, shared, problem, work):
        """Warp 9 of either CTA: its halves of everything, in the order of the products."""
        step, at = self._first_step(problem, work), Cursor(Int32(0), Int32(0))
        self._load_own(bars, maps.a, shared, work, SCORES)
        at = self._load_rows(bars, maps.b, shared, step, work, at)
        if const_expr(self.has_dscores):
            self._load_own(bars, maps.a_prime, shared, work, DSCORES)
            at = self._load_rows(bars, maps.b_prime, shared, step, work, at)
        remaining = work.num_steps - 1
        while remaining > 0:
            following = self._next_step(step, work)
            at = self._load_rows(bars, maps.b, shared, following, work, at)
            at = self._load_columns(bars, maps.b_sum, shared, step, work, at)
            if const_expr(self.has_dscores):
                at = self._load_rows(bars, maps.b_prime, shared, following, work, at)
            step = following
            remaining = remaining - 1
        self._load_columns(bars, maps.b_sum, shared, step, work, at)

    def _own_start(self, work):
        """Where the sequence of this pair's rows begins in A; None if dense."""
        return work.first_key

    def _column_start(self, work):
        """The same of the columns, in B."""
        return work.first_query

    def _column_count(self, work):
        """Columns of the sequence."""
        return work.seqlen_q

    @cute.jit
    def _load_own(self, bars, source: Map, shared, work, place: cutlass.Constexpr[int]):
        """This CTA's 128 rows of A or A'."""
        rows = self._row_tiles(source.coordinates, (PAIR_N, self.head_dim), work.head_kv, work, self._own_start(work))
        rows = self._mma_scores().get_slice(_rank()).partition_A(rows)
        target, rows = _copy_views(source.atom, shared.own, rows)
        pair = self._cluster_tile(work.n_block)
        num_bytes = self._bytes(self.head_dim)
        self._load_tile(bars.own_full + place, source.atom, rows[None, pair], target[None, place], num_bytes, False)

    @cute.jit
    def _load_rows(self, bars, source: Map, shared, step, work, at: Cursor) -> Cursor:
        """This CTA's 64 rows of a tile of B or B' into a slot; returns the next slot."""
        rows = self._row_tiles(source.coordinates, (TILE_M, self.head_dim), step.head, work, self._column_start(work))
        rows = self._mma_scores().get_slice(_rank()).partition_B(rows)
        return self._load_slot(bars, source.atom, shared.ring, rows, step, at)

    @cute.jit
    def _load_columns(self, bars, source: Map, shared, step, work, at: Cursor) -> Cursor:
        """This CTA's half of the columns of a tile of B", all 128 rows, in the same way."""
        start = self._column_start(work)
        columns = self._column_tiles(source.coordinates, (self.head_dim, TILE_M), step.head, work, start)
        columns = self._mma_accumulate(self.head_dim).get_slice(_rank()).partition_B(columns)
        slots = _retyped(shared.ring, self._layouts().columns, self.dtype)
        return self._load_slot(bars, source.atom, slots, columns, step, at)

    @cute.jit
    def _load_slot(self, bars, atom, slots, tiles, step, at: Cursor) -> Cursor:
        target, tiles = _copy_views(atom, slots, tiles)
        arch.mbarrier_wait(bars.ring_empty + at.stage, at.phase ^ 1)
        full = bars.ring_landed if const_expr(self.is_packed) else bars.ring_full
        num_bytes = self._bytes(self.head_dim) // PAIR
        self._load_tile(
            full + at.stage, atom, tiles[None, step.m_block], target[None, at.stage], num_bytes, self.is_packed
        )
        return at.next(self.slots)

    @cute.jit
    def _statistics_role(self, bars, shared, dpsum, lse_log2, problem, work):
        """Warp 10 of either CTA: the per-query values of every tile of queries."""
        step, at = self._first_step(problem, work), Cursor(Int32(0), Int32(0))
        vectors = (lse_log2, dpsum) if self.has_dscores else (lse_log2,)
        remaining = work.num_steps
        while remaining > 0:
            full = bars.statistics_full + at.stage
            arch.mbarrier_wait(bars.statistics_empty + at.stage, at.phase ^ 1)
            with arch.elect_one():
                arch.mbarrier_arrive_and_expect_tx(full, len(vectors) * TILE_M * 4)
            for place, vector in enumerate(vectors):
                rows, target = cpasync.group_bulk_copy_modes(
                    cute.local_tile(self._rows_of(vector, step.head, work), (TILE_M,), (step.m_block,)),
                    shared.statistics[None, place, at.stage],
                )
                with arch.elect_one():
                    cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32), rows, target, mbar_ptr=full)
            step, at = self._next_step(step, work), at.next(STATISTICS_SLOTS)
            remaining = remaining - 1

    # --- rows behind a sequence -------------------------------------------------------------------------------------

    @cute.jit
    def _tail_role(self, bars, shared, problem, work):
        """Warp 11 of either CTA, packed sequences only: zeros to rows behind the sequence, in the loads' order."""
        step, at = self._first_step(problem, work), Cursor(Int32(0), Int32(0))
        at = self._end_rows(bars, shared, step, work, at)
        if const_expr(self.has_dscores):
            at = self._end_rows(bars, shared, step, work, at)
        remaining = work.num_steps - 1
        while remaining > 0:
            following = self._next_step(step, work)
            at = self._end_rows(bars, shared, following, work, at)
            at = self._end_columns(bars, shared, step, work, at)
            if const_expr(self.has_dscores):
                at = self._end_rows(bars, shared, following, work, at)
            step = following
            remaining = remaining - 1
        self._end_columns(bars, shared, step, work, at)

    def _end_rows(self, bars, shared, step, work, at: Cursor) -> Cursor:
        """A slot of B or B'."""
        end = self._column_count(work) - step.m_block * TILE_M - _rank() * HALF
        return self._end_slot(bars, shared, end, HALF, self.head_dim, at)

    def _end_columns(self, bars, shared, step, work, at: Cursor) -> Cursor:
        """A slot of B"."""
        end = self._column_count(work) - step.m_block * TILE_M
        return self._end_slot(bars, shared, end, TILE_M, self.head_dim // PAIR, at)

    @cute.jit
    def _end_slot(
        self, bars, shared, end, rows: cutlass.Constexpr[int], columns: cutlass.Constexpr[int], at: Cursor
    ) -> Cursor:
        """Waits for a slot of this CTA, puts zeros in its rows `end` .. and tells the leader; returns the next slot."""
        arch.mbarrier_wait(bars.ring_landed + at.stage, at.phase)
        if end < rows:
            address = shared.ring.iterator.toint() + at.stage * (self._bytes(self.head_dim) // PAIR)
            value_tail.zero_rows(address, maximum(end, 0), arch.lane_idx(), rows, columns, WARP)
            arch.fence_proxy("async.shared", space="cta")
        self._arrive_mma(bars.ring_full + at.stage)
        return at.next(self.slots)

    # --- matrix products --------------------------------------------------------------------------------------------

    @cute.jit
    def _mma_role(self, bars, shared, tmem, work):
        """Warp 8 of the leader: see the order of products above."""
        at, turn, accumulate = Cursor(Int32(0), Int32(0)), Int32(0), cutlass.Boolean(False)
        arch.mbarrier_wait(bars.own_full + SCORES, 0)
        at = self._multiply_scores(bars, shared, tmem, at, turn)
        if const_expr(self.has_dscores):
            arch.mbarrier_wait(bars.own_full + DSCORES, 0)
            at = self._multiply_dscores(bars, shared, tmem, at)
        while turn < work.num_steps - 1:
            if const_expr(self.score_tiles == 1):
                arch.mbarrier_wait(bars.scores_done, turn & 1)
                fence_after_wait()
            at = self._multiply_scores(bars, shared, tmem, at, turn + 1)
            at = self._multiply_gradient(bars, shared, tmem, at, turn, accumulate)
            if const_expr(self.has_dscores):
                at = self._multiply_dscores(bars, shared, tmem, at)
            turn, accumulate = turn + 1, cutlass.Boolean(True)
        self._multiply_gradient(bars, shared, tmem, at, turn, accumulate)
        _commit(bars.gradient_full)

    @cute.jit
    def _multiply_scores(self, bars, shared, tmem, at: Cursor, turn) -> Cursor:
        place, _ = self._score_place(turn)
        self._multiply_rows(bars, shared, tmem, SCORES, at, self.tmem.scores + place * TILE_M)
        _commit(bars.scores_full + place)
        return at.next(self.slots)

    @cute.jit
    def _multiply_dscores(self, bars, shared, tmem, at: Cursor) -> Cursor:
        self._multiply_rows(bars, shared, tmem, DSCORES, at, self.tmem.dscores)
        _commit(bars.dscores_full)
        return at.next(self.slots)

    @cute.jit
    def _multiply_rows(self, bars, shared, tmem, place: cutlass.Constexpr[int], at: Cursor, column):
        """A B^T, or A' B'^T; frees the slot."""
        mma = self._mma_scores()
        own, rows = mma.make_fragment_A(shared.own), mma.make_fragment_B(shared.ring)
        target = accumulator_at(mma, (PAIR_N, TILE_M), tmem, column)
        arch.mbarrier_wait(bars.ring_full + at.stage, at.phase)
        multiply(
            mma, target, own[None, None, None, place], rows[None, None, None, at.stage], 0, self.head_dim // 16, False
        )
        _commit(bars.ring_empty + at.stage)

    @cute.jit
    def _multiply_gradient(self, bars, shared, tmem, at: Cursor, turn, accumulate) -> Cursor:
        """gradient += X B", where each half of X lies at the beginning of its half of the accumulator it came from."""
        mma = self._mma_accumulate(self.head_dim)
        target = accumulator_at(mma, (PAIR_N, self.head_dim), tmem, self.tmem.gradient)
        columns = mma.make_fragment_B(_retyped(shared.ring, self._layouts().columns, self.dtype))
        columns = columns[None, None, None, at.stage]
        arch.mbarrier_wait(bars.ring_full + at.stage, at.phase)
        column = self._wait_weights(bars, turn)
        steps = HALF // 16
        low = operand_a_at(mma, (PAIR_N, TILE_M), tmem, column, self.dtype)
        high = operand_a_at(mma, (PAIR_N, TILE_M), tmem, column + HALF // 2, self.dtype)
        multiply(mma, target, low, columns, 0, steps, accumulate)
        multiply(mma, target, high, columns, steps, 2 * steps, True)
        _commit(bars.ring_empty + at.stage)
        return at.next(self.slots)

    @cute.jit
    def _wait_weights(self, bars, turn):
        """Waits for X of a tile; returns its first column."""
        arch.mbarrier_wait(bars.dscores_done, turn & 1)
        fence_after_wait()
        return self.tmem.dscores

    # --- compute ----------------------------------------------------------------------------------------------------

    @cute.jit
    def _compute_role(self, bars, maps, shared, tmem, dpsum, lse_log2, rows, problem, work):
        """Warps 0 - 7 of either CTA: thread t owns row t of the CTA, warpgroup h columns 64 h .. 64 h + 63."""
        row = arch.thread_idx()[0] % TILE_N
        half = arch.make_warp_uniform(arch.warp_idx() // WARPS_PER_GROUP)
        line = work.n_block * TILE_N + row
        own = self._own_statistics(dpsum, lse_log2, line, work)
        step, at, turn = self._first_step(problem, work), Cursor(Int32(0), Int32(0)), Int32(0)
        while turn < work.num_steps:
            if const_expr(self.columns_are_queries):
                arch.mbarrier_wait(bars.statistics_full + at.stage, at.phase)
            weights = self._weights(bars, shared, tmem, problem, work, step, line, row, half, own, at, turn)
            if const_expr(self.has_dscores):
                self._dscores(bars, shared, tmem, weights, row, half, own, at, turn)
            if const_expr(self.columns_are_queries):
                self._arrive_warp(bars.statistics_empty + at.stage)
            step, at, turn = self._next_step(step, work), at.next(STATISTICS_SLOTS), turn + 1
        arch.mbarrier_wait(bars.gradient_full, 0)
        self._store(maps.gradient, rows, shared, tmem + self.tmem.gradient, problem, work, row, half)
        with arch.elect_one():
            arch.cp_async_bulk_wait_group(0, read=False)

    def _own_statistics(self, dpsum, lse_log2, line, work):
        """(lse_log2, dpsum) of this thread's row, where rows are queries."""
        return None

    @cute.jit
    def _weights(self, bars, shared, tmem, problem, work, step, line, row, half, own, at, turn):
        """What dP - dpsum is multiplied by, in float32: P of this thread, times the derivative of the soft cap."""
        values = self._scores(bars, tmem, problem, work, step, line, row, half, turn)
        if const_expr(problem.softcap is None):
            self._probabilities(values, shared, half * HALF, own, at, problem.scale)
        else:
            for piece in cutlass.range_constexpr(HALF // FRAGMENT):
                mine = cute.make_tensor(values.iterator + piece * FRAGMENT, cute.make_layout(FRAGMENT))
                capped = mine.load()
                self._probabilities(mine, shared, half * HALF + piece * FRAGMENT, own, at, problem.softcap)
                gradients.damp(mine, capped)
        return values

    @cute.jit
    def _scores(self, bars, tmem, problem, work, step, line, row, half, turn):
        """This thread's scores of a tile, capped and masked."""
        place, parity = self._score_place(turn)
        arch.mbarrier_wait(bars.scores_full + place, parity)
        fence_after_wait()
        column = self.tmem.scores + place * TILE_M + half * HALF
        load, source = correction.row_copies(self._columns_at(tmem, column, HALF), FRAGMENT, row, False)
        values = cute.make_rmem_tensor((HALF,), Float32)
        for piece in cutlass.range_constexpr(HALF // FRAGMENT):
            cute.copy(load, source[None, None, piece], self._piece(values, piece, FRAGMENT))
        arch.fence_view_async_tmem_load()
        if const_expr(self.has_dscores):
            fence_before_arrive()
            self._arrive_mma(bars.scores_done + place)
        if const_expr(problem.softcap is not None):
            cap_scores(values, problem.cap_factor)
        if (step.m_block < work.inner_begin) | (step.m_block >= work.inner_end):
            self._mask(values, line, step.m_block * TILE_M + half * HALF, problem, work)
        return values

    @cute.jit
    def _mask(self, values, line, first_query, problem, work):
        """Hides what this thread's key is not seen by; the first of the values belongs to `first_query`."""
        begin, end = self._visible_queries(line, problem, work)
        score_rows.mask_row(values, begin - first_query, end - first_query, True, self.mask == LOCAL)

    def _probabilities(self, values, shared, first, own, at, scale):
        """Scores become probabilities; `first`: column of the first of them in the tile."""
        lse = self._per_query(shared, LSE, first, cute.size(values), at)
        gradients.probabilities(values, lse, -(scale * Float32(LOG2_E)))

    def _score_gradients(self, values, weights, shared, first, own, at):
        """dP becomes dS, in the same way."""
        gradients.score_gradients(values, weights, self._per_query(shared, DPSUM, first, cute.size(values), at))

    def _per_query(self, shared, place: int, first, size: int, at):
        """The per-query values of columns first .. first + size - 1, where first is a multiple of size."""
        return cute.local_tile(shared.statistics[None, place, at.stage], (size,), (first // size,))

    @cute.jit
    def _dscores(self, bars, shared, tmem, weights, row, half, own, at, turn):
        """dP -> dS of one tile, each half at the beginning of its columns."""
        arch.mbarrier_wait(bars.dscores_full, turn & 1)
        fence_after_wait()
        column = self.tmem.dscores + half * HALF
        load, source = correction.row_copies(self._columns_at(tmem, column, HALF), FRAGMENT, row, False)
        for piece in cutlass.range_constexpr(HALF // FRAGMENT):
            values = cute.make_rmem_tensor((FRAGMENT,), Float32)
            cute.copy(load, source[None, None, piece], self._piece(values, 0, FRAGMENT))
            arch.fence_view_async_tmem_load()
            mine = cute.make_tensor(weights.iterator + piece * FRAGMENT, cute.make_layout(FRAGMENT))
            self._score_gradients(values, mine, shared, half * HALF + piece * FRAGMENT, own, at)
            self._store_operand(values, 0, tmem, column + piece * (FRAGMENT // 2), row)
        arch.fence_view_async_tmem_store()
        fence_before_arrive()
        self._arrive_mma(bars.dscores_done)

    @cute.jit
    def _store(self, gradient: Map, rows, shared, accumulator, problem, work, row, half):
        """The gradient of this warp's rows, times `_factor`. rows: its tensor, of packed sequences."""
        staging = _retyped(shared.own, self._layouts().boxes, self.dtype)
        self._store_gradient(
            rows, gradient.atom, gradient.coordinates, staging, accumulator, self.head_dim, self._factor(problem), work,
            row, half,
        )  # fmt: skip

    def _factor(self, problem):
        return Float32(1.0)

    @cute.jit
    def _store_nothing(self, rows, work):
        """Zeros: the gradient of keys whose sequence has no queries."""
        row = arch.thread_idx()[0] % TILE_N
        half = arch.make_warp_uniform(arch.warp_idx() // WARPS_PER_GROUP)
        zeros = cute.make_rmem_tensor((FRAGMENT,), self.dtype)
        zeros.fill(0)
        for turn in cutlass.range_constexpr(self.head_dim // (2 * FRAGMENT)):
            self._store_row(rows, zeros, turn * 2 + half, work, row)


class _Dv(_Gradient):
    """dV = P^T dO. Two tiles of scores."""

    score_tiles = 2
    has_dscores = False

    def _operands(self, q, k, v, dout, dq_accum, dk, dv):
        return k, None, q, None, dout, dv

    @cute.jit
    def _weights(self, bars, shared, tmem, problem, work, step, line, row, half, own, at, turn):
        """P of one tile to tensor memory, each half at the beginning of its columns."""
        place, _ = self._score_place(turn)
        values = self._scores(bars, tmem, problem, work, step, line, row, half, turn)
        scale = problem.scale if const_expr(problem.softcap is None) else problem.softcap
        self._probabilities(values, shared, half * HALF, own, at, scale)
        column = self.tmem.scores + place * TILE_M + half * HALF
        for piece in cutlass.range_constexpr(HALF // FRAGMENT):
            self._store_operand(values, piece, tmem, column, row)
        arch.fence_view_async_tmem_store()
        fence_before_arrive()
        self._arrive_mma(bars.scores_done + place)
        return values

    @cute.jit
    def _wait_weights(self, bars, turn):
        place, parity = self._score_place(turn)
        arch.mbarrier_wait(bars.scores_done + place, parity)
        fence_after_wait()
        return self.tmem.scores + place * TILE_M


class _Dk(_Gradient):
    """dK = dS^T Q."""

    def _operands(self, q, k, v, dout, dq_accum, dk, dv):
        return k, v, q, dout, q, dk

    def _factor(self, problem):
        return problem.scale


class _Dq(_Gradient):
    """dQ = dS K: rows are queries, columns are keys. In float32 and without the scale, as postprocess wants it."""

    columns_are_queries = False
    accumulates_float32 = True

    def _operands(self, q, k, v, dout, dq_accum, dk, dv):
        return q, dout, k, v, k, dq_accum

    @cute.jit
    def _work(self, problem: Problem, tiles: Tiles) -> Work:
        """The tile of queries of this CTA. Under a causal mask the last ones, which see most keys, start first."""
        if const_expr(self.is_packed):
            return self._packed_work(problem, tiles)
        tile = single_tile.tile_at(self._cluster(), tiles.num_n_blocks, tiles.num_heads_kv)
        pair = tile.m_block
        if const_expr(self.mask != FULL):
            pair = tiles.num_n_blocks.divisor - 1 - pair
        return self._visits(problem, pair, tile.head, tile.batch, problem.seqlen_q, problem.seqlen_k)

    @cute.jit
    def _packed_work(self, problem: Problem, tiles: Tiles) -> Work:
        """The same among packed sequences. Without keys there is nothing to do: preprocess has left zeros."""
        is_valid, sequence, rest = varlen_tiles.find_sequence(
            self._cluster(), tiles.cu_seqlens_q, tiles.seqused_q, tiles.cu_seqlens_q.shape[0] - 1, 1,
            tiles.num_heads_kv, PAIR_N,
        )  # fmt: skip
        seqlen_q = varlen_tiles.sequence_length(tiles.cu_seqlens_q, tiles.seqused_q, sequence)
        seqlen_k = varlen_tiles.sequence_length(tiles.cu_seqlens_k, tiles.seqused_k, sequence)
        num_pairs = maximum(ceil_div(seqlen_q, PAIR_N), 1)
        head = rest // num_pairs
        pair = rest - head * num_pairs
        if const_expr(self.mask != FULL):
            pair = num_pairs - 1 - pair
        first_query = tiles.cu_seqlens_q[sequence]
        work = self._visits(problem, pair, head, Int32(0), seqlen_q, maximum(seqlen_k, 1))
        return work._replace(
            num_steps=select(is_valid & (seqlen_k > 0), work.num_steps, 0),
            seqlen_k=seqlen_k,
            first_query=first_query,
            first_key=tiles.cu_seqlens_k[sequence],
            first_row=padded_tiles.first_tile(first_query, sequence) * padded_tiles.TILE,
            is_valid=is_valid,
        )

    @cute.jit
    def _visits(self, problem: Problem, pair, head, batch, seqlen_q, seqlen_k) -> Work:
        """The work of 256 queries."""
        blocks = block_range(
            pair, tile_m=PAIR_N, tile_n=TILE_N, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=self.mask,
            window_left=problem.window_left, window_right=problem.window_right,
        )  # fmt: skip
        begin, end = Int32(blocks.begin), Int32(blocks.end)
        return Work(
            n_block=self._tile_of(pair), head_kv=head, batch=batch, begin=begin,
            inner_begin=Int32(blocks.inner_begin), inner_end=Int32(blocks.inner_end), end=end, num_steps=end - begin,
            seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        )  # fmt: skip

    def _own_start(self, work):
        return work.first_query

    def _column_start(self, work):
        return work.first_key

    def _column_count(self, work):
        return work.seqlen_k

    def _first_step(self, problem: Problem, work: Work) -> Step:
        return Step(work.head_kv // problem.heads_per_kv, work.begin)

    @cute.jit
    def _own_statistics(self, dpsum, lse_log2, line, work):
        """Of a row beyond the sequence: what makes its P and dS zero."""
        place = minimum(line, work.seqlen_q - 1)
        is_query = line < work.seqlen_q
        lse, total = (self._rows_of(vector, work.head_kv, work)[place] for vector in (lse_log2, dpsum))
        return lse if is_query else Float32.inf, total if is_query else Float32(0.0)

    @cute.jit
    def _mask(self, values, line, first_key, problem, work):
        """Hides the keys that this thread's query does not see, and those beyond the sequence."""
        begin, end = Int32(0), work.seqlen_k
        diagonal = line + (work.seqlen_k - work.seqlen_q)
        if const_expr(self.mask == CAUSAL):
            end = minimum(end, diagonal + 1)
        if const_expr(self.mask == LOCAL):
            begin, end = diagonal - problem.window_left, minimum(end, diagonal + problem.window_right + 1)
        score_rows.mask_row(values, begin - first_key, end - first_key, self.mask == LOCAL, True)

    def _probabilities(self, values, shared, first, own, at, scale):
        _row_probabilities(values, own[LSE], -(scale * Float32(LOG2_E)))

    def _score_gradients(self, values, weights, shared, first, own, at):
        _row_score_gradients(values, weights, own[DPSUM])

    @cute.jit
    def _store(self, gradient: Map, rows, shared, accumulator, problem, work, row, half):
        """Every second 32 columns of this warp's 32 queries; boxes of both warpgroups fill what held Q and dO. The
        tensor map clips tiles beyond the workspace; those of packed sequences end inside it."""
        fence_after_wait()
        quarter = arch.make_warp_uniform(row // FRAGMENT)
        staging = _retyped(shared.own, self._layouts().boxes, Float32)
        target = self._tiles_of(gradient.coordinates, (FRAGMENT, FRAGMENT), work.head_kv, work, work.first_row)
        m_tile = work.n_block * WARPS_PER_GROUP + quarter
        for turn in cutlass.range_constexpr(self.head_dim // (2 * FRAGMENT)):
            fragment = turn * 2 + half
            box = fragment * WARPS_PER_GROUP + quarter
            columns = self._columns_at(accumulator, fragment * FRAGMENT, FRAGMENT)
            load, source = correction.row_copies(columns, FRAGMENT, row, False)
            values = cute.make_rmem_tensor((FRAGMENT,), Float32)
            cute.copy(load, source[None, None, 0], self._piece(values, 0, FRAGMENT))
            arch.fence_view_async_tmem_load()
            if const_expr(self.is_packed):
                self._end_row(values, work.n_block * TILE_N + row < work.seqlen_q)
            cute.autovec_copy(values, staging[row % FRAGMENT, None, box])
            arch.fence_proxy("async.shared", space="cta")
            arch.sync_warp()
            if (not self.is_packed) | (m_tile * FRAGMENT < work.seqlen_q):
                self._store_box(gradient.atom, staging[None, None, box], target[None, None, m_tile, fragment], False)

    @cute.jit
    def _end_row(self, values, is_query):
        """Zeros in place of a row behind the sequence, which may hold anything."""
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = values[i] if is_query else Float32(0.0)


class BackwardSm100InThree:
    """Backward attention for head_dim 256, one specialization; calling it is the host function `bwd` of
    docs/formats.md. The order of dQ's sum is always fixed, and its semaphores are not used.

    Args:
        symbol: prefix of the device entries.
        dtype: cutlass.BFloat16 or cutlass.Float16, of all tensors but the float32 workspaces.
        head_dim, head_dim_v: 256.
        mask: "full", "causal" or "local".
        slots: of 128 x 128 elements, in the ring of operands of the kernels of dK and dQ; dv_slots: in that of dV.
        layout: "dense", or "varlen" for packed sequences.
        compute_registers, other_registers: a thread, multiples of 8.
    """

    def __init__(self, *, slots: int, dv_slots: int, **arguments):
        self.parts = (_Dv(slots=dv_slots, **arguments), _Dk(slots=slots, **arguments), _Dq(slots=slots, **arguments))

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
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=None,
        softcap=None,
        stream,
    ):
        for part in self.parts:
            part(
                q=q,
                k=k,
                v=v,
                dout=dout,
                dpsum=dpsum,
                lse_log2=lse_log2,
                dq_accum=dq_accum,
                dk=dk,
                dv=dv,
                softmax_scale=softmax_scale,
                window_left=window_left,
                window_right=window_right,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
                seqused_q=seqused_q,
                seqused_k=seqused_k,
                softcap=softcap,
                stream=stream,
            )
