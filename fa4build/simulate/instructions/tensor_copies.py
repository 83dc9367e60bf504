"""Tensor (TMA) loads, stores and reductions. Source: ptx-semantics.md 8.4; PTX ISA 9.7.9.27."""

import numpy as np

from fa4build.errors import SimulationError
from fa4build.simulate.hardware import tensor_map, tma
from fa4build.simulate.hardware.engine import AsyncOp
from fa4build.simulate.hardware.gang import WARP
from fa4build.simulate.instructions.async_copies import add_to_bulk, observe_issue, one_thread, target_cta
from fa4build.simulate.instructions.barriers import find_mbarrier
from fa4build.simulate.instructions.ctas import PARAMETER_WINDOW
from fa4build.simulate.instructions.operands import active_lanes, active_warps, one_value
from fa4build.simulate.translate.opcodes import system

_POISON_UNIT = 0xC1


def resolve_map(b, g, address: int) -> tensor_map.TensorMap:
    """The tensor map at a parameter or global address; decoded once per launch."""
    cluster = g.cta.cluster
    found = cluster.tensor_maps.get(address)
    if found is None:
        if address >= PARAMETER_WINDOW:
            offset = address - PARAMETER_WINDOW
            data = bytes(cluster.parameters[offset : offset + 128])
        else:
            data = bytes(cluster.memory.read_bytes(address, 128))
        if address % 64 and address < PARAMETER_WINDOW:
            raise b.fault(f"tensor map address 0x{address:x} is not a multiple of 64")
        found = cluster.tensor_maps[address] = tensor_map.unpack(data)
    return found


class _Operands:
    """The operands of one tensor copy, bound."""

    def __init__(self, b, tensor, shared):
        self.b = b
        self.map = b.get(tensor.base, "u64")
        self.coordinates = [b.get(c, "s32") for c in tensor.coordinates]
        self.shared = b.address(shared, 32)

    def plan(self, g, lane: int, *, outgoing: bool = False, per_element: bool = False):
        """(CTA, box plan, map, coordinates) for one lane."""
        b = self.b
        tmap = resolve_map(b, g, int(self.map(g)[lane]))
        coordinates = tuple(int(c(g)[lane]) for c in self.coordinates)
        cta, offset = target_cta(b, g, int(self.shared(g)[lane]))
        if len(coordinates) != int(b.ins.opcode.split("tensor.")[1][0]):
            raise b.fault(f"{len(coordinates)} coordinates for {b.ins.opcode}")
        try:
            plan = tma.plan_box(tmap, coordinates, offset, outgoing=outgoing, per_element=per_element)
        except SimulationError as error:
            raise b.fault(str(error)) from None
        last = int(plan.shared_addresses.max()) + plan.unit_bytes
        if offset < 0x400 or last > cta.shared_limit:
            raise b.fault(
                f"tensor copy touches shared bytes 0x{offset:x}..0x{last:x}, outside CTA rank {cta.rank}'s "
                f"shared memory"
            )
        return cta, plan, tmap, coordinates

    def uniform_over_warp(self, g, mask, k: int) -> bool:
        """Whether all active lanes of a warp name the same copy."""
        lanes = slice(WARP * k, WARP * k + WARP)
        part = None if mask is None else mask[lanes]
        arrays = [self.map(g), self.shared(g), *(c(g) for c in self.coordinates)]
        return all(one_value(a[lanes], part) is not None for a in arrays)


def global_side(b, memory, plan, writes: bool):
    """The buffer all valid units lie in (None if no unit is valid)."""
    addresses = plan.global_addresses if plan.valid is None else plan.global_addresses[plan.valid]
    if not len(addresses):
        return None
    first = int(addresses.min())
    buffer = memory.find(first, plan.unit_bytes, "tensor copy")
    if writes and buffer.read_only:
        raise b.fault(f"tensor store to read-only buffer {buffer.name}")
    memory.find(int(addresses.max()), plan.unit_bytes, "tensor copy")
    return buffer


_TILE = r"\.([12345])d"
_HINT = r"(?:\.L2::cache_hint)?"


