"""In which order things happen that no program orders: which warp goes on, when a copy is performed, and the like.

An order is data; the engine has no names. A right kernel gives the same bits in all of them. The eight kinds that a
proof runs differ in what they can find (tests/simulate/native/test_orders.py has a fault for each that no other finds):

| order | who goes on | copies and products happen | finds, for example, what relies on |
|---|---|---|---|
| eager | first warp first, until it waits | when they are issued | a copy that takes a while |
| late | last warp first | when no warp can go on, newest first | a copy that is over by now |
| copies in order | first warp first | one behind every run of a warp, oldest first | the last one coming first |
| copies against order | first warp first | one behind every run, newest first | earlier ones being over |
| clusters reversed | last cluster first | behind the run that issued them | lower clusters being ahead |
| role n starved | the n-th role only when no other can | behind the run that issued them | nobody being lapped |
| random | shuffled, stopped anywhere | by chance, any of them | two instructions being one |
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

NEWEST, OLDEST, ANY = range(3)  # of queues of operations
FORWARD, BACKWARD, SHUFFLED = range(3)  # warps
EVERY = 1 << 20  # operations: more than there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`Order` of core.h.

    Attributes:
        deferred: asynchronous operations are performed not at issue but when no warp can go on (or by the next two).
        behind_run: so many operations are performed behind every warp's run.
        drift_percent: chance that one more is performed then, and then another.
        pick: whose turn it then is: the queue that came last, the one that came first, any.
        warps: in which order warps are asked.
        longest_run: a warp runs 1 to so many instructions before the next one does; 0: until it has to wait.
        miss_percent: chance that a barrier test without a time limit fails although the phase is over.
        starved: bit w: warp w of each CTA runs only when no other can.
        reversed_clusters: of the clusters that are in flight at once the last starts first.
        elected: elect.sync takes the first member from this lane on, cyclic; any is right if always the same.
        role: the warps of this role are starved too, counted round (roles.py); -1: of none. The engine does not see it.
    """

    deferred: bool = False
    pick: int = NEWEST
    warps: int = FORWARD
    longest_run: int = 0
    behind_run: int = 0
    drift_percent: int = 0
    miss_percent: int = 0
    starved: int = 0
    reversed_clusters: bool = False
    elected: int = 0
    role: int = -1


FIELDS = tuple(field.name for field in fields(Order) if field.name != "role")
_SOON = {"deferred": True, "pick": OLDEST, "behind_run": EVERY}

ORDERS = {
    "eager": Order(),
    "late": Order(deferred=True, warps=BACKWARD, elected=31),
    "copies in order": Order(deferred=True, pick=OLDEST, behind_run=1, elected=7),
    "copies against order": Order(deferred=True, pick=NEWEST, behind_run=1, elected=5),
    "clusters reversed": Order(reversed_clusters=True, elected=22, **_SOON),
    "random": Order(
        deferred=True, pick=ANY, warps=SHUFFLED, longest_run=299, drift_percent=40, miss_percent=30, elected=13
    ),
}
"""By name; "role n starved" is one too. Eager, late and random are the Python engine's."""

_STARVED = re.compile(r"role (\d+) starved")
_TURNS = {"role starved": 0, "next role starved": 1}  # of a case on its own


def order_named(name: str) -> Order | None:
    """An order of `ORDERS`, or `role n starved`; None where there is none of this name."""
    found = _STARVED.fullmatch(name)
    turn = int(found[1]) if found else _TURNS.get(name)
    if turn is not None:
        return Order(role=turn, **_SOON)
    return ORDERS.get(name)


def starving(warps: range, **options) -> Order:
    """An order that lets these warps run only when no others can."""
    return Order(starved=sum(1 << warp for warp in warps), **options)
