"""Roles of the warps of a CTA: which warps start on the same side of every branch that warps choose by their number.

Found in the program alone. A value counts as known where it follows from the thread's number by the few instructions
that warp-specialised kernels dispatch with; a branch on anything else goes both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fa4build.simulate.native.program import Program
from fa4build.simulate.ptx.control_flow import BRANCHES, post_dominators
from fa4build.simulate.ptx.instructions import Imm, Instruction, Pair, Reg, Special
from fa4build.simulate.translate.emitter import written_registers

LANES = 32
_WAITS = ("mbarrier.try_wait", "mbarrier.test_wait", "bar.", "barrier.")  # without: a warp's part of a common job
_WORD = (1 << 32) - 1


@lru_cache(maxsize=64)
def roles_of(program: Program, block: tuple[int, int, int]) -> tuple[int, ...]:
    """Warps of each role as a mask, in the order of their first warps.

    A kernel whose warps all start alike has two roles, the first and the second half of its warps: what one warp
    waits for of another is then within one role. A single warp is the one role.
    """
    count = -(-block[0] * block[1] * block[2] // LANES)
    paths = _Paths.of(program, block, count)
    found: dict[frozenset, int] = {}
    for warp in range(count):
        way = paths.of_warp(warp)
        found[way] = found.get(way, 0) | 1 << warp
    if len(found) > 1 or count == 1:
        return tuple(found.values())
    first = (1 << count // 2) - 1
    return first, (1 << count) - 1 & ~first


def mask_of(program: Program, block: tuple[int, int, int], turn: int) -> int:
    """Warps of the role whose turn it is, counted round."""
    roles = roles_of(program, block)
    return roles[turn % len(roles)]


def blocks_reached(program: Program, block: tuple[int, int, int]) -> frozenset[int]:
    """Basic blocks that some warp may come to: the others are dead, since warps decide against them by their number."""
    count = -(-block[0] * block[1] * block[2] // LANES)
    paths = _Paths.of(program, block, count)
    return frozenset().union(*(paths.walked(warp)[1] for warp in range(count)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paths:
    """What the walks of all warps need: where ways meet, and branches that a warp's number decides."""

    program: Program
    start_of: dict[int, int]  # of a block, by its first instruction
    decided: dict[int, np.ndarray]  # block -> for each warp, whether its branch is taken: 1, 0, or -1, open
    jobs: frozenset[int]  # blocks of which warps wait for each other before the ways of their branch meet

    @classmethod
    def of(cls, program: Program, block: tuple[int, int, int], warps: int) -> _Paths:
        decided = _decided(program, _known(program, block, warps))
        meetings = post_dominators(program.blocks)
        return cls(
            program=program,
            start_of={b.start: number for number, b in enumerate(program.blocks)},
            decided=decided,
            jobs=frozenset(number for number in decided if _is_job(program, number, meetings[number])),
        )

    def of_warp(self, warp: int) -> frozenset[tuple[int, bool]]:
        """(block, whether its branch is taken) of the branches to jobs that a warp may come to and decides."""
        return self.walked(warp)[0]

    def walked(self, warp: int) -> tuple[frozenset[tuple[int, bool]], set[int]]:
        """As `of_warp`; and the blocks that the warp may come to."""
        ways, seen, waiting = set(), set(), [0]
        while waiting:
            number = waiting.pop()
            if number in seen or number == len(self.program.blocks):
                continue
            seen.add(number)
            block = self.program.blocks[number]
            taken = int(self.decided[number][warp]) if number in self.decided else -1
            if taken < 0:
                waiting += block.successors
                continue
            if number in self.jobs:
                ways.add((number, bool(taken)))
            target = self.program.function.instructions[block.stop - 1].operands[0].index if taken else block.stop
            waiting.append(self.start_of.get(target, len(self.program.blocks)))
        return frozenset(ways), seen


