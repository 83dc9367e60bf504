"""Attention backward (the main kernel) for sm_90a (Hopper): wires the building blocks together, nothing else.

One CTA owns 128 keys of one key head and computes their dK and dV, 64 keys in the registers of each consumer
warpgroup; so several query heads of a key head need no further reduction. A copy warp streams tiles of Q and dO with
their row statistics. Scores are recomputed transposed, S^T = K Q^T, so that P^T and dS^T come out as operands of
dV += P^T dO and dK += dS^T Q. dQ sums over keys, that is over CTAs: two storing warps, one for each consumer, add its
tiles to a float32 accumulator in global memory.
Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2; FlashAttention-3 (arXiv 2407.08608) for the roles on Hopper.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from kernels_src.integers import ceil_div, maximum, select
from kernels_src.masking.accumulator_mask import mask_columns
from kernels_src.masking.block_range import CAUSAL, FULL, LOCAL
from kernels_src.masking.query_range import query_range
from kernels_src.memory import epilogue_store, row_load, tile_reduce, tma_load, value_tail
from kernels_src.mma import gradients, wgmma
from kernels_src.pipelines import named_barriers
from kernels_src.pipelines.arrive_counts import backward_arrive_counts
from kernels_src.pipelines.ring import Cursor, release, wait_empty, wait_full
from kernels_src.scheduling import padded_tiles, turns, varlen_tiles
from kernels_src.scheduling.work_tile import decode_head
from kernels_src.softmax import recomputed
from kernels_src.softmax.online_softmax import LOG2_E
from kernels_src.softmax.softcap import cap_factor, cap_scores
from kernels_src.warp_roles import ROWS_PER_WARPGROUP, THREADS_PER_WARPGROUP, WarpRoles

CONSUMERS = 2
TILE_N = CONSUMERS * ROWS_PER_WARPGROUP
COPY_WARP, FIRST_STORING_WARP = 0, 1
WHOLE, ONLY_DV, ALL_BUT_DV = "whole", "only_dv", "all_but_dv"
TAIL_WARP = 3
DENSE, VARLEN = "dense", "varlen"
PIECE = 8  # elements of a 16-byte store
NOTHING, ZEROS, WORK = 0, 1, 2
NEVER = 1 << 30
WIDEST_BESIDE_CAP = 192  # columns of dK beside which registers suffice for dP, dQ and what a soft cap needs


class Problem(NamedTuple):
    """What every role reads of a launch. softcap_log2, cap_factor: None without a soft cap. lengths: (cu_seqlens_q,
    cu_seqlens_k, seqused_q, seqused_k) of packed sequences, whose own lengths a Tile has; else None."""

    softmax_scale: object
    window_left: object
    window_right: object
    seqlen_q: object
    seqlen_k: object
    group_size: object
    num_n_blocks: object
    by_n_blocks: object
    by_heads: object
    softcap_log2: object
    cap_factor: object
    num_heads_kv: object
    lengths: object


class Tile(NamedTuple):
    """The work of a CTA. The last four of packed sequences only: where the sequence starts in q, in k and in the
    workspaces; state: NOTHING, ZEROS (keys without queries) or WORK.
    """

    n_block: object
    kv_head: object
    batch: object
    seqlen_q: object
    seqlen_k: object
    first_query: object = None
    first_key: object = None
    first_row: object = None
    state: object = None


class Shared(NamedTuple):
    """Shared memory: rings of Q and dO, one-stage rings of K and V, row statistics by stage, dS and dQ tiles."""

    queries: object
    douts: object
    keys: object
    values: object
    lse: object
    dpsum: object
    dscores: object
    dq: object
    notice: object


class TileRing(NamedTuple):
    """As pipelines.ring.Ring. landed: what the copy engine completes. Packed sequences: the warp that ends tiles then
    completes `full`; else it is the same.
    """

    tiles: object
    full: object
    empty: object
    landed: object


class Consumer(NamedTuple):
    """What a consumer warpgroup holds: matrix instructions, shared operands, registers."""

    group: object
    thread: object
    first_scores_mma: object
    scores_mma: object
    dv_mma: object
    dk_mma: object
    first_dq_mma: object
    dq_mma: object
    keys: object
    values: object
    queries: object
    douts: object
    queries_columns: object
    douts_columns: object
    dscores_columns: object
    dscores_rows: object
    keys_columns: object
    scores: object
    dscores: object
    probabilities_operand: object
    dscores_operand: object
    dk: object
    dv: object
    dq: object
    scale_log2: object
    cap_factor: object


class At(NamedTuple):
    """Where a consumer is: cursors of Q and dO, the stage of dS, and whether a product for dK is running."""

    query: object
    dout: object
    dscores: object
    is_running: object


class BackwardSm90:
    """Backward attention, one specialization; calling it is the host function `bwd` of docs/formats.md section 1.

    Args:
        symbol: prefix of the device entry, which is `<symbol>_0`.
        dtype: cutlass.BFloat16 or cutlass.Float16, of q, k, v, dout, dk and dv.
        head_dim, head_dim_v: multiples of 32, at most 256.
        mask: "full", "causal" or "local".
        deterministic: dQ is summed in a fixed order.
        layout: "dense", or "varlen" for packed sequences.
        tile_m: query rows of a tile, 64 or 128. 64: the consumers split the columns of dQ, else its rows.
        q_stages, dout_stages: tiles of Q and of dO in flight. dscores_stages: 1 or 2; with 1 the consumers meet twice a
            tile.
        dscores_by_keys: dS lies in shared memory contiguous along keys, over which dQ sums, else along queries.
        overlaps_dk: the product for dK reads dS from shared memory and is waited for in the next step; else it reads
            registers, too few to hold them that long, and is waited for at once.
        dq_chunk: columns of dQ that a consumer hands over at a time, a multiple of 32 that divides its share; 0: all.
        part: "whole"; or "only_dv" and "all_but_dv", two kernels for head dims whose dK and dV do not fit in registers
            together. Both recompute the scores, so five products a tile become six.
        consumer_registers, producer_registers: see warp_roles.
    Raises: ValueError for a combination that cannot run.
    """

    def __init__(
        self,
        *,
        symbol: str,
        dtype,
        head_dim: int,
        head_dim_v: int,
        mask: str,
        deterministic: bool,
        tile_m: int,
        q_stages: int,
        dout_stages: int,
        dscores_stages: int,
        dscores_by_keys: bool = False,
        overlaps_dk: bool = False,
        dq_chunk: int = 0,
        part: str = WHOLE,
        consumer_registers: int = 240,
        producer_registers: int = 24,
        layout: str = DENSE,
    ):
        self.dtype, self.head_dim, self.head_dim_v, self.mask = dtype, head_dim, head_dim_v, mask
        self.deterministic, self.is_packed = deterministic, layout == VARLEN
        self.tile_m, self.q_stages, self.dout_stages = tile_m, q_stages, dout_stages
        self.dscores_stages, self.dscores_by_keys = dscores_stages, dscores_by_keys
        self.overlaps_dk = overlaps_dk
        self.splits_dq_columns = tile_m == ROWS_PER_WARPGROUP
        self.part, self.has_dv, self.has_dk = part, part != ALL_BUT_DV, part != ONLY_DV
        self.key_parts = CONSUMERS if self.splits_dq_columns and self.has_dk else 1
        self.dq_columns = head_dim // CONSUMERS if self.splits_dq_columns else head_dim
        self.dq_chunk = dq_chunk or self.dq_columns
        self.roles = WarpRoles(CONSUMERS, consumer_registers, producer_registers)
        self.counts = backward_arrive_counts(CONSUMERS)
        _check(self)
        self.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)

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
        """Launches the kernel. Arguments: docs/formats.md section 1."""
        by_row, by_head, per_row = (1, 3, 2, 0), (2, 3, 1, 0), (2, 1, 0)
        if const_expr(self.is_packed):
            by_row, by_head, per_row = (0, 2, 1), (1, 2, 0), (1, 0)
        q_rows, k_rows, v_rows, dout_rows, dk_rows, dv_rows = (_permuted(t, by_row) for t in (q, k, v, dout, dk, dv))
        dq_rows = _permuted(dq_accum, by_head)
        lse_rows, dpsum_rows, semaphores = (_permuted(t, per_row) for t in (lse_log2, dpsum, dq_semaphore))
        d, dv_columns = self.head_dim, self.head_dim_v
        q_layout, dout_layout, k_layout, v_layout = (
            cute.select(gradients.rows_layout(self.dtype, rows, columns, 1, parts), mode=[0, 1])
            for rows, columns, parts in (
                (self.tile_m, d, 1),
                (self.tile_m, dv_columns, 1),
                (TILE_N, d, self.key_parts),
                (TILE_N, dv_columns, 1),
            )
        )
        loads = (
            *tma_load.make_tile_load(q_rows, q_layout, (self.tile_m, d)),
            *tma_load.make_tile_load(dout_rows, dout_layout, (self.tile_m, dv_columns)),
            *tma_load.make_tile_load(k_rows, k_layout, (TILE_N, d)),
            *tma_load.make_tile_load(v_rows, v_layout, (TILE_N, dv_columns)),
        )
        stores = (
            *epilogue_store.make_tile_store(dk_rows, k_layout, (TILE_N, d)),
            *epilogue_store.make_tile_store(dv_rows, v_layout, (TILE_N, dv_columns)),
            *tile_reduce.make_tile_reduce(dq_rows, cute.select(self._dq_layout(), mode=[0, 1]), self._dq_tile()),
        )
        num_heads_kv, lengths = k.shape[-2], None
        if const_expr(self.is_packed):
            lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
            num_n_blocks = varlen_tiles.max_tiles(k.shape[0], cu_seqlens_k.shape[0] - 1, TILE_N)
            num_tiles = num_n_blocks * num_heads_kv
        else:
            num_n_blocks = cute.ceil_div(k.shape[1], TILE_N)
            num_tiles = num_n_blocks * num_heads_kv * k.shape[0]
        problem = Problem(
            softmax_scale=softmax_scale,
            softcap_log2=None if const_expr(softcap is None) else softcap * LOG2_E,
            cap_factor=None if const_expr(softcap is None) else cap_factor(softmax_scale, softcap),
            window_left=window_left,
            window_right=window_right,
            seqlen_q=None if const_expr(self.is_packed) else q.shape[1],
            seqlen_k=None if const_expr(self.is_packed) else k.shape[1],
            group_size=q.shape[-2] // num_heads_kv,
            num_n_blocks=None if const_expr(self.is_packed) else num_n_blocks,
            by_n_blocks=None if const_expr(self.is_packed) else cute.FastDivmodDivisorV2(num_n_blocks),
            by_heads=None if const_expr(self.is_packed) else cute.FastDivmodDivisorV2(num_heads_kv),
            num_heads_kv=num_heads_kv if const_expr(self.is_packed) else None,
            lengths=lengths,
        )
        rows = (dk_rows, dv_rows) if const_expr(self.is_packed) else None
        self.kernel(*loads, *stores, lse_rows, dpsum_rows, semaphores, rows, problem).launch(
            grid=(num_tiles, 1, 1),
            block=(self.roles.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def _dq_tile(self) -> tuple[int, int]:
        """Rows and columns of dQ that one consumer hands over at a time."""
        return ROWS_PER_WARPGROUP, self.dq_chunk

    def _dq_layout(self):
        return hopper.make_smem_layout_epi(Float32, LayoutEnum.ROW_MAJOR, self._dq_tile(), CONSUMERS)

    @cute.kernel
    def kernel(
        self,
        load_q: cute.CopyAtom,
        q: cute.Tensor,
        load_dout: cute.CopyAtom,
        dout: cute.Tensor,
        load_k: cute.CopyAtom,
        k: cute.Tensor,
        load_v: cute.CopyAtom,
        v: cute.Tensor,
        store_dk: cute.CopyAtom,
        dk: cute.Tensor,
        store_dv: cute.CopyAtom,
        dv: cute.Tensor,
        reduce_dq: cute.CopyAtom,
        dq: cute.Tensor,
        lse: cute.Tensor,
        dpsum: cute.Tensor,
        semaphores: cute.Tensor,
        rows,
        problem: Problem,
    ):
        """Device entry: sets up shared memory and barriers, then every warp takes its role."""
        warp = arch.warp_idx()
        shared = self._allocate_shared()
        if const_expr(self.is_packed):
            if warp == COPY_WARP:
                self._post_tile(shared.notice, problem)
        if warp == 0:
            for atom in (load_q, load_dout, load_k, load_v, store_dk, store_dv, reduce_dq):
                cpasync.prefetch_descriptor(atom)
            with arch.elect_one():
                for ring, stages in (
                    (shared.queries, self.q_stages),
                    (shared.douts, self.dout_stages),
                    (shared.keys, 1),
                    (shared.values, 1 if self.has_dk else 0),
                ):
                    if const_expr(self.is_packed):
                        for stage in cutlass.range_constexpr(stages):
                            arch.mbarrier_init(ring.landed + stage, self.counts.tile_full)
                    for stage in cutlass.range_constexpr(stages):
                        arch.mbarrier_init(ring.full + stage, self.counts.tile_full)
                        arch.mbarrier_init(ring.empty + stage, self.counts.tile_empty)
        arch.mbarrier_init_fence()
        arch.sync_threads()
        group = arch.make_warp_uniform(warp // 4)
        tile = self._posted_tile(shared.notice) if const_expr(self.is_packed) else self._tile(problem)
        if group == 0:
            arch.setmaxregister_decrease(self.roles.producer_registers)
            if self._is_working(tile):
                if warp == COPY_WARP:
                    self._load_tiles(
                        load_q, q, load_dout, dout, load_k, k, load_v, v, lse, dpsum, shared, tile, problem
                    )
                elif const_expr(self.has_dk):
                    if warp < FIRST_STORING_WARP + CONSUMERS:
                        self._add_query_gradients(
                            reduce_dq, dq, semaphores, shared, tile, problem, warp - FIRST_STORING_WARP
                        )
                if const_expr(self.is_packed):
                    if warp == TAIL_WARP:
                        self._end_tiles(shared, tile, problem)
        else:
            arch.setmaxregister_increase(self.roles.consumer_registers)
            if self._is_working(tile):
                self._compute(store_dk, dk, store_dv, dv, rows, shared, tile, problem, group - 1)
            if const_expr(self.is_packed):
                if tile.state == ZEROS:
                    self._write_zeros(rows, tile)

    def _is_working(self, tile: Tile):
        """Dense CTAs always are."""
        return tile.state == WORK if self.is_packed else True

    def _allocate_shared(self) -> Shared:
        shared = memory.SmemAllocator()
        kinds = 3 if self.is_packed else 2
        barriers = shared.allocate_array(Int64, kinds * (self.q_stages + self.dout_stages + 2))
        notice = shared.allocate_array(Int32, len(Tile._fields)) if self.is_packed else None
        rings = []
        for rows, columns, stages, parts in (
            (self.tile_m, self.head_dim, self.q_stages, 1),
            (self.tile_m, self.head_dim_v, self.dout_stages, 1),
            (TILE_N, self.head_dim, 1, self.key_parts),
            (TILE_N, self.head_dim_v, 1 if self.has_dk else 0, 1),
        ):
            tiles = None
            if const_expr(stages > 0):
                layout = gradients.rows_layout(self.dtype, rows, columns, stages, parts)
                tiles = _allocate(shared, self.dtype, layout)
            rings.append(self._ring(tiles, barriers, stages))
            barriers = barriers + kinds * stages
        statistics = []
        for stages in (self.q_stages, self.dout_stages):
            layout = cute.make_layout((self.tile_m, stages))
            statistics.append(shared.allocate_tensor(Float32, layout, byte_alignment=128))
        if const_expr(not self.has_dk):
            return Shared(*rings, *statistics, None, None, notice)
        shape = (self.tile_m, TILE_N) if self.dscores_by_keys else (TILE_N, self.tile_m)
        dscores = _allocate(shared, self.dtype, gradients.rows_layout(self.dtype, *shape, self.dscores_stages))
        return Shared(*rings, *statistics, dscores, _allocate(shared, Float32, self._dq_layout()), notice)

    def _ring(self, tiles, barriers, stages: int):
        landed = barriers + 2 * stages if self.is_packed else barriers
        return TileRing(tiles, barriers, barriers + stages, landed)

    def _tile(self, problem: Problem) -> Tile:
        head_batch, n_block = divmod(arch.block_idx()[0], problem.by_n_blocks)
        if self.deterministic and turns.starts_with_last_keys(self.mask):
            n_block = problem.num_n_blocks - 1 - n_block
        kv_head, batch = decode_head(head_batch, problem.by_heads)
        return Tile(n_block, kv_head, batch, problem.seqlen_q, problem.seqlen_k)

    @cute.jit
    def _post_tile(self, notice, problem: Problem):
        """Finds the tile of this CTA among packed sequences, and leaves it in shared memory: the roles have too few
        registers to search. Tiles of keys of a head are neighbours."""
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = problem.lengths
        is_valid, sequence, rest = varlen_tiles.find_sequence(
            arch.block_idx()[0], cu_seqlens_k, seqused_k, cu_seqlens_k.shape[0] - 1, 1, problem.num_heads_kv, TILE_N
        )
        seqlen_q = varlen_tiles.sequence_length(cu_seqlens_q, seqused_q, sequence)
        seqlen_k = varlen_tiles.sequence_length(cu_seqlens_k, seqused_k, sequence)
        num_n_blocks = maximum(ceil_div(seqlen_k, TILE_N), 1)
        kv_head = rest // num_n_blocks
        n_block = rest - kv_head * num_n_blocks
        if const_expr(self.deterministic and turns.starts_with_last_keys(self.mask)):
            n_block = num_n_blocks - 1 - n_block
        first_query = cu_seqlens_q[sequence]
        first_row = padded_tiles.first_tile(first_query, sequence) * padded_tiles.TILE
        state = select(is_valid, select(seqlen_q > 0, WORK, ZEROS), NOTHING)
        values = (n_block, kv_head, 0, seqlen_q, seqlen_k, first_query, cu_seqlens_k[sequence], first_row, state)
        with arch.elect_one():
            for i in cutlass.range_constexpr(len(values)):
                notice[i] = Int32(values[i])

    def _posted_tile(self, notice) -> Tile:
        return Tile(*[arch.make_warp_uniform(notice[i]) for i in range(len(Tile._fields))])

    def _range(self, tile: Tile, problem: Problem):
        return query_range(
            tile.n_block,
            tile_m=self.tile_m,
            tile_n=TILE_N,
            seqlen_q=tile.seqlen_q,
            seqlen_k=tile.seqlen_k,
            mask=self.mask,
            window_left=problem.window_left,
            window_right=problem.window_right,
        )

    def _rows_of(self, tensor, head, tile: Tile, first_row):
        """Rows and columns of one head of a sequence, which starts at `first_row` of packed ones."""
        if self.is_packed:
            return cute.domain_offset((first_row, 0), tensor[None, None, head])
        return tensor[None, None, head, tile.batch]

    def _per_row(self, statistics, head, tile: Tile):
        if self.is_packed:
            return cute.domain_offset((tile.first_row,), statistics[None, head])
        return statistics[None, head, tile.batch]

    def _bytes(self, rows: int, columns: int) -> int:
        return rows * columns * self.dtype.width // 8

    # --- copy warp ----------------------------------------------------------------------------------------------------

    @cute.jit
    def _load_tiles(self, load_q, q, load_dout, dout, load_k, k, load_v, v, lse, dpsum, shared, tile, problem):
        """Loads K and V once, then streams Q with its LSE and dO with its row sums as far ahead as the rings allow."""
        tiles = self._range(tile, problem)
        k_tiles = cute.local_tile(
            self._rows_of(k, tile.kv_head, tile, tile.first_key), (TILE_N, self.head_dim), (None, 0)
        )
        v_tiles = cute.local_tile(
            self._rows_of(v, tile.kv_head, tile, tile.first_key), (TILE_N, self.head_dim_v), (None, 0)
        )
        self._load_once(load_k, k_tiles, shared.keys, tile.n_block, self.head_dim)
        q_at, dout_at = Cursor(Int32(0), Int32(0)), Cursor(Int32(0), Int32(0))
        for member in cutlass.range(problem.group_size, unroll=1):
            head = tile.kv_head * problem.group_size + member
            q_tiles = cute.local_tile(
                self._rows_of(q, head, tile, tile.first_query), (self.tile_m, self.head_dim), (None, 0)
            )
            dout_tiles = cute.local_tile(
                self._rows_of(dout, head, tile, tile.first_query), (self.tile_m, self.head_dim_v), (None, 0)
            )
            q_to, q_from = tma_load.partition_load(load_q, shared.queries.tiles, q_tiles)
            dout_to, dout_from = tma_load.partition_load(load_dout, shared.douts.tiles, dout_tiles)
            lse_tiles = cute.local_tile(self._per_row(lse, head, tile), (self.tile_m,), (None,))
            dpsum_tiles = cute.local_tile(self._per_row(dpsum, head, tile), (self.tile_m,), (None,))
            for i in cutlass.range(tiles.end - tiles.begin, unroll=1):
                m_block = tiles.begin + i
                q_at = self._load_block(
                    load_q, q_from, q_to, lse_tiles, shared.lse, shared.queries, q_at, m_block, self.q_stages
                )
                if const_expr(not self.has_dk):
                    pass
                elif (member == 0) & (i == 0):
                    self._load_once(load_v, v_tiles, shared.values, tile.n_block, self.head_dim_v)
                dout_at = self._load_block(
                    load_dout,
                    dout_from,
                    dout_to,
                    dpsum_tiles,
                    shared.dpsum,
                    shared.douts,
                    dout_at,
                    m_block,
                    self.dout_stages,
                )

    @cute.jit
    def _load_once(self, atom, tiles, ring: TileRing, block, columns: cutlass.Constexpr[int]):
        to, source = tma_load.partition_load(atom, ring.tiles, tiles)
        tma_load.expect_bytes(ring.landed, self._bytes(TILE_N, columns))
        tma_load.start_load(atom, source[None, block], to[None, 0], ring.landed)

    def _load_block(self, atom, source, to, statistics, statistics_to, ring: TileRing, at: Cursor, block, stages: int):
        """Fills the next stage of a ring with one tile and its row statistics; returns the cursor after it."""
        wait_empty(ring, at)
        columns = cute.size(ring.tiles, mode=[1])
        num_bytes = self._bytes(self.tile_m, columns) + self.tile_m * Float32.width // 8
        landed = ring.landed + at.stage
        tma_load.expect_bytes(landed, num_bytes)
        tma_load.start_load(atom, source[None, block], to[None, at.stage], landed)
        row_load.start_row_load(statistics[None, block], statistics_to[None, at.stage], landed)
        return at.next(stages)

    # --- rows behind a sequence ---------------------------------------------------------------------------------------

    @cute.jit
    def _end_tiles(self, shared: Shared, tile: Tile, problem: Problem):
        """Zeros to rows of K, Q, V and dO behind the sequence, which belong to another, in the order of the loads."""
        tiles = self._range(tile, problem)
        keys = tile.seqlen_k - tile.n_block * TILE_N
        self._end_tile(shared.keys, Cursor(Int32(0), Int32(0)), keys, TILE_N, self.head_dim, self.key_parts)
        q_at, dout_at = Cursor(Int32(0), Int32(0)), Cursor(Int32(0), Int32(0))
        for member in cutlass.range(problem.group_size, unroll=1):
            for i in cutlass.range(tiles.end - tiles.begin, unroll=1):
                queries = tile.seqlen_q - (tiles.begin + i) * self.tile_m
                self._end_tile(shared.queries, q_at, queries, self.tile_m, self.head_dim, 1)
                q_at = q_at.next(self.q_stages)
                if const_expr(self.has_dk):
                    if (member == 0) & (i == 0):
                        self._end_tile(shared.values, Cursor(Int32(0), Int32(0)), keys, TILE_N, self.head_dim_v, 1)
                self._end_tile(shared.douts, dout_at, queries, self.tile_m, self.head_dim_v, 1)
                dout_at = dout_at.next(self.dout_stages)

    @cute.jit
    def _end_tile(
        self,
        ring,
        at: Cursor,
        rows,
        tile_rows: cutlass.Constexpr[int],
        columns: cutlass.Constexpr[int],
        parts: cutlass.Constexpr[int],
    ):
        """Zeros to rows `rows` .. of a tile, and the arrival that hands it on. parts: of its columns, one behind the
        other."""
        arch.mbarrier_wait(ring.landed + at.stage, at.phase)
        if rows < tile_rows:
            address = ring.tiles.iterator.toint() + at.stage * self._bytes(tile_rows, columns)
            for part in cutlass.range_constexpr(parts):
                start = address + part * self._bytes(tile_rows, columns // parts)
                value_tail.zero_rows(start, maximum(rows, 0), arch.lane_idx(), tile_rows, columns // parts, 32)
            arch.fence_proxy("async.shared", space="cta")
        arch.sync_warp()
        with arch.elect_one():
            arch.mbarrier_arrive(ring.full + at.stage)

    # --- storing warps ------------------------------------------------------------------------------------------------

    @cute.jit
    def _add_query_gradients(self, reduce_dq, dq, semaphores, shared, tile, problem, group):
        """The storing warp of one consumer: adds its part of every dQ tile to the accumulator."""
        tiles = self._range(tile, problem)
        source = shared.dq[None, None, group]
        is_adding = self._is_adding(tile, problem)
        for member in cutlass.range(problem.group_size, unroll=1):
            head = tile.kv_head * problem.group_size + member
            parts = cute.local_tile(self._rows_of(dq, head, tile, tile.first_row), self._dq_tile(), (None, None))
            chunks = self.dq_columns // self.dq_chunk
            counters = self._counters(semaphores, head, tile)
            for i in cutlass.range(tiles.end - tiles.begin, unroll=1):
                m_block = tiles.begin + i
                for chunk in cutlass.range_constexpr(chunks):
                    self._hand_over_buffer(group)
                    self._wait_tile(group)
                    if is_adding:
                        part = (CONSUMERS * m_block + group, chunk)
                        if const_expr(self.splits_dq_columns):
                            part = (m_block, chunks * group + chunk)
                        counter = m_block * self.tile_m // turns.QUERIES_PER_COUNTER
                        if const_expr(self.deterministic and chunk == 0):
                            if (i == 0) | (m_block * self.tile_m % turns.QUERIES_PER_COUNTER == 0):
                                turns.wait_turn(counters + counter, CONSUMERS * self._rank(tile, counter, problem))
                        tile_reduce.reduce_tile(reduce_dq, source, parts[(None, None, *part)])
                        if const_expr(self.deterministic and chunk == chunks - 1):
                            tile_reduce.wait_until_added()
                            next_row = (m_block + 1) * self.tile_m
                            if (m_block + 1 == tiles.end) | (next_row % turns.QUERIES_PER_COUNTER == 0):
                                turns.end_turn(counters + counter)
                        else:
                            epilogue_store.wait_until_read()

    def _counters(self, semaphores, head, tile: Tile):
        """The counters of a head's tiles of queries."""
        if self.is_packed:
            return semaphores[None, head].iterator + tile.first_row // turns.QUERIES_PER_COUNTER
        return semaphores[None, head, tile.batch].iterator

    def _is_adding(self, tile: Tile, problem: Problem):
        """Whether this CTA adds to dQ at all. Without an order, adding zeros does no harm."""
        if not self.deterministic:
            return True
        return turns.is_seen(
            tile.n_block,
            tile_n=TILE_N,
            seqlen_q=tile.seqlen_q,
            seqlen_k=tile.seqlen_k,
            mask=self.mask,
            window_left=problem.window_left,
            window_right=problem.window_right,
        )

    def _rank(self, tile: Tile, counter, problem: Problem):
        return turns.rank(
            tile.n_block,
            counter,
            tile_n=TILE_N,
            seqlen_q=tile.seqlen_q,
            seqlen_k=tile.seqlen_k,
            mask=self.mask,
            window_right=problem.window_right,
        )

    def _hand_over_buffer(self, group) -> None:
        arch.barrier_arrive(barrier_id=named_barriers.dq_empty(group), number_of_threads=self.counts.dq_threads)

    def _wait_tile(self, group) -> None:
        arch.barrier(barrier_id=named_barriers.dq_full(group), number_of_threads=self.counts.dq_threads)

    # --- consumers ----------------------------------------------------------------------------------------------------

    @cute.jit
    def _compute(self, store_dk, dk, store_dv, dv, rows, shared, tile, problem, group):
        """A consumer warpgroup: dK and dV of its 64 keys, and its part of every dQ tile."""
        work = self._consumer(shared, problem, group)
        if const_expr(self.has_dk):
            work.dk.fill(0.0)
        if const_expr(self.has_dv):
            work.dv.fill(0.0)
        tiles = self._range(tile, problem)
        limits = self._limits(work, tile, problem)
        at = At(Cursor(Int32(0), Int32(0)), Cursor(Int32(0), Int32(0)), Int32(0), cutlass.Boolean(False))
        wait_full(shared.keys, Cursor(0, 0))
        for member in cutlass.range(problem.group_size, unroll=1):
            for i in cutlass.range(tiles.inner_begin - tiles.begin, unroll=1):
                at = self._step(work, shared, at, limits, tiles.begin + i, True, self.mask == LOCAL)
            for i in cutlass.range(tiles.inner_end - tiles.inner_begin, unroll=1):
                at = self._step(work, shared, at, limits, tiles.inner_begin + i, False, False)
            if const_expr(self.mask == LOCAL):
                for i in cutlass.range(tiles.end - tiles.inner_end, unroll=1):
                    at = self._step(work, shared, at, limits, tiles.inner_end + i, True, True)
        warpgroup.wait_group(0)
        self._write(work, store_dk, dk, store_dv, dv, rows, shared, tile, problem)

    def _consumer(self, shared: Shared, problem: Problem, group) -> Consumer:
        """Fragments and registers of consumer `group`; None for what this part does not compute."""
        dtype, rows = self.dtype, ROWS_PER_WARPGROUP
        scores_mma = wgmma.scores_mma(dtype, self.tile_m, accumulate=True)
        fields = dict.fromkeys(Consumer._fields) | {
            "group": group,
            "thread": arch.thread_idx()[0] % THREADS_PER_WARPGROUP,
            "first_scores_mma": wgmma.scores_mma(dtype, self.tile_m, accumulate=False),
            "scores_mma": scores_mma,
            "keys": _as_a(scores_mma, _rows_of(shared.keys.tiles[None, None, 0], group, self.head_dim)),
            "queries": _as_b(scores_mma, shared.queries.tiles),
            "scores": cute.make_rmem_tensor(scores_mma.partition_shape_C((rows, self.tile_m)), Float32),
            "scale_log2": problem.softmax_scale * LOG2_E if problem.softcap_log2 is None else problem.softcap_log2,
            "cap_factor": problem.cap_factor,
        }
        if self.has_dv:
            fields |= self._dv_fields(shared)
        if self.has_dk:
            dq_columns = self.dq_columns // (2 if self._is_tight(problem.cap_factor) else 1)
            fields |= self._dk_fields(shared, scores_mma, group, dq_columns)
        return Consumer(**fields)

    def _columns_view(self, tiles, rows: int, columns: int, stages: int, parts: int = 1):
        """Tiles seen as operands that are summed over their rows."""
        return cute.make_tensor(
            tiles.iterator, gradients.columns_layout(self.dtype, rows, columns, stages, parts).outer
        )

    def _dscores_views(self, shared: Shared) -> tuple:
        """The tiles of dS as (keys, queries, stage) and as (queries, keys, stage)."""
        if self.dscores_by_keys:
            other = self._columns_view(shared.dscores, self.tile_m, TILE_N, self.dscores_stages)
            return other, shared.dscores
        return shared.dscores, self._columns_view(shared.dscores, TILE_N, self.tile_m, self.dscores_stages)

    def _dv_fields(self, shared: Shared) -> dict:
        """What dV += P^T dO needs."""
        rows, columns = ROWS_PER_WARPGROUP, self.head_dim_v
        dv_mma = wgmma.output_mma(self.dtype, columns)
        douts_columns = self._columns_view(shared.douts.tiles, self.tile_m, columns, self.dout_stages)
        return {
            "dv_mma": dv_mma,
            "douts_columns": _as_b(dv_mma, douts_columns),
            "probabilities_operand": cute.make_rmem_tensor(dv_mma.partition_shape_A((rows, self.tile_m)), self.dtype),
            "dv": cute.make_rmem_tensor(dv_mma.partition_shape_C((rows, columns)), Float32),
        }

    def _dk_fields(self, shared: Shared, scores_mma, group, dq_columns: int) -> dict:
        """What dP, dK and dQ need. dq_columns: of dQ that are computed at a time."""
        dtype, columns, rows = self.dtype, self.head_dim, ROWS_PER_WARPGROUP
        from_registers = wgmma.output_mma(dtype, columns)
        dk_mma = gradients.key_gradient_mma(dtype, columns) if self.overlaps_dk else from_registers
        dq_mmas = [
            gradients.query_gradient_mma(dtype, dq_columns, accumulate, by_keys=self.dscores_by_keys)
            for accumulate in (False, True)
        ]
        pieces = self.dq_columns // dq_columns
        keys_columns = self._columns_view(shared.keys.tiles, TILE_N, columns, 1, self.key_parts)[None, None, 0]
        by_keys, by_queries = self._dscores_views(shared)
        if self.splits_dq_columns:
            keys = [cute.local_tile(keys_columns, (dq_columns, TILE_N), (pieces * group + i, 0)) for i in range(pieces)]
        else:
            keys = [keys_columns]
            by_queries = cute.local_tile(by_queries, (rows, TILE_N), (group, 0, None))
        dscores_rows = None
        if self.overlaps_dk:
            dscores_rows = _as_a(dk_mma, cute.local_tile(by_keys, (rows, self.tile_m), (group, 0, None)))
        queries_columns = self._columns_view(shared.queries.tiles, self.tile_m, columns, self.q_stages)
        return {
            "dk_mma": dk_mma,
            "first_dq_mma": dq_mmas[0],
            "dq_mma": dq_mmas[1],
            "values": _as_a(scores_mma, _rows_of(shared.values.tiles[None, None, 0], group, self.head_dim_v)),
            "douts": _as_b(scores_mma, shared.douts.tiles),
            "queries_columns": _as_b(dk_mma, queries_columns),
            "dscores_columns": _as_a(dq_mmas[1], by_queries),
            "dscores_rows": dscores_rows,
            "keys_columns": tuple(_as_b(dq_mmas[1], tile) for tile in keys),
            "dscores": cute.make_rmem_tensor(scores_mma.partition_shape_C((rows, self.tile_m)), Float32),
            "dscores_operand": cute.make_rmem_tensor(from_registers.partition_shape_A((rows, self.tile_m)), dtype),
            "dk": cute.make_rmem_tensor(dk_mma.partition_shape_C((rows, columns)), Float32),
            "dq": cute.make_rmem_tensor(dq_mmas[1].partition_shape_C((rows, dq_columns)), Float32),
        }

    @cute.jit
    def _step(
        self,
        work: Consumer,
        shared: Shared,
        at: At,
        limits,
        m_block,
        has_begin: cutlass.Constexpr[bool],
        has_end: cutlass.Constexpr[bool],
    ) -> At:
        """One tile of queries."""
        q_stage, dout_stage = at.query.stage, at.dout.stage
        wait_full(shared.queries, at.query)
        wgmma.issue_scores(
            work.first_scores_mma, work.scores_mma, work.scores, work.keys, work.queries[None, None, None, q_stage]
        )
        if const_expr(self.overlaps_dk):
            warpgroup.wait_group(1)
            if at.is_running:
                release(shared.queries, at.query.previous(self.q_stages))
        is_tight = self._is_tight(work.cap_factor)
        if const_expr(is_tight):
            warpgroup.wait_group(0)
        else:
            self._start_dprobabilities(work, shared, at.dout)
            warpgroup.wait_group(1 if self.has_dk else 0)
        scores = wgmma.rows_view(work.scores)
        if const_expr(work.cap_factor is not None):
            cap_scores(work.scores, work.cap_factor)
        if const_expr(has_begin or has_end):
            begins, ends = (tuple(limit - m_block * self.tile_m for limit in side) for side in limits)
            mask_columns(scores, begins, ends, has_begin, has_end)
        column = wgmma.column_of_thread(work.thread)
        lse = shared.lse[None, q_stage]
        keeps_derivative = work.cap_factor is not None and self.has_dk
        if const_expr(not keeps_derivative):
            recomputed.probabilities(scores, lse, column, work.scale_log2)
        else:
            operand = work.probabilities_operand
            recomputed.capped_probabilities(work.scores, operand, lse, column, work.scale_log2, self.dtype)
        if const_expr(not self.has_dk):
            arch.sync_warp()  # every lane has read its statistics: one lane's arrival speaks for all
            release(shared.queries, at.query)
        if const_expr(self.has_dv and not keeps_derivative):
            wgmma.round_to_operand(work.scores, work.probabilities_operand, self.dtype)
        if const_expr(is_tight):
            # The assembler moves no product over its wait; without one it would start dP before the cap after all.
            self._start_dprobabilities(work, shared, at.dout)
        if const_expr(self.has_dk):
            warpgroup.wait_group(0)
            dscores = wgmma.rows_view(work.dscores)
            recomputed.score_gradients(scores, dscores, shared.dpsum[None, dout_stage], column)
            if const_expr(not self.has_dv):
                arch.sync_warp()
                release(shared.douts, at.dout)
            wgmma.round_to_operand(work.dscores, work.dscores_operand, self.dtype)
        if const_expr(self.has_dv):
            douts_columns = work.douts_columns[None, None, None, dout_stage]
            wgmma.issue_output(work.dv_mma, work.dv, work.probabilities_operand, douts_columns)
        if const_expr(self.has_dk):
            self._add_to_dk_and_dq(work, shared, at)
        else:
            warpgroup.wait_group(0)
            release(shared.douts, at.dout)
        next_dscores = at.dscores ^ 1 if self.dscores_stages == 2 else at.dscores
        return At(at.query.next(self.q_stages), at.dout.next(self.dout_stages), next_dscores, cutlass.Boolean(True))

    def _is_tight(self, cap_factor) -> bool:
        """Whether registers are so few, beside dK and a soft cap, that dP waits for the cap and dQ comes in pieces."""
        return self.has_dk and cap_factor is not None and self.head_dim > WIDEST_BESIDE_CAP

    def _start_dprobabilities(self, work: Consumer, shared: Shared, at: Cursor) -> None:
        """Waits for a tile of dO and starts dP^T = V dO^T, where this part has it."""
        if self.has_dk:
            wait_full(shared.values, Cursor(0, 0))
        wait_full(shared.douts, at)
        if self.has_dk:
            douts = work.douts[None, None, None, at.stage]
            wgmma.issue_scores(work.first_scores_mma, work.scores_mma, work.dscores, work.values, douts)

    def _add_to_dk_and_dq(self, work: Consumer, shared: Shared, at: At) -> None:
        """The products with dS. The one for dV, if any, is running."""
        by_keys, _ = self._dscores_views(shared)
        self._share_dscores(work, by_keys[None, None, at.dscores])
        dscores_columns = work.dscores_columns[None, None, None, at.dscores]
        wgmma.issue_scores(work.first_dq_mma, work.dq_mma, work.dq, dscores_columns, work.keys_columns[0])
        if self.has_dv:
            warpgroup.wait_group(1)
            release(shared.douts, at.dout)
        dk_operand = work.dscores_operand
        if self.overlaps_dk:
            dk_operand = work.dscores_rows[None, None, None, at.dscores]
        queries_columns = work.queries_columns[None, None, None, at.query.stage]
        wgmma.issue_output(work.dk_mma, work.dk, dk_operand, queries_columns)
        warpgroup.wait_group(1)
        self._pass_on_dq(work, shared)
        for keys_columns in work.keys_columns[1:]:
            wgmma.issue_scores(work.first_dq_mma, work.dq_mma, work.dq, dscores_columns, keys_columns)
            warpgroup.wait_group(0)
            self._pass_on_dq(work, shared)
        if not self.overlaps_dk:
            warpgroup.wait_group(0)
            release(shared.queries, at.query)

    def _share_dscores(self, work: Consumer, shared) -> None:
        """dS^T of this group's keys to shared memory; returns when both groups' are there."""
        if self.dscores_stages == 1:
            self._meet()
        own = cute.local_tile(shared, (ROWS_PER_WARPGROUP, self.tile_m), (work.group, 0))
        transpose = self.dscores_by_keys
        gradients.write_operand(work.scores_mma, work.dscores_operand, work.dscores, own, work.thread, transpose)
        arch.fence_proxy("async.shared", space="cta")
        self._meet()

    def _pass_on_dq(self, work: Consumer, shared: Shared) -> None:
        """What there is of a tile of dQ to shared memory, for the storing warp of this group."""
        threads = self.counts.dq_threads
        chunk_mma = gradients.query_gradient_mma(self.dtype, self.dq_chunk, accumulate=False)
        layout = cute.make_layout(chunk_mma.partition_shape_C(self._dq_tile()))
        for chunk in range(cute.size(work.dq) // cute.size(layout)):
            part = cute.make_tensor(work.dq.iterator + chunk * cute.size(layout), layout)
            arch.barrier(barrier_id=named_barriers.dq_empty(work.group), number_of_threads=threads)
            tile_reduce.write_accumulator(chunk_mma, part, shared.dq[None, None, work.group], work.thread)
            arch.fence_proxy("async.shared", space="cta")
            arch.barrier_arrive(barrier_id=named_barriers.dq_full(work.group), number_of_threads=threads)

    def _meet(self) -> None:
        arch.barrier(barrier_id=named_barriers.CONSUMERS_MEET, number_of_threads=self.counts.consumer_threads)

    def _limits(self, work: Consumer, tile: Tile, problem: Problem) -> tuple:
        """(begins, ends): queries that see this thread's two keys, less its first column; none past the last key."""
        first_key = tile.n_block * TILE_N + work.group * ROWS_PER_WARPGROUP + wgmma.row_of_thread(work.thread)
        column = wgmma.column_of_thread(work.thread)
        begins, ends = [], []
        for key in (first_key, first_key + 8):
            meets = key - (tile.seqlen_k - tile.seqlen_q)
            begin = Int32(-NEVER)
            if self.mask == CAUSAL:
                begin = meets
            elif self.mask == LOCAL:
                begin = meets - problem.window_right
                ends.append(meets + problem.window_left + 1 - column)
            begins.append(select(key >= tile.seqlen_k, NEVER, begin) - column)
        return tuple(begins), tuple(ends)

    @cute.jit
    def _write(self, work: Consumer, store_dk, dk, store_dv, dv, rows, shared: Shared, tile, problem):
        """Scales dK and stores dK and dV through the shared memory of K and V (dV alone: of K)."""
        parts = []
        if const_expr(self.has_dv):
            target = shared.values.tiles if self.has_dk else self._values_in_keys(shared)
            parts.append((work.dv_mma, work.dv, target[None, None, 0], store_dv, dv))
        if const_expr(self.has_dk):
            for i in cutlass.range_constexpr(cute.size(work.dk)):
                work.dk[i] = work.dk[i] * problem.softmax_scale
            parts.append((work.dk_mma, work.dk, shared.keys.tiles[None, None, 0], store_dk, dk))
        self._meet()  # the other group has read K for the last time
        for mma, accumulator, whole, _, _ in parts:
            own = _rows_of(whole, work.group, cute.size(whole, mode=[1]))
            epilogue_store.write_tile(mma, accumulator, own, self.dtype, work.thread)
        arch.fence_proxy("async.shared", space="cta")
        self._meet()
        if const_expr(self.is_packed):
            for _, _, whole, _, gradient in parts:
                self._write_rows(rows[0] if gradient is dk else rows[1], whole, tile)
        elif arch.warp_idx() == THREADS_PER_WARPGROUP // 32:
            for _, _, whole, atom, gradient in parts:
                tiles = cute.local_tile(
                    gradient[None, None, tile.kv_head, tile.batch], (TILE_N, cute.size(whole, mode=[1])), (None, 0)
                )
                epilogue_store.store_tile(atom, whole, tiles[None, None, tile.n_block])
            epilogue_store.wait_until_read()

    @cute.jit
    def _write_rows(self, gradient, whole, tile: Tile):
        """Rows of a tile in shared memory to those keys of the gradient that exist, 16 bytes a store; None: zeros."""
        pieces = gradient.shape[1] // PIECE
        target = self._rows_of(gradient, tile.kv_head, tile, tile.first_key)
        thread = arch.thread_idx()[0] - THREADS_PER_WARPGROUP
        for i in cutlass.range(TILE_N * pieces // (CONSUMERS * THREADS_PER_WARPGROUP), unroll=1):
            index = i * (CONSUMERS * THREADS_PER_WARPGROUP) + thread
            row, piece = index // pieces, index % pieces
            key = tile.n_block * TILE_N + row
            if key < tile.seqlen_k:
                values = cute.make_rmem_tensor((PIECE,), self.dtype)
                if const_expr(whole is None):
                    values.fill(0)
                else:
                    cute.autovec_copy(cute.local_tile(whole[row, None], (PIECE,), (piece,)), values)
                cute.autovec_copy(values, cute.local_tile(target[key, None], (PIECE,), (piece,)))

    def _write_zeros(self, rows, tile: Tile) -> None:
        """dK and dV of keys whose sequence has no queries."""
        for gradient, is_mine in zip(rows, (self.has_dk, self.has_dv)):
            if is_mine:
                self._write_rows(gradient, None, tile)

    def _values_in_keys(self, shared: Shared):
        """A tile of dV over the memory of K."""
        layout = gradients.rows_layout(self.dtype, TILE_N, self.head_dim_v, 1)
        return cute.make_tensor(shared.keys.tiles.iterator, layout.outer)


def _as_a(mma, tiles):
    return mma.make_fragment_A(mma.get_slice(0).partition_A(tiles))


def _as_b(mma, tiles):
    return mma.make_fragment_B(mma.get_slice(0).partition_B(tiles))


def _rows_of(tile, group, columns: int):
    """The 64 rows of a tile that belong to consumer `group`."""
    return cute.local_tile(tile, (ROWS_PER_WARPGROUP, columns), (group, 0))


def _allocate(shared, dtype, layout):
    return shared.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def _permuted(tensor: cute.Tensor, modes: tuple[int, ...]) -> cute.Tensor:
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(modes)))


