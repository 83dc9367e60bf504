"""The one function that turns a compiled host module into a launch plan."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fa4build.errors import LaunchPlanError
from fa4build.plan.as_json import check_plan
from fa4build.plan.builder import NodeTable, without_unused
from fa4build.plan.extract.entry import (
    find_entry,
    guard_message,
    plan_args,
    signature_of,
    write_arguments,
)
from fa4build.plan.extract.launch import LaunchRecorder
from fa4build.plan.extract.machine import Check, ExternalCall, Machine, Value
from fa4build.plan.extract.mlir_text import parse_module
from fa4build.plan.extract.vectors import COMPARED_INPUTS, check_maps, make_vectors
from fa4build.plan.guards import add_guards
from fa4build.plan.values import Guard, LaunchPlan

_TARGET = re.compile(r"^\.target\s+(\w+)", re.MULTILINE)


def extract_plan(
    ir_module: Any, *, elf: bytes, ptx: str, spec: Mapping[str, Any], compared: int = COMPARED_INPUTS
) -> LaunchPlan:
    """The launch plan of a compiled host function, with guards and vectors.

    Args:
        ir_module: `compiled.ir_module`, or its generic form as text
            (`ir_module.operation.get_asm(print_generic_op_form=True)`).
        elf, ptx: the cubin and its PTX; they name the plan's origin. `validate_plan` compares the plan with them.
        spec: facts the kernel was compiled for (docs in `plan.guards`); kept in the plan and guarded.
        compared: random inputs on which the plan must equal an interpretation of the code.
    Raises: LaunchPlanError, with function and line of the generic form, for whatever is not understood.
    Cost: 20 to 150 ms for the host functions of attention kernels.
    """
    text = ir_module if isinstance(ir_module, str) else ir_module.operation.get_asm(print_generic_op_form=True)
    module = parse_module(text)
    parameters = signature_of(module)
    table = NodeTable()
    recorder = LaunchRecorder(module)
    machine = Machine(module, table, _externals(recorder))
    recorder.install(machine)
    _call_entry(machine, find_entry(module), write_arguments(machine, parameters), len(parameters))
    if not recorder.launches:
        raise LaunchPlanError("host function launches nothing")
    target = _TARGET.search(ptx)
    plan = LaunchPlan(
        origin={
            "kind": "extracted",
            "arch": target[1] if target else "",
            "ir_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "cubin_sha256": hashlib.sha256(elf).hexdigest(),
        },
        spec=dict(spec),
        args=tuple(plan_args(parameters)),
        nodes=tuple(table.nodes),
        guards=_guards(table, machine.checks, parameters),
        launches=tuple(recorder.launches),
    )
    check_maps(plan, recorder.maps)
    plan = check_plan(without_unused(add_guards(replace(plan, nodes=tuple(table.nodes)))))
    _check_leaks(machine, plan)
    return replace(plan, vectors=make_vectors(plan, module, parameters, compared))


def _call_entry(machine: Machine, entry: str, arguments: int, count: int) -> None:
    """`int entry(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result)` must return 0."""
    table, memory = machine.table, machine.memory
    operands = (
        table.const(0, "i64"),
        table.const(arguments, "i64"),
        table.const(count, "i32"),
        table.const(memory.allocate("result"), "i64"),
    )
    status = machine.call(entry, operands)
    if not isinstance(status, int) or table.constant(status) != 0:
        raise LaunchPlanError("host entry does not return 0 after its launches")


def _externals(recorder: LaunchRecorder) -> dict[str, ExternalCall]:
    """Calls that leave the module, as they behave when all goes well on the current device."""

    def success(machine: Machine, _arguments: tuple[Value, ...]) -> Value:
        return machine.table.const(0, "i32")

    def stream(machine: Machine, _arguments: tuple[Value, ...]) -> Value:
        return machine.table.const(machine.memory.address_of("the current stream"), "i64")

    def device(machine: Machine, arguments: tuple[Value, ...]) -> Value:
        zero = machine.table.const(0, "i32")
        machine.memory.store(machine.constant(arguments[0], "pointer"), "i32", zero)
        return zero

    return {
        "_cudaLaunchKernelEx": recorder.launch_kernel_ex,
        "_cudaGetDevice": device,
        "_cudaSetDevice": success,
        "TVMFFIEnvGetStream": stream,
        "cuda_dialect_init_library_once": success,
    }


def _guards(table: NodeTable, checks: Sequence[Check], parameters: Sequence[Any]) -> tuple[Guard, ...]:
    """The entry's checks, each once, without those that always hold."""
    found: dict[int, Guard] = {}
    for check in checks:
        message = guard_message(check.parts, parameters)
        if table.constant(check.expr) == 0:
            raise LaunchPlanError(f"host code always fails: {message}")
        if table.constant(check.expr) is None and check.expr not in found:
            found[check.expr] = Guard(expr=check.expr, message=message, source="entry")
    return tuple(found.values())


def _check_leaks(machine: Machine, plan: LaunchPlan) -> None:
    """No address of the machine's own memory may have reached a parameter."""
    for node in plan.nodes:
        if node[0] == "const" and isinstance(node[2], int) and machine.memory.owns(node[2]):
            index, _ = machine.memory.object_at(node[2])
            raise LaunchPlanError(f"the address of {machine.memory.objects[index].name} is passed to a kernel")
