"""The multi-function unit: ex2, lg2, rcp exactly as an H200 computes them, the rest correctly rounded.

The tables in `data/` hold, for each of the 2^23 mantissas, the difference in last places between the hardware and the
correctly rounded result of ex2 and rcp; they were measured on an H200 over every input. They are loaded at first use.

| function | exactness |
|---|---|
| ex2_ftz, rcp_ftz, lg2_ftz | every one of the 2^32 inputs equals the H200's |
| ex2 | ex2_ftz, and for x < -126 the square of ex2(x/2): the instructions ptxas 12.9 makes of it |
| all others | correctly rounded from float64; PTX allows the hardware an error, given in the docstring |

Args and returns are bit patterns, as in `float_formats`; NaN results are 0x7FFFFFFF.
Source: ptx-semantics.md 6 and 15; PTX ISA 9.7.3.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Callable
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fa4build.simulate.units.float_formats import (
    F32_NAN,
    Bits,
    as_bits,
    bf16_to_f32,
    canonical_nan,
    f16_to_f32,
    f32_to_bf16_rn,
    f32_to_f16_rn,
    flush_subnormals,
    mul_f32,
    round_f64_to_f32,
)
from fa4build.simulate.units.lg2_unit import UNIT_BITS, log2_of_mantissa

_ONE = np.uint32(0x3F800000)
_INFINITY = np.uint32(0x7F800000)
_NEGATIVE_INFINITY = np.uint32(0xFF800000)
_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_MANTISSA = np.uint32(0x007FFFFF)
_MIN_NORMAL = np.int32(0x00800000)


def _delta(name: str) -> NDArray[np.integer]:
    packed = resources.files("fa4build.simulate").joinpath("data", f"h200_{name}_delta.npy.xz").read_bytes()
    return np.load(io.BytesIO(lzma.decompress(packed)))


def _table(name: str, function: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> NDArray[np.int32]:
    """Bits of the hardware's result for 1 + i/2^23, i = 0..2^23-1.

    Contract: float64's `function` decides the f32 rounding. The nearest any of these values comes to an f32 midpoint is
    20 float64 last places (tested), far more than the error of any libm.
    """
    argument = np.arange(1 << 23, dtype=np.float64)
    argument *= 2.0**-23
    argument += 1.0
    table = function(argument).astype(np.float32).view(np.int32) + _delta(name).astype(np.int32)
    table.flags.writeable = False
    return table


@cache
def ex2_table() -> NDArray[np.int32]:
    """f32 bits of the H200's ex2 on [1, 2), by mantissa."""
    return _table("ex2_1to2", np.exp2)


@cache
def _rcp_delta() -> NDArray[np.integer]:
    return _delta("rcp_1to2")


def rcp_of_mantissa(mantissa: NDArray[np.uint32]) -> NDArray[np.int64]:
    """f32 bits of the H200's rcp of 1 + mantissa / 2^23. Contract: as `_table`."""
    exact = np.reciprocal(1.0 + mantissa * 2.0**-23).astype(np.float32).view(np.int32)
    return exact.astype(np.int64) + _rcp_delta()[mantissa]


_BEYOND = np.float32(
    256.0 - 2.0**-16
)  # its fixed-point form still fits in int32; all results from here on are 0 or inf


def _exp2_index(bits: Bits) -> NDArray[np.int32]:
    """x in units of 2^-23 as the unit forms it: cut off; ones' complement for x < 0 unless the fraction is 0."""
    x = bits.view(np.float32)
    magnitude = np.fmin(np.abs(x), _BEYOND)
    magnitude *= np.float32(2.0**23)
    fixed = magnitude.astype(np.int32)
    negative = bits >> np.uint32(31)
    is_complement = negative & (fixed & np.int32(0x7FFFFF) != 0)
    # -n for a whole number, ~n = -n - 1 for another
    np.negative(fixed, out=fixed, where=negative != 0)
    fixed -= is_complement.view(np.int32)
    return fixed


def ex2_ftz(bits: ArrayLike) -> Bits:
    """2^x: `ex2.approx.ftz.f32`. Results below 2^-126 are 0, from 2^128 on infinity; subnormal x gives 1.

    Source: ptx-semantics.md 15 (0 mismatches over all inputs on an H200).
    """
    bits = as_bits(bits)
    index = _exp2_index(bits)
    octave = np.clip(index >> 23, -127, 128) - 1
    result = ex2_table().take(index & 0x7FFFFF) + (octave << 23)
    np.minimum(result, np.int32(_INFINITY), out=result)
    result[result < _MIN_NORMAL] = 0
    is_nan = (bits & _MAGNITUDE) > _INFINITY
    result = result.view(np.uint32)
    if np.count_nonzero(is_nan):
        result[is_nan] = F32_NAN
    return result


def ex2(bits: ArrayLike) -> Bits:
    """2^x with subnormal results: `ex2.approx.f32`; for x < -126 the square of ex2(x/2).

    Source: SASS of ptxas 12.9 for sm_90a: compare with -126, halve, MUFU.EX2, square.
    """
    bits = as_bits(bits)
    small = bits.view(np.float32) < np.float32(-126.0)
    if not small.any():
        return ex2_ftz(bits)
    root = ex2_ftz(np.where(small, mul_f32(bits, np.uint32(0x3F000000)), bits))
    return np.where(small, mul_f32(root, root), root)


