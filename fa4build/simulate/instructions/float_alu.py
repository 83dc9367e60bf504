"""f32 arithmetic, packed f32x2, compares and the approximate functions.

Source: PTX ISA 9.7.3, 9.7.5; ptx-semantics.md 5.2, 6.

Scalars are float32 arrays; an f32x2 operand is a tuple of two. Rounding is exact; NaN payloads are not modelled.
"""

import numpy as np

from fa4build.simulate.ptx.instructions import Reg
from fa4build.simulate.translate.node_scope import in_node_scope
from fa4build.simulate.translate.opcodes import fused
from fa4build.simulate.units import float_formats as ff
from fa4build.simulate.units import mufu

_TAIL, _HALF = np.uint64(0x1FFF_FFFF), np.uint64(0x1000_0000)
_TINY = np.float64(2.0**-126)
_ROUND = r"(?:\.(rn|rz|rm|rp))?(\.ftz)?"


@in_node_scope
def fma32(a, b, c):
    """a*b + c of float32 arrays, rounded once to nearest even.

    float64 holds the product exactly; only a float64 sum that is inexact and lies halfway, or near the subnormals, can
    round wrongly, and then the exact routine takes over.
    """
    total = a.astype(np.float64) * b + c
    risky = (total.view(np.uint64) & _TAIL == _HALF) | (np.abs(total) < _TINY) & (total != 0)
    result = total.astype(np.float32)
    if np.count_nonzero(risky):
        chosen = (np.broadcast_to(x, result.shape)[risky].view(np.uint32) for x in (a, b, c))
        result[risky] = ff.fma_f32(*chosen, "rn").view(np.float32)
    return result


@in_node_scope
def directed(a, b, subtract, rounding):
    """a + b or a - b of float32 arrays in a directed rounding."""
    bits = (ff.sub_f32 if subtract else ff.add_f32)(a.view(np.uint32), b.view(np.uint32), rounding)
    return bits.view(np.float32)


@in_node_scope
def mul_directed(a, b, rounding):
    """a * b of float32 arrays in a directed rounding."""
    return ff.mul_f32(a.view(np.uint32), b.view(np.uint32), rounding).view(np.float32)


@in_node_scope
def fma_directed(a, b, c, rounding):
    """a*b + c of float32 arrays in a directed rounding."""
    return ff.fma_f32(a.view(np.uint32), b.view(np.uint32), c.view(np.uint32), rounding).view(np.float32)


@in_node_scope
def flush(a):
    """Subnormals to zero of the same sign."""
    tiny = (np.abs(a) < np.float32(2.0**-126)) & (a != 0)
    return np.where(tiny, np.copysign(np.float32(0), a), a) if np.count_nonzero(tiny) else a


def _sum(a: str, b: str, minus: bool, rounding: str | None, ftz: str | None) -> str:
    if ftz:
        a, b = f"flush({a})", f"flush({b})"
    text = (
        f"{a} {'-' if minus else '+'} {b}" if rounding in (None, "rn") else f"directed({a}, {b}, {minus}, {rounding!r})"
    )
    return f"flush({text})" if ftz else text


def _product(a: str, b: str, rounding: str | None, ftz: str | None) -> str:
    if ftz:
        a, b = f"flush({a})", f"flush({b})"
    text = f"{a} * {b}" if rounding in (None, "rn") else f"mul_directed({a}, {b}, {rounding!r})"
    return f"flush({text})" if ftz else text


def _fma(a: str, b: str, c: str, rounding: str | None, ftz: str | None) -> str:
    if ftz:
        a, b, c = f"flush({a})", f"flush({b})", f"flush({c})"
    text = f"fma32({a}, {b}, {c})" if rounding in (None, "rn") else f"fma_directed({a}, {b}, {c}, {rounding!r})"
    return f"flush({text})" if ftz else text


