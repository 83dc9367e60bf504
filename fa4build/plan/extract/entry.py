"""The tvm-ffi entry of a host module: its signature, its argument block in memory, and its error texts as messages.

The entry is compiled in by `--enable-tvm-ffi`. It unpacks a caller's arguments, checks them, and calls the host
function; its error texts hold the signature, which is where argument names come from:

    `__call__(x: Tensor([n0, 128], bfloat16), scale: float32, extra: Tuple[int32, Tensor([n1], float32)])`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fa4build.errors import LaunchPlanError
from fa4build.plan.extract.machine import Machine
from fa4build.plan.extract.mlir_text import Module, split_types
from fa4build.plan.values import Arg

ENTRY_PREFIX = "__tvm_ffi_"
_SIGNATURE = re.compile(r" when calling: `\w*\((?P<parameters>.*)\)`", re.DOTALL)

# TVMFFIAny type indices and DLPack codes (apache-tvm-ffi c_api.h, dlpack.h)
_TAG_NONE, _TAG_INT, _TAG_BOOL, _TAG_FLOAT, _TAG_HANDLE, _TAG_TENSOR, _TAG_ARRAY = 0, 1, 2, 3, 4, 7, 71
_CUDA_DEVICE = 2
_OBJECT_HEADER_BYTES = 24
_ANY_BYTES = 16

_TENSOR_DTYPES = {  # tvm-ffi name -> (plan dtype, DLPack code, bits)
    "bfloat16": ("bf16", 4, 16),
    "bool": ("i1", 6, 8),
    "float4_e2m1fn": ("e2m1", 17, 4),
    "float8_e4m3fn": ("e4m3", 10, 8),
    "float8_e5m2": ("e5m2", 12, 8),
    "float8_e8m0fnu": ("e8m0", 14, 8),
    **{f"float{bits}": (f"f{bits}", 2, bits) for bits in (16, 32, 64)},
    **{f"int{bits}": (f"i{bits}", 0, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (f"u{bits}", 1, bits) for bits in (8, 16, 32, 64)},
}
_SCALAR_DTYPES = {
    **{f"{sign}int{bits}": f"i{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{"bool": "i1", "float32": "f32", "float64": "f64"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of the signature. `kind`: tensor, scalar, handle, constant, shape, tuple.

    `dtype` is tvm-ffi's name (of a constant: its text); `rank` of tensors and shapes; `elements` of tuples.
    """

    name: str
    kind: str
    dtype: str = ""
    rank: int = 0
    elements: tuple[Parameter, ...] = ()


def find_entry(module: Module) -> str:
    """Name of the entry function.

    Raises: LaunchPlanError when the module has none, or several.
    """
    names = [n for n in module.functions if n.startswith(ENTRY_PREFIX) and not n.startswith(ENTRY_PREFIX + "_")]
    if len(names) != 1:
        raise LaunchPlanError(
            f"host module has {len(names)} tvm-ffi entries, one is needed; compile with --enable-tvm-ffi and a "
            "stream made by make_fake_stream(use_tvm_ffi_env_stream=True)"
        )
    return names[0]


def signature_of(module: Module) -> tuple[Parameter, ...]:
    """The entry's parameters, from the text of its errors.

    Raises: LaunchPlanError when no text holds a signature, or a type in it is not known.
    """
    for text in module.strings.values():
        match = _SIGNATURE.fullmatch(text)
        if match:
            return tuple(_parameter(*item.split(": ", 1)) for item in split_types(match["parameters"]))
    raise LaunchPlanError(
        "host module holds no signature among its error texts; was it compiled with --enable-tvm-ffi?"
    )


