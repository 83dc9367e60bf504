"""Contract under test: a launch plan is data that every reader understands alike (docs/formats.md, section 2).

- JSON out and in gives an equal plan, equal plans give equal bytes; anything unknown, newer, out of order or out of
range
  is refused with its place.
- Integers wrap in two's complement, division by zero gives 0, a shift by the width or more gives 0 (`ashr`: the sign);
  every operation has one value on every input.
- The digest covers exactly the defined bytes; the first guard that fails is the message.
- Building expressions simplifies them without changing a value.
"""

import hashlib
import json
import math
import random
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4build.errors import LaunchPlanError
from fa4build.plan import (
    Arg,
    BytesTemplate,
    Guard,
    LaunchPlan,
    LaunchTemplate,
    TensorMapTemplate,
    Vector,
    canonical_digest,
    check_plan,
    evaluate,
    failed_guard,
    leaves,
    plan_from_json,
    plan_to_json,
    render_plan,
)
from fa4build.plan.builder import NodeTable, without_unused
from fa4build.plan.evaluation import compute, const_value, evaluate_nodes, to_bytes, wrap
from fa4build.plan.extract.device_facts import StandInDevice, pretend, with_device_inputs
from fa4build.plan.guards import add_guards
from fa4build.plan.values import INT_BITS, result_type

MIN32, MAX32 = -(1 << 31), (1 << 31) - 1


def small_plan() -> LaunchPlan:
    """One launch over a bf16 tensor x (rows, 64): a map, and 16 bytes of which 4 to 7 and 13 to 15 are undefined."""
    b = NodeTable()
    pointer, rows = b.leaf("x.ptr", "i64"), b.leaf("x.shape[0]", "i64")
    stride = b.op("mul", "i64", b.leaf("x.stride[0]", "i64"), b.const(2, "i64"))
    tiles = b.op("udiv", "i64", b.op("add", "i64", rows, b.const(127, "i64")), b.const(128, "i64"))
    scale = b.op("fmul", "f32", b.leaf("scale", "f32"), b.const(0.5, "f32"))
    is_long = b.op("sgt", "i64", rows, b.const(1000, "i64"))
    one, width = b.const(1, "i64"), b.const(64, "i64")
    guards = (
        Guard(expr=b.op("sge", "i64", rows, one), message="x.shape[0] must be at least 1", source="spec"),
        Guard(expr=b.op("sle", "i64", rows, b.const(4096, "i64")), message="x.shape[0] is too long", source="entry"),
    )
    params = (
        TensorMapTemplate(
            dtype="bf16",
            addr=pointer,
            dims=(width, rows),
            strides=(stride,),
            box=(64, 128),
            elem_strides=(1, 1),
            swizzle=128,
            interleave=0,
            l2_promotion=128,
            oob_fill="zero",
        ),
        BytesTemplate(size=16, align=8, fields=((0, scale), (8, b.op("trunc", "i32", rows)), (12, is_long))),
    )
    return LaunchPlan(
        origin={"kind": "handwritten"},
        spec={"head_dim": 64},
        args=(
            Arg(name="x", kind="tensor", dtype="bf16", rank=2),
            Arg(name="scale", kind="scalar", dtype="f32"),
            Arg(name="dev.sm_count", kind="device", dtype="i32"),
        ),
        nodes=tuple(b.nodes),
        guards=guards,
        launches=(
            LaunchTemplate(
                kernel="toy_0",
                grid=(tiles, one, one),
                block=(128, 1, 1),
                cluster=(2, 1, 1),
                smem=1024,
                pdl=True,
                cooperative=False,
                params=params,
            ),
        ),
    )


INPUTS = {"x.ptr": 4096, "x.shape[0]": 1001, "x.stride[0]": 72, "scale": 3.0}


def test_a_plan_gives_launches() -> None:
    """Grid, maps and bytes are the plan's expressions with numbers in them."""
    (launch,) = evaluate(small_plan(), INPUTS)

    assert launch.grid == (8, 1, 1)  # ceil(1001 / 128)
    assert (launch.block, launch.cluster, launch.smem, launch.pdl) == ((128, 1, 1), (2, 1, 1), 1024, True)
    tensor_map, data = launch.params
    assert (tensor_map.addr, tensor_map.dims, tensor_map.strides) == (4096, (64, 1001), (144,))
    # 1.5 as f32, 4 undefined bytes, 1001 as i32, true as one byte, 3 undefined bytes
    assert data.data == struct.pack("<f4xiB3x", 1.5, 1001, 1)
    assert data.mask == b"\xff" * 4 + bytes(4) + b"\xff" * 5 + bytes(3)


