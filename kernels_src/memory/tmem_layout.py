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


def forward_tmem(num_q_tiles: int, tile_n: int, head_dim_v: int, num_scores: int = 0) -> ForwardTmem:
    """Plan the columns of a forward kernel.

    Args:
        num_q_tiles: Q tiles of 128 rows in flight in a CTA, 1 or 2.
        tile_n: keys a block; head_dim_v: columns of O.
        num_scores: S tiles, if not one for each Q tile.
    Raises: ValueError when S and O tiles do not fit 512 columns.
    """
    num_scores = num_scores or num_q_tiles
    scores = tuple(i * tile_n for i in range(num_scores))
    first_output = num_scores * tile_n
    outputs = tuple(first_output + i * head_dim_v for i in range(num_q_tiles))
    used = first_output + num_q_tiles * head_dim_v
    if used > TMEM_COLUMNS:
        raise ValueError(
            f"{num_q_tiles} Q tiles, tile_n {tile_n} and head_dim_v {head_dim_v} need {used} columns of tensor memory, "
            f"there are {TMEM_COLUMNS}: use fewer Q tiles"
        )
    return ForwardTmem(
        scores=scores,
        probabilities=tuple(s + tile_n // 2 for s in scores),
        outputs=outputs,
        num_columns=max(32, 1 << (used - 1).bit_length()),
    )


@dataclass(frozen=True)
class BackwardTmem:
    """Columns of the backward kernel, keys along the lanes except for dQ (queries along the lanes).

    Attributes:
        scores: S^T, fp32, tile_m columns; each half of its columns is overwritten by the same queries' P^T in the input
            type, which takes the first half of that half.
        dprobabilities: dP^T, fp32, tile_m columns; overwritten by dS^T in the same way.
        dv, dk: accumulators, fp32.
        dq: dQ of one tile of queries, fp32, head_dim columns; where there is room on its own, else over dP^T.
        has_own_dq: whether dQ has columns of its own.
        num_columns: columns to allocate, a power of two.
    """

    scores: int
    dprobabilities: int
    dv: int
    dk: int
    dq: int
    has_own_dq: bool
    num_columns: int


def backward_tmem(tile_m: int, head_dim: int, head_dim_v: int) -> BackwardTmem:
    """Plan the columns of a backward kernel with 128 keys a CTA.

    Args:
        tile_m: queries a tile; head_dim, head_dim_v: columns of dQ and dK, and of dV.
    Raises: ValueError when S, dP, dK and dV do not fit 512 columns.
    """
    dv = tile_m
    dprobabilities = dv + head_dim_v
    dk = dprobabilities + max(tile_m, head_dim)
    used = dk + head_dim
    if used > TMEM_COLUMNS:
        raise ValueError(
            f"head_dim {head_dim} and head_dim_v {head_dim_v} need {used} tensor-memory columns, there are "
            f"{TMEM_COLUMNS}: use two CTAs"
        )
    has_own_dq = used + head_dim <= TMEM_COLUMNS
    used += head_dim if has_own_dq else 0
    return BackwardTmem(
        scores=0,
        dprobabilities=dprobabilities,
        dv=dv,
        dk=dk,
        dq=used - head_dim if has_own_dq else dprobabilities,
        has_own_dq=has_own_dq,
        num_columns=max(32, 1 << (used - 1).bit_length()),
    )


def wide_backward_tmem(tile_m: int, head_dim: int, head_dim_v: int) -> BackwardTmem:
    """Plan the columns of a backward kernel with two CTAs of 128 keys each, which does one product after the other.

    dP begins where the first half of S ends: P takes that half, once all of S is in registers. dQ, of which a CTA has
    half of the queries and so head_dim / 2 columns, lies at the end, over dP and the end of S.
    Raises: ValueError when the accumulators and one and a half times tile_m columns do not fit 512 columns.
    """
    dk = head_dim_v
    scores = dk + head_dim
    dprobabilities = scores + tile_m // 2
    used = dprobabilities + tile_m
    if used > TMEM_COLUMNS:
        raise ValueError(
            f"head_dim {head_dim} and head_dim_v {head_dim_v} need {used} tensor-memory columns, there are "
            f"{TMEM_COLUMNS}"
        )
    return BackwardTmem(
        scores=scores,
        dprobabilities=dprobabilities,
        dv=0,
        dk=dk,
        dq=used - head_dim // 2,
        has_own_dq=False,
        num_columns=max(32, 1 << (used - 1).bit_length()),
    )
