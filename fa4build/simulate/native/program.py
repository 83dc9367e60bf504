"""A PTX function made ready for the native engine: records, constants, operand lists, places of registers.

Registers that live inside one basic block share the places of those that are dead; all others, and the accumulators
of wgmma (written after their instruction), have one of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fa4build.errors import SimulationError
from fa4build.simulate.instructions import rules  # noqa: F401  registers the opcodes that the simulator knows
from fa4build.simulate.native import decode_alu, decode_barriers, decode_memory  # noqa: F401  register their rules
from fa4build.simulate.native.coder import SLOT_BYTES, SPECIALS, Coder, operations, rule_of, storage_width
from fa4build.simulate.ptx.control_flow import BRANCHES, EXITS, Block, basic_blocks, live_in, post_dominators
from fa4build.simulate.ptx.instructions import Function, Module, Vector
from fa4build.simulate.ptx.parser import parse_module
from fa4build.simulate.translate.contraction import contracted_multiplies
from fa4build.simulate.translate.emitter import read_registers, registers_in, written_registers
from fa4build.simulate.translate.opcodes import rule_for

PART = 64  # instructions, of core.h


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """An entry ready to run.

    Attributes:
        records: RECORD, one an instruction, and one more for the end of the kernel.
        constants: bytes of all immediates. lists: operands of instructions with many.
        register_bytes: of one warp. specials: (number in SPECIALS, bits, offset) of values to fill in.
        texts: of faults that lie in the code itself.
        tracked, products: (first entry of every instruction, entries) of the registers of wgmma that it writes or
            (accumulators) reads by other means, and that it multiplies with, accumulators first.
        parts: (first pair of each part of PART instructions, and one more for special values; pairs of offset and
            bytes) of the places that it writes.
        function, blocks, contracted: as the Python engine has them.
    """

    function: Function
    blocks: tuple[Block, ...]
    contracted: dict[int, int]
    records: np.ndarray
    constants: np.ndarray
    lists: np.ndarray
    register_bytes: int
    specials: np.ndarray
    texts: tuple[str, ...]
    tracked: tuple[np.ndarray, np.ndarray]
    products: tuple[np.ndarray, np.ndarray]
    parts: tuple[np.ndarray, np.ndarray]


def make_program(module: Module, entry: str, contract: bool) -> Program:
    """Translates one entry.

    Raises: SimulationError for an opcode that the simulator does not know, as the Python engine.
    """
    if entry not in module.entries:
        raise SimulationError(f"no entry {entry!r} in the PTX; it has {', '.join(sorted(module.entries))}")
    function = module.entries[entry]
    blocks = basic_blocks(function)
    for ins in function.instructions:
        if ins.opcode not in BRANCHES and ins.opcode not in EXITS:
            rule_for(ins.opcode, ins.line)
    contracted = contracted_multiplies(function, blocks) if contract else {}
    slots, size = _place_registers(function, blocks, contracted)
    shared = frozenset(symbol.name for symbol in module.shared_symbols)
    coder = Coder(function, slots, size, shared)
    coder.contracted = contracted
    _encode(coder, blocks)
    specials = [(SPECIALS.index(name), bits, place) for (name, bits), place in coder.specials.items()]
    return Program(
        function=function,
        blocks=blocks,
        contracted=contracted,
        records=coder.records(),
        constants=np.frombuffer(bytes(coder.constants.data) or b"\0", np.uint8),
        lists=np.array(coder.lists or [0], np.int32),
        register_bytes=(coder.size + 127) // 128 * 128,
        specials=np.array(specials, np.int32).reshape(-1, 3),
        texts=tuple(coder.texts),
        tracked=_table(_tracked(function)),
        products=_table([_multiplied(ins) for ins in function.instructions]),
        parts=_parts(function, slots, specials),
    )


def _multiplied(ins) -> list[int]:
    """Registers of a product: accumulators, then the A fragment."""
    if not ins.opcode.startswith("wgmma.mma_async"):
        return []
    fragment = registers_in(ins.operands[1]) if isinstance(ins.operands[1], Vector) else []
    return registers_in(ins.operands[0]) + fragment


def _tracked(function: Function) -> list[list[int]]:
    """Registers of products that each instruction writes, and accumulators that it reads, these as register plus
    the number of registers."""
    of_products = {register for ins in function.instructions for register in _multiplied(ins)}
    products = (ins for ins in function.instructions if ins.opcode.startswith("wgmma.mma_async"))
    accumulators = {register for ins in products for register in registers_in(ins.operands[0])}
    count = len(function.register_names)
    return [
        []
        if ins.opcode.startswith("wgmma") or not of_products
        else [r for r in written_registers(ins) if r in of_products]
        + [count + r for r in read_registers(ins) if r in accumulators]
        for ins in function.instructions
    ]


def _parts(function: Function, slots: list[int], specials: list[tuple[int, int, int]]):
    """Places that each part of the code writes, neighbours as one."""
    sizes = [SLOT_BYTES[storage_width(width)] for width in function.register_widths]
    rows = []
    for first in range(0, len(function.instructions), PART):
        written = {r for ins in function.instructions[first : first + PART] for r in written_registers(ins)}
        rows.append(_stretches({slots[r]: sizes[r] for r in written if slots[r] >= 0}))
    starts, flat = _table([*rows, _stretches({place: SLOT_BYTES[bits] for _, bits, place in specials})])
    return starts // 2, flat


def _stretches(places: dict[int, int]) -> list[int]:
    """Offset and bytes of each stretch of places, behind each other."""
    found: list[list[int]] = []
    for start in sorted(places):
        if found and found[-1][0] + found[-1][1] == start:
            found[-1][1] += places[start]
        else:
            found.append([start, places[start]])
    return [number for stretch in found for number in stretch]


def _table(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows behind each other: where each begins (and one more), and all entries."""
    starts = np.cumsum([0, *(len(row) for row in rows), 0], dtype=np.int32)
    return starts, np.array([entry for row in rows for entry in row] or [0], np.int32)


