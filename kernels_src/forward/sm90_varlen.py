"""Attention forward for sm_90a over packed sequences, with keys packed too or in pages, and with keys split over CTAs.

Products and softmax are those of forward/sm90; here is how tiles are found, filled and stored. A tile's rows enumerate
(query, head of the group), so a group's heads share one pass over the keys. Warp 0 finds the tile and streams keys and
values by TMA; the other warps of its warpgroup find it too, gather the rows of Q, and leave a notice of the tile in
shared memory for the consumers, who never search. With `split`, a CTA visits its share of a tile's blocks and writes
float32 partial results, to be merged by `combine`. Decoding is such short kernels in a row, so those with `split` start
while the kernel before ends (programmatic dependent launch).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync

from kernels_src.forward.sm90 import NATURAL, Consumer, ForwardSm90, permuted
from kernels_src.integers import ceil_div, maximum, minimum, select
from kernels_src.masking.block_range import BlockRange, visible_blocks
from kernels_src.masking.split_share import split_share
from kernels_src.memory import epilogue_store, paged_keys, row_gather, tma_load, value_tail
from kernels_src.memory.swizzled_rows import chunk_columns
from kernels_src.mma import wgmma
from kernels_src.pipelines.ring import Cursor, Ring, release, wait_empty, wait_full
from kernels_src.scheduling import longest_first, varlen_tiles
from kernels_src.softmax.softcap import cap_factor
from kernels_src.warp_roles import ROWS_PER_WARPGROUP, THREADS_PER_WARPGROUP

VARLEN, PAGED = "varlen", "paged"
GATHER_WARPS = 3  # of the copying warpgroup; its first warp drives the copy engine
GATHER_THREADS = 32 * GATHER_WARPS


class PackedProblem(NamedTuple):
    """What every role reads of a launch. The names that Problem has mean the same; None: not in this variant."""

    softmax_scale: object
    window_left: object
    window_right: object
    by_group_size: object
    cap_factor: object
    sink: object
    cu_seqlens_q: object
    cu_seqlens_k: object
    seqused_q: object
    seqused_k: object
    page_table: object
    by_page_size: object
    has_boxes: object
    by_splits: object
    batch: object
    group_size: object
    num_kv_heads: object


class PackedWork(NamedTuple):
    """A tile as every role needs it. first_query, first_key: rows of the tensors where the sequence starts
    (first_key: 0 if paged). begin to end: a BlockRange; without blocks (begin == end) a split has nothing to do."""

    is_valid: object
    m_block: object
    kv_head: object
    sequence: object
    seqlen_q: object
    first_query: object
    seqlen_k: object
    first_key: object
    begin: object
    inner_begin: object
    inner_end: object
    end: object


class Copies(NamedTuple):
    """TMA atoms and coordinate tensors of K and V. rows_k, rows_v: the tensors themselves, None unless paged."""

    load_k: object
    k: object
    load_v: object
    v: object
    rows_k: object = None
    rows_v: object = None


class ForwardSm90Packed(ForwardSm90):
    """Forward attention over packed sequences; calling it is the host function of docs/formats.md section 1.

    Args: as ForwardSm90, and
        layout: "varlen" or "paged". split: keys are shared out among CTAs; then not persistent.
        persistent: a CTA takes TILES_PER_CTA tiles. q_stages: of Q; with 2, a tile's queries are gathered while the one
            before is computed. The tile of O always lies where the tile of Q did.
    Raises: ValueError for a combination that cannot run.
    """

    def __init__(self, *, layout: str, split: bool = False, q_stages: int = 1, **dense):
        self.layout, self.split, self.q_stages = layout, split, q_stages
        super().__init__(**dense)
        if layout not in (VARLEN, PAGED):
            raise ValueError(f"layout {layout!r}: must be {VARLEN} or {PAGED}")
        if split and self.persistent:
            raise ValueError("split: a CTA takes one share of one tile; persistent must be False")
        if self.separate_output:
            raise ValueError("separate_output: O lies in Q's shared memory here; use q_stages to overlap tiles")
        if self.tile_n % paged_keys.BOX_ROWS:
            raise ValueError(f"tile_n {self.tile_n}: must be a multiple of {paged_keys.BOX_ROWS}")

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor | None = None,
        lse: cute.Tensor | None = None,
        out_partial: cute.Tensor | None = None,
        lse_partial: cute.Tensor | None = None,
        cu_seqlens_q: cute.Tensor | None = None,
        cu_seqlens_k: cute.Tensor | None = None,
        page_table: cute.Tensor | None = None,
        seqused_q: cute.Tensor | None = None,
        seqused_k: cute.Tensor | None = None,
        softmax_scale: Float32 | None = None,
        window_left: Int32 | None = None,
        window_right: Int32 | None = None,
        num_sms: Int32 | None = None,
        stream=None,
        sink: cute.Tensor | None = None,
        softcap: Float32 | None = None,
    ):
        """Launches the kernel. Arguments: docs/formats.md section 1."""
        num_heads_q, num_heads_kv = q.shape[1], k.shape[-2]
        group_size, batch = num_heads_q // num_heads_kv, cu_seqlens_q.shape[0] - 1
        num_splits = out_partial.shape[0] if const_expr(self.split) else 1
        divisor = cute.FastDivmodDivisorV2
        problem = PackedProblem(
            softmax_scale=softmax_scale if const_expr(softcap is None) else softcap,
            window_left=window_left,
            window_right=window_right,
            by_group_size=divisor(group_size),
            cap_factor=None if const_expr(softcap is None) else cap_factor(softmax_scale, softcap),
            sink=sink,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            page_table=page_table,
            by_page_size=divisor(k.shape[1]) if const_expr(self.layout == PAGED) else None,
            has_boxes=select(paged_keys.fits_boxes(k.shape[1]), 1, 0) if const_expr(self.layout == PAGED) else None,
            by_splits=divisor(num_splits) if const_expr(self.split) else None,
            batch=batch,
            group_size=group_size,
            num_kv_heads=num_heads_kv,
        )
        tiles = varlen_tiles.max_tiles(q.shape[0] * group_size, batch, self.roles.tile_m) * num_heads_kv
        if const_expr(self.persistent):
            tiles = cute.ceil_div(tiles, longest_first.TILES_PER_CTA)
        results = (out_partial, lse_partial) if const_expr(self.split) else (out, lse)
        self.kernel(q, *results, self._copies(k, v), problem).launch(
            grid=(tiles, num_splits, 1), block=(self.roles.threads, 1, 1), use_pdl=self.split, stream=stream
        )

    def _copies(self, k, v) -> Copies:
        """Tensor maps of K as (rows, head_dim, head[, page]) and of V as (head_dim_v, rows, head[, page])."""
        _, k_layout, v_layout, _ = (cute.select(x, mode=[0, 1]) for x in self._smem_layouts())
        if self.layout == VARLEN:
            return Copies(
                *tma_load.make_tile_load(permuted(k, (0, 2, 1)), k_layout, (self.tile_n, self.head_dim)),
                *tma_load.make_tile_load(permuted(v, (2, 0, 1)), v_layout, (self.head_dim_v, self.tile_n)),
            )
        k_box, v_box = (
            (paged_keys.BOX_ROWS, chunk_columns(self.head_dim)),
            (
                chunk_columns(self.head_dim_v),
                paged_keys.BOX_ROWS,
            ),
        )
        return Copies(
            *tma_load.make_tile_load(permuted(k, (1, 3, 2, 0)), _box_layout(k_layout, k_box, 1), k_box),
            *tma_load.make_tile_load(permuted(v, (3, 1, 2, 0)), _box_layout(v_layout, v_box, 0), v_box),
            k,
            v,
        )

    @cute.kernel
    def kernel(self, q: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, copies: Copies, problem: PackedProblem):
        """Device entry: sets up shared memory and barriers, then every warp takes its role."""
        warp = arch.warp_idx()
        queries, keys, values, outputs, notice = self._allocate_shared_packed()
        if warp == 0:
            for atom in (copies.load_k, copies.load_v):
                cpasync.prefetch_descriptor(atom)
            with arch.elect_one():
                for ring, stages, fills in (
                    (queries, self.q_stages, GATHER_WARPS),
                    (keys, self.kv_stages, self.counts.tile_full),
                    (values, self.kv_stages, self.counts.tile_full),
                ):
                    for stage in cutlass.range_constexpr(stages):
                        arch.mbarrier_init(ring.full + stage, fills)
                        arch.mbarrier_init(ring.empty + stage, self.counts.tile_empty)
                arch.mbarrier_init(values.full + self._tail_barrier(), self.counts.tile_full)
        arch.mbarrier_init_fence()
        if const_expr(self.split):
            arch.griddepcontrol_wait()  # from here on memory is read and written
        arch.sync_threads()
        group = arch.make_warp_uniform(warp // 4)
        if group == 0:
            if const_expr(self._trades_registers()):
                arch.setmaxregister_decrease(self.roles.producer_registers)
            if warp == 0:
                self._load_keys_and_values(copies, keys, values, problem)
            else:
                self._gather_queries(q, queries, notice, problem)
        else:
            if const_expr(self._trades_registers()):
                arch.setmaxregister_increase(self.roles.consumer_registers)
            self._compute_packed(queries, keys, values, outputs, notice, out, lse, problem, group - 1)

    def _trades_registers(self) -> bool:
        """With one consumer warpgroup every thread has the most registers there are from the start."""
        return self.roles.consumer_warpgroups > 1

    def _tail_barrier(self) -> int:
        """Distance of the barrier of partial V blocks from V's first full barrier: the last of all barriers."""
        return 2 * self.kv_stages

    def _allocate_shared_packed(self) -> tuple:
        """Rings of Q (a tile per warpgroup and stage), K and V, the tiles of O, and a notice for each stage of Q."""
        shared = memory.SmemAllocator()
        q_layout, k_layout, v_layout, o_layout = self._smem_layouts()
        barriers = shared.allocate_array(Int64, 2 * (self.q_stages + 2 * self.kv_stages) + 1)
        fields = len(PackedWork._fields)
        notice = shared.allocate_tensor(Int32, cute.make_layout((fields, self.q_stages)), byte_alignment=16)
        rings = []
        for layout, stages in (
            (q_layout, self.q_stages),
            (k_layout, self.kv_stages),
            (v_layout, self.kv_stages),
        ):
            tiles = shared.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            rings.append(Ring(tiles, barriers, barriers + stages))
            barriers = barriers + 2 * stages
        if self.split:
            outputs = None  # partial results go straight from registers to memory
        else:
            # The tile of O starts where the same warpgroup's tile of Q does: nobody else reads that.
            tile = cute.select(o_layout.outer, mode=[0, 1])
            places = cute.make_layout(self._query_tiles(), stride=ROWS_PER_WARPGROUP * self.head_dim)
            outputs = cute.make_tensor(rings[0].tiles.iterator, cute.append(tile, places))
        return (*rings, outputs, notice)

    def _query_tiles(self) -> int:
        return self.roles.consumer_warpgroups * self.q_stages

    # --- which tile -------------------------------------------------------------------------------------------------

    def _rounds(self) -> int:
        return longest_first.TILES_PER_CTA if self.persistent else 1

    @cute.jit
    def _find(self, round_, problem: PackedProblem) -> PackedWork:
        """The tile of this CTA's round. Contract: called by a whole warp."""
        group = problem.group_size
        is_valid, sequence, rest = varlen_tiles.find_sequence(
            arch.block_idx()[0] + round_ * arch.grid_dim()[0],
            problem.cu_seqlens_q,
            problem.seqused_q,
            problem.batch,
            group,
            problem.num_kv_heads,
            self.roles.tile_m,
        )
        seqlen_q = varlen_tiles.sequence_length(problem.cu_seqlens_q, problem.seqused_q, sequence)
        seqlen_k, first_key = Int32(0), Int32(0)
        if const_expr(self.layout == VARLEN):
            seqlen_k = varlen_tiles.sequence_length(problem.cu_seqlens_k, problem.seqused_k, sequence)
            first_key = problem.cu_seqlens_k[sequence]
        else:
            seqlen_k = problem.seqused_k[sequence]
        together = Int32(1)
        if const_expr(self.order != NATURAL):
            kv_bytes = (self.head_dim + self.head_dim_v) * self.dtype.width // 8
            together = varlen_tiles.heads_per_group(seqlen_k, kv_bytes, problem.num_kv_heads)
        rows, tile_m = seqlen_q * group, self.roles.tile_m
        num_m_blocks = maximum(ceil_div(rows, tile_m), 1)
        m_block, kv_head = varlen_tiles.tile_in_sequence(
            rest, num_m_blocks, problem.num_kv_heads, together, self.order != NATURAL
        )
        last_row = maximum(minimum((m_block + 1) * tile_m, rows) - 1, 0)
        blocks = visible_blocks(
            m_block * tile_m // problem.by_group_size,
            last_row // problem.by_group_size,
            tile_n=self.tile_n,
            seqlen_q=seqlen_q,
            # A sequence without keys gets one block like a row that sees none: masked to nothing.
            seqlen_k=maximum(seqlen_k, 1),
            mask=self.mask,
            window_left=problem.window_left,
            window_right=problem.window_right,
        )
        if const_expr(self.split):
            blocks = split_share(blocks, arch.block_idx()[1], problem.by_splits)
        return PackedWork(
            is_valid=select(is_valid, 1, 0),
            m_block=m_block,
            kv_head=kv_head,
            sequence=sequence,
            seqlen_q=seqlen_q,
            first_query=problem.cu_seqlens_q[sequence],
            seqlen_k=seqlen_k,
            first_key=first_key,
            begin=Int32(blocks.begin),
            inner_begin=Int32(blocks.inner_begin),
            inner_end=Int32(blocks.inner_end),
            end=Int32(blocks.end),
        )

    def _blocks(self, tile: PackedWork, problem) -> BlockRange:
        return BlockRange(tile.begin, tile.inner_begin, tile.inner_end, tile.end)

    # --- copying ----------------------------------------------------------------------------------------------------

    @cute.jit
    def _gather_queries(self, q, queries, notice, problem: PackedProblem):
        """Warps 1 to 3: the notice of every tile, then its rows of Q."""
        worker = arch.thread_idx()[0] - 32
        q_at = Cursor(Int32(0), Int32(0))
        for round_ in cutlass.range(self._rounds(), unroll=1):
            work = self._find(round_, problem)
            wait_empty(queries, q_at)
            if worker == 0:
                for i in cutlass.range_constexpr(len(PackedWork._fields)):
                    notice[i, q_at.stage] = work[i]
            if (work.is_valid == 1) & (work.begin < work.end):
                row_gather.gather_packed_rows(
                    q,
                    queries.tiles.iterator.toint() + q_at.stage * self._bytes(self.roles.tile_m, self.head_dim),
                    work.m_block * self.roles.tile_m,
                    work.seqlen_q * problem.group_size,
                    work.first_query,
                    work.kv_head * problem.group_size,
                    problem.by_group_size,
                    worker,
                    GATHER_THREADS,
                    self.roles.tile_m,
                    self.head_dim,
                    ROWS_PER_WARPGROUP,
                )
                arch.cp_async_commit_group()
                arch.cp_async_wait_group(0)
                arch.fence_proxy("async.shared", space="cta")
            arch.sync_warp()
            with arch.elect_one():
                arch.mbarrier_arrive(queries.full + q_at.stage)
            q_at = q_at.next(self.q_stages)

    @cute.jit
    def _load_keys_and_values(self, copies: Copies, keys, values, problem: PackedProblem):
        """Warp 0: streams K and V of every tile, as far ahead as the rings allow."""
        k_at, v_at = (Cursor(Int32(0), Int32(0)) for _ in range(2))
        tail_phase = Int32(0)
        for round_ in cutlass.range(self._rounds(), unroll=1):
            work = self._find(round_, problem)
            if (work.is_valid == 1) & (work.begin < work.end):
                k_at = self._load_keys(copies, keys, k_at, work, work.end - 1, problem)
                for i in cutlass.range(work.end - 1 - work.begin, unroll=1):
                    k_at = self._load_keys(copies, keys, k_at, work, work.end - 2 - i, problem)
                    v_at, tail_phase = self._load_values(
                        copies, values, v_at, tail_phase, work, work.end - 1 - i, problem
                    )
                v_at, tail_phase = self._load_values(copies, values, v_at, tail_phase, work, work.begin, problem)
        if const_expr(self.split):
            # Not earlier: blocks of `combine` would gather on the few multiprocessors that are free by then.
            arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _load_keys(self, copies: Copies, keys: Ring, at: Cursor, work: PackedWork, block, problem):
        """Fills the next stage of K with one block; returns the cursor after it."""
        wait_empty(keys, at)
        barrier = keys.full + at.stage
        if const_expr(self.layout == VARLEN):
            tma_load.expect_bytes(barrier, self._bytes(self.tile_n, self.head_dim))
            rows = cute.domain_offset((work.first_key, 0), copies.k[None, None, work.kv_head])
            tiles = cute.local_tile(rows, (self.tile_n, self.head_dim), (None, 0))
            target, source = tma_load.partition_load(copies.load_k, keys.tiles, tiles)
            tma_load.start_load(copies.load_k, source[None, block], target[None, at.stage], barrier)
        else:
            if problem.has_boxes == 1:
                tma_load.expect_bytes(barrier, self._bytes(self.tile_n, self.head_dim))
                self._load_boxes(copies.load_k, copies.k, keys.tiles, at.stage, barrier, work, block, problem, 0)
            else:
                self._gather_keys(copies.rows_k, keys, at.stage, work, block, problem, self.head_dim)
        return at.next(self.kv_stages)

    @cute.jit
    def _load_values(self, copies: Copies, values: Ring, at: Cursor, tail_phase, work: PackedWork, block, problem):
        """Fills the next stage of V with one block, with zeros beyond the sequence; returns (cursor, tail phase) after.

        A partial block arrives at a barrier of its own, and is handed on when its tail is zero: at most one a tile, the
        first, which the consumers need after two products and a softmax.
        """
        wait_empty(values, at)
        inside = work.seqlen_k - block * self.tile_n
        is_partial = inside < self.tile_n
        if const_expr(self.layout == PAGED):
            is_partial = is_partial & (problem.has_boxes == 1)  # gathered rows beyond the sequence are zeros already
        barrier = values.full + select(is_partial, self._tail_barrier(), at.stage)
        if const_expr(self.layout == VARLEN):
            tma_load.expect_bytes(barrier, self._bytes(self.tile_n, self.head_dim_v))
            columns = cute.domain_offset((0, work.first_key), copies.v[None, None, work.kv_head])
            tiles = cute.local_tile(columns, (self.head_dim_v, self.tile_n), (0, None))
            target, source = tma_load.partition_load(copies.load_v, values.tiles, tiles)
            tma_load.start_load(copies.load_v, source[None, block], target[None, at.stage], barrier)
        else:
            if problem.has_boxes == 1:
                tma_load.expect_bytes(barrier, self._bytes(self.tile_n, self.head_dim_v))
                self._load_boxes(copies.load_v, copies.v, values.tiles, at.stage, barrier, work, block, problem, 1)
            else:
                self._gather_keys(copies.rows_v, values, at.stage, work, block, problem, self.head_dim_v)
        if is_partial:
            arch.mbarrier_wait(values.full + self._tail_barrier(), tail_phase)
            value_tail.zero_rows(
                values.tiles[None, None, at.stage].iterator.toint(),
                inside,
                arch.lane_idx(),
                self.tile_n,
                self.head_dim_v,
                32,
            )
            arch.fence_proxy("async.shared", space="cta")
            arch.sync_warp()
            with arch.elect_one():
                arch.mbarrier_arrive(values.full + at.stage)
            tail_phase = tail_phase ^ 1
        return at.next(self.kv_stages), tail_phase

    @cute.jit
    def _gather_keys(self, rows, ring: Ring, stage, work: PackedWork, block, problem, columns: cutlass.Constexpr[int]):
        """Fills a stage with one block, row by row, and waits for it: for page sizes that boxes do not fit."""
        row_gather.gather_paged_rows(
            rows,
            ring.tiles[None, None, stage].iterator.toint(),
            problem.page_table,
            work.sequence,
            work.kv_head,
            block * self.tile_n,
            work.seqlen_k,
            problem.by_page_size,
            arch.lane_idx(),
            self.tile_n,
            columns,
        )
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        arch.fence_proxy("async.shared", space="cta")
        arch.sync_warp()
        with arch.elect_one():
            arch.mbarrier_arrive(ring.full + stage)

    @cute.jit
    def _load_boxes(
        self, atom, tensor, tiles, stage, barrier, work: PackedWork, block, problem, row_mode: cutlass.Constexpr[int]
    ):
        """Starts the copies of one block of a paged tensor, a box of 16 keys and one swizzle pattern at a time.

        Args: row_mode: which mode of tensor and tile counts keys: 0 for K, 1 for V.
        """
        boxes = self.tile_n // paged_keys.BOX_ROWS
        columns = self.head_dim if row_mode == 0 else self.head_dim_v
        box = minimum(arch.lane_idx(), boxes - 1)
        start = paged_keys.box_start(block, box, tile_n=self.tile_n, seqlen_k=work.seqlen_k)
        entry, row = paged_keys.place_of(start, problem.by_page_size)
        own_page, own_row = problem.page_table[work.sequence, entry], row // paged_keys.BOX_ROWS
        chunk = chunk_columns(columns)
        box_shape = (paged_keys.BOX_ROWS, chunk) if row_mode == 0 else (chunk, paged_keys.BOX_ROWS)
        shared = _boxes_of(tiles, chunk, boxes, columns // chunk, self.tile_n, self.kv_stages, row_mode)
        target, source = tma_load.partition_boxes(atom, shared, cute.zipped_divide(tensor, box_shape))
        for i in cutlass.range_constexpr(boxes):
            page, row = arch.shuffle_sync(own_page, i), arch.shuffle_sync(own_row, i)
            for c in cutlass.range_constexpr(columns // chunk):
                place = (row, c, work.kv_head, page) if row_mode == 0 else (c, row, work.kv_head, page)
                tma_load.start_load(atom, source[None, place], target[None, i, c, stage], barrier)

    # --- computing --------------------------------------------------------------------------------------------------

    @cute.jit
    def _compute_packed(self, queries, keys, values, outputs, notice, out, lse, problem, group):
        """A consumer warpgroup: softmax(Q K^T) V for its 64 rows of every tile."""
        work = self._consumer(queries, keys, values, problem, group)
        q_at, k_at, v_at = (Cursor(Int32(0), Int32(0)) for _ in range(3))
        if const_expr(self.ping_pong):
            # The first turn comes from the last group, like every later one: no warp arrives twice at a barrier.
            if group == self.roles.consumer_warpgroups - 1:
                self._hand_over_turn(0)
        for round_ in cutlass.range(self._rounds(), unroll=1):
            wait_full(queries, q_at)
            tile = PackedWork(*(arch.make_warp_uniform(notice[i, q_at.stage]) for i in range(len(PackedWork._fields))))
            if (tile.is_valid == 1) & (tile.begin < tile.end):
                work = self._with_queries(work, queries, q_at)
                k_at, v_at = self._attend(work, queries, q_at, k_at, v_at, tile, problem)
                self._write_packed(work, outputs, q_at, out, lse, tile, problem)
            else:
                if const_expr(self.split):
                    if tile.is_valid == 1:
                        self._write_no_keys(work, lse, tile, problem)
            arch.sync_warp()  # every lane has read the notice, and its rows of the output
            release(queries, q_at)
            q_at = q_at.next(self.q_stages)
        if const_expr(self.ping_pong):
            if group == 0:
                self._take_turn(0)

    def _with_queries(self, work: Consumer, queries: Ring, at: Cursor) -> Consumer:
        """The same with the queries of a stage."""
        if self.q_stages == 1:
            return work
        place = at.stage * self.roles.consumer_warpgroups + work.group
        mma = work.scores_mma
        tiles = mma.make_fragment_A(mma.get_slice(0).partition_A(queries.tiles))
        return work._replace(queries=tiles[None, None, None, place])

    def _lengths(self, tile: PackedWork, problem) -> tuple:
        return tile.seqlen_q, tile.seqlen_k

    def _queries(self, work: Consumer, tile: PackedWork, problem: PackedProblem) -> tuple:
        first_row = self._first_row(work, tile)
        return first_row // problem.by_group_size, (first_row + 8) // problem.by_group_size

    @cute.jit
    def _write_packed(self, work: Consumer, outputs, at: Cursor, out, lse, tile: PackedWork, problem: PackedProblem):
        """Normalises O and stores its rows that exist, and their LSE."""
        sinks = None
        if const_expr(problem.sink is not None):
            sinks = self._row_sinks(work, tile, problem)
        lse_values = self._finish(work, problem, sinks)
        self._store_lse(work, lse, lse_values, tile, problem)
        num_rows = tile.seqlen_q * problem.group_size
        first_head = tile.kv_head * problem.group_size
        if const_expr(self.split):
            rows = wgmma.rows_view(work.output)
            for r in cutlass.range_constexpr(2):
                row = self._first_row(work, tile) + 8 * r
                if row < num_rows:
                    token, head = row_gather.packed_row(row, problem.by_group_size)
                    partial = out[arch.block_idx()[1], None, None, None]
                    address = row_gather.row_address(partial, tile.first_query + token, first_head + head)
                    epilogue_store.store_row(rows, r, address + wgmma.column_of_thread(work.thread) * 4)
        else:
            # The memory is free once every warp's last scores have read their queries.
            self._sync_group(work.group)
            shared = outputs[None, None, at.stage * self.roles.consumer_warpgroups + work.group]
            epilogue_store.write_tile(work.output_mma, work.output, shared, self.dtype, work.thread)
            self._sync_group(work.group)
            row_gather.store_packed_rows(
                out,
                shared.iterator.toint(),
                tile.m_block * self.roles.tile_m + work.group * ROWS_PER_WARPGROUP,
                num_rows,
                tile.first_query,
                first_head,
                problem.by_group_size,
                work.thread,
                THREADS_PER_WARPGROUP,
                ROWS_PER_WARPGROUP,
                self.head_dim_v,
            )

    @cute.jit
    def _row_sinks(self, work: Consumer, tile: PackedWork, problem: PackedProblem):
        """The sinks of this thread's two rows."""
        sinks = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            _, head = row_gather.packed_row(self._first_row(work, tile) + 8 * r, problem.by_group_size)
            sinks[r] = problem.sink[tile.kv_head * problem.group_size + head]
        return sinks

    @cute.jit
    def _write_no_keys(self, work: Consumer, lse, tile: PackedWork, problem: PackedProblem):
        """The LSE of a split that has no block: -inf, by which `combine` knows to skip it."""
        lse_values = cute.make_rmem_tensor(2, Float32)
        lse_values.fill(-Float32.inf)
        self._store_lse(work, lse, lse_values, tile, problem)

    @cute.jit
    def _store_lse(self, work: Consumer, lse, values, tile: PackedWork, problem: PackedProblem):
        """Stores the LSE of this thread's two rows; four threads hold the same, the first of them stores."""
        if work.thread % 4 == 0:
            for r in cutlass.range_constexpr(2):
                row = self._first_row(work, tile) + 8 * r
                if row < tile.seqlen_q * problem.group_size:
                    token, head = row_gather.packed_row(row, problem.by_group_size)
                    place = (tile.kv_head * problem.group_size + head, tile.first_query + token)
                    if const_expr(self.split):
                        lse[(arch.block_idx()[1], *place)] = values[r]
                    else:
                        lse[place] = values[r]


def _box_layout(tile_layout, box: tuple, contiguous: int):
    """Shared-memory layout of a box within a tile: its own rows side by side, the tile's swizzle."""
    stride = (box[1], 1) if contiguous == 1 else (1, box[0])
    return cute.make_composed_layout(tile_layout.inner, 0, cute.make_layout(box, stride=stride))


def _boxes_of(tiles, chunk: int, boxes: int, chunks: int, tile_n: int, stages: int, row_mode: int):
    """The tiles of a ring as (box, number of box along the keys, chunk of columns, stage)."""
    rows = paged_keys.BOX_ROWS
    box = cute.make_layout((rows, chunk), stride=(chunk, 1)) if row_mode == 0 else cute.make_layout((chunk, rows))
    counts = cute.make_layout((boxes, chunks, stages), stride=(rows * chunk, tile_n * chunk, tile_n * chunk * chunks))
    layout = cute.make_layout((*box.shape, *counts.shape), stride=(*box.stride, *counts.stride))
    return cute.make_tensor(tiles.iterator, layout)
