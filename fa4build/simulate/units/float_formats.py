"""Bit-exact conversions and f32 arithmetic of the PTX simulator, as numpy-vectorised functions on bit patterns.

Every f32 argument is an array of u32 bit patterns (a float32 array is taken as its bits); results are bit patterns
again. Shapes broadcast like numpy's. `.f32x2` instructions are the same functions on the two halves.

NaN results are canonical as PTX asks: 0x7FFFFFFF (f32), 0x7FFF (f16, bf16), 0x7F (e4m3, e5m2).

Method of the rounding: the float64 value of a sum or fused multiply-add is made *odd* when it is inexact (its last bit
says that something was cut off). Rounding an odd 53-bit value to 24 bits or fewer, in any direction, gives the
correctly rounded result of the exact one (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums",
IEEE Trans. Computers 57(4), 2008). The plain float64 result is used where it is provably right.

Source: ptx-semantics.md 5.2 and 5.3 (PTX ISA 9.7.3, 9.7.5, 9.7.9.21).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fa4build.errors import SimulationError

F32_NAN = np.uint32(0x7FFFFFFF)
F16_NAN = np.uint16(0x7FFF)
BF16_NAN = np.uint16(0x7FFF)
F8_NAN = np.uint8(0x7F)

ROUNDINGS = ("rn", "rz", "rm", "rp")

_F32_SIGN = np.uint32(0x80000000)
_F32_MAGNITUDE = np.uint32(0x7FFFFFFF)
_F32_INFINITY = np.uint32(0x7F800000)
_F32_MIN_NORMAL = np.uint32(0x00800000)
_F32_MAX_SUBNORMAL = np.uint32(0x007FFFFF)
_TAIL = np.uint64(0x1FFFFFFF)  # the 29 low bits of a float64 that a normal f32 drops
_HALFWAY = np.uint64(0x10000000)

Bits = NDArray[np.uint32]


def as_bits(x: ArrayLike) -> Bits:
    """The u32 bit patterns of an array of f32 values or of bit patterns (ints in 0..2^32-1)."""
    x = np.asarray(x)
    if x.dtype == np.uint32:
        return x
    if x.dtype == np.float32 or x.dtype == np.int32:
        return x.view(np.uint32)
    if np.issubdtype(x.dtype, np.integer):
        return x.astype(np.uint32)
    raise SimulationError(f"f32 operand has dtype {x.dtype}; give uint32 bit patterns or float32 values")


def _quiet() -> np.errstate:
    return np.errstate(all="ignore")


def _check_rounding(rounding: str) -> None:
    if rounding not in ROUNDINGS:
        raise SimulationError(f"rounding {rounding!r} is unknown; allowed: {', '.join(ROUNDINGS)}")


def flush_subnormals(bits: ArrayLike) -> Bits:
    """`.ftz` on an operand or result: subnormals become zero of the same sign. Source: PTX 9.7.3."""
    bits = as_bits(bits)
    return np.where((bits & _F32_INFINITY) == 0, bits & _F32_SIGN, bits)


def canonical_nan(bits: Bits) -> Bits:
    """Replaces every NaN by 0x7FFFFFFF; copies only if there is one."""
    is_nan = (bits & _F32_MAGNITUDE) > _F32_INFINITY
    return np.where(is_nan, F32_NAN, bits) if is_nan.any() else bits


# ------------------------------------------------------------------------------------------------ f32 arithmetic


def _odd_sum(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """x + y in float64, rounded to odd: exact, or a neighbour of the exact sum whose last bit is 1.

    Contract: |x|, |y| < 2^1022, so that nothing overflows in Knuth's two-sum.
    """
    total = x + y
    y_part = total - x
    error = (x - (total - y_part)) + (y - y_part)
    bits = total.view(np.int64)
    inexact_even = (error != 0) & ((bits & 1) == 0)
    # The exact sum lies between `total` and its neighbour in the direction of `error`; one of the two is odd.
    away = (error > 0) == (total > 0)
    step = np.where(away, 1, -1)
    return np.where(inexact_even, bits + step, bits).view(np.float64)


def round_f64_to_f32(value: NDArray[np.float64], rounding: str = "rn") -> Bits:
    """Rounds float64 values to f32 bits in any PTX direction; overflow follows IEEE 754 for that direction.

    The result is exact for the mathematical value if `value` is exact or rounded to odd. NaN gives 0x7FFFFFFF.
    """
    _check_rounding(rounding)
    value = np.asarray(value, dtype=np.float64)
    with _quiet():
        nearest = value.astype(np.float32)
        if rounding != "rn":
            back = nearest.astype(np.float64)
            too_high, too_low = back > value, back < value
            if rounding == "rz":
                too_high, too_low = too_high & (value > 0), too_low & (value < 0)
            if rounding in ("rm", "rz"):
                nearest = np.where(too_high, np.nextafter(nearest, np.float32(-np.inf)), nearest)
            if rounding in ("rp", "rz"):
                nearest = np.where(too_low, np.nextafter(nearest, np.float32(np.inf)), nearest)
    return canonical_nan(nearest.view(np.uint32))


def _negative_zero_when_cancelled(
    result: Bits, total: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]
) -> Bits:
    """Rounding down: an exact zero sum is -0 unless both addends are +0 (IEEE 754, 6.3)."""
    both_positive_zero = (x == 0) & (y == 0) & ~np.signbit(x) & ~np.signbit(y)
    return np.where((total == 0) & ~both_positive_zero, _F32_SIGN, result)


def _sum_rounded(x: NDArray[np.float64], y: NDArray[np.float64], rounding: str) -> Bits:
    plain = x + y
    total = np.where(np.isfinite(plain), _odd_sum(x, y), plain)  # two-sum makes NaN of infinities
    result = round_f64_to_f32(total, rounding)
    return _negative_zero_when_cancelled(result, total, x, y) if rounding == "rm" else result


def fma_f32(a: ArrayLike, b: ArrayLike, c: ArrayLike, rounding: str = "rn", ftz: bool = False) -> Bits:
    """a * b + c with one rounding: `fma.{rn,rz,rm,rp}{.ftz}.f32` and each half of `fma.*.f32x2`.

    Args: f32 bits. Returns: f32 bits, exact in every case, subnormals kept unless `ftz`.
    `fma.rn.f32.bf16` is this on `bf16_to_f32` of the first two operands.
    Source: ptx-semantics.md 5.2. Flushing a result that only rounding makes normal is [INF]: not flushed here.
    """
    _check_rounding(rounding)
    a, b, c = as_bits(a), as_bits(b), as_bits(c)
    if ftz:
        a, b, c = flush_subnormals(a), flush_subnormals(b), flush_subnormals(c)
    with _quiet():
        product = a.view(np.float32).astype(np.float64) * b.view(np.float32)  # 48 significant bits: exact
        addend = c.view(np.float32)
        if rounding == "rn":
            total = product + addend
            result = total.astype(np.float32).view(np.uint32)
            # Double rounding can only go wrong where the float64 sum looks halfway, or where the f32 is subnormal.
            magnitude = result & _F32_MAGNITUDE
            doubtful = (total.view(np.uint64) & _TAIL) == _HALFWAY
            doubtful |= (magnitude - np.uint32(1)) < _F32_MIN_NORMAL
            doubtful |= magnitude > _F32_INFINITY
            if doubtful.any():
                result = _sum_rounded(*np.broadcast_arrays(product, addend.astype(np.float64)), "rn")
        else:
            result = _sum_rounded(*np.broadcast_arrays(product, addend.astype(np.float64)), rounding)
    return flush_subnormals(result) if ftz else result


def _add_directed(x: NDArray[np.float32], y: NDArray[np.float32], rounding: str) -> Bits:
    """x + y toward `rounding`: the nearest sum, moved by one place where two-sum's exact error asks for it."""
    nearest = x + y
    if not (np.isfinite(nearest) & (nearest != 0)).all():  # signs of zero, infinities, overflow
        wide_x, wide_y = np.broadcast_arrays(x.astype(np.float64), y.astype(np.float64))
        return _sum_rounded(wide_x, wide_y, rounding)
    y_part = nearest - x
    error = (x - (nearest - y_part)) + (y - y_part)
    if rounding == "rz":
        moved = np.where((error < 0) == (nearest < 0), nearest, np.nextafter(nearest, np.float32(0)))
        return np.where(error == 0, nearest, moved).view(np.uint32)
    target = np.float32(-np.inf if rounding == "rm" else np.inf)
    wrong_side = error < 0 if rounding == "rm" else error > 0
    return np.where(wrong_side, np.nextafter(nearest, target), nearest).view(np.uint32)


