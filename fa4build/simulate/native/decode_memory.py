"""Decoding rules: loads and stores, atomics, fences, copies."""

from __future__ import annotations

from fa4build.simulate.native.coder import NONE, decodes, elements
from fa4build.simulate.ptx.instructions import Imm

_TYPE = r"(b8|u8|s8|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64)"
_CACHE = r"(?:\.(?:ca|cg|cs|lu|cv|wb|wt|nc|weak))*(?:\.L[12]::[\w:]+)*"
SIGNED = 256


def _targets(c, operand) -> list[int]:
    return [c.any_register(t) for t in elements(operand)]


def _sources(c, operand, size: int) -> list[int]:
    """Stored values; a register of another width is cut or widened with zeros."""
    return [c.src(s, f"u{c.width_of(s, max(8 * size, 16))}") for s in elements(operand)]


def _bits_of_space(space: str) -> int:
    return 32 if space == "shared" else 64


@decodes(rf"ld\.(shared|global|local)(?:::cta)?{_CACHE}(?:\.v([248]))?\.{_TYPE}", r"ld_\1")
def _load(c, ins, match) -> None:
    base, offset = c.address(ins.operands[1], _bits_of_space(match[1]))
    size, places = int(match[3][1:]) // 8, _targets(c, ins.operands[0])
    flags = SIGNED if match[3][0] == "s" else 0
    c.emit(f"ld_{match[1]}", base, imm=offset, size=size, count=len(places), flags=flags, entries=places)


_STRONG = r"(?:\.(relaxed|release|volatile)(?:\.(cta|cluster|gpu|sys))?)?"


@decodes(rf"st{_STRONG}\.(shared|global|local)(?:::cta)?{_CACHE}(?:\.v([248]))?\.{_TYPE}", r"st_\3")
def _store(c, ins, match) -> None:
    """Flags of a strong store: 1, order << 1, scope << 4."""
    order, scope, space, kind = match[1], match[2], match[3], match[5]
    if order == "release" and space != "global":
        raise ValueError(f"{ins.opcode} is not modelled; a release of the global space is")
    base, offset = c.address(ins.operands[0], _bits_of_space(space))
    size = int(kind[1:]) // 8
    places = _sources(c, ins.operands[1], size)
    flags = 0
    if order and space == "global":
        scope = "sys" if order == "volatile" else scope or "gpu"
        flags = 1 | (2 if order == "release" else 0) << 1 | SCOPES[scope] << 4
    c.emit(f"st_{space}", base, imm=offset, size=size, count=len(places), flags=flags, entries=places)


@decodes(rf"(ld|st)\.shared::cluster(?:\.v([24]))?\.{_TYPE}", r"\1_cluster")
def _remote(c, ins, match) -> None:
    is_load = match[1] == "ld"
    size = int(match[3][1:]) // 8
    place, data = (ins.operands[1], ins.operands[0]) if is_load else ins.operands[:2]
    base, offset = c.address(place, 32)
    make = c.dst if is_load else c.src
    places = [make(x, f"u{8 * size}") for x in elements(data)]
    c.emit(f"{match[1]}_cluster", base, imm=offset, size=size, count=len(places), entries=places)


@decodes(r"mapa\.shared::cluster\.u32", "mapa")
def _mapa(c, ins, match) -> None:
    c.emit("mapa", c.dst(ins.operands[0], "u32"), *(c.src(x, "u32") for x in ins.operands[1:]))


@decodes(r"prefetch(?:u)?\.[\w.:]+|nanosleep\.u32|cp\.async\.bulk\.prefetch\.[\w.:]+", "nop")
def _hint(c, ins, match) -> None:
    c.emit("nop")


@decodes(rf"ld(?:\.global)?\.(acquire|relaxed|volatile)(?:\.(cta|cluster|gpu|sys))?(?:\.global)?\.{_TYPE}", "ld_poll")
def _ld_acquire(c, ins, match) -> None:
    base, offset = c.address(ins.operands[1], 64)
    size = int(match[3][1:]) // 8
    flags = ORDERS["acquire" if match[1] == "acquire" else "relaxed"] | SCOPES[match[2] or "gpu"] << 4
    c.emit("ld_poll", c.dst(ins.operands[0], f"u{8 * size}"), base, imm=offset, size=size, flags=flags)


ORDERS = {None: 0, "relaxed": 0, "acquire": 1, "release": 2, "acq_rel": 3}
SCOPES = {None: 2, "cta": 0, "cluster": 1, "gpu": 2, "sys": 3}
ATOMICS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
_ORDER = r"(?:\.(relaxed|acquire|release|acq_rel))?(?:\.(cta|cluster|gpu|sys))?"
_OPERATION = r"\.(add|min|max|and|or|xor|exch|cas|inc|dec)\.(u32|s32|b32|u64|s64|b64|f32)"


