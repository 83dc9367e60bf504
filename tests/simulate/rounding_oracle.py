"""Slow scalar rounding with exact fractions: the reference the numeric tests of the simulator share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A binary format with subnormals; `max_code` is the largest finite magnitude, the next code is infinity."""

    bits: int
    mantissa_bits: int
    bias: int
    max_code: int

    @property
    def min_exponent(self) -> int:
        return 1 - self.bias

    def value(self, magnitude_code: int) -> Fraction:
        exponent, mantissa = magnitude_code >> self.mantissa_bits, magnitude_code % (1 << self.mantissa_bits)
        if exponent:
            mantissa += 1 << self.mantissa_bits
        return Fraction(mantissa) * Fraction(2) ** (max(exponent, 1) - self.bias - self.mantissa_bits)


F32 = Format(bits=32, mantissa_bits=23, bias=127, max_code=0x7F7FFFFF)
F16 = Format(bits=16, mantissa_bits=10, bias=15, max_code=0x7BFF)
BF16 = Format(bits=16, mantissa_bits=7, bias=127, max_code=0x7F7F)
E4M3 = Format(bits=8, mantissa_bits=3, bias=7, max_code=0x7E)
E5M2 = Format(bits=8, mantissa_bits=2, bias=15, max_code=0x7B)


def fraction_of(code: int, fmt: Format = F32) -> Fraction:
    """The exact value of a finite code."""
    sign_bit = 1 << (fmt.bits - 1)
    magnitude = fmt.value(code & (sign_bit - 1))
    return -magnitude if code & sign_bit else magnitude


def round_fraction(value: Fraction, fmt: Format = F32, rounding: str = "rn", zero_sign: int = 0) -> int:
    """The code of `value` rounded as IEEE 754 says; `zero_sign` is the sign of an exact zero.

    Overflow: to infinity (max_code + 1) in `rn` and in the direction of the sign, else to the largest finite value.
    """
    if value == 0:
        return zero_sign << (fmt.bits - 1)
    negative, magnitude = value < 0, abs(value)
    sign = int(negative) << (fmt.bits - 1)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    exponent = max(exponent, fmt.min_exponent)
    steps = magnitude / Fraction(2) ** (exponent - fmt.mantissa_bits)
    low = math.floor(steps)
    upward = {"rn": False, "rz": False, "rm": negative, "rp": not negative}[rounding] and steps != low
    if rounding == "rn":
        rest = steps - low
        upward = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2 == 1)
    # `steps` counts from exponent's first code; adding the leading one carries into the exponent field by itself.
    code = low + int(upward) + ((exponent + fmt.bias - 1) << fmt.mantissa_bits)
    if code > fmt.max_code:
        to_infinity = rounding == "rn" or (rounding == "rm" and negative) or (rounding == "rp" and not negative)
        code = fmt.max_code + int(to_infinity)
    return sign | code
