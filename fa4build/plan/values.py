"""What a launch plan is made of: plain frozen values and the tables of allowed words (docs/formats.md, section 2).

Not here: reading and writing JSON (`plan.as_json`), computing (`plan.evaluation`), making plans (`plan.builder`,
`extract`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT = "fa4build.launchplan"
VERSION = 1

INT_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64}
FLOAT_BITS = {"f32": 32, "f64": 64}
TYPE_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f32": 4, "f64": 8}

INT_BINARY = frozenset("add sub mul and or xor shl lshr ashr udiv sdiv urem srem smin smax umin umax".split())
FLOAT_BINARY = frozenset("fadd fsub fmul fdiv fmin fmax".split())
INT_COMPARE = frozenset("eq ne slt sle sgt sge ult ule ugt uge".split())
FLOAT_COMPARE = frozenset("feq flt fle fgt fge".split())
INT_WIDEN = frozenset({"sext", "zext"})
CONVERSIONS = frozenset("sext zext trunc fptrunc fpext sitofp uitofp fptosi bitcast".split())
OPERAND_COUNT = {
    **dict.fromkeys(("in", "const"), 0),
    **dict.fromkeys(INT_BINARY | FLOAT_BINARY | INT_COMPARE | FLOAT_COMPARE, 2),
    **dict.fromkeys(CONVERSIONS, 1),
    "select": 3,
    "clog2": 1,
    "ctlz": 1,
}

TENSOR_ITEM_BITS = {
    **dict.fromkeys(("e2m1", "i4", "u4"), 4),
    **dict.fromkeys(("i1", "i8", "u8", "e4m3", "e5m2", "e8m0"), 8),
    **dict.fromkeys(("bf16", "f16", "i16", "u16"), 16),
    **dict.fromkeys(("f32", "tf32", "i32", "u32"), 32),
    **dict.fromkeys(("f64", "i64", "u64"), 64),
}
SCALAR_DTYPES = frozenset(TYPE_BYTES)
DEVICE_LEAVES = frozenset({"dev.sm_count", "dev.smem_optin", "dev.l2_bytes"})

MAP_ITEM_BYTES = {"u8": 1, "u16": 2, "u32": 4, "i32": 4, "u64": 8, "i64": 8}
MAP_ITEM_BYTES |= {"f16": 2, "f32": 4, "f64": 8, "bf16": 2, "tf32": 4}
MAP_SWIZZLES = (0, 32, 64, 128)
MAP_INTERLEAVES = (0, 16, 32)
MAP_L2_PROMOTIONS = (0, 64, 128, 256)
MAP_OOB_FILLS = ("zero", "nan")
GUARD_SOURCES = ("entry", "spec", "tma")
ORIGIN_KINDS = ("extracted", "handwritten")

Node = tuple  # (op, type, *operand indices), ("in", type, leaf name) or ("const", type, int | hex bit string)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arg:
    """One argument of the host function. `kind` is tensor, scalar or device; `rank` belongs to tensors alone."""

    name: str
    kind: str
    dtype: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Node `expr` (i1) must be 1 before a launch; `message` says in the caller's words what must hold."""

    expr: int
    message: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesTemplate:
    """A parameter of `size` bytes; `fields` are (byte offset, node), sorted; bytes under no field are undefined."""

    size: int
    align: int
    fields: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMapTemplate:
    """A 128-byte tensor map. `addr`, `dims`, `strides` (bytes, of dims 1..) are nodes, the rest literals."""

    dtype: str
    addr: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    elem_strides: tuple[int, ...]
    swizzle: int
    interleave: int
    l2_promotion: int
    oob_fill: str


ParamTemplate = BytesTemplate | TensorMapTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTemplate:
    """One launch: grid as nodes; block, cluster, shared memory (dynamic, bytes) as numbers; params in kernel order."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int
    pdl: bool
    cooperative: bool
    params: tuple[ParamTemplate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """An example: a value for every input leaf, and the digest of the launches that it gives."""

    inputs: Mapping[str, int | float]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The host half of a kernel as data. Immutable; the mappings inside are not to be changed."""

    origin: Mapping[str, str]
    spec: Mapping[str, Any]
    args: tuple[Arg, ...]
    nodes: tuple[Node, ...]
    guards: tuple[Guard, ...]
    launches: tuple[LaunchTemplate, ...]
    vectors: tuple[Vector, ...] = field(default=())


def leaves(plan: LaunchPlan) -> dict[str, str]:
    """Input leaf name -> type, in node order: what `evaluate` wants to be told."""
    return {node[2]: node[1] for node in plan.nodes if node[0] == "in"}


def result_type(node: Node) -> str:
    """Type of a node's value: i1 for comparisons, else the type it carries."""
    return "i1" if node[0] in INT_COMPARE or node[0] in FLOAT_COMPARE else node[1]


# What evaluating a plan gives.


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesParam:
    """`data` with undefined bytes 0; `mask` has 0xFF for a defined byte and 0 for an undefined one."""

    data: bytes
    mask: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMapParam:
    """Arguments of cuTensorMapEncodeTiled; strides in bytes, of dims 1.., as the plan gives them (no repair)."""

    dtype: str
    addr: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    elem_strides: tuple[int, ...]
    swizzle: int
    interleave: int
    l2_promotion: int
    oob_fill: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch with numbers in it. Skip it when `is_empty`."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int
    pdl: bool
    cooperative: bool
    params: tuple[BytesParam | TensorMapParam, ...]

    @property
    def is_empty(self) -> bool:
        """True when a grid dimension is 0: there is nothing to launch."""
        return 0 in self.grid
