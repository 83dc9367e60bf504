"""Contract of the committed results: docs/mutation.md says what the files beside it say.

A file holds every mutant of a kernel. None of them is unexplained, and every reason is one that the code still gives.
"""

import json
from pathlib import Path

import pytest

from fa4build.verify.mutation.campaign import CRASHED, KILLED, SURVIVED, UNREACHED
from fa4build.verify.mutation.survivors import REASONS, reasons_for

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "mutation.md").read_text(encoding="utf-8")
FILES = sorted(path for path in (DOCS / "mutation").glob("*.json") if path.name != "coverage.json")


def outcomes(path: Path) -> dict:
    """A file."""
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_mutant_of_a_file_is_killed_or_has_the_reason_that_the_code_gives(path):
    """A reason that was withdrawn, or covers fewer mutants, leaves its rows open."""
    document = outcomes(path)
    left = [row for row in document["outcomes"] if row["status"] != KILLED]

    assert document["counts"] == {
        status: sum(row["status"] == status for row in document["outcomes"])
        for status in (KILLED, SURVIVED, UNREACHED, CRASHED)
    }
    assert document["counts"][CRASHED] == 0
    assert [row["by"] for row in left] == reasons_for(
        document["kernel"], [(row["opcode"], row["change"], row["status"]) for row in left]
    )
    assert all(row["by"] for row in document["outcomes"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_page_has_the_figures_of_a_file(path):
    """A row a kernel."""
    document = outcomes(path)
    counts = [document["counts"][status] for status in (KILLED, SURVIVED, UNREACHED)]
    figures = " | ".join(map(str, [document["operations"], document["mutants"], *counts]))
    kind = "" if document["every"] == 1 else f", every {document['every']}"

    assert f"| [{document['kernel']}](mutation/{document['kernel']}.json){kind} | {figures} |" in PAGE


def test_the_page_has_every_reason_that_is_used_with_its_argument():
    """And how many mutants it is for."""
    rows = [row for path in FILES for row in outcomes(path)["outcomes"] if row["status"] != KILLED]
    for reason in REASONS:
        number = sum(row["by"] == reason.name for row in rows)

        assert not number or f"| {reason.name} | {number} | {reason.text} |" in PAGE


def test_forwards_and_backwards_of_hopper_and_blackwell_are_among_the_kernels():
    """Packed and deterministic ones, and pairs of CTAs, too."""
    names = [path.stem for path in FILES]

    for part in ("fwd-sm90a-", "bwd-sm90a-", "fwd-sm100a-", "bwd-sm100a-", "-varlen", "-deterministic", "-2cta"):
        assert any(part in name for name in names), part


def test_the_page_has_the_figures_of_the_coverage():
    """A row a kernel; what is open is in the file."""
    for row in json.loads((DOCS / "mutation" / "coverage.json").read_text(encoding="utf-8"))["coverage"]:
        ways_back = row["allowed"].get("way back of a wait", 0)
        figures = [row["instructions"], row["instructions"] - row["unrun"], ways_back, len(row["open"])]

        assert f"| {row['kernel']} | {' | '.join(map(str, figures))} |" in PAGE
        assert row["unrun"] == sum(row["allowed"].values()) + len(row["open"])
