"""What a scheduler hands out: one tile of queries of one head of one sequence.

A schedule is two pure functions: how many tiles a CTA takes, and which tile its n-th is. Both run on the host.
"""

from typing import NamedTuple


class WorkTile(NamedTuple):
    """m_block: tile of queries; head: query head; batch: sequence."""

    m_block: object
    head: object
    batch: object


def decode_head(head_batch, num_heads) -> tuple:
    """(head, batch) of a flat index that counts heads fastest. `num_heads`: an int or a fast divisor."""
    batch, head = divmod(head_batch, num_heads)
    return head, batch
