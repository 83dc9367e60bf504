"""Contract of the local executor's size: as many compiles as asked for, never more than memory holds, never none."""

import os

import pytest

from fa4build.compiling import executors
from fa4build.compiling.executors import BYTES_PER_COMPILE, available_memory_bytes, worker_count


@pytest.mark.parametrize(
    ("jobs", "memory_bytes", "workers"),
    [
        pytest.param(1, 64 * BYTES_PER_COMPILE, 1, id="as asked"),
        pytest.param(8, 64 * BYTES_PER_COMPILE, 8, id="more than cores, if asked"),
        pytest.param(8, 3 * BYTES_PER_COMPILE, 3, id="memory for three"),
        pytest.param(8, 3 * BYTES_PER_COMPILE - 1, 2, id="not quite three"),
        pytest.param(8, 0, 1, id="at least one"),
    ],
)
def test_workers_are_limited_by_memory(monkeypatch, jobs, memory_bytes, workers):
    """One compile that dies of memory is a failed variant; too many at a time would be many."""
    monkeypatch.setattr(executors, "available_memory_bytes", lambda: memory_bytes)

    assert worker_count(jobs) == workers


def test_by_default_there_is_one_worker_a_core(monkeypatch):
    """A core this process may use, not one the machine has."""
    monkeypatch.setattr(executors, "available_memory_bytes", lambda: 1 << 60)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})

    assert worker_count() == 3


MEMINFO = ["MemTotal:       24000000 kB", "MemAvailable:   10000000 kB"]


@pytest.mark.parametrize(
    ("limit", "current", "available"),
    [
        pytest.param([], [], 10_240_000_000, id="no control group"),
        pytest.param(["max"], ["5"], 10_240_000_000, id="no limit"),
        pytest.param(["3000000000"], ["1000000000"], 2_000_000_000, id="limit below the machine"),
        pytest.param(["90000000000"], ["0"], 10_240_000_000, id="limit above the machine"),
        pytest.param(["1000"], ["2000"], 0, id="over the limit"),
    ],
)
def test_available_memory_is_the_lower_of_machine_and_control_group(monkeypatch, limit, current, available):
    """A container sees the machine's memory in /proc/meminfo; 10,000,000 kB are 10,240,000,000 bytes."""
    files = {
        "/proc/meminfo": MEMINFO,
        "/sys/fs/cgroup/memory.max": limit,
        "/sys/fs/cgroup/memory.current": current,
    }
    monkeypatch.setattr(executors, "_lines", files.__getitem__)

    assert available_memory_bytes() == available
