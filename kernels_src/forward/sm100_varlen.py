"""FlashAttention forward for SM100 and SM103 over packed sequences: varlen and paged keys, split keys.

The roles of forward/sm100 with other ends: the rows of a tile are (query, head of a group) pairs, gathered and stored
16 bytes a lane by the correction warps; keys come from the sequence's place in a packed tensor, or from pages in boxes
of 16 rows; a CTA takes one work item (two tiles of queries of one key head and sequence, and one share of their keys),
which its first warp finds from the lengths alone. A second tile without rows, as in decoding, is left out by all roles.
"""

from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
import cutlass.memory as mem
from cutlass import Float32, Int32, const_expr
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, tcgen05

from kernels_src.forward.ctas import arrive_warp
from kernels_src.forward.score_tiles import AlternatingTiles
from kernels_src.forward.sm100 import (
    LOAD_WARP,
    MMA_WARP,
    NUM_THREADS,
    TILE_M,
    WARPS_PER_TILE,
    Descales,
    ForwardSm100,
    Problem,
)
from kernels_src.integers import select
from kernels_src.masking.block_range import FULL, BlockRange, visible_blocks
from kernels_src.masking.split_share import split_share
from kernels_src.memory.paged_keys import BOX_ROWS, box_start, fits_boxes, place_of
from kernels_src.memory.row_gather import gather_packed_rows, gather_paged_rows, packed_row, row_address
from kernels_src.memory.swizzled_rows import chunk_columns
from kernels_src.memory.value_tail import zero_rows
from kernels_src.memory.varlen_output import store_tile_rows, zero_rows_of_output
from kernels_src.mma.umma import accumulator_at, commit, fence_after_wait, fence_before_arrive
from kernels_src.pipelines.barriers import Barrier, allocate, initialise
from kernels_src.pipelines.ring import Cursor
from kernels_src.scheduling.varlen_tiles import (
    find_sequence,
    heads_per_group,
    max_tiles,
    sequence_length,
    tile_in_sequence,
)
from kernels_src.softmax import correction

TAIL_WARP = 15
NOTHING, NO_KEYS, WORK = 0, 1, 2  # states of a CTA: no tile, a tile without a key, a tile with blocks of keys


class Work(NamedTuple):
    """What a CTA does; all of it in shared memory, in this order. first_query, first_key: the sequence's first rows in
    the packed tensors; begin .. end: as in masking.block_range."""

    state: object
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


class Tensors(NamedTuple):
    """Global tensors that are read and written without the copy engine. k, v: None unless paged."""

    q: cute.Tensor
    k: Optional[cute.Tensor]
    v: Optional[cute.Tensor]
    out: cute.Tensor
    lse: cute.Tensor
    cu_seqlens_q: cute.Tensor
    seqused_q: cute.Tensor
    keys: cute.Tensor  # cu_seqlens_k or page_table
    seqused_k: cute.Tensor
    sink: Optional[cute.Tensor]
    descales: Optional[Descales]


class Maps(NamedTuple):
    """Tensor maps of keys and values, and their coordinate tensors."""

    k: cute.CopyAtom
    k_coordinates: cute.Tensor
    v: cute.CopyAtom
    v_coordinates: cute.Tensor


class PackedProblem(NamedTuple):
    """Runtime facts of the launch, and the CTA's Work in shared memory (added on the device)."""

    window_left: Int32
    window_right: Int32
    scale_log2: Float32
    cap_factor: Optional[Float32]
    batch: Int32
    num_heads_kv: Int32
    num_splits: Int32
    group: cute.FastDivmodDivisorV2
    page_size: Optional[cute.FastDivmodDivisorV2]
    has_boxes: Optional[Int32]
    work: Optional[cute.Tensor] = None


