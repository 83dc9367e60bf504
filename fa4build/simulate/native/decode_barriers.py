"""Decoding rules: mbarriers, named and cluster barriers, wgmma and tcgen05."""

from __future__ import annotations

import re

from fa4build.simulate.native.coder import NONE, decodes, elements
from fa4build.simulate.native.decode_memory import ORDERS, SCOPES
from fa4build.simulate.ptx.instructions import Address, Imm, Sink, Vector

UNSAID = 256  # no scope is written
_SCOPE = r"(?:\.(release|relaxed)\.(cta|cluster))?"


@decodes(r"mbarrier\.init\.shared(?:::cta)?\.b64", "mbar_init")
def _init(c, ins, match) -> None:
    base, offset = c.address(ins.operands[0], 32)
    c.emit("mbar_init", base, c.src(ins.operands[1], "u32"), imm=offset)


@decodes(r"mbarrier\.inval\.shared(?:::cta)?\.b64", "mbar_inval")
def _inval(c, ins, match) -> None:
    base, offset = c.address(ins.operands[0], 32)
    c.emit("mbar_inval", base, imm=offset)


@decodes(rf"mbarrier\.arrive(\.expect_tx)?{_SCOPE}\.(shared|shared::cta|shared::cluster)\.b64", "mbar_arrive")
def _arrive(c, ins, match) -> None:
    d = NONE if isinstance(ins.operands[0], Sink) else c.dst(ins.operands[0], "u64")
    base, offset = c.address(ins.operands[1], 32)
    amount = c.src(ins.operands[2], "u32") if len(ins.operands) > 2 else NONE
    flags = (match[1] is not None) | ORDERS[match[2] or "release"] << 4 | SCOPES[match[3] or "cta"] << 6
    flags |= UNSAID * (match[3] is None)
    c.emit("mbar_arrive", d, base, amount, imm=offset, flags=flags)


@decodes(rf"mbarrier\.(expect_tx|complete_tx){_SCOPE}\.(shared|shared::cta|shared::cluster)\.b64", "mbar_expect")
def _expect(c, ins, match) -> None:
    base, offset = c.address(ins.operands[0], 32)
    c.emit("mbar_expect", base, c.src(ins.operands[1], "u32"), imm=offset, flags=match[1] == "complete_tx")


@decodes(
    r"mbarrier\.(try_wait|test_wait)\.parity(?:\.(acquire|relaxed)\.(cta|cluster))?\.(?:shared|shared::cta)\.b64",
    "mbar_wait",
)
def _try_wait(c, ins, match) -> None:
    base, offset = c.address(ins.operands[1], 32)
    flags = (len(ins.operands) == 4) | ORDERS[match[2] or "acquire"] << 4 | SCOPES[match[3] or "cta"] << 6
    flags |= UNSAID * (match[3] is None)
    c.emit("mbar_wait", c.dst(ins.operands[0], "p"), base, c.src(ins.operands[2], "u32"), imm=offset, flags=flags)


