"""Sliding-window visibility, aligned to the bottom right corner. Rows only; which blocks need it: block_range.

Contract: |window| <= 2**30 and seqlen_q + seqlen_k <= 2**30, so that no sum overflows 32 bits. Negative windows are
real offsets (`window_right = -3`: only keys at least three before the diagonal).
"""

from kernels_src.integers import minimum


def visible_begin(row, seqlen_q, seqlen_k, window_left):
    """First key that query `row` may see; may be negative or beyond the last key.

    Cost: two integer additions a row and tile. Source: docs/formats.md section 1.
    """
    return row + (seqlen_k - seqlen_q) - window_left


def visible_end(row, seqlen_q, seqlen_k, window_right):
    """One past the last key that query `row` may see; at most seqlen_k, may be negative.

    Cost: three integer additions and a minimum a row and tile. Source: docs/formats.md section 1.
    """
    return minimum(row + (seqlen_k - seqlen_q) + window_right + 1, seqlen_k)
