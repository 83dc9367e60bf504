"""Tile-mode TMA copies: which global bytes meet which shared bytes, and the copies themselves.

A box is described by a `BoxPlan`: three flat arrays in box order (innermost dimension fastest) of equal length, one
entry per *unit*, the largest piece that is contiguous on both sides (16 bytes, or one element at ragged edges).

What an H200 does beyond the manual (recorded; see test_probes.py), and so does this:

* The first coordinate must be a multiple of 16 bytes, and stores and reductions take no negative coordinate: the kernel
  ends with an illegal instruction.
* Loads cut off at the last element. Stores and reductions work in pieces of 16 bytes along the first dimension: where
  its extent is no multiple of 16 bytes, they also write what lies between the last element and the end of its piece.

Not covered, and refused: im2col, interleaved layouts, element strides above 1, NaN fill.

Source: ptx-semantics.md 8.4; recordings of an H200 (negative start, ragged end, all swizzles).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fa4build.errors import SimulationError
from fa4build.simulate.hardware.swizzle import UNIT_BYTES, swizzle_address
from fa4build.simulate.hardware.tensor_map import TensorMap
from fa4build.simulate.units.float_formats import add_f32

SHARED_ALIGNMENT = 128  # bytes, of the shared address of a tensor copy (PTX 5.5.6)
_PATTERN = 1024  # bytes after which every swizzle repeats

_UNIT_TYPES = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype("V16"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxPlan:
    """The address pairs of one box.

    unit_bytes: size of a unit. global_addresses: int64 (units,), absolute bytes; meaningless where not valid.
    valid: bool (units,), False outside the tensor; None if all are inside. shared_addresses: int64 (units,), absolute
    bytes in the CTA's window, swizzled. box_bytes: the full box, what a load adds to its mbarrier.
    """

    unit_bytes: int
    global_addresses: NDArray[np.int64]
    valid: NDArray[np.bool_] | None
    shared_addresses: NDArray[np.int64]
    box_bytes: int


@lru_cache(maxsize=256)
def _relative_global(box: tuple[int, ...], strides: tuple[int, ...], inner_units: int, unit: int) -> NDArray[np.int64]:
    """Byte offsets of a box's units from its first element, flat in box order."""
    offsets = np.arange(inner_units, dtype=np.int64) * unit
    for extent, stride in zip(box[1:], strides, strict=True):
        offsets = (np.arange(extent, dtype=np.int64) * stride)[:, None] + offsets
        offsets = offsets.reshape(-1)
    offsets.flags.writeable = False
    return offsets


@lru_cache(maxsize=256)
def _relative_shared(box_bytes: int, swizzle: int, phase: int, unit: int) -> NDArray[np.int64]:
    """Swizzled byte offsets of a box's units from the shared address minus `phase` (its offset in a 1024-B pattern)."""
    offsets = swizzle_address(phase + np.arange(0, box_bytes, unit, dtype=np.int64), swizzle)
    offsets.flags.writeable = False
    return offsets


def _check_supported(tmap: TensorMap, coords: tuple[int, ...], shared_address: int, outgoing: bool) -> None:
    if len(coords) != tmap.rank:
        raise SimulationError(
            f"tensor copy gives {len(coords)} coordinates {coords} to a map of rank {tmap.rank}; both must agree"
        )
    if shared_address % SHARED_ALIGNMENT:
        raise SimulationError(f"tensor copy: shared address {shared_address:#x} is not a multiple of 128")
    if coords[0] * tmap.element_bytes % UNIT_BYTES:
        raise SimulationError(
            f"tensor copy: first coordinate {coords[0]} of {tmap.dtype} is not a multiple of 16 bytes; "
            f"hardware ends the kernel with an illegal instruction"
        )
    if outgoing and min(coords) < 0:
        raise SimulationError(
            f"tensor copy: a store or reduction at {coords}; coordinates must not be negative there "
            f"(hardware ends the kernel with an illegal instruction; only loads may begin before the tensor)"
        )
    if tmap.interleave:
        raise SimulationError(f"tensor copy: interleave {tmap.interleave} is not simulated; only 0 is")
    if any(step != 1 for step in tmap.element_strides):
        raise SimulationError(f"tensor copy: element strides {tmap.element_strides} are not simulated; only 1 is")
    if tmap.oob_fill != "zero":
        raise SimulationError("tensor copy: NaN fill is not simulated; only zero fill is")