@system(
    rf"cp\.async\.bulk\.tensor{_TILE}\.shared::(cta|cluster)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes"
    rf"(\.multicast::cluster)?(?:\.cta_group::[12])?{_HINT}(?:\.cta_group::([12]))?"
)
def _load(b, ins, match):
    operands = _Operands(b, ins.operands[1], ins.operands[0])
    bar = b.address(ins.operands[2], 32)
    multicast = b.get(ins.operands[3], "u16") if match[3] else None

    def run(g, mask) -> None:
        lane = one_thread(b, g, mask)
        cta, plan, tmap, coordinates = operands.plan(g, lane)
        address = int(bar(g)[lane])
        targets = [(cta, find_mbarrier(g.cta, address))]
        if multicast is not None:
            members = int(multicast(g)[lane])
            ctas = [c for c in g.cta.cluster.ctas if members >> c.rank & 1]
            targets = [(c, find_mbarrier(c, c.rank << 24 | address & 0xFFFFFF)) for c in ctas]
        elif cta is not g.cta and match[2] == "cta":
            raise b.fault("destination of a shared::cta tensor load is in another CTA")
        for target, barrier in targets:
            _submit_load(b, g, g.warps[lane // WARP], target, barrier, plan, tmap, coordinates)

    return run


def _submit_load(b, g, warp, cta, barrier, plan, tmap, coordinates) -> None:
    shared = cta.shared[1]
    if cta.cluster.engine.schedule != "eager":
        shared[(plan.shared_addresses[:, None] + np.arange(plan.unit_bytes)).reshape(-1)] = _POISON_UNIT

    def copy() -> None:
        buffer = global_side(b, cta.memory, plan, False)
        if buffer is None:
            tma.load_box(plan, np.zeros(0, np.uint8), 0, shared)
        else:
            tma.load_box(plan, buffer.data, buffer.base, shared)
        barrier.complete_bytes(plan.box_bytes, f"tensor load at line {b.line}")

    global_side(b, cta.memory, plan, False)
    barrier.sources[g.cta.rank, warp.index] = b.line
    op = AsyncOp(f"tensor load of box {tmap.box} at {coordinates}, line {b.line}", [copy])
    observe_issue(b, g, warp, op, barrier, [("box", plan, 0)], [("smem", cta, np.unique(plan.shared_addresses // 16))])
    cta.cluster.engine.submit(op)


@system(rf"cp\.async\.bulk\.tensor{_TILE}\.global\.shared::cta(?:\.tile)?\.bulk_group{_HINT}")
def _store(b, ins, match):
    return _outgoing(b, ins, False)


@system(rf"cp\.reduce\.async\.bulk\.tensor{_TILE}\.global\.shared::cta\.add(?:\.tile)?\.bulk_group{_HINT}")
def _reduce(b, ins, match):
    return _outgoing(b, ins, True)


def _outgoing(b, ins, reduces: bool):
    operands = _Operands(b, ins.operands[0], ins.operands[1])

    def run(g, mask) -> None:
        for k in active_warps(g, mask):
            lanes = [i for i in active_lanes(g, mask).tolist() if i // WARP == k]
            if len(lanes) > 1 and (reduces or not operands.uniform_over_warp(g, mask, k)):
                what = "each lane adds again" if reduces else "with different operands"
                raise b.fault(
                    f"{ins.opcode} is executed by {len(lanes)} lanes of warp {g.warps[k].index} ({what}); "
                    f"elect one thread"
                )
            _submit_store(b, g, mask, operands, lanes, reduces)

    return run


def _submit_store(b, g, mask, operands: _Operands, lanes: list[int], reduces: bool) -> None:
    cta, plan, tmap, coordinates = operands.plan(g, lanes[0], outgoing=True, per_element=reduces)
    if cta is not g.cta:
        raise b.fault("source of a tensor store is in another CTA")
    if reduces and tmap.dtype != "f32":
        raise SimulationError(f"tensor reduction of {tmap.dtype} is not modelled; f32 is")
    buffer = global_side(b, g.cta.memory, plan, True)
    staged: list = []

    def read() -> None:
        staged.append(cta.shared[1].copy() if buffer is not None else None)

    def write() -> None:
        if buffer is not None:
            function = tma.reduce_add_f32_box if reduces else tma.store_box
            function(plan, staged.pop(), buffer.data, buffer.base)

    what = "tensor reduction" if reduces else "tensor store"
    op = AsyncOp(f"{what} of box {tmap.box} at {coordinates}, line {b.line}", [read, write])
    target: list[tuple] = [] if buffer is None else [("box", plan, 0)]
    # Units outside the tensor are not stored, so they need not have been written.
    stored = plan.shared_addresses if plan.valid is None else plan.shared_addresses[plan.valid]
    source: list[tuple] = [("smem", cta, np.unique(stored // 16))]
    reads, writes = ([*source, *target], []) if reduces else (source, target)
    observe_issue(b, g, g.warps[lanes[0] // WARP], op, "bulk", reads, writes)
    add_to_bulk(g, mask, op, lanes)
    cta.cluster.engine.submit(op)
