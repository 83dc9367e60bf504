"""FlashAttention forward for SM100 and SM103: warp roles wired together.

A CTA works on two tiles of 128 query rows at once, so that one tile's softmax runs while the tensor core multiplies for
the other. Warps 0-3 and 4-7 are the softmax of tile 0 and 1 (a thread owns a row), 8-11 the correction; 12 issues
matrix products, 13 stores, 14 loads, 15 idles. Scores, probabilities and output accumulators live in tensor memory
(memory/tmem_layout.py); K and V share a ring of shared-memory slots where they are of one size.
Source: FlashAttention-4 (arXiv 2603.05451) for the roles, the two tiles and the correction.

Who waits for whom: `ForwardSm100._barriers`.
Every tensor-memory access that crosses threads has its tcgen05 fences; every generic write that the copy engine or the
tensor core reads has its proxy fence.
"""

from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
import cutlass.memory as mem
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import LayoutEnum

from kernels_src.forward.ctas import OneCta, arrive_warp
from kernels_src.forward.score_tiles import OwnTiles
from kernels_src.masking import causal, seqlen, sliding_window
from kernels_src.masking.block_range import CAUSAL, FULL, LOCAL, block_range
from kernels_src.memory.tmem_layout import forward_tmem
from kernels_src.mma.umma import (
    accumulator_at,
    fence_after_wait,
    fence_before_arrive,
    held,
    instruction_descriptor,
    multiply,
    multiply_chain,
    operand_a_at,
    shared_operand,
    tensor_operand,
)
from kernels_src.pipelines.barriers import Barrier, allocate, initialise
from kernels_src.pipelines.ring import Cursor
from kernels_src.scheduling import longest_first, single_tile
from kernels_src.softmax import correction, score_rows
from kernels_src.softmax.sink import join as join_sink
from kernels_src.softmax.softcap import cap_factor, cap_scores

NUM_THREADS = 512
TILE_M = 128
LAUNCH_REGISTERS = 128  # of each of the 512 threads
NUM_SCORES = 2  # S tiles in tensor memory
CORRECTION_WARP, MMA_WARP, STORE_WARP, LOAD_WARP = 8, 12, 13, 14
WARPS_PER_TILE = 4
STORE_COLUMNS = 16  # columns of P converted and stored at a time: as many packed registers as it has pairs
TMEM_LANE = 65536  # step of a tensor-memory address from lane to lane
LOG2_E = 1.4426950408889634


class Problem(NamedTuple):
    """Runtime facts of the launch that every role reads. scale_log2 is of the scores that softmax sees, which are
    tanh(..) where they are capped; cap_factor (softmax.softcap) is None where they are not."""

    seqlen_q: Int32
    seqlen_k: Int32
    window_left: Int32
    window_right: Int32
    scale_log2: Float32
    cap_factor: Optional[Float32] = None


class Descales(NamedTuple):
    """Factors of fp8 inputs, (batch, key head): of q, k and v."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor


class Tiles(NamedTuple):
    """The order of work: tile counts and divisors (scheduling/)."""

    num_tiles: Int32
    num_m_blocks: cute.FastDivmodDivisorV2
    num_heads: cute.FastDivmodDivisorV2
    group_heads: cute.FastDivmodDivisorV2
    group_tiles: cute.FastDivmodDivisorV2
    last_group_heads: cute.FastDivmodDivisorV2
    last_group: Int32
    heads_per_kv: cute.FastDivmodDivisorV2


class Maps(NamedTuple):
    """Tensor maps and their coordinate tensors."""

    q: cute.CopyAtom
    q_coordinates: cute.Tensor
    k: cute.CopyAtom
    k_coordinates: cute.Tensor
    v: cute.CopyAtom
    v_coordinates: cute.Tensor
    out: cute.CopyAtom
    out_coordinates: cute.Tensor


def _copy_views(atom, shared, global_parts):
    """(shared view, global view) for cute.copy of operand tiles: modes (one tile, stage) and (one tile, tile index)."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(global_parts, 0, 3)
    )


def _piece(values, piece: int, columns: int):
    """Registers [piece * columns, (piece + 1) * columns) of a row, shaped for a tensor-memory copy."""
    return cute.make_tensor(values.iterator + piece * columns, cute.make_layout(((columns, 1), 1)))


