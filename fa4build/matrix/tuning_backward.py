"""How backward kernels are computed: the rows of `tuning.py` for op `bwd`, and the absence of rows for its helpers."""

from __future__ import annotations

from dataclasses import dataclass

from fa4build.matrix.axes import Variant, spell_head_dims

WARPGROUP_THREADS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTuning:
    """Of a kernel that is bound by memory and has nothing to choose: preprocess and postprocess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardTuning:
    """How the main backward kernel of sm90a is built. A thread block owns 128 keys, 64 a consumer warpgroup.

    Attributes:
        tile_m: query rows of a tile. 64: the consumers split the columns of dQ, 128: its rows.
        q_stages, dout_stages: tiles of Q and of dO that shared memory holds.
        dscores_stages: tiles of dS that shared memory holds; with 2 the consumers meet once a tile, with 1 twice.
        dscores_by_keys: dS lies in shared memory contiguous along keys, else along queries.
        overlaps_dk: the product for dK runs on into the next tile.
        dq_chunk: columns of dQ that a consumer hands over at a time, 0 for its whole share.
        dv_q_stages, dv_dout_stages: of the kernel that computes dV alone, where dV has one of its own; else 0.
        consumer_registers: registers of each thread that computes.
        producer_registers: of each thread that loads or stores.
    """

    tile_m: int
    q_stages: int
    dout_stages: int
    dscores_stages: int
    dscores_by_keys: bool
    overlaps_dk: bool
    dq_chunk: int
    dv_q_stages: int
    dv_dout_stages: int
    consumer_registers: int
    producer_registers: int

    @property
    def correction_registers(self) -> int:
        """No role corrects: 0."""
        return 0

    @property
    def registers(self) -> int:
        """Registers of all threads of one thread block: two consumer warpgroups, one that loads and stores."""
        return WARPGROUP_THREADS * (2 * self.consumer_registers + self.producer_registers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm100BackwardTuning:
    """How the main backward kernel of sm100a and sm103a is built. Tiles are 128 keys by 128 queries.

    Attributes:
        q_stages, dout_stages: tiles of Q and of dO that shared memory holds.
        consumer_registers: registers of each thread that computes P and dS, two warpgroups.
        reduce_registers: of each thread that adds dQ to global memory, one warpgroup.
        producer_registers: of each thread that loads or issues matrix instructions, one warpgroup.
    """

    q_stages: int
    dout_stages: int
    consumer_registers: int
    reduce_registers: int
    producer_registers: int

    @property
    def correction_registers(self) -> int:
        """The third role's budget: of the threads that add dQ."""
        return self.reduce_registers

    @property
    def registers(self) -> int:
        """Registers of all threads of one thread block: four warpgroups."""
        return WARPGROUP_THREADS * (2 * self.consumer_registers + self.reduce_registers + self.producer_registers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm100InThreeTuning:
    """How the kernels of sm100a and sm103a that compute one gradient each are built. Tiles are 128 by 128, of a pair of
    thread blocks 256 by 128.

    Attributes:
        slots, dv_slots: operands of 32 KiB that shared memory holds for products to come; dv_slots in the kernel of dV.
        consumer_registers: registers of each thread that computes P and dS, two warpgroups.
        producer_registers: of each thread that loads or issues matrix instructions, one warpgroup.
    """

    slots: int
    dv_slots: int
    consumer_registers: int
    producer_registers: int

    @property
    def correction_registers(self) -> int:
        """No role corrects or adds: 0."""
        return 0

    @property
    def registers(self) -> int:
        """Registers of all threads of one thread block: three warpgroups."""
        return WARPGROUP_THREADS * (2 * self.consumer_registers + self.producer_registers)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardTuningRow:
    """A tuning with the name of its row and the source of its numbers, both for `explain` only."""

    name: str
    source: str
    tuning: BackwardTuning | Sm100BackwardTuning | Sm100InThreeTuning


_MEASURED = "fastest of the candidates of benchmarks/notes_backward_sm90.md on an H200"
_FITS = "what fits in the shared memory of a multiprocessor"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row of the table below; `stages` is (Q, dO, dS), `dv_stages` (Q, dO) of a kernel for dV alone."""

    tile_m: int
    stages: tuple[int, int, int]
    dv_stages: tuple[int, int] = (0, 0)
    dq_chunk: int = 0
    source: str


_SM90 = {
    (64, 64): _Row(tile_m=128, stages=(2, 2, 2), source=_MEASURED),
    (96, 96): _Row(tile_m=64, stages=(2, 2, 2), source=_MEASURED),
    (128, 128): _Row(tile_m=64, stages=(2, 2, 2), source=_MEASURED),
    (192, 128): _Row(tile_m=64, stages=(2, 2, 1), dv_stages=(2, 2), source=_FITS),
    (256, 256): _Row(tile_m=64, stages=(1, 1, 1), dv_stages=(2, 2), dq_chunk=32, source=_FITS),
}
# Where the derivative of the cap leaves too few registers for the row above.
_NO_SPILLS = "no spills with ptxas V13.4.59, over all masks, types and both orders of dQ"
_SM90_SOFTCAP = {
    (64, 64): _Row(tile_m=64, stages=(2, 2, 2), source=_NO_SPILLS),
    (128, 128): _Row(tile_m=64, stages=(2, 2, 1), source=_NO_SPILLS),
}

_SM100_SOURCE = (
    "stages: what 227 KiB hold beside K, V, dS and the staged dQ; registers: no role spills with ptxas V13.4.59, over "
    "all masks, types and both orders of dQ"
)
_SM100_STAGES = {(64, 64): (2, 2), (96, 96): (2, 2), (128, 128): (2, 1)}  # of Q, of dO
# Q and dO lie in shared memory twice, each half in either orientation; wide ones one after the other.
_SM100_TWO_CTA_STAGES = {(128, 128): (1, 1), (192, 128): (1, 1)}

# Of the threads that compute, add dQ, and load or multiply, by (CTAs, soft cap).
_SM100_REGISTERS = {
    (1, False): (152, 128, 80),
    (1, True): (168, 128, 48),
    (2, False): (152, 120, 88),
    (2, True): (176, 112, 48),
}
# Of head_dim over 128, by (deterministic, soft cap).
_SM100_WIDE_REGISTERS = {
    (False, False): (144, 136, 88),
    (False, True): (176, 120, 40),
    (True, False): (144, 136, 88),
    (True, True): (176, 112, 48),
}

_SM100_IN_THREE = {
    (256, 256): Sm100InThreeTuning(slots=3, dv_slots=5, consumer_registers=216, producer_registers=72),
}
_SM100_IN_THREE_SOURCE = (
    "slots: what 227 KiB hold beside K and V, or K alone; registers: no role spills with ptxas V13.4.59, over all "
    "masks and types"
)


def has_backward_tuning(variant: Variant) -> bool:
    """Whether there is a row for this variant."""
    if variant.op != "bwd":
        return False
    if variant.arch == "sm90a":
        return variant.head_dims in _SM90
    return variant.head_dims in _sm100_stages(variant) or _is_in_three(variant)


def backward_row_for(variant: Variant) -> BackwardTuningRow:
    """The row that decides how a valid backward variant is built. Contract: has_backward_tuning(variant)."""
    if variant.arch == "sm90a":
        return _sm90_row(variant)
    return _in_three_row(variant) if _is_in_three(variant) else _sm100_row(variant)


def _is_in_three(variant: Variant) -> bool:
    return variant.cta_group == 2 and variant.head_dims in _SM100_IN_THREE


def _in_three_row(variant: Variant) -> BackwardTuningRow:
    return BackwardTuningRow(
        name=f"bwd-{variant.arch}-{spell_head_dims(variant.head_dims)}-2cta",
        source=_SM100_IN_THREE_SOURCE,
        tuning=_SM100_IN_THREE[variant.head_dims],
    )


def _sm100_stages(variant: Variant) -> dict[tuple[int, int], tuple[int, int]]:
    return _SM100_TWO_CTA_STAGES if variant.cta_group == 2 else _SM100_STAGES


def _sm100_row(variant: Variant) -> BackwardTuningRow:
    q_stages, dout_stages = _sm100_stages(variant)[variant.head_dims]
    consumer_registers, reduce_registers, producer_registers = (
        _SM100_WIDE_REGISTERS[variant.deterministic, variant.softcap]
        if variant.head_dim > 128
        else _SM100_REGISTERS[variant.cta_group, variant.softcap]
    )
    tuning = Sm100BackwardTuning(
        q_stages=q_stages,
        dout_stages=dout_stages,
        consumer_registers=consumer_registers,
        reduce_registers=reduce_registers,
        producer_registers=producer_registers,
    )
    switches = ("-2cta" if variant.cta_group == 2 else "") + ("-softcap" if variant.softcap else "")
    name = f"bwd-{variant.arch}-{spell_head_dims(variant.head_dims)}{switches}"
    return BackwardTuningRow(name=name, source=_SM100_SOURCE, tuning=tuning)


def _sm90_row(variant: Variant) -> BackwardTuningRow:
    row = (
        _SM90_SOFTCAP.get(variant.head_dims, _SM90[variant.head_dims]) if variant.softcap else _SM90[variant.head_dims]
    )
    tuning = BackwardTuning(
        tile_m=row.tile_m,
        q_stages=row.stages[0],
        dout_stages=row.stages[1],
        dscores_stages=row.stages[2],
        # On an H200 2 to 3 % faster there, and 1 to 2 % slower without a mask.
        dscores_by_keys=variant.head_dims == (128, 128) and variant.mask == "causal" and not variant.softcap,
        overlaps_dk=False,
        dq_chunk=row.dq_chunk,
        dv_q_stages=row.dv_stages[0],
        dv_dout_stages=row.dv_stages[1],
        consumer_registers=240,
        producer_registers=24,
    )
    return BackwardTuningRow(name=f"bwd-sm90a-{spell_head_dims(variant.head_dims)}", source=row.source, tuning=tuning)
