"""Contract: the C evaluator computes what docs/formats.md, section 2, says, for every op, on every bit pattern.

Expected values come from fa4build's own evaluator (plan/evaluation.py), which shares no code with it; a few literal
rows guard against a misunderstanding that both share.
"""

import hashlib
import math
import struct

import pytest
from fa4_kernels import plan as encoding
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fa4build.plan import evaluation
from fa4build.plan import values as plan_values
from fa4build.plan.as_json import plan_from_json, plan_to_json
from tests.runtime.fake import Nodes, forward_plan, launch_template, make_plan

INTEGERS = ("i1", "i8", "i16", "i32", "i64")
FLOATS = ("f32", "f64")
BITS = encoding._TYPE_BITS


def evaluate_words(launcher, op, type_, operands, operand_types):
    """Result word of one op in C, for operands given as bit patterns."""
    n = Nodes()
    values = [constant(n, t, word) for t, word in zip(operand_types, operands, strict=True)]
    result = n(op, type_, *values)
    size = plan_values.TYPE_BYTES[plan_values.result_type((op, type_))]
    zero = n("const", "i32", 0)
    params = [{"kind": "bytes", "size": size, "align": 1, "fields": [[0, result]]}]
    document = make_plan(n, args=[], launches=[launch_template("k", [zero] * 3, params)])
    data = launcher.Plan(encoding.encode_plan(document)).evaluate({})
    return int.from_bytes(data[80:], "little")


def constant(n, type_, word):
    """A constant node with these bits."""
    if type_ in FLOATS:
        return n("const", type_, f"0x{word:0{BITS[type_] // 4}x}")
    return n("const", type_, evaluation.wrap(word, type_))


def expected_word(op, type_, operands, operand_types):
    values = tuple(
        evaluation.from_bytes(word.to_bytes(plan_values.TYPE_BYTES[t], "little"), t)
        for word, t in zip(operands, operand_types, strict=True)
    )
    result = evaluation.compute(op, type_, operand_types[0], values)
    return int.from_bytes(evaluation.to_bytes(result, plan_values.result_type((op, type_))), "little")


def words(type_):
    """Bit patterns of a type, the awkward ones often."""
    bits = BITS[type_]
    edges = [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, bits & ((1 << bits) - 1)]
    if type_ in FLOATS:
        numbers = (0.0, -0.0, 1.0, -1.5, 0.5, 2.0**31, -(2.0**31), 2.0**63, -(2.0**63), 1e30, math.inf, -math.inf)
        edges = [int.from_bytes(struct.pack("<f" if type_ == "f32" else "<d", x), "little") for x in numbers]
    return st.one_of(st.sampled_from(edges), st.integers(0, (1 << bits) - 1))


def is_nan(word, type_):
    exponent, mantissa = (8, 23) if type_ == "f32" else (11, 52)
    return type_ in FLOATS and (word & ((1 << (exponent + mantissa)) - 1)) > ((1 << exponent) - 1) << mantissa


SHAPES = (
    [(op, t, (t, t)) for op in sorted(plan_values.INT_BINARY | plan_values.INT_COMPARE) for t in INTEGERS]
    + [(op, t, (t, t)) for op in sorted(plan_values.FLOAT_BINARY | plan_values.FLOAT_COMPARE) for t in FLOATS]
    + [("select", t, ("i1", t, t)) for t in INTEGERS + FLOATS]
    + [(op, b, (a,)) for op in ("sext", "zext") for a in INTEGERS for b in INTEGERS if BITS[a] < BITS[b]]
    + [("trunc", b, (a,)) for a in INTEGERS for b in INTEGERS if BITS[a] > BITS[b]]
    + [("fptrunc", "f32", ("f64",)), ("fpext", "f64", ("f32",))]
    + [(op, b, (a,)) for op in ("sitofp", "uitofp") for a in INTEGERS for b in FLOATS]
    + [("fptosi", b, (a,)) for a in FLOATS for b in INTEGERS]
    + [("bitcast", "f32", ("i32",)), ("bitcast", "i32", ("f32",)), ("bitcast", "f64", ("i64",))]
    + [("bitcast", "i64", ("f64",))]
    + [("clog2", "i32", (t,)) for t in INTEGERS]
    + [("ctlz", t, (t,)) for t in INTEGERS]
)


def test_every_op_is_covered_below():
    """The table of shapes names every op of the format, and the runtime's table is the format's."""
    ops = {op for op, _, _ in SHAPES} | {"in", "const"}

    assert ops == set(plan_values.OPERAND_COUNT) == set(encoding.OPS)


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_every_op_equals_the_reference(launcher, data):
    """Any op, any type, any bits: the same bits come out; a NaN is only compared as a NaN."""
    op, type_, operand_types = data.draw(st.sampled_from(SHAPES))
    operands = [data.draw(words(t)) for t in operand_types]
    actual = evaluate_words(launcher, op, type_, operands, operand_types)
    expected = expected_word(op, type_, operands, operand_types)

    if is_nan(expected, plan_values.result_type((op, type_))):
        assert is_nan(actual, type_)
    else:
        assert expected == actual


