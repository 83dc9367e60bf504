"""Proof of a family's operators in the PTX simulator: whole recipes, as the runtime calls them.

A recipe is run step by step on tensors in simulated memory: workspaces with their fills, launch plans with their
guards, kernels under the rules of the simulator. Every case runs in several schedules (`cases.schedules.RUNS`), which
also change strides, guard zones and the number of multiprocessors; the first run is compared with the family's answers,
the others with the first, bit by bit but for sums in any order.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fa4build.cases.bits import from_bits
from fa4build.cases.schedules import Run
from fa4build.errors import Fa4BuildError, SimulationError
from fa4build.families.interface import OpRecipe
from fa4build.families.proof import Problem, ProofCase
from fa4build.matrix.arch import ARCHES
from fa4build.plan import LaunchPlan, evaluate, failed_guard, plan_from_json
from fa4build.runtime.fa4_kernels.expressions import evaluate as value_of
from fa4build.simulate import GlobalMemory, simulate_launch
from fa4build.verify.code_identity import place_of
from fa4build.verify.engines import DEFAULT, engine_named
from fa4build.verify.identity import PACKAGE, Prover, digest_of, plan_sha256, ptx_form
from fa4build.verify.pool import now_in
from fa4build.verify.runs import poisoned
from fa4build.verify.simulated import MAX_FAILURES, Proof, runs_document, summary_of

_BITS = {
    **dict.fromkeys(("bf16", "fp16"), np.uint16),
    **dict.fromkeys(("f32", "i32"), np.uint32),
    **dict.fromkeys(("e4m3", "e5m2", "u8", "i8"), np.uint8),
    "i64": np.uint64,
}
_SIGNED = {"i8": np.int8, "i32": np.int32, "i64": np.int64}
_L2_BYTES = 50 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFiles:
    """A compiled kernel, as far as the simulator needs it. `registers` a thread, at launch."""

    ptx: str
    plan: str
    registers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRequest:
    """An operator to prove, as plain data for another process. `sha256` is over all but the seeds;
    `engine`: by name."""

    recipe: OpRecipe
    kernels: Mapping[str, KernelFiles]
    cases: tuple[ProofCase, ...]
    seeds: tuple[int, ...]
    sha256: str
    engine: str = DEFAULT


def operators_of(recipes: Iterable[OpRecipe], kernels: Iterable[str]) -> dict[str, OpRecipe]:
    """Kernel id -> the operator by which it is proven: its own, or the first that calls it. Others have none."""
    found: dict[str, OpRecipe] = {}
    recipes = tuple(recipes)
    own = {recipe.id: recipe for recipe in recipes}
    for name in kernels:
        callers = (recipe for recipe in recipes if any(step.kernel == name for step in recipe.steps))
        recipe = own.get(name) or next(callers, None)
        if recipe is not None:
            found[name] = recipe
    return found


def operator_request(
    recipe: OpRecipe,
    kernels: Mapping[str, KernelFiles],
    cases: Sequence[ProofCase],
    seeds: tuple[int, ...],
    engine: str = DEFAULT,
) -> OperatorRequest:
    """The request to prove an operator, from the compiled kernels of its steps."""
    forms = {name: ptx_form(files.ptx) for name, files in kernels.items()}
    parts = [
        recipe.document(),
        {name: [forms[name].sha256, plan_sha256(f.plan, forms[name]), f.registers] for name, f in kernels.items()},
        [dataclasses.asdict(case) for case in cases],
        runs_document(engine),
        _code_sha256(cases, {opcode for form in forms.values() for opcode in form.opcodes}, engine),
    ]
    digest = digest_of(parts)
    return OperatorRequest(
        recipe=recipe, kernels=dict(kernels), cases=tuple(cases), seeds=seeds, sha256=digest, engine=engine
    )


def _code_sha256(cases: Sequence[ProofCase], opcodes: set[str], engine: str) -> list[str]:
    """Digests of what runs and judges the cases, and of what draws them: its bytes if it is not of this package."""
    draws = sorted({tuple(case.draw.split(":")) for case in cases})
    own = [(module, name) for module, name in draws if module.split(".")[0] == PACKAGE]
    foreign = [hashlib.sha256(_source(module)).hexdigest() for module, name in draws if (module, name) not in own]
    return [_own_prover(engine).sha256([place_of(prove_operator), *own], opcodes), *foreign]


@functools.cache
def _own_prover(engine: str) -> Prover:
    return Prover((summary_of, engine_named, now_in), engine)


def _source(module: str) -> bytes:
    spec = importlib.util.find_spec(module)
    return Path(str(spec.origin)).read_bytes() if spec else b""


def prove_operator(request: OperatorRequest, tell: Callable[[str], None]) -> Proof:
    """Run every case; `tell` gets a line at the start of each. A failing kernel is no error."""
    rows: list[Mapping[str, Any]] = []
    failures: list[str] = []
    for seed in request.seeds:
        for number, case in enumerate(request.cases, 1):
            if len(failures) >= MAX_FAILURES:
                failures.append("further cases were not run")
                break
            tell(f"case {number}/{len(request.cases)} {case.name}")
            row, faults = prove_operator_case(request, case, seed, engine_named(request.engine).runs)
            rows.append(row)
            failures += [f"case {case.name} (seed {seed}): {fault}" for fault in faults]
    summary = {**summary_of(request.sha256, request.seeds, rows, request.engine), "operator": request.recipe.id}
    return Proof(summary=summary, runs=tuple(rows), failures=tuple(failures))


def prove_operator_case(
    request: OperatorRequest, case: ProofCase, seed: int, runs: tuple[Run, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Runs of one case up to the first bad one: a row of figures (`ratio` <= 1 is allowed), and what is wrong."""
    module, _, name = case.draw.partition(":")
    problem = getattr(importlib.import_module(module), name)(case.arguments, seed)
    row = {"case": case.name, "seed": seed, "ratio": 0.0, "lse_error": 0.0, "warp_instructions": 0, "notes": ()}
    first: Mapping[str, np.ndarray] | None = None
    for run in runs:
        where = f"{run.schedule} schedule" + (f" with seed {seed}" if run.schedule == "random" else "")
        try:
            call = _Call(request, problem, run)
            found = call.results(case, seed)
        except Fa4BuildError as error:
            return row, (f"{where}: {error}",)
        row["warp_instructions"] += call.warp_instructions
        row["notes"] = tuple(sorted({*row["notes"], *call.notes}))
        ratio, faults = _judge(request.recipe, problem, found)
        row["ratio"] = max(row["ratio"], ratio)
        faults += call.changed_inputs()
        if first is None:
            first = found
        else:
            exact = (name for name in found if name not in case.any_order)
            faults += [
                f"{name}: other bits than in the {runs[0].schedule} schedule"
                for name in exact
                if not np.array_equal(found[name], first[name])
            ]
        if faults:
            return row, tuple(f"{where}: {fault}" for fault in faults)
    return row, ()


