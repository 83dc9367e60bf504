"""Options and fixtures shared by all tests."""

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN_DIR = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the code makes now")


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
