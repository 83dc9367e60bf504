"""How backward kernels are computed: the rows of `tuning.py` for op `bwd`, and the absence of rows for its helpers."""

from __future__ import annotations

from dataclasses import dataclass

from fa4build.axes import Variant, spell_head_dims

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
        overlaps_dk: the product for dK runs on into the next tile.
        consumer_registers: registers of each thread that computes.
        producer_registers: of each thread that loads or stores.
    """

    tile_m: int
    q_stages: int
    dout_stages: int
    dscores_stages: int
    overlaps_dk: bool
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
class BackwardTuningRow:
    """A tuning with the name of its row and the source of its numbers, both for `explain` only."""

    name: str
    source: str
    tuning: BackwardTuning


_TABLE = "tiles and stages of flash-attn-4 4.0.0b36 for SM90 backward"
_TILE_M = {(64, 64): 128, (96, 96): 64, (128, 128): 64}


def has_backward_tuning(variant: Variant) -> bool:
    """Whether there is a row for this variant."""
    return variant.op == "bwd" and variant.arch == "sm90a" and variant.head_dims in _TILE_M


def backward_row_for(variant: Variant) -> BackwardTuningRow:
    """The row that decides how a valid backward variant is built. Contract: has_backward_tuning(variant)."""
    tuning = BackwardTuning(
        tile_m=_TILE_M[variant.head_dims],
        q_stages=2,
        dout_stages=2,
        dscores_stages=2,
        overlaps_dk=False,
        consumer_registers=240,
        producer_registers=24,
    )
    return BackwardTuningRow(name=f"bwd-sm90a-{spell_head_dims(variant.head_dims)}", source=_TABLE, tuning=tuning)
