"""Soft cap of attention scores: softcap * tanh(softmax_scale * q.k / softcap), which keeps them inside +-softcap.

Only the hyperbolic tangent is taken of each element; the factor softcap joins the scale of the exponent, so a capped
kernel runs its softmax on t = tanh(..) with scale_log2 = softcap * log2 e. Masks are applied after the cap.

tanh(y) = 1 - 2 / (1 + e^(2 y)), with the exponential and the reciprocal of the special function unit: saturates to
+-1 without overflow (e^(2 y) = inf gives 1, 0 gives -1) and keeps NaN. Absolute error of t at most 4e-7, so a score is
off by at most 4e-7 * softcap: below 1e-4 for softcap <= 250. (`tanh.approx` has 5e-4: a capped score of 20 would weigh
1 % too much.)

Cost an element: one multiplication, one addition, one fused multiply-add, one exponential, one reciprocal.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import arch

TWO_LOG2_E = 2.8853900817779268


def cap_factor(softmax_scale: Float32, softcap: Float32) -> Float32:
    """What `capped` multiplies a raw score q.k by: 2 log2(e) * softmax_scale / softcap. Once a launch, on the host."""
    return softmax_scale * Float32(TWO_LOG2_E) / softcap


def capped(score: Float32, factor: Float32) -> Float32:
    """tanh(softmax_scale * score / softcap), in [-1, 1]; NaN stays NaN.

    Args: score: raw q.k; factor: from `cap_factor`.
    """
    power = arch.exp2(score * factor)
    return arch.rcp_approx(power + Float32(1.0)) * Float32(-2.0) + Float32(1.0)


@cute.jit
def cap_scores(scores, factor: Float32):
    """Every score of a register tensor becomes `capped`, in place."""
    for i in cutlass.range_constexpr(cute.size(scores)):
        scores[i] = capped(scores[i], factor)
