"""Contract of the README's figures and first screen.

Every row of the comparison is shown, the worst first, with the values of the committed record. What has never run on
hardware is said on the first screen, and so is how to use it in torch and in transformers.
"""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
RECORD = json.loads((ROOT / "benchmarks" / "comparison_h200.json").read_text(encoding="utf-8"))
OTHERS = ("flash_attn_4", "cudnn", "fa2")
FIRST_SCREEN = 40  # lines
_ROW = re.compile(r"^\| head_dim (\d+) (causal|full), seqlen (\d+)k \| (.*) \|$", re.MULTILINE)


def shown(direction: str) -> list[tuple[int, bool, int, list[str]]]:
    """(head_dim, causal, seqlen, cells) of the README's table, in its order."""
    section = TEXT.partition(f"| {direction} | ours |")[2].partition("\n\n")[0]
    return [(int(d), m == "causal", 1024 * int(k), cells.split(" | ")) for d, m, k, cells in _ROW.findall(section)]


def ratio(row: dict[str, float]) -> float:
    """Ours over the best of the others."""
    return row["fa4_kernels"] / max(row[name] for name in OTHERS)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_row_of_the_comparison_is_shown_the_worst_first(direction):
    """As the record has them, rounded; no row is left out."""
    rows = sorted(RECORD[f"{direction}_tflops"], key=ratio)
    expected = [
        (
            row["head_dim"],
            row["causal"],
            row["seqlen"],
            [*(f"{row[name]:.0f}" for name in ("fa4_kernels", *OTHERS)), f"{ratio(row):.2f}"],
        )
        for row in rows
    ]

    assert expected == shown(direction)


def test_decoding_is_shown_as_recorded():
    """A share of the memory bandwidth for each layout, batch and number of query tokens, the worst batch first."""
    shares = {
        (row["layout"], row["batch"], row["rows"]): f"{100 * row['share']:.0f} %"
        for row in RECORD["decoding"]
        if not row["num_splits"]
    }
    lines = re.findall(r"^\| (varlen|paged)(?: \(64\))?, batch (\d+) \| (.*) \|$", TEXT, re.MULTILINE)
    found = {
        (layout, int(batch), rows): share
        for layout, batch, cells in lines
        for rows, share in zip((1, 2, 4, 8), cells.split(" | "), strict=True)
    }

    assert shares == found
    assert ["1", "1", "8", "8", "32", "32"] == [batch for _, batch, _ in lines]


def test_the_first_screen_says_what_never_ran_on_hardware_and_how_to_use_it():
    """Before anything else: a reader may stop there."""
    screen = "\n".join(TEXT.splitlines()[:FIRST_SCREEN])

    assert "never run on hardware" in screen
    assert "sm_100a or sm_103a" in screen
    assert 'fa4_kernels.provide("torch")' in screen
    assert 'attn_implementation="fa4_kernels"' in screen
