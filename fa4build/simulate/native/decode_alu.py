"""Decoding rules: integer and float arithmetic, moves, conversions, exchanges inside a warp."""

from __future__ import annotations

from fa4build.simulate.native.coder import CLOCKS, NONE, decodes, elements
from fa4build.simulate.ptx.instructions import Imm, Reg, Special, Symbol, Vector

_INT = r"(s16|u16|s32|u32|s64|u64)"
_UNSIGNED = {"s16": "u16", "s32": "u32", "s64": "u64", "b16": "u16", "b32": "u32", "b64": "u64", "pred": "p"}
_WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
ROUNDINGS = {None: 0, "rn": 0, "rz": 1, "rm": 2, "rp": 3}
FTZ, NAN, NEGATE_A, NEGATE_C, SIGNED = 16, 32, 64, 128, 256


def _plain(kind: str) -> str:
    return _UNSIGNED.get(kind, kind)


def _simple(c, ins, operation: str, kind: str, flags: int = 0) -> None:
    """One destination and sources, all of one kind."""
    d, *sources = ins.operands
    c.emit(operation, c.dst(d, kind), *(c.src(s, kind) for s in sources), flags=flags)


# --- integers -----------------------------------------------------------------------------------------------------


@decodes(rf"(add|sub)\.{_INT}", r"\1_b*")
def _add(c, ins, match) -> None:
    _simple(c, ins, f"{match[1]}_b{match[2][1:]}", _plain(match[2]))


@decodes(rf"(mul|mad)\.lo\.{_INT}", r"\1_b*")
def _mul_lo(c, ins, match) -> None:
    _simple(c, ins, f"{match[1]}_b{match[2][1:]}", _plain(match[2]))


@decodes(r"(mul|mad)\.wide\.(s16|u16|s32|u32)", r"\1w_\2")
def _mul_wide(c, ins, match) -> None:
    kind, wide = match[2], _WIDER[match[2]]
    d, a, b, *rest = ins.operands
    sources = (c.src(a, kind), c.src(b, kind), *(c.src(x, wide) for x in rest))
    c.emit(f"{match[1]}w_{kind}", c.dst(d, wide), *sources)


@decodes(r"mul\.hi\.(s32|u32|u64)", r"mulhi_\1")
def _mul_hi(c, ins, match) -> None:
    _simple(c, ins, f"mulhi_{match[1]}", match[1])


@decodes(rf"(div|rem)\.{_INT}", r"\1_\2")
def _div(c, ins, match) -> None:
    _simple(c, ins, f"{match[1]}_{match[2]}", match[2])


@decodes(rf"(min|max)\.{_INT}", r"\1_\2")
def _min_max(c, ins, match) -> None:
    _simple(c, ins, f"{match[1]}_{match[2]}", match[2])


@decodes(r"(min|max)\.relu\.s32", r"\1relu_s32")
def _relu(c, ins, match) -> None:
    _simple(c, ins, f"{match[1]}relu_s32", "s32")


@decodes(r"(neg|abs)\.(s16|s32|s64)", r"\1_\2")
def _neg(c, ins, match) -> None:
    _simple(c, ins, f"{match[1]}_{match[2]}", match[2])


@decodes(r"not\.(pred|b16|b32|b64)", "not_*")
def _not(c, ins, match) -> None:
    _simple(c, ins, f"not_{match[1]}", _plain(match[1]))


@decodes(r"(and|or|xor)\.(pred|b16|b32|b64)", r"\1_*")
def _logic(c, ins, match) -> None:
    kind = "b32" if match[2] == "b16" else match[2]
    _simple(c, ins, f"{match[1]}_{kind}", _plain(match[2]))


@decodes(r"(shl|shr)\.(b16|b32|b64|u16|u32|u64|s16|s32|s64)", r"\1_*")
def _shift(c, ins, match) -> None:
    d, a, n = ins.operands
    kind = match[2] if match[1] == "shr" and match[2][0] == "s" else f"u{match[2][1:]}"
    c.emit(f"{match[1]}_{kind}", c.dst(d, kind), c.src(a, kind), c.src(n, "u32"))


@decodes(r"(popc|clz|brev)\.b32", r"\1")
def _count_bits(c, ins, match) -> None:
    _simple(c, ins, match[1], "u32")


