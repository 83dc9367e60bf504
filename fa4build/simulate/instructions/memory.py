"""Loads and stores of shared, global and local memory. Source: PTX ISA 9.7.9; ptx-semantics.md 5.4.

Shared addresses carry the CTA rank in bits 24 and up; the window of a CTA starts at 0x400, as on the hardware.
"""

import numpy as np

from fa4build.errors import SimulationError
from fa4build.simulate.hardware.gang import Fault
from fa4build.simulate.instructions.operands import Wait, active_lanes
from fa4build.simulate.ptx.instructions import Vector
from fa4build.simulate.translate.node_scope import in_node_scope
from fa4build.simulate.translate.opcodes import fused, system

SHARED_BASE = 0x400
RANK_SHIFT = 24
_TYPE = r"(b8|u8|s8|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64)"
_CACHE = r"(?:\.(?:ca|cg|cs|lu|cv|wb|wt|nc|weak))*(?:\.L[12]::[\w:]+)*"


@in_node_scope
def load_shared(g, address, size, count, mask, site):
    """`count` elements of `size` bytes from own shared memory, as unsigned arrays of full width."""
    cta = g.cta
    chosen = address if mask is None else address[mask]
    offset = chosen - cta.rank_bits
    if np.count_nonzero(offset & np.uint32(size * count - 1)):
        raise _misaligned("shared load", chosen, size * count, site)
    if cta.observer is not None:
        cta.observer.shared_access(g, offset, size * count, mask, site, False)
    view, index = cta.shared[size], offset // np.uint32(size)
    try:
        values = [view[index + np.uint32(k)] if k else view[index] for k in range(count)]
    except IndexError:
        raise _outside("shared load", cta, chosen, size * count, site) from None
    return values if mask is None else [_spread(v, mask) for v in values]


@in_node_scope
def store_shared(g, address, values, mask, site):
    """Stores unsigned arrays to consecutive elements of own shared memory; the highest lane wins a conflict."""
    cta = g.cta
    size = values[0].dtype.itemsize
    if mask is not None:
        address, values = address[mask], [v[mask] for v in values]
    offset = address - cta.rank_bits
    total = size * len(values)
    if np.count_nonzero(offset & np.uint32(total - 1)):
        raise _misaligned("shared store", address, total, site)
    if len(offset) and int(offset.min()) < SHARED_BASE:
        raise _outside("shared store", cta, address, total, site)
    if cta.observer is not None:
        cta.observer.shared_access(g, offset, total, mask, site, True)
    view, index = cta.shared[size], offset // np.uint32(size)
    try:
        for k, value in enumerate(values):
            view[index + np.uint32(k)] = value
    except IndexError:
        raise _outside("shared store", cta, address, total, site) from None


def _spread(values, mask):
    full = np.zeros(len(mask), values.dtype)
    full[mask] = values
    return full


def _misaligned(what: str, address, size: int, site: int) -> Fault:
    bad = int(address[np.flatnonzero(address & address.dtype.type(size - 1))[0]])
    return Fault(f"{what} of {size} bytes at misaligned address 0x{bad:x}; it must be a multiple of {size}", site)


def _outside(what: str, cta, address, size: int, site: int) -> Fault:
    limit = cta.shared_limit
    offsets = address - cta.rank_bits
    bad = int(address[np.flatnonzero((offsets > limit - size) | (offsets < SHARED_BASE))[0]])
    return Fault(
        f"{what} of {size} bytes at 0x{bad:x} is outside the shared memory of CTA rank {cta.rank} "
        f"(0x{int(cta.rank_bits) + SHARED_BASE:x} to 0x{int(cta.rank_bits) + limit:x})",
        site,
    )


@in_node_scope
def load_global(g, address, size, count, mask, site):
    """`count` elements of `size` bytes from global memory."""
    chosen = address if mask is None else address[mask]
    total = size * count
    if np.count_nonzero(chosen & np.uint64(total - 1)):
        raise _misaligned("global load", chosen, total, site)
    cta = g.cta
    try:
        values = _gather(cta.memory, chosen, size, count)
    except SimulationError as error:
        raise Fault(str(error), site) from None
    if cta.observer is not None:
        cta.observer.global_access(g, chosen, total, mask, site, False)
    return values if mask is None else [_spread(v, mask) for v in values]


