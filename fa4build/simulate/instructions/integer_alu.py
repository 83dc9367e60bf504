"""Integer arithmetic, logic, shifts, compares and selects. Source: PTX ISA 9.7.1, 9.7.6, 9.7.8."""

import numpy as np

from fa4build.simulate.hardware.gang import Fault
from fa4build.simulate.ptx.instructions import Imm
from fa4build.simulate.translate.node_scope import in_node_scope
from fa4build.simulate.translate.opcodes import fused

_INT = r"(s16|u16|s32|u32|s64|u64)"
_UNSIGNED = {"s16": "u16", "s32": "u32", "s64": "u64", "b16": "u16", "b32": "u32", "b64": "u64", "pred": "p"}
_WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}


def _plain(kind: str) -> str:
    """The unsigned kind of that width: wraparound needs no sign."""
    return _UNSIGNED.get(kind, kind)


@fused(rf"(add|sub)\.{_INT}")
def _add(e, ins, match) -> None:
    kind = _plain(match[2])
    d, a, b = ins.operands
    sign = "+" if match[1] == "add" else "-"
    e.dst(d, kind, f"{e.src(a, kind)} {sign} {e.src(b, kind)}")


@fused(rf"(mul|mad)\.lo\.{_INT}")
def _mul_lo(e, ins, match) -> None:
    kind = _plain(match[2])
    d, a, b = ins.operands[:3]
    product = f"{e.src(a, kind)} * {e.src(b, kind)}"
    e.dst(d, kind, f"{product} + {e.src(ins.operands[3], kind)}" if match[1] == "mad" else product)


@fused(r"(mul|mad)\.wide\.(s16|u16|s32|u32)")
def _mul_wide(e, ins, match) -> None:
    kind, wide = match[2], _WIDER[match[2]]
    d, a, b = ins.operands[:3]
    product = f"{e.src(a, kind)}.astype({wide}) * {e.src(b, kind)}.astype({wide})"
    e.dst(d, wide, f"{product} + {e.src(ins.operands[3], wide)}" if match[1] == "mad" else product)


@fused(r"mul\.hi\.(s32|u32)")
def _mul_hi(e, ins, match) -> None:
    kind, wide = match[1], _WIDER[match[1]]
    d, a, b = ins.operands
    shift = e.const(32, wide)
    e.dst(d, kind, f"({e.src(a, kind)}.astype({wide}) * {e.src(b, kind)}.astype({wide}) >> {shift}).astype({kind})")


@in_node_scope
def mul_hi_u64(a, b):
    """High 64 bits of a 64 x 64 bit product."""
    return np.array([int(x) * int(y) >> 64 for x, y in zip(a.tolist(), b.tolist(), strict=True)], np.uint64)


@fused(r"mul\.hi\.u64")
def _mul_hi_64(e, ins, match) -> None:
    d, a, b = ins.operands
    e.dst(d, "u64", f"mul_hi_u64({e.src(a, 'u64')}, {e.src(b, 'u64')})")


@in_node_scope
def divide(a, b, mask, want_remainder, site):
    """Integer quotient (toward zero) or remainder (sign of the dividend)."""
    zero = b == 0
    if mask is not None:
        zero = zero & mask
    if np.count_nonzero(zero):
        raise Fault(f"integer division by zero in {np.count_nonzero(zero)} lanes", site)
    b = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return a % b if want_remainder else a // b
    remainder = np.fmod(a, b)
    return remainder if want_remainder else (a - remainder) // b


@fused(rf"(div|rem)\.{_INT}")
def _div(e, ins, match) -> None:
    d, a, b = ins.operands
    kind = match[2]
    e.dst(d, kind, f"divide({e.src(a, kind)}, {e.src(b, kind)}, {e.mask}, {match[1] == 'rem'}, {e.site})")


@fused(rf"(min|max)\.{_INT}")
def _min_max(e, ins, match) -> None:
    d, a, b = ins.operands
    kind = match[2]
    e.dst(d, kind, f"np.{match[1]}imum({e.src(a, kind)}, {e.src(b, kind)})")


