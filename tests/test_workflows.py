"""Contract of the workflows in .github.

No action by a name that can be moved to other code: each is a commit. No permission that a job does not name. Jobs run
the Makefile's targets, so that a developer can run what they run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_commits(path: Path) -> None:
    """40 hexadecimal digits, with the version as a comment for people; or a workflow of this repository."""
    uses = re.findall(r"uses:\s*(.*)", path.read_text())
    pinned = r"[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*|\./\.github/workflows/[\w-]+\.yml"

    assert uses
    assert [line for line in uses if not re.fullmatch(pinned, line)] == []


def test_one_action_has_one_version() -> None:
    """Everywhere the same commit, so that an update misses none."""
    found: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for name, commit in re.findall(r"uses:\s*([\w./-]+)@([0-9a-f]{40})", path.read_text()):
            found.setdefault(name, set()).add(commit)

    assert {name: commits for name, commits in found.items() if len(commits) > 1} == {}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_nothing_is_permitted_unless_a_job_asks(path: Path) -> None:
    """The workflow grants nothing. Only a release writes, and only identity tokens and attestations."""
    text = path.read_text()
    writes = set(re.findall(r"^\s+([\w-]+): write\b", text, flags=re.MULTILINE))

    assert "\npermissions: {}\n" in text
    assert writes == ({"attestations", "id-token"} if path.name == "release.yml" else set())


def test_publishing_needs_a_protected_environment_and_no_token() -> None:
    """Each job with an identity token for the index names the environment; no secret is read anywhere."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()

    assert text.count("gh-action-pypi-publish@") == text.count("environment: pypi") == 2
    assert [path.name for path in WORKFLOWS if "secrets." in path.read_text()] == []
    assert text.index("publish-kernels:") < text.index("needs: publish-kernels")


def test_workflows_follow_their_schema() -> None:
    """The schema of GitHub workflows that check-jsonschema brings; it needs no network."""
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, *map(str, WORKFLOWS)], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stdout


RUNTIME_PROJECT = ROOT / "packaging" / "fa4-kernels"


def test_every_interpreter_that_cibuildwheel_knows_is_served() -> None:
    """By one wheel a machine: cp310-abi3 for each with an interpreter lock, and its own for each free-threaded one.
    The workflow builds a wheel for every one of them, and for 3.13t, which cibuildwheel no longer knows."""
    pytest.importorskip("cibuildwheel")
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux"]
    found = []
    for machine in ("x86_64", "aarch64"):
        arguments = [*command, "--archs", machine, str(RUNTIME_PROJECT)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found += done.stdout.split()
    served = {name: _serving(name) for name in found}
    hosts = (ROOT / ".github" / "workflows" / "wheels.yml").read_text().partition("HOSTS: >-")[2].partition("\n\n")[0]

    locked = {f"cp3{minor}-manylinux_{machine}" for minor in range(10, 15) for machine in ("x86_64", "aarch64")}
    assert locked <= served.keys()
    assert "cp314t-manylinux_aarch64" in served
    assert {name: wheels for name, wheels in served.items() if len(wheels) != 1} == {}
    assert {wheel for wheels in served.values() for wheel in wheels} <= set(hosts.split())
    assert {"x86_64-cp313t", "aarch64-cp313t"} <= set(hosts.split())


def _serving(identifier: str) -> list[str]:
    """The platforms whose wheel an interpreter (`cp314t-manylinux_x86_64`) of its machine installs."""
    from packaging.tags import cpython_tags, parse_tag

    from fa4build.shipping.launcher_build import FREE_THREADED_PLATFORMS, PLATFORMS

    python, _, platform = identifier.partition("-")
    machine = platform.removeprefix("manylinux_")
    minor = int(re.fullmatch(r"cp3(\d+)t?", python)[1])
    tags = set(cpython_tags((3, minor), abis=[python], platforms=[f"manylinux_2_28_{machine}"]))
    known = (*PLATFORMS, *FREE_THREADED_PLATFORMS)
    return [platform.short_name for platform in known if not tags.isdisjoint(parse_tag(platform.wheel_tag))]


def test_the_project_that_cibuildwheel_builds_gives_the_wheel_of_the_bundle(tmp_path: Path) -> None:
    """Equal bytes, whether pip asks the project on this machine or fa4build makes it for this machine from anywhere."""
    from fa4build.shipping.backend import host_platform
    from fa4build.shipping.index import file_sha256
    from fa4build.shipping.wheel import write_runtime_wheel
    from tests.artifacts import COMPILER_CACHE

    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*pip, "--wheel-dir", str(tmp_path / "pip"), str(RUNTIME_PROJECT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = (tmp_path / "pip").iterdir()
    expected = write_runtime_wheel(host_platform(), tmp_path / "own", compiler_cache=COMPILER_CACHE).path

    assert built.name == expected.name
    assert file_sha256(built) == file_sha256(expected)


def test_jobs_call_targets_that_exist() -> None:
    """Every `make` in a workflow or in .ci/run names a target of the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    texts = [path.read_text() for path in (*WORKFLOWS, ROOT / ".ci" / "run")]
    called = {name for text in texts for name in re.findall(r"\bmake ([\w-]+)", text)}

    assert {"lint", "test", "test-slow", "matrix"} <= called
    assert called <= targets
