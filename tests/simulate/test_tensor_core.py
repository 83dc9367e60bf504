"""Contract: mma_tile gives the bits of a tensor core: addends cut 25 bits below the largest exponent, summed exactly,
the sum cut to f32; K steps chained through the f32 accumulator.

Golden: wgmma m64n8k16 f32.bf16.bf16 outputs recorded on an H200. Reference: exact fractions, element by element.
"""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4build.errors import SimulationError
from fa4build.simulate.units.tensor_core import mma_tile
from tests.simulate.rounding_oracle import BF16, E4M3, E5M2, F16, F32, fraction_of, round_fraction

GOLDEN = Path(__file__).parent.parent / "golden" / "h200_wgmma_m64n8k16_bf16.bin"
# One record per instruction: A registers, B (n, k), accumulator before and after, by thread and register.
RECORD = np.dtype([("a", "<u4", (128, 4)), ("b", "<u2", (8, 16)), ("c", "<u4", (128, 4)), ("d", "<u4", (128, 4))])
K_STEP = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}
FORMATS = {"bf16": BF16, "f16": F16, "tf32": F32, "e4m3": E4M3, "e5m2": E5M2}
UNSIGNED = {"bf16": np.uint16, "f16": np.uint16, "tf32": np.uint32, "e4m3": np.uint8, "e5m2": np.uint8}


def exponent_of(value: Fraction, code: int, kind: str) -> int:
    """The stored exponent: floor(log2 |value|), for subnormals that of the smallest normal number."""
    fmt = FORMATS[kind]
    field = (code & (2 ** (fmt.bits - 1) - 1)) >> fmt.mantissa_bits
    return max(field, 1) - fmt.bias


def reference_step(a_codes, b_codes, c_bits, a_kind, b_kind):
    """One element of one step, in exact arithmetic; overflow to infinity, which stays; an empty sum is +0."""
    if c_bits & 0x7FFFFFFF == 0x7F800000:
        return c_bits
    mask = {"tf32": 0xFFFFE000}
    addends = []
    for a, b in zip(a_codes, b_codes, strict=True):
        a, b = a & mask.get(a_kind, ~0), b & mask.get(b_kind, ~0)
        x, y = fraction_of(a, FORMATS[a_kind]), fraction_of(b, FORMATS[b_kind])
        if x and y:
            addends.append((x * y, exponent_of(x, a, a_kind) + exponent_of(y, b, b_kind)))
    if fraction_of(c_bits):
        addends.append((fraction_of(c_bits), exponent_of(fraction_of(c_bits), c_bits, "tf32")))
    if not addends:
        return 0
    quantum = Fraction(2) ** (max(-133, *(e for _, e in addends), -133) - 25)
    total = sum(math.trunc(value / quantum) for value, _ in addends) * quantum
    if abs(total) >= Fraction(2) ** 128:
        return 0xFF800000 if total < 0 else 0x7F800000
    return round_fraction(total, F32, "rz")


def reference(a, b, c, a_kind, b_kind):
    d = np.array(c, dtype=np.uint32)
    step = K_STEP[a_kind]
    for m in range(a.shape[0]):
        for n in range(b.shape[0]):
            for first in range(0, a.shape[1], step):
                part = slice(first, first + step)
                d[m, n] = reference_step(a[m, part].tolist(), b[n, part].tolist(), int(d[m, n]), a_kind, b_kind)
    return d