def add_f32(a: ArrayLike, b: ArrayLike, rounding: str = "rn", ftz: bool = False) -> Bits:
    """a + b: `add.{rn,rz,rm,rp}{.ftz}.f32`. Args and returns: f32 bits. Source: ptx-semantics.md 5.2."""
    _check_rounding(rounding)
    a, b = as_bits(a), as_bits(b)
    if ftz:
        a, b = flush_subnormals(a), flush_subnormals(b)
    with _quiet():
        if rounding == "rn":
            result = canonical_nan(np.asarray(a.view(np.float32) + b.view(np.float32)).view(np.uint32))
        else:
            result = _add_directed(a.view(np.float32), b.view(np.float32), rounding)
    return flush_subnormals(result) if ftz else result


def sub_f32(a: ArrayLike, b: ArrayLike, rounding: str = "rn", ftz: bool = False) -> Bits:
    """a - b: `sub.{rn,rz,rm,rp}{.ftz}.f32`. Args and returns: f32 bits. Source: ptx-semantics.md 5.2."""
    return add_f32(a, as_bits(b) ^ _F32_SIGN, rounding, ftz)


def mul_f32(a: ArrayLike, b: ArrayLike, rounding: str = "rn", ftz: bool = False) -> Bits:
    """a * b: `mul.{rn,rz,rm,rp}{.ftz}.f32`. Args and returns: f32 bits. Source: ptx-semantics.md 5.2."""
    _check_rounding(rounding)
    a, b = as_bits(a), as_bits(b)
    if ftz:
        a, b = flush_subnormals(a), flush_subnormals(b)
    with _quiet():
        if rounding == "rn":
            result = canonical_nan(np.asarray(a.view(np.float32) * b.view(np.float32)).view(np.uint32))
        else:
            product = a.view(np.float32).astype(np.float64) * b.view(np.float32)
            result = round_f64_to_f32(product, rounding)
    return flush_subnormals(result) if ftz else result