def rcp_ftz(bits: ArrayLike) -> Bits:
    """1/x: `rcp.approx.ftz.f32`. Source: ptx-semantics.md 15 (0 mismatches over all inputs on an H200)."""
    bits = flush_subnormals(bits)
    magnitude = bits & _MAGNITUDE
    exponent = (magnitude >> np.uint32(23)).astype(np.int64) - 127
    result = rcp_of_mantissa(magnitude & _MANTISSA) - (exponent << 23)
    result = np.where((result < _MIN_NORMAL) | (magnitude == _INFINITY), 0, result)
    result = np.where(magnitude == 0, np.int64(_INFINITY), result).astype(np.uint32) | (bits & _SIGN)
    return np.where(magnitude > _INFINITY, F32_NAN, result)


def lg2_ftz(bits: ArrayLike) -> Bits:
    """log2 x: `lg2.approx.ftz.f32`. lg2(+-0) = -inf, lg2(x < 0) = NaN, lg2(inf) = inf.

    Contract: every result equals an H200's (`lg2_unit`).
    """
    bits = flush_subnormals(bits)
    exponent = (bits >> np.uint32(23)).astype(np.int64) - 127
    total = (exponent << UNIT_BITS) + log2_of_mantissa((bits & _MANTISSA).astype(np.int64))
    total += total < 0  # a negative sum's magnitude is its ones' complement
    result = round_f64_to_f32(total * 2.0**-UNIT_BITS, "rz")  # 44 bits at most: exact in float64
    result = np.where(bits == _ONE, np.uint32(0), result)
    result = np.where(bits == _INFINITY, _INFINITY, result)
    result = np.where(bits & _MAGNITUDE == 0, _NEGATIVE_INFINITY, result)
    invalid = (bits > _INFINITY) & (bits != _SIGN)
    return np.where(invalid, F32_NAN, result)


def _correctly_rounded(bits: ArrayLike, function: Callable, ftz: bool) -> Bits:
    value = (flush_subnormals(bits) if ftz else as_bits(bits)).view(np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        result = np.asarray(function(value)).astype(np.float32)
    result = canonical_nan(result.view(np.uint32))
    return flush_subnormals(result) if ftz else result


def rsqrt_approx(bits: ArrayLike, ftz: bool = True) -> Bits:
    """1/sqrt(x), correctly rounded: `rsqrt.approx{.ftz}.f32`. The hardware may differ by 2 ulp (PTX 9.7.3)."""
    return _correctly_rounded(bits, lambda x: 1 / np.sqrt(x), ftz)


def sqrt_approx(bits: ArrayLike, ftz: bool = True) -> Bits:
    """sqrt(x), correctly rounded: `sqrt.approx{.ftz}.f32`. The hardware's relative error is up to 2^-23 (PTX 9.7.3)."""
    return _correctly_rounded(bits, np.sqrt, ftz)


def sqrt_rn(bits: ArrayLike) -> Bits:
    """sqrt(x), IEEE: `sqrt.rn.f32`."""
    return _correctly_rounded(bits, np.sqrt, ftz=False)


def tanh_approx(bits: ArrayLike) -> Bits:
    """tanh(x), correctly rounded: `tanh.approx.f32`. The hardware's relative error is up to 2^-11 (PTX 9.7.3)."""
    return _correctly_rounded(bits, np.tanh, ftz=False)


def sin_approx(bits: ArrayLike, ftz: bool = True) -> Bits:
    """sin(x), correctly rounded: `sin.approx{.ftz}.f32`. Hardware: absolute error 2^-20.5 on [-pi, pi] (PTX 9.7.3)."""
    return _correctly_rounded(bits, np.sin, ftz)


def cos_approx(bits: ArrayLike, ftz: bool = True) -> Bits:
    """cos(x), correctly rounded: `cos.approx{.ftz}.f32`. Hardware: absolute error 2^-20.5 on [-pi, pi] (PTX 9.7.3)."""
    return _correctly_rounded(bits, np.cos, ftz)


def _halves(packed: ArrayLike, function: Callable[[NDArray[np.uint16]], NDArray[np.uint16]]) -> Bits:
    packed = as_bits(packed)
    low = function((packed & np.uint32(0xFFFF)).astype(np.uint16))
    high = function((packed >> np.uint32(16)).astype(np.uint16))
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def ex2_bf16x2_ftz(packed: ArrayLike) -> Bits:
    """2^x on both bf16 halves: `ex2.approx.ftz.bf16x2`, correctly rounded. Hardware: relative error up to 2^-7."""
    return _halves(packed, lambda half: f32_to_bf16_rn(_correctly_rounded(bf16_to_f32(half), np.exp2, ftz=True)))


def ex2_f16x2(packed: ArrayLike) -> Bits:
    """2^x on both f16 halves: `ex2.approx.f16x2`, correctly rounded. Hardware: relative error up to 2^-9.9."""
    return _halves(packed, lambda half: f32_to_f16_rn(_correctly_rounded(f16_to_f32(half), np.exp2, ftz=False)))
