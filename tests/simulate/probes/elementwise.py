"""Probes of arithmetic without interaction: every thread computes many functions of three input words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fa4build.simulate.units import float_formats as ff
from fa4build.simulate.units import mufu
from tests.simulate.probes.probe import INPUT, OUTPUT, THREAD, Probe, kernel_text, unwritten

THREADS = 256
COUNT = 1024  # words of each of the three operands


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One function: PTX from %r10, %r11, %r12 (a, b, c) to %r20, and the same on arrays of u32."""

    ptx: str
    function: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def _binary(opcode: str, function: Callable) -> Operation:
    return Operation(ptx=f"{opcode} \t%r20, %r10, %r11;", function=lambda a, b, c: function(a, b))


def _unary(opcode: str, function: Callable) -> Operation:
    return Operation(ptx=f"{opcode} \t%r20, %r10;", function=lambda a, b, c: function(a))


def _ternary(opcode: str, function: Callable) -> Operation:
    return Operation(ptx=f"{opcode} \t%r20, %r10, %r11, %r12;", function=function)


def _rounded(rounding: str) -> tuple[Operation, ...]:
    return (
        _binary(f"add.{rounding}.f32", lambda a, b: ff.add_f32(a, b, rounding)),
        _binary(f"sub.{rounding}.f32", lambda a, b: ff.sub_f32(a, b, rounding)),
        _binary(f"mul.{rounding}.f32", lambda a, b: ff.mul_f32(a, b, rounding)),
        _ternary(f"fma.{rounding}.f32", lambda a, b, c: ff.fma_f32(a, b, c, rounding)),
    )


ARITHMETIC = (
    *_rounded("rn"),
    *_rounded("rz"),
    *_rounded("rm"),
    *_rounded("rp"),
    _binary("add.rn.ftz.f32", lambda a, b: ff.add_f32(a, b, ftz=True)),
    _binary("mul.rn.ftz.f32", lambda a, b: ff.mul_f32(a, b, ftz=True)),
    _ternary("fma.rn.ftz.f32", lambda a, b, c: ff.fma_f32(a, b, c, ftz=True)),
    _binary("max.f32", ff.max_f32),
    _binary("min.f32", ff.min_f32),
    _binary("max.NaN.f32", lambda a, b: ff.max_f32(a, b, propagate_nan=True)),
    _binary("max.ftz.f32", lambda a, b: ff.max_f32(a, b, ftz=True)),
    _binary("div.rn.f32", ff.div_f32_rn),
    _unary("rcp.rn.f32", lambda a: ff.div_f32_rn(np.uint32(0x3F800000), a)),
    _unary("sqrt.rn.f32", mufu.sqrt_rn),
)

MUFU = (
    _unary("ex2.approx.ftz.f32", mufu.ex2_ftz),
    _unary("ex2.approx.f32", mufu.ex2),
    _unary("rcp.approx.ftz.f32", mufu.rcp_ftz),
    _unary("lg2.approx.ftz.f32", mufu.lg2_ftz),
)


def _packed(high: np.ndarray, low: np.ndarray, width: int) -> np.ndarray:
    return high.astype(np.uint32) << np.uint32(width) | low.astype(np.uint32)


def _pair(opcode: str, encode: Callable) -> Operation:
    return _binary(opcode, lambda a, b: _packed(encode(a), encode(b), 16))


def _byte_pair(opcode: str, encode: Callable) -> Operation:
    return Operation(
        ptx=f"{opcode} \t%rs1, %r10, %r11;\n\tcvt.u32.u16 \t%r20, %rs1;",
        function=lambda a, b, c: _packed(encode(a), encode(b), 8),
    )


def _from_low_half(opcode: str, decode: Callable) -> Operation:
    return Operation(
        ptx=f"cvt.u16.u32 \t%rs1, %r10;\n\t{opcode} \t%r20, %rs1;",
        function=lambda a, b, c: decode((a & np.uint32(0xFFFF)).astype(np.uint16)),
    )


CONVERSIONS = (
    _pair("cvt.rn.bf16x2.f32", ff.f32_to_bf16_rn),
    _pair("cvt.rn.f16x2.f32", ff.f32_to_f16_rn),
    _byte_pair("cvt.rn.satfinite.e4m3x2.f32", ff.f32_to_e4m3_rn_satfinite),
    _byte_pair("cvt.rn.satfinite.e5m2x2.f32", ff.f32_to_e5m2_rn_satfinite),
    _from_low_half("cvt.f32.bf16", ff.bf16_to_f32),
    _from_low_half("cvt.f32.f16", ff.f16_to_f32),
)

_COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: (a == b) | np.isnan(a) | np.isnan(b),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}


def _comparison(name: str) -> Operation:
    def function(a, b, c):
        return _COMPARISONS[name](a.view(np.float32), b.view(np.float32)).astype(np.uint32)

    return Operation(ptx=f"setp.{name}.f32 \t%p2, %r10, %r11;\n\tselp.b32 \t%r20, 1, 0, %p2;", function=function)