def _decided(program: Program, known: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Branches whose condition is known, by block: what each warp does there, -1 where its lanes disagree."""
    found = {}
    for number, block in enumerate(program.blocks):
        last = program.function.instructions[block.stop - 1]
        if last.opcode in BRANCHES and last.guard is not None and last.guard.register in known:
            taken = (known[last.guard.register] != 0) != last.guard.negated
            found[number] = np.where(taken.all(axis=1), 1, np.where(taken.any(axis=1), -1, 0))
    return found


def _is_job(program: Program, number: int, meeting: int) -> bool:
    """Whether warps wait for each other between the branch of a block and where its ways meet."""
    code, blocks = program.function.instructions, program.blocks
    end = blocks[meeting].start if meeting < len(blocks) else len(code)
    return any(ins.opcode.startswith(_WAITS) for ins in code[blocks[number].stop : end])


def _known(program: Program, block: tuple[int, int, int], warps: int) -> dict[int, np.ndarray]:
    """(warp, lane) values of the registers that follow from the thread's number and that one instruction writes."""
    times: dict[int, int] = {}
    for written in map(written_registers, program.function.instructions):
        for register in written:
            times[register] = times.get(register, 0) + 1
    known: dict[int, np.ndarray] = {}
    for ins in program.function.instructions:
        if ins.guard is None and ins.opcode.startswith(_KNOWN_OPCODES):
            register, value = _value(ins, warps, block, known)
            if value is not None and times[register] == 1:
                known[register] = value
    return known


# --- values of all lanes ----------------------------------------------------------------------------------------------

_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": lambda a, b: a << np.minimum(b, 32),
    "shr": lambda a, b: a >> np.minimum(b, 63),
}
_KNOWN_OPCODES = (*(f"{name}." for name in _BINARY), "mov.", "not.", "selp.", "setp.", "shfl.")
_COMPARE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _value(
    ins: Instruction, warps: int, block: tuple[int, int, int], known: dict[int, np.ndarray]
) -> tuple[int, np.ndarray | None]:
    """(register, its value in every lane, None where that is not known) after an instruction on words or predicates."""
    head, *rest = ins.opcode.split(".")
    if not ins.operands:
        return -1, None
    target = ins.operands[0].data if isinstance(ins.operands[0], Pair) else ins.operands[0]
    if not isinstance(target, Reg) or not rest or rest[-1] not in ("u32", "s32", "b32", "pred"):
        return -1, None
    needed = ins.operands[1:3] if head == "shfl" else ins.operands[1:]
    sources = [_operand(operand, warps, block, known) for operand in needed]
    if any(source is None for source in sources):
        return target.index, None
    return target.index, _result(head, rest, sources)


def _result(head: str, rest: list[str], sources: list) -> np.ndarray | None:
    type_, count = rest[-1], len(sources)
    if head == "mov" and count == 1:
        return sources[0]
    if head == "not" and count == 1 and type_ == "pred":
        return sources[0] == 0
    if head == "selp" and count == 3:
        return np.where(sources[2] != 0, sources[0], sources[1])
    if head == "shfl" and rest[:2] == ["sync", "idx"]:
        return np.take_along_axis(sources[0], sources[1] & (LANES - 1), axis=1)
    if head in _BINARY and count == 2 and len(rest) == 1:
        return _typed(_BINARY[head](*(_typed(source, type_) for source in sources)), "b32")
    if head == "setp" and count == 2 and len(rest) == 2 and rest[0] in _COMPARE:
        return _COMPARE[rest[0]](*(_typed(source, type_) for source in sources)).astype(np.int64)
    return None


def _typed(value: np.ndarray, type_: str) -> np.ndarray:
    """A word as a number of its type."""
    word = value & _WORD
    return word if type_ != "s32" else (word ^ 1 << 31) - (1 << 31)


def _operand(operand, warps: int, block: tuple[int, int, int], known: dict[int, np.ndarray]) -> np.ndarray | None:
    if isinstance(operand, Reg):
        return known.get(operand.index)
    if isinstance(operand, Imm) and not operand.is_float:
        return np.full((warps, LANES), operand.value, np.int64)
    if isinstance(operand, Special):
        return _special(operand.name, warps, block)
    return None


def _special(name: str, warps: int, block: tuple[int, int, int]) -> np.ndarray | None:
    thread = np.arange(warps * LANES, dtype=np.int64).reshape(warps, LANES)
    x, y, _ = block
    values = {"tid.x": thread % x, "tid.y": thread // x % y, "tid.z": thread // (x * y), "laneid": thread % LANES}
    return values.get(name.removeprefix("%"))