def _parameter(name: str, text: str) -> Parameter:
    if text.startswith("Tensor("):
        shape, dtype = split_types(text[len("Tensor(") : -1])
        _known(dtype, _TENSOR_DTYPES, name)
        return Parameter(name=name, kind="tensor", dtype=dtype, rank=len(split_types(shape[1:-1])))
    if text.startswith("Tuple["):
        items = split_types(text[len("Tuple[") : -1])
        elements = tuple(_parameter(f"{name}[{i}]", item) for i, item in enumerate(items))
        return Parameter(name=name, kind="tuple", elements=elements)
    if text.startswith("Shape("):
        return Parameter(name=name, kind="shape", rank=len(split_types(text[len("Shape([") : -2])))
    if text in ("Stream", "handle", "DataPointer"):
        return Parameter(name=name, kind="handle", dtype=text)
    if text == "None" or text.startswith(("Int(", "Bool(", "Float(")):
        return Parameter(name=name, kind="constant", dtype=text)
    _known(text, _SCALAR_DTYPES, name)
    return Parameter(name=name, kind="scalar", dtype=text)


def _known(dtype: str, table: dict, name: str) -> None:
    if dtype not in table:
        raise LaunchPlanError(f"argument {name} has dtype {dtype!r}; known: {', '.join(sorted(table))}")


def plan_args(parameters: Sequence[Parameter]) -> Iterator[Arg]:
    """The plan's arguments: tuples flattened to `name[0]`, streams and constants left out."""
    for p in parameters:
        if p.kind == "tensor":
            yield Arg(name=p.name, kind="tensor", dtype=_TENSOR_DTYPES[p.dtype][0], rank=p.rank)
        elif p.kind == "scalar":
            yield Arg(name=p.name, kind="scalar", dtype=_SCALAR_DTYPES[p.dtype])
        elif p.kind == "shape":
            yield from (Arg(name=f"{p.name}[{i}]", kind="scalar", dtype="i64") for i in range(p.rank))
        elif p.kind == "tuple":
            yield from plan_args(p.elements)
        elif p.dtype == "DataPointer":
            yield Arg(name=p.name, kind="scalar", dtype="i64")


def write_arguments(machine: Machine, parameters: Sequence[Parameter]) -> int:
    """Address of an array of TVMFFIAny that holds the inputs as a caller would pass them.

    Every tensor is on one CUDA device and has the right dtype and number of dimensions; its pointer, extents and
    strides are input leaves. What the entry checks about the rest is then true, what it checks about the leaves becomes
    guards.
    """
    address = machine.memory.allocate("arguments", count=len(parameters))
    for i, parameter in enumerate(parameters):
        _write_any(machine, parameter, address + _ANY_BYTES * i)
    return address


def _write_any(machine: Machine, p: Parameter, address: int) -> None:
    table, store = machine.table, machine.memory.store
    tag, payload = _TAG_NONE, table.const(0, "i64")
    if p.kind == "tensor":
        tag, payload = _TAG_TENSOR, table.const(_write_tensor(machine, p), "i64")
    elif p.kind == "scalar":
        tag, payload = _scalar(machine, p)
    elif p.kind == "tuple":
        items = write_arguments(machine, p.elements)
        tag, payload = _TAG_ARRAY, table.const(_write_array(machine, p.name, items, len(p.elements)), "i64")
    elif p.kind == "shape":
        integers = [Parameter(name=f"{p.name}[{i}]", kind="scalar", dtype="int64") for i in range(p.rank)]
        items = write_arguments(machine, integers)
        tag, payload = _TAG_ARRAY, table.const(_write_array(machine, p.name, items, p.rank), "i64")
    elif p.dtype == "DataPointer":
        tag, payload = _TAG_HANDLE, table.leaf(p.name, "i64")
    elif p.kind == "handle":
        tag, payload = _TAG_HANDLE, table.const(machine.memory.address_of("the caller's stream"), "i64")
    elif p.dtype != "None":
        tag, payload = _constant(machine, p)
    store(address, "i32", table.const(tag, "i32"))
    store(address + 4, "i32", table.const(0, "i32"))
    store(address + 8, table.type_of(payload), payload)


