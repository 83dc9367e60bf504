"""A machine that does random things to the hazard checks: nothing runs, so nothing has to make sense.

It calls the hooks of an observer as the simulator does, with few places, warps and instructions, so that accesses meet
often and every rule finds something. What a rule would say of a real kernel is tested elsewhere; here only the twins
are compared.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import numpy as np

from fa4build.errors import SimulationError
from fa4build.simulate import GlobalMemory
from fa4build.simulate.hardware.engine import AsyncOp
from fa4build.simulate.hardware.gang import WARP
from fa4build.simulate.instructions.barriers import ClusterBarrier, Mbarrier, NamedBarrier
from fa4build.simulate.instructions.ctas import Warp
from fa4build.simulate.program import program_for
from fa4build.simulate.ptx.parser import parse_module
from tests.simulate.ptx_snippets import text_of

BASE = 0x400
SITES = 24
_BODY = "".join(f"add.s32 %r{k}, %r0, {k};" for k in range(1, SITES))
_NAMES = ("bulk", "cp.async", "wgmma", "mma")


@cache
def program():
    """A program whose instructions stand for the places of all accesses."""
    text = text_of(_BODY)
    parse_module(text)
    return program_for(text, "snippet", contract=True)


class _Tensor:
    """Tensor memory as the end of a CTA sees it."""

    def __init__(self):
        self.allocator = self
        self.blocks: dict[int, int] = {}

    def leftover(self) -> dict[int, int]:
        return dict(self.blocks)


class _Cta:
    def __init__(self, cluster, rank: int, num_warps: int, granules: int):
        self.cluster, self.rank, self.ctaid = cluster, rank, (2 * cluster.index + rank, 0, 0)
        self.shared_limit = BASE + 16 * granules
        self.memory, self.observer = cluster.memory, None
        self.warps = [Warp(self, i) for i in range(num_warps)]
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named = [NamedBarrier(i) for i in range(16)]
        self.named_clocks: dict = {}
        self.tmem = _Tensor()

    def name_of(self, offset: int) -> str:
        return f"smem+{offset - BASE}"


class _Cluster:
    def __init__(self, memory, index: int, num_ctas: int, num_warps: int, granules: int):
        self.memory, self.index, self.check_state = memory, index, None
        self.ctas = [_Cta(self, rank, num_warps, granules) for rank in range(num_ctas)]
        self.barrier = ClusterBarrier(self)


class _Gang:
    def __init__(self, cta, warps: list):
        self.cta, self.warps, self.special = cta, warps, {}
        self.lanes = WARP * len(warps)
        self.tids = np.concatenate([np.arange(WARP * w.index, WARP * w.index + WARP, dtype=np.uint32) for w in warps])

    def warp_any(self, mask):
        return np.ones(len(self.warps), bool) if mask is None else mask.reshape(-1, WARP).any(axis=1)


def gang_of(cta, indexes: list[int]) -> _Gang:
    """A gang of those warps of a CTA."""
    return _Gang(cta, [cta.warps[i] for i in indexes])


class Machine:
    """Random events of a seed, told to an observer. `shape`: CTAs of a cluster, warps of each, granules of each."""

    def __init__(self, seed: int, observer, *, num_clusters: int = 2, shape: tuple[int, int, int] | None = None):
        self.random, self.observer = random.Random(seed), observer
        self.memory = GlobalMemory()
        self.words = [np.zeros(64, np.uint32) for _ in range(3)]
        self.addresses = [self.memory.add(f"buffer{k}", words) for k, words in enumerate(self.words)]
        for address in self.addresses[:2]:
            self.memory.mark_unwritten(address)
        drawn = (self.random.choice([1, 1, 2]), self.random.randint(1, 10), self.random.choice([4, 8, 24]))
        self.clusters = [_Cluster(self.memory, i, *(shape or drawn)) for i in range(num_clusters)]
        self.operations: list[tuple] = []  # (cluster, warp, operation)
        self.clocks: list[tuple] = []  # (cluster, clock)
        self.passing: list[tuple] = []  # waits of named barriers: (gang, mask, barrier, generation)

    def run(self, events: int) -> None:
        """That many events, then the end."""
        names = list(_EVENTS)
        weights = [_EVENTS[name] for name in names]
        for name in self.random.choices(names, weights, k=events):
            getattr(self, name)()
        self.end()

    # --- drawing ------------------------------------------------------------------------------------------------------

    def site(self) -> int:
        return self.random.randrange(SITES)

    def flip(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def gang(self, *, single: bool = False):
        """A gang of one warp or several, in order of their numbers."""
        cta = self.random.choice(self.random.choice(self.clusters).ctas)
        count = 1 if single or self.flip(0.4) else self.random.randint(1, len(cta.warps))
        chosen = sorted(self.random.sample(range(len(cta.warps)), count))
        return _Gang(cta, [cta.warps[i] for i in chosen])

    def mask(self, g):
        """All lanes, or some; at least one."""
        if self.flip():
            return None
        mask = np.array([self.flip(0.7) for _ in range(g.lanes)])
        for k in range(len(g.warps)):
            if self.flip(0.2):
                mask[WARP * k : WARP * k + WARP] = False
        mask[self.random.randrange(g.lanes)] = True
        return mask

    # --- memory -------------------------------------------------------------------------------------------------------

    def shared(self) -> None:
        g = self.gang()
        mask = self.mask(g)
        count = g.lanes if mask is None else int(np.count_nonzero(mask))
        size = self.random.choice([1, 2, 4, 4, 8, 16])
        places = (g.cta.shared_limit - BASE) // size
        first, step = self.random.randrange(places), self.random.choice([0, 1, 1, 2, 4, 5])
        index = (first + step * np.arange(count)) % places
        if self.flip(0.2):
            index = np.array([self.random.randrange(places) for _ in range(count)])
        offset = (BASE + size * index).astype(np.uint32)
        if self.flip(0.01):
            offset[-1] += 1 << 16
        self.observer.shared_access(g, offset, size, mask, self.site(), self.flip())

    def shared_lanes(self) -> None:
        """Whole granules, lane by lane: what the note on lanes of one warp looks at."""
        g = self.gang(single=True)
        granules = (g.cta.shared_limit - BASE) // 16
        index = (np.arange(WARP) + self.random.randrange(3)) % granules
        offset = (BASE + 16 * index).astype(np.uint32)
        self.observer.shared_access(g, offset, 16, None, self.site(), self.flip())

    def global_(self) -> None:
        g = self.gang()
        size = self.random.choice([2, 4, 8, 16])
        count = self.random.randint(1, 32)
        address = self.random.choice(self.addresses) + size * np.arange(count) % (256 - size)
        if self.flip(0.3):
            address = np.array(
                [self.random.choice(self.addresses) + size * self.random.randrange(8) for _ in range(count)]
            )
        if self.flip(0.02):
            address[0] += 1 << 20
        self.observer.global_access(g, address.astype(np.uint64), size, None, self.site(), self.flip(0.3))

    def tensor(self) -> None:
        g = self.gang(single=True)
        warp = g.warps[0]
        quarter = warp.index % 4 if self.flip(0.9) else self.random.randrange(4)
        column, width = self.random.randrange(6), self.random.randint(1, 4)
        self.observer.tmem_access(g, warp, quarter << 21 | column, width, self.flip(0.4), self.site())

    def tensor_wait(self) -> None:
        g = self.gang()
        self.observer.tmem_wait(g, self.mask(g), self.random.choice(["ld", "st", "before", "after"]))

    def tensor_free(self) -> None:
        g = self.gang(single=True)
        column = self.random.randrange(4)
        self.observer.tmem_freed(g, None, column, self.random.randint(1, 4), self.site())

    # --- asynchronous operations --------------------------------------------------------------------------------------

    def _span(self, cta) -> tuple:
        granules = np.arange(BASE // 16, cta.shared_limit // 16)
        if self.flip():
            first = self.random.randrange(len(granules))
            return ("smem", cta, granules[first : first + self.random.randint(1, 4)])
        chosen = [g for g in granules.tolist() if self.flip(0.3)] or [int(granules[0])]
        return ("smem", cta, np.array(chosen))

    def _operand(self, g, channel) -> tuple:
        cta = self.random.choice(g.cta.cluster.ctas)
        if channel == "mma" and self.flip(0.7):
            lane = 32 * self.random.randrange(4)
            return ("tmem", cta, (lane, self.random.choice([16, 32, 128 - lane]), self.random.randrange(6), 2))
        if channel in ("bulk", "mbarrier") and self.flip(0.3):
            return ("gmem", self.random.choice(self.addresses) + 16 * self.random.randrange(4), 48)
        if channel in ("bulk", "mbarrier") and self.flip(0.3):
            return ("box", _Box(self), 0)
        return self._span(cta)

    def issue(self) -> None:
        g = self.gang()
        warp = self.random.choice(g.warps)
        name = self.random.choice([*_NAMES, "mma", "mbarrier"])
        barriers = [b for cta in g.cta.cluster.ctas for b in cta.mbarriers.values()]
        if name == "mbarrier" and not barriers:
            return
        channel = self.random.choice(barriers) if name == "mbarrier" else name
        op = AsyncOp(f"operation {self.random.randrange(6)}", [lambda: None])
        reads, writes = ([self._operand(g, name) for _ in range(self.random.randrange(3))] for _ in range(2))
        self.observer.issue(g, warp, op, channel, reads, writes, self.site())
        self.operations.append((g.cta.cluster, warp, op))

    def waited(self) -> None:
        g = self.gang()
        mine = [op for cluster, _, op in self.operations if cluster is g.cta.cluster]
        chosen = [op for op in mine if self.flip(0.3)]
        self.observer.ops_waited(g, self.mask(g), chosen, "bulk reads")

    def take_clock(self) -> None:
        g = self.gang(single=True)
        take: Callable = self.observer.copies_so_far if self.flip() else self.observer.products_so_far
        self.clocks.append((g.cta.cluster, take(g.warps[0])))

    def deferred(self) -> None:
        barriers = self._barriers()
        if self.clocks and barriers:
            cluster, clock = self.random.choice(self.clocks)
            mine = [b for b in barriers if b.cta.cluster is cluster]
            if mine:
                self.observer.deferred_arrive(self.random.choice(mine), clock)

    def hand_over(self) -> None:
        """One warp touches tensor memory, a barrier, another does: with all fences of tcgen05, or some."""
        cta = self.random.choice(self.random.choice(self.clusters).ctas)
        first, second = (_Gang(cta, [self.random.choice(cta.warps)]) for _ in range(2))
        column, quarter = self.random.randrange(6), self.random.randrange(4) << 21
        self.observer.tmem_access(first, first.warps[0], quarter | column, 2, self.flip(), self.site())
        for kind in ("ld", "st", "before"):
            if self.flip(0.8):
                self.observer.tmem_wait(first, None, kind)
        self._meet(first, second)
        if self.flip():
            self.observer.tmem_wait(second, None, "after")
        self.observer.tmem_access(second, second.warps[0], quarter | column, 2, self.flip(), self.site())

    def commit_over(self) -> None:
        """A product, its commit, a warp that waits for it and touches what it wrote."""
        g = self.gang(single=True)
        barriers = list(g.cta.mbarriers.values())
        if not barriers:
            return
        barrier, block = self.random.choice(barriers), (0, 128, self.random.randrange(6), 2)
        op = AsyncOp("product", [lambda: None])
        self.observer.issue(g, g.warps[0], op, "mma", [], [("tmem", g.cta, block)], self.site())
        clock = self.observer.products_so_far(g.warps[0])
        self.observer.deferred_arrive(barrier, clock)
        barrier.phase, barrier.pending = barrier.phase + 1, barrier.expected
        self.observer.phase_completed(barrier)
        warp = self.random.choice(g.cta.warps)
        other = _Gang(g.cta, [warp])
        self.observer.wait_passed(other, None, barrier, 0, self.site())
        if self.flip(0.8):
            self.observer.tmem_wait(other, None, "after")
        self.observer.tmem_access(other, warp, (warp.index % 4) << 21 | block[2], 2, self.flip(), self.site())

    def _meet(self, first, second) -> None:
        barrier = first.cta.named[2]
        generation = barrier.generation
        self.observer.named_arrive(first, None, barrier, generation, False)
        self.observer.named_arrive(second, None, barrier, generation, True)
        barrier.generation += 1
        self.observer.named_completed(first, barrier, generation)
        self.observer.named_passed(second, None, barrier, generation)

    # --- barriers and fences ------------------------------------------------------------------------------------------

    def _barriers(self) -> list:
        return [b for c in self.clusters for cta in c.ctas for b in cta.mbarriers.values()]

    def create(self) -> None:
        g = self.gang()
        offset = BASE + 8 * self.random.randrange(4)
        barrier = g.cta.mbarriers[offset] = Mbarrier(g.cta, offset, self.random.randint(1, 3))
        self.observer.barrier_created(g, self.mask(g), barrier, self.site())

    def arrive(self) -> None:
        g = self.gang()
        barriers = [b for b in self._barriers() if b.cta.cluster is g.cta.cluster]
        if not barriers:
            return
        barrier = self.random.choice(barriers)
        self.observer.arrive(g, self.mask(g), barrier, self.site())
        barrier.pending -= 1
        if not barrier.pending:
            barrier.phase, barrier.pending = barrier.phase + 1, barrier.expected
            self.observer.phase_completed(barrier)

    def passed(self) -> None:
        g = self.gang()
        barriers = [b for b in self._barriers() if b.cta.cluster is g.cta.cluster]
        if barriers:
            barrier = self.random.choice(barriers)
            self.observer.wait_passed(g, self.mask(g), barrier, 0, self.site())

    def named(self) -> None:
        g = self.gang()
        mask, barrier, is_sync = self.mask(g), g.cta.named[self.random.randrange(2)], self.flip(0.7)
        generation = barrier.generation
        for k in np.flatnonzero(g.warp_any(mask)):
            barrier.arrived.append(g.warps[k].index)
        barrier.required = WARP * 8
        self.observer.named_arrive(g, mask, barrier, generation, is_sync)
        if is_sync:
            self.passing.append((g, mask, barrier, generation))
        if self.flip():
            barrier.generation, barrier.arrived = generation + 1, []
            self.observer.named_completed(g, barrier, generation)
        self._pass_some()

    def _pass_some(self) -> None:
        rest = []
        for g, mask, barrier, generation in self.passing:
            if barrier.generation > generation and self.flip(0.7):
                self.observer.named_passed(g, mask, barrier, generation)
            else:
                rest.append((g, mask, barrier, generation))
        self.passing = rest

    def cluster_arrive(self) -> None:
        g = self.gang()
        self.observer.cluster_arrive(g, self.mask(g), g.cta.cluster.barrier, self.flip(0.3))
        if self.flip():
            self.observer.cluster_completed(g.cta.cluster.barrier)

    def cluster_pass(self) -> None:
        g = self.gang()
        mask = self.mask(g)
        for k in np.flatnonzero(g.warp_any(mask)):
            g.warps[k].synced_cluster = True
        self.observer.cluster_passed(g, mask, g.cta.cluster.barrier)

    def fence(self) -> None:
        g = self.gang()
        kinds = [".proxy.async.shared::cta", ".proxy.async", ".mbarrier_init.release.cluster", ".acq_rel.gpu"]
        self.observer.fence(g, self.random.choice(kinds), self.mask(g))

    def meet(self) -> None:
        g = self.gang()
        self.observer.warp_barrier(g, self.mask(g))

    def atomic(self) -> None:
        g = self.gang()
        addresses = self.addresses[2] + 4 * np.array(
            [self.random.randrange(3) for _ in range(self.random.randint(1, 4))]
        )
        order = self.random.choice([None, "relaxed", "acquire", "release", "acq_rel"])
        self.observer.atomic(g, self.mask(g), addresses.astype(np.uint64), order, self.flip(0.9), self.site())

    def acquire(self) -> None:
        g = self.gang()
        addresses = self.addresses[2] + 4 * np.array([self.random.randrange(3)])
        self.observer.acquire(g, addresses.astype(np.uint64), self.mask(g))

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Warps exit with some of their operations open, CTAs with some of their barriers and budgets uneven."""
        for cluster in self.clusters:
            for cta in cluster.ctas:
                self._end_of(cluster, cta)
            with suppress(SimulationError):  # raises all errors so far
                self.observer.cluster_exit(cluster)

    def _end_of(self, cluster, cta) -> None:
        mine = [op for of, warp, op in self.operations if of is cluster and warp.cta is cta]
        is_full = self.flip(0.3)
        for warp in cta.warps:
            warp.register_history = [248] if is_full else []
            for op in self.random.sample(mine, min(len(mine), 3)):
                op.committed, op.stage = self.flip(), self.random.randrange(2)
                op.token = op.token if self.flip(0.8) else None
                target = warp.bulk_open if self.flip() else warp.bulk_groups
                target.setdefault(self.random.randrange(3), []).append([op] if target is warp.bulk_groups else op)
            warp.wgmma_open = mine[:1] if self.flip(0.1) else []
            if not is_full and self.flip(0.9):
                warp.register_history = self.random.choice([[240], [240, 248], [24]])
        for barrier in cta.mbarriers.values():
            barrier.tx = self.random.choice([0, 0, 64])
        cta.tmem.blocks = {0: 32} if self.flip(0.3) else {}
        g = _Gang(cta, cta.warps)
        mask = self.mask(g)
        self.observer.lanes_exit(g, np.ones(g.lanes, bool) if mask is None else mask)


class _Box:
    """The global side of a tensor copy."""

    def __init__(self, machine: Machine):
        address, self.unit_bytes = machine.random.choice(machine.addresses), machine.random.choice([4, 16])
        self.global_addresses = address + self.unit_bytes * np.arange(6)
        self.valid = None if machine.flip() else np.array([machine.flip() for _ in range(6)])


_EVENTS = {
    "shared": 24,
    "shared_lanes": 6,
    "global_": 6,
    "tensor": 14,
    "tensor_wait": 8,
    "tensor_free": 2,
    "hand_over": 6,
    "commit_over": 4,
    "issue": 16,
    "waited": 6,
    "take_clock": 3,
    "deferred": 4,
    "create": 3,
    "arrive": 8,
    "passed": 8,
    "named": 8,
    "cluster_arrive": 4,
    "cluster_pass": 3,
    "fence": 6,
    "meet": 4,
    "atomic": 5,
    "acquire": 3,
}