@decodes(r"lop3\.b32", "lop3")
def _lop3(c, ins, match) -> None:
    d, *sources, table = ins.operands
    c.emit("lop3", c.dst(d, "u32"), *(c.src(s, "u32") for s in sources), imm=table.value)


@decodes(r"prmt\.b32", "prmt")
def _prmt(c, ins, match) -> None:
    _simple(c, ins, "prmt", "u32")


@decodes(r"shf\.(l|r)\.(wrap|clamp)\.b32", "shf")
def _shf(c, ins, match) -> None:
    _simple(c, ins, "shf", "u32", flags=(match[1] == "l") | (match[2] == "clamp") << 1)


@decodes(r"bfe\.(u32|s32)", r"bfe_\1")
def _bfe(c, ins, match) -> None:
    _simple(c, ins, f"bfe_{match[1]}", "u32")


@decodes(r"bfi\.b32", "bfi")
def _bfi(c, ins, match) -> None:
    _simple(c, ins, "bfi", "u32")


_SAME = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@decodes(r"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)\.(s16|u16|b16|s32|u32|b32|s64|u64|b64)", "setp_??_[usp]*")
def _setp(c, ins, match) -> None:
    d, a, b = ins.operands
    is_plain = match[2][0] == "b" or match[1] in (*_SAME, "eq", "ne")
    kind = _plain(match[2]) if is_plain else match[2]
    name = f"setp_{_SAME.get(match[1], match[1])}_{kind}"
    c.emit(name, c.dst(d, "p"), c.src(a, kind), c.src(b, kind))


@decodes(r"selp\.(b16|u16|s16|b32|u32|s32|f32|b64|u64|s64)", "selp_b*")
def _selp(c, ins, match) -> None:
    d, a, b, p = ins.operands
    kind = f"u{match[1][1:]}"
    name = "selp_b64" if kind == "u64" else "selp_b32"
    c.emit(name, c.dst(d, kind), c.src(a, kind), c.src(b, kind), c.src(p, "p"))


# --- floats -------------------------------------------------------------------------------------------------------

_ROUND = r"(?:\.(rn|rz|rm|rp))?(\.ftz)?"


def _float(c, ins, name: str, kind: str, rounding: str | None, ftz: str | None) -> None:
    flags = ROUNDINGS[rounding] | (FTZ if ftz else 0)
    _simple(c, ins, f"{name}_{kind}" if not flags else f"{name}r_{kind}", "pair" if kind == "f32x2" else "f32", flags)


@decodes(rf"(add|sub){_ROUND}\.f32", r"\1_f32 \1r_f32 fma_f32 fman_f32")
def _add_f32(c, ins, match) -> None:
    swallowed = c.contracted.get(c.index)
    if swallowed is None:
        _float(c, ins, match[1], "f32", match[2], match[3])
        return
    d, a, b = ins.operands
    product, x, y = c.function.instructions[swallowed].operands
    is_first = isinstance(a, Reg) and a == product
    flags = 0
    if match[1] == "sub":
        flags = NEGATE_C if is_first else NEGATE_A
    other = b if is_first else a
    name = "fman_f32" if flags else "fma_f32"
    c.emit(name, c.dst(d, "f32"), c.src(x, "f32"), c.src(y, "f32"), c.src(other, "f32"), flags=flags)


@decodes(rf"(mul|fma){_ROUND}\.f32", r"\1_f32 \1r_f32")
def _mul_f32(c, ins, match) -> None:
    _float(c, ins, match[1], "f32", match[2], match[3])


@decodes(rf"(add|sub|mul|fma){_ROUND}\.f32x2", r"\1_f32x2 \1r_f32x2")
def _packed(c, ins, match) -> None:
    _float(c, ins, match[1], "f32x2", match[2], match[3])


@decodes(r"fma\.rn\.f32\.bf16", "fma_f32_bf16")
def _fma_bf16(c, ins, match) -> None:
    d, a, b, x = ins.operands
    c.emit("fma_f32_bf16", c.dst(d, "f32"), c.src(a, "u16"), c.src(b, "u16"), c.src(x, "f32"))


@decodes(r"(max|min)(\.ftz)?(\.NaN)?\.f32", r"\1_f32 \1x_f32")
def _max_f32(c, ins, match) -> None:
    flags = (FTZ if match[2] else 0) | (NAN if match[3] else 0)
    _simple(c, ins, f"{match[1]}_f32" if not flags else f"{match[1]}x_f32", "f32", flags)


