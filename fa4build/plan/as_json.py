"""Launch plans in and out of canonical JSON. Reading checks everything; what it cannot vouch for it refuses.

Contract: `plan_from_json(plan_to_json(plan)) == plan`, and equal plans give equal bytes. Every error is a
LaunchPlanError that names the place, e.g. `launches[0].params[2].fields[1]`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from fa4build.errors import LaunchPlanError
from fa4build.plan.evaluation import const_value
from fa4build.plan.values import (
    CONVERSIONS,
    DEVICE_LEAVES,
    FLOAT_BINARY,
    FLOAT_BITS,
    FLOAT_COMPARE,
    FORMAT,
    GUARD_SOURCES,
    INT_BINARY,
    INT_BITS,
    INT_COMPARE,
    MAP_INTERLEAVES,
    MAP_ITEM_BYTES,
    MAP_L2_PROMOTIONS,
    MAP_OOB_FILLS,
    MAP_SWIZZLES,
    OPERAND_COUNT,
    ORIGIN_KINDS,
    SCALAR_DTYPES,
    TENSOR_ITEM_BITS,
    TYPE_BYTES,
    VERSION,
    Arg,
    BytesTemplate,
    Guard,
    LaunchPlan,
    LaunchTemplate,
    Node,
    ParamTemplate,
    TensorMapTemplate,
    Vector,
    result_type,
)

T = TypeVar("T")

MAX_NODES = 1 << 16
MAX_BYTES_PARAM = 32764  # the largest parameter space of a kernel (CUDA 12.1 and later)
_PLAN_KEYS = frozenset("format version origin spec args nodes guards launches vectors".split())
_LAUNCH_KEYS = frozenset("kernel grid block cluster smem pdl cooperative params".split())
_MAP_KEYS = frozenset("kind dtype addr dims strides box elem_strides swizzle interleave l2_promotion oob_fill".split())


def plan_to_json(plan: LaunchPlan) -> str:
    """Canonical text: one line, sorted keys, no spaces, a newline at the end."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "origin": dict(plan.origin),
        "spec": dict(plan.spec),
        "args": [_arg_json(arg) for arg in plan.args],
        "nodes": [list(node) for node in plan.nodes],
        "guards": [{"expr": g.expr, "message": g.message, "source": g.source} for g in plan.guards],
        "launches": [_launch_json(launch) for launch in plan.launches],
        "vectors": [{"in": dict(v.inputs), "sha256": v.sha256} for v in plan.vectors],
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"


def _arg_json(arg: Arg) -> dict[str, Any]:
    document: dict[str, Any] = {"name": arg.name, "kind": arg.kind, "dtype": arg.dtype}
    return document | ({"rank": arg.rank} if arg.kind == "tensor" else {})


def _launch_json(launch: LaunchTemplate) -> dict[str, Any]:
    return {
        "kernel": launch.kernel,
        "grid": list(launch.grid),
        "block": list(launch.block),
        "cluster": list(launch.cluster),
        "smem": launch.smem,
        "pdl": launch.pdl,
        "cooperative": launch.cooperative,
        "params": [_param_json(param) for param in launch.params],
    }


def _param_json(param: ParamTemplate) -> dict[str, Any]:
    if isinstance(param, BytesTemplate):
        fields = [list(f) for f in param.fields]
        return {"kind": "bytes", "size": param.size, "align": param.align, "fields": fields}
    return {
        "kind": "tmap",
        "dtype": param.dtype,
        "addr": param.addr,
        "dims": list(param.dims),
        "strides": list(param.strides),
        "box": list(param.box),
        "elem_strides": list(param.elem_strides),
        "swizzle": param.swizzle,
        "interleave": param.interleave,
        "l2_promotion": param.l2_promotion,
        "oob_fill": param.oob_fill,
    }


