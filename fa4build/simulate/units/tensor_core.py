"""Tensor-core arithmetic, bit for bit: what one wgmma or tcgen05.mma adds up, and how it rounds.

For one output element and the K products of one instruction step, with E the largest exponent among the products
(sums of the stored exponents, not renormalised) and the accumulator:

    q = 2^(E - 25)
    d = round_toward_zero_f32(sum of trunc(p / q) * q over products p, plus trunc(c / q) * q)

Zero products take no part in E. Successive K steps are separate instructions, chained through the f32 accumulator.

| type | K step | evidence |
|---|---|---|
| bf16 | 16 | H200: 131,072 of 131,072 outputs; B200: 5,000 of 5,000 vectors |
| f16 | 16 | B200: 5,000 of 5,000 vectors |
| tf32 | 8 | B200: 5,000 of 5,000 vectors |
| e4m3, e5m2 | 32 | one public model of tcgen05 [PUB]; Hopper's fp8 wgmma is another unit and is not modelled |

Source: ptx-semantics.md 9.8; overflow to infinity and NaN 0x7FFFFFFF as in the public model MMA-Sim (arXiv 2511.10909).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fa4build.errors import SimulationError
from fa4build.simulate.units.float_formats import F32_NAN, Bits, bf16_to_f32, e4m3_to_f32, e5m2_to_f32, round_f64_to_f32

FRACTION_BITS = 25  # bits kept below the largest exponent
_ZERO_EXPONENT = -2000  # stands for the exponent of zero; the sum of two still fits in int16
_LOWEST_ALIGNMENT = -133  # the unit aligns to no lower exponent than this (ptx-semantics.md 9.8)
_BLOCK_ELEMENTS = 8192  # outputs worked on at once, so that the working set stays in the first-level caches


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandType:
    """One operand type: K elements per step, the exact conversion to f32 bits, the exponent of its subnormals."""

    k_step: int
    to_f32: Callable[[NDArray], Bits]
    min_exponent: int
    bits_type: np.dtype


def _f16_payload_to_f32(bits: NDArray) -> Bits:
    return np.asarray(bits, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)


def _tf32_to_f32(bits: NDArray) -> Bits:
    """The unit reads the upper 19 bits: sign, 8 exponent bits, 10 mantissa bits."""
    return np.asarray(bits, dtype=np.uint32) & np.uint32(0xFFFFE000)


OPERAND_TYPES = {
    "bf16": OperandType(k_step=16, to_f32=bf16_to_f32, min_exponent=-126, bits_type=np.dtype(np.uint16)),
    "f16": OperandType(k_step=16, to_f32=_f16_payload_to_f32, min_exponent=-14, bits_type=np.dtype(np.uint16)),
    "tf32": OperandType(k_step=8, to_f32=_tf32_to_f32, min_exponent=-126, bits_type=np.dtype(np.uint32)),
    "e4m3": OperandType(k_step=32, to_f32=e4m3_to_f32, min_exponent=-6, bits_type=np.dtype(np.uint8)),
    "e5m2": OperandType(k_step=32, to_f32=e5m2_to_f32, min_exponent=-14, bits_type=np.dtype(np.uint8)),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Operand:
    """An operand by K step, transposed so that one k is a contiguous row: f32 values and stored exponents (K, rows)."""

    values: NDArray[np.float32]
    exponents: NDArray[np.int16]
    is_finite: bool
    lowest: int  # smallest exponent of a nonzero element, large if there is none


def _exponents(bits: Bits, min_exponent: int) -> NDArray[np.int16]:
    """Exponents as stored in the operand type; subnormals have the type's minimum, zero has `_ZERO_EXPONENT`."""
    field = ((bits >> np.uint32(23)) & np.uint32(0xFF)).astype(np.int16)
    exponent = np.maximum(field - np.int16(127), np.int16(min_exponent))
    return np.where(bits & np.uint32(0x7FFFFFFF) == 0, np.int16(_ZERO_EXPONENT), exponent)


