"""Properties of the build machine's device that a trace bakes into host code, turned into inputs of the plan.

Kernels ask `HardwareInfo` for the number of multiprocessors while they are traced, and the answer becomes a constant of
the host code. A variant with such constants is compiled twice, on two invented devices; where the two plans differ, the
constants must be explained by the devices' difference (rule V7), and `dev.sm_count` or `dev.l2_bytes` takes their
place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fa4build.errors import LaunchPlanError
from fa4build.plan.as_json import check_plan
from fa4build.plan.builder import NodeTable, without_unused
from fa4build.plan.evaluation import canonical_digest, evaluate
from fa4build.plan.values import Arg, BytesTemplate, Guard, LaunchPlan, LaunchTemplate, Node, Vector

CLUSTER_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandInDevice:
    """An invented device, to be compared with another.

    Both numbers of both devices should be 15 modulo 16 and far apart: then it shows if a kernel rounds them down to
    whole clusters of 2, 4, 8 or 16 blocks, and no other pair of constants is taken for them.
    """

    sm_count: int
    l2_bytes: int

    def leaf_values(self) -> dict[str, int]:
        """The inputs of a plan that this device stands for."""
        return {"dev.sm_count": self.sm_count, "dev.l2_bytes": self.l2_bytes}


def pretend(hardware_info: type, device: StandInDevice) -> None:
    """Make the class `cutlass.utils.HardwareInfo` answer for `device`, for the rest of this process.

    Any question but the two known ones is a LaunchPlanError: its answer would be baked in without anybody noticing.
    """

    def unknown(name: str) -> Callable[..., Any]:
        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise LaunchPlanError(
                f"kernel code asks the build machine for {name}, which a plan cannot make an input of"
            )

        return refuse

    for name in dir(hardware_info):
        if not name.startswith("_"):
            setattr(hardware_info, name, unknown(name))
    answers: dict[str, Callable[..., Any]] = {
        "__init__": lambda _self, *_args, **_kwargs: None,
        "get_device_multiprocessor_count": lambda _self: device.sm_count,
        "get_l2_cache_size_in_bytes": lambda _self: device.l2_bytes,
    }
    for name, answer in answers.items():
        setattr(hardware_info, name, answer)


def with_device_inputs(
    first: LaunchPlan, second: LaunchPlan, first_device: StandInDevice, second_device: StandInDevice
) -> LaunchPlan:
    """One plan for all devices, from the plans of two compiles that differ in the device alone.

    Its vectors are those of both plans, each with its own device. Plans that are equal come back as `first`.

    Raises: LaunchPlanError when the plans differ in more than constants, when a constant that differs is no multiple of
        a number of the device, or when the cubins differ.
    """
    if first.origin.get("cubin_sha256") != second.origin.get("cubin_sha256"):
        raise LaunchPlanError("V7: two compiles that differ in the device give two cubins; one serves only its device")
    if len(first.nodes) != len(second.nodes) or _frame(first) != _frame(second):
        raise LaunchPlanError("V7: host code itself, not only constants of it, depends on the build machine's device")
    pairs = zip(first.nodes, second.nodes, strict=True)
    changed = {i: (a, b) for i, (a, b) in enumerate(pairs) if a != b}
    if not changed:
        return first
    table, new = NodeTable(), []
    for i, node in enumerate(first.nodes):
        if i in changed:
            new.append(_explained(table, *changed[i], first_device, second_device))
        elif node[0] in ("in", "const"):
            new.append(table.leaf(node[2], node[1]) if node[0] == "in" else _constant(table, node))
        else:
            new.append(table.op(node[0], node[1], *(new[operand] for operand in node[2:])))
    used = sorted({node[2] for node in table.nodes if node[0] == "in" and node[2].startswith("dev.")})
    plan = replace(
        first,
        args=(*first.args, *(Arg(name=name, kind="device", dtype="i64") for name in used)),
        nodes=tuple(table.nodes),
        guards=tuple(replace(guard, expr=new[guard.expr]) for guard in first.guards),
        launches=tuple(_moved(launch, new) for launch in first.launches),
        vectors=(),
    )
    plan = without_unused(plan)
    return check_plan(
        replace(plan, vectors=(*_vectors(first, first_device, used), *_vectors(second, second_device, used)))
    )


def with_shared_memory_of(first: LaunchPlan, second: LaunchPlan) -> LaunchPlan:
    """`second`, compiled without the bodies of its kernels, with the shared memory that those bodies would ask for.

    A launch without a size of its own takes what its kernel allocates, and an empty kernel allocates nothing. Sizes
    that hosts give stay as they are, to be compared.
    """
    if len(first.launches) != len(second.launches):
        return second
    pairs = zip(first.launches, second.launches, strict=True)
    launches = tuple(b if b.smem else replace(b, smem=a.smem) for a, b in pairs)
    plan = replace(second, launches=launches, vectors=())
    digests = (canonical_digest(evaluate(plan, vector.inputs)) for vector in second.vectors)
    vectors = (replace(v, sha256=digest) for v, digest in zip(second.vectors, digests, strict=True))
    return replace(plan, vectors=tuple(vectors))


def _frame(plan: LaunchPlan) -> tuple[tuple[Guard, ...], tuple[LaunchTemplate, ...], tuple[Arg, ...]]:
    """Everything of a plan that must be the same on every device."""
    return plan.guards, plan.launches, plan.args


def _constant(table: NodeTable, node: Node) -> int:
    """The same constant in another table."""
    if isinstance(node[2], int):
        return table.const(node[2], node[1])
    bits = table.const(int(node[2], 16), "i32" if node[1] == "f32" else "i64")
    return table.op("bitcast", node[1], bits)


def _explained(table: NodeTable, a: Node, b: Node, first: StandInDevice, second: StandInDevice) -> int:
    """A constant that differs, as a multiple of a number of the device, or of the whole clusters that fit."""
    if a[:2] == b[:2] and a[0] == "const" and isinstance(a[2], int) and isinstance(b[2], int):
        for name, of_first in first.leaf_values().items():
            for blocks in CLUSTER_SIZES:
                factor, rest = divmod(a[2], of_first // blocks)
                if not rest and factor * (second.leaf_values()[name] // blocks) == b[2]:
                    clusters = table.op("udiv", "i64", table.leaf(name, "i64"), table.const(blocks, "i64"))
                    scaled = table.op("mul", "i64", clusters, table.const(factor, "i64"))
                    return scaled if a[1] == "i64" else table.op("trunc", a[1], scaled)
    raise LaunchPlanError(
        f"V7: a constant of host code is {a[2]} on {first} and {b[2]} on {second}; "
        "it is no multiple of the number of multiprocessors or of the L2 size"
    )


def _moved(launch: LaunchTemplate, new: list[int]) -> LaunchTemplate:
    params = tuple(
        replace(p, fields=tuple((at, new[node]) for at, node in p.fields))
        if isinstance(p, BytesTemplate)
        else replace(p, addr=new[p.addr], dims=tuple(new[i] for i in p.dims), strides=tuple(new[i] for i in p.strides))
        for p in launch.params
    )
    x, y, z = (new[i] for i in launch.grid)
    return replace(launch, grid=(x, y, z), params=params)


def _vectors(plan: LaunchPlan, device: StandInDevice, used: list[str]) -> tuple[Vector, ...]:
    values = {name: device.leaf_values()[name] for name in used}
    half = max(len(plan.vectors) // 2, 1)
    return tuple(replace(vector, inputs={**vector.inputs, **values}) for vector in plan.vectors[:half])
