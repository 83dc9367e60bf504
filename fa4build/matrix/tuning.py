"""How a variant is computed: tiles, stages, registers per role, scheduler and softmax constants, as named rows.

Every row names where its numbers come from. A number that steers a kernel is written here and nowhere else; kernels get
it as a literal of their specialization module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from fa4build.errors import VariantError
from fa4build.matrix.arch import Arch, arch_named
from fa4build.matrix.axes import DTYPES_16_BIT, DTYPES_FP8, Variant, spell_head_dims
from fa4build.matrix.tuning_backward import (
    BackwardTuning,
    BackwardTuningRow,
    NoTuning,
    Sm100BackwardTuning,
    Sm100InThreeTuning,
    backward_row_for,
    has_backward_tuning,
)

WARPGROUP_THREADS = 128
ORDERS = ("natural", "longest_first")

# Largest finite value of each type that probabilities are stored in: the formats' definitions (IEEE 754 binary16,
# bfloat16, OCP 8-bit floating point e4m3 and e5m2).
MAX_FINITE = {"bf16": 3.3895313892515355e38, "fp16": 65504.0, "e4m3": 448.0, "e5m2": 57344.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a forward kernel is built. Values are not checked on construction: see `check_tuning`.

    Attributes:
        tile_m: query rows of one tile of a thread block.
        tile_n: keys of one block of the inner loop.
        q_stages: query tiles one thread block works on at a time.
        kv_stages: K or V tiles that shared memory holds; K and V share the ring on sm100a, have one each on sm90a.
        consumer_warpgroups: warpgroups that do the softmax.
        consumer_registers: registers of each of their threads.
        correction_registers: of a thread of the warpgroup that rescales the output, 0 where there is none.
        producer_registers: of a thread that loads, issues matrix instructions, stores or schedules.
        producer_warpgroups: warpgroups with that budget.
        order: in which thread blocks take tiles, one of ORDERS.
        persistent: a thread block takes tile after tile (one block per multiprocessor; on sm90a in the order
            longest_first two tiles each); otherwise one.
        separate_output: the output tile has shared memory of its own, otherwise it reuses Q's.
        ping_pong: consumer warpgroups take turns to issue matrix instructions.
        exp2_frequency: of each so many columns the last 4 use the polynomial; 0 is native exp2 alone.
        exp2_start: first 32-column fragment in which the polynomial may be used.
        rescale_threshold: how far the row maximum may rise before the output is rescaled, log2 units.
        max_offset: probabilities are stored times 2**max_offset.
        max_with_load: row maxima of unmasked blocks come with the load from tensor memory (sm103a).
    """

    tile_m: int
    tile_n: int
    q_stages: int
    kv_stages: int
    consumer_warpgroups: int
    consumer_registers: int
    correction_registers: int
    producer_registers: int
    producer_warpgroups: int
    order: str
    persistent: bool
    separate_output: bool
    ping_pong: bool
    exp2_frequency: int
    exp2_start: int
    rescale_threshold: float
    max_offset: float
    max_with_load: bool = False

    @property
    def registers(self) -> int:
        """Registers of all threads of one thread block."""
        consumers = self.consumer_warpgroups * self.consumer_registers
        producers = self.producer_warpgroups * self.producer_registers
        return WARPGROUP_THREADS * (consumers + self.correction_registers + producers)


def check_tuning(tuning: Tuning, *, arch: Arch, dtype: str) -> None:
    """Refuses a tuning that cannot run on the target or would overflow the type that probabilities are stored in.

    Raises: VariantError if a role's budget is none that setmaxnreg takes, the roles' registers together exceed the
        register file, the order is unknown, or max_offset + rescale_threshold >= log2(largest finite value of dtype).
    """
    if tuning.order not in ORDERS:
        raise VariantError(f"order {tuning.order!r} is unknown; allowed: {', '.join(ORDERS)}.")
    _check_registers(tuning, arch)
    peak_log2, limit_log2 = tuning.max_offset + tuning.rescale_threshold, math.log2(MAX_FINITE[dtype])
    if peak_log2 >= limit_log2:
        raise VariantError(
            f"max_offset + rescale_threshold is {peak_log2}, but {dtype} holds no 2**{peak_log2} "
            f"(limit {limit_log2:.3f}). Lower the threshold."
        )


