"""cp.async, bulk copies and bulk groups. Source: ptx-semantics.md 8.2, 8.3, 8.5; PTX ISA 9.7.9.25, 9.7.9.27."""

import numpy as np

from fa4build.simulate.hardware.engine import AsyncOp
from fa4build.simulate.hardware.gang import WARP
from fa4build.simulate.instructions.barriers import find_mbarrier, lanes_by_address
from fa4build.simulate.instructions.memory import RANK_SHIFT
from fa4build.simulate.instructions.operands import Wait, active_lanes, active_warps
from fa4build.simulate.ptx.instructions import Imm
from fa4build.simulate.translate.opcodes import fused, system
from fa4build.simulate.units import float_formats as ff

_POISON = 0xC1


def target_cta(b, g, address: int):
    """The CTA a shared::cluster address names, and the offset in its window."""
    rank, offset = address >> RANK_SHIFT, address & 0xFFFFFF
    if rank >= len(g.cta.cluster.ctas):
        raise b.fault(f"shared address 0x{address:x} names CTA rank {rank}; the cluster has {len(g.cta.cluster.ctas)}")
    cta = g.cta.cluster.ctas[rank]
    if cta is not g.cta and cta.threads_alive() == 0:
        raise b.fault(f"shared address 0x{address:x} is in CTA rank {rank}, which has exited")
    return cta, offset


def shared_span(b, cta, offset: int, size: int, what: str) -> np.ndarray:
    """Bytes [offset, offset + size) of a CTA's shared memory, bounds checked."""
    if not 0x400 <= offset <= cta.shared_limit - size:
        raise b.fault(
            f"{what}: shared bytes 0x{offset:x}..0x{offset + size:x} are outside CTA rank {cta.rank}'s "
            f"{cta.shared_limit - 0x400}"
        )
    return cta.shared[1][offset : offset + size]


def require_bulk_alignment(b, *values: int) -> None:
    """Bulk copies need 16-byte addresses and sizes."""
    for value in values:
        if value % 16:
            raise b.fault(f"bulk copy: 0x{value:x} is not a multiple of 16 (addresses and size must be)")


