"""Which of a tile's key blocks one split visits, when the keys of a tile are divided over several thread blocks.

Whole blocks, in contiguous shares whose sizes differ by at most one. Integers only: runs on the host and in a kernel.
"""

from kernels_src.integers import maximum, minimum
from kernels_src.masking.block_range import BlockRange


def split_share(blocks: BlockRange, split, num_splits) -> BlockRange:
    """The part of `blocks` that split number `split` visits; which blocks need which mask stays as it was.

    Args:
        blocks: of the tile, begin < end. split: in [0, num_splits).
        num_splits: at least 1; an int, or a fast divisor in device code.
    Returns: a BlockRange whose begin may be its end: that split has nothing to do. Shares are disjoint and cover
        `blocks` in order. Block end - 1 of a share is masked with everything, which changes nothing where no mask is
        needed.
    Contract: (end - begin) * num_splits < 2**31. Cost: two divisions by `num_splits`, about ten integer instructions.
    """
    count = blocks.end - blocks.begin
    begin = blocks.begin + count * split // num_splits
    end = blocks.begin + count * (split + 1) // num_splits
    inner_end = maximum(minimum(blocks.inner_end, end - 1), begin)
    inner_begin = maximum(minimum(blocks.inner_begin, inner_end), begin)
    return BlockRange(begin=begin, inner_begin=inner_begin, inner_end=inner_end, end=end)
