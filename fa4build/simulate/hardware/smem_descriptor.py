"""Matrix operands in shared memory: the descriptors of wgmma and tcgen05.mma and the bytes they name.

Element (i, k) of an operand has i = M or N index and k = K index. Addresses are absolute bytes in the CTA's shared
window; the swizzle acts on them, so a start address advanced inside a swizzle pattern works.

Source: ptx-semantics.md 9.5 and 10 (PTX ISA 9.7.16.3.3, tables 40 and 42). Swizzle spans 128 and 64 and unswizzled
K-major are checked on an H200; the other layouts follow the same formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fa4build.errors import SimulationError
from fa4build.simulate.hardware.swizzle import UNIT_BYTES, swizzle_address

MAJORS = ("k", "mn")
_PATTERN = 1024  # bytes after which every swizzle repeats
_WGMMA_SPANS = {0: 0, 1: 128, 2: 64, 3: 32}
_TCGEN05_SPANS = {0: 0, 2: 128, 4: 64, 6: 32}
_ELEMENT_TYPES = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SmemDescriptor:
    """A matrix descriptor. All fields in bytes; `swizzle` is the span, 0 = none.

    leading_bytes (LBO) and stride_bytes (SBO) mean what `element_offsets` says for each layout.
    """

    start: int
    leading_bytes: int
    stride_bytes: int
    swizzle: int


def _bits(word: int, low: int, width: int) -> int:
    return (int(word) >> low) & ((1 << width) - 1)


def _decode(word: int, spans: dict[int, int], code: int, reserved: int, what: str) -> SmemDescriptor:
    word = int(word)
    if not 0 <= word < 1 << 64:
        raise SimulationError(f"{what} descriptor {word:#x} does not fit in 64 bits")
    if word & reserved:
        raise SimulationError(f"{what} descriptor {word:#018x} sets bits {word & reserved:#x}, which must be zero")
    if _bits(word, 49, 3):
        raise SimulationError(
            f"{what} descriptor {word:#018x} has base offset {_bits(word, 49, 3)}; only 0 is simulated: "
            "start the swizzle pattern at a multiple of its size"
        )
    if code not in spans:
        raise SimulationError(
            f"{what} descriptor {word:#018x} has swizzle code {code}; simulated: {', '.join(map(str, spans))}"
        )
    return SmemDescriptor(
        start=_bits(word, 0, 14) << 4,
        leading_bytes=_bits(word, 16, 14) << 4,
        stride_bytes=_bits(word, 32, 14) << 4,
        swizzle=spans[code],
    )


def decode_wgmma(word: int) -> SmemDescriptor:
    """Reads a 64-bit wgmma matrix descriptor.

    Bits: start >> 4 at 0, LBO >> 4 at 16, SBO >> 4 at 32 (14 each), base offset 49-51, swizzle 62-63.
    Raises: SimulationError for reserved bits, a base offset, or more than 64 bits. Source: ptx-semantics.md 10.
    """
    reserved = 3 << 14 | 3 << 30 | 7 << 46 | ((1 << 10) - 1) << 52
    return _decode(word, _WGMMA_SPANS, _bits(word, 62, 2), reserved, "wgmma")


def decode_tcgen05(word: int) -> SmemDescriptor:
    """Reads a 64-bit tcgen05 shared-memory descriptor.

    As wgmma's, with 0b001 in bits 46-48, absolute-LBO mode in bit 52 and the swizzle code in bits 61-63.
    Raises: SimulationError also for the absolute-LBO mode and the 32-byte-atom swizzle. Source: ptx-semantics.md 9.5.
    """
    if _bits(word, 46, 3) != 1:
        raise SimulationError(f"tcgen05 descriptor {int(word):#018x} has {_bits(word, 46, 3)} in bits 46-48, not 1")
    if _bits(word, 52, 1):
        raise SimulationError(f"tcgen05 descriptor {int(word):#018x} asks for the absolute LBO mode; not simulated")
    reserved = 3 << 14 | 3 << 30 | ((1 << 8) - 1) << 53
    return _decode(word, _TCGEN05_SPANS, _bits(word, 61, 3), reserved, "tcgen05")


# ------------------------------------------------------------------------------------------------ addresses


def element_offsets(desc: SmemDescriptor, i: NDArray, k: NDArray, elem_bytes: int, major: str) -> NDArray[np.int64]:
    """Byte offset of elements (i, k) from the start address, before the swizzle.

    With T = 16/elem_bytes, S = swizzle span, E = S/elem_bytes:
      K-major, swizzled:    (i//8)*SBO + (i%8)*S + k*elem_bytes
      K-major, plain:       (i//8)*SBO + (i%8)*16 + (k//T)*LBO + (k%T)*elem_bytes
      MN-major, swizzled:   (i//E)*LBO + (i%E)*elem_bytes + (k//8)*SBO + (k%8)*S
      MN-major, plain:      (i//T)*SBO + (i%T)*elem_bytes + (k//8)*LBO + (k%8)*16
    Source: ptx-semantics.md 9.5.
    """
    i, k = np.asarray(i, dtype=np.int64), np.asarray(k, dtype=np.int64)
    leading, stride, span = desc.leading_bytes, desc.stride_bytes, desc.swizzle
    per_unit = UNIT_BYTES // elem_bytes
    if major == "k":
        if span:
            return (i // 8) * stride + (i % 8) * span + k * elem_bytes
        return (i // 8) * stride + (i % 8) * 16 + (k // per_unit) * leading + (k % per_unit) * elem_bytes
    if span:
        per_span = span // elem_bytes
        return (i // per_span) * leading + (i % per_span) * elem_bytes + (k // 8) * stride + (k % 8) * span
    return (i // per_unit) * stride + (i % per_unit) * elem_bytes + (k // 8) * leading + (k % 8) * 16


def _check_operand(desc: SmemDescriptor, k_elems: int, elem_bytes: int, major: str) -> None:
    if major not in MAJORS:
        raise SimulationError(f"operand major {major!r} is unknown; allowed: {', '.join(MAJORS)}")
    if elem_bytes not in _ELEMENT_TYPES:
        raise SimulationError(f"operand elements of {elem_bytes} bytes do not exist; allowed: 1, 2, 4")
    if major == "k" and desc.swizzle and k_elems * elem_bytes > desc.swizzle:
        raise SimulationError(
            f"K-major operand of {k_elems * elem_bytes} bytes per row exceeds its swizzle span of {desc.swizzle}; "
            "advance the start address per K step"
        )


def element_addresses(desc: SmemDescriptor, rows: int, k_elems: int, elem_bytes: int, major: str) -> NDArray[np.int64]:
    """Absolute byte address of every element of a (rows, k_elems) operand. Source: ptx-semantics.md 9.5."""
    _check_operand(desc, k_elems, elem_bytes, major)
    offsets = element_offsets(desc, np.arange(rows)[:, None], np.arange(k_elems)[None, :], elem_bytes, major)
    return swizzle_address(desc.start + offsets, desc.swizzle)


@lru_cache(maxsize=1024)
def _unit_map(
    phase: int,
    leading_bytes: int,
    stride_bytes: int,
    swizzle: int,
    rows: int,
    k_elems: int,
    elem_bytes: int,
    major: str,
) -> tuple[NDArray[np.int64], int]:
    """16-byte unit numbers of an operand that starts at byte `phase` of a 1024-byte pattern, and the largest of them.

    A unit holds neighbours along the major dimension in every layout: (rows, K units) or (k_elems, row units).
    """
    desc = SmemDescriptor(start=phase, leading_bytes=leading_bytes, stride_bytes=stride_bytes, swizzle=swizzle)
    _check_operand(desc, k_elems, elem_bytes, major)
    per_unit = UNIT_BYTES // elem_bytes
    along = np.arange(0, k_elems if major == "k" else rows, per_unit)[None, :]
    across = np.arange(rows if major == "k" else k_elems)[:, None]
    i, k = (across, along) if major == "k" else (along, across)
    units = swizzle_address(phase + element_offsets(desc, i, k, elem_bytes, major), swizzle) // UNIT_BYTES
    units.flags.writeable = False
    return units, int(units.max())


def operand_units(desc: SmemDescriptor, rows: int, k_elems: int, elem_bytes: int, major: str) -> NDArray[np.int64]:
    """The 16-byte units (absolute address // 16) an operand reads: what a hazard check marks.

    Shape (rows, K units) for K-major, (k_elems, row units) for MN-major; the last unit of a row may be used in part.
    """
    phase = desc.start % _PATTERN
    units, _ = _unit_map(phase, desc.leading_bytes, desc.stride_bytes, desc.swizzle, rows, k_elems, elem_bytes, major)
    return units + (desc.start - phase) // UNIT_BYTES


@lru_cache(maxsize=1024)
def _distinct_units(*key) -> NDArray[np.int64]:
    units = np.unique(_unit_map(*key)[0])
    units.flags.writeable = False
    return units


def distinct_units(desc: SmemDescriptor, rows: int, k_elems: int, elem_bytes: int, major: str) -> NDArray[np.int64]:
    """`operand_units`, each once and in order."""
    phase = desc.start % _PATTERN
    key = (phase, desc.leading_bytes, desc.stride_bytes, desc.swizzle, rows, k_elems, elem_bytes, major)
    return _distinct_units(*key) + (desc.start - phase) // UNIT_BYTES


def load_matrix(
    smem: NDArray[np.uint8], desc: SmemDescriptor, rows: int, k_elems: int, elem_bytes: int, major: str
) -> NDArray:
    """Gathers an operand: the bit patterns of a (rows, k_elems) matrix, dtype u8, u16 or u32.

    Args:
        smem: the CTA's shared window from address 0; its size a multiple of 16.
        elem_bytes: 1, 2 or 4. major: `k` or `mn`, the dimension that is contiguous in memory.
    Raises: SimulationError if the operand leaves the window or does not fit its layout.
    Source: ptx-semantics.md 9.5 and 10.
    """
    phase = desc.start % _PATTERN
    units, last = _unit_map(
        phase, desc.leading_bytes, desc.stride_bytes, desc.swizzle, rows, k_elems, elem_bytes, major
    )
    base = desc.start - phase
    if base + (last + 1) * UNIT_BYTES > smem.size:
        raise SimulationError(
            f"matrix operand reads shared byte {base + last * UNIT_BYTES:#x}, outside the window of {smem.size:#x}"
        )
    # complex128 is numpy's only plain 16-byte type: it is gathered as bits, never computed with.
    gathered = np.take(smem[base:].view(np.complex128), units)
    matrix = gathered.view(_ELEMENT_TYPES[elem_bytes])
    return matrix[:, :k_elems] if major == "k" else matrix[:, :rows].T


# ------------------------------------------------------------------------------------------- instruction descriptor

_F16_KIND_TYPES = {0: "f16", 1: "bf16"}
_F8_KIND_TYPES = {0: "e4m3", 1: "e5m2"}
_KIND_TYPES = {"f16": _F16_KIND_TYPES, "tf32": {2: "tf32"}, "f8f6f4": _F8_KIND_TYPES}
_D_TYPES = {1: "f32"}
_K_ELEMENTS = {"f16": 16, "tf32": 8, "f8f6f4": 32}
_ELEMENT_BYTES = {"f16": 2, "tf32": 4, "f8f6f4": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionDescriptor:
    """What one tcgen05.mma computes. Types as in `tensor_core`; majors `k` or `mn`; m, n for the whole CTA group."""

    m: int
    n: int
    k: int
    a_type: str
    b_type: str
    d_type: str
    negate_a: bool
    negate_b: bool
    a_major: str
    b_major: str
    elem_bytes: int


def decode_instruction(word: int, kind: str, cta_group: int) -> InstructionDescriptor:
    """Reads the 32-bit instruction descriptor of tcgen05.mma.

    Args: kind: `f16`, `tf32` or `f8f6f4`. cta_group: 1 or 2.
    Raises: SimulationError for sparsity, saturation, .ws shifts, a type that is not simulated, or an M, N the CTA
        group does not have (M 64, 128 / 128, 256; N a multiple of 8 / 16 up to 256, 16 / 32 for 8-bit MN-major B).
    Source: ptx-semantics.md 9.5 (PTX table 42).
    """
    word = int(word)
    if kind not in _KIND_TYPES:
        raise SimulationError(f"tcgen05.mma kind::{kind} is not simulated; simulated: {', '.join(_KIND_TYPES)}")
    if cta_group not in (1, 2):
        raise SimulationError(f"tcgen05.mma cta_group::{cta_group} does not exist; allowed: 1, 2")
    unsupported = 0b1111 | 1 << 6 | 1 << 23 | 1 << 29 | 3 << 30
    if word & unsupported or not 0 <= word < 1 << 32:
        raise SimulationError(
            f"tcgen05.mma instruction descriptor {word:#010x} sets bits {word & unsupported:#x}: sparsity, saturation, "
            "reserved bits and .ws shifts are not simulated"
        )
    types = _KIND_TYPES[kind]
    a_code, b_code, d_code = _bits(word, 7, 3), _bits(word, 10, 3), _bits(word, 4, 2)
    if a_code not in types or b_code not in types or d_code not in _D_TYPES:
        raise SimulationError(
            f"tcgen05.mma kind::{kind} descriptor {word:#010x}: types A {a_code}, B {b_code}, D {d_code} "
            f"are not simulated; A, B: {types}, D: {_D_TYPES}"
        )
    desc = InstructionDescriptor(
        m=_bits(word, 24, 5) << 4,
        n=_bits(word, 17, 6) << 3,
        k=_K_ELEMENTS[kind],
        a_type=types[a_code],
        b_type=types[b_code],
        d_type=_D_TYPES[d_code],
        negate_a=bool(_bits(word, 13, 1)),
        negate_b=bool(_bits(word, 14, 1)),
        a_major=MAJORS[_bits(word, 15, 1)],
        b_major=MAJORS[_bits(word, 16, 1)],
        elem_bytes=_ELEMENT_BYTES[kind],
    )
    step = 8 * cta_group * (2 if desc.elem_bytes == 1 and desc.b_major == "mn" else 1)
    if desc.m not in (64 * cta_group, 128 * cta_group) or desc.n % step or not step <= desc.n <= 256:
        raise SimulationError(
            f"tcgen05.mma cta_group::{cta_group} has no shape M {desc.m}, N {desc.n}; "
            f"M is {64 * cta_group} or {128 * cta_group}, N a multiple of {step} up to 256"
        )
    return desc