@decodes(
    rf"(atom|red){_ORDER}(?:\.(global|shared|shared::cta))?{_ORDER}(?:\.(global|shared|shared::cta))?{_OPERATION}",
    "atomic",
)
def _atomic(c, ins, match) -> None:
    order, scope, space = match[2] or match[5], match[3] or match[6], match[4] or match[7]
    operation, kind = match[8], match[9]
    if space is None:
        raise ValueError(f"{ins.opcode}: name the state space (.global or .shared)")
    if kind == "f32" and operation != "add":
        raise ValueError(f"{ins.opcode} is not modelled for f32")
    operands, width = list(ins.operands), f"u{kind[1:]}"
    d = c.dst(operands.pop(0), width) if match[1] == "atom" else NONE
    base, offset = c.address(operands.pop(0), 64 if space == "global" else 32)
    values = [c.src(o, width) for o in operands]
    flags = ATOMICS.index(operation) | "usf".find(kind[0]) % 3 << 4 | (space == "global") << 6
    if kind[0] == "b":
        flags = ATOMICS.index(operation) | (space == "global") << 6
    flags |= ORDERS[order] << 8 | SCOPES[scope] << 10
    c.emit("atomic", d, base, *values, imm=offset, size=int(kind[1:]) // 8, flags=flags)


# --- fences -------------------------------------------------------------------------------------------------------

_SPACES = {"shared::cta": 1, "shared::cluster": 2, "global": 4, None: 7}
_FENCE_ORDERS = {"acq_rel": 3, "sc": 3, "acquire": 1, "release": 2}


@decodes(
    r"fence\.(?:(proxy\.async)(?:\.(shared::cta|shared::cluster|global))?|(mbarrier_init)\.release\.cluster"
    r"|(proxy\.alias)|(acq_rel|sc|acquire|release)\.(cta|cluster|gpu|sys)|(proxy)\.tensormap::generic\.[\w.]+)"
    r"|membar\.(?:cta|gl|sys)",
    "fence",
)
def _fence(c, ins, match) -> None:
    """kind (chk_fence_kind), spaces, order and scope in the flags."""
    if match[1]:
        c.emit("fence", flags=1 | _SPACES[match[2]] << 4)
    elif match[3]:
        c.emit("fence", flags=2)
    elif match[5]:
        c.emit("fence", flags=3 | _FENCE_ORDERS[match[5]] << 8 | SCOPES[match[6]] << 10)
    else:
        c.emit("fence", flags=0)


@decodes(r"griddepcontrol\.(launch_dependents|wait)", "fence")
def _griddep(c, ins, match) -> None:
    c.emit("fence", flags=4 if match[1] == "wait" else 5)


@decodes(r"trap", "fault")
def _trap(c, ins, match) -> None:
    c.emit_fault("trap executed: an assertion of the kernel failed")


@decodes(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32", "setmaxnreg")
def _setmaxnreg(c, ins, match) -> None:
    c.emit("setmaxnreg", imm=ins.operands[0].value, flags=match[1] == "inc")


# --- cp.async and bulk copies -------------------------------------------------------------------------------------


@decodes(r"cp\.async\.(ca|cg)\.shared\.global(?:\.L2::cache_hint)?(?:\.L2::\d+B)?", "cp_async")
def _cp_async(c, ins, match) -> None:
    to, source = c.address(ins.operands[0], 32), c.address(ins.operands[1], 64)
    size = ins.operands[2].value
    real = c.src(ins.operands[3] if len(ins.operands) > 3 else Imm(size), "u32")
    c.emit("cp_async", to[0], source[0], real, size=size, imm=to[1], imm2=source[1])


@decodes(r"cp\.async\.commit_group", "cp_commit")
def _cp_commit(c, ins, match) -> None:
    c.emit("cp_commit")


@decodes(r"cp\.async\.wait_(group|all)", "cp_wait")
def _cp_wait(c, ins, match) -> None:
    newest = ins.operands[0].value if match[1] == "group" else 0
    c.emit("cp_wait", imm=newest, flags=match[1] == "all")


@decodes(r"cp\.async\.mbarrier\.arrive(\.noinc)?\.shared(?:::cta)?\.b64", "cp_arrive")
def _cp_arrive(c, ins, match) -> None:
    base, offset = c.address(ins.operands[0], 32)
    c.emit("cp_arrive", base, imm=offset, flags=match[1] is None)


@decodes(
    r"cp\.async\.bulk\.shared::(?:cluster|cta)\.global\.mbarrier::complete_tx::bytes(?:\.L2::cache_hint)?", "bulk_load"
)
def _bulk_load(c, ins, match) -> None:
    to, source = c.address(ins.operands[0], 32), c.address(ins.operands[1], 64)
    count, bar = c.src(ins.operands[2], "u32"), c.address(ins.operands[3], 32)
    entries = [to[1], source[1], bar[1]]
    c.emit("bulk_load", to[0], source[0], count, bar[0], entries=entries)


@decodes(r"cp\.async\.bulk\.shared::cluster\.shared::cta\.mbarrier::complete_tx::bytes", "bulk_push")
def _bulk_push(c, ins, match) -> None:
    to, source = c.address(ins.operands[0], 32), c.address(ins.operands[1], 32)
    count, bar = c.src(ins.operands[2], "u32"), c.address(ins.operands[3], 32)
    c.emit("bulk_push", to[0], source[0], count, bar[0], entries=[to[1], source[1], bar[1]])


@decodes(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group(?:\.L2::cache_hint)?", "bulk_out")
def _bulk_store(c, ins, match) -> None:
    _bulk_out(c, ins, 0)


@decodes(r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32", "bulk_out")
def _bulk_reduce(c, ins, match) -> None:
    _bulk_out(c, ins, 1)


def _bulk_out(c, ins, reduces: int) -> None:
    to, source = c.address(ins.operands[0], 64), c.address(ins.operands[1], 32)
    count = c.src(ins.operands[2], "u32")
    c.emit("bulk_out", to[0], source[0], count, imm=to[1], imm2=source[1], flags=reduces)


@decodes(r"cp\.async\.bulk\.commit_group", "bulk_commit")
def _bulk_commit(c, ins, match) -> None:
    c.emit("bulk_commit")


@decodes(r"cp\.async\.bulk\.wait_group(\.read)?", "bulk_wait")
def _bulk_wait(c, ins, match) -> None:
    c.emit("bulk_wait", imm=ins.operands[0].value, flags=match[1] is not None)


@decodes(
    r"st\.async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(?:\.v([24]))?\.(b32|b64|u32|s32|f32)",
    "st_async",
)
def _st_async(c, ins, match) -> None:
    to, bar = c.address(ins.operands[0], 32), c.address(ins.operands[2], 32)
    size = int(match[2][1:]) // 8
    values = [c.src(v, f"u{8 * size}") for v in elements(ins.operands[1])]
    c.emit("st_async", to[0], bar[0], imm=to[1], imm2=bar[1], size=size, count=len(values), entries=values)


# --- tensor copies ------------------------------------------------------------------------------------------------

_TILE = r"\.([12345])d"
_HINT = r"(?:\.L2::cache_hint)?"


def _tensor(c, tensor, shared) -> tuple[int, tuple[int, int], list[int]]:
    """(map, shared address, coordinates)."""
    return c.src(tensor.base, "u64"), c.address(shared, 32), [c.src(x, "s32") for x in tensor.coordinates]


@decodes(
    rf"cp\.async\.bulk\.tensor{_TILE}\.shared::(cta|cluster)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes"
    rf"(\.multicast::cluster)?(?:\.cta_group::([12]))?{_HINT}(?:\.cta_group::([12]))?",
    "tensor_load",
)
def _tensor_load(c, ins, match) -> None:
    tensor, shared, coordinates = _tensor(c, ins.operands[1], ins.operands[0])
    bar = c.address(ins.operands[2], 32)
    members = c.src(ins.operands[3], "u16") if match[3] else NONE
    flags = (match[2] == "cta") | (match[3] is not None) << 1 | ("2" in (match[4], match[5])) << 2
    c.emit("tensor_load", tensor, shared[0], bar[0], members, imm=shared[1], imm2=bar[1], count=int(match[1]),
           flags=flags, entries=coordinates)  # fmt: skip


@decodes(rf"cp\.async\.bulk\.tensor{_TILE}\.global\.shared::cta(?:\.tile)?\.bulk_group{_HINT}", "tensor_out")
def _tensor_store(c, ins, match) -> None:
    _outgoing(c, ins, match, 0)


@decodes(
    rf"cp\.reduce\.async\.bulk\.tensor{_TILE}\.global\.shared::cta\.add(?:\.tile)?\.bulk_group{_HINT}", "tensor_out"
)
def _tensor_reduce(c, ins, match) -> None:
    _outgoing(c, ins, match, 1)


def _outgoing(c, ins, match, reduces: int) -> None:
    tensor, shared, coordinates = _tensor(c, ins.operands[0], ins.operands[1])
    c.emit("tensor_out", tensor, shared[0], imm=shared[1], count=int(match[1]), flags=reduces, entries=coordinates)


@decodes(
    r"clusterlaunchcontrol\.try_cancel\.async(?:\.shared::cta)?\.mbarrier::complete_tx::bytes(\.multicast::cluster::all)?\.b128",
    "try_cancel",
)
def _try_cancel(c, ins, match) -> None:
    where, bar = c.address(ins.operands[0], 32), c.address(ins.operands[1], 32)
    c.emit("try_cancel", where[0], bar[0], imm=where[1], imm2=bar[1], flags=match[1] is not None)


@decodes(r"clusterlaunchcontrol\.query_cancel\.is_canceled\.pred\.b128", "is_canceled")
def _is_canceled(c, ins, match) -> None:
    c.emit("is_canceled", c.dst(ins.operands[0], "p"), c.src(ins.operands[1], "b128"))


@decodes(r"clusterlaunchcontrol\.query_cancel\.get_first_ctaid::([xyz])\.b32\.b128", "first_ctaid")
def _first_ctaid(c, ins, match) -> None:
    d, handle = ins.operands
    c.emit("first_ctaid", c.dst(d, "u32"), c.src(handle, "b128"), imm="xyz".index(match[1]) + 1)