class ForwardSm100:
    """Forward attention, one specialization; calling it is the host function of docs/formats.md section 1.

    Args:
        symbol: prefix of the device entry, which is `<symbol>_0`.
        dtype: cutlass.BFloat16 or cutlass.Float16, of q, k, v and out; or Float8E4M3FN or Float8E5M2, with bf16 out.
        head_dim: multiple of 16, at most 192. head_dim_v: at most 128, since two output tiles must fit tensor memory.
        mask: "full", "causal" or "local".
        kv_stages: slots of the ring that K and V share when they are of one size; otherwise V has one slot of its own
            and K the rest.
        separate_output: O tiles have shared memory of their own, else they lie over the Q tiles.
        softmax_registers, correction_registers, other_registers: a thread, multiples of 8.
        exp2_frequency, exp2_first_fragment: which columns take the FMA pipe, see softmax.exp2_emulation.
        rescale_threshold: log2 units, see softmax.conditional_rescaling.
        max_with_load: the row maximum of unmasked blocks comes with the scores from tensor memory (sm103a).
        max_offset: probabilities are stored times 2**max_offset, to use the range of an fp8 type.
        order: "natural" or "longest_first". persistent: one CTA per multiprocessor, else one per tile.
        has_softcap, has_sink: features of docs/formats.md; their arguments are then required.
        tile_n: keys of a block, a multiple of 64: the product starts when three quarters of P are there, and softmax
            and product must mean the same columns by that, or they wait for each other.
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
        tile_n: int = 128,
        kv_stages: int,
        softmax_registers: int,
        correction_registers: int,
        other_registers: int,
        exp2_frequency: int,
        exp2_first_fragment: int,
        rescale_threshold: float = 8.0,
        max_offset: float = 0.0,
        max_with_load: bool = False,
        order: str = "natural",
        persistent: bool = True,
        separate_output: bool = True,
        has_softcap: bool = False,
        has_sink: bool = False,
    ):
        if tile_n % (4 * STORE_COLUMNS):
            raise ValueError(f"tile_n {tile_n}: must be a multiple of {4 * STORE_COLUMNS}")
        self.has_softcap, self.has_sink = has_softcap, has_sink
        self.is_fp8 = dtype.width == 8
        self.dtype, self.head_dim, self.head_dim_v, self.mask, self.tile_n = dtype, head_dim, head_dim_v, mask, tile_n
        self.shares_ring = head_dim == head_dim_v
        self.k_stages, self.v_stages = (kv_stages, kv_stages) if self.shares_ring else self._ring_sizes(kv_stages)
        self.separate_output = separate_output
        self.registers = (softmax_registers, correction_registers, other_registers)
        self.exp2 = (exp2_frequency, exp2_first_fragment)
        self.rescale_threshold, self.max_offset = rescale_threshold, max_offset
        self.max_with_load = max_with_load and not has_softcap
        self.out_dtype = BFloat16 if self.is_fp8 else dtype
        self.mma_k = 256 // dtype.width  # an instruction sums over 32 bytes
        self.order, self.persistent = order, persistent
        self.tmem = forward_tmem(self.num_q_tiles, tile_n, head_dim_v, NUM_SCORES)
        self.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)

    ctas = OneCta()
    scores = OwnTiles()

    @property
    def num_q_tiles(self) -> int:
        """Q tiles of a CTA."""
        return self.scores.num_q_tiles

    @property
    def mma_m(self) -> int:
        """Query rows of a product: a Q tile of every CTA that shares it."""
        return TILE_M * self.ctas.count

    @property
    def k_parts(self) -> int:
        """Parts of 64 columns in which a K tile comes and goes. More than one where K and V do not share slots and too
        few whole tiles fit: then V has two slots, and a part of the next K tile comes while this one is in use."""
        is_split = not self.shares_ring and self.ctas.count == 1 and self.issues_chains
        return self.head_dim // 64 if is_split else 1

    @property
    def part_columns(self) -> int:
        """Columns of a part of a K tile."""
        return self.head_dim // self.k_parts

    @property
    def issues_chains(self) -> bool:
        """Whether products are issued in chains (mma.umma.multiply_chain), which are of 16-bit types. Windows and
        caps leave no registers for that."""
        has_registers = self.mask != LOCAL and not self.has_softcap and not self.is_fp8
        return has_registers or self.num_q_tiles == 1

    @property
    def is_short_of_registers(self) -> bool:
        """Whether the softmax carries no more between blocks than it must: with a cap, where ptxas spills (it does not
        in causal ones). Its CTAs take one work item each."""
        return self.has_softcap and self.mask != CAUSAL and not self.persistent

    @property
    def exponentials_first(self) -> bool:
        """Where products take less time than the exponentials, all of a block's are made before P is handed over, so
        that the exponential unit is not left idle. Not with windows, whose limits take the registers that it needs."""
        return self.head_dim_v <= self.tile_n // 2 and self.mask != LOCAL

    # ------------------------------------------------------------------------------------------------------------
    # Host

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
        sink: Optional[cute.Tensor] = None,
        softcap: Optional[Float32] = None,
        q_descale: Optional[cute.Tensor] = None,
        k_descale: Optional[cute.Tensor] = None,
        v_descale: Optional[cute.Tensor] = None,
    ):
        batch, seqlen_q, num_heads, _ = q.shape
        seqlen_k, num_heads_kv = k.shape[1], k.shape[2]
        mma_qk, mma_pv = self.mma_qk(), self.mma_pv()
        layouts = self._smem_layouts(mma_qk, mma_pv)
        maps = self._maps(q, k, v, out, mma_qk, mma_pv, layouts)
        tiles = self._tiles(batch, seqlen_q, seqlen_k, num_heads, num_heads_kv)
        scale_log2, factor = self._scales(softmax_scale, softcap)
        problem = Problem(
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            window_left=window_left,
            window_right=window_right,
            scale_log2=scale_log2,
            cap_factor=factor,
        )
        clusters = tiles.num_tiles
        if const_expr(self.persistent):
            clusters = cutlass.min(clusters, cutlass.max(num_sms // self.ctas.count, 1))
        descales = Descales(q_descale, k_descale, v_descale) if const_expr(self.is_fp8) else None
        self.kernel(maps, lse, sink, descales, problem, tiles, *layouts).launch(
            grid=(clusters * self.ctas.count, 1, 1),
            block=(NUM_THREADS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            **self.ctas.cluster,
        )

    def _scales(self, softmax_scale, softcap):
        """(scale_log2, cap_factor) of Problem."""
        if self.has_softcap:
            return softcap * Float32(LOG2_E), cap_factor(softmax_scale, softcap)
        return softmax_scale * Float32(LOG2_E), None

    def mma_qk(self):
        """S = Q K^T: both operands from shared memory. Made anew wherever products are issued: an instruction's
        accumulate flag is state, and state must not leave a loop of the device code."""
        return blackwell.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32,
            self.ctas.group, (self.mma_m, self.tile_n), tcgen05.OperandSource.SMEM,
        )  # fmt: skip

    def mma_pv(self):
        """O += P V: P from tensor memory, V from shared memory with the head dimension contiguous."""
        return blackwell.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32,
            self.ctas.group, (self.mma_m, self.head_dim_v), tcgen05.OperandSource.TMEM,
        )  # fmt: skip

    def _smem_layouts(self, mma_qk, mma_pv):
        """Shared-memory layouts of (Q tiles, K ring, V ring, O tiles)."""
        qk_tile, pv_tile = (self.mma_m, self.tile_n, self.head_dim), (self.mma_m, self.head_dim_v, self.tile_n)
        return (
            blackwell.make_smem_layout_a(mma_qk, qk_tile, self.dtype, self.num_q_tiles),
            blackwell.make_smem_layout_b(mma_qk, (*qk_tile[:2], self.part_columns), self.dtype, self.k_stages),
            blackwell.make_smem_layout_b(mma_pv, pv_tile, self.dtype, self.v_stages),
            blackwell.make_smem_layout_epi(
                self.out_dtype, LayoutEnum.ROW_MAJOR, (TILE_M, self.head_dim_v), self.num_q_tiles
            ),
        )

    def _maps(self, q, k, v, out, mma_qk, mma_pv, layouts):
        """Tensor maps over (sequence, dim, head, batch); V as (dim, sequence, head, batch)."""

        def reordered(tensor, modes):
            return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))

        def one_stage(layout):
            return cute.select(layout, mode=[0, 1, 2])

        rows = [1, 3, 2, 0]
        qk_tile, pv_tile = (self.mma_m, self.tile_n, self.head_dim), (self.mma_m, self.head_dim_v, self.tile_n)
        load = cpasync.CopyBulkTensorTileG2SOp(self.ctas.group)
        cluster = cute.tiled_divide(cute.make_layout((self.ctas.count, 1, 1)), (mma_qk.thr_id.shape,)).shape
        q_map = cute.nvgpu.make_tiled_tma_atom_A(
            load, reordered(q, rows), one_stage(layouts[0]), qk_tile, mma_qk, cluster
        )
        k_map = cute.nvgpu.make_tiled_tma_atom_B(
            load, reordered(k, rows), one_stage(layouts[1]), (*qk_tile[:2], self.part_columns), mma_qk, cluster
        )
        v_map = cute.nvgpu.make_tiled_tma_atom_B(
            load, reordered(v, [3, 1, 2, 0]), one_stage(layouts[2]), pv_tile, mma_pv, cluster
        )
        out_map = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            reordered(out, rows),
            cute.select(layouts[3], mode=[0, 1]),
            (TILE_M, self.head_dim_v),
        )
        return Maps(*q_map, *k_map, *v_map, *out_map)

    def _tiles(self, batch, seqlen_q, seqlen_k, num_heads, num_heads_kv):
        """Tile counts and fast divisors of the schedule; a "tile" here is the pair of Q tiles of one CTA."""
        divisor = cute.FastDivmodDivisorV2
        num_m_blocks = cute.ceil_div(seqlen_q, self.num_q_tiles * self.mma_m)
        num_tiles = num_m_blocks * num_heads * batch
        kv_bytes = seqlen_k.to(Int64) * ((self.head_dim + self.head_dim_v) * self.dtype.width // 8)
        group = longest_first.heads_per_group(kv_bytes, num_heads, num_heads_kv, batch).to(Int32)
        last_group = (num_heads * batch - 1) // group
        return Tiles(
            num_tiles=num_tiles,
            num_m_blocks=divisor(num_m_blocks),
            num_heads=divisor(num_heads),
            group_heads=divisor(group),
            group_tiles=divisor(group * num_m_blocks),
            last_group_heads=divisor(num_heads * batch - last_group * group),
            last_group=last_group,
            heads_per_kv=divisor(num_heads // num_heads_kv),
        )

    # ------------------------------------------------------------------------------------------------------------
    # Device

    @cute.kernel
    def kernel(
        self,
        maps: Maps,
        lse: cute.Tensor,
        sink: Optional[cute.Tensor],
        descales: Optional[Descales],
        problem: Problem,
        tiles: Tiles,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        o_layout: cute.ComposedLayout,
    ):
        smem = mem.SmemAllocator()
        bars = allocate(smem, self._barriers())
        tmem_pointer = smem.allocate_array(Int32, 1)
        # Rescale factors, then row sums, of both tiles; row maxima behind them.
        stats = smem.allocate_tensor(Float32, cute.make_layout((TILE_M, self.num_q_tiles, 2)), byte_alignment=16)
        sQ = smem.allocate_tensor(self.dtype, q_layout.outer, byte_alignment=1024, swizzle=q_layout.inner)
        sK = smem.allocate_tensor(self.dtype, k_layout.outer, byte_alignment=1024, swizzle=k_layout.inner)
        if const_expr(self.shares_ring):
            sV = cute.make_tensor(cute.recast_ptr(sK.iterator, v_layout.inner, dtype=self.dtype), v_layout.outer)
        else:
            sV = smem.allocate_tensor(self.dtype, v_layout.outer, byte_alignment=1024, swizzle=v_layout.inner)
        if const_expr(self.separate_output):
            sO = smem.allocate_tensor(self.out_dtype, o_layout.outer, byte_alignment=1024, swizzle=o_layout.inner)
        else:
            tiles_of_q = cute.make_layout(self.num_q_tiles, stride=TILE_M * self.head_dim)
            over_q = cute.append(cute.select(o_layout.outer, mode=[0, 1]), tiles_of_q)
            sO = cute.make_tensor(cute.recast_ptr(sQ.iterator, o_layout.inner, dtype=self.out_dtype), over_q)

        warp = arch.make_warp_uniform(arch.warp_idx())
        if warp == MMA_WARP:
            initialise(self._barriers(), bars)
            arch.alloc_tmem(self.tmem.num_columns, tmem_pointer, is_two_cta=self.ctas.count == 2)
        if warp == LOAD_WARP:
            for tensor_map in (maps.q, maps.k, maps.v, maps.out):
                cpasync.prefetch_descriptor(tensor_map)
        self.ctas.meet()
        mma_pv = self.mma_pv()
        tmem = arch.retrieve_tmem_ptr(Float32, 16, tmem_pointer)
        outputs = [accumulator_at(mma_pv, (self.mma_m, self.head_dim_v), tmem, c) for c in self.tmem.outputs]

        if warp < WARPS_PER_TILE * self.num_q_tiles:
            arch.setmaxregister_increase(self.registers[0])
            self._softmax_role(warp // WARPS_PER_TILE, bars, stats, tmem, descales, problem, tiles)
        elif self._is_correcting(warp):
            if const_expr(self.registers[1] > LAUNCH_REGISTERS):
                arch.setmaxregister_increase(self.registers[1])
            else:
                arch.setmaxregister_decrease(self.registers[1])
            self._correction_role(bars, stats, outputs, sO, lse, sink, descales, problem, tiles)
        else:
            arch.setmaxregister_decrease(self.registers[2])
            if (warp == MMA_WARP) & self.ctas.is_issuing():
                if const_expr(self.num_q_tiles == 1):
                    self._alternating_mma_role(bars, sQ, sK, sV, tmem, problem, tiles)
                else:
                    self._mma_role(bars, sQ, sK, sV, tmem, problem, tiles)
            elif warp == LOAD_WARP:
                self._load_role(bars, maps, sQ, sK, sV, problem, tiles)
            elif warp == STORE_WARP:
                self._store_role(bars, maps, sO, problem, tiles)
        self.ctas.meet()
        if warp == MMA_WARP:
            arch.relinquish_tmem_alloc_permit(is_two_cta=self.ctas.count == 2)
            arch.dealloc_tmem(tmem, self.tmem.num_columns, is_two_cta=self.ctas.count == 2)

    def _is_correcting(self, warp):
        """Whether a warp that is not softmax corrects."""
        return warp < MMA_WARP if self.num_q_tiles == 2 else (warp >= CORRECTION_WARP) & (warp < MMA_WARP)

    def _m_tile(self, m_block, i):
        """Number of this CTA's Q tile `i`, of 128 rows, of work item row `m_block`."""
        return self.ctas.own_tile(m_block * self.num_q_tiles + i)

    @cute.jit
    def _drain(self, bars, k_slot, v_slot, turn):
        """The load warp waits until every slot is free: a commit of the leader must not arrive in a CTA that has left.
        Commits of a CTA's own cannot."""
        if const_expr(self.ctas.count > 1):
            for _ in cutlass.range_constexpr(self.k_stages):
                arch.mbarrier_wait(bars.kv_empty + k_slot.stage, k_slot.phase ^ 1)
                k_slot = k_slot.next(self.k_stages)
            if const_expr(not self.shares_ring):
                for _ in cutlass.range_constexpr(self.v_stages):
                    arch.mbarrier_wait(bars.kv_empty + self._v_barrier(v_slot), v_slot.phase ^ 1)
                    v_slot = v_slot.next(self.v_stages)
            for i in cutlass.range_constexpr(self.num_q_tiles):
                arch.mbarrier_wait(bars.q_empty + i, (turn & 1) ^ 1)

    def _ring_sizes(self, kv_stages: int) -> tuple[int, int]:
        """Slots of K (of its parts) and of V, where their tiles differ in size. kv_stages: tiles K V K .. that fit."""
        if self.ctas.count > 1:
            return kv_stages - kv_stages // 2, kv_stages // 2
        if self.k_parts == 1:
            return kv_stages - 1, 1
        columns = (kv_stages - kv_stages // 2) * self.head_dim + kv_stages // 2 * self.head_dim_v
        return (columns - 2 * self.head_dim_v) // self.part_columns, 2

    def _num_slots(self) -> int:
        """Slots of K and V together; V's own ones, where it has them, come after K's."""
        return self.k_stages if self.shares_ring else self.k_stages + self.v_stages

    def _v_barrier(self, slot: Cursor):
        """Index of a V slot among all slots."""
        return slot.stage if self.shares_ring else slot.stage + self.k_stages

    def _next_k(self, k_slot: Cursor, v_slot: Cursor) -> Cursor:
        """The slot of the next K tile. A shared ring is filled K V K V ..."""
        return v_slot.next(self.k_stages) if self.shares_ring else k_slot.next(self.k_stages)

    def _next_v(self, k_slot: Cursor, v_slot: Cursor) -> Cursor:
        """The slot of the next V tile, after `k_slot` was taken for the K tile of the same block."""
        return k_slot.next(self.v_stages) if self.shares_ring else v_slot.next(self.v_stages)

    def _first_v(self, k_slot: Cursor) -> Cursor:
        """The slot of the first V tile of all."""
        return k_slot.next(self.v_stages) if self.shares_ring else Cursor(Int32(0), Int32(0))

    def _barriers(self) -> dict[str, Barrier]:
        """Who waits for whom: `full` says that something may be read, `empty` that it may be written again.

        Indexed by the Q tile, the slot, the S tile, or tile * 4 + warp. Loads announce their bytes.
        """
        tiles, scores, slots, rows = self.num_q_tiles, NUM_SCORES, self._num_slots(), WARPS_PER_TILE
        warps = rows * self.ctas.count  # that the issuing warp waits for: those of every CTA that shares a product
        return {
            "q_full": Barrier(tiles, 1),  # a Q tile is loaded
            "q_empty": Barrier(tiles, 1),  # the last product has read it (where O lies over it: O is stored)
            "kv_full": Barrier(slots, 1),  # a tile of K or V is loaded
            "kv_empty": Barrier(slots, 1),  # its product has read it
            "s_full": Barrier(scores, 1),  # the scores are complete, and with them every earlier product of the tile
            "p_ready": Barrier(scores, 2 * warps),  # three quarters of P stored, O rescaled by the correction
            "p_last": Barrier(scores, warps),  # the last quarter of P is stored
            "stats_full": Barrier(tiles * rows, 1),  # the rescale factors of a warp's 32 rows are written
            "stats_empty": Barrier(tiles * rows, 1),  # ... and read
            "o_full": Barrier(tiles, 1),  # the output accumulator is complete
            "store_full": Barrier(tiles, rows),  # the output tile is in shared memory
            "store_empty": Barrier(tiles, 1),  # ... and read by the TMA store
        }

    @cute.jit
    def _tile_at(self, index, tiles: Tiles):
        """(pair of Q tiles, head, batch) of work item `index`."""
        if const_expr(self.order == "longest_first"):
            return longest_first.tile_at(
                index, tiles.num_m_blocks.divisor, tiles.num_heads, tiles.group_heads, tiles.group_tiles,
                tiles.last_group, tiles.last_group_heads,
            )  # fmt: skip
        return single_tile.tile_at(index, tiles.num_m_blocks, tiles.num_heads)

    @cute.jit
    def _blocks(self, m_block, problem: Problem):
        """Key blocks of a pair of Q tiles, the same for every role."""
        return block_range(
            m_block,
            tile_m=self.num_q_tiles * self.mma_m,
            tile_n=self.tile_n,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            mask=self.mask,
            window_left=problem.window_left,
            window_right=problem.window_right,
        )

    # --- load -------------------------------------------------------------------------------------------------------

    @cute.jit
    def _load_role(self, bars, maps, sQ, sK, sV, problem, tiles):
        """Warp 14: K0 Q0 Q1 V0 K1 V1 ... of every tile; the whole warp runs along, the DSL elects for each copy."""
        index, turn = self.ctas.first_index(), Int32(0)
        k_slot = Cursor(Int32(0), Int32(0))
        v_slot = self._first_v(k_slot)
        v_bytes = self._bytes(self.tile_n, self.head_dim_v)
        while index < tiles.num_tiles:
            tile = self._tile_at(index, tiles)
            blocks = self._blocks(tile.m_block, problem)
            kv_head = tile.head // tiles.heads_per_kv
            thread_qk, thread_pv = self.mma_qk().get_slice(self.ctas.rank()), self.mma_pv().get_slice(self.ctas.rank())
            gQ = cute.local_tile(maps.q_coordinates, (self.mma_m, self.head_dim), (None, 0, tile.head, tile.batch))
            part_shape = (self.tile_n, self.part_columns)
            gK = cute.local_tile(maps.k_coordinates, part_shape, (None, None, kv_head, tile.batch))
            gV = cute.local_tile(maps.v_coordinates, (self.head_dim_v, self.tile_n), (0, None, kv_head, tile.batch))
            qs, gQ = _copy_views(maps.q, sQ, thread_qk.partition_A(gQ))
            ks, gK = _copy_views(maps.k, sK, thread_qk.partition_B(gK))
            vs, gV = _copy_views(maps.v, sV, thread_pv.partition_B(gV))
            block = blocks.end - 1
            k_slot = self._fill_parts(bars, maps.k, gK, ks, block, k_slot)
            for i in cutlass.range_constexpr(self.num_q_tiles):
                arch.mbarrier_wait(bars.q_empty + i, (turn & 1) ^ 1)
                self.ctas.expect(bars.q_full + i, self._bytes(TILE_M, self.head_dim))
                cute.copy(
                    maps.q, gQ[None, tile.m_block * self.num_q_tiles + i], qs[None, i], tma_bar_ptr=bars.q_full + i
                )
            place = self._v_barrier(v_slot)
            self._fill_slot(bars, maps.v, gV[None, block], vs[None, v_slot.stage], place, v_slot.phase, v_bytes)
            k_slot = self._next_k(k_slot, v_slot)
            v_slot = self._next_v(k_slot, v_slot)
            block = block - 1
            while block >= blocks.begin:
                k_slot = self._fill_parts(bars, maps.k, gK, ks, block, k_slot)
                place = self._v_barrier(v_slot)
                self._fill_slot(bars, maps.v, gV[None, block], vs[None, v_slot.stage], place, v_slot.phase, v_bytes)
                k_slot = self._next_k(k_slot, v_slot)
                v_slot = self._next_v(k_slot, v_slot)
                block = block - 1
            turn = turn + 1
            index = index + self.ctas.index_step()
        self._drain(bars, k_slot, v_slot, turn)

    def _k_slots(self, slot: Cursor):
        """The slots of all parts of a K tile whose first part is in `slot`."""
        slots = [slot]
        while len(slots) < self.k_parts:
            slots.append(slots[-1].next(self.k_stages))
        return slots

    def _fill_parts(self, bars, atom, gK, ks, block, slot):
        """Copy a K tile part by part; returns the slot of the last one."""
        slots, num_bytes = self._k_slots(slot), self._bytes(self.tile_n, self.part_columns)
        for part, (stage, phase) in enumerate(slots):
            self._fill_slot(bars, atom, gK[None, block, part], ks[None, stage], stage, phase, num_bytes)
        return slots[-1]

    def _bytes(self, rows: int, columns: int) -> int:
        """Bytes of a tile in the input type."""
        return rows * columns * self.dtype.width // 8

    @cute.jit
    def _fill_slot(self, bars, atom, source, target, place, phase, num_bytes: cutlass.Constexpr[int]):
        """Copy one K or V tile into slot number `place` once its last reader is done."""
        arch.mbarrier_wait(bars.kv_empty + place, phase ^ 1)
        self.ctas.expect(bars.kv_full + place, num_bytes // self.ctas.count)
        cute.copy(atom, source, target, tma_bar_ptr=bars.kv_full + place)

    # --- matrix products --------------------------------------------------------------------------------------------

    @cute.jit
    def _mma_role(self, bars, sQ, sK, sV, tmem, problem, tiles):
        """Warp 12: S = Q K^T of the next block goes out right behind O += P V of the same tile's last one."""
        mma_qk, mma_pv = self.mma_qk(), self.mma_pv()
        fQ, fK, fV = mma_qk.make_fragment_A(sQ), mma_qk.make_fragment_B(sK), mma_pv.make_fragment_B(sV)
        index, turn, block_count = self.ctas.first_index(), Int32(0), Int32(0)
        k_slot = Cursor(Int32(0), Int32(0))
        v_slot = self._first_v(k_slot)
        queries = [self.operand(fQ[None, None, None, i]) for i in range(self.num_q_tiles)]
        while index < tiles.num_tiles:
            tile = self._tile_at(index, tiles)
            blocks = self._blocks(tile.m_block, problem)
            first_keys = self._keys(fK, k_slot)
            for i in cutlass.range_constexpr(self.num_q_tiles):
                arch.mbarrier_wait(bars.q_full + i, turn & 1)
                self._issue_qk(bars, tmem, queries[i], first_keys, i)
            k_slot = self._k_slots(k_slot)[-1]
            accumulate = Int32(0)
            remaining = blocks.end - 1 - blocks.begin
            while remaining > 0:
                k_slot = self._next_k(k_slot, v_slot)
                keys = self._keys(fK, k_slot)
                values = self.operand(fV[None, None, None, v_slot.stage])
                arch.mbarrier_wait(bars.kv_full + self._v_barrier(v_slot), v_slot.phase)
                for i in cutlass.range_constexpr(self.num_q_tiles):
                    self._issue_pv(bars, tmem, values, i, block_count, accumulate)
                    if const_expr(i == self.num_q_tiles - 1):
                        self.ctas.commit(bars.kv_empty + self._v_barrier(v_slot))
                    self._issue_qk(bars, tmem, queries[i], keys, i)
                k_slot = self._k_slots(k_slot)[-1]
                accumulate = Int32(1)
                v_slot = self._next_v(k_slot, v_slot)
                block_count = block_count + 1
                remaining = remaining - 1
            if const_expr(self.separate_output):
                for i in cutlass.range_constexpr(self.num_q_tiles):
                    self.ctas.commit(bars.q_empty + i)
            last_values = self.operand(fV[None, None, None, v_slot.stage])
            arch.mbarrier_wait(bars.kv_full + self._v_barrier(v_slot), v_slot.phase)
            for i in cutlass.range_constexpr(self.num_q_tiles):
                self._issue_pv(bars, tmem, last_values, i, block_count, accumulate)
                self.ctas.commit(bars.o_full + i)
            self.ctas.commit(bars.kv_empty + self._v_barrier(v_slot))
            k_slot = self._next_k(k_slot, v_slot)
            v_slot = self._next_v(k_slot, v_slot)
            block_count = block_count + 1
            turn = turn + 1
            index = index + self.ctas.index_step()

    @cute.jit
    def _alternating_mma_role(self, bars, sQ, sK, sV, tmem, problem, tiles):
        """Warp 12 where one Q tile has two S tiles."""
        mma_qk, mma_pv = self.mma_qk(), self.mma_pv()
        fQ, fK, fV = mma_qk.make_fragment_A(sQ), mma_qk.make_fragment_B(sK), mma_pv.make_fragment_B(sV)
        index, turn, block_count = self.ctas.first_index(), Int32(0), Int32(0)
        k_slot = Cursor(Int32(0), Int32(0))
        queries = self.operand(fQ[None, None, None, 0])
        while index < tiles.num_tiles:
            tile = self._tile_at(index, tiles)
            blocks = self._blocks(tile.m_block, problem)
            num_blocks = blocks.end - blocks.begin
            arch.mbarrier_wait(bars.q_full, turn & 1)
            k_slot, block_count = self.scores.multiply_blocks(
                self, bars, tmem, queries, fK, fV, k_slot, block_count, num_blocks
            )
            turn = turn + 1
            index = index + self.ctas.index_step()

    def operand(self, fragment):
        """One stage of an operand in shared memory, for _issue."""
        return shared_operand(fragment) if self.issues_chains else fragment

    def issue(self, mma, column: int, tmem, a, b, begin: int, end: int, accumulate):
        """The accumulator at `column` (+)= A B over k-steps [begin, end)."""
        n = mma.shape_mnk[1]
        if self.issues_chains:
            descriptor = instruction_descriptor(self.dtype, self.mma_m, n, mma.op.b_major_mode == OperandMajorMode.MN)
            multiply_chain(tmem.toint() + column, a, b, begin, end, accumulate, descriptor, self.ctas.count)
        else:
            keep = accumulate if isinstance(accumulate, int) else accumulate != 0
            multiply(mma, accumulator_at(mma, (self.mma_m, n), tmem, column), a, b, begin, end, keep)

    def _keys(self, fK, slot: Cursor):
        """(slot, operand) of every part of a K tile."""
        return [(part, self.operand(fK[None, None, None, part.stage])) for part in self._k_slots(slot)]

    def _issue_qk(self, bars, tmem, queries, keys, i: int):
        """S[i] = Q[i] K^T. The first tile's product waits for K, the last one's releases it."""
        steps = self.part_columns // self.mma_k
        for part, (slot, operand) in enumerate(keys):
            if i == 0:
                arch.mbarrier_wait(bars.kv_full + slot.stage, slot.phase)
            if self.k_parts > 1:
                own = queries._replace(steps=queries.steps[part * steps : (part + 1) * steps])
            else:
                own = queries
            self.issue(self.mma_qk(), self.tmem.scores[i], tmem, own, operand, 0, steps, int(part > 0))
            if part == self.k_parts - 1:
                self.ctas.commit(bars.s_full + i)
            if i == self.num_q_tiles - 1:
                self.ctas.commit(bars.kv_empty + slot.stage)

    def _issue_pv(self, bars, tmem, values, i: int, block_count, accumulate):
        """O[i] (+)= P[i] V."""
        columns = self.tmem.probabilities[i], self.tmem.outputs[i]
        self.issue_product(bars, tmem, values, columns, i, block_count & 1, accumulate)

    def issue_product(self, bars, tmem, values, columns, place, parity, accumulate):
        """O (+)= P V, starting when three quarters of P are there. columns: of P and O; place, parity: P's barriers."""
        mma, (column, output) = self.mma_pv(), columns
        if self.issues_chains:
            probabilities = tensor_operand(tmem.toint() + column, self.tile_n)
        else:
            probabilities = operand_a_at(mma, (self.mma_m, self.tile_n), tmem, column, self.dtype)
        steps = self.tile_n // self.mma_k
        early = steps * 3 // 4
        arch.mbarrier_wait(bars.p_ready + place, parity)
        fence_after_wait()
        self.issue(mma, output, tmem, probabilities, values, 0, early, accumulate)
        arch.mbarrier_wait(bars.p_last + place, parity)
        fence_after_wait()
        self.issue(mma, output, tmem, probabilities, values, early, steps, 1)

    # --- softmax ----------------------------------------------------------------------------------------------------

    @cute.jit
    def _softmax_role(self, i, bars, stats, tmem, descales, problem, tiles):
        """Warps 4 i .. 4 i + 3, i = 0 or 1: thread t owns row t of Q tile i."""
        row = arch.thread_idx()[0] % TILE_M
        scores = accumulator_at(self.mma_qk(), (self.mma_m, self.tile_n), tmem, i * self.tile_n)
        index, block_count, stats_count = self.ctas.first_index(), Int32(0), Int32(0)
        while index < tiles.num_tiles:
            tile = self._tile_at(index, tiles)
            blocks = self._blocks(tile.m_block, problem)
            scaled = self._descaled(problem, descales, tile.batch, tile.head // tiles.heads_per_kv)
            block_count, stats_count = self._softmax_tile(
                i, bars, stats, scores, row, tile.m_block, blocks, scaled, block_count, stats_count
            )
            index = tiles.num_tiles if const_expr(self.is_short_of_registers) else index + self.ctas.index_step()

    def _row_number(self, m_block, i, row):
        """Query row of the calling thread; where registers are short, nothing made of it is kept between blocks."""
        number = self._m_tile(m_block, i) * TILE_M + row
        return held(number) if self.is_short_of_registers else number

    def _descaled(self, problem, descales, batch, kv_head):
        """The problem with its scales times the factors of q and k, where there are any."""
        if not self.is_fp8:
            return problem
        descale = descales.q[batch, kv_head] * descales.k[batch, kv_head]
        if self.has_softcap:
            return problem._replace(cap_factor=problem.cap_factor * descale)
        return problem._replace(scale_log2=problem.scale_log2 * descale)

    @cute.jit
    def _softmax_tile(
        self, i, bars, stats, scores, row, m_block, blocks, problem, block_count, stats_count, limits=None
    ):
        """All blocks of one tile; returns the counts after it. limits: [begin, end) of the keys that the row sees, if
        they cost more to compute than to keep."""
        reference, total = -Float32.inf, Float32(0.0)
        block = blocks.end - 1
        while block >= blocks.begin:
            place, parity = self.scores.place(i, block_count)
            here = self.scores.tile(scores, place, self.tile_n)
            arch.mbarrier_wait(bars.s_full + place, parity)
            fence_after_wait()
            values, largest = self._load_scores(here, row)
            if const_expr(self.has_softcap):
                cap_scores(values, problem.cap_factor)
            if (block >= blocks.inner_end) | (block < blocks.inner_begin):
                # The limits are computed where they are needed: registers are short between the blocks.
                begin, end = (
                    self._visible(self._row_number(m_block, i, row), problem) if const_expr(limits is None) else limits
                )
                first_key = block * self.tile_n
                score_rows.mask_row(values, begin - first_key, end - first_key, self.mask == LOCAL, True)
                if const_expr(self.max_with_load):
                    largest = score_rows.row_max(values)
            if const_expr(not self.max_with_load):
                largest = score_rows.row_max(values)
            reference, factor = score_rows.update_max(reference, largest, problem.scale_log2, self.rescale_threshold)
            self._send_stats(i, bars, stats, row, stats_count, factor, reference)
            safe = Float32(0.0) if reference == -Float32.inf else reference
            reference_log2 = safe * problem.scale_log2
            if const_expr(self.max_offset > 0):
                reference_log2 = reference_log2 - Float32(self.max_offset)
            sums = self._store_probabilities(place, bars, here, values, row, reference_log2, problem.scale_log2)
            total = total * factor + score_rows.total_of(sums)
            block, block_count, stats_count = block - 1, block_count + 1, stats_count + 1
        self._send_stats(i, bars, stats, row, stats_count, total, reference)
        return block_count, stats_count + 1

    @cute.jit
    def _visible(self, row, problem: Problem):
        """[begin, end) of the keys that a query row sees."""
        begin = Int32(0)
        if const_expr(self.mask == FULL):
            end = seqlen.visible_end(problem.seqlen_k)
        elif const_expr(self.mask == CAUSAL):
            end = cutlass.min(causal.visible_end(row, problem.seqlen_q, problem.seqlen_k), problem.seqlen_k)
        else:
            begin = sliding_window.visible_begin(row, problem.seqlen_q, problem.seqlen_k, problem.window_left)
            end = sliding_window.visible_end(row, problem.seqlen_q, problem.seqlen_k, problem.window_right)
        return begin, end

    @cute.jit
    def _load_scores(self, scores, row):
        """(scores of a row in registers, their maximum if it comes with them)."""
        values = cute.make_rmem_tensor((self.tile_n,), Float32)
        pieces, largest = self.tile_n // score_rows.FRAGMENT, Float32(0.0)
        if const_expr(self.max_with_load):
            load, source = correction.row_max_copies(scores, score_rows.FRAGMENT, row)
            maxima = [cute.make_rmem_tensor((1,), Float32) for _ in range(pieces)]
            for piece in cutlass.range_constexpr(pieces):
                part = _piece(values, piece, score_rows.FRAGMENT)
                cute.copy(load, source[None, None, piece], [part, _piece(maxima[piece], 0, 1)])
            arch.fence_view_async_tmem_load()
            first, *others = [maximum[0] for maximum in maxima]
            largest = first
            for other in others:
                largest = arch.fmax(largest, other)
        else:
            load, source = correction.row_copies(scores, score_rows.FRAGMENT, row, False)
            for piece in cutlass.range_constexpr(pieces):
                cute.copy(load, source[None, None, piece], _piece(values, piece, score_rows.FRAGMENT))
            arch.fence_view_async_tmem_load()
        return values, largest

    @cute.jit
    def _store_probabilities(self, i, bars, scores, values, row, reference_log2, scale_log2):
        """exp2 and conversion a few columns at a time, into the upper half of the score columns; returns sums of the
        row for score_rows.total_of."""
        packed = cute.make_tensor(
            scores.iterator + self.tile_n // 2,
            cute.make_layout(((TILE_M, self.tile_n * self.dtype.width // 32), 1, 1), stride=((TMEM_LANE, 1), 0, 0)),
        )
        store, target = correction.row_copies(packed, STORE_COLUMNS * self.dtype.width // 32, row, True)
        early, sums, summed = self.tile_n * 3 // 4, None, 0
        for begin in cutlass.range_constexpr(0, self.tile_n, STORE_COLUMNS):
            if const_expr(begin < early or not self.exponentials_first):
                score_rows.probabilities(values, begin, begin + STORE_COLUMNS, reference_log2, scale_log2, *self.exp2)
            self._store_piece(values, store, target, begin // STORE_COLUMNS)
            if const_expr(begin + STORE_COLUMNS == early):
                if const_expr(self.exponentials_first):
                    score_rows.probabilities(values, early, self.tile_n, reference_log2, scale_log2, *self.exp2)
                self._arrive_stored(bars.p_ready + i)
                if const_expr(self.exponentials_first):
                    sums, summed = score_rows.add_to_sums(None, values, 0, early), early
        self._arrive_stored(bars.p_last + i)
        return score_rows.add_to_sums(sums, values, summed, self.tile_n)

    @cute.jit
    def _arrive_stored(self, barrier):
        """Says that what this warp has stored to tensor memory is there."""
        arch.fence_view_async_tmem_store()
        fence_before_arrive()
        self.ctas.arrive_issuer(barrier)

    @cute.jit
    def _store_piece(self, values, store, target, piece: cutlass.Constexpr[int]):
        """Sixteen probabilities of a row in the input type, to tensor memory."""
        converted = cute.make_rmem_tensor((STORE_COLUMNS,), self.dtype)
        converted.store(_piece(values, piece, STORE_COLUMNS).load().reshape(converted.shape).to(self.dtype))
        words = _piece(cute.recast_tensor(converted, Float32), 0, STORE_COLUMNS * self.dtype.width // 32)
        cute.copy(store, words, target[None, None, piece])

    @cute.jit
    def _send_stats(self, i, bars, stats, row, count, value, reference):
        """Hand a row's rescale factor (at the end its sum) and reference to the correction warp of the same rows."""
        place = i * WARPS_PER_TILE + row // 32
        arch.mbarrier_wait(bars.stats_empty + place, (count & 1) ^ 1)
        stats[row, i, 0] = value
        stats[row, i, 1] = reference
        arrive_warp(bars.stats_full + place)

    # --- correction -------------------------------------------------------------------------------------------------

    @cute.jit
    def _correction_role(self, bars, stats, outputs, sO, lse, sink, descales, problem, tiles):
        """Warps 8 - 11: thread t owns row t of both Q tiles."""
        row = arch.thread_idx()[0] % TILE_M
        index, turn, stats_count = self.ctas.first_index(), Int32(0), Int32(0)
        while index < tiles.num_tiles:
            tile = self._tile_at(index, tiles)
            blocks = self._blocks(tile.m_block, problem)
            for i in cutlass.range_constexpr(self.num_q_tiles):
                self._receive_stats(i, bars, stats, row, stats_count)
                self.ctas.arrive_issuer(bars.p_ready + self.scores.place(i, stats_count - turn)[0])
            stats_count = stats_count + 1
            remaining = blocks.end - 1 - blocks.begin
            while remaining > 0:
                for i in cutlass.range_constexpr(self.num_q_tiles):
                    self._correct(i, bars, stats, outputs[i], row, stats_count, stats_count - turn)
                stats_count = stats_count + 1
                remaining = remaining - 1
            for i in cutlass.range_constexpr(self.num_q_tiles):
                total, reference = self._receive_stats(i, bars, stats, row, stats_count)
                self.scores.wait_output(bars, i, turn, stats_count - turn - 1)
                fence_after_wait()
                arch.mbarrier_wait(bars.store_empty + i, (turn & 1) ^ 1)
                kv_head = tile.head // tiles.heads_per_kv
                scale_log2, factor = self._descaled(problem, descales, tile.batch, kv_head).scale_log2, Float32(1.0)
                if const_expr(self.is_fp8):
                    factor = descales.v[tile.batch, kv_head]
                    reference, scale_log2 = reference * scale_log2 - Float32(self.max_offset), Float32(1.0)
                if const_expr(self.has_sink):
                    reference, total, kept = self._join_sink(reference, total, sink[tile.head], scale_log2)
                    factor, scale_log2 = factor * kept, Float32(1.0)
                self._write_output(outputs[i], sO, i, row, factor * correction.final_factor(total))
                fence_before_arrive()
                arch.fence_proxy("async.shared", space="cta")
                arrive_warp(bars.store_full + i)
                query = self._m_tile(tile.m_block, i) * TILE_M + row
                if query < problem.seqlen_q:
                    lse[tile.batch, tile.head, query] = correction.log_sum_exp(reference, total, scale_log2)
            stats_count = stats_count + 1
            turn = turn + 1
            index = index + self.ctas.index_step()

    @cute.jit
    def _correct(self, i: cutlass.Constexpr[int], bars, stats, output, row, stats_count, block_count=0):
        """Before block number `block_count`: rescale O if any row of the warp asks for it, and let its product go."""
        factor, _ = self._receive_stats(i, bars, stats, row, stats_count)
        self.scores.wait_product(bars, i, block_count - 1)
        if arch.vote_any_sync(factor < Float32(1.0)):
            fence_after_wait()
            correction.rescale(output, factor, row)
            fence_before_arrive()
        self.ctas.arrive_issuer(bars.p_ready + self.scores.place(i, block_count)[0])

    @cute.jit
    def _join_sink(self, reference, total, logit, scale_log2):
        """(reference in log2 units, row sum, factor of the unnormalised output) of a row, with the sink of its head."""
        return join_sink(reference * scale_log2, total, logit * Float32(LOG2_E))

    @cute.jit
    def _receive_stats(self, i: cutlass.Constexpr[int], bars, stats, row, count):
        place = i * WARPS_PER_TILE + row // 32
        arch.mbarrier_wait(bars.stats_full + place, count & 1)
        value, reference = stats[row, i, 0], stats[row, i, 1]
        arrive_warp(bars.stats_empty + place)
        return value, reference

    @cute.jit
    def _write_output(self, accumulator, sO, i: cutlass.Constexpr[int], row, factor):
        """O * factor in the output type to the swizzled shared tile, 16 bytes a store."""
        load, source = correction.row_copies(accumulator, correction.RESCALE_COLUMNS, row, False)
        for piece in cutlass.range_constexpr(self.head_dim_v // correction.RESCALE_COLUMNS):
            values = cute.make_rmem_tensor((correction.RESCALE_COLUMNS,), Float32)
            cute.copy(load, source[None, None, piece], _piece(values, 0, correction.RESCALE_COLUMNS))
            arch.fence_view_async_tmem_load()
            for j in cutlass.range_constexpr(0, correction.RESCALE_COLUMNS, 2):
                values[j], values[j + 1] = arch.mul_packed_f32x2((values[j], values[j + 1]), (factor, factor))
            converted = cute.make_rmem_tensor((correction.RESCALE_COLUMNS,), self.out_dtype)
            converted.store(values.load().to(self.out_dtype))
            line = cute.local_tile(sO[row, None, i], (correction.RESCALE_COLUMNS,), (piece,))
            cute.autovec_copy(converted, line)

    # --- store ------------------------------------------------------------------------------------------------------

    @cute.jit
    def _store_role(self, bars, maps, sO, problem, tiles):
        """Warp 13: output tiles to global memory; the tensor map clips rows beyond the sequence."""
        index, turn = self.ctas.first_index(), Int32(0)
        while index < tiles.num_tiles:
            tile = self._tile_at(index, tiles)
            gO = cute.local_tile(maps.out_coordinates, (TILE_M, self.head_dim_v), (None, 0, tile.head, tile.batch))
            shared, target = cpasync.tma_partition(
                maps.out, 0, cute.make_layout(1), cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
            )
            for i in cutlass.range_constexpr(self.num_q_tiles):
                arch.mbarrier_wait(bars.store_full + i, turn & 1)
                with arch.elect_one():
                    cute.copy(maps.out, shared[None, i], target[None, self._m_tile(tile.m_block, i)])
                    arch.cp_async_bulk_commit_group()
            for i in cutlass.range_constexpr(self.num_q_tiles):
                with arch.elect_one():
                    arch.cp_async_bulk_wait_group(self.num_q_tiles - 1 - i, read=True)
                    arch.mbarrier_arrive(bars.store_empty + i)
                    if const_expr(not self.separate_output):
                        arch.mbarrier_arrive(bars.q_empty + i)
            turn = turn + 1
            index = index + self.ctas.index_step()
        with arch.elect_one():
            arch.cp_async_bulk_wait_group(0, read=False)
