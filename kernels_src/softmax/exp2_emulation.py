"""2^x on the FMA pipe, for the share of elements that would otherwise queue for the exponential unit.

Domain: x <= 127. Softmax gives x <= rescale threshold + offset (at most 16). Below -127, and for -inf, the result is 0;
a NaN also gives 0 (the clamp swallows it), so a kernel keeps part of each row on the exponential unit, which does not.

Method (Cody and Waite's range reduction, as in the FlashAttention-4 paper, arXiv 2603.05451): adding 1.5 * 2^23 with
rounding down leaves floor(x) in the low mantissa bits; a polynomial gives 2^f for the fraction f in [0, 1); a shift
and an integer add put the floor into the exponent field.

Cost a pair of elements: 2 max, 3 packed add or subtract, `degree` packed fma, 2 shifts, 2 adds; no exponential unit.
"""

from cutlass import Float32, Int32
from cutlass.cute import arch

ROUND_DOWN_TO_INTEGER = 12582912.0  # 1.5 * 2^23: float32 has no bits left for a fraction there
SMALLEST_EXPONENT = -127.0  # 2^-127 has exponent field 0, and the polynomial is exactly 1 there: the result is 0.0

# Lowest coefficient first, the constant is exactly 1 so that integers are exact. Degree 3 is the FlashAttention-4
# paper's: largest relative error 8.77e-5. Degrees 4 and 5 are minimax_exp2(4) and (5) of fa4build.numerics.minimax,
# in float32: 2.97e-6 and 1.6e-7, of which half is rounding.
POLYNOMIALS = {
    3: (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625),
    4: (1.0, 0.6930448412895203, 0.241280198097229, 0.052242472767829895, 0.013426683843135834),
    5: (1.0, 0.6931512951850891, 0.24016444385051727, 0.05579991266131401, 0.009017030708491802, 0.0018671300495043397),
}


def exp2_emulated_pair(x0: Float32, x1: Float32, degree: int = 3):
    """(2^x0, 2^x1); relative error at most 8.8e-5 for degree 3, a fortieth of a bf16 rounding.

    Args:
        x0, x1: at most 127.
        degree: key of `POLYNOMIALS`.
    """
    pair = (arch.fmax(x0, Float32(SMALLEST_EXPONENT)), arch.fmax(x1, Float32(SMALLEST_EXPONENT)))
    shift = (Float32(ROUND_DOWN_TO_INTEGER), Float32(ROUND_DOWN_TO_INTEGER))
    rounded = arch.add_packed_f32x2(pair, shift, rnd="rm", ftz=True)
    floor = arch.sub_packed_f32x2(rounded, shift)
    fraction = arch.sub_packed_f32x2(pair, floor)
    *higher, _ = tuple(reversed(POLYNOMIALS[degree]))
    value = (Float32(higher[0]), Float32(higher[0]))
    for coefficient in (*higher[1:], 1.0):
        value = arch.fma_packed_f32x2(value, fraction, (Float32(coefficient), Float32(coefficient)))
    return _scale_by_exponent(rounded[0], value[0]), _scale_by_exponent(rounded[1], value[1])


def _scale_by_exponent(rounded: Float32, value: Float32) -> Float32:
    """value * 2^n, n being the integer in the low mantissa bits of `rounded`."""
    bits = (rounded.bitcast(Int32) << 23) + value.bitcast(Int32)
    return bits.bitcast(Float32)


def is_emulated(column: int, frequency: int, first_fragment: int) -> bool:
    """Whether a column of a 128-column score row is emulated. Depends on the column alone, never on the mask, so that
    prefill and decode of the same keys give the same bits.

    Args:
        column: 0..127; fragments are 32 columns.
        frequency: of each `frequency` columns in a fragment the last 4 are emulated; 0 = none.
        first_fragment: fragments before it, and the last one, are left to the exponential unit.
    """
    fragment, offset = divmod(column, 32)
    return frequency > 0 and first_fragment <= fragment < 3 and offset % frequency >= frequency - 4


def emulated_share(frequency: int, first_fragment: int) -> float:
    """Share of a score row that is emulated."""
    return sum(is_emulated(column, frequency, first_fragment) for column in range(128)) / 128
