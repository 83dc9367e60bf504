"""Contract of the native engine's instructions: each gives the bits of the Python engine, in whole warps and parts.

One line a test: what it computes from %r1, %r2, %r3 goes to %r9 (and %r10). NaN payloads differ: the native engine
has the canonical NaN of PTX.
"""

import pytest

from fa4build.simulate.native import program  # noqa: F401  registers the decoding rules
from fa4build.simulate.native.coder import operations, rule_of
from fa4build.simulate.ptx.control_flow import BRANCHES, EXITS
from fa4build.simulate.ptx.parser import parse_module
from tests.simulate.mutations.kernels import NAMES, kept
from tests.simulate.native.engine_pair import Values, assert_equal, both
from tests.simulate.ptx_snippets import result

TO_64 = "mov.b64 %rd10, {%r1, %r2}; mov.b64 %rd11, {%r3, %r1};"
FROM_64 = "mov.b64 {%r9, %r10}, %rd12;"
TO_16 = "cvt.u16.u32 %rs1, %r1; cvt.u16.u32 %rs2, %r2; cvt.u16.u32 %rs3, %r3;"
FROM_16 = "cvt.u32.u16 %r9, %rs9;"

INTEGERS_32 = [
    *(f"{op}.{t} %r9, %r1, %r2;" for op in ("add", "sub", "mul.lo") for t in ("s32", "u32")),
    *(f"{op}.{t} %r9, %r1, %r2;" for op in ("min", "max", "mul.hi") for t in ("s32", "u32")),
    "mad.lo.s32 %r9, %r1, %r2, %r3;",
    *(f"or.b32 %r4, %r2, 1; {op}.{t} %r9, %r1, %r4;" for op in ("div", "rem") for t in ("s32", "u32")),
    *(f"{op}.relu.s32 %r9, %r1, %r2;" for op in ("min", "max")),
    *(f"{op}.b32 %r9, %r1, %r2;" for op in ("and", "or", "xor")),
    *(f"and.b32 %r4, %r2, 127; {op} %r9, %r1, %r4;" for op in ("shl.b32", "shr.u32", "shr.s32")),
    *(f"{op} %r9, %r1, 40;" for op in ("shl.b32", "shr.u32", "shr.s32")),
    *(f"{op} %r9, %r1;" for op in ("neg.s32", "abs.s32", "not.b32", "popc.b32", "clz.b32", "brev.b32")),
    *(f"lop3.b32 %r9, %r1, %r2, %r3, {table};" for table in (0, 0x96, 0xE8, 0xC0, 0xFF)),
    "prmt.b32 %r9, %r1, %r2, %r3;",
    *(f"shf.{side}.{mode}.b32 %r9, %r1, %r2, %r3;" for side in "lr" for mode in ("wrap", "clamp")),
    *(f"bfe.{t} %r9, %r1, %r2, %r3;" for t in ("u32", "s32")),
    "bfi.b32 %r9, %r1, %r2, 5, 9;",
    "bfi.b32 %r9, %r1, %r2, %r3, %r1;",
    *(
        f"setp.{c}.{t} %p2, %r1, %r2; selp.b32 %r9, 7, %r3, %p2;"
        for c in ("eq", "ne", "lt", "le", "gt", "ge")
        for t in ("s32", "u32")
    ),
    *(f"setp.{c}.u32 %p2, %r1, %r2; selp.b32 %r9, 7, 9, %p2;" for c in ("lo", "ls", "hi", "hs")),
    "setp.lt.s32 %p2, %r1, %r2; setp.gt.u32 %p3, %r1, 5; xor.pred %p4, %p2, %p3; not.pred %p5, %p4;"
    "and.pred %p6, %p5, %p3; or.pred %p6, %p6, %p2; selp.b32 %r9, 1, 2, %p6;",
    "mapa.shared::cluster.u32 %r9, %r1, 3;",
]
INTEGERS_64 = [
    *(f"{op}.{t} %rd12, %rd10, %rd11;" for op in ("add", "sub", "mul.lo", "min", "max") for t in ("s64", "u64")),
    "mad.lo.s64 %rd12, %rd10, %rd11, %rd10;",
    *(f"or.b64 %rd13, %rd11, 1; {op}.{t} %rd12, %rd10, %rd13;" for op in ("div", "rem") for t in ("s64", "u64")),
    "mul.hi.u64 %rd12, %rd10, %rd11;",
    *(f"{op}.{t} %rd12, %r1, %r2;" for op in ("mul.wide",) for t in ("s32", "u32")),
    *(f"mad.wide.{t} %rd12, %r1, %r2, %rd11;" for t in ("s32", "u32")),
    *(f"{op}.b64 %rd12, %rd10, %rd11;" for op in ("and", "or", "xor")),
    *(f"and.b32 %r4, %r2, 127; {op} %rd12, %rd10, %r4;" for op in ("shl.b64", "shr.u64", "shr.s64")),
    *(f"{op} %rd12, %rd10;" for op in ("neg.s64", "abs.s64", "not.b64", "mov.b64")),
    *(
        f"setp.{c}.{t} %p2, %rd10, %rd11; selp.b64 %rd12, %rd10, 5, %p2;"
        for c in ("eq", "lt", "ge")
        for t in ("s64", "u64")
    ),
    "cvt.u64.u32 %rd12, %r1;",
    "cvt.s64.s32 %rd12, %r1;",
    "cvt.u32.u64 %r4, %rd10; cvt.u64.u32 %rd12, %r4;",
    "mov.b64 {%rs1, %rs2, %rs3, %rs4}, %rd10; mov.b64 %rd12, {%rs4, %rs3, %rs2, %rs1};",
    "mov.b128 %q1, {%rd10, %rd11}; mov.b128 {%rd13, %rd12}, %q1;",
]
INTEGERS_16 = [
    *(f"{op}.{t} %rs9, %rs1, %rs2;" for op in ("add", "sub", "mul.lo", "min", "max") for t in ("s16", "u16")),
    *(f"or.b16 %rs4, %rs2, 1; {op}.{t} %rs9, %rs1, %rs4;" for op in ("div", "rem") for t in ("s16", "u16")),
    *(f"{op}.b16 %rs9, %rs1, %rs2;" for op in ("and", "or", "xor")),
    *(f"{op} %rs9, %rs1, 3;" for op in ("shl.b16", "shr.u16", "shr.s16")),
    *(f"{op} %rs9, %rs1;" for op in ("neg.s16", "abs.s16", "not.b16", "mov.b16")),
    *(f"setp.{c}.{t} %p2, %rs1, %rs2; selp.b16 %rs9, %rs3, %rs1, %p2;" for c in ("lt", "ge") for t in ("s16", "u16")),
    *(f"mul.wide.{t} %r4, %rs1, %rs2; cvt.u16.u32 %rs9, %r4;" for t in ("s16", "u16")),
    *(f"cvt.{to}.{of} %r9, %rs1; cvt.u16.u32 %rs9, %r9;" for to in ("s32", "u32") for of in ("s8", "u8", "s16", "u16")),
]
FLOATS = [
    *(f"{op}.f32 %r9, %r1, %r2;" for op in ("add", "sub", "mul", "div.rn", "div.full", "max", "min", "copysign")),
    *(f"{op}.{r}.f32 %r9, %r1, %r2;" for op in ("add", "sub", "mul") for r in ("rn", "rz", "rm", "rp")),
    *(f"{op}.ftz.f32 %r9, %r1, %r2;" for op in ("add", "sub", "mul", "max", "min", "div.rn")),
    *(f"fma.{r}.f32 %r9, %r1, %r2, %r3;" for r in ("rn", "rz", "rm", "rp", "rn.ftz")),
    "mul.f32 %r4, %r1, %r2; add.f32 %r9, %r4, %r3;",
    "mul.f32 %r4, %r1, %r2; sub.f32 %r9, %r4, %r3;",
    "mul.f32 %r4, %r1, %r2; sub.f32 %r9, %r3, %r4;",
    "max.f32 %r9, %r1, %r2, %r3;",
    *(f"{op}.f32 %r9, %r1;" for op in ("neg", "abs", "rcp.rn", "ex2.approx.ftz", "ex2.approx", "rcp.approx.ftz")),
    *(f"abs.f32 %r4, %r1; {op}.f32 %r9, %r4;" for op in ("sqrt.rn", "lg2.approx.ftz", "rsqrt.approx.ftz")),
    *(
        f"setp.{c}.f32 %p2, %r1, %r2; selp.f32 %r9, %r1, %r3, %p2;"
        for c in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "nan", "num")
    ),
    *(f"cvt.{m}.{t}.f32 %r9, %r1;" for m in ("rzi", "rni", "rmi", "rpi") for t in ("s32", "u32", "f32")),
    *(f"cvt.rn.f32.{t} %r9, %r1;" for t in ("s32", "u32")),
    *(f"cvt.rn.{t}x2.f32 %r9, %r1, %r2;" for t in ("bf16", "f16")),
    *(f"cvt.rn.{t}.f32 %rs1, %r1; cvt.f32.{t} %r9, %rs1;" for t in ("bf16", "f16")),
    *(f"cvt.rn.satfinite.{t}x2.f32 %rs1, %r1, %r2; cvt.u32.u16 %r9, %rs1;" for t in ("e4m3", "e5m2")),
    "cvt.rn.bf16.f32 %rs1, %r1; cvt.rn.bf16.f32 %rs2, %r2; fma.rn.f32.bf16 %r9, %rs1, %rs2, %r3;",
]
PAIRS = [
    *(f"{op}.rn.f32x2 %rd12, %rd10, %rd11;" for op in ("add", "sub", "mul")),
    "fma.rn.f32x2 %rd12, %rd10, %rd11, %rd10;",
    "add.rm.ftz.f32x2 %rd12, %rd10, %rd11;",
]
WARP = [
    *(f"shfl.sync.{mode}.b32 %r9|%p2, %r1, {by}, 31, -1; selp.b32 %r10, 1, 0, %p2;"
      for mode in ("up", "down", "bfly", "idx") for by in (1, 5, 31)),
    "shfl.sync.down.b32 %r9, %r1, 3, 0x1c1f, -1;",
    "and.b32 %r4, %r2, 31; shfl.sync.idx.b32 %r9, %r1, %r4, 31, -1;",
    "setp.lt.s32 %p2, %r1, %r2; vote.sync.ballot.b32 %r9, %p2, -1;",
    *(f"setp.lt.s32 %p2, %r1, %r2; vote.sync.{m}.pred %p3, %p2, -1; selp.b32 %r9, 1, 0, %p3;"
      for m in ("any", "all", "uni")),
    "redux.sync.add.u32 %r9, %r1, -1;",
    *(f"redux.sync.{op}.{t} %r9, %r1, -1;" for op in ("min", "max") for t in ("u32", "s32")),
    *(f"redux.sync.{op}.b32 %r9, %r1, -1;" for op in ("and", "or", "xor")),
    "elect.sync %r9|%p2, -1; selp.b32 %r10, 1, 0, %p2;",
    "activemask.b32 %r9;",
    "mov.u32 %r9, %laneid; mov.u32 %r10, %lanemask_ge;",
    "mov.u32 %r9, %lanemask_lt; mov.u32 %r10, %ntid.x;",
]  # fmt: skip


