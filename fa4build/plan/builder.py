"""Expressions of a plan under construction: each node once, constants folded, trivial operations removed.

Used by the extractor, for guards, and to write a plan by hand:

    b = NodeTable()
    n = b.leaf("q.shape[1]", "i64")
    tiles = b.op("udiv", "i64", b.op("add", "i64", n, b.const(127, "i64")), b.const(128, "i64"))

A node is named by its index; an operand always precedes its user. `without_unused` drops what no root reaches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fa4build.plan.evaluation import Value, compute, const_value, float_bits, unsigned, wrap
from fa4build.plan.values import (
    FLOAT_BITS,
    INT_BITS,
    INT_COMPARE,
    BytesTemplate,
    LaunchPlan,
    Node,
    ParamTemplate,
    result_type,
)

_COMMUTATIVE = frozenset("add mul and or xor smin smax umin umax eq ne".split())
_NEUTRAL_RIGHT = {
    **dict.fromkeys("add sub or xor shl lshr ashr".split(), 0),
    **dict.fromkeys("mul udiv sdiv".split(), 1),
}
_SAME_OPERANDS = {**dict.fromkeys("eq sle sge ule uge".split(), 1), **dict.fromkeys("ne slt sgt ult ugt".split(), 0)}


class NodeTable:
    """A growing list of nodes without duplicates."""

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        self.nodes: list[Node] = []
        self._index: dict[Node, int] = {}
        for node in nodes:
            self._add(node)

    def _add(self, node: Node) -> int:
        index = self._index.get(node)
        if index is None:
            index = self._index[node] = len(self.nodes)
            self.nodes.append(node)
        return index

    def type_of(self, index: int) -> str:
        """Type of a node's value."""
        return result_type(self.nodes[index])

    def constant(self, index: int) -> Value | None:
        """The number a node is, None if it depends on an input."""
        node = self.nodes[index]
        return const_value(node) if node[0] == "const" else None

    def leaf(self, name: str, type_: str) -> int:
        """The input leaf of that name."""
        return self._add(("in", type_, name))

    def const(self, value: Value, type_: str) -> int:
        """A constant; an integer wraps to its type, a float is kept by its bits."""
        if type_ in FLOAT_BITS:
            return self._add(("const", type_, float_bits(float(value), type_)))
        return self._add(("const", type_, wrap(int(value), type_)))

    def op(self, op: str, type_: str, *operands: int) -> int:
        """A computing node, or a simpler node with the same value.

        `type_` is as in the plan: the result's type, for comparisons the operands'.
        """
        constants = [self.constant(i) for i in operands]
        if all(c is not None for c in constants):
            value = compute(op, type_, self.type_of(operands[0]), tuple(c for c in constants if c is not None))
            return self.const(value, result_type((op, type_)))
        if op in _COMMUTATIVE and (constants[0] is not None or (constants[1] is None and operands[0] > operands[1])):
            operands, constants = operands[::-1], constants[::-1]
        simpler = self._simpler(op, type_, operands, constants)
        return self._add((op, type_, *operands)) if simpler is None else simpler

    def _simpler(self, op: str, type_: str, operands: tuple[int, ...], constants: list[Value | None]) -> int | None:
        first, last = operands[0], constants[-1]
        if op == "select":
            return self._simpler_select(type_, operands, constants)
        if len(operands) == 1:
            return self._simpler_conversion(op, type_, first)
        if type_ not in INT_BITS:
            return None
        if op in _NEUTRAL_RIGHT and last == _NEUTRAL_RIGHT[op] and (type_ != "i1" or op in ("or", "xor")):
            return first
        if op in ("and", "mul") and last == 0:
            return self.const(0, type_)
        if op in ("and", "or") and (operands[0] == operands[1] or last == (wrap(-1, type_) if op == "and" else 0)):
            return first
        if type_ == "i1" and op == "or" and last == 1:
            return self.const(1, "i1")
        if operands[0] == operands[1] and op in _SAME_OPERANDS:
            return self.const(_SAME_OPERANDS[op], "i1")
        if operands[0] == operands[1] and op in ("sub", "xor"):
            return self.const(0, type_)
        if op == "xor" and type_ == "i1" and last == 1:
            return self._negated(first)
        if op in INT_COMPARE:
            return self._simpler_compare(op, type_, operands, last)
        return self._simpler_sum(op, type_, operands, last)

    def _simpler_sum(self, op: str, type_: str, operands: tuple[int, ...], last: Value | None) -> int | None:
        """x - c is x + -c, and constants of nested sums are added up."""
        if last is None or op not in ("add", "sub"):
            return None
        if op == "sub":
            return self.op("add", type_, operands[0], self.const(-int(last), type_))
        node = self.nodes[operands[0]]
        inner = self.constant(node[3]) if node[0] == "add" else None
        return None if inner is None else self.op("add", type_, node[2], self.const(int(inner) + int(last), type_))

    def _simpler_compare(self, op: str, type_: str, operands: tuple[int, ...], last: Value | None) -> int | None:
        """Comparisons with a constant: of a truth value it is the value; of a widened one it needs no widening."""
        if op not in INT_COMPARE or last is None:
            return None
        low, high = _range(type_, is_signed=op[0] == "s")
        bound = last if op[0] == "s" else unsigned(int(last), type_)
        if type_ != "i1" and (op[1:], bound) in (("ge", low), ("le", high), ("lt", low), ("gt", high)):
            return self.const(int(op[1:] in ("ge", "le")), "i1")
        node = self.nodes[operands[0]]
        if type_ == "i1" and op in ("eq", "ne"):
            is_same = (op == "eq") == (last == 1)
            return operands[0] if is_same else self._negated(operands[0])
        if node[0] not in ("sext", "zext"):
            return None
        inner = self.type_of(node[2])
        low, high = _range(inner, is_signed=node[0] == "sext")
        if low <= last <= high and not (node[0] == "sext" and op[0] == "u"):
            narrow_op = "u" + op[1:] if node[0] == "zext" and op[0] == "s" else op
            return self.op(narrow_op, inner, node[2], self.const(int(last), inner))
        if op[0] == "u":
            return None
        is_above = last > high
        return self.const(int({"eq": False, "ne": True}.get(op, is_above == (op in ("slt", "sle")))), "i1")

    def _negated(self, condition: int) -> int | None:
        node = self.nodes[condition]
        opposite = _OPPOSITE.get(node[0])
        if opposite:
            return self._add((opposite, *node[1:]))
        if node[0] == "xor" and self.constant(node[3]) == 1:
            return node[2]
        return self._add(("xor", "i1", condition, self.const(1, "i1")))

    def negate(self, condition: int) -> int:
        """The opposite of an i1 node."""
        return self.op("xor", "i1", condition, self.const(1, "i1"))

    def _simpler_select(self, type_: str, operands: tuple[int, ...], constants: list[Value | None]) -> int | None:
        condition, if_true, if_false = operands
        if constants[0] is not None:
            return if_true if constants[0] else if_false
        if if_true == if_false:
            return if_true
        if type_ == "i1" and constants[1] is not None:  # as and / or, which is what a reader of guards expects
            if constants[1]:
                return self.op("or", "i1", condition, if_false)
            return self.op("and", "i1", self.negate(condition), if_false)
        if type_ == "i1" and constants[2] is not None:
            if constants[2]:
                return self.op("or", "i1", self.negate(condition), if_true)
            return self.op("and", "i1", condition, if_true)
        node = self.nodes[condition]
        if node[0] == "xor" and self.constant(node[3]) == 1:
            return self.op("select", type_, node[2], if_false, if_true)
        return None

    def _simpler_conversion(self, op: str, type_: str, operand: int) -> int | None:
        node = self.nodes[operand]
        if op == "trunc" and node[0] in ("sext", "zext", "trunc"):
            inner = node[2]
            inner_bits, bits = INT_BITS[self.type_of(inner)], INT_BITS[type_]
            if inner_bits == bits:
                return inner
            return self.op("trunc" if inner_bits > bits else node[0], type_, inner)
        if op in ("sext", "zext") and node[0] == op:
            return self.op(op, type_, node[2])
        if op == "fptrunc" and node[0] == "fpext":
            return node[2]
        if op == "bitcast" and node[0] == "bitcast" and self.type_of(node[2]) == type_:
            return node[2]
        return None


