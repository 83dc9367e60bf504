"""Contract: what the simulator's modules cite stands in docs/ptx-semantics.md, and so does every rule they report."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ptx-semantics.md").read_text()
SOURCES = [*(ROOT / "fa4build").rglob("*.py"), *(ROOT / "tests" / "simulate").rglob("*.py")]
_CITED = re.compile(r"ptx-semantics\.md ((?:\d+(?:\.\d+)?)(?:(?:, | and | to )\d+(?:\.\d+)?)*)")
_HEADING = re.compile(r"^#+ (\d+(?:\.\d+)?)\.? ", re.MULTILINE)
_RULE = re.compile(r'"(R[1-9]\d*(?:w|-\w+)?)[" ]')


def citations() -> list[tuple[str, str]]:
    """(file, section) of every citation."""
    found = []
    for path in SOURCES:
        for numbers in _CITED.findall(path.read_text()):
            found += [(path.name, number) for number in re.findall(r"\d+(?:\.\d+)?", numbers)]
    return found


@pytest.mark.parametrize(("file", "section"), sorted(set(citations())))
def test_a_cited_section_exists(file, section):
    """A reader of the module finds what it rests on."""
    assert section in _HEADING.findall(PAGE), file


def test_the_simulator_cites_the_page():
    """The test above has something to test."""
    assert len(citations()) > 40


def test_every_rule_that_is_reported_is_explained():
    """By its name, in bold or as the first cell of a row of the table."""
    reported = {
        rule for path in (ROOT / "fa4build" / "simulate").rglob("*.py") for rule in _RULE.findall(path.read_text())
    }

    assert {"R1", "R5-exit", "R7w", "R15-after"} <= reported
    assert [rule for rule in sorted(reported) if f"| {rule} |" not in PAGE and f"**{rule}**" not in PAGE] == []