def test_the_digest_is_over_the_documented_bytes() -> None:
    """10 numbers of the launch, then the map as numbers, then the bytes with 0 for undefined ones."""
    numbers = (8, 1, 1, 128, 1, 1, 2, 1, 1, 1024)
    numbers += (4096, 2, 64, 1001, 144, 64, 128, 1, 1, 128, 0, 128, 0)  # addr, rank, dims, strides, box, ...
    expected = hashlib.sha256(struct.pack("<23q", *numbers) + struct.pack("<f4xiB3x", 1.5, 1001, 1)).hexdigest()

    assert canonical_digest(evaluate(small_plan(), INPUTS)) == expected


def test_the_first_failing_guard_is_the_message() -> None:
    """Guards are looked at in order; when all hold there is no message."""
    plan = small_plan()

    assert failed_guard(plan, INPUTS) is None
    assert failed_guard(plan, INPUTS | {"x.shape[0]": 0}) == "x.shape[0] must be at least 1"
    assert failed_guard(plan, INPUTS | {"x.shape[0]": 5000}) == "x.shape[0] is too long"


def test_an_empty_launch_says_so() -> None:
    """A zero in the grid means that there is nothing to launch."""
    (launch,) = evaluate(small_plan(), INPUTS | {"x.shape[0]": 0})

    assert launch.grid == (0, 1, 1)
    assert launch.is_empty


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x.ptr": 0, "x.shape[0]": 1, "scale": 1.0}, r"input x\.stride\[0\] \(i64\) is missing"),
        (INPUTS | {"x.shape[0]": 1.5}, r"x\.shape\[0\] = 1\.5 is no i64"),
        (INPUTS | {"x.shape[0]": 1 << 64}, r"is no i64; pass an integer of at most 64 bits"),
    ],
)
def test_inputs_are_checked(inputs: dict[str, Any], message: str) -> None:
    """A leaf without a value, or with one its type does not hold, is refused."""
    with pytest.raises(LaunchPlanError, match=message):
        evaluate(small_plan(), inputs)


def test_json_round_trip() -> None:
    """Text and value determine each other; keys are sorted; nothing but the last newline is white space outside
    texts."""
    plan = replace(small_plan(), vectors=(Vector(inputs=INPUTS, sha256="ab" * 32),))
    text = plan_to_json(plan)

    assert plan_from_json(text) == plan
    assert plan_to_json(plan_from_json(text)) == text
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) + "\n"


def test_leaves_are_what_evaluate_wants() -> None:
    """Inputs that no expression uses need no value."""
    assert leaves(small_plan()) == {"x.ptr": "i64", "x.shape[0]": "i64", "x.stride[0]": "i64", "scale": "f32"}


def mutated(path: str, value: Any) -> str:
    """The small plan's JSON with one place changed; a path like `launches.0.block`, `!key` removes."""
    document = json.loads(plan_to_json(small_plan()))
    *parents, last = path.split(".")
    place: Any = document
    for key in parents:
        place = place[int(key)] if key.isdigit() else place[key]
    if last.startswith("!"):
        del place[last[1:]]
    else:
        place[int(last) if last.isdigit() else last] = value
    return json.dumps(document)


