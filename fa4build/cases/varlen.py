"""What kernels over packed sequences, pages, splits and features must compute: cases, inputs, references, judgement.

The companion of cases/forward.py for every variant beyond the dense one without features. A case is a list of
sequences; dense layouts take those whose lengths are equal. How to use it, as verify/varlen.py does:

    for case in packed_cases_for(variant):
        problem = draw_problem(variant, case, seed)
        problem.inputs      # argument -> values: float64 (exact in the argument's dtype) or int32
        problem.outputs     # argument -> shape
        problem.scalars     # argument -> number; window and scale among them
        verdict = problem.judge({"out": ..., "lse": ...})    # float64 values; NaN = not written
        verdict.ratio       # worst error over its bound
        verdict.wrong       # sentences; empty if all is well

Whatever no result may depend on holds NaN (rows behind a sequence's used length, pages behind the used ones, partial
results of empty splits) or numbers far outside (page table entries); rows that no kernel may write are checked to be
NaN still.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fa4build.cases.forward import (
    FP8_MANTISSA_BITS,
    UNBOUNDED_WINDOW,
    Case,
    draw_inputs,
    lse_error,
    output_bound,
    reference,
    round_to,
    same_dtype_attention,
    same_dtype_fp8_attention,
    window_of,
)

if TYPE_CHECKING:
    from fa4build.matrix.variants import Variant

LSE_TOLERANCE = 1e-4  # relative to max(1, |lse|); single precision with approximate exp2 and log2 gives 1e-6
FP8_COSINE = 0.99  # of the output with the reference; the figure upstream holds its fp8 kernels to
COMBINE_NOISE = 2.0**-18  # of the largest partial output: a float32 sum of up to 256 terms
_GARBAGE_PAGES = (2**31 - 1, -1, 12345678, -(2**31))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCase:
    """One problem over sequences.

    Attributes:
        seqlens_q, seqlens_k: rows that each sequence has in the tensors.
        used_q, used_k: how many of them exist; None = all, and the kernel is given no list.
        tail: rows behind the last sequence that belong to none.
        window: (left, right) keys visible; None = the variant's mask decides.
        fill: as acceptance.Case; `tail_mass` (fp8): many keys of which each alone is too light for the type.
        sink: one number for every head, or None: drawn.
        page_size: keys a page, layout `paged` only.
        num_splits: feature `split` and op `fwd_combine` only.
        num_runs: in how many schedules of the Python engine it runs, where many blocks make it slow; None: in all.
    """

    name: str
    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    tail: int = 0
    num_heads_q: int = 1
    num_heads_kv: int = 1
    window: tuple[int, int] | None = None
    fill: str = "normal"
    softcap: float = 15.0
    sink: float | None = None
    page_size: int = 64
    num_splits: int = 3
    num_runs: int | None = None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.seqlens_q)

    @property
    def lengths_q(self) -> tuple[int, ...]:
        """Query rows that exist, by sequence."""
        return self.seqlens_q if self.used_q is None else self.used_q

    @property
    def lengths_k(self) -> tuple[int, ...]:
        """Keys that exist, by sequence."""
        return self.seqlens_k if self.used_k is None else self.used_k

    @property
    def shape(self) -> str:
        """Readable shape: `b3 q113+7+1 k300+7+1 h4/1`."""
        lengths = (_spelled(self.lengths_q), _spelled(self.lengths_k))
        return f"b{self.batch} q{lengths[0]} k{lengths[1]} h{self.num_heads_q}/{self.num_heads_kv}"


def _spelled(lengths: tuple[int, ...]) -> str:
    shown = "+".join(map(str, lengths[:4]))
    return shown + (f"+..({sum(lengths)})" if len(lengths) > 4 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Worst error over its bound (<= 1 is allowed), worst error of lse, and a sentence for each thing that is wrong."""

    ratio: float = 0.0
    lse_error: float = 0.0
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A case with drawn inputs. `free_bits`: outputs whose bits may differ between runs."""

    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, tuple[int, ...]]
    scalars: Mapping[str, float | int]
    judge: Callable[[Mapping[str, np.ndarray]], Verdict]
    free_bits: frozenset[str] = frozenset()


# --- cases ------------------------------------------------------------------------------------------------------------


def sparse_lengths(rows: Mapping[int, int], batch: int) -> tuple[int, ...]:
    """Lengths of `batch` sequences, 0 where not named."""
    return tuple(rows.get(b, 0) for b in range(batch))


# More sequences than two warps have lanes to search them with, and, once, than most blocks have threads.
_MANY, _VERY_MANY = 70, 260


_PACKED = (
    PackedCase(name="single", seqlens_q=(1,), seqlens_k=(1,)),
    PackedCase(name="unequal", seqlens_q=(113, 7, 300, 1), seqlens_k=(113, 7, 300, 1)),
    PackedCase(name="unequal-keys", seqlens_q=(5, 130, 1), seqlens_k=(200, 17, 129), num_heads_q=4, num_heads_kv=1),
    PackedCase(name="empty-ones", seqlens_q=(0, 3, 0, 0, 20, 0), seqlens_k=(5, 0, 0, 9, 40, 7)),
    PackedCase(
        name="many-empty",
        seqlens_q=sparse_lengths({0: 1, 31: 2, 32: 130, 33: 1, 64: 3, 69: 1}, _MANY),
        seqlens_k=sparse_lengths({0: 3, 31: 40, 32: 5, 33: 129, 64: 1, 69: 2}, _MANY),
        num_splits=2,
    ),
    PackedCase(
        name="very-many-empty",
        seqlens_q=sparse_lengths({127: 1, 128: 2, 255: 3, 256: 2, 259: 1}, _VERY_MANY),
        seqlens_k=sparse_lengths({127: 3, 128: 4, 255: 1, 259: 2}, _VERY_MANY),
        num_splits=1,
        num_runs=1,
    ),
    PackedCase(
        name="used-lengths",
        seqlens_q=(60, 140, 9, 20),
        seqlens_k=(150, 70, 10, 30),
        used_q=(33, 129, 0, 20),
        used_k=(129, 70, 10, 0),
        num_heads_q=2,
        num_heads_kv=2,
        tail=3,
    ),
    PackedCase(
        name="one-query-each",
        seqlens_q=(1, 1, 1),
        seqlens_k=(200, 64, 129),
        used_k=(150, 64, 0),
        num_heads_q=8,
        num_heads_kv=1,
    ),
    PackedCase(name="group-of-five", seqlens_q=(33, 17), seqlens_k=(65, 90), num_heads_q=5, num_heads_kv=1),
    PackedCase(name="rising-maxima", seqlens_q=(3, 40), seqlens_k=(300, 400), fill="rising"),
)
_PACKED_WINDOWS = (
    PackedCase(name="window-left", seqlens_q=(150, 20), seqlens_k=(150, 300), window=(20, UNBOUNDED_WINDOW)),
    PackedCase(name="window-both", seqlens_q=(70, 129), seqlens_k=(333, 60), window=(64, 0)),
    PackedCase(name="window-empty-rows", seqlens_q=(140, 3), seqlens_k=(60, 300), window=(3, 3)),
    PackedCase(name="window-negative", seqlens_q=(100, 9), seqlens_k=(100, 9), window=(-10, 40)),
)
_PAGES = PackedCase(name="pages-of-64", seqlens_q=(1, 130, 5), seqlens_k=(200, 300, 17), page_size=64)
_PAGED = (
    replace(_PAGES, name="pages-of-16", page_size=16, num_heads_q=4),
    _PAGES,
    replace(_PAGES, name="pages-of-128", page_size=128),
    PackedCase(
        name="used-queries",
        seqlens_q=(20, 9, 3),
        seqlens_k=(129, 0, 64),
        used_q=(17, 9, 0),
        tail=2,
        num_heads_q=8,
        num_heads_kv=1,
        page_size=16,
    ),
    PackedCase(
        name="many-empty",
        seqlens_q=sparse_lengths({0: 1, 32: 2, 63: 3, 64: 1, 69: 1}, _MANY),
        seqlens_k=sparse_lengths({0: 3, 32: 40, 33: 20, 63: 1, 69: 130}, _MANY),
        num_splits=2,
    ),
    PackedCase(
        name="very-many-empty",
        seqlens_q=sparse_lengths({127: 1, 128: 2, 255: 3, 256: 2, 259: 1}, _VERY_MANY),
        seqlens_k=sparse_lengths({127: 3, 128: 4, 255: 1, 259: 2}, _VERY_MANY),
        page_size=16,
        num_splits=1,
        num_runs=1,
    ),
    PackedCase(name="group-of-five", seqlens_q=(33, 1), seqlens_k=(65, 90), num_heads_q=5, num_heads_kv=1),
)
_PAGED_WINDOWS = (
    PackedCase(
        name="window-left", seqlens_q=(20, 1), seqlens_k=(333, 300), window=(20, UNBOUNDED_WINDOW), page_size=16
    ),
    PackedCase(name="window-both", seqlens_q=(129,), seqlens_k=(200,), window=(64, 0), page_size=128),
    PackedCase(name="window-empty-rows", seqlens_q=(140, 3), seqlens_k=(60, 300), window=(3, 3)),
)
_DENSE = (
    PackedCase(name="single", seqlens_q=(1,), seqlens_k=(1,)),
    PackedCase(name="odd", seqlens_q=(17,), seqlens_k=(129,)),
    PackedCase(name="batch-and-groups", seqlens_q=(127,) * 2, seqlens_k=(130,) * 2, num_heads_q=4, num_heads_kv=1),
    PackedCase(name="group-of-five", seqlens_q=(33,), seqlens_k=(65,), num_heads_q=5, num_heads_kv=1),
    PackedCase(name="more-queries", seqlens_q=(200,), seqlens_k=(40,)),
    PackedCase(name="two-tiles", seqlens_q=(257,), seqlens_k=(333,)),
    PackedCase(name="large-logits", seqlens_q=(64,), seqlens_k=(300,), fill="large_logits"),
    PackedCase(name="rising-maxima", seqlens_q=(64,), seqlens_k=(400,), fill="rising"),
)
_DENSE_WINDOWS = (
    PackedCase(name="window-left", seqlens_q=(150,), seqlens_k=(150,), window=(20, UNBOUNDED_WINDOW)),
    PackedCase(name="window-both", seqlens_q=(200,), seqlens_k=(333,), window=(64, 0), num_heads_q=2, num_heads_kv=2),
    PackedCase(name="window-empty-rows", seqlens_q=(200,), seqlens_k=(60,), window=(3, 3)),
)
_TAIL_MASS = PackedCase(name="tail-mass", seqlens_q=(3,), seqlens_k=(1100,), fill="tail_mass")
_COMBINE = tuple(
    PackedCase(
        name=f"splits-{splits}", seqlens_q=(rows,) * batch, seqlens_k=(0,) * batch, num_heads_q=heads, num_splits=splits
    )
    for splits, batch, rows, heads in (
        (1, 1, 1, 1),
        (2, 1, 1, 8),
        (3, 2, 17, 2),
        (5, 1, 130, 1),
        (17, 2, 3, 5),
        (40, 1, 9, 2),
        (128, 1, 2, 1),
    )
)


def packed_cases_for(variant: "Variant") -> tuple[PackedCase, ...]:
    """Acceptance cases of a forward or combine variant, smallest first."""
    if variant.op == "fwd_combine":
        return _COMBINE
    common, windows = {
        "dense": (_DENSE, _DENSE_WINDOWS),
        "varlen": (_PACKED, _PACKED_WINDOWS),
        "paged": (_PAGED, _PAGED_WINDOWS),
    }[variant.layout]
    cases = (*common, *(windows if variant.mask == "local" else ()))
    if variant.dtype in FP8_MANTISSA_BITS:
        cases = (*cases, _TAIL_MASS)
    small = min(common[1:], key=_work)
    if variant.sink:
        cases = (*cases, *_with_sinks(small))
    if variant.softcap:
        cases = (*cases, replace(small, name="small-cap", softcap=0.5, fill="large_logits"))
    if variant.split:
        cases = (*cases, *_with_splits(next(case for case in common if case.num_heads_q > 1)))
    if variant.layout == "paged":
        cases = tuple(_as_paged(case) for case in cases)
    return tuple(sorted(cases, key=_work))


def _with_sinks(case: PackedCase) -> tuple[PackedCase, ...]:
    return tuple(replace(case, name=f"sink-{sink:g}", sink=sink) for sink in (0.0, -1e4, 100.0))


def _with_splits(case: PackedCase) -> tuple[PackedCase, ...]:
    """More splits than the shortest sequences have blocks, so that some have none."""
    return tuple(replace(case, name=f"splits-{splits}", num_splits=splits) for splits in (1, 2, 5))


def _as_paged(case: PackedCase) -> PackedCase:
    """Pages hold what is used; whole lengths are always given."""
    return case if case.used_k is not None else replace(case, used_k=case.seqlens_k)


def _work(case: PackedCase) -> int:
    pairs = sum(q * k for q, k in zip(case.lengths_q, case.lengths_k, strict=True))
    return case.num_heads_q * (pairs + 128 * sum(length > 0 for length in case.lengths_q))


# --- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One sequence as the reference sees it: (1, rows, heads, dim) in float64, exact in the variant's dtype."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def draw_sequences(case: PackedCase, variant: "Variant", seed: int) -> tuple[Sequence, ...]:
    """The rows that exist of every sequence."""
    drawn = []
    for b, (rows, keys) in enumerate(zip(case.lengths_q, case.lengths_k, strict=True)):
        fill = "normal" if case.fill == "tail_mass" or not keys else case.fill
        one = Case(
            name=case.name,
            seqlen_q=rows,
            seqlen_k=keys,
            num_heads_q=case.num_heads_q,
            num_heads_kv=case.num_heads_kv,
            fill=fill,
        )
        q, k, v = draw_inputs(one, variant.head_dim, variant.head_dim_v, seed * 1009 + b)
        if case.fill == "tail_mass":
            q, k, v = _tail_mass(q, k, v)
        q, k, v = (round_to(x, variant.dtype) for x in (q, k, v))
        drawn.append(Sequence(q=q, k=k, v=v))
    return tuple(drawn)


def _tail_mass(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    """Key 0 scores 9.9 or 10 (exact in fp8), all others 0: together 5 %, each e^-9.9; their value is 1, its is 0."""
    head_dim = q.shape[-1]
    peak = {64: 1.25, 128: 0.875}.get(head_dim, 9.9 / np.sqrt(head_dim))
    q, k, v = np.ones_like(q), np.zeros_like(k), np.ones_like(v)
    k[:, 0], v[:, 0] = peak, 0
    return q, k, v


def starts(lengths: tuple[int, ...]) -> np.ndarray:
    """Where each sequence starts, and behind them where the last one ends: int32 (batch + 1)."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def pack_rows(rows: list[np.ndarray], lengths: tuple[int, ...], tail: int) -> np.ndarray:
    """Sequences (rows that exist, ...) one behind the other; everything else is NaN."""
    first = starts(lengths)
    packed = np.full((int(first[-1]) + tail, *rows[0].shape[1:]), np.nan)
    for start, part in zip(first, rows, strict=False):
        packed[start : start + len(part)] = part
    return packed


