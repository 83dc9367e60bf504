"""Online softmax over blocks of keys, for accumulators that sit in the registers of a warpgroup.

A row is spread over four neighbouring threads. The running maximum is reduced over them at every block, the running sum
only once at the end, since all four scale by the same factor. Scores are raw products q.k; the scale is folded into the
exponent: p = 2^(s * scale_log2 - m * scale_log2), one fused multiply-add and one exponential an element.

Contract: scale_log2 > 0. Scores are finite or -inf. A row whose scores so far are all -inf has maximum -inf, sum 0 and
probabilities 0 (never inf - inf).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute import arch

from kernels_src.softmax import sink
from kernels_src.softmax.conditional_rescaling import keeps_reference

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
_CHAINS = 2  # independent partial maxima and sums a row: two rows give four chains, enough for the 4-cycle latency


def exp2(x):
    """2**x by the exponential unit (ex2.approx.ftz): 2 ulp, results below 2**-126 are 0, 2**-inf = 0."""
    return arch.exp2(x)


def _quad(value, combine):
    for distance in (1, 2):
        value = combine(value, arch.shuffle_sync_bfly(value, offset=distance))
    return value


def _row_maximum(scores_rows, r, start):
    columns = cute.size(scores_rows, mode=[1])
    partial = [arch.fmax(start, scores_rows[r, 0])] + [scores_rows[r, c] for c in range(1, _CHAINS)]
    for i in range(_CHAINS, columns):
        partial[i % _CHAINS] = arch.fmax(partial[i % _CHAINS], scores_rows[r, i])
    maximum = partial[0]
    for c in range(1, _CHAINS):
        maximum = arch.fmax(maximum, partial[c])
    return _quad(maximum, arch.fmax)


def _exponentiate_row(scores_rows, r, scale_log2, offset):
    """Replaces scores by probabilities in place; returns this thread's sum."""
    partial = [Float32(0.0)] * _CHAINS
    for i in range(cute.size(scores_rows, mode=[1])):
        probability = exp2(scores_rows[r, i] * scale_log2 + offset)
        scores_rows[r, i] = probability
        partial[i % _CHAINS] = partial[i % _CHAINS] + probability if i >= _CHAINS else probability
    total = partial[0]
    for c in range(1, _CHAINS):
        total = total + partial[c]
    return total


@cute.jit
def first_step(scores_rows, row_max, row_sum, scale_log2):
    """Starts the rows: scores become probabilities in place, row_max and row_sum (2 each) are set.

    Cost: an element costs one max, one fused multiply-add, one exponential, one add; a row four shuffles.
    """
    for r in cutlass.range_constexpr(2):
        maximum = _row_maximum(scores_rows, r, -Float32.inf)
        row_max[r] = maximum
        finite = Float32(0.0) if maximum == -Float32.inf else maximum
        row_sum[r] = _exponentiate_row(scores_rows, r, scale_log2, -(finite * scale_log2))


@cute.jit
def next_step(
    scores_rows,
    row_max,
    row_sum,
    rescale,
    scale_log2,
    may_be_empty: cutlass.Constexpr[bool],
    threshold: cutlass.Constexpr[float],
):
    """Adds a block: scores become probabilities in place; row_max and row_sum advance; rescale[r] is the factor for O.

    Args: may_be_empty: whether a row may have seen no key yet after this block (masked blocks only). threshold: as in
        conditional_rescaling, in powers of two; 0 = the reference is always the maximum.
    Cost: as first_step, plus one exponential a row.
    """
    for r in cutlass.range_constexpr(2):
        old = row_max[r]
        maximum = _row_maximum(scores_rows, r, old)
        finite = maximum
        if const_expr(may_be_empty):
            finite = Float32(0.0) if maximum == -Float32.inf else maximum
        step_log2 = (old - finite) * scale_log2
        factor = exp2(step_log2)
        if const_expr(threshold > 0.0):
            keeps = keeps_reference(step_log2, threshold)
            factor = Float32(1.0) if keeps else factor
            maximum = old if keeps else maximum
            finite = old if keeps else finite
        row_max[r] = maximum
        rescale[r] = factor
        block_sum = _exponentiate_row(scores_rows, r, scale_log2, -(finite * scale_log2))
        row_sum[r] = row_sum[r] * factor + block_sum


def needs_rescale(rescale):
    """Whether any row of the calling warp has a factor other than 1. Contract: called by whole warps."""
    return arch.vote_any_sync((rescale[0] != 1.0) | (rescale[1] != 1.0))


@cute.jit
def rescale_output(output_rows, rescale, is_needed):
    """Multiplies O by the factors of next_step if `is_needed`, which is the same in a whole warp."""
    if is_needed:
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(cute.size(output_rows, mode=[1])):
                output_rows[r, i] = output_rows[r, i] * rescale[r]


@cute.jit
def finish(output_rows, row_max, row_sum, lse, softmax_scale, sinks=None):
    """Normalises O and gives lse[r] = ln sum exp(scale * s), natural log; an empty row gets O = 0 and -inf.

    Args: sinks: one logit for each of the two rows that joins the sum and has no value, or None.
    Cost: one reciprocal, one logarithm and two shuffles a row, a multiplication an element of O.
    """
    for r in cutlass.range_constexpr(2):
        total = _quad(row_sum[r], lambda a, b: a + b)
        if const_expr(sinks is None):
            is_empty = total == 0.0
            inverse = Float32(0.0) if is_empty else arch.rcp_approx(total)
            logarithm = cute.math.log2(total, fastmath=True) * LN_2
            lse[r] = -Float32.inf if is_empty else row_max[r] * softmax_scale + logarithm
        else:
            reference_log2, total, factor = sink.join(row_max[r] * softmax_scale * LOG2_E, total, sinks[r] * LOG2_E)
            is_empty = total == 0.0
            inverse = Float32(0.0) if is_empty else arch.rcp_approx(total) * factor
            logarithm = reference_log2 + cute.math.log2(total, fastmath=True)
            lse[r] = -Float32.inf if is_empty else logarithm * LN_2
        for i in cutlass.range_constexpr(cute.size(output_rows, mode=[1])):
            output_rows[r, i] = output_rows[r, i] * inverse
