"""Moves, address conversions and type conversions. Source: PTX ISA 9.7.9 and 9.7.9.21."""

import numpy as np

from fa4build.simulate.ptx.instructions import Imm, Reg, Symbol, Vector
from fa4build.simulate.translate.node_scope import in_node_scope
from fa4build.simulate.translate.opcodes import fused
from fa4build.simulate.units import float_formats as ff

_BITS = {"b16": "u16", "u16": "u16", "s16": "u16", "b32": "u32", "u32": "u32", "s32": "u32", "f32": "f32", "b64": "u64",
         "u64": "u64", "s64": "u64", "pred": "p", "f64": "u64"}  # fmt: skip


@fused(r"mov\.(b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64|pred)")
def _mov(e, ins, match) -> None:
    d, a = ins.operands
    if isinstance(a, Vector):
        _pack(e, d, a.elements)
        return
    if isinstance(d, Vector):
        _unpack(e, d.elements, a, match[1])
        return
    kind = _BITS[match[1]]
    if isinstance(d, Reg) and kind not in ("p", "u16"):
        storage = e.program.storage[d.index]
        kind = e.program.storage[a.index] if isinstance(a, Reg) else storage
        if kind == "pair" and not isinstance(a, Reg | Imm):
            kind = "u64"
    e.dst(d, kind, e.src(a, kind))


def _pack(e, d, elements) -> None:
    """`mov.b64 d, {lo, hi}` and the narrower and wider forms; element 0 is the low part."""
    width = e.program.function.register_widths[d.index] if isinstance(d, Reg) else 64
    if width == 64 and len(elements) == 2:
        e.dst(d, "pair", f"({e.src(elements[0], 'f32')}, {e.src(elements[1], 'f32')})")
    elif width == 64 and len(elements) == 4:
        e.dst(d, "u64", "pack16x4({}, {}, {}, {})".format(*(e.src(x, "u16") for x in elements)))
    elif width == 32 and len(elements) == 2:
        e.dst(d, "u32", f"pack16({e.src(elements[0], 'u16')}, {e.src(elements[1], 'u16')})")
    elif width == 128 and len(elements) == 2:
        e.dst(d, "b128", f"({e.src(elements[0], 'u64')}, {e.src(elements[1], 'u64')})")
    else:
        raise ValueError(f"no packing of {len(elements)} elements into {width} bits")


def _unpack(e, elements, source, kind: str) -> None:
    if kind == "b64" and len(elements) == 2:
        pair = e.src(source, "pair")
        halves = [e.tmp(f"{pair}[0]"), e.tmp(f"{pair}[1]")]
        for d, half in zip(elements, halves, strict=True):
            e.dst(d, "f32", half)
    elif kind == "b32" and len(elements) == 2:
        value = e.src(source, "u32")
        low, high = e.tmp(f"{value}.astype(u16)"), e.tmp(f"({value} >> {e.const(16, 'u32')}).astype(u16)")
        e.dst(elements[0], "u16", low)
        e.dst(elements[1], "u16", high)
    elif kind == "b64" and len(elements) == 4:
        value = e.src(source, "u64")
        parts = [e.tmp(f"({value} >> {e.const(16 * k, 'u64')}).astype(u16)") for k in range(4)]
        for d, part in zip(elements, parts, strict=True):
            e.dst(d, "u16", part)
    else:
        raise ValueError(f"no unpacking of .{kind} into {len(elements)} elements")


@fused(r"mov\.b128")
def _mov_128(e, ins, match) -> None:
    d, a = ins.operands
    if isinstance(a, Vector):
        _pack(e, d, a.elements)
    elif isinstance(d, Vector):
        value = e.src(a, "b128")
        halves = [e.tmp(f"{value}[0]"), e.tmp(f"{value}[1]")]
        for part, half in zip(d.elements, halves, strict=True):
            e.dst(part, "u64", half)
    else:
        e.dst(d, "b128", e.src(a, "b128"))


@in_node_scope
def pack16(low, high):
    """Two u16 arrays into u32."""
    return low | high.astype(np.uint32) << np.uint32(16)


@in_node_scope
def pack16x4(a, b, c, d):
    """Four u16 arrays into u64."""
    low, high = pack16(a, b), pack16(c, d)
    return low | high.astype(np.uint64) << np.uint64(32)


# Shared, parameter and local addresses are numbers that need no translation in this machine.
@fused(r"cvta(?:\.to)?\.(?:param|shared(?:::cluster|::cta)?|global|local)\.(u64|u32)")
def _cvta(e, ins, match) -> None:
    d, a = ins.operands
    e.dst(d, match[1], e.src(a, match[1]))


@in_node_scope
def param(g, offset, size, kind):
    """A kernel parameter field, the same in all lanes; `kind` has its width or more (zero or sign extended)."""
    key = ("param", offset, size, kind)
    value = g.special.get(key)
    if value is None:
        raw = g.cta.cluster.parameters[offset : offset + size]
        number = int.from_bytes(raw, "little", signed=kind[0] == "s")
        value = g.special[key] = np.full(g.lanes, number, np.dtype(_np(kind)))
        value.flags.writeable = False
    return value


def _np(kind: str):
    return {"u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}[
        kind
    ]


