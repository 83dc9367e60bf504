"""Symbolic execution of lowered host code: every value becomes a node, every branch a select, every check a guard.

What is understood is listed in `_BINARY`, `_CONVERSIONS`, `_SAME_VALUE` and the `_op_*` methods. Anything else, be it
an operation, a call or a loop whose length depends on data (except the power-of-two search of fast division), is a
LaunchPlanError that names function and line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fa4build.errors import LaunchPlanError
from fa4build.plan.builder import NodeTable
from fa4build.plan.extract.flow import EXIT, Flow
from fa4build.plan.extract.llvm_types import LlvmType, member_at, parse_type
from fa4build.plan.extract.loops import Iteration, search_length, summarize_search
from fa4build.plan.extract.memory import Memory
from fa4build.plan.extract.mlir_text import Function, Module, Op, split_types

Value = int | None | tuple  # a node, undefined, or the leaves of a struct, array or vector

MAX_STEPS = 400_000  # operations executed; a host function of ours takes about 2,000
DYNAMIC_INDEX = -(1 << 31)

_BINARY = {
    name: name for name in "add sub mul and or xor shl lshr ashr udiv sdiv urem srem fadd fsub fmul fdiv".split()
}
_BINARY |= {f"intr.{name}": name for name in ("smin", "smax", "umin", "umax")}
_BINARY |= {"intr.minnum": "fmin", "intr.maxnum": "fmax"}
_CONVERSIONS = frozenset("sext zext trunc fptrunc fpext sitofp uitofp fptosi bitcast".split())
_SAME_VALUE = frozenset({"ptrtoint", "inttoptr", "addrspacecast", "freeze"})
_INT_PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
_FLOAT_PREDICATES = {1: "feq", 2: "fgt", 3: "fge", 4: "flt", 5: "fle"}  # the ordered ones of LLVM's numbering


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A condition without which host code fails. `parts` are the texts of the failing block, as written there."""

    expr: int
    parts: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Frame:
    """One call under execution."""

    function: Function
    flow: Flow
    values: dict[str, Value] = field(default_factory=dict)


ExternalCall = Callable[["Machine", tuple[Value, ...]], Value]


