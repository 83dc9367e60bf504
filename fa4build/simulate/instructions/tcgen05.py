"""tcgen05 (sm_100a, sm_103a): tensor memory, MMA, commit. Source: ptx-semantics.md 9; PTX ISA 9.7.16.

Loads and stores of tensor memory happen at issue; MMAs and commits are one in-order queue per issuing warp.
"""

import re

import numpy as np

from fa4build.errors import SimulationError
from fa4build.simulate.hardware import tmem
from fa4build.simulate.hardware.engine import AsyncOp
from fa4build.simulate.hardware.gang import WARP
from fa4build.simulate.hardware.smem_descriptor import decode_instruction, decode_tcgen05, distinct_units, load_matrix
from fa4build.simulate.instructions.async_copies import observe_issue, one_thread
from fa4build.simulate.instructions.barriers import find_mbarrier
from fa4build.simulate.instructions.memory import store_shared
from fa4build.simulate.instructions.operands import Wait, active_warps, require_converged, uniform
from fa4build.simulate.ptx.instructions import Address, Imm, Vector
from fa4build.simulate.translate.opcodes import system
from fa4build.simulate.units.tensor_core import mma_tile

_POISON = 0x7FC1_7FC1


class TensorMemory:
    """Cells and allocation of one CTA. `group`: the cta_group all its instructions must share."""

    __slots__ = ("allocator", "cells", "group")

    def __init__(self) -> None:
        self.cells = np.full((tmem.LANES, tmem.COLUMNS), _POISON, np.uint32)
        self.allocator = tmem.Allocator()
        self.group: int | None = None

    def require(self, column: int, count: int, b) -> None:
        """Checks that columns are allocated."""
        for start, size in self.allocator.blocks.items():
            if start <= column and column + count <= start + size:
                return
        if not self.allocator.owns(column, count):
            blocks = ", ".join(f"{s}..{s + n - 1}" for s, n in self.allocator.blocks.items()) or "none"
            raise b.fault(
                f"tensor memory columns {column}..{column + count - 1} are not allocated (allocated: {blocks})"
            )


def tensor_memory(cta) -> TensorMemory:
    """The tensor memory of a CTA."""
    if cta.tmem is None:
        cta.tmem = TensorMemory()
    return cta.tmem


def _join_group(b, cta, group: int) -> TensorMemory:
    memory = tensor_memory(cta)
    if memory.group not in (None, group):
        raise b.fault(
            f"cta_group::{group} after cta_group::{memory.group}: all tcgen05 instructions of a kernel must use one"
        )
    memory.group = group
    return memory


def pair_of(b, cta, group: int) -> list:
    """The CTAs of an instruction: itself, or the pair of ranks that differ in bit 0, even first."""
    if group == 1:
        return [cta]
    ctas = cta.cluster.ctas
    even = cta.rank & ~1
    if even + 1 >= len(ctas):
        raise b.fault(f"cta_group::2 in a cluster of {len(ctas)} CTA: launch with a cluster of pairs")
    return [ctas[even], ctas[even + 1]]


def _guarded(b, function, *args, **kwargs):
    """Calls a tensor-memory function and places its error."""
    try:
        return function(*args, **kwargs)
    except SimulationError as error:
        raise b.fault(str(error)) from error


@system(r"tcgen05\.alloc\.cta_group::([12])\.sync\.aligned(?:\.shared::cta)?\.b32")
def _alloc(b, ins, match):
    """The first column goes to shared memory. Waits while there is no room."""
    where, columns = b.address(ins.operands[0], 32), b.get(ins.operands[1], "u32")

    def run(g, mask):
        require_converged(g, mask, "tcgen05.alloc")
        if len(active_warps(g, mask)) != 1:
            raise b.fault(f"tcgen05.alloc is executed by {len(active_warps(g, mask))} warps; one warp must allocate")
        memory = _join_group(b, g.cta, int(match[1]))
        count = uniform(columns(g), mask, "columns")
        start = _guarded(b, memory.allocator.allocate, count)
        if start is None:
            wait = Wait(
                lambda: not memory.allocator.blocks,
                lambda: f"{count} free tensor memory columns ({memory.allocator.blocks} are taken)",
            )
            wait.resume = -1
            return wait
        first = np.zeros(g.lanes, bool)
        first[WARP * active_warps(g, mask)[0]] = True
        store_shared(g, where(g), [np.full(g.lanes, start, np.uint32)], first, b.site)
        return None

    return run


