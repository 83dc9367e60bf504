"""Contract of the clock algebra of the native hazard checks: it knows exactly what comes before what.

The oracle keeps no clocks. It draws an arrow from every event to those that follow it by a rule (program order, arrive
to wait, release to acquire, completion of a copy to the wait that saw it; a copy hands on nothing of the warp that
issued it) and asks whether a way leads from one access
to another. The checks must report a race where none does, and nowhere else.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from fa4build.simulate.native.check_texts import KINDS
from tests.simulate.native import checks_library as native
from tests.simulate.native.checks_recorder import NUMBER

WARPS, GRANULES, BARRIERS, WORDS, BASE = 4, 3, 2, 2, 0x400
_RELEASE, _ACQUIRE, _BOTH = 2, 1, 3
_BULK, _MBARRIER = 1, 7


@dataclass
class _Granule:
    """What the oracle remembers of 16 bytes: the last write, and the reads that a later write has to come after."""

    write: int | None = None
    write_is_async: bool = False
    reads: list[int] = field(default_factory=list)


class _World:
    """Random events: their words for the checks, the arrows between them, and what has to be found."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.words: list[int] = []
        self.after: list[set[int]] = []  # of each event: all that come before it, by any way
        self.last: list[set[int]] = [set() for _ in range(WARPS)]  # of each warp: its newest event
        self.fences: list[int] = []
        self.granules = [_Granule() for _ in range(GRANULES)]
        self.phase = [0] * BARRIERS
        self.arrivals: dict[tuple[int, int], set[int]] = {}
        self.copies: list[tuple[int, int, int]] = []  # (barrier, phase, access)
        self.stores: list[tuple[int, int, int]] = []  # (warp, operation, access)
        self.releases: dict[int, set[int]] = {}
        self.named: tuple[int, set[int]] = (0, set())
        self.cluster: list[set[int]] = [set(), set()]  # arrivals of this phase, of the one before
        self.operations = 0
        self.expected: set[tuple[str, int]] = set()
        self._start()

    # --- words and arrows ---------------------------------------------------------------------------------------------

    def put(self, event: str, *values: int) -> None:
        self.words += [NUMBER[event], len(values), *values]

    def gang(self, warp: int) -> tuple[int, ...]:
        return (0, 0, 1, warp, 1)

    def event(self, warp: int | None, before: set[int] = frozenset()) -> int:
        """A new event: behind the warp's last one, and behind others."""
        number, known = len(self.after), set(before)
        if warp is not None:
            known |= self.last[warp]
        self.after.append(known.union(*(self.after[k] for k in known)))
        if warp is not None:
            self.last[warp] = {number}
        return number

    def _start(self) -> None:
        self.put("CLUSTER_BEGIN", 0, 0, 1, WARPS, BASE + 16 * (GRANULES + BARRIERS))
        for k in range(BARRIERS):
            self.put("CREATED", *self.gang(0), BASE + 16 * (GRANULES + k), 0, k)
        self.put("FENCE", *self.gang(0), 2, 7, 3, 0)

    def is_visible(self, write: int, issue: int) -> bool:
        """Whether a proxy fence is on a way from a generic write to an issue."""
        return any(write in self.after[f] and (f in self.after[issue] or f == issue) for f in self.fences)

    # --- accesses -----------------------------------------------------------------------------------------------------

    def access(self) -> None:
        warp, where, is_write = self.warp(), self.random.randrange(GRANULES), self.random.random() < 0.4
        number, granule = self.event(warp), self.granules[where]
        self.put("SHARED", *self.gang(warp), 16, number, is_write, 1, BASE + 16 * where)
        before = self.after[number]
        if granule.write is not None and granule.write not in before:
            self.expected.add(("SHARED_RACE_WRITE" if is_write else "SHARED_RACE_READ", number))
        if is_write:
            if any(read not in before for read in granule.reads):
                self.expected.add(("SHARED_RACE_OVERWRITE", number))
            granule.write, granule.write_is_async = number, False
        else:
            if granule.write is None:
                self.expected.add(("SHARED_UNWRITTEN", number))
            granule.reads.append(number)

    def _operation(self, warp: int, channel: int, barrier: int, phase: int, site: int, where: int, writes: int) -> None:
        operand = (0, 0, BASE // 16 + where, 0, 0, 0, 0, 1)
        head = (self.operations, warp, channel, barrier, phase, site, 1 - writes, writes)
        self.put("ISSUE", *self.gang(warp), *head, *operand)
        self.operations += 1

    def _issue_faults(self, issue: int, site: int, granule: _Granule, is_write: bool) -> None:
        known = self.after[issue]
        if granule.write is not None:
            if granule.write not in known:
                self.expected.add(("SHARED_RACE_WRITE" if is_write else "SHARED_RACE_READ", site))
            elif not granule.write_is_async and not self.is_visible(granule.write, issue):
                self.expected.add(("PROXY_WRITE" if is_write else "PROXY_READ", site))
        if is_write and any(read not in known for read in granule.reads):
            self.expected.add(("SHARED_RACE_OVERWRITE", site))

    def copy_in(self) -> None:
        """A bulk copy to shared memory, seen through an mbarrier."""
        warp, where, barrier = self.warp(), self.random.randrange(GRANULES), self.random.randrange(BARRIERS)
        issue = self.event(warp)
        copy, granule = self.event(None), self.granules[where]
        self._operation(warp, _MBARRIER, barrier, self.phase[barrier], copy, where, 1)
        self._issue_faults(issue, copy, granule, True)
        granule.write, granule.write_is_async, granule.reads = copy, True, []
        self.copies.append((barrier, self.phase[barrier], copy))

    def copy_out(self) -> None:
        """A bulk copy from shared memory, seen through a bulk group."""
        warp, where = self.warp(), self.random.randrange(GRANULES)
        issue = self.event(warp)
        read, granule = self.event(None), self.granules[where]
        self.stores.append((warp, self.operations, read))
        self._operation(warp, _BULK, -1, 0, read, where, 0)
        self._issue_faults(issue, read, granule, False)
        if granule.write is None:
            self.expected.add(("SHARED_UNWRITTEN_ASYNC", read))
        granule.reads.append(read)

    # --- order --------------------------------------------------------------------------------------------------------

    def warp(self) -> int:
        return self.random.randrange(WARPS)

    def wait_group(self) -> None:
        """Waiting for one store is waiting for all before it of that warp, by whomever."""
        if not self.stores:
            return
        owner, operation, _ = self.random.choice(self.stores)
        done = {read for warp, number, read in self.stores if warp == owner and number <= operation}
        warp = self.warp()
        self.event(warp, done)
        self.put("WAITED", *self.gang(warp), 1, operation)

    def arrive(self) -> None:
        warp, barrier = self.warp(), self.random.randrange(BARRIERS)
        phase = self.phase[barrier]
        self.arrivals.setdefault((barrier, phase), set()).add(self.event(warp))
        self.put("ARRIVE", *self.gang(warp), barrier, phase, 1, 2, _RELEASE, 0, 0)
        if self.random.random() < 0.6:
            self.phase[barrier] += 1

    def wait(self) -> None:
        warp, barrier = self.warp(), self.random.randrange(BARRIERS)
        phase = self.phase[barrier]
        done = {copy for b, issued, copy in self.copies if b == barrier and issued < phase}
        self.event(warp, done | self.arrivals.get((barrier, phase - 1), set()))
        self.put("PASSED", *self.gang(warp), barrier, phase, _ACQUIRE, 0, 0)

    def named_barrier(self) -> None:
        """Two warps meet, and go on at once."""
        first, second = self.random.sample(range(WARPS), 2)
        generation = self.named[0]
        both = {self.event(first), self.event(second)}
        for warp in (first, second):
            self.put("NAMED_ARRIVE", *self.gang(warp), 1, generation, 1)
        self.put("NAMED_COMPLETED", 0, 0, 1, generation)
        for warp in (first, second):
            self.event(warp, both)
            self.put("NAMED_PASSED", *self.gang(warp), 1, generation)
        self.named = (generation + 1, set())

    def cluster_arrive(self) -> None:
        warp, is_relaxed = self.warp(), self.random.random() < 0.3
        number = self.event(warp)
        self.put("CLUSTER_ARRIVE", *self.gang(warp), 0 if is_relaxed else _RELEASE, 1)
        if not is_relaxed:
            self.cluster[0].add(number)
        if self.random.random() < 0.5:
            self.cluster = [set(), self.cluster[0]]
            self.put("CLUSTER_COMPLETED", 0)

    def cluster_wait(self) -> None:
        warp = self.warp()
        self.event(warp, self.cluster[1])
        self.put("CLUSTER_PASSED", *self.gang(warp))

    def atomic(self) -> None:
        warp, word, order = self.warp(), self.random.randrange(WORDS), self.random.choice([0, 1, 2, 3])
        before = self.releases.get(word, set()) if order & _ACQUIRE else set()
        number = self.event(warp, before)
        self.put("ATOMIC", *self.gang(warp), order, 2, 0, 1, 0x7000 + 4 * word)
        if order & _RELEASE:
            self.releases.setdefault(word, set()).add(number)

    def proxy_fence(self) -> None:
        warp = self.warp()
        self.fences.append(self.event(warp))
        self.put("FENCE", *self.gang(warp), 1, 7, 3, 0)


_EVENTS = {
    "access": 12,
    "copy_in": 3,
    "copy_out": 3,
    "wait_group": 2,
    "arrive": 4,
    "wait": 5,
    "named_barrier": 2,
    "cluster_arrive": 2,
    "cluster_wait": 2,
    "atomic": 4,
    "proxy_fence": 3,
}
_JUDGED = {
    *("SHARED_RACE_READ", "SHARED_RACE_WRITE", "SHARED_RACE_OVERWRITE", "PROXY_READ", "PROXY_WRITE"),
    *("SHARED_UNWRITTEN", "SHARED_UNWRITTEN_ASYNC"),
}


def _found(world: _World) -> set[tuple[str, int]]:
    with native.Launch() as launch:
        status, done = launch.replay(np.array(world.words, np.int64))
        assert (status, done.refused) == (native.OK, 0)
        records, lost = launch.records()
    assert lost == 0
    found = {(KINDS[r["kind"]], int(r["site"])) for r in records}
    return {pair for pair in found if pair[0] in _JUDGED}


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_a_race_is_reported_where_no_way_leads_from_one_access_to_the_other(first):
    """And only there: 400 random histories of up to 150 events."""
    for seed in range(first, first + 50):
        world = _World(seed)
        for name in world.random.choices(list(_EVENTS), list(_EVENTS.values()), k=world.random.randint(10, 150)):
            getattr(world, name)()
        assert _found(world) == world.expected, seed


def test_the_random_histories_hold_races_of_every_kind_and_ordered_accesses():
    """The oracle is not asked about nothing."""
    kinds, accesses = set(), 0
    for seed in range(1000, 1030):
        world = _World(seed)
        for name in world.random.choices(list(_EVENTS), list(_EVENTS.values()), k=100):
            getattr(world, name)()
        kinds |= {kind for kind, _ in world.expected}
        accesses += sum(1 for word in world.words if word == NUMBER["SHARED"]) - len(world.expected)
    assert kinds == _JUDGED
    assert accesses > 0
