"""wgmma (sm_90a): fragments, descriptors, groups. Source: ptx-semantics.md 10; PTX ISA 9.7.15.

In the eager schedule an instruction computes at issue. In the others it computes when it is waited for, from shared
memory as it is then, and its accumulators hold poison in between.
"""

from typing import Any

import numpy as np

from fa4build.simulate.hardware.engine import AsyncOp
from fa4build.simulate.hardware.gang import WARP
from fa4build.simulate.hardware.registers import to_kind
from fa4build.simulate.hardware.scheduler import RENDEZVOUS
from fa4build.simulate.hardware.smem_descriptor import decode_wgmma, distinct_units, load_matrix
from fa4build.simulate.instructions.async_copies import observe_issue
from fa4build.simulate.instructions.operands import Wait, active_warps, require_converged, uniform
from fa4build.simulate.ptx.instructions import Imm, Vector
from fa4build.simulate.translate.opcodes import system
from fa4build.simulate.units.tensor_core import mma_tile

GROUP = 4 * WARP
_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
_POISON = np.float32(np.nan)


def accumulator_matrix(fragment: np.ndarray) -> np.ndarray:
    """(N/2 registers, 128 lanes) to the (64, N) matrix: register 4i+2h+c of lane (w, r, q) is row 16w+8h+r, column
    8i+2q+c.
    """
    return fragment.reshape(-1, 2, 2, 4, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(64, -1)


def accumulator_fragment(matrix: np.ndarray) -> np.ndarray:
    """Inverse of `accumulator_matrix`."""
    split = matrix.reshape(4, 2, 8, -1, 4, 2)
    return np.ascontiguousarray(split.transpose(3, 1, 5, 0, 2, 4)).reshape(-1, GROUP)


def operand_matrix(fragment: np.ndarray, element_bytes: int) -> np.ndarray:
    """(4 registers, 128 lanes) of u32 to the (64, 32 / element_bytes) A operand."""
    per_register = 4 // element_bytes
    parts = np.ascontiguousarray(fragment).view(f"u{element_bytes}").reshape(2, 2, 4, 8, 4, per_register)
    return np.ascontiguousarray(parts.transpose(2, 1, 3, 0, 4, 5)).reshape(64, -1)


def rendezvous(g, node_name: str, line: int):
    """None if the gang holds whole warpgroups; else a Wait for the missing warps, which then join the gang."""
    here = {w.index for w in g.warps}
    missing = sorted({m for w in here for m in range(w // 4 * 4, w // 4 * 4 + 4)} - here)
    if not missing:
        return None
    cta, node = g.cta, g.pc

    def ready() -> bool:
        waiting = {
            w.index for other in cta.gangs if other.wait is not None and other.wait.node == node for w in other.warps
        }
        return set(missing) <= waiting

    wait = Wait(ready, lambda: f"warps {missing} of its warpgroup to reach {node_name} at line {line} as well")
    wait.resume = RENDEZVOUS
    return wait


@system(r"wgmma\.fence\.sync\.aligned")
def _fence(b, ins, match):
    def run(g, mask):
        require_converged(g, mask, ins.opcode)
        if g.cta.observer is not None:
            g.fenced = list(g.regs)

    return run


@system(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(bf16|f16|tf32|e4m3|e5m2)\.(bf16|f16|tf32|e4m3|e5m2)")
def _mma(b, ins, match):
    n, kind = int(match[1]), match[3]
    d, a, bdesc, scale, scale_a, scale_b, *transposes = ins.operands
    size, k_elements = _BYTES[kind], int(match[2])
    if size == 1:
        # tensor_core.py sums 8-bit products as Blackwell does; Hopper keeps fewer bits of each (ptx-semantics.md 9.8).
        raise b.fault(
            f"{ins.opcode}: 8-bit operands are not modelled for sm_90a; their sums are cut to other bits there"
        )
    from_registers = isinstance(a, Vector)
    majors = ["mn" if t.value else "k" for t in transposes]
    b_major = majors[-1] if majors else "k"
    a_major = majors[0] if majors and not from_registers else "k"
    if len(d.elements) != n // 2 or k_elements * size != 32:
        raise b.fault(f"{ins.opcode}: {len(d.elements)} accumulator registers; m64n{n} has {n // 2}")
    if (scale_a.value, scale_b.value) != (1, 1):
        raise b.fault("imm-scale other than 1 is not modelled")
    read_d, write_d = _accumulators(b, d)
    read_a = [b.get(x, "u32") for x in a.elements] if from_registers else b.get(a, "u64")
    read_b = b.get(bdesc, "u64")
    accumulate = (lambda g: np.full(g.lanes, bool(scale.value))) if isinstance(scale, Imm) else b.get(scale, "p")
    regs = tuple(e.index for e in d.elements)
    a_regs = tuple(e.index for e in a.elements) if from_registers else ()

    def operands_of(g, group: int) -> tuple:
        a_operand: Any
        lanes = slice(GROUP * group, GROUP * (group + 1))
        descriptor = decode_wgmma(uniform(read_b(g)[lanes], None, "B descriptor"))
        if from_registers:
            a_operand = operand_matrix(np.stack([x(g)[lanes] for x in read_a]), size)
        else:
            a_operand = decode_wgmma(uniform(read_a(g)[lanes], None, "A descriptor"))
        return a_operand, descriptor, bool(uniform(accumulate(g)[lanes], None, "scale-d"))

    def compute(g, a_operand, descriptor, c) -> np.ndarray:
        shared = g.cta.shared[1]
        a_bits = a_operand if from_registers else load_matrix(shared, a_operand, 64, k_elements, size, a_major)
        b_bits = load_matrix(shared, descriptor, n, k_elements, size, b_major)
        return mma_tile(a_bits, b_bits, c, kind, match[4]).view(np.float32)

    def observe(g, op, group: int, a_operand, descriptor) -> None:
        if g.cta.observer is None:
            return
        reads = [("smem", g.cta, distinct_units(descriptor, n, k_elements, size, b_major))]
        if not from_registers:
            reads.append(("smem", g.cta, distinct_units(a_operand, 64, k_elements, size, a_major)))
        observe_issue(b, g, g.warps[4 * group], op, "wgmma", reads)

    def run(g, mask):
        require_converged(g, mask, ins.opcode)
        wait = rendezvous(g, "wgmma", b.line)
        if wait is not None:
            return wait
        if g.cta.observer is not None:
            _check_fence(b, g, regs, a_regs)
        groups = g.lanes // GROUP
        lazy = g.cta.cluster.engine.schedule != "eager"
        before = None if lazy else read_d(g)
        results = []
        for group in range(groups):
            a_operand, descriptor, keeps = operands_of(g, group)
            op = _operation(b, g, group, regs, lambda c, o=a_operand, s=descriptor: compute(g, o, s, c), keeps, lazy)
            observe(g, op, group, a_operand, descriptor)
            for warp in g.warps[4 * group : 4 * group + 4]:
                warp.wgmma_open.append(op)
            if lazy:
                _start_late(g, op, group, regs, keeps, read_d)
                g.cta.cluster.engine.submit(op, ("wgmma", id(g.cta), g.warps[4 * group].index))
                continue
            c = accumulator_matrix(before[:, GROUP * group : GROUP * (group + 1)]) if keeps else None
            op.stage = 1
            results.append(accumulator_fragment(compute(g, a_operand, descriptor, c)))
        if lazy:
            write_d(g, np.full((n // 2, g.lanes), _POISON, np.float32))
        else:
            write_d(g, results[0] if groups == 1 else np.concatenate(results, axis=1))
        return None

    return run


def _accumulators(b, d: Vector):
    """Reader and writer of the accumulator registers as one (registers, lanes) f32 array."""
    places = [(e.index, b.program.storage[e.index]) for e in d.elements]
    plain = all(storage == "f32" for _, storage in places)

    def read(g) -> np.ndarray:
        if plain:
            return np.stack([g.regs[i] for i, _ in places])
        return np.stack([to_kind(g.regs[i], storage, "f32") for i, storage in places])

    def write(g, values: np.ndarray) -> None:
        for (i, storage), row in zip(places, values, strict=True):
            g.regs[i] = row if storage == "f32" else to_kind(row, "f32", storage)
            if g.fenced:
                g.fenced[i] = g.regs[i]

    return read, write


def _check_fence(b, g, regs, a_regs) -> None:
    """R8: accumulators and A fragments may not be written between the last wgmma.fence and the instruction."""
    if g.fenced is None:
        return
    if g.fenced is False:
        g.cta.observer.error("R8", b.site, f"{b.ins.opcode} at line {b.line}: no wgmma.fence before it")
        return
    changed = [r for r in (*regs, *a_regs) if g.regs[r] is not g.fenced[r]]
    if changed:
        names = ", ".join(b.program.function.register_names[r] for r in changed[:4])
        what = "accumulator" if changed[0] in regs else "A fragment"
        text = f"{what} registers ({names}, ...) were written after the last wgmma.fence"
        g.cta.observer.error("R8", b.site, f"{b.ins.opcode} at line {b.line}: {text}")


class _Pending(AsyncOp):
    """A wgmma that has not computed yet.

    `source`: accumulator input (array or an earlier pending one); `result`: (64, N).
    """

    __slots__ = ("regs", "result", "source", "warps")

    def __init__(self, describe: str, stages: list, regs: tuple[int, ...], warps: tuple[int, ...]):
        super().__init__(describe, stages)
        self.regs, self.warps = regs, warps
        self.source: Any = None
        self.result: Any = None


def _operation(b, g, group: int, regs, compute, keeps: bool, lazy: bool) -> _Pending:
    def work() -> None:
        source = op.source.result if isinstance(op.source, _Pending) else op.source
        op.result = compute(source if keeps else None)

    warps = tuple(w.index for w in g.warps[4 * group : 4 * group + 4])
    op = _Pending(f"wgmma at line {b.line}", [work], regs, warps)
    return op


def _start_late(g, op: _Pending, group: int, regs, keeps: bool, read_d) -> None:
    """Finds the accumulator input: the newest pending wgmma on the same registers, or the registers themselves."""
    warp = g.warps[4 * group]
    pending = [o for grp in [*warp.wgmma_groups, warp.wgmma_open] for o in grp if o is not op]
    for other in reversed(pending):
        if other.regs == regs:
            op.source = other
            return
    if keeps:
        op.source = accumulator_matrix(read_d(g)[:, GROUP * group : GROUP * (group + 1)])


@system(r"wgmma\.commit_group\.sync\.aligned")
def _commit(b, ins, match):
    def run(g, mask) -> None:
        require_converged(g, mask, ins.opcode)
        for k in active_warps(g, mask):
            warp = g.warps[k]
            warp.wgmma_groups.append(warp.wgmma_open)
            warp.wgmma_open = []

    return run


@system(r"wgmma\.wait_group\.sync\.aligned")
def _wait(b, ins, match):
    newest = ins.operands[0].value

    def run(g, mask):
        require_converged(g, mask, ins.opcode)
        lazy = g.cta.cluster.engine.schedule != "eager"
        if g.cta.observer is not None and len(g.warps) % 4:
            g.cta.observer.note(
                f"R14 wgmma.wait_group at line {b.line} is executed by part of a warpgroup; PTX wants all "
                f"four warps at it together"
            )
        ops: dict = {}
        for k in active_warps(g, mask):
            warp = g.warps[k]
            keep = len(warp.wgmma_groups) - newest
            for group in warp.wgmma_groups[: max(keep, 0)]:
                ops.update((id(op), op) for op in group)
            warp.wgmma_groups = warp.wgmma_groups[max(keep, 0) :]
        done = list(ops.values())

        def finish() -> None:
            if lazy:
                _deliver(g, done)
            if g.cta.observer is not None:
                g.cta.observer.ops_waited(g, mask, done, "wgmma")

        if all(op.is_done for op in done):
            finish()
            return None
        return Wait(lambda: all(op.is_done for op in done), lambda: f"{len(done)} wgmma operations", finish)

    return run


def _deliver(g, ops: list[_Pending]) -> None:
    """Writes results of late operations into the registers; a later pending one on the same registers leaves poison."""
    for op in ops:
        fragment = accumulator_fragment(op.result)
        for k, warp in enumerate(g.warps):
            if warp.index not in op.warps:
                continue
            lanes = slice(WARP * k, WARP * k + WARP)
            own = WARP * op.warps.index(warp.index)
            for reg, row in zip(op.regs, fragment, strict=True):
                storage = g.program.storage[reg]
                value = to_kind(g.regs[reg], storage, "f32").copy()
                value[lanes] = row[own : own + WARP]
                g.regs[reg] = to_kind(value, "f32", storage)
                if g.fenced:
                    g.fenced[reg] = g.regs[reg]
