"""Numbers of the 16 hardware barriers of a CTA, and the order in which consumer warpgroups take turns.

Ping-pong: one group issues its two matrix products while the others run their softmax, so matrix and exponential units
are busy at the same time. The right to issue is a token that travels round the groups: a group waits at its own
barrier, and arriving at a barrier hands the token to that barrier's group.
"""

CTA = 0  # bar.sync 0: everything in the CTA


def turn_barrier(warpgroup):
    """Barrier at which consumer `warpgroup` (0, 1, ...) waits for its turn."""
    return 1 + warpgroup


def epilogue_barrier(warpgroup, consumer_warpgroups: int):
    """Barrier among the threads of one consumer warpgroup between writing O to shared memory and storing it."""
    return 1 + consumer_warpgroups + warpgroup


def next_warpgroup(warpgroup, consumer_warpgroups: int):
    """Who gets the token after `warpgroup`: the groups in a ring."""
    from kernels_src.integers import select

    return select(warpgroup == consumer_warpgroups - 1, 0, warpgroup + 1)


# Backward: the consumers meet where dS of all keys must lie in shared memory. Each consumer hands its tiles of dQ to a
# storing warp: the buffer is announced empty by that warp and full by the consumer.
CONSUMERS_MEET = 1


def dq_empty(warpgroup):
    """Barrier at which consumer `warpgroup` waits for its dQ buffer."""
    return 2 + 2 * warpgroup


def dq_full(warpgroup):
    """Barrier at which the storing warp of consumer `warpgroup` waits for a tile."""
    return 3 + 2 * warpgroup
