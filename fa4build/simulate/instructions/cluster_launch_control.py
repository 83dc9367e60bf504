"""clusterlaunchcontrol: running clusters claim ones that have not started.

Source: ptx-semantics.md 7.7; PTX ISA 9.7.13.17.

The opaque 16-byte response is, here, four u32: claimed (0 or 1), then the first CTA's x, y, z.
"""

import numpy as np

from fa4build.simulate.hardware.engine import AsyncOp
from fa4build.simulate.hardware.gang import WARP
from fa4build.simulate.instructions.async_copies import observe_issue, one_thread, shared_span, units
from fa4build.simulate.instructions.barriers import find_mbarrier
from fa4build.simulate.translate.opcodes import fused, system


class GridWork:
    """Clusters of a launch that have not started, in linear order."""

    def __init__(self, origins: list[tuple[int, int, int]]):
        self.origins = origins
        self.next = 0

    def take(self) -> tuple[int, int, int] | None:
        """The next cluster's first CTA, or None when all have started or were claimed."""
        if self.next == len(self.origins):
            return None
        self.next += 1
        return self.origins[self.next - 1]


@system(
    r"clusterlaunchcontrol\.try_cancel\.async(?:\.shared::cta)?\.mbarrier::complete_tx::bytes(\.multicast::cluster::all)?\.b128"
)
def _try_cancel(b, ins, match):
    """Writes the response to every CTA of the cluster and completes 16 bytes on each one's mbarrier."""
    where, bar = b.address(ins.operands[0], 32), b.address(ins.operands[1], 32)

    def run(g, mask) -> None:
        lane = one_thread(b, g, mask)
        offset, barrier_offset = int(where(g)[lane]) & 0xFFFFFF, int(bar(g)[lane]) & 0xFFFFFF
        cluster = g.cta.cluster
        if cluster.claim_failed:
            raise b.fault("clusterlaunchcontrol.try_cancel after a response that said there is no more work: undefined")
        claimed = cluster.grid_work.take()
        cluster.claim_failed = claimed is None
        response = np.array([claimed is not None, *(claimed or (0, 0, 0))], np.uint32).view(np.uint8)
        for cta in cluster.ctas if match[1] else [g.cta]:
            _respond(
                b, g, g.warps[lane // WARP], cta, offset, find_mbarrier(cta, cta.rank << 24 | barrier_offset), response
            )

    return run


def _respond(b, g, warp, cta, offset: int, barrier, response) -> None:
    target = shared_span(b, cta, offset, 16, "clusterlaunchcontrol response")

    def write() -> None:
        target[:] = response
        barrier.complete_bytes(16, f"clusterlaunchcontrol at line {b.line}")

    op = AsyncOp(f"clusterlaunchcontrol response at line {b.line}", [write])
    observe_issue(b, g, warp, op, barrier, (), [("smem", cta, units(offset, 16))])
    cta.cluster.engine.submit(op)


@fused(r"clusterlaunchcontrol\.query_cancel\.is_canceled\.pred\.b128")
def _is_canceled(e, ins, match) -> None:
    d, handle = ins.operands
    value = e.src(handle, "b128")
    e.dst(d, "p", f"({value}[0] & {e.const(1, 'u64')}) != {e.const(0, 'u64')}")


@fused(r"clusterlaunchcontrol\.query_cancel\.get_first_ctaid::([xyz])\.b32\.b128")
def _first_ctaid(e, ins, match) -> None:
    d, handle = ins.operands
    value = e.src(handle, "b128")
    word, high = {"x": (0, True), "y": (1, False), "z": (1, True)}[match[1]]
    text = f"({value}[{word}] >> {e.const(32, 'u64')}).astype(u32)" if high else f"{value}[{word}].astype(u32)"
    e.dst(d, "u32", text)
