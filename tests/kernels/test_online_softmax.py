"""Contract: online softmax with conditional rescaling equals two-pass softmax, for any threshold, with fewer rescales.

The recurrence below is the one of kernels_src/softmax/online_softmax.py in scalar Python; the rule when to keep the
reference is the kernel's own function.
"""

import math

import numpy as np
import pytest

from kernels_src.softmax.conditional_rescaling import keeps_reference
from tests.oracles.attention import attention

LOG2_E = math.log2(math.e)


def online(scores: np.ndarray, values: np.ndarray, block: int, threshold: float):
    """One row, blocks from the last to the first: (O, lse, number of rescales, largest probability before rounding)."""
    starts = range((len(scores) - 1) // block * block, -1, -block)
    reference, total, output, rescales, largest = -math.inf, 0.0, np.zeros(values.shape[1]), 0, 0.0
    for start in starts:
        part = scores[start : start + block]
        maximum = max(reference, float(part.max()))
        finite = 0.0 if maximum == -math.inf else maximum
        step_log2 = (reference - finite) * LOG2_E
        factor = 2.0**step_log2
        if threshold > 0 and keeps_reference(step_log2, threshold):
            factor, maximum, finite = 1.0, reference, reference
        rescales += factor != 1.0 and reference != -math.inf
        weights = 2.0 ** ((part - finite) * LOG2_E)
        largest = max(largest, float(weights.max()))
        total = total * factor + weights.sum()
        output = output * factor + weights @ values[start : start + block]
        reference = maximum
    if total == 0:
        return output, -math.inf, rescales, largest
    return output / total, reference + math.log(total), rescales, largest


def rows():
    rng = np.random.default_rng(7)
    yield "normal", rng.normal(size=200) * 3
    yield "rising towards the first key", np.linspace(60, 0, 200) + rng.normal(size=200)
    yield "creeping", np.linspace(4, 0, 200)
    yield "hidden at the end", np.where(np.arange(200) < 20, rng.normal(size=200), -math.inf)
    yield "hidden at the start", np.where(np.arange(200) > 180, rng.normal(size=200), -math.inf)
    yield "all hidden", np.full(200, -math.inf)
    yield "huge", rng.normal(size=200) * 1e4


@pytest.mark.parametrize("threshold", [0.0, 1.0, 8.0])
@pytest.mark.parametrize(("name", "scores"), tuple(rows()))
def test_equals_two_pass_softmax(name, scores, threshold):
    """Any reference point gives the same O and lse; an empty row gives 0 and -inf."""
    values = np.random.default_rng(3).normal(size=(200, 4))
    output, lse, _, _ = online(scores, values, 32, threshold)
    exact, exact_lse = attention(scores[None], values)
    np.testing.assert_allclose(output, exact[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(lse, exact_lse[0], rtol=1e-12)


@pytest.mark.parametrize(("name", "scores"), tuple(rows()))
def test_probabilities_stay_below_two_to_the_threshold(name, scores):
    """A row keeps its reference only while its maximum is at most 2^8 above: 256 fits every operand type."""
    assert online(scores, np.ones((200, 1)), 32, 8.0)[3] <= 2.0**8 * (1 + 1e-12)


def test_small_rises_do_not_rescale():
    """Maxima that creep up by less than 8 in log2 units in all (4 * log2 e = 5.8) never rescale; at 0 they do.

    Seven blocks of up to 32 keys, visited from the last; each after the first brings a larger maximum: 6 rescales.
    """
    scores = np.linspace(4, 0, 200)
    assert online(scores, np.ones((200, 1)), 32, 8.0)[2] == 0
    assert online(scores, np.ones((200, 1)), 32, 0.0)[2] == 6


def test_a_first_key_always_sets_the_reference():
    """From a row that has seen nothing (-inf) the step is -inf, below any threshold."""
    assert not keeps_reference(-math.inf, 8.0)
    assert keeps_reference(-8.0, 8.0)
    assert not keeps_reference(-8.001, 8.0)
