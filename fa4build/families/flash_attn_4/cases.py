"""What the operators of flash-attn-4 must compute: small problems that reach every class of lengths and layouts.

Answers are attention in float64 (`cases.forward.reference`). Bounds are relative to the largest answer: half a unit in
the last place of the result, and as much for the kernels' own rounding of P to the type of their inputs; of gradients,
for P, dS and the sums over heads. P in fp8 has three bits of mantissa, over which a row of keys averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fa4build.cases.backward import reference_gradients
from fa4build.cases.bits import from_bits, to_bits
from fa4build.cases.forward import UNBOUNDED_WINDOW, reference
from fa4build.families.flash_attn_4.matrix import declared
from fa4build.families.interface import OpRecipe
from fa4build.families.proof import Problem, ProofCase

# What upstream's kernels do, and the rules of the simulator object to: barriers left half complete by pipeline tails, a
# store not waited for before exit, warps of one warpgroup with different register budgets, tensor memory handed from
# thread to thread by barriers without tcgen05 fences and wait::ld. A merge whose tile is half empty reads rows that it
# never uses, and scales factors of a row by two warps at once. The backward's first kernel writes some rows of lse in
# two blocks.
TOLERATED = {
    "*": ("R5-exit", "R7w", "R12", "R14", "R15-after", "R15-before"),
    "fwd_combine-*": ("R1", "R3", "R9"),
    "bwd_preprocess-*": ("R3",),
}

_DRAW = f"{__name__}:draw_forward"
_DRAW_BACKWARD = f"{__name__}:draw_backward"
_WINDOW = (100, 64)
_OUT_BOUND = {"bf16": 2**-7, "fp16": 2**-10, "e4m3": 0.04}
_GRADIENT_BOUND = {"bf16": 2**-6, "fp16": 2**-9}
_LSE_BOUND = 1e-4


def cases(recipe: OpRecipe) -> tuple[ProofCase, ...]:
    """Acceptance cases of an operator: one plain problem, and one of several sequences and heads."""
    payload = declared(recipe.id).payload
    names = (*("dtype", "head_dim", "head_dim_v", "mask", "layout", "ratio"), *("sink", "softcap"))
    facts = {name: payload[name] for name in names if name in payload}
    if payload["call"] == "bwd":
        unordered = () if payload["deterministic"] else ("dq", "dk", "dv") if payload["ratio"] > 1 else ("dq",)
        return tuple(
            ProofCase(
                name=name, draw=_DRAW_BACKWARD, arguments={**facts, **more}, any_order=unordered, tolerated=TOLERATED
            )
            for name, more in _backward_shapes(payload)
        )
    return tuple(
        ProofCase(name=name, draw=_DRAW, arguments={**facts, **more}, tolerated=TOLERATED)
        for name, more in _forward_shapes(recipe, payload)
    )


def _forward_shapes(recipe: OpRecipe, payload: Mapping[str, Any]) -> tuple[tuple[str, dict[str, Any]], ...]:
    longest = _longest_query(recipe, payload)
    short, page = max(longest // 3, 1), {"page_size": payload["page_size"]}
    if payload["call"] == "split":
        splits = {"num_splits": 3, "heads_kv": 1}
        return (("split", {"queries": [longest // 4], "keys": [700], **splits}),)
    if payload["layout"] == "dense":
        return (
            ("odd", {"queries": [longest], "keys": [333], "heads_kv": 1}),
            ("several", {"queries": [longest] * 2, "keys": [129] * 2, "heads_kv": 2}),
        )
    lengths = [short, longest, max(short // 2, 1)]
    keys = [130, 257, 40] if payload["layout"] == "paged" else [100, 333, 41]
    if payload["layout"] == "paged":
        return (("pages", {"queries": [longest] * 3, "keys": keys, "heads_kv": 1, **page}),)
    return (("packed", {"queries": lengths, "keys": keys, "heads_kv": 1}),)


def _longest_query(recipe: OpRecipe, payload: Mapping[str, Any]) -> int:
    """A length that the recipe's rule allows: one tile of rows, two, or more."""
    if payload["call"] == "split" or ("<= 128" in recipe.when and "128 <" not in recipe.when):
        return 100 // payload["ratio"]
    return 230 // payload["ratio"] if "<= 256" in recipe.when else max(300, -(-300 // payload["ratio"]))


