"""Proof of kernels over packed sequences, pages, splits and features in the PTX simulator.

The runs are those of a dense proof (verify/simulated.py); cases, references and judgement are cases/varlen.py's and
cases/varlen_backward.py's. `prove_packed_case` is what tests of a kernel call, through verify.simulated.prove or
with a compiled variant's PTX and plan at hand.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fa4build.cases.bits import from_bits, to_bits
from fa4build.cases.schedules import Run
from fa4build.cases.varlen import PackedCase, Problem, draw_problem
from fa4build.cases.varlen_backward import draw_backward_problem
from fa4build.compiling.signature import TensorArg, signature_for
from fa4build.errors import Fa4BuildError
from fa4build.matrix.axes import Variant
from fa4build.plan import LaunchPlan
from fa4build.verify.runs import POISON, Request, device_scalars, execute, filled, poisoned

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_BYTES = {"bf16": 2, "fp16": 2, "e4m3": 1, "e5m2": 1, "f32": 4, "i32": 4}
_POISONS = {2: POISON, 4: POISON << 16 | POISON}


def drawer_of(variant: Variant) -> Callable[[Variant, PackedCase, int], Problem]:
    """What draws the problems of a variant."""
    return draw_backward_problem if variant.op.startswith("bwd") else draw_problem


def problem_of(variant: Variant, case: PackedCase, seed: int) -> Problem:
    """Inputs, outputs and judge."""
    return drawer_of(variant)(variant, case, seed)


def dtypes_of(variant: Variant) -> dict[str, str]:
    """Element types of a kernel's tensors, by argument name."""
    return {arg.name: arg.dtype for arg in signature_for(variant) if isinstance(arg, TensorArg)}


def prove_packed_case(
    variant: Variant, request: Request, plan: LaunchPlan, case: PackedCase, seed: int, runs: tuple[Run, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Runs of one case up to the first bad one: a row of figures (`ratio` <= 1 is allowed), and what is wrong."""
    problem = problem_of(variant, case, seed)
    dtypes = dtypes_of(variant)
    bits = {name: to_bits(x, dtypes[name]) for name, x in problem.inputs.items()}
    unwritten = tuple(name for name in problem.outputs if name not in bits)
    row: dict[str, Any] = {
        "case": case.name,
        "seed": seed,
        "ratio": 0.0,
        "lse_error": 0.0,
        "warp_instructions": 0,
        "notes": (),
    }
    first: dict[str, np.ndarray] | None = None
    for run in runs:
        where = f"{run.schedule} schedule" + (f" with seed {seed}" if run.schedule == "random" else "")
        buffers = {name: filled(x, run.padded) for name, x in bits.items()}
        for name in unwritten:
            word = _WORDS[_BYTES[dtypes[name]]]
            buffers[name] = poisoned(problem.outputs[name], word, run.padded)
        scalars = {**problem.scalars, **device_scalars(variant, run)}
        try:
            ran = execute(request, plan, buffers, tuple(problem.outputs), scalars, run, seed, unwritten)
        except Fa4BuildError as error:
            return row, (f"{where}: {error}",)
        row["warp_instructions"] += ran.warp_instructions
        row["notes"] = tuple(sorted({*row["notes"], *ran.notes}))
        found = {name: buffers[name].view.copy() for name in problem.outputs}
        if first is None or not _equal(first, found):  # equal bits have one verdict
            verdict = problem.judge({name: _values(x, dtypes[name]) for name, x in found.items()})
        row["ratio"] = max(row["ratio"], verdict.ratio)
        row["lse_error"] = max(row["lse_error"], verdict.lse_error)
        faults = [*ran.faults, *verdict.wrong]
        first = first or found
        faults += _differences(problem, first, found, runs[0].schedule)
        if faults:
            return row, tuple(f"{where}: {fault}" for fault in faults)
    return row, ()


def _equal(first: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> bool:
    return all(np.array_equal(first[name], found[name]) for name in found)


def _values(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Float64 values; NaN is what nobody wrote, and a NaN that a kernel wrote is inf."""
    if dtype == "i32":
        return np.where(bits == _POISONS[4], np.nan, bits.view(np.int32).astype(np.float64))
    values = from_bits(bits, dtype)
    return np.where(np.isnan(values) & (bits != _POISONS[bits.itemsize]), np.inf, values)


def _differences(problem: Problem, first: Mapping, found: Mapping, schedule: str) -> list[str]:
    """Outputs whose bits must not depend on the schedule, and do."""
    faults = []
    for name in sorted(set(first) - problem.free_bits):
        places = np.argwhere(first[name] != found[name])
        if len(places):
            place = tuple(places[0].tolist())
            faults.append(f"{name} has other bits than in the {schedule} schedule, first at {place}")
    return faults