def _check(kernel: BackwardSm90) -> None:
    """Refuses what would hang or be wrong on the device. Shared memory is checked by the caller's tuning table."""
    if misfit := kernel.roles.misfit():
        raise ValueError(misfit)
    if kernel.mask not in (FULL, CAUSAL, LOCAL):
        raise ValueError(f"mask {kernel.mask!r}: must be full, causal or local")
    if kernel.tile_m not in (64, 128):
        raise ValueError(f"tile_m {kernel.tile_m}: must be 64 or 128")
    if kernel.dscores_stages not in (1, 2):
        raise ValueError(f"dscores_stages {kernel.dscores_stages}: must be 1 or 2")
    for head_dim in (kernel.head_dim, kernel.head_dim_v):
        if head_dim % 32 or not 32 <= head_dim <= 256:
            raise ValueError(f"head_dim {head_dim}: must be a multiple of 32, at most 256")


class BackwardSm90InTwo:
    """Two kernels for head dims whose dK and dV do not fit in registers together; arguments as BackwardSm90.

    The first, which computes dV, has `dv_q_stages` and `dv_dout_stages`; the other arguments are those of the second.
    """

    def __init__(self, *, dv_q_stages: int, dv_dout_stages: int, dq_chunk: int, **arguments):
        stages = {"q_stages": dv_q_stages, "dout_stages": dv_dout_stages}
        self.only_dv = BackwardSm90(part=ONLY_DV, **(arguments | stages | {"deterministic": False}))
        self.all_but_dv = BackwardSm90(part=ALL_BUT_DV, dq_chunk=dq_chunk, **arguments)

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
        """Launches both kernels. Arguments: docs/formats.md section 1."""
        for kernel in (self.only_dv, self.all_but_dv):
            kernel(
                q=q,
                k=k,
                v=v,
                dout=dout,
                dpsum=dpsum,
                lse_log2=lse_log2,
                dq_accum=dq_accum,
                dq_semaphore=dq_semaphore,
                dk=dk,
                dv=dv,
                softmax_scale=softmax_scale,
                window_left=window_left,
                window_right=window_right,
                num_sms=num_sms,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
                seqused_q=seqused_q,
                seqused_k=seqused_k,
                softcap=softcap,
                stream=stream,
            )
