"""The engines that a proof may run in: the native one, which proves, and the Python one, its oracle.

Both run the same cases under the rules of the simulator. A proof is of one engine, and of the orders that it was run
in: its digest holds the code of that engine alone, and its record names it.
"""

from dataclasses import dataclass

from fa4build.cases.schedules import Run, runs_of
from fa4build.errors import SimulationError
from fa4build.simulate.launch import run_launch
from fa4build.simulate.native.run import run_launch as run_native
from fa4build.simulate.plan_launch import Launcher

ENGINES = ("native", "python")
DEFAULT = "native"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What runs a launch, and the ways in which a proof runs every case in it."""

    name: str
    run_launch: Launcher
    runs: tuple[Run, ...]


def engine_named(name: str) -> Engine:
    """The engine of a name. Raises: SimulationError for a name that is none."""
    launchers = {"native": run_native, "python": run_launch}
    if name not in launchers:
        raise SimulationError(f"engine {name!r} is unknown; allowed: {', '.join(ENGINES)}")
    return Engine(name=name, run_launch=launchers[name], runs=runs_of(name))