def div_f32_rn(a: ArrayLike, b: ArrayLike) -> Bits:
    """a / b, IEEE: `div.rn.f32`, and `rcp.rn.f32` with a = 1. Args and returns: f32 bits."""
    with _quiet():
        return canonical_nan(np.asarray(as_bits(a).view(np.float32) / as_bits(b).view(np.float32)).view(np.uint32))


def _ordered_key(bits: Bits) -> NDArray[np.int64]:
    """Integers in the order of the f32 values, -0 below +0."""
    magnitude = (bits & _F32_MAGNITUDE).astype(np.int64)
    return np.where(bits & _F32_SIGN != 0, -1 - magnitude, magnitude)


def _is_nan(bits: Bits) -> NDArray[np.bool_]:
    return (bits & _F32_MAGNITUDE) > _F32_INFINITY


def _choose(a: ArrayLike, b: ArrayLike, take_larger: bool, propagate_nan: bool, ftz: bool) -> Bits:
    a, b = as_bits(a), as_bits(b)
    if ftz:
        a, b = flush_subnormals(a), flush_subnormals(b)
    with _quiet():
        chosen = np.asarray((np.fmax if take_larger else np.fmin)(a.view(np.float32), b.view(np.float32)))
        if not propagate_nan and (np.abs(chosen) > 0).all():  # only zeros and NaN need more than fmax and fmin
            return chosen.view(np.uint32)
    a_nan, b_nan = _is_nan(a), _is_nan(b)
    a_wins = (_ordered_key(a) >= _ordered_key(b)) == take_larger
    result = np.where((a_wins & ~a_nan) | b_nan, a, b)
    is_nan = (a_nan | b_nan) if propagate_nan else (a_nan & b_nan)
    return np.where(is_nan, F32_NAN, result)