@system(r"tcgen05\.dealloc\.cta_group::([12])\.sync\.aligned\.b32")
def _dealloc(b, ins, match):
    address, columns = b.get(ins.operands[0], "u32"), b.get(ins.operands[1], "u32")

    def run(g, mask) -> None:
        require_converged(g, mask, "tcgen05.dealloc")
        if len(active_warps(g, mask)) != 1:
            raise b.fault(f"tcgen05.dealloc is executed by {len(active_warps(g, mask))} warps; one warp must free")
        memory = _join_group(b, g.cta, int(match[1]))
        start, count = uniform(address(g), mask, "address"), uniform(columns(g), mask, "columns")
        _guarded(b, memory.allocator.free, start, count)
        if g.cta.observer is not None:
            g.cta.observer.tmem_freed(g, mask, start & 0xFFFF, count, b.site)

    return run


@system(r"tcgen05\.relinquish_alloc_permit\.cta_group::([12])\.sync\.aligned")
def _relinquish(b, ins, match):
    def run(g, mask) -> None:
        require_converged(g, mask, "tcgen05.relinquish_alloc_permit")
        _join_group(b, g.cta, int(match[1])).allocator.relinquish()

    return run


_SHAPE = r"(32x32b|16x64b|16x128b|16x256b|16x32bx2)\.x(\d+)"


def _warp_addresses(b, g, mask, address) -> list[tuple[int, int]]:
    """(position, address) of every active warp; lanes of a warp must agree."""
    return [
        (k, uniform(address[WARP * k : WARP * k + WARP], None, "tensor memory address")) for k in active_warps(g, mask)
    ]


def _whole_block(g, mask, places: list[tuple[int, int]]):
    """Lane rows when every warp reads its own quarter at one column: the common case, done as one copy."""
    columns = {a & 0xFFFF for _, a in places}
    if mask is not None or len(columns) != 1:
        return None
    for k, address in places:
        if address >> 16 != WARP * (g.warps[k].index % 4):
            return None
    rows = [address >> 16 for _, address in places]
    if rows == list(range(rows[0], rows[0] + WARP * len(rows), WARP)):
        return slice(rows[0], rows[0] + WARP * len(rows))
    return np.concatenate([np.arange(r, r + WARP) for r in rows])


def _check_cells(b, g, places, memory, shape: str, width: int) -> None:
    for k, address in places:
        memory.require(address & 0xFFFF, width, b)
        _guarded(b, tmem.check_transfer, address, g.warps[k].index, shape, 0)


def _observe(b, g, places, width: int, is_write: bool) -> None:
    if g.cta.observer is not None:
        for k, address in places:
            g.cta.observer.tmem_access(g, g.warps[k], address, width, is_write, b.site)


@system(rf"tcgen05\.ld\.sync\.aligned\.{_SHAPE}(\.pack::16b)?\.b32")
def _ld(b, ins, match):
    shape, repeat, packed = match[1], int(match[2]), match[3] is not None
    targets = ins.operands[0].elements if isinstance(ins.operands[0], Vector) else (ins.operands[0],)
    address = b.address(ins.operands[1], 32)
    split = ins.operands[2].value if len(ins.operands) > 2 else 0
    writers = [b.put(t, "u32") for t in targets]
    width = tmem.transfer_columns(shape, repeat, split, packed)

    def run(g, mask) -> None:
        require_converged(g, mask, "tcgen05.ld")
        memory = tensor_memory(g.cta)
        places = _warp_addresses(b, g, mask, address(g))
        _check_cells(b, g, places, memory, shape, width)
        _observe(b, g, places, width, False)
        rows = _whole_block(g, mask, places) if shape == "32x32b" and not packed else None
        if rows is not None:
            column = places[0][1] & 0xFFFF
            values = np.ascontiguousarray(memory.cells[rows, column : column + repeat].T)
        else:
            values = np.zeros((len(targets), g.lanes), np.uint32)
            for k, a in places:
                part = _guarded(b, tmem.load, memory.cells, a, g.warps[k].index, shape, repeat, split, packed)
                values[:, WARP * k : WARP * k + WARP] = part
        for write, row in zip(writers, values, strict=True):
            write(g, mask, row)

    return run


