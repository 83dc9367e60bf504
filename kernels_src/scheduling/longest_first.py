"""Longest tiles first, for causal masks: the last tile of queries sees the most keys.

Handing out long tiles first leaves the short ones to fill the end (the LPT rule of list scheduling). Running over all
heads before the next shorter tile would stream every head's keys through L2 at once, so heads are taken in groups whose
keys and values fit in L2 together, longest first within a group.
"""

from kernels_src.integers import maximum, minimum, select
from kernels_src.scheduling.work_tile import WorkTile, decode_head

# Of two tiles a CTA takes, one start-up and one epilogue are hidden, and the hardware still balances the CTAs. On an
# H200, head_dim 128: 7 % faster at 1k keys, 3 % at 4k, 1 % slower at 16k; three are slower at 4k and 16k.
TILES_PER_CTA = 2
L2_BUDGET_BYTES = 32 * 1024 * 1024  # about half of the 50 to 60 MB of H100 and H200: Q and O pass through as well


def heads_per_group(kv_bytes_per_head, num_heads_q, num_heads_kv, num_batches):
    """How many query heads run together.

    Args: kv_bytes_per_head: bytes of K and V of one key head of one sequence (64 bit: it passes 2**31 at long
    sequences).
    Returns: a multiple of the query heads per key head, at least that many, at most num_heads_q * num_batches.
    Cost: one 64-bit division on the host a launch.
    """
    ratio = num_heads_q // num_heads_kv
    kv_heads = maximum(L2_BUDGET_BYTES // kv_bytes_per_head, 1)
    return ratio * minimum(kv_heads, num_heads_kv * num_batches)


def tile_at(index, num_m_blocks, num_heads, group_heads, group_tiles, last_group, last_group_heads) -> WorkTile:
    """Tile number `index` of the order "group, then longest query tile, then head".

    Args:
        num_m_blocks: query tiles of a sequence (a plain integer).
        num_heads, group_heads, group_tiles, last_group_heads: ints, or fast divisors in device code; group_tiles =
            group_heads * num_m_blocks, last_group_heads = heads * batches - last_group * group_heads, in [1,
            group_heads].
        last_group: index of the last, possibly smaller, group (a plain integer).
    Cost: four fast divisions a tile (about 30 integer instructions).
    """
    group, rest = divmod(index, group_tiles)
    reversed_full, head_full = divmod(rest, group_heads)
    reversed_last, head_last = divmod(rest, last_group_heads)
    is_last = group == last_group
    head_in_group = select(is_last, head_last, head_full)
    m_block = num_m_blocks - 1 - select(is_last, reversed_last, reversed_full)
    head, batch = decode_head(group * heads_of(group_heads) + head_in_group, num_heads)
    return WorkTile(m_block=m_block, head=head, batch=batch)


def heads_of(group_heads):
    """The plain integer behind `group_heads` (a fast divisor carries it)."""
    return group_heads if isinstance(group_heads, int) else group_heads.divisor
