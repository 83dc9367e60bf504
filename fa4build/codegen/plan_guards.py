"""Guards for what host code does not check: facts of the specialization, and what a tensor map can describe.

Two reserved keys of a plan's `spec` say what the kernel was compiled for; the rest of `spec` are named facts:

    {"head_dim": 128,
     "shapes": {"q": ["batch", "seqlen_q", "num_heads_q", "head_dim"], "k": ["batch", "seqlen_k", "num_heads_kv", 128]},
     "multiples": [["num_heads_q", "num_heads_kv"]]}

In `shapes` a number is an extent; a name of an integer fact is that extent; any other name is a run-time extent, the
same wherever it occurs. In `multiples` the first name's extent is a multiple of the second's. A stride of an extent of
1 is free, because no kernel ever uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fa4build.codegen.plan_builder import NodeTable
from fa4build.codegen.plan_values import MAP_ITEM_BYTES, BytesTemplate, Guard, LaunchPlan, TensorMapTemplate
from fa4build.errors import LaunchPlanError

MAP_ALIGN_BYTES = 16
MAP_STRIDE_LIMIT = 1 << 40  # bytes; cuTensorMapEncodeTiled


def add_guards(plan: LaunchPlan) -> LaunchPlan:
    """`plan` with the guards of its `spec` and of its tensor maps behind its own; a condition occurs once.

    Raises: LaunchPlanError when `spec` names a tensor, dimension or extent that the plan does not have.
    """
    table = NodeTable(plan.nodes)
    guards = {guard.expr: guard for guard in plan.guards}
    guards |= {guard.expr: guard for guard in _shape_guards(table, plan)}  # of two messages, the one that says why
    for guard in _map_guards(table, plan):
        guards.setdefault(guard.expr, guard)
    for guard in guards.values():
        if table.constant(guard.expr) == 0:
            raise LaunchPlanError(f"a guard can never hold: {guard.message}")
    guards = {expr: guard for expr, guard in guards.items() if table.constant(expr) is None}
    return replace(plan, nodes=tuple(table.nodes), guards=tuple(guards.values()))


def _shape_guards(table: NodeTable, plan: LaunchPlan) -> Iterator[Guard]:
    """One guard for each extent in `spec["shapes"]`, and those of `spec["multiples"]`."""
    ranks = {arg.name: arg.rank for arg in plan.args if arg.kind == "tensor"}
    first: dict[str, str] = {}
    for tensor, shape in plan.spec.get("shapes", {}).items():
        if ranks.get(tensor) != len(shape):
            raise LaunchPlanError(f'spec["shapes"] gives {tensor} {len(shape)} extents; the host function has {ranks}')
        for i, extent in enumerate(shape):
            leaf = f"{tensor}.shape[{i}]"
            fixed = _fixed(extent, plan.spec)
            if fixed is not None:
                role = f" is {extent} and" if isinstance(extent, str) else ""
                condition = table.op("eq", "i64", table.leaf(leaf, "i64"), table.const(fixed, "i64"))
                yield Guard(expr=condition, message=f"{leaf}{role} must be {fixed}", source="spec")
            elif first.setdefault(str(extent), leaf) != leaf:
                other = first[str(extent)]
                condition = table.op("eq", "i64", table.leaf(leaf, "i64"), table.leaf(other, "i64"))
                yield Guard(expr=condition, message=f"{leaf} is {extent} and must be equal to {other}", source="spec")
    for name, divisor in plan.spec.get("multiples", []):
        if name not in first or divisor not in first:
            raise LaunchPlanError(f'spec["multiples"] names {name} and {divisor}; known extents: {sorted(first)}')
        remainder = table.op("urem", "i64", table.leaf(first[name], "i64"), table.leaf(first[divisor], "i64"))
        message = f"{first[name]} is {name} and must be a multiple of {first[divisor]}"
        yield Guard(expr=table.op("eq", "i64", remainder, table.const(0, "i64")), message=message, source="spec")


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
