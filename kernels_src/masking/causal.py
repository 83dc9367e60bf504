"""Causal visibility, aligned to the bottom right corner of the scores. Rows only; for blocks see block_range."""


def visible_end(row, seqlen_q, seqlen_k):
    """One past the last key that query `row` may see.

    Args: row: query index in [0, seqlen_q); rows beyond it give harmless values.
    Returns: an integer that may be <= 0 (the row sees nothing) and is at most seqlen_k for a row inside the sequence.
    Cost: two integer additions a row and tile.
    Source: docs/formats.md section 1 (window_right = 0).
    """
    return row + (seqlen_k - seqlen_q) + 1
