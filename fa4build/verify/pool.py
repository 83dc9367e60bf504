"""One process for each task, so many at a time, with messages on the way. Knows nothing of kernels.

A process for each rather than a pool of workers: what a task leaks goes with it, one that crashes or hangs harms no
other, and each is told apart by its process number.
"""

import gc
import multiprocessing
import multiprocessing.context
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from fa4build.errors import Fa4BuildError, SimulationError

_POLL_S = 0.2
_OBJECTS = 1_000_000  # a task's process ends with it: cycles are looked for once in so many new objects
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")  # a task has one core; idle threads spin


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`function(argument, tell)` in a process of its own; both must pickle. `tell(message)` reports progress."""

    name: str
    function: Callable[[Any, Callable[[str], None]], Any]
    argument: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What became of a task: what it returned, or the error; wall seconds."""

    name: str
    result: Any
    error: Fa4BuildError | None
    seconds: float


@dataclass(slots=True, kw_only=True)
class _Running:
    """`place`: where the task last said that it was."""

    task: Task
    process: multiprocessing.process.BaseProcess
    started: float
    place: str = ""


def run_tasks(
    tasks: Sequence[Task],
    *,
    jobs: int,
    timeout_s: float,
    on_message: Callable[[str, str], None],
    on_end: Callable[[End], None],
    context: multiprocessing.context.BaseContext | None = None,
) -> None:
    """Run every task, `jobs` at a time; callbacks run here, between processes.

    Args:
        on_message: gets (task name, message); "" says that the task has started.
        context: how processes start; default: from a server. Forked ones have all that is in memory here, and neither
            function nor argument is pickled.
    Contract: when it returns or raises, none of its processes runs any more.
    """
    context = context or _context()
    waiting, running = deque(tasks), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.popleft()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(task.function, task.argument, theirs), daemon=True)
                process.start()
                theirs.close()
                running[ours] = _Running(task=task, process=process, started=time.monotonic())
                on_message(task.name, "")
            for connection in wait(list(running), timeout=_POLL_S):
                _receive(connection, running, on_message, on_end)
            for connection, late in list(running.items()):
                if time.monotonic() - late.started > timeout_s:
                    _end(connection, running, None, _too_long(late.task, timeout_s), on_end)
    finally:
        for left in running.values():
            left.process.kill()
            left.process.join()


def _context() -> multiprocessing.context.BaseContext:
    """New processes from a server that has imported what tasks need, where there is such a thing; else from nothing."""
    for name in _ONE_THREAD:
        os.environ.setdefault(name, "1")
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "fa4build.verify.simulated"])
    return context


def _receive(
    connection: Connection,
    running: dict[Connection, _Running],
    on_message: Callable[[str, str], None],
    on_end: Callable[[End], None],
) -> None:
    """One message: progress, the result, or the end of a pipe whose process died."""
    task = running[connection].task
    try:
        kind, value = connection.recv()
    except EOFError:
        running[connection].process.join()
        code = running[connection].process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with {code}"
        hint = " Out of memory? Use fewer --jobs." if code == -9 else ""
        where = f" in {running[connection].place}" if running[connection].place else ""
        _end(connection, running, None, SimulationError(f"{task.name}: its process {how}{where}.{hint}"), on_end)
        return
    if kind == "message":
        running[connection].place = value
        on_message(task.name, value)
    elif kind == "place":
        running[connection].place = f"{running[connection].place.partition(', ')[0]}, {value}"
    else:
        _end(connection, running, *((value, None) if kind == "result" else (None, value)), on_end)


def _end(
    connection: Connection,
    running: dict[Connection, _Running],
    result: Any,
    error: Fa4BuildError | None,
    on_end: Callable[[End], None],
) -> None:
    done = running.pop(connection)
    done.process.kill()
    done.process.join()
    connection.close()
    on_end(End(name=done.task.name, result=result, error=error, seconds=time.monotonic() - done.started))


def _too_long(task: Task, timeout_s: float) -> SimulationError:
    return SimulationError(f"{task.name}: not finished after {timeout_s:.0f} s. Give it more with --timeout.")


_tell_place: list[Callable[[str], None]] = []


def now_in(place: str) -> None:
    """Says where a task is, for the case that its process dies there; outside of a task, nothing."""
    for tell in _tell_place:
        tell(place)


def _work(function: Callable[[Any, Callable[[str], None]], Any], argument: Any, connection: Connection) -> None:
    """The other process: exactly one result or error, after any number of messages."""
    gc.set_threshold(_OBJECTS)
    _tell_place[:] = [lambda place: connection.send(("place", place))]
    try:
        answer = ("result", function(argument, lambda message: connection.send(("message", message))))
    except Fa4BuildError as error:
        answer = ("error", error)
    except Exception as error:  # the boundary of a worker: whatever it is belongs to this task alone
        import traceback

        answer = ("error", SimulationError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    connection.send(answer)
    connection.close()