def one_thread_a_warp(b, g, mask) -> list[int]:
    """The lanes that execute, at most one of each warp (warps in lockstep may be several)."""
    lanes = active_lanes(g, mask).tolist()
    if len({lane // WARP for lane in lanes}) != len(lanes):
        one_thread(b, g, mask)
    return lanes


def one_thread(b, g, mask) -> int:
    """The only active lane: every further lane would repeat the copy and its transaction bytes."""
    lanes = active_lanes(g, mask)
    if len(lanes) != 1:
        raise b.fault(
            f"{b.ins.opcode} is executed by {len(lanes)} threads; each repeats the copy and its bytes. "
            "Elect one thread (elect_one, or a single-lane branch)"
        )
    return int(lanes[0])


def observe_issue(b, g, warp, op: AsyncOp, channel, reads=(), writes=()) -> None:
    """Tells the hazard observer what an operation will touch.

    Args:
        warp: the issuing warp.
        channel: what its completion is seen through: an mbarrier, or a name (`bulk`, `cp.async`, `wgmma`, `mma`).
        reads, writes: ("smem", CTA, 16-byte units), ("tmem", CTA, (lane, lanes, column, columns)), or global ranges.
    """
    if g.cta.observer is not None:
        g.cta.observer.issue(g, warp, op, channel, reads, writes, b.site)


def units(offset: int, size: int) -> np.ndarray:
    """16-byte units of a contiguous span."""
    return np.arange(offset // 16, (offset + size + 15) // 16)


@system(r"cp\.async\.(ca|cg)\.shared\.global(?:\.L2::cache_hint)?(?:\.L2::\d+B)?")
def _cp_async(b, ins, match):
    """Per-lane copy of `size` bytes, of which only `source size` are read and the rest zero filled."""
    to, source = b.address(ins.operands[0], 32), b.address(ins.operands[1], 64)
    size = ins.operands[2].value
    real = b.get(ins.operands[3], "u32") if len(ins.operands) > 3 else b.get(Imm(size), "u32")

    def run(g, mask) -> None:
        targets, sources, counts = to(g) - g.cta.rank_bits, source(g), real(g)
        for k in active_warps(g, mask):
            lanes = np.arange(WARP * k, WARP * k + WARP)
            lanes = lanes if mask is None else lanes[mask[lanes]]
            _submit_copy(b, g, g.warps[k], targets[lanes], sources[lanes], counts[lanes], size)

    return run


def _submit_copy(b, g, warp, targets, sources, counts, size: int) -> None:
    cta = g.cta
    if ((targets | sources.astype(np.uint32)) % size).any():
        raise b.fault(f"cp.async of {size} bytes: addresses must be multiples of {size}")
    if len(targets) and int(targets.max()) + size > cta.shared_limit:
        raise b.fault(f"cp.async writes shared offset 0x{int(targets.max()):x}, outside the CTA's shared memory")

    def copy() -> None:
        steps = np.arange(size)
        data = np.zeros((len(targets), size), np.uint8)
        for k, count in enumerate(counts.tolist()):
            if count:
                data[k, :count] = cta.memory.read_bytes(int(sources[k]), count)
        cta.shared[1][targets[:, None].astype(np.int64) + steps] = data

    op = AsyncOp(f"cp.async at line {b.line}", [copy])
    warp.copy_open.append(op)
    observe_issue(b, g, warp, op, "cp.async", (), [("smem", cta, np.unique(targets // 16))])
    cta.cluster.engine.submit(op, ("cp.async", id(cta), warp.index))


@system(r"cp\.async\.commit_group")
def _cp_commit(b, ins, match):
    def run(g, mask) -> None:
        for k in active_warps(g, mask):
            warp = g.warps[k]
            warp.copy_groups.append(warp.copy_open)
            warp.copy_open = []

    return run


@system(r"cp\.async\.wait_(group|all)")
def _cp_wait(b, ins, match):
    newest = ins.operands[0].value if match[1] == "group" else 0

    def run(g, mask):
        groups = []
        for k in active_warps(g, mask):
            warp = g.warps[k]
            if match[1] == "all":
                warp.copy_groups.append(warp.copy_open)
                warp.copy_open = []
            groups += warp.copy_groups[: len(warp.copy_groups) - newest]
            warp.copy_groups = warp.copy_groups[len(warp.copy_groups) - newest :] if newest else []
        ops = [op for group in groups for op in group]
        return _wait_for(g, mask, ops, lambda op: op.is_done, "cp.async copies")

    return run


def _wait_for(g, mask, ops: list, done, what: str):
    """Waits for operations; tells the observer when they are over."""

    def finish() -> None:
        if g.cta.observer is not None:
            g.cta.observer.ops_waited(g, mask, ops, what)

    if all(done(op) for op in ops):
        finish()
        return None
    return Wait(lambda: all(done(op) for op in ops), lambda: f"{sum(not done(o) for o in ops)} {what}", finish)


@system(r"cp\.async\.mbarrier\.arrive(\.noinc)?\.shared(?:::cta)?\.b64")
def _cp_arrive(b, ins, match):
    """When all earlier cp.async of the thread are done: one arrival a lane (without .noinc it was added before)."""
    address = b.address(ins.operands[0], 32)

    def run(g, mask) -> None:
        a = address(g)
        for k in active_warps(g, mask):
            lanes = np.zeros(g.lanes, bool)
            lanes[WARP * k : WARP * k + WARP] = True
            lanes = lanes if mask is None else lanes & mask
            for target, count in lanes_by_address(g, lanes, a).items():
                _submit_arrival(b, g, g.warps[k], find_mbarrier(g.cta, target), count, match[1] is None)

    return run


def _submit_arrival(b, g, warp, barrier, count: int, increments: bool) -> None:
    if increments:
        barrier.pending += count
    observer = g.cta.observer
    clock = None if observer is None else observer.copies_so_far(warp)

    def arrive() -> None:
        if observer is not None:
            observer.deferred_arrive(barrier, clock)
        barrier.arrive(count, f"cp.async of warp {warp.index} at line {b.line}")

    op = AsyncOp(f"cp.async arrival at line {b.line}", [arrive])
    g.cta.cluster.engine.submit(op, ("cp.async", id(g.cta), warp.index))


@system(r"cp\.async\.bulk\.shared::(?:cluster|cta)\.global\.mbarrier::complete_tx::bytes(?:\.L2::cache_hint)?")
def _bulk_load(b, ins, match):
    to, source = b.address(ins.operands[0], 32), b.address(ins.operands[1], 64)
    count, bar = b.get(ins.operands[2], "u32"), b.address(ins.operands[3], 32)

    def run(g, mask) -> None:
        lanes = active_lanes(g, mask)
        for lane in lanes.tolist():
            address, origin, size = int(to(g)[lane]), int(source(g)[lane]), int(count(g)[lane])
            require_bulk_alignment(b, address, origin, size)
            cta, offset = target_cta(b, g, address)
            barrier = find_mbarrier(g.cta, int(bar(g)[lane]))
            target = shared_span(b, cta, offset, size, "bulk copy")
            cta.memory.find(origin, size, "bulk copy")
            fetch = lambda o=origin, s=size: g.cta.memory.read_bytes(o, s)  # noqa: E731
            _submit_load(b, g, lane, cta, offset, target, fetch, barrier, [("gmem", origin, size)])

    return run


def _submit_load(b, g, lane: int, cta, offset: int, target, fetch, barrier, reads=()) -> None:
    size = len(target)

    def copy() -> None:
        target[:] = fetch()
        barrier.complete_bytes(size, f"bulk copy at line {b.line}")

    if cta.cluster.engine.schedule != "eager":
        target[:] = _POISON
    barrier.sources[g.cta.rank, g.warps[lane // WARP].index] = b.line
    op = AsyncOp(f"bulk copy of {size} bytes at line {b.line}", [copy])
    observe_issue(b, g, g.warps[lane // WARP], op, barrier, reads, [("smem", cta, units(offset, size))])
    cta.cluster.engine.submit(op)


@system(r"cp\.async\.bulk\.shared::cluster\.shared::cta\.mbarrier::complete_tx::bytes")
def _bulk_push(b, ins, match):
    """Own shared memory to another CTA's; the mbarrier must be the destination's."""
    to, source = b.address(ins.operands[0], 32), b.address(ins.operands[1], 32)
    count, bar = b.get(ins.operands[2], "u32"), b.address(ins.operands[3], 32)

    def push(g, lane: int) -> None:
        address, origin, size = int(to(g)[lane]), int(source(g)[lane]), int(count(g)[lane])
        require_bulk_alignment(b, address, origin, size)
        cta, offset = target_cta(b, g, address)
        barrier = find_mbarrier(g.cta, int(bar(g)[lane]))
        if barrier.cta is not cta:
            raise b.fault(
                f"bulk push to CTA rank {cta.rank} signals an mbarrier of CTA rank {barrier.cta.rank}; both "
                f"must be the same CTA"
            )
        start = origin & 0xFFFFFF
        data = shared_span(b, g.cta, start, size, "bulk push source")
        target = shared_span(b, cta, offset, size, "bulk push")
        _submit_load(b, g, lane, cta, offset, target, lambda: data, barrier, [("smem", g.cta, units(start, size))])

    def run(g, mask) -> None:
        for lane in one_thread_a_warp(b, g, mask):
            push(g, lane)

    return run


def add_to_bulk(g, mask, op: AsyncOp, lanes) -> None:
    """Puts an operation into the open bulk group of the threads that issued it."""
    for lane in lanes:
        g.warps[lane // WARP].bulk_open.setdefault(lane % WARP, []).append(op)


@system(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group(?:\.L2::cache_hint)?")
def _bulk_store(b, ins, match):
    return _bulk_out(b, ins, reduces=False)


@system(r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32")
def _bulk_reduce(b, ins, match):
    return _bulk_out(b, ins, reduces=True)


def _bulk_out(b, ins, reduces: bool):
    to, source, count = b.address(ins.operands[0], 64), b.address(ins.operands[1], 32), b.get(ins.operands[2], "u32")

    def run(g, mask) -> None:
        for lane in active_lanes(g, mask).tolist():
            address, origin, size = int(to(g)[lane]), int(source(g)[lane]) & 0xFFFFFF, int(count(g)[lane])
            require_bulk_alignment(b, address, origin, size)
            op = _out_operation(b, g, address, origin, size, reduces)
            here: tuple = ("smem", g.cta, units(origin, size))
            there: tuple = ("gmem", address, size)
            # A reduction reads what it adds to; it may meet reductions of other CTAs.
            reads, writes = ([here, there], []) if reduces else ([here], [there])
            observe_issue(b, g, g.warps[lane // WARP], op, "bulk", reads, writes)
            add_to_bulk(g, mask, op, [lane])
            g.cta.cluster.engine.submit(op)

    return run


def _out_operation(b, g, address: int, origin: int, size: int, reduces: bool) -> AsyncOp:
    cta = g.cta
    source = shared_span(b, cta, origin, size, "bulk store source")
    buffer = cta.memory.find(address, size, "bulk store")
    if buffer.read_only:
        raise b.fault(f"bulk store to read-only buffer {buffer.name}")
    start = address - buffer.base
    staged: list = []

    def read() -> None:
        staged.append(source.copy())

    def write() -> None:
        if reduces:
            total = buffer.data[start : start + size].view(np.uint32)
            total[:] = ff.add_f32(total, staged[0].view(np.uint32))
        else:
            buffer.data[start : start + size] = staged[0]

    what = "bulk reduction" if reduces else "bulk store"
    return AsyncOp(f"{what} of {size} bytes to {buffer.name} at line {b.line}", [read, write])


@system(r"cp\.async\.bulk\.commit_group")
def _bulk_commit(b, ins, match):
    """Closes the open group of each executing thread; threads without any operation have only empty groups."""

    def run(g, mask) -> None:
        for k in active_warps(g, mask):
            warp = g.warps[k]
            for lane in {*warp.bulk_open, *warp.bulk_groups}:
                if mask is None or mask[WARP * k + lane]:
                    group = warp.bulk_open.pop(lane, [])
                    for op in group:
                        op.committed = True
                    warp.bulk_groups.setdefault(lane, []).append(group)

    return run


@system(r"cp\.async\.bulk\.wait_group(\.read)?")
def _bulk_wait(b, ins, match):
    newest = ins.operands[0].value
    only_read = match[1] is not None

    def run(g, mask):
        ops = []
        for k in active_warps(g, mask):
            for lane, groups in g.warps[k].bulk_groups.items():
                if mask is None or mask[WARP * k + lane]:
                    ops += [op for group in groups[: len(groups) - newest] for op in group]
                    groups[:] = [
                        x for i, x in enumerate(groups) if i >= len(groups) - newest or any(not o.is_done for o in x)
                    ]
        done = (lambda op: op.has_read) if only_read else (lambda op: op.is_done)
        return _wait_for(g, mask, ops, done, "bulk reads" if only_read else "bulk operations")

    return run


@system(r"st\.async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(?:\.v([24]))?\.(b32|b64|u32|s32|f32)")
def _st_async(b, ins, match):
    """Remote store that completes bytes on the destination's mbarrier."""
    to, bar = b.address(ins.operands[0], 32), b.address(ins.operands[2], 32)
    elements = getattr(ins.operands[1], "elements", (ins.operands[1],))
    size = int(match[2][1:]) // 8
    values = [b.get(v, f"u{8 * size}") for v in elements]

    def run(g, mask) -> None:
        for lane in active_lanes(g, mask).tolist():
            cta, offset = target_cta(b, g, int(to(g)[lane]))
            data = np.array([v(g)[lane] for v in values], f"u{size}").view(np.uint8)
            target = shared_span(b, cta, offset, len(data), "st.async")
            barrier = find_mbarrier(g.cta, int(bar(g)[lane]))
            _submit_load(b, g, lane, cta, offset, target, lambda d=data: d, barrier)

    return run


@fused(r"cp\.async\.bulk\.prefetch\.[\w.:]+")
def _bulk_prefetch(e, ins, match) -> None:
    """A hint."""
