"""Writes the Python source of one straight-line run of instructions."""

from fa4build.errors import SimulationError
from fa4build.simulate.ptx.control_flow import BRANCHES, EXITS
from fa4build.simulate.ptx.instructions import Address, Imm, Pair, Reg, Sink, Special, Symbol, Vector
from fa4build.simulate.translate.batching import batched
from fa4build.simulate.translate.node_scope import NODE_SCOPE
from fa4build.simulate.translate.opcodes import rule_for

_WIDTH = {"p": 1, "u8": 8, "s8": 8, "u16": 16, "s16": 16, "u32": 32, "s32": 32, "f32": 32, "u64": 64, "s64": 64,
          "f64": 64, "pair": 64, "b128": 128}  # fmt: skip
# Opcodes without a destination: every register operand is read.
_NO_DESTINATION = (
    "st.", "bar.", "barrier.", "fence", "cp.", "red.", "mbarrier.init", "mbarrier.inval", "mbarrier.expect_tx",
    "bra", "ret", "exit",
    "stmatrix", "setmaxnreg", "griddepcontrol", "tcgen05.st", "tcgen05.mma", "tcgen05.alloc", "tcgen05.dealloc",
    "tcgen05.commit", "tcgen05.wait", "tcgen05.relinquish", "tcgen05.fence", "tcgen05.cp", "tcgen05.shift",
    "prefetch", "membar", "st.async", "trap", "nanosleep",
    "wgmma.fence", "wgmma.commit", "wgmma.wait", "clusterlaunchcontrol.try_cancel", "mbarrier.complete_tx",
    "multimem.red", "discard", "applypriority",
)  # fmt: skip


def registers_in(operand) -> list[int]:
    """Every register named inside an operand."""
    if isinstance(operand, Reg):
        return [operand.index]
    if isinstance(operand, Vector):
        return [r for e in operand.elements for r in registers_in(e)]
    if isinstance(operand, Pair):
        return registers_in(operand.data) + registers_in(operand.predicate)
    if isinstance(operand, Address):
        return registers_in(operand.base) + [r for c in operand.coordinates or () for r in registers_in(c)]
    return []


def _has_destination(ins) -> bool:
    return not ins.opcode.startswith(_NO_DESTINATION)


def read_registers(ins) -> list[int]:
    """Registers an instruction reads, its guard included; wgmma reads its accumulators."""
    first = 1 if _has_destination(ins) else 0
    regs = [r for o in ins.operands[first:] for r in registers_in(o)]
    if first and (isinstance(ins.operands[0], Address) or ins.opcode.startswith("wgmma.mma_async")):
        regs += registers_in(ins.operands[0])
    if ins.opcode.startswith("tcgen05.ld.red"):
        regs = [r for o in ins.operands[2:] for r in registers_in(o)]
    if ins.guard is not None:
        regs.append(ins.guard.register)
    return regs


def written_registers(ins) -> list[int]:
    """Registers an instruction writes."""
    if not _has_destination(ins) or not ins.operands or isinstance(ins.operands[0], Address):
        return []
    regs = registers_in(ins.operands[0])
    if ins.opcode.startswith("tcgen05.ld.red"):
        regs = regs + registers_in(ins.operands[1])
    return regs


