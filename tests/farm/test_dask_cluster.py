"""Contract of `--executor dask`: a real scheduler and worker processes on loopback give the bytes of this machine.

A killed worker loses nothing; a worker that would make another key compiles nothing; errors come with their log.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("distributed")
pytest.importorskip("cutlass")

from fa4build.compiling.toolchain import current_toolchain
from fa4build.errors import ToolchainError, VariantError
from fa4build.families.registry import family_named
from fa4build.farm.executors import Settings, make_executor
from fa4build.matrix.selection import Selection
from fa4build.pipeline import build_matrix
from fa4build.store.cache import Cache
from tests.built import cubin_of

pytestmark = pytest.mark.dsl

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("bwd_preprocess-sm90a-bf16-hd64", "bwd_preprocess-sm100a-bf16-hd64")
WORKER = """
import sys
sys.path.insert(0, {root!r})
{before}
import asyncio
from distributed import Worker
async def work():
    async with Worker({scheduler!r}, nthreads=1, name={name!r}, nanny=False) as worker:
        await worker.finished()
asyncio.run(work())
"""


OTHER_BUILDER = """
import dataclasses
import fa4build.farm.dask_worker as worker
real = worker.current_toolchain
worker.current_toolchain = lambda: dataclasses.replace(real(), builder_sha256="0" * 64)
"""


class Cluster:
    """A scheduler and its workers, each a process."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.processes = directory, {}
        code = (
            "import asyncio\nfrom distributed import Scheduler\nasync def run():\n"
            "    async with Scheduler(host='127.0.0.1', port=0, dashboard_address=':0') as scheduler:\n"
            "        print(scheduler.address, flush=True)\n        await scheduler.finished()\nasyncio.run(run())\n"
        )
        self.scheduler = self._start("scheduler", code, stdout=subprocess.PIPE)
        self.address = self.scheduler.stdout.readline().strip()

    def _start(self, name: str, code: str, **options) -> subprocess.Popen:
        log = (self.directory / f"{name}.log").open("w")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": "False"}
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=self.directory, env=environment, text=True, stderr=log, **options
        )
        self.processes[name] = process
        return process

    def work(self, name: str, before: str = "") -> subprocess.Popen:
        """Start a worker; `before` runs in it first."""
        code = WORKER.format(root=str(ROOT), before=before, scheduler=self.address, name=name)
        return self._start(name, code, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A scheduler without workers."""
    made = Cluster(tmp_path)
    yield made
    made.close()


def built_on(cluster: Cluster, cache: Cache, kernels=KERNELS, **options):
    """A build of some kernels on the cluster."""
    return build_matrix(Selection(globs=kernels), cache, executor="dask", scheduler=cluster.address, **options)


@pytest.mark.slow
def test_a_cluster_compiles_what_this_machine_does(cluster: Cluster, tmp_path: Path):
    """Four workers, one of them killed at work, one of another fa4build: every kernel is there, with equal bytes."""
    victim = cluster.work("victim", before="import time")
    cluster.work("stranger", before=OTHER_BUILDER)
    cluster.work("one")
    cluster.work("two")
    killed = []

    def kill(event) -> None:
        if not killed:
            killed.append(time.sleep(1.0))
            victim.kill()

    cache = Cache(tmp_path / "cache")
    report = built_on(cluster, cache, on_event=kill)

    assert [(o.name, o.status, o.message) for o in report.outcomes] == [(k, "compiled", "") for k in KERNELS]
    entries = {outcome.name: cache.get(outcome.key) for outcome in report.outcomes}
    assert {name: cache.read(entry, "cubin") for name, entry in entries.items()} == {
        name: cubin_of(name).elf for name in KERNELS
    }


def test_workers_that_would_make_something_else_are_refused(cluster: Cluster, tmp_path: Path):
    """Nothing is compiled on them; when there is no other, the build ends and says why."""
    cluster.work("stranger", before=OTHER_BUILDER)

    with pytest.raises(ToolchainError, match=r"no worker of the cluster may compile: .*its fa4build, compiler"):
        built_on(cluster, Cache(tmp_path / "cache"), kernels=KERNELS[:1])


def test_without_a_scheduler_nothing_starts(monkeypatch):
    """No address, none that answers, no executor of the name."""
    monkeypatch.setattr("fa4build.farm.dask_cluster.CONNECT_S", 1.0)
    settings = {"toolchain": current_toolchain(), "family": family_named(), "timeout_s": 60.0}

    with pytest.raises(VariantError, match="Add --scheduler"):
        make_executor("dask", Settings(**settings))
    with pytest.raises(ToolchainError, match="no scheduler with a worker answers in 1 s"):
        make_executor("dask", Settings(**settings, scheduler="tcp://127.0.0.1:9"))
    with pytest.raises(VariantError, match="Allowed: local, dask"):
        make_executor("slurm", Settings(**settings))
