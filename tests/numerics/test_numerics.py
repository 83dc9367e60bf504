"""Contract of the host oracles.

Rounding is that of the types, to nearest even, subnormals kept, saturating. The recurrence with threshold 0 is plain
online softmax; with any threshold the exact part of the result is the same, and a reference never lags by more than the
threshold. Constants come from the kernels' own files. The roofline counts what its docstring says.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4build.errors import RenderError
from fa4build.numerics.experiments import PEAKED, STEEP
from fa4build.numerics.figures import build_takes
from fa4build.numerics.kernel_blocks import definitions, keeps_reference
from fa4build.numerics.rescaling import (
    attention_with_lag,
    attention_with_shift,
    block_maxima,
    exact_attention,
    recurrence,
    relative_l2,
)
from fa4build.numerics.roofline import backward_bounds, exp_to_mma, forward_bounds
from fa4build.numerics.rounding import FORMATS, bf16_bits, round_to_format

NUMPY_TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


# --- rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_rounding_agrees_with_the_library_types(name):
    """On all magnitudes from far below the subnormals to the largest finite value."""
    rng = np.random.default_rng(0)
    format_ = FORMATS[name]
    lowest = format_.min_exponent - format_.mantissa_bits - 3
    exponents = rng.uniform(max(lowest, -140), np.log2(format_.max_finite) - 0.1, 200_000)
    x = np.exp2(exponents).astype(np.float32).astype(np.float64)

    assert np.array_equal(x.astype(NUMPY_TYPES[name]).astype(np.float64), round_to_format(x, name))


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("e4m3", 449.0, 448.0),  # saturates, as cvt.rn.satfinite does
        ("e4m3", 4096.0, 448.0),  # offset 8 with a lag of 4: what the build's check forbids
        ("e4m3", 2.0**-10, 0.0),  # half the smallest subnormal 2^-9: a tie, to even
        ("e4m3", 2.0**-10 * 1.01, 2.0**-9),
        ("e4m3", 17.0, 16.0),  # 16 and 18 are neighbours; a tie, to even
        ("e5m2", 9.0, 8.0),
        ("e5m2", 60000.0, 57344.0),
        ("bf16", 1.0 + 2.0**-8, 1.0),  # a tie
        ("bf16", 1.0 + 3 * 2.0**-8, 1.0 + 2.0**-6),
        ("fp16", 2.0**-25, 0.0),
        ("bf16", 0.0, 0.0),
    ],
)
def test_rounding_at_ties_and_ends(name, x, expected):
    """Nearest even; too large becomes the largest finite."""
    assert expected == round_to_format(np.array([x]), name)[0]


def test_bf16_bits_round_to_even():
    """0x3F808000 lies between 0x3F80 and 0x3F81."""
    bits = np.array([0x3F808000, 0x3F808001, 0x3F818000, 0x3F817FFF], dtype=np.uint32)

    assert [0x3F80, 0x3F81, 0x3F82, 0x3F81] == bf16_bits(bits.view(np.float32)).tolist()


# --- conditional rescaling --------------------------------------------------------------------------------------------


def scores_of(maxima: list[float]) -> np.ndarray:
    """32 equal rows whose blocks of two keys have these maxima."""
    return np.repeat([[value for maximum in maxima for value in (maximum - 1, maximum)]], 32, axis=0)


@pytest.mark.parametrize(
    ("threshold", "references"),
    [
        (0.0, [0, 3, 3, 9, 12]),  # plain online softmax: the running maximum
        (8.0, [0, 0, 0, 9, 9]),  # 3 is no more than 8 above 0; 9 is, and 12 is not 8 above 9
        (2.9, [0, 3, 3, 9, 12]),
        (3.0, [0, 0, 0, 9, 9]),  # a rise of exactly the threshold is kept
        (12.0, [0, 0, 0, 0, 0]),
    ],
)
def test_the_reference_moves_only_when_the_rise_exceeds_the_threshold(threshold, references):
    """Maxima 0, 3, 1, 9, 12."""
    found = recurrence(block_maxima(scores_of([0, 3, 1, 9, 12]), block=2), threshold)

    moved = [after > before for before, after in itertools.pairwise(references)]
    assert references == found.references[:, 0].tolist()
    assert moved == found.moved[:, 0].tolist()


def test_shares_count_steps_after_the_first_block():
    """One of 32 rows moves in one of two steps: 1/64 of row steps, 1/2 of warp steps."""
    scores = scores_of([0, 0, 0])
    scores[5, 3] = 100.0
    found = recurrence(block_maxima(scores, block=2), 8.0)

    assert (1 / 64, 1 / 2) == (found.row_share, found.warp_share)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), threshold=st.sampled_from([0.0, 4.0, 8.0]), sigma=st.floats(0.1, 20.0))
def test_a_reference_lags_by_at_most_the_threshold(seed, threshold, sigma):
    """So a probability is at most 2^threshold; and it never runs ahead of the maximum."""
    scores = sigma * np.random.default_rng(seed).standard_normal((32, 512))
    found = recurrence(block_maxima(scores), threshold)
    running = np.maximum.accumulate(scores.reshape(32, 4, 128).max(axis=2).T, axis=0)

    assert np.all(found.references <= running)
    assert np.all(running - found.references <= threshold)


def test_threshold_zero_is_plain_online_softmax():
    """The references are the running maxima, and the share of moving rows is that of records: (H_64 - 1) / 63."""
    scores = np.random.default_rng(3).standard_normal((1024, 8192))
    found = recurrence(block_maxima(scores), 0.0)
    records = (sum(1 / n for n in range(1, 65)) - 1) / 63

    assert np.array_equal(scores.max(axis=1), found.references[-1])
    assert found.row_share == pytest.approx(records, abs=0.004)  # 1024 rows: a standard deviation is 0.0009


def test_lag_changes_nothing_but_rounding():
    """With P in fp16, whose 11 bits are 8 times as fine as bf16's, the error is 8 times smaller, lagging or not."""
    rng = np.random.default_rng(1)
    scores, values = STEEP.draw(rng, rows=64, keys=2048), rng.standard_normal((2048, 32))
    exact = exact_attention(scores, values)
    for threshold in (0.0, 8.0):
        coarse, fine = attention_with_lag(scores, values, ("bf16", "fp16"), threshold)
        assert relative_l2(coarse, exact) / relative_l2(fine, exact) == pytest.approx(8, rel=0.15)