def _cases():
    for kind, lines in (("words", INTEGERS_32), ("floats", FLOATS)):
        yield from (pytest.param(kind, line, id=line) for line in lines)
    for kind, lines in (("words", INTEGERS_64), ("floats", PAIRS)):
        yield from (pytest.param(kind, f"{TO_64} {line} {FROM_64}", id=line) for line in lines)
    yield from (pytest.param("words", f"{TO_16} {line} {FROM_16}", id=line) for line in INTEGERS_16)
    yield from (pytest.param("words", line, id=line) for line in WARP)


@pytest.mark.parametrize(("kind", "line"), list(_cases()))
def test_an_instruction_gives_the_same_bits_in_both_engines(kind, line, monkeypatch):
    """64 threads of edges and random operands."""
    draw = getattr(Values(), kind)
    body = f"mov.b32 %r9, 0; mov.b32 %r10, 0; {line} {result(0, '%r9')} {result(1, '%r10')}"

    outcome = assert_equal(body, *(draw(64) for _ in range(3)), threads=64, words=2, monkeypatch=monkeypatch)

    assert outcome.error == ""


GUARDED = ("add.s32 %r9, %r1, %r2;", "mul.wide.u32 %rd12, %r1, %r2;", "setp.lt.s32 %p2, %r1, 5;")


