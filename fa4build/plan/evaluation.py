"""Evaluate a launch plan in plain Python: the reference the C evaluator and the simulator are compared with.

Integers are held signed, in the range of their type (i1: 0 or 1). Integers wrap; division by zero gives 0; a shift by
the width or more gives 0 (`ashr`: the sign); `fptosi` of what the type cannot hold gives 0; `fmin` and `fmax` prefer a
number to NaN. f32 values are rounded after each operation, which equals
single-precision arithmetic for + - * / (a double has more than 2 * 24 + 2 significant bits).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Mapping

from fa4build.errors import LaunchPlanError
from fa4build.plan.values import (
    FLOAT_BITS,
    INT_BITS,
    TYPE_BYTES,
    BytesParam,
    BytesTemplate,
    Launch,
    LaunchPlan,
    LaunchTemplate,
    Node,
    TensorMapParam,
    TensorMapTemplate,
    result_type,
)

Value = int | float

_FLOAT_FORMAT = {"f32": "<f", "f64": "<d"}


def wrap(value: int, type_: str) -> int:
    """`value` modulo 2**bits as the signed number of that type; i1 gives 0 or 1."""
    bits = INT_BITS[type_]
    value &= (1 << bits) - 1
    return value - (1 << bits) if bits > 1 and value >> (bits - 1) else value


def unsigned(value: int, type_: str) -> int:
    """The two's-complement bits of `value` as a number from 0 to 2**bits - 1."""
    return value & ((1 << INT_BITS[type_]) - 1)


def to_bytes(value: Value, type_: str) -> bytes:
    """Little-endian bytes of a value, i1 as one byte."""
    if type_ in _FLOAT_FORMAT:
        return struct.pack(_FLOAT_FORMAT[type_], value)
    return unsigned(int(value), type_).to_bytes(TYPE_BYTES[type_], "little")


def from_bytes(data: bytes, type_: str) -> Value:
    """The value whose `to_bytes` is `data`."""
    if type_ in _FLOAT_FORMAT:
        return struct.unpack(_FLOAT_FORMAT[type_], data)[0]
    return wrap(int.from_bytes(data, "little"), type_)


def round_float(value: float, type_: str) -> float:
    """`value` rounded to the nearest number of the type, ties to even; too large gives infinity."""
    if type_ == "f64":
        return value
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def float_bits(value: float, type_: str) -> str:
    """The hexadecimal bit string a `const` node holds, e.g. 1.0 (f32) -> 0x3f800000."""
    return f"0x{int.from_bytes(to_bytes(value, type_), 'little'):0{FLOAT_BITS[type_] // 4}x}"


def const_value(node: Node) -> Value:
    """The number of a `const` node."""
    if node[1] in FLOAT_BITS:
        return from_bytes(int(node[2], 16).to_bytes(TYPE_BYTES[node[1]], "little"), node[1])
    return node[2]


def _signed_quotient(a: int, b: int) -> int:
    """a / b rounded towards zero, 0 for b = 0."""
    if b == 0:
        return 0
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _float_quotient(a: float, b: float) -> float:
    """IEEE division, which Python refuses for a zero divisor."""
    if b != 0:
        return a / b
    if a == 0 or math.isnan(a):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1.0, b)


def _float_to_int(value: float, type_: str) -> int:
    """`value` towards zero, 0 if the type cannot hold it."""
    if not math.isfinite(value):
        return 0
    whole = math.trunc(value)
    half = 1 << (INT_BITS[type_] - 1)
    return whole if -half <= whole < half else 0


def _minimum(a: float, b: float) -> float:
    """The smaller; a number beats NaN."""
    return a if math.isnan(b) or a < b else b


def _maximum(a: float, b: float) -> float:
    """The larger; a number beats NaN."""
    return a if math.isnan(b) or a > b else b


