"""What backward kernels over packed sequences, or with a soft cap, must compute; the backward of cases/varlen.py.

Each of the three kernels is given what right predecessors would hand it. `draw_backward_problem` returns a `Problem` as
cases/varlen.py describes it. Workspaces of packed sequences have whole tiles of 128 rows for each sequence; rows
of none hold NaN on the way in, and are not looked at on the way out.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fa4build.cases.backward import (
    Gradients,
    gradient_bounds,
    reference_gradients,
    same_dtype_gradients,
)
from fa4build.cases.forward import UNBOUNDED_WINDOW, reference, round_to, window_of
from fa4build.cases.varlen import (
    PackedCase,
    Problem,
    Verdict,
    draw_sequences,
    pack_rows,
    scale_of,
    sparse_lengths,
    starts,
)

if TYPE_CHECKING:
    from fa4build.matrix.variants import Variant

ROWS = 128  # queries of a tile of the workspaces (docs/formats.md)
LOG2_E = 1.4426950408889634
ROW_SUM_TOLERANCE = 1e-5  # relative to max(1, sum of magnitudes): a float32 sum of 256 products gives 1e-6
LSE_LOG2_TOLERANCE = 1e-6  # relative to max(1, |lse_log2|): one float32 product

_PACKED = (
    PackedCase(name="single", seqlens_q=(1,), seqlens_k=(1,)),
    PackedCase(name="unequal", seqlens_q=(113, 7, 300, 1), seqlens_k=(113, 7, 300, 1)),
    PackedCase(name="groups", seqlens_q=(5, 130), seqlens_k=(200, 17), num_heads_q=4, num_heads_kv=1),
    PackedCase(name="empty-ones", seqlens_q=(0, 3, 0, 128, 20, 0), seqlens_k=(5, 0, 0, 129, 40, 7)),
    PackedCase(
        name="many-empty",
        seqlens_q=sparse_lengths({0: 1, 32: 130, 63: 3, 64: 2, 69: 1}, 70),
        seqlens_k=sparse_lengths({0: 3, 32: 40, 33: 129, 63: 1, 69: 2}, 70),
    ),
    PackedCase(
        name="very-many-empty",
        seqlens_q=sparse_lengths({127: 1, 128: 2, 255: 3, 256: 2, 259: 1}, 260),
        seqlens_k=sparse_lengths({127: 3, 128: 4, 255: 1, 259: 2}, 260),
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
    PackedCase(name="group-of-five", seqlens_q=(33, 17), seqlens_k=(65, 90), num_heads_q=10, num_heads_kv=2),
)
_TURNS = PackedCase(name="turns", seqlens_q=(130, 5), seqlens_k=(500, 40), num_heads_q=2, num_heads_kv=2)
_PACKED_WINDOWS = (
    PackedCase(name="window-left", seqlens_q=(150, 20), seqlens_k=(150, 300), window=(20, UNBOUNDED_WINDOW)),
    PackedCase(name="window-both", seqlens_q=(70, 129), seqlens_k=(333, 60), window=(64, 0)),
    PackedCase(name="window-empty-rows", seqlens_q=(300, 3), seqlens_k=(60, 300), window=(3, 3)),
)
_DENSE = (
    PackedCase(name="single", seqlens_q=(1,), seqlens_k=(1,)),
    PackedCase(name="odd", seqlens_q=(17,), seqlens_k=(129,)),
    PackedCase(name="batch-and-groups", seqlens_q=(127,) * 2, seqlens_k=(130,) * 2, num_heads_q=4, num_heads_kv=1),
    PackedCase(name="more-queries", seqlens_q=(300,), seqlens_k=(40,)),
    PackedCase(name="three-tiles", seqlens_q=(385,), seqlens_k=(333,)),
    PackedCase(name="large-logits", seqlens_q=(64,), seqlens_k=(300,), fill="large_logits"),
)
_DENSE_WINDOWS = (
    PackedCase(name="window-left", seqlens_q=(300,), seqlens_k=(300,), window=(20, UNBOUNDED_WINDOW)),
    PackedCase(name="window-both", seqlens_q=(200,), seqlens_k=(333,), window=(64, 0), num_heads_q=2, num_heads_kv=2),
    PackedCase(name="window-keys-unseen", seqlens_q=(60,), seqlens_k=(400,), window=(20, 3)),
)


def packed_backward_cases_for(variant: "Variant") -> tuple[PackedCase, ...]:
    """Acceptance cases of a backward variant that is packed or capped, smallest first."""
    common, windows = (_DENSE, _DENSE_WINDOWS) if variant.layout == "dense" else (_PACKED, _PACKED_WINDOWS)
    cases = (*common, *(windows if variant.mask == "local" else ()))
    if variant.deterministic:
        one = replace(_TURNS, seqlens_q=_TURNS.seqlens_q[:1], seqlens_k=_TURNS.seqlens_k[:1])
        cases = (*cases, one if variant.layout == "dense" else _TURNS)
    if variant.softcap:
        cases = (*cases, replace(common[-1], name="small-cap", softcap=0.5))
    return tuple(sorted(cases, key=_work))


def _work(case: PackedCase) -> int:
    return case.num_heads_q * sum(q * k + 128 for q, k in zip(case.lengths_q, case.lengths_k, strict=True))


def draw_backward_problem(variant: "Variant", case: PackedCase, seed: int) -> Problem:
    """Inputs, outputs and judge of a backward variant; see cases.varlen.Problem."""
    return {"bwd": _main_problem, "bwd_preprocess": _preprocess_problem, "bwd_postprocess": _postprocess_problem}[
        variant.op
    ](variant, case, seed)


# --- where rows lie ---------------------------------------------------------------------------------------------------


class _Places:
    """Where the rows of a case lie in tensors and workspaces of a layout."""

    def __init__(self, variant: "Variant", case: PackedCase) -> None:
        self.case, self.is_packed = case, variant.layout == "varlen"
        first = starts(case.seqlens_q)
        total = int(first[-1]) + case.tail
        if self.is_packed:
            self.tiles = [(int(first[b]) + ROWS * b) // ROWS * ROWS for b in range(case.batch)]
            self.num_rows = (total + ROWS * case.batch) // ROWS * ROWS
        else:
            rounded = -(-case.seqlens_q[0] // ROWS) * ROWS
            self.tiles = [rounded * b for b in range(case.batch)]
            self.num_rows = rounded * case.batch

    def tensor(self, rows: list[np.ndarray], side: str) -> np.ndarray:
        """Rows (rows, heads, ...) of each sequence as a tensor of `q` or `k`."""
        lengths = self.case.seqlens_q if side == "q" else self.case.seqlens_k
        return pack_rows(rows, lengths, self.case.tail) if self.is_packed else np.stack(rows)

    def per_head(self, rows: list[np.ndarray]) -> np.ndarray:
        """Rows (rows, heads) of each sequence as `lse` lies."""
        return self.tensor(rows, "q").swapaxes(-1, -2)

    def workspace(self, rows: list[np.ndarray], padding: float) -> np.ndarray:
        """(rows, heads, ...) of each sequence in tiles of its own, `padding` behind them, NaN in rows of none."""
        flat = np.full((self.num_rows, *rows[0].shape[1:]), np.nan)
        for start, length, part in zip(self.tiles, self.case.lengths_q, rows, strict=True):
            flat[start : start + -(-length // ROWS) * ROWS] = padding
            flat[start : start + length] = part
        return self._heads_first(flat)

    def _heads_first(self, flat: np.ndarray) -> np.ndarray:
        if self.is_packed:
            return flat.swapaxes(0, 1)
        return flat.reshape(self.case.batch, -1, *flat.shape[1:]).swapaxes(1, 2)

    def semaphore(self) -> tuple[int, ...]:
        """Shape of dq_semaphore."""
        shape = self.workspace([np.zeros((n, self.case.num_heads_q)) for n in self.case.lengths_q], 0).shape
        return (*shape[:-1], shape[-1] // ROWS)

    def lengths(self, names: Mapping[str, str]) -> dict[str, np.ndarray]:
        """The lists of lengths, under the names that this op has for them: q -> seqused_q."""
        case, lists = self.case, {}
        if self.is_packed:
            for side, name in names.items():
                lengths, used = (case.seqlens_q, case.used_q) if side == "q" else (case.seqlens_k, case.used_k)
                lists[name.replace("seqused", "cu_seqlens")] = starts(lengths)
                lists[name] = np.array([] if used is None else used, np.int32)
        return lists


class _Drawn:
    """q, k, v, dout rounded to the type, and the forward's out and lse, by sequence: (rows, heads, ...)."""

    def __init__(self, variant: "Variant", case: PackedCase, seed: int) -> None:
        self.scale = scale_of(variant)
        self.window = window_of(case, variant.mask)
        self.softcap = float(np.float32(case.softcap)) if variant.softcap else 0.0
        self.sequences = draw_sequences(case, variant, seed)
        rng = np.random.default_rng((seed, 1))
        self.dout, self.out, self.lse = [], [], []
        for sequence in self.sequences:
            out, lse = reference(sequence.q, sequence.k, sequence.v, self.scale, self.window, softcap=self.softcap)
            self.out.append(round_to(out[0], variant.dtype))
            self.lse.append(lse[0].T.astype(np.float32).astype(np.float64))
            self.dout.append(round_to(rng.standard_normal(out.shape[1:], dtype=np.float32), variant.dtype))


