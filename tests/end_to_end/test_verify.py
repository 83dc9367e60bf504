"""Contract of `fa4build verify` as a user meets it.

A built kernel passes; what it passed is evidence for the next wheel, and an unchanged kernel is not simulated again. A
kernel that computes something else, or no longer fits its plan, fails with exit code 10, the case and the place named;
its evidence is withdrawn. stdout carries the result alone: one line, or one JSON document.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fa4build.cases.schedules import NATIVE_RUNS
from fa4build.matrix.variants import Selection, expand_matrix
from fa4build.pipeline import build_matrix, find_cached
from fa4build.runtime.fa4_kernels.evidence import RECORD_FIELD
from fa4build.shipping.release import artifact_of
from fa4build.store.cache import Cache
from fa4build.store.entries import CacheEntry
from fa4build.store.evidence import Committed, read_record, silicon_records, subject_of

pytestmark = pytest.mark.dsl

NAME = "fwd-sm90a-bf16-hd64-full"
ONE = Selection(globs=(NAME,))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with one compiled variant."""
    root = tmp_path_factory.mktemp("cache")
    assert build_matrix(ONE, Cache(root), 1).exit_code == 0
    return root


def entry_in(root: Path) -> CacheEntry:
    """The one entry."""
    ((_, entry),) = find_cached(expand_matrix(ONE), Cache(root))
    assert entry is not None
    return entry


def with_other(root: Path, to: Path, **objects: bytes) -> Path:
    """A cache in which the compile of the variant gave something else."""
    cache, entry = Cache(root), entry_in(root)
    stored = {name: objects.get(name) or cache.read(entry, name) for name in entry.objects}
    Cache(to).put(name=entry.name, inputs=entry.inputs, facts=entry.facts, objects=stored)
    return to