@fused(r"ld\.param(?:\.v([248]))?\.(b8|u8|s8|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64)")
def _ld_param(e, ins, match) -> None:
    d, source = ins.operands
    if not isinstance(source.base, Symbol):
        raise ValueError("ld.param through a register is not supported")
    parameter = next(p for p in e.program.function.parameters if p.name == source.base.name)
    size = int(match[2][1:]) // 8
    targets = d.elements if match[1] else (d,)
    if source.offset + size * len(targets) > parameter.size:
        raise ValueError(f"reads past the end of {parameter.name} ({parameter.size} bytes)")
    for k, target in enumerate(targets):
        offset = parameter.offset + source.offset + k * size
        width = e.program.function.register_widths[target.index] if isinstance(target, Reg) else 32
        kind = ("s" if match[2][0] == "s" else "u") + str(max(width, 16))
        e.dst(target, kind, f"param(g, {offset}, {size}, {kind!r})")


_INTEGER = r"(s8|u8|s16|u16|s32|u32|s64|u64)"


@fused(rf"cvt\.{_INTEGER}\.{_INTEGER}")
def _cvt_integer(e, ins, match) -> None:
    d, a = ins.operands
    to, of = match[1], match[2]
    widths = e.program.function.register_widths
    have = f"u{max(widths[a.index], 16)}" if isinstance(a, Reg) else "u" + of[1:]
    want = max(widths[d.index], 16) if isinstance(d, Reg) else int(to[1:])
    value = e.src(a, have)
    if have[1:] != of[1:]:
        value = e.tmp(f"{value}.astype(u{of[1:]})")
    if of[0] == "s":
        value = e.tmp(f"{value}.view({of})")
    if to[1:] != of[1:]:
        value = e.tmp(f"{value}.astype({to})")
    elif to != of:
        value = e.tmp(f"{value}.view({to})")
    final = f"{to[0]}{want}"
    if final != to:
        value = e.tmp(f"{value}.astype({final})")
    e.dst(d, final, value)


@fused(r"cvt\.r[nz]\.f32\.(s32|u32|s64|u64|s16|u16)")
def _cvt_from_integer(e, ins, match) -> None:
    d, a = ins.operands
    if ins.opcode.startswith("cvt.rz"):
        raise ValueError("only round to nearest is modelled")
    e.dst(d, "f32", f"{e.src(a, match[1])}.astype(f32)")


@in_node_scope
def to_integer(a, mode, kind):
    """f32 to integer with saturation; NaN gives 0."""
    rounded = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[mode](a.astype(np.float64))
    info = np.iinfo(_np(kind))
    rounded = np.where(np.isnan(rounded), 0, rounded)
    # The largest double that fits: 2^63 - 1 itself is not a double.
    top = float(info.max) if info.bits <= 32 else np.nextafter(float(info.max), 0)
    result = np.clip(rounded, float(info.min), top).astype(_np(kind))
    return np.where(rounded > top, info.max, result).astype(_np(kind))


@fused(r"cvt\.(rzi|rni|rmi|rpi)(?:\.ftz)?\.(s32|u32|s64|u64|s16|u16)\.f32")
def _cvt_to_integer(e, ins, match) -> None:
    d, a = ins.operands
    e.dst(d, match[2], f"to_integer({e.src(a, 'f32')}, {match[1]!r}, {match[2]!r})")


@fused(r"cvt\.(rzi|rni|rmi|rpi)(\.ftz)?\.f32\.f32")
def _cvt_round(e, ins, match) -> None:
    d, a = ins.operands
    a = e.src(a, "f32")
    a = f"flush({a})" if match[2] else a
    function = {"rzi": "trunc", "rni": "rint", "rmi": "floor", "rpi": "ceil"}[match[1]]
    e.dst(d, "f32", f"np.{function}({a})")


@in_node_scope
def bf16_bits(a):
    """f32 to bf16, nearest even, as u16."""
    return ff.f32_to_bf16_rn(a.view(np.uint32))


@in_node_scope
def f16_bits(a):
    """f32 to f16, nearest even, as u16."""
    return ff.f32_to_f16_rn(a.view(np.uint32))


@in_node_scope
def f16_value(a):
    """f16 bits to float32."""
    return ff.f16_to_f32(a).view(np.float32)


@fused(r"cvt\.rn\.(bf16|f16)x2\.f32")
def _cvt_pair(e, ins, match) -> None:
    """The first source goes to the upper half."""
    d, high, low = ins.operands
    function = f"{match[1]}_bits"
    low, high = (e.tmp(f"{function}({e.src(x, 'f32')})") for x in (low, high))
    e.dst(d, "u32", f"pack16({low}, {high})")


@fused(r"cvt\.rn\.(bf16|f16)\.f32")
def _cvt_half(e, ins, match) -> None:
    d, a = ins.operands
    e.dst(d, "u16", f"{match[1]}_bits({e.src(a, 'f32')})")


@fused(r"cvt\.f32\.(bf16|f16)")
def _cvt_widen(e, ins, match) -> None:
    d, a = ins.operands
    e.dst(d, "f32", f"{match[1]}_value({e.src(a, 'u16')})")


@in_node_scope
def fp8_pair(high, low, name):
    """Two f32 arrays to packed fp8 in u16, the first in the upper byte."""
    encode = {"e4m3": ff.f32_to_e4m3_rn_satfinite, "e5m2": ff.f32_to_e5m2_rn_satfinite}[name]
    return encode(low.view(np.uint32)) | encode(high.view(np.uint32)).astype(np.uint16) << np.uint16(8)


@fused(r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32")
def _cvt_fp8(e, ins, match) -> None:
    d, high, low = ins.operands
    e.dst(d, "u16", f"fp8_pair({e.src(high, 'f32')}, {e.src(low, 'f32')}, {match[1]!r})")
