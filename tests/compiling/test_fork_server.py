"""Contract of the fork server.

Every job runs in a fresh child that sees nothing of the others, in an environment that is given and not inherited. What
a job does to itself (an error, a crash, no end) is reported and stops nothing else. Nothing outlives its parent.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fa4build.compiling.fork_server import LOG_NAME, ForkServer, JobEnd
from fa4build.errors import ToolchainError

ROOT = Path(__file__).resolve().parents[2]
JOBS = "tests.fork_jobs"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    """A server in an environment of two variables, with one module blocked."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with ForkServer(
        setup=f"{JOBS}:setup",
        environment={"GIVEN": "1", "LC_ALL": "C"},
        scratch_dir=scratch,
        blocked_modules=("colorsys",),
    ) as server:
        yield server


def run(server: ForkServer, function: str, work_dir: Path, timeout_s: float = 30.0) -> JobEnd:
    """One job from start to end."""
    work_dir.mkdir(parents=True)
    job = server.submit(function=f"{JOBS}:{function}", work_dir=work_dir, timeout_s=timeout_s)
    end = server.wait()
    assert end.job == job
    return end


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, what: str) -> None:
    """Poll for up to ten seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def test_a_job_sees_no_trace_of_an_earlier_one(server, tmp_path):
    """State that a compile leaves in its process must not reach the next compile."""
    for name in ("first", "second"):
        run(server, "remember", tmp_path / name)

    assert (tmp_path / "second" / "seen").read_text() == "second"


def test_the_environment_is_given_and_not_inherited(server, tmp_path, monkeypatch):
    """Only the scratch directory is added, so that temporary files go with the job."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    run(server, "environment", tmp_path / "job")

    assert (tmp_path / "job" / "environment").read_text() == f"GIVEN=1\nLC_ALL=C\nTMPDIR={tmp_path / 'job'}"


def test_a_blocked_module_cannot_be_imported(server, tmp_path):
    """A result cannot depend on whether it is installed."""
    end = run(server, "import_blocked", tmp_path / "job")

    assert end.end == "exit 1"
    assert "colorsys" in (tmp_path / "job" / LOG_NAME).read_text()


def test_everything_said_is_in_the_log(server, tmp_path):
    """By the job and by the tools it runs."""
    end = run(server, "talk", tmp_path / "job")

    assert end.end == "exit 0"
    assert sorted((tmp_path / "job" / LOG_NAME).read_text().splitlines()) == ["from a tool", "to stderr", "to stdout"]


@pytest.mark.parametrize(
    ("function", "timeout_s", "end", "said"),
    [
        pytest.param("fail", 30, "exit 1", "ValueError: tile_m 7 is odd", id="error"),
        pytest.param("segfault", 30, f"signal {signal.SIGSEGV.value}", "", id="crash"),
        pytest.param("hang", 0.5, "timeout", "", id="no end"),
        pytest.param("no_such_function", 30, "exit 1", "no_such_function", id="unknown function"),
    ],
)
def test_a_job_that_goes_wrong_is_reported_and_the_next_one_runs(server, tmp_path, function, timeout_s, end, said):
    """With what it said until then."""
    assert run(server, function, tmp_path / "bad", timeout_s).end == end
    assert said in (tmp_path / "bad" / LOG_NAME).read_text()
    assert run(server, "remember", tmp_path / "good").end == "exit 0"


def test_a_stopped_job_takes_its_tools_with_it(server, tmp_path):
    """An assembler must not go on burning a core after its compile was given up."""
    end = run(server, "hang", tmp_path / "job", timeout_s=1.0)
    pids = [int(pid) for pid in (tmp_path / "job" / "pids").read_text().split()]

    assert 1.0 <= end.seconds < 10.0
    wait_until(lambda: not any(map(is_running, pids)), "the job's processes are gone")


def test_jobs_run_side_by_side(server, tmp_path):
    """A short one is not held up by one that never ends."""
    (tmp_path / "long").mkdir()
    server.submit(function=f"{JOBS}:hang", work_dir=tmp_path / "long", timeout_s=30)
    end = run(server, "remember", tmp_path / "short")

    assert (end.job, end.end) == (2, "exit 0")


def test_closing_ends_running_jobs(tmp_path):
    """Ctrl-C leaves nothing behind."""
    for name in ("scratch", "job"):
        (tmp_path / name).mkdir()
    with ForkServer(setup=f"{JOBS}:setup", environment={}, scratch_dir=tmp_path / "scratch") as server:
        pids = [int(server.facts()["server_pid"])]
        server.submit(function=f"{JOBS}:hang", work_dir=tmp_path / "job", timeout_s=600)
        wait_until((tmp_path / "job" / "pids").exists, "the job has started")
        pids += [int(pid) for pid in (tmp_path / "job" / "pids").read_text().split()]

    wait_until(lambda: not any(map(is_running, pids)), "server, job and tool are gone")


PARENT = """
import sys, time
from pathlib import Path
from fa4build.compiling.fork_server import ForkServer

root = Path(sys.argv[1])
server = ForkServer(setup="tests.fork_jobs:setup", environment={}, scratch_dir=root / "scratch")
(root / "server").write_text(server.facts()["server_pid"])
server.submit(function="tests.fork_jobs:hang", work_dir=root / "job", timeout_s=600)
time.sleep(600)
"""


def test_nothing_outlives_a_killed_parent(tmp_path):
    """`kill -9` of a build: server, child and the child's tool end."""
    for name in ("scratch", "job"):
        (tmp_path / name).mkdir()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT)
    try:
        wait_until((tmp_path / "job" / "pids").exists, "the job has started")
    finally:
        parent.kill()
        parent.wait()
    pids = [int(pid) for pid in (tmp_path / "job" / "pids").read_text().split()]
    pids.append(int((tmp_path / "server").read_text()))

    wait_until(lambda: not any(map(is_running, pids)), "server, job and tool are gone")


def test_a_killed_server_takes_its_jobs_with_it_and_is_noticed(server, tmp_path):
    """Out of memory: an error instead of waiting for ever."""
    (tmp_path / "job").mkdir()
    server.submit(function=f"{JOBS}:hang", work_dir=tmp_path / "job", timeout_s=600)
    wait_until((tmp_path / "job" / "pids").exists, "the job has started")
    child = int((tmp_path / "job" / "pids").read_text().split()[0])
    os.kill(int(server.facts()["server_pid"]), signal.SIGKILL)

    with pytest.raises(ToolchainError, match="the compile server died"):
        server.wait()
    wait_until(lambda: not is_running(child), "the job is gone")


def test_a_server_that_cannot_start_says_why(tmp_path):
    """With the traceback of its imports."""
    with ForkServer(setup=f"{JOBS}:broken_setup", environment={}, scratch_dir=tmp_path) as server:
        with pytest.raises(ToolchainError, match=r"libcompiler\.so: cannot open shared object file"):
            server.facts()


def test_the_fourth_job_finds_a_warm_server(tmp_path):
    """Work that every child would do again is done once, in the server, and only where there are several jobs."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with ForkServer(setup=f"{JOBS}:setup", environment={}, scratch_dir=scratch, warm=f"{JOBS}:warm") as server:
        for number in range(1, 6):
            run(server, "remember", tmp_path / str(number))

    seen = [(tmp_path / str(number) / "seen").read_text() for number in range(1, 6)]
    assert seen == ["1", "2", "3", "warmed 4", "warmed 5"]