@system(r"tcgen05\.ld\.red\.sync\.aligned\.32x32b\.x(\d+)\.(min|max)(\.abs)?(\.NaN)?\.f32")
def _ld_red(b, ins, match):
    repeat = int(match[1])
    writers = [b.put(t, "u32") for t in ins.operands[0].elements]
    reduced, address = b.put(ins.operands[1], "u32"), b.address(ins.operands[2], 32)

    def run(g, mask) -> None:
        require_converged(g, mask, "tcgen05.ld.red")
        memory = tensor_memory(g.cta)
        places = _warp_addresses(b, g, mask, address(g))
        _check_cells(b, g, places, memory, "32x32b", repeat)
        _observe(b, g, places, repeat, False)
        values, extremes = np.zeros((repeat, g.lanes), np.uint32), np.zeros(g.lanes, np.uint32)
        for k, a in places:
            lanes = slice(WARP * k, WARP * k + WARP)
            values[:, lanes], extremes[lanes] = _guarded(
                b,
                tmem.load_reduce,
                memory.cells,
                a,
                g.warps[k].index,
                repeat,
                match[2],
                match[3] is not None,
                match[4] is not None,
            )
        for write, row in zip(writers, values, strict=True):
            write(g, mask, row)
        reduced(g, mask, extremes)

    return run


@system(rf"tcgen05\.st\.sync\.aligned\.{_SHAPE}(\.unpack::16b)?\.b32")
def _st(b, ins, match):
    shape, repeat, packed = match[1], int(match[2]), match[3] is not None
    address = b.address(ins.operands[0], 32)
    split = ins.operands[1].value if len(ins.operands) > 2 else 0
    sources = ins.operands[-1].elements if isinstance(ins.operands[-1], Vector) else (ins.operands[-1],)
    readers = [b.get(s, "u32") for s in sources]
    width = tmem.transfer_columns(shape, repeat, split, packed)

    def run(g, mask) -> None:
        require_converged(g, mask, "tcgen05.st")
        memory = tensor_memory(g.cta)
        places = _warp_addresses(b, g, mask, address(g))
        _check_cells(b, g, places, memory, shape, width)
        _observe(b, g, places, width, True)
        values = np.stack([read(g) for read in readers])
        rows = _whole_block(g, mask, places) if shape == "32x32b" and not packed else None
        if rows is not None:
            column = places[0][1] & 0xFFFF
            memory.cells[rows, column : column + repeat] = values.T
            return
        for k, a in places:
            part = values[:, WARP * k : WARP * k + WARP]
            _guarded(b, tmem.store, memory.cells, a, g.warps[k].index, shape, repeat, part, split, packed)

    return run


@system(r"tcgen05\.wait::(ld|st)\.sync\.aligned|tcgen05\.fence::(before|after)_thread_sync")
def _wait(b, ins, match):
    def run(g, mask) -> None:
        if match[1]:
            require_converged(g, mask, ins.opcode)
        if g.cta.observer is not None:
            g.cta.observer.tmem_wait(g, mask, match[1] or match[2])

    return run


