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


def test_one_launcher_wheel_serves_what_cibuildwheel_would_build_for(tmp_path: Path) -> None:
    """Every CPython of 3.10 or later with a GIL on both hosts accepts cp310-abi3-manylinux_2_28; free-threaded ones,
    whose ABI has no abi3 before 3.15, do not: pip refuses there instead of installing what crashes."""
    pytest.importorskip("cibuildwheel")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\nrequires-python = ">=3.10"\n')
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux"]
    environment = {**os.environ, "CIBW_BUILD": "cp*-manylinux_*"}
    found = []
    for machine in ("x86_64", "aarch64"):
        arguments = [*command, "--archs", machine, str(tmp_path)]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found += done.stdout.split()
    served = {name: _is_served(name) for name in found}

    assert {f"cp3{minor}-manylinux_{machine}" for minor in range(10, 15) for machine in ("x86_64", "aarch64")} <= set(
        served
    )
    assert [name for name, is_served in served.items() if is_served == ("t-" in name)] == []


def _is_served(identifier: str) -> bool:
    """Whether an interpreter (`cp313t-manylinux_x86_64`) installs the launcher wheel for its machine."""
    from packaging.tags import Tag, cpython_tags

    python, _, platform = identifier.partition("-")
    machine = platform.removeprefix("manylinux_")
    minor = int(re.fullmatch(r"cp3(\d+)t?", python)[1])
    tags = cpython_tags((3, minor), abis=[python], platforms=[f"manylinux_2_28_{machine}"])
    return Tag("cp310", "abi3", f"manylinux_2_28_{machine}") in set(tags)


def test_jobs_call_targets_that_exist() -> None:
    """Every `make` in a workflow or in .ci/run names a target of the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    texts = [path.read_text() for path in (*WORKFLOWS, ROOT / ".ci" / "run")]
    called = {name for text in texts for name in re.findall(r"\bmake ([\w-]+)", text)}

    assert {"lint", "test", "test-slow", "matrix"} <= called
    assert called <= targets
