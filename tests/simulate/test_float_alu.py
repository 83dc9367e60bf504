"""f32 and packed f32x2 instructions: one rounding, PTX's NaN and zero rules, contraction as ptxas does it."""

import numpy as np
import pytest

from tests.simulate.ptx_snippets import lane0, result, run

ONE, TWO, THREE, HALF = 0x3F800000, 0x40000000, 0x40400000, 0x3F000000
NAN, INF, MINUS_ZERO, TINY = 0x7FC00000, 0x7F800000, 0x80000000, 0x00000001


@pytest.mark.parametrize(
    ("instruction", "a", "b", "expected"),
    [
        ("add.f32 %r9, %r1, %r2;", ONE, TWO, THREE),
        ("sub.f32 %r9, %r1, %r2;", ONE, TWO, 0xBF800000),
        ("mul.f32 %r9, %r1, %r2;", THREE, HALF, 0x3FC00000),
        # 1 + 2^-24 is a tie: nearest even stays 1, up gives the next float, down stays
        ("add.rn.f32 %r9, %r1, %r2;", ONE, 0x33800000, ONE),
        ("add.rp.f32 %r9, %r1, %r2;", ONE, 0x33800000, 0x3F800001),
        ("add.rm.f32 %r9, %r1, %r2;", ONE, 0x33800000, ONE),
        ("sub.rm.f32 %r9, %r1, %r2;", ONE, 0x33800000, 0x3F7FFFFF),
        ("sub.rz.f32 %r9, %r1, %r2;", ONE, 0x33000000, 0x3F7FFFFF),
        ("mul.f32 %r9, %r1, %r2;", TINY, HALF, 0),
        ("add.f32 %r9, %r1, %r2;", TINY, TINY, 2),
        ("add.ftz.f32 %r9, %r1, %r2;", TINY, TINY, 0),
        ("max.f32 %r9, %r1, %r2;", NAN, ONE, ONE),
        ("max.f32 %r9, %r1, %r2;", 0, MINUS_ZERO, 0),
        ("max.f32 %r9, %r1, %r2;", MINUS_ZERO, 0, 0),
        ("min.f32 %r9, %r1, %r2;", 0, MINUS_ZERO, MINUS_ZERO),
        ("max.f32 %r9, %r1, %r2, 0f40A00000;", ONE, TWO, 0x40A00000),
        ("neg.f32 %r9, %r1;", ONE, 0, 0xBF800000),
        ("abs.f32 %r9, %r1;", 0xBF800000, 0, ONE),
        ("rcp.rn.f32 %r9, %r1;", TWO, 0, HALF),
        ("div.rn.f32 %r9, %r1, %r2;", ONE, THREE, 0x3EAAAAAB),
        ("sqrt.rn.f32 %r9, %r1;", 0x40800000, 0, TWO),
        ("ex2.approx.ftz.f32 %r9, %r1;", THREE, 0, 0x41000000),
        ("ex2.approx.ftz.f32 %r9, %r1;", 0xFF800000, 0, 0),
        ("lg2.approx.ftz.f32 %r9, %r1;", 0x41000000, 0, THREE),
        ("rcp.approx.ftz.f32 %r9, %r1;", TWO, 0, HALF),
    ],
)
def test_f32_instruction(instruction, a, b, expected):
    """One instruction on known bit patterns."""
    assert lane0(instruction + result(0, "%r9"), a, b) == [expected]


def test_fma_rounds_once():
    """(1 + 2^-12)^2 - (1 + 2^-11) = 2^-24 exactly: a product rounded first would give 0."""
    body = "fma.rn.f32 %r9, %r1, %r1, %r2;" + result(0, "%r9")

    assert lane0(body, 0x3F800800, 0xBF801000) == [0x33800000]


def test_fma_is_right_where_float64_rounds_twice():
    """(1 + 2^-23)(1 - 2^-23) + (2^24 + 2) = 2^24 + 3 - 2^-46 lies just below a tie; float64 loses the 2^-46 and
    would round up.
    """
    body = "fma.rn.f32 %r9, %r1, %r2, %r3;" + result(0, "%r9")

    assert lane0(body, 0x3F800001, 0x3F7FFFFE, 0x4B800001) == [0x4B800001]


