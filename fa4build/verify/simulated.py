"""Proof of a forward kernel in the PTX simulator: every acceptance case, under several schedules and memory layouts.

Each case is launched through the product's plan with every check of the simulator: in order, then adversarially, late
(asynchronous work happens as late as it may, warps in reverse) and in seeded random order. The adversarial runs also
change what must not matter: strides, guard zones around every tensor, how many multiprocessors there are. All runs of
a case must give the same bits, and those must be attention (cases/forward.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4build.cases.bits import from_bits, to_bits
from fa4build.cases.forward import (
    Case,
    draw_inputs,
    lse_error,
    output_bound,
    reference,
    round_to,
    same_dtype_attention,
    window_of,
)
from fa4build.cases.of_variant import cases_of_variant, is_packed
from fa4build.cases.schedules import Run, runs_of, runs_of_case
from fa4build.errors import Fa4BuildError
from fa4build.matrix.arch import arch_named
from fa4build.matrix.axes import Variant
from fa4build.matrix.variants import parse_variant
from fa4build.plan import LaunchPlan, plan_from_json
from fa4build.verify.backward import prove_backward_case
from fa4build.verify.chain import CASES as CHAIN_CASES
from fa4build.verify.chain import prove_chain_case
from fa4build.verify.code_identity import place_of
from fa4build.verify.engines import DEFAULT, engine_named
from fa4build.verify.identity import Prover, PtxForm, digest_of, plan_sha256, ptx_form
from fa4build.verify.pool import now_in
from fa4build.verify.runs import Link, Request, execute, filled, poisoned, scalars_for, softmax_scale
from fa4build.verify.varlen import drawer_of, dtypes_of, prove_packed_case

LSE_TOLERANCE = 1e-4  # relative to max(1, |lse|); single precision with approximate exp2 and log2 gives 1e-6
CHAIN_RUNS = 2  # of the engine's: each kernel of a chain has passed in all of them
MAX_FAILURES = 3  # a broken kernel is broken in every case: the first ones say enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The outcome: what goes into the evidence, one row a case, and a sentence for each thing that is wrong."""

    summary: Mapping[str, Any]
    runs: tuple[Mapping[str, Any], ...]
    failures: tuple[str, ...]


def request_for(
    variant: Variant,
    *,
    ptx: str,
    plan: str,
    registers: int,
    seeds: tuple[int, ...],
    chain: tuple[Link, ...] = (),
    form_of: Callable[[str], PtxForm] = ptx_form,
    engine: str = DEFAULT,
) -> Request:
    """The request to prove a compiled variant. Kernels that differ in names, in the name of their Blackwell target, or
    in what they were compiled from alone have equal digests.

    Args:
        registers: a thread has at launch (from the cubin).
        chain: the compiled `companions_of` the variant, to prove whole gradients as well; empty leaves that out.
        seeds: each draws inputs of its own and a random schedule.
        form_of: what reads a PTX text.
        engine: by which it is to be proven; a proof in one is none in another.
    """
    form = form_of(ptx)
    sha256 = digest_of(
        [
            variant.id.replace("sm103a", "sm100a"),
            _kernel_digests(form, plan, registers),
            _facts(variant),
            [dataclasses.asdict(case) for case in cases_of_variant(variant)],
            runs_document(engine),
            code_sha256(variant, form.opcodes, engine),
        ]
    )
    return Request(
        variant_id=variant.id,
        ptx=ptx,
        plan=plan,
        registers=registers,
        seeds=seeds,
        sha256=sha256,
        chain=chain,
        chain_sha256=_chain_sha256(sha256, chain, form_of, engine) if chain else "",
        engine=engine,
    )


def _chain_sha256(sha256: str, chain: tuple[Link, ...], form_of: Callable[[str], PtxForm], engine: str) -> str:
    forms = [form_of(link.ptx) for link in chain]
    links = [
        [link.op, *_kernel_digests(form, link.plan, link.registers)] for link, form in zip(chain, forms, strict=True)
    ]
    opcodes = {opcode for form in forms for opcode in form.opcodes}
    code = own_prover(engine).sha256([place_of(_prove_chain)], opcodes)
    return digest_of([sha256, links, [dataclasses.asdict(case) for case in CHAIN_CASES], code])


def _kernel_digests(form: PtxForm, plan: str, registers: int) -> list[str | int]:
    return [form.sha256, plan_sha256(plan, form), registers]


def _facts(variant: Variant) -> dict[str, Any]:
    """What a run takes from tables that also hold much else, as values."""
    dtypes = dtypes_of(variant) if is_packed(variant) else {}
    return {"smem_bytes": arch_named(variant.arch).smem_bytes, "dtypes": dtypes}


def code_sha256(variant: Variant, opcodes: Iterable[str], engine: str = DEFAULT, prover: Prover | None = None) -> str:
    """Digest of the code that proves a kernel of these opcodes; `prover`: of other sources than those that run here."""
    drawing = (drawer_of(variant),) if is_packed(variant) else ()
    functions = [place_of(function) for function in (prove, case_prover(variant), *drawing)]
    return (prover or own_prover(engine)).sha256(functions, opcodes)


@functools.cache
def own_prover(engine: str) -> Prover:
    """The code that runs here."""
    return Prover(given(), engine)


