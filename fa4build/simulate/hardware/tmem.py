"""Tensor memory of Blackwell: allocation, the lanes and columns of tcgen05.ld/st, and where MMA operands live.

Tensor memory is a uint32 array of 128 lanes x 512 columns per CTA; an address is lane << 16 | column.

| rule | evidence |
|---|---|
| 32x32b ld/st, D of M 128 (one CTA), M 256 and 128 (two CTAs), A operand | real kernels in a prototype |
| 16x64b, 16x128b, 16x256b, 16x32bx2, pack/unpack, D for M 64 | documentation only |

Source: ptx-semantics.md 9.1, 9.2, 9.4, 9.5 (PTX ISA 9.7.16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fa4build.errors import SimulationError
from fa4build.simulate.units.float_formats import max_f32, min_f32

LANES = 128
COLUMNS = 512
_WARP_LANES = 32


def split_address(address: int) -> tuple[int, int]:
    """(lane, column) of a tensor-memory address; refuses one outside 128 x 512. Source: ptx-semantics.md 9.1."""
    lane, column = int(address) >> 16, int(address) & 0xFFFF
    if not (0 <= lane < LANES and column < COLUMNS):
        raise SimulationError(f"tensor memory address {int(address):#x} (lane {lane}, column {column}) is out of range")
    return lane, column


# ------------------------------------------------------------------------------------------------ allocation


@dataclass(slots=True, kw_only=True)
class Allocator:
    """The columns of one CTA's tensor memory. `may_allocate` ends with tcgen05.relinquish_alloc_permit.

    Source: ptx-semantics.md 9.2.
    """

    blocks: dict[int, int] = field(default_factory=dict)  # first column -> number of columns
    may_allocate: bool = True
    last_size_cols: int = COLUMNS

    def allocate(self, num_cols: int) -> int | None:
        """First column of a new block (the lowest free place), or None: the instruction waits.

        Raises: SimulationError for a size that is no power of two in 32..512, one larger than an earlier one, or after
            the permit was given up.
        """
        if num_cols not in (32, 64, 128, 256, 512):
            raise SimulationError(f"tcgen05.alloc of {num_cols} columns; allowed: 32, 64, 128, 256, 512")
        if not self.may_allocate:
            raise SimulationError("tcgen05.alloc after tcgen05.relinquish_alloc_permit; allocate before it")
        if num_cols > self.last_size_cols:
            raise SimulationError(
                f"tcgen05.alloc of {num_cols} columns after one of {self.last_size_cols}: sizes must not grow"
            )
        for first in range(0, COLUMNS - num_cols + 1, num_cols):
            if all(first + num_cols <= start or start + size <= first for start, size in self.blocks.items()):
                self.blocks[first] = num_cols
                self.last_size_cols = num_cols
                return first
        return None

    def free(self, address: int, num_cols: int) -> None:
        """tcgen05.dealloc: the block must be one that `allocate` gave, whole."""
        _, column = split_address(address)
        if self.blocks.get(column) != num_cols:
            raise SimulationError(
                f"tcgen05.dealloc of {num_cols} columns at {column}; allocated blocks (column: size): {self.blocks}"
            )
        del self.blocks[column]

    def relinquish(self) -> None:
        """tcgen05.relinquish_alloc_permit: no allocation afterwards."""
        self.may_allocate = False

    def leftover(self) -> dict[int, int]:
        """Blocks not freed, first column -> columns; must be empty when the CTA exits."""
        return dict(self.blocks)

    def owns(self, first_column: int, num_cols: int) -> bool:
        """Whether the columns first_column .. first_column + num_cols - 1 all lie in allocated blocks."""
        columns = set(range(first_column, first_column + num_cols))
        for start, size in self.blocks.items():
            columns.difference_update(range(start, start + size))
        return not columns


# ------------------------------------------------------------------------------------------------ ld and st

_REGISTERS_PER_REPEAT = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
_COLUMNS_PER_REPEAT = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 1}
_MAX_REPEAT = {"32x32b": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32, "16x32bx2": 128}


@lru_cache(maxsize=256)
def transfer_cells(
    shape: str, repeat: int, split_offset: int = 0, packed: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Relative (lanes, columns) of register j in lane t, each of shape (registers, 32), or (registers, 32, 2) packed.

    Args:
        shape: 32x32b, 16x64b, 16x128b, 16x256b or 16x32bx2; repeat: N of .xN.
        split_offset: column distance of the second half of 16x32bx2.
        packed: `.pack::16b` of ld, `.unpack::16b` of st: a register holds the low 16 bits of two adjacent columns,
            the lower column in its low half.
    Source: ptx-semantics.md 9.4.
    """
    if shape not in _REGISTERS_PER_REPEAT:
        raise SimulationError(f"tcgen05 ld/st shape {shape!r} is unknown; allowed: {', '.join(_REGISTERS_PER_REPEAT)}")
    if repeat not in (1, 2, 4, 8, 16, 32, 64, 128) or repeat > _MAX_REPEAT[shape]:
        raise SimulationError(f"tcgen05 ld/st {shape}.x{repeat}: repeat is a power of two up to {_MAX_REPEAT[shape]}")
    j, t = np.arange(repeat * _REGISTERS_PER_REPEAT[shape])[:, None], np.arange(32)[None, :]
    lanes, columns = {
        "32x32b": lambda: (t + 0 * j, j + 0 * t),
        "16x64b": lambda: (t // 4 + 8 * (t % 2) + 0 * j, 2 * j + (t // 2) % 2),
        "16x128b": lambda: (t // 4 + 8 * (j % 2), 4 * (j // 2) + t % 4),
        "16x256b": lambda: (t // 4 + 8 * ((j // 2) % 2), 8 * (j // 4) + 2 * (t % 4) + j % 2),
        "16x32bx2": lambda: (t % 16 + 0 * j, (t // 16) * split_offset + j),
    }[shape]()
    if packed:
        first = 2 * columns
        if shape == "16x32bx2":
            first = (t // 16) * split_offset + 2 * j
        lanes, columns = np.stack([lanes, lanes], axis=-1), np.stack([first, first + 1], axis=-1)
    lanes.flags.writeable = columns.flags.writeable = False
    return lanes, columns


def transfer_columns(shape: str, repeat: int, split_offset: int = 0, packed: bool = False) -> int:
    """Columns from the first to behind the last that one ld or st touches."""
    return int(transfer_cells(shape, repeat, split_offset, packed)[1].max()) + 1


def check_transfer(address: int, warp: int, shape: str, num_cols: int) -> tuple[int, int]:
    """(lane, column) of an ld/st address: a warp reaches only the 32 lanes of its quarter."""
    lane, column = split_address(address)
    own = _WARP_LANES * (warp % 4)
    allowed = (own,) if shape == "32x32b" else (own, own + 16)
    if lane not in allowed:
        raise SimulationError(
            f"tcgen05 ld/st {shape} at lane {lane} by warp {warp} of the CTA; "
            f"it may start at lane {' or '.join(map(str, allowed))}"
        )
    if column + num_cols > COLUMNS:
        raise SimulationError(f"tcgen05 ld/st {shape} touches columns {column}..{column + num_cols - 1} of {COLUMNS}")
    return lane, column


def load(
    tmem: NDArray[np.uint32],
    address: int,
    warp: int,
    shape: str,
    repeat: int,
    split_offset: int = 0,
    packed: bool = False,
) -> NDArray[np.uint32]:
    """tcgen05.ld: the registers of one warp, (registers, 32) u32.

    Args: tmem: (128, 512). address: uniform over the warp. warp: index in the CTA. Others as `transfer_cells`.
    Raises: SimulationError for lanes of another warp's quarter or columns outside. Source: ptx-semantics.md 9.4.
    """
    lane, column = check_transfer(address, warp, shape, transfer_columns(shape, repeat, split_offset, packed))
    if shape == "32x32b" and not packed:
        return np.ascontiguousarray(tmem[lane : lane + 32, column : column + repeat].T)
    lanes, columns = transfer_cells(shape, repeat, split_offset, packed)
    cells = tmem[lanes + lane, columns + column]
    return (cells[..., 0] & np.uint32(0xFFFF)) | (cells[..., 1] << np.uint32(16)) if packed else cells


def store(
    tmem: NDArray[np.uint32],
    address: int,
    warp: int,
    shape: str,
    repeat: int,
    registers: NDArray[np.uint32],
    split_offset: int = 0,
    packed: bool = False,
) -> None:
    """tcgen05.st: writes the registers (registers, 32) of one warp; arguments and errors as `load`.

    With `packed` (.unpack::16b) each half goes to the low 16 bits of its column, the upper 16 become zero.
    """
    lane, column = check_transfer(address, warp, shape, transfer_columns(shape, repeat, split_offset, packed))
    lanes, columns = transfer_cells(shape, repeat, split_offset, packed)
    if registers.shape != lanes.shape[:2]:
        raise SimulationError(f"tcgen05.st {shape}.x{repeat} has registers {registers.shape}, needs {lanes.shape[:2]}")
    if packed:
        registers = np.stack([registers & np.uint32(0xFFFF), registers >> np.uint32(16)], axis=-1)
    if shape == "32x32b" and not packed:
        tmem[lane : lane + 32, column : column + repeat] = registers.T
    else:
        tmem[lanes + lane, columns + column] = registers


def load_reduce(
    tmem: NDArray[np.uint32],
    address: int,
    warp: int,
    repeat: int,
    operation: str,
    absolute: bool = False,
    propagate_nan: bool = False,
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """tcgen05.ld.red.32x32b.f32: the registers of `load`, and per lane their max or min over the columns, (32,) u32.

    Args: operation: `max` or `min`; absolute: of |x|; propagate_nan: `.NaN`, otherwise NaN is ignored.
    Source: ptx-semantics.md 9.4.
    """
    if operation not in ("max", "min"):
        raise SimulationError(f"tcgen05.ld.red operation {operation!r} is unknown; allowed: max, min")
    registers = load(tmem, address, warp, "32x32b", repeat)
    values = registers & np.uint32(0x7FFFFFFF) if absolute else registers
    choose = max_f32 if operation == "max" else min_f32
    reduced = values[0]
    for row in values[1:]:
        reduced = choose(reduced, row, propagate_nan)
    return registers, choose(reduced, reduced, propagate_nan)


# ------------------------------------------------------------------------------------------------ MMA operands


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulatorBlock:
    """A rectangle of D: rows [row, row+num_rows) x columns [n, n+num_cols) of the matrix lie in CTA `cta` of the group
    (its rank modulo 2) at lanes from `lane` and tensor-memory columns from `column`."""

    cta: int
    row: int
    n: int
    num_rows: int
    num_cols: int
    lane: int
    column: int


@lru_cache(maxsize=256)
def accumulator_blocks(m: int, n: int, cta_group: int, address: int) -> tuple[AccumulatorBlock, ...]:
    """Where D of an M x N tcgen05.mma lies, one f32 per cell.

    | M, group | row m, column n |
    |---|---|
    | 128, 1 (layout D) | lane m, column n |
    | 64, 1 (layout F) | lane 32*(m/16) + m%16, plus 16 if the address says so; column n |
    | 256, 2 (layout A) | CTA m/128, lane m%128, column n |
    | 128, 2 (layout B) | CTA m/64; n < N/2: lane m%64, column n; else lane 64 + m%64, column n - N/2 |

    Raises: SimulationError for another shape, a lane that the layout does not allow, or columns past 512.
    Source: ptx-semantics.md 9.5; M 64 by documentation only.
    """
    lane, column = split_address(address)
    if lane not in ((0, 16) if (m, cta_group) == (64, 1) else (0,)):
        raise SimulationError(f"tcgen05.mma accumulator of M {m}, cta_group::{cta_group} at lane {lane}; must be 0")
    width = n // 2 if (m, cta_group) == (128, 2) else n
    if column + width > COLUMNS:
        raise SimulationError(f"tcgen05.mma accumulator takes columns {column}..{column + width - 1} of {COLUMNS}")

    def block(cta: int, row: int, first_n: int, num_rows: int, at_lane: int) -> AccumulatorBlock:
        return AccumulatorBlock(
            cta=cta, row=row, n=first_n, num_rows=num_rows, num_cols=width, lane=at_lane, column=column
        )

    if (m, cta_group) == (128, 1):
        return (block(0, 0, 0, 128, 0),)
    if (m, cta_group) == (64, 1):
        return tuple(block(0, 16 * quarter, 0, 16, 32 * quarter + lane) for quarter in range(4))
    if (m, cta_group) == (256, 2):
        return tuple(block(cta, 128 * cta, 0, 128, 0) for cta in range(2))
    if (m, cta_group) == (128, 2):
        return tuple(block(cta, 64 * cta, half * width, 64, 64 * half) for cta in range(2) for half in range(2))
    raise SimulationError(f"tcgen05.mma cta_group::{cta_group} has no M {m}; M is 64, 128 (1 CTA), 128, 256 (2 CTAs)")


def read_accumulator(
    tmems: Sequence[NDArray[np.uint32]], m: int, n: int, cta_group: int, address: int
) -> NDArray[np.uint32]:
    """D as an (M, N) array of f32 bits. Args: tmems: tensor memory of each CTA of the group, even rank first."""
    d = np.empty((m, n), dtype=np.uint32)
    for b in accumulator_blocks(m, n, cta_group, int(address)):
        source = tmems[b.cta][b.lane : b.lane + b.num_rows, b.column : b.column + b.num_cols]
        d[b.row : b.row + b.num_rows, b.n : b.n + b.num_cols] = source
    return d


def write_accumulator(
    tmems: Sequence[NDArray[np.uint32]],
    d: NDArray[np.uint32],
    cta_group: int,
    address: int,
    disabled_lanes: Sequence[NDArray[np.bool_]] | None = None,
) -> None:
    """Writes an (M, N) array of f32 bits as D.

    Args: disabled_lanes: per CTA a bool (128,), True where disable-output-lane suppresses the write.
    Source: ptx-semantics.md 9.5.
    """
    for b in accumulator_blocks(d.shape[0], d.shape[1], cta_group, int(address)):
        target = tmems[b.cta][b.lane : b.lane + b.num_rows, b.column : b.column + b.num_cols]
        source = d[b.row : b.row + b.num_rows, b.n : b.n + b.num_cols]
        if disabled_lanes is None:
            target[:] = source
        else:
            enabled = ~disabled_lanes[b.cta][b.lane : b.lane + b.num_rows]
            target[enabled] = source[enabled]


_ELEMENT_TYPES = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


def read_a_operand(
    tmems: Sequence[NDArray[np.uint32]], m: int, cta_group: int, address: int, elem_bytes: int
) -> NDArray:
    """A of one instruction step from tensor memory: (M, K) bit patterns, K = 32 bytes = 8 columns.

    Row i lies in lane i of its CTA (CTA r has rows r*M/2 on), elements packed along columns, the first in the low bits.
    For M 128 of two CTAs the 64 rows must also stand in lanes 64 to 127; this reads lanes 0 to 63 and refuses rows that
    differ. Source: ptx-semantics.md 9.5 (PTX 9.7.16.10.4); the duplication is [INF].
    """
    lane, column = split_address(address)
    if lane or column + 8 > COLUMNS:
        raise SimulationError(f"tcgen05.mma A operand at lane {lane}, column {column}; lane 0 and 8 columns are needed")
    rows = m // cta_group
    if rows not in (64, 128) or (rows == 64 and cta_group == 1):
        raise SimulationError(
            f"tcgen05.mma A operand in tensor memory with M {m}, cta_group::{cta_group}: not modelled"
        )
    parts = []
    for cta in range(cta_group):
        cells = tmems[cta][:, column : column + 8]
        if rows == 64 and not np.array_equal(cells[:64], cells[64:]):
            raise SimulationError(
                f"tcgen05.mma A operand of M {m}, cta_group::2: lanes 64..127 of CTA {cta} must repeat lanes 0..63"
            )
        parts.append(np.ascontiguousarray(cells[:rows]).view(_ELEMENT_TYPES[elem_bytes]))
    return np.concatenate(parts)