def _gather(memory, address, size: int, count: int) -> list:
    values = [np.empty(len(address), f"u{size}") for _ in range(count)]
    for buffer, where, offsets in memory.split(address, size * count, "load"):
        index = offsets // size
        for k, value in enumerate(values):
            value[where] = buffer.views[size][index + k]
    return values


@in_node_scope
def store_global(g, address, values, mask, site):
    """Stores unsigned arrays to consecutive elements of global memory."""
    size = values[0].dtype.itemsize
    if mask is not None:
        address, values = address[mask], [v[mask] for v in values]
    total = size * len(values)
    if np.count_nonzero(address & np.uint64(total - 1)):
        raise _misaligned("global store", address, total, site)
    cta = g.cta
    if cta.observer is not None:
        cta.observer.global_access(g, address, total, mask, site, True)
    try:
        for buffer, where, offsets in cta.memory.split(address, total, "store"):
            if buffer.read_only:
                raise Fault(f"store to read-only buffer {buffer.name} at byte offset {int(offsets[0])}", site)
            for k, value in enumerate(values):
                buffer.views[size][offsets // size + k] = value[where]
    except SimulationError as error:
        raise error if isinstance(error, Fault) else Fault(str(error), site) from None


@in_node_scope
def load_local(g, address, size, count, mask, site):
    """Per-thread memory, one row per thread."""
    rows, offset = _local(g, address, size * count, mask, site)
    out = []
    for k in range(count):
        parts = [g.cta.local[rows, offset + k * size + b].astype(np.uint64) << np.uint64(8 * b) for b in range(size)]
        value = np.bitwise_or.reduce(parts).astype(f"u{size}")
        out.append(value if mask is None else _spread(value, mask))
    return out


@in_node_scope
def store_local(g, address, values, mask, site):
    """Stores to per-thread memory."""
    size = values[0].dtype.itemsize
    rows, offset = _local(g, address, size * len(values), mask, site)
    for k, value in enumerate(values):
        value = value if mask is None else value[mask]
        for b in range(size):
            shifted = value >> value.dtype.type(8 * b) if b else value
            g.cta.local[rows, offset + k * size + b] = shifted.astype(np.uint8)


def _local(g, address, size: int, mask, site: int):
    rows = g.tids if mask is None else g.tids[mask]
    offset = (address if mask is None else address[mask]).astype(np.int64)
    limit = g.cta.local.shape[1]
    if len(offset) and (offset.min() < 0 or offset.max() > limit - size):
        raise Fault(
            f"local access of {size} bytes at offset {int(offset.max())} is outside the {limit} local bytes", site
        )
    return rows, offset


def _elements(operand) -> tuple:
    return operand.elements if isinstance(operand, Vector) else (operand,)


_LOAD = {"shared": ("load_shared", 32), "global": ("load_global", 64), "local": ("load_local", 64)}
_STORE = {"shared": ("store_shared", 32), "global": ("store_global", 64), "local": ("store_local", 64)}


@fused(rf"ld\.(shared|global|local)(?:::cta)?{_CACHE}(?:\.v([248]))?\.{_TYPE}")
def _load(e, ins, match) -> None:
    targets = _elements(ins.operands[0])
    function, bits = _LOAD[match[1]]
    size = int(match[3][1:]) // 8
    address = e.address(ins.operands[1], bits)
    result = e.tmp(f"{function}(g, {address}, {size}, {len(targets)}, {e.mask}, {e.site})")
    for k, target in enumerate(targets):
        _write_loaded(e, target, f"{result}[{k}]", match[3])


def _write_loaded(e, target, value: str, kind: str) -> None:
    """Destination registers may be wider than the element: zero extended, or sign extended for .s types."""
    have = int(kind[1:])
    width = max(e.program.function.register_widths[target.index], 16) if hasattr(target, "index") else have
    if kind[0] == "s" and width > have:
        e.dst(target, f"s{width}", f"{value}.view(s{have}).astype(s{width})")
    elif width > have:
        e.dst(target, f"u{width}", f"{value}.astype(u{width})")
    else:
        e.dst(target, f"u{have}", value)


@fused(
    rf"st(?:\.(?:relaxed|release|volatile)(?:\.(?:cta|cluster|gpu|sys))?)?\.(shared|global|local)(?:::cta)?{_CACHE}(?:\.v([248]))?\.{_TYPE}"
)
def _store(e, ins, match) -> None:
    sources = _elements(ins.operands[1])
    function, bits = _STORE[match[1]]
    kind = f"u{match[3][1:]}"
    names = [_stored(e, s, kind) for s in sources]
    e.lines.append(f"{function}(g, {e.address(ins.operands[0], bits)}, [{', '.join(names)}], {e.mask}, {e.site})")


def _stored(e, operand, kind: str) -> str:
    width = max(e.program.function.register_widths[operand.index], 16) if hasattr(operand, "index") else int(kind[1:])
    if width != int(kind[1:]):
        return e.tmp(f"{e.src(operand, f'u{width}')}.astype({kind})")
    return e.src(operand, kind)


@system(rf"(ld|st)\.shared::cluster(?:\.v([24]))?\.{_TYPE}")
def _remote(b, ins, match):
    """Loads and stores of any CTA's shared memory in the cluster, lane by lane."""
    is_load = match[1] == "ld"
    size = int(match[3][1:]) // 8
    place, data = (ins.operands[1], ins.operands[0]) if is_load else (ins.operands[0], ins.operands[1])
    address = b.address(place, 32)
    elements = [b.put(e, f"u{8 * size}") if is_load else b.get(e, f"u{8 * size}") for e in _elements(data)]

    def run(g, mask) -> None:
        a = address(g)
        values = [np.zeros(g.lanes, f"u{size}") if is_load else read(g) for read in elements]
        for lane in active_lanes(g, mask).tolist():
            cta, offset = _remote_cta(b, g, int(a[lane]), size * len(elements))
            for k, value in enumerate(values):
                index = (offset + k * size) // size
                if is_load:
                    value[lane] = cta.shared[size][index]
                else:
                    cta.shared[size][index] = value[lane]
        if is_load:
            for write, value in zip(elements, values, strict=True):
                write(g, mask, value)

    return run


def _remote_cta(b, g, address: int, size: int):
    rank, offset = address >> RANK_SHIFT, address & 0xFFFFFF
    ctas = g.cta.cluster.ctas
    if rank >= len(ctas) or not SHARED_BASE <= offset <= ctas[rank].shared_limit - size:
        raise b.fault(f"shared::cluster access of {size} bytes at 0x{address:x} is outside the cluster's shared memory")
    if address % size:
        raise b.fault(f"shared::cluster access of {size} bytes at misaligned address 0x{address:x}")
    return ctas[rank], offset


@fused(r"mapa\.shared::cluster\.u32")
def _mapa(e, ins, match) -> None:
    d, a, rank = ins.operands
    window = e.const(0x00FFFFFF, "u32")
    e.dst(d, "u32", f"{e.src(a, 'u32')} & {window} | {e.src(rank, 'u32')} << {e.const(RANK_SHIFT, 'u32')}")


@fused(r"prefetch(?:u)?\.[\w.:]+")
def _prefetch(e, ins, match) -> None:
    """A hint."""


@system(rf"ld(?:\.global)?\.(acquire|relaxed|volatile)(?:\.(cta|cluster|gpu|sys))?(?:\.global)?\.{_TYPE}")
def _ld_acquire(b, ins, match):
    """An acquire load. Polling the same value again waits until the memory changes: a spin loop becomes a wait."""
    kind = match[3][1:]
    size = int(kind) // 8
    put, address = b.put(ins.operands[0], f"u{kind}"), b.address(ins.operands[1], 64)

    def run(g, mask):
        a = address(g)
        value = load_global(g, a, size, 1, mask, b.site)[0]
        where = active_lanes(g, mask)
        poll = (b.site, a[where].tobytes(), value[where].tobytes())
        repeated = g.last_poll == poll
        g.last_poll = poll
        if g.cta.observer is not None:
            g.cta.observer.acquire(g, a[where], mask)
        put(g, mask, value)
        if not repeated:
            return None
        g.last_poll = None

        def changed() -> bool:
            return load_global(g, a, size, 1, mask, b.site)[0][where].tobytes() != poll[2]

        wait = Wait(
            changed, lambda: f"global word at 0x{int(a[where[0]]):x}, last read {int(value[where[0]])}, to change"
        )
        wait.resume = g.program.nodes[g.pc].index
        return wait

    return run
