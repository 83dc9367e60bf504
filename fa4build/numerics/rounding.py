"""Rounding of numpy arrays to the types that attention computes in: float32 fused, bf16, fp16, fp8.

Independent of the simulator's arithmetic on purpose, so that each can be tested against the other.
"""

from dataclasses import dataclass

import numpy as np


def fma_f32(a: np.ndarray, b: np.ndarray, c: np.float32) -> np.ndarray:
    """a * b + c rounded once to float32, to nearest even.

    Args: a, b: float32 arrays; c: a float32. Results must be normal numbers (they are: polynomials between 1 and 2).
    Method: the product is exact in float64; the sum is rounded to odd there, after which the rounding to float32 is the
        only one that counts (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    c64 = np.float64(c)
    total = product + c64
    virtual = total - product
    lost = (product - (total - virtual)) + (c64 - virtual)
    bits = total.view(np.int64)
    towards_zero = np.where((lost > 0) == (total > 0), bits, bits - 1)
    return np.where(lost == 0, bits, towards_zero | 1).view(np.float64).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A binary floating-point type. mantissa_bits without the hidden one; min_exponent: of the smallest normal
    number.
    """

    name: str
    mantissa_bits: int
    min_exponent: int
    max_finite: float


_FLOAT64_BIAS = 1023
_HALF = 1 << 51  # mantissa of 1.5 in float64

# Sources: IEEE 754 binary16; bfloat16 as in the PTX ISA; OCP 8-bit floating point specification for e4m3 and e5m2.
FORMATS = {
    "bf16": Format(name="bf16", mantissa_bits=7, min_exponent=-126, max_finite=3.3895313892515355e38),
    "fp16": Format(name="fp16", mantissa_bits=10, min_exponent=-14, max_finite=65504.0),
    "e4m3": Format(name="e4m3", mantissa_bits=3, min_exponent=-6, max_finite=448.0),
    "e5m2": Format(name="e5m2", mantissa_bits=2, min_exponent=-14, max_finite=57344.0),
}


def round_to_format(x: np.ndarray, name: str) -> np.ndarray:
    """Values of non-negative float64 x in a format: nearest even, subnormals kept, too large becomes the largest
    finite.

    That is what `cvt.rn.satfinite` gives for fp8; for bf16 and fp16 it differs from a plain conversion only above the
    largest finite value, which probabilities do not reach.
    """
    format_ = FORMATS[name]
    exponent = np.maximum(x.view(np.int64) >> 52, format_.min_exponent + _FLOAT64_BIAS)
    # Adding 1.5 * 2^52 units in the last place of the format leaves float64 no bit below that place.
    shift = ((exponent + (52 - format_.mantissa_bits)) << 52 | _HALF).view(np.float64)
    return np.minimum((x + shift) - shift, format_.max_finite)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """The 16 bits of float32 x rounded to bf16, nearest even; finite x."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