@pytest.mark.parametrize("guard", ["@%p1", "@!%p1"])
@pytest.mark.parametrize(
    "line", ["add.s32 %r9, %r1, %r2;", "mul.wide.u32 %rd12, %r1, %r2;", "setp.lt.s32 %p2, %r1, 5;"]
)
def test_a_guarded_instruction_leaves_the_other_lanes_alone(guard, line, monkeypatch):
    """Lanes outside the mask keep what the register held."""
    body = (
        "and.b32 %r4, %r1, 1; setp.eq.s32 %p1, %r4, 0; mov.b32 %r9, 77; mov.b64 %rd12, 99; setp.eq.s32 %p2, %r0, 3;"
        f"{guard} {line} cvt.u32.u64 %r10, %rd12; selp.b32 %r11, 1, 0, %p2; {result(0, '%r9')}{result(1, '%r10')}"
        f"{result(2, '%r11')}"
    )

    outcome = assert_equal(body, *(Values().words(32) for _ in range(2)), words=3, monkeypatch=monkeypatch)

    assert outcome.error == ""


def test_every_operation_has_a_number_and_a_handler():
    """The C table and the decoding rules are made from one list."""
    numbers = operations()

    assert list(numbers.values()) == list(range(len(numbers)))


@pytest.mark.parametrize("kernel", NAMES)
def test_every_opcode_of_a_kernel_has_a_rule_in_the_native_engine(kernel):
    """What the Python engine runs, the native one runs."""
    (function,) = parse_module(kept(kernel).ptx).entries.values()

    assert not {i.opcode for i in function.instructions if rule_of(i.opcode) is None} - BRANCHES - EXITS


def test_an_opcode_that_the_simulator_does_not_know_is_the_same_error(monkeypatch):
    """Before anything runs."""
    outcome = assert_equal("frobnicate.b32 %r9, %r1;", monkeypatch=monkeypatch)

    assert "is not in the simulator's table" in outcome.error


def test_a_register_of_another_width_is_an_error_where_it_is_executed(monkeypatch):
    """As in the Python engine: told with the line, and not before."""
    skipped = "setp.eq.s32 %p1, %r0, 99; @%p1 bra WRONG; bra.uni OUT; WRONG: add.s32 %r9, %rd2, 1; OUT:"

    assert assert_equal(skipped, monkeypatch=monkeypatch).error == ""
    _, native = both("add.s32 %r9, %rd2, 1;", monkeypatch=monkeypatch)
    assert "cannot translate 'add.s32 %r9, %rd2, 1': a 64-bit register is used as u32" in native.error
