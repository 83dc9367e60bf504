"""The ways in which a proof runs every case: orders of the simulator, and how tensors lie."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way to execute a case; all ways must give the same bits.

    Attributes:
        schedule: an order of the simulator: `eager`, `late` or `random`; in the native engine also those of
            simulate/native/orders.py.
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
"""Of the Python engine. The first is compared with the reference; the others with the first, bit by bit."""

NATIVE_RUNS = (
    RUNS[0],
    RUNS[1],
    Run(schedule="copies in order", padded=True, num_sms=2, checks=True, by_warp=True),
    Run(schedule="copies against order", padded=False, num_sms=132, checks=True, by_warp=True),
    Run(schedule="clusters reversed", padded=True, num_sms=3, checks=True, by_warp=True, concurrent_clusters=64),
    Run(schedule="role starved", padded=True, num_sms=2, checks=True, by_warp=True),
    Run(schedule="next role starved", padded=False, num_sms=132, checks=True, by_warp=True),
    RUNS[2],
)
"""Of the native engine, which has at least as many clusters in flight as the multiprocessors have room for.

The roles starved are two of the kernel's, in turn from case to case.
"""

_TURNS = ("role starved", "next role starved")


def runs_of(engine: str) -> tuple[Run, ...]:
    """The runs of every proof in an engine of the simulator, `python` or `native`."""
    return RUNS if engine == "python" else NATIVE_RUNS


def runs_of_case(engine: str, number: int, most: int | None = None) -> tuple[Run, ...]:
    """All runs of a case, in order: those of `runs_of`, with the roles whose turn it is.

    Args:
        number: of the case among those of its kernel, from 0.
        most: so many are enough where an engine is slow: the Python engine makes no more.
    """
    if engine == "python":
        return RUNS[:most]
    turns = {name: f"role {len(_TURNS) * number + turn} starved" for turn, name in enumerate(_TURNS)}
    return tuple(replace(run, schedule=turns.get(run.schedule, run.schedule)) for run in NATIVE_RUNS)