MAP, BYTES = "launches.0.params.0", "launches.0.params.1"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "other", "has format 'other', not \"fa4build.launchplan\""),
        ("version", 2, "has version 2; this fa4build reads version 1"),
        ("version", True, "has version True"),
        ("extra", 1, r"missing or unknown: \['extra'\]"),
        ("!vectors", None, r"missing or unknown: \['vectors'\]"),
        ("origin", {}, "origin.kind is None; allowed: extracted, handwritten"),
        ("origin", {"kind": "extracted", "dsl": 4}, "origin.dsl is 4; allowed: a text"),
        ("spec", [], "spec is"),
        ("args.0.kind", "array", r"args\[0\]"),
        ("args.0.dtype", "complex64", r"args\[0\].dtype is 'complex64'"),
        ("args.1.name", "x.ptr", r"args\[1\].name is 'x.ptr'; allowed: a name no other argument has"),
        ("args.2.name", "dev.clock", r"args\[2\].name is 'dev.clock'; allowed: dev.l2_bytes"),
        ("nodes.0", ["in", "i64", "y.ptr"], r"nodes\[0\] input is 'y.ptr'"),
        ("nodes.0", ["in", "i32", "x.ptr"], r"nodes\[0\] type of x.ptr is 'i32'; allowed: i64"),
        ("nodes.1", ["in", "i64", "x.ptr"], r"nodes\[1\] input is 'x.ptr'; allowed: an input that no earlier node"),
        ("nodes.1", ["pow", "i64", 0, 0], r"nodes\[1\] op is 'pow'; allowed: add"),
        ("nodes.1", ["add", "i128", 0, 0], r"nodes\[1\] type is 'i128'"),
        ("nodes.1", ["add", "i64", 0, 1], r"nodes\[1\] operand 1 is 1; allowed: an integer from 0 to 0"),
        ("nodes.1", ["add", "i64", 0, True], r"nodes\[1\] operand 1 is True"),
        ("nodes.1", ["add", "i32", 0, 0], r"nodes\[1\] is \['i64', 'i64'\]; allowed: operands of type i32"),
        ("nodes.1", ["fadd", "i64", 0, 0], r"nodes\[1\] is .*; allowed: a type fadd works on"),
        ("nodes.1", ["add", "i64", 0], r"allowed: 2 operands for add"),
        ("nodes.1", ["sext", "i64", 0], r"sext from i64 to i64"),
        ("nodes.1", ["bitcast", "f32", 0], r"bitcast from i64 to f32"),
        ("nodes.1", ["select", "i64", 0, 0, 0], r"operands of types i1, i64, i64"),
        ("nodes.1", ["clog2", "i64", 0], r"\[\"clog2\", \"i32\", an integer\]"),
        ("nodes.1", ["const", "i32", 1 << 31], r"nodes\[1\] value is 2147483648"),
        ("nodes.1", ["const", "i1", -1], r"nodes\[1\] value is -1; allowed: an integer from 0 to 1"),
        ("nodes.1", ["const", "f32", 0.5], r"nodes\[1\] value is 0.5; allowed: a bit string 0x and 8"),
        ("guards.0.expr", 99, r"guards\[0\] is 99; allowed: a node index"),
        ("guards.0.expr", 0, r"guards\[0\] is 'node 0 of type i64'; allowed: a node of type i1"),
        ("guards.0.source", "caller", r"guards\[0\].source is 'caller'"),
        ("guards.0.message", "", r"guards\[0\].message"),
        ("launches", [], "launches is 0; allowed: at least one launch"),
        ("launches.0.kernel", "a b", r"launches\[0\].kernel is 'a b'"),
        ("launches.0.grid", [0, 0], r"launches\[0\].grid is \[0, 0\]; allowed: three integers"),
        ("launches.0.block", [1024, 2, 1], "allowed: at most 1024 threads"),
        ("launches.0.cluster", [8, 4, 1], "allowed: at most 16 blocks"),
        ("launches.0.smem", 1.5, r"launches\[0\].smem is 1.5"),
        ("launches.0.pdl", 1, r"launches\[0\].pdl is 1; allowed: true or false"),
        (f"{MAP}.kind", "buffer", r"params\[0\].kind is 'buffer'; allowed: bytes, tmap"),
        (f"{MAP}.words", [], r"unknown: \['words'\]"),
        (f"{MAP}.dtype", "fp4", r"params\[0\].dtype is 'fp4'"),
        (f"{MAP}.dims", [], r"params\[0\].dims is 0; allowed: 1 to 5 dimensions"),
        (f"{MAP}.strides", [], "allowed: 1 entries for rank 2"),
        (f"{MAP}.box", [64, 257], r"params\[0\].box\[1\] is 257"),
        (f"{MAP}.elem_strides", [1, 9], r"params\[0\].elem_strides\[1\] is 9"),
        (f"{MAP}.swizzle", 16, r"params\[0\].swizzle is 16; allowed: 0, 32, 64, 128"),
        (f"{MAP}.interleave", 8, r"params\[0\].interleave"),
        (f"{MAP}.l2_promotion", 512, r"params\[0\].l2_promotion"),
        (f"{MAP}.oob_fill", "one", r"params\[0\].oob_fill is 'one'; allowed: zero, nan"),
        (f"{BYTES}.align", 3, r"params\[1\].align is 3"),
        (f"{BYTES}.size", 8, r"params\[1\].fields\[1\] is 8; allowed: a field inside the 8 bytes"),
        (f"{BYTES}.fields.1.0", 2, r"params\[1\].fields\[1\] is 2; allowed: an offset of at least 4"),
        (f"{BYTES}.fields.1", [8], r"params\[1\].fields\[1\] is \[8\]"),
        ("vectors", [{"in": {}, "sha256": "ab" * 32}], r"vectors\[0\].in is \[\]"),
        ("vectors", [{"in": INPUTS, "sha256": "AB"}], r"vectors\[0\].sha256 is 'AB'"),
        ("vectors", [{"in": INPUTS | {"scale": "x"}, "sha256": "ab" * 32}], r"vectors\[0\].in.scale is 'x'"),
    ],
)
def test_a_mutated_plan_is_refused_with_its_place(path: str, value: Any, message: str) -> None:
    """Every field: one wrong value, one error that names the field."""
    with pytest.raises(LaunchPlanError, match=message):
        plan_from_json(mutated(path, value))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":1,"a":2}', '{"a":NaN}', "[" * 100_000])
def test_what_is_no_plan_is_refused(text: str) -> None:
    """Damaged text gives the same kind of error, not a Python one."""
    with pytest.raises(LaunchPlanError):
        plan_from_json(text)


@pytest.mark.parametrize(
    ("op", "type_", "operands", "expected"),
    [
        ("add", "i32", (MAX32, 1), MIN32),
        ("sub", "i8", (-128, 1), 127),
        ("mul", "i64", (1 << 62, 4), 0),
        ("sdiv", "i32", (-7, 2), -3),  # towards zero
        ("sdiv", "i32", (MIN32, -1), MIN32),  # wraps
        ("sdiv", "i32", (5, 0), 0),
        ("udiv", "i32", (-1, 2), MAX32),  # (2**32 - 1) / 2
        ("udiv", "i32", (5, 0), 0),
        ("srem", "i32", (-7, 2), -1),  # sign of the dividend
        ("srem", "i32", (-7, 0), 0),
        ("urem", "i32", (-1, 10), 5),  # 4294967295 mod 10
        ("shl", "i32", (1, 31), MIN32),
        ("shl", "i32", (1, 32), 0),
        ("lshr", "i32", (-1, 31), 1),
        ("lshr", "i32", (-1, 32), 0),
        ("ashr", "i32", (-8, 1), -4),
        ("ashr", "i32", (-8, 32), -1),  # the sign
        ("ashr", "i32", (8, -1), 0),  # a negative amount is a large one
        ("and", "i16", (-1, 255), 255),
        ("or", "i8", (-128, 127), -1),
        ("xor", "i1", (1, 1), 0),
        ("smin", "i32", (-1, 1), -1),
        ("umin", "i32", (-1, 1), 1),
        ("smax", "i32", (-1, 1), 1),
        ("umax", "i32", (-1, 1), -1),
        ("eq", "i32", (1, 1), 1),
        ("slt", "i32", (-1, 0), 1),
        ("ult", "i32", (-1, 0), 0),
        ("uge", "i64", (-1, 1 << 62), 1),
        ("slt", "i1", (1, 0), 1),  # 1 is -1 in one signed bit
        ("feq", "f32", (math.nan, math.nan), 0),
        ("fle", "f64", (1.0, 1.0), 1),
        ("fadd", "f32", (16777216.0, 1.0), 16777216.0),  # 2**24 + 1 is no f32: ties to even
        ("fmul", "f32", (3e38, 10.0), math.inf),
        ("fdiv", "f32", (1.0, 0.0), math.inf),
        ("fdiv", "f32", (-1.0, 0.0), -math.inf),
        ("fmin", "f32", (math.nan, 2.0), 2.0),
        ("fmax", "f64", (1.0, math.nan), 1.0),
        ("ctlz", "i32", (1,), 31),
        ("ctlz", "i32", (0,), 32),
        ("ctlz", "i64", (-1,), 0),
    ],
)
def test_operations(op: str, type_: str, operands: tuple, expected: float) -> None:
    """One literal value per rule: wrapping, signs, zero divisors, long shifts, rounding."""
    assert compute(op, type_, type_, operands) == expected


@pytest.mark.parametrize(
    ("op", "source", "target", "value", "expected"),
    [
        ("sext", "i8", "i32", -1, -1),
        ("zext", "i8", "i32", -1, 255),
        ("sext", "i1", "i8", 1, -1),
        ("zext", "i1", "i8", 1, 1),
        ("trunc", "i64", "i32", (1 << 40) + 5, 5),
        ("trunc", "i32", "i1", 2, 0),
        ("sitofp", "i32", "f32", -3, -3.0),
        ("uitofp", "i32", "f64", -1, 4294967295.0),
        ("sitofp", "i64", "f32", (1 << 60) + (1 << 36) + 1, float((1 << 60) + (1 << 37))),  # one rounding, upwards
        ("fptosi", "f32", "i32", -2.9, -2),
        ("fptosi", "f64", "i32", 3e9, 0),  # what the type cannot hold
        ("fptosi", "f64", "i32", math.nan, 0),
        ("fptrunc", "f64", "f32", 1e300, math.inf),
        ("fptrunc", "f64", "f32", 0.1, 0.10000000149011612),
        ("bitcast", "f32", "i32", 1.0, 0x3F800000),
        ("bitcast", "i64", "f64", 0x3FF0000000000000, 1.0),
        ("clog2", "i32", "i32", 0, 0),
        ("clog2", "i32", "i32", 1, 0),
        ("clog2", "i32", "i32", 5, 3),
        ("clog2", "i32", "i32", 8, 3),
        ("clog2", "i32", "i32", -1, 32),  # unsigned 2**32 - 1
        ("clog2", "i64", "i32", (1 << 40) + 1, 41),
    ],
)
def test_conversions(op: str, source: str, target: str, value: float, expected: float) -> None:
    """One literal value per rule of widening, narrowing and rounding."""
    assert compute(op, target, source, (value,)) == expected


FINITE_F32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(FINITE_F32, FINITE_F32)
def test_f32_arithmetic_equals_numpy(a: float, b: float) -> None:
    """Rounding a double after each operation is single-precision arithmetic."""
    import numpy as np

    with np.errstate(all="ignore"):
        expected = {
            "fadd": np.float32(a) + np.float32(b),
            "fsub": np.float32(a) - np.float32(b),
            "fmul": np.float32(a) * np.float32(b),
        }
        if b:
            expected["fdiv"] = np.float32(a) / np.float32(b)
    for op, value in expected.items():
        assert to_bytes(compute(op, "f32", "f32", (a, b)), "f32") == value.tobytes()


_BINARY = "add sub mul and or xor shl lshr ashr udiv sdiv urem srem smin umax".split()
_COMPARE = "eq ne slt sle sgt sge ult ule ugt uge".split()
_EDGES = [0, 1, 2, 3, 7, 15, 16, 31, 32, 63, 64, 127, 128, -1, -2, -128, MAX32, MIN32, (1 << 63) - 1, -(1 << 63)]


def _random_expression(rng: random.Random, table: NodeTable, values: dict[str, int]) -> tuple[int, int]:
    """A random expression as a node of `table`, and its value computed step by step without the table."""
    pool: list[tuple[int, str, int]] = []  # (node, type, value)
    for name, type_ in (("a", "i32"), ("b", "i64"), ("c", "i1")):
        pool.append((table.leaf(name, type_), type_, values[name]))
    for _ in range(rng.randrange(1, 25)):
        choice = rng.randrange(6)
        node, type_, value = rng.choice(pool)
        same = [p for p in pool if p[1] == type_]
        if choice == 0:
            new_type = rng.choice(["i1", "i8", "i32", "i64"])
            constant = wrap(rng.choice(_EDGES), new_type)
            pool.append((table.const(constant, new_type), new_type, constant))
        elif choice in (1, 2):
            op, other = rng.choice(_BINARY), rng.choice(same)
            made = compute(op, type_, type_, (value, other[2]))
            pool.append((table.op(op, type_, node, other[0]), type_, int(made)))
        elif choice == 3:
            op, other = rng.choice(_COMPARE), rng.choice(same)
            made = compute(op, type_, type_, (value, other[2]))
            pool.append((table.op(op, type_, node, other[0]), "i1", int(made)))
        elif choice == 4:
            condition, other = rng.choice([p for p in pool if p[1] == "i1"]), rng.choice(same)
            picked = value if condition[2] else other[2]
            pool.append((table.op("select", type_, condition[0], node, other[0]), type_, picked))
        else:
            new_type = rng.choice([t for t in ("i1", "i8", "i32", "i64") if t != type_])
            op = "trunc" if INT_BITS[new_type] < INT_BITS[type_] else rng.choice(["sext", "zext"])
            pool.append((table.op(op, new_type, node), new_type, int(compute(op, new_type, type_, (value,)))))
    return pool[-1][0], pool[-1][2]


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 1 << 60))
def test_simplification_never_changes_a_value(seed: int) -> None:
    """A random expression, simplified while built, has the value of the same expression computed step by step."""
    rng = random.Random(seed)
    values = {"a": wrap(rng.choice(_EDGES), "i32"), "b": wrap(rng.choice(_EDGES), "i64"), "c": rng.randrange(2)}
    table = NodeTable()
    node, expected = _random_expression(rng, table, values)
    dtypes = {"a": "i32", "b": "i64", "c": "i1"}
    args = tuple(Arg(name=name, kind="scalar", dtype=dtype) for name, dtype in dtypes.items())
    zero = table.const(0, "i32")
    launch = LaunchTemplate(
        kernel="k",
        grid=(zero, zero, zero),
        block=(1, 1, 1),
        cluster=(1, 1, 1),
        smem=0,
        pdl=False,
        cooperative=False,
        params=(BytesTemplate(size=8, align=8, fields=((0, node),)),),
    )
    plan = LaunchPlan(
        origin={"kind": "handwritten"}, spec={}, args=args, nodes=tuple(table.nodes), guards=(), launches=(launch,)
    )

    check_plan(plan)
    used = without_unused(plan)
    assert evaluate_nodes(plan, values)[node] == expected
    wanted = to_bytes(expected, result_type(table.nodes[node])).ljust(8, b"\0")
    assert evaluate(used, values)[0].params[0].data == wanted


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        pytest.param(lambda b, x: b.op("add", "i64", b.op("add", "i64", x, b.const(-1, "i64")), b.const(1, "i64")), "x",
                     id="x - 1 + 1"),
        pytest.param(lambda b, x: b.op("mul", "i64", x, b.const(1, "i64")), "x", id="x * 1"),
        pytest.param(lambda b, x: b.op("trunc", "i32", b.op("sext", "i64", b.op("trunc", "i32", x))), "trunc.i32(x)",
                     id="narrow after widening"),
        pytest.param(lambda b, x: b.op("sge", "i64", b.op("sext", "i64", b.op("trunc", "i32", x)), b.const(MIN32,
        "i64")),
                     "1", id="a range its type guarantees"),
        pytest.param(lambda b, x: b.negate(b.op("ult", "i64", x, b.const(5, "i64"))), "x >=u 5", id="not less"),
        pytest.param(lambda b, x: b.op("select", "i64", b.const(1, "i1"), x, b.const(0, "i64")), "x",
                     id="known choice"),
    ],
)  # fmt: skip
def test_trivial_operations_disappear(build: Any, expected: str) -> None:
    """What is left is what a person would write."""
    b = NodeTable()
    node = build(b, b.leaf("x", "i64"))
    plan = LaunchPlan(
        origin={"kind": "handwritten"},
        spec={},
        args=(Arg(name="x", kind="scalar", dtype="i64"),),
        nodes=tuple(b.nodes),
        guards=(),
        launches=(
            LaunchTemplate(
                kernel="k",
                grid=(b.const(1, "i32"),) * 3,
                block=(1, 1, 1),
                cluster=(1, 1, 1),
                smem=0,
                pdl=False,
                cooperative=False,
                params=(BytesTemplate(size=8, align=8, fields=((0, node),)),),
            ),
        ),
    )
    plan = replace(plan, nodes=tuple(b.nodes))

    assert f"{{0: {expected}}}" in render_plan(plan)


