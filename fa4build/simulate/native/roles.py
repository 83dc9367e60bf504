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
from fa4build.simulate.ptx.instructions import Imm, Pair, Reg, Special
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
    paths = _Paths.of(program, block)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paths:
    """What the walks of all warps need: blocks, where ways meet, registers that one instruction alone writes."""

    program: Program
    block: tuple[int, int, int]
    start_of: dict[int, int]  # of a block, by its first instruction
    meetings: tuple[int, ...]
    written_once: frozenset[int]

    @classmethod
    def of(cls, program: Program, block: tuple[int, int, int]) -> _Paths:
        times: dict[int, int] = {}
        for ins in program.function.instructions:
            for register in written_registers(ins):
                times[register] = times.get(register, 0) + 1
        return cls(
            program=program,
            block=block,
            start_of={b.start: number for number, b in enumerate(program.blocks)},
            meetings=post_dominators(program.blocks),
            written_once=frozenset(register for register, count in times.items() if count == 1),
        )

    def of_warp(self, warp: int) -> frozenset[tuple[int, bool]]:
        """(branch, whether it is taken) of the branches to jobs that a warp may come to and that its number decides."""
        known: dict[int, np.ndarray] = {}
        ways, seen, waiting = set(), set(), [0]
        while waiting:
            number = waiting.pop()
            if number in seen or number == len(self.program.blocks):
                continue
            seen.add(number)
            taken = self._walk(number, warp, known)
            block, last = self.program.blocks[number], self.program.blocks[number].stop - 1
            if taken is None:
                waiting += reversed(block.successors)
                continue
            if self._is_job(number, last):
                ways.add((last, taken))
            target = self.program.function.instructions[last].operands[0].index if taken else block.stop
            waiting.append(self.start_of.get(target, len(self.program.blocks)))
        return frozenset(ways)

    def _walk(self, number: int, warp: int, known: dict[int, np.ndarray]) -> bool | None:
        """Takes in what a block makes known; whether its last branch is taken, None where that is open."""
        block = self.program.blocks[number]
        code = self.program.function.instructions
        for index in range(block.start, block.stop):
            ins = code[index]
            if ins.opcode in BRANCHES or ins.guard is not None:
                continue
            register, value = _value(ins, warp, self.block, known)
            if value is not None and register in self.written_once:
                known[register] = value
        last = code[block.stop - 1]
        if last.opcode not in BRANCHES or last.guard is None or last.guard.register not in known:
            return None
        condition = known[last.guard.register] != last.guard.negated
        return bool(condition[0]) if (condition == condition[0]).all() else None

    def _is_job(self, number: int, last: int) -> bool:
        """Whether warps wait for each other between a branch and where its ways meet."""
        meeting, blocks = self.meetings[number], self.program.blocks
        code = self.program.function.instructions
        end = blocks[meeting].start if meeting < len(blocks) else len(code)
        return any(ins.opcode.startswith(_WAITS) for ins in code[last + 1 : end])


# --- values of 32 lanes -----------------------------------------------------------------------------------------------

_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": lambda a, b: a << np.minimum(b, 32),
    "shr": lambda a, b: a >> np.minimum(b, 63),
}
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


def _value(ins, warp: int, block: tuple[int, int, int], known: dict[int, np.ndarray]) -> tuple[int, np.ndarray | None]:
    """(register, its value in every lane, None where that is not known) after an instruction on words or predicates."""
    head, *rest = ins.opcode.split(".")
    if not ins.operands:
        return -1, None
    target = ins.operands[0].data if isinstance(ins.operands[0], Pair) else ins.operands[0]
    if not isinstance(target, Reg) or not rest or rest[-1] not in ("u32", "s32", "b32", "pred"):
        return -1, None
    needed = ins.operands[1:3] if head == "shfl" else ins.operands[1:]
    sources = [_operand(operand, warp, block, known) for operand in needed]
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
        return sources[0][sources[1] & (LANES - 1)]
    if head in _BINARY and count == 2 and len(rest) == 1:
        return _typed(_BINARY[head](*(_typed(source, type_) for source in sources)), "b32")
    if head == "setp" and count == 2 and len(rest) == 2 and rest[0] in _COMPARE:
        return _COMPARE[rest[0]](*(_typed(source, type_) for source in sources)).astype(np.int64)
    return None


def _typed(value: np.ndarray, type_: str) -> np.ndarray:
    """A word as a number of its type."""
    word = value & _WORD
    return word if type_ != "s32" else (word ^ 1 << 31) - (1 << 31)


def _operand(operand, warp: int, block: tuple[int, int, int], known: dict[int, np.ndarray]) -> np.ndarray | None:
    if isinstance(operand, Reg):
        return known.get(operand.index)
    if isinstance(operand, Imm) and not operand.is_float:
        return np.full(LANES, operand.value, np.int64)
    if isinstance(operand, Special):
        return _special(operand.name, warp, block)
    return None


def _special(name: str, warp: int, block: tuple[int, int, int]) -> np.ndarray | None:
    lane = np.arange(LANES, dtype=np.int64)
    thread = lane + warp * LANES
    x, y, _ = block
    values = {"%tid.x": thread % x, "%tid.y": thread // x % y, "%tid.z": thread // (x * y), "%laneid": lane}
    return values.get(name if name.startswith("%") else f"%{name}")
