"""Arguments of a launch plan under other names, or taken from a tensor: a foreign host called as a signature says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fa4build.errors import LaunchPlanError
from fa4build.plan.as_json import check_plan
from fa4build.plan.evaluation import canonical_digest, evaluate
from fa4build.plan.values import BytesTemplate, LaunchPlan, LaunchTemplate, Node, TensorMapTemplate, Vector


def with_names(plan: LaunchPlan, names: Mapping[str, str]) -> LaunchPlan:
    """`plan` with its arguments renamed wherever they occur: leaves, guards, spec, vectors.

    Args:
        names: old -> new; arguments that are not named keep theirs.
    Raises: LaunchPlanError when an old name does not exist, or two arguments would share one.
    """
    if not names:
        return plan
    known = [arg.name for arg in plan.args]
    if unknown := sorted(set(names) - set(known)):
        raise LaunchPlanError(f"no argument is called {', '.join(unknown)}; the host function takes {', '.join(known)}")
    renamed = [names.get(name, name) for name in known]
    if len(set(renamed)) != len(renamed):
        raise LaunchPlanError(f"two arguments would have one name: {', '.join(renamed)}")
    word = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, names)) + r")(?!\w)")

    def text(value: str) -> str:
        return word.sub(lambda match: names[match[1]], value)

    def leaf(value: str) -> str:
        head, dot, rest = value.partition(".")
        return f"{names.get(head, head)}{dot}{rest}"

    return check_plan(
        replace(
            plan,
            spec=_renamed_spec(plan.spec, names, leaf),
            args=tuple(replace(arg, name=name) for arg, name in zip(plan.args, renamed, strict=True)),
            nodes=tuple((*node[:2], leaf(node[2])) if node[0] == "in" else node for node in plan.nodes),
            guards=tuple(replace(guard, message=text(guard.message)) for guard in plan.guards),
            vectors=tuple(
                replace(vector, inputs={leaf(name): value for name, value in vector.inputs.items()})
                for vector in plan.vectors
            ),
        )
    )


def _renamed_spec(spec: Mapping[str, Any], names: Mapping[str, str], leaf: Any) -> dict[str, Any]:
    """`spec` with the tensors of its reserved keys renamed (see `plan.guards`)."""
    new = dict(spec)
    if "shapes" in new:
        new["shapes"] = {names.get(name, name): shape for name, shape in new["shapes"].items()}
    if "unit_strides" in new:
        new["unit_strides"] = [leaf(stride) for stride in new["unit_strides"]]
    return new


_ONE_BYTE = ("u8", "i8", "e4m3", "e5m2", "e8m0")


def with_types(plan: LaunchPlan, types: Mapping[str, str]) -> LaunchPlan:
    """`plan` whose tensors have the element types of `types`: libraries pass 8-bit floats as bytes.

    Raises: LaunchPlanError when a name is no tensor of bytes, or a type has another size.
    """
    tensors = {arg.name: arg.dtype for arg in plan.args if arg.kind == "tensor"}
    for name, dtype in types.items():
        if tensors.get(name) not in _ONE_BYTE or dtype not in _ONE_BYTE:
            raise LaunchPlanError(
                f"{name} cannot be called a tensor of {dtype}: it is one of {tensors.get(name, 'nothing known')}; "
                f"allowed are {', '.join(_ONE_BYTE)} for each other"
            )
    args = tuple(replace(arg, dtype=types.get(arg.name, arg.dtype)) for arg in plan.args)
    return check_plan(replace(plan, args=args))


def with_bindings(plan: LaunchPlan, bindings: Mapping[str, str]) -> LaunchPlan:
    """`plan` without the scalar arguments of `bindings`: each is read from a leaf of a tensor instead.

    Args:
        bindings: scalar argument (i32 or i64) -> leaf, `q.shape[1]`.
    Raises: LaunchPlanError when there is no such scalar.
    Contract: vectors keep their inputs but for the bound scalar, with digests computed anew.
    """
    if not bindings:
        return plan
    scalars = {arg.name for arg in plan.args if arg.kind == "scalar"}
    if unknown := sorted(set(bindings) - scalars):
        raise LaunchPlanError(f"no scalar argument is called {', '.join(unknown)}; there are {sorted(scalars)}")
    nodes: list[Node] = []
    new: list[int] = []
    leaves: dict[str, int] = {}  # a leaf is read by one node

    def leaf(type_: str, name: str) -> int:
        if name not in leaves:
            nodes.append(("in", type_, name))
            leaves[name] = len(nodes) - 1
        return leaves[name]

    for node in plan.nodes:
        if node[0] == "in" and node[2] in bindings:
            extent = leaf("i64", bindings[node[2]])
            if node[1] != "i64":
                nodes.append(("trunc", node[1], extent))
                extent = len(nodes) - 1
            new.append(extent)
        elif node[0] == "in":
            new.append(leaf(node[1], node[2]))
        else:
            operands = node[2:] if node[0] == "const" else tuple(new[operand] for operand in node[2:])
            nodes.append((*node[:2], *operands))
            new.append(len(nodes) - 1)
    bound_plan = replace(
        plan,
        args=tuple(arg for arg in plan.args if arg.name not in bindings),
        nodes=tuple(nodes),
        guards=tuple(replace(guard, expr=new[guard.expr]) for guard in plan.guards),
        launches=tuple(_moved(launch, new) for launch in plan.launches),
        vectors=(),
    )
    return check_plan(replace(bound_plan, vectors=tuple(_replayed(bound_plan, v, bindings) for v in plan.vectors)))


def _moved(launch: LaunchTemplate, new: list[int]) -> LaunchTemplate:
    """A launch whose expressions have new numbers."""

    def moved(param: BytesTemplate | TensorMapTemplate) -> BytesTemplate | TensorMapTemplate:
        if isinstance(param, BytesTemplate):
            return replace(param, fields=tuple((at, new[node]) for at, node in param.fields))
        dims, strides = (tuple(new[node] for node in nodes) for nodes in (param.dims, param.strides))
        return replace(param, addr=new[param.addr], dims=dims, strides=strides)

    x, y, z = (new[node] for node in launch.grid)
    return replace(launch, grid=(x, y, z), params=tuple(map(moved, launch.params)))


def _replayed(plan: LaunchPlan, vector: Vector, bindings: Mapping[str, str]) -> Vector:
    inputs = {name: value for name, value in vector.inputs.items() if name not in bindings}
    return replace(vector, inputs=inputs, sha256=canonical_digest(evaluate(plan, inputs)))