def plan_from_json(text: str) -> LaunchPlan:
    """The plan that `text` holds.

    Raises: LaunchPlanError for text that is no JSON, another format, a newer version, an unknown op, kind, key or type,
        an index out of order, overlapping fields, or anything else outside docs/formats.md section 2.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise LaunchPlanError(f"launch plan is not JSON ({error}); rebuild the variant that it belongs to") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise LaunchPlanError(f'launch plan has format {found!r}, not "{FORMAT}"')
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise LaunchPlanError(
            f"launch plan has version {version!r}; this fa4build reads version {VERSION}. "
            "Use the fa4build that wrote it, or rebuild"
        )
    _keys(document, _PLAN_KEYS, "plan")
    return check_plan(_parse(document))


def check_plan(plan: LaunchPlan) -> LaunchPlan:
    """`plan` itself if it obeys every rule that needs neither PTX nor cubin; raises LaunchPlanError if not."""
    types = _check_nodes(plan)
    for i, guard in enumerate(plan.guards):
        place = f"guards[{i}]"
        _index(guard.expr, types, place, "i1")
        _require(bool(guard.message), f"{place}.message", guard.message, "a non-empty text")
        _member(guard.source, GUARD_SOURCES, f"{place}.source")
    _require(bool(plan.launches), "launches", 0, "at least one launch")
    for i, launch in enumerate(plan.launches):
        _check_launch(launch, types, f"launches[{i}]")
    _check_vectors(plan)
    return plan


def _fail(place: str, found: object, allowed: str) -> NoReturn:
    raise LaunchPlanError(f"launch plan: {place} is {found!r}; allowed: {allowed}")


def _require(condition: bool, place: str, found: object, allowed: str) -> None:
    if not condition:
        _fail(place, found, allowed)


def _member(found: object, allowed: Sequence[object] | frozenset[str], place: str) -> None:
    # bool is an int to Python: True would pass for 1
    if isinstance(found, bool) or found not in allowed:
        _fail(place, found, ", ".join(str(x) for x in (sorted(allowed) if isinstance(allowed, frozenset) else allowed)))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError(f"a key occurs twice among {[key for key, _ in pairs]}")
    return document


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _keys(document: object, expected: frozenset[str], place: str) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        _fail(place, document, "an object")
    if document.keys() != expected:
        wrong = sorted(document.keys() ^ expected)
        _fail(place, sorted(document), f"exactly the keys {sorted(expected)}; missing or unknown: {wrong}")
    return document


def _list(found: object, place: str) -> list[Any]:
    if not isinstance(found, list):
        _fail(place, found, "a list")
    return found


def _text(found: object, place: str) -> str:
    if not isinstance(found, str):
        _fail(place, found, "a text")
    return found


def _bool(found: object, place: str) -> bool:
    if not isinstance(found, bool):
        _fail(place, found, "true or false")
    return found


def _int(found: object, place: str, low: int = 0, high: int = 1 << 31) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
        _fail(place, found, f"an integer from {low} to {high}")
    return found


def _ints(found: object, place: str, low: int = 0, high: int = 1 << 31) -> tuple[int, ...]:
    return tuple(_int(x, f"{place}[{i}]", low, high) for i, x in enumerate(_list(found, place)))


def _triple(found: object, place: str, low: int = 0, high: int = 1 << 31) -> tuple[int, int, int]:
    numbers = _ints(found, place, low, high)
    if len(numbers) != 3:
        _fail(place, found, "three integers")
    return numbers[0], numbers[1], numbers[2]


def _each(found: object, place: str, parse: Callable[[Any, str], T]) -> tuple[T, ...]:
    return tuple(parse(x, f"{place}[{i}]") for i, x in enumerate(_list(found, place)))


# JSON values -> plan values: types and keys alone. The rules follow below.


def _parse(document: Mapping[str, Any]) -> LaunchPlan:
    for key in ("origin", "spec"):
        _require(isinstance(document[key], dict), key, document[key], "an object")
    _member(document["origin"].get("kind"), ORIGIN_KINDS, "origin.kind")
    for key, value in document["origin"].items():
        _text(value, f"origin.{key}")
    return LaunchPlan(
        origin=document["origin"],
        spec=document["spec"],
        args=_each(document["args"], "args", _parse_arg),
        nodes=_each(document["nodes"], "nodes", lambda node, place: tuple(_list(node, place))),
        guards=_each(document["guards"], "guards", _parse_guard),
        launches=_each(document["launches"], "launches", _parse_launch),
        vectors=_each(document["vectors"], "vectors", _parse_vector),
    )


def _parse_arg(found: Any, place: str) -> Arg:
    is_tensor = isinstance(found, dict) and found.get("kind") == "tensor"
    _keys(found, frozenset({"name", "kind", "dtype"} | ({"rank"} if is_tensor else set())), place)
    return Arg(
        name=_text(found["name"], f"{place}.name"),
        kind=_text(found["kind"], f"{place}.kind"),
        dtype=_text(found["dtype"], f"{place}.dtype"),
        rank=_int(found["rank"], f"{place}.rank", 0, 32) if is_tensor else None,
    )


def _parse_guard(found: Any, place: str) -> Guard:
    _keys(found, frozenset({"expr", "message", "source"}), place)
    return Guard(
        expr=_int(found["expr"], f"{place}.expr"),
        message=_text(found["message"], f"{place}.message"),
        source=_text(found["source"], f"{place}.source"),
    )


def _parse_launch(found: Any, place: str) -> LaunchTemplate:
    _keys(found, _LAUNCH_KEYS, place)
    return LaunchTemplate(
        kernel=_text(found["kernel"], f"{place}.kernel"),
        grid=_triple(found["grid"], f"{place}.grid"),
        block=_triple(found["block"], f"{place}.block", 1, 1024),
        cluster=_triple(found["cluster"], f"{place}.cluster", 1, 16),
        smem=_int(found["smem"], f"{place}.smem", 0, 1 << 20),
        pdl=_bool(found["pdl"], f"{place}.pdl"),
        cooperative=_bool(found["cooperative"], f"{place}.cooperative"),
        params=_each(found["params"], f"{place}.params", _parse_param),
    )


def _parse_param(found: Any, place: str) -> ParamTemplate:
    kind = found.get("kind") if isinstance(found, dict) else found
    _member(kind, ("bytes", "tmap"), f"{place}.kind")
    if kind == "bytes":
        _keys(found, frozenset({"kind", "size", "align", "fields"}), place)
        fields = _each(found["fields"], f"{place}.fields", _ints)
        for i, pair in enumerate(fields):
            _require(len(pair) == 2, f"{place}.fields[{i}]", list(pair), "[byte offset, node]")
        return BytesTemplate(
            size=_int(found["size"], f"{place}.size", 1, MAX_BYTES_PARAM),
            align=_int(found["align"], f"{place}.align", 1, 128),
            fields=tuple((pair[0], pair[1]) for pair in fields),
        )
    _keys(found, _MAP_KEYS, place)
    return TensorMapTemplate(
        dtype=_text(found["dtype"], f"{place}.dtype"),
        addr=_int(found["addr"], f"{place}.addr"),
        dims=_ints(found["dims"], f"{place}.dims"),
        strides=_ints(found["strides"], f"{place}.strides"),
        box=_ints(found["box"], f"{place}.box", 1, 256),
        elem_strides=_ints(found["elem_strides"], f"{place}.elem_strides", 1, 8),
        swizzle=_int(found["swizzle"], f"{place}.swizzle"),
        interleave=_int(found["interleave"], f"{place}.interleave"),
        l2_promotion=_int(found["l2_promotion"], f"{place}.l2_promotion"),
        oob_fill=_text(found["oob_fill"], f"{place}.oob_fill"),
    )


def _parse_vector(found: Any, place: str) -> Vector:
    _keys(found, frozenset({"in", "sha256"}), place)
    inputs = found["in"]
    _require(isinstance(inputs, dict), f"{place}.in", inputs, "an object")
    for name, value in inputs.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        _require(is_number and math.isfinite(value), f"{place}.in.{name}", value, "a finite number")
    return Vector(inputs=inputs, sha256=_text(found["sha256"], f"{place}.sha256"))


# Rules over plan values.


def leaf_types(args: Sequence[Arg]) -> dict[str, tuple[str, ...]]:
    """Every input leaf that these arguments offer -> the types it may have.

    Raises: LaunchPlanError for a repeated name, or a kind, dtype or device leaf that does not exist.
    """
    leaves: dict[str, tuple[str, ...]] = {}
    for i, arg in enumerate(args):
        place = f"args[{i}]"
        _require(bool(re.fullmatch(r"[A-Za-z_][\w.\[\]]*", arg.name)), f"{place}.name", arg.name, "an identifier")
        if arg.kind == "tensor":
            _member(arg.dtype, frozenset(TENSOR_ITEM_BITS), f"{place}.dtype")
            _require(arg.rank is not None, f"{place}.rank", None, "a number of dimensions")
            names = [f"{arg.name}.ptr"]
            names += [f"{arg.name}.{what}[{d}]" for what in ("shape", "stride") for d in range(arg.rank or 0)]
            offered = dict.fromkeys(names, ("i64",))
        elif arg.kind == "scalar":
            _member(arg.dtype, SCALAR_DTYPES, f"{place}.dtype")
            offered = {arg.name: (arg.dtype,)}
        else:
            _member(arg.kind, ("tensor", "scalar", "device"), f"{place}.kind")
            _member(arg.name, DEVICE_LEAVES, f"{place}.name")
            _member(arg.dtype, ("i32", "i64"), f"{place}.dtype")
            offered = {arg.name: (arg.dtype,)}
        taken = sorted(offered.keys() & leaves.keys())
        _require(not taken, f"{place}.name", arg.name, "a name no other argument has")
        leaves |= offered
    return leaves


def _check_nodes(plan: LaunchPlan) -> list[str]:
    """Type of every node, after checking all of them."""
    _require(len(plan.nodes) <= MAX_NODES, "nodes", len(plan.nodes), f"at most {MAX_NODES} nodes")
    offered = leaf_types(plan.args)
    types: list[str] = []
    seen: set[str] = set()
    for i, node in enumerate(plan.nodes):
        place = f"nodes[{i}]"
        _require(len(node) >= 3, place, list(node), "[op, type, operands...]")
        op, type_ = node[0], node[1]
        if not isinstance(op, str) or op not in OPERAND_COUNT:
            _fail(f"{place} op", op, ", ".join(sorted(OPERAND_COUNT)))
        if not isinstance(type_, str) or type_ not in TYPE_BYTES:
            _fail(f"{place} type", type_, ", ".join(TYPE_BYTES))
        if op == "in":
            _require(len(node) == 3, place, list(node), '["in", type, name]')
            _require(node[2] in offered, f"{place} input", node[2], f"one of {sorted(offered)}")
            _member(type_, offered[node[2]], f"{place} type of {node[2]}")
            _require(node[2] not in seen, f"{place} input", node[2], "an input that no earlier node reads")
            seen.add(node[2])
        elif op == "const":
            _check_const(node, place)
        else:
            _check_operands(node, types, place)
        types.append(result_type(node))
    return types


def _check_const(node: Node, place: str) -> None:
    type_, value = node[1], node[2]
    _require(len(node) == 3, place, list(node), '["const", type, value]')
    if type_ in FLOAT_BITS:
        digits = FLOAT_BITS[type_] // 4
        matches = isinstance(value, str) and re.fullmatch(f"0x[0-9a-f]{{{digits}}}", value)
        _require(bool(matches), f"{place} value", value, f"a bit string 0x and {digits} lower-case digits")
        const_value(node)
    else:
        bits = INT_BITS[type_]
        low, high = (0, 1) if bits == 1 else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        _int(value, f"{place} value", low, high)


def _check_operands(node: Node, types: list[str], place: str) -> None:
    """Count, order and types of the operands of a computing node."""
    op, type_, operands = node[0], node[1], node[2:]
    _require(len(operands) == OPERAND_COUNT[op], place, list(node), f"{OPERAND_COUNT[op]} operands for {op}")
    for i, operand in enumerate(operands):
        _int(operand, f"{place} operand {i}", 0, len(types) - 1)
    found = [types[i] for i in operands]
    if op == "select":
        _require(found == ["i1", type_, type_], place, found, f"operands of types i1, {type_}, {type_}")
    elif op in CONVERSIONS:
        allowed = _CONVERSION_RULES[op]
        _require(allowed(found[0], type_), place, f"{op} from {found[0]} to {type_}", f"what {op} can convert")
    elif op == "clog2":
        _require(type_ == "i32" and found[0] in INT_BITS, place, list(node), '["clog2", "i32", an integer]')
    else:
        is_float = op in FLOAT_BINARY or op in FLOAT_COMPARE
        is_int = op in INT_BINARY or op in INT_COMPARE or op == "ctlz"
        _require(is_float == (type_ in FLOAT_BITS) and is_int != is_float, place, list(node), f"a type {op} works on")
        _require(found == [type_] * len(found), place, found, f"operands of type {type_}")


_CONVERSION_RULES: dict[str, Callable[[str, str], bool]] = {
    "sext": lambda a, b: a in INT_BITS and b in INT_BITS and INT_BITS[a] < INT_BITS[b],
    "zext": lambda a, b: a in INT_BITS and b in INT_BITS and INT_BITS[a] < INT_BITS[b],
    "trunc": lambda a, b: a in INT_BITS and b in INT_BITS and INT_BITS[a] > INT_BITS[b],
    "fptrunc": lambda a, b: (a, b) == ("f64", "f32"),
    "fpext": lambda a, b: (a, b) == ("f32", "f64"),
    "sitofp": lambda a, b: a in INT_BITS and b in FLOAT_BITS,
    "uitofp": lambda a, b: a in INT_BITS and b in FLOAT_BITS,
    "fptosi": lambda a, b: a in FLOAT_BITS and b in INT_BITS,
    "bitcast": lambda a, b: {a, b} in ({"i32", "f32"}, {"i64", "f64"}),
}


def _index(found: int, types: list[str], place: str, type_: str | None = None) -> None:
    _require(0 <= found < len(types), place, found, f"a node index below {len(types)}")
    if type_ is not None:
        _require(types[found] == type_, place, f"node {found} of type {types[found]}", f"a node of type {type_}")


def _check_launch(launch: LaunchTemplate, types: list[str], place: str) -> None:
    _require(bool(re.fullmatch(r"[A-Za-z_$][\w$]*", launch.kernel)), f"{place}.kernel", launch.kernel, "a PTX name")
    for i, node in enumerate(launch.grid):
        _index(node, types, f"{place}.grid[{i}]")
        _member(types[node], ("i32", "i64"), f"{place}.grid[{i}] type")
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    _require(threads <= 1024, f"{place}.block", list(launch.block), "at most 1024 threads")
    ctas = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    _require(ctas <= 16, f"{place}.cluster", list(launch.cluster), "at most 16 blocks")
    for i, param in enumerate(launch.params):
        if isinstance(param, BytesTemplate):
            _check_bytes(param, types, f"{place}.params[{i}]")
        else:
            _check_map(param, types, f"{place}.params[{i}]")


def _check_bytes(param: BytesTemplate, types: list[str], place: str) -> None:
    _member(param.align, (1, 2, 4, 8, 16, 32, 64, 128), f"{place}.align")
    end = 0
    for i, (offset, node) in enumerate(param.fields):
        at = f"{place}.fields[{i}]"
        _index(node, types, at)
        _require(offset >= end, at, offset, f"an offset of at least {end}: fields are sorted and do not overlap")
        end = offset + TYPE_BYTES[types[node]]
        _require(end <= param.size, at, offset, f"a field inside the {param.size} bytes")


def _check_map(param: TensorMapTemplate, types: list[str], place: str) -> None:
    rank = len(param.dims)
    _require(1 <= rank <= 5, f"{place}.dims", rank, "1 to 5 dimensions")
    for name, found, count in (
        ("strides", param.strides, rank - 1),
        ("box", param.box, rank),
        ("elem_strides", param.elem_strides, rank),
    ):
        _require(len(found) == count, f"{place}.{name}", list(found), f"{count} entries for rank {rank}")
    _index(param.addr, types, f"{place}.addr", "i64")
    for name, indices in (("dims", param.dims), ("strides", param.strides)):
        for i, node in enumerate(indices):
            _index(node, types, f"{place}.{name}[{i}]", "i64")
    _member(param.dtype, frozenset(MAP_ITEM_BYTES), f"{place}.dtype")
    _member(param.swizzle, MAP_SWIZZLES, f"{place}.swizzle")
    _member(param.interleave, MAP_INTERLEAVES, f"{place}.interleave")
    _member(param.l2_promotion, MAP_L2_PROMOTIONS, f"{place}.l2_promotion")
    _member(param.oob_fill, MAP_OOB_FILLS, f"{place}.oob_fill")


def _check_vectors(plan: LaunchPlan) -> None:
    wanted = {node[2]: node[1] for node in plan.nodes if node[0] == "in"}
    for i, vector in enumerate(plan.vectors):
        place = f"vectors[{i}]"
        _require(vector.inputs.keys() == wanted.keys(), f"{place}.in", sorted(vector.inputs), f"{sorted(wanted)}")
        _require(bool(re.fullmatch("[0-9a-f]{64}", vector.sha256)), f"{place}.sha256", vector.sha256, "64 hex digits")
