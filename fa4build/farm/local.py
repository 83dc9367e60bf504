"""Compiles on this machine, whose time limit holds even if the compile server does nothing any more.

The server ends compiles that run too long. One that is stopped, or starved, cannot; then it is killed from here, its
compiles with it, and the next compile starts another. This is not in `fa4build/compiling`, which is part of every key.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fa4build.compiling.compile import CompileOptions, CompileRequest, check_server, start_server
from fa4build.compiling.executors import Finished, LocalExecutor
from fa4build.compiling.toolchain import Toolchain
from fa4build.errors import CompileError, ToolchainError
from fa4build.files import make_scratch

GRACE_S = 15.0
"""How much later than the server itself a silent server is ended."""


class WatchedExecutor(LocalExecutor):
    """As `LocalExecutor`. Job numbers are its own, since a server that is started anew counts from one."""

    def __init__(self, toolchain: Toolchain, *, timeout_s: float, **options: Any) -> None:
        """As `LocalExecutor`."""
        super().__init__(toolchain, timeout_s=timeout_s, **options)
        self._numbers = itertools.count(1)
        self._own: dict[int, tuple[int, float]] = {}  # server's number -> ours, and when it is overdue
        self._ended: deque[Finished] = deque()
        self._remove: Callable[[], None] | None = None
        self._is_overdue = threading.Event()

    def submit(self, request: CompileRequest, options: CompileOptions, work_dir: Path) -> int:
        """As `LocalExecutor.submit`."""
        if self._server is None:
            self._scratch, self._remove = make_scratch("server")
            self._server = start_server(self._toolchain, self._scratch, self._worker)
            check_server(self._server, self._toolchain)
        job = super().submit(request, options, work_dir)
        number = next(self._numbers)
        self._own[job] = (number, time.monotonic() + self._timeout_s + GRACE_S)
        return number

    def wait(self) -> Finished:
        """As `LocalExecutor.wait`; compiles of a server that was killed here have run out of time."""
        if self._ended:
            return self._ended.popleft()
        overdue = min(deadline for _, deadline in self._own.values())
        watch = threading.Timer(max(0.0, overdue - time.monotonic()), self._end_server)
        watch.daemon = True
        watch.start()
        try:
            finished = super().wait()
        except ToolchainError:
            if not self._is_overdue.is_set():
                raise
            self._give_up_all()
            return self._ended.popleft()
        finally:
            watch.cancel()
        return replace(finished, job=self._own.pop(finished.job)[0])

    def __exit__(self, *_: object) -> None:
        """End the server and remove what it worked in."""
        super().__exit__()
        self._server = None
        if self._remove is not None:
            self._remove()
            self._remove = None

    def _end_server(self) -> None:
        """Killed, it takes its children with it, and whoever waits for a line of it finds the end of the stream."""
        self._is_overdue.set()
        if self._server is not None:
            self._server._process.kill()

    def _give_up_all(self) -> None:
        """Every compile of that server ends here; each may pass with the next one."""
        for job, (number, _) in self._own.items():
            request, work_dir = self._running.pop(job)
            error = CompileError(
                f"{request.name}: no end after {self._timeout_s + GRACE_S:g} s: the compile server was stopped or "
                f"starved, and was killed. Build again, or give a longer --timeout. Kept: {work_dir}"
            )
            error.may_pass_again = True
            self._ended.append(Finished(job=number, result=error, seconds=self._timeout_s + GRACE_S))
        self._own.clear()
        self.__exit__()
        self._is_overdue.clear()
