"""Backward softmax: probabilities from stored statistics, and gradients of the scores, on transposed scores.

Rows of the accumulators are keys, columns are queries, so the statistics of a query belong to a column. A thread needs
those of its own columns, pairs that are 8 apart, and reads them from shared memory as it goes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import arch

from kernels_src.mma.wgmma import rounded_pair
from kernels_src.softmax.online_softmax import exp2


def _of_columns(statistics, column):
    """The statistics of the calling thread's columns: (pair, one of the two) in registers."""
    pairs = cute.size(statistics) // 8
    pointer = (statistics.iterator + column).align(8)
    source = cute.make_tensor(pointer, cute.make_layout((2, pairs), stride=(1, 8)))
    values = cute.make_rmem_tensor((2, pairs), Float32)
    for pair in range(pairs):
        cute.autovec_copy(source[None, pair], values[None, pair])
    return values


@cute.jit
def probabilities(scores_rows, lse_log2, column, scale_log2):
    """Scores become probabilities in place: p = 2^(s * scale_log2 - lse_log2).

    Args: scores_rows: rows_view of S^T; lse_log2: of the tile's queries, shared memory, +inf for a query that sees
    nothing; column: the thread's first.
    Cost: one fused multiply-add and one exponential an element, one 8-byte load for four elements.
    """
    lse = _of_columns(lse_log2, column)
    for i in cutlass.range_constexpr(cute.size(scores_rows, mode=[1])):
        for r in cutlass.range_constexpr(2):
            scores_rows[r, i] = exp2(scores_rows[r, i] * scale_log2 - lse[i % 2, i // 2])


@cute.jit
def capped_probabilities(scores, operand, lse_log2, column, softcap_log2, dtype: cutlass.Constexpr):
    """P under a soft cap to the operand, and P times the cap's derivative in place of the scores.

    Args: scores: accumulator S^T of t = tanh(score / softcap), -inf where hidden; operand: of a next product, 16-bit
    pairs in the accumulator's order, or None; softcap_log2: softcap * log2 e; lse_log2, column: as `probabilities`.
    Cost: as `probabilities`, and a maximum, a fused multiply-add and a multiplication an element.
    """
    lse = _of_columns(lse_log2, column)
    packed = None if cutlass.const_expr(operand is None) else cute.recast_tensor(operand, cutlass.Int32)
    for i in cutlass.range_constexpr(cute.size(scores) // 2):
        capped = (scores[2 * i], scores[2 * i + 1])
        weights = [exp2(capped[j] * softcap_log2 - lse[j, i // 2]) for j in range(2)]
        if cutlass.const_expr(operand is not None):
            packed[i] = rounded_pair(*weights, dtype)
        for j in cutlass.range_constexpr(2):
            scores[2 * i + j] = _damped(weights[j], capped[j])


def _damped(weight, capped):
    """weight * (1 - t^2). Volatile assembly holds its place: moved behind the exponentials of other elements it would
    keep t and P of them all (seen as spills with dsl 4.8.1)."""
    code = (
        "{ .reg .f32 t, u; max.f32 t, {$r1}, 0fBF800000; neg.f32 u, t; "
        "fma.rn.f32 u, u, t, 0f3F800000; mul.rn.f32 {$w0}, {$r0}, u; }"
    )
    return arch.inline_ptx(code, write_only_types=[Float32], read_only_args=[weight, capped])


@cute.jit
def score_gradients(probabilities_rows, dprobabilities_rows, dpsum, column):
    """dP becomes dS (without the scale) in place: ds = p * (dp - dpsum).

    Args: both rows_views of transposed accumulators; dpsum: of the tile's queries, shared memory.
    Cost: a subtraction and a multiplication an element, one 8-byte load for four elements.
    """
    sums = _of_columns(dpsum, column)
    for i in cutlass.range_constexpr(cute.size(probabilities_rows, mode=[1])):
        for r in cutlass.range_constexpr(2):
            difference = dprobabilities_rows[r, i] - sums[i % 2, i // 2]
            dprobabilities_rows[r, i] = probabilities_rows[r, i] * difference