def _encode(coder: Coder, blocks: tuple[Block, ...]) -> None:
    function = coder.function
    skipped = set(coder.contracted.values())
    for index, ins in enumerate(function.instructions):
        coder.index = index
        if ins.guard is not None:
            coder.guards[index] = coder.slots[ins.guard.register] | ins.guard.negated
        if ins.opcode in BRANCHES:
            coder.emit("branch", flags=ins.opcode == "bra.uni")
        elif ins.opcode in EXITS:
            coder.emit("branch")
        elif index in skipped:
            coder.emit("nop")
        else:
            _encode_one(coder, ins)
    coder.index = len(function.instructions)
    coder.emit("leave")
    _link(coder, blocks)


def _encode_one(coder: Coder, ins) -> None:
    found = rule_of(ins.opcode)
    if found is None:
        coder.emit_fault(f"the native engine has no rule for {ins.opcode}; run with the Python engine")
        return
    make, match = found
    try:
        make(coder, ins, match)
    except (IndexError, AttributeError, KeyError, ValueError, TypeError) as error:
        coder.emit_fault(f"cannot translate {ins.text[:160]!r}: {error}")


def _link(coder: Coder, blocks: tuple[Block, ...]) -> None:
    """Branch targets and, for every instruction that ends a block with a branch, where its ways meet again."""
    code, parents = coder.function.instructions, post_dominators(blocks)
    start = [*(block.start for block in blocks), len(code)]
    for number, block in enumerate(blocks):
        last = code[block.stop - 1]
        if last.opcode in BRANCHES:
            coder.targets[block.stop - 1] = last.operands[0].index
        elif last.opcode in EXITS:
            coder.targets[block.stop - 1] = len(code)
        coder.meetings[block.stop - 1] = start[parents[number]]


