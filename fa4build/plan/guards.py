"""Guards for what host code does not check: facts of the specialization, and what a tensor map can describe.

Reserved keys of a plan's `spec` say what the kernel was compiled for; the rest of `spec` are named facts:

    {"head_dim": 128,
     "shapes": {"q": ["batch", "seqlen_q", "num_heads_q", "head_dim"], "k": ["batch", "seqlen_k", "num_heads_kv", 128]},
     "multiples": [["num_heads_q", "num_heads_kv"]],
     "sums": [["batch_plus_one", "batch", 1]],
     "sums_or_zero": [["num_seqused_q", "batch_plus_one", -1]],
     "unit_strides": ["q.stride[3]"]}

In `shapes` a number is an extent; a name of an integer fact is that extent; any other name is a run-time extent, the
same wherever it occurs. In `multiples` the first name's extent is a multiple of the second's; a number behind them is
the quotient. In `sums` the first name's extent is the second's plus the number; in `sums_or_zero` it may also be 0. A
stride of an extent of 1 is free, because no kernel ever uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fa4build.errors import LaunchPlanError
from fa4build.plan.builder import NodeTable
from fa4build.plan.values import MAP_ITEM_BYTES, BytesTemplate, Guard, LaunchPlan, TensorMapTemplate

MAP_ALIGN_BYTES = 16
MAP_STRIDE_LIMIT = 1 << 40  # bytes; cuTensorMapEncodeTiled


def add_guards(plan: LaunchPlan) -> LaunchPlan:
    """`plan` with the guards of its `spec` and of its tensor maps behind its own; a condition occurs once.

    Raises: LaunchPlanError when `spec` names a tensor, dimension or extent that the plan does not have.
    """
    table = NodeTable(plan.nodes)
    guards = {guard.expr: guard for guard in plan.guards}
    first = _first_occurrences(plan)
    for guard in (
        *_shape_guards(table, plan, first),
        *_multiple_guards(table, plan, first),
        *_sum_guards(table, plan, first),
        *_unit_guards(table, plan),
    ):
        guards[guard.expr] = guard  # of two messages for one condition, the one that says why
    for guard in _map_guards(table, plan):
        guards.setdefault(guard.expr, guard)
    for guard in guards.values():
        if table.constant(guard.expr) == 0:
            raise LaunchPlanError(f"a guard can never hold: {guard.message}")
    guards = {expr: guard for expr, guard in guards.items() if table.constant(expr) is None}
    return replace(plan, nodes=tuple(table.nodes), guards=tuple(guards.values()))


def _first_occurrences(plan: LaunchPlan) -> dict[str, str]:
    """Name of a run-time extent -> the first leaf that is it."""
    first: dict[str, str] = {}
    for tensor, shape in plan.spec.get("shapes", {}).items():
        for i, extent in enumerate(shape):
            if _fixed(extent, plan.spec) is None:
                first.setdefault(str(extent), f"{tensor}.shape[{i}]")
    return first


def _shape_guards(table: NodeTable, plan: LaunchPlan, first: Mapping[str, str]) -> Iterator[Guard]:
    """One guard for each extent in `spec["shapes"]` that is fixed or occurs elsewhere."""
    ranks = {arg.name: arg.rank for arg in plan.args if arg.kind == "tensor"}
    for tensor, shape in plan.spec.get("shapes", {}).items():
        if ranks.get(tensor) != len(shape):
            raise LaunchPlanError(f'spec["shapes"] gives {tensor} {len(shape)} extents; the host function has {ranks}')
        for i, extent in enumerate(shape):
            leaf = f"{tensor}.shape[{i}]"
            fixed = _fixed(extent, plan.spec)
            if fixed is not None:
                role = f" is {extent} and" if isinstance(extent, str) else ""
                yield _equal(table, leaf, table.const(fixed, "i64"), f"{leaf}{role} must be {fixed}")
            elif first[extent] != leaf:
                message = f"{leaf} is {extent} and must be equal to {first[extent]}"
                yield _equal(table, leaf, table.leaf(first[extent], "i64"), message)


def _multiple_guards(table: NodeTable, plan: LaunchPlan, first: Mapping[str, str]) -> Iterator[Guard]:
    """Guards of `spec["multiples"]`."""
    for name, divisor, *quotient in plan.spec.get("multiples", []):
        if name not in first or divisor not in first:
            raise LaunchPlanError(f'spec["multiples"] names {name} and {divisor}; known extents: {sorted(first)}')
        whole, part = table.leaf(first[name], "i64"), table.leaf(first[divisor], "i64")
        subject = f"{first[name]} is {name} and must be"
        if quotient:
            expected = table.op("mul", "i64", part, table.const(quotient[0], "i64"))
            yield _equal(table, first[name], expected, f"{subject} {quotient[0]} times {first[divisor]}")
        else:
            rest = table.op("urem", "i64", whole, part)
            condition = table.op("eq", "i64", rest, table.const(0, "i64"))
            yield Guard(expr=condition, message=f"{subject} a multiple of {first[divisor]}", source="spec")


def _sum_guards(table: NodeTable, plan: LaunchPlan, first: Mapping[str, str]) -> Iterator[Guard]:
    """Guards of `spec["sums"]` and `spec["sums_or_zero"]`."""
    for key in ("sums", "sums_or_zero"):
        for name, other, number in plan.spec.get(key, []):
            if name not in first or other not in first:
                raise LaunchPlanError(f'spec["{key}"] names {name} and {other}; known extents: {sorted(first)}')
            leaf, or_zero = first[name], " or 0" if key == "sums_or_zero" else ""
            total = table.op("add", "i64", table.leaf(first[other], "i64"), table.const(number, "i64"))
            sign = "+" if number >= 0 else "-"
            message = f"{leaf} is {name} and must be {first[other]} {sign} {abs(number)}{or_zero}"
            guard = _equal(table, leaf, total, message)
            if or_zero:
                is_zero = _equal(table, leaf, table.const(0, "i64"), message)
                guard = replace(guard, expr=table.op("or", "i1", is_zero.expr, guard.expr))
            yield guard


def _unit_guards(table: NodeTable, plan: LaunchPlan) -> Iterator[Guard]:
    """Guards of `spec["unit_strides"]`."""
    known = {f"{arg.name}.stride[{i}]" for arg in plan.args if arg.kind == "tensor" for i in range(arg.rank or 0)}
    one = table.const(1, "i64")
    for leaf in plan.spec.get("unit_strides", []):
        if leaf not in known:
            raise LaunchPlanError(f'spec["unit_strides"] names {leaf}; the host function has {sorted(known)}')
        is_free = table.op("eq", "i64", table.leaf(leaf.replace(".stride[", ".shape["), "i64"), one)
        condition = table.op("or", "i1", is_free, table.op("eq", "i64", table.leaf(leaf, "i64"), one))
        yield Guard(expr=condition, message=f"{leaf} must be 1", source="spec")


def _equal(table: NodeTable, leaf: str, expected: int, message: str) -> Guard:
    return Guard(expr=table.op("eq", "i64", table.leaf(leaf, "i64"), expected), message=message, source="spec")


def _fixed(extent: object, spec: Mapping[str, Any]) -> int | None:
    """The number that an entry of `shapes` is, None for a run-time extent."""
    value = spec.get(extent) if isinstance(extent, str) else extent
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _map_guards(table: NodeTable, plan: LaunchPlan) -> Iterator[Guard]:
    """What cuTensorMapEncodeTiled demands of addresses, extents and strides."""
    for launch in plan.launches:
        for i, param in enumerate(launch.params):
            if not isinstance(param, BytesTemplate):
                yield from _guards_of_map(table, param, f"{launch.kernel} parameter {i}")


def _guards_of_map(table: NodeTable, param: TensorMapTemplate, place: str) -> Iterator[Guard]:
    one, zero = table.const(1, "i64"), table.const(0, "i64")
    address = _subject(table, param.addr, ".ptr", f"address of the tensor map at {place}")
    yield _guard(_divisible(table, param.addr), f"{address} must be a multiple of {MAP_ALIGN_BYTES} bytes")
    if table.nodes[param.addr][0] != "in":  # a computed base may wrap below 0, which the driver refuses
        yield _guard(
            table.op("sgt", "i64", param.addr, zero), f"{address} must be above 0; strides are too large for it"
        )
    for d, extent in enumerate(param.dims):
        subject = _subject(table, extent, ".shape[", f"extent {d} of the tensor map at {place}")
        yield _guard(table.op("sge", "i64", extent, one), f"{subject} must be at least 1")
    for d, stride in enumerate(param.strides, start=1):
        subject = _subject(table, stride, ".stride[", f"stride {d} of the tensor map at {place}")
        is_free = table.op("sle", "i64", param.dims[d], one)
        is_legal = table.op("and", "i1", _divisible(table, stride), table.op("sge", "i64", stride, zero))
        in_range = table.op("slt", "i64", stride, table.const(MAP_STRIDE_LIMIT, "i64"))
        condition = table.op("or", "i1", is_free, table.op("and", "i1", is_legal, in_range))
        elements = max(MAP_ALIGN_BYTES // MAP_ITEM_BYTES[param.dtype], 1)
        limit = MAP_STRIDE_LIMIT // MAP_ITEM_BYTES[param.dtype]
        yield _guard(condition, f"{subject} must be a multiple of {elements} elements, from 0 to {limit - elements}")


def _guard(condition: int, message: str) -> Guard:
    return Guard(expr=condition, message=message, source="tma")


def _divisible(table: NodeTable, node: int) -> int:
    rest = table.op("and", "i64", node, table.const(MAP_ALIGN_BYTES - 1, "i64"))
    return table.op("eq", "i64", rest, table.const(0, "i64"))


def _subject(table: NodeTable, node: int, part: str, otherwise: str) -> str:
    """The one leaf with `part` in its name that a node depends on, e.g. q.stride[1]; else a description."""
    found: set[str] = set()
    stack = [node]
    while stack:
        current = table.nodes[stack.pop()]
        if current[0] == "in":
            found.add(current[2])
        elif current[0] != "const":
            stack += current[2:]
    return found.pop() if len(found) == 1 and part in next(iter(found)) else otherwise