def max_f32(a: ArrayLike, b: ArrayLike, propagate_nan: bool = False, ftz: bool = False) -> Bits:
    """`max{.ftz}{.NaN}.f32`: the non-NaN operand wins, +0 > -0; with `propagate_nan` any NaN gives NaN.

    Args and returns: f32 bits. The 3-operand form is max(max(a, b), c). Source: ptx-semantics.md 5.2.
    """
    return _choose(a, b, True, propagate_nan, ftz)


def min_f32(a: ArrayLike, b: ArrayLike, propagate_nan: bool = False, ftz: bool = False) -> Bits:
    """`min{.ftz}{.NaN}.f32`: the non-NaN operand wins, -0 < +0. Args and returns: f32 bits."""
    return _choose(a, b, False, propagate_nan, ftz)


# ------------------------------------------------------------------------------------------------ 16-bit formats


def f32_to_bf16_rn(bits: ArrayLike) -> NDArray[np.uint16]:
    """f32 bits -> bf16 bits, round to nearest even; overflow gives infinity. Source: ptx-semantics.md 5.3."""
    bits = as_bits(bits)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded >>= np.uint32(16)
    is_nan = _is_nan(bits)
    if np.count_nonzero(is_nan):
        rounded = np.where(is_nan, np.uint32(BF16_NAN), rounded)
    return rounded.astype(np.uint16)


def f32_to_bf16_rz(bits: ArrayLike) -> NDArray[np.uint16]:
    """f32 bits -> bf16 bits, toward zero: the upper half. Source: PTX 9.7.9.21."""
    bits = as_bits(bits)
    return np.where(_is_nan(bits), BF16_NAN, (bits >> np.uint32(16)).astype(np.uint16))


def bf16_to_f32(bits: ArrayLike) -> Bits:
    """bf16 bits -> f32 bits, exact (a NaN keeps its payload, as `cvt.f32.bf16` is a shift). Source: 5.3."""
    return np.asarray(bits, dtype=np.uint16).astype(np.uint32) << np.uint32(16)


def f32_to_f16_rn(bits: ArrayLike) -> NDArray[np.uint16]:
    """f32 bits -> f16 bits, round to nearest even, subnormals kept, overflow to infinity. Source: 5.3."""
    bits = as_bits(bits)
    with _quiet():
        half = np.asarray(bits.view(np.float32).astype(np.float16)).view(np.uint16)
    return np.where(_is_nan(bits), F16_NAN, half)


def f32_to_f16_rz(bits: ArrayLike) -> NDArray[np.uint16]:
    """f32 bits -> f16 bits, toward zero; a finite value stays finite. Source: PTX 9.7.9.21."""
    bits = as_bits(bits)
    with _quiet():
        value = bits.view(np.float32)
        half = np.asarray(value.astype(np.float16)).view(np.uint16)
        too_large = np.abs(half.view(np.float16).astype(np.float32)) > np.abs(value)
    return np.where(_is_nan(bits), F16_NAN, half - too_large.astype(np.uint16))  # the magnitude below is bits - 1


def f16_to_f32(bits: ArrayLike) -> Bits:
    """f16 bits -> f32 bits, exact; NaN gives 0x7FFFFFFF."""
    value = np.asarray(bits, dtype=np.uint16).view(np.float16).astype(np.float32)
    return canonical_nan(value.view(np.uint32))