# --- places of registers ------------------------------------------------------------------------------------------


def _reads(function: Function, contracted: dict[int, int], index: int) -> list[int]:
    reads = read_registers(function.instructions[index])
    if index in contracted:
        reads = reads + read_registers(function.instructions[contracted[index]])
    return reads


def _place_registers(function: Function, blocks: tuple[Block, ...], contracted: dict[int, int]):
    """(byte offset of every register, bytes in all). Predicates come first, then the widest."""
    count = len(function.register_names)
    widths = [storage_width(w) for w in function.register_widths]
    reads = [_reads(function, contracted, i) for i in range(len(function.instructions))]
    writes = [written_registers(ins) for ins in function.instructions]
    home = _home_blocks(function, blocks, reads, writes)
    slots = [-1] * count
    size = 0
    for width in (1, 128, 64, 32, 16):
        for register in range(count):
            if widths[register] == width and (width == 1 or home[register] is None):
                slots[register] = size
                size += SLOT_BYTES[width]
        size = (size + 127) // 128 * 128
    pool = _Pool(size)
    for block in blocks:
        _place_block(block, reads, writes, home, widths, slots, pool)
    return slots, pool.size


def _home_blocks(function: Function, blocks, reads, writes) -> list[int | None]:
    """The block in which a register lives all its life; None where it crosses blocks or belongs to wgmma."""
    uses, defs = [], []
    home: dict[int, int | None] = {}
    for number, block in enumerate(blocks):
        used = defined = 0
        for i in range(block.start, block.stop):
            for register in reads[i]:
                used |= (1 << register) & ~defined
            guarded = function.instructions[i].guard is not None
            for register in writes[i]:
                if guarded:
                    used |= (1 << register) & ~defined
                else:
                    defined |= 1 << register
            for register in (*reads[i], *writes[i]):
                home[register] = number if home.get(register, number) == number else None
        uses.append(used)
        defs.append(defined)
    live = live_in(blocks, uses, defs)
    for register, where in home.items():
        if where is not None and live[where] >> register & 1:
            home[register] = None
    for ins in function.instructions:
        if ins.opcode.startswith("wgmma.mma_async"):
            home.update(dict.fromkeys(registers_in(ins.operands[0])))
    return [home.get(register) for register in range(len(function.register_names))]


class _Pool:
    """Places for registers of one block, given back when they are dead."""

    def __init__(self, size: int):
        self.start = self.size = size
        self.free: dict[int, list[int]] = {}

    def take(self, width: int) -> int:
        bytes_needed = SLOT_BYTES[width]
        known = self.free.setdefault(bytes_needed, [])
        if known:
            return known.pop()
        self.size += bytes_needed
        return self.size - bytes_needed

    def give(self, width: int, place: int) -> None:
        self.free.setdefault(SLOT_BYTES[width], []).append(place)


def _place_block(block, reads, writes, home, widths, slots, pool) -> None:
    """Linear scan: a register has its place from its first mention to its last."""
    last: dict[int, int] = {}
    for i in range(block.start, block.stop):
        for register in (*reads[i], *writes[i]):
            last[register] = i
    for i in range(block.start, block.stop):
        mentioned = dict.fromkeys((*reads[i], *writes[i]))
        for register in mentioned:
            if slots[register] < 0:
                slots[register] = pool.take(widths[register])
        for register in mentioned:
            if last[register] == i and home[register] is not None and widths[register] != 1:
                pool.give(widths[register], slots[register])


@lru_cache(maxsize=8)
def _cached(text: str, entry: str, contract: bool) -> Program:
    return make_program(parse_module(text), entry, contract)


def program_for(text: str, entry: str, *, contract: bool = True) -> Program:
    """The program of an entry; cached by content. Arguments as `translate.program_for`."""
    return _cached(text, entry, contract)


def unknown_operations() -> set[str]:
    """Names in `ops.h`, for tests that compare them with the rules."""
    return set(operations())
