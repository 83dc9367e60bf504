"""Contract: ex2 and rcp follow the H200's tables, lg2 its interpolation; special values are those of the PTX manual.
Whether all of it is what an H200 does is compared in test_sweeps.py.

The tables are read as corrections to the correctly rounded value, so the values they correct must not depend on the
math library: the tests show how far every entry is from a rounding boundary. Errors are measured against mpmath.
"""

import io
import lzma
from fractions import Fraction
from importlib import resources

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4build.simulate.units import lg2_unit, mufu
from tests.simulate.rounding_oracle import F32, fraction_of, round_fraction

mpmath.mp.prec = 120
INF, NEGATIVE_INF, NAN = 0x7F800000, 0xFF800000, 0x7FFFFFFF


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32).view(np.uint32)


def bits_of(x: float) -> int:
    return int(f32(x)[0])


def delta(name: str) -> np.ndarray:
    data = resources.files("fa4build.simulate").joinpath("data", f"h200_{name}_delta.npy.xz").read_bytes()
    return np.load(io.BytesIO(lzma.decompress(data)))


def correctly_rounded(value: mpmath.mpf) -> int:
    """f32 bits of an mpmath number (120 bits: far from any f32 midpoint in these tests)."""
    sign, mantissa, exponent, _ = value._mpf_
    magnitude = int(mantissa) * fraction_of(bits_of(2.0)) ** int(exponent)
    return round_fraction(-magnitude if sign else magnitude, F32)


def to_mpf(bits: int) -> mpmath.mpf:
    return mpmath.mpf(float(np.uint32(bits).view(np.float32)))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(np.exp2, id="ex2"),
        pytest.param(np.reciprocal, id="rcp"),
    ],
)
def test_no_table_entry_is_near_a_rounding_boundary(function):
    """The float64 value of every entry is at least 16 last places from an f32 midpoint, so any libm rounds it alike."""
    values = function(1 + np.arange(1 << 23) / 2.0**23)
    tail = values.view(np.int64) & 0x1FFFFFFF

    assert np.abs(tail - 0x10000000).min() >= 16


