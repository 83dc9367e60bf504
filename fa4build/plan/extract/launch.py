"""Launches: what host code hands to the CUDA runtime, read out of the symbolic machine's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fa4build.errors import LaunchPlanError
from fa4build.plan.extract.llvm_types import parse_type
from fa4build.plan.extract.machine import Machine, Value
from fa4build.plan.extract.mlir_text import Module, Op, unescape
from fa4build.plan.extract.tensor_map import WORDS, recover_map
from fa4build.plan.values import BytesTemplate, LaunchTemplate, ParamTemplate, TensorMapTemplate

# The DSL's launch configuration: grid 3 x i32, block 3 x i32, i64 shared bytes, stream, attributes, i32 their number
_GRID_AT, _BLOCK_AT, _SMEM_AT, _ATTRIBUTES_AT, _COUNT_AT = 0, 12, 24, 40, 48
_ATTRIBUTE_BYTES, _ATTRIBUTE_VALUE_AT = 72, 8
_COOPERATIVE, _CLUSTER, _PDL = 2, 4, 6  # cudaLaunchAttributeID
_MAP_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MapWords:
    """A recovered map and the nodes of the words it came from, to be compared by value."""

    template: TensorMapTemplate
    words: tuple[int, ...]


class LaunchRecorder:
    """Stands in for the CUDA runtime: `launches` in order, and the maps they pass."""

    def __init__(self, module: Module) -> None:
        self.launches: list[LaunchTemplate] = []
        self.maps: list[MapWords] = []
        self._symbols = kernel_symbols(module)

    def install(self, machine: Machine) -> None:
        """Give every kernel's global a handle that `launch_kernel_ex` recognises."""
        for symbol in self._symbols:
            handle = machine.table.const(machine.memory.address_of(_handle(symbol)), "i64")
            machine.memory.store(machine.memory.address_of(symbol), "i64", handle)

    def launch_kernel_ex(self, machine: Machine, arguments: tuple[Value, ...]) -> Value:
        """`_cudaLaunchKernelEx(configuration, kernel, pointers to parameters)`; it succeeds."""
        configuration, kernel, pointers = (machine.constant(x, "launch argument") for x in arguments)
        attributes = _attributes(machine, configuration)
        block = _numbers(machine, configuration + _BLOCK_AT, "block size")
        smem = _node(machine, configuration + _SMEM_AT, "i64", "shared memory")
        self.launches.append(
            LaunchTemplate(
                kernel=self._kernel(machine, kernel),
                grid=_grid(machine, configuration + _GRID_AT),
                block=block,
                cluster=attributes.get(_CLUSTER, (1, 1, 1)),
                smem=machine.constant(smem, "shared memory size"),
                pdl=bool(attributes.get(_PDL, (0, 0, 0))[0]),
                cooperative=bool(attributes.get(_COOPERATIVE, (0, 0, 0))[0]),
                params=self._params(machine, pointers),
            )
        )
        return machine.table.const(0, "i32")

    def _kernel(self, machine: Machine, handle: int) -> str:
        index, _ = machine.memory.object_at(handle)
        name = machine.memory.objects[index].name
        for symbol, kernel in self._symbols.items():
            if _handle(symbol) == name:
                return kernel
        raise LaunchPlanError(f"a launch of {name}, which is no kernel of the module")

    def _params(self, machine: Machine, pointers: int) -> tuple[ParamTemplate, ...]:
        index, _ = machine.memory.object_at(pointers)
        params = []
        for i in range(machine.memory.objects[index].count):
            pointer = _node(machine, pointers + 8 * i, "i64", f"pointer to parameter {i}")
            param = self._param(machine, machine.constant(pointer, "pointer to a parameter"))
            params += [param] if param is not None else []
        return tuple(params)

    def _param(self, machine: Machine, address: int) -> ParamTemplate | None:
        """The parameter stored at `address`, None if it has no bytes."""
        index, offset = machine.memory.object_at(address)
        stored = machine.memory.objects[index]
        type_ = parse_type(stored.type_text)
        if offset or stored.count != 1:
            raise LaunchPlanError(f"a kernel parameter lies inside {stored.name}, not in a slot of its own")
        if type_.size == 0:
            return None
        cells = machine.memory.cells(address)
        if type_.size == _MAP_BYTES and stored.align >= 64:
            words = tuple(cells[8 * i][1] for i in range(WORDS) if 8 * i in cells)
            if len(words) < WORDS:
                raise LaunchPlanError(f"a tensor map in {stored.name} has only {len(words)} of {WORDS} words")
            self.maps.append(MapWords(template=recover_map(machine.table, words), words=words))
            return self.maps[-1].template
        missing = [at for at, _ in type_.leaves if at not in cells]
        if missing:
            raise LaunchPlanError(f"V5: byte {missing[0]} of the kernel parameter in {stored.name} is never written")
        fields = tuple((at, node) for at, (_, node) in sorted(cells.items()))
        return BytesTemplate(size=type_.size, align=stored.align, fields=fields)


