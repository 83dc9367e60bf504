"""A fixed share of the tiles for every CTA: CTA c takes tiles c, c + num_ctas, c + 2 num_ctas, ...

The copy warp of a CTA runs ahead into the next tile while the others finish the last, so start-up and epilogue overlap.
With one CTA per multiprocessor, for masks that give every tile the same work. Shares of unequal tiles are not balanced
(causal, head_dim 128, 4096 keys, 132 CTAs: the fullest has 1.2 times the mean); there, more CTAs with a few tiles each
leave the balancing to the hardware.
"""

from kernels_src.integers import ceil_div


def num_tiles_of(cta, num_ctas, num_tiles):
    """How many tiles CTA `cta` takes, 0 or more. Sums to num_tiles over all CTAs.

    Args: cta: in [0, num_ctas); num_ctas >= 1. Cost: one division by a runtime value a CTA.
    """
    return ceil_div(num_tiles - cta, num_ctas)


def index_at(round_, cta, num_ctas):
    """Index of the tile that `cta` takes in round `round_` (0, 1, ...). Cost: one integer instruction."""
    return round_ * num_ctas + cta