class ForwardSm100Packed(ForwardSm100):
    """Forward attention over packed queries; calling it is the host function of docs/formats.md section 1.

    Args: as ForwardSm100; layout: "varlen" or "paged"; has_split: partial results in float32 instead of outputs.
    Raises: ValueError for a combination that cannot run.
    """

    exponentials_first = False  # the limits of a row stay in registers

    def __init__(self, *, layout: str, has_split: bool, **common):
        if layout not in ("varlen", "paged"):
            raise ValueError(f"layout {layout!r}: must be varlen or paged")
        if has_split and common.get("has_sink"):
            raise ValueError("has_split and has_sink: a sink joins the sum once, where splits are combined")
        if common["head_dim_v"] > TILE_M:  # O of a second Q tile has no room in tensor memory
            self.scores = AlternatingTiles()
        super().__init__(order="natural", persistent=False, separate_output=False, **common)
        self.is_paged, self.has_split = layout == "paged", has_split

    @property
    def issues_chains(self) -> bool:
        """Two Q tiles keep their K tiles whole."""
        return self.num_q_tiles == 1

    @property
    def rows(self) -> int:
        """Packed rows of a CTA."""
        return self.num_q_tiles * TILE_M

    # ------------------------------------------------------------------------------------------------------------
    # Host

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        seqused_q: cute.Tensor,
        seqused_k: cute.Tensor,
        softmax_scale: Float32,
        window_left: Int32,
        window_right: Int32,
        num_sms: Int32,
        stream,
        out: Optional[cute.Tensor] = None,
        lse: Optional[cute.Tensor] = None,
        out_partial: Optional[cute.Tensor] = None,
        lse_partial: Optional[cute.Tensor] = None,
        cu_seqlens_k: Optional[cute.Tensor] = None,
        page_table: Optional[cute.Tensor] = None,
        sink: Optional[cute.Tensor] = None,
        softcap: Optional[Float32] = None,
        q_descale: Optional[cute.Tensor] = None,
        k_descale: Optional[cute.Tensor] = None,
        v_descale: Optional[cute.Tensor] = None,
    ):
        total_q, num_heads_q, _ = q.shape
        num_heads_kv = k.shape[2] if const_expr(self.is_paged) else k.shape[1]
        batch = cu_seqlens_q.shape[0] - 1
        group = num_heads_q // num_heads_kv
        layouts = self._smem_layouts(self.mma_qk(), self.mma_pv())[:3]
        scale_log2, factor = self._scales(softmax_scale, softcap)
        problem = PackedProblem(
            window_left=window_left,
            window_right=window_right,
            scale_log2=scale_log2,
            cap_factor=factor,
            batch=batch,
            num_heads_kv=num_heads_kv,
            num_splits=out_partial.shape[0] if const_expr(self.has_split) else Int32(1),
            group=cute.FastDivmodDivisorV2(group),
            page_size=cute.FastDivmodDivisorV2(k.shape[1]) if const_expr(self.is_paged) else None,
            has_boxes=select(fits_boxes(k.shape[1]), 1, 0) if const_expr(self.is_paged) else None,
        )
        tensors = Tensors(
            q=q,
            k=k if const_expr(self.is_paged) else None,
            v=v if const_expr(self.is_paged) else None,
            out=out_partial if const_expr(self.has_split) else out,
            lse=lse_partial if const_expr(self.has_split) else lse,
            cu_seqlens_q=cu_seqlens_q,
            seqused_q=seqused_q,
            keys=page_table if const_expr(self.is_paged) else cu_seqlens_k,
            seqused_k=seqused_k,
            sink=sink,
            descales=Descales(q_descale, k_descale, v_descale) if const_expr(self.is_fp8) else None,
        )
        num_ctas = max_tiles(total_q * group, batch, self.rows) * num_heads_kv
        self.kernel(self._key_maps(k, v, layouts), tensors, problem, *layouts).launch(
            grid=(num_ctas, problem.num_splits, 1), block=(NUM_THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    def _key_maps(self, k, v, layouts):
        """varlen: tiles of (row, dim, head), V as (dim, row, head). paged: boxes of (row, dim, head, page) for both."""

        def reordered(tensor, modes):
            return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))

        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        if self.is_paged:
            rows = [1, 3, 2, 0]
            k_map = cpasync.make_tiled_tma_atom(load, reordered(k, rows), *self._box(layouts[1], self.head_dim))
            v_map = cpasync.make_tiled_tma_atom(load, reordered(v, rows), *self._box(layouts[2], self.head_dim_v))
            return Maps(*k_map, *v_map)
        mma_qk, mma_pv = self.mma_qk(), self.mma_pv()
        cluster = cute.tiled_divide(cute.make_layout((1, 1, 1)), (mma_qk.thr_id.shape,)).shape
        qk_tile, pv_tile = (TILE_M, self.tile_n, self.head_dim), (TILE_M, self.head_dim_v, self.tile_n)
        k_stage, v_stage = (cute.select(layout, mode=[0, 1, 2]) for layout in layouts[1:])
        k_map = cute.nvgpu.make_tiled_tma_atom_B(load, reordered(k, [0, 2, 1]), k_stage, qk_tile, mma_qk, cluster)
        v_map = cute.nvgpu.make_tiled_tma_atom_B(load, reordered(v, [2, 0, 1]), v_stage, pv_tile, mma_pv, cluster)
        return Maps(*k_map, *v_map)

    def _as_16_bit(self, columns: int) -> int:
        """Columns of a row of inputs, counted in 16-bit elements: what the blocks that move bytes are told."""
        return columns * self.dtype.width // 16

    def _chunk(self, columns: int) -> int:
        """Columns that a swizzle pattern spans."""
        return chunk_columns(self._as_16_bit(columns)) * 16 // self.dtype.width

    def _box(self, layout, columns: int):
        """(shared-memory layout, extents) of a box of pages: 16 rows, as many columns as the swizzle spans."""
        width = self._chunk(columns)
        plain = cute.make_layout((BOX_ROWS, width), stride=(width, 1))
        return cute.make_composed_layout(layout.inner, 0, plain), (BOX_ROWS, width)

    # ------------------------------------------------------------------------------------------------------------
    # Device

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        tensors: Tensors,
        problem: PackedProblem,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
    ):
        smem = mem.SmemAllocator()
        bars = allocate(smem, self._barriers())
        tmem_pointer = smem.allocate_array(Int32, 1)
        work = smem.allocate_tensor(Int32, cute.make_layout(len(Work._fields)), byte_alignment=16)
        stats = smem.allocate_tensor(Float32, cute.make_layout((TILE_M, self.num_q_tiles, 2)), byte_alignment=16)
        sQ = smem.allocate_tensor(self.dtype, q_layout.outer, byte_alignment=1024, swizzle=q_layout.inner)
        sK = smem.allocate_tensor(self.dtype, k_layout.outer, byte_alignment=1024, swizzle=k_layout.inner)
        if const_expr(self.shares_ring):
            sV = cute.make_tensor(cute.recast_ptr(sK.iterator, v_layout.inner, dtype=self.dtype), v_layout.outer)
        else:
            sV = smem.allocate_tensor(self.dtype, v_layout.outer, byte_alignment=1024, swizzle=v_layout.inner)

        problem = problem._replace(work=work)
        warp = arch.make_warp_uniform(arch.warp_idx())
        if warp == 0:
            self._find_work(tensors, problem)
        if warp == MMA_WARP:
            initialise(self._barriers(), bars)
        arch.sync_threads()
        if work[0] == WORK:
            self._run(warp, bars, tmem_pointer, stats, maps, tensors, problem, sQ, sK, sV)
        elif work[0] == NO_KEYS:
            self._write_rows_without_keys(tensors, problem)

    def _barriers(self) -> dict[str, Barrier]:
        """As ForwardSm100; a CTA takes one work item, so no Q or O tile is used twice."""
        used = dict(super()._barriers())
        for name in ("q_empty", "store_full", "store_empty"):
            del used[name]
        return used | {
            "q_full": Barrier(self.num_q_tiles, WARPS_PER_TILE),  # the warps of the correction have gathered a tile
            # The first V tile is loaded, the only one that can reach beyond the sequence. Warp 15 zeroes the rows
            # there, which may hold NaN, and then completes kv_full of its slot.
            "v_landed": Barrier(1, 1),
        }

    @cute.jit
    def _find_work(self, tensors: Tensors, problem: PackedProblem):
        """Warp 0: the CTA's Work, to shared memory."""
        group, work = problem.group.divisor, problem.work
        is_valid, sequence, rest = find_sequence(
            arch.block_idx()[0],
            tensors.cu_seqlens_q,
            tensors.seqused_q,
            problem.batch,
            group,
            problem.num_heads_kv,
            self.rows,
        )
        state, seqlen_q, seqlen_k, first_query, first_key = Int32(NOTHING), Int32(0), Int32(0), Int32(0), Int32(0)
        m_block, kv_head = Int32(0), Int32(0)
        blocks = BlockRange(begin=Int32(0), inner_begin=Int32(0), inner_end=Int32(0), end=Int32(0))
        if is_valid:
            first_query = tensors.cu_seqlens_q[sequence]
            seqlen_q = sequence_length(tensors.cu_seqlens_q, tensors.seqused_q, sequence)
            if const_expr(self.is_paged):
                seqlen_k = tensors.seqused_k[sequence]
            else:
                first_key = tensors.keys[sequence]
                seqlen_k = sequence_length(tensors.keys, tensors.seqused_k, sequence)
            rows = seqlen_q * group
            kv_bytes = (self.head_dim + self.head_dim_v) * self.dtype.width // 8
            heads = heads_per_group(seqlen_k, kv_bytes, problem.num_heads_kv)
            m_block, kv_head = tile_in_sequence(
                rest, (rows + self.rows - 1) // self.rows, problem.num_heads_kv, heads, self.mask != FULL
            )
            state = Int32(NO_KEYS)
            if seqlen_k > 0:
                blocks = self._share_of_keys(m_block, rows, seqlen_q, seqlen_k, problem)
                state = Int32(WORK) if blocks.begin < blocks.end else Int32(NO_KEYS)
        found = Work(
            state, m_block, kv_head, sequence, seqlen_q, first_query, seqlen_k, first_key,
            blocks.begin, blocks.inner_begin, blocks.inner_end, blocks.end,
        )  # fmt: skip
        if arch.lane_idx() == 0:
            for place, value in enumerate(found):
                work[place] = value

    @cute.jit
    def _share_of_keys(self, m_block, rows, seqlen_q, seqlen_k, problem: PackedProblem) -> BlockRange:
        """Key blocks of this CTA: those that its rows see, or its split's share of them."""
        blocks = visible_blocks(
            m_block * self.rows // problem.group,
            (cutlass.min((m_block + 1) * self.rows, rows) - 1) // problem.group,
            tile_n=self.tile_n,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            mask=self.mask,
            window_left=problem.window_left,
            window_right=problem.window_right,
        )
        if const_expr(self.has_split):
            blocks = split_share(blocks, arch.block_idx()[1], problem.num_splits)
        return BlockRange(*[Int32(edge) for edge in blocks])

    def _work(self, problem: PackedProblem) -> Work:
        """The CTA's Work in registers; what is not used is not read."""
        return Work(*[problem.work[place] for place in range(len(Work._fields))])

    @cute.jit
    def _run(self, warp, bars, tmem_pointer, stats, maps, tensors, problem: PackedProblem, sQ, sK, sV):
        """A CTA that has blocks of keys: tensor memory, and the roles."""
        if warp == MMA_WARP:
            arch.alloc_tmem(self.tmem.num_columns, tmem_pointer)
        fence_before_arrive()
        arch.sync_threads()
        fence_after_wait()
        mma_pv = self.mma_pv()
        tmem = arch.retrieve_tmem_ptr(Float32, 16, tmem_pointer)
        outputs = [accumulator_at(mma_pv, (TILE_M, self.head_dim_v), tmem, c) for c in self.tmem.outputs]
        tiles_used = self._tiles_used(self._work(problem), problem)
        if warp < WARPS_PER_TILE * self.num_q_tiles:
            arch.setmaxregister_increase(self.registers[0])
            if warp // WARPS_PER_TILE < tiles_used:
                self._packed_softmax_role(warp // WARPS_PER_TILE, bars, stats, tmem, tensors, problem)
        elif self._is_correcting(warp):
            arch.setmaxregister_decrease(self.registers[1])
            self._packed_correction_role(bars, stats, outputs, sQ, tensors, problem, tiles_used)
        else:
            arch.setmaxregister_decrease(self.registers[2])
            if warp == MMA_WARP:
                if const_expr(self.num_q_tiles == 1):
                    self._packed_alternating_mma_role(bars, sQ, sK, sV, tmem, problem)
                else:
                    self._packed_mma_role(bars, sQ, sK, sV, tmem, problem, tiles_used)
            elif warp == LOAD_WARP:
                self._packed_load_role(bars, maps, sK, sV, tensors, problem)
            elif warp == TAIL_WARP:
                self._tail_role(bars, sV, problem)
        fence_before_arrive()
        arch.sync_threads()
        fence_after_wait()
        if warp == MMA_WARP:
            arch.relinquish_tmem_alloc_permit()
            arch.dealloc_tmem(tmem, self.tmem.num_columns)

    @cute.jit
    def _tiles_used(self, work: Work, problem: PackedProblem):
        """How many of the CTA's tiles have rows."""
        if const_expr(self.num_q_tiles == 1):
            return Int32(1)
        return Int32(1) if work.seqlen_q * problem.group.divisor - work.m_block * self.rows <= TILE_M else Int32(2)

    # --- load -------------------------------------------------------------------------------------------------------

    @cute.jit
    def _packed_load_role(self, bars, maps, sK, sV, tensors: Tensors, problem: PackedProblem):
        """Warp 14: K0 V0 K1 V1 ... from the last block to the first."""
        work = self._work(problem)
        k_slot = Cursor(Int32(0), Int32(0))
        v_slot = self._first_v(k_slot)
        block, is_first = work.end - 1, cutlass.Boolean(True)
        while block >= work.begin:
            place = self._v_barrier(v_slot)
            v_full = bars.v_landed if is_first else bars.kv_full + place
            arch.mbarrier_wait(bars.kv_empty + k_slot.stage, k_slot.phase ^ 1)
            if const_expr(self.is_paged):
                boxes = self._places_of_boxes(block, tensors.keys, work, problem)
                self._load_paged(bars.kv_full + k_slot.stage, k_slot, maps, sK, True, boxes, block, tensors, problem)
                arch.mbarrier_wait(bars.kv_empty + place, v_slot.phase ^ 1)
                self._load_paged(v_full, v_slot, maps, sV, False, boxes, block, tensors, problem)
            else:
                self._load_packed(bars.kv_full + k_slot.stage, k_slot, maps, sK, True, block, work)
                arch.mbarrier_wait(bars.kv_empty + place, v_slot.phase ^ 1)
                self._load_packed(v_full, v_slot, maps, sV, False, block, work)
            k_slot = self._next_k(k_slot, v_slot)
            v_slot = self._next_v(k_slot, v_slot)
            block, is_first = block - 1, cutlass.Boolean(False)

    @cute.jit
    def _expect_tile(self, full, columns: cutlass.Constexpr[int]):
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(full, self._bytes(self.tile_n, columns))

    @cute.jit
    def _load_packed(self, full, slot, maps, shared, is_k: cutlass.Constexpr[bool], block, work: Work):
        """varlen: one tile of the packed tensor; rows behind the tensor arrive as zeros."""
        if const_expr(is_k):
            atom, moved = maps.k, cute.domain_offset((work.first_key, 0, 0), maps.k_coordinates)
            tiles = cute.local_tile(moved, (self.tile_n, self.head_dim), (None, 0, work.kv_head))
            parts = self.mma_qk().get_slice(0).partition_B(tiles)
        else:
            atom, moved = maps.v, cute.domain_offset((0, work.first_key, 0), maps.v_coordinates)
            tiles = cute.local_tile(moved, (self.head_dim_v, self.tile_n), (0, None, work.kv_head))
            parts = self.mma_pv().get_slice(0).partition_B(tiles)
        self._expect_tile(full, self.head_dim if const_expr(is_k) else self.head_dim_v)
        target, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(parts, 0, 3)
        )
        cute.copy(atom, source[None, block], target[None, slot.stage], tma_bar_ptr=full)

    @cute.jit
    def _places_of_boxes(self, block, page_table, work: Work, problem: PackedProblem):
        """Lane b mod 8: (page, box within the page) of the b-th box of rows of the block."""
        box = arch.lane_idx() % (self.tile_n // BOX_ROWS)
        key = box_start(block, box, tile_n=self.tile_n, seqlen_k=work.seqlen_k)
        entry, row = place_of(key, problem.page_size)
        return page_table[work.sequence, entry], row // BOX_ROWS

    @cute.jit
    def _load_paged(
        self, full, slot, maps, shared, is_k: cutlass.Constexpr[bool], places, block, tensors: Tensors, problem
    ):
        """paged: the tile in boxes of 16 rows, each from its page; row by row where boxes would cross pages."""
        columns = self.head_dim if const_expr(is_k) else self.head_dim_v
        work = self._work(problem)
        if problem.has_boxes == 1:
            self._expect_tile(full, columns)
            atom, coordinates = (maps.k, maps.k_coordinates) if const_expr(is_k) else (maps.v, maps.v_coordinates)
            self._load_boxes(full, slot, atom, coordinates, shared, columns, places, work)
        else:
            gather_paged_rows(
                tensors.k if const_expr(is_k) else tensors.v,
                shared.iterator.toint() + slot.stage * self._bytes(self.tile_n, columns),
                tensors.keys,
                work.sequence,
                work.kv_head,
                block * self.tile_n,
                work.seqlen_k,
                problem.page_size,
                arch.lane_idx(),
                self.tile_n,
                self._as_16_bit(columns),
            )
            arch.cp_async_commit_group()
            arch.cp_async_wait_group(0)
            arch.fence_proxy("async.shared", space="cta")
            arrive_warp(full)

    @cute.jit
    def _load_boxes(self, full, slot, atom, coordinates, shared, columns: cutlass.Constexpr[int], places, work: Work):
        """One copy for each box of rows and each chunk of columns."""
        width, boxes = self._chunk(columns), self.tile_n // BOX_ROWS
        layout = cute.make_layout(
            ((BOX_ROWS, width), boxes, columns // width),
            stride=((width, 1), BOX_ROWS * width, self.tile_n * width),
        )
        tile = cute.make_tensor(shared.iterator + slot.stage * (self.tile_n * columns), layout)
        parts = cute.local_tile(coordinates, (BOX_ROWS, width), (None, None, work.kv_head, None))
        target, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(tile, 0, 1), cute.group_modes(parts, 0, 2)
        )
        for box in cutlass.range(boxes, unroll=1):
            page, part = arch.shuffle_sync(places[0], box), arch.shuffle_sync(places[1], box)
            for chunk in cutlass.range_constexpr(columns // width):
                cute.copy(atom, source[None, part, chunk, page], target[None, box, chunk], tma_bar_ptr=full)

    @cute.jit
    def _tail_role(self, bars, sV, problem: PackedProblem):
        """Warp 15: zeros behind the last key of the first V tile, then the tile is full."""
        work = self._work(problem)
        slot = self._first_v(Cursor(Int32(0), Int32(0)))
        arch.mbarrier_wait(bars.v_landed, 0)
        num_keys = work.seqlen_k - (work.end - 1) * self.tile_n
        if num_keys < self.tile_n:
            start = sV.iterator.toint() + slot.stage * self._bytes(self.tile_n, self.head_dim_v)
            zero_rows(start, num_keys, arch.lane_idx(), self.tile_n, self._as_16_bit(self.head_dim_v), 32)
            arch.fence_proxy("async.shared", space="cta")
        arrive_warp(bars.kv_full + self._v_barrier(slot))

    # --- matrix products --------------------------------------------------------------------------------------------

    @cute.jit
    def _packed_mma_role(self, bars, sQ, sK, sV, tmem, problem: PackedProblem, tiles_used):
        """Warp 12: as in forward/sm100, for the tiles that have rows."""
        mma_qk, mma_pv = self.mma_qk(), self.mma_pv()
        fQ, fK, fV = mma_qk.make_fragment_A(sQ), mma_qk.make_fragment_B(sK), mma_pv.make_fragment_B(sV)
        queries = [self.operand(fQ[None, None, None, i]) for i in range(self.num_q_tiles)]
        work, block_count, accumulate = self._work(problem), Int32(0), Int32(0)
        k_slot = Cursor(Int32(0), Int32(0))
        v_slot = self._first_v(k_slot)
        keys = self._keys(fK, k_slot)
        for i in cutlass.range_constexpr(self.num_q_tiles):
            if Int32(i) < tiles_used:
                arch.mbarrier_wait(bars.q_full + i, 0)
                self._issue_qk(bars, tmem, queries[i], keys, i)
        self._release_keys(bars, k_slot, tiles_used)
        remaining = work.end - 1 - work.begin
        while remaining > 0:
            k_slot = self._next_k(k_slot, v_slot)
            next_keys = self._keys(fK, k_slot)
            values = self.operand(fV[None, None, None, v_slot.stage])
            arch.mbarrier_wait(bars.kv_full + self._v_barrier(v_slot), v_slot.phase)
            for i in cutlass.range_constexpr(self.num_q_tiles):
                if Int32(i) < tiles_used:
                    self._issue_pv(bars, tmem, values, i, block_count, accumulate)
                if const_expr(i == self.num_q_tiles - 1):
                    commit(bars.kv_empty + self._v_barrier(v_slot))
                if Int32(i) < tiles_used:
                    self._issue_qk(bars, tmem, queries[i], next_keys, i)
            self._release_keys(bars, k_slot, tiles_used)
            accumulate = Int32(1)
            v_slot = self._next_v(k_slot, v_slot)
            block_count = block_count + 1
            remaining = remaining - 1
        last_values = self.operand(fV[None, None, None, v_slot.stage])
        arch.mbarrier_wait(bars.kv_full + self._v_barrier(v_slot), v_slot.phase)
        for i in cutlass.range_constexpr(self.num_q_tiles):
            if Int32(i) < tiles_used:
                self._issue_pv(bars, tmem, last_values, i, block_count, accumulate)
                commit(bars.o_full + i)

    @cute.jit
    def _packed_alternating_mma_role(self, bars, sQ, sK, sV, tmem, problem: PackedProblem):
        """Warp 12 where one Q tile has two S tiles."""
        mma_qk, mma_pv = self.mma_qk(), self.mma_pv()
        fQ, fK, fV = mma_qk.make_fragment_A(sQ), mma_qk.make_fragment_B(sK), mma_pv.make_fragment_B(sV)
        queries = self.operand(fQ[None, None, None, 0])
        work = self._work(problem)
        arch.mbarrier_wait(bars.q_full, 0)
        first_slot, num_blocks = Cursor(Int32(0), Int32(0)), work.end - work.begin
        self.scores.multiply_blocks(self, bars, tmem, queries, fK, fV, first_slot, Int32(0), num_blocks)

    @cute.jit
    def _release_keys(self, bars, slot: Cursor, tiles_used):
        """The last tile's product releases K; where there is no last tile, the first one's does."""
        if tiles_used < self.num_q_tiles:
            commit(bars.kv_empty + slot.stage)

    # --- softmax ----------------------------------------------------------------------------------------------------

    @cute.jit
    def _packed_softmax_role(self, i, bars, stats, tmem, tensors: Tensors, problem: PackedProblem):
        """Warps 4 i .. 4 i + 3: thread t owns packed row t of tile i."""
        row = arch.thread_idx()[0] % TILE_M
        scores = accumulator_at(self.mma_qk(), (TILE_M, self.tile_n), tmem, i * self.tile_n)
        work = self._work(problem)
        blocks = BlockRange(begin=work.begin, inner_begin=work.inner_begin, inner_end=work.inner_end, end=work.end)
        query, _ = packed_row(self._m_tile(work.m_block, i) * TILE_M + row, problem.group)
        limits = self._visible(query, self._lengths(work, problem))
        problem = self._descaled(problem, tensors.descales, work.sequence, work.kv_head)
        self._softmax_tile(i, bars, stats, scores, row, work.m_block, blocks, problem, Int32(0), Int32(0), limits)

    def _lengths(self, work: Work, problem: PackedProblem) -> Problem:
        """The CTA's sequence as forward/sm100 knows a problem."""
        return Problem(
            seqlen_q=work.seqlen_q,
            seqlen_k=work.seqlen_k,
            window_left=problem.window_left,
            window_right=problem.window_right,
            scale_log2=problem.scale_log2,
        )

    # --- correction -------------------------------------------------------------------------------------------------

    @cute.jit
    def _packed_correction_role(self, bars, stats, outputs, sQ, tensors: Tensors, problem: PackedProblem, tiles_used):
        """Warps 8 - 11: gather the queries, then correct as in forward/sm100, then store rows."""
        row = arch.thread_idx()[0] % TILE_M
        work, stats_count = self._work(problem), Int32(1)
        for i in cutlass.range_constexpr(self.num_q_tiles):
            if Int32(i) < tiles_used:
                self._gather_queries(i, bars, sQ, tensors, problem, work, row)
        for i in cutlass.range_constexpr(self.num_q_tiles):
            if Int32(i) < tiles_used:
                self._receive_stats(i, bars, stats, row, 0)
                arrive_warp(bars.p_ready + self.scores.place(i, 0)[0])
        remaining = work.end - 1 - work.begin
        while remaining > 0:
            for i in cutlass.range_constexpr(self.num_q_tiles):
                if Int32(i) < tiles_used:
                    self._correct(i, bars, stats, outputs[i], row, stats_count, stats_count)
            stats_count = stats_count + 1
            remaining = remaining - 1
        for i in cutlass.range_constexpr(self.num_q_tiles):
            if Int32(i) < tiles_used:
                self._finish_tile(i, bars, stats, outputs[i], sQ, tensors, problem, row, stats_count)

    @cute.jit
    def _gather_queries(self, i: cutlass.Constexpr[int], bars, sQ, tensors, problem, work: Work, row):
        """The queries of a tile to shared memory; rows beyond the sequence are zeros."""
        gather_packed_rows(
            tensors.q,
            sQ.iterator.toint() + i * self._bytes(TILE_M, self.head_dim),
            self._m_tile(work.m_block, i) * TILE_M,
            work.seqlen_q * problem.group.divisor,
            work.first_query,
            work.kv_head * problem.group.divisor,
            problem.group,
            row,
            TILE_M,
            TILE_M,
            self._as_16_bit(self.head_dim),
        )
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        arch.fence_proxy("async.shared", space="cta")
        arrive_warp(bars.q_full + i)

    @cute.jit
    def _finish_tile(self, i: cutlass.Constexpr[int], bars, stats, output, sQ, tensors, problem, row, stats_count):
        """The finished rows of a tile and their log-sum-exp to global memory."""
        work, group = self._work(problem), problem.group.divisor
        total, reference = self._receive_stats(i, bars, stats, row, stats_count)
        num_rows, packed = work.seqlen_q * group, self._m_tile(work.m_block, i) * TILE_M + row
        query, head = packed_row(packed, problem.group)
        token, head = work.first_query + query, work.kv_head * group + head
        scaled = self._descaled(problem, tensors.descales, work.sequence, work.kv_head)
        scale_log2, factor = scaled.scale_log2, Float32(1.0)
        if const_expr(self.is_fp8):
            factor = tensors.descales.v[work.sequence, work.kv_head]
            reference, scale_log2 = reference * scale_log2 - Float32(self.max_offset), Float32(1.0)
        if const_expr(self.has_sink):
            logit = Float32(0.0)
            if packed < num_rows:
                logit = tensors.sink[head]
            reference, total, kept = self._join_sink(reference, total, logit, scale_log2)
            factor, scale_log2 = factor * kept, Float32(1.0)
        lse = self._of_this_split(tensors.lse)
        if packed < num_rows:
            lse[head, token] = correction.log_sum_exp(reference, total, scale_log2)
        self.scores.wait_output(bars, i, 0, stats_count - 1)
        fence_after_wait()
        out = self._of_this_split(tensors.out)
        store_tile_rows(
            out,
            output,
            # The tile's queries have been read by every product that o_full waits for.
            sQ.iterator.toint() + i * self._bytes(TILE_M, self.head_dim),
            row,
            factor * correction.final_factor(total),
            row_address(out, token, head),
            num_rows - self._m_tile(work.m_block, i) * TILE_M,
            self.head_dim_v,
            self._bytes(1, self.head_dim),
        )

    def _of_this_split(self, tensor):
        """The part of a result that this CTA writes."""
        if not self.has_split:
            return tensor
        return tensor[(arch.block_idx()[1], *(None for _ in tensor.shape[1:]))]

    # --- tiles without keys -----------------------------------------------------------------------------------------

    @cute.jit
    def _write_rows_without_keys(self, tensors: Tensors, problem: PackedProblem):
        """out = 0, lse = -inf or the sink; of a split lse = -inf alone."""
        work, group = self._work(problem), problem.group.divisor
        packed = work.m_block * self.rows + arch.thread_idx()[0]
        lse, columns = self._of_this_split(tensors.lse), self.head_dim_v
        has_sink, has_split = self.has_sink, self.has_split
        if (arch.thread_idx()[0] < self.rows) & (packed < work.seqlen_q * group):
            query, head = packed_row(packed, problem.group)
            token, head = work.first_query + query, work.kv_head * group + head
            lse[head, token] = tensors.sink[head] if const_expr(has_sink) else -Float32.inf
            if const_expr(not has_split):
                zero_rows_of_output(tensors.out, token, head, columns)
