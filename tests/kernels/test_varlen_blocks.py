"""Contract of the building blocks of packed, paged and split attention that are integers: tile orders, shares, places.

Oracles: brute-force enumeration, and the swizzle as the tensor memory accelerator's addresses define it.
"""

import itertools

import numpy as np
import pytest

from fa4build.simulate.hardware.swizzle import swizzle_address
from kernels_src.masking.block_range import BlockRange, visible_blocks
from kernels_src.masking.split_share import split_share
from kernels_src.memory.paged_keys import BOX_ROWS, box_start, place_of
from kernels_src.memory.swizzled_rows import chunk_columns, piece_offset, swizzle_bytes
from kernels_src.scheduling.varlen_tiles import heads_per_group, max_tiles, tile_in_sequence
from tests.oracles.visibility import UNBOUNDED, visible


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 40])
def test_shares_of_splits_cover_the_blocks_in_order_and_evenly(num_splits):
    """Laid side by side they are the tile's range; sizes differ by at most one."""
    for begin, count in itertools.product((0, 3), (1, 2, 5, 16)):
        whole = BlockRange(begin=begin, inner_begin=begin, inner_end=begin + count - 1, end=begin + count)
        shares = [split_share(whole, split, num_splits) for split in range(num_splits)]
        visited = [block for share in shares for block in range(share.begin, share.end)]
        assert visited == list(range(begin, begin + count))
        sizes = [share.end - share.begin for share in shares]
        assert max(sizes) - min(sizes) <= 1


def test_a_share_masks_every_block_that_the_tile_masks():
    """A block without a mask in a share has none in the tile; the edges of the others stay."""
    for first, num_splits in itertools.product(range(0, 7), (1, 2, 3, 5, 9)):
        for last in range(first, 7):
            whole = BlockRange(begin=0, inner_begin=first, inner_end=last, end=8)
            for share in (split_share(whole, split, num_splits) for split in range(num_splits)):
                if share.begin == share.end:
                    continue
                assert share.begin <= share.inner_begin <= share.inner_end <= share.end - 1
                for block in range(share.begin, share.end - 1):
                    assert (block >= share.inner_end) == (block >= whole.inner_end)
                    if block < share.inner_end:
                        assert (block < share.inner_begin) == (block < whole.inner_begin)


@pytest.mark.parametrize("mask", ["full", "causal", "local"])
@pytest.mark.parametrize("group", [1, 3, 5])
def test_packed_rows_visit_exactly_the_blocks_that_one_of_their_queries_sees(mask, group):
    """Rows are (query, head): a tile of 4 rows may start and end amid a query."""
    tile_m, tile_n = 4, 3
    for seqlen_q, seqlen_k, window in itertools.product((1, 3, 8), (1, 4, 13), ((2, 1), (UNBOUNDED, 0), (0, 0))):
        seen = np.repeat(visible(seqlen_q, seqlen_k, mask, *window), group, axis=0)
        for start in range(0, seqlen_q * group, tile_m):
            rows = seen[start : start + tile_m]
            blocks = visible_blocks(
                start // group,
                (min(start + tile_m, seqlen_q * group) - 1) // group,
                tile_n=tile_n,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                mask=mask,
                window_left=window[0],
                window_right=window[1],
            )
            columns = np.flatnonzero(rows.any(axis=0))
            if len(columns):
                assert (blocks.begin, blocks.end) == (columns[0] // tile_n, columns[-1] // tile_n + 1)
            assert blocks.end - blocks.begin >= 1


@pytest.mark.parametrize("longest_first", [False, True])
def test_tiles_of_a_sequence_are_a_bijection_in_groups_of_heads(longest_first):
    """Every (tile, head) once; a group of heads ends before the next begins; within a group tiles go one way."""
    for num_m_blocks, heads, together in itertools.product((1, 2, 5), (1, 3, 8), (1, 2, 3, 8)):
        if together > heads:
            continue
        order = [
            tile_in_sequence(rest, num_m_blocks, heads, together, longest_first) for rest in range(num_m_blocks * heads)
        ]
        assert sorted(order) == sorted(itertools.product(range(num_m_blocks), range(heads)))
        groups = [head // together for _, head in order]
        assert groups == sorted(groups)
        for _, tiles in itertools.groupby(order, key=lambda tile: tile[1] // together):
            rows = [m_block for m_block, _ in tiles]
            assert rows == sorted(rows, reverse=longest_first)


def test_heads_that_run_together_fit_the_budget_or_are_one():
    """32 MiB for keys and values: at 512 bytes a key, 65,536 keys."""
    assert heads_per_group(4096, 512, 32) == 16
    assert heads_per_group(65537, 512, 32) == 1
    assert heads_per_group(0, 512, 4) == 4


def test_the_bound_of_tiles_holds_and_is_reached_but_for_one_a_sequence():
    """max_tiles(sum of rows, sequences, tile) >= sum of ceil(rows / tile) >= that - sequences."""
    rng = np.random.default_rng(1)
    for tile_m, batch in itertools.product((4, 64, 128), (1, 2, 9)):
        rows = rng.integers(0, 3 * tile_m, batch)
        tiles = int(-(-rows // tile_m).sum())
        bound = max_tiles(int(rows.sum()), batch, tile_m)
        assert tiles <= bound <= tiles + batch


@pytest.mark.parametrize("columns", [32, 64, 96, 128, 192, 256])
def test_pieces_lie_where_the_copy_engine_puts_them(columns):
    """A box of a tensor map has its rows side by side in chunks of the pattern's width; then addresses are swizzled."""
    rows, width = 48, swizzle_bytes(columns)
    for row, column in itertools.product(range(rows), range(0, columns, 8)):
        chunk, within = divmod(column, chunk_columns(columns))
        address = swizzle_address(chunk * rows * width + row * width + 2 * within, width)
        assert piece_offset(row, column // 8, rows=rows, columns=columns) == address


@pytest.mark.dsl
def test_lanes_side_by_side_share_a_row():
    """The multiplication that stands for a division, on its whole domain."""
    from kernels_src.memory.row_gather import row_of_worker

    for pieces in range(1, 33):
        assert [row_of_worker(worker, pieces) for worker in range(1024)] == [worker // pieces for worker in range(1024)]


def test_boxes_name_every_key_of_a_block_and_no_page_behind_the_last():
    """Keys that exist lie where the page table says; boxes beyond the end repeat the last one that holds a key."""
    for page_size, seqlen_k, tile_n in itertools.product((16, 48, 128), (0, 1, 16, 17, 200), (64, 112)):
        used_pages = max(-(-seqlen_k // page_size), 1)
        for block in range(max(-(-seqlen_k // tile_n), 1)):
            for box in range(tile_n // BOX_ROWS):
                key = block * tile_n + box * BOX_ROWS
                start = box_start(block, box, tile_n=tile_n, seqlen_k=seqlen_k)
                assert start == key if key < seqlen_k else start <= max(seqlen_k - 1, 0)
                entry, row = place_of(start, page_size)
                assert entry < used_pages
                assert row % BOX_ROWS == 0
                assert row + BOX_ROWS <= page_size