def _check_registers(tuning: Tuning, arch: Arch) -> None:
    for name in ("consumer_registers", "correction_registers", "producer_registers"):
        value = getattr(tuning, name)
        has_role = name != "correction_registers" or value != 0
        if has_role and (value % 8 or not 24 <= value <= 256):
            raise VariantError(f"{name} is {value}; setmaxnreg takes multiples of 8 from 24 to 256.")
    if tuning.registers > arch.register_file:
        raise VariantError(
            f"roles need {tuning.registers} registers, {arch.name} has {arch.register_file}. Lower a role's budget."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRow:
    """A tuning with the name of its row and the source of its numbers, both for `explain` only."""

    name: str
    source: str
    tuning: Tuning


AnyTuning = Tuning | BackwardTuning | Sm100BackwardTuning | Sm100InThreeTuning | NoTuning
WITHOUT_TUNING = ("fwd_combine", "bwd_preprocess", "bwd_postprocess")


def has_tuning(variant: Variant) -> bool:
    """Whether there is a row for this variant; not whether it is valid or written."""
    return variant.op == "fwd" or has_backward_tuning(variant)


def tuning_row_for(variant: Variant) -> TuningRow | BackwardTuningRow:
    """The row that decides how a valid variant is built.

    Raises: VariantError if there is none.
    """
    if not has_tuning(variant):
        raise VariantError(f"{variant.id}: there is no tuning for op {variant.op} yet.")
    if variant.op == "bwd":
        return backward_row_for(variant)
    row = _sm90_forward(variant) if variant.arch == "sm90a" else _sm100_forward(variant)
    check_tuning(row.tuning, arch=arch_named(variant.arch), dtype=variant.dtype)
    return row


def tuning_for(variant: Variant) -> AnyTuning:
    """How this variant is built. Raises: VariantError if it needs a row and has none."""
    return NoTuning() if variant.op in WITHOUT_TUNING else tuning_row_for(variant).tuning


def exp2_mode(tuning: Tuning) -> str:
    """How powers of two are computed, in words: derived from arch and tuning, no axis of its own."""
    if tuning.exp2_frequency == 0:
        return "native"
    share = emulated_share(tuning)
    return f"{share:.2%} of each row on the FMA pipe, the rest native"


def emulated_share(tuning: Tuning) -> float:
    """Share of a tile's columns whose exp2 is the polynomial.

    A fragment is 32 columns; the last 4 columns of each whole or partial period of `exp2_frequency` columns are
    emulated, counted within the fragment, from fragment `exp2_start` on and never in the last fragment.
    """
    if tuning.exp2_frequency == 0:
        return 0.0
    fragments = range(tuning.exp2_start, tuning.tile_n // 32 - 1)
    per_fragment = sum(column % tuning.exp2_frequency >= tuning.exp2_frequency - 4 for column in range(32))
    return len(fragments) * per_fragment / tuning.tile_n


# --- rules that hold for every forward row ----------------------------------------------------------------------------


def _rescale(dtype: str) -> tuple[float, float]:
    """(rescale_threshold, max_offset), log2 units.

    16-bit types hold 2**8 with room, so the maximum may lag by 8. fp8 has no room to lag, and uses its range by the
    offset instead: 2**8 is below 448, the largest e4m3.
    """
    return (0.0, 8.0) if dtype in DTYPES_FP8 else (8.0, 0.0)


# --- sm90a forward ----------------------------------------------------------------------------------------------------

_SM90_TILES_SOURCE = "fastest of the candidates of benchmarks/notes_forward_sm90.md on an H200"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sm90Row:
    """A row of the table below; `registers` is (consumer, producer)."""

    head_dims: tuple[int, int]
    masks: tuple[str, ...]
    tile_m: int
    tile_n: int
    registers: tuple[int, int]
    kv_stages: int = 2
    q_stages: int = 1
    order: str = "natural"
    persistent: bool = False
    separate_output: bool = False
    ping_pong: bool = True
    source: str = _SM90_TILES_SOURCE


_THREE_CONSUMERS, _TWO_CONSUMERS = (160, 32), (240, 24)

# Causal tiles differ in length, so the longest go first. Several tiles a block where that was faster.
_SM90_FORWARD: tuple[_Sm90Row, ...] = (
    _Sm90Row(
        head_dims=(64, 64),
        masks=("full",),
        tile_m=192,
        tile_n=128,
        registers=_THREE_CONSUMERS,
        kv_stages=3,
        persistent=True,
        separate_output=True,
    ),
    _Sm90Row(
        head_dims=(64, 64),
        masks=("causal",),
        tile_m=192,
        tile_n=128,
        registers=_THREE_CONSUMERS,
        kv_stages=3,
        order="longest_first",
        persistent=True,
        separate_output=True,
    ),
    _Sm90Row(head_dims=(64, 64), masks=("local",), tile_m=192, tile_n=96, registers=_THREE_CONSUMERS),
    _Sm90Row(
        head_dims=(96, 96),
        masks=("full",),
        tile_m=192,
        tile_n=112,
        registers=_THREE_CONSUMERS,
        persistent=True,
        separate_output=True,
    ),
    _Sm90Row(
        head_dims=(96, 96), masks=("causal",), tile_m=192, tile_n=96, registers=_THREE_CONSUMERS, order="longest_first"
    ),
    _Sm90Row(
        head_dims=(96, 96),
        masks=("local",),
        tile_m=128,
        tile_n=128,
        registers=_TWO_CONSUMERS,
        persistent=True,
        separate_output=True,
    ),
    _Sm90Row(
        head_dims=(128, 128),
        masks=("full",),
        tile_m=128,
        tile_n=128,
        registers=_TWO_CONSUMERS,
        persistent=True,
        separate_output=True,
    ),
    _Sm90Row(
        head_dims=(128, 128),
        masks=("causal",),
        tile_m=128,
        tile_n=128,
        registers=_TWO_CONSUMERS,
        order="longest_first",
        persistent=True,
        separate_output=True,
    ),
    _Sm90Row(
        head_dims=(128, 128),
        masks=("local",),
        tile_m=128,
        tile_n=128,
        registers=_TWO_CONSUMERS,
        persistent=True,
        separate_output=True,
    ),
    _Sm90Row(
        head_dims=(192, 128),
        masks=("full",),
        tile_m=128,
        tile_n=112,
        registers=_TWO_CONSUMERS,
        persistent=True,
        separate_output=True,
        ping_pong=False,
    ),
    _Sm90Row(
        head_dims=(192, 128), masks=("causal",), tile_m=128, tile_n=128, registers=_TWO_CONSUMERS, order="longest_first"
    ),
    _Sm90Row(head_dims=(192, 128), masks=("local",), tile_m=128, tile_n=128, registers=_TWO_CONSUMERS),
    _Sm90Row(head_dims=(256, 256), masks=("full",), tile_m=128, tile_n=80, registers=_TWO_CONSUMERS, persistent=True),
    _Sm90Row(
        head_dims=(256, 256),
        masks=("causal",),
        tile_m=128,
        tile_n=64,
        registers=_TWO_CONSUMERS,
        order="longest_first",
        ping_pong=False,
    ),
    _Sm90Row(head_dims=(256, 256), masks=("local",), tile_m=128, tile_n=64, registers=_TWO_CONSUMERS, ping_pong=False),
)


# Kernels over packed sequences compute as the dense ones do, but their copying warps search and gather: these get as
# many registers as they need to spill nothing (ptxas V13.4.59). A CTA of several tiles takes two, in every order.
_SM90_PACKED_REGISTERS = {
    (_THREE_CONSUMERS, "varlen"): (160, 32),
    (_THREE_CONSUMERS, "paged"): (160, 32),
    (_TWO_CONSUMERS, "varlen"): (232, 40),
    (_TWO_CONSUMERS, "paged"): (224, 56),
}
_SM90_SPLIT_SOURCE = (
    "64 query rows, since split keys are for few queries; as many stages as fit, since their bytes in flight bound it"
)
_SM90_SPLIT_REGISTERS = (256, 256)  # one consumer warpgroup: no role has to give any away
_SM90_SPLIT_TILES = {(64, 64): (128, 6), (96, 96): (128, 4), (128, 128): (128, 3), (192, 128): (128, 2)}
_SM90_SPLIT_TILES |= {(256, 256): (64, 3)}  # head_dims -> (tile_n, kv_stages)


def _no_row(variant: Variant, table: str) -> VariantError:
    """What is missing where a value was added to an axis and no tuning."""
    return VariantError(
        f"{variant.id}: {table} in fa4build/matrix/tuning.py has no row for {spell_head_dims(variant.head_dims)} and "
        f"mask {variant.mask}. Add one; docs/guide/add-a-value.md shows how."
    )


def _sm90_row(variant: Variant) -> _Sm90Row:
    if variant.split:
        if variant.head_dims not in _SM90_SPLIT_TILES:
            raise _no_row(variant, "_SM90_SPLIT_TILES")
        tile_n, kv_stages = _SM90_SPLIT_TILES[variant.head_dims]
        return _Sm90Row(
            head_dims=variant.head_dims,
            masks=("full", "causal", "local"),
            tile_m=64,
            tile_n=tile_n,
            registers=_SM90_SPLIT_REGISTERS,
            kv_stages=kv_stages,
            ping_pong=False,
            source=_SM90_SPLIT_SOURCE,
        )
    rows = (row for row in _SM90_FORWARD if row.head_dims == variant.head_dims and variant.mask in row.masks)
    row = next(rows, None)
    if row is None:
        raise _no_row(variant, "_SM90_FORWARD")
    if variant.layout == "dense":
        return row
    is_tight = variant.softcap or (variant.layout, variant.head_dim) == ("paged", 96)
    if is_tight and row.registers == _THREE_CONSUMERS:
        # The cap's temporaries spill in the 160 registers of three consumers, pages of 96 columns in the 32 beside.
        # With fewer keys a tile, the launch would have too few registers for what two consumers ask for.
        tile_n = row.tile_n if variant.softcap else 128
        row = replace(row, tile_m=128, tile_n=tile_n, registers=_TWO_CONSUMERS)
    # Two tiles of Q take the place of one of Q and one of O: the next is gathered while this one is computed.
    overlaps = row.persistent and row.separate_output and row.head_dims != (192, 128)
    return replace(
        row,
        registers=_SM90_PACKED_REGISTERS[row.registers, variant.layout],
        q_stages=2 if overlaps else 1,
        persistent=row.persistent and row.head_dims != (192, 128),  # two tiles of 192 columns do not fit beside K and V
        separate_output=False,
    )


def _sm90_forward(variant: Variant) -> TuningRow:
    row = _sm90_row(variant)
    consumer_registers, producer_registers = row.registers
    rescale_threshold, max_offset = _rescale(variant.dtype)
    tuning = Tuning(
        tile_m=row.tile_m,
        tile_n=row.tile_n,
        q_stages=row.q_stages,
        kv_stages=row.kv_stages,
        consumer_warpgroups=row.tile_m // 64,  # a warpgroup's matrix instruction has 64 rows
        consumer_registers=consumer_registers,
        correction_registers=0,
        producer_registers=producer_registers,
        producer_warpgroups=1,
        order=row.order,
        persistent=row.persistent,
        separate_output=row.separate_output,
        ping_pong=row.ping_pong,
        exp2_frequency=0,  # matrix and exp2 units are in balance on Hopper: nothing to gain from emulation
        exp2_start=0,
        rescale_threshold=rescale_threshold,
        max_offset=max_offset,
    )
    kind = ("" if variant.layout == "dense" else "-packed") + ("-split" if variant.split else "")
    name = f"fwd-sm90a{kind}-{spell_head_dims(row.head_dims)}-{'|'.join(row.masks)}"
    return TuningRow(name=name, source=row.source, tuning=tuning)


# --- sm100a and sm103a forward ----------------------------------------------------------------------------------------

_FA4 = "exp2 and register table of flash-attn-4 4.0.0b36 for SM100 forward"
_FA4_EXP2_OUR_REGISTERS = (
    "exp2 table of flash-attn-4 4.0.0b36 for SM100 forward; registers: the most for softmax with which ptxas V13.4.59 "
    "spills nothing in our roles"
)
_ONE_CTA_REGISTERS = (184, 104, 40)
_SOFTCAP_REGISTERS = (192, 88, 40)  # a capped row needs a few more registers, the correction has them to spare
_WIDE_SOFTCAP_REGISTERS = (184, 96, 48)  # but for causal masks ptxas spills at the former, and not at these
_FP8_LOCAL_REGISTERS = (176, 96, 64)  # head_dim 64: ptxas spills at those of the other masks
_PACKED_REGISTERS = (184, 80, 64)  # a row keeps the keys it sees, and loading keeps pages
_TILE_M = 128  # rows of tensor memory: one thread a row
_TILE_N = 128
_KV_BYTES_LIMIT = 224 * 1024  # of the 227 KiB, 3 are for barriers and statistics
_MAX_KV_STAGES = 32
_BLOCK_REGISTERS_PER_THREAD = 512  # summed over the four warpgroups: 65536 / 128 threads


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sm100Row:
    """Registers are (softmax, correction, other); None is the default budget, whose rest goes to `other`."""

    name: str
    matches: Callable[[Variant], bool]
    exp2_frequency: int
    exp2_start: int = 0
    registers: tuple[int, int, int] | None = None
    tile_n: int = _TILE_N
    source: str = _FA4


def _key(
    arch: str, cta_group: int, head_dim: int, masks: tuple[str, ...], dtypes: tuple[str, ...]
) -> Callable[[Variant], bool]:
    """Matches one cell of the source's table; its "not causal" is full and local alike."""
    return lambda v: (
        v.arch == arch and v.cta_group == cta_group and v.head_dim == head_dim and v.mask in masks and v.dtype in dtypes
    )


_FULL, _NOT_CAUSAL, _CAUSAL, _ANY_MASK = ("full",), ("full", "local"), ("causal",), ("full", "causal", "local")
_B16, _FP8 = DTYPES_16_BIT, DTYPES_FP8

# First match wins. Rows with exp2_frequency 0 leave emulation off.
_SM100_FORWARD: tuple[_Sm100Row, ...] = (
    _Sm100Row(
        name="hd64",
        matches=lambda v: v.arch == "sm100a" and v.head_dim < 96 and v.dtype in _B16,
        exp2_frequency=16,
        exp2_start=1,
        registers=_ONE_CTA_REGISTERS,
        source=_FA4_EXP2_OUR_REGISTERS,
    ),
    _Sm100Row(
        name="hd64-fp8",
        matches=lambda v: v.arch == "sm100a" and v.head_dim < 96 and v.dtype in _FP8,
        exp2_frequency=16,
        exp2_start=1,
        registers=(168, 96, 80),
    ),
    _Sm100Row(
        name="hd128-2cta",
        matches=_key("sm100a", 2, 128, _NOT_CAUSAL, _B16),
        exp2_frequency=16,
        exp2_start=1,
        registers=_ONE_CTA_REGISTERS,
        source="flash-attn-4 4.0.0b36 has frequency 10; 16 spills nothing, and the products bound the time",
    ),
    _Sm100Row(
        name="hd128-causal",
        matches=_key("sm100a", 1, 128, _CAUSAL, _B16),
        exp2_frequency=16,
        exp2_start=1,
        registers=_ONE_CTA_REGISTERS,
        source=_FA4_EXP2_OUR_REGISTERS,
    ),
    _Sm100Row(
        name="hd192-2cta",
        matches=_key("sm100a", 2, 192, _NOT_CAUSAL, _B16),
        exp2_frequency=16,
        registers=_ONE_CTA_REGISTERS,
        source=_FA4_EXP2_OUR_REGISTERS,
    ),
    _Sm100Row(
        name="hd192-causal",
        matches=_key("sm100a", 1, 192, _CAUSAL, _B16),
        exp2_frequency=32,
        exp2_start=1,
        registers=_ONE_CTA_REGISTERS,
        source=_FA4_EXP2_OUR_REGISTERS,
    ),
    _Sm100Row(
        name="hd256-2cta", matches=_key("sm100a", 2, 256, _ANY_MASK, _B16), exp2_frequency=14, registers=(256, 160, 48)
    ),
    _Sm100Row(
        name="hd256-packed",
        matches=lambda v: v.head_dim == 256 and v.cta_group == 1 and v.layout != "dense",
        exp2_frequency=0,
        registers=(200, 120, 96),
        tile_n=64,
        source=(
            "native exp2 as flash-attn-4 4.0.0b36 has it beyond head_dim 128 in one CTA; five tiles of 64 keys fit: in "
            "the timing model 128 keys take 3300 clocks, with tiles of 128, of which two fit, 6513; registers: no role "
            "spills (ptxas V13.4.59)"
        ),
    ),
    _Sm100Row(
        name="hd128-2cta-fp8",
        matches=_key("sm100a", 2, 128, _NOT_CAUSAL, _FP8),
        exp2_frequency=10,
        exp2_start=1,
        registers=(160, 72, 120),
    ),
    _Sm100Row(name="hd128-causal-fp8", matches=_key("sm100a", 1, 128, _CAUSAL, _FP8), exp2_frequency=8, exp2_start=1),
    _Sm100Row(
        name="hd64-fp8",
        matches=lambda v: v.arch == "sm103a" and v.head_dim < 96 and v.dtype in _FP8,
        exp2_frequency=0,
        registers=(168, 96, 80),
    ),
    _Sm100Row(
        name="hd64",
        matches=lambda v: v.arch == "sm103a" and v.head_dim < 96,
        exp2_frequency=0,
        registers=_ONE_CTA_REGISTERS,
        source=_FA4_EXP2_OUR_REGISTERS,
    ),
    _Sm100Row(
        name="hd128-2cta",
        matches=_key("sm103a", 2, 128, _NOT_CAUSAL, _B16),
        exp2_frequency=0,
        registers=_ONE_CTA_REGISTERS,
        source=_FA4_EXP2_OUR_REGISTERS,
    ),
    _Sm100Row(
        name="hd128-causal",
        matches=_key("sm103a", 1, 128, _CAUSAL, _B16),
        exp2_frequency=0,
        registers=_ONE_CTA_REGISTERS,
        source=_FA4_EXP2_OUR_REGISTERS,
    ),
    _Sm100Row(
        name="hd256-2cta",
        matches=_key("sm103a", 2, 256, _ANY_MASK, _B16),
        exp2_frequency=0,
        registers=(256, 160, 48),
        source="registers of flash-attn-4 4.0.0b36 for SM100 forward; native exp2 as in its rows for SM103",
    ),
    _Sm100Row(
        name="hd192-2cta",
        matches=_key("sm103a", 2, 192, _NOT_CAUSAL, _B16),
        exp2_frequency=0,
        registers=_ONE_CTA_REGISTERS,
        source=_FA4_EXP2_OUR_REGISTERS,
    ),
    _Sm100Row(
        name="hd192-causal",
        matches=_key("sm103a", 1, 192, _CAUSAL, _B16),
        exp2_frequency=0,
        registers=_ONE_CTA_REGISTERS,
        source=_FA4_EXP2_OUR_REGISTERS,
    ),
    _Sm100Row(
        name="hd96-local",
        matches=_key("sm100a", 1, 96, ("local",), _B16),
        exp2_frequency=16,
        exp2_start=1,
        registers=(184, 96, 48),
        source=_FA4_EXP2_OUR_REGISTERS,
    ),
    _Sm100Row(
        name="hd96-local",
        matches=_key("sm103a", 1, 96, ("local",), _B16),
        exp2_frequency=0,
        registers=(184, 96, 48),
        source=_FA4_EXP2_OUR_REGISTERS,
    ),
    # Emulation pays up to head_dim 128: beyond it the matrix instructions take longer than the exponentials.
    _Sm100Row(
        name="default",
        matches=lambda v: v.arch == "sm100a" and v.head_dim <= 128,
        exp2_frequency=16,
        exp2_start=1,
        source=_FA4_EXP2_OUR_REGISTERS,
    ),
    _Sm100Row(name="default-native", matches=lambda v: True, exp2_frequency=0, source=_FA4_EXP2_OUR_REGISTERS),
)


def _default_registers(q_stages: int) -> tuple[int, int, int]:
    """(softmax, correction, other) where no row says otherwise: what is left over, a multiple of 8, at most 128."""
    softmax, correction, _ = _ONE_CTA_REGISTERS
    rest = (_BLOCK_REGISTERS_PER_THREAD - softmax * q_stages - correction) // (3 - q_stages)
    return softmax, correction, min(rest // 8 * 8, 128)


def _sm100_has_separate_output(variant: Variant) -> bool:
    """Rows of packed queries pass through the memory of the queries they belong to, a warp at a time."""
    return variant.layout == "dense" and variant.head_dim < 192


def _sm100_kv_stages(variant: Variant, q_stages: int, tile_n: int) -> int:
    """K or V tiles that fit beside Q and the output tile; a tile is halved when two blocks share it.

    The output tile shares Q's memory where both would leave too little room. Source: shared-memory plan of
    flash-attn-4 4.0.0b36 for SM100 forward.
    """
    bytes_in = 1 if variant.dtype in DTYPES_FP8 else 2
    bytes_out = 2
    q_bytes = q_stages * _TILE_M * variant.head_dim * bytes_in
    out_bytes = q_stages * _TILE_M * variant.head_dim_v * bytes_out
    beside = q_bytes + out_bytes if _sm100_has_separate_output(variant) else max(q_bytes, out_bytes)
    slots = [tile_n * columns * bytes_in // variant.cta_group for columns in variant.head_dims]
    room, stages = _KV_BYTES_LIMIT - beside, 0
    while room >= slots[stages % 2] and stages < _MAX_KV_STAGES:
        room -= slots[stages % 2]
        stages += 1
    return stages


def _sm100_forward(variant: Variant) -> TuningRow:
    row = next(row for row in _SM100_FORWARD if row.matches(variant))
    q_stages = 1 if variant.head_dim_v == 256 else 2  # two accumulators of 256 columns would fill tensor memory
    softmax, correction, other = row.registers or _default_registers(q_stages)
    if variant.layout != "dense" and q_stages == 2:
        softmax, correction, other = _PACKED_REGISTERS
    elif variant.softcap and q_stages == 2:
        softmax, correction, other = _SOFTCAP_REGISTERS if variant.mask == "causal" else _WIDE_SOFTCAP_REGISTERS
    elif variant.dtype in DTYPES_FP8 and variant.head_dim == 64 and variant.mask == "local":
        softmax, correction, other = _FP8_LOCAL_REGISTERS
    rescale_threshold, max_offset = _rescale(variant.dtype)
    tuning = Tuning(
        tile_m=_TILE_M,
        tile_n=row.tile_n,
        q_stages=q_stages,
        kv_stages=_sm100_kv_stages(variant, q_stages, row.tile_n),
        consumer_warpgroups=q_stages,
        consumer_registers=softmax,
        correction_registers=correction,
        producer_registers=other,
        producer_warpgroups=3 - q_stages,
        order="longest_first" if variant.layout == "dense" and variant.mask != "full" else "natural",
        persistent=variant.layout == "dense" and variant.mask == "full" and not (variant.split or variant.softcap),
        separate_output=_sm100_has_separate_output(variant),
        ping_pong=False,  # the two softmax warpgroups are kept apart by the correction warpgroup instead
        exp2_frequency=row.exp2_frequency,
        exp2_start=row.exp2_start,
        rescale_threshold=rescale_threshold,
        max_offset=max_offset,
        max_with_load=variant.arch == "sm103a" and q_stages == 2,
    )
    return TuningRow(name=f"fwd-{variant.arch}-{row.name}", source=row.source, tuning=tuning)
