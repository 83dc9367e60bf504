"""One process that has done the slow imports, and forks a fresh child for each job.

A child never sees another job's state, as if it were a new interpreter, without paying for the imports again. Both ends
are here: `ForkServer` in the parent, `serve` in the server. They talk in JSON lines over a socket pair; a job is a
directory and the name of a function, its results are files in that directory. Nothing here knows what a job does.

    parent -> server   {"job": 7, "function": "module:name", "work_dir": "..", "timeout_s": 300}
    server -> parent   {"ready": {..}} once, or {"refused": ".."}; then {"job": 7, "end": "exit 0", "seconds": ..}

A child has its own session, its output goes to `log.txt` in its directory, and it dies with the server; the server dies
with the parent. Linux only (pidfd, prctl), as the compiler is.
"""

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa4build.compiling import inputs_read
from fa4build.errors import ToolchainError

LOG_NAME = "log.txt"
_START_TIMEOUT_S = 120.0
_WARM_AT_JOB = 4
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended: `exit 0`, `exit 1`, `signal 11` or `timeout`.

    `seconds` is wall time, `cpu_seconds` user plus system time of the child, `peak_bytes` its largest resident set.
    """

    job: int
    end: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int


class ForkServer:
    """The parent's end. A context manager: leaving it, in whatever way, ends the server and every running job."""

    def __init__(
        self,
        *,
        setup: str,
        environment: Mapping[str, str],
        scratch_dir: Path,
        blocked_modules: Sequence[str] = (),
        warm: str = "",
    ) -> None:
        """Start the server; it works on its imports while the caller goes on.

        Args:
            setup: `module:function`, called once in the server; does the imports and returns facts (a JSON object).
            environment: the server's whole environment.
            scratch_dir: an existing directory for what the imports may write; the server's working directory.
            blocked_modules: modules whose import fails in the server, so that results cannot depend on them.
            warm: `module:function`, called once in the server before the fourth job: work that every child would do
                again, worth doing ahead only where there are several.
        """
        ours, theirs = socket.socketpair()
        start = {
            "setup": setup,
            "blocked_modules": list(blocked_modules),
            "warm": warm,
            "sys_path": [str(Path(entry or ".").resolve()) for entry in sys.path],
            "socket": theirs.fileno(),
        }
        boot = "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['sys_path']; "
        boot += f"from {__name__} import serve; serve(start)"
        self._log = (scratch_dir / "server.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-c", boot, json.dumps(start)],
            env=dict(environment),
            cwd=scratch_dir,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        theirs.close()
        self._socket = ours
        self._lines = _Lines(ours)
        self._facts: Mapping[str, Any] | None = None
        self._next_job = 0

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and all its jobs. Their directories are left as they are."""
        self._socket.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def facts(self) -> Mapping[str, Any]:
        """What `setup` returned. Waits for the server to be ready.

        Raises: ToolchainError when the server could not start, with its output.
        """
        if self._facts is None:
            message = self._lines.read(timeout_s=_START_TIMEOUT_S)
            if message is None or "ready" not in message:
                output = Path(self._log.name).read_text(errors="replace").strip()
                reason = output if message is None else message["refused"]
                raise ToolchainError(
                    f"the compile server did not start:\n{reason or 'no output before the time limit'}"
                )
            self._facts = message["ready"]
        return self._facts

    def submit(self, *, function: str, work_dir: Path, timeout_s: float) -> int:
        """Start `function(work_dir)` in a fresh child and return the job's number. `function` is `module:name`."""
        self.facts()
        self._next_job += 1
        message = {
            "job": self._next_job,
            "function": function,
            "work_dir": str(work_dir.resolve()),
            "timeout_s": timeout_s,
        }
        self._socket.sendall(_line(message))
        return self._next_job

    def wait(self) -> JobEnd:
        """Block until some job ends.

        Raises: ToolchainError when the server itself has died.
        """
        message = self._lines.read(timeout_s=None)
        if message is None:
            raise ToolchainError(
                f"the compile server died (status {self._process.wait()}). If memory is short, use --jobs 1."
            )
        return JobEnd(**message)


