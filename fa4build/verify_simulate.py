"""Proof of a forward kernel in the PTX simulator: every acceptance case, under several schedules and memory layouts.

Each case is launched through the product's plan with every check of the simulator: in order, then adversarially, late
(asynchronous work happens as late as it may, warps in reverse) and in seeded random order. The adversarial runs also
change what must not matter: strides, guard zones around every tensor, how many multiprocessors there are. All runs of
a case must give the same bits, and those must be attention (acceptance.py).
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fa4build.acceptance import (
    MANTISSA_BITS,
    Case,
    cases_for,
    draw_inputs,
    lse_error,
    output_bound,
    reference,
    round_to,
    same_dtype_attention,
    window_of,
)
from fa4build.arch import arch_named
from fa4build.axes import Variant
from fa4build.codegen.launch_plan import LaunchPlan, evaluate, failed_guard, plan_from_json
from fa4build.errors import Fa4BuildError, SimulationError
from fa4build.simulate import GlobalMemory, plan_inputs, simulate_launch
from fa4build.variants import parse_variant

LSE_TOLERANCE = 1e-4  # relative to max(1, |lse|); single precision with approximate exp2 and log2 gives 1e-6
MAX_FAILURES = 3  # a broken kernel is broken in every case: the first ones say enough

POISON = 0x7FC1  # a quiet NaN in bfloat16, in float16, and twice in float32
_GUARD = {2: POISON, 4: POISON << 16 | POISON}
_L2_BYTES = 50 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way to execute a case; all ways must give the same bits.

    Attributes:
        schedule: of the simulator, `eager`, `late` or `random`.
        padded: gaps between heads and tokens and guard zones around every tensor, filled with NaN; else compact, where
            the simulator itself stops any access that leaves a tensor.
        num_sms: multiprocessors the kernel is told of. Few make persistent blocks take several tiles.
        checks: races, fences, uninitialised reads and leftovers are looked for.
        by_warp: warps never run in lockstep.
    """

    schedule: str
    padded: bool
    num_sms: int
    checks: bool = False
    by_warp: bool = False
    concurrent_clusters: int = 1


RUNS = (
    Run(schedule="eager", padded=False, num_sms=132, checks=True),
    Run(schedule="late", padded=True, num_sms=2, checks=True),
    Run(schedule="random", padded=True, num_sms=3, checks=True, by_warp=True, concurrent_clusters=2),
)
"""The first is compared with the reference; the others with the first, bit by bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A kernel to prove, as plain data for another process.

    `sha256` is over all that the outcome depends on but the seeds: a proof with more seeds covers one with fewer.
    """

    variant_id: str
    ptx: str
    plan: str
    registers: int
    seeds: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The outcome: what goes into the evidence, one row a case, and a sentence for each thing that is wrong."""

    summary: Mapping[str, Any]
    runs: tuple[Mapping[str, Any], ...]
    failures: tuple[str, ...]


def request_for(variant: Variant, *, ptx: str, plan: str, registers: int, seeds: tuple[int, ...]) -> Request:
    """The request to prove a compiled variant.

    Args:
        registers: a thread has at launch (from the cubin).
        seeds: each draws inputs of its own and a random schedule.
    """
    parts = [
        variant.id,
        hashlib.sha256(ptx.encode()).hexdigest(),
        hashlib.sha256(plan.encode()).hexdigest(),
        registers,
        [dataclasses.asdict(case) for case in _cases(variant)],
        [dataclasses.asdict(run) for run in RUNS],
        simulator_sha256(),
    ]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return Request(variant_id=variant.id, ptx=ptx, plan=plan, registers=registers, seeds=seeds, sha256=digest)


def covers(summary: Mapping[str, Any], request: Request) -> bool:
    """Whether evidence from before already proves what is asked for."""
    return summary.get("proof_sha256") == request.sha256 and set(request.seeds) <= set(summary.get("seeds", ()))


@functools.cache
def simulator_sha256() -> str:
    """Digest of every source and table that decides what a simulation says."""
    here = Path(__file__).parent
    paths = [here / name for name in ("acceptance.py", "verify_simulate.py", "codegen/plan_evaluate.py")]
    paths += (path for path in (here / "simulate").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(here).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def has_cases(variant: Variant) -> bool:
    """Whether there are acceptance cases: for dense 16-bit forward kernels."""
    return variant.op == "fwd" and variant.layout == "dense" and variant.dtype in MANTISSA_BITS


def _cases(variant: Variant) -> tuple[Case, ...]:
    if not has_cases(variant):
        raise SimulationError(
            f"{variant.id}: there are acceptance cases for dense 16-bit forward kernels only. "
            "Leave it out with a GLOB, or verify it with --static."
        )
    return cases_for(variant)


def prove(request: Request, tell: Callable[[str], None]) -> Proof:
    """Run every acceptance case; `tell` gets a line at the start of each. A failing kernel is no error."""
    variant, plan = parse_variant(request.variant_id), plan_from_json(request.plan)
    cases = _cases(variant)
    rows: list[Mapping[str, Any]] = []
    failures: list[str] = []
    for seed in request.seeds:
        for number, case in enumerate(cases, 1):
            if len(failures) >= MAX_FAILURES:
                break
            tell(f"case {number}/{len(cases)} {case.name}")
            row, faults = prove_case(variant, request, plan, case, seed)
            rows.append(row)
            failures += [f"case {case.name} ({case.shape}, seed {seed}): {fault}" for fault in faults]
    if len(failures) >= MAX_FAILURES:
        failures.append("further cases were not run")
    return Proof(summary=_summary(request, rows), runs=tuple(rows), failures=tuple(failures))


def _summary(request: Request, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Evidence: what was run under what, and the worst that was seen."""
    return {
        "proof_sha256": request.sha256,
        "simulator_sha256": simulator_sha256(),
        "cases": len({row["case"] for row in rows}),
        "seeds": list(request.seeds),
        "schedules": [run.schedule for run in RUNS],
        "checked_schedules": [run.schedule for run in RUNS if run.checks],
        "warp_instructions": sum(row["warp_instructions"] for row in rows),
        "worst_ratio": max((row["ratio"] for row in rows), default=0.0),
        "worst_lse_error": max((row["lse_error"] for row in rows), default=0.0),
        "notes": len({note for row in rows for note in row["notes"]}),
    }