# (type, a, b) -> value before wrapping; a and b are signed.
_INT_BINARY: dict[str, Callable[[str, int, int], int]] = {
    "add": lambda _t, a, b: a + b,
    "sub": lambda _t, a, b: a - b,
    "mul": lambda _t, a, b: a * b,
    "and": lambda _t, a, b: a & b,
    "or": lambda _t, a, b: a | b,
    "xor": lambda _t, a, b: a ^ b,
    "shl": lambda t, a, b: a << unsigned(b, t) if unsigned(b, t) < INT_BITS[t] else 0,
    "lshr": lambda t, a, b: unsigned(a, t) >> unsigned(b, t),
    "ashr": lambda t, a, b: (-a if t == "i1" else a) >> unsigned(b, t),
    "udiv": lambda t, a, b: unsigned(a, t) // unsigned(b, t) if b else 0,
    "sdiv": lambda _t, a, b: _signed_quotient(a, b),
    "urem": lambda t, a, b: unsigned(a, t) % unsigned(b, t) if b else 0,
    "srem": lambda _t, a, b: a - b * _signed_quotient(a, b) if b else 0,
    "smin": lambda t, a, b: min(a, b) if t != "i1" else a | b,
    "smax": lambda t, a, b: max(a, b) if t != "i1" else a & b,
    "umin": lambda t, a, b: min(unsigned(a, t), unsigned(b, t)),
    "umax": lambda t, a, b: max(unsigned(a, t), unsigned(b, t)),
}
_FLOAT_BINARY: dict[str, Callable[[float, float], float]] = {
    "fadd": lambda a, b: a + b,
    "fsub": lambda a, b: a - b,
    "fmul": lambda a, b: a * b,
    "fdiv": _float_quotient,
    "fmin": _minimum,
    "fmax": _maximum,
}
_COMPARE: dict[str, Callable[[Value, Value], bool]] = {
    **dict.fromkeys(("eq", "feq"), lambda a, b: a == b),
    "ne": lambda a, b: a != b,
    **dict.fromkeys(("slt", "ult", "flt"), lambda a, b: a < b),
    **dict.fromkeys(("sle", "ule", "fle"), lambda a, b: a <= b),
    **dict.fromkeys(("sgt", "ugt", "fgt"), lambda a, b: a > b),
    **dict.fromkeys(("sge", "uge", "fge"), lambda a, b: a >= b),
}


def _convert(op: str, source: str, target: str, value: Value) -> Value:
    """One conversion; `source` and `target` are types."""
    if op in ("sitofp", "uitofp"):
        number = unsigned(int(value), source) if op == "uitofp" else -int(value) if source == "i1" else int(value)
        return _int_to_float(number, target)
    if op in ("fptrunc", "fpext"):
        return round_float(float(value), target)
    if op == "fptosi":
        return wrap(_float_to_int(float(value), target), target)
    if op == "bitcast":
        return from_bytes(to_bytes(value, source), target)
    if op == "sext" and source == "i1":
        return wrap(-int(value), target)
    return wrap(unsigned(int(value), source) if op == "zext" else int(value), target)


def _int_to_float(number: int, target: str) -> float:
    """Nearest float of the type with one rounding: integers above 2**53 must not be rounded to a double first."""
    if target == "f64" or abs(number) < 1 << 53:
        return round_float(float(number), target)
    shift = abs(number).bit_length() - 26
    sticky = int(abs(number) & ((1 << shift) - 1) != 0)
    magnitude = math.ldexp(float((abs(number) >> shift << 1) | sticky), shift - 1)
    return round_float(math.copysign(magnitude, number), target)


def compute(op: str, type_: str, source: str, operands: tuple[Value, ...]) -> Value:
    """Value of one node that is neither `in` nor `const`. `source` is the type of the first operand."""
    if op in _INT_BINARY:
        a, b = operands
        return wrap(_INT_BINARY[op](type_, int(a), int(b)), type_)
    if op in _FLOAT_BINARY:
        return round_float(_FLOAT_BINARY[op](*operands), type_)
    if op in _COMPARE:
        a, b = operands
        if op[0] == "u":
            a, b = unsigned(int(a), type_), unsigned(int(b), type_)
        elif type_ == "i1" and op[0] == "s":
            a, b = -a, -b
        return int(_COMPARE[op](a, b))
    if op == "select":
        return operands[1] if operands[0] else operands[2]
    if op == "clog2":
        return max(unsigned(int(operands[0]), source) - 1, 0).bit_length()
    if op == "ctlz":
        return wrap(INT_BITS[type_] - unsigned(int(operands[0]), type_).bit_length(), type_)
    return _convert(op, source, type_, operands[0])


