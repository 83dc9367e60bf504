"""Probabilities and score gradients of the backward pass, for a thread that holds one key's scores of many queries.

Scores are transposed: a thread owns a key, its columns are queries, so the per-query values (lse_log2, dpsum) differ
from column to column and come from shared memory; all threads of a warp read the same address, one access for the warp.
Exponentials are native: the backward pass is bound by shared memory, not by the exponential unit.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import arch

VECTOR = 4  # per-query values a 16-byte shared load brings


@cute.jit
def _per_query(vector, piece: cutlass.Constexpr[int]):
    """Four neighbouring per-query values."""
    values = cute.make_rmem_tensor((VECTOR,), Float32)
    cute.autovec_copy(cute.local_tile(vector, (VECTOR,), (piece,)), values)
    return values


@cute.jit
def probabilities(scores, lse_log2, negative_scale_log2: Float32):
    """scores = 2^(score * scale_log2 - lse_log2), in place.

    Args:
        scores: unscaled scores of one key, -inf where hidden; a multiple of 4.
        lse_log2: shared-memory vector over the same queries; +inf gives 0.
        negative_scale_log2: -(softmax scale times log2 e). The exponent is formed negated, since the exponential unit
            negates its operand for free and the multiply-add would need the negated lse.
    Cost: half a packed multiply-add and one exponential a score, a quarter of a shared load.
    """
    for piece in cutlass.range_constexpr(cute.size(scores) // VECTOR):
        lse = _per_query(lse_log2, piece)
        for j in cutlass.range_constexpr(0, VECTOR, 2):
            i = piece * VECTOR + j
            x0, x1 = arch.fma_packed_f32x2(
                (scores[i], scores[i + 1]), (negative_scale_log2, negative_scale_log2), (lse[j], lse[j + 1])
            )
            scores[i] = arch.exp2(-x0)
            scores[i + 1] = arch.exp2(-x1)


@cute.jit
def score_gradients(dprobabilities, weights, dpsum):
    """dprobabilities = weights * (dprobabilities - dpsum), in place: dS without the softmax scale.

    Args:
        dprobabilities: dP of one key for a few queries, a multiple of 4.
        weights: P of the same, in float32.
        dpsum: shared-memory vector over the same queries.
    Cost: one packed operation a score, a quarter of a shared load.
    """
    for piece in cutlass.range_constexpr(cute.size(dprobabilities) // VECTOR):
        sums = _per_query(dpsum, piece)
        for j in cutlass.range_constexpr(0, VECTOR, 2):
            i = piece * VECTOR + j
            difference = arch.sub_packed_f32x2((dprobabilities[i], dprobabilities[i + 1]), (sums[j], sums[j + 1]))
            dprobabilities[i], dprobabilities[i + 1] = arch.mul_packed_f32x2(difference, (weights[i], weights[i + 1]))


@cute.jit
def damp(weights, capped):
    """weights *= 1 - t^2, in place: the derivative of softcap * tanh(y / softcap), where t = tanh(y / softcap).

    Args: capped: t of the same scores, -inf where hidden (where the weight is 0).
    Cost: two packed operations and a maximum a score.
    """
    for i in cutlass.range_constexpr(0, cute.size(weights), 2):
        t = (cutlass.max(capped[i], Float32(-1.0)), cutlass.max(capped[i + 1], Float32(-1.0)))
        slope = arch.fma_packed_f32x2((-t[0], -t[1]), t, (Float32(1.0), Float32(1.0)))
        weights[i], weights[i + 1] = arch.mul_packed_f32x2((weights[i], weights[i + 1]), slope)