@pytest.mark.parametrize(
    ("sum_instruction", "expected"),
    [
        # x*x with x = 1 + 2^-12: exact 1 + 2^-11 + 2^-24; minus (1 + 2^-11)
        pytest.param("sub.f32 %r9, %r8, %r2;", 0x33800000, id="contracted"),
        pytest.param("sub.f32 %r9, %r2, %r8;", 0xB3800000, id="contracted-reversed"),
        pytest.param("sub.rn.f32 %r9, %r8, %r2;", 0, id="explicit-rounding-is-kept"),
    ],
)
def test_single_use_product_is_contracted(sum_instruction, expected):
    """ptxas turns a single-use mul.f32 and the add or sub that reads it into one FFMA, unless .rn is written."""
    assert lane0("mul.f32 %r8, %r1, %r1;" + sum_instruction + result(0, "%r9"), 0x3F800800, 0x3F801000) == [expected]


def test_product_with_two_uses_is_not_contracted():
    """Both uses see the rounded product."""
    body = "mul.f32 %r8, %r1, %r1; sub.f32 %r9, %r8, %r2;" + result(0, "%r9") + result(1, "%r8")

    assert lane0(body, 0x3F800800, 0x3F801000, words=2) == [0, 0x3F801000]


def test_product_is_contracted_across_a_barrier_of_the_same_block():
    """The factors live until the sum, also when a barrier stands between the two."""
    body = "mov.b32 %r7, %r1; mul.f32 %r8, %r7, %r7; bar.sync 0; sub.f32 %r9, %r8, %r2;" + result(0, "%r9")

    assert lane0(body, 0x3F800800, 0x3F801000) == [0x33800000]


def test_contraction_can_be_switched_off():
    """`contract=False` rounds every instruction."""
    body = "mul.f32 %r8, %r1, %r1; sub.f32 %r9, %r8, %r2;" + result(0, "%r9")

    assert lane0(body, 0x3F800800, 0x3F801000, contract=False) == [0]


def test_packed_halves_are_independent():
    """f32x2: low word first; each half has its own result and rounding."""
    body = (
        "mov.b64 %rd8, {%r1, %r2}; mov.b64 %rd9, {%r2, %r2};"
        "add.rn.f32x2 %rd10, %rd8, %rd9; mul.rn.f32x2 %rd11, %rd8, %rd9; fma.rn.f32x2 %rd12, %rd8, %rd9, %rd9;"
        "add.rm.f32x2 %rd13, %rd8, %rd9;"
        + "".join(
            f"mov.b64 {{%r{20 + 2 * k}, %r{21 + 2 * k}}}, %rd{10 + k};"
            + result(2 * k, f"%r{20 + 2 * k}")
            + result(2 * k + 1, f"%r{21 + 2 * k}")
            for k in range(4)
        )
    )
    expected = [0x40400000, 0x40800000, TWO, 0x40800000, 0x40800000, 0x40C00000, 0x40400000, 0x40800000]

    assert lane0(body, ONE, TWO, words=8, target="sm_100a") == expected


def test_exp2_emulation_on_fma_units_is_reproducible():
    """The range reduction x + 12582912 rounded down leaves floor(x) in the low bits: x = 2.75 gives 2."""
    body = (
        "mov.b64 %rd8, {%r1, %r1}; mov.b64 %rd9, {%r2, %r2}; add.rm.f32x2 %rd10, %rd8, %rd9; mov.b64 {%r20, "
        "%r21}, %rd10;" + result(0, "%r20")
    )

    assert lane0(body, 0x40300000, 0x4B400000) == [0x4B400002]
    assert lane0(body, 0xC0300000, 0x4B400000) == [0x4B3FFFFD]  # floor(-2.75) = -3