@fused(rf"(add|sub){_ROUND}\.f32")
def _add(e, ins, match) -> None:
    d, a, b = ins.operands
    swallowed = e.program.contracted.get(e.site)
    if swallowed is None:
        e.dst(d, "f32", _sum(e.src(a, "f32"), e.src(b, "f32"), match[1] == "sub", match[2], match[3]))
        return
    _, x, y = e.program.function.instructions[swallowed].operands
    x, y = e.src(x, "f32"), e.src(y, "f32")
    product_first = isinstance(a, Reg) and a == e.program.function.instructions[swallowed].operands[0]
    other = e.src(b if product_first else a, "f32")
    if match[1] == "sub":
        x, other = (x, e.tmp(f"-{other}")) if product_first else (e.tmp(f"-{x}"), other)
    e.dst(d, "f32", f"fma32({x}, {y}, {other})")


@fused(rf"mul{_ROUND}\.f32")
def _mul(e, ins, match) -> None:
    d, a, b = ins.operands
    e.dst(d, "f32", _product(e.src(a, "f32"), e.src(b, "f32"), match[1], match[2]))


@fused(rf"fma{_ROUND}\.f32")
def _fma_f32(e, ins, match) -> None:
    d, a, b, c = ins.operands
    e.dst(d, "f32", _fma(e.src(a, "f32"), e.src(b, "f32"), e.src(c, "f32"), match[1], match[2]))


@in_node_scope
def bf16_value(a):
    """Value of the low 16 bits as bf16, a float32 array."""
    return (a.astype(np.uint32) << np.uint32(16)).view(np.float32)


@fused(r"fma\.rn\.f32\.bf16")
def _fma_bf16(e, ins, match) -> None:
    d, a, b, c = ins.operands
    e.dst(d, "f32", f"fma32(bf16_value({e.src(a, 'u16')}), bf16_value({e.src(b, 'u16')}), {e.src(c, 'f32')})")


def _packed(e, ins, operands, expression) -> None:
    """Applies an expression builder to both halves."""
    names = [e.src(o, "pair") for o in operands]
    halves = [e.tmp(expression(*(f"{n}[{h}]" for n in names))) for h in (0, 1)]
    e.dst(ins.operands[0], "pair", f"({halves[0]}, {halves[1]})")


@fused(rf"(add|sub){_ROUND}\.f32x2")
def _add_packed(e, ins, match) -> None:
    _packed(e, ins, ins.operands[1:], lambda a, b: _sum(a, b, match[1] == "sub", match[2], match[3]))


@fused(rf"mul{_ROUND}\.f32x2")
def _mul_packed(e, ins, match) -> None:
    _packed(e, ins, ins.operands[1:], lambda a, b: _product(a, b, match[1], match[2]))


@fused(rf"fma{_ROUND}\.f32x2")
def _fma_packed(e, ins, match) -> None:
    _packed(e, ins, ins.operands[1:], lambda a, b, c: _fma(a, b, c, match[1], match[2]))


@in_node_scope
def fmax(a, b):
    """max.f32: a NaN operand is ignored, +0 > -0."""
    r = np.fmax(a, b)
    zero = r == 0
    return np.where(zero & (a == 0) & (b == 0), a + b, r) if np.count_nonzero(zero) else r


@in_node_scope
def fmin(a, b):
    """min.f32: a NaN operand is ignored, -0 < +0."""
    r = np.fmin(a, b)
    zero = (r == 0) & (a == 0) & (b == 0)
    return np.where(zero, -(-a + -b), r) if np.count_nonzero(zero) else r


@fused(r"(max|min)(\.ftz)?(\.NaN)?\.f32")
def _max(e, ins, match) -> None:
    d, *sources = ins.operands
    names = [e.src(s, "f32") for s in sources]
    if match[2]:
        names = [e.tmp(f"flush({n})") for n in names]
    function = f"np.{match[1]}imum" if match[3] else f"f{match[1]}"
    text = names[0]
    for name in names[1:-1]:
        text = e.tmp(f"{function}({text}, {name})")
    e.dst(d, "f32", f"{function}({text}, {names[-1]})")


