"""What must be over, freed or balanced when threads exit: R5, R6, R12, R14."""

import numpy as np

from fa4build.simulate.hardware.gang import WARP

REGISTER_FILE = 65_536  # registers of one multiprocessor


def check_warps(observer, g, mask) -> None:
    """Threads exit: their bulk copies must have read their sources, their wgmma must be waited for."""
    for k, warp in enumerate(g.warps):
        leaving = mask.reshape(-1, WARP)[k]
        if not leaving.any():
            continue
        place = f"CTA {g.cta.ctaid} warp {warp.index}"
        for lane, groups in warp.bulk_groups.items():
            unread = [op for group in groups for op in group if not _source_is_free(observer, warp, op)]
            if leaving[lane] and unread:
                observer.findings.error(
                    "R12",
                    (unread[0].describe,),
                    f"{place} exits while {unread[0].describe} may still read shared memory",
                )
        for lane, ops in warp.bulk_open.items():
            # Stores that all lanes issue are one store; a commit by any of them closes it.
            ops = [op for op in ops if not op.committed]
            if leaving[lane] and ops:
                observer.findings.error(
                    "R12", (ops[0].describe,), f"{place} exits with an uncommitted {ops[0].describe}"
                )
        if warp.wgmma_open or any(warp.wgmma_groups):
            observer.findings.error("R8", (warp.index,), f"{place} exits with wgmma operations not waited for")


def _source_is_free(observer, warp, op) -> bool:
    """Whether the warp has waited for the operation."""
    if op.token is None:
        return op.has_read
    state = observer.state(warp.cta.cluster)
    component, count = op.token
    return int(state.clocks.g[state.slot(warp), component]) >= count


def check_cluster(observer, cluster) -> None:
    """Barriers balanced, tensor memory freed, register budgets equal within warpgroups."""
    for cta in cluster.ctas:
        _check_barriers(observer, cta)
        if cta.tmem is not None and cta.tmem.allocator.leftover():
            observer.findings.error(
                "R6",
                (cta.rank,),
                f"CTA {cta.ctaid} exits with tensor memory not freed: {cta.tmem.allocator.leftover()}",
            )
        _check_registers(observer, cta)


def _check_barriers(observer, cta) -> None:
    for barrier in cta.mbarriers.values():
        if barrier.tx:
            observer.findings.error(
                "R5-exit",
                (barrier.offset,),
                f"CTA {cta.ctaid} exits with mbarrier {barrier.name} unbalanced: {barrier.state()}",
            )
        elif barrier.pending != barrier.expected:
            observer.findings.error(
                "R5-exit",
                (barrier.offset,),
                f"CTA {cta.ctaid} exits with a half-complete phase of mbarrier {barrier.name}: {barrier.state()}",
            )
    for barrier in cta.named:
        if barrier.arrived:
            observer.note(
                f"R14 CTA {cta.ctaid} exits with {len(barrier.arrived) * WARP} of {barrier.required} threads "
                f"arrived at named barrier {barrier.index}"
            )


def _check_registers(observer, cta) -> None:
    for first in range(0, len(cta.warps), 4):
        histories = {tuple(w.register_history) for w in cta.warps[first : first + 4]}
        if len(histories) > 1:
            observer.findings.error(
                "R14",
                (cta.rank, first),
                f"warps {first}-{first + 3} have unequal register budgets: setmaxnreg {sorted(histories)}",
            )
    changed = [w for w in cta.warps if w.register_history]
    if len(changed) == len(cta.warps):
        total = int(np.sum([WARP * w.register_history[-1] for w in cta.warps]))
        if total > REGISTER_FILE:
            observer.findings.error(
                "R14",
                (cta.rank,),
                f"setmaxnreg asks for {total} registers in all; a multiprocessor has {REGISTER_FILE}",
            )
