"""The interface of an executor, and the executors by name.

The pipeline hands recipes in and takes ends out, in any order. An executor never decides what is compiled or where the
result is kept: it turns one recipe into a cubin or an error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fa4build.compiling.executors import Finished, LocalExecutor
from fa4build.compiling.toolchain import Toolchain
from fa4build.errors import VariantError
from fa4build.families.interface import Family, Recipe
from fa4build.farm.local import WatchedExecutor

NAMES = ("local", "dask")


class Executor(Protocol):
    """What the pipeline needs."""

    capacity: int
    """How many compiles it takes at a time; the pipeline submits no more."""

    def submit(self, recipe: Recipe, work_dir: Path) -> int:
        """Start a compile; returns its number. `work_dir` is its own, a log is left there if it fails.

        Raises: ToolchainError if no compile can run at all.
        """

    def wait(self) -> Finished:
        """Block until a compile ends. A failed compile is a result; only a broken executor raises."""

    def close(self) -> None:
        """End everything that still runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What executors are made from.

    Attributes:
        jobs: compiles at a time, on this machine; default: one a core, as memory allows.
        timeout_s: how long one compile may take.
        scheduler: address of a dask scheduler, `tcp://host:8786`.
    """

    toolchain: Toolchain
    family: Family
    jobs: int | None = None
    timeout_s: float
    scheduler: str | None = None


class Local:
    """This machine: a fork server, and as many children at a time as cores and memory allow."""

    def __init__(self, executor: LocalExecutor) -> None:
        self._executor = executor
        self.capacity = executor.capacity

    def submit(self, recipe: Recipe, work_dir: Path) -> int:
        """As `Executor.submit`."""
        return self._executor.submit(recipe.request, recipe.options, work_dir)

    def wait(self) -> Finished:
        """As `Executor.wait`."""
        return self._executor.wait()

    def close(self) -> None:
        """As `Executor.close`."""
        self._executor.__exit__()


def make_executor(name: str, settings: Settings) -> Executor:
    """The executor of this name. Raises: VariantError for another name or a missing setting, ToolchainError."""
    makers: dict[str, Callable[[Settings], Executor]] = {"local": _local, "dask": _dask}
    if name not in makers:
        raise VariantError(f"--executor {name}: unknown. Allowed: {', '.join(makers)}.")
    return makers[name](settings)


def _local(settings: Settings) -> Executor:
    options: dict[str, Any] = {"jobs": settings.jobs, "timeout_s": settings.timeout_s, "worker": settings.family.worker}
    return Local(WatchedExecutor(settings.toolchain, **options))


def _dask(settings: Settings) -> Executor:
    from fa4build.farm.dask_cluster import DaskExecutor

    if settings.scheduler is None:
        raise VariantError("--executor dask: which cluster? Add --scheduler tcp://host:8786.")
    return DaskExecutor(settings.scheduler, family=settings.family.name, timeout_s=settings.timeout_s)
