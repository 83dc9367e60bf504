"""Contract of docs/guide/add-a-value.md: its diff applies, and what it adds compiles and computes attention.

The diff is applied to a copy. Without the tuning row that it adds, the error says which table lacks a row.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guide" / "add-a-value.md").read_text(encoding="utf-8")
DIFF = re.search(r"<!-- file: hd80\.diff -->\n```diff\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
NAME = "fwd-sm90a-bf16-hd80-full"


def patched(folder: Path, diff: str) -> Path:
    """A copy of the sources with a diff applied."""
    for name in ("fa4build", "kernels_src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "hd80.diff").write_text(diff, encoding="utf-8")
    subprocess.run(["git", "apply", "hd80.diff"], cwd=folder, check=True, timeout=60)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of the copy."""
    return subprocess.run(
        [sys.executable, "-m", "fa4build", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "FA4BUILD_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def test_the_diff_applies_and_adds_six_variants(tmp_path):
    """Two dtypes and three masks; nothing else of head dim 80."""
    assert DIFF is not None
    folder = patched(tmp_path, DIFF[1])
    done = run(folder, "list", "--select", "*-hd80-*")

    assert "6 variants: 6 implemented" in done.stdout, done.stderr
    assert NAME in done.stdout


def test_without_a_tuning_row_the_error_names_the_table(tmp_path):
    """Not a traceback: the step that is easy to forget."""
    assert DIFF is not None
    parts = re.split(r"(?m)^(?=--- a/)", DIFF[1])
    folder = patched(tmp_path, "".join(part for part in parts if "matrix/tuning.py" not in part))
    done = run(folder, "explain", NAME)

    assert done.returncode == 2
    assert "_SM90_FORWARD in fa4build/matrix/tuning.py has no row for hd80 and mask full" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.dsl
@pytest.mark.slow
def test_what_the_diff_adds_compiles_and_passes_the_simulator(tmp_path):
    """All acceptance cases of the new head dim."""
    assert DIFF is not None
    folder = patched(tmp_path, DIFF[1])
    built = run(folder, "matrix", "--select", NAME)
    verified = run(folder, "verify", "--simulate", NAME)

    assert "1 compiled, 0 failed" in built.stdout, built.stderr
    assert "simulated 1 passed" in verified.stdout, verified.stderr