@pytest.mark.parametrize(
    ("instruction", "argument", "index"),
    [
        # X = 2^23 * |x| for x >= 0: 0.75 -> index 0.75 * 2^23, no octave; ex2 table value halved.
        pytest.param("ex2", 0.75, 6291456, id="ex2-positive"),
        # x < 0 with a fraction: ones' complement of 2^22 is -2^22 - 1: octave -1, index 2^22 - 1.
        pytest.param("ex2", -0.5, 4194303, id="ex2-negative-fraction"),
        # -2^-23 is one unit: ~1 = -2: octave -1, index 2^23 - 2.
        pytest.param("ex2", -(2.0**-23), 8388606, id="ex2-smallest-step"),
    ],
)
def test_ex2_reads_the_table_at_the_documented_index(instruction, argument, index):
    """The result is 2^octave * T[index], T = correctly rounded 2^(1 + index/2^23) / 2 plus the measured correction."""
    octave = -1 if argument < 0 else 0
    table_value = correctly_rounded(mpmath.power(2, 1 + mpmath.mpf(index) / 2**23)) + int(delta("ex2_1to2")[index])
    expected = table_value + ((octave - 1) << 23)

    assert expected == int(mufu.ex2_ftz(f32(argument))[0])


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (0.0, bits_of(1.0)),
        (-0.0, bits_of(1.0)),
        (1e-45, bits_of(1.0)),
        (-1e-45, bits_of(1.0)),
        (-(2.0**-24), bits_of(1.0)),  # less than one unit of 2^-23
        (3.0, bits_of(8.0)),
        (-3.0, bits_of(0.125)),
        (127.0, bits_of(2.0**127)),
        (128.0, INF),
        (1e30, INF),
        (-126.0, bits_of(2.0**-126)),
        (-126.5, 0),
        (-1e30, 0),
        (float("inf"), INF),
        (float("-inf"), 0),
        (float("nan"), NAN),
    ],
)
def test_ex2_ftz_special_values(x, expected):
    """Integers are exact, overflow from 2^128 on, flush below 2^-126."""
    assert expected == int(mufu.ex2_ftz(f32(x))[0])


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (1.0, bits_of(1.0)),
        (-4.0, bits_of(-0.25)),
        (0.0, INF),
        (-0.0, NEGATIVE_INF),
        (1e-45, INF),
        (2.0**126, bits_of(2.0**-126)),
        (2.0**127, 0),  # 2^-127 is subnormal: flushed
        (-(2.0**127), 0x80000000),
        (float("inf"), 0),
        (float("-inf"), 0x80000000),
        (float("nan"), NAN),
    ],
)
def test_rcp_ftz_special_values(x, expected):
    """Powers of two are exact; zero and subnormals give infinity; subnormal results are flushed with their sign."""
    assert expected == int(mufu.rcp_ftz(f32(x))[0])


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (1.0, 0),
        (2.0, bits_of(1.0)),
        (2.0**127, bits_of(127.0)),
        (0.25, bits_of(-2.0) - 1),  # the interpolation does not begin at 0: one place toward zero
        (2.0**-126, bits_of(-126.0) - 1),
        (0.0, NEGATIVE_INF),
        (-0.0, NEGATIVE_INF),
        (1e-45, NEGATIVE_INF),
        (-1.0, NAN),
        (float("inf"), INF),
        (float("-inf"), NAN),
        (float("nan"), NAN),
    ],
)
def test_lg2_ftz_special_values(x, expected):
    """Powers of two from 1 on are exact; zero and subnormals give -inf; a negative argument gives NaN."""
    assert expected == int(mufu.lg2_ftz(f32(x))[0])


@pytest.mark.parametrize(
    ("t", "units"),
    [
        (0, 0),
        (724, 0),  # 724^2 = 2^19 - 112, and no partial product reaches 2^19
        (1024, 2),
        (
            1792,
            5,
        ),  # 2^10 + 2^9 + 2^8: 2^20 + 2 * 2^19 + 2 * 2^18; the other products lie below 2^19. 1792^2 is 6.1 units
        (1 << 16, 1 << 13),
    ],
)
def test_squares_leave_out_partial_products_below_their_unit(t, units):
    """s(t) is the sum of the partial products of at least 2^19, in units of 2^19."""
    assert units == int(lg2_unit.squares()[t])


def test_interpolation_in_the_first_interval():
    """c0 = 230, c1 = 47272, c2 = -727. t = 0: 32 * 230 + floor(17.25); t = 1024: + 47272 * 256 - 727 (s = 2)."""
    first, second = lg2_unit.log2_of_mantissa(np.array([0, 1024]))

    assert [7377, 7377 + 47272 * 256 - 727] == [first, second]


@pytest.mark.parametrize(
    ("x", "units"),
    [
        pytest.param(12.0, 0, id="positive"),
        pytest.param(0.375, 1, id="negative"),
        pytest.param(0.25, 1, id="negative-power-of-two"),
        pytest.param(0.99999994, 1, id="cancellation"),
    ],
)
def test_lg2_adds_the_exponent_and_cuts_off(x, units):
    """exponent + interpolation toward zero; of a negative sum first the ones' complement, one unit of 2^-36 less."""
    exponent, mantissa = (bits_of(x) >> 23) - 127, bits_of(x) & 0x7FFFFF
    fraction = Fraction(int(lg2_unit.log2_of_mantissa(np.array([mantissa]))[0]) + units, 2**36)
    expected = round_fraction(exponent + fraction, F32, "rz")

    assert expected == int(mufu.lg2_ftz(f32(x))[0])


