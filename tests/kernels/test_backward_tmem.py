"""Contract: what the backward kernel keeps in tensor memory at one time does not overlap, and fits 512 columns."""

import itertools

import pytest

from kernels_src.memory.tmem_2cta import pipelined_backward_tmem
from kernels_src.memory.tmem_layout import TMEM_COLUMNS, backward_tmem, wide_backward_tmem


@pytest.mark.parametrize(
    ("head_dim", "own_dq", "columns"),
    [
        (64, True, 512),  # 128 + 64 + 128 + 64, and 64 for dQ: 448
        (96, False, 512),  # 128 + 96 + 128 + 96 = 448, and no 96 more
        (128, False, 512),  # 128 + 128 + 128 + 128 = 512
    ],
)
def test_plans(head_dim, own_dq, columns):
    """dQ has columns of its own where there is room, else those of dP."""
    plan = backward_tmem(128, head_dim, head_dim)

    assert (own_dq, columns) == (plan.has_own_dq, plan.num_columns)
    assert own_dq == (plan.dq != plan.dprobabilities)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_no_two_accumulators_overlap(head_dim):
    """S, dV, dP, dK, and dQ where it has its own; all within the 512 columns."""
    plan = backward_tmem(128, head_dim, head_dim)
    areas = [(plan.scores, 128), (plan.dv, head_dim), (plan.dprobabilities, 128), (plan.dk, head_dim)]
    areas += [(plan.dq, head_dim)] if plan.has_own_dq else []

    assert all(begin + size <= TMEM_COLUMNS for begin, size in areas)
    for (begin, size), (other, other_size) in itertools.combinations(areas, 2):
        assert begin + size <= other or other + other_size <= begin


def test_wider_heads_are_refused():
    """(192, 128): 128 + 128 + 192 + 192 = 640."""
    with pytest.raises(ValueError, match="head_dim 192 and head_dim_v 128 need 640 tensor-memory columns"):
        backward_tmem(128, 192, 128)


def test_wide_heads_with_two_ctas():
    """(192, 128), a CTA: dV 128 and dK 192 columns for good. Of the other 192: P, half as wide as S, beside dP; S over
    both; dQ, 192 / 2 columns, beside P, which dV may still be read from."""
    plan = wide_backward_tmem(128, 192, 128)
    p, dp, dq = (plan.scores, 64), (plan.dprobabilities, 128), (plan.dq, 96)

    for areas in (
        [(plan.dv, 128), (plan.dk, 192), (plan.scores, 128)],
        [(plan.dv, 128), (plan.dk, 192), p, dp],
        [(plan.dv, 128), (plan.dk, 192), p, dq],
    ):
        assert all(begin + size <= TMEM_COLUMNS == plan.num_columns for begin, size in areas)
        for (begin, size), (other, other_size) in itertools.combinations(areas, 2):
            assert begin + size <= other or other + other_size <= begin


def test_heads_too_wide_for_two_ctas_are_refused():
    """(256, 256): 256 + 256 + 192 = 704."""
    with pytest.raises(ValueError, match="head_dim 256 and head_dim_v 256 need 704 tensor-memory columns"):
        wide_backward_tmem(128, 256, 256)


def test_pipelined_heads_with_two_ctas():
    """128, a CTA: all 512 columns for S, dP, dV and dK. dQ, 128 / 2 columns, beside P, half as wide as S, at the same
    place; both only where S was."""
    plan = pipelined_backward_tmem(128, 128, 128)
    others = [(plan.dprobabilities, 128), (plan.dv, 128), (plan.dk, 128)]
    p, dq = (plan.scores, 64), (plan.dq, 64)

    assert plan.scores <= plan.dq
    assert plan.dq + 64 <= plan.scores + 128
    for areas in ([(plan.scores, 128), *others], [p, dq, *others]):
        assert all(begin + size <= TMEM_COLUMNS == plan.num_columns for begin, size in areas)
        for (begin, size), (other, other_size) in itertools.combinations(areas, 2):
            assert begin + size <= other or other + other_size <= begin


def test_dq_wider_than_half_of_the_scores_is_refused():
    """Of a head of 160 a CTA has 80 columns of dQ; tiles of 128 queries leave 64."""
    with pytest.raises(ValueError, match="dQ of head_dim 160 needs 80 columns, half of S has 64"):
        pipelined_backward_tmem(128, 160, 64)