def _judge(recipe: OpRecipe, problem: Problem, found: Mapping[str, np.ndarray]) -> tuple[float, list[str]]:
    """Largest error over its bound, and what is wrong."""
    dtypes = {buffer.name: buffer.dtype for buffer in recipe.buffers}
    worst, wrong = 0.0, []
    for name, (expected, bound) in problem.expected.items():
        values = _values(found[name], dtypes[name])
        with np.errstate(invalid="ignore"):  # equal infinities are equal
            errors = np.where(values == expected, 0.0, np.abs(values - expected))
        if np.isnan(errors).any():
            place = tuple(np.argwhere(np.isnan(errors))[0].tolist())
            return float("inf"), [f"{name} is NaN or unwritten, first at {place} of {errors.shape}"]
        worst = max(worst, float(errors.max(initial=0.0)) / bound)
        if errors.max(initial=0.0) > bound:
            place = tuple(int(i) for i in np.unravel_index(errors.argmax(), errors.shape))
            wrong.append(f"{name} is off by {errors.max():.3g} at {place}; {bound:.3g} is allowed")
    return worst, wrong


def _values(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype in _SIGNED:
        return np.ascontiguousarray(bits).view(_SIGNED[dtype]).astype(np.float64)
    return from_bits(bits, dtype)


class _Call:
    """One call of an operator on tensors in simulated memory."""

    def __init__(self, request: OperatorRequest, problem: Problem, run: Run) -> None:
        self._request, self._recipe, self._run = request, request.recipe, run
        self._names: dict[str, Any] = {"num_sms": run.num_sms, **problem.scalars}
        self._memory = GlobalMemory()
        self._arrays = {name: _placed(bits, run.padded) for name, bits in problem.inputs.items()}
        self._before = {name: array.copy() for name, array in self._arrays.items()}
        self.warp_instructions, self.notes = 0, ()
        self._name_extents()
        self._allocate()

    def _name_extents(self) -> None:
        """Values of the recipe's names. Raises: SimulationError when the problem is not one for this recipe."""
        recipe = self._recipe
        for tensor in recipe.inputs:
            for extent, found in zip(tensor.shape, self._arrays[tensor.name].shape, strict=True):
                expected = extent if isinstance(extent, int) else self._names.setdefault(extent, found)
                if expected != found:
                    raise SimulationError(f"{recipe.id}: {tensor.name} has an extent {found}, {expected} is needed")
        for name, text in recipe.let:
            self._names[name] = value_of(text, self._names)
        for scalar in recipe.scalars:
            if scalar.name not in self._names and scalar.default is not None:
                self._names[scalar.name] = value_of(scalar.default, self._names)
        if recipe.when and not value_of(recipe.when, self._names):
            raise SimulationError(f"{recipe.id}: the case is not one of {recipe.when}")

    def _allocate(self) -> None:
        """Results and workspaces: NaN that nobody may read before it was written, or what the recipe fills in."""
        for buffer in self._recipe.buffers:
            shape = tuple(int(value_of(str(extent), self._names)) for extent in buffer.shape)
            if buffer.fill is None:
                array = _nothing(shape, _BITS[buffer.dtype])
                self._memory.mark_unwritten(self._memory.add_view(buffer.name, array))
            else:
                array = np.full(shape, buffer.fill, np.dtype(_SIGNED.get(buffer.dtype, np.float32)))
                array = array.view(_BITS[buffer.dtype])
            self._arrays[buffer.name] = array

    def results(self, case: ProofCase, seed: int) -> dict[str, np.ndarray]:
        """Run the steps. Raises: SimulationError as the simulator, and when a plan refuses."""
        now_in(f"the {self._run.schedule} schedule")
        for step in self._recipe.steps:
            files = self._request.kernels[step.kernel]
            plan = plan_from_json(files.plan)
            inputs = self._inputs(plan, step.arguments)
            if (refusal := failed_guard(plan, inputs)) is not None:
                raise SimulationError(f"{step.kernel}: the plan refuses a problem it must take: {refusal}")
            for launch in evaluate(plan, inputs):
                if launch.is_empty:
                    continue
                report = simulate_launch(
                    files.ptx,
                    launch,
                    self._memory,
                    registers=files.registers,
                    by_warp=self._run.by_warp,
                    checks=self._run.checks,
                    schedule=self._run.schedule,
                    seed=seed,
                    concurrent_clusters=self._run.concurrent_clusters,
                    multiprocessors=self._run.num_sms,
                    free_sums=bool(case.any_order),
                    allowed=_tolerated(case, step.kernel),
                    engine=engine_named(self._request.engine).run_launch,
                )
                self.warp_instructions += report.warp_instructions
                self.notes = (*self.notes, *report.notes)
        return {name: self._arrays[name].copy() for name in self._recipe.results}

    def _inputs(self, plan: LaunchPlan, arguments: Sequence[str]) -> dict[str, int | float]:
        """Leaves of a plan for the arguments of a step, which stand in the plan's order."""
        arch = next(arch for arch in ARCHES if arch.target == self._recipe.target)
        inputs: dict[str, int | float] = {
            "dev.sm_count": self._run.num_sms,
            "dev.smem_optin": arch.smem_bytes,
            "dev.l2_bytes": _L2_BYTES,
        }
        named = [arg for arg in plan.args if arg.kind != "device"]
        for arg, text in zip(named, arguments, strict=True):
            if arg.kind != "tensor":
                inputs[arg.name] = value_of(text, self._names)
                continue
            array = self._arrays[text.removesuffix(".transpose")]
            if text.endswith(".transpose"):
                array = array.swapaxes(-1, -2)
            inputs[f"{arg.name}.ptr"] = self._memory.add_view(text, array)
            for i, (extent, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
                inputs[f"{arg.name}.shape[{i}]"] = extent
                inputs[f"{arg.name}.stride[{i}]"] = stride // array.itemsize
        return inputs

    def changed_inputs(self) -> list[str]:
        """Inputs must be as they were."""
        return [
            f"wrote into {name}" for name, old in self._before.items() if not np.array_equal(self._arrays[name], old)
        ]


def _tolerated(case: ProofCase, kernel: str) -> tuple[str, ...]:
    return tuple(rule for glob, rules in case.tolerated.items() if fnmatch.fnmatchcase(kernel, glob) for rule in rules)


def _placed(bits: np.ndarray, padded: bool) -> np.ndarray:
    """A copy of an input. Padded: with gaps and guard zones of NaN around it, where there is more than one extent."""
    if bits.ndim < 2 or bits.itemsize == 8:
        return bits.copy()
    buffer = poisoned(bits.shape, bits.dtype.type, padded)
    buffer.view[...] = bits
    return buffer.view


def _nothing(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.zeros(shape, dtype) if np.dtype(dtype).itemsize == 8 else poisoned(shape, dtype, padded=False).view
