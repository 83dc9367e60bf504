"""Options and fixtures shared by all tests."""

import difflib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.built import SHARED_FOLDER

GOLDEN_DIR = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the code makes now")


def pytest_configure(config: pytest.Config) -> None:
    """One folder a run for the kernels that its processes share (tests/built.py); workers inherit its name."""
    if not hasattr(config, "workerinput"):
        os.environ[SHARED_FOLDER] = tempfile.mkdtemp(prefix="fa4build-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """The folder goes with the run."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(SHARED_FOLDER), ignore_errors=True)


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the file of this name in tests/golden; `--update-golden` writes it and prints the change."""
    update = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        path = GOLDEN_DIR / name
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        if text == expected:
            return
        lines = difflib.unified_diff(expected.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm="")
        difference = "\n".join(lines)
        if not update:
            pytest.fail(f"{name} changed; if that is meant, run pytest with --update-golden.\n{difference}")
        path.write_text(text, encoding="utf-8")
        print(difference)

    return check
