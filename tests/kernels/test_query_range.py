"""Contract: a block of keys visits every tile of queries that sees one of its keys, masks every tile that holds a
hidden pair, and in deterministic kernels the CTAs of a head add to dQ in one order without gaps.

The oracle is the dense boolean matrix, and the visits themselves. Sizes are small so that every phase occurs.
"""

import itertools
from collections import defaultdict

import numpy as np
import pytest

from kernels_src.masking.query_range import query_range
from kernels_src.scheduling import turns
from tests.oracles.visibility import UNBOUNDED, visible

SEQLENS = (1, 2, 3, 5, 8, 13, 24)
WINDOWS = ((0, 0), (2, 0), (0, 2), (4, 3), (UNBOUNDED, 1), (1, UNBOUNDED), (-2, 5), (5, -2), (-9, UNBOUNDED), (40, 40))
TILES = [(4, 4), (4, 3), (2, 8), (8, 2), (1, 1)]


def problems():
    for seqlen_q, seqlen_k in itertools.product(SEQLENS, SEQLENS):
        for mask, windows in (("full", ((0, 0),)), ("causal", ((0, 0),)), ("local", WINDOWS)):
            for left, right in windows:
                yield seqlen_q, seqlen_k, mask, left, right


def blocks(tile_m, tile_n):
    """(visibility of the block's keys as (tiles * tile_m, tile_n), hidden = padding of keys; tiles; its QueryRange)."""
    for seqlen_q, seqlen_k, mask, left, right in problems():
        seen = visible(seqlen_q, seqlen_k, mask, left, right)
        num_tiles, num_blocks = -(-seqlen_q // tile_m), -(-seqlen_k // tile_n)
        # Padding rows of queries are not masked: their lse is +inf.
        seen = np.pad(seen, ((0, 0), (0, num_blocks * tile_n - seqlen_k)))
        for n_block in range(num_blocks):
            tiles = query_range(
                n_block,
                tile_m=tile_m,
                tile_n=tile_n,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                mask=mask,
                window_left=left,
                window_right=right,
            )
            yield seen[:, n_block * tile_n : (n_block + 1) * tile_n], num_tiles, tiles


@pytest.mark.parametrize(("tile_m", "tile_n"), TILES)
def test_ranges_are_ordered_and_never_empty(tile_m, tile_n):
    """0 <= begin <= inner_begin <= inner_end <= end <= number of tiles, begin < end."""
    for _, num_tiles, tiles in blocks(tile_m, tile_n):
        assert 0 <= tiles.begin <= tiles.inner_begin <= tiles.inner_end <= tiles.end <= num_tiles
        assert tiles.begin < tiles.end


@pytest.mark.parametrize(("tile_m", "tile_n"), TILES)
def test_every_query_that_sees_a_key_is_visited(tile_m, tile_n):
    """The range runs from the first to the last tile with a visible pair (one tile if there is none)."""
    for seen, _, tiles in blocks(tile_m, tile_n):
        rows = np.flatnonzero(seen.any(axis=1))
        if len(rows):
            assert (tiles.begin, tiles.end) == (rows[0] // tile_m, rows[-1] // tile_m + 1)
        else:
            assert tiles.end == tiles.begin + 1


@pytest.mark.parametrize(("tile_m", "tile_n"), TILES)
def test_tiles_without_a_mask_hide_nothing_and_the_others_do(tile_m, tile_n):
    """Inner tiles are seen whole. A whole block masks only tiles that hold a hidden pair."""
    for seen, _, tiles in blocks(tile_m, tile_n):
        for tile in range(tiles.begin, tiles.end):
            is_whole = seen[tile * tile_m : (tile + 1) * tile_m].all()
            if tiles.inner_begin <= tile < tiles.inner_end:
                assert is_whole


@pytest.mark.parametrize("mask", ["full", "causal", "local"])
@pytest.mark.parametrize("tile_m", [64, 128])
def test_ranks_count_the_blocks_that_come_before(mask, tile_m):
    """For every 128 queries the blocks that visit them have ranks 0, 1, 2, ... in the order in which CTAs start; so
    the first to wait waits for nobody, and nobody waits for a CTA that starts later."""
    windows = {"local": ((100, 0), (0, 300), (UNBOUNDED, 50), (200, -40), (-40, 200), (-300, UNBOUNDED), (0, 0))}
    for seqlen_q, seqlen_k in itertools.product((1, 100, 128, 129, 500, 1000), (1, 127, 300, 640, 1100)):
        for left, right in windows.get(mask, ((0, 0),)):
            _check_ranks(mask, tile_m, seqlen_q, seqlen_k, left, right)


def _check_ranks(mask, tile_m, seqlen_q, seqlen_k, left, right):
    sizes = {"tile_n": 128, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "mask": mask, "window_right": right}
    order = range(-(-seqlen_k // 128))
    visitors = defaultdict(list)
    for n_block in reversed(order) if turns.starts_with_last_keys(mask) else order:
        if turns.is_seen(n_block, window_left=left, **sizes):
            tiles = query_range(n_block, tile_m=tile_m, window_left=left, **sizes)
            for counter in {tile * tile_m // turns.QUERIES_PER_COUNTER for tile in range(tiles.begin, tiles.end)}:
                visitors[counter].append(turns.rank(n_block, counter, **sizes))
    for ranks in visitors.values():
        assert ranks == list(range(len(ranks)))
