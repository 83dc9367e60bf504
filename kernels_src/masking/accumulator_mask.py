"""Applies visibility limits to a score accumulator in registers.

Cost: two instructions an element and edge (compare with a constant, select), on edge blocks only.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from kernels_src.mma.wgmma import column_offset


@cute.jit
def mask_columns(scores_rows, begins, ends, has_begin: cutlass.Constexpr[bool], has_end: cutlass.Constexpr[bool]):
    """Sets scores outside [begin, end) to -inf.

    Args:
        scores_rows: rows_view of the accumulator, in place.
        begins, ends: for each of the two rows, the limit minus the first column of this thread (so that an element is
            compared with its constant offset). An unused one may be anything.
    """
    for r in cutlass.range_constexpr(cute.size(scores_rows, mode=[0])):
        for i in cutlass.range_constexpr(cute.size(scores_rows, mode=[1])):
            value = scores_rows[r, i]
            if cutlass.const_expr(has_end):
                value = -Float32.inf if column_offset(i) >= ends[r] else value
            if cutlass.const_expr(has_begin):
                value = -Float32.inf if column_offset(i) < begins[r] else value
            scores_rows[r, i] = value