class _Lines:
    """JSON lines from a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def read(self, *, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message; None at the end of the stream or after the time limit."""
        self._connection.settimeout(timeout_s)
        while b"\n" not in self._buffer:
            try:
                data = self._connection.recv(1 << 16)
            except (TimeoutError, ConnectionError):
                return None
            if not data:
                return None
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


# The server's end.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    """A running job."""

    job: int
    pid: int
    pidfd: int
    started: float
    deadline: float


def serve(start: Mapping[str, Any]) -> None:
    """Do the imports, then fork a child a job until the parent closes its end."""
    connection = socket.socket(fileno=start["socket"])
    inputs_read.watch()  # before any code that a job or `setup` may bring
    for name in start["blocked_modules"]:
        sys.modules[name] = None  # type: ignore[assignment]  # makes `import name` raise ImportError
    try:
        facts = resolve(start["setup"])()
        if (threads := len(list(Path("/proc/self/task").iterdir()))) != 1:
            raise RuntimeError(f"{threads} threads after the imports; forking is safe from a single one only")
    except BaseException:
        connection.sendall(_line({"refused": traceback.format_exc()}))
        raise
    _settle()
    connection.sendall(_line({"ready": facts}))
    _Server(connection, start["warm"]).run()


def _settle() -> None:
    """The collector of a child must not touch, and so copy, what it shares with the server."""
    gc.collect()
    gc.freeze()


class _Server:
    """The event loop: new jobs from the parent, ends of children, time limits."""

    def __init__(self, connection: socket.socket, warm: str) -> None:
        self._connection = connection
        self._warm = warm
        self._buffer = b""
        self._children: dict[int, _Child] = {}  # by pidfd
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the parent is gone."""
        try:
            while True:
                for key, _ in self._selector.select(self._seconds_to_next_deadline()):
                    if key.fileobj is not self._connection:
                        self._finish(self._children[key.fd], end=None)
                    elif not self._receive():
                        return
                self._end_overdue()
        except ConnectionError:
            return
        finally:
            for child in list(self._children.values()):
                _kill_session(child.pid)

    def _receive(self) -> bool:
        """Start the jobs that have arrived; False at the end of the stream."""
        data = self._connection.recv(1 << 16)
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._start(json.loads(line))
        return bool(data)

    def _start(self, message: Mapping[str, Any]) -> None:
        if self._warm and message["job"] == _WARM_AT_JOB:
            resolve(self._warm)()
            _settle()
        started = time.monotonic()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            self._connection.close()
            _run_child(server, message)
        child = _Child(
            job=message["job"],
            pid=pid,
            pidfd=os.pidfd_open(pid),
            started=started,
            deadline=started + message["timeout_s"],
        )
        self._children[child.pidfd] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ)

    def _seconds_to_next_deadline(self) -> float | None:
        deadlines = [child.deadline for child in self._children.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for child in list(self._children.values()):
            if child.deadline <= now:
                self._finish(child, end="timeout")

    def _finish(self, child: _Child, *, end: str | None) -> None:
        """Reap a child that has ended, or one that has to, and report it. Whatever it started goes with it."""
        _kill_session(child.pid)
        _, status, usage = os.wait4(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        del self._children[child.pidfd]
        code = os.waitstatus_to_exitcode(status)
        message = {
            "job": child.job,
            "end": end or (f"exit {code}" if code >= 0 else f"signal {-code}"),
            "seconds": time.monotonic() - child.started,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_bytes": usage.ru_maxrss * 1024,
        }
        self._connection.sendall(_line(message))


def _kill_session(pid: int) -> None:
    """Kill a child, which may be dead already but is not yet reaped, and whatever it has started."""
    for kill in (os.killpg, os.kill):  # the group exists only once the child has called setsid
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _run_child(server: int, message: Mapping[str, Any]) -> None:
    """The whole life of a child. Never returns."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # it died before prctl
            os._exit(1)
        work_dir = Path(message["work_dir"])
        os.chdir(work_dir)
        os.environ["TMPDIR"] = str(work_dir)
        log = os.open(LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        resolve(message["function"])(work_dir)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def resolve(name: str) -> Callable[..., Any]:
    """The function called `module:name`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
