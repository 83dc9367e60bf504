"""The observer: turns what the machine does into clock and shadow updates. Rules R1 to R15: ptx-semantics.md 13.3."""

from functools import lru_cache

import numpy as np

from fa4build.simulate.checks import exit_rules
from fa4build.simulate.checks.clocks import Clock, Clocks, merged
from fa4build.simulate.checks.findings import Findings
from fa4build.simulate.checks.memory_rules import MemoryRules
from fa4build.simulate.checks.shadow import Shadow
from fa4build.simulate.checks.tensor_rules import TensorRules, TensorShadow
from fa4build.simulate.checks.undefined import UndefinedUse, undefined_uses
from fa4build.simulate.instructions.operands import active_warps


@lru_cache(maxsize=8)
def _undefined_uses(program) -> tuple[UndefinedUse, ...]:
    return undefined_uses(program.function, program.blocks)


class _ClusterState:
    """Clocks and shadows of one cluster."""

    def __init__(self, cluster):
        self.first_slot: dict[int, int] = {}
        slots = 0
        for cta in cluster.ctas:
            self.first_slot[cta.rank] = slots
            slots += len(cta.warps)
        self.clocks = Clocks(slots)
        for cta in cluster.ctas:
            for warp in cta.warps:
                self.clocks.names[self.slot(warp)] = f"warp {warp.index} of CTA {cta.rank}"
        self.shared = {cta.rank: Shadow(cta.shared_limit // 16 + 1) for cta in cluster.ctas}
        self.tensor: dict[int, TensorShadow] = {}
        self.barrier_bytes = {cta.rank: np.zeros(cta.shared_limit // 16 + 1, np.uint16) for cta in cluster.ctas}
        self.unfenced: dict[tuple[int, int], tuple[int, int]] = {}  # mbarrier (CTA, offset) -> warp slot, site of init
        self.cluster_arrivals: Clock | None = None
        self.cluster_done: Clock | None = None

    def slot(self, warp) -> int:
        """Clock row of a warp."""
        return self.first_slot[warp.cta.rank] + warp.index

    def tensor_shadow(self, rank: int) -> TensorShadow:
        """Shadow of a CTA's tensor memory."""
        if rank not in self.tensor:
            self.tensor[rank] = TensorShadow(len(self.clocks.g))
        return self.tensor[rank]


class Observer:
    """Hooks called by the machine when checks are on."""

    enter_node = None  # called with (gang, node) before every node by observers that want it

    def __init__(self, program, allowed: tuple[str, ...]):
        self.program = program
        self.findings = Findings(program.function.name, program.function.instructions, allowed)
        self.tensor_rules = TensorRules(self)
        self.rules = MemoryRules(self, self.tensor_rules)
        self._semaphores: dict[tuple[int, int], Clock] = {}
        for use in _undefined_uses(program):
            name = program.function.register_names[use.register]
            place = self.findings.line(use.site)
            self.error("R9-register", use.site, f"{place}: some path comes here before {name} has been written")

    def state(self, cluster) -> _ClusterState:
        """State of a cluster, made on first use."""
        if cluster.check_state is None:
            cluster.check_state = _ClusterState(cluster)
        return cluster.check_state

    def error(self, rule: str, site: int, text: str) -> None:
        """A finding of a rule that is checked elsewhere."""
        self.findings.error(rule, (site,), text)

    def note(self, text: str) -> None:
        """A remark that is no error."""
        self.findings.note(text, text)

    def notes(self) -> tuple[str, ...]:
        """All remarks."""
        return tuple(self.findings.notes)

    def _slots(self, g, mask) -> list[int]:
        state = self.state(g.cta.cluster)
        return [state.slot(g.warps[k]) for k in active_warps(g, mask)]

    # --- memory ---------------------------------------------------------------------------------------------------

    def shared_access(self, g, offset, size: int, mask, site: int, is_write: bool) -> None:
        """Generic access of shared memory by lanes; `offset` and `mask` as in the memory helpers."""
        self.rules.generic_access(g, offset, size, mask, site, is_write)

    def global_access(self, g, address, size: int, mask, site: int, is_write: bool) -> None:
        """Generic access of global memory."""
        self.rules.global_access(g, address, size, site, is_write)

    def issue(self, g, warp, op, channel, reads, writes, site: int) -> None:
        """An asynchronous operation is issued."""
        if not isinstance(channel, str):
            self._note_unfenced(self.state(channel.cta.cluster), channel, self.findings.line(site))
        self.rules.asynchronous(g, warp, op, channel, reads, writes, site)

    def tmem_access(self, g, warp, address: int, width: int, is_write: bool, site: int) -> None:
        """tcgen05.ld or st by one warp."""
        self.tensor_rules.access(g, warp, address, width, is_write, site)

    def tmem_wait(self, g, mask, kind: str) -> None:
        """tcgen05.wait::st or ::ld (`st`, `ld`), or tcgen05.fence (`before`, `after`) of these warps."""
        state = self.state(g.cta.cluster)
        for slot in self._slots(g, mask):
            self.tensor_rules.ordered(state, slot, kind)

    def tmem_freed(self, g, mask, column: int, num_cols: int, site: int) -> None:
        """tcgen05.dealloc by one warp."""
        self.tensor_rules.freed(g, g.warps[active_warps(g, mask)[0]], column, num_cols, site)

    # --- waiting for asynchronous operations ------------------------------------------------------------------------

    def ops_waited(self, g, mask, ops: list, what: str) -> None:
        """Groups were waited for: their operations are complete for these warps (`bulk reads`: their sources are
        free).
        """
        clocks = self.state(g.cta.cluster).clocks
        for slot in self._slots(g, mask):
            for op in ops:
                if op.token is not None:
                    component, count = op.token
                    clocks.reach(slot, component, count)

    def copies_so_far(self, warp) -> Clock:
        """Clock of a cp.async arrival: the warp's copies up to now are done."""
        return self._with_channel(warp, "cp.async")

    def products_so_far(self, warp) -> Clock:
        """Clock of a tcgen05.commit: the warp's MMAs up to now are done."""
        return self._with_channel(warp, "mma")

    def _with_channel(self, warp, channel: str) -> Clock:
        state = self.state(warp.cta.cluster)
        slot, clocks = state.slot(warp), state.clocks
        clock = clocks.snapshot(slot)
        component = self.rules.channel_component(state, warp, channel)
        clock.g[component] = clock.p[component] = clock.x[component] = clocks.now[component]
        return clock

    def deferred_arrive(self, barrier, clock: Clock) -> None:
        """An asynchronous arrival happens."""
        self._note_unfenced(self.state(barrier.cta.cluster), barrier, "an asynchronous arrival")
        barrier.phases[barrier.phase] = merged(barrier.phases.get(barrier.phase), clock)

    # --- mbarriers --------------------------------------------------------------------------------------------------

    def barrier_created(self, g, mask, barrier, site: int) -> None:
        """The 8 bytes of an mbarrier may only be touched by mbarrier instructions from now on."""
        state = self.state(g.cta.cluster)
        granule, bits = barrier.offset // 16, np.uint16(0xFF << barrier.offset % 16)
        state.barrier_bytes[g.cta.rank][granule] |= bits
        state.shared[g.cta.rank].initialised[granule] |= bits
        state.unfenced[g.cta.rank, barrier.offset] = (self._slots(g, mask)[0], site)

    def _note_unfenced(self, state, barrier, user: str) -> None:
        """R5: a barrier is used from outside its CTA's threads before anything has made its initialisation visible."""
        slot, site = state.unfenced.pop((barrier.cta.rank, barrier.offset), (None, None))
        if slot is not None:
            self.note(
                f"R5 {user} uses mbarrier {barrier.name} of CTA rank {barrier.cta.rank}, initialised at "
                f"{self.findings.line(site)} without a fence.mbarrier_init behind it"
            )

    def arrive(self, g, mask, barrier, site: int) -> None:
        """Threads arrive (release)."""
        state = self.state(g.cta.cluster)
        if barrier.cta is not g.cta:
            self._note_unfenced(state, barrier, self.findings.line(site))
        if barrier.cta is not g.cta and not all(g.warps[k].synced_cluster for k in active_warps(g, mask)):
            place = self.findings.line(site)
            self.note(f"R13 {place}: arrives at CTA rank {barrier.cta.rank} before any cluster barrier was passed")
        if (
            barrier.phase > 0
            and barrier.phases.get("observed", -1) < barrier.phase - 1
            and barrier.pending == barrier.expected
        ):
            self.findings.note(
                ("R5", site, barrier.offset),
                f"R5 {self.findings.line(site)}: first arrival of phase {barrier.phase} at mbarrier {barrier.name}, "
                f"but no wait has observed the end of phase {barrier.phase - 1}",
            )
        for k in active_warps(g, mask):
            clock = state.clocks.snapshot(state.slot(g.warps[k]))
            barrier.phases[barrier.phase] = merged(barrier.phases.get(barrier.phase), clock)

    def phase_completed(self, barrier) -> None:
        """Forgets clocks that no wait can ask for any more."""
        barrier.phases.pop(barrier.phase - 3, None)

    def wait_passed(self, g, mask, barrier, parity: int, site: int) -> None:
        """Threads saw the end of the newest complete phase (acquire)."""
        state = self.state(g.cta.cluster)
        ended = barrier.phase - 1
        barrier.phases["observed"] = max(barrier.phases.get("observed", -1), ended)
        component = self.rules.channel_component(state, None, barrier)
        for slot in self._slots(g, mask):
            state.clocks.join(slot, barrier.phases.get(ended))
            state.clocks.reach(slot, component, barrier.phase)

    # --- other barriers and fences ----------------------------------------------------------------------------------

    def named_arrive(self, g, mask, barrier, generation: int, is_sync: bool) -> None:
        """Warps enter a named barrier."""
        self.warp_barrier(g, mask)
        clocks = self.state(g.cta.cluster).clocks
        for slot in self._slots(g, mask):
            barrier.clock = merged(barrier.clock, clocks.snapshot(slot))

    def named_completed(self, g, barrier, generation: int) -> None:
        """The generation is over."""
        g.cta.named_clocks[barrier.index, generation] = barrier.clock
        barrier.clock = None

    def named_passed(self, g, mask, barrier, generation: int) -> None:
        """Warps that waited come after all that arrived."""
        clocks = self.state(g.cta.cluster).clocks
        for slot in self._slots(g, mask):
            clocks.join(slot, g.cta.named_clocks.get((barrier.index, generation)))

    def cluster_arrive(self, g, mask, barrier, relaxed: bool) -> None:
        """A relaxed arrive orders nothing but itself."""
        self.warp_barrier(g, mask)
        state = self.state(g.cta.cluster)
        if not relaxed:
            for slot in self._slots(g, mask):
                state.cluster_arrivals = merged(state.cluster_arrivals, state.clocks.snapshot(slot))

    def cluster_completed(self, barrier) -> None:
        """The phase is over."""
        state = self.state(barrier.cluster)
        state.cluster_done, state.cluster_arrivals = state.cluster_arrivals, None

    def cluster_passed(self, g, mask, barrier) -> None:
        """Warps come after all that arrived with release."""
        state = self.state(g.cta.cluster)
        for slot in self._slots(g, mask):
            state.clocks.join(slot, state.cluster_done)

    def fence(self, g, kind: str, mask) -> None:
        """`fence.proxy.async`: generic writes before it become visible to the asynchronous proxy; it and
        `fence.mbarrier_init` publish the barriers that the warp has initialised.
        """
        state, slots = self.state(g.cta.cluster), self._slots(g, mask)
        if kind.startswith((".proxy.async", ".mbarrier_init")):
            state.unfenced = {of: made for of, made in state.unfenced.items() if made[0] not in slots}
        if kind.startswith(".proxy.async"):
            for slot in slots:
                state.clocks.fence_async(slot)

    def warp_barrier(self, g, mask) -> None:
        """The lanes of a warp synchronise (bar.warp.sync, shuffles, votes, barriers)."""
        for slot in self._slots(g, mask):
            self.state(g.cta.cluster).clocks.lane_epochs[slot] += 1

    def atomic(self, g, mask, addresses, order: str | None, is_global: bool, site: int) -> None:
        """A release on an address carries the clock; an acquire takes it."""
        if not is_global:
            return
        clocks = self.state(g.cta.cluster).clocks
        for address in set(addresses.tolist()):
            for slot in self._slots(g, mask):
                if order in ("acquire", "acq_rel"):
                    clocks.join(slot, self._semaphore(address, clocks))
                if order in ("release", "acq_rel"):
                    held = self._semaphore(address, clocks)
                    self._semaphores[id(clocks), address] = merged(held, clocks.snapshot(slot))

    def acquire(self, g, addresses, mask) -> None:
        """ld.acquire."""
        clocks = self.state(g.cta.cluster).clocks
        for address in set(addresses.tolist()):
            for slot in self._slots(g, mask):
                clocks.join(slot, self._semaphore(address, clocks))

    def _semaphore(self, address: int, clocks: Clocks) -> Clock | None:
        # Clocks of another cluster count other components: its work is over, or not comparable here.
        return self._semaphores.get((id(clocks), address))

    # --- the end ----------------------------------------------------------------------------------------------------

    def lanes_exit(self, g, mask) -> None:
        """Threads leave the kernel."""
        exit_rules.check_warps(self, g, mask)

    def cluster_exit(self, cluster) -> None:
        """All threads have left: nothing may be left over."""
        exit_rules.check_cluster(self, cluster)
        self.findings.raise_if_any()
