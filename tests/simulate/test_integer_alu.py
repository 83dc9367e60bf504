"""Integer instructions against hand-derived values. Integers wrap; shifts clamp; division truncates toward zero."""

import pytest

from fa4build.errors import SimulationError
from tests.simulate.ptx_snippets import lane0, result

MINUS_7 = 0xFFFFFFF9


@pytest.mark.parametrize(
    ("instruction", "a", "b", "expected"),
    [
        ("add.s32 %r9, %r1, %r2;", 0xFFFFFFFF, 2, 1),
        ("sub.u32 %r9, %r1, %r2;", 1, 2, 0xFFFFFFFF),
        ("mul.lo.s32 %r9, %r1, %r2;", 0x10000, 0x10001, 0x10000),
        # 0x66666667 * 100 = 0x28_0000003C: the division by 5 of compilers, before its shift
        ("mul.hi.s32 %r9, %r1, %r2;", 0x66666667, 100, 40),
        ("mul.hi.s32 %r9, %r1, %r2;", 0xFFFFFFFF, 5, 0xFFFFFFFF),
        ("mul.hi.u32 %r9, %r1, %r2;", 0xFFFFFFFF, 5, 4),
        ("mad.lo.s32 %r9, %r1, %r2, 3;", 5, 7, 38),
        ("div.s32 %r9, %r1, %r2;", MINUS_7, 2, 0xFFFFFFFD),
        ("rem.s32 %r9, %r1, %r2;", MINUS_7, 2, 0xFFFFFFFF),
        ("div.u32 %r9, %r1, %r2;", MINUS_7, 2, 0x7FFFFFFC),
        ("min.s32 %r9, %r1, %r2;", MINUS_7, 3, MINUS_7),
        ("min.u32 %r9, %r1, %r2;", MINUS_7, 3, 3),
        ("max.s32 %r9, %r1, %r2;", MINUS_7, 3, 3),
        ("max.relu.s32 %r9, %r1, %r2;", MINUS_7, 0xFFFFFFFE, 0),
        ("neg.s32 %r9, %r1;", 7, 0, MINUS_7),
        ("abs.s32 %r9, %r1;", MINUS_7, 0, 7),
        ("not.b32 %r9, %r1;", 0x0F0F0F0F, 0, 0xF0F0F0F0),
        ("and.b32 %r9, %r1, -16777217;", 0x01000408, 0, 0x00000408),
        ("xor.b32 %r9, %r1, %r2;", 0b1100, 0b1010, 0b0110),
        ("or.b32 %r9, %r1, %r2;", 0b1100, 0b1010, 0b1110),
        ("shl.b32 %r9, %r1, %r2;", 3, 4, 48),
        ("shl.b32 %r9, %r1, %r2;", 3, 32, 0),
        ("shr.u32 %r9, %r1, %r2;", 0x80000000, 31, 1),
        ("shr.u32 %r9, %r1, %r2;", 0x80000000, 40, 0),
        ("shr.s32 %r9, %r1, %r2;", 0x80000000, 40, 0xFFFFFFFF),
        ("shr.s32 %r9, %r1, 4;", 0x80000000, 0, 0xF8000000),
        ("popc.b32 %r9, %r1;", 0xF00F0001, 0, 9),
        ("clz.b32 %r9, %r1;", 0x00010000, 0, 15),
        ("brev.b32 %r9, %r1;", 0x00000003, 0, 0xC0000000),
        ("lop3.b32 %r9, %r1, %r2, 0, 0x3C;", 0b1100, 0b1010, 0b0110),  # table 0x3C = a xor b
        ("prmt.b32 %r9, %r1, %r2, 0x5410;", 0x44332211, 0x88776655, 0x66552211),
        ("prmt.b32 %r9, %r1, %r2, 0x0008;", 0x44332280, 0, 0x808080FF),  # nibble 8: sign of byte 0
        ("shf.l.wrap.b32 %r9, %r1, %r2, 8;", 0xAABBCCDD, 0x11223344, 0x223344AA),
        ("shf.r.wrap.b32 %r9, %r1, %r2, 8;", 0xAABBCCDD, 0x11223344, 0x44AABBCC),
        ("bfe.u32 %r9, %r1, 4, 8;", 0x00000AB0, 0, 0xAB),
        ("bfe.s32 %r9, %r1, 4, 8;", 0x00000AB0, 0, 0xFFFFFFAB),
        ("bfi.b32 %r9, %r1, %r2, 8, 4;", 0xF, 0, 0xF00),
    ],
)
def test_32_bit_instruction(instruction, a, b, expected):
    """One instruction on known words."""
    assert lane0(instruction + result(0, "%r9"), a, b) == [expected]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # -3 * 5 in 64 bits
        ("mul.wide.s32 %rd9, %r1, 5;", 0xFFFFFFFF_FFFFFFF1),
        ("mul.wide.u32 %rd9, %r1, 5;", 0x4_FFFFFFF1),
        ("cvt.s64.s32 %rd8, %r1; add.s64 %rd9, %rd8, 10;", 7),
        ("cvt.u64.u32 %rd8, %r1; shl.b64 %rd9, %rd8, 8;", 0xFF_FFFFFD00),
        ("cvt.s64.s32 %rd8, %r1; shr.s64 %rd9, %rd8, 1;", 0xFFFFFFFF_FFFFFFFE),
        ("mov.b64 %rd8, 4294967297; mul.lo.s64 %rd9, %rd8, %rd8;", 0x2_00000001),
        ("mov.b64 %rd8, 100; div.u64 %rd9, %rd8, 7;", 14),
        ("mov.b64 %rd8, -5; min.s64 %rd9, %rd8, 3;", 0xFFFFFFFF_FFFFFFFB),
    ],
)
def test_64_bit_instruction(body, expected):
    """64-bit results, with %r1 = -3; checked as two words."""
    words = lane0(body + "mov.b64 {%r20, %r21}, %rd9;" + result(0, "%r20") + result(1, "%r21"), 0xFFFFFFFD, words=2)

    assert words[1] << 32 | words[0] == expected


