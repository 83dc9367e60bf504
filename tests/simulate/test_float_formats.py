"""Contract: f32 arithmetic and conversions of the simulator give the bits the PTX manual asks for.

Single rounding in rn, rz, rm and rp; subnormals kept, or flushed with ftz; canonical NaN; zero signs as in IEEE 754;
bf16/f16 round to nearest even; e4m3 and e5m2 saturate. The reference is exact rational arithmetic.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4build.errors import SimulationError
from fa4build.simulate.units import float_formats as ff
from tests.simulate.rounding_oracle import BF16, E4M3, E5M2, F16, F32, fraction_of, round_fraction

ROUNDINGS = ("rn", "rz", "rm", "rp")


def is_nan(bits: int) -> bool:
    return bits & 0x7FFFFFFF > 0x7F800000


def is_finite(bits: int) -> bool:
    return bits & 0x7F800000 != 0x7F800000


def u32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32).view(np.uint32)


# Operands near each other, near the format's ends and with few significant bits: ties and cancellation are common.
finite_bits = st.one_of(
    st.integers(0, 2**32 - 1).filter(is_finite),
    st.builds(
        lambda sign, exponent, mantissa, shift: (sign << 31) | (exponent << 23) | ((mantissa << shift) & 0x7FFFFF),
        st.integers(0, 1),
        st.one_of(st.integers(0, 3), st.integers(60, 68), st.integers(100, 154), st.integers(250, 254)),
        st.integers(0, 15),
        st.integers(0, 22),
    ),
)


def expected_sum(x, y, rounding: str, x_negative: bool, y_negative: bool) -> int:
    """IEEE 754 sum of two exact values; a zero keeps a common sign, else it is -0 only when rounding down."""
    zero_sign = int(x_negative) if x_negative == y_negative and x == 0 and y == 0 else int(rounding == "rm")
    return round_fraction(x + y, F32, rounding, zero_sign)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(finite_bits, finite_bits, finite_bits)
@settings(max_examples=400, deadline=None)
def test_fma_rounds_the_exact_value_once(rounding, a, b, c):
    """fma is a*b+c rounded once, in every direction, for normal, subnormal and overflowing results."""
    x, y = fraction_of(a) * fraction_of(b), fraction_of(c)
    expected = expected_sum(x, y, rounding, bool((a ^ b) >> 31), bool(c >> 31))

    assert expected == int(ff.fma_f32(u32(a), u32(b), u32(c), rounding)[0])


@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(finite_bits, finite_bits)
@settings(max_examples=300, deadline=None)
def test_add_sub_and_mul_round_the_exact_value_once(rounding, a, b):
    """add, sub and mul round the exact value once in every direction."""
    x, y = fraction_of(a), fraction_of(b)
    product = round_fraction(x * y, F32, rounding, (a ^ b) >> 31)

    assert expected_sum(x, y, rounding, bool(a >> 31), bool(b >> 31)) == int(ff.add_f32(u32(a), u32(b), rounding)[0])
    assert expected_sum(x, -y, rounding, bool(a >> 31), not b >> 31) == int(ff.sub_f32(u32(a), u32(b), rounding)[0])
    assert product == int(ff.mul_f32(u32(a), u32(b), rounding)[0])


def test_fma_is_not_fooled_by_double_rounding():
    """A sum just beside an f32 midpoint, which float64 would round to the midpoint itself, goes to the right side."""
    # a*b = 2^-24 * (1 + 2^-23) (1 - 2^-23) = 2^-24 - 2^-70; float64 next to 1 resolves 2^-52 only.
    a, b = f32(2**-24 * (1 + 2**-23)), f32(1 - 2**-23)
    # 1 + 2^-24 - 2^-70 lies below the midpoint of 1 and 1 + 2^-23: down to 1 (as halfway-to-even would too).
    even_neighbour = ff.fma_f32(a, b, f32(1.0))
    # 1 + 2^-23 + 2^-24 - 2^-70 lies below the midpoint of 1 + 2^-23 and 1 + 2^-22: down, where halfway-to-even goes up.
    odd_neighbour = ff.fma_f32(a, b, f32(1 + 2**-23))
    # 2^-24 + 2^-47 + 1 is above the midpoint and float64 holds it: up.
    above = ff.fma_f32(f32(1 + 2**-23), f32(2**-24), f32(1.0))

    assert [0x3F800001] == above.tolist()
    assert [0x3F800000] == even_neighbour.tolist()
    assert [0x3F800001] == odd_neighbour.tolist()


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [("rn", 0x3F800000), ("rz", 0x3F800000), ("rm", 0x3F800000), ("rp", 0x3F800001)],
)
def test_directed_rounding_of_a_value_just_above_one(rounding, expected):
    """1 + 2^-60 rounds to 1 except upward."""
    assert [expected] == ff.add_f32(f32(1.0), f32(2.0**-60), rounding).tolist()
    assert [expected] == ff.fma_f32(f32(2.0**-30), f32(2.0**-30), f32(1.0), rounding).tolist()


def test_add_rounding_down_splits_integer_and_fraction_of_the_exp2_emulation():
    """x + 12582912 rounded down holds floor(x) in its low bits (the use FlashAttention makes of add.rm)."""
    x = f32(-0.25, -1.0, -1.75, 0.5, -126.999)
    low_bits = ff.add_f32(x, f32(12582912.0), "rm") - np.uint32(0x4B400000)

    assert [-1, -1, -2, 0, -127] == low_bits.view(np.int32).tolist()


@pytest.mark.parametrize(("rounding", "sign"), [("rn", 0), ("rz", 0), ("rp", 0), ("rm", 1)])
def test_exact_cancellation_gives_minus_zero_only_when_rounding_down(rounding, sign):
    """x - x is +0, but -0 in rm; (+0) + (+0) is +0 and (-0) + (-0) is -0 everywhere."""
    assert [sign << 31] == ff.add_f32(f32(1.5), f32(-1.5), rounding).tolist()
    assert [0] == ff.add_f32(f32(0.0), f32(0.0), rounding).tolist()
    assert [1 << 31] == ff.fma_f32(f32(-0.0), f32(1.0), f32(-0.0), rounding).tolist()


def test_ftz_flushes_operands_and_results_to_zero_of_their_sign():
    """With ftz a subnormal operand counts as zero and a subnormal result is replaced by zero; without, both stay."""
    smallest_normal, subnormal = 0x00800000, 0x00400000

    assert [0x00C00000] == ff.add_f32(u32(smallest_normal), u32(subnormal)).tolist()
    assert [smallest_normal] == ff.add_f32(u32(smallest_normal), u32(subnormal), ftz=True).tolist()
    assert [0x80400000] == ff.mul_f32(u32(smallest_normal), f32(-0.5)).tolist()
    assert [0x80000000] == ff.mul_f32(u32(smallest_normal), f32(-0.5), ftz=True).tolist()
    assert [0x80000000] == ff.fma_f32(u32(smallest_normal), f32(-0.5), f32(-0.0), ftz=True).tolist()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_nan_results_are_canonical_and_infinities_propagate(rounding):
    """Any NaN operand, inf - inf and 0 * inf give 0x7FFFFFFF; inf + finite stays inf."""
    inf, negative_inf, payload_nan = u32(0x7F800000), u32(0xFF800000), u32(0xFFC12345)

    assert [0x7FFFFFFF] == ff.fma_f32(payload_nan, f32(1.0), f32(1.0), rounding).tolist()
    assert [0x7FFFFFFF] == ff.add_f32(inf, negative_inf, rounding).tolist()
    assert [0x7FFFFFFF] == ff.mul_f32(f32(0.0), inf, rounding).tolist()
    assert [0xFF800000] == ff.fma_f32(f32(-2.0), inf, f32(1.0), rounding).tolist()
    assert [0x7F800000] == ff.add_f32(inf, f32(-3.0), rounding).tolist()


@pytest.mark.parametrize(
    ("rounding", "positive", "negative"),
    [
        ("rn", 0x7F800000, 0xFF800000),
        ("rz", 0x7F7FFFFF, 0xFF7FFFFF),
        ("rm", 0x7F7FFFFF, 0xFF800000),
        ("rp", 0x7F800000, 0xFF7FFFFF),
    ],
)
def test_overflow_follows_the_rounding_direction(rounding, positive, negative):
    """2^127 * 2 overflows to infinity or to the largest finite value, by direction and sign."""
    assert [positive] == ff.mul_f32(f32(2.0**127), f32(2.0), rounding).tolist()
    assert [negative] == ff.mul_f32(f32(-(2.0**127)), f32(2.0), rounding).tolist()


def test_max_and_min_ignore_nan_and_order_zeros():
    """max.f32 returns the operand that is a number, and +0 over -0; with propagate_nan any NaN wins."""
    a = u32(0x7FC00000, 0x80000000, 0x00000000, 0xBF800000, 0xFFC00000)
    b = u32(0x3F800000, 0x00000000, 0x80000000, 0xC0000000, 0x7FC00001)

    assert [0x3F800000, 0, 0, 0xBF800000, 0x7FFFFFFF] == ff.max_f32(a, b).tolist()
    assert [0x3F800000, 0x80000000, 0x80000000, 0xC0000000, 0x7FFFFFFF] == ff.min_f32(a, b).tolist()
    assert [0x7FFFFFFF, 0, 0, 0xBF800000, 0x7FFFFFFF] == ff.max_f32(a, b, propagate_nan=True).tolist()


@pytest.mark.parametrize(
    ("encode", "fmt", "rounding", "saturates"),
    [
        pytest.param(ff.f32_to_bf16_rn, BF16, "rn", False, id="bf16-rn"),
        pytest.param(ff.f32_to_bf16_rz, BF16, "rz", False, id="bf16-rz"),
        pytest.param(ff.f32_to_f16_rn, F16, "rn", False, id="f16-rn"),
        pytest.param(ff.f32_to_f16_rz, F16, "rz", False, id="f16-rz"),
        pytest.param(ff.f32_to_e4m3_rn_satfinite, E4M3, "rn", True, id="e4m3"),
        pytest.param(ff.f32_to_e5m2_rn_satfinite, E5M2, "rn", True, id="e5m2"),
    ],
)
@given(st.one_of(finite_bits, st.floats(-1000, 1000, width=32).map(lambda x: int(f32(x)[0]))))
@settings(max_examples=400, deadline=None)
def test_conversion_from_f32_rounds_correctly(encode, fmt, rounding, saturates, bits):
    """Every finite f32 converts as exact rounding says; 8-bit formats stop at their largest finite value."""
    expected = round_fraction(fraction_of(bits), fmt, rounding, bits >> 31)
    magnitude = expected & (2 ** (fmt.bits - 1) - 1)
    if saturates and magnitude > fmt.max_code:
        expected -= magnitude - fmt.max_code

    assert expected == int(encode(u32(bits))[0])


@pytest.mark.parametrize(
    ("encode", "inf", "negative_inf", "nan"),
    [
        pytest.param(ff.f32_to_bf16_rn, 0x7F80, 0xFF80, 0x7FFF, id="bf16"),
        pytest.param(ff.f32_to_f16_rn, 0x7C00, 0xFC00, 0x7FFF, id="f16"),
        pytest.param(ff.f32_to_e4m3_rn_satfinite, 0x7E, 0xFE, 0x7F, id="e4m3"),
        pytest.param(ff.f32_to_e5m2_rn_satfinite, 0x7B, 0xFB, 0x7F, id="e5m2"),
    ],
)
def test_infinity_and_nan_convert_as_documented(encode, inf, negative_inf, nan):
    """Infinity converts to infinity or saturates; each NaN becomes the canonical one, whatever its sign."""
    codes = encode(u32(0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001))

    assert [inf, negative_inf, nan, nan] == codes.tolist()


@pytest.mark.parametrize(
    ("decode", "encode", "num_codes", "nan_codes"),
    [
        pytest.param(ff.e4m3_to_f32, ff.f32_to_e4m3_rn_satfinite, 256, {0x7F, 0xFF}, id="e4m3"),
        pytest.param(
            ff.e5m2_to_f32,
            ff.f32_to_e5m2_rn_satfinite,
            256,
            {0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF},
            id="e5m2",
        ),
        pytest.param(ff.bf16_to_f32, ff.f32_to_bf16_rn, 65536, None, id="bf16"),
        pytest.param(ff.f16_to_f32, ff.f32_to_f16_rn, 65536, None, id="f16"),
    ],
)
def test_decoding_then_encoding_gives_every_code_back(decode, encode, num_codes, nan_codes):
    """decode is exact: encoding its result gives the same code, for all codes that are numbers."""
    codes = np.arange(num_codes)
    values = decode(codes)
    numbers = ~np.isin(codes, list(nan_codes)) if nan_codes else ~np.isnan(values.view(np.float32))
    back = encode(values)

    assert codes[numbers].tolist() == back[numbers].tolist()
    assert np.count_nonzero(numbers) > num_codes // 2


def test_eight_bit_formats_have_the_documented_ends():
    """e4m3: 448 at 0x7E, 2^-9 at 1; e5m2: 57344 at 0x7B, 2^-16 at 1, infinity at 0x7C."""
    assert [448.0, 2.0**-9, -448.0] == ff.e4m3_to_f32([0x7E, 1, 0xFE]).view(np.float32).tolist()
    assert [57344.0, 2.0**-16, np.inf] == ff.e5m2_to_f32([0x7B, 1, 0x7C]).view(np.float32).tolist()


def test_satfinite_replaces_only_infinity():
    """f16 and bf16 with .satfinite clamp infinity to the largest finite code and keep everything else."""
    assert [0x7BFF, 0xFBFF, 0x3C00, 0x7FFF] == ff.saturate_finite_16([0x7C00, 0xFC00, 0x3C00, 0x7FFF], 0x7BFF).tolist()
    assert [0x7F7F, 0xFF7F] == ff.saturate_finite_16([0x7F80, 0xFF80], 0x7F7F).tolist()


def test_division_is_ieee():
    """rcp.rn.f32 is 1/x correctly rounded: 1/3 = 0x3EAAAAAB, 1/0 = inf, 0/0 = canonical NaN."""
    assert [0x3EAAAAAB, 0x7F800000] == ff.div_f32_rn(f32(1.0), f32(3.0, 0.0)).tolist()
    assert [0x7FFFFFFF] == ff.div_f32_rn(f32(0.0), f32(0.0)).tolist()


def test_wrong_operands_are_refused():
    """An unknown rounding and a float64 operand are errors that name what is allowed."""
    with pytest.raises(SimulationError, match="rn, rz, rm, rp"):
        ff.add_f32(f32(1.0), f32(1.0), "rna")
    with pytest.raises(SimulationError, match="float64"):
        ff.add_f32(np.array([1.0]), f32(1.0))