COMPARISONS = tuple(_comparison(name) for name in _COMPARISONS)

_SPECIAL = np.array(
    "00000000 80000000 7f800000 ff800000 7fc00000 ffc12345 7f800001 00000001 80000001 007fffff 00800000 80800000 "
    "7f7fffff ff7fffff 3f800000 bf800000 3f800001 34000000 33800000 4b400000 7f7f8000 477fefff 38800000 33000000 "
    "43e00000 43e80000 3a800000 3b000000 47600000 47680000".split()
)


def mixed_operands(seed: int) -> np.ndarray:
    """Three columns of f32 bits: normal values, all exponents, near-cancelling sums, special values."""
    rng = np.random.default_rng(seed)
    special = np.array([int(word, 16) for word in _SPECIAL], dtype=np.uint32)
    ordinary = rng.standard_normal((3, COUNT)).astype(np.float32).view(np.uint32)
    anything = rng.integers(0, 2**32, (3, COUNT), dtype=np.uint64).astype(np.uint32)
    chosen = rng.integers(0, 8, (3, COUNT))
    words = np.where(chosen < 4, ordinary, np.where(chosen < 6, anything, rng.choice(special, (3, COUNT))))
    # A quarter of the rows: c close to -a*b, or b close to -a, so that sums cancel.
    near = rng.random(COUNT) < 0.25
    with np.errstate(all="ignore"):
        product = -(ordinary[0].view(np.float32) * ordinary[1].view(np.float32))
    words[:, near] = ordinary[:, near]
    words[2, near] = product.view(np.uint32)[near] + rng.integers(0, 3, COUNT).astype(np.uint32)[near]
    return words


def mufu_operands(seed: int) -> np.ndarray:
    """Column a: exponents, the table ranges of ex2, rcp and lg2, special values. Columns b, c: zero."""
    rng = np.random.default_rng(seed)
    parts = [
        rng.uniform(-150, -1e-3, 244),
        rng.uniform(0.5, 2, 260),
        np.exp2(-rng.uniform(1, 4, 100)),
        np.exp2(-rng.uniform(4, 126, 60)),
        np.exp2(-np.arange(1.0, 41.0)),
        rng.uniform(2, 130, 160),
        -np.exp2(rng.uniform(-140, 127, 80)),
        np.exp2(rng.uniform(1, 127, 40)),
        np.array([0.5, 1.0, 2.0, 0.25, 2.0**-126, -126.0, -126.5, -0.5, -(2.0**-23), -(2.0**-24)]),
    ]
    values = np.concatenate(parts).astype(np.float32).view(np.uint32)
    special = np.array([int(word, 16) for word in _SPECIAL[:16]], dtype=np.uint32)
    a = np.concatenate([values, special])
    words = np.zeros((3, COUNT), dtype=np.uint32)
    words[0, : a.size] = a
    words[0, a.size :] = 0x3F800000
    return words


def probe_of(name: str, operations: tuple[Operation, ...], operands: np.ndarray) -> Probe:
    """A probe that stores every operation on every row of `operands` (3, COUNT), one block of COUNT words each."""
    lines = [
        f"\t{operation.ptx}\n\tst.global.b32 \t[%rd7+{4 * COUNT * number}], %r20;"
        for number, operation in enumerate(operations)
    ]
    body = f"""
\tmov.b32 \t%r3, {THREAD};
$L__next:
\tmul.wide.u32 \t%rd5, %r3, 4;
\tadd.s64 \t%rd6, {INPUT}, %rd5;
\tadd.s64 \t%rd7, {OUTPUT}, %rd5;
\tld.global.b32 \t%r10, [%rd6];
\tld.global.b32 \t%r11, [%rd6+{4 * COUNT}];
\tld.global.b32 \t%r12, [%rd6+{8 * COUNT}];
{chr(10).join(lines)}
\tadd.s32 \t%r3, %r3, {THREADS};
\tsetp.lt.s32 \t%p1, %r3, {COUNT};
\t@%p1 bra \t$L__next;"""

    def expected(words: np.ndarray) -> np.ndarray:
        a, b, c = words.reshape(3, COUNT)
        with np.errstate(all="ignore"):
            return np.concatenate([np.asarray(op.function(a, b, c), dtype=np.uint32) for op in operations])

    return Probe(
        name=name,
        ptx=kernel_text(name, THREADS, body),
        threads=THREADS,
        shared_bytes=0,
        input=operands.reshape(-1),
        output=unwritten(COUNT * len(operations)),
        expected=expected,
    )


PROBES = (
    probe_of("f32_arithmetic", ARITHMETIC, mixed_operands(1)),
    probe_of("f32_conversions", CONVERSIONS, mixed_operands(2)),
    probe_of("f32_comparisons", COMPARISONS, mixed_operands(3)),
    probe_of("mufu", MUFU, mufu_operands(4)),
)