@pytest.mark.parametrize(
    ("compare", "a", "b", "expected"),
    [
        ("eq", NAN, NAN, 0), ("equ", NAN, NAN, 1), ("ne", NAN, ONE, 0), ("neu", NAN, ONE, 1), ("lt", ONE, TWO, 1),
        ("ltu", NAN, TWO, 1),
        ("leu", TWO, ONE, 0), ("geu", ONE, TWO, 0), ("gtu", TWO, ONE, 1), ("nan", NAN, ONE, 1), ("num", ONE, TWO, 1),
        ("ne", ONE, TWO, 1),
        ("eq", 0, MINUS_ZERO, 1), ("equ", ONE, TWO, 0),
    ],
)  # fmt: skip
def test_float_compare(compare, a, b, expected):
    """Ordered compares are false on NaN (also `ne`), unordered ones true."""
    assert lane0(f"setp.{compare}.f32 %p1, %r1, %r2; selp.b32 %r9, 1, 0, %p1;" + result(0, "%r9"), a, b) == [expected]


def test_bf16_fma_widens_exactly():
    """fma.rn.f32.bf16: bf16 factors, f32 addend, one rounding."""
    body = "mov.b32 {%rs1, %rs2}, %r1; fma.rn.f32.bf16 %r9, %rs1, %rs2, %r2;" + result(0, "%r9")

    assert lane0(body, 0x40403F80 | 0, ONE, target="sm_100a") == [0x40800000]  # 1.0 * 3.0 + 1.0


@pytest.mark.parametrize(
    ("instruction", "value", "expected"),
    [
        ("cvt.rzi.s32.f32 %r9, %r1;", 0xC0300000, 0xFFFFFFFE),  # -2.75 -> -2
        ("cvt.rmi.s32.f32 %r9, %r1;", 0xC0300000, 0xFFFFFFFD),
        ("cvt.rni.s32.f32 %r9, %r1;", 0x40200000, 2),  # 2.5 to even
        ("cvt.rzi.s32.f32 %r9, %r1;", NAN, 0),
        ("cvt.rzi.u32.f32 %r9, %r1;", 0xC0300000, 0),
        ("cvt.rzi.s32.f32 %r9, %r1;", INF, 0x7FFFFFFF),
        ("cvt.rn.f32.s32 %r9, %r1;", 0xFFFFFFFF, 0xBF800000),
        ("cvt.rn.f32.u32 %r9, %r1;", 0xFFFFFFFF, 0x4F800000),
        ("cvt.rmi.f32.f32 %r9, %r1;", 0x40300000, TWO),
        ("cvt.rn.bf16x2.f32 %r9, %r1, 0f40000000;", ONE, 0x3F804000),  # first source in the upper half
        ("cvt.rn.bf16x2.f32 %r9, %r1, 0f00000000;", 0x3F808000, 0x3F800000),  # tie to even
        ("cvt.rn.bf16x2.f32 %r9, %r1, 0f00000000;", NAN, 0x7FFF0000),
        ("cvt.rn.f16x2.f32 %r9, %r1, 0f40000000;", ONE, 0x3C004000),
        ("cvt.rn.satfinite.e4m3x2.f32 %rs1, %r1, 0f3F800000; cvt.u32.u16 %r9, %rs1;", 0x44160000, 0x7E38),  # 600 -> 448
        ("mov.b32 {%rs1, %rs2}, %r1; cvt.f32.bf16 %r9, %rs2;", 0x40400000, THREE),
        ("cvt.s32.s8 %r9, %r1;", 0x000001FF, 0xFFFFFFFF),
        ("cvt.s8.s32 %rs1, %r1; cvt.s32.s16 %r9, %rs1;", 0x00000180, 0xFFFFFF80),
        ("cvt.u16.u32 %rs1, %r1; cvt.u32.u16 %r9, %rs1;", 0x00018001, 0x8001),
    ],
)  # fmt: skip
def test_conversion(instruction, value, expected):
    """Rounding, saturation, packing order and sign extension of conversions."""
    assert lane0(instruction + result(0, "%r9"), value) == [expected]


def test_results_are_per_lane():
    """Thirty-two lanes with different values."""
    x = np.arange(32, dtype=np.float32)
    out = run("mul.f32 %r9, %r1, %r1;" + result(0, "%r9"), x)

    assert out[:, 0].view(np.float32).tolist() == [float(i * i) for i in range(32)]
