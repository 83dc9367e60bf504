"""A ring of shared-memory stages between the copy warp and the consumer warpgroups.

Each stage has a full barrier (completed by the copy's bytes) and an empty barrier (completed by one lane of every
consumer warp). A cursor is a place in the ring and the parity of the pass over it: readers wait for full with that
parity, the writer for empty with the opposite one, which passes at once on the first pass.
"""

from typing import NamedTuple

from kernels_src.integers import select


class Cursor(NamedTuple):
    """stage: 0 .. stages - 1; phase: parity of the pass, 0 first."""

    stage: object
    phase: object

    def next(self, stages: int) -> "Cursor":
        """The place after this one. Integers only; two selects."""
        wraps = self.stage + 1 == stages
        return Cursor(select(wraps, 0, self.stage + 1), select(wraps, self.phase ^ 1, self.phase))

    def previous(self, stages: int) -> "Cursor":
        """The place before this one. Integers only; two selects."""
        wraps = self.stage == 0
        return Cursor(select(wraps, stages - 1, self.stage - 1), select(wraps, self.phase ^ 1, self.phase))


class Ring(NamedTuple):
    """Tiles (last mode counts stages) and pointers to the first full and the first empty barrier."""

    tiles: object
    full: object
    empty: object


def wait_full(ring: Ring, at: Cursor) -> None:
    """Blocks until the stage is filled."""
    from cutlass.cute import arch

    arch.mbarrier_wait(ring.full + at.stage, at.phase)


def wait_empty(ring: Ring, at: Cursor) -> None:
    """Blocks until the stage may be overwritten."""
    from cutlass.cute import arch

    arch.mbarrier_wait(ring.empty + at.stage, at.phase ^ 1)


def release(ring: Ring, at: Cursor) -> None:
    """Says that the calling warp has read the stage: one lane arrives. Contract: called by whole warps."""
    from cutlass.cute import arch

    with arch.elect_one():
        arch.mbarrier_arrive(ring.empty + at.stage)
