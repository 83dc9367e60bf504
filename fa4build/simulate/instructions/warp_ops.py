"""Shuffles, votes, elections, warp reductions and matrix fragments.

Source: PTX ISA 9.7.9.6, 9.7.13, 9.7.14.5; ptx-semantics.md 5.5, 5.6.
"""

import numpy as np

from fa4build.simulate.hardware.gang import WARP, Fault
from fa4build.simulate.instructions.memory import load_shared, store_shared
from fa4build.simulate.instructions.operands import lane_ranges, require_converged
from fa4build.simulate.ptx.instructions import Imm
from fa4build.simulate.translate.node_scope import in_node_scope
from fa4build.simulate.translate.opcodes import fused

_FULL = 0xFFFFFFFF


def _check_members(g, members, mask, what: str, site: int) -> None:
    """All lanes named in the member mask must execute the instruction, in every warp that executes it."""
    if mask is None and members == _FULL:
        return
    present = np.ones((len(g.warps), WARP), bool) if mask is None else mask.reshape(-1, WARP)
    gone = np.zeros_like(present) if g.exited is None else g.exited.reshape(-1, WARP)
    named = np.array([members >> lane & 1 for lane in range(WARP)], bool)
    for k, warp in enumerate(g.warps):
        if present[k].any() and (named & ~present[k] & ~gone[k]).any():
            here = lane_ranges(np.flatnonzero(present[k]).tolist())
            raise Fault(
                f"{what} with member mask 0x{members:08x} is executed by lanes {here} of warp {warp.index} "
                f"only; the hardware waits "
                "for the others for ever. A TMA load, TMA reduce or tcgen05 MMA elects its own thread: put "
                "it under a whole-warp "
                "branch (`if warp_idx == 0`), never under `if tid == 0` or elect_one()",
                site,
            )


def _members(value, mask) -> int:
    chosen = value if mask is None else value[mask]
    return int(chosen[0]) if len(chosen) else _FULL


@in_node_scope
def elect(g, members, mask, site):
    """Lane id of the elected lane and the predicate that is true in it alone: the lowest lane of the member mask."""
    members = _members(members, mask)
    _check_members(g, members, mask, "elect.sync", site)
    if members == 0:
        raise Fault("elect.sync with an empty member mask", site)
    leader = (members & -members).bit_length() - 1
    lane = g.tids & np.uint32(31)
    return np.full(g.lanes, leader, np.uint32), lane == leader


@fused(r"elect\.sync")
def _elect(e, ins, match) -> None:
    pair, members = ins.operands
    result = e.tmp(f"elect(g, {e.src(members, 'u32')}, {e.mask}, {e.site})")
    e.dst(pair.data, "u32", f"{result}[0]")
    e.dst(pair.predicate, "p", f"{result}[1]")


def _source_lanes(tids, mode: str, b, c):
    """Lane that each lane reads, and whether it is in range."""
    lane = (tids & np.uint32(31)).astype(np.int64)
    b = b.astype(np.int64)
    segment, clamp = (c >> np.uint32(8) & np.uint32(31)).astype(np.int64), (c & np.uint32(31)).astype(np.int64)
    highest, lowest = lane & segment | clamp & ~segment, lane & segment
    if mode == "up":
        source = lane - (b & 31)
        inside = source >= highest
    elif mode == "down":
        source = lane + (b & 31)
        inside = source <= highest
    elif mode == "bfly":
        source = lane ^ (b & 31)
        inside = source <= highest
    else:
        source = lowest | b & ~segment & 31
        inside = source <= highest
    return np.where(inside, source, lane), inside


