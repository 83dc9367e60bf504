"""Visibility at the end of the key sequence, for variants with no other mask."""


def visible_end(seqlen_k):
    """One past the last key any query may see. Rows of K beyond it are zeros (the copy engine fills them), so scores
    there are 0 and must be masked: they would weigh exp(0 - max).

    Cost: none a row; the comparison runs in the last block alone (`block_range`).
    """
    return seqlen_k