# --- the three kernels ------------------------------------------------------------------------------------------------


def _main_problem(variant: "Variant", case: PackedCase, seed: int) -> Problem:
    places, drawn = _Places(variant, case), _Drawn(variant, case, seed)
    rows = {name: [getattr(sequence, name)[0] for sequence in drawn.sequences] for name in "qkv"}
    inputs = {name: places.tensor(parts, "q" if name == "q" else "k") for name, parts in rows.items()}
    inputs["dout"] = places.tensor(drawn.dout, "q")
    dpsum = [(out * dout).sum(axis=-1) for out, dout in zip(drawn.out, drawn.dout, strict=True)]
    lse_log2 = [np.where(np.isneginf(lse), np.inf, lse * LOG2_E) for lse in drawn.lse]
    inputs |= {"dpsum": places.workspace(dpsum, 0), "lse_log2": places.workspace(lse_log2, np.inf)}
    inputs["dq_accum"] = places.workspace([np.zeros(q.shape) for q in rows["q"]], 0)
    inputs["dq_semaphore"] = np.zeros(places.semaphore())
    inputs |= places.lengths({"q": "seqused_q", "k": "seqused_k"})
    outputs = {name: inputs[name].shape for name in ("dq_accum", "dq_semaphore")}
    outputs |= {"dk": inputs["k"].shape, "dv": inputs["v"].shape}
    expected = functools.cache(lambda: _expected_gradients(variant, places, drawn))  # once for all runs
    scalars = {"softmax_scale": drawn.scale, "window_left": drawn.window[0], "window_right": drawn.window[1]}
    return Problem(
        inputs=inputs,
        outputs=outputs,
        scalars=scalars | ({"softcap": drawn.softcap} if variant.softcap else {}),
        judge=lambda found: _judge_main(variant, drawn.scale, expected(), found),
        free_bits=frozenset(("dq_semaphore",) if variant.deterministic else ("dq_accum", "dq_semaphore")),
    )


