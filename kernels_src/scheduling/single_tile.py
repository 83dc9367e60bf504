"""Tiles in natural order: query tiles fastest, then heads, then sequences.

CTAs that run together then read the keys and values of one head, which stay in L2. For masks that give every tile about
the same work; otherwise longest_first.
"""

from kernels_src.scheduling.work_tile import WorkTile, decode_head


def tile_at(index, num_m_blocks, num_heads) -> WorkTile:
    """Tile number `index`, 0 <= index < num_m_blocks * num_heads * num_batches.

    Args: num_m_blocks, num_heads: ints, or fast divisors in device code.
    Cost: two fast divisions a tile (about 14 integer instructions).
    """
    head_batch, m_block = divmod(index, num_m_blocks)
    head, batch = decode_head(head_batch, num_heads)
    return WorkTile(m_block=m_block, head=head, batch=batch)
