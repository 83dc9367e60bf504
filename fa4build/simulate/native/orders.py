"""In which order things happen that no program orders: which warp goes on, when a copy is performed, and the like.

An order is data; the engine has no names. A right kernel gives the same bits in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

NEWEST, OLDEST, ANY = range(3)  # of queues of operations
FORWARD, BACKWARD, SHUFFLED = range(3)  # warps


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`Order` of core.h.

    Attributes:
        deferred: asynchronous operations are performed not at issue but when no warp can go on (or by `drift_percent`).
        pick: whose turn it then is: the queue that came last, the one that came first, any.
        warps: in which order warps are asked.
        longest_run: a warp runs 1 to so many instructions before the next one does; 0: until it has to wait.
        drift_percent: chance that an operation is performed behind a warp's run, and then another.
        miss_percent: chance that a barrier test without a time limit fails although the phase is over.
        starved: bit w: warp w of each CTA runs only when no other can.
        reversed_clusters: the last cluster of the grid starts first.
        elected: elect.sync takes the first member from this lane on, cyclic; any choice is right if always the same.
    """

    deferred: bool = False
    pick: int = NEWEST
    warps: int = FORWARD
    longest_run: int = 0
    drift_percent: int = 0
    miss_percent: int = 0
    starved: int = 0
    reversed_clusters: bool = False
    elected: int = 0


FIELDS = tuple(field.name for field in fields(Order))

ORDERS = {
    "eager": Order(),
    "late": Order(deferred=True, warps=BACKWARD, elected=31),
    "random": Order(
        deferred=True, pick=ANY, warps=SHUFFLED, longest_run=299, drift_percent=40, miss_percent=30, elected=13
    ),
    "late, in order": Order(deferred=True, pick=OLDEST, elected=7),
    "clusters reversed": Order(reversed_clusters=True, warps=BACKWARD, elected=22),
    "short runs": Order(longest_run=8, deferred=True, pick=OLDEST, drift_percent=20, elected=5),
}
"""By name. The first three are the Python engine's."""


def starving(warps: range, **options) -> Order:
    """An order that lets warps (of a role, say) run only when no others can."""
    return Order(starved=sum(1 << warp for warp in warps), **options)
