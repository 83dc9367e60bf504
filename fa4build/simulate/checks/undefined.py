"""R9 of registers: whether any path of the code uses a register before it has been written. Static: it holds for every
input, not only for what a run happens to do.

Moves hand an undefined value on without using it: compilers leave such copies where a value does not matter. A write
under a guard leaves a register possibly undefined. The accumulators of wgmma are not looked at, since a product that
does not accumulate only names them: they start out as NaN, which would show in the results.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4build.simulate.ptx.instructions import Function, Instruction
from fa4build.simulate.translate.emitter import read_registers, registers_in, written_registers


@dataclass(frozen=True, slots=True, kw_only=True)
class UndefinedUse:
    """An instruction (index) and the register it may read before anything was written to it."""

    site: int
    register: int


def undefined_uses(function: Function, blocks: tuple) -> tuple[UndefinedUse, ...]:
    """Uses that some path reaches with the register undefined, the first for each register.

    Method: registers that may be undefined, forward over the basic blocks to a fixpoint (bit sets).
    """
    everything = (1 << len(function.register_names)) - 1
    entering: list[int | None] = [None] * (len(blocks) + 1)
    entering[0] = everything
    waiting = [0]
    while waiting:
        number = waiting.pop()
        undefined = entering[number] or 0
        for index in range(blocks[number].start, blocks[number].stop):
            undefined = _after(function.instructions[index], undefined)
        for following in blocks[number].successors:
            known = entering[following]
            joined = undefined if known is None else known | undefined
            if joined != known:
                entering[following] = joined
                if following < len(blocks):
                    waiting.append(following)
    return tuple(_uses(function, blocks, entering))


def _uses(function: Function, blocks: tuple, entering: list[int | None]):
    seen: set[int] = set()
    for number, block in enumerate(blocks):
        undefined = entering[number] or 0  # a block that nothing reaches has no uses
        for index in range(block.start, block.stop):
            ins = function.instructions[index]
            for register in _used(ins) if undefined else ():
                if undefined >> register & 1 and register not in seen:
                    seen.add(register)
                    yield UndefinedUse(site=index, register=register)
            undefined = _after(ins, undefined)


def _is_move(ins: Instruction) -> bool:
    return ins.opcode.startswith("mov.")


def _used(ins: Instruction) -> list[int]:
    """Registers whose value an instruction does something with."""
    if _is_move(ins):
        return [] if ins.guard is None else [ins.guard.register]
    used = read_registers(ins)
    if ins.opcode.startswith("wgmma.mma_async"):
        accumulators = set(registers_in(ins.operands[0]))
        used = [register for register in used if register not in accumulators]
    return used


def _after(ins: Instruction, undefined: int) -> int:
    """What may be undefined behind an instruction."""
    written = 0
    for register in written_registers(ins):
        written |= 1 << register
    if not written:
        return undefined
    if _is_move(ins) and any(undefined >> register & 1 for register in read_registers(ins)):
        return undefined | written
    return undefined if ins.guard is not None else undefined & ~written