# --- one case ---------------------------------------------------------------------------------------------------------


def prove_case(
    variant: Variant, request: Request, plan: LaunchPlan, case: Case, seed: int, runs: tuple[Run, ...] = RUNS
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Runs of one case up to the first bad one: a row of figures (`ratio` <= 1 is allowed), and what is wrong."""
    drawn = draw_inputs(case, variant.head_dim, variant.head_dim_v, seed)
    row = {"case": case.name, "seed": seed, "ratio": 0.0, "lse_error": 0.0, "warp_instructions": 0, "notes": ()}
    first: _Outputs | None = None
    for run in runs:
        where = f"{run.schedule} schedule" + (f" with seed {seed}" if run.schedule == "random" else "")
        try:
            outputs = _execute(variant, request, plan, case, drawn, run, seed)
        except Fa4BuildError as error:
            return row, (f"{where}: {error}",)
        row["warp_instructions"] += outputs.warp_instructions
        row["notes"] = tuple(sorted({*row["notes"], *outputs.notes}))
        faults = list(outputs.faults)
        if first is None:
            first = outputs
            row["ratio"], row["lse_error"], wrong = _judge(variant, case, drawn, outputs)
            faults += wrong
        elif not (np.array_equal(first.out, outputs.out) and np.array_equal(first.lse, outputs.lse)):
            faults.append(
                f"other bits than in the {runs[0].schedule} schedule, first at {_first_difference(first, outputs)}"
            )
        if faults:
            return row, tuple(f"{where}: {fault}" for fault in faults)
    return row, ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    """Bit patterns of out (u16) and lse (u32) after a run, and faults seen in memory."""

    out: np.ndarray
    lse: np.ndarray
    warp_instructions: int
    notes: tuple[str, ...]
    faults: tuple[str, ...]


def _execute(
    variant: Variant,
    request: Request,
    plan: LaunchPlan,
    case: Case,
    drawn: tuple[np.ndarray, ...],
    run: Run,
    seed: int,
) -> _Outputs:
    """One run. Raises: SimulationError as the simulator does, and when the plan refuses the case."""
    shapes = {"out": ((*drawn[0].shape[:3], variant.head_dim_v), np.uint16)}
    shapes["lse"] = ((case.batch, case.num_heads_q, case.seqlen_q), np.uint32)
    buffers = {name: _filled(to_bits(x, variant.dtype), run.padded) for name, x in zip("qkv", drawn, strict=True)}
    buffers |= {name: _poisoned(shape, dtype, run.padded) for name, (shape, dtype) in shapes.items()}
    before = {name: buffer.whole.copy() for name, buffer in buffers.items()}
    memory = GlobalMemory()
    arrays = {name: buffer.view for name, buffer in buffers.items()}
    inputs = plan_inputs(plan, memory, arrays, _scalars(variant, case, run))
    if (refusal := failed_guard(plan, inputs)) is not None:
        raise SimulationError(f"the plan refuses a problem it must take: {refusal}")
    reports = [
        simulate_launch(
            request.ptx,
            launch,
            memory,
            registers=request.registers,
            by_warp=run.by_warp,
            checks=run.checks,
            schedule=run.schedule,
            seed=seed,
            concurrent_clusters=run.concurrent_clusters,
        )
        for launch in evaluate(plan, inputs)
        if not launch.is_empty
    ]
    return _Outputs(
        out=arrays["out"].copy(),
        lse=arrays["lse"].copy(),
        warp_instructions=sum(report.warp_instructions for report in reports),
        notes=tuple(note for report in reports for note in report.notes),
        faults=tuple(_memory_faults(buffers, before)),
    )


def _scalars(variant: Variant, case: Case, run: Run) -> dict[str, int | float]:
    window_left, window_right = window_of(case, variant.mask)
    return {
        "softmax_scale": softmax_scale(variant),
        "window_left": window_left,
        "window_right": window_right,
        "num_sms": run.num_sms,
        "dev.sm_count": run.num_sms,
        "dev.smem_optin": arch_named(variant.arch).smem_bytes,
        "dev.l2_bytes": _L2_BYTES,
    }


def softmax_scale(variant: Variant) -> float:
    """1/sqrt(head_dim) as the single-precision argument holds it."""
    return float(np.float32(variant.head_dim**-0.5))


def _judge(
    variant: Variant, case: Case, drawn: tuple[np.ndarray, ...], outputs: _Outputs
) -> tuple[float, float, list[str]]:
    """(error of out over its bound, error of lse, what is wrong), against float64."""
    rounded = tuple(round_to(x, variant.dtype) for x in drawn)
    scale, window = softmax_scale(variant), window_of(case, variant.mask)
    ref, ref_lse = reference(*rounded, scale, window)
    same = same_dtype_attention(*rounded, scale, window, variant.dtype)
    out, lse = from_bits(outputs.out, variant.dtype), outputs.lse.view(np.float32)
    if np.isnan(out).any() or np.isnan(lse).any():
        return float("inf"), float("inf"), [_nan_report(out, lse)]
    bound = output_bound(ref, same, variant.dtype)
    errors = np.abs(out - ref)
    ratio = float(errors.max() / bound) if bound else float(errors.max() > 0)
    lse_off = lse_error(lse, ref_lse)
    wrong = []
    if not ratio <= 1:
        place = tuple(int(i) for i in np.unravel_index(errors.argmax(), errors.shape))
        wrong.append(
            f"out is off by {errors.max():.3g} at (batch, query, head, column) {place}; {bound:.3g} is allowed"
        )
    if not lse_off <= LSE_TOLERANCE:
        wrong.append(f"lse is off by {lse_off:.3g}; {LSE_TOLERANCE} is allowed")
    return ratio, lse_off, wrong


def _nan_report(out: np.ndarray, lse: np.ndarray) -> str:
    rows = np.argwhere(np.isnan(out).any(axis=-1))
    if len(rows):
        return f"NaN or unwritten in {len(rows)} rows of out, first at (batch, query, head) {tuple(rows[0].tolist())}"
    rows = np.argwhere(np.isnan(lse))
    return f"NaN or unwritten in {len(rows)} values of lse, first at (batch, head, query) {tuple(rows[0].tolist())}"


def _first_difference(first: _Outputs, other: _Outputs) -> str:
    for name, axes in (("out", "(batch, query, head, column)"), ("lse", "(batch, head, query)")):
        places = np.argwhere(getattr(first, name) != getattr(other, name))
        if len(places):
            return f"{name} {axes} {tuple(places[0].tolist())}, {len(places)} in all"
    raise AssertionError("equal outputs have no difference")


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffer:
    """A tensor (`view`) and the memory it lies in (`whole`, the same where there is nothing around it)."""

    whole: np.ndarray
    view: np.ndarray


def _poisoned(shape: tuple[int, ...], dtype: type, padded: bool) -> _Buffer:
    """NaN everywhere. Padded: one more of every inner extent and 16 bytes or more a row, strides multiples of 16."""
    if padded:
        row = 16 // np.dtype(dtype).itemsize
        around = (0, *(1 for _ in shape[1:-1]), row + -shape[-1] % row)
    else:
        around = (0,) * len(shape)
    whole = np.full(
        [extent + more for extent, more in zip(shape, around, strict=True)], _GUARD[dtype().itemsize], dtype
    )
    return _Buffer(whole=whole, view=whole[tuple(slice(extent) for extent in shape)])


def _filled(bits: np.ndarray, padded: bool) -> _Buffer:
    buffer = _poisoned(bits.shape, bits.dtype.type, padded)
    buffer.view[...] = bits
    return buffer


def _memory_faults(buffers: Mapping[str, _Buffer], before: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Inputs and everything around outputs must be as they were."""
    for name, buffer in buffers.items():
        changed = buffer.whole != before[name]
        if name in ("out", "lse"):
            changed[tuple(slice(extent) for extent in buffer.view.shape)] = False
        if changed.any():
            place = tuple(np.argwhere(changed)[0].tolist())
            what = "outside" if name in ("out", "lse") else "into"
            yield f"wrote {what} {name}: {int(changed.sum())} elements, first at index {place} of {buffer.whole.shape}"


def to_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """Bit patterns (u16) of values rounded to nearest even in `bf16` or `fp16`."""
    if dtype == "fp16":
        return round_to(x, dtype).astype(np.float16).view(np.uint16)
    return (round_to(x, dtype).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Values in float64 of u16 bit patterns."""
    bits = np.ascontiguousarray(bits)
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