class Emitter:
    """Source of one node under construction. Rules use `src`, `dst`, `tmp`, `address` and the current `mask`."""

    def __init__(self, program, node, masked: bool):
        self.program, self.node, self.masked = program, node, masked
        self.lines: list[str] = []
        self.names: dict[int, dict[str, str]] = {}  # register -> kind -> variable that holds its current value
        self.constants: dict[int, str] = {}
        self.dirty: dict[int, None] = {}
        self.serial = 0
        self.site = 0
        self.mask = "m" if masked else "None"
        self._guard: str | None = None
        self._skipped = set(program.contracted.values())

    def instruction(self, index: int, ins) -> None:
        """Emits one instruction by its rule."""
        if index in self._skipped:
            return
        self.site = index
        self._enter_guard(ins.guard)
        rule, match = rule_for(ins.opcode, ins.line)
        try:
            rule.make(self, ins, match)
        except (IndexError, AttributeError, KeyError, ValueError, TypeError) as error:
            raise SimulationError(f"PTX line {ins.line}: cannot translate {ins.text[:160]!r}: {error}") from error

    def _enter_guard(self, guard) -> None:
        self._guard = None
        self.mask = "m" if self.masked else "None"
        if guard is not None:
            name = self.src(Reg(guard.register), "p")
            if guard.negated:
                name = self.tmp(f"~{name}")
            self._guard = self.mask = self.tmp(f"{name} & m") if self.masked else name

    def tmp(self, expression: str) -> str:
        """Assigns an expression to a fresh variable."""
        self.serial += 1
        name = f"t{self.serial}"
        self.lines.append(f"{name} = {expression}")
        return name

    def const(self, bits: int, kind: str) -> str:
        """An immediate as an array."""
        index = self.program.constant(bits, kind)
        if index not in self.constants:
            self.constants[index] = f"k{index}"
            self.lines.append(f"k{index} = K[{index}]")
        return self.constants[index]

    def src(self, operand, kind: str) -> str:
        """Expression of an operand as an array of `kind` (for `pair` and `b128`: a tuple of two)."""
        if isinstance(operand, Reg):
            return self._register(operand.index, kind)
        if isinstance(operand, Imm):
            if kind in ("pair", "b128"):
                half = "f32" if kind == "pair" else "u64"
                width = _WIDTH[half]
                low, high = operand.value & ((1 << width) - 1), operand.value >> width & ((1 << width) - 1)
                return f"({self.const(low, half)}, {self.const(high, half)})"
            return self.const(operand.value & ((1 << _WIDTH[kind]) - 1), kind)
        if isinstance(operand, Special):
            return self.tmp(f"special(g, {operand.name!r}, {kind!r})")
        if isinstance(operand, Symbol):
            return self.tmp(f"symbol(g, {operand.name!r}, {kind!r})")
        raise ValueError(f"operand {operand} cannot be read as {kind}")

    def _register(self, reg: int, kind: str) -> str:
        known = self.names.setdefault(reg, {})
        if kind in known:
            return known[kind]
        storage = self.program.storage[reg]
        if storage not in known:
            other = next(iter(known.items()), None)
            known[storage] = self.tmp(f"r[{reg}]") if other is None else self._convert(other[1], other[0], storage)
        if kind != storage:
            known[kind] = self._convert(known[storage], storage, kind)
        return known[kind]

    def _convert(self, name: str, have: str, want: str) -> str:
        if have == want:
            return name
        if _WIDTH[have] != _WIDTH[want]:
            raise ValueError(f"a {_WIDTH[have]}-bit register is used as {want}")
        if "pair" in (have, want):
            if have not in ("pair", "u64", "s64", "f64"):
                raise ValueError(f"cannot read {have} as {want}")
            return self.tmp(f"to_kind({name}, {have!r}, {want!r})")
        return self.tmp(f"{name}.view({want})")

    def dst(self, operand, kind: str, expression: str) -> None:
        """Writes an expression of `kind` to a destination; lanes outside the mask keep the old value."""
        if isinstance(operand, Sink):
            self.lines.append(expression)
            return
        if not isinstance(operand, Reg):
            raise ValueError(f"{operand} is not a destination register")
        reg = operand.index
        storage = self.program.storage[reg]
        value = self.tmp(expression)
        keep_old = self._guard is not None or (self.masked and reg not in self.program.local)
        if keep_old:
            value, kind = self._convert(value, kind, storage), storage
            known = bool(self.names.get(reg)) or reg not in self.program.local
            old = self._register(reg, storage) if known else "None"
            value = self.tmp(f"merge({self.mask}, {value}, {old})")
        self.names[reg] = {kind: value}
        self.dirty[reg] = None

    def address(self, operand: Address, bits: int) -> str:
        """`[base + offset]` as an array of u32 (shared) or u64 (global, local) byte addresses."""
        kind = f"u{bits}"
        if isinstance(operand.base, Imm):
            return self.const(operand.base.value + operand.offset, kind)
        base = self.src(operand.base, kind)
        return self.tmp(f"{base} + {self.const(operand.offset & ((1 << bits) - 1), kind)}") if operand.offset else base

    def finish(self, diverge):
        """Adds write-back and the branch; compiles and returns the node's function."""
        self.lines = batched(self.lines)
        for reg in self.dirty:
            if reg not in self.program.local:
                self.lines.append(f"r[{reg}] = {self._register(reg, self.program.storage[reg])}")
        self._branch()
        head = "def node(g):\n    r = g.regs; K = g.constants\n" + ("    m = g.mask\n" if self.masked else "")
        source = head + "".join(f"    {line}\n" for line in self.lines)
        scope = dict(NODE_SCOPE)
        scope["diverge"] = diverge
        exec(compile(source, f"<ptx {self.program.function.name} node {self.node.index}>", "exec"), scope)
        return scope["node"]

    def _branch(self) -> None:
        last = self.program.function.instructions[self.node.stop - 1]
        node = self.node
        if last.opcode not in BRANCHES and last.opcode not in EXITS:
            self.lines.append(f"return {node.next}")
            return
        if last.guard is None:
            self.lines.append(f"return {node.target}")
            return
        taken = self.src(Reg(last.guard.register), "p")
        if last.guard.negated:
            taken = self.tmp(f"~{taken}")
        if self.masked:
            taken = self.tmp(f"{taken} & m")
        self.lines += [
            f"n = count({taken})",
            f"if n == 0: return {node.next}",
            f"if n == g.active: return {node.target}",
            f"return diverge(g, {taken}, {node.next}, {node.target}, {node.reconverge}, "
            f"{last.opcode == 'bra.uni'}, {last.line})",
        ]
