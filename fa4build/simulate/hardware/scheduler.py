"""Runs the gangs of clusters until all have exited; says who waits for whom when none can go on."""

import random

import numpy as np

from fa4build.errors import SimulationError
from fa4build.simulate.hardware.deadlock import deadlock_report
from fa4build.simulate.hardware.gang import DEAD, Fault, Gang, merge_gangs, place

_QUANTUM = 1 << 30
RENDEZVOUS = -2  # `Wait.resume` of gangs that wait for each other to become one


class Scheduler:
    """Round robin over gangs. The random schedule also shuffles their order and cuts their runs short."""

    def __init__(self, clusters: list, *, schedule: str, seed: int, limit: int, kernel: str):
        self.clusters, self.schedule, self.limit, self.kernel = clusters, schedule, limit, kernel
        self.random = random.Random(seed ^ 0x5EED)
        self.steps = 0
        self.warp_instructions = 0
        for cluster in clusters:
            cluster.scheduler = self

    def may_miss(self) -> bool:
        """Whether a non-blocking barrier test may report false although the phase is over."""
        return self.schedule == "random" and self.random.random() < 0.3

    def run(self) -> None:
        """Runs to the end.

        Raises:
            SimulationError: a fault with its place, a deadlock, or the instruction limit.
        """
        with np.errstate(all="ignore"):
            while gangs := [g for cluster in self.clusters for cta in cluster.ctas for g in cta.gangs]:
                if self._round(gangs):
                    continue
                if self._merge_paused():
                    continue
                advanced = [cluster.engine.advance() for cluster in self.clusters]
                if any(advanced):
                    continue
                raise SimulationError(deadlock_report(self.kernel, self.clusters))

    def _round(self, gangs: list[Gang]) -> bool:
        progress = False
        if self.schedule == "random":
            self.random.shuffle(gangs)
        elif self.schedule == "late":
            gangs.reverse()
        for gang in gangs:
            if gang.dead or gang.paused:
                continue
            if gang.wait is not None:
                if not self._is_ready(gang):
                    continue
                if gang.wait.resume == RENDEZVOUS:
                    gang = self._join_waiting(gang)
                else:
                    self._resume(gang)
            self._run_gang(gang)
            progress = True
        return progress

    def _is_ready(self, gang: Gang) -> bool:
        try:
            return gang.wait.ready()
        except Fault as fault:
            raise self._located(gang, fault) from fault

    def _resume(self, gang: Gang) -> None:
        wait, gang.wait = gang.wait, None
        if wait.finish is not None:
            gang.pc = wait.node
            try:
                wait.finish()
            except Fault as fault:
                raise self._located(gang, fault) from fault
        gang.pc = wait.node if wait.resume == -1 else wait.resume

    def _join_waiting(self, gang: Gang) -> Gang:
        """Merges all gangs that wait for each other at one node, and takes them back to it."""
        cta, node = gang.cta, gang.wait.node
        group = [g for g in cta.gangs if g.wait is not None and g.wait.node == node and g.wait.resume == RENDEZVOUS]
        # Where whole warps went apart, and hoped to meet again, may differ; only lanes within a warp must not be apart.
        hints = _shared_start([g.hints for g in group])
        for other in group:
            other.wait, other.pc, other.hints = None, node, list(hints)
        if len({g.shape() for g in group}) != 1:
            raise self._located(gang, Fault("warps of one warpgroup meet with different divergence"))
        merged = merge_gangs(group)
        cta.replace(group[0], [merged])
        for other in group[1:]:
            cta.gangs.remove(other)
            other.dead = True
        return merged

    def _run_gang(self, gang: Gang) -> None:
        program = gang.program
        uniform, masked, sizes = program.uniform, program.masked, program.sizes
        quantum = self.random.randrange(1, 300) if self.schedule == "random" else _QUANTUM
        warps = len(gang.warps)
        executed = 0
        pc = gang.pc
        engine = gang.cta.cluster.engine
        enter = None if gang.cta.observer is None else gang.cta.observer.enter_node
        try:
            while True:
                if pc == gang.stop:
                    pc = gang.reach_stop(pc)
                    if pc < 0:
                        break
                    continue
                gang.pc = pc
                if enter is not None:
                    enter(gang, pc)
                executed += sizes[pc]
                pc = (uniform if gang.mask is None else masked)[pc](gang)
                if pc < 0:
                    break
                if executed > quantum:
                    gang.pc = pc
                    break
                if executed > self.limit:
                    raise Fault(f"more than {self.limit} instructions without an end: livelock?")
        except Fault as fault:
            raise self._located(gang, fault) from fault
        except (TypeError, IndexError, ValueError, AttributeError) as error:
            raise self._located(gang, Fault(f"the simulator failed: {type(error).__name__}: {error}")) from error
        self.warp_instructions += executed * warps
        self.steps += executed
        if pc == DEAD:
            gang.cta.gangs.remove(gang)
        if self.warp_instructions > self.limit * 64:
            raise self._located(gang, Fault(f"more than {self.limit * 64} warp instructions in all: livelock?"))
        engine.drift()

    def _merge_paused(self) -> bool:
        """Gangs that met at a reconvergence point go on as one."""
        any_paused = False
        for cluster in self.clusters:
            for cta in cluster.ctas:
                groups: dict = {}
                for gang in cta.gangs:
                    if gang.paused:
                        gang.paused = False
                        any_paused = True
                        groups.setdefault(gang.shape(), []).append(gang)
                for group in groups.values():
                    if len(group) > 1:
                        merged = merge_gangs(group)
                        cta.replace(group[0], [merged])
                        for other in group[1:]:
                            cta.gangs.remove(other)
                            other.dead = True
        return any_paused

    def _located(self, gang: Gang, fault: Fault) -> SimulationError:
        """The fault with kernel, CTA, warps, role and PTX line."""
        program = gang.program
        if fault.site is not None:
            index = fault.site
        elif gang.pc < program.exit_node:
            index = program.nodes[gang.pc].start
        else:
            index = len(program.function.instructions) - 1
        ins = program.function.instructions[index]
        return SimulationError(f"{self.kernel}: {place(gang)}, PTX line {ins.line} `{ins.text[:200]}`: {fault}")


def _shared_start(lists: list[list[int]]) -> list[int]:
    """What all lists begin with."""
    shared = []
    for values in zip(*lists, strict=False):
        if len(set(values)) > 1:
            break
        shared.append(values[0])
    return shared