def _scalar(machine: Machine, p: Parameter) -> tuple[int, int]:
    """(tag, payload): tvm-ffi passes integers as int64 and floats as float64."""
    table, type_ = machine.table, _SCALAR_DTYPES[p.dtype]
    leaf = table.leaf(p.name, type_)
    if type_ in ("f32", "f64"):
        return _TAG_FLOAT, leaf if type_ == "f64" else table.op("fpext", "f64", leaf)
    if type_ == "i1":
        return _TAG_BOOL, table.op("zext", "i64", leaf)
    if type_ == "i64":
        return _TAG_INT, leaf
    return _TAG_INT, table.op("zext" if p.dtype.startswith("u") else "sext", "i64", leaf)


def _constant(machine: Machine, p: Parameter) -> tuple[int, int]:
    """A value fixed when compiling, e.g. `Int(3)`: the caller must pass the same."""
    kind, text = p.dtype[:-1].split("(", 1)
    if kind == "Float":
        return _TAG_FLOAT, machine.table.const(float(text), "f64")
    value = int(text == "True") if kind == "Bool" else int(text)
    return (_TAG_BOOL if kind == "Bool" else _TAG_INT), machine.table.const(value, "i64")


def _write_array(machine: Machine, name: str, items: int, count: int) -> int:
    """A TVMFFIArray object: header, then pointer and number of its items."""
    address = machine.memory.allocate(name)
    machine.memory.store(address + _OBJECT_HEADER_BYTES, "i64", machine.table.const(items, "i64"))
    machine.memory.store(address + _OBJECT_HEADER_BYTES + 8, "i64", machine.table.const(count, "i64"))
    return address


def _write_tensor(machine: Machine, p: Parameter) -> int:
    """A DLTensor with its extents and strides."""
    table, store = machine.table, machine.memory.store
    _, code, bits = _TENSOR_DTYPES[p.dtype]
    extents, strides = machine.memory.allocate(f"{p.name}.shape"), machine.memory.allocate(f"{p.name}.stride")
    for i in range(p.rank):
        store(extents + 8 * i, "i64", table.leaf(f"{p.name}.shape[{i}]", "i64"))
        store(strides + 8 * i, "i64", table.leaf(f"{p.name}.stride[{i}]", "i64"))
    address = machine.memory.allocate(p.name)
    store(address, "i64", table.leaf(f"{p.name}.ptr", "i64"))
    for offset, type_, value in (
        (8, "i32", _CUDA_DEVICE),
        (12, "i32", 0),  # device id: that all tensors are on the current device is the caller's to check
        (16, "i32", p.rank),
        (20, "i8", code),
        (21, "i8", bits),
        (22, "i16", 1),
        (24, "i64", extents),
        (32, "i64", strides),
        (40, "i64", 0),  # byte offset: part of the pointer
    ):
        store(address + offset, type_, table.const(value, type_))
    return address


def guard_message(parts: Sequence[str], parameters: Sequence[Parameter]) -> str:
    """An error's texts as one sentence about what must hold, e.g. `q.stride[1] must be divisible by 8`.

    tvm-ffi writes a kind (ValueError), what is wrong with which part of which argument, and what was expected.
    """
    texts = [part for part in parts[1:] if not part.startswith(" when calling")]
    text = "".join(texts).replace(".strides[", ".stride[").strip()
    head, _, expectation = text.partition(", expected ")
    field = re.search(r"([A-Za-z_]\w*(?:\[\d+\])*\.(?:shape|stride)\[\d+\])", head)
    argument = re.search(r"on argument #(\d+)", head)
    if field:
        subject = field[1]
    elif argument:
        name = parameters[int(argument[1])].name
        subject = f"{name}.ptr" if "data alignment" in expectation else name
    else:
        return text
    return f"{subject} must be {_expected(expectation)}" if expectation else f"{subject}: {head}"


def _expected(text: str) -> str:
    """`to be divisible by 8` -> `divisible by 8`, `data alignment=16 bytes` -> `aligned to 16 bytes`, ..."""
    text = re.sub(r"^to be ", "", text)
    text = re.sub(r"^data alignment=(\d+) bytes$", r"aligned to \1 bytes", text)
    text = re.sub(r"^(?:to )?match(?:es)? ", "equal to ", text)
    return text.replace("strides[", "stride[")