def fragment_maps():
    """(row, column) of accumulator register i and (row, first k) of A register j, for the 128 threads."""
    thread, register = np.arange(128)[:, None], np.arange(4)[None, :]
    warp, lane = thread // 32, thread % 32
    row = 16 * warp + lane // 4 + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + 2 * (lane % 4) + register % 2
    a_row = 16 * warp + lane // 4 + 8 * (register % 2)
    a_k = 2 * (lane % 4) + 8 * (register // 2)
    return row, column, a_row, a_k


def test_every_bit_equals_the_recorded_hardware_outputs():
    """32 instructions with random operands, 16,384 outputs: no bit differs."""
    row, column, a_row, a_k = fragment_maps()
    records = np.fromfile(GOLDEN, dtype=RECORD)
    differing = 0
    for record in records:
        a, c, d = np.zeros((64, 16), np.uint16), np.zeros((64, 8), np.uint32), np.zeros((64, 8), np.uint32)
        a[a_row, a_k], a[a_row, a_k + 1] = record["a"] & 0xFFFF, record["a"] >> 16
        c[row, column], d[row, column] = record["c"], record["d"]
        differing += np.count_nonzero(mma_tile(a, record["b"], c, "bf16") != d)

    assert (32, 0) == (len(records), differing)


def finite_codes(rng, kind, shape, spread):
    """Random finite codes whose exponents span about `spread` binades around 1, with some zeros and both signs."""
    fmt = FORMATS[kind]
    exponents = np.clip(rng.integers(-spread, spread + 1, shape) + fmt.bias, 0, (fmt.max_code >> fmt.mantissa_bits))
    mantissa = rng.integers(0, 1 << fmt.mantissa_bits, shape)
    codes = np.minimum((exponents << fmt.mantissa_bits) | mantissa, fmt.max_code)
    codes = np.where(rng.random(shape) < 0.1, 0, codes) | (rng.integers(0, 2, shape) << (fmt.bits - 1))
    return codes.astype(UNSIGNED[kind])


@pytest.mark.parametrize(
    ("a_kind", "b_kind"),
    [("bf16", "bf16"), ("f16", "f16"), ("tf32", "tf32"), ("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "e5m2")],
)
@pytest.mark.parametrize("spread", [2, 12, 40, 200], ids=lambda s: f"spread{s}")
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 10, 60, 130]))
@settings(max_examples=15, deadline=None)
def test_every_bit_equals_exact_arithmetic(a_kind, b_kind, spread, seed, c_spread):
    """Operands and accumulators from near 1 to the ends of their formats, subnormals and zeros included."""
    rng = np.random.default_rng(seed)
    k = 2 * K_STEP[a_kind]
    a, b = finite_codes(rng, a_kind, (3, k), spread), finite_codes(rng, b_kind, (4, k), spread)
    c = finite_codes(rng, "tf32", (3, 4), c_spread)

    assert reference(a, b, c, a_kind, b_kind).tolist() == mma_tile(a, b, c, a_kind, b_kind).tolist()


def bf16(*values):
    return (np.array(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def one_product_row(*values):
    """A row of 16 bf16 with the given first values, the rest zero."""
    return bf16(*values, *[0.0] * (16 - len(values)))[None, :]


def test_addends_are_cut_25_bits_below_the_largest_exponent():
    """A tail of 2^-25 beside 1 counts until the sum is cut to f32: two of them and 2^-24 make 2^-23; 2^-26 is lost."""
    ones = one_product_row(1.0, 1.0, 1.0, 1.0)

    def sum_of(*values):
        return int(mma_tile(one_product_row(*values), ones, None, "bf16")[0, 0])

    assert 0x3F800000 == sum_of(1.0, 2.0**-25)
    assert 0x3F800001 == sum_of(1.0, 2.0**-25, 2.0**-25, 2.0**-24)
    assert 0x3F800000 == sum_of(1.0, 2.0**-24, 2.0**-25, 2.0**-26)  # nearest would give 1 + 2^-23
    assert 0x3F7FFFFF == sum_of(1.0, -(2.0**-25))  # cut toward zero, not to nearest


def test_product_exponents_are_not_renormalised():
    """1.5 * 1.5 = 2.25 counts with exponent 0, so a partner of 2^-25 is kept although 2.25 has exponent 1."""
    a = one_product_row(1.5, 2.0**-25, 2.0**-25, -1.5)
    b = one_product_row(1.5, 1.0, 1.0, 1.5)

    assert np.float32(2.0**-24).view(np.uint32) == mma_tile(a, b, None, "bf16")[0, 0]


def test_the_accumulator_takes_part_in_the_alignment():
    """An accumulator of 2^26 pushes a product of 1.5 to 1 (q = 2), and 1 below q is dropped."""
    c = np.array([[2.0**26]], dtype=np.float32)

    assert 2.0**26 == mma_tile(one_product_row(1.0), one_product_row(1.5), c, "bf16").view(np.float32)[0, 0]
    assert 2.0**26 + 8 == mma_tile(one_product_row(1.0), one_product_row(9.0), c, "bf16").view(np.float32)[0, 0]


def test_steps_are_chained_through_f32():
    """K = 32 is two instructions: the first result is cut to f32 before the second adds to it."""
    a, b = one_product_row(1.0, 2.0**-24), one_product_row(1.0, 1.0)
    both = mma_tile(np.hstack([a, a]), np.hstack([b, b]), None, "bf16")
    chained = mma_tile(a, b, mma_tile(a, b, None, "bf16"), "bf16")

    assert chained.tolist() == both.tolist() == [[0x40000000]]


def test_tf32_ignores_the_low_13_bits():
    """1 + 2^-11 has its last bit below tf32's mantissa."""
    a = np.zeros((1, 8), dtype=np.float32)
    a[0, 0] = 1 + 2.0**-11

    assert [[0x3F800000]] == mma_tile(a.view(np.uint32), a.view(np.uint32), None, "tf32").tolist()


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        pytest.param(np.inf, 1.0, 0.0, 0x7F800000, id="inf"),
        pytest.param(-np.inf, 2.0, 5.0, 0xFF800000, id="negative-inf"),
        pytest.param(np.inf, 0.0, 0.0, 0x7FFFFFFF, id="inf-times-zero"),
        pytest.param(np.inf, 1.0, -np.inf, 0x7FFFFFFF, id="inf-minus-inf"),
        pytest.param(np.nan, 0.0, 1.0, 0x7FFFFFFF, id="nan-operand"),
        pytest.param(1.0, 1.0, np.nan, 0x7FFFFFFF, id="nan-accumulator"),
        pytest.param(3e38, 3e38, 0.0, 0x7F800000, id="overflow"),
        pytest.param(-3e38, 3e38, 0.0, 0xFF800000, id="negative-overflow"),
        pytest.param(0.0, -1.0, 0.0, 0x00000000, id="empty-sum-is-plus-zero"),
        pytest.param(1.0, -1.0, 1.0, 0x00000000, id="cancellation"),
    ],
)
def test_special_values(a, b, c, expected):
    """Infinity and NaN follow IEEE rules; NaN is 0x7FFFFFFF; overflow is infinity; zero is +0."""
    row_a, row_b = one_product_row(a, 1.0), one_product_row(b, 0.0)
    accumulator = np.array([[c]], dtype=np.float32)

    assert [[expected]] == mma_tile(row_a, row_b, accumulator, "bf16").tolist()