def _range(type_: str, *, is_signed: bool) -> tuple[int, int]:
    """Least and greatest number of an integer type, as sext or zext make it."""
    bits = INT_BITS[type_]
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)


_OPPOSITE = {"eq": "ne", "slt": "sge", "sle": "sgt", "ult": "uge", "ule": "ugt"}
_OPPOSITE |= {b: a for a, b in _OPPOSITE.items()}


def _renumbered_param(param: ParamTemplate, new: Mapping[int, int]) -> ParamTemplate:
    if isinstance(param, BytesTemplate):
        return replace(param, fields=tuple((offset, new[node]) for offset, node in param.fields))
    return replace(
        param,
        addr=new[param.addr],
        dims=tuple(new[i] for i in param.dims),
        strides=tuple(new[i] for i in param.strides),
    )


def roots(plan: LaunchPlan) -> list[int]:
    """Every node index that a guard or a launch names, with repetitions."""
    found = [guard.expr for guard in plan.guards]
    for launch in plan.launches:
        found += launch.grid
        for param in launch.params:
            if isinstance(param, BytesTemplate):
                found += [node for _, node in param.fields]
            else:
                found += [param.addr, *param.dims, *param.strides]
    return found


def without_unused(plan: LaunchPlan) -> LaunchPlan:
    """`plan` with only the nodes that guards and launches need, renumbered; nothing else changes.

    Contract: `plan.vectors` is empty, because they list the leaves.
    """
    is_used = [False] * len(plan.nodes)
    for index in roots(plan):
        is_used[index] = True
    for index in reversed(range(len(plan.nodes))):
        node = plan.nodes[index]
        if is_used[index] and node[0] not in ("in", "const"):
            for operand in node[2:]:
                is_used[operand] = True
    new: dict[int, int] = {}
    nodes: list[Node] = []
    for index, node in enumerate(plan.nodes):
        if is_used[index]:
            new[index] = len(nodes)
            nodes.append(node if node[0] in ("in", "const") else (*node[:2], *(new[i] for i in node[2:])))
    launches = tuple(
        replace(
            launch,
            grid=(new[launch.grid[0]], new[launch.grid[1]], new[launch.grid[2]]),
            params=tuple(_renumbered_param(param, new) for param in launch.params),
        )
        for launch in plan.launches
    )
    guards = tuple(replace(guard, expr=new[guard.expr]) for guard in plan.guards)
    return replace(plan, nodes=tuple(nodes), guards=guards, launches=launches)