def _judge_main(
    variant: "Variant", scale: float, right: tuple[dict[str, np.ndarray], dict[str, float]], found: Mapping
) -> Verdict:
    """`right`: of `_expected_gradients`."""
    expected, allowed = right
    wrong, ratio = [], 0.0
    unscaled = np.where(np.isnan(expected["dq"]), np.nan, found["dq_accum"])
    scaled = round_to(unscaled * scale, variant.dtype)
    for name, values in (("dq", scaled), ("dk", found["dk"]), ("dv", found["dv"])):
        exists = ~np.isnan(expected[name])
        errors = np.abs(np.where(exists, values - np.where(exists, expected[name], 0), 0))
        worst = float(errors.max(initial=0.0)) if np.isfinite(values[exists]).all() else float("inf")
        ratio = max(ratio, worst / allowed[name])
        if not worst <= allowed[name]:
            place = tuple(int(i) for i in np.unravel_index(np.argmax(np.nan_to_num(errors, nan=np.inf)), errors.shape))
            wrong.append(f"{name} is off by {worst:.3g} at index {place}; {allowed[name]:.3g} is allowed")
        strange = ~exists & ~np.isnan(values) & (values != 0)
        if name != "dq" and strange.any():
            first = tuple(np.argwhere(strange)[0].tolist())
            wrong.append(f"{name} holds {int(strange.sum())} numbers beyond the sequences, first at index {first}")
    return Verdict(ratio=ratio, wrong=tuple(wrong))