@decodes(r"(neg|abs)(\.ftz)?\.f32", r"\1_f32")
def _neg_f32(c, ins, match) -> None:
    _simple(c, ins, f"{match[1]}_f32", "f32", FTZ if match[2] else 0)


@decodes(r"setp\.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|nan|num)(\.ftz)?\.f32", r"setp_\1_f32")
def _setp_f32(c, ins, match) -> None:
    d, a, b = ins.operands
    c.emit(f"setp_{match[1]}_f32", c.dst(d, "p"), c.src(a, "f32"), c.src(b, "f32"), flags=FTZ if match[2] else 0)


_APPROXIMATE = {
    "ex2.approx.ftz": "ex2_ftz", "ex2.approx": "ex2", "lg2.approx.ftz": "lg2_ftz", "rcp.approx.ftz": "rcp_ftz",
    "rsqrt.approx.ftz": "rsqrt_approx", "sqrt.approx.ftz": "sqrt_approx", "tanh.approx": "tanh_approx",
    "sin.approx.ftz": "sin_approx", "cos.approx.ftz": "cos_approx",
}  # fmt: skip


@decodes(r"((ex2|lg2|rcp|rsqrt|sqrt|tanh|sin|cos)\.approx(?:\.ftz)?)\.f32", r"\2 \2_ftz \2_approx")
def _approximate(c, ins, match) -> None:
    if match[1] not in _APPROXIMATE:
        raise ValueError(f"{ins.opcode} has no model")
    _simple(c, ins, _APPROXIMATE[match[1]], "f32")


@decodes(r"(rcp|sqrt)\.rn(\.ftz)?\.f32", r"\1_rn")
def _exact(c, ins, match) -> None:
    _simple(c, ins, f"{match[1]}_rn", "f32", FTZ if match[2] else 0)


@decodes(r"div\.(?:rn|full)(\.ftz)?\.f32", "div_rn")
def _div_f32(c, ins, match) -> None:
    _simple(c, ins, "div_rn", "f32", FTZ if match[1] else 0)


@decodes(r"copysign\.f32", "copysign")
def _copysign(c, ins, match) -> None:
    _simple(c, ins, "copysign", "f32")


# --- moves --------------------------------------------------------------------------------------------------------

_WIDTH_OF_MOVE = {"b16": "u16", "u16": "u16", "s16": "u16", "b32": "u32", "u32": "u32", "s32": "u32", "f32": "u32",
                  "b64": "u64", "u64": "u64", "s64": "u64", "f64": "u64", "pred": "p", "b128": "b128"}  # fmt: skip
_MOVE = {"p": "mov_pred", "u16": "mov_b32", "u32": "mov_b32", "u64": "mov_b64", "b128": "mov_b128"}


@decodes(r"mov\.(b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64|pred|b128)", "mov_* clock pack* unpack*")
def _mov(c, ins, match) -> None:
    d, a = ins.operands
    kind = _WIDTH_OF_MOVE[match[1]]
    if isinstance(a, Vector):
        _pack(c, d, a.elements)
    elif isinstance(d, Vector):
        _unpack(c, d.elements, a, match[1])
    elif isinstance(a, Special) and a.name in CLOCKS:
        c.emit("clock", c.any_register(d))
    else:
        if kind in ("u32", "u64"):  # the registers decide, as between them nothing but bits moves
            kind = f"u{c.width_of(d, 64 if kind == 'u64' else 32)}"
        c.emit(_MOVE[kind], c.dst(d, kind), c.src(a, kind))


_PACKINGS = {(64, 2): ("pack32x2", "u64", "u32"), (64, 4): ("pack16x4", "u64", "u16"),
             (32, 2): ("pack16x2", "u32", "u16"), (128, 2): ("pack64x2", "b128", "u64")}  # fmt: skip


def _pack(c, d, parts) -> None:
    """Element 0 is the low part."""
    key = (c.width_of(d, 64), len(parts))
    if key not in _PACKINGS:
        raise ValueError(f"no packing of {len(parts)} elements into {key[0]} bits")
    name, whole, part = _PACKINGS[key]
    c.emit(name, c.dst(d, whole), *(c.src(x, part) for x in parts))