@pytest.mark.parametrize(
    ("op", "type_", "operand_types", "operands", "expected"),
    [
        pytest.param("udiv", "i32", ("i32", "i32"), (7, 0), 0, id="division by zero is 0"),
        pytest.param("sdiv", "i64", ("i64", "i64"), (1 << 63, (1 << 64) - 1), 1 << 63, id="minimum / -1 wraps"),
        pytest.param("srem", "i8", ("i8", "i8"), (0xF9, 3), 0xFF, id="-7 srem 3 = -1"),
        pytest.param("shl", "i32", ("i32", "i32"), (1, 32), 0, id="shift by the width is 0"),
        pytest.param("ashr", "i16", ("i16", "i16"), (0x8000, 99), 0xFFFF, id="ashr past the width is the sign"),
        pytest.param("slt", "i1", ("i1", "i1"), (1, 0), 1, id="a true i1 is -1 to a signed comparison"),
        pytest.param("sext", "i32", ("i1",), (1,), 0xFFFFFFFF, id="sext of true is -1"),
        pytest.param("clog2", "i32", ("i64",), (129,), 8, id="2^8 is the first power not below 129"),
        pytest.param("clog2", "i32", ("i64",), (128,), 7, id="2^7 = 128"),
        pytest.param("ctlz", "i32", ("i32",), (0,), 32, id="ctlz of 0 is the width"),
        pytest.param("fptosi", "i32", ("f32",), (0x4F000000,), 0, id="2^31 does not fit i32: 0"),
        pytest.param("fptosi", "i32", ("f32",), (0xCF000000,), 0x80000000, id="-2^31 fits i32"),
        pytest.param("fmin", "f32", ("f32", "f32"), (0x7FC00000, 0x3F800000), 0x3F800000, id="a number beats NaN"),
        # 16777219 lies between 16777218 and 16777220 (spacing 2 from 2^24 on): a tie, to the even mantissa 0x800002.
        pytest.param("sitofp", "f32", ("i32",), (16777219,), 0x4B800002, id="ties go to even"),
    ],
)
def test_values_the_format_fixes(launcher, op, type_, operand_types, operands, expected):
    """The sentences of docs/formats.md about the odd cases."""
    assert evaluate_words(launcher, op, type_, operands, operand_types) == expected


def forward_inputs(draw_int):
    """A value for every leaf of `forward_plan`."""
    names = ["q.ptr", "out.ptr", "lse.ptr", "q.stride[0]", "q.stride[1]", "q.stride[2]", "k.shape[1]"]
    names += [f"q.shape[{i}]" for i in range(4)]
    inputs = {name: draw_int(-(1 << 63), (1 << 63) - 1) for name in names}
    inputs |= {name: draw_int(-(1 << 31), (1 << 31) - 1) for name in ("window_left", "window_right", "num_sms")}
    return inputs


@settings(max_examples=200, deadline=None)
@given(data=st.data(), scale=st.floats(width=32, allow_nan=False))
@example(data=None, scale=0.125)
def test_a_whole_plan_has_the_reference_digest(launcher, data, scale):
    """Grid, parameter bytes, tensor maps: canonical bytes hash to what fa4build's evaluator says, and so do guards."""
    document = forward_plan("k")
    reference = plan_from_json(encode_json(document))
    if data is None:
        inputs = forward_inputs(lambda low, high: 1)
    else:
        inputs = forward_inputs(lambda low, high: data.draw(st.integers(low, high)))
    inputs["softmax_scale"] = scale
    compiled = launcher.Plan(encoding.encode_plan(document))

    digest = hashlib.sha256(compiled.evaluate(inputs)).hexdigest()

    assert digest == evaluation.canonical_digest(evaluation.evaluate(reference, inputs))
    assert compiled.failed_guard(inputs) == evaluation.failed_guard(reference, inputs)


def encode_json(document):
    import json

    return json.dumps(document)


def test_plans_written_by_the_builder_are_read(launcher):
    """What `plan_to_json` writes is what `parse_plan` reads."""
    text = plan_to_json(plan_from_json(encode_json(forward_plan("k"))))
    inputs = forward_inputs(lambda low, high: 5) | {"softmax_scale": 1.0}

    actual = launcher.Plan(encoding.encode_plan(encoding.parse_plan(text))).evaluate(inputs)

    assert actual == launcher.Plan(encoding.encode_plan(forward_plan("k"))).evaluate(inputs)


def test_a_missing_leaf_is_named(launcher):
    """`evaluate` does not guess."""
    inputs = forward_inputs(lambda low, high: 5)

    with pytest.raises(ValueError, match=r"input leaf softmax_scale is missing"):
        launcher.Plan(encoding.encode_plan(forward_plan("k"))).evaluate(inputs)