def _expected_gradients(
    variant: "Variant", places: _Places, drawn: _Drawn
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """dq as the accumulator lies, dk and dv as k and v, NaN where there is no row; and the errors allowed."""
    parts: dict[str, list[np.ndarray]] = {"dq": [], "dk": [], "dv": []}
    largest, off = dict.fromkeys(parts, 0.0), dict.fromkeys(parts, 0.0)
    for sequence, dout in zip(drawn.sequences, drawn.dout, strict=True):
        arguments = (sequence.q, sequence.k, sequence.v, dout[None], drawn.scale, drawn.window)
        ref = reference_gradients(*arguments, softcap=drawn.softcap)
        same = same_dtype_gradients(*arguments, variant.dtype, softcap=drawn.softcap)
        for name, found in parts.items():
            found.append(getattr(ref, name)[0])
            largest[name] = max(largest[name], float(np.abs(found[-1]).max(initial=0.0)))
            off[name] = max(off[name], float(np.abs(getattr(same, name)[0] - found[-1]).max(initial=0.0)))
    columns = {"dq": variant.head_dim, "dk": variant.head_dim, "dv": variant.head_dim_v}
    ref, same = (
        Gradients(**{name: np.full((1, 1, 1, columns[name]), values[name]) for name in parts})
        for values in (largest, {name: largest[name] + off[name] for name in parts})
    )
    expected = {"dk": places.tensor(parts["dk"], "k"), "dv": places.tensor(parts["dv"], "k")}
    return expected | {"dq": places.workspace(parts["dq"], np.nan)}, gradient_bounds(ref, same, variant.dtype)


def _preprocess_problem(variant: "Variant", case: PackedCase, seed: int) -> Problem:
    places, drawn = _Places(variant, case), _Drawn(variant, case, seed)
    for lse in drawn.lse:
        lse[::7] = -np.inf  # as of queries that see no key
    inputs = {"out": places.tensor(drawn.out, "q"), "dout": places.tensor(drawn.dout, "q")}
    inputs |= {"lse": places.per_head(drawn.lse), **places.lengths({"q": "seqused_q"})}
    zeros = places.workspace([np.zeros((n, case.num_heads_q, variant.head_dim)) for n in case.lengths_q], 0)
    outputs = {"dpsum": zeros.shape[:-1], "lse_log2": zeros.shape[:-1], "dq_accum": zeros.shape}
    return Problem(
        inputs=inputs,
        outputs=outputs | {"dq_semaphore": places.semaphore()},
        scalars={},
        judge=lambda found: _judge_preprocess(places, drawn, zeros, found),
        free_bits=frozenset(("dpsum", "lse_log2", "dq_accum", "dq_semaphore")),
    )


def _judge_preprocess(places: _Places, drawn: _Drawn, zeros: np.ndarray, found: Mapping[str, np.ndarray]) -> Verdict:
    products = [out * dout for out, dout in zip(drawn.out, drawn.dout, strict=True)]
    sums = places.workspace([part.sum(axis=-1) for part in products], 0)
    magnitudes = places.workspace([np.abs(part).sum(axis=-1) for part in products], 0)
    lse = places.workspace([np.where(np.isneginf(part), np.inf, part * LOG2_E) for part in drawn.lse], np.inf)
    exists, finite = ~np.isnan(sums), np.isfinite(lse)
    off = np.abs(found["dpsum"] - sums)[exists] / np.maximum(1, magnitudes[exists])
    lse_off = np.abs(found["lse_log2"][finite] - lse[finite]) / np.maximum(1, np.abs(lse[finite]))
    tiles = exists.reshape(*exists.shape[:-1], -1, ROWS).any(axis=-1)
    checks = {
        "dpsum is off, or not 0 in the padding of a tile": bool((off <= ROW_SUM_TOLERANCE).all()),
        "lse_log2 is off": bool((lse_off <= LSE_LOG2_TOLERANCE).all()),
        "lse_log2 is not inf where lse is -inf, and in the padding": bool(
            np.isposinf(found["lse_log2"][exists & ~finite]).all()
        ),
        "dq_accum is not 0": not found["dq_accum"][~np.isnan(zeros)].any(),
        "dq_semaphore is not 0": not found["dq_semaphore"][tiles].any(),
    }
    ratio = float(off.max(initial=0.0) / ROW_SUM_TOLERANCE)
    return Verdict(ratio=ratio, wrong=tuple(what for what, holds in checks.items() if not holds))


def _postprocess_problem(variant: "Variant", case: PackedCase, seed: int) -> Problem:
    places, rng = _Places(variant, case), np.random.default_rng((seed, 2))
    rows = [
        rng.standard_normal((n, case.num_heads_q, variant.head_dim), dtype=np.float32).astype(np.float64)
        for n in case.lengths_q
    ]
    scale = scale_of(variant)
    scaled = [(part.astype(np.float32) * np.float32(scale)).astype(np.float64) for part in rows]
    expected = places.tensor([round_to(part, variant.dtype) for part in scaled], "q")
    return Problem(
        inputs={"accumulator": places.workspace(rows, 0), **places.lengths({"q": "seqused"})},
        outputs={"gradient": expected.shape},
        scalars={"scale": scale},
        judge=lambda found: _judge_postprocess(expected, found["gradient"]),
    )


def _judge_postprocess(expected: np.ndarray, found: np.ndarray) -> Verdict:
    """Every number exactly; rows that do not exist may be zero."""
    exists = ~np.isnan(expected)
    different = np.where(exists, found != expected, ~np.isnan(found) & (found != 0))
    if different.any():
        first = tuple(np.argwhere(different)[0].tolist())
        wrong = (f"gradient has {int(different.sum())} wrong elements, first at index {first}",)
        return Verdict(ratio=float("inf"), wrong=wrong)
    return Verdict()
