"""A campaign: every mutant of a kernel runs through the acceptance cases until something is found.

The kernel itself runs first: it must pass, and tells how much work each case is and which instructions it executes. A
mutant then runs the cases that reach its operation, the quickest first, each as a proof does, in a process of its own
that is forked from the one that has everything in memory. Needs an operating system that forks.
"""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fa4build.cases.of_variant import cases_of_variant
from fa4build.cases.schedules import runs_of_case
from fa4build.errors import SimulationError
from fa4build.matrix.variants import parse_variant
from fa4build.plan import plan_from_json
from fa4build.simulate.native.executed import executed_instructions
from fa4build.simulate.ptx.parser import parse_module
from fa4build.verify.mutation.mutants import Mutant, mutants_of
from fa4build.verify.mutation.operations import operations_of, synchronises
from fa4build.verify.mutation.survivors import reasons_for
from fa4build.verify.pool import End, Task, run_tasks
from fa4build.verify.runs import Request
from fa4build.verify.simulated import case_prover

SEED = 1
MUTANT_TIMEOUT_S = 300.0
KILLED, SURVIVED, UNREACHED, CRASHED = "killed", "survived", "unreached", "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        line, opcode, change: of the mutant.
        status: `killed`; `survived` all cases that reach it; `unreached`: no case does, nothing was run; `crashed`: the
            simulator did not survive it, a fault of the simulator.
        by: the rule that found it, or `deadlock`, `results`, `no end`, `fault`; of a survivor the reason why the PTX
            manual allows it (survivors.py), empty where there is none.
        case, order: where it was found.
        text: the first line of what was said.
    """

    line: int
    opcode: str
    change: str
    status: str
    by: str = ""
    case: str = ""
    order: str = ""
    text: str = ""

    @property
    def is_explained(self) -> bool:
        """Whether nothing is left to do about it."""
        return self.status == KILLED or (self.status in (SURVIVED, UNREACHED) and bool(self.by))


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """All outcomes of a kernel, in the order of its text. `every`: of its operations every so many were changed."""

    kernel: str
    operations: int
    every: int
    outcomes: tuple[Outcome, ...]
    seconds: float

    def count(self, status: str) -> int:
        """Mutants that ended so."""
        return sum(outcome.status == status for outcome in self.outcomes)

    def document(self) -> dict[str, Any]:
        """As JSON; without times, which differ from run to run."""
        counts = {status: self.count(status) for status in (KILLED, SURVIVED, UNREACHED, CRASHED)}
        killed_by = [outcome.by for outcome in self.outcomes if outcome.status == KILLED]
        return {
            "kernel": self.kernel,
            "operations": self.operations,
            "every": self.every,
            "mutants": len(self.outcomes),
            "counts": counts,
            "killed_by": {by: killed_by.count(by) for by in sorted(set(killed_by))},
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """An acceptance case: its place among those of its kernel, warp instructions of all its runs, what they execute."""

    number: int
    case: Any
    work: int
    executed: np.ndarray


def run_campaign(
    request: Request,
    *,
    jobs: int,
    tell: Callable[[str, Outcome | None, int, int], None] = lambda *_: None,
    every: int = 1,
    only: Callable[[Mutant], bool] = lambda mutant: True,
    timeout_s: float = MUTANT_TIMEOUT_S,
) -> Campaign:
    """Plants every mutant of a kernel in turn.

    Args:
        jobs: mutants at a time.
        tell: gets (kernel, an outcome that has no reason yet, mutants done, all mutants).
        every: of the operations take every so many, from the second on; 1: all.
        only: which mutants; default: all.
        timeout_s: of a mutant.
    Raises: SimulationError when the kernel itself does not pass, or its text is not understood.
    """
    started = time.monotonic()
    judge = _Judge(request)
    sites = _sites(request.ptx)
    mutants = [mutant for mutant in mutants_of(request.ptx) if mutant.number % every == 1 % every and only(mutant)]
    cases = judge.cases_of_kernel()
    outcomes: dict[int, Outcome] = {}

    def note(number: int, outcome: Outcome) -> None:
        outcomes[number] = outcome
        tell(request.variant_id, outcomes[number], len(outcomes), len(mutants))

    tasks = []
    for number, mutant in enumerate(mutants):
        reaching = [case for case in cases if case.executed[sites[mutant.number]]]
        if reaching:
            tasks.append(Task(name=str(number), function=partial(_run, judge, reaching), argument=mutant))
        else:
            note(number, _outcome(mutant, UNREACHED))
    run_tasks(
        tasks,
        jobs=jobs,
        timeout_s=timeout_s,
        on_message=lambda name, message: None,
        on_end=lambda end: note(int(end.name), _of_end(mutants[int(end.name)], end)),
        context=multiprocessing.get_context("fork"),
    )
    ordered = explained(request.variant_id, [outcomes[number] for number in range(len(mutants))])
    seconds = time.monotonic() - started
    return Campaign(kernel=request.variant_id, operations=len(sites), every=every, outcomes=ordered, seconds=seconds)


def explained(kernel: str, outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Outcomes with the reasons of those that were not killed."""
    left = [number for number, outcome in enumerate(outcomes) if outcome.status in (SURVIVED, UNREACHED)]
    reasons = reasons_for(kernel, [(o.opcode, o.change, o.status) for o in (outcomes[number] for number in left)])
    found = dict(zip(left, reasons, strict=True))
    return tuple(replace(outcome, by=found.get(number, outcome.by)) for number, outcome in enumerate(outcomes))


