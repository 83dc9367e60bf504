"""Which blocks of keys a tile of queries visits, and which of them need a mask.

A tile walks its blocks from the last to the first. Blocks in the middle lie inside the visible region of every row of
the tile and need no comparison at all. Integers only: runs on the host and in a kernel.
"""

from typing import NamedTuple

from kernels_src.integers import ceil_div, maximum, minimum

FULL, CAUSAL, LOCAL = "full", "causal", "local"


class BlockRange(NamedTuple):
    """Block indices of one tile: begin <= inner_begin <= inner_end <= end - 1, begin < end.

    Block end - 1 is masked with everything that the variant has (also the end of the sequence); blocks in
    [inner_end, end - 1) with the right and left edge; blocks in [inner_begin, inner_end) with nothing; blocks in
    [begin, inner_begin) with the left edge.
    """

    begin: object
    inner_begin: object
    inner_end: object
    end: object


def block_range(m_block, *, tile_m, tile_n, seqlen_q, seqlen_k, mask, window_left, window_right) -> BlockRange:
    """Blocks that tile `m_block` visits.

    Args:
        m_block: tile of queries, 0 <= m_block < ceil(seqlen_q / tile_m).
        tile_m, tile_n: rows of a tile, keys of a block; compile-time.
        seqlen_q, seqlen_k: at least 1.
        mask: "full", "causal" or "local"; compile-time.
        window_left, window_right: read by "local" only; domain as in masking.sliding_window.
    Returns: a BlockRange. A tile that sees no key at all still gets one block (masked to nothing), so that a kernel
        needs no second path: the row sums come out as 0 and the epilogue writes O = 0, LSE = -inf.
    Cost: about 20 integer instructions a tile. Source: visibility rule of docs/formats.md section 1.
    """
    last_query = minimum((m_block + 1) * tile_m, seqlen_q) - 1 if mask != FULL else 0
    return visible_blocks(
        m_block * tile_m,
        last_query,
        tile_n=tile_n,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        mask=mask,
        window_left=window_left,
        window_right=window_right,
    )


def visible_blocks(
    first_query, last_query, *, tile_n, seqlen_q, seqlen_k, mask, window_left, window_right
) -> BlockRange:
    """Blocks that a tile visits whose rows are the queries first_query .. last_query (both inside the sequence).

    For tiles that are no whole number of queries, as of packed query heads. Otherwise as `block_range`.
    """
    num_blocks = ceil_div(seqlen_k, tile_n)
    if mask == FULL:
        return BlockRange(begin=0, inner_begin=0, inner_end=num_blocks - 1, end=num_blocks)
    right = 0 if mask == CAUSAL else window_right
    first_row_diagonal = first_query + (seqlen_k - seqlen_q)
    last_row_diagonal = last_query + (seqlen_k - seqlen_q)
    # Both ends are clamped at zero before the division, which is then on non-negative values.
    end = minimum(num_blocks, ceil_div(maximum(last_row_diagonal + right + 1, 0), tile_n))
    inner_end = maximum(first_row_diagonal + right + 1, 0) // tile_n
    if mask == CAUSAL:
        end = maximum(end, 1)
        return BlockRange(begin=0, inner_begin=0, inner_end=minimum(inner_end, end - 1), end=end)
    begin = minimum(maximum(first_row_diagonal - window_left, 0) // tile_n, num_blocks - 1)
    end = maximum(end, begin + 1)
    inner_end = minimum(maximum(inner_end, begin), end - 1)
    inner_begin = ceil_div(maximum(last_row_diagonal - window_left, 0), tile_n)
    return BlockRange(
        begin=begin, inner_begin=minimum(maximum(inner_begin, begin), inner_end), inner_end=inner_end, end=end
    )
