"""Probes of integer arithmetic, shifts, bit operations and conversions, and of fused multiply-add contraction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fa4build.simulate.units.float_formats import add_f32, fma_f32, mul_f32, sub_f32
from tests.simulate.probes.elementwise import COUNT, Operation, mixed_operands
from tests.simulate.probes.elementwise import probe_of as elementwise_probe

_SIGN = np.uint32(0x80000000)


def _signed(x: np.ndarray) -> np.ndarray:
    return x.view(np.int32).astype(np.int64)


def _word(x: np.ndarray) -> np.ndarray:
    return (np.asarray(x, dtype=np.int64) & 0xFFFFFFFF).astype(np.uint32)


def _op(opcode: str, function: Callable, operands: str = "%r10, %r11") -> Operation:
    return Operation(ptx=f"{opcode} \t%r20, {operands};", function=function)


def _shift(opcode: str, function: Callable) -> Operation:
    """A shift by b modulo 64: amounts of 32 and more are clamped."""
    return Operation(
        ptx=f"and.b32 \t%r13, %r11, 63;\n\t{opcode} \t%r20, %r10, %r13;",
        function=lambda a, b, c: function(a, (b & np.uint32(63)).astype(np.int64)),
    )


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Signed division toward zero by b | 1."""
    x, y = _signed(a), _signed(b | np.uint32(1))
    return _word(np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y)))


def _compare(name: str, function: Callable) -> Operation:
    return Operation(
        ptx=f"setp.{name} \t%p2, %r10, %r11;\n\tselp.b32 \t%r20, %r12, 7, %p2;",
        function=lambda a, b, c: np.where(function(a, b), c, np.uint32(7)),
    )


def _converted(ptx: str, function: Callable) -> Operation:
    return Operation(ptx=ptx, function=lambda a, b, c: function(a))


def _low(x: np.ndarray, dtype: type) -> np.ndarray:
    return x.astype(np.uint64).astype(dtype).astype(np.int64)


INTEGERS = (
    _op("add.s32", lambda a, b, c: a + b),
    _op("sub.s32", lambda a, b, c: a - b),
    _op("mul.lo.s32", lambda a, b, c: a * b),
    _op("mul.hi.s32", lambda a, b, c: _word(_signed(a) * _signed(b) >> 32)),
    _op("mul.hi.u32", lambda a, b, c: (a.astype(np.uint64) * b >> np.uint64(32)).astype(np.uint32)),
    _op("mad.lo.s32", lambda a, b, c: a * b + c, "%r10, %r11, %r12"),
    _op("max.s32", lambda a, b, c: _word(np.maximum(_signed(a), _signed(b)))),
    _op("min.s32", lambda a, b, c: _word(np.minimum(_signed(a), _signed(b)))),
    _op("and.b32", lambda a, b, c: a & b),
    _op("or.b32", lambda a, b, c: a | b),
    _op("xor.b32", lambda a, b, c: a ^ b),
    _op("not.b32", lambda a, b, c: ~a, "%r10"),
    _op("neg.s32", lambda a, b, c: _word(-_signed(a)), "%r10"),
    _op("popc.b32", lambda a, b, c: np.array([bin(int(x)).count("1") for x in a], dtype=np.uint32), "%r10"),
    _shift("shl.b32", lambda a, n: np.where(n > 31, 0, _word(a.astype(np.int64) << np.minimum(n, 31)))),
    _shift("shr.u32", lambda a, n: np.where(n > 31, 0, a.astype(np.int64) >> np.minimum(n, 31))),
    _shift("shr.s32", lambda a, n: _word(_signed(a) >> np.minimum(n, 31))),
    Operation(
        ptx="or.b32 \t%r13, %r11, 1;\n\tdiv.s32 \t%r20, %r10, %r13;",
        function=lambda a, b, c: _divide(a, b),
    ),
    Operation(
        ptx="or.b32 \t%r13, %r11, 1;\n\tdiv.u32 \t%r20, %r10, %r13;",
        function=lambda a, b, c: a // (b | np.uint32(1)),
    ),
    _compare("lt.s32", lambda a, b: _signed(a) < _signed(b)),
    _compare("gt.u32", lambda a, b: a > b),
    _compare("eq.b32", lambda a, b: a == b),
    _converted(
        "cvt.s64.s32 \t%rd20, %r10;\n\tshr.u64 \t%rd20, %rd20, 16;\n\tcvt.u32.u64 \t%r20, %rd20;",
        lambda a: _word(_signed(a) >> 16),
    ),
    _converted("cvt.u16.u32 \t%rs1, %r10;\n\tcvt.u32.u16 \t%r20, %rs1;", lambda a: a & np.uint32(0xFFFF)),
    _converted("cvt.u16.u32 \t%rs1, %r10;\n\tcvt.s32.s16 \t%r20, %rs1;", lambda a: _word(_low(a, np.int16))),
    _converted("cvt.s32.s8 \t%r20, %r10;", lambda a: _word(_low(a, np.int8))),
    _converted("cvt.s8.s32 \t%rs1, %r10;\n\tmul.wide.s16 \t%r20, %rs1, 300;", lambda a: _word(_low(a, np.int8) * 300)),
    Operation(
        ptx="mul.wide.s32 \t%rd20, %r10, %r11;\n\tshr.s64 \t%rd20, %rd20, 7;\n\tcvt.u32.u64 \t%r20, %rd20;",
        function=lambda a, b, c: _word(_signed(a) * _signed(b) >> 7),
    ),
)

# Multiplications and additions without .rn: the assembler fuses a product that has one use, in the same block, into the
# addition or subtraction that uses it (ptx-semantics.md 5.2).
CONTRACTION = (
    Operation(
        ptx="mul.f32 \t%r30, %r10, %r11;\n\tadd.f32 \t%r20, %r30, %r12;",
        function=lambda a, b, c: fma_f32(a, b, c),
    ),
    Operation(
        ptx="mul.f32 \t%r31, %r10, %r11;\n\tsub.f32 \t%r20, %r31, %r12;",
        function=lambda a, b, c: fma_f32(a, b, c ^ _SIGN),
    ),
    Operation(
        ptx="mul.f32 \t%r32, %r10, %r11;\n\tsub.f32 \t%r20, %r12, %r32;",
        function=lambda a, b, c: fma_f32(a ^ _SIGN, b, c),
    ),
    Operation(
        ptx="mul.rn.f32 \t%r33, %r10, %r11;\n\tadd.rn.f32 \t%r20, %r33, %r12;",
        function=lambda a, b, c: add_f32(mul_f32(a, b), c),
    ),
    Operation(
        ptx="mul.rn.f32 \t%r34, %r10, %r11;\n\tsub.f32 \t%r20, %r34, %r12;",
        function=lambda a, b, c: sub_f32(mul_f32(a, b), c),
    ),
)


def _integer_operands() -> np.ndarray:
    """Three columns: random words, small numbers of both signs, the ends of the range."""
    rng = np.random.default_rng(51)
    ends = np.array([0, 1, 2, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFF, 0x80, 0x8000, 0xFFFF], np.uint32)
    anything = rng.integers(0, 2**32, (3, COUNT), dtype=np.uint64).astype(np.uint32)
    small = rng.integers(-300, 300, (3, COUNT)).astype(np.int32).view(np.uint32)
    chosen = rng.integers(0, 4, (3, COUNT))
    return np.where(chosen < 2, anything, np.where(chosen == 2, small, rng.choice(ends, (3, COUNT))))


PROBES = (
    elementwise_probe("integers", INTEGERS, _integer_operands()),
    elementwise_probe("contraction", CONTRACTION, mixed_operands(52)),
)