@fused(r"(min|max)\.relu\.s32")
def _min_max_relu(e, ins, match) -> None:
    """The result is clamped at 0 from below."""
    d, a, b = ins.operands
    inner = f"np.{match[1]}imum({e.src(a, 's32')}, {e.src(b, 's32')})"
    e.dst(d, "s32", f"np.maximum({inner}, {e.const(0, 's32')})")


@fused(r"(neg|abs)\.(s16|s32|s64)")
def _neg(e, ins, match) -> None:
    d, a = ins.operands
    function = {"neg": "np.negative", "abs": "np.abs"}[match[1]]
    e.dst(d, match[2], f"{function}({e.src(a, match[2])})")


@fused(r"not\.(pred|b16|b32|b64)")
def _not(e, ins, match) -> None:
    d, a = ins.operands
    kind = _plain(match[1])
    e.dst(d, kind, f"~{e.src(a, kind)}")


@fused(r"(and|or|xor)\.(pred|b16|b32|b64)")
def _logic(e, ins, match) -> None:
    d, a, b = ins.operands
    kind = _plain(match[2])
    sign = {"and": "&", "or": "|", "xor": "^"}[match[1]]
    e.dst(d, kind, f"{e.src(a, kind)} {sign} {e.src(b, kind)}")


@in_node_scope
def shift(a, amount, left):
    """Shift with the amount clamped to the width: zeros, or the sign for signed right shifts."""
    bits = 8 * a.dtype.itemsize
    over = amount >= bits
    n = np.where(over, 0, amount).astype(a.dtype)
    shifted = a << n if left else a >> n
    fill = a >> a.dtype.type(bits - 1) if a.dtype.kind == "i" and not left else a.dtype.type(0)
    return np.where(over, fill, shifted)


@fused(r"(shl|shr)\.(b16|b32|b64|u16|u32|u64|s16|s32|s64)")
def _shift(e, ins, match) -> None:
    d, a, n = ins.operands
    left = match[1] == "shl"
    kind = _plain(match[2]) if left or match[2][0] == "b" else match[2]
    bits = int(match[2][1:])
    if isinstance(n, Imm) and 0 <= n.value < bits:
        e.dst(d, kind, f"{e.src(a, kind)} {'<<' if left else '>>'} {e.const(n.value, kind)}")
        return
    e.dst(d, kind, f"shift({e.src(a, kind)}, {e.src(n, 'u32')}, {left})")


@in_node_scope
def popc(a):
    """Number of one bits, as u32."""
    octets = np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1)
    return np.unpackbits(octets, axis=1).sum(axis=1).astype(np.uint32)


@in_node_scope
def clz(a):
    """Leading zeros of a u32 array."""
    return np.array([32 - int(x).bit_length() for x in a.tolist()], np.uint32)


@in_node_scope
def brev(a):
    """Bits of a u32 array in reverse order."""
    octets = a.astype(">u4").view(np.uint8).reshape(len(a), 4)
    return np.packbits(np.unpackbits(octets, axis=1)[:, ::-1], axis=1).view(">u4")[:, 0].astype(np.uint32)


@fused(r"(popc|clz|brev)\.b32")
def _count_bits(e, ins, match) -> None:
    d, a = ins.operands
    e.dst(d, "u32", f"{match[1]}({e.src(a, 'u32')})")


@fused(r"lop3\.b32")
def _lop3(e, ins, match) -> None:
    d, a, b, c, table = ins.operands
    a, b, c = (e.src(x, "u32") for x in (a, b, c))
    terms = [
        " & ".join(
            f"({name})" if on else f"(~{name})" for name, on in zip((a, b, c), (k & 4, k & 2, k & 1), strict=True)
        )
        for k in range(8)
        if table.value >> k & 1
    ]
    e.dst(d, "u32", " | ".join(f"({t})" for t in terms) if terms else f"{a} & {e.const(0, 'u32')}")


