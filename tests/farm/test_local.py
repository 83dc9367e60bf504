"""Contract of compiles on this machine: a time limit is kept even by a compile server that does nothing any more.

The server stands in here: it forks for real, and compiles nothing.
"""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from fa4build.compiling.fork_server import ForkServer
from fa4build.errors import CompileError
from fa4build.farm import local

IMPORTS = "tests.fork_jobs:setup"


def executor(monkeypatch, tmp_path, timeout_s):
    """A watched executor whose server runs functions of `tests.fork_jobs` in place of a compile."""
    servers = []

    def start(toolchain, scratch, worker):
        servers.append(ForkServer(setup=IMPORTS, environment=dict(os.environ), scratch_dir=scratch))
        return servers[-1]

    monkeypatch.setattr(local, "start_server", start)
    monkeypatch.setattr(local, "check_server", lambda server, toolchain: server.facts())
    monkeypatch.setattr(local, "GRACE_S", 0.5)
    monkeypatch.setattr("fa4build.compiling.executors.prepare", lambda request, options, work_dir: work_dir.mkdir())
    monkeypatch.setattr("fa4build.compiling.executors.read_result", lambda request, work_dir, end: end.end)
    monkeypatch.setattr("fa4build.compiling.executors.WORKER", "tests.fork_jobs")
    return local.WatchedExecutor(None, jobs=2, timeout_s=timeout_s), servers


def test_a_stopped_server_ends_at_the_time_limit(tmp_path, monkeypatch):
    """Both compiles have run out of time, may pass another time, and the next one has a server of its own."""
    running, servers = executor(monkeypatch, tmp_path, timeout_s=1.0)
    with running:
        numbers = [running.submit(SimpleNamespace(name=f"v{n}"), None, tmp_path / str(n)) for n in (1, 2)]
        os.kill(servers[0]._process.pid, signal.SIGSTOP)
        started = time.monotonic()
        ends = [running.wait(), running.wait()]
        assert time.monotonic() - started < 20
        assert sorted(end.job for end in ends) == numbers
        assert all(isinstance(end.result, CompileError) and end.result.may_pass_again for end in ends)

        number = running.submit(SimpleNamespace(name="v3"), None, tmp_path / "3")
        end = running.wait()
    assert (number, end.job, len(servers)) == (3, 3, 2)


def test_a_server_that_dies_by_itself_is_still_an_error(tmp_path, monkeypatch):
    """Nobody is told of a time limit that was not reached."""
    running, servers = executor(monkeypatch, tmp_path, timeout_s=60.0)
    with running:
        running.submit(SimpleNamespace(name="v"), None, tmp_path / "1")
        os.kill(servers[0]._process.pid, signal.SIGKILL)
        with pytest.raises(Exception, match="the compile server died"):
            running.wait()