def _operand(bits: NDArray, operand_type: OperandType) -> _Operand:
    f32 = np.ascontiguousarray(operand_type.to_f32(bits.T))
    finite = (f32 & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    is_finite = bool(finite.all())
    if not is_finite:
        f32 = np.where(finite, f32, np.uint32(0))
    exponents = _exponents(f32, operand_type.min_exponent)
    lowest = int(np.where(exponents == _ZERO_EXPONENT, np.int16(1000), exponents).min())
    return _Operand(values=f32.view(np.float32), exponents=exponents, is_finite=is_finite, lowest=lowest)


def _largest_exponent(a: _Operand, b: _Operand, rows: slice, c: Bits) -> NDArray[np.int16]:
    """E of every output: the largest of the product exponents and the accumulator's."""
    largest = _exponents(c, -126)
    product = np.empty_like(largest)
    for a_exponent, b_exponent in zip(a.exponents, b.exponents, strict=True):
        np.add(a_exponent[rows, None], b_exponent[None, :], out=product)
        np.maximum(largest, product, out=largest)
    return largest


def _power_of_two(exponent: NDArray[np.int32]) -> NDArray[np.float32]:
    """2^exponent as f32, for -126 <= exponent <= 127."""
    return ((exponent + np.int32(127)) << np.int32(23)).view(np.float32)


def _sum_in_f32(a: _Operand, b: _Operand, rows: slice, c: Bits, largest: NDArray[np.int16]) -> Bits:
    """One step where no product or scale leaves the f32 range: products and scaling are exact in f32.

    A product has at most 22 significant bits and |p| * 2^(25 - E) < 2^27: int32 holds the sum of 16 of them
    (16 * (2 - 2^-10)^2 * 2^25 < 2^31). The result has E >= -98 or is zero, so it is normal.
    """
    scale = _power_of_two(FRACTION_BITS - largest)
    total = np.zeros(largest.shape, dtype=np.float64)
    term, whole = np.empty(largest.shape, dtype=np.float32), np.empty(largest.shape, dtype=np.int32)
    for first in range(0, len(a.values), 16):
        part = np.zeros(largest.shape, dtype=np.int32)
        for a_value, b_value in zip(a.values[first : first + 16], b.values[first : first + 16], strict=True):
            np.multiply(a_value[rows, None], b_value[None, :], out=term)
            np.multiply(term, scale, out=term)
            np.copyto(whole, term, casting="unsafe")  # conversion to int cuts off toward zero
            part += whole
        total += part
    total += np.trunc(c.view(np.float32) * scale)
    return _cut_to_f32(total, largest)


def _cut_to_f32(total: NDArray[np.float64], largest: NDArray[np.int16]) -> Bits:
    """total * 2^(E - 25) cut to 24 bits toward zero, for normal results."""
    cut = (total.view(np.uint64) & np.uint64(0xFFFFFFFFE0000000)).view(np.float64)
    return (cut.astype(np.float32) * _power_of_two(largest - FRACTION_BITS)).view(np.uint32)


def _sum_in_f64(a: _Operand, b: _Operand, rows: slice, c: Bits, largest: NDArray[np.int16]) -> Bits:
    """One step for any operands: f64 holds every product, scale and sum exactly."""
    largest = np.maximum(largest, np.int16(_LOWEST_ALIGNMENT)).astype(np.int32)
    scale = np.ldexp(1.0, FRACTION_BITS - largest)
    total = np.trunc(c.view(np.float32) * scale)
    for a_value, b_value in zip(a.values, b.values, strict=True):
        product = a_value[rows, None].astype(np.float64) * b_value[None, :]
        product *= scale
        total += np.trunc(product, out=product)
    return _round_toward_zero(np.ldexp(total, largest - FRACTION_BITS))


def _round_toward_zero(value: NDArray[np.float64]) -> Bits:
    """f32 bits toward zero; 2^128 and beyond is infinity (MMA-Sim), and an empty sum is +0."""
    bits = round_f64_to_f32(value, "rz")
    bits = np.where(np.abs(value) >= 2.0**128, np.where(value < 0, np.uint32(0xFF800000), np.uint32(0x7F800000)), bits)
    return np.where(value == 0, np.uint32(0), bits)


def _step(a: _Operand, b: _Operand, c: Bits) -> Bits:
    """One instruction step on finite operands: a (K, M), b (K, N), c (M, N) f32 bits."""
    result = np.empty_like(c)
    rows_per_block = max(1, _BLOCK_ELEMENTS // c.shape[1])
    for first in range(0, c.shape[0], rows_per_block):
        rows = slice(first, first + rows_per_block)
        largest = _largest_exponent(a, b, rows, c[rows])
        tiny = (largest < -98) & (largest > -1000)
        if a.lowest + b.lowest >= -120 and int(largest.max()) <= 120 and not tiny.any():
            result[rows] = _sum_in_f32(a, b, rows, c[rows], np.maximum(largest, np.int16(-98)).astype(np.int32))
        else:
            result[rows] = _sum_in_f64(a, b, rows, c[rows], largest)
    return result


def _with_non_finite(
    a_bits: NDArray, b_bits: NDArray, c: Bits, d: Bits, types: tuple[OperandType, OperandType]
) -> Bits:
    """Puts infinities and NaN where IEEE rules give them: inf * 0 and inf - inf are NaN."""
    a = types[0].to_f32(a_bits).view(np.float32).astype(np.float64)
    b = types[1].to_f32(b_bits).view(np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        total = c.view(np.float32).astype(np.float64)
        for k in range(a.shape[1]):
            total = total + a[:, k, None] * b[None, :, k]
    d = np.where(np.isposinf(total), np.uint32(0x7F800000), d)
    d = np.where(np.isneginf(total), np.uint32(0xFF800000), d)
    return np.where(np.isnan(total), F32_NAN, d)


def _operand_type(name: str) -> OperandType:
    if name not in OPERAND_TYPES:
        raise SimulationError(
            f"tensor core operand type {name!r} is not modelled; modelled: {', '.join(OPERAND_TYPES)}"
        )
    return OPERAND_TYPES[name]


def mma_tile(
    a_bits: NDArray, b_bits: NDArray, c: NDArray | None, kind: str, b_kind: str | None = None
) -> NDArray[np.uint32]:
    """D = A * B^T + C as the tensor core computes it, one instruction step of K after another.

    Args:
        a_bits: (M, K) and b_bits: (N, K) bit patterns of the operand types; K a multiple of the type's step.
        c: (M, N) f32 bits (or float32), None for zero.
        kind: operand type of A and B: bf16, f16, tf32, e4m3, e5m2. b_kind: type of B where it differs (fp8).
    Returns: (M, N) f32 bits.
    Raises: SimulationError for an unknown type, shapes that do not fit, or a K that is not whole steps.
    Cost: 64 x 128 x 64 bf16 0.85 ms, 1.7 to 2.2 ms where f32 does not do (numpy 2.4, one core of an AMD EPYC 9005).
    Source: ptx-semantics.md 9.8.
    """
    a_type, b_type = _operand_type(kind), _operand_type(b_kind or kind)
    a_bits, b_bits = np.asarray(a_bits), np.asarray(b_bits)
    k_step = a_type.k_step
    if b_type.k_step != k_step or a_bits.shape[1:] != b_bits.shape[1:] or a_bits.shape[1] % k_step:
        raise SimulationError(
            f"mma of A {a_bits.shape} {kind} and B {b_bits.shape} {b_kind or kind}: "
            f"both need the same K, a multiple of {k_step}, and types of equal K step"
        )
    shape = (a_bits.shape[0], b_bits.shape[0])
    d = np.zeros(shape, dtype=np.uint32) if c is None else np.asarray(c).view(np.uint32)
    if d.shape != shape:
        raise SimulationError(f"mma accumulator has shape {d.shape}, A and B give {shape}")
    for first in range(0, a_bits.shape[1], k_step):
        a_part, b_part = a_bits[:, first : first + k_step], b_bits[:, first : first + k_step]
        a, b = _operand(a_part, a_type), _operand(b_part, b_type)
        c_finite = (d & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
        if a.is_finite and b.is_finite and c_finite.all():
            d = _step(a, b, d)
        else:
            finite_c = np.where(c_finite, d, np.uint32(0))
            d = _with_non_finite(a_part, b_part, d, _step(a, b, finite_c), (a_type, b_type))
    return d