@decodes(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(\.aligned)?", "bar_named")
def _named(c, ins, match) -> None:
    number = c.src(ins.operands[0], "u32")
    count = c.src(ins.operands[1], "u32") if len(ins.operands) > 1 else NONE
    is_aligned = ins.opcode.startswith("bar.") or match[2] is not None
    c.emit("bar_named", number, count, flags=(match[1] == "sync") | is_aligned << 1)


@decodes(r"barrier\.cluster\.arrive(\.release|\.relaxed)?(\.aligned)?", "cluster_arrive")
def _cluster_arrive(c, ins, match) -> None:
    c.emit("cluster_arrive", flags=(match[1] == ".relaxed") | (match[2] is not None) << 1)


@decodes(r"barrier\.cluster\.wait(?:\.acquire)?(\.aligned)?", "cluster_wait")
def _cluster_wait(c, ins, match) -> None:
    c.emit("cluster_wait", flags=(match[1] is not None) << 1)


# --- wgmma --------------------------------------------------------------------------------------------------------

TYPES = {"bf16": 0, "f16": 1, "tf32": 2, "e4m3": 3, "e5m2": 4}
_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
A_REGISTERS, A_MN, B_MN = 1, 2, 4


@decodes(r"wgmma\.fence\.sync\.aligned", "wgmma_fence")
def _wgmma_fence(c, ins, match) -> None:
    c.emit("wgmma_fence")


@decodes(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(bf16|f16|tf32|e4m3|e5m2)\.(bf16|f16|tf32|e4m3|e5m2)",
    "wgmma",
)
def _wgmma(c, ins, match) -> None:
    n, kind, size = int(match[1]), match[3], _BYTES[match[3]]
    d, a, b, scale, scale_a, scale_b, *transposes = ins.operands
    if size == 1:
        text = f"{ins.opcode}: 8-bit operands are not modelled for sm_90a; their sums are cut to other bits there"
        raise ValueError(text)
    if len(d.elements) != n // 2 or int(match[2]) * size != 32:
        raise ValueError(f"{ins.opcode}: {len(d.elements)} accumulator registers; m64n{n} has {n // 2}")
    if (scale_a.value, scale_b.value) != (1, 1):
        raise ValueError("imm-scale other than 1 is not modelled")
    from_registers = isinstance(a, Vector)
    majors = [t.value for t in transposes]
    flags = A_REGISTERS if from_registers else 0
    flags |= A_MN if majors and not from_registers and majors[0] else 0
    flags |= B_MN if majors and majors[-1] else 0
    flags |= TYPES[kind] << 4 | TYPES[match[4]] << 8
    keeps = c.constant(bool(scale.value), 1) if isinstance(scale, Imm) else c.src(scale, "p")
    a_registers = [c.src(x, "u32") for x in a.elements] if from_registers else []
    c.emit(
        "wgmma",
        NONE if from_registers else c.src(a, "u64"),
        c.src(b, "u64"),
        keeps,
        size=size,
        count=int(match[2]),
        flags=flags,
        imm=n,
        entries=[c.dst(x, "f32") for x in d.elements],
        entries2=a_registers,
    )


@decodes(r"wgmma\.commit_group\.sync\.aligned", "wgmma_commit")
def _wgmma_commit(c, ins, match) -> None:
    c.emit("wgmma_commit")


@decodes(r"wgmma\.wait_group\.sync\.aligned", "wgmma_wait")
def _wgmma_wait(c, ins, match) -> None:
    c.emit("wgmma_wait", imm=ins.operands[0].value)


# --- tcgen05 ------------------------------------------------------------------------------------------------------

_SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
_SHAPE = r"(32x32b|16x64b|16x128b|16x256b|16x32bx2)\.x(\d+)"
_KINDS = ("f16", "tf32", "f8f6f4")


@decodes(r"tcgen05\.alloc\.cta_group::([12])\.sync\.aligned(?:\.shared::cta)?\.b32", "tc_alloc")
def _alloc(c, ins, match) -> None:
    base, offset = c.address(ins.operands[0], 32)
    c.emit("tc_alloc", base, c.src(ins.operands[1], "u32"), imm=offset, count=int(match[1]))


@decodes(r"tcgen05\.dealloc\.cta_group::([12])\.sync\.aligned\.b32", "tc_dealloc")
def _dealloc(c, ins, match) -> None:
    c.emit("tc_dealloc", *(c.src(x, "u32") for x in ins.operands), count=int(match[1]))


@decodes(r"tcgen05\.relinquish_alloc_permit\.cta_group::([12])\.sync\.aligned", "tc_relinquish")
def _relinquish(c, ins, match) -> None:
    c.emit("tc_relinquish", count=int(match[1]))


@decodes(rf"tcgen05\.ld\.sync\.aligned\.{_SHAPE}(\.pack::16b)?\.b32", "tc_ld")
def _tc_ld(c, ins, match) -> None:
    base, offset = c.address(ins.operands[1], 32)
    split = ins.operands[2].value if len(ins.operands) > 2 else 0
    places = [c.dst(t, "u32") for t in elements(ins.operands[0])]
    c.emit("tc_ld", base, imm=offset, imm2=split, count=int(match[2]), size=_SHAPES.index(match[1]),
           flags=match[3] is not None, entries=places)  # fmt: skip


@decodes(r"tcgen05\.ld\.red\.sync\.aligned\.32x32b\.x(\d+)\.(min|max)(\.abs)?(\.NaN)?\.f32", "tc_ld_red")
def _tc_ld_red(c, ins, match) -> None:
    base, offset = c.address(ins.operands[2], 32)
    places = [c.dst(t, "u32") for t in elements(ins.operands[0])]
    flags = (match[2] == "max") | (match[3] is not None) << 1 | (match[4] is not None) << 2
    c.emit("tc_ld_red", base, c.dst(ins.operands[1], "u32"), imm=offset, count=int(match[1]), flags=flags,
           entries=places)  # fmt: skip


@decodes(rf"tcgen05\.st\.sync\.aligned\.{_SHAPE}(\.unpack::16b)?\.b32", "tc_st")
def _tc_st(c, ins, match) -> None:
    base, offset = c.address(ins.operands[0], 32)
    split = ins.operands[1].value if len(ins.operands) > 2 else 0
    places = [c.src(s, "u32") for s in elements(ins.operands[-1])]
    c.emit("tc_st", base, imm=offset, imm2=split, count=int(match[2]), size=_SHAPES.index(match[1]),
           flags=match[3] is not None, entries=places)  # fmt: skip


@decodes(r"tcgen05\.wait::(ld|st)\.sync\.aligned|tcgen05\.fence::(before|after)_thread_sync", "tc_wait")
def _tc_wait(c, ins, match) -> None:
    c.emit("tc_wait", flags=("ld", "st", "before", "after").index(match[1] or match[2]))


@decodes(r"tcgen05\.mma\.cta_group::([12])\.kind::(f16|tf32|f8f6f4)(?:\.collector::[\w:]+)?", "tc_mma")
def _tc_mma(c, ins, match) -> None:
    d, a, b, shape, *rest = ins.operands
    disabled = elements(rest.pop(0)) if isinstance(rest[0], Vector) else ()
    enable = rest.pop(0)
    if rest:
        raise ValueError("tcgen05.mma with scale-input-d is not modelled")
    from_tmem = isinstance(a, Address)
    d_base, d_offset = c.address(d, 32)
    a_base, a_offset = c.address(a, 32) if from_tmem else (c.src(a, "u64"), 0)
    keeps = c.constant(bool(enable.value), 1) if isinstance(enable, Imm) else c.src(enable, "p")
    c.emit(
        "tc_mma",
        d_base,
        a_base,
        c.src(b, "u64"),
        c.src(shape, "u32"),
        keeps,
        imm=d_offset,
        imm2=a_offset,
        count=int(match[1]),
        size=_KINDS.index(match[2]),
        flags=from_tmem,
        entries=[c.src(x, "u32") for x in disabled],
    )


# name -> rows, bytes a row, quarters of the first 32 rows, quarters of the second
_COPIES = {
    "128x256b": (128, 32, 0, 0),
    "128x128b": (128, 16, 0, 0),
    "64x128b.warpx2::02_13": (64, 16, 0b0101, 0b1010),
    "64x128b.warpx2::01_23": (64, 16, 0b0011, 0b1100),
    "32x128b.warpx4": (32, 16, 0b1111, 0),
}


@decodes(r"tcgen05\.cp\.cta_group::([12])\.(" + "|".join(map(re.escape, _COPIES)) + ")", "tc_cp")
def _tc_cp(c, ins, match) -> None:
    rows, size, first, second = _COPIES[match[2]]
    base, offset = c.address(ins.operands[0], 32)
    c.emit("tc_cp", base, c.src(ins.operands[1], "u64"), imm=offset, imm2=rows, count=int(match[1]), size=size,
           flags=first | second << 4)  # fmt: skip


@decodes(
    r"tcgen05\.commit\.cta_group::([12])\.mbarrier::arrive::one(?:\.shared::cluster)?(\.multicast::cluster)?\.b64",
    "tc_commit",
)
def _tc_commit(c, ins, match) -> None:
    base, offset = c.address(ins.operands[0], 32)
    members = c.src(ins.operands[1], "u16") if match[2] else NONE
    c.emit("tc_commit", base, members, imm=offset, count=int(match[1]))