def test_spec_and_map_guards_are_added() -> None:
    """Facts of `spec` and the driver's rules for maps become guards; those that hold anyway are left out."""
    spec = {"head_dim": 64, "shapes": {"x": ["rows", "head_dim"]}}
    plan = add_guards(replace(small_plan(), spec=spec))
    messages = [guard.message for guard in plan.guards]

    assert messages == [
        "x.shape[0] must be at least 1",
        "x.shape[0] is too long",
        "x.shape[1] is head_dim and must be 64",
        "x.ptr must be a multiple of 16 bytes",
        "x.stride[0] must be a multiple of 8 elements, from 0 to 549755813880",
    ]
    good = INPUTS | {"x.shape[1]": 64}
    assert failed_guard(plan, good) is None
    assert failed_guard(plan, good | {"x.shape[1]": 128}) == messages[2]
    assert failed_guard(plan, good | {"x.ptr": 4104}) == messages[3]
    assert failed_guard(plan, good | {"x.stride[0]": 71}) == messages[4]
    assert failed_guard(plan, good | {"x.stride[0]": 71, "x.shape[0]": 1}) is None  # a stride that is never used


def test_multiples_guard_names_both_extents() -> None:
    """`num_heads_q` a multiple of `num_heads_kv`, as grouped-query attention needs."""
    spec = {"shapes": {"x": ["num_heads_q", "num_heads_kv"]}, "multiples": [["num_heads_q", "num_heads_kv"]]}
    plan = add_guards(replace(small_plan(), spec=spec))

    good = INPUTS | {"x.shape[0]": 12, "x.shape[1]": 4}
    assert failed_guard(plan, good) is None
    expected = "x.shape[0] is num_heads_q and must be a multiple of x.shape[1]"
    assert failed_guard(plan, good | {"x.shape[1]": 5}) == expected


