"""Tiles of packed sequences: which tile of queries, key head and sequence a thread block takes.

The query heads of a key head are packed: a tile's rows enumerate (query, head of the group), heads fastest, so one tile
reads its keys once for the whole group, and a single query of a large group fills a tile. Sequence b has
ceil(length_b * group / tile_m) tiles a key head, whole tiles of its own. How many tiles there are in all is known on
the device alone; the host launches `max_tiles` a key head, and surplus thread blocks find nothing.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch

from kernels_src.integers import ceil_div, maximum, minimum, select

WARP = 32
L2_BUDGET_BYTES = 32 * 1024 * 1024  # as scheduling.longest_first: half of L2, since Q and O pass through as well


class PackedTile(NamedTuple):
    """is_valid: whether there is such a tile; the others are 0 if not. m_block: tile of packed query rows within the
    sequence; kv_head; sequence; seqlen_q, first_query: length and first row of the sequence in the query tensor."""

    is_valid: object
    m_block: object
    kv_head: object
    sequence: object
    seqlen_q: object
    first_query: object


def max_tiles(total_rows, batch, tile_m: int):
    """An upper bound of the sum over sequences of ceil(rows / tile_m): every sequence wastes less than one tile."""
    return total_rows // tile_m + batch


def heads_per_group(seqlen_k, kv_bytes_per_key: int, num_kv_heads):
    """How many key heads of a sequence run together, so that their keys and values fit in L2. At least 1.

    Args: kv_bytes_per_key: bytes of K and V of one key of one head. Cost: a 32-bit division.
    """
    fitting = (L2_BUDGET_BYTES // kv_bytes_per_key) // maximum(seqlen_k, 1)
    return maximum(minimum(fitting, num_kv_heads), 1)


def tile_in_sequence(rest, num_m_blocks, num_kv_heads, group_heads, longest_first: bool) -> tuple:
    """(m_block, kv_head) of tile number `rest` of a sequence: group of heads, then query tile, then head.

    Args: rest: in [0, num_m_blocks * num_kv_heads); group_heads: heads that run together, in [1, num_kv_heads];
        longest_first: the last tile of queries comes first, as a causal mask wants it.
    Returns: a bijection onto [0, num_m_blocks) x [0, num_kv_heads). Cost: two divisions.
    """
    group = rest // (group_heads * num_m_blocks)
    rest = rest - group * group_heads * num_m_blocks
    heads_here = minimum(group_heads, num_kv_heads - group * group_heads)
    row = rest // heads_here
    m_block = num_m_blocks - 1 - row if longest_first else row
    return m_block, group * group_heads + rest - row * heads_here


@cute.jit
def sequence_length(cu_seqlens: cute.Tensor, seqused: cute.Tensor, sequence) -> Int32:
    """Rows of a sequence that exist: seqused[sequence] if that tensor has elements, else the distance in cu_seqlens."""
    length = Int32(0)
    if seqused.shape[0] > 0:
        length = seqused[sequence]
    else:
        length = cu_seqlens[sequence + 1] - cu_seqlens[sequence]
    return length


@cute.jit
def find_sequence(index, cu_seqlens_q, seqused_q, batch, group, num_kv_heads, tile_m: cutlass.Constexpr[int]):
    """Finds the sequence that tile number `index` of the launch belongs to.

    Args: index: >= 0, counts the tiles of all key heads of a sequence, then those of the next. group: query heads a key
        head. batch: sequences, any number; they may be empty.
    Returns: (is_valid, sequence, number of the tile within the sequence); the last two are 0 if not valid. The same in
        all lanes. Contract: called by a whole, converged warp; batch * (its tiles) < 2**31.
    Cost: for every 32 sequences one load of their lengths, five shuffles, a vote.
    """
    lane = arch.lane_idx()
    begin, before, found = Int32(0), Int32(0), Int32(-1)
    sequence, rest = Int32(0), Int32(0)
    while (begin < batch) & (found < 0):
        own, tiles = begin + lane, Int32(0)
        if own < batch:
            rows = sequence_length(cu_seqlens_q, seqused_q, own) * group
            tiles = ceil_div(rows, tile_m) * num_kv_heads
        through = tiles
        for step in cutlass.range_constexpr(5):
            lower = arch.shuffle_sync_up(through, 1 << step, mask_and_clamp=0)
            through = select(lane >= (1 << step), through + lower, through)
        # The first lane whose sequences reach beyond the index.
        reached = arch.vote_ballot_sync(before + through > index)
        if reached != 0:
            found = Int32(arch.popc((reached - 1) & ~reached))
            sequence = begin + found
            rest = index - before - arch.shuffle_sync(through - tiles, found)
        before = before + arch.shuffle_sync(through, WARP - 1)
        begin = begin + WARP
    return found >= 0, sequence, rest