def _input_value(name: str, type_: str, inputs: Mapping[str, Value]) -> Value:
    """The caller's value for a leaf, checked against its type."""
    if name not in inputs:
        raise LaunchPlanError(f"input {name} ({type_}) is missing; the plan needs a value for each of its input leaves")
    value = inputs[name]
    if type_ in FLOAT_BITS:
        return round_float(float(value), type_)
    bits = INT_BITS[type_]
    if isinstance(value, float) or not -(1 << (bits - 1)) <= value < 1 << bits:
        raise LaunchPlanError(f"input {name} = {value!r} is no {type_}; pass an integer of at most {bits} bits")
    return wrap(int(value), type_)


def evaluate_nodes(plan: LaunchPlan, inputs: Mapping[str, Value]) -> list[Value]:
    """Value of every node, in order."""
    values: list[Value] = []
    types: list[str] = []
    for node in plan.nodes:
        op, type_ = node[0], node[1]
        if op == "in":
            value = _input_value(node[2], type_, inputs)
        elif op == "const":
            value = const_value(node)
        else:
            operands = node[2:]
            value = compute(op, type_, types[operands[0]], tuple(values[i] for i in operands))
        values.append(value)
        types.append(result_type(node))
    return values


def _bytes_param(template: BytesTemplate, values: list[Value], types: list[str]) -> BytesParam:
    data, mask = bytearray(template.size), bytearray(template.size)
    for offset, node in template.fields:
        field_bytes = to_bytes(values[node], types[node])
        data[offset : offset + len(field_bytes)] = field_bytes
        mask[offset : offset + len(field_bytes)] = b"\xff" * len(field_bytes)
    return BytesParam(data=bytes(data), mask=bytes(mask))


def _map_param(template: TensorMapTemplate, values: list[Value]) -> TensorMapParam:
    return TensorMapParam(
        dtype=template.dtype,
        addr=int(values[template.addr]),
        dims=tuple(int(values[i]) for i in template.dims),
        strides=tuple(int(values[i]) for i in template.strides),
        box=template.box,
        elem_strides=template.elem_strides,
        swizzle=template.swizzle,
        interleave=template.interleave,
        l2_promotion=template.l2_promotion,
        oob_fill=template.oob_fill,
    )


def _launch(template: LaunchTemplate, values: list[Value], types: list[str]) -> Launch:
    x, y, z = (int(values[i]) for i in template.grid)
    return Launch(
        kernel=template.kernel,
        grid=(x, y, z),
        block=template.block,
        cluster=template.cluster,
        smem=template.smem,
        pdl=template.pdl,
        cooperative=template.cooperative,
        params=tuple(
            _bytes_param(p, values, types) if isinstance(p, BytesTemplate) else _map_param(p, values)
            for p in template.params
        ),
    )


def evaluate(plan: LaunchPlan, inputs: Mapping[str, Value]) -> tuple[Launch, ...]:
    """The launches of `plan` for these inputs, in order, empty ones included. Guards are not looked at.

    Args:
        inputs: a value for each input leaf (`leaves(plan)`): pointers, extents, strides (elements) as int, f32 float.
    Raises: LaunchPlanError when a leaf is missing or does not fit its type.
    """
    values = evaluate_nodes(plan, inputs)
    types = [result_type(node) for node in plan.nodes]
    return tuple(_launch(template, values, types) for template in plan.launches)


def failed_guard(plan: LaunchPlan, inputs: Mapping[str, Value]) -> str | None:
    """Message of the first guard that these inputs break, or None when the launch is allowed."""
    values = evaluate_nodes(plan, inputs)
    return next((guard.message for guard in plan.guards if not values[guard.expr]), None)


def _canonical_param(param: BytesParam | TensorMapParam) -> bytes:
    if isinstance(param, BytesParam):
        return param.data
    words = (param.addr, len(param.dims), *param.dims, *param.strides, *param.box, *param.elem_strides)
    words += (param.swizzle, param.interleave, param.l2_promotion, int(param.oob_fill == "nan"))
    return struct.pack(f"<{len(words)}q", *words)


def canonical_digest(launches: tuple[Launch, ...]) -> str:
    """sha256 of the canonical bytes of all launches (docs/formats.md, section 2): equal iff every defined byte is."""
    digest = hashlib.sha256()
    for launch in launches:
        digest.update(struct.pack("<10q", *launch.grid, *launch.block, *launch.cluster, launch.smem))
        for param in launch.params:
            digest.update(_canonical_param(param))
    return digest.hexdigest()