def test_a_special_value_touches_only_its_row_and_column():
    """A NaN in one row of A leaves the other rows exact."""
    rng = np.random.default_rng(7)
    a, b = finite_codes(rng, "bf16", (8, 16), 3), finite_codes(rng, "bf16", (8, 16), 3)
    clean = mma_tile(a, b, None, "bf16")
    a[3, 5] = 0x7FC0
    found = mma_tile(a, b, None, "bf16")

    assert [0x7FFFFFFF] * 8 == found[3].tolist()
    assert np.delete(clean, 3, axis=0).tolist() == np.delete(found, 3, axis=0).tolist()


def test_tiles_of_several_blocks_equal_row_by_row_results():
    """A 256 x 128 tile is worked on in blocks of rows; each row equals the row computed alone."""
    rng = np.random.default_rng(8)
    a, b = finite_codes(rng, "bf16", (256, 32), 8), finite_codes(rng, "bf16", (128, 32), 8)
    c = finite_codes(rng, "tf32", (256, 128), 8)
    tile = mma_tile(a, b, c, "bf16")
    for row in (0, 63, 64, 200, 255):
        assert mma_tile(a[row : row + 1], b, c[row : row + 1], "bf16").tolist() == tile[row : row + 1].tolist()


@pytest.mark.parametrize(
    ("a", "b", "c", "kind", "message"),
    [
        pytest.param((8, 16), (8, 16), None, "e2m1", "not modelled", id="type"),
        pytest.param((8, 24), (8, 24), None, "bf16", "multiple of 16", id="partial-step"),
        pytest.param((8, 16), (8, 32), None, "bf16", "same K", id="different-k"),
        pytest.param((8, 16), (8, 16), (8, 9), "bf16", "accumulator", id="accumulator-shape"),
    ],
)
def test_what_does_not_fit_is_refused(a, b, c, kind, message):
    """Unknown types and shapes are errors that name the value."""
    with pytest.raises(SimulationError, match=message):
        mma_tile(np.zeros(a, np.uint16), np.zeros(b, np.uint16), None if c is None else np.zeros(c, np.uint32), kind)
