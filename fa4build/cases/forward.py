"""What a forward kernel must compute: cases, inputs, float64 reference and tolerance.

Shared by every level of proof that runs a kernel. The cases are small and awkward on purpose: a wrong mask edge, a
wrong head mapping or a lost rescale shows at 17 keys as well as at 17,000. Not for speed: see benchmarks/.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from fa4build.matrix.variants import Variant

UNBOUNDED_WINDOW = 2**30  # docs/formats.md section 1: a window side without limit
MANTISSA_BITS = {"bf16": 7, "fp16": 10}
FP8_MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
_FP8_RANGE = {"e4m3": (-6, 448.0), "e5m2": (-14, 57344.0)}  # log2 of the smallest normal number, the largest number


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem: shapes, window and how the inputs are drawn.

    Attributes:
        window: (left, right) keys visible; None = the variant's mask decides (full, causal).
        fill: `normal`, `large_logits` (q x 8), `rising` (row maxima rise by more than 2^8 from block to block),
            `creeping` (rise by less than 2^8), `falling` (rise by 2^6 a block from the last key to the first, the way
            in which kernels walk), `zero_q` (lse is the log of the number of visible keys),
            `one_key` (a single dominating key in a row).
    """

    name: str
    batch: int = 1
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int = 1
    num_heads_kv: int = 1
    window: tuple[int, int] | None = None
    fill: str = "normal"

    @property
    def shape(self) -> str:
        """Readable shape: `b2 q17 k200 h4/1`."""
        return f"b{self.batch} q{self.seqlen_q} k{self.seqlen_k} h{self.num_heads_q}/{self.num_heads_kv}"


_COMMON = (
    Case(name="single", seqlen_q=1, seqlen_k=1),
    Case(name="one-query", seqlen_q=1, seqlen_k=200),
    Case(name="odd", seqlen_q=17, seqlen_k=129),
    Case(name="batch-and-groups", batch=2, seqlen_q=127, seqlen_k=130, num_heads_q=4, num_heads_kv=1),
    Case(name="group-of-five", seqlen_q=33, seqlen_k=65, num_heads_q=5, num_heads_kv=1),
    Case(name="more-queries", seqlen_q=200, seqlen_k=40),
    Case(name="two-tiles", seqlen_q=257, seqlen_k=333),
    Case(name="large-logits", seqlen_q=64, seqlen_k=300, fill="large_logits"),
    Case(name="rising-maxima", seqlen_q=64, seqlen_k=400, fill="rising"),
    Case(name="creeping-maxima", seqlen_q=64, seqlen_k=400, fill="creeping"),
    Case(name="zero-q", seqlen_q=40, seqlen_k=150, fill="zero_q"),
    Case(name="one-key", seqlen_q=40, seqlen_k=150, fill="one_key"),
)
# A CTA takes several pieces of work that use all of its tiles and several slots: what the next one overwrites has to be
# read. And all tiles of a CTA or pair see maxima rise by more than 2^8, over keys that fill every slot twice: every
# tile is rescaled, and the unrolled loop of the loads runs.
_BLACKWELL = (
    Case(name="many-tiles", seqlen_q=300, seqlen_k=300, num_heads_q=5, num_heads_kv=5),
    Case(name="falling-maxima", seqlen_q=300, seqlen_k=1100, fill="falling"),
)
_WINDOWS = (
    Case(name="window-left", seqlen_q=150, seqlen_k=150, window=(20, UNBOUNDED_WINDOW)),
    Case(name="window-right", seqlen_q=130, seqlen_k=200, window=(UNBOUNDED_WINDOW, 5)),
    Case(name="window-both", seqlen_q=200, seqlen_k=333, window=(64, 0), num_heads_q=2, num_heads_kv=2),
    Case(name="window-one-key", seqlen_q=70, seqlen_k=70, window=(0, 0)),
    Case(name="window-empty-rows", seqlen_q=200, seqlen_k=60, window=(3, 3)),
    Case(name="window-negative", seqlen_q=100, seqlen_k=100, window=(-10, 40)),
)


def cases_for(variant: "Variant") -> tuple[Case, ...]:
    """Acceptance cases of a dense forward variant, smallest first."""
    windows = _WINDOWS if str(variant.mask) == "local" else ()
    more = () if variant.arch == "sm90a" else _BLACKWELL
    return tuple(sorted((*_COMMON, *windows, *more), key=_work))


