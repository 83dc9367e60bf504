"""Contract of the clocks of lanes: what one lane of a warp releases or learns is that lane's until the lanes meet.

The oracle keeps no clocks. Every lane is a thread of its own; bar.warp.sync of some lanes, an arrival at an mbarrier
and a wait for it draw arrows between them. Lane l reads 16 bytes that are its own, and writes those or its
neighbour's; two accesses race where no way of arrows leads from the one to the other. The checks must report exactly
these.
"""

import random

import numpy as np
import pytest

from fa4build.simulate.native.check_texts import KINDS
from tests.simulate.native import checks_library as native
from tests.simulate.native.checks_recorder import NUMBER

WARPS, LANES, BARRIERS, BASE = 2, 32, 2, 0x400
ALL = 0xFFFFFFFF
RACES = {"SHARED_RACE_READ", "SHARED_RACE_WRITE", "SHARED_RACE_OVERWRITE", "LANE_RACE"}
_RELEASE, _ACQUIRE = 2, 1


class _World:
    """Random events: their words for the checks, what comes before what, and which accesses race."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.words: list[int] = []
        self.known = {(warp, lane): set() for warp in range(WARPS) for lane in range(LANES)}
        self.count = 0
        self.written: dict[int, int] = {}
        self.read: dict[int, set[int]] = {}
        self.phase = [0] * BARRIERS
        self.arrived: list[dict[int, set[int]]] = [{} for _ in range(BARRIERS)]
        self.expected: set[int] = set()
        self.put("CLUSTER_BEGIN", 0, 0, 1, WARPS, BASE + 16 * LANES + 16 * BARRIERS)
        for k in range(BARRIERS):
            self.put("CREATED", 0, 0, 1, 0, ALL, BASE + 16 * LANES + 16 * k, 0, k)

    def put(self, event: str, *values: int) -> None:
        self.words += [NUMBER[event], len(values), *values]

    def some(self) -> tuple[int, int, list[int]]:
        """(warp, mask, its lanes): all lanes, one, or a few."""
        warp = self.random.randrange(WARPS)
        mask = self.random.choice((ALL, 1 << self.random.randrange(4), self.random.randrange(1, 16)))
        return warp, mask, [lane for lane in range(LANES) if mask >> lane & 1]

    def access(self) -> None:
        """Read, or write one's own or one's neighbour's bytes."""
        warp, mask, lanes = self.some()
        is_write, swap = self.random.random() < 0.4, self.random.random() < 0.3
        self.count += 1
        site, granules = self.count, [lane ^ (is_write and swap) for lane in lanes]
        self.put("SHARED", 0, 0, 1, warp, mask, 16, site, is_write, len(lanes), *(BASE + 16 * g for g in granules))
        for lane, granule in zip(lanes, granules, strict=True):
            known, event = self.known[warp, lane], (site, lane)
            others = {self.written.get(granule)} | (self.read.get(granule, set()) if is_write else set())
            if others - {None} - known:
                self.expected.add(site)
            known.add(event)
            if is_write:
                self.written[granule] = event  # reads stay: a later write has to come after them too
            else:
                self.read.setdefault(granule, set()).add(event)

    def meet(self) -> None:
        """bar.warp.sync."""
        warp, mask, lanes = self.some()
        self.put("WARP_BARRIER", 0, 0, 1, warp, mask)
        together = set().union(*(self.known[warp, lane] for lane in lanes))
        for lane in lanes:
            self.known[warp, lane] |= together

    def arrive(self) -> None:
        """At the phase of an mbarrier that is now."""
        warp, mask, lanes = self.some()
        k = self.random.randrange(BARRIERS)
        self.put("ARRIVE", 0, 0, 1, warp, mask, k, self.phase[k], 1, 2, _RELEASE, 0, 0)
        handed = self.arrived[k].setdefault(self.phase[k], set())
        for lane in lanes:
            handed |= self.known[warp, lane]

    def end_phase(self) -> None:
        """An mbarrier goes to its next phase."""
        self.phase[self.random.randrange(BARRIERS)] += 1

    def wait(self) -> None:
        """For the phase before."""
        warp, mask, lanes = self.some()
        k = self.random.randrange(BARRIERS)
        if not self.phase[k]:
            return
        self.put("PASSED", 0, 0, 1, warp, mask, k, self.phase[k], _ACQUIRE, 0, 0)
        for lane in lanes:
            self.known[warp, lane] |= self.arrived[k].get(self.phase[k] - 1, set())


_EVENTS = {"access": 10, "meet": 2, "arrive": 3, "end_phase": 2, "wait": 4}


def _random_world(seed: int) -> _World:
    world = _World(seed)
    for name in world.random.choices(list(_EVENTS), list(_EVENTS.values()), k=world.random.randint(5, 120)):
        getattr(world, name)()
    return world


def _found(world: _World) -> set[int]:
    with native.Launch(rules=native.LANES) as launch:
        status, done = launch.replay(np.array(world.words, np.int64))
        assert (status, done.refused) == (native.OK, 0)
        records, lost = launch.records()
    assert lost == 0
    return {int(r["site"]) for r in records if KINDS[r["kind"]] in RACES}


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_lanes_race_where_no_way_leads_from_one_to_the_other(first):
    """And nowhere else: 300 random histories of up to 120 events."""
    for seed in range(first, first + 50):
        world = _random_world(seed)
        assert _found(world) == world.expected, seed


def test_the_random_histories_hold_races_and_ordered_accesses():
    """The oracle is not asked about nothing."""
    worlds = [_random_world(seed) for seed in range(20)]
    races, accesses = sum(len(w.expected) for w in worlds), sum(w.count for w in worlds)
    assert accesses / 10 < races < accesses * 9 / 10
