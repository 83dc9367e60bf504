"""The mbarriers of a kernel as one table: a line names one, says how many there are and what completes a phase of it.

The kernel's documentation, its shared memory and its initialisation all come from this table: what is waited for cannot
go out of step with what is counted.
"""

from collections import namedtuple
from typing import NamedTuple


class Barrier(NamedTuple):
    """`count` mbarriers of one kind (none: this variant does without), and the arrivals that complete a phase of each.

    An arrival that announces bytes is one of them; the bytes complete the phase beside it.
    """

    count: int
    arrivals: int


def allocate(smem, table: dict[str, Barrier]):
    """Shared-memory addresses under the names of the table, in its order; None where there is none.

    Add the slot, or whatever index the table's line gives, where there are several.
    """
    from cutlass import Int64

    addresses = [smem.allocate_array(Int64, line.count) if line.count else None for line in table.values()]
    return namedtuple("Barriers", table)(*addresses)


def initialise(table: dict[str, Barrier], addresses) -> None:
    """By one converged warp, before any thread uses a barrier; a fence makes them known to the copy engine."""
    from cutlass.cute import arch

    with arch.elect_one():
        for line, address in zip(table.values(), addresses, strict=True):
            for i in range(line.count):
                arch.mbarrier_init(address + i, line.arrivals)
    arch.mbarrier_init_fence()