@given(st.floats(-125, 127, width=32))
@settings(max_examples=300, deadline=None)
def test_ex2_ftz_is_within_two_places(x):
    """PTX: at most 2 ulp; measured over all inputs of the H200: 2."""
    error = int(mufu.ex2_ftz(f32(x))[0]) - correctly_rounded(mpmath.power(2, to_mpf(bits_of(x))))

    assert abs(error) <= 2


@given(st.integers(0x00800000, 0x7E800000))
@settings(max_examples=300, deadline=None)
def test_rcp_ftz_is_within_one_place(bits):
    """PTX: at most 1 ulp, for every normal argument whose reciprocal is normal."""
    error = int(mufu.rcp_ftz(np.array([bits], dtype=np.uint32))[0]) - correctly_rounded(1 / to_mpf(bits))

    assert abs(error) <= 1


@given(st.integers(bits_of(2.0), 0x7F7FFFFF))
@settings(max_examples=300, deadline=None)
def test_lg2_ftz_is_within_two_places_above_two(bits):
    """Measured over all inputs of the H200 outside (0.5, 2): at most 2 ulp."""
    error = int(mufu.lg2_ftz(np.array([bits], dtype=np.uint32))[0]) - correctly_rounded(mpmath.log(to_mpf(bits), 2))

    assert abs(error) <= 2


@given(st.integers(bits_of(0.5), bits_of(2.0) - 1))
@settings(max_examples=300, deadline=None)
def test_lg2_ftz_is_within_its_absolute_bound_around_one(bits):
    """PTX: absolute error at most 2^-22 for x in (0.5, 2)."""
    result = to_mpf(int(mufu.lg2_ftz(np.array([bits], dtype=np.uint32))[0]))

    assert abs(result - mpmath.log(to_mpf(bits), 2)) <= mpmath.mpf(2) ** -22


def test_plain_ex2_keeps_subnormal_results():
    """ex2.approx.f32 equals the ftz form down to -126 and gives subnormals below: 2^-130 and 2^-149 exactly."""
    x = f32(0.3, -5.7, -126.0, 127.9, float("inf"))

    assert mufu.ex2_ftz(x).tolist() == mufu.ex2(x).tolist()
    assert [1 << 19, 1, 0, 0] == mufu.ex2(f32(-130.0, -149.0, -200.0, float("-inf"))).tolist()


def test_other_functions_are_correctly_rounded():
    """rsqrt, sqrt, tanh, sin and cos round the exact value; arguments out of range give NaN."""
    assert [bits_of(0.5), INF, 0] == mufu.rsqrt_approx(f32(4.0, 0.0, float("inf"))).tolist()
    assert [correctly_rounded(1 / mpmath.sqrt(3))] == mufu.rsqrt_approx(f32(3.0)).tolist()
    assert [correctly_rounded(mpmath.sqrt(2)), NAN] == mufu.sqrt_approx(f32(2.0, -1.0)).tolist()
    assert [bits_of(3.0)] == mufu.sqrt_rn(f32(9.0)).tolist()
    assert [correctly_rounded(mpmath.tanh(0.5))] == mufu.tanh_approx(f32(0.5)).tolist()
    assert [correctly_rounded(mpmath.sin(1))] == mufu.sin_approx(f32(1.0)).tolist()
    assert [correctly_rounded(mpmath.cos(1)), NAN] == mufu.cos_approx(f32(1.0, float("inf"))).tolist()


def test_packed_half_forms_work_on_each_half():
    """bf16x2 and f16x2: low half 2^1, high half 2^-1."""
    bf16_one, bf16_minus_one, f16_one, f16_minus_one = 0x3F80, 0xBF80, 0x3C00, 0xBC00

    assert [0x3F004000] == mufu.ex2_bf16x2_ftz([(bf16_minus_one << 16) | bf16_one]).tolist()
    assert [0x38004000] == mufu.ex2_f16x2([(f16_minus_one << 16) | f16_one]).tolist()
