"""Shared-memory swizzles: which address a TMA copy or a matrix descriptor really touches.

A swizzle exchanges the 16-byte units of a span with those of the other rows of its pattern, by XOR of address bits. It
acts on the absolute shared address, so a start address advanced inside a pattern still reads what was written.

Source: ptx-semantics.md 8.4 and 9.5 (PTX ISA 5.5.7).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fa4build.errors import SimulationError

Address = TypeVar("Address", int, NDArray[np.integer])

SPANS = (0, 32, 64, 128)  # bytes; 0 = no swizzle
UNIT_BYTES = 16  # the XOR moves whole 16-byte units

_ROW_MASK = {0: 0, 32: 1, 64: 3, 128: 7}


def pattern_bytes(span: int) -> int:
    """Bytes after which the swizzle pattern repeats: 8 spans (1024, 512, 256 for 128, 64, 32), 16 without swizzle."""
    return 8 * row_span(span) if span else UNIT_BYTES


def row_span(span: int) -> int:
    """`span` itself, checked.

    Raises: SimulationError if it is none of 0, 32, 64, 128.
    """
    if span not in _ROW_MASK:
        raise SimulationError(f"swizzle span of {span} bytes does not exist; allowed: 0, 32, 64, 128")
    return span


def swizzle_address(address: Address, span: int) -> Address:
    """The address after the swizzle: a ^ (((a >> 7) & m) << 4), m = 0, 1, 3, 7 for spans 0, 32, 64, 128.

    Its own inverse: bits 7 to 9 select, bits 4 to 6 change. Args: absolute shared address(es) in bytes.
    """
    mask = _ROW_MASK[row_span(span)]
    return address ^ (((address >> 7) & mask) << 4) if mask else address


def swizzle_address_128_atom32(address: Address) -> Address:
    """128-byte swizzle that moves 32-byte units (tf32 operands, M- or N-major): a ^ (((a >> 7) & 3) << 5).

    Source: ptx-semantics.md 9.5 (PTX ISA 5.5.7), not exercised on hardware.
    """
    return address ^ (((address >> 7) & 3) << 5)
