"""Softmax of a score row that one thread holds entirely, as on Blackwell: no exchange between threads.

Registers: one row of `tile_n` fp32 scores, overwritten by its probabilities. Traced into the softmax warps.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import arch

from kernels_src.softmax.conditional_rescaling import keeps_reference
from kernels_src.softmax.exp2_emulation import exp2_emulated_pair, is_emulated

FRAGMENT = 32  # columns a tensor-memory load or store moves at a time


@cute.jit
def mask_row(scores, begin, end, has_begin: cutlass.Constexpr[bool], has_end: cutlass.Constexpr[bool]):
    """Sets scores whose column is outside [begin, end) to -inf. Cost: 2 instructions a column and edge."""
    for i in cutlass.range_constexpr(cute.size(scores)):
        if cutlass.const_expr(has_end):
            scores[i] = -Float32.inf if Int32(i) >= end else scores[i]
        if cutlass.const_expr(has_begin):
            scores[i] = -Float32.inf if Int32(i) < begin else scores[i]


@cute.jit
def row_max(scores) -> Float32:
    """Largest score. Four chains, so that the latency of one is hidden by the others; the assembler fuses pairs into
    three-input maxima on SM100. Cost: tile_n / 2 instructions there."""
    chains = [scores[i] for i in range(4)]
    for i in cutlass.range_constexpr(4, cute.size(scores), 8):
        for chain in cutlass.range_constexpr(4):
            chains[chain] = arch.fmax(chains[chain], scores[i + chain])
            if cutlass.const_expr(i + chain + 4 < cute.size(scores)):
                chains[chain] = arch.fmax(chains[chain], scores[i + chain + 4])
    return arch.fmax(arch.fmax(chains[0], chains[1]), arch.fmax(chains[2], chains[3]))


@cute.jit
def update_max(old_max: Float32, block_max: Float32, scale_log2: Float32, threshold: cutlass.Constexpr[float]):
    """New reference point of a row and the factor for what was summed under the old one.

    Args:
        old_max: reference so far; -inf before the first block, or when every key so far was hidden.
        block_max: largest score of this block, unscaled; -inf if all are hidden.
        scale_log2: softmax scale times log2(e), positive.
        threshold: keep the old reference while the maximum has risen by at most this much, log2 units (0: never).
    Returns: (new reference, factor). The factor is 1 when the reference is kept.
    """
    new_max = arch.fmax(old_max, block_max)
    safe_max = Float32(0.0) if new_max == -Float32.inf else new_max
    step_log2 = (old_max - safe_max) * scale_log2
    factor = arch.exp2(step_log2)
    if cutlass.const_expr(threshold > 0):
        keeps = keeps_reference(step_log2, threshold)
        new_max = old_max if keeps else new_max
        factor = Float32(1.0) if keeps else factor
    return new_max, factor


@cute.jit
def probabilities(
    scores,
    begin: cutlass.Constexpr[int],
    end: cutlass.Constexpr[int],
    reference_log2: Float32,
    scale_log2: Float32,
    frequency: cutlass.Constexpr[int],
    first_fragment: cutlass.Constexpr[int],
):
    """scores[begin:end] = 2^(score * scale_log2 - reference_log2), in place.

    Args:
        reference_log2: reference point times scale_log2, minus the offset of the probability type.
        frequency, first_fragment: which columns take the FMA pipe, see `exp2_emulation.is_emulated`.
    """
    for i in cutlass.range_constexpr(begin, end, 2):
        x0, x1 = arch.fma_packed_f32x2(
            (scores[i], scores[i + 1]), (scale_log2, scale_log2), (-reference_log2, -reference_log2)
        )
        if cutlass.const_expr(is_emulated(i, frequency, first_fragment)):
            scores[i], scores[i + 1] = exp2_emulated_pair(x0, x1)
        else:
            scores[i] = arch.exp2(x0)
            scores[i + 1] = arch.exp2(x1)


SUM_CHAINS = 4  # of packed pairs: the latency of one addition is hidden by the others


def add_to_sums(sums, values, begin: int, end: int):
    """Four packed sums and columns [begin, end) of a row of fp32 probabilities; begins them with sums None.

    Pairs go to the chains in turn, so the order of additions, and with it the bits, does not depend on where the row
    is cut. begin, end: multiples of 8.
    """
    pairs = [(values[i], values[i + 1]) for i in range(begin, end, 2)]
    if sums is None:
        sums, pairs = pairs[:SUM_CHAINS], pairs[SUM_CHAINS:]
    sums = list(sums)
    for number, pair in enumerate(pairs):
        sums[number % SUM_CHAINS] = arch.add_packed_f32x2(sums[number % SUM_CHAINS], pair)
    return sums


def total_of(sums) -> Float32:
    """The sum of `add_to_sums`."""
    low, high = arch.add_packed_f32x2(sums[0], sums[1]), arch.add_packed_f32x2(sums[2], sums[3])
    total = arch.add_packed_f32x2(low, high)
    return total[0] + total[1]
