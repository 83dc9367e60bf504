"""Contract: the yardstick itself. The float64 reference equals a plain loop over rows, the window rule is the one of
docs/formats.md, rounding is round-to-nearest-even, and the tolerance grows with the same-dtype error only.
"""

import math

import numpy as np
import pytest

from fa4build.cases.forward import (
    UNBOUNDED_WINDOW,
    Case,
    cases_for,
    draw_inputs,
    lse_error,
    output_bound,
    reference,
    round_to,
    same_dtype_attention,
    visible,
)
from fa4build.matrix.variants import parse_variant

EVERYTHING = (UNBOUNDED_WINDOW, UNBOUNDED_WINDOW)


def _attention_by_loops(q, k, v, scale, window):
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    out = np.zeros((batch, seqlen_q, heads, v.shape[3]))
    lse = np.full((batch, heads, seqlen_q), -math.inf)
    for b, i, h in np.ndindex(batch, seqlen_q, heads):
        kv = h // (heads // heads_kv)
        centre = i + seqlen_k - seqlen_q
        keys = [j for j in range(seqlen_k) if centre - window[0] <= j <= centre + window[1]]
        if not keys:
            continue
        weights = [math.exp(scale * float(q[b, i, h] @ k[b, j, kv])) for j in keys]
        lse[b, h, i] = math.log(sum(weights))
        out[b, i, h] = sum(w * v[b, j, kv] for w, j in zip(weights, keys, strict=True)) / sum(weights)
    return out, lse


@pytest.mark.parametrize("window", [EVERYTHING, (UNBOUNDED_WINDOW, 0), (2, 1), (-1, 3)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 7), (7, 3)], ids=str)
def test_reference_equals_a_plain_loop_over_rows(window, seqlen_q, seqlen_k):
    """Masks, head groups, empty rows: one row at a time with math.exp gives the same numbers."""
    case = Case(name="t", batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_q=4, num_heads_kv=2)
    q, k, v = (x.astype(np.float64) for x in draw_inputs(case, 8, 4, seed=3))

    out, lse = reference(q, k, v, 0.3, window)

    expected_out, expected_lse = _attention_by_loops(q, k, v, 0.3, window)
    np.testing.assert_allclose(out, expected_out, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-13)


def test_causal_is_aligned_at_the_bottom_right():
    """Two queries over four keys: the last query sees all, the first all but the last."""
    assert visible(2, 4, (UNBOUNDED_WINDOW, 0)).tolist() == [[True, True, True, False], [True, True, True, True]]


def test_a_query_before_the_first_key_sees_nothing():
    """Three queries, one key, causal: rows 0 and 1 are empty and give 0 and -inf."""
    q, k, v = draw_inputs(Case(name="t", seqlen_q=3, seqlen_k=1), 4, 4, seed=0)

    out, lse = reference(q, k, v, 1.0, (UNBOUNDED_WINDOW, 0))

    assert np.isneginf(lse[0, 0]).tolist() == [True, True, False]
    assert not out[0, :2].any()


def test_zero_queries_give_the_log_of_the_number_of_keys():
    """softmax of equal scores: lse = ln(6), out = mean of v."""
    q, k, v = draw_inputs(Case(name="t", seqlen_q=2, seqlen_k=6, fill="zero_q"), 4, 4, seed=1)

    out, lse = reference(q, k, v, 0.5, EVERYTHING)

    np.testing.assert_allclose(lse, math.log(6), rtol=1e-14)
    np.testing.assert_allclose(out[0, :, 0], np.broadcast_to(v[0, :, 0].mean(0, dtype=np.float64), (2, 4)), rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1 + 2**-8, 1.0),  # tie between 1 and 1+2^-7 goes to the even 1
        (1 + 3 * 2**-8, 1 + 2**-6),  # tie goes up to the even 1+2^-6
        (1 + 2**-8 + 2**-20, 1 + 2**-7),  # above the tie
        (-3.0, -3.0),
    ],
)
def test_bf16_rounding_is_to_nearest_even(value, expected):
    """bf16 has 7 stored mantissa bits."""
    assert round_to(np.array([value]), "bf16")[0] == expected