def given() -> tuple[Any, ...]:
    """What a request's digest holds as values: which kernel it is, its cases, facts, and who proves it."""
    chosen = (cases_of_variant, case_prover, _prove_chain, drawer_of, summary_of, engine_named, now_in)
    return (Variant, parse_variant, arch_named, dtypes_of, *chosen)


def runs_document(engine: str) -> list[Any]:
    """The runs of a proof in an engine, as far as they decide what happens."""
    return [dataclasses.asdict(run) for run in engine_named(engine).runs]


def covers_kernel(summary: Mapping[str, Any], request: Request) -> bool:
    """Whether evidence from before already proves the kernel alone."""
    return summary.get("proof_sha256") == request.sha256 and set(request.seeds) <= set(summary.get("seeds", ()))


def covers(summary: Mapping[str, Any], request: Request) -> bool:
    """Whether evidence from before already proves all that is asked for."""
    chain_known = not request.chain or summary.get("chain_sha256") == request.chain_sha256
    return covers_kernel(summary, request) and chain_known


def case_prover(variant: Variant) -> Callable[..., tuple[dict[str, Any], tuple[str, ...]]]:
    """What runs one case of a variant."""
    if is_packed(variant):
        return prove_packed_case
    return prove_case if variant.op == "fwd" else prove_backward_case


def prove(request: Request, tell: Callable[[str], None]) -> Proof:
    """Run every acceptance case; `tell` gets a line at the start of each. A failing kernel is no error."""
    variant = parse_variant(request.variant_id)
    rows: list[Mapping[str, Any]] = []
    failures: list[str] = []
    if request.proven is None:
        _prove_cases(variant, request, tell, rows, failures)
    summary = dict(request.proven or summary_of(request.sha256, request.seeds, rows, request.engine))
    if request.chain and not failures:
        of_chain: list[Mapping[str, Any]] = []
        _prove_chain(variant, request, tell, of_chain, failures)
        summary["chain_sha256"] = request.chain_sha256
        summary["chain_cases"] = len({row["case"] for row in of_chain})
        summary["chain_worst_ratio"] = max((row["ratio"] for row in of_chain), default=0.0)
        rows += of_chain
    if len(failures) >= MAX_FAILURES:
        failures.append("further cases were not run")
    return Proof(summary=summary, runs=tuple(rows), failures=tuple(failures))


def _prove_cases(
    variant: Variant, request: Request, tell: Callable[[str], None], rows: list[Mapping[str, Any]], failures: list[str]
) -> None:
    """Every acceptance case of the kernel alone; adds to `rows` and `failures`."""
    plan, cases, prove_one = plan_from_json(request.plan), cases_of_variant(variant), case_prover(variant)
    for seed in request.seeds:
        for number, case in enumerate(cases, 1):
            if len(failures) >= MAX_FAILURES:
                return
            tell(f"case {number}/{len(cases)} {case.name}")
            runs = runs_of_case(request.engine, number - 1, getattr(case, "num_runs", None))
            row, faults = prove_one(variant, request, plan, case, seed, runs)
            rows.append(row)
            failures += [f"case {case.name} ({case.shape}, seed {seed}): {fault}" for fault in faults]


def _prove_chain(
    variant: Variant, request: Request, tell: Callable[[str], None], rows: list[Mapping[str, Any]], failures: list[str]
) -> None:
    """Whole gradients with the kernel among its companions; adds to `rows` and `failures`."""
    runs = engine_named(request.engine).runs[:CHAIN_RUNS]
    for seed in request.seeds:
        for case in CHAIN_CASES:
            tell(f"{case.name}: forward to postprocess")
            row, faults = prove_chain_case(variant, request, case, seed, runs)
            rows.append(row)
            failures += [f"case {case.name} ({case.shape}, seed {seed}): {fault}" for fault in faults]


def summary_of(sha256: str, seeds: tuple[int, ...], rows: Sequence[Mapping[str, Any]], engine: str) -> dict[str, Any]:
    """Evidence: what was run under what, and the worst that was seen."""
    runs = runs_of(engine)
    return {
        "proof_sha256": sha256,
        "engine": engine,
        "cases": len({row["case"] for row in rows}),
        "seeds": list(seeds),
        "schedules": [run.schedule for run in runs],
        "checked_schedules": [run.schedule for run in runs if run.checks],
        "warp_instructions": sum(row["warp_instructions"] for row in rows),
        "worst_ratio": max((row["ratio"] for row in rows), default=0.0),
        "worst_lse_error": max((row["lse_error"] for row in rows), default=0.0),
        "notes": len({note for row in rows for note in row["notes"]}),
    }


# --- one case ---------------------------------------------------------------------------------------------------------


def prove_case(
    variant: Variant, request: Request, plan: LaunchPlan, case: Case, seed: int, runs: tuple[Run, ...]
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
    buffers = {name: filled(to_bits(x, variant.dtype), run.padded) for name, x in zip("qkv", drawn, strict=True)}
    buffers |= {name: poisoned(shape, dtype, run.padded) for name, (shape, dtype) in shapes.items()}
    ran = execute(request, plan, buffers, tuple(shapes), scalars_for(variant, case, run), run, seed, tuple(shapes))
    return _Outputs(
        out=buffers["out"].view.copy(),
        lse=buffers["lse"].view.copy(),
        warp_instructions=ran.warp_instructions,
        notes=ran.notes,
        faults=ran.faults,
    )


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