def _valid_units(
    tmap: TensorMap, dims: tuple[int, ...], coords: tuple[int, ...], inner_units: int, unit: int
) -> NDArray[np.bool_] | None:
    """Which units lie inside a tensor of these dims; None if all do. Coordinates may be negative."""
    inside = all(
        0 <= start and start + extent <= dim for start, extent, dim in zip(coords, tmap.box, dims, strict=True)
    )
    if inside:
        return None
    element = np.arange(inner_units) * (unit // tmap.element_bytes) + coords[0]
    valid = (element >= 0) & (element < dims[0])
    for start, extent, dim in zip(coords[1:], tmap.box[1:], dims[1:], strict=True):
        index = np.arange(start, start + extent)
        valid = (((index >= 0) & (index < dim))[:, None] & valid).reshape(-1)
    return valid


def plan_box(
    tmap: TensorMap,
    coords: tuple[int, ...],
    shared_address: int,
    *,
    outgoing: bool = False,
    per_element: bool = False,
) -> BoxPlan:
    """The address pairs of the box at `coords`.

    Args:
        coords: first element per dimension, innermost first, signed; of the first a multiple of 16 bytes.
        shared_address: start in the CTA's shared window, without the rank bits.
        outgoing: from shared to global memory.
        per_element: units of one element, for copies that compute (reductions).
    Raises: SimulationError for a rank mismatch, a misaligned shared address, coordinates that hardware does not take,
        or a mode that is not simulated.
    Source: ptx-semantics.md 8.4.
    """
    coords = tuple(int(c) for c in coords)
    _check_supported(tmap, coords, shared_address, outgoing)
    size = tmap.element_bytes
    dims = tmap.dims
    if outgoing:
        dims = (-(-dims[0] * size // UNIT_BYTES) * UNIT_BYTES // size, *dims[1:])
    unit = size if per_element or dims[0] * size % UNIT_BYTES else UNIT_BYTES
    inner_units = tmap.box[0] * size // unit
    first = tmap.address + coords[0] * size
    first += sum(c * stride for c, stride in zip(coords[1:], tmap.strides, strict=True))
    first = (first + 2**63) % 2**64 - 2**63  # addresses wrap like the hardware's 64 bits
    phase = shared_address % _PATTERN
    return BoxPlan(
        unit_bytes=unit,
        global_addresses=_relative_global(tmap.box, tmap.strides, inner_units, unit) + np.int64(first),
        valid=_valid_units(tmap, dims, coords, inner_units, unit),
        shared_addresses=_relative_shared(tmap.box_bytes, tmap.swizzle, phase, unit) + (shared_address - phase),
        box_bytes=tmap.box_bytes,
    )


def _indices(addresses: NDArray[np.int64], start: int, size: int, unit: int, what: str) -> NDArray[np.int64]:
    """Unit indices of byte addresses in an array that begins at byte address `start`, bounds checked."""
    if addresses.size and (addresses.min() < start or addresses.max() + unit > start + size):
        bad = int(addresses.min() if addresses.min() < start else addresses.max())
        raise SimulationError(f"tensor copy touches {what} byte {bad:#x}, outside {start:#x}..{start + size:#x}")
    return (addresses - start) // unit


def _as_units(data: NDArray[np.uint8], unit: int) -> NDArray:
    return data[: data.size // unit * unit].view(_UNIT_TYPES[unit])


def load_box(plan: BoxPlan, memory: NDArray[np.uint8], memory_address: int, shared: NDArray[np.uint8]) -> None:
    """Copies a box from global memory to shared memory; units outside the tensor become zero.

    Args: memory: bytes that begin at global address `memory_address` (a multiple of 16). shared: the CTA's window from
    address 0. Raises: SimulationError if a valid unit lies outside either array; nothing is written then.
    """
    unit = plan.unit_bytes
    addresses = plan.global_addresses if plan.valid is None else plan.global_addresses[plan.valid]
    source = _as_units(memory, unit)[_indices(addresses, memory_address, memory.size, unit, "global")]
    target = _indices(plan.shared_addresses, 0, shared.size, unit, "shared")
    window = _as_units(shared, unit)
    if plan.valid is None:
        window[target] = source
    else:
        window[target[~plan.valid]] = np.zeros((), dtype=window.dtype)
        window[target[plan.valid]] = source


def store_box(plan: BoxPlan, shared: NDArray[np.uint8], memory: NDArray[np.uint8], memory_address: int) -> None:
    """Copies a box from shared to global memory; units outside the tensor are not written.

    Args as `load_box`; the plan must be made `outgoing`.
    """
    unit = plan.unit_bytes
    keep = slice(None) if plan.valid is None else plan.valid
    target = _indices(plan.global_addresses[keep], memory_address, memory.size, unit, "global")
    source = _indices(plan.shared_addresses[keep], 0, shared.size, unit, "shared")
    _as_units(memory, unit)[target] = _as_units(shared, unit)[source]


def reduce_add_f32_box(
    plan: BoxPlan, shared: NDArray[np.uint8], memory: NDArray[np.uint8], memory_address: int
) -> None:
    """Adds a box of f32 from shared to global memory, elementwise, nearest even, subnormals kept.

    Args as `load_box`; the plan must be made `outgoing` and `per_element` from an f32 map without zero strides.
    Source: ptx-semantics.md 8.3 (H200).
    """
    if plan.unit_bytes != 4:
        raise SimulationError(f"tensor reduction of {plan.unit_bytes}-byte units; f32 addition needs per_element=True")
    keep = slice(None) if plan.valid is None else plan.valid
    target = _indices(plan.global_addresses[keep], memory_address, memory.size, 4, "global")
    source = _indices(plan.shared_addresses[keep], 0, shared.size, 4, "shared")
    total, addend = _as_units(memory, 4), _as_units(shared, 4)
    total[target] = add_f32(total[target], addend[source])
