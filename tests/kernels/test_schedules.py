"""Contract: a schedule hands out every tile exactly once.

Longest first never hands a longer tile after a shorter one of its group; shares of several tiles a CTA are disjoint and
differ by at most one tile.
"""

import itertools

import pytest

from kernels_src.scheduling import longest_first, single_tile, static_persistent

SHAPES = tuple(itertools.product((1, 3, 8), (1, 4, 6), (1, 2, 5)))  # num_m_blocks, num_heads, num_batches


def longest_first_order(num_m_blocks, num_heads, num_batches, group_heads):
    heads = num_heads * num_batches
    group_heads = min(group_heads, heads)
    last_group = (heads - 1) // group_heads
    return [
        longest_first.tile_at(
            index,
            num_m_blocks,
            num_heads,
            group_heads,
            group_heads * num_m_blocks,
            last_group,
            heads - last_group * group_heads,
        )
        for index in range(heads * num_m_blocks)
    ]


@pytest.mark.parametrize(("num_m_blocks", "num_heads", "num_batches"), SHAPES)
def test_natural_order_visits_every_tile_once(num_m_blocks, num_heads, num_batches):
    """Query tiles fastest, then heads, then sequences."""
    order = [single_tile.tile_at(i, num_m_blocks, num_heads) for i in range(num_m_blocks * num_heads * num_batches)]
    expected = itertools.product(range(num_batches), range(num_heads), range(num_m_blocks))
    assert [(t.batch, t.head, t.m_block) for t in order] == list(expected)


@pytest.mark.parametrize("group_heads", [1, 2, 4, 7, 100])
@pytest.mark.parametrize(("num_m_blocks", "num_heads", "num_batches"), SHAPES)
def test_longest_first_visits_every_tile_once_and_never_lengthens(num_m_blocks, num_heads, num_batches, group_heads):
    """A permutation of all tiles; within a group of heads the tile index, which is the length, does not rise."""
    order = longest_first_order(num_m_blocks, num_heads, num_batches, group_heads)
    assert len(set(order)) == num_m_blocks * num_heads * num_batches
    assert all(0 <= t.m_block < num_m_blocks and t.head < num_heads and t.batch < num_batches for t in order)
    groups = [(t.batch * num_heads + t.head) // min(group_heads, num_heads * num_batches) for t in order]
    assert groups == sorted(groups)
    for _, members in itertools.groupby(zip(groups, order, strict=True), key=lambda pair: pair[0]):
        lengths = [tile.m_block for _, tile in members]
        assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("seqlen_k", "heads_q", "heads_kv", "batch", "expected"),
    [
        (4096, 16, 16, 8, 16),  # 4096 * 256 * 2 B = 2 MiB a head: 16 of 32 MiB
        (16384, 32, 8, 2, 16),  # 8 MiB a key head: 4 of them, each read by 4 query heads
        (1 << 24, 8, 2, 1, 4),  # 8 GiB a head: one key head at a time
        (128, 6, 2, 3, 18),  # all heads fit
    ],
)
def test_groups_fit_in_l2(seqlen_k, heads_q, heads_kv, batch, expected):
    """head_dim 128 on both sides, two bytes an element, so 512 bytes a key."""
    assert longest_first.heads_per_group(seqlen_k * 512, heads_q, heads_kv, batch) == expected


@pytest.mark.parametrize(("num_ctas", "num_tiles"), [(1, 7), (4, 4), (4, 5), (4, 8), (4, 11), (132, 1000), (7, 13)])
def test_persistent_shares_cover_every_tile_once(num_ctas, num_tiles):
    """Shares are disjoint, cover everything and differ by at most one tile."""
    counts = [static_persistent.num_tiles_of(cta, num_ctas, num_tiles) for cta in range(num_ctas)]
    taken = [static_persistent.index_at(r, cta, num_ctas) for cta in range(num_ctas) for r in range(counts[cta])]
    assert sorted(taken) == list(range(num_tiles))
    assert max(counts) - min(counts) <= 1


def test_a_cta_takes_tiles_at_a_constant_stride():
    """Three CTAs and eight tiles: CTA 1 takes 1, 4 and 7; CTA 2 takes 2 and 5."""
    shares = [
        [static_persistent.index_at(r, cta, 3) for r in range(static_persistent.num_tiles_of(cta, 3, 8))]
        for cta in range(3)
    ]
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5]]
