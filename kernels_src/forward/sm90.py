"""Attention forward for sm_90a (Hopper): wires the building blocks together, nothing else.

One CTA computes O and LSE for 64 query rows per consumer warpgroup of one head. A copy warp streams blocks of keys and
values through rings of shared-memory stages, from the last visible block to the first. Within a warpgroup the product Q
K^T of the next block is issued before P V of the current one, so that the softmax of the next block overlaps P V;
between warpgroups a token lets one issue its products while the others are at their softmax. P stays in registers.
Source: FlashAttention-3 (arXiv 2407.08608) for the overlap on Hopper, FlashAttention-4 (arXiv 2603.05451) for the rest.
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

from kernels_src.masking import causal, seqlen, sliding_window
from kernels_src.masking.accumulator_mask import mask_columns
from kernels_src.masking.block_range import CAUSAL, FULL, LOCAL, block_range
from kernels_src.memory import epilogue_store, tma_load
from kernels_src.mma import wgmma
from kernels_src.pipelines import named_barriers
from kernels_src.pipelines.arrive_counts import forward_arrive_counts
from kernels_src.pipelines.ring import Cursor, Ring, release, wait_empty, wait_full
from kernels_src.scheduling import longest_first, single_tile, static_persistent
from kernels_src.softmax import online_softmax
from kernels_src.softmax.softcap import cap_factor, cap_scores
from kernels_src.warp_roles import ROWS_PER_WARPGROUP, THREADS_PER_WARPGROUP, WarpRoles

NATURAL, LONGEST_FIRST = "natural", "longest_first"


class Schedule(NamedTuple):
    """Tile order of a launch (scheduling/). The last four belong to "longest_first"."""

    num_tiles: object
    num_m_blocks: object
    by_m_blocks: object
    by_heads: object
    by_group_heads: object
    by_group_tiles: object
    last_group: object
    by_last_group_heads: object


class Problem(NamedTuple):
    """Scalars of a launch that every role reads. softmax_scale: of the logits, so the cap where scores are capped;
    cap_factor and sink: None where the variant has no such feature."""

    softmax_scale: object
    window_left: object
    window_right: object
    seqlen_q: object
    seqlen_k: object
    by_group_size: object
    cap_factor: object = None
    sink: object = None


class Consumer(NamedTuple):
    """What a consumer warpgroup holds: matrix instructions, shared operands, registers."""

    group: object
    thread: object
    first_scores_mma: object
    scores_mma: object
    output_mma: object
    queries: object
    keys: object
    values: object
    key_ring: object
    value_ring: object
    scores: object
    probabilities: object
    output: object
    row_max: object
    row_sum: object
    rescale: object
    scale_log2: object
    cap_factor: object


class ForwardSm90:
    """Forward attention, one specialization; calling it is the host function of docs/formats.md section 1.

    Args:
        symbol: prefix of the device entry, which is `<symbol>_0`.
        dtype: cutlass.BFloat16 or cutlass.Float16, of q, k, v and out.
        head_dim, head_dim_v: multiples of 16, at most 256.
        mask: "full", "causal" or "local".
        tile_m: query rows of a CTA, 64 * consumer_warpgroups. tile_n: keys of a block, a multiple of 16, at most 256.
        kv_stages: stages of K and of V, each.
        consumer_warpgroups: 1 to 3. consumer_registers, producer_registers: see warp_roles.
        order: "natural" or "longest_first". persistent: a CTA takes several tiles (natural: as many CTAs as
            multiprocessors; longest first: longest_first.TILES_PER_CTA tiles each), else one.
        separate_output: O has its own shared memory (the next tile's Q loads during the epilogue), else it reuses Q's.
        ping_pong: consumer warpgroups take turns to issue.
        rescale_threshold: powers of two by which a row's maximum may rise before O is rescaled; 0 = any rise.
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
        tile_m: int,
        tile_n: int,
        kv_stages: int,
        consumer_warpgroups: int,
        consumer_registers: int,
        producer_registers: int,
        order: str = NATURAL,
        persistent: bool = False,
        separate_output: bool = False,
        ping_pong: bool = True,
        rescale_threshold: float = 8.0,
    ):
        self.dtype, self.head_dim, self.head_dim_v, self.mask = dtype, head_dim, head_dim_v, mask
        self.tile_n, self.kv_stages = tile_n, kv_stages
        self.order, self.persistent, self.separate_output = order, persistent, separate_output
        self.ping_pong = ping_pong and consumer_warpgroups > 1
        self.rescale_threshold = rescale_threshold
        self.roles = WarpRoles(consumer_warpgroups, consumer_registers, producer_registers)
        self.counts = forward_arrive_counts(consumer_warpgroups)
        _check(self, tile_m)
        self.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)

    def _smem_layouts(self):
        """Layouts of Q, K, V and O; the last mode counts tiles of 64 rows (Q, O) or stages (K, V)."""
        tiles, rows = self._query_tiles(), ROWS_PER_WARPGROUP
        scores_shape, output_shape = (rows, self.tile_n, self.head_dim), (rows, self.head_dim_v, self.tile_n)
        return (
            hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, scores_shape, self.dtype, tiles),
            hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, scores_shape, self.dtype, self.kv_stages),
            hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, output_shape, self.dtype, self.kv_stages),
            hopper.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, (rows, self.head_dim_v), tiles),
        )

    def _query_tiles(self) -> int:
        return self.roles.consumer_warpgroups

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        softmax_scale: Float32,
        window_left: Int32,
        window_right: Int32,
        num_sms: Int32,
        stream,
        sink: cute.Tensor | None = None,
        softcap: Float32 | None = None,
    ):
        """Launches the kernel. Arguments: docs/formats.md section 1."""
        # The tensor maps want (rows, head_dim, head, batch), and for V, a transposed operand, (head_dim, rows, ...).
        q_rows, k_rows, out_rows = (permuted(t, (1, 3, 2, 0)) for t in (q, k, out))
        v_columns, lse_rows = permuted(v, (3, 1, 2, 0)), permuted(lse, (2, 1, 0))
        q_layout, k_layout, v_layout, o_layout = (cute.select(x, mode=[0, 1]) for x in self._smem_layouts())
        loads = (
            tma_load.make_tile_load(q_rows, q_layout, (ROWS_PER_WARPGROUP, self.head_dim)),
            tma_load.make_tile_load(k_rows, k_layout, (self.tile_n, self.head_dim)),
            tma_load.make_tile_load(v_columns, v_layout, (self.head_dim_v, self.tile_n)),
        )
        store = epilogue_store.make_tile_store(out_rows, o_layout, (ROWS_PER_WARPGROUP, self.head_dim_v))
        seqlen_q, num_heads_q, num_heads_kv = q.shape[1], q.shape[2], k.shape[2]
        schedule = self._schedule(q, k)
        problem = Problem(
            softmax_scale=softmax_scale if const_expr(softcap is None) else softcap,
            window_left=window_left,
            window_right=window_right,
            seqlen_q=seqlen_q,
            seqlen_k=k.shape[1],
            by_group_size=cute.FastDivmodDivisorV2(num_heads_q // num_heads_kv),
            cap_factor=None if const_expr(softcap is None) else cap_factor(softmax_scale, softcap),
            sink=sink,
        )
        num_ctas = schedule.num_tiles
        if const_expr(self.persistent and self.order == NATURAL):
            num_ctas = cutlass.min(schedule.num_tiles, num_sms)
        elif const_expr(self.persistent):
            num_ctas = cute.ceil_div(schedule.num_tiles, longest_first.TILES_PER_CTA)
        self.kernel(*loads[0], *loads[1], *loads[2], *store, lse_rows, schedule, problem).launch(
            grid=(num_ctas, 1, 1), block=(self.roles.threads, 1, 1), stream=stream
        )

    def _schedule(self, q, k) -> Schedule:
        batch, seqlen_q, num_heads_q = q.shape[0], q.shape[1], q.shape[2]
        num_m_blocks = cute.ceil_div(seqlen_q, self.roles.tile_m)
        heads = num_heads_q * batch
        divisor = cute.FastDivmodDivisorV2
        group = (None, None, None, None)
        if self.order == LONGEST_FIRST:
            seqlen_k, num_heads_kv = k.shape[1], k.shape[2]
            kv_bytes = Int64(seqlen_k) * ((self.head_dim + self.head_dim_v) * self.dtype.width // 8)
            group_heads = Int32(longest_first.heads_per_group(kv_bytes, num_heads_q, num_heads_kv, batch))
            last_group = (heads - 1) // group_heads
            last_heads = heads - last_group * group_heads
            group = (divisor(group_heads), divisor(group_heads * num_m_blocks), last_group, divisor(last_heads))
        return Schedule(heads * num_m_blocks, num_m_blocks, divisor(num_m_blocks), divisor(num_heads_q), *group)

    @cute.kernel
    def kernel(
        self,
        load_q: cute.CopyAtom,
        q: cute.Tensor,
        load_k: cute.CopyAtom,
        k: cute.Tensor,
        load_v: cute.CopyAtom,
        v: cute.Tensor,
        store_o: cute.CopyAtom,
        out: cute.Tensor,
        lse: cute.Tensor,
        schedule: Schedule,
        problem: Problem,
    ):
        """Device entry: sets up shared memory and barriers, then every warp takes its role."""
        warp = arch.warp_idx()
        queries, keys, values, outputs = self._allocate_shared()
        if warp == 0:
            for atom in (load_q, load_k, load_v, store_o):
                cpasync.prefetch_descriptor(atom)
            with arch.elect_one():
                for ring, stages in ((queries, 1), (keys, self.kv_stages), (values, self.kv_stages)):
                    for stage in cutlass.range_constexpr(stages):
                        arch.mbarrier_init(ring.full + stage, self.counts.tile_full)
                        arch.mbarrier_init(ring.empty + stage, self.counts.tile_empty)
        arch.mbarrier_init_fence()
        arch.sync_threads()
        group = arch.make_warp_uniform(warp // 4)
        if group == 0:
            arch.setmaxregister_decrease(self.roles.producer_registers)
            if warp == 0:
                self._load_tiles(load_q, q, load_k, k, load_v, v, queries, keys, values, schedule, problem)
        else:
            arch.setmaxregister_increase(self.roles.consumer_registers)
            self._compute_tiles(queries, keys, values, outputs, store_o, out, lse, schedule, problem, group - 1)

    def _allocate_shared(self) -> tuple[Ring, Ring, Ring, cute.Tensor]:
        """Rings of Q (one stage with a tile per warpgroup), K and V, and the tiles of O."""
        shared = memory.SmemAllocator()
        q_layout, k_layout, v_layout, o_layout = self._smem_layouts()
        barriers = shared.allocate_array(Int64, 2 * (1 + 2 * self.kv_stages))
        rings = []
        for layout, stages in ((q_layout, 1), (k_layout, self.kv_stages), (v_layout, self.kv_stages)):
            tiles = shared.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            rings.append(Ring(tiles, barriers, barriers + stages))
            barriers = barriers + 2 * stages
        if self.separate_output:
            outputs = shared.allocate_tensor(self.dtype, o_layout.outer, byte_alignment=1024, swizzle=o_layout.inner)
        else:
            # The tile of O starts where the same warpgroup's tile of Q does: nobody else reads that.
            tile = cute.select(o_layout.outer, mode=[0, 1])
            groups = cute.make_layout(self.roles.consumer_warpgroups, stride=ROWS_PER_WARPGROUP * self.head_dim)
            outputs = cute.make_tensor(rings[0].tiles.iterator, cute.append(tile, groups))
        return (*rings, outputs)

    def _num_tiles(self, schedule: Schedule):
        if not self.persistent:
            return 1
        return static_persistent.num_tiles_of(arch.block_idx()[0], arch.grid_dim()[0], schedule.num_tiles)

    def _tile(self, round_, schedule: Schedule):
        """The tile of this CTA's round `round_`."""
        index = arch.block_idx()[0]
        if self.persistent:
            index = static_persistent.index_at(round_, index, arch.grid_dim()[0])
        if self.order == LONGEST_FIRST:
            return longest_first.tile_at(
                index,
                schedule.num_m_blocks,
                schedule.by_heads,
                schedule.by_group_heads,
                schedule.by_group_tiles,
                schedule.last_group,
                schedule.by_last_group_heads,
            )
        return single_tile.tile_at(index, schedule.by_m_blocks, schedule.by_heads)

    def _blocks(self, tile, problem: Problem):
        """The blocks of keys that a tile visits."""
        return block_range(
            tile.m_block,
            tile_m=self.roles.tile_m,
            tile_n=self.tile_n,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            mask=self.mask,
            window_left=problem.window_left,
            window_right=problem.window_right,
        )

    @cute.jit
    def _load_tiles(self, load_q, q, load_k, k, load_v, v, queries, keys, values, schedule, problem):
        """The copy warp: streams Q, K and V of every tile, as far ahead as the rings allow."""
        q_at, k_at, v_at = (Cursor(Int32(0), Int32(0)) for _ in range(3))
        for round_ in cutlass.range(self._num_tiles(schedule), unroll=1):
            tile = self._tile(round_, schedule)
            kv_head = tile.head // problem.by_group_size
            blocks = self._blocks(tile, problem)
            q_tiles = cute.local_tile(
                q[None, None, tile.head, tile.batch], (ROWS_PER_WARPGROUP, self.head_dim), (None, 0)
            )
            k_tiles = cute.local_tile(k[None, None, kv_head, tile.batch], (self.tile_n, self.head_dim), (None, 0))
            v_tiles = cute.local_tile(v[None, None, kv_head, tile.batch], (self.head_dim_v, self.tile_n), (0, None))
            q_to, q_from = tma_load.partition_load(load_q, queries.tiles, q_tiles)
            k_to, k_from = tma_load.partition_load(load_k, keys.tiles, k_tiles)
            v_to, v_from = tma_load.partition_load(load_v, values.tiles, v_tiles)
            # K first: its stages are free while the epilogue of the last tile may still hold Q's.
            k_at = self._load_block(load_k, k_from, k_to, keys, k_at, blocks.end - 1)
            wait_empty(queries, q_at)
            tma_load.expect_bytes(queries.full, self._bytes(self.roles.tile_m, self.head_dim))
            groups = self.roles.consumer_warpgroups
            for group in cutlass.range_constexpr(groups):
                source = q_from[None, tile.m_block * groups + group]
                tma_load.start_load(load_q, source, q_to[None, group], queries.full)
            q_at = q_at.next(1)
            for i in cutlass.range(blocks.end - 1 - blocks.begin, unroll=1):
                k_at = self._load_block(load_k, k_from, k_to, keys, k_at, blocks.end - 2 - i)
                v_at = self._load_block(load_v, v_from, v_to, values, v_at, blocks.end - 1 - i)
            v_at = self._load_block(load_v, v_from, v_to, values, v_at, blocks.begin)

    def _bytes(self, rows: int, columns: int) -> int:
        return rows * columns * self.dtype.width // 8

    def _load_block(self, atom, source, destination, ring: Ring, at: Cursor, block) -> Cursor:
        """Fills the next stage of a ring with one block; returns the cursor after it."""
        wait_empty(ring, at)
        tma_load.expect_bytes(
            ring.full + at.stage, self._bytes(cute.size(ring.tiles, mode=[0]), cute.size(ring.tiles, mode=[1]))
        )
        tma_load.start_load(atom, source[None, block], destination[None, at.stage], ring.full + at.stage)
        return at.next(self.kv_stages)

    @cute.jit
    def _compute_tiles(self, queries, keys, values, outputs, store_o, out, lse, schedule, problem, group):
        """A consumer warpgroup: softmax(Q K^T) V for its 64 rows of every tile."""
        work = self._consumer(queries, keys, values, problem, group)
        q_at, k_at, v_at = (Cursor(Int32(0), Int32(0)) for _ in range(3))
        if const_expr(self.ping_pong):
            # The first turn comes from the last group, like every later one: no warp arrives twice at a barrier.
            if group == self.roles.consumer_warpgroups - 1:
                self._hand_over_turn(0)
        for round_ in cutlass.range(self._num_tiles(schedule), unroll=1):
            tile = self._tile(round_, schedule)
            wait_full(queries, q_at)
            k_at, v_at = self._attend(work, queries, q_at, k_at, v_at, tile, problem)
            self._write(work, outputs, store_o, out, lse, tile, problem)
            if const_expr(not self.separate_output):
                release(queries, q_at)
            q_at = q_at.next(1)
        if const_expr(self._stores_run_on()):
            if arch.warp_idx() % 4 == 0:
                epilogue_store.wait_until_read()
        if const_expr(self.ping_pong):
            if group == 0:
                self._take_turn(0)

    def _consumer(self, queries, keys, values, problem, group) -> Consumer:
        """What a warpgroup computes with; its queries are tile number `group`."""
        thread = arch.thread_idx()[0] % THREADS_PER_WARPGROUP
        scores_mma = wgmma.scores_mma(self.dtype, self.tile_n, accumulate=True)
        output_mma = wgmma.output_mma(self.dtype, self.head_dim_v)
        return Consumer(
            group=group,
            thread=thread,
            first_scores_mma=wgmma.scores_mma(self.dtype, self.tile_n, accumulate=False),
            scores_mma=scores_mma,
            output_mma=output_mma,
            queries=scores_mma.make_fragment_A(scores_mma.get_slice(0).partition_A(queries.tiles[None, None, group])),
            keys=scores_mma.make_fragment_B(scores_mma.get_slice(0).partition_B(keys.tiles)),
            values=output_mma.make_fragment_B(output_mma.get_slice(0).partition_B(values.tiles)),
            key_ring=keys,
            value_ring=values,
            scores=cute.make_rmem_tensor(scores_mma.partition_shape_C((ROWS_PER_WARPGROUP, self.tile_n)), Float32),
            probabilities=cute.make_rmem_tensor(
                output_mma.partition_shape_A((ROWS_PER_WARPGROUP, self.tile_n)), self.dtype
            ),
            output=cute.make_rmem_tensor(output_mma.partition_shape_C((ROWS_PER_WARPGROUP, self.head_dim_v)), Float32),
            row_max=cute.make_rmem_tensor(2, Float32),
            row_sum=cute.make_rmem_tensor(2, Float32),
            rescale=cute.make_rmem_tensor(2, Float32),
            scale_log2=problem.softmax_scale * online_softmax.LOG2_E,
            cap_factor=problem.cap_factor,
        )

    @cute.jit
    def _attend(self, work: Consumer, queries, q_at, k_at, v_at, tile, problem):
        """The blocks of one tile, last to first: leaves O, maxima and sums in registers."""
        blocks = self._blocks(tile, problem)
        limits = self._limits(work, tile, problem)
        first, has_begin = blocks.end - 1, self.mask == LOCAL
        work.output.fill(0.0)
        work.rescale.fill(1.0)

        wait_full(work.key_ring, k_at)
        self._issue_scores(work, k_at)
        warpgroup.wait_group(0)
        release(work.key_ring, k_at)
        k_at = k_at.next(self.kv_stages)
        self._cap(work)
        self._mask(work, limits, first, has_begin, True)
        online_softmax.first_step(wgmma.rows_view(work.scores), work.row_max, work.row_sum, work.scale_log2)

        if const_expr(self.mask != FULL):
            for i in cutlass.range(first - blocks.inner_end, unroll=1):
                block = first - 1 - i
                k_at, v_at = self._step(work, k_at, v_at, limits, block, block < first - 1, has_begin, True)
        for i in cutlass.range(blocks.inner_end - blocks.inner_begin, unroll=1):
            block = blocks.inner_end - 1 - i
            k_at, v_at = self._step(work, k_at, v_at, limits, block, block < first - 1, False, False)
        if const_expr(self.mask == LOCAL):
            for i in cutlass.range(blocks.inner_begin - blocks.begin, unroll=1):
                block = blocks.inner_begin - 1 - i
                k_at, v_at = self._step(work, k_at, v_at, limits, block, block < first - 1, True, False)

        if const_expr(self.separate_output):
            release(queries, q_at)
        self._settle(work, v_at, blocks.begin < first)
        wait_full(work.value_ring, v_at)
        self._issue_output(work, v_at)
        warpgroup.wait_group(0)
        release(work.value_ring, v_at)
        return k_at, v_at.next(self.kv_stages)

    def _step(self, work: Consumer, k_at, v_at, limits, block, is_running, has_begin: bool, has_end: bool):
        """Starts the scores of `block` and P V of the block before it (at v_at); the softmax of `block` overlaps P V.

        P V is waited for at the start of the next step (`is_running`: one is), on the other side of the loop's edge: in
        one straight piece of code ptxas 13 moves that wait up, before the exponentials, and nothing overlaps.
        """
        self._settle(work, v_at, is_running)
        wait_full(work.key_ring, k_at)
        if self.ping_pong:
            self._take_turn(work.group)
        self._issue_scores(work, k_at)
        wait_full(work.value_ring, v_at)
        self._issue_output(work, v_at)
        if self.ping_pong:
            self._hand_over_turn(named_barriers.next_warpgroup(work.group, self.roles.consumer_warpgroups))
        warpgroup.wait_group(1)
        release(work.key_ring, k_at)
        self._cap(work)
        self._mask(work, limits, block, has_begin, has_end)
        online_softmax.next_step(
            wgmma.rows_view(work.scores),
            work.row_max,
            work.row_sum,
            work.rescale,
            work.scale_log2,
            has_begin or has_end,
            self.rescale_threshold,
        )
        return k_at.next(self.kv_stages), v_at.next(self.kv_stages)

    @cute.jit
    def _settle(self, work: Consumer, v_at, is_running):
        """Ends the P V before v_at, if one is running: frees its values, rounds the next P and rescales O for it."""
        is_rescaling = online_softmax.needs_rescale(work.rescale)
        warpgroup.wait_group(0)
        if is_running:
            release(work.value_ring, v_at.previous(self.kv_stages))
        wgmma.round_to_operand(work.scores, work.probabilities, self.dtype)
        online_softmax.rescale_output(wgmma.rows_view(work.output), work.rescale, is_rescaling)

    def _issue_scores(self, work: Consumer, k_at: Cursor) -> None:
        keys = work.keys[None, None, None, k_at.stage]
        wgmma.issue_scores(work.first_scores_mma, work.scores_mma, work.scores, work.queries, keys)

    def _issue_output(self, work: Consumer, v_at: Cursor) -> None:
        values = work.values[None, None, None, v_at.stage]
        wgmma.issue_output(work.output_mma, work.output, work.probabilities, values)

    def _take_turn(self, group) -> None:
        arch.barrier(barrier_id=named_barriers.turn_barrier(group), number_of_threads=self.counts.turn_threads)

    def _hand_over_turn(self, group) -> None:
        arch.barrier_arrive(barrier_id=named_barriers.turn_barrier(group), number_of_threads=self.counts.turn_threads)

    def _first_row(self, work: Consumer, tile):
        return tile.m_block * self.roles.tile_m + work.group * ROWS_PER_WARPGROUP + wgmma.row_of_thread(work.thread)

    def _lengths(self, tile, problem: Problem) -> tuple:
        """(seqlen_q, seqlen_k) of the tile's sequence."""
        return problem.seqlen_q, problem.seqlen_k

    def _queries(self, work: Consumer, tile, problem: Problem) -> tuple:
        """Which queries of the sequence this thread's two rows are."""
        first_row = self._first_row(work, tile)
        return first_row, first_row + 8

    def _limits(self, work: Consumer, tile, problem: Problem) -> tuple:
        """(begins, ends): visible keys of this thread's two rows, less its first column."""
        seqlen_q, seqlen_k = self._lengths(tile, problem)
        column = wgmma.column_of_thread(work.thread)
        begins, ends = [], []
        for row in self._queries(work, tile, problem):
            if self.mask == FULL:
                ends.append(seqlen.visible_end(seqlen_k) - column)
            elif self.mask == CAUSAL:
                ends.append(causal.visible_end(row, seqlen_q, seqlen_k) - column)
            else:
                ends.append(sliding_window.visible_end(row, seqlen_q, seqlen_k, problem.window_right) - column)
                begins.append(sliding_window.visible_begin(row, seqlen_q, seqlen_k, problem.window_left) - column)
        return tuple(begins), tuple(ends)

    def _cap(self, work: Consumer) -> None:
        if work.cap_factor is not None:
            cap_scores(work.scores, work.cap_factor)

    def _mask(self, work: Consumer, limits: tuple, block, has_begin: bool, has_end: bool) -> None:
        if has_begin or has_end:
            begins, ends = (tuple(limit - block * self.tile_n for limit in side) for side in limits)
            mask_columns(wgmma.rows_view(work.scores), begins, ends, has_begin, has_end)

    @cute.jit
    def _write(self, work: Consumer, outputs, store_o, out, lse, tile, problem):
        """Normalises O and stores it and the LSE. One warp of the group drives the copy engine."""
        sinks = None
        if const_expr(problem.sink is not None):
            sinks = (problem.sink[tile.head],) * 2
        lse_values = self._finish(work, problem, sinks)
        is_storing_warp = arch.warp_idx() % 4 == 0
        if const_expr(self._stores_run_on()):
            if is_storing_warp:
                epilogue_store.wait_until_read()
        # The memory is free once that store has read it, or, where it is Q's, once every warp's last scores have.
        self._sync_group(work.group)
        shared = outputs[None, None, work.group]
        epilogue_store.write_tile(work.output_mma, work.output, shared, self.dtype, work.thread)
        arch.fence_proxy("async.shared", space="cta")
        self._sync_group(work.group)
        if is_storing_warp:
            tiles = cute.local_tile(
                out[None, None, tile.head, tile.batch], (ROWS_PER_WARPGROUP, self.head_dim_v), (None, 0)
            )
            index = tile.m_block * self.roles.consumer_warpgroups + work.group
            epilogue_store.store_tile(store_o, shared, tiles[None, None, index])
            if const_expr(not self._stores_run_on()):
                epilogue_store.wait_until_read()
        epilogue_store.store_lse(
            lse[None, tile.head, tile.batch], lse_values, self._first_row(work, tile), problem.seqlen_q, work.thread
        )

    def _finish(self, work: Consumer, problem: Problem, sinks):
        """Normalises O in registers; the log-sum-exps of this thread's two rows. `sinks`: of these rows, or None."""
        lse_values = cute.make_rmem_tensor(2, Float32)
        online_softmax.finish(
            wgmma.rows_view(work.output), work.row_max, work.row_sum, lse_values, problem.softmax_scale, sinks
        )
        return lse_values

    def _stores_run_on(self) -> bool:
        """Whether a store of O is still reading its shared memory while the next tile is computed."""
        return self.persistent and self.separate_output

    def _sync_group(self, group) -> None:
        barrier = named_barriers.epilogue_barrier(group, self.roles.consumer_warpgroups)
        arch.barrier(barrier_id=barrier, number_of_threads=self.counts.warpgroup_threads)


def permuted(tensor: cute.Tensor, modes: tuple[int, ...]) -> cute.Tensor:
    """The same tensor with its modes in another order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(modes)))


def _check(kernel: ForwardSm90, tile_m: int) -> None:
    """Refuses what would hang or be wrong on the device. Shared memory is checked by the caller's tuning table."""
    if misfit := kernel.roles.misfit():
        raise ValueError(misfit)
    if tile_m != kernel.roles.tile_m:
        raise ValueError(f"tile_m {tile_m}: must be {kernel.roles.tile_m}, 64 rows per consumer warpgroup")
    if kernel.mask not in (FULL, CAUSAL, LOCAL):
        raise ValueError(f"mask {kernel.mask!r}: must be full, causal or local")
    if kernel.order not in (NATURAL, LONGEST_FIRST):
        raise ValueError(f"order {kernel.order!r}: must be {NATURAL} or {LONGEST_FIRST}")
    if kernel.tile_n % 16 or not 16 <= kernel.tile_n <= 256:
        raise ValueError(f"tile_n {kernel.tile_n}: must be a multiple of 16, at most 256")
    for head_dim in (kernel.head_dim, kernel.head_dim_v):
        if head_dim % 16 or not 16 <= head_dim <= 256:
            raise ValueError(f"head_dim {head_dim}: must be a multiple of 16, at most 256")
    fits = kernel.head_dim_v <= kernel.head_dim and _swizzle(kernel.head_dim) == _swizzle(kernel.head_dim_v)
    if not fits and not kernel.separate_output:
        dims = f"head_dim {kernel.head_dim}, head_dim_v {kernel.head_dim_v}"
        raise ValueError(f"{dims}: O does not fit in Q's shared memory or wants another swizzle; use separate_output")


def _swizzle(head_dim: int) -> int:
    """Bytes of the swizzle pattern for 16-bit rows of head_dim: the widest that divides them."""
    return next(size for size in (128, 64, 32) if 2 * head_dim % size == 0)
