"""atom and red on global and shared memory. Source: PTX ISA 9.7.13.4, 9.7.13.5; ptx-semantics.md 7.8.

Lanes are served in order; each sees the result of the one before.
"""

import numpy as np

from fa4build.simulate.hardware.registers import DTYPES
from fa4build.simulate.instructions.operands import active_lanes
from fa4build.simulate.ptx.instructions import Address
from fa4build.simulate.translate.opcodes import system
from fa4build.simulate.units import float_formats as ff

_ORDER = r"(?:\.(relaxed|acquire|release|acq_rel))?(?:\.(?:cta|cluster|gpu|sys))?"
_OPERATION = r"\.(add|min|max|and|or|xor|exch|cas|inc|dec)\.(u32|s32|b32|u64|s64|b64|f32)"


def _combine(operation: str, kind: str, old: int, x: int, y: int) -> int:
    """New value of a word, as unsigned bits."""
    bits = int(kind[1:])
    wrap = (1 << bits) - 1
    if kind == "f32":
        return int(ff.add_f32(np.array([old], np.uint32), np.array([x], np.uint32))[0])
    if operation in ("min", "max"):
        signed = (lambda v: v - (1 << bits) if v >> bits - 1 else v) if kind[0] == "s" else (lambda v: v)
        return (min if operation == "min" else max)(old, x, key=signed)
    table = {
        "add": lambda: old + x & wrap,
        "and": lambda: old & x,
        "or": lambda: old | x,
        "xor": lambda: old ^ x,
        "exch": lambda: x,
        "cas": lambda: y if old == x else old,
        "inc": lambda: 0 if old >= x else old + 1,
        "dec": lambda: x if old == 0 or old > x else old - 1,
    }
    return table[operation]()


@system(rf"(atom|red){_ORDER}(?:\.(global|shared|shared::cta))?{_ORDER}(?:\.(global|shared|shared::cta))?{_OPERATION}")
def _atomic(b, ins, match):
    order, space = match[2] or match[4], match[3] or match[5]
    operation, kind = match[6], match[7]
    returns = match[1] == "atom"
    if space is None:
        raise b.fault(f"{ins.opcode}: name the state space (.global or .shared)")
    if kind == "f32" and operation != "add":
        raise b.fault(f"{ins.opcode} is not modelled for f32")
    operands = list(ins.operands)
    put = b.put(operands.pop(0), f"u{kind[1:]}") if returns else None
    place: Address = operands.pop(0)
    width = f"u{kind[1:]}"
    values = [b.get(o, width) for o in operands]
    is_global = space == "global"
    address = b.address(place, 64 if is_global else 32)

    def run(g, mask) -> None:
        a, operand = address(g), [v(g) for v in values]
        observer = g.cta.observer
        lanes = active_lanes(g, mask)
        if observer is not None:
            observer.atomic(g, mask, a[lanes], order, is_global, b.site)
        results = np.zeros(g.lanes, DTYPES[width])
        for lane in lanes.tolist():
            view, index = _word(b, g, int(a[lane]), int(kind[1:]) // 8, is_global)
            old = int(view[index])
            y = int(operand[1][lane]) if len(operand) > 1 else 0
            view[index] = _combine(operation, kind, old, int(operand[0][lane]), y)
            results[lane] = old
        if put is not None:
            put(g, mask, results)

    return run


def _word(b, g, address: int, size: int, is_global: bool):
    """(array, index) of an aligned word."""
    if address % size:
        raise b.fault(f"atomic on misaligned address 0x{address:x}; it must be a multiple of {size}")
    if is_global:
        buffer = g.cta.memory.find(address, size, "atomic")
        if buffer.read_only:
            raise b.fault(f"atomic on read-only buffer {buffer.name}")
        return buffer.views[size], (address - buffer.base) // size
    offset = address - int(g.cta.rank_bits)
    if not 0x400 <= offset <= g.cta.shared_limit - size:
        raise b.fault(f"atomic at 0x{address:x} is outside the CTA's shared memory")
    return g.cta.shared[size], offset // size
