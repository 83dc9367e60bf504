"""Compiles on the workers of a dask cluster: `fa4build matrix --executor dask --scheduler tcp://host:8786`.

Tasks are names and keys, results are bytes whose digest is checked. A worker that dies loses nothing: the scheduler
gives its task to another. A worker that would make another key is passed over from then on.

Source: distributed's Client, as_completed and worker restrictions (docs of dask.distributed).
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa4build.compiling.compile import LOG_NAME
from fa4build.compiling.executors import Finished
from fa4build.errors import CompileError, ToolchainError
from fa4build.families.interface import Recipe
from fa4build.farm.dask_worker import Answer, compile_here

CONNECT_S = 30.0
"""Seconds in which the scheduler must answer, and a first worker be there."""


@dataclass(slots=True, kw_only=True)
class _Task:
    recipe: Recipe
    work_dir: Path
    job: int


class DaskExecutor:
    """An executor whose compiles run on a cluster. `capacity` is twice its threads, so that none waits for us."""

    def __init__(self, scheduler: str, *, family: str, timeout_s: float) -> None:
        """Raises: ToolchainError if dask is not installed, or no scheduler or no worker answers in CONNECT_S."""
        try:
            from distributed import Client, as_completed
        except ImportError as error:
            raise ToolchainError(f"--executor dask: {error}. Run: pip install 'fa4build[dask]'") from error
        try:
            self._client: Any = Client(scheduler, timeout=CONNECT_S, set_as_default=False)
            self._client.wait_for_workers(1, timeout=CONNECT_S)
        except (OSError, TimeoutError, ValueError) as error:
            raise ToolchainError(
                f"--scheduler {scheduler}: no scheduler with a worker answers in {CONNECT_S:.0f} s ({error}). Run "
                "dask scheduler, and dask worker ADDRESS."
            ) from error
        self.capacity = max(1, 2 * sum(self._client.nthreads().values()))
        self._family, self._timeout_s = family, timeout_s
        self._refused: dict[str, str] = {}  # worker's address -> why
        self._tasks: dict[str, _Task] = {}
        self._ended: Any = as_completed(loop=self._client.loop)
        self._submitted, self._sent = 0, 0

    def submit(self, recipe: Recipe, work_dir: Path) -> int:
        """As `Executor.submit`."""
        self._submitted += 1
        self._send(_Task(recipe=recipe, work_dir=work_dir, job=self._submitted))
        return self._submitted

    def wait(self) -> Finished:
        """As `Executor.wait`."""
        while True:
            future = self._next()
            task = self._tasks.pop(future.key)
            try:
                answer: Answer = future.result()
            except BaseException as error:
                if not isinstance(error, Exception):
                    raise
                return self._lost(task, error)
            if answer.refused is None:
                return _finished(task, answer)
            self._pass_over(future, answer)
            self._send(task)

    def close(self) -> None:
        """As `Executor.close`."""
        self._client.cancel([future for future, _ in self._ended.futures.items()], force=True)
        self._client.close()

    def _next(self) -> Any:
        try:
            return next(self._ended)
        except StopIteration:
            raise ToolchainError("the scheduler has lost all tasks. Start it again, and the build.") from None

    def _send(self, task: _Task) -> None:
        allowed = sorted(set(self._client.nthreads()) - self._refused.keys())
        if self._refused and not allowed:
            reasons = "; ".join(sorted({f"{worker}: {reason}" for worker, reason in self._refused.items()})[:3])
            raise ToolchainError(f"no worker of the cluster may compile: {reasons}. Install there what is here.")
        self._sent += 1
        future = self._client.submit(
            compile_here,
            *(self._family, task.recipe.name, task.recipe.key, task.recipe.options, self._timeout_s),
            key=f"fa4build-{task.recipe.key[:16]}-{self._sent}",
            workers=allowed if self._refused else None,
            pure=False,
        )
        self._tasks[future.key] = task
        self._ended.add(future)

    def _pass_over(self, future: Any, answer: Answer) -> None:
        """From now on without the worker that refused."""
        for worker in self._client.who_has([future]).get(future.key, ()):
            self._refused[worker] = f"{answer.worker}: {answer.refused}"

    def _lost(self, task: _Task, error: Exception) -> Finished:
        """A task that killed worker after worker, or whose cluster went away."""
        if self._client.status != "running":
            raise ToolchainError(f"the connection to the scheduler is lost ({error}). Start it again, and the build.")
        what = CompileError(f"{task.recipe.name}: the cluster gave it up: {type(error).__name__}: {error}")
        what.may_pass_again = True
        return Finished(job=task.job, result=what, seconds=0.0)


def _finished(task: _Task, answer: Answer) -> Finished:
    """The end of a compile: bytes with the digest they left with, or the error with its log on this machine."""
    result: Any = answer.cubin
    if answer.error is not None:
        task.work_dir.mkdir(parents=True, exist_ok=True)
        log = task.work_dir / LOG_NAME
        log.write_text(answer.log, encoding="utf-8")
        result = type(answer.error)(f"{str(answer.error).partition('Kept: ')[0]}on {answer.worker}. Kept: {log}")
    elif hashlib.sha256(answer.cubin.elf).hexdigest() != answer.sha256:  # type: ignore[union-attr]
        result = CompileError(f"{task.recipe.name}: bytes changed between {answer.worker} and here. Build again.")
        result.may_pass_again = True
    return Finished(job=task.job, result=result, seconds=answer.seconds)