class Machine:
    """Executes functions of `module` over nodes of `table`; `externals` are the calls that leave the module."""

    def __init__(self, module: Module, table: NodeTable, externals: dict[str, ExternalCall]) -> None:
        self.module = module
        self.table = table
        self.memory = Memory(table)
        self.checks: list[Check] = []
        self.path = table.const(1, "i1")
        self._externals = externals
        self._flows: dict[str, Flow] = {}
        self._steps = 0

    def call(self, name: str, arguments: tuple[Value, ...]) -> Value:
        """Execute a function and give its result, None for void.

        Raises: LaunchPlanError for what is not understood, with the place.
        """
        function = self.module.functions[name]
        flow = self._flows.setdefault(name, Flow(function))
        frame = Frame(function=function, flow=flow)
        _, results = self._run(frame, function.entry, arguments, EXIT)
        return results[0] if results else None

    def _run(self, frame: Frame, label: str, arguments: tuple[Value, ...], stop: str) -> tuple[str, tuple[Value, ...]]:
        """Execute from block `label` until `stop` (its arguments are returned) or the function's end (its results)."""
        while label not in (stop, EXIT):
            self._enter(frame, label, arguments)
            terminator = frame.function.blocks[label].ops[-1]
            if terminator.name == "return":
                return EXIT, tuple(frame.values[x] for x in terminator.operands)
            try:
                label, arguments = self._branch(frame, label, terminator)
            except LaunchPlanError as error:
                raise _placed(error, frame, terminator) from None
        return label, arguments

    def _enter(self, frame: Frame, label: str, arguments: tuple[Value, ...]) -> None:
        """Bind a block's arguments and execute it up to its terminator."""
        block = frame.function.blocks[label]
        frame.values.update(zip((name for name, _ in block.arguments), arguments, strict=True))
        self._steps += len(block.ops)
        if self._steps > MAX_STEPS:
            raise LaunchPlanError(f"host function {frame.function.name} takes more than {MAX_STEPS} operations")
        for op in block.ops[:-1]:
            try:
                value = self._execute(frame, op)
            except LaunchPlanError as error:
                raise _placed(error, frame, op) from None
            if op.result is not None:
                frame.values[op.result] = value

    # Control flow

    def _branch(self, frame: Frame, label: str, op: Op) -> tuple[str, tuple[Value, ...]]:
        if op.name == "br":
            return op.successors[0], tuple(frame.values[x] for x in op.operands)
        if op.name != "cond_br":
            raise LaunchPlanError(f"llvm.{op.name} is not understood")
        sides = self._sides(frame, op)
        condition = frame.values[op.operands[0]]
        if not isinstance(condition, int):
            raise LaunchPlanError("a branch depends on an undefined value")
        constant = self.table.constant(condition)
        if constant is not None:
            return sides[0] if constant else sides[1]
        failing = [side[0] in frame.flow.failing for side in sides]
        if any(failing):
            self._check(frame, condition if failing[1] else self.table.negate(condition), sides[failing.index(True)][0])
            return sides[failing.index(False)]
        loops = [frame.flow.returns_to(side[0], label) for side in sides]
        if any(loops):
            return self._loop(frame, label, op, loops)
        return self._both(frame, condition, sides, frame.flow.join(label))

    @staticmethod
    def _sides(frame: Frame, op: Op) -> list[tuple[str, tuple[Value, ...]]]:
        """[(true block, its arguments), (false block, its arguments)]"""
        _, count_true, _ = op.integers("operandSegmentSizes")
        values = tuple(frame.values.get(x) for x in op.operands[1:])
        return [(op.successors[0], values[:count_true]), (op.successors[1], values[count_true:])]

    def _check(self, frame: Frame, condition: int, failing: str) -> None:
        """Record that `condition` must hold on this path; block `failing` tells what is reported otherwise."""
        expr = self.table.op("or", "i1", self.table.negate(self.path), condition)
        texts: list[str] = []
        for op in frame.function.blocks[failing].ops:
            symbol = op.reference("global_name") if op.name == "mlir.addressof" else None
            text = self.module.strings.get(symbol or "")
            texts += [text] if text is not None else []
        self.checks.append(Check(expr=expr, parts=tuple(texts)))

    def _both(
        self, frame: Frame, condition: int, sides: list[tuple[str, tuple[Value, ...]]], join: str
    ) -> tuple[str, tuple[Value, ...]]:
        """Execute both sides up to where they meet, and select."""
        path, before = self.path, self.memory.snapshot()
        self.path = self.table.op("and", "i1", path, condition)
        label, if_true = self._run(frame, *sides[0], join)
        after_true = self.memory.snapshot()
        self.memory.restore(before)
        self.path = self.table.op("and", "i1", path, self.table.negate(condition))
        _, if_false = self._run(frame, *sides[1], join)
        self.path = path
        self.memory.merge(condition, after_true)
        merged = tuple(self.select(condition, a, b) for a, b in zip(if_true, if_false, strict=True))
        return label, merged

    def _loop(self, frame: Frame, label: str, op: Op, loops: list[bool]) -> tuple[str, tuple[Value, ...]]:
        """A loop whose length depends on data: only the search for a power of two is understood."""
        if all(loops):
            raise LaunchPlanError("a loop depends on data")
        block = frame.function.blocks[label]
        names = [name for name, _ in block.arguments] + [x.result for x in block.ops[:-1] if x.result]
        iterations = [self._iteration(frame, names, op, is_inverted=loops[1])]
        before = self.memory.snapshot()
        for _ in range(search_length(self.table, iterations[0].condition) - 1):
            inside, arguments = self._sides(frame, op)[loops.index(True)]
            _, arguments = self._run(frame, inside, arguments, label)
            self._enter(frame, label, arguments)
            iterations.append(self._iteration(frame, names, op, is_inverted=loops[1]))
        if self.memory.snapshot() != before:
            raise LaunchPlanError("a loop that depends on data writes memory")
        found = summarize_search(self.table, iterations)
        for name in names:
            frame.values[name] = found.get(name)
        return self._sides(frame, op)[loops.index(False)]

    def _iteration(self, frame: Frame, names: list[str], op: Op, *, is_inverted: bool) -> Iteration:
        """What the loop's first block computed this time round, and the condition to stay in the loop."""
        condition = frame.values[op.operands[0]]
        if not isinstance(condition, int):
            raise LaunchPlanError("a loop depends on an undefined value")
        return Iteration(
            condition=self.table.negate(condition) if is_inverted else condition,
            values={name: frame.values[name] for name in names},
        )

    def select(self, condition: int, if_true: Value, if_false: Value) -> Value:
        """A value that depends on `condition`; where one side is undefined, the other's value."""
        if if_true is None or if_true == if_false:
            return if_false
        if if_false is None:
            return if_true
        if isinstance(if_true, tuple) and isinstance(if_false, tuple):
            return tuple(self.select(condition, a, b) for a, b in zip(if_true, if_false, strict=True))
        assert isinstance(if_true, int)
        assert isinstance(if_false, int)
        return self.table.op("select", self.table.type_of(if_true), condition, if_true, if_false)

    # Operations

    def _execute(self, frame: Frame, op: Op) -> Value:
        operands = tuple(frame.values[x] for x in op.operands)
        if op.name in _BINARY:
            return self._scalar(_BINARY[op.name], operands, None)
        if op.name in _CONVERSIONS:
            return self._convert(op.name, operands[0], op.result_type)
        if op.name in _SAME_VALUE:
            return operands[0]
        method = getattr(self, "_op_" + op.name.replace(".", "_"), None)
        if method is None:
            raise LaunchPlanError(f"llvm.{op.name} is not understood")
        return method(op, operands)

    def _scalar(self, plan_op: str, operands: tuple[Value, ...], type_: str | None) -> Value:
        """A node over scalar operands, undefined if one of them is."""
        nodes = [x for x in operands if isinstance(x, int)]
        if any(isinstance(x, tuple) for x in operands):
            raise LaunchPlanError(f"{plan_op} of vectors is not understood")
        if len(nodes) < len(operands):
            return None
        return self.table.op(plan_op, type_ or self.table.type_of(nodes[0]), *nodes)

    def _convert(self, name: str, operand: Value, result_type: str) -> Value:
        type_ = _scalar_type(result_type)
        if isinstance(operand, int) and self.table.type_of(operand) == type_:
            return operand
        return self._scalar(name, (operand,), type_)

    def _op_mlir_constant(self, op: Op, _operands: tuple[Value, ...]) -> Value:
        text = op.attribute("value") or ""
        type_ = parse_type(op.result_type)
        if text.startswith('"'):
            return (None,) * len(type_.leaves)  # a text: only ever passed to calls that fail
        if text.startswith("dense<"):
            return self._dense(text, type_)
        if not type_.is_scalar:
            raise LaunchPlanError(f"the constant {text[:60]} is not understood")
        return self._number(text.split(" : ")[0], op.result_type)

    def _number(self, text: str, type_text: str) -> int:
        type_ = _scalar_type(type_text)
        if text in ("true", "false"):
            return self.table.const(int(text == "true"), type_)
        if type_ in ("f32", "f64"):
            if text.startswith("0x"):
                bits = self.table.const(int(text, 16), "i32" if type_ == "f32" else "i64")
                return self.table.op("bitcast", type_, bits)
            return self.table.const(float(text), type_)
        return self.table.const(int(text), type_)

    def _dense(self, text: str, type_: LlvmType) -> Value:
        """`dense<0> : vector<4xi32>` or `dense<[1, 2]> : ...`"""
        body = text.removeprefix("dense<").split(">")[0]
        numbers = [x.strip() for x in body.strip("[]").split(",")]
        numbers = numbers * len(type_.leaves) if len(numbers) == 1 else numbers
        if len(numbers) != len(type_.leaves):
            raise LaunchPlanError(f"the constant {text[:60]} is not understood")
        return tuple(self._number(x, leaf) for x, (_, leaf) in zip(numbers, type_.leaves, strict=True))

    def _op_mlir_zero(self, op: Op, _operands: tuple[Value, ...]) -> Value:
        type_ = parse_type(op.result_type)
        zeros = tuple(self.table.const(0, leaf) for _, leaf in type_.leaves)
        return zeros[0] if type_.is_scalar else zeros

    def _op_mlir_poison(self, op: Op, _operands: tuple[Value, ...]) -> Value:
        type_ = parse_type(op.result_type)
        return None if type_.is_scalar else (None,) * len(type_.leaves)

    _op_mlir_undef = _op_mlir_poison

    def _op_mlir_addressof(self, op: Op, _operands: tuple[Value, ...]) -> Value:
        symbol = op.reference("global_name")
        if symbol is None:
            raise LaunchPlanError("an address of nothing")
        return self.table.const(self.memory.address_of(symbol), "i64")

    def _op_icmp(self, op: Op, operands: tuple[Value, ...]) -> Value:
        predicate = op.integer("predicate")
        if predicate is None or not 0 <= predicate < len(_INT_PREDICATES):
            raise LaunchPlanError(f"icmp predicate {predicate} is not understood")
        return self._scalar(_INT_PREDICATES[predicate], operands, None)

    def _op_fcmp(self, op: Op, operands: tuple[Value, ...]) -> Value:
        predicate = op.integer("predicate")
        if predicate not in _FLOAT_PREDICATES:
            raise LaunchPlanError(f"fcmp predicate {predicate} is not understood")
        return self._scalar(_FLOAT_PREDICATES[predicate], operands, None)

    def _op_select(self, _op: Op, operands: tuple[Value, ...]) -> Value:
        if not isinstance(operands[0], int):
            raise LaunchPlanError("a select depends on an undefined value")
        return self.select(operands[0], operands[1], operands[2])

    def _op_fneg(self, _op: Op, operands: tuple[Value, ...]) -> Value:
        if not isinstance(operands[0], int):
            return None
        type_ = self.table.type_of(operands[0])
        return self.table.op("fsub", type_, self.table.const(-0.0, type_), operands[0])

    def _op_intr_ctlz(self, _op: Op, operands: tuple[Value, ...]) -> Value:
        return self._scalar("ctlz", operands[:1], None)

    def _op_extractvalue(self, op: Op, operands: tuple[Value, ...]) -> Value:
        aggregate = parse_type(op.types)
        _, member, first = member_at(aggregate, op.integers("position"))
        leaves = operands[0] if isinstance(operands[0], tuple) else (None,) * len(aggregate.leaves)
        return leaves[first] if member.is_scalar else leaves[first : first + len(member.leaves)]

    def _op_insertvalue(self, op: Op, operands: tuple[Value, ...]) -> Value:
        aggregate = parse_type(op.result_type)
        _, member, first = member_at(aggregate, op.integers("position"))
        leaves = operands[0] if isinstance(operands[0], tuple) else (None,) * len(aggregate.leaves)
        part = operands[1] if isinstance(operands[1], tuple) else (operands[1],)
        return (*leaves[:first], *part, *leaves[first + len(member.leaves) :])

    def _op_alloca(self, op: Op, operands: tuple[Value, ...]) -> Value:
        text = op.attribute("elem_type") or ""
        type_ = parse_type(text)
        align = max(type_.align, op.integer("alignment") or 1)
        name = f"stack slot {op.result} ({text})"
        address = self.memory.allocate(name, text, self.constant(operands[0], "stack slot's count"), align)
        return self.table.const(address, "i64")

    def _op_getelementptr(self, op: Op, operands: tuple[Value, ...]) -> Value:
        """Base plus offset: the first index steps over whole elements, the others go into one."""
        if any(not isinstance(x, int) for x in operands):
            return None
        dynamic = iter(operands[1:])
        type_ = parse_type(op.attribute("elem_type") or "")
        address = operands[0]
        for depth, index in enumerate(op.integers("rawConstantIndices")):
            if index == DYNAMIC_INDEX:
                type_ = type_.children[0][1] if depth else type_
                address = self._add(address, self._scaled(next(dynamic), type_.size))
            elif depth:
                at, type_, _ = type_.children[index]
                address = self._add(address, self.table.const(at, "i64"))
            else:
                address = self._add(address, self.table.const(index * type_.size, "i64"))
        return address

    def _add(self, address: Value, offset: int) -> int:
        assert isinstance(address, int)
        return self.table.op("add", "i64", address, offset)

    def _scaled(self, index: Value, size: int) -> int:
        """A signed index in bytes."""
        assert isinstance(index, int)
        wide = index if self.table.type_of(index) == "i64" else self.table.op("sext", "i64", index)
        return self.table.op("mul", "i64", wide, self.table.const(size, "i64"))

    def _op_load(self, op: Op, operands: tuple[Value, ...]) -> Value:
        type_ = parse_type(op.result_type)
        leaves = tuple(self._load(operands[0], at, leaf) for at, leaf in type_.leaves)
        return leaves[0] if type_.is_scalar else leaves

    def _load(self, pointer: Value, offset: int, type_: str) -> int | None:
        """One scalar at a pointer, which may be one of two."""
        if not isinstance(pointer, int):
            raise LaunchPlanError("a load through an undefined pointer")
        node = self.table.nodes[pointer]
        if node[0] == "select":
            value = self.select(node[2], self._load(node[3], offset, type_), self._load(node[4], offset, type_))
            return value if isinstance(value, int) else None
        return self.memory.load(self.constant(pointer, "pointer") + offset, type_)

    def _op_store(self, op: Op, operands: tuple[Value, ...]) -> Value:
        type_ = parse_type(split_types(op.types)[0])
        address = self.constant(operands[1], "pointer")
        leaves = operands[0] if isinstance(operands[0], tuple) else (operands[0],) * len(type_.leaves)
        for (at, leaf), value in zip(type_.leaves, leaves, strict=True):
            self.memory.store(address + at, leaf, value)
        return None

    def _op_call(self, op: Op, operands: tuple[Value, ...]) -> Value:
        callee = op.reference("callee") or "a computed address"
        if callee in self._externals:
            return self._externals[callee](self, operands)
        if callee in self.module.functions:
            return self.call(callee, operands)
        raise LaunchPlanError(f"a call of {callee} is not understood")

    def constant(self, value: Value, what: str) -> int:
        """The integer that a value is known to be.

        Raises: LaunchPlanError if it depends on inputs, or is undefined.
        """
        found = self.table.constant(value) if isinstance(value, int) else None
        if not isinstance(found, int):
            raise LaunchPlanError(f"a {what} depends on the caller's data, which is not understood")
        return found


def _scalar_type(text: str) -> str:
    """Plan type of a scalar LLVM type."""
    type_ = parse_type(text)
    if not type_.is_scalar or text in ("f16", "bf16"):
        raise LaunchPlanError(f"the type {text} is not understood here")
    return type_.leaves[0][1]


def _placed(error: LaunchPlanError, frame: Frame, op: Op) -> LaunchPlanError:
    """The same error with its place, once."""
    text = str(error)
    if ", line " in text:
        return error
    return LaunchPlanError(f"host function {frame.function.name}, line {op.line} of the generic form: {text}")
