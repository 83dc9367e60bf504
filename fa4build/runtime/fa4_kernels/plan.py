"""Launch plans: from JSON (docs/formats.md, section 2) to the bytes `_plan.h` decodes.

The tables here are in the order of the enums there. Only the form is checked here; indices, types and limits are
checked in C, which trusts nothing.
"""

import json
import re
import struct
from collections.abc import Mapping
from typing import Any

from .abi import PLAN_FORMAT, PLAN_VERSION
from .errors import PackError

_MAGIC = 0x50344146
_ENCODING = 1
_MAX_RANK = 8

TYPES = ("i1", "i8", "i16", "i32", "i64", "f32", "f64")
_TYPE_BITS = dict(zip(TYPES, (1, 8, 16, 32, 64, 32, 64), strict=True))
OPS = tuple(
    """in const
    add sub mul and or xor shl lshr ashr udiv sdiv urem srem smin smax umin umax
    fadd fsub fmul fdiv fmin fmax
    eq ne slt sle sgt sge ult ule ugt uge
    feq flt fle fgt fge
    select
    sext zext trunc fptrunc fpext sitofp uitofp fptosi bitcast
    clog2 ctlz""".split()
)
TENSOR_DTYPES = tuple("i8 u8 e4m3 e5m2 e8m0 bf16 f16 i16 u16 f32 i32 u32 f64 i64 u64".split())
MAP_DTYPES = tuple("u8 u16 u32 i32 u64 i64 f16 f32 f64 bf16 tf32".split())
DEVICE_LEAVES = ("dev.sm_count", "dev.smem_optin", "dev.l2_bytes")
_SWIZZLES = (0, 32, 64, 128)
_INTERLEAVES = (0, 16, 32)
_PROMOTIONS = (0, 64, 128, 256)
_FILLS = ("zero", "nan")

_TYPE = {name: i for i, name in enumerate(TYPES)}
_OP = {name: i for i, name in enumerate(OPS)}
# A variant spells half precision `fp16`, PTX and tensor maps `f16`: one type.
_TENSOR_DTYPE = {name: i for i, name in enumerate(TENSOR_DTYPES)} | {"fp16": TENSOR_DTYPES.index("f16")}
_KINDS = {"tensor": 0, "scalar": 1, "device": 2}


def parse_plan(text: str | bytes) -> dict[str, Any]:
    """The JSON object of a launch plan of a version this package reads.

    Raises: PackError when it is not JSON, of another format, or newer.
    """
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PackError(f"launch plan: not JSON ({error}). The pack is damaged; install it again.") from error
    if not isinstance(plan, dict) or plan.get("format") != PLAN_FORMAT:
        raise PackError(f"launch plan: not of format {PLAN_FORMAT}. The pack is damaged; install it again.")
    if plan.get("version") != PLAN_VERSION:
        raise PackError(
            f"launch plan: version {plan.get('version')!r}, this fa4-kernels reads version {PLAN_VERSION}. "
            "Install the fa4-kernels that belongs to the pack."
        )
    return plan


