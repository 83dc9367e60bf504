"""Runs a host entry on numbers: a plain interpreter of the same code that the extractor executes symbolically.

It shares the parser and the type layout with the extractor and nothing else: values are Python numbers, memory is bytes
with a mask of what was written, branches and loops are taken. Its launches are what the plan's must equal.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fa4build.errors import LaunchPlanError
from fa4build.plan.extract.entry import Parameter, find_entry
from fa4build.plan.extract.launch import kernel_symbols
from fa4build.plan.extract.llvm_types import LlvmType, member_at, parse_type
from fa4build.plan.extract.mlir_text import Function, Module, Op, split_types, unescape

_STEP = 1 << 24
_BASE = 1 << 60
_FORMATS = {"f32": "<f", "f64": "<d"}
_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64}
MAX_OPERATIONS = 1_000_000


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes of any value, and a mask (1 for a byte that is defined)."""

    data: bytes
    mask: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcreteLaunch:
    """What reached the CUDA runtime."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    attributes: Mapping[int, bytes]
    params: tuple[Raw, ...]


class HostRefusedError(Exception):
    """The entry reported an error instead of launching."""


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _divide(a: int, b: int) -> int:
    return 0 if b == 0 else int(math.copysign(1, a) * math.copysign(1, b)) * (abs(a) // abs(b))


_UNSIGNED: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b if b < 64 else 0,
    "lshr": lambda a, b: a >> b,
    "udiv": lambda a, b: a // b if b else 0,
    "urem": lambda a, b: a % b if b else 0,
    "intr.umin": min,
    "intr.umax": max,
}
_SIGNED: dict[str, Callable[[int, int], int]] = {
    "sdiv": _divide,
    "srem": lambda a, b: a - b * _divide(a, b) if b else 0,
    "intr.smin": min,
    "intr.smax": max,
}
_FLOAT: dict[str, Callable[[float, float], float]] = {
    "fadd": lambda a, b: a + b,
    "fsub": lambda a, b: a - b,
    "fmul": lambda a, b: a * b,
    "fdiv": lambda a, b: a / b,
    "intr.minnum": min,
    "intr.maxnum": max,
}
_COMPARE: tuple[Callable[[int, int, int], bool], ...] = (  # by predicate; operands unsigned, and their width
    lambda a, b, _: a == b,
    lambda a, b, _: a != b,
    lambda a, b, n: _signed(a, n) < _signed(b, n),
    lambda a, b, n: _signed(a, n) <= _signed(b, n),
    lambda a, b, n: _signed(a, n) > _signed(b, n),
    lambda a, b, n: _signed(a, n) >= _signed(b, n),
    lambda a, b, _: a < b,
    lambda a, b, _: a <= b,
    lambda a, b, _: a > b,
    lambda a, b, _: a >= b,
)
_FCOMPARE: dict[int, Callable[[float, float], bool]] = {
    1: lambda a, b: a == b,
    2: lambda a, b: a > b,
    3: lambda a, b: a >= b,
    4: lambda a, b: a < b,
    5: lambda a, b: a <= b,
}


class Interpreter:
    """One run of a module's entry. Values are `Raw`; their type is what the operation says."""

    def __init__(self, module: Module) -> None:
        self.launches: list[ConcreteLaunch] = []
        self._module = module
        self._data: list[bytearray] = []
        self._mask: list[bytearray] = []
        self._symbols: dict[str, int] = {}
        self._kernels = {self._address(symbol): name for symbol, name in kernel_symbols(module).items()}
        for address in self._kernels:
            self.write(address, struct.pack("<q", address))
        self._operations = 0

    def allocate(self, size: int) -> int:
        """Address of new, undefined bytes."""
        self._data.append(bytearray(size))
        self._mask.append(bytearray(size))
        return _BASE + (len(self._data) - 1) * _STEP

    def _address(self, symbol: str) -> int:
        if symbol not in self._symbols:
            self._symbols[symbol] = self.allocate(64)
        return self._symbols[symbol]

    def write(self, address: int, data: bytes, mask: bytes | None = None) -> None:
        """Store bytes, defined unless a mask says otherwise."""
        index, offset = divmod(address - _BASE, _STEP)
        self._data[index][offset : offset + len(data)] = data
        self._mask[index][offset : offset + len(data)] = b"\1" * len(data) if mask is None else mask

    def read(self, address: int, size: int) -> Raw:
        """Bytes as they are."""
        index, offset = divmod(address - _BASE, _STEP)
        if not 0 <= index < len(self._data) or offset + size > len(self._data[index]):
            raise LaunchPlanError(f"host code reads {size} bytes at {address:#x}, outside its memory")
        return Raw(bytes(self._data[index][offset : offset + size]), bytes(self._mask[index][offset : offset + size]))

    def _number(self, address: int, size: int) -> int:
        return int.from_bytes(self.read(address, size).data, "little")

    def run(self, name: str, arguments: Sequence[Raw]) -> Raw | None:
        """Execute a function and give its result."""
        function = self._module.functions[name]
        values: dict[str, Raw] = {}
        label, incoming = function.entry, tuple(arguments)
        while True:
            block = function.blocks[label]
            values.update(zip((n for n, _ in block.arguments), incoming, strict=True))
            for op in block.ops[:-1]:
                self._operations += 1
                if self._operations > MAX_OPERATIONS:
                    raise LaunchPlanError(f"host function {name} does not end")
                result = self._execute(op, [values[x] for x in op.operands])
                if op.result is not None and result is not None:
                    values[op.result] = result
            last = block.ops[-1]
            if last.name == "return":
                return values[last.operands[0]] if last.operands else None
            label, incoming = self._next(function, last, values)

    def _next(self, function: Function, op: Op, values: Mapping[str, Raw]) -> tuple[str, tuple[Raw, ...]]:
        if op.name == "unreachable":
            raise HostRefusedError(function.name)
        if op.name == "br":
            return op.successors[0], tuple(values[x] for x in op.operands)
        count = op.integers("operandSegmentSizes")[1]
        arguments = op.operands[1:]
        if values[op.operands[0]].data[0] & 1:
            return op.successors[0], tuple(values[x] for x in arguments[:count])
        return op.successors[1], tuple(values[x] for x in arguments[count:])

    def _execute(self, op: Op, operands: list[Raw]) -> Raw | None:
        name = op.name
        if name in _UNSIGNED or name in _SIGNED:
            return self._integer(op, operands)
        if name in _FLOAT:
            type_ = _leaf(op.result_type)
            return _float(_FLOAT[name](*(_as_float(x, type_) for x in operands)), type_)
        if name == "mlir.constant":
            return _constant(op)
        if name in ("mlir.poison", "mlir.undef", "mlir.zero"):
            size = parse_type(op.result_type).size
            return Raw(bytes(size), (b"\1" if name == "mlir.zero" else b"\0") * size)
        if name in ("ptrtoint", "inttoptr", "addrspacecast", "freeze", "bitcast"):
            return operands[0]
        if name in ("icmp", "fcmp"):
            return self._compare(op, operands)
        if name == "select":
            return operands[1] if operands[0].data[0] & 1 else operands[2]
        if name in ("sext", "zext", "trunc", "fptrunc", "fpext", "sitofp", "uitofp", "fptosi"):
            return _convert(op, operands[0])
        if name in ("extractvalue", "insertvalue"):
            return _member(op, operands)
        return self._memory_or_call(op, operands)

    def _integer(self, op: Op, operands: list[Raw]) -> Raw:
        type_ = _leaf(op.result_type)
        bits = _BITS[type_]
        a, b = (_as_int(x, bits) for x in operands)
        if op.name in _UNSIGNED:
            return _int(_UNSIGNED[op.name](a, b), type_)
        return _int(_SIGNED[op.name](_signed(a, bits), _signed(b, bits)), type_)

    def _compare(self, op: Op, operands: list[Raw]) -> Raw:
        type_ = _leaf(split_types(op.types)[0])
        predicate = op.integer("predicate") or 0
        if op.name == "fcmp":
            a, b = (_as_float(x, type_) for x in operands)
            return _int(int(_FCOMPARE[predicate](a, b)), "i1")
        bits = _BITS[type_]
        return _int(int(_COMPARE[predicate](_as_int(operands[0], bits), _as_int(operands[1], bits), bits)), "i1")

    def _memory_or_call(self, op: Op, operands: list[Raw]) -> Raw | None:
        if op.name == "mlir.addressof":
            return _int(self._address(str(op.reference("global_name"))), "i64")
        if op.name == "alloca":
            size = parse_type(op.attribute("elem_type") or "").size * _as_int(operands[0], 32)
            return _int(self.allocate(size), "i64")
        if op.name == "getelementptr":
            return _int(_pointer(op, operands), "i64")
        if op.name == "load":
            return self.read(_as_int(operands[0], 64), parse_type(op.result_type).size)
        if op.name == "store":
            self.write(_as_int(operands[1], 64), operands[0].data, operands[0].mask)
            return None
        if op.name == "fneg":
            type_ = _leaf(op.result_type)
            return _float(-_as_float(operands[0], type_), type_)
        if op.name == "intr.ctlz":
            type_ = _leaf(op.result_type)
            return _int(_BITS[type_] - _as_int(operands[0], _BITS[type_]).bit_length(), type_)
        if op.name == "call":
            return self._call(str(op.reference("callee")), operands)
        raise LaunchPlanError(f"line {op.line} of the generic form: llvm.{op.name} cannot be interpreted")

    def _call(self, callee: str, operands: list[Raw]) -> Raw | None:
        if callee == "_cudaLaunchKernelEx":
            self._launch(*(_as_int(x, 64) for x in operands))
        elif callee == "_cudaGetDevice":
            self.write(_as_int(operands[0], 64), struct.pack("<i", 0))
        elif callee in self._module.functions:
            return self.run(callee, operands)
        elif callee not in ("TVMFFIEnvGetStream", "cuda_dialect_init_library_once", "_cudaSetDevice"):
            raise HostRefusedError(callee)
        return _int(self._address("stream"), "i64") if callee == "TVMFFIEnvGetStream" else _int(0, "i32")

    def _launch(self, configuration: int, kernel: int, pointers: int) -> None:
        sizes = [_signed(self._number(configuration + 4 * i, 4), 32) for i in range(6)]
        attributes = self._number(configuration + 40, 8)
        params = []
        count = len(self._data[(pointers - _BASE) // _STEP]) // 8
        for i in range(count):
            address = self._number(pointers + 8 * i, 8)
            size = len(self._data[(address - _BASE) // _STEP])
            params += [self.read(address, size)] if size else []
        self.launches.append(
            ConcreteLaunch(
                kernel=self._kernels[kernel],
                grid=(sizes[0], sizes[1], sizes[2]),
                block=(sizes[3], sizes[4], sizes[5]),
                smem=self._number(configuration + 24, 8),
                attributes={
                    self._number(attributes + 72 * i, 4): self.read(attributes + 72 * i + 8, 64).data
                    for i in range(self._number(configuration + 48, 4))
                },
                params=tuple(params),
            )
        )


def _leaf(text: str) -> str:
    return parse_type(text).leaves[0][1]


def _as_int(value: Raw, bits: int) -> int:
    return int.from_bytes(value.data, "little") & ((1 << bits) - 1)


def _int(value: int, type_: str) -> Raw:
    size = max(_BITS[type_] // 8, 1)
    return Raw((value & ((1 << _BITS[type_]) - 1)).to_bytes(size, "little"), b"\1" * size)


def _as_float(value: Raw, type_: str) -> float:
    return struct.unpack(_FORMATS[type_], value.data)[0]


def _float(value: float, type_: str) -> Raw:
    try:
        data = struct.pack(_FORMATS[type_], value)
    except OverflowError:
        data = struct.pack(_FORMATS[type_], math.copysign(math.inf, value))
    return Raw(data, b"\1" * len(data))


def _constant(op: Op) -> Raw:
    text, type_ = op.attribute("value") or "", parse_type(op.result_type)
    if text.startswith('"'):
        data = unescape(text[1 : text.rindex('"')])
        return Raw(data, b"\1" * len(data))
    if text.startswith("dense<"):
        numbers = text.removeprefix("dense<").split(">")[0].strip("[]").split(", ")
        numbers = numbers * len(type_.leaves) if len(numbers) == 1 else numbers
        data = b"".join(_literal(n, leaf).data for n, (_, leaf) in zip(numbers, type_.leaves, strict=True))
        return Raw(data, b"\1" * len(data))
    return _literal(text.split(" : ")[0], type_.leaves[0][1])


def _literal(text: str, type_: str) -> Raw:
    if type_ in _FORMATS and not text.startswith("0x"):
        return _float(float(text), type_)
    number = {"true": 1, "false": 0}[text] if text in ("true", "false") else int(text, 0)
    return _int(number, {"f32": "i32", "f64": "i64"}.get(type_, type_))


def _convert(op: Op, operand: Raw) -> Raw:
    source, target = _leaf(op.types), _leaf(op.result_type)
    if source in _FORMATS:
        value = _as_float(operand, source)
        return _int(int(value), target) if op.name == "fptosi" else _float(value, target)
    number = _as_int(operand, _BITS[source])
    if op.name in ("sext", "sitofp"):
        number = _signed(number, _BITS[source])
    return _float(float(number), target) if target in _FORMATS else _int(number, target)


def _member(op: Op, operands: list[Raw]) -> Raw:
    aggregate = parse_type(op.types if op.name == "extractvalue" else op.result_type)
    offset, member, _ = member_at(aggregate, op.integers("position"))
    end = offset + member.size
    whole = operands[0]
    if op.name == "extractvalue":
        return Raw(whole.data[offset:end], whole.mask[offset:end])
    part = operands[1]
    return Raw(whole.data[:offset] + part.data + whole.data[end:], whole.mask[:offset] + part.mask + whole.mask[end:])


def _pointer(op: Op, operands: list[Raw]) -> int:
    address, dynamic = _as_int(operands[0], 64), operands[1:]
    type_: LlvmType = parse_type(op.attribute("elem_type") or "")
    for depth, index in enumerate(op.integers("rawConstantIndices")):
        if index == -(1 << 31):
            raw = dynamic.pop(0)
            number = _signed(int.from_bytes(raw.data, "little"), 8 * len(raw.data))
            type_ = type_.children[0][1] if depth else type_
            address += number * type_.size
        elif depth:
            at, type_, _ = type_.children[index]
            address += at
        else:
            address += index * type_.size
    return address & ((1 << 64) - 1)


# The caller's side: arguments as a caller would lay them out.


def run_entry(
    module: Module, parameters: Sequence[Parameter], inputs: Mapping[str, int | float]
) -> tuple[ConcreteLaunch, ...]:
    """Launches of the entry for these inputs.

    Raises: HostRefusedError when the entry reports an error, LaunchPlanError for what cannot be interpreted.
    """
    machine = Interpreter(module)
    arguments = _any_array(machine, parameters, inputs)
    operands = [_int(0, "i64"), _int(arguments, "i64"), _int(len(parameters), "i32"), _int(machine.allocate(16), "i64")]
    status = machine.run(find_entry(module), operands)
    if status is None or any(status.data):
        raise HostRefusedError("the entry returned an error")
    return tuple(machine.launches)


def _any_array(machine: Interpreter, parameters: Sequence[Parameter], inputs: Mapping[str, int | float]) -> int:
    address = machine.allocate(16 * len(parameters))
    for i, parameter in enumerate(parameters):
        tag, payload = _any(machine, parameter, inputs)
        machine.write(address + 16 * i, struct.pack("<ii", tag, 0) + payload)
    return address


def _any(machine: Interpreter, p: Parameter, inputs: Mapping[str, int | float]) -> tuple[int, bytes]:
    """(type index, payload) of one TVMFFIAny."""
    if p.kind == "tensor":
        return 7, struct.pack("<q", _tensor(machine, p, inputs))
    if p.kind == "tuple":
        return 71, struct.pack("<q", _array(machine, _any_array(machine, p.elements, inputs), len(p.elements)))
    if p.kind == "shape":
        items = [Parameter(name=f"{p.name}[{i}]", kind="scalar", dtype="int64") for i in range(p.rank)]
        return 71, struct.pack("<q", _array(machine, _any_array(machine, items, inputs), p.rank))
    if p.dtype == "DataPointer":
        return 4, struct.pack("<q", inputs[p.name])
    if p.kind == "handle":
        return 4, struct.pack("<q", 0)
    if p.kind == "constant":
        kind, _, text = p.dtype.rstrip(")").partition("(")
        tag = {"None": 0, "Int": 1, "Bool": 2, "Float": 3}[kind]
        if kind == "Float":
            return tag, struct.pack("<d", float(text))
        return tag, struct.pack("<q", {"": 0, "True": 1, "False": 0}[text] if kind in ("None", "Bool") else int(text))
    value = inputs.get(p.name, 0)
    if p.dtype.startswith("float"):
        return 3, struct.pack("<d", value)
    if p.dtype.startswith("u"):
        value = int(value) & ((1 << int(p.dtype[4:])) - 1)
        return 1, value.to_bytes(8, "little")
    return (2 if p.dtype == "bool" else 1), struct.pack("<q", int(value))


def _array(machine: Interpreter, items: int, count: int) -> int:
    address = machine.allocate(40)
    machine.write(address + 24, struct.pack("<qq", items, count))
    return address


_DLPACK = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}
_DLPACK_FLOAT8 = {"float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8), "float8_e8m0fnu": (14, 8), "float4_e2m1fn": (17, 4)}


def _tensor(machine: Interpreter, p: Parameter, inputs: Mapping[str, int | float]) -> int:
    code, bits = _DLPACK_FLOAT8.get(p.dtype, (0, 0))
    if not bits:
        word = p.dtype.rstrip("0123456789")
        code, bits = _DLPACK[word], int(p.dtype[len(word) :] or 8)
    arrays = []
    for part in ("shape", "stride"):
        array = machine.allocate(8 * p.rank)
        machine.write(array, b"".join(struct.pack("<q", inputs.get(f"{p.name}.{part}[{i}]", 1)) for i in range(p.rank)))
        arrays.append(array)
    address = machine.allocate(48)
    head = struct.pack("<qiiiBBH", inputs.get(f"{p.name}.ptr", 0), 2, 0, p.rank, code, bits, 1)
    machine.write(address, head + struct.pack("<qqq", *arrays, 0))
    return address
