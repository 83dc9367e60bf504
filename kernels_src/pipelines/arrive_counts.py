"""How many arrivals complete each barrier of the SM90 forward kernel, derived and not guessed.

Integers only. A wrong count hangs or, worse, lets a reader pass early; the tests derive every value by hand.
"""

from typing import NamedTuple

WARPS_PER_WARPGROUP = 4
THREADS_PER_WARPGROUP = 128


class ForwardArriveCounts(NamedTuple):
    """Counts for mbarriers (arrivals) and named barriers (threads)."""

    tile_full: int  # Q, K or V stage filled: the copy thread's one expect-tx arrival (bytes complete the rest)
    tile_empty: int  # stage read: one lane of every consumer warp
    turn_threads: int  # ping-pong: the group that waits and the group that hands over
    warpgroup_threads: int  # epilogue: the threads of one warpgroup


def forward_arrive_counts(consumer_warpgroups: int) -> ForwardArriveCounts:
    """Counts for `consumer_warpgroups` (1 to 3) consumers and one copy warp.

    Every consumer warp reads a stage through its own part of the warpgroup's matrix instructions and waits for those
    alone, so the stage is free only after an arrival of each warp.
    """
    return ForwardArriveCounts(
        tile_full=1,
        tile_empty=consumer_warpgroups * WARPS_PER_WARPGROUP,
        turn_threads=2 * THREADS_PER_WARPGROUP,
        warpgroup_threads=THREADS_PER_WARPGROUP,
    )


class BackwardArriveCounts(NamedTuple):
    """Counts of the SM90 backward kernel, for mbarriers (arrivals) and named barriers (threads)."""

    tile_full: int  # a stage filled: the copy thread's one expect-tx arrival (bytes complete the rest)
    tile_empty: int  # stage read: one lane of every consumer warp
    dq_threads: int  # a consumer warpgroup and the warp that stores its part of dQ
    consumer_threads: int  # all consumer warpgroups


def backward_arrive_counts(consumer_warpgroups: int) -> BackwardArriveCounts:
    """Counts for a copy warp, `consumer_warpgroups` consumers that share all tiles, and a storing warp for each."""
    return BackwardArriveCounts(
        tile_full=1,
        tile_empty=consumer_warpgroups * WARPS_PER_WARPGROUP,
        dq_threads=THREADS_PER_WARPGROUP + THREADS_PER_WARPGROUP // WARPS_PER_WARPGROUP,
        consumer_threads=consumer_warpgroups * THREADS_PER_WARPGROUP,
    )
