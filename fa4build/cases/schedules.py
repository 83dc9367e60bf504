"""The ways in which a proof runs every case: schedules of the simulator, and how tensors lie."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way to execute a case; all ways must give the same bits.

    Attributes:
        schedule: of the simulator, `eager`, `late` or `random`.
        padded: gaps between heads and tokens and guard zones around every tensor, filled with NaN; else compact, where
            the simulator itself stops any access that leaves a tensor.
        num_sms: multiprocessors the kernel is told of. Few make persistent blocks take several tiles.
        checks: races, fences, uninitialised reads and leftovers are looked for.
        by_warp: warps never run in lockstep.
    """

    schedule: str
    padded: bool
    num_sms: int
    checks: bool = False
    by_warp: bool = False
    concurrent_clusters: int = 1


RUNS = (
    Run(schedule="eager", padded=False, num_sms=132, checks=True),
    Run(schedule="late", padded=True, num_sms=2, checks=True),
    Run(schedule="random", padded=True, num_sms=3, checks=True, by_warp=True, concurrent_clusters=2),
)
"""The first is compared with the reference; the others with the first, bit by bit."""


def runs_of(engine: str) -> tuple[Run, ...]:
    """The runs of a proof in the engine of a name, `native` or `python`."""
    return RUNS
