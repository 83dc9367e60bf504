"""PTX function to an executable program: nodes, each a Python function over all lanes of a gang.

A node is a straight-line run of fused instructions (one generated function, possibly ending in the block's branch) or
one system instruction. Every node exists twice: for a gang whose lanes are all active, and for one with a lane mask;
each is generated on first use. A node function returns the next node, or a negative scheduler code.
"""

from functools import lru_cache

import numpy as np

from fa4build.errors import SimulationError
from fa4build.simulate.hardware.gang import BLOCKED, diverge, exit_lanes
from fa4build.simulate.hardware.registers import DTYPES, poison, storage_classes
from fa4build.simulate.instructions import rules  # noqa: F401  registers every opcode rule
from fa4build.simulate.instructions.operands import Binder, Split, Wait
from fa4build.simulate.ptx.control_flow import BRANCHES, EXITS, Block, basic_blocks, live_in, post_dominators
from fa4build.simulate.ptx.instructions import Function
from fa4build.simulate.ptx.parser import parse_module
from fa4build.simulate.translate.contraction import contracted_multiplies
from fa4build.simulate.translate.emitter import Emitter, read_registers, written_registers
from fa4build.simulate.translate.opcodes import rule_for


class Node:
    """Instructions [start, stop) of the function; `next` is the node after it, `target` the branch target."""

    __slots__ = ("block", "index", "is_system", "next", "reconverge", "start", "stop", "target")

    def __init__(self, start: int, stop: int, block: int, is_system: bool):
        self.start, self.stop, self.block, self.is_system = start, stop, block, is_system
        self.index = self.next = self.target = self.reconverge = -1


class Program:
    """An entry ready to run.

    `uniform[n]`, `masked[n]`: node functions; `helpers`: names the generated code may call.
    """

    def __init__(self, function: Function, contract: bool):
        self.function = function
        self.storage = storage_classes(function)
        self.blocks = basic_blocks(function)
        self.contracted = contracted_multiplies(function, self.blocks) if contract else {}
        self.nodes = _make_nodes(function, self.blocks)
        self.exit_node = len(self.nodes)
        self._link()
        self._analyse()
        self.sizes = [max(n.stop - n.start, 1) for n in self.nodes] + [0]
        self.constants: list[tuple[int, str]] = []
        self._constant_index: dict[tuple[int, str], int] = {}
        self._by_width: dict[int, list] = {}
        self._prefix: dict[int, list[int]] = {}
        self.uniform = [_stub(self, n, False) for n in self.nodes] + [exit_lanes]
        self.masked = [_stub(self, n, True) for n in self.nodes] + [exit_lanes]
        self._live_lists: dict[int, list[int]] = {}

    def _link(self) -> None:
        first: dict[int, int] = {}
        for node in self.nodes:
            first.setdefault(node.block, node.index)
        first[len(self.blocks)] = self.exit_node
        start_of = {self.blocks[b].start: first[b] for b in range(len(self.blocks))}
        start_of[len(self.function.instructions)] = self.exit_node
        parents = post_dominators(self.blocks)
        self.node_of_block = first
        for node in self.nodes:
            node.next = node.index + 1
            last = self.function.instructions[node.stop - 1]
            if node.stop == self.blocks[node.block].stop:
                node.next = start_of.get(node.stop, self.exit_node)
                node.reconverge = first[parents[node.block]]
                if last.opcode in BRANCHES:
                    node.target = start_of[last.operands[0].index]
                elif last.opcode in EXITS:
                    node.target = self.exit_node

    def _analyse(self) -> None:
        """Liveness per node, and which registers never leave their node."""
        uses: list[int] = []
        defs: list[int] = []
        blocks: list[Block] = []
        where: dict[int, set[int]] = {}
        for node in self.nodes:
            used = defined = 0
            for index in range(node.start, node.stop):
                ins = self.function.instructions[index]
                for reg in self._reads(index):
                    used |= (1 << reg) & ~defined
                    where.setdefault(reg, set()).add(node.index)
                for reg in written_registers(ins):
                    where.setdefault(reg, set()).add(node.index)
                    if ins.guard is None:
                        defined |= 1 << reg
                    else:
                        used |= (1 << reg) & ~defined
            uses.append(used)
            defs.append(defined)
            successors = tuple({n for n in (node.next, node.target) if n >= 0})
            if node.target >= 0 and self.function.instructions[node.stop - 1].guard is None:
                successors = (node.target,)
            blocks.append(Block(start=node.start, stop=node.stop, successors=successors))
        self.live = live_in(tuple(blocks), uses, defs)
        self.local = {
            reg for reg, nodes in where.items() if len(nodes) == 1 and not self.live[next(iter(nodes))] >> reg & 1
        }

    def _reads(self, index: int) -> list[int]:
        """Registers an instruction reads; one that swallows a product reads its factors as well."""
        reads = read_registers(self.function.instructions[index])
        if index in self.contracted:
            reads = reads + read_registers(self.function.instructions[self.contracted[index]])
        return reads

    def live_registers(self, node: int) -> list[int]:
        """Registers whose value matters at the start of a node."""
        if node not in self._live_lists:
            bits = self.live[node]
            self._live_lists[node] = [i for i in range(len(self.storage)) if bits >> i & 1]
        return self._live_lists[node]

    def fresh_registers(self, lanes: int) -> list:
        """Registers at kernel entry: those that some path reads before writing hold poison."""
        registers: list = [None] * len(self.storage)
        for reg in self.live_registers(0):
            registers[reg] = poison(self.storage[reg], lanes)
        return registers

    def constant(self, bits: int, kind: str) -> int:
        """Index of an immediate in the tables of `constant_arrays`."""
        key = (bits, kind)
        if key not in self._constant_index:
            self._constant_index[key] = len(self.constants)
            self.constants.append(key)
            for lanes, table in self._by_width.items():
                table.append(_broadcast(bits, kind, lanes))
        return self._constant_index[key]

    def constant_arrays(self, lanes: int) -> list:
        """All immediates as full arrays of that many lanes (array with array is numpy's fastest case)."""
        if lanes not in self._by_width:
            self._by_width[lanes] = [_broadcast(bits, kind, lanes) for bits, kind in self.constants]
        return self._by_width[lanes]

    def line_of(self, node: int) -> int:
        """PTX line of a node's first instruction (0 after the end)."""
        return self.function.instructions[self.nodes[node].start].line if node < self.exit_node else 0


