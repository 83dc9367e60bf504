"""What a backward kernel must compute: cases, incoming gradient, float64 reference and tolerance.

The backward of `cases/forward.py`, whose cases, inputs and rounding it uses. A backward kernel is given the forward's
results; `forward_results` makes them from the reference, so that its proof does not hang on a forward kernel.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fa4build.cases.forward import UNBOUNDED_WINDOW, Case, output_bound, reference, round_to, softmax_terms, visible

if TYPE_CHECKING:
    from fa4build.matrix.variants import Variant

# dS is a difference of two float32 sums of terms up to order 40, each off by a few 2**-24 of that.
# Where dS is exactly 0 (a query that sees one key), reference and yardstick are 0 and this is all that is allowed.
FLOAT32_NOISE = 2.0**-18


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """dq, dk, dv in float64, with the shapes of q, k, v."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


_COMMON = (
    Case(name="single", seqlen_q=1, seqlen_k=1),
    Case(name="odd", seqlen_q=17, seqlen_k=129),
    Case(name="one-query", seqlen_q=1, seqlen_k=200),
    Case(name="batch-and-groups", batch=2, seqlen_q=127, seqlen_k=130, num_heads_q=4, num_heads_kv=1),
    Case(name="group-of-five", seqlen_q=130, seqlen_k=65, num_heads_q=10, num_heads_kv=2),
    Case(name="more-queries", seqlen_q=300, seqlen_k=40),
    Case(name="more-keys", seqlen_q=40, seqlen_k=300),
    Case(name="three-tiles", seqlen_q=385, seqlen_k=333),
    Case(name="large-logits", seqlen_q=64, seqlen_k=300, fill="large_logits"),
    Case(name="zero-q", seqlen_q=40, seqlen_k=150, fill="zero_q"),
)
# Where CTAs add to dQ in turns: four blocks of keys, two heads, so that an order of three or more shows in the bits.
_TURNS = (Case(name="turns", seqlen_q=130, seqlen_k=500, num_heads_q=2, num_heads_kv=2),)
_WINDOWS = (
    Case(name="window-left", seqlen_q=300, seqlen_k=300, window=(20, UNBOUNDED_WINDOW)),
    Case(name="window-right", seqlen_q=130, seqlen_k=300, window=(UNBOUNDED_WINDOW, 5)),
    Case(name="window-both", seqlen_q=200, seqlen_k=333, window=(64, 0), num_heads_q=2, num_heads_kv=2),
    Case(name="window-one-key", seqlen_q=70, seqlen_k=70, window=(0, 0)),
    Case(name="window-empty-rows", seqlen_q=300, seqlen_k=60, window=(3, 3)),
    Case(name="window-keys-unseen", seqlen_q=60, seqlen_k=400, window=(20, 3)),
    Case(name="window-negative", seqlen_q=200, seqlen_k=200, window=(-10, 40)),
)


def backward_cases_for(variant: "Variant") -> tuple[Case, ...]:
    """Acceptance cases of a dense backward variant, smallest first."""
    cases = (*_COMMON, *_WINDOWS) if variant.mask == "local" else _COMMON
    cases = (*cases, *_TURNS) if variant.deterministic else cases
    return tuple(sorted(cases, key=lambda case: case.batch * case.num_heads_q * case.seqlen_q * case.seqlen_k))


def draw_gradient(case: Case, head_dim_v: int, seed: int) -> np.ndarray:
    """The gradient of the output, float32 (batch, seqlen_q, num_heads_q, head_dim_v), before rounding."""
    rng = np.random.default_rng((seed, 1))  # not the stream of the inputs
    shape = (case.batch, case.seqlen_q, case.num_heads_q, head_dim_v)
    return rng.standard_normal(shape, dtype=np.float32)


def forward_results(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: tuple[int, int], dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """What a right forward hands to the backward: out rounded to dtype (as float64), lse in float32."""
    out, lse = reference(q, k, v, scale, window)
    return round_to(out, dtype), lse.astype(np.float32)


def reference_gradients(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    scale: float,
    window: tuple[int, int],
    *,
    softcap: float = 0.0,
    sink: np.ndarray | None = None,
) -> Gradients:
    """Gradients of sum(out * dout) in float64; queries that see no key have dq = 0 and add nothing."""
    return _gradients(q, k, v, dout, scale, window, softcap, sink, lambda x: x)


def same_dtype_gradients(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    scale: float,
    window: tuple[int, int],
    dtype: str,
    *,
    softcap: float = 0.0,
    sink: np.ndarray | None = None,
) -> Gradients:
    """Gradients as an unfused framework computes them in `dtype`: every matrix rounded to it, sums in float64."""
    return _gradients(q, k, v, dout, scale, window, softcap, sink, lambda x: round_to(x, dtype))


def _gradients(q, k, v, dout, scale, window, softcap, sink, rounded) -> Gradients:
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    group = q.shape[2] // k.shape[2]
    keys, values = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = rounded(np.einsum("bqhd,bkhd->bhqk", rounded(q * scale), keys, optimize=True))
    tangents = rounded(np.tanh(rounded(scores / softcap))) if softcap else None
    scores = scores if tangents is None else rounded(tangents * softcap)
    weights, row_sum, _ = softmax_terms(np.where(visible(q.shape[1], k.shape[1], window), scores, -np.inf), sink)
    weights = rounded(weights / np.where(row_sum == 0, 1.0, row_sum))
    dweights = rounded(np.einsum("bqhd,bkhd->bhqk", dout, values, optimize=True))
    row_sums = (weights * dweights).sum(axis=-1, keepdims=True)
    dscores = rounded(weights * (dweights - row_sums))
    if tangents is not None:
        dscores = rounded(dscores * rounded(1 - tangents**2))
    dq = np.einsum("bhqk,bkhd->bqhd", dscores, keys, optimize=True) * scale
    dk = np.einsum("bhqk,bqhd->bkhd", dscores, q * scale, optimize=True)
    dv = np.einsum("bhqk,bqhd->bkhd", weights, dout, optimize=True)
    return Gradients(dq=rounded(dq), dk=rounded(_over_groups(dk, group)), dv=rounded(_over_groups(dv, group)))


def _over_groups(gradient: np.ndarray, group: int) -> np.ndarray:
    """(batch, seqlen_k, num_heads_q, dim) summed over the query heads that share a key head."""
    batch, seqlen, heads, dim = gradient.shape
    return gradient.reshape(batch, seqlen, heads // group, group, dim).sum(axis=3)


def gradient_bounds(ref: Gradients, same_dtype: Gradients, dtype: str) -> dict[str, float]:
    """Largest error allowed for dq, dk and dv: the rule of `cases.forward.output_bound`, and the noise of float32 sums,
    which grows with their terms: FLOAT32_NOISE up to head_dim 128."""
    noise = FLOAT32_NOISE * max(1.0, ref.dq.shape[-1] / 128)
    names = ("dq", "dk", "dv")
    return {name: output_bound(getattr(ref, name), getattr(same_dtype, name), dtype) + noise for name in names}


def gradient_errors(found: Gradients, ref: Gradients) -> dict[str, float]:
    """Largest |found - ref| of dq, dk and dv; inf where one is not finite."""
    errors = {}
    for name in ("dq", "dk", "dv"):
        difference = np.abs(getattr(found, name) - getattr(ref, name))
        errors[name] = float(difference.max(initial=0.0)) if np.isfinite(difference).all() else float("inf")
    return errors