def kernel_symbols(module: Module) -> dict[str, str]:
    """Name of the global that holds a kernel's handle -> name of the kernel's entry in the cubin.

    Read from the function that loads the module: it asks for a kernel by name and stores the handle.
    """
    found: dict[str, str] = {}
    for function in module.functions.values():
        ops = [op for block in function.blocks.values() for op in block.ops]
        by_result = {op.result: op for op in ops if op.result}
        for op in ops:
            if op.name == "call" and op.reference("callee") == "_cudaLibraryGetKernel":
                symbol = by_result[op.operands[0]].reference("global_name")
                found[str(symbol)] = _stored_text(ops, by_result, op.operands[2])
    return found


def _stored_text(ops: Sequence[Op], by_result: dict[str, Op], slot: str) -> str:
    for op in ops:
        if op.name == "store" and op.operands[1] == slot:
            text = by_result[op.operands[0]].attribute("value") or ""
            return unescape(text.split('"')[1]).rstrip(b"\0").decode()
    raise LaunchPlanError("host module loads a kernel whose name is not written down")


def _handle(symbol: str) -> str:
    return f"handle of {symbol}"


def _node(machine: Machine, address: int, type_: str, what: str) -> int:
    node = machine.memory.load(address, type_)
    if node is None:
        raise LaunchPlanError(f"a launch's {what} is undefined")
    return node


def _numbers(machine: Machine, address: int, what: str) -> tuple[int, int, int]:
    """Three i32 that must be known."""
    x, y, z = (machine.constant(_node(machine, address + 4 * i, "i32", what), what) for i in range(3))
    return x, y, z


def _grid(machine: Machine, address: int) -> tuple[int, int, int]:
    """Grid nodes; on a path that is not always taken, x is 0 where it is not, which skips the launch."""
    table = machine.table
    x, y, z = (_node(machine, address + 4 * i, "i32", "grid size") for i in range(3))
    return table.op("select", "i32", machine.path, x, table.const(0, "i32")), y, z


def _attributes(machine: Machine, configuration: int) -> dict[int, tuple[int, int, int]]:
    """Launch attributes by id; single numbers as (value, 0, 0).

    Raises: LaunchPlanError for an attribute that a plan cannot express.
    """
    count = machine.constant(_node(machine, configuration + _COUNT_AT, "i32", "attribute count"), "attribute count")
    if count == 0:
        return {}
    table = machine.constant(_node(machine, configuration + _ATTRIBUTES_AT, "i64", "attributes"), "attribute table")
    found: dict[int, tuple[int, int, int]] = {}
    for i in range(count):
        address = table + _ATTRIBUTE_BYTES * i
        id_ = machine.constant(_node(machine, address, "i32", "attribute"), "launch attribute")
        value = address + _ATTRIBUTE_VALUE_AT
        if id_ == _CLUSTER:
            found[id_] = _numbers(machine, value, "cluster size")
        elif id_ in (_COOPERATIVE, _PDL):
            number = machine.constant(_node(machine, value, "i32", "attribute value"), "launch attribute's value")
            found[id_] = (number, 0, 0)
        else:
            raise LaunchPlanError(
                f"a launch has attribute {id_}; a plan knows {_CLUSTER} (cluster), {_PDL} (programmatic "
                f"serialization) and {_COOPERATIVE} (cooperative)"
            )
    return found