@in_node_scope
def shuffle(g, value, b, c, members, mode, mask, site, key):
    """shfl.sync: the value of another lane; out of range keeps the own value. `key` caches constant lane maps."""
    if mask is not None:
        _check_members(g, _members(members, mask), mask, f"shfl.sync.{mode}", site)
    if g.cta.observer is not None:
        g.cta.observer.warp_barrier(g, mask)
    cached = g.special.get(key) if key is not None else None
    if cached is None:
        source, inside = _source_lanes(g.tids, mode, b, c)
        cached = (np.arange(g.lanes) // WARP * WARP + source, inside)
        if key is not None:
            g.special[key] = cached
    return value[cached[0]], cached[1]


@fused(r"shfl\.sync\.(up|down|bfly|idx)\.b32")
def _shfl(e, ins, match) -> None:
    d, a, b, c, members = ins.operands
    mode = match[1]
    key = ("shfl", mode, b.value, c.value) if isinstance(b, Imm) and isinstance(c, Imm) else None
    data = getattr(d, "data", d)
    args = ", ".join(e.src(x, "u32") for x in (b, c, members))
    result = e.tmp(f"shuffle(g, {e.src(a, 'u32')}, {args}, {mode!r}, {e.mask}, {e.site}, {key!r})")
    e.dst(data, "u32", f"{result}[0]")
    if data is not d:
        e.dst(d.predicate, "p", f"{result}[1]")


@in_node_scope
def vote(g, predicate, members, mode, mask, site):
    """vote.sync: ballot as u32, or any/all/uni as a predicate."""
    members = _members(members, mask)
    _check_members(g, members, mask, "vote.sync", site)
    if g.cta.observer is not None:
        g.cta.observer.warp_barrier(g, mask)
    counted = np.ones(g.lanes, bool) if mask is None else mask
    p = (predicate & counted).reshape(-1, WARP)
    n = counted.reshape(-1, WARP)
    if mode == "ballot":
        words = (p.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(axis=1)
        return np.repeat(words.astype(np.uint32), WARP)
    some, every = p.any(axis=1), (p | ~n).all(axis=1)
    return np.repeat({"any": some, "all": every, "uni": every | ~some}[mode], WARP)


@fused(r"vote\.sync\.(ballot\.b32|any\.pred|all\.pred|uni\.pred)")
def _vote(e, ins, match) -> None:
    d, a, members = ins.operands
    mode = match[1].split(".")[0]
    kind = "u32" if mode == "ballot" else "p"
    e.dst(d, kind, f"vote(g, {e.src(a, 'p')}, {e.src(members, 'u32')}, {mode!r}, {e.mask}, {e.site})")


@in_node_scope
def active_mask(g, mask):
    """activemask: the executing lanes of each warp."""
    present = np.ones(g.lanes, bool) if mask is None else mask
    words = (present.reshape(-1, WARP).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(axis=1)
    return np.repeat(words.astype(np.uint32), WARP)


@fused(r"activemask\.b32")
def _activemask(e, ins, match) -> None:
    e.dst(ins.operands[0], "u32", f"active_mask(g, {e.mask})")


@in_node_scope
def warp_reduce(g, value, members, operation, mask, site):
    """redux.sync over the executing lanes of each warp."""
    _check_members(g, _members(members, mask), mask, "redux.sync", site)
    present = (np.ones(g.lanes, bool) if mask is None else mask).reshape(-1, WARP)
    rows = value.reshape(-1, WARP)
    function = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    out = [
        function[operation].reduce(row[keep]) if keep.any() else row[0] for row, keep in zip(rows, present, strict=True)
    ]
    return np.repeat(np.array(out, value.dtype), WARP)


@fused(r"redux\.sync\.(add|min|max|and|or|xor)\.(u32|s32|b32)")
def _redux(e, ins, match) -> None:
    d, a, members = ins.operands
    kind = "u32" if match[2] == "b32" else match[2]
    e.dst(d, kind, f"warp_reduce(g, {e.src(a, kind)}, {e.src(members, 'u32')}, {match[1]!r}, {e.mask}, {e.site})")


@in_node_scope
def warp_barrier(g, members, mask, site):
    """bar.warp.sync: orders the lanes of a warp; they must all be here."""
    _check_members(g, _members(members, mask), mask, "bar.warp.sync", site)
    observer = g.cta.observer
    if observer is not None:
        observer.warp_barrier(g, mask)


@fused(r"bar\.warp\.sync")
def _bar_warp(e, ins, match) -> None:
    e.lines.append(f"warp_barrier(g, {e.src(ins.operands[0], 'u32')}, {e.mask}, {e.site})")


def _row_addresses(address, matrices: int):
    """Row addresses (warps, matrices, 8) from the lanes that supply them."""
    return address.reshape(-1, WARP)[:, : 8 * matrices].reshape(-1, matrices, 8)


def _element_addresses(address, matrices: int):
    """Address of the register's element pair for every (warp, matrix, lane): row t/4, columns 2(t%4)."""
    lane = np.arange(WARP)
    rows = _row_addresses(address, matrices)
    return rows[:, :, lane // 4] + (4 * (lane % 4)).astype(np.uint32)


@in_node_scope
def store_matrix(g, address, values, transposed, mask, site):
    """stmatrix m8n8 .b16: lane t holds row t/4, columns 2(t%4) and +1 of each 8x8 matrix (transposed: row and
    column swapped).
    """
    require_converged(g, mask, "stmatrix.sync.aligned")
    if transposed:
        values = [_transpose_fragment(v) for v in values]
    keep = None if mask is None else mask
    targets = _element_addresses(address, len(values))
    for j, value in enumerate(values):
        store_shared(g, targets[:, j].reshape(-1), [value], keep, site)


def _transpose_fragment(value):
    """Fragment of the transposed matrix, per warp."""
    halves = np.ascontiguousarray(value).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(halves.transpose(0, 2, 1)).reshape(-1).view(np.uint32)


@fused(r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def _stmatrix(e, ins, match) -> None:
    address, values = ins.operands
    names = ", ".join(e.src(v, "u32") for v in values.elements)
    e.lines.append(f"store_matrix(g, {e.address(address, 32)}, [{names}], {match[2] is not None}, {e.mask}, {e.site})")


@in_node_scope
def load_matrix(g, address, count, transposed, mask, site):
    """ldmatrix m8n8 .b16, the inverse of stmatrix."""
    require_converged(g, mask, "ldmatrix.sync.aligned")
    targets = _element_addresses(address, count)
    values = [load_shared(g, targets[:, j].reshape(-1), 4, 1, mask, site)[0] for j in range(count)]
    return [_transpose_fragment(v) for v in values] if transposed else values


@fused(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def _ldmatrix(e, ins, match) -> None:
    values, address = ins.operands
    result = e.tmp(f"load_matrix(g, {e.address(address, 32)}, {match[1]}, {match[2] is not None}, {e.mask}, {e.site})")
    for k, element in enumerate(values.elements):
        e.dst(element, "u32", f"{result}[{k}]")
