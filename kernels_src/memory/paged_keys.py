"""Where the keys of a block lie in a paged cache. Keys are copied in boxes of 16 rows, which never cross a page if the
page size is a multiple of 16. Integers only: runs on the host and in a kernel.
"""

from kernels_src.integers import maximum, minimum

BOX_ROWS = 16


def fits_boxes(page_size):
    """Whether no box crosses a page of this size."""
    return page_size % BOX_ROWS == 0


def box_start(block, box, *, tile_n: int, seqlen_k):
    """First key of box number `box` of a block, in the sequence: for boxes beyond the last key, that of the last box
    that holds one, so that no entry of the page table behind the used ones is read.

    Args: box: 0 .. tile_n / BOX_ROWS - 1. seqlen_k: >= 0; with 0 keys the first box of the first page is named.
    Cost: four integer instructions.
    """
    last = maximum(seqlen_k - 1, 0) // BOX_ROWS * BOX_ROWS
    return minimum(block * tile_n + box * BOX_ROWS, last)


def place_of(key, by_page_size) -> tuple:
    """(entry of the page table, row within the page) of a key; `by_page_size`: an int or a fast divisor."""
    return divmod(key, by_page_size)