@in_node_scope
def prmt(a, b, selector):
    """Byte permute, default mode: nibble k of the selector picks byte (0..7) of {b,a}; bit 3 replicates its sign."""
    pool = b.astype(np.uint64) << np.uint64(32) | a
    result = np.zeros(len(a), np.uint32)
    for k in range(4):
        nibble = selector >> np.uint32(4 * k) & np.uint32(15)
        byte = (pool >> (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte >> np.uint32(7), np.uint32(255), np.uint32(0))
        result |= np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * k)
    return result


@fused(r"prmt\.b32")
def _prmt(e, ins, match) -> None:
    d, a, b, s = ins.operands
    e.dst(d, "u32", f"prmt({e.src(a, 'u32')}, {e.src(b, 'u32')}, {e.src(s, 'u32')})")


@in_node_scope
def funnel(a, b, n, left, clamp):
    """shf: shifts {b,a} and returns the high (left) or low (right) word."""
    n = np.minimum(n, np.uint32(32)) if clamp else n & np.uint32(31)
    pool = b.astype(np.uint64) << np.uint64(32) | a
    n = n.astype(np.uint64)
    return (pool << n >> np.uint64(32) if left else pool >> n).astype(np.uint32)


@fused(r"shf\.(l|r)\.(wrap|clamp)\.b32")
def _shf(e, ins, match) -> None:
    d, a, b, n = ins.operands
    args = ", ".join(e.src(x, "u32") for x in (a, b, n))
    e.dst(d, "u32", f"funnel({args}, {match[1] == 'l'}, {match[2] == 'clamp'})")


@in_node_scope
def bit_extract(a, position, length, signed):
    """bfe: `length` bits from `position`, zero or sign extended; both taken from their low 8 bits."""
    out = []
    for value, p, n in zip(a.tolist(), (position & 255).tolist(), (length & 255).tolist(), strict=True):
        n = min(n, 32)
        field = value >> p & ((1 << n) - 1)
        top = min(p + n - 1, 31)
        if signed and n and value >> top & 1:
            field |= -1 << (top - p + 1) if top >= p else -1
        out.append(field & 0xFFFFFFFF)
    return np.array(out, np.uint32)


@fused(r"bfe\.(u32|s32)")
def _bfe(e, ins, match) -> None:
    d, a, p, n = ins.operands
    args = ", ".join(e.src(x, "u32") for x in (a, p, n))
    e.dst(d, "u32", f"bit_extract({args}, {match[1] == 's32'})")


@in_node_scope
def bit_insert(a, b, position, length):
    """bfi: the low `length` bits of `a` put into `b` at `position`."""
    out = []
    for x, y, p, n in zip(a.tolist(), b.tolist(), (position & 255).tolist(), (length & 255).tolist(), strict=True):
        field = ((1 << n) - 1) << p & 0xFFFFFFFF
        out.append((y & ~field | x << p & field) & 0xFFFFFFFF)
    return np.array(out, np.uint32)


@fused(r"bfi\.b32")
def _bfi(e, ins, match) -> None:
    d, a, b, p, n = ins.operands
    e.dst(d, "u32", "bit_insert({}, {}, {}, {})".format(*(e.src(x, "u32") for x in (a, b, p, n))))


@fused(r"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)\.(s16|u16|b16|s32|u32|b32|s64|u64|b64)")
def _setp(e, ins, match) -> None:
    d, a, b = ins.operands
    kind = _plain(match[2]) if match[2][0] == "b" or match[1] in ("lo", "ls", "hi", "hs") else match[2]
    e.dst(d, "p", f"{e.src(a, kind)} {_COMPARE[match[1]]} {e.src(b, kind)}")


@fused(r"selp\.(b16|u16|s16|b32|u32|s32|f32|b64|u64|s64)")
def _selp(e, ins, match) -> None:
    d, a, b, p = ins.operands
    kind = match[1] if match[1] == "f32" else _plain(match[1])
    e.dst(d, kind, f"where({e.src(p, 'p')}, {e.src(a, kind)}, {e.src(b, kind)})")
