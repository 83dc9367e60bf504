"""Oracle of `kernels_src/softmax/exp2_emulation.py`: 2^x from additions and multiplications, bit for bit, and its
error.

Every float32 operation of the device code is done here with the same rounding: the clamp, the addition that rounds
down, the exact subtractions, the fused multiply-adds, and the integer addition into the exponent field.
"""

from dataclasses import dataclass

import numpy as np

from fa4build.numerics.kernel_blocks import definitions, polynomials
from fa4build.numerics.rounding import bf16_bits, fma_f32


def exp2_emulated(x: np.ndarray, degree: int = 3) -> np.ndarray:
    """2^x as `exp2_emulated_pair` computes it.

    Args:
        x: float32; NaN and everything below -127 count as -127.
        degree: of the polynomial, a key of `polynomials()`.
    Returns: float32; 0 at -127. Between -127 and -126 a subnormal pattern.
    Contract: x <= 127; beyond, the exponent field overflows, here as there.
    """
    constants = definitions("softmax/exp2_emulation.py", "ROUND_DOWN_TO_INTEGER", "SMALLEST_EXPONENT")
    shift = np.float32(constants["ROUND_DOWN_TO_INTEGER"])
    x = np.fmax(np.asarray(x, dtype=np.float32), np.float32(constants["SMALLEST_EXPONENT"]))
    rounded = _add_round_down(x, shift)
    fraction = x - (rounded - shift)
    *lower, leading = (np.float32(coefficient) for coefficient in polynomials()[degree])
    value = np.full_like(fraction, leading)
    for coefficient in reversed(lower):
        value = fma_f32(value, fraction, coefficient)
    return ((rounded.view(np.uint32) << np.uint32(23)) + value.view(np.uint32)).view(np.float32)


def _add_round_down(x: np.ndarray, shift: np.float32) -> np.ndarray:
    """x + 1.5 * 2^23 rounded towards minus infinity, subnormal x taken as zero (`add.rm.ftz`).

    Float32 numbers from 2^23 to 2^24 are the integers, so this is floor(x) plus the shift, which is exact in float64.
    """
    flushed = np.where(np.abs(x) < np.float32(2.0**-126), np.float32(0.0), x)
    return (np.floor(flushed.astype(np.float64)) + np.float64(shift)).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exp2Error:
    """Error of the emulation on a set of inputs.

    Attributes:
        max_relative, mean_relative: against 2^x in float64.
        bf16_identical: share of inputs whose bf16 rounding is that of float64's 2^x. max_bf16_ulps: the largest
            distance of the two roundings in units in the last place.
    """

    count: int
    max_relative: float
    mean_relative: float
    bf16_identical: float
    max_bf16_ulps: int


def exp2_error(low: float, high: float, degree: int, count: int, seed: int = 0) -> Exp2Error:
    """Error on `count` inputs drawn evenly from [low, high); at least -126, so that results are normal numbers."""
    rng = np.random.default_rng(seed)
    worst, total, identical, ulps, left = 0.0, 0.0, 0, 0, count
    while left:
        size = min(left, 1 << 18)  # pieces that stay in the processor's cache
        x = rng.uniform(low, high, size).astype(np.float32)
        exact = np.exp2(x.astype(np.float64))
        emulated = exp2_emulated(x, degree)
        relative = np.abs(emulated / exact - 1.0)
        distance = np.abs(bf16_bits(emulated).astype(np.int32) - _bf16_bits_of_float64(exact).astype(np.int32))
        worst, total = max(worst, float(relative.max())), total + float(relative.sum())
        identical, ulps = identical + int((distance == 0).sum()), max(ulps, int(distance.max()))
        left -= size
    return Exp2Error(
        count=count,
        max_relative=worst,
        mean_relative=total / count,
        bf16_identical=identical / count,
        max_bf16_ulps=ulps,
    )


def _bf16_bits_of_float64(x: np.ndarray) -> np.ndarray:
    """bf16 bits of float64 rounded once: float32 rounded to odd on the way keeps the second rounding right."""
    single = x.astype(np.float32)
    bits = single.view(np.uint32)
    lost = x - single.astype(np.float64)
    towards_zero = np.where(lost < 0, bits - np.uint32(1), bits)  # x is positive
    return bf16_bits(np.where(lost == 0, bits, towards_zero | np.uint32(1)).astype(np.uint32).view(np.float32))


def error_curve(degree: int, points: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """Signed relative error over one period: (fractions in [0, 1), error). The error repeats with period 1."""
    x = (np.arange(points) / points).astype(np.float32)
    return x, exp2_emulated(x, degree) / np.exp2(x.astype(np.float64)) - 1.0