@system(r"tcgen05\.mma\.cta_group::([12])\.kind::(f16|tf32|f8f6f4)(?:\.collector::[\w:]+)?")
def _mma(b, ins, match):
    group, kind = int(match[1]), match[2]
    d, a, bdesc, idesc, *rest = ins.operands
    disabled = rest.pop(0) if isinstance(rest[0], Vector) else None
    enable = rest.pop(0)
    if rest:
        raise b.fault("tcgen05.mma with scale-input-d is not modelled")
    from_tmem = isinstance(a, Address)
    read_d = b.address(d, 32)
    read_a = b.address(a, 32) if from_tmem else b.get(a, "u64")
    read_b, read_i = b.get(bdesc, "u64"), b.get(idesc, "u32")
    accumulate = (lambda g: np.full(g.lanes, bool(enable.value))) if isinstance(enable, Imm) else b.get(enable, "p")
    read_mask = [b.get(x, "u32") for x in disabled.elements] if disabled is not None else []

    def run(g, mask) -> None:
        lane = one_thread(b, g, mask)
        ctas = pair_of(b, g.cta, group)
        for cta in ctas:
            _join_group(b, cta, group)
        desc = _guarded(b, decode_instruction, int(read_i(g)[lane]), kind, group)
        a_value, d_address = int(read_a(g)[lane]), int(read_d(g)[lane])
        a_desc = a_value if from_tmem else _guarded(b, decode_tcgen05, a_value)
        b_desc = _guarded(b, decode_tcgen05, int(read_b(g)[lane]))
        if desc.d_type != "f32":
            raise b.fault(f"tcgen05.mma with D type {desc.d_type} is not modelled")
        suppressed = _disabled_lanes([int(x(g)[lane]) for x in read_mask], group)
        keeps = bool(accumulate(g)[lane])
        warp = g.warps[lane // WARP]
        blocks = _guarded(b, tmem.accumulator_blocks, desc.m, desc.n, group, d_address)
        for block in blocks:
            tensor_memory(ctas[block.cta]).require(block.column, block.num_cols, b)

        def compute() -> None:
            _compute(b, ctas, desc, a_desc, b_desc, d_address, keeps, from_tmem, group, suppressed)

        op = AsyncOp(f"tcgen05.mma at line {b.line}", [compute])
        if g.cta.observer is not None:
            reads, writes = _footprint(ctas, desc, a_desc, b_desc, blocks, keeps, from_tmem, group)
            observe_issue(b, g, warp, op, "mma", reads, writes)
        g.cta.cluster.engine.submit(op, ("tcgen05", id(g.cta), warp.index))

    return run


def _disabled_lanes(words: list[int], group: int):
    """Per CTA the lanes whose write is suppressed; None if there are none."""
    if not any(words):
        return None
    bits = np.array([words[i // 32] >> (i % 32) & 1 for i in range(32 * len(words))], bool)
    return [bits[tmem.LANES * r : tmem.LANES * (r + 1)] for r in range(group)]


def _operand(ctas, desc, descriptor, rows: int, major: str) -> np.ndarray:
    """Rows of all CTAs of the group, each from its own shared memory."""
    share = rows // len(ctas)
    parts = [load_matrix(c.shared[1], descriptor, share, desc.k, desc.elem_bytes, major) for c in ctas]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _negated(bits: np.ndarray, negate: bool) -> np.ndarray:
    return bits ^ bits.dtype.type(1 << 8 * bits.dtype.itemsize - 1) if negate else bits


def _compute(b, ctas, desc, a_desc, b_desc, d_address, keeps, from_tmem, group, suppressed) -> None:
    cells = [tensor_memory(c).cells for c in ctas]
    if from_tmem:
        a_bits = _guarded(b, tmem.read_a_operand, cells, desc.m, group, a_desc, desc.elem_bytes)
    else:
        a_bits = _operand(ctas, desc, a_desc, desc.m, desc.a_major)
    b_bits = _operand(ctas, desc, b_desc, desc.n, desc.b_major)
    c = tmem.read_accumulator(cells, desc.m, desc.n, group, d_address) if keeps else None
    a_bits, b_bits = _negated(a_bits, desc.negate_a), _negated(b_bits, desc.negate_b)
    result = mma_tile(a_bits, b_bits, c, desc.a_type, desc.b_type)
    tmem.write_accumulator(cells, result, group, d_address, suppressed)


def _footprint(ctas, desc, a_desc, b_desc, blocks, keeps, from_tmem, group):
    """What an MMA touches: shared units and tensor-memory blocks (lanes, columns)."""
    reads: list = []
    for cta in ctas:
        reads.append(("smem", cta, distinct_units(b_desc, desc.n // group, desc.k, desc.elem_bytes, desc.b_major)))
        if not from_tmem:
            reads.append(("smem", cta, distinct_units(a_desc, desc.m // group, desc.k, desc.elem_bytes, desc.a_major)))
        else:
            reads.append(("tmem", cta, (0, desc.m // group, a_desc & 0xFFFF, 8)))
    cells = [("tmem", ctas[x.cta], (x.lane, x.num_rows, x.column, x.num_cols)) for x in blocks]
    return (reads + cells if keeps else reads), cells


_COPY_SHAPES = {
    "128x256b": (128, 32, ((0, 0),)),
    "128x128b": (128, 16, ((0, 0),)),
    # rows 0-31 of the source to the quarters of the first list, rows 32-63 to those of the second
    "64x128b.warpx2::02_13": (64, 16, ((0, 0), (0, 2), (1, 1), (1, 3))),
    "64x128b.warpx2::01_23": (64, 16, ((0, 0), (0, 1), (1, 2), (1, 3))),
    "32x128b.warpx4": (32, 16, ((0, 0), (0, 1), (0, 2), (0, 3))),
}


@system(r"tcgen05\.cp\.cta_group::([12])\.(" + "|".join(map(re.escape, _COPY_SHAPES)) + ")")
def _copy(b, ins, match):
    """Rows of shared memory (K-major descriptor) to tensor memory, in order with the MMAs. From documentation only."""
    group = int(match[1])
    rows, size, parts = _COPY_SHAPES[match[2]]
    address, source = b.address(ins.operands[0], 32), b.get(ins.operands[1], "u64")

    def run(g, mask) -> None:
        lane = one_thread(b, g, mask)
        descriptor = _guarded(b, decode_tcgen05, int(source(g)[lane]))
        column = int(address(g)[lane]) & 0xFFFF
        ctas = pair_of(b, g.cta, group)
        for cta in ctas:
            _join_group(b, cta, group).require(column, size // 4, b)

        def work() -> None:
            for cta in ctas:
                data = load_matrix(cta.shared[1], descriptor, rows, size, 1, "k")
                words = np.ascontiguousarray(data).view(np.uint32)
                cells = tensor_memory(cta).cells
                if rows == tmem.LANES:
                    cells[:, column : column + size // 4] = words
                    continue
                for part, quarter in parts:
                    cells[WARP * quarter : WARP * quarter + WARP, column : column + size // 4] = words[
                        WARP * part : WARP * part + WARP
                    ]

        op = AsyncOp(f"tcgen05.cp at line {b.line}", [work])
        reads = [("smem", c, distinct_units(descriptor, rows, size, 1, "k")) for c in ctas]
        writes = [("tmem", c, (0, tmem.LANES, column, size // 4)) for c in ctas]
        warp = g.warps[lane // WARP]
        observe_issue(b, g, warp, op, "mma", reads, writes)
        g.cta.cluster.engine.submit(op, ("tcgen05", id(g.cta), warp.index))

    return run


@system(r"tcgen05\.commit\.cta_group::([12])\.mbarrier::arrive::one(?:\.shared::cluster)?(\.multicast::cluster)?\.b64")
def _commit(b, ins, match):
    """One arrival when all earlier asynchronous tcgen05 operations of the thread are done."""
    address = b.address(ins.operands[0], 32)
    members = b.get(ins.operands[1], "u16") if match[2] else None

    def run(g, mask) -> None:
        lane = one_thread(b, g, mask)
        _join_group(b, g.cta, int(match[1]))
        target = int(address(g)[lane])
        barriers = [find_mbarrier(g.cta, target)] if members is None else []
        if members is not None:
            chosen = int(members(g)[lane])
            if chosen >> len(g.cta.cluster.ctas):
                raise b.fault(f"commit mask 0x{chosen:x} names CTAs outside the cluster of {len(g.cta.cluster.ctas)}")
            barriers = [
                find_mbarrier(g.cta, c.rank << 24 | target & 0xFFFFFF)
                for c in g.cta.cluster.ctas
                if chosen >> c.rank & 1
            ]
        warp = g.warps[lane // WARP]

        observer = g.cta.observer
        clock = None if observer is None else observer.products_so_far(warp)
        for barrier in barriers:
            barrier.sources[g.cta.rank, warp.index] = b.line

        def arrive() -> None:
            for barrier in barriers:
                if observer is not None:
                    observer.deferred_arrive(barrier, clock)
                barrier.arrive(1, f"tcgen05.commit of warp {warp.index}, CTA {g.cta.rank} at line {b.line}")

        op = AsyncOp(f"tcgen05.commit at line {b.line}", [arrive])
        g.cta.cluster.engine.submit(op, ("tcgen05", id(g.cta), warp.index))

    return run