def _work(case: Case) -> int:
    return case.batch * case.num_heads_q * case.seqlen_q * case.seqlen_k


class HasWindow(Protocol):
    """What a case says about its window: (left, right), or None to leave it to the mask."""

    @property
    def window(self) -> tuple[int, int] | None: ...


def window_of(case: HasWindow, mask: str) -> tuple[int, int]:
    """The visible window (left, right) in keys relative to `i + seqlen_k - seqlen_q`."""
    if mask == "causal":
        return UNBOUNDED_WINDOW, 0
    if mask == "full" or case.window is None:
        return UNBOUNDED_WINDOW, UNBOUNDED_WINDOW
    return case.window


def draw_inputs(case: Case, head_dim: int, head_dim_v: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v in float32: (batch, seqlen, heads, dim), fresh for each seed, before rounding to the variant's dtype."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((case.batch, case.seqlen_q, case.num_heads_q, head_dim), dtype=np.float32)
    k = rng.standard_normal((case.batch, case.seqlen_k, case.num_heads_kv, head_dim), dtype=np.float32)
    v = rng.standard_normal((case.batch, case.seqlen_k, case.num_heads_kv, head_dim_v), dtype=np.float32)
    if case.fill == "large_logits":
        q *= 8
    elif case.fill in ("rising", "creeping", "falling"):
        # A common direction whose weight grows with the key index: with scale 1/sqrt(head_dim) the row maximum rises by
        # rise * 128 / 32 * log2(e) a block of 128 keys in log2 units, 23 and 2.9; `falling` is the same backwards, 5.8.
        rise = {"rising": 4.0, "creeping": 0.5, "falling": 1.0}[case.fill]
        order = np.arange(case.seqlen_k, dtype=np.float32)[:: -1 if case.fill == "falling" else 1]
        direction = np.ones(head_dim, dtype=np.float32)
        q = q * 0.1 + direction
        k = k * 0.1 + direction * (rise * order / 32 / np.sqrt(head_dim))[None, :, None, None]
    elif case.fill == "zero_q":
        q[:] = 0
    elif case.fill == "one_key":
        k[:, case.seqlen_k // 3] = 4 * q[:, :1, : k.shape[2]].mean(axis=1)
        k[:, case.seqlen_k // 3] *= 8
    return q, k, v


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """Float64 values of x rounded to nearest even in a variant's dtype (bf16: normal range).

    Beyond the largest number fp16 becomes inf, e4m3 and e5m2 that number: what conversions to fp8 saturate to.
    """
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float64)
    if dtype in FP8_MANTISSA_BITS:
        return _round_to_fp8(np.asarray(x, np.float64), dtype)
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.nan, rounded.view(np.float32).astype(np.float64))


def _round_to_fp8(x: np.ndarray, dtype: str) -> np.ndarray:
    """Of numbers with `bits` of mantissa, the smallest normal one 2^low; NaN stays NaN."""
    bits, (low, largest) = FP8_MANTISSA_BITS[dtype], _FP8_RANGE[dtype]
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.abs(x))), low)
    step = np.exp2(np.where(np.isfinite(exponent), exponent, low) - bits)
    return np.clip(np.round(x / step) * step, -largest, largest)


def visible(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> np.ndarray:
    """Boolean (seqlen_q, seqlen_k): which keys a query sees. Bottom-right aligned, inclusive (docs/formats.md)."""
    diagonal = np.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)
    key = np.arange(seqlen_k)[None, :]
    return (key >= diagonal - window[0]) & (key <= diagonal + window[1])


def reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    window: tuple[int, int],
    *,
    softcap: float = 0.0,
    sink: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64.

    Args:
        q, k, v: (batch, seqlen, heads, dim), any float dtype; query head h reads head h // (heads_q // heads_kv).
        scale: multiplies q.k.
        window: as `visible`.
        softcap: scores become softcap * tanh(score / softcap); 0 leaves them.
        sink: (heads_q), one more logit of every row, without a value.
    Returns: out (batch, seqlen_q, heads_q, dim_v) and lse (batch, heads_q, seqlen_q), natural log. Rows that see no
        key: out 0, lse -inf or the sink.
    """
    scores = _capped(_scores(np.asarray(q, np.float64), np.asarray(k, np.float64)) * scale, softcap)
    scores = np.where(visible(q.shape[1], k.shape[1], window), scores, -np.inf)
    weights, row_sum, unit = softmax_terms(scores, sink)
    with np.errstate(divide="ignore"):
        lse = (np.log(row_sum) + unit)[..., 0]
    return _values(weights / np.where(row_sum == 0, 1.0, row_sum), np.asarray(v, np.float64)), lse


def _capped(
    scores: np.ndarray, softcap: float, rounded: Callable[[np.ndarray], np.ndarray] = lambda x: x
) -> np.ndarray:
    """Capped scores; `rounded` is applied behind every step."""
    return rounded(rounded(np.tanh(rounded(scores / softcap))) * softcap) if softcap else scores


def softmax_terms(scores: np.ndarray, sink: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(exp(score - unit), their sum with the sink's, unit) of masked scores (batch, heads, queries, keys).

    The unit is the row's maximum; -inf where there is nothing, and then it is not subtracted.
    """
    unit = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    if sink is not None:
        unit = np.maximum(unit, np.asarray(sink, np.float64)[:, None, None])
    subtracted = np.where(np.isfinite(unit), unit, 0.0)
    weights = np.exp(scores - subtracted)
    row_sum = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        row_sum = row_sum + np.exp(np.asarray(sink, np.float64)[:, None, None] - subtracted)
    return weights, row_sum, unit


def same_dtype_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    window: tuple[int, int],
    dtype: str,
    *,
    softcap: float = 0.0,
    sink: np.ndarray | None = None,
) -> np.ndarray:
    """Attention as an unfused framework computes it in `dtype`: every matrix rounded to it, sums in float32 or better.

    The yardstick of the tolerance rule, which is upstream's: scale folded into q; scores, softmax and output rounded.
    """

    def rounded(x: np.ndarray) -> np.ndarray:
        return round_to(x, dtype)

    scores = rounded(_scores(rounded(np.asarray(q, np.float64) * scale), np.asarray(k, np.float64)))
    scores = _capped(scores, softcap, rounded)
    scores = np.where(visible(q.shape[1], k.shape[1], window), scores, -np.inf)
    weights, row_sum, _ = softmax_terms(scores, sink)
    probabilities = rounded(weights / np.where(row_sum == 0, 1.0, row_sum))
    return rounded(_values(probabilities, np.asarray(v, np.float64)))


def same_dtype_fp8_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    window: tuple[int, int],
    dtype: str,
    *,
    softcap: float = 0.0,
    sink: np.ndarray | None = None,
) -> np.ndarray:
    """The same for fp8, whose products are of fp8 matrices and everything else in single precision; out in bf16.

    Weights lie in (0, 1] and are rounded as 2^8 times that, which keeps small ones off the subnormals.
    """
    scores = _capped(_scores(np.asarray(q, np.float64), np.asarray(k, np.float64)) * scale, softcap)
    scores = np.where(visible(q.shape[1], k.shape[1], window), scores, -np.inf)
    weights, row_sum, _ = softmax_terms(scores, sink)
    weights = round_to(weights * 256, dtype) / 256
    return round_to(_values(weights / np.where(row_sum == 0, 1.0, row_sum), np.asarray(v, np.float64)), "bf16")


def _scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    return np.einsum("bqhd,bkhd->bhqk", q, k, optimize=True)


def _values(probabilities: np.ndarray, v: np.ndarray) -> np.ndarray:
    v = np.repeat(v, probabilities.shape[1] // v.shape[2], axis=2)
    return np.einsum("bhqk,bkhd->bqhd", probabilities, v, optimize=True)


def output_bound(ref: np.ndarray, same_dtype: np.ndarray, dtype: str) -> float:
    """Largest |out - ref| allowed: twice the same-dtype framework's error, and one rounding of the largest output."""
    one_rounding = float(np.abs(ref).max(initial=0.0)) * 2.0 ** -(MANTISSA_BITS[dtype] + 1)
    return 2 * float(np.abs(same_dtype - ref).max(initial=0.0)) + one_rounding


def lse_error(lse: np.ndarray, ref: np.ndarray) -> float:
    """Largest |lse - ref| over finite rows, relative to max(1, |ref|); inf where one is -inf and the other is not."""
    if not np.array_equal(np.isneginf(lse), np.isneginf(ref)):
        return float("inf")
    finite = np.isfinite(ref)
    difference = np.abs(np.asarray(lse, np.float64)[finite] - ref[finite]) / np.maximum(1.0, np.abs(ref[finite]))
    return float(difference.max(initial=0.0)) if not np.isnan(difference).any() else float("inf")