def encode_plan(plan: Mapping[str, Any], align_bytes: Mapping[str, int] | None = None) -> bytes:
    """The bytes for `_launcher.Plan`.

    Args:
        plan: as `parse_plan` returns it.
        align_bytes: tensor argument -> what divides its pointer and strides (bytes); 1 where not named.
    Raises: PackError naming the first part that is not as docs/formats.md says.
    """
    place = "plan"
    try:
        place = "args"
        strings = _Strings()
        args, leaves = _encode_args(plan["args"], align_bytes or {}, strings)
        place = "nodes"
        nodes = _encode_nodes(plan["nodes"], leaves)
        place = "guards"
        guards = b"".join(struct.pack("<2I", g["expr"], strings.add(g["message"])) for g in plan["guards"])
        place = "launches"
        launches, params, fields, maps = _encode_launches(plan["launches"], strings)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise PackError(
            f"launch plan: {place}: {type(error).__name__}: {error}. "
            "The pack was made by another version or is damaged; install matching versions."
        ) from error
    pool = bytes(strings.pool)
    counts = [len(plan[part]) for part in ("args", "nodes", "guards", "launches")]
    counts += [len(params) // 20, len(fields) // 8, len(maps) // 104, len(pool)]
    header = struct.pack("<10I", _MAGIC, _ENCODING, *counts)
    return b"".join((header, args, nodes, guards, launches, params, fields, maps, pool))


class _Strings:
    """Texts one after another, each ended by a 0 byte; a text is stored once."""

    def __init__(self) -> None:
        self.pool = bytearray()
        self._offsets: dict[str, int] = {}

    def add(self, text: str) -> int:
        """Offset of `text`."""
        if text not in self._offsets:
            if not text or "\0" in text:
                raise ValueError(f"text {text!r} is empty or holds a zero byte")
            self._offsets[text] = len(self.pool)
            self.pool += text.encode() + b"\0"
        return self._offsets[text]


def _encode_args(args: list[Any], align_bytes: Mapping[str, int], strings: _Strings) -> tuple[bytes, dict[str, int]]:
    """The argument records, and the number of each input leaf."""
    out = bytearray()
    leaves: dict[str, int] = {}
    for arg in args:
        name, kind, rank = arg["name"], _KINDS[arg["kind"]], 0
        names = [name]
        if kind == 0:
            rank = arg["rank"]
            if not 1 <= rank <= _MAX_RANK:
                raise ValueError(f"{name}: rank {rank}; allowed: 1 to {_MAX_RANK}")
            names = [f"{name}.ptr", *(f"{name}.{what}[{i}]" for what in ("shape", "stride") for i in range(rank))]
        dtype = _TENSOR_DTYPE[arg["dtype"]] if kind == 0 else _TYPE[arg["dtype"]]
        align = align_bytes.get(name, 1) if kind == 0 else 0
        device_leaf = DEVICE_LEAVES.index(name) if kind == 2 else 0
        out += struct.pack("<6I", kind, dtype, rank, align, device_leaf, strings.add(name))
        for leaf in names:
            leaves[leaf] = len(leaves)
    return bytes(out), leaves


def _encode_nodes(nodes: list[Any], leaves: Mapping[str, int]) -> bytes:
    out = bytearray()
    pack = struct.Struct("<BBH3I").pack
    for node in nodes:
        op, type_ = node[0], node[1]
        if op == "const":
            word = _constant_word(type_, node[2])
            operands = (word & 0xFFFFFFFF, word >> 32)
        else:
            operands = (leaves[node[2]],) if op == "in" else tuple(node[2:])
        out += pack(_OP[op], _TYPE[type_], 0, *operands, *(0,) * (3 - len(operands)))
    return bytes(out)


def _constant_word(type_: str, value: int | str) -> int:
    """A constant as the bits of its type, zero-extended."""
    bits = _TYPE_BITS[type_]
    if type_[0] == "f":
        if not isinstance(value, str) or not re.fullmatch(f"0x[0-9a-f]{{{bits // 4}}}", value):
            raise ValueError(f"{value!r} is no bit string of {type_}")
        return int(value, 16)
    if not isinstance(value, int) or not -(1 << (bits - 1)) <= value < 1 << bits:
        raise ValueError(f"{value!r} is no {type_}")
    return value & ((1 << bits) - 1)


def _encode_launches(launches: list[Any], strings: _Strings) -> tuple[bytes, bytes, bytes, bytes]:
    """The records of launches, parameters, fields and maps."""
    out, params, fields, maps = bytearray(), bytearray(), bytearray(), bytearray()
    for launch in launches:
        flags = int(launch["pdl"]) + 2 * int(launch["cooperative"])
        numbers = (strings.add(launch["kernel"]), *launch["grid"], *launch["block"], *launch["cluster"])
        numbers += (launch["smem"], flags, len(params) // 20, len(launch["params"]))
        out += struct.pack("<14I", *numbers)
        for param in launch["params"]:
            if param["kind"] == "bytes":
                params += struct.pack("<5I", 0, param["size"], param["align"], len(fields) // 8, len(param["fields"]))
                fields += b"".join(struct.pack("<2I", *field) for field in param["fields"])
            elif param["kind"] == "tmap":
                params += struct.pack("<5I", 1, 128, 64, len(maps) // 104, 0)
                maps += _encode_map(param)
            else:
                raise ValueError(f"parameter of kind {param['kind']!r}; known: bytes, tmap")
    return bytes(out), bytes(params), bytes(fields), bytes(maps)


def _encode_map(param: Mapping[str, Any]) -> bytes:
    rank = len(param["dims"])
    lists = [(param["dims"], rank, 5), (param["strides"], rank - 1, 4)]
    lists += [(param["box"], rank, 5), (param["elem_strides"], rank, 5)]
    numbers = [MAP_DTYPES.index(param["dtype"]), rank, param["addr"]]
    for values, expected, room in lists:
        if len(values) != expected:
            raise ValueError(f"a tensor map of rank {rank} with {len(values)} numbers where {expected} belong")
        numbers += [*values, *(0,) * (room - expected)]
    numbers += [_SWIZZLES.index(param["swizzle"]), _INTERLEAVES.index(param["interleave"])]
    numbers += [_PROMOTIONS.index(param["l2_promotion"]), _FILLS.index(param["oob_fill"])]
    return struct.pack("<26I", *numbers)
