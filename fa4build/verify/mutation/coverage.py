"""Which lines of a kernel's PTX its acceptance cases run: no proof says anything about a line that none runs.

Two kinds of lines may stay: the way back of a wait with a time limit, since waits of the simulator end only when their
phase is over, and what no warp comes to because its number alone decides against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4build.cases.of_variant import cases_of_variant
from fa4build.cases.schedules import runs_of_case
from fa4build.errors import SimulationError
from fa4build.matrix.variants import parse_variant
from fa4build.plan import plan_from_json
from fa4build.simulate.native.executed import Marks, executed_instructions
from fa4build.simulate.native.program import Program, program_for
from fa4build.simulate.native.roles import blocks_reached
from fa4build.simulate.ptx.control_flow import BRANCHES
from fa4build.verify.runs import Request
from fa4build.verify.simulated import case_prover

SEED = 1
WAIT_LOOP, DEAD = "way back of a wait", "no warp's number leads here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrun:
    """An instruction that no case executed; `why` that is right, empty where nothing says so."""

    line: int
    text: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What the cases of a kernel execute."""

    kernel: str
    instructions: int
    unrun: tuple[Unrun, ...]

    @property
    def open(self) -> tuple[Unrun, ...]:
        """Instructions for which a case is missing, or an argument."""
        return tuple(each for each in self.unrun if not each.why)

    def document(self) -> dict[str, Any]:
        """As JSON; lines that may stay are counted, others told."""
        whys = [each.why for each in self.unrun if each.why]
        return {
            "kernel": self.kernel,
            "instructions": self.instructions,
            "unrun": len(self.unrun),
            "allowed": {why: whys.count(why) for why in sorted(set(whys))},
            "open": [{"line": each.line, "text": each.text} for each in self.open],
        }


def coverage_of(request: Request, tell: Callable[[str], None]) -> Coverage:
    """Runs every acceptance case of a kernel, in all orders; `tell` gets a line at the start of each.

    Raises: SimulationError when the kernel fails a case.
    """
    variant, plan = parse_variant(request.variant_id), plan_from_json(request.plan)
    cases, prove = cases_of_variant(variant), case_prover(variant)
    with executed_instructions() as marks:
        for number, case in enumerate(cases):
            tell(f"case {number + 1}/{len(cases)} {case.name}")
            runs = runs_of_case(request.engine, number, getattr(case, "num_runs", None))
            faults = prove(variant, request, plan, case, SEED, runs)[1]
            if faults:
                raise SimulationError(f"{request.variant_id}: the kernel fails {case.name}: {faults[0]}")
    return _coverage(request, marks)


def _coverage(request: Request, marks: Marks) -> Coverage:
    found: list[Unrun] = []
    count = 0
    for (ptx, entry), executed in marks.items():
        if ptx == request.ptx:
            program = program_for(ptx, entry)
            count += len(program.function.instructions)
            found += unrun_instructions(program, executed)
    return Coverage(kernel=request.variant_id, instructions=count, unrun=tuple(found))


def unrun_instructions(program: Program, executed: np.ndarray) -> list[Unrun]:
    """What was not executed, in the order of the text. executed: one entry an instruction."""
    code = program.function.instructions
    threads = program.function.required_threads or 0
    reached = blocks_reached(program, (threads, 1, 1)) if threads else frozenset(range(len(program.blocks)))
    dead = {i for n, block in enumerate(program.blocks) if n not in reached for i in range(block.start, block.stop)}
    loops = set(_ways_back(program))
    return [
        Unrun(line=ins.line, text=ins.text, why=WAIT_LOOP if i in loops else DEAD if i in dead else "")
        for i, ins in enumerate(code)
        if not executed[i]
    ]


def _ways_back(program: Program) -> list[int]:
    """Branches back to a wait with a time limit that stands directly before them: `wait; @P bra DONE; bra wait`."""
    code = program.function.instructions
    return [
        i
        for i, ins in enumerate(code)
        if ins.opcode in BRANCHES
        and 0 <= i - ins.operands[0].index <= 2
        and code[ins.operands[0].index].opcode.startswith("mbarrier.try_wait")
        and len(code[ins.operands[0].index].operands) == 4
    ]
