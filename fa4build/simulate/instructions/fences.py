"""Fences, hints without effect, traps, and the register budgets of warps.

Source: ptx-semantics.md 7.5, 7.6, 7.9; PTX ISA 9.7.13, 9.7.19.5.
"""

from fa4build.simulate.hardware.gang import WARP
from fa4build.simulate.instructions.operands import Wait, active_warps, require_converged
from fa4build.simulate.translate.node_scope import in_node_scope
from fa4build.simulate.translate.opcodes import fused, system


@in_node_scope
def fence(g, kind, mask):
    """Fences do nothing here; the hazard observer follows them."""
    if g.cta.observer is not None:
        g.cta.observer.fence(g, kind, mask)


@fused(
    r"fence(\.proxy\.async(?:\.(?:shared::cta|shared::cluster|global))?|\.mbarrier_init\.release\.cluster|\.proxy\.alias"
    r"|\.(?:acq_rel|sc|acquire|release)\.(?:cta|cluster|gpu|sys)|\.proxy\.tensormap::generic\.[\w.]+)|membar\.(?:cta|gl|sys)"
)
def _fence(e, ins, match) -> None:
    e.lines.append(f"fence(g, {match[1] or '.membar'!r}, {e.mask})")


@fused(r"griddepcontrol\.(launch_dependents|wait)")
def _griddep(e, ins, match) -> None:
    """Kernels of a plan run one after the other here, so both are done at once."""
    e.lines.append(f"fence(g, 'griddepcontrol.{match[1]}', {e.mask})")


@fused(r"nanosleep\.u32")
def _nanosleep(e, ins, match) -> None:
    """Time passes anyway."""


@system(r"trap")
def _trap(b, ins, match):
    def run(g, mask) -> None:
        raise b.fault("trap executed: an assertion of the kernel failed")

    return run


@system(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32")
def _setmaxnreg(b, ins, match):
    """Functionally nothing; the pool of the CTA must hold what all warps ask for."""
    wanted = ins.operands[0].value

    def run(g, mask):
        require_converged(g, mask, ins.opcode)
        if wanted % 8 or not 24 <= wanted <= 256:
            raise b.fault(f"setmaxnreg {wanted}: allowed are multiples of 8 from 24 to 256")
        warps = [g.warps[k] for k in active_warps(g, mask)]
        budget = g.cta.register_budget
        if budget is not None and match[1] == "inc":
            need = sum(WARP * (wanted - w.registers) for w in warps)
            if budget.free < need:
                return _wait_for_registers(budget, need)
        for warp in warps:
            if budget is not None:
                if (match[1] == "inc") != (wanted >= warp.registers):
                    raise b.fault(
                        f"setmaxnreg.{match[1]} {wanted}: warp {warp.index} has {warp.registers} registers a thread"
                    )
                budget.free += WARP * (warp.registers - wanted)
            warp.registers = wanted
            warp.register_history.append(wanted)
        return None

    return run


def _wait_for_registers(budget, need: int) -> Wait:
    wait = Wait(
        lambda: budget.free >= need,
        lambda: f"{need} registers for setmaxnreg.inc; the CTA's pool has {budget.free} free of {budget.total}",
    )
    wait.resume = -1
    return wait
