"""Proof of the three backward kernels in the PTX simulator; the runs are those of a forward proof
(verify/simulated.py).

Each op is proven alone, from inputs that a right predecessor would hand it. Main kernel: gradients against float64
(cases/backward.py); dk and dv have the same bits in all runs, dq_accum too where the kernel is deterministic.
Preprocess: row sums and log-sum-exp against float64, zeros and padding exactly. Postprocess: every bit.
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from fa4build.cases.backward import (
    Gradients,
    draw_gradient,
    forward_results,
    gradient_bounds,
    gradient_errors,
    reference_gradients,
    same_dtype_gradients,
)
from fa4build.cases.bits import from_bits, to_bits
from fa4build.cases.forward import Case, draw_inputs, round_to, window_of
from fa4build.cases.schedules import Run
from fa4build.errors import Fa4BuildError
from fa4build.matrix.axes import Variant
from fa4build.plan import LaunchPlan
from fa4build.verify.runs import Request, execute, filled, poisoned, scalars_for, softmax_scale

ROWS = 128  # queries of a tile: workspaces are rounded up to it (docs/formats.md)
LOG2_E = 1.4426950408889634
ROW_SUM_TOLERANCE = 1e-5  # relative to max(1, sum of magnitudes): a float32 sum of 256 products gives 1e-6
LSE_TOLERANCE = 1e-6  # relative to max(1, |lse_log2|): one float32 product


def prove_backward_case(
    variant: Variant, request: Request, plan: LaunchPlan, case: Case, seed: int, runs: tuple[Run, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Runs of one case up to the first bad one: a row of figures (`ratio` <= 1 is allowed), and what is wrong."""
    inputs, outputs = _PROBLEMS[variant.op](variant, case, seed)
    row = {"case": case.name, "seed": seed, "ratio": 0.0, "lse_error": 0.0, "warp_instructions": 0, "notes": ()}
    first: dict[str, np.ndarray] | None = None
    unwritten = tuple(name for name in outputs if name not in inputs)
    for run in runs:
        where = f"{run.schedule} schedule" + (f" with seed {seed}" if run.schedule == "random" else "")
        buffers = {name: filled(bits, run.padded) for name, bits in inputs.items()}
        buffers |= {name: poisoned(*outputs[name], run.padded) for name in unwritten}
        scalars = scalars_for(variant, case, run) | {"scale": softmax_scale(variant)}
        try:
            ran = execute(request, plan, buffers, tuple(outputs), scalars, run, seed, unwritten)
        except Fa4BuildError as error:
            return row, (f"{where}: {error}",)
        row["warp_instructions"] += ran.warp_instructions
        row["notes"] = tuple(sorted({*row["notes"], *ran.notes}))
        found = {name: buffers[name].view.copy() for name in outputs}
        faults = list(ran.faults)
        if first is None or any(not np.array_equal(first[name], found[name]) for name in found):
            ratio, wrong = _JUDGES[variant.op](variant, case, seed, found)  # equal bits have one verdict
        row["ratio"] = max(row["ratio"], ratio)
        faults += wrong
        if first is None:
            first = found
        faults += _differences(variant, first, found, runs[0].schedule)
        if faults:
            return row, tuple(f"{where}: {fault}" for fault in faults)
    return row, ()


def _differences(variant: Variant, first: Mapping, found: Mapping, schedule: str) -> list[str]:
    """Outputs whose bits must not depend on the schedule, and do."""
    free = ("dq_accum", "dq_semaphore") if variant.op == "bwd" and not variant.deterministic else ("dq_semaphore",)
    faults = []
    for name in set(first) - set(free):
        places = np.argwhere(first[name] != found[name])
        if len(places):
            faults.append(
                f"{name} has other bits than in the {schedule} schedule, first at {tuple(places[0].tolist())}"
            )
    return sorted(faults)