def _sites(ptx: str) -> list[int]:
    """For each operation of the text, the index of its instruction. Raises: SimulationError where they differ."""
    (function,) = parse_module(ptx).entries.values()
    found = [(i, ins) for i, ins in enumerate(function.instructions) if synchronises(ins.opcode)]
    operations = operations_of(ptx)
    if [(op.line, op.opcode) for op in operations] != [(ins.line, ins.opcode) for _, ins in found]:
        raise SimulationError(f"{function.name}: the text has other synchronisation than the parsed function")
    return [index for index, _ in found]


def _run(judge: _Judge, cases: Sequence[_Case], mutant: Mutant, tell: Callable[[str], None]) -> Outcome:
    """In a process of its own: the cases that reach a mutant, up to the first finding."""
    ptx = mutant.applied(judge.request.ptx)
    for case in cases:
        tell(case.case.name)
        faults = judge.proven(ptx, case.number, case.case)[1]
        if faults:
            order, _, text = faults[0].partition(": ")
            status = CRASHED if _NOT_UNDERSTOOD.search(text) else KILLED
            return _outcome(mutant, status, by=kind_of(text), case=case.case.name, order=order, text=_first_line(text))
    return _outcome(mutant, SURVIVED)


def _of_end(mutant: Mutant, end: End) -> Outcome:
    if end.error is None:
        return end.result
    text = str(end.error).partition(": ")[2]
    if "not finished after" in text:
        return _outcome(mutant, KILLED, by="no end", text="not finished in time")
    return _outcome(mutant, CRASHED, text=_first_line(text))


def _outcome(mutant: Mutant, status: str, **found: str) -> Outcome:
    return Outcome(line=mutant.line, opcode=mutant.opcode, change=mutant.change, status=status, **found)


_RULE = re.compile(r"\b(R\d+(?:-\w+|[a-z])?)\b")
_NOT_UNDERSTOOD = re.compile(r"is not in the simulator's table|has no rule for|cannot translate|cannot read")
_KINDS = (
    (re.compile(r"deadlock", re.I), "deadlock"),
    (re.compile(r"without an end"), "no end"),
    (re.compile(r"other bits than|is off by|NaN or unwritten|wrote (?:into|outside)"), "results"),
)


def kind_of(text: str) -> str:
    """What a report is, in one word: its first rule, or the kind of its fault."""
    rule = _RULE.search(text)
    for pattern, name in _KINDS:
        if pattern.search(text.split("\n")[0]):
            return name
    return rule[1] if rule else "fault"


def _first_line(text: str) -> str:
    """What is said first that names a rule, or first of all."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return next((line for line in lines if _RULE.search(line)), *lines[:1])[:200] if lines else ""


class _Judge:
    """Runs a case with any text in the place of a kernel's."""

    def __init__(self, request: Request):
        self.request = request
        self._variant = parse_variant(request.variant_id)
        self._plan = plan_from_json(request.plan)
        self._prove = case_prover(self._variant)

    def proven(self, ptx: str, number: int, case: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
        """A proof of one case with a text: its row of figures, and what is wrong."""
        runs = runs_of_case(self.request.engine, number, getattr(case, "num_runs", None))
        return self._prove(self._variant, replace(self.request, ptx=ptx), self._plan, case, SEED, runs)

    def cases_of_kernel(self) -> list[_Case]:
        """The cases, the quickest first. Raises: SimulationError when the kernel does not pass one."""
        found = []
        for number, case in enumerate(cases_of_variant(self._variant)):
            with executed_instructions() as marks:
                row, faults = self.proven(self.request.ptx, number, case)
            if faults:
                raise SimulationError(f"{self.request.variant_id}: the kernel itself fails {case.name}: {faults[0]}")
            executed = sum((m for (text, _), m in marks.items() if text == self.request.ptx), start=np.uint8(0))
            work = row["warp_instructions"]
            found.append(_Case(number=number, case=case, work=work, executed=np.atleast_1d(executed) > 0))
        return sorted(found, key=lambda case: case.work)
