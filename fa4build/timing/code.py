"""Straight-line code as the timing model replays it: machine-like instructions in an order an assembler might choose.

A region is a run of nodes of one basic block without synchronisation inside. Its instructions are list-scheduled once
by critical path, since ptxas reorders freely there; what the assembler folds away (timing.is_folded) only passes
dependencies on. Registers are taken as enough.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fa4build.simulate.ptx.control_flow import BRANCHES, EXITS
from fa4build.simulate.translate.emitter import read_registers, written_registers
from fa4build.timing.rates import BRANCH, instruction_cost, is_folded, result_latency

LONG = 12.0  # clocks: results that take at least this long are followed across regions
_MEMORY = ("ld.", "st.", "tcgen05.ld", "tcgen05.st", "atom", "red.", "stmatrix", "ldmatrix")
UNITS = ("none", "fma", "alu", "mufu", "tensor_memory_ld", "tensor_memory_st", "shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One instruction to issue. `unit`: index into UNITS. `before`: (position in the region, clocks after its issue).

    `outside`: registers from earlier regions that may be late; `late`: own results that later regions may wait for.
    `pause`: clocks the warp cannot issue afterwards (branches).
    """

    unit: int
    clocks: float
    latency: float
    before: tuple[tuple[int, float], ...]
    outside: tuple[int, ...]
    late: tuple[int, ...]
    pause: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Steps in issue order. `passed_on`: (register, positions, registers) that moves hand to later regions."""

    steps: tuple[Step, ...]
    passed_on: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]


class _Draft:
    """An instruction with its dependencies by number, before scheduling."""

    __slots__ = ("clocks", "deps", "is_branch", "late", "latency", "outside", "priority", "unit", "users")

    def __init__(self, unit, clocks, latency, deps, outside, late, is_branch):
        self.unit, self.clocks, self.latency, self.deps = unit, clocks, latency, deps
        self.outside, self.late, self.is_branch = outside, late, is_branch
        self.users: list[tuple[int, float]] = []
        self.priority = 0.0


class Code:
    """Regions of one program for one architecture; made on demand. broadcasts: sites that load one shared address."""

    def __init__(self, program, arch: str, broadcasts: Mapping[int, bool] = MappingProxyType({})):
        self.program, self.arch, self._broadcasts = program, arch, broadcasts
        self._regions: dict[tuple[int, int], Region] = {}
        self._skipped = set(program.contracted.values())
        if arch != "sm90a":
            self._skipped |= _joined_maxima(program)
        self._elected = self._elected_predicates()
        self._late = self._late_registers()

    def block_of(self, node: int) -> int:
        """The basic block of a node."""
        return self.program.nodes[node].block

    def region(self, first: int, last: int) -> Region:
        """The region of nodes first..last of one block."""
        key = (first, last)
        if key not in self._regions:
            start, stop = self.program.nodes[first].start, self.program.nodes[last].stop
            self._regions[key] = self._schedule(start, stop)
        return self._regions[key]

    def _is_folded(self, index: int) -> bool:
        ins = self.program.function.instructions[index]
        if ins.opcode in BRANCHES and ins.guard is not None and ins.guard.register in self._elected:
            return True  # becomes a predicate on what the elected lane does, or is merged with the election before
        return index in self._skipped or is_folded(ins.opcode)

    def _elected_predicates(self) -> set[int]:
        """Predicates that say whether a lane is the elected one."""
        code = self.program.function.instructions
        elected = {reg for ins in code if ins.opcode.startswith("elect") for reg in written_registers(ins)}
        for ins in code:
            if ins.opcode in ("not.pred", "mov.pred") and elected.intersection(read_registers(ins)):
                elected.update(written_registers(ins))
        return elected

    def _late_registers(self) -> set[int]:
        """Registers that hold results of long latency, also through moves. Tensor-memory loads have their own wait."""
        late: set[int] = set()
        code = self.program.function.instructions
        for ins in code:
            if result_latency(ins.opcode) >= LONG and not ins.opcode.startswith("tcgen05"):
                late.update(written_registers(ins))
        for _ in range(2):
            for i, ins in enumerate(code):
                if self._is_folded(i) and late.intersection(read_registers(ins)):
                    late.update(written_registers(ins))
        return late

    def _schedule(self, start: int, stop: int) -> Region:
        drafts, passed_on = self._drafts(start, stop)
        order, position = _list_schedule(drafts)
        steps = []
        for number in order:
            d = drafts[number]
            before = tuple((position[i], clocks) for i, clocks in d.deps)
            pause = BRANCH.value if d.is_branch else 0.0
            steps.append(
                Step(
                    unit=d.unit,
                    clocks=d.clocks,
                    latency=d.latency,
                    before=before,
                    outside=d.outside,
                    late=d.late,
                    pause=pause,
                )
            )
        handed = tuple((reg, tuple(position[i] for i in own), regs) for reg, own, regs in passed_on)
        return Region(steps=tuple(steps), passed_on=handed)

    def _drafts(self, start: int, stop: int):
        """Instructions with dependencies; folded ones are replaced by what they read."""
        sources: dict[int, tuple[frozenset[int], frozenset[int]]] = {}  # register -> (own drafts, outside registers)
        drafts: list[_Draft] = []
        moved: dict[int, None] = {}
        memory: int | None = None
        for i in range(start, stop):
            ins = self.program.function.instructions[i]
            own: set[int] = set()
            outside: set[int] = set()
            for reg in read_registers(ins):
                if reg in sources:
                    own |= sources[reg][0]
                    outside |= sources[reg][1]
                elif reg in self._late:
                    outside.add(reg)
            written = written_registers(ins)
            if self._is_folded(i):
                for reg in written:
                    sources[reg] = (frozenset(own), frozenset(outside))
                    moved[reg] = None
                continue
            cost = instruction_cost(ins.opcode, self.arch)
            clocks = min(cost.clocks, 1.0) if self._broadcasts.get(i) else cost.clocks
            deps = [(d, drafts[d].clocks + drafts[d].latency) for d in sorted(own)]
            if ins.opcode.startswith(_MEMORY):
                if memory is not None and memory not in own:
                    deps.append((memory, 1.0))
                memory = len(drafts)
            latency = result_latency(ins.opcode)
            late = tuple(written) if latency >= LONG and not ins.opcode.startswith("tcgen05") else ()
            is_branch = ins.opcode in BRANCHES or ins.opcode in EXITS
            for reg in written:
                sources[reg] = (frozenset((len(drafts),)), frozenset())
                moved.pop(reg, None)
            drafts.append(
                _Draft(UNITS.index(cost.unit), clocks, latency, deps, tuple(sorted(outside)), late, is_branch)
            )
        passed = [(r, tuple(sorted(sources[r][0])), tuple(sorted(sources[r][1]))) for r in moved if r in self._late]
        return drafts, passed


def _joined_maxima(program) -> set[int]:
    """Two-input maxima that ptxas joins with the one that alone reads them (FMNMX3 of sm100a and later)."""
    code = program.function.instructions
    uses: dict[int, int] = {}
    for ins in code:
        for reg in read_registers(ins):
            uses[reg] = uses.get(reg, 0) + 1
    joined: set[int] = set()
    for block in program.blocks:
        made: dict[int, int] = {}  # register -> the two-input maximum that made it and may be joined
        for i in range(block.start, block.stop):
            ins = code[i]
            written = written_registers(ins)
            is_pair = ins.opcode in ("max.f32", "max.ftz.f32") and len(ins.operands) == 3 and ins.guard is None
            source = next((r for r in read_registers(ins) if r in made and uses[r] == 1), None) if is_pair else None
            for reg in written:
                made.pop(reg, None)
            if source is not None:
                joined.add(made.pop(source))
            elif is_pair:
                made[written[0]] = i
    return joined


def _list_schedule(drafts: list[_Draft]) -> tuple[list[int], dict[int, int]]:
    """Numbers in issue order, and the place of each. Longest path to the end first; a branch comes last."""
    for number in range(len(drafts) - 1, -1, -1):
        d = drafts[number]
        d.priority += d.clocks
        for i, clocks in d.deps:
            drafts[i].users.append((number, clocks))
            drafts[i].priority = max(drafts[i].priority, d.priority + clocks)
    waiting = [len(d.deps) for d in drafts]
    last = {n for n, d in enumerate(drafts) if d.is_branch}
    pending = [(0.0, n) for n in range(len(drafts)) if not waiting[n] and n not in last]
    heapq.heapify(pending)
    available: list[tuple[float, int]] = []
    free = [0.0] * len(UNITS)
    ready = [0.0] * len(drafts)
    order: list[int] = []
    now = 0.0
    while pending or available:
        while pending and pending[0][0] <= now:
            n = heapq.heappop(pending)[1]
            heapq.heappush(available, (-drafts[n].priority, n))
        chosen, kept = None, []
        while available:
            entry = heapq.heappop(available)
            if free[drafts[entry[1]].unit] <= now:
                chosen = entry[1]
                break
            kept.append(entry)
        for entry in kept:
            heapq.heappush(available, entry)
        if chosen is None:
            nexts = [free[drafts[n].unit] for _, n in available] + ([pending[0][0]] if pending else [])
            now = max(now + 1.0, min(nexts))
            continue
        order.append(chosen)
        d = drafts[chosen]
        if d.unit:
            free[d.unit] = now + d.clocks
        for user, clocks in d.users:
            ready[user] = max(ready[user], now + clocks)
            waiting[user] -= 1
            if not waiting[user] and user not in last:
                heapq.heappush(pending, (ready[user], user))
        now += 1.0
    order += sorted(last)
    return order, {n: k for k, n in enumerate(order)}
