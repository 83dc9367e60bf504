"""Whole tiles of packed sequences in the backward's workspaces: where a sequence's begin, and whose a tile is.

Sequence b begins at row (cu_seqlens[b] + 128 b) / 128 * 128, so every sequence has ceil(length / 128) tiles of its own
and at least one, an empty one too: its keys still get their gradients, zeros, from a tile of queries that do not exist.
Source: docs/formats.md section 1.
"""

import cutlass.cute as cute
from cutlass import Int32

TILE = 128


def first_tile(cu_seqlen, sequence):
    """Number of the first tile of a sequence. Args: cu_seqlen: cu_seqlens[sequence]. Integers of host or device."""
    return (cu_seqlen + TILE * sequence) // TILE


def num_tiles(total_rows, batch):
    """Tiles of all sequences together, spare ones included."""
    return first_tile(total_rows, batch)


@cute.jit
def sequence_of(tile, cu_seqlens: cute.Tensor):
    """(sequence, number of the tile within it). Tiles behind the last row of a sequence belong to it as well.

    Args: tile: in [0, num_tiles). cu_seqlens: (batch + 1), not falling, batch at least 1.
    Cost: log2(batch) loads, one after the other.
    """
    low, high = Int32(0), Int32(cu_seqlens.shape[0] - 1)
    while high - low > 1:
        middle = (low + high) // 2
        if first_tile(cu_seqlens[middle], middle) <= tile:
            low = middle
        else:
            high = middle
    return low, tile - first_tile(cu_seqlens[low], low)
