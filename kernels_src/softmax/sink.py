"""Attention sink: one more logit a row that takes part in the softmax sum and in the log-sum-exp, and has no value.

It joins once, when a row's sum is complete. The larger of row reference and sink becomes the new reference, so no power
of two overflows, whatever the sink: a huge one drives the output to 0, a very negative one changes nothing.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import arch

LARGEST = 3.0e38  # a sink times log2 e may overflow; inf - inf would be NaN


@cute.jit
def join(reference_log2: Float32, row_sum: Float32, sink_log2: Float32):
    """The row with its sink: (reference_log2, row_sum, factor for the unnormalised output).

    Args:
        reference_log2: log2 of the unit that row_sum and output are counted in; -inf if no key was seen.
        row_sum: sum of 2^(score_log2 - reference_log2); 0 if no key was seen.
        sink_log2: the sink times log2 e.
    Returns: the output is O * factor / row_sum, the log-sum-exp (reference_log2 + log2 row_sum) ln 2. A row that saw no
        key: factor 0, row_sum 1, log-sum-exp = sink. No key and a sink of -inf: row_sum 0.
    Cost: two exponentials a row, a maximum, a minimum, one fused multiply-add.
    """
    sink_log2 = arch.fmin(sink_log2, Float32(LARGEST))
    joined = arch.fmax(reference_log2, sink_log2)
    joined = Float32(0.0) if joined == -Float32.inf else joined
    factor = arch.exp2(reference_log2 - joined)
    return joined, row_sum * factor + arch.exp2(sink_log2 - joined), factor