def _rounded_up(seqlen: int) -> int:
    return -(-seqlen // ROWS) * ROWS


@functools.lru_cache(maxsize=1)  # one case at a time, in several runs
def _drawn(variant: Variant, case: Case, seed: int) -> tuple[np.ndarray, ...]:
    """q, k, v, dout, rounded to the type, and the forward's out and lse."""
    q, k, v = (round_to(x, variant.dtype) for x in draw_inputs(case, variant.head_dim, variant.head_dim_v, seed))
    dout = round_to(draw_gradient(case, variant.head_dim_v, seed), variant.dtype)
    out, lse = forward_results(q, k, v, softmax_scale(variant), window_of(case, variant.mask), variant.dtype)
    if variant.op == "bwd_preprocess":
        lse[..., ::7] = -np.inf  # as of queries that see no key
    return q, k, v, dout, out, lse


# --- main kernel ------------------------------------------------------------------------------------------------------


def _main_problem(variant: Variant, case: Case, seed: int):
    q, k, v, dout, out, lse = _drawn(variant, case, seed)
    rows = _rounded_up(case.seqlen_q)
    row_shape = (case.batch, case.num_heads_q, rows)
    inputs = {name: to_bits(x, variant.dtype) for name, x in {"q": q, "k": k, "v": v, "dout": dout}.items()}
    lse_log2, dpsum = np.full(row_shape, np.inf, np.float32), np.zeros(row_shape, np.float32)
    lse_log2[..., : case.seqlen_q] = np.where(np.isneginf(lse), np.inf, lse * np.float32(LOG2_E))
    dpsum[..., : case.seqlen_q] = (out * dout).sum(axis=-1).transpose(0, 2, 1)
    inputs |= {"lse_log2": lse_log2.view(np.uint32), "dpsum": dpsum.view(np.uint32)}
    inputs["dq_accum"] = np.zeros((*row_shape, variant.head_dim), np.uint32)
    inputs["dq_semaphore"] = np.zeros((case.batch, case.num_heads_q, rows // ROWS), np.uint32)
    outputs = {name: (inputs[name].shape, np.uint32) for name in ("dq_accum", "dq_semaphore")}
    outputs |= {"dk": (k.shape, np.uint16), "dv": (v.shape, np.uint16)}
    return inputs, outputs


@functools.lru_cache(maxsize=1)
def _expected_gradients(variant: Variant, case: Case, seed: int) -> tuple[Gradients, dict[str, float]]:
    """The gradients in float64, and the largest error allowed for each."""
    q, k, v, dout, _, _ = _drawn(variant, case, seed)
    scale, window = softmax_scale(variant), window_of(case, variant.mask)
    ref = reference_gradients(q, k, v, dout, scale, window)
    return ref, gradient_bounds(ref, same_dtype_gradients(q, k, v, dout, scale, window, variant.dtype), variant.dtype)


def _judge_main(variant: Variant, case: Case, seed: int, found: Mapping) -> tuple[float, list[str]]:
    *_, lse = _drawn(variant, case, seed)
    accumulated = found["dq_accum"].view(np.float32)[:, :, : case.seqlen_q].transpose(0, 2, 1, 3)
    gradients = Gradients(
        dq=round_to(accumulated * np.float32(softmax_scale(variant)), variant.dtype),
        dk=from_bits(found["dk"], variant.dtype),
        dv=from_bits(found["dv"], variant.dtype),
    )
    ref, bounds = _expected_gradients(variant, case, seed)
    errors = gradient_errors(gradients, ref)
    wrong = [
        f"{name} is off by {error:.3g}; {bounds[name]:.3g} is allowed"
        for name, error in errors.items()
        if not error <= bounds[name]
    ]
    if gradients.dq[np.isneginf(lse).transpose(0, 2, 1)].any():
        wrong.append("dq of a query that sees no key is not 0")
    return max(errors[name] / bounds[name] for name in errors), wrong


# --- preprocess -------------------------------------------------------------------------------------------------------


def _preprocess_problem(variant: Variant, case: Case, seed: int):
    *_, dout, out, lse = _drawn(variant, case, seed)
    rows = _rounded_up(case.seqlen_q)
    row_shape = (case.batch, case.num_heads_q, rows)
    inputs = {"out": to_bits(out, variant.dtype), "dout": to_bits(dout, variant.dtype), "lse": lse.view(np.uint32)}
    outputs = dict.fromkeys(("dpsum", "lse_log2"), (row_shape, np.uint32))
    outputs["dq_accum"] = ((*row_shape, variant.head_dim), np.uint32)
    outputs["dq_semaphore"] = ((case.batch, case.num_heads_q, rows // ROWS), np.uint32)
    return inputs, outputs


def _judge_preprocess(variant: Variant, case: Case, seed: int, found: Mapping) -> tuple[float, list[str]]:
    *_, dout, out, lse = _drawn(variant, case, seed)
    products = (out * dout).transpose(0, 2, 1, 3)
    dpsum, lse_log2 = found["dpsum"].view(np.float32), found["lse_log2"].view(np.float32)
    n = case.seqlen_q
    off = np.abs(dpsum[..., :n] - products.sum(axis=-1)) / np.maximum(1, np.abs(products).sum(axis=-1))
    is_empty = np.isneginf(lse)
    expected = np.where(is_empty, 0, lse).astype(np.float64) * LOG2_E
    lse_off = np.where(is_empty, 0, np.abs(lse_log2[..., :n] - expected) / np.maximum(1, np.abs(expected)))
    checks = {
        "dpsum is off": bool((off <= ROW_SUM_TOLERANCE).all()),
        "dpsum is not 0 in the padding": not dpsum[..., n:].any(),
        "lse_log2 is off": bool((lse_off[~is_empty] <= LSE_TOLERANCE).all()),
        "lse_log2 is not inf where lse is -inf": bool(np.isposinf(lse_log2[..., :n][is_empty]).all()),
        "lse_log2 is not inf in the padding": bool(np.isposinf(lse_log2[..., n:]).all()),
        "dq_accum is not 0": not found["dq_accum"].any(),
        "dq_semaphore is not 0": not found["dq_semaphore"].any(),
    }
    return float(off.max() / ROW_SUM_TOLERANCE), [what for what, holds in checks.items() if not holds]


# --- postprocess ------------------------------------------------------------------------------------------------------


def _accumulator(variant: Variant, case: Case, seed: int) -> np.ndarray:
    shape = (case.batch, case.num_heads_q, _rounded_up(case.seqlen_q), variant.head_dim)
    return np.random.default_rng((seed, 2)).standard_normal(shape, dtype=np.float32)


def _postprocess_problem(variant: Variant, case: Case, seed: int):
    accumulator = _accumulator(variant, case, seed)
    gradient = (case.batch, case.seqlen_q, case.num_heads_q, variant.head_dim)
    return {"accumulator": accumulator.view(np.uint32)}, {"gradient": (gradient, np.uint16)}


def _judge_postprocess(variant: Variant, case: Case, seed: int, found: Mapping) -> tuple[float, list[str]]:
    scaled = _accumulator(variant, case, seed) * np.float32(softmax_scale(variant))
    expected = to_bits(scaled[:, :, : case.seqlen_q].transpose(0, 2, 1, 3), variant.dtype)
    different = np.argwhere(expected != found["gradient"])
    if len(different):
        return float("inf"), [f"gradient has {len(different)} wrong elements, first at {tuple(different[0].tolist())}"]
    return 0.0, []


_PROBLEMS = {"bwd": _main_problem, "bwd_preprocess": _preprocess_problem, "bwd_postprocess": _postprocess_problem}
_JUDGES = {"bwd": _judge_main, "bwd_preprocess": _judge_preprocess, "bwd_postprocess": _judge_postprocess}
