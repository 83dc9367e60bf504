"""Contract of the workflows in .github.

No action by a name that can be moved to other code: each is a commit. No permission that a job does not name. Jobs run
the Makefile's targets, so that a developer can run what they run.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_commits(path: Path) -> None:
    """40 hexadecimal digits, with the version as a comment for people."""
    uses = re.findall(r"uses:\s*(.*)", path.read_text())

    assert uses
    assert [line for line in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*", line)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_nothing_is_permitted_unless_a_job_asks(path: Path) -> None:
    """The workflow grants nothing; no job may write."""
    text = path.read_text()

    assert "\npermissions: {}\n" in text
    assert re.findall(r"^\s+[\w-]+: write\b", text, flags=re.MULTILINE) == []


def test_jobs_call_targets_that_exist() -> None:
    """Every `make` in a workflow or in .ci/run names a target of the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    texts = [path.read_text() for path in (*WORKFLOWS, ROOT / ".ci" / "run")]
    called = {name for text in texts for name in re.findall(r"\bmake ([\w-]+)", text)}

    assert {"lint", "test", "test-slow", "matrix"} <= called
    assert called <= targets