def run_verify(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`fa4build verify NAME ...` on a cache, not on a terminal."""
    command = [sys.executable, "-m", "fa4build.cli", "verify", NAME, "--cache-dir", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)


def test_a_built_kernel_passes_once_and_is_known_the_second_time(built):
    """All acceptance cases in every order; the second run takes over what the first has proven."""
    first = run_verify(built, "--simulate", "--jobs", "1")
    again = run_verify(built, "--simulate", "--json")
    (variant,) = json.loads(again.stdout)["variants"]
    summary = variant["checks"]["simulated"]["summary"]

    assert first.returncode == 0, first.stderr
    assert re.match(r"1 variants: simulated 1 passed in [\d.]+ s; evidence: ", first.stdout)
    assert "passed  simulated fwd-sm90a-bf16-hd64-full  12 cases, worst 0." in first.stderr
    assert again.returncode == 0
    assert variant["checks"]["simulated"]["status"] == "known"
    assert (summary["cases"], summary["schedules"]) == (12, [run.schedule for run in NATIVE_RUNS])
    assert 0 < summary["worst_ratio"] <= 1
    assert summary["worst_lse_error"] <= 1e-4


def test_static_figures_are_read_and_go_into_the_manifest(built, tmp_path):
    """No baseline here: a note, no failure. The artifact of the next wheel carries the evidence."""
    done = run_verify(built, "--static", "--json", "--baseline-dir", str(tmp_path))
    (variant,) = json.loads(done.stdout)["variants"]
    check = variant["checks"]["static"]
    evidence = artifact_of(entry_in(built), Cache(built), Committed()).facts.evidence

    assert done.returncode == 0, done.stderr
    assert check["status"] == "passed"
    assert (check["summary"]["target"], check["summary"]["spill_bytes"]) == ("sm_90a", 0)
    assert check["summary"]["instructions"]["mma"] > 0
    assert check["notes"] == ["no baseline yet: fa4build verify --static --update-baseline writes one"]
    sealed = dict(evidence.as_dict()["static"])
    assert len(sealed.pop(RECORD_FIELD)) == 64
    assert sealed == check["summary"]


def test_a_worse_figure_than_the_baseline_fails_until_the_baseline_is_updated(built, tmp_path):
    """One register fewer in the baseline than the kernel needs."""
    updated = run_verify(built, "--update-baseline", "--baseline-dir", str(tmp_path))
    path = tmp_path / "sm90a.json"
    registers = json.loads(path.read_text())["variants"][NAME]["registers"]
    path.write_text(path.read_text().replace(f'"registers": {registers}', f'"registers": {registers - 1}'))
    worse = run_verify(built, "--static", "--baseline-dir", str(tmp_path))
    again = run_verify(built, "--update-baseline", "--baseline-dir", str(tmp_path))

    assert f"baseline: {NAME}: new" in updated.stdout
    assert worse.returncode == 10
    assert f"{NAME}: static: worse than the baseline: registers {registers - 1} -> {registers}" in worse.stderr
    assert "fa4build verify --static --update-baseline" in worse.stderr
    assert again.returncode == 0
    assert f"baseline: {NAME}: registers {registers - 1} -> {registers}" in again.stdout


def test_a_kernel_that_computes_something_else_fails_and_loses_its_evidence(built, tmp_path):
    """The first product of Q and K takes its operands the wrong way round."""
    ptx = Cache(built).read(entry_in(built), "ptx").decode()
    swapped, count = re.subn(r"(wgmma\.mma_async[^;]*}), (%rd\d+), (%rd\d+),", r"\1, \3, \2,", ptx, count=1)
    assert count == 1
    root = with_other(built, tmp_path / "cache", ptx=swapped.encode())
    done = run_verify(root, "--simulate")

    assert done.returncode == 10
    assert f"failed: {NAME}: simulated: case one-query (b1 q1 k200 h1/1, seed 1): eager schedule: " in done.stderr
    assert "at (batch, query, head, column)" in done.stderr
    assert re.match(r"1 variants: simulated 1 failed in", done.stdout)
    assert read_record(root, "simulated", subject_of(entry_in(root))) is None


def test_a_plan_of_another_kernel_fails_before_anything_runs(built, tmp_path):
    """One parameter is missing."""
    plan = json.loads(Cache(built).read(entry_in(built), "plan"))
    plan["launches"][0]["params"].pop()
    plan["vectors"] = []
    text = json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()
    done = run_verify(with_other(built, tmp_path / "cache", plan=text), "--static")

    assert done.returncode == 10
    assert "V1: the plan has" in done.stderr


def test_a_truncated_cubin_fails_with_what_is_wrong(built, tmp_path):
    """Half of it."""
    cubin = Cache(built).read(entry_in(built), "cubin")
    done = run_verify(with_other(built, tmp_path / "cache", cubin=cubin[: len(cubin) // 2]), "--static")

    assert done.returncode == 10
    assert f"failed: {NAME}: static: cubin of {len(cubin) // 2} bytes" in done.stderr


def test_a_record_of_this_very_cubin_is_kept(built, tmp_path):
    """And told in JSON where."""
    digest = entry_in(built).objects["cubin"].sha256
    row = {"id": NAME, "cubin_sha256": digest, "passed": True, "cases": 40, "worst_ratio": 0.3, "failures": []}
    header = {"schema": 1, "date": "2026-11-29T18:00:00Z", "device": "NVIDIA H200", "capability": "sm_90a"}
    record = tmp_path / "record.json"
    record.write_text(json.dumps({**header, "driver": "580.95", "torch": "2.11.0", "variants": [row]}))
    options = ("--device", str(record), "--evidence-dir", str(tmp_path / "evidence"), "--cache-dir", str(built))
    done = subprocess.run(
        [sys.executable, "-m", "fa4build.cli", "verify", *options, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    kept = json.loads(done.stdout)

    assert done.returncode == 0, done.stderr
    assert kept["path"] == str(tmp_path / "evidence/sm90a/nvidia-h200-20261129T180000Z.json")
    assert kept["proven"] == [NAME]
    assert silicon_records([tmp_path / "evidence"])[digest]["cases"] == 40


def test_a_record_takes_no_glob(tmp_path):
    """It is checked whole."""
    record = tmp_path / "record.json"
    record.write_text("{}")
    done = run_verify(tmp_path / "cache", "--device", str(record))

    assert done.returncode == 2
    assert "--device imports the whole record" in done.stderr