def test_an_offset_cancels_but_for_rounding():
    """P and its sum carry the same 2^8: with bf16, whose range is that of float32, not a bit changes."""
    rng = np.random.default_rng(2)
    scores, values = PEAKED.draw(rng, rows=32, keys=512), rng.standard_normal((512, 16))
    (plain,) = attention_with_lag(scores, values, ("bf16",), 0.0)
    (offset,) = attention_with_lag(scores, values, ("bf16",), 0.0, max_offset=8.0)

    assert plain == pytest.approx(offset, rel=1e-12)


def test_a_shift_by_whole_powers_of_two_changes_nothing():
    """Only a fractional shift moves probabilities to other roundings."""
    rng = np.random.default_rng(4)
    scores, values = PEAKED.draw(rng, rows=32, keys=512), rng.standard_normal((512, 16))
    still = attention_with_shift(scores, values, "bf16", np.zeros(32))

    assert still == pytest.approx(attention_with_shift(scores, values, "bf16", np.full(32, 5.0)), rel=1e-9)
    assert relative_l2(attention_with_shift(scores, values, "bf16", np.full(32, 5.5)), still) > 1e-4


def test_tail_mass_survives_in_e4m3_with_the_offset():
    """4096 keys of weight 2^-14 carry a fifth of the mass; without the offset each would round to 0."""
    scores = np.full((32, 4096), -14.0)
    scores[:, 0] = 0.0
    values = np.ones((4096, 1))
    (with_offset,) = attention_with_lag(scores, values, ("e4m3",), 0.0, max_offset=8.0)
    (without,) = attention_with_lag(scores, values, ("e4m3",), 0.0)

    assert with_offset[0, 0] == pytest.approx(1.0, abs=1e-6)
    assert without[0, 0] == pytest.approx(1 / (1 + 4095 / 2**14), abs=1e-6)


@pytest.mark.parametrize(
    ("dtype", "threshold", "offset", "taken"),
    [
        ("e4m3", 0.0, 8.0, True),  # 8 < log2 448 = 8.807
        ("e4m3", 0.8, 8.0, True),
        ("e4m3", 0.81, 8.0, False),
        ("e4m3", 4.0, 8.0, False),  # 2^12 saturates
        ("e5m2", 4.0, 8.0, True),  # 12 < log2 57344 = 15.807
        ("e5m2", 8.0, 8.0, False),
    ],
)
def test_the_build_refuses_what_saturates(dtype, threshold, offset, taken):
    """offset + threshold stays below log2 of the type's largest finite value."""
    assert taken == build_takes(dtype, threshold=threshold, max_offset=offset)


# --- the kernels' own constants ---------------------------------------------------------------------------------------


def test_the_rescale_rule_is_the_kernels_own():
    """Taken from the file, it works on arrays: a step of exactly -threshold keeps."""
    assert [True, True, False, False] == keeps_reference()(np.array([0.0, -8.0, -8.001, -np.inf]), 8.0).tolist()


def test_a_name_that_a_kernel_file_no_longer_defines_is_an_error():
    """Never a silent default."""
    with pytest.raises(RenderError, match=r"exp2_emulation\.py does not define NO_SUCH_TABLE"):
        definitions("softmax/exp2_emulation.py", "NO_SUCH_TABLE", "POLYNOMIALS")


# --- roofline ---------------------------------------------------------------------------------------------------------


def test_the_ratio_of_exponentials_to_products_depends_on_head_dim_alone():
    """128 / d on sm_100a; half of it with the doubled exponential unit of sm_103a."""
    for head_dim in (32, 64, 96, 128, 256):
        assert exp_to_mma("sm100a", head_dim) == 128 / head_dim
        assert exp_to_mma("sm103a", head_dim) == 64 / head_dim


def test_forward_traffic_by_hand():
    """128 x 128 x 64: Q 128*64*2 B = 16384 B = 128 clocks; K and V as much each. sm_90a has half the matrix rate."""
    bounds = forward_bounds("sm100a", 128, 128, 64)

    assert {"Q": 128.0, "K": 128.0, "V": 128.0} == bounds.shared_parts
    assert 512 == bounds.mma
    assert 1024 == forward_bounds("sm90a", 128, 128, 64).mma


def test_excess_is_relative_to_the_tensor_core():
    """Backward, 1 CTA, head_dim 128: 3328 / 2560 - 1; a pair brings it to 2688 / 2560 - 1."""
    assert backward_bounds("sm100a", 128).excess == pytest.approx(0.30)
    assert backward_bounds("sm100a", 128, 2).excess == pytest.approx(0.05)