@fused(r"(neg|abs)(\.ftz)?\.f32")
def _neg(e, ins, match) -> None:
    d, a = ins.operands
    a = e.src(a, "f32")
    a = f"flush({a})" if match[2] else a
    e.dst(d, "f32", f"-{a}" if match[1] == "neg" else f"np.abs({a})")


_ORDERED = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNORDERED = {"equ": "!=", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}


@in_node_scope
def compare_nan(a, b, kind):
    """`ne` (ordered), `neu`, `nan`, `num`."""
    unordered = np.isnan(a) | np.isnan(b)
    if kind == "nan":
        return unordered
    if kind == "num":
        return ~unordered
    return (a != b) | unordered if kind == "neu" else (a != b) & ~unordered


@fused(r"setp\.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|nan|num)(\.ftz)?\.f32")
def _setp(e, ins, match) -> None:
    d, a, b = ins.operands
    a, b = e.src(a, "f32"), e.src(b, "f32")
    if match[2]:
        a, b = e.tmp(f"flush({a})"), e.tmp(f"flush({b})")
    if match[1] in _ORDERED:
        e.dst(d, "p", f"{a} {_ORDERED[match[1]]} {b}")
    elif match[1] == "neu":
        e.dst(d, "p", f"{a} != {b}")
    elif match[1] in _UNORDERED:
        # The unordered form is the negation of the opposite ordered one.
        opposite = _UNORDERED[match[1]]
        e.dst(d, "p", f"compare_equ({a}, {b})" if match[1] == "equ" else f"~({a} {opposite} {b})")
    else:
        e.dst(d, "p", f"compare_nan({a}, {b}, {match[1]!r})")


@in_node_scope
def compare_equ(a, b):
    """Equal, or either is NaN."""
    return (a == b) | np.isnan(a) | np.isnan(b)


_APPROXIMATE = {
    "ex2.approx.ftz": "ex2_ftz", "ex2.approx": "ex2", "lg2.approx.ftz": "lg2_ftz", "rcp.approx.ftz": "rcp_ftz",
    "rsqrt.approx.ftz": "rsqrt_approx", "sqrt.approx.ftz": "sqrt_approx", "tanh.approx": "tanh_approx",
    "sin.approx.ftz": "sin_approx", "cos.approx.ftz": "cos_approx",
}  # fmt: skip


@in_node_scope
def approximate(a, name):
    """An approximate function of the special function unit, as the H200 computes it."""
    return getattr(mufu, name)(a.view(np.uint32)).view(np.float32)


@fused(r"((?:ex2|lg2|rcp|rsqrt|sqrt|tanh|sin|cos)\.approx(?:\.ftz)?)\.f32")
def _approximate(e, ins, match) -> None:
    d, a = ins.operands
    name = _APPROXIMATE.get(match[1])
    if name is None or not hasattr(mufu, name):
        raise ValueError(f"{ins.opcode} has no model")
    e.dst(d, "f32", f"approximate({e.src(a, 'f32')}, {name!r})")


@fused(r"(rcp|sqrt)\.rn(\.ftz)?\.f32")
def _exact(e, ins, match) -> None:
    d, a = ins.operands
    a = e.src(a, "f32")
    a = f"flush({a})" if match[2] else a
    text = f"np.float32(1) / {a}" if match[1] == "rcp" else f"np.sqrt({a})"
    e.dst(d, "f32", f"flush({text})" if match[2] else text)


@fused(r"div\.(?:rn|full)(\.ftz)?\.f32")
def _div(e, ins, match) -> None:
    d, a, b = ins.operands
    a, b = e.src(a, "f32"), e.src(b, "f32")
    e.dst(d, "f32", f"flush(flush({a}) / flush({b}))" if match[1] else f"{a} / {b}")


@fused(r"copysign\.f32")
def _copysign(e, ins, match) -> None:
    d, a, b = ins.operands
    e.dst(d, "f32", f"np.copysign({e.src(b, 'f32')}, {e.src(a, 'f32')})")