def _backward_shapes(payload: Mapping[str, Any]) -> tuple[tuple[str, dict[str, Any]], ...]:
    if payload["layout"] == "varlen":
        return (("packed", {"queries": [100, 211, 40], "keys": [90, 257, 41], "heads_kv": 1}),)
    return (("odd", {"queries": [200], "keys": [333], "heads_kv": 1}),)


# --- numbers ----------------------------------------------------------------------------------------------------------


def draw_forward(arguments: Mapping[str, Any], seed: int) -> Problem:
    """Inputs, out and lse of one forward, in any layout."""
    layout, dtype = arguments["layout"], arguments["dtype"]
    rng = np.random.default_rng(seed)
    heads = arguments["heads_kv"] * arguments["ratio"]
    sink = to_bits(rng.standard_normal(heads), "bf16") if arguments.get("sink") else None
    sequences = [_Sequence(arguments, rng, *lengths) for lengths in _lengths(arguments)]
    for sequence in sequences:
        sequence.attend(None if sink is None else from_bits(sink, "bf16"))
    out, lse = [s.out for s in sequences], [s.lse for s in sequences]
    inputs, scalars = _placed(arguments, sequences, rng), _scalars(arguments)
    return Problem(
        inputs=inputs if sink is None else {**inputs, "sink": sink},
        scalars=scalars,
        expected={
            "out": _within(_OUT_BOUND[dtype], np.concatenate(out) if layout == "varlen" else np.stack(out)),
            "lse": (np.concatenate(lse, axis=-1) if layout == "varlen" else np.stack(lse), _LSE_BOUND),
        },
    )


def draw_backward(arguments: Mapping[str, Any], seed: int) -> Problem:
    """Inputs, results of a forward, and gradients."""
    dtype, is_varlen = arguments["dtype"], arguments["layout"] == "varlen"
    rng = np.random.default_rng(seed)
    sequences = [_Sequence(arguments, rng, *lengths) for lengths in _lengths(arguments)]
    dout, gradients = [], []
    for sequence in sequences:
        sequence.attend()
        bits = to_bits(rng.standard_normal(sequence.out.shape), dtype)
        dout.append(bits)
        gradients.append(sequence.gradients(from_bits(bits, dtype)))
    join = np.concatenate if is_varlen else np.stack
    lse = [s.lse.astype(np.float32).view(np.uint32) for s in sequences]
    rounded = [to_bits(s.out, dtype) for s in sequences]
    return Problem(
        inputs={
            **_placed(arguments, sequences, rng),
            "out": join(rounded),
            "dout": join(dout),
            "lse": np.concatenate(lse, axis=-1) if is_varlen else np.stack(lse),
        },
        scalars=_scalars(arguments),
        expected={
            name: _within(_GRADIENT_BOUND[dtype], join([g[i] for g in gradients]))
            for i, name in enumerate(("dq", "dk", "dv"))
        },
    )


def _within(relative: float, answer: np.ndarray) -> tuple[np.ndarray, float]:
    """An answer with the absolute error that is allowed."""
    return answer, relative * max(1.0, float(np.abs(answer).max()))


