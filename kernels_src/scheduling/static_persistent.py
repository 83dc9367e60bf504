"""A fixed share of the tiles for every CTA: as many CTAs as multiprocessors, each taking tiles at a constant stride.

The copy warp of a CTA runs ahead into the next tile while the others finish the last, so start-up and epilogue overlap.
Rounds alternate direction ("snake"): with tiles sorted by length, whoever got the longest of one round gets the shortest of
the next, and the shares come out equal to within about one tile's step.
"""

from kernels_src.integers import select


def num_tiles_of(cta, num_ctas, num_tiles):
    """How many tiles CTA `cta` takes. Sums to num_tiles over all CTAs.

    Args: cta: in [0, num_ctas); num_ctas: in [1, num_tiles]. Cost: one division by a runtime value a CTA.
    """
    full_rounds = num_tiles // num_ctas
    rest = num_tiles - full_rounds * num_ctas
    return full_rounds + select(_place(full_rounds, cta, num_ctas) < rest, 1, 0)


def index_at(round_, cta, num_ctas):
    """Index of the tile that `cta` takes in round `round_` (0, 1, ...). Cost: five integer instructions."""
    return round_ * num_ctas + _place(round_, cta, num_ctas)


def _place(round_, cta, num_ctas):
    return select((round_ & 1) == 0, cta, num_ctas - 1 - cta)
