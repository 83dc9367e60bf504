"""Compiles on this machine: a fork server, and as many children at a time as cores and memory allow.

Where else compiles may run is the business of `fa4build.farm`.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fa4build.compiling.compile import (
    TIMEOUT_S,
    WORKER,
    CompileOptions,
    CompileRequest,
    Cubin,
    Worker,
    check_server,
    prepare,
    read_result,
    start_server,
)
from fa4build.compiling.fork_server import ForkServer
from fa4build.compiling.toolchain import Toolchain
from fa4build.errors import Fa4BuildError

BYTES_PER_COMPILE = 1 << 30
"""Memory set aside for one compile. The largest forward kernels were seen to take 440 to 660 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of one compile: its cubin, or the error. `seconds` is wall time in the compile process."""

    job: int
    result: Cubin | Fa4BuildError
    seconds: float


class LocalExecutor:
    """Compiles on this machine, `capacity` at a time. The compiler is loaded when the first request comes."""

    def __init__(
        self,
        toolchain: Toolchain,
        *,
        jobs: int | None = None,
        timeout_s: float = TIMEOUT_S,
        worker: Worker | None = None,
    ) -> None:
        """`jobs`: at most so many at a time; default: one a core. `worker`: the process that is forked."""
        self.capacity = worker_count(jobs)
        self._toolchain = toolchain
        self._worker = worker
        self._timeout_s = timeout_s
        self._server: ForkServer | None = None
        self._scratch: Path | None = None
        self._running: dict[int, tuple[CompileRequest, Path]] = {}

    def __enter__(self) -> "LocalExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def submit(self, request: CompileRequest, options: CompileOptions, work_dir: Path) -> int:
        """Start a compile. Raises: ToolchainError if the compiler cannot run, or is not what its metadata says."""
        prepare(request, options, work_dir)
        if self._server is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="fa4build-"))
            self._server = start_server(self._toolchain, self._scratch, self._worker)
            check_server(self._server, self._toolchain)
        job = self._server.submit(function=f"{WORKER}:run", work_dir=work_dir, timeout_s=self._timeout_s)
        self._running[job] = (request, work_dir)
        return job

    def wait(self) -> Finished:
        """The next compile that ends. Raises: ToolchainError if the server has died."""
        assert self._server is not None, "nothing was submitted"
        end = self._server.wait()
        request, work_dir = self._running.pop(end.job)
        try:
            result: Cubin | Fa4BuildError = read_result(request, work_dir, end)
        except Fa4BuildError as error:
            result = error
        return Finished(job=end.job, result=result, seconds=end.seconds)


def worker_count(jobs: int | None = None) -> int:
    """How many compiles to run at a time: `jobs` (default: usable cores), fewer if memory is short, at least one."""
    wanted = len(os.sched_getaffinity(0)) if jobs is None else jobs
    return max(1, min(wanted, available_memory_bytes() // BYTES_PER_COMPILE))


def available_memory_bytes() -> int:
    """What can still be used: of the machine, and of this process's control group (version 2) if it has a limit."""
    available = [int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    limit, current = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and current and limit[0].isdigit():
        available.append(max(0, int(limit[0]) - int(current[0])))
    return min(available, default=BYTES_PER_COMPILE)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