class _Sequence:
    """Queries, keys and values of one sequence (bits and values), later its out (rows, heads, dim) and lse."""

    def __init__(self, arguments: Mapping[str, Any], rng: np.random.Generator, queries: int, keys: int) -> None:
        heads, dtype = arguments["heads_kv"], arguments["dtype"]
        shapes = (
            (queries, heads * arguments["ratio"], arguments["head_dim"]),
            (keys, heads, arguments["head_dim"]),
            (keys, heads, arguments["head_dim_v"]),
        )
        self.bits = tuple(to_bits(rng.standard_normal(shape), dtype) for shape in shapes)
        self.values = tuple(values_of(bits, dtype)[None] for bits in self.bits)
        self.scale = float(np.float32(arguments["head_dim"] ** -0.5))
        self.window, self.softcap = window(arguments["mask"]), arguments.get("softcap", 0.0)

    def attend(self, sink: np.ndarray | None = None) -> None:
        """Attention in float64; `sink` is a logit a head, which takes part in sums alone."""
        out, lse = reference(*self.values, self.scale, self.window, softcap=self.softcap, sink=sink)
        self.out, self.lse = out[0], lse[0]

    def gradients(self, dout: np.ndarray) -> tuple[np.ndarray, ...]:
        """dq, dk, dv in float64."""
        found = reference_gradients(*self.values, dout[None], self.scale, self.window)
        return found.dq[0], found.dk[0], found.dv[0]


def values_of(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Float64 of bit patterns, fp8 included."""
    if dtype != "e4m3":
        return from_bits(bits, dtype)
    sign, exponent, mantissa = bits >> 7, (bits >> 3 & 15).astype(int), (bits & 7).astype(float)
    magnitude = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    return np.where(sign == 1, -magnitude, magnitude)


def window(mask: str) -> tuple[int, int]:
    """(left, right) keys around the diagonal that a mask lets a query see."""
    return {
        "full": (UNBOUNDED_WINDOW, UNBOUNDED_WINDOW),
        "causal": (UNBOUNDED_WINDOW, 0),
        "local": _WINDOW,
    }[mask]


def _lengths(arguments: Mapping[str, Any]) -> list[tuple[int, int]]:
    return list(zip(arguments["queries"], arguments["keys"], strict=True))


def _scalars(arguments: Mapping[str, Any]) -> dict[str, int | float]:
    scalars: dict[str, int | float] = {"softmax_scale": float(np.float32(arguments["head_dim"] ** -0.5))}
    if arguments["mask"] == "local":
        scalars |= {"window_left": _WINDOW[0], "window_right": _WINDOW[1]}
    if arguments["layout"] == "varlen":
        scalars["max_seqlen_q"] = max(arguments["queries"])
    if "num_splits" in arguments:
        scalars["num_splits"] = arguments["num_splits"]
    return scalars


def _placed(
    arguments: Mapping[str, Any], sequences: list[_Sequence], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """q, k, v as the layout has them, with what tells the sequences apart."""
    q, k, v = zip(*(sequence.bits for sequence in sequences), strict=True)
    if arguments["layout"] == "varlen":
        starts = {
            f"cu_seqlens_{x}": _i32(np.cumsum([0, *arguments[lengths]]))
            for x, lengths in (("q", "queries"), ("k", "keys"))
        }
        return {"q": np.concatenate(q), "k": np.concatenate(k), "v": np.concatenate(v), **starts}
    if arguments["layout"] == "paged":
        return {"q": np.stack(q), **_pages(arguments, k, v, rng)}
    return {"q": np.stack(q), "k": np.stack(k), "v": np.stack(v)}


def _pages(
    arguments: Mapping[str, Any], k: tuple[np.ndarray, ...], v: tuple[np.ndarray, ...], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Pages in any order. One more than needed, and what no sequence uses of the others is NaN only where whole."""
    size = arguments["page_size"]
    counts = [-(-len(keys) // size) for keys in k]
    order = rng.permutation(sum(counts) + 1).tolist()
    table = np.zeros((len(k), max(counts)), np.int32)
    nan = {1: 0x7F, 2: 0x7FC1}[k[0].itemsize]
    found = {"k": np.full((len(order), size, *k[0].shape[1:]), nan, k[0].dtype)}
    found["v"] = np.full((len(order), size, *v[0].shape[1:]), nan, v[0].dtype)
    for i, count in enumerate(counts):
        for j in range(count):
            page = table[i, j] = order.pop()
            for name, rows in (("k", k[i]), ("v", v[i])):
                part = rows[j * size : (j + 1) * size]
                found[name][page] = 0
                found[name][page, : len(part)] = part
    return {**found, "page_table": _i32(table), "seqused_k": _i32(np.array([len(keys) for keys in k]))}


def _i32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32).view(np.uint32)