def saturate_finite_16(bits: ArrayLike, max_finite: int) -> NDArray[np.uint16]:
    """`.satfinite` for f16 (max_finite 0x7BFF) and bf16 (0x7F7F): infinity becomes the largest finite value.

    Source: PTX 9.7.9.21; NaN stays the canonical NaN.
    """
    bits = np.asarray(bits, dtype=np.uint16)
    magnitude = bits & np.uint16(0x7FFF)
    infinity = np.uint16(max_finite + 1)
    return np.where(magnitude == infinity, (bits & np.uint16(0x8000)) | np.uint16(max_finite), bits)


# ------------------------------------------------------------------------------------------------ 8-bit formats


def _f32_to_f8(bits: ArrayLike, mantissa_bits: int, exponent_bias: int, max_finite: int) -> NDArray[np.uint8]:
    """Round to nearest even with `.satfinite`: the code grid is that of a small IEEE format with subnormals."""
    bits = as_bits(bits)
    magnitude = (bits & _F32_MAGNITUDE).astype(np.int64)
    drop = 23 - mantissa_bits
    rounded = magnitude + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)
    normal = (rounded >> drop) - ((127 - exponent_bias) << mantissa_bits)
    min_normal = (127 - exponent_bias + 1) << 23
    with _quiet():
        # Below the smallest normal number the codes are equally spaced; rint rounds half to even.
        value = magnitude.astype(np.uint32).view(np.float32)
        steps = np.rint(value * np.float32(2.0 ** (exponent_bias - 1 + mantissa_bits)))
    code = np.where(magnitude < min_normal, np.fmin(steps, 2**mantissa_bits).astype(np.int64), normal)
    code = np.minimum(code, max_finite).astype(np.uint8) | ((bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.uint8)
    return np.where(_is_nan(bits), F8_NAN, code)


def f32_to_e4m3_rn_satfinite(bits: ArrayLike) -> NDArray[np.uint8]:
    """f32 bits -> e4m3 codes: nearest even, |x| > 448 and infinity to +-448, NaN to 0x7F, least value 2^-9.

    Source: ptx-semantics.md 5.3.
    """
    return _f32_to_f8(bits, mantissa_bits=3, exponent_bias=7, max_finite=0x7E)


def f32_to_e5m2_rn_satfinite(bits: ArrayLike) -> NDArray[np.uint8]:
    """f32 bits -> e5m2 codes: nearest even, |x| > 57344 and infinity to +-57344, NaN to 0x7F, least value 2^-16.

    Source: PTX 9.7.9.21.
    """
    return _f32_to_f8(bits, mantissa_bits=2, exponent_bias=15, max_finite=0x7B)


def _f8_table(mantissa_bits: int, exponent_bias: int, nan_from: int, infinity: int | None) -> Bits:
    codes = np.arange(256)
    magnitude = codes & 0x7F
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    significand = np.where(exponent == 0, mantissa, mantissa + (1 << mantissa_bits)).astype(np.float64)
    value = np.ldexp(significand, np.maximum(exponent, 1) - exponent_bias - mantissa_bits).astype(np.float32)
    table = value.view(np.uint32) | ((codes >> 7) << 31).astype(np.uint32)
    if infinity is not None:
        table[[infinity, infinity | 0x80]] = [0x7F800000, 0xFF800000]
    table[(magnitude >= nan_from)] = F32_NAN
    table.flags.writeable = False
    return table


_E4M3 = _f8_table(mantissa_bits=3, exponent_bias=7, nan_from=0x7F, infinity=None)
_E5M2 = _f8_table(mantissa_bits=2, exponent_bias=15, nan_from=0x7D, infinity=0x7C)


def e4m3_to_f32(codes: ArrayLike) -> Bits:
    """e4m3 codes -> f32 bits, exact; 0x7F and 0xFF are NaN, there is no infinity. Source: PTX 5.2.3."""
    return _E4M3[np.asarray(codes, dtype=np.uint8)]


def e5m2_to_f32(codes: ArrayLike) -> Bits:
    """e5m2 codes -> f32 bits, exact; 0x7C is infinity, 0x7D-0x7F NaN. Source: PTX 5.2.3."""
    return _E5M2[np.asarray(codes, dtype=np.uint8)]