def test_same_dtype_attention_is_off_by_a_few_roundings():
    """The yardstick is neither exact nor far off: its error lies between 2^-12 and 2^-5 of the largest output."""
    case = Case(name="t", seqlen_q=64, seqlen_k=64)
    q, k, v = (round_to(x, "bf16") for x in draw_inputs(case, 64, 64, seed=5))
    ref, _ = reference(q, k, v, 0.125, EVERYTHING)

    error = np.abs(same_dtype_attention(q, k, v, 0.125, EVERYTHING, "bf16") - ref).max() / np.abs(ref).max()

    assert 2**-12 < error < 2**-5


def test_bound_is_twice_the_yardstick_and_one_rounding():
    """ref max 4, error 0.01: 2 * 0.01 + 4 * 2^-8."""
    assert output_bound(np.array([4.0, 1.0]), np.array([4.0, 1.01]), "bf16") == pytest.approx(0.02 + 4 / 256)


def test_lse_error_never_forgives_a_missing_minus_infinity():
    """A finite value where the row is empty, and a NaN, are infinitely wrong."""
    assert lse_error(np.array([0.0]), np.array([-np.inf])) == math.inf
    assert lse_error(np.array([np.nan]), np.array([0.0])) == math.inf
    assert lse_error(np.array([1.0, -np.inf]), np.array([1.5, -np.inf])) == pytest.approx(0.5 / 1.5)


@pytest.mark.parametrize(("fill", "low", "high"), [("rising", 8.0, 64.0), ("creeping", 0.5, 8.0)])
def test_rising_fills_move_the_row_maximum_as_they_say(fill, low, high):
    """In log2 units a block of 128 keys: more than 8 (a rescale at threshold 8), or less than 8 (skipped)."""
    case = Case(name="t", seqlen_q=4, seqlen_k=512, fill=fill)
    q, k, _ = draw_inputs(case, 128, 128, seed=2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k)[0, 0] / math.sqrt(128) * math.log2(math.e)
    block_max = scores.reshape(4, 4, 128).max(axis=-1)

    rise = np.diff(block_max, axis=1)

    assert low < rise.min()
    assert rise.max() < high


def test_falling_maxima_rise_the_way_in_which_kernels_walk():
    """From the last block of keys to the first: less than 8 a block, more than 8 in two; with a rescale and without."""
    case = Case(name="t", seqlen_q=4, seqlen_k=512, fill="falling")
    q, k, _ = draw_inputs(case, 128, 128, seed=2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k)[0, 0] / math.sqrt(128) * math.log2(math.e)
    block_max = scores.reshape(4, 4, 128).max(axis=-1)[:, ::-1]

    assert np.diff(block_max, axis=1).max() < 8
    assert (block_max[:, 2:] - block_max[:, :-2]).min() > 8


@pytest.mark.parametrize("mask", ["full", "causal", "local"])
def test_all_tiles_of_a_blackwell_cta_rescale_over_more_keys_than_slots_and_take_work_again(mask):
    """Three tiles of 128 queries reach the second tile of a CTA and of a pair; a ring has at most four slots; of five
    heads two multiprocessors take two each."""
    cases = {arch: cases_for(parse_variant(f"fwd-{arch}-bf16-hd128-{mask}")) for arch in ("sm90a", "sm100a", "sm103a")}
    by_name = {case.name: case for case in cases["sm100a"]}
    falling, many = by_name["falling-maxima"], by_name["many-tiles"]

    assert cases["sm100a"] == cases["sm103a"]
    assert not {"falling-maxima", "many-tiles"} & {case.name for case in cases["sm90a"]}
    assert (falling.fill, falling.seqlen_q > 2 * 128, falling.seqlen_k > 2 * 4 * 128) == ("falling", True, True)
    assert many.seqlen_q > 2 * 128
    assert many.batch * many.num_heads_q >= 2 * 2
