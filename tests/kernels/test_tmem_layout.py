"""Contract: what lies in tensor memory at the same time does not overlap, and 512 columns are never exceeded.

P lies over the upper half of its own S tile on purpose: a thread holds its whole row of S before it stores the first P.
"""

import itertools

import pytest

from fa4build.matrix.tuning import tuning_for
from fa4build.matrix.variants import written_variants
from kernels_src.memory.tmem_layout import TMEM_COLUMNS, forward_tmem


@pytest.mark.parametrize(
    ("num_q_tiles", "tile_n", "head_dim_v", "outputs", "num_columns"),
    [
        (2, 128, 128, (256, 384), 512),  # S 0..255, O 256..511: full
        (2, 128, 64, (256, 320), 512),  # 384 used: the next power of two
        (1, 128, 256, (128,), 512),
        (1, 128, 64, (128,), 256),  # 192 used
        (1, 64, 64, (64,), 128),
        (1, 16, 8, (16,), 32),  # the least that can be allocated
    ],
)
def test_columns_of_the_forward(num_q_tiles, tile_n, head_dim_v, outputs, num_columns):
    """S tiles first, then O; allocated is a power of two."""
    layout = forward_tmem(num_q_tiles, tile_n, head_dim_v)

    assert outputs == layout.outputs
    assert num_columns == layout.num_columns


@pytest.mark.parametrize("num_q_tiles", [1, 2])
@pytest.mark.parametrize("tile_n", [64, 96, 128])
@pytest.mark.parametrize("head_dim_v", [64, 96, 128])
def test_accumulators_never_overlap(num_q_tiles, tile_n, head_dim_v):
    """All S and O tiles are disjoint and inside what is allocated."""
    layout = forward_tmem(num_q_tiles, tile_n, head_dim_v)
    tiles = [range(s, s + tile_n) for s in layout.scores] + [range(o, o + head_dim_v) for o in layout.outputs]

    for one, other in itertools.combinations(tiles, 2):
        assert not set(one) & set(other)
    assert max(tile.stop for tile in tiles) <= layout.num_columns <= TMEM_COLUMNS


@pytest.mark.parametrize("num_q_tiles", [1, 2])
@pytest.mark.parametrize("tile_n", [64, 128])
def test_probabilities_lie_in_the_upper_half_of_their_own_scores(num_q_tiles, tile_n):
    """16-bit P takes tile_n / 2 columns, so it ends where S ends."""
    layout = forward_tmem(num_q_tiles, tile_n, 64)

    for scores, probabilities in zip(layout.scores, layout.probabilities, strict=True):
        assert scores + tile_n // 2 == probabilities
        assert scores + tile_n == probabilities + tile_n // 2


def test_one_q_tile_may_have_two_score_tiles():
    """S 0..127 and 128..255, each with its P in the upper half, and one O behind them."""
    layout = forward_tmem(1, 128, 256, num_scores=2)

    assert ((0, 128), (64, 192), (256,)) == (layout.scores, layout.probabilities, layout.outputs)
    assert layout.num_columns == TMEM_COLUMNS


@pytest.mark.parametrize(("num_q_tiles", "tile_n", "head_dim_v"), [(2, 128, 129), (2, 128, 192), (1, 384, 136)])
def test_what_does_not_fit_is_refused_with_the_count(num_q_tiles, tile_n, head_dim_v):
    """One column too many is too many: 2 * 128 + 2 * 129 = 514."""
    used = num_q_tiles * (tile_n + head_dim_v)

    with pytest.raises(ValueError, match=f"need {used} columns of tensor memory, there are 512"):
        forward_tmem(num_q_tiles, tile_n, head_dim_v)


def test_every_written_forward_for_blackwell_fits():
    """With the tiles that the tuning table gives it."""
    variants = [v for v in written_variants() if v.op == "fwd" and v.arch in ("sm100a", "sm103a")]

    assert variants
    for variant in variants:
        tuning = tuning_for(variant)
        assert forward_tmem(tuning.q_stages, tuning.tile_n, variant.head_dim_v).num_columns <= TMEM_COLUMNS, variant.id
