"""Contract: a tile visits every block with a visible key, masks every block that holds a hidden one, and no more.

The oracle is the dense boolean matrix. Sizes are small (tiles of 4 x 3 and the like) so that every phase, also empty
ones and windows narrower than a block, occurs.
"""

import itertools

import numpy as np
import pytest

from kernels_src.masking.block_range import block_range
from tests.oracles.visibility import UNBOUNDED, visible

SEQLENS = (1, 2, 3, 5, 8, 13, 24)
WINDOWS = ((0, 0), (2, 0), (0, 2), (4, 3), (UNBOUNDED, 1), (1, UNBOUNDED), (-2, 5), (5, -2), (-9, UNBOUNDED), (40, 40))


def problems():
    for seqlen_q, seqlen_k in itertools.product(SEQLENS, SEQLENS):
        for mask, windows in (("full", ((0, 0),)), ("causal", ((0, 0),)), ("local", WINDOWS)):
            for left, right in windows:
                yield seqlen_q, seqlen_k, mask, left, right


def tiles(tile_m, tile_n):
    """(visibility of the tile's real rows as (rows, blocks * tile_n), hidden = padding too; its BlockRange)."""
    for seqlen_q, seqlen_k, mask, left, right in problems():
        seen = visible(seqlen_q, seqlen_k, mask, left, right)
        num_blocks = -(-seqlen_k // tile_n)
        seen = np.pad(seen, ((0, 0), (0, num_blocks * tile_n - seqlen_k)))
        for m_block in range(-(-seqlen_q // tile_m)):
            blocks = block_range(
                m_block,
                tile_m=tile_m,
                tile_n=tile_n,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                mask=mask,
                window_left=left,
                window_right=right,
            )
            yield seen[m_block * tile_m : (m_block + 1) * tile_m], num_blocks, blocks


@pytest.mark.parametrize(("tile_m", "tile_n"), [(4, 4), (4, 3), (2, 8), (8, 2), (1, 1)])
def test_ranges_are_ordered_and_inside_the_sequence(tile_m, tile_n):
    """begin <= inner_begin <= inner_end < end <= number of blocks; every tile has at least one block."""
    for _, num_blocks, blocks in tiles(tile_m, tile_n):
        assert 0 <= blocks.begin <= blocks.inner_begin <= blocks.inner_end < blocks.end <= num_blocks


@pytest.mark.parametrize(("tile_m", "tile_n"), [(4, 4), (4, 3), (2, 8), (8, 2), (1, 1)])
def test_no_visible_key_is_skipped_and_no_empty_block_is_visited(tile_m, tile_n):
    """The range is exactly from the first to the last block with a visible key (one block if there is none)."""
    for seen, _, blocks in tiles(tile_m, tile_n):
        columns = np.flatnonzero(seen.any(axis=0))
        if len(columns):
            assert (blocks.begin, blocks.end) == (columns[0] // tile_n, columns[-1] // tile_n + 1)
        else:
            assert blocks.end == blocks.begin + 1


@pytest.mark.parametrize(("tile_m", "tile_n"), [(4, 4), (4, 3), (2, 8), (8, 2), (1, 1)])
def test_unmasked_blocks_are_visible_to_every_row(tile_m, tile_n):
    """What is not masked holds no hidden key; what is masked on the left alone has no right edge."""
    for seen, _, blocks in tiles(tile_m, tile_n):
        assert seen[:, blocks.inner_begin * tile_n : blocks.inner_end * tile_n].all()
        for block in range(blocks.begin, blocks.inner_begin):
            part = seen[:, block * tile_n : (block + 1) * tile_n]
            assert (np.diff(part.astype(int), axis=1) >= 0).all(), "hidden keys may only be on the left"


@pytest.mark.parametrize(("tile_m", "tile_n"), [(4, 4), (4, 3), (8, 2)])
def test_masks_run_only_where_needed(tile_m, tile_n):
    """A block between the edges, the first visited one apart, is masked only if it hides a key from some row."""
    for seen, _, blocks in tiles(tile_m, tile_n):
        masked = [*range(blocks.inner_end, blocks.end - 1), *range(blocks.begin, blocks.inner_begin)]
        for block in masked:
            assert not seen[:, block * tile_n : (block + 1) * tile_n].all()


def test_a_tile_without_keys_gets_one_masked_block():
    """Causal, seqlen_q 8, seqlen_k 2: rows 0 to 5 see nothing; the first tile of 4 rows still visits block 0."""
    blocks = block_range(0, tile_m=4, tile_n=2, seqlen_q=8, seqlen_k=2, mask="causal", window_left=0, window_right=0)
    assert tuple(blocks) == (0, 0, 0, 1)


def test_causal_tile_of_128_rows_masks_one_block():
    """Seqlen 512 on both sides, tiles of 128: tile 2 sees keys to 383; blocks 0 and 1 are free, 2 is masked."""
    blocks = block_range(
        2, tile_m=128, tile_n=128, seqlen_q=512, seqlen_k=512, mask="causal", window_left=0, window_right=0
    )
    assert tuple(blocks) == (0, 0, 2, 3)
