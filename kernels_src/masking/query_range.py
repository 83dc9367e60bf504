"""Which tiles of queries a tile of keys meets in the backward pass, and which of them need a mask.

The transpose of block_range: a CTA owns keys and walks queries upwards. Integers only: runs on the host and in a
kernel.
"""

from typing import NamedTuple

from kernels_src.integers import ceil_div, maximum, minimum, select
from kernels_src.masking.block_range import CAUSAL, FULL


class QueryRange(NamedTuple):
    """Tiles of queries of one key tile: begin < end; those in [inner_begin, inner_end) see every key of the tile."""

    begin: object
    inner_begin: object
    inner_end: object
    end: object


def query_range(n_block, *, tile_m, tile_n, seqlen_q, seqlen_k, mask, window_left, window_right) -> QueryRange:
    """Tiles of queries that key tile `n_block` visits.

    Args:
        n_block: tile of keys, 0 <= n_block < ceil(seqlen_k / tile_n).
        tile_m, tile_n: queries and keys of a tile; compile-time.
        seqlen_q, seqlen_k: at least 1.
        mask: "full", "causal" or "local"; compile-time. window_left, window_right: read by "local" only.
    Returns: a QueryRange. A tile that no query sees still gets one tile of queries (masked to nothing), so that a
        kernel needs no second path: its gradients come out as 0. For a tile with keys beyond the sequence, all tiles
        of queries are in [begin, inner_begin).
    Cost: about 20 integer instructions a tile. Source: visibility rule of docs/formats.md section 1, solved for the
        query.
    """
    num_m_blocks = ceil_div(seqlen_q, tile_m)
    first_key, past_key = n_block * tile_n, (n_block + 1) * tile_n
    is_partial = past_key > seqlen_k
    if mask == FULL:
        return QueryRange(
            begin=0, inner_begin=select(is_partial, num_m_blocks, 0), inner_end=num_m_blocks, end=num_m_blocks
        )
    offset = seqlen_k - seqlen_q
    right = 0 if mask == CAUSAL else window_right
    # Query q sees key k iff k - offset - right <= q <= k - offset + left. Clamped at zero before every division.
    begin = minimum(maximum(first_key - offset - right, 0) // tile_m, num_m_blocks - 1)
    end = num_m_blocks
    if mask != CAUSAL:
        past_query = minimum(past_key, seqlen_k) - offset + window_left
        end = maximum(minimum(num_m_blocks, ceil_div(maximum(past_query, 0), tile_m)), begin + 1)
    inner_begin = minimum(maximum(ceil_div(maximum(past_key - 1 - offset - right, 0), tile_m), begin), end)
    inner_end = end
    if mask != CAUSAL:
        inner_end = minimum(maximum(first_key - offset + window_left + 1, 0) // tile_m, end)
    inner_begin = select(is_partial, end, inner_begin)
    inner_end = maximum(inner_end, inner_begin)
    return QueryRange(begin=begin, inner_begin=inner_begin, inner_end=inner_end, end=end)