def _broadcast(bits: int, kind: str, lanes: int):
    dtype = np.dtype(DTYPES[kind])
    if kind == "p":
        return np.full(lanes, bool(bits))
    value = np.full(lanes, bits & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").view(dtype)
    value.flags.writeable = False
    return value


def _make_nodes(function: Function, blocks: tuple[Block, ...]) -> list[Node]:
    nodes: list[Node] = []
    for b, block in enumerate(blocks):
        start = block.start
        for i in range(block.start, block.stop):
            ins = function.instructions[i]
            if ins.opcode in BRANCHES or ins.opcode in EXITS:
                continue
            rule, _ = rule_for(ins.opcode, ins.line)
            if rule.is_system:
                if i > start:
                    nodes.append(Node(start, i, b, False))
                nodes.append(Node(i, i + 1, b, True))
                start = i + 1
        if start < block.stop:
            nodes.append(Node(start, block.stop, b, False))
    for index, node in enumerate(nodes):
        node.index = index
    return nodes


def _stub(program: Program, node: Node, masked: bool):
    """Generates the node's function when it is first reached."""

    def first_call(gang):
        make = _system_function if node.is_system else _fused_function
        table = program.masked if masked else program.uniform
        table[node.index] = make(program, node, masked)
        return table[node.index](gang)

    return first_call


def _fused_function(program: Program, node: Node, masked: bool):
    emitter = Emitter(program, node, masked)
    for i in range(node.start, node.stop):
        ins = program.function.instructions[i]
        if ins.opcode in BRANCHES or ins.opcode in EXITS:
            break
        emitter.instruction(i, ins)
    return emitter.finish(diverge)


def _system_function(program: Program, node: Node, masked: bool):
    ins = program.function.instructions[node.start]
    rule, match = rule_for(ins.opcode, ins.line)
    binder = Binder(program, node.start, ins)
    action = rule.make(binder, ins, match)
    guard, following, index = ins.guard, node.next, node.index

    def run(gang):
        mask = gang.mask
        if guard is not None:
            predicate = gang.regs[guard.register]
            if guard.negated:
                predicate = ~predicate
            mask = predicate if mask is None else predicate & mask
            active = np.count_nonzero(mask)
            if active == 0:
                return following
            if active == gang.lanes:
                mask = None
        outcome = action(gang, mask)
        if outcome is None:
            return following
        if isinstance(outcome, Wait):
            outcome.resume = following if outcome.resume is None else outcome.resume
            outcome.node = index
            gang.wait = outcome
            return BLOCKED
        if isinstance(outcome, Split):
            gang.pc = index
            return gang.cta.split_by(gang, outcome.keys)
        raise SimulationError(f"PTX line {ins.line}: rule of {ins.opcode} returned {outcome!r}")

    return run


@lru_cache(maxsize=8)
def _program_cached(text: str, entry: str, contract: bool) -> Program:
    module = parse_module(text)
    if entry not in module.entries:
        raise SimulationError(f"no entry {entry!r} in the PTX; it has {', '.join(sorted(module.entries))}")
    return Program(module.entries[entry], contract)


def program_for(text: str, entry: str, *, contract: bool = True) -> Program:
    """The program of an entry; cached by content.

    Args:
        text: the PTX module.
        entry: symbol of the kernel.
        contract: fuse a single-use `mul.f32` into the add or subtract that reads it, as ptxas does.
    """
    return _program_cached(text, entry, contract)
