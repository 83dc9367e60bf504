"""Contract of `fa4build matrix` as a whole, with the real kernels and the real compiler.

A second run compiles nothing. Killing a build loses nothing that was finished. Two builds at once share the work. Two
checkouts at two places give the same bytes. A kernel that does not compile fails alone.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fa4build.compiling.cubin import read_cubin
from fa4build.plan import plan_from_json
from fa4build.store.cache import Cache

pytestmark = pytest.mark.dsl

ROOT = Path(__file__).resolve().parents[2]
PAIR = ("fwd-sm90a-bf16-hd64-full", "fwd-sm90a-fp16-hd64-full")
THREE = (*PAIR, "fwd-sm90a-bf16-hd128-full")
TIMEOUT_S = 300


def checkout(directory: Path, origin: Path = ROOT, *, kernels: str = "kernels_src") -> Path:
    """A copy of builder and kernels at another place. Installed, the kernels lie in `fa4build/kernels_src`."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(origin / "fa4build", directory / "fa4build", ignore=ignored)
    shutil.copytree(origin / "kernels_src", directory / kernels, ignore=ignored)
    return directory


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout as it is now: keys must not change while somebody goes on editing."""
    return checkout(tmp_path_factory.mktemp("source") / "checkout")


def command(cache: Path, ids: tuple[str, ...], *options: str) -> list[str]:
    """A build of these variants into a cache, with JSON on stdout."""
    selected = [word for id_ in ids for word in ("--select", id_)]
    return [sys.executable, "-m", "fa4build.cli", "matrix", "--cache-dir", str(cache), "--json", *selected, *options]


def environment() -> dict[str, str]:
    """This process's, without a cache of the user's."""
    return {name: value for name, value in os.environ.items() if name != "FA4BUILD_CACHE_DIR"}


def matrix(root: Path, cache: Path, ids: tuple[str, ...], *options: str) -> tuple[int, dict, str]:
    """Exit code, document and messages of a build."""
    done = subprocess.run(
        command(cache, ids, *options),
        cwd=root,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A cache with two variants, and the report of the build that filled it."""
    cache = tmp_path_factory.mktemp("matrix") / "cache"
    code, report, messages = matrix(source, cache, PAIR)
    assert code == 0, messages
    return cache, report


def test_a_cold_build_compiles_every_variant(built):
    """With what was read back from each cubin; the work directories are gone."""
    cache, report = built
    assert report["counts"] == {"cached": 0, "compiled": 2, "failed": 0}
    assert [row["id"] for row in report["variants"]] == list(PAIR)
    assert {row["facts"]["target"] for row in report["variants"]} == {"sm_90a"}
    assert {row["facts"]["spill_bytes"] for row in report["variants"]} == {0}
    assert list((cache / "work").iterdir()) == []


def test_the_cache_holds_cubin_ptx_and_plan_of_one_kernel(built):
    """Entry, target and thread block agree in all three."""
    cache = Cache(built[0])
    for entry in cache.entries():
        (symbol,) = entry.facts["symbols"]
        plan = plan_from_json(cache.read(entry, "plan").decode())
        cubin = read_cubin(cache.read(entry, "cubin"))
        ptx = cache.read(entry, "ptx").decode()

        assert symbol == entry.name.replace("-", "_") + "_0"
        assert [launch.kernel for launch in plan.launches] == [symbol] == [kernel.symbol for kernel in cubin.kernels]
        assert f".visible .entry {symbol}(" in ptx
        assert f".reqntid {plan.launches[0].block[0]}" in ptx
    assert cache.verify() == ()


def test_a_second_build_compiles_nothing(source, built):
    """Proven by --assert-cached as well as by the report."""
    cache, first = built
    code, again, _ = matrix(source, cache, PAIR)

    assert (code, again["counts"]) == (0, {"cached": 2, "compiled": 0, "failed": 0})
    assert [row["key"] for row in again["variants"]] == [row["key"] for row in first["variants"]]
    assert matrix(source, cache, PAIR, "--assert-cached")[0] == 0


@pytest.mark.parametrize(
    ("signal_", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)], ids=["kill", "ctrl-c"]
)
def test_a_stopped_build_loses_nothing_that_was_finished(source, tmp_path, signal_, code):
    """Stopped after the first variant; the next build compiles the others only, and all is whole."""
    cache = tmp_path / "cache"
    process = subprocess.Popen(
        command(cache, THREE, "--jobs", "1"),
        cwd=source,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that runs in the background of a shell has SIGINT ignored, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    first = process.stderr.readline()
    process.send_signal(signal_)
    assert process.wait(timeout=TIMEOUT_S) == code
    process.stderr.close()
    finished = len(Cache(cache).entries())
    code, report, messages = matrix(source, cache, THREE)

    assert first.startswith("[1/3] compiled")
    assert 1 <= finished < 3
    assert code == 0, messages
    assert report["counts"] == {"cached": finished, "compiled": 3 - finished, "failed": 0}
    assert Cache(cache).verify() == ()


def test_two_builds_at_once_share_the_work(source, tmp_path):
    """Every variant is compiled by one of them and taken from the cache by the other."""
    cache = tmp_path / "cache"
    processes = [
        subprocess.Popen(
            command(cache, PAIR, "--jobs", "1"),
            cwd=source,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(2)
    ]
    reports = [json.loads(process.communicate(timeout=TIMEOUT_S)[0]) for process in processes]

    assert [process.returncode for process in processes] == [0, 0]
    for id_ in PAIR:
        statuses = sorted(row["status"] for report in reports for row in report["variants"] if row["id"] == id_)
        assert statuses == ["cached", "compiled"]


def shipped(cache: Path) -> dict[str, tuple[str, str, str]]:
    """Digests of cubin, PTX and plan by variant."""
    names = ("cubin", "ptx", "plan")
    return {entry.name: tuple(entry.objects[name].sha256 for name in names) for entry in Cache(cache).entries()}


def test_an_installation_elsewhere_gives_the_same_keys_and_the_same_bytes(source, built, tmp_path):
    """So a cache can be shared between machines, and wheels can be reproduced. Installed, and under a longer path."""
    cache, first = built
    root = checkout(tmp_path / "a place with a rather longer name" / "lib", source, kernels="fa4build/kernels_src")
    code, report, messages = matrix(root, tmp_path / "cache", PAIR)

    assert code == 0, messages
    assert [row["key"] for row in report["variants"]] == [row["key"] for row in first["variants"]]
    assert shipped(tmp_path / "cache") == shipped(cache)


def test_a_kernel_that_does_not_compile_fails_alone_and_its_source_is_kept(source, tmp_path):
    """One data type breaks in the kernel file; the other is built. Message, log and rendered module stay."""
    root = checkout(tmp_path / "checkout", source)
    kernel = root / "kernels_src" / "forward/sm90.py"
    guard = '\nif "fp16" in __import__("os").getcwd():\n    raise ValueError("no fp16 today")\n'
    kernel.write_text(kernel.read_text() + guard)
    code, report, messages = matrix(root, tmp_path / "cache", PAIR)
    outcomes = {row["id"]: row for row in report["variants"]}
    (work_dir,) = (tmp_path / "cache" / "work").iterdir()

    assert code == 5
    assert {name: row["status"] for name, row in outcomes.items()} == {PAIR[0]: "compiled", PAIR[1]: "failed"}
    assert f"{PAIR[1]}: ValueError: no fp16 today" in outcomes[PAIR[1]]["message"]
    assert str(work_dir / "log.txt") in messages
    assert (work_dir / "fwd_sm90a_fp16_hd64_full.py").is_file()