def test_a_fixed_ratio_and_unit_strides_are_guarded() -> None:
    """A kernel compiled for 4 query heads a key head refuses others; a stride it takes for 1 must be 1."""
    spec = {
        "shapes": {"x": ["num_heads_q", "num_heads_kv"]},
        "multiples": [["num_heads_q", "num_heads_kv", 4]],
        "unit_strides": ["x.stride[1]"],
    }
    plan = add_guards(replace(small_plan(), spec=spec))

    good = INPUTS | {"x.shape[0]": 12, "x.shape[1]": 3, "x.stride[1]": 1}
    assert failed_guard(plan, good) is None
    ratio = "x.shape[0] is num_heads_q and must be 4 times x.shape[1]"
    assert failed_guard(plan, good | {"x.shape[0]": 24}) == ratio
    assert failed_guard(plan, good | {"x.stride[1]": 2}) == "x.stride[1] must be 1"
    assert failed_guard(plan, good | {"x.stride[1]": 2, "x.shape[0]": 4, "x.shape[1]": 1}) is None


def test_an_extent_may_have_to_be_another_plus_a_number_or_none_at_all() -> None:
    """As the list of starts is one longer than the batch, and lengths may be left out."""
    spec = {"shapes": {"x": ["first", "second"]}, "sums": [["first", "second", 1]]}
    plan = add_guards(replace(small_plan(), spec=spec))
    optional = {"shapes": {"x": ["first", "second"]}, "sums_or_zero": [["second", "first", -1]]}
    plan_or_zero = add_guards(replace(small_plan(), spec=optional))

    good = INPUTS | {"x.shape[0]": 5, "x.shape[1]": 4}
    assert failed_guard(plan, good) is None
    assert failed_guard(plan, good | {"x.shape[1]": 5}) == "x.shape[0] is first and must be x.shape[1] + 1"
    assert failed_guard(plan_or_zero, good) is None
    refusal = "x.shape[1] is second and must be x.shape[0] - 1 or 0"
    assert failed_guard(plan_or_zero, good | {"x.shape[1]": 0}) != refusal
    assert failed_guard(plan_or_zero, good | {"x.shape[1]": 5}) == refusal


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"shapes": {"z": ["rows"]}}, "gives z 1 extents"),
        ({"shapes": {"x": ["rows"]}}, "gives x 1 extents"),
        (
            {"shapes": {"x": ["rows", "columns"]}, "multiples": [["rows", "heads"]]},
            "names rows and heads; known extents",
        ),
        (
            {"shapes": {"x": ["rows", "columns"]}, "sums": [["rows", "heads", 1]]},
            "names rows and heads; known extents",
        ),
        ({"unit_strides": ["x.stride[2]"]}, r"names x.stride\[2\]; the host function has \['x.stride\[0\]'"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(spec: dict[str, Any], message: str) -> None:
    """Facts about what the host function does not have are mistakes, not guards to drop."""
    with pytest.raises(LaunchPlanError, match=message):
        add_guards(replace(small_plan(), spec=spec))


def test_constants_keep_their_bits() -> None:
    """Floats are written as bit strings, so no reader rounds them."""
    b = NodeTable()
    index = b.const(1.4426950408889634, "f32")

    assert b.nodes[index] == ("const", "f32", "0x3fb8aa3b")
    assert const_value(b.nodes[index]) == 1.4426950216293335


FIRST, SECOND = StandInDevice(sm_count=143, l2_bytes=52428815), StandInDevice(sm_count=159, l2_bytes=62914591)


def persistent_plan(blocks: int, *, cubin: str = "aa") -> LaunchPlan:
    """Host code that launches min(n, blocks) blocks, `blocks` being a constant of the build machine."""
    b = NodeTable()
    n = b.leaf("n", "i32")
    one = b.const(1, "i32")
    launch = LaunchTemplate(
        kernel="k",
        grid=(b.op("smin", "i32", n, b.const(blocks, "i32")), one, one),
        block=(128, 1, 1),
        cluster=(1, 1, 1),
        smem=0,
        pdl=False,
        cooperative=False,
        params=(BytesTemplate(size=4, align=4, fields=((0, n),)),),
    )
    plan = LaunchPlan(
        origin={"kind": "extracted", "cubin_sha256": cubin},
        spec={},
        args=(Arg(name="n", kind="scalar", dtype="i32"),),
        nodes=tuple(b.nodes),
        guards=(),
        launches=(launch,),
    )
    vectors = tuple(Vector(inputs={"n": n}, sha256=canonical_digest(evaluate(plan, {"n": n}))) for n in (5, 1000))
    return replace(plan, vectors=vectors)


@pytest.mark.parametrize(("first", "second", "name", "blocks"), [
    pytest.param(143, 159, "sm_count", 148, id="multiprocessors"),
    pytest.param(286, 318, "sm_count", 296, id="two blocks a multiprocessor"),
    pytest.param(142, 158, "sm_count", 148, id="whole pairs: 143 // 2 * 2, 159 // 2 * 2"),
    pytest.param(136, 152, "sm_count", 144, id="whole clusters of eight: 148 // 8 * 8"),
    pytest.param(35, 39, "sm_count", 37, id="number of clusters of four"),
    pytest.param(52428815, 62914591, "l2_bytes", 148, id="L2"),
])  # fmt: skip
def test_constants_of_the_device_become_inputs(first: int, second: int, name: str, blocks: int) -> None:
    """V7: what differs between two invented devices as they do is read from the device at run time."""
    plan = with_device_inputs(persistent_plan(first), persistent_plan(second), FIRST, SECOND)

    assert Arg(name=f"dev.{name}", kind="device", dtype="i64") in plan.args
    (launch,) = evaluate(plan, {"n": 1 << 30, f"dev.{name}": 148})
    assert launch.grid == (blocks, 1, 1)
    assert [v.inputs[f"dev.{name}"] for v in plan.vectors] == [getattr(FIRST, name), getattr(SECOND, name)]
    assert all(canonical_digest(evaluate(plan, v.inputs)) == v.sha256 for v in plan.vectors)


def test_equal_plans_need_no_device() -> None:
    """Host code that did not ask for the device keeps its plan."""
    assert with_device_inputs(persistent_plan(64), persistent_plan(64), FIRST, SECOND) == persistent_plan(64)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        pytest.param(persistent_plan(150), "is 143 on .* and 150 on .*; it is no multiple", id="unexplained constant"),
        pytest.param(persistent_plan(159, cubin="bb"), "give two cubins", id="another cubin"),
        pytest.param(small_plan(), "give two cubins|host code itself", id="other code"),
        pytest.param(replace(persistent_plan(159), launches=persistent_plan(159).launches * 2), "host code itself",
                     id="another launch"),
    ],
)  # fmt: skip
def test_unexplained_differences_are_refused(second: LaunchPlan, message: str) -> None:
    """V7: a constant or a structure that follows the build machine in an unknown way fails the build."""
    with pytest.raises(LaunchPlanError, match=message):
        with_device_inputs(persistent_plan(143), second, FIRST, SECOND)


def test_an_unknown_question_to_the_machine_is_refused() -> None:
    """The list of machine properties is closed: a new one would be baked in silently."""

    class HardwareInfo:
        def get_device_multiprocessor_count(self) -> int:
            return 1

        def get_l2_cache_size_in_bytes(self) -> int:
            return 1

        def get_clock_rate(self) -> int:
            return 1

    pretend(HardwareInfo, FIRST)

    assert HardwareInfo().get_device_multiprocessor_count() == 143
    assert HardwareInfo().get_l2_cache_size_in_bytes() == 52428815
    with pytest.raises(LaunchPlanError, match="asks the build machine for get_clock_rate"):
        HardwareInfo().get_clock_rate()