_UNPACKINGS = {("b64", 2): ("unpack32x2", "u64", "u32"), ("b64", 4): ("unpack16x4", "u64", "u16"),
               ("b32", 2): ("unpack16x2", "u32", "u16"), ("b128", 2): ("unpack64x2", "b128", "u64")}  # fmt: skip


def _unpack(c, parts, source, kind: str) -> None:
    if (kind, len(parts)) not in _UNPACKINGS:
        raise ValueError(f"no unpacking of .{kind} into {len(parts)} elements")
    name, whole, part = _UNPACKINGS[kind, len(parts)]
    c.emit(name, *(c.dst(x, part) for x in parts), *[NONE] * (4 - len(parts)), c.src(source, whole))


@decodes(r"cvta(?:\.to)?\.(?:param|shared(?:::cluster|::cta)?|global|local)\.(u64|u32)", "mov_b*")
def _cvta(c, ins, match) -> None:
    _simple(c, ins, _MOVE[match[1]], match[1])


@decodes(r"ld\.param(?:\.v([248]))?\.(b8|u8|s8|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64)", "ld_param")
def _ld_param(c, ins, match) -> None:
    d, source = ins.operands
    if not isinstance(source.base, Symbol):
        raise ValueError("ld.param through a register is not supported")
    parameter = next(p for p in c.function.parameters if p.name == source.base.name)
    size = int(match[2][1:]) // 8
    targets = d.elements if match[1] else (d,)
    if source.offset + size * len(targets) > parameter.size:
        raise ValueError(f"reads past the end of {parameter.name} ({parameter.size} bytes)")
    flags = SIGNED if match[2][0] == "s" else 0
    places = [c.any_register(t) for t in targets]
    c.emit("ld_param", size=size, flags=flags, imm=parameter.offset + source.offset, entries=places)


# --- conversions --------------------------------------------------------------------------------------------------

_INTEGER = r"(s8|u8|s16|u16|s32|u32|s64|u64)"
_PLAIN_CONVERSIONS = {("u64", "u32", 64, 32): "cvt_u64_u32", ("s64", "s32", 64, 32): "cvt_s64_s32",
                      ("u32", "u64", 32, 64): "cvt_u32_u64", ("u32", "u16", 32, 16): "mov_b32"}  # fmt: skip


@decodes(rf"cvt\.{_INTEGER}\.{_INTEGER}", "cvt_u64_u32 cvt_s64_s32 cvt_u32_u64 mov_b32 cvt_int")
def _cvt_integer(c, ins, match) -> None:
    d, a = ins.operands
    to, of = match[1], match[2]
    have, want = c.width_of(a, max(int(of[1:]), 16)), c.width_of(d, max(int(to[1:]), 16))
    source = c.src(a, f"u{have}") if isinstance(a, Reg) else c.src(a, f"u{of[1:]}")
    name = _PLAIN_CONVERSIONS.get((to, of, want, have))
    if name is not None:
        c.emit(name, c.dst(d, f"u{want}"), source)
        return
    # Both steps extend from some width: bits to shift out, and whether with the sign.
    first, second = min(int(of[1:]), have), int(to[1:])
    flags = (64 - first) | (of[0] == "s") << 7 | (64 - second) << 8 | (to[0] == "s") << 15
    c.emit("cvt_int", c.dst(d, f"u{want}"), source, size=want, flags=flags)


@decodes(r"cvt\.r[nz]\.f32\.(s32|u32|s64|u64|s16|u16)", r"cvt_f32_\1")
def _cvt_from_integer(c, ins, match) -> None:
    d, a = ins.operands
    if ins.opcode.startswith("cvt.rz"):
        raise ValueError("only round to nearest is modelled")
    c.emit(f"cvt_f32_{match[1]}", c.dst(d, "f32"), c.src(a, match[1]))


_MODES = {"rzi": 0, "rni": 1, "rmi": 2, "rpi": 3}


@decodes(r"cvt\.(rzi|rni|rmi|rpi)(?:\.ftz)?\.(s32|u32|s64|u64|s16|u16)\.f32", "cvt_int_f32")
def _cvt_to_integer(c, ins, match) -> None:
    d, a = ins.operands
    kind = match[2]
    flags = _MODES[match[1]] | (SIGNED if kind[0] == "s" else 0)
    c.emit("cvt_int_f32", c.dst(d, kind), c.src(a, "f32"), size=int(kind[1:]), flags=flags)


