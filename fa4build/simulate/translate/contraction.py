"""Which `mul.f32` ptxas fuses into the following add or subtract (FFMA).

Rule: the product has one use, an `add.f32`/`sub.f32` without `.rn` in the same basic block, and its factors keep
their values until then. On sm_90 it predicted the machine code and the bits of attention kernels exactly.
"""

from collections import Counter

from fa4build.simulate.ptx.control_flow import Block
from fa4build.simulate.ptx.instructions import Function, Reg
from fa4build.simulate.translate.emitter import read_registers, written_registers

PRODUCT = "mul.f32"
CONSUMERS = frozenset(["add.f32", "sub.f32"])


def contracted_multiplies(function: Function, blocks: tuple[Block, ...]) -> dict[int, int]:
    """Index of the add or subtract -> index of the multiply that it swallows."""
    uses = Counter(reg for ins in function.instructions for reg in read_registers(ins))
    fused: dict[int, int] = {}
    for block in blocks:
        _contract_block(function, block, uses, fused)
    return fused


def _contract_block(function: Function, block: Block, uses: Counter, fused: dict[int, int]) -> None:
    products: dict[int, tuple[int, frozenset[int]]] = {}  # result -> (multiply, registers that must keep their values)
    for i in range(block.start, block.stop):
        ins = function.instructions[i]
        if ins.opcode in CONSUMERS and ins.guard is None:
            for operand in ins.operands[1:]:
                if isinstance(operand, Reg) and operand.index in products:
                    fused[i] = products.pop(operand.index)[0]
                    break
        if products:
            written = written_registers(ins)
            products = {reg: kept for reg, kept in products.items() if kept[1].isdisjoint(written)}
        if ins.opcode == PRODUCT and ins.guard is None:
            result = ins.operands[0].index
            factors = read_registers(ins)
            if uses[result] == 1 and result not in factors:
                products[result] = i, frozenset((result, *factors))
