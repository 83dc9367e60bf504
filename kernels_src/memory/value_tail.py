"""Zeros in place of the values beyond a sequence's end.

Their probabilities are 0, but the memory behind a packed sequence belongs to another one or to nobody, and 0 * NaN is
NaN. (Scores of keys beyond the end are replaced by -inf, whatever they are, so keys need nothing.)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch

from kernels_src.memory.swizzled_rows import PIECE, swizzle_bytes


@cute.jit
def zero_rows(
    shared_address,
    first_row,
    lane,
    rows: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
    lanes: cutlass.Constexpr[int],
):
    """Zeros to rows first_row .. rows - 1 of a swizzled tile of 16-bit elements. `first_row` in [0, rows].

    Whole rows, so the permutation within a row does not matter. Contract: `lanes` neighbouring lanes call it when the
    copy that filled the tile is known to be complete; the caller fences the async proxy before it signals.
    Cost: one 16-byte store for 8 elements.
    """
    width = swizzle_bytes(columns)
    pieces = width // PIECE
    count = (rows - first_row) * pieces
    for chunk in cutlass.range_constexpr(2 * columns // width):
        start = shared_address + chunk * rows * width + first_row * width
        for index in cutlass.range(lane, count, lanes, unroll=1):
            arch.inline_ptx(
                "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [{$r0}], {z, z, z, z}; }",
                read_only_args=[Int32(start + index * PIECE)],
            )