def _pages(rows: list[np.ndarray], table: np.ndarray, page_size: int, num_pages: int) -> np.ndarray:
    pages = np.full((num_pages, page_size, *rows[0].shape[1:]), np.nan)
    for b, part in enumerate(rows):
        for n in range(-(-len(part) // page_size)):
            piece = part[n * page_size : (n + 1) * page_size]
            pages[table[b, n], : len(piece)] = piece
    return pages


def _page_table(case: PackedCase, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """A shuffled table whose entries behind the used pages are garbage, and how many pages there are: two more."""
    counts = [-(-length // case.page_size) for length in case.lengths_k]
    num_pages = sum(counts) + 2
    free = list(rng.permutation(num_pages))
    table = rng.choice(_GARBAGE_PAGES, size=(case.batch, max(counts) + 1)).astype(np.int32)
    for b, count in enumerate(counts):
        table[b, :count] = [free.pop() for _ in range(count)]
    return table, num_pages


def draw_problem(variant: "Variant", case: PackedCase, seed: int) -> Problem:
    """Inputs, outputs and judge of a forward or combine variant."""
    if variant.op == "fwd_combine":
        return _combine_problem(variant, case, seed)
    rng = np.random.default_rng((seed, 3))
    sequences = draw_sequences(case, variant, seed)
    inputs = _layout_inputs(variant, case, sequences, rng)
    options = _Options.drawn(variant, case, rng)
    inputs |= options.inputs(case)
    window = window_of(case, variant.mask)
    scalars = {"softmax_scale": scale_of(variant), "window_left": window[0], "window_right": window[1]}
    scalars |= {"softcap": case.softcap} if variant.softcap else {}
    expected = _expected(variant, case, sequences, options, window)
    names = ("out_partial", "lse_partial") if variant.split else ("out", "lse")
    shapes = tuple(x.shape for x in (expected.out, expected.lse))
    if variant.split:
        shapes = tuple((case.num_splits, *shape) for shape in shapes)
    judge = _judge_split if variant.split else _judge_whole
    return Problem(
        inputs=inputs,
        outputs=dict(zip(names, shapes, strict=True)),
        scalars=scalars,
        judge=lambda found: judge(variant, expected, *(found[name] for name in names)),
    )


def scale_of(variant: "Variant") -> float:
    """1/sqrt(head_dim) as the single-precision argument holds it."""
    return float(np.float32(variant.head_dim**-0.5))


def _layout_inputs(
    variant: "Variant", case: PackedCase, sequences: tuple[Sequence, ...], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """q, k, v and whatever says where their sequences lie."""
    queries = [sequence.q[0] for sequence in sequences]
    keys, values = ([getattr(sequence, name)[0] for sequence in sequences] for name in "kv")
    if variant.layout == "dense":
        return {"q": np.stack(queries), "k": np.stack(keys), "v": np.stack(values)}
    inputs = {"q": pack_rows(queries, case.seqlens_q, case.tail), "cu_seqlens_q": starts(case.seqlens_q)}
    for name, used in (("seqused_q", case.used_q), ("seqused_k", case.used_k)):
        inputs[name] = np.array([] if used is None else used, np.int32)
    if variant.layout == "varlen":
        inputs["k"], inputs["v"] = (pack_rows(rows, case.seqlens_k, case.tail) for rows in (keys, values))
        return inputs | {"cu_seqlens_k": starts(case.seqlens_k)}
    table, num_pages = _page_table(case, rng)
    inputs["k"], inputs["v"] = (_pages(rows, table, case.page_size, num_pages) for rows in (keys, values))
    return inputs | {"page_table": table}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Features of a case: sink (heads_q) or None, cap or 0, factors (3, batch, heads_kv) of q, k, v or None."""

    sink: np.ndarray | None
    softcap: float
    descales: np.ndarray | None

    @classmethod
    def drawn(cls, variant: "Variant", case: PackedCase, rng: np.random.Generator) -> "_Options":
        """Single-precision numbers."""
        sink = rng.standard_normal(case.num_heads_q) if case.sink is None else np.full(case.num_heads_q, case.sink)
        descales = rng.uniform(0.5, 1.5, (3, case.batch, case.num_heads_kv))
        if case.fill == "tail_mass":
            descales = np.ones_like(descales)
        return cls(
            sink=sink.astype(np.float32).astype(np.float64) if variant.sink else None,
            softcap=float(np.float32(case.softcap)) if variant.softcap else 0.0,
            descales=descales.astype(np.float32).astype(np.float64) if variant.dtype in FP8_MANTISSA_BITS else None,
        )

    def inputs(self, case: PackedCase) -> dict[str, np.ndarray]:
        """The tensors among them."""
        inputs = {} if self.sink is None else {"sink": self.sink}
        if self.descales is not None:
            inputs |= dict(zip(("q_descale", "k_descale", "v_descale"), self.descales, strict=True))
        return inputs


# --- reference and judgement ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """Reference in the shapes of the outputs, NaN where nothing may be written, and what is allowed."""

    out: np.ndarray
    lse: np.ndarray
    bound: float
    is_fp8: bool
    has_tail_mass: bool


def _expected(
    variant: "Variant",
    case: PackedCase,
    sequences: tuple[Sequence, ...],
    options: _Options,
    window: tuple[int, int],
) -> _Expected:
    outs, lses, off = [], [], 0.0
    for b, sequence in enumerate(sequences):
        features: dict[str, Any] = {"softcap": options.softcap, "sink": options.sink}
        arguments = (sequence.q, sequence.k, sequence.v, scale_of(variant), window)
        if options.descales is None:
            out, lse = reference(*arguments, **features)
            same = same_dtype_attention(*arguments, variant.dtype, **features)
        else:
            group = case.num_heads_q // case.num_heads_kv
            q_factor, k_factor, v_factor = (np.repeat(x[b], group)[:, None] for x in options.descales)
            scaled = (sequence.q * (q_factor * k_factor), *arguments[1:])
            out, lse = reference(*scaled, **features)
            same = same_dtype_fp8_attention(*scaled, variant.dtype, **features)
            out, same = out * v_factor, same * v_factor
        off = max(off, float(np.abs(same - out).max(initial=0.0)))
        outs.append(out[0])
        lses.append(lse[0].T)
    dtype = "bf16" if options.descales is not None else variant.dtype
    largest = max((float(np.abs(out).max(initial=0.0)) for out in outs), default=0.0)
    bound = output_bound(np.array([largest]), np.array([largest + off]), dtype)
    if variant.layout == "dense":
        out, lse = np.stack(outs), np.stack(lses).transpose(0, 2, 1)
    else:
        out, lse = pack_rows(outs, case.seqlens_q, case.tail), pack_rows(lses, case.seqlens_q, case.tail).T
    return _Expected(
        out=out,
        lse=lse,
        bound=bound,
        is_fp8=options.descales is not None,
        has_tail_mass=case.fill == "tail_mass"
        and window == (UNBOUNDED_WINDOW, UNBOUNDED_WINDOW)
        and options.sink is None,
    )


def _judge_whole(variant: "Variant", expected: _Expected, out: np.ndarray, lse: np.ndarray) -> Verdict:
    """Against float64, row by row; rows that do not exist must not be written."""
    wrong = [*_written(out, expected.out, "out"), *_written(lse, expected.lse, "lse")]
    if wrong:
        return Verdict(ratio=float("inf"), lse_error=float("inf"), wrong=tuple(wrong))
    exists = ~np.isnan(expected.out)
    errors = np.where(exists, np.abs(out - np.where(exists, expected.out, 0)), 0)
    ratio = _ratio(float(errors.max(initial=0.0)), expected.bound)
    rows = ~np.isnan(expected.lse)
    lse_off = lse_error(lse[rows], expected.lse[rows])
    if not ratio <= 1:
        place = tuple(int(i) for i in np.unravel_index(errors.argmax(), errors.shape))
        wrong.append(f"out is off by {errors.max():.3g} at index {place}; {expected.bound:.3g} is allowed")
    if not lse_off <= LSE_TOLERANCE:
        wrong.append(f"lse is off by {lse_off:.3g}; {LSE_TOLERANCE} is allowed")
    if expected.is_fp8:
        wrong += _fp8_faults(out[exists], expected.out[exists], expected.has_tail_mass)
    return Verdict(ratio=ratio, lse_error=lse_off, wrong=tuple(wrong))


def _fp8_faults(out: np.ndarray, ref: np.ndarray, has_tail_mass: bool) -> list[str]:
    faults = []
    norm = np.linalg.norm(out) * np.linalg.norm(ref)
    cosine = float((out * ref).sum() / norm) if norm else 1.0
    if not cosine > FP8_COSINE:
        faults.append(f"the cosine of out with the reference is {cosine:.4f}; more than {FP8_COSINE} is needed")
    if has_tail_mass and not (np.abs(out - ref) <= 0.1 * np.abs(ref)).all():
        faults.append(f"light keys got lost: out is {out.min():.4f} to {out.max():.4f}, {ref.min():.4f} is right")
    return faults


def _ratio(error: float, bound: float) -> float:
    return error / bound if bound else (float("inf") if error else 0.0)


def _written(found: np.ndarray, expected: np.ndarray, name: str) -> list[str]:
    """A sentence for NaN where a number belongs, and one for a number where nothing may be written."""
    missing, strange = np.isnan(found) & ~np.isnan(expected), ~np.isnan(found) & np.isnan(expected)
    faults = []
    for what, places in (("NaN or unwritten in", missing), ("written beyond the sequences in", strange)):
        if places.any():
            first = tuple(np.argwhere(places)[0].tolist())
            faults.append(f"{what} {int(places.sum())} elements of {name}, first at index {first}")
    return faults


def _judge_split(variant: "Variant", expected: _Expected, out: np.ndarray, lse: np.ndarray) -> Verdict:
    """The float64 merge of the parts, judged like a whole. Parts without a key may hold anything."""
    lse_rows = lse.swapaxes(-2, -1)
    wrong = _written(lse, np.broadcast_to(expected.lse, lse.shape), "lse_partial")
    readable = np.where(np.isneginf(lse_rows)[..., None], 0.0, out)
    wrong += _written(readable, np.broadcast_to(expected.out, out.shape), "out_partial")
    if wrong:
        return Verdict(ratio=float("inf"), lse_error=float("inf"), wrong=tuple(wrong))
    merged, merged_lse = merge(out, lse_rows, None)
    return _judge_whole(variant, expected, merged, merged_lse.swapaxes(-2, -1))


def merge(out: np.ndarray, lse: np.ndarray, sink: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Results of split keys made one, in float64.

    Args:
        out: (num_splits, ..., heads, dim_v); lse: (num_splits, ..., heads), -inf for a part without a key.
        sink: (heads) or None.
    Returns: out (..., heads, dim_v) and lse (..., heads); 0 and -inf where no part has a key and there is no sink.
    """
    lse = np.asarray(lse, np.float64)
    parts = lse if sink is None else np.concatenate([lse, np.broadcast_to(sink, lse[:1].shape)])
    unit = parts.max(axis=0)
    subtracted = np.where(np.isneginf(unit), 0.0, unit)
    row_sum = np.exp(parts - subtracted).sum(axis=0)
    weights = np.exp(lse - subtracted) / np.where(row_sum == 0, 1.0, row_sum)
    with np.errstate(divide="ignore"):
        merged_lse = np.log(row_sum) + subtracted
    readable = np.where(np.isneginf(lse)[..., None], 0.0, out)
    return (weights[..., None] * readable).sum(axis=0), merged_lse


def _combine_problem(variant: "Variant", case: PackedCase, seed: int) -> Problem:
    """Random parts of which a third has no key; every seventh row has none at all."""
    rng = np.random.default_rng((seed, 4))
    shape = (case.num_splits, case.batch, case.seqlens_q[0], case.num_heads_q)
    out = rng.standard_normal((*shape, variant.head_dim_v)).astype(np.float32).astype(np.float64)
    lse = (10 * rng.standard_normal(shape)).astype(np.float32).astype(np.float64)
    lse[rng.random(shape) < 1 / 3] = -np.inf
    lse[:, :, 3::7] = -np.inf
    out[np.isneginf(lse)] = np.nan
    sink = np.resize([*rng.standard_normal(3), 0.0, 100.0, -1e4], case.num_heads_q).astype(np.float32)
    ref, ref_lse = merge(out, lse, sink if variant.sink else None)
    rounding = output_bound(ref, ref, variant.dtype)
    expected = _Expected(
        out=ref,
        lse=ref_lse.swapaxes(-2, -1),
        bound=rounding + COMBINE_NOISE * float(np.nanmax(np.abs(out), initial=0.0)),
        is_fp8=False,
        has_tail_mass=False,
    )
    return Problem(
        inputs={"out_partial": out, "lse_partial": lse.swapaxes(-2, -1)} | ({"sink": sink} if variant.sink else {}),
        outputs={"out": expected.out.shape, "lse": expected.lse.shape},
        scalars={},
        judge=lambda found: _judge_whole(variant, expected, found["out"], found["lse"]),
    )
