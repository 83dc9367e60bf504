"""Contract: the per-row limits that the kernel compares columns with are those of the dense visibility matrix."""

import itertools

import numpy as np
import pytest

from kernels_src.masking import causal, seqlen, sliding_window
from tests.oracles.visibility import UNBOUNDED, visible

SEQLENS = tuple(itertools.product((1, 3, 8, 20), (1, 5, 8, 33)))


def from_limits(seqlen_q, seqlen_k, begin_of, end_of):
    keys = np.arange(seqlen_k)
    return np.array([(begin_of(row) <= keys) & (keys < end_of(row)) for row in range(seqlen_q)])


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SEQLENS)
def test_full_and_causal(seqlen_q, seqlen_k):
    """Bottom-right aligned; a causal row inside the sequence never sees past its end."""
    everything = from_limits(seqlen_q, seqlen_k, lambda row: 0, lambda row: seqlen.visible_end(seqlen_k))
    lower = from_limits(seqlen_q, seqlen_k, lambda row: 0, lambda row: causal.visible_end(row, seqlen_q, seqlen_k))
    assert (everything == visible(seqlen_q, seqlen_k, "full")).all()
    assert (lower == visible(seqlen_q, seqlen_k, "causal")).all()
    assert causal.visible_end(seqlen_q - 1, seqlen_q, seqlen_k) == seqlen_k


@pytest.mark.parametrize(
    "window", [(0, 0), (3, 2), (UNBOUNDED, 0), (2, UNBOUNDED), (UNBOUNDED, UNBOUNDED), (-2, 6), (6, -2)]
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SEQLENS)
def test_windows(seqlen_q, seqlen_k, window):
    """Both edges inclusive, negative windows are offsets; the end is clipped to the sequence."""
    left, right = window
    band = from_limits(
        seqlen_q,
        seqlen_k,
        lambda row: sliding_window.visible_begin(row, seqlen_q, seqlen_k, left),
        lambda row: sliding_window.visible_end(row, seqlen_q, seqlen_k, right),
    )
    assert (band == visible(seqlen_q, seqlen_k, "local", left, right)).all()
    assert sliding_window.visible_end(seqlen_q - 1, seqlen_q, seqlen_k, right) <= seqlen_k


@pytest.mark.parametrize("window_side", [UNBOUNDED, -UNBOUNDED])
def test_limits_stay_within_32_bits(window_side):
    """At the edge of the domain, seqlen_q + seqlen_k = 2**30 and |window| = 2**30, nothing leaves [-2**31, 2**31)."""
    seqlen_q, seqlen_k = 2**29, 2**29
    for row in (0, seqlen_q - 1):
        limits = (
            sliding_window.visible_begin(row, seqlen_q, seqlen_k, window_side),
            row + (seqlen_k - seqlen_q) + window_side + 1,
        )
        assert all(-(2**31) <= limit < 2**31 for limit in limits)
