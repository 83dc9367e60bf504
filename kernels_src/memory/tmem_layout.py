"""Which tensor-memory columns hold what.

Tensor memory is 128 lanes by 512 columns of 32 bits a CTA (PTX ISA 9.7.16.1). Pure integers: runs as ordinary Python.
"""

from dataclasses import dataclass

TMEM_COLUMNS = 512


@dataclass(frozen=True)
class ForwardTmem:
    """Column of the first score, probability and output accumulator of each Q tile of the forward kernel.

    Attributes:
        scores: S tiles, fp32, `tile_n` columns each.
        probabilities: P tiles in the input type, over the upper half of their S tile: a softmax thread holds its whole
            row of S in registers before it stores the first P.
        outputs: O accumulators, fp32, `head_dim_v` columns each.
        num_columns: columns to allocate, a power of two.
    """

    scores: tuple
    probabilities: tuple
    outputs: tuple
    num_columns: int


def forward_tmem(num_q_tiles: int, tile_n: int, head_dim_v: int) -> ForwardTmem:
    """Plan the columns of a forward kernel.

    Args:
        num_q_tiles: Q tiles of 128 rows in flight in a CTA, 1 or 2.
        tile_n: keys a block; head_dim_v: columns of O.
    Raises: ValueError when S and O tiles do not fit 512 columns.
    """
    scores = tuple(i * tile_n for i in range(num_q_tiles))
    first_output = num_q_tiles * tile_n
    outputs = tuple(first_output + i * head_dim_v for i in range(num_q_tiles))
    used = first_output + num_q_tiles * head_dim_v
    if used > TMEM_COLUMNS:
        raise ValueError(
            f"{num_q_tiles} Q tiles with tile_n {tile_n} and head_dim_v {head_dim_v} need {used} tensor-memory columns, "
            f"there are {TMEM_COLUMNS}: use fewer Q tiles"
        )
    return ForwardTmem(
        scores=scores,
        probabilities=tuple(s + tile_n // 2 for s in scores),
        outputs=outputs,
        num_columns=max(32, 1 << (used - 1).bit_length()),
    )