@decodes(r"cvt\.(rzi|rni|rmi|rpi)(\.ftz)?\.f32\.f32", "round_f32")
def _cvt_round(c, ins, match) -> None:
    _simple(c, ins, "round_f32", "f32", _MODES[match[1]] | (FTZ if match[2] else 0))


@decodes(r"cvt\.rn\.(bf16|f16)x2\.f32", r"cvt_\1x2")
def _cvt_pair(c, ins, match) -> None:
    d, high, low = ins.operands
    c.emit(f"cvt_{match[1]}x2", c.dst(d, "u32"), c.src(high, "f32"), c.src(low, "f32"))


@decodes(r"cvt\.rn\.(bf16|f16)\.f32", r"cvt_\1")
def _cvt_half(c, ins, match) -> None:
    d, a = ins.operands
    c.emit(f"cvt_{match[1]}", c.dst(d, "u16"), c.src(a, "f32"))


@decodes(r"cvt\.f32\.(bf16|f16)", r"cvt_f32_\1")
def _cvt_widen(c, ins, match) -> None:
    d, a = ins.operands
    c.emit(f"cvt_f32_{match[1]}", c.dst(d, "f32"), c.src(a, "u16"))


@decodes(r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32", r"cvt_\1x2")
def _cvt_fp8(c, ins, match) -> None:
    d, high, low = ins.operands
    c.emit(f"cvt_{match[1]}x2", c.dst(d, "u16"), c.src(high, "f32"), c.src(low, "f32"))


# --- exchanges inside a warp --------------------------------------------------------------------------------------


@decodes(r"elect\.sync", "elect")
def _elect(c, ins, match) -> None:
    pair, members = ins.operands
    c.emit("elect", c.dst(pair.data, "u32"), c.dst(pair.predicate, "p"), c.src(members, "u32"))


SHUFFLES = {"up": 0, "down": 1, "bfly": 2, "idx": 3}


@decodes(r"shfl\.sync\.(up|down|bfly|idx)\.b32", "shfl")
def _shfl(c, ins, match) -> None:
    d, a, b, clamp, members = ins.operands
    data, predicate = getattr(d, "data", d), getattr(d, "predicate", None)
    is_fixed = isinstance(b, Imm) and isinstance(clamp, Imm)
    c.emit(
        "shfl",
        c.dst(data, "u32"),
        NONE if predicate is None else c.dst(predicate, "p"),
        *(c.src(x, "u32") for x in (a, b, clamp, members)),
        flags=SHUFFLES[match[1]] | is_fixed << 4,
    )


VOTES = {"ballot": 0, "any": 1, "all": 2, "uni": 3}


@decodes(r"vote\.sync\.(ballot\.b32|any\.pred|all\.pred|uni\.pred)", "vote")
def _vote(c, ins, match) -> None:
    d, a, members = ins.operands
    mode = match[1].split(".")[0]
    kind = "u32" if mode == "ballot" else "p"
    c.emit("vote", c.dst(d, kind), c.src(a, "p"), c.src(members, "u32"), flags=VOTES[mode])


@decodes(r"activemask\.b32", "activemask")
def _activemask(c, ins, match) -> None:
    c.emit("activemask", c.dst(ins.operands[0], "u32"))


REDUCTIONS = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5}


@decodes(r"redux\.sync\.(add|min|max|and|or|xor)\.(u32|s32|b32)", "redux")
def _redux(c, ins, match) -> None:
    d, a, members = ins.operands
    flags = REDUCTIONS[match[1]] | (SIGNED if match[2] == "s32" else 0)
    c.emit("redux", c.dst(d, "u32"), c.src(a, "u32"), c.src(members, "u32"), flags=flags)


@decodes(r"bar\.warp\.sync", "bar_warp")
def _bar_warp(c, ins, match) -> None:
    c.emit("bar_warp", c.src(ins.operands[0], "u32"))


@decodes(r"(st|ld)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16", r"\1matrix")
def _matrix(c, ins, match) -> None:
    address, values = ins.operands if match[1] == "st" else ins.operands[::-1]
    base, offset = c.address(address, 32)
    make = c.src if match[1] == "st" else c.dst
    places = [make(v, "u32") for v in elements(values)]
    c.emit(f"{match[1]}matrix", base, imm=offset, flags=bool(match[3]), entries=places, count=int(match[2]))