def test_16_bit_arithmetic_wraps_and_widens():
    """u16 wraps at 65536; mul.wide.s16 gives 32 bits with sign."""
    body = (
        "mov.b16 %rs1, 65535; mov.b16 %rs2, 3; add.s16 %rs3, %rs1, %rs2; cvt.u32.u16 %r9, %rs3;"
        + result(0, "%r9")
        + "mul.wide.s16 %r10, %rs1, -7;"
        + result(1, "%r10")
        + "shr.s16 %rs4, %rs1, 3; cvt.s32.s16 %r11, %rs4;"
        + result(2, "%r11")
    )

    assert lane0(body, words=3) == [2, 7, 0xFFFFFFFF]


@pytest.mark.parametrize(
    ("compare", "a", "b", "expected"),
    [
        ("lt.s32", MINUS_7, 3, 1),
        ("lt.u32", MINUS_7, 3, 0),
        ("ge.s32", 3, 3, 1),
        ("ne.b32", 3, 3, 0),
        ("eq.b32", 3, 3, 1),
        ("gt.u32", MINUS_7, 3, 1),
        ("le.s32", 4, 3, 0),
        ("hi.u32", MINUS_7, 3, 1),
    ],
)
def test_compare_and_select(compare, a, b, expected):
    """setp and selp, signed and unsigned."""
    assert lane0(f"setp.{compare} %p1, %r1, %r2; selp.b32 %r9, 1, 0, %p1;" + result(0, "%r9"), a, b) == [expected]


def test_predicate_logic():
    """and, or, xor, not and mov on predicates."""
    body = (
        "setp.eq.s32 %p1, %r1, 1; setp.eq.s32 %p2, %r1, 2; or.pred %p3, %p1, %p2; and.pred %p4, %p1, %p2;"
        "not.pred %p5, %p4; xor.pred %p6, %p3, %p5; mov.pred %p7, %p3; mov.pred %p8, 0;"
        + "".join(f"selp.b32 %r{20 + k}, 1, 0, %p{k};" + result(k - 3, f"%r{20 + k}") for k in range(3, 9))
    )

    assert lane0(body, 1, words=6) == [1, 0, 1, 0, 1, 0]


def test_division_by_zero_is_an_error():
    """The hardware gives an unspecified value; here it is a fault with the line."""
    with pytest.raises(SimulationError, match=r"PTX line \d+ `div\.s32.*division by zero in 32 lanes"):
        lane0("div.s32 %r9, %r1, %r2;", 1, 0)


def test_guarded_instruction_keeps_the_old_value_elsewhere():
    """Lanes where the guard is false keep the destination."""
    body = "mov.b32 %r9, 5; setp.eq.s32 %p1, %r1, 1; @%p1 mov.b32 %r9, 6; @!%p1 add.s32 %r9, %r9, 10;" + result(
        0, "%r9"
    )

    assert lane0(body, 1) == [6]
    assert lane0(body, 2) == [15]
