"""The page: one HTML file that needs no network, follows the reader's light or dark theme, and prints."""

from collections.abc import Callable, Sequence
from pathlib import Path

from fa4build.files import write_atomically
from fa4build.report.changes import Change
from fa4build.report.collect import ReportData, VariantRow
from fa4build.report.grid import SIGNS, STAGES, grids, stage_of
from fa4build.report.model_plots import model_plots
from fa4build.report.plots import benchmark_plots, build_plots, comparison_plots

TEMPLATES = Path(__file__).parent / "templates"
OPEN_ROWS = 100
"""Up to so many kernels are listed when the page opens; more are folded, by target and op."""

SHOWN_RATIOS = 12
"""Slowest rows that are shown at once; the others are folded."""

MOST_LIMITS = 20
REGISTERS_LIMIT = 255

STAGE_WORDS = {
    "implemented": "can be compiled, is not",
    "outdated": "compiled from other sources",
    "simulated-elsewhere": "not compiled here; simulated elsewhere (committed record)",
    "silicon-elsewhere": "not compiled here; ran on a GPU elsewhere (committed record)",
    "compiled": "compiled, not tested",
    "static": "binary checked",
    "simulated": "correct in the simulator",
    "silicon": "correct on a GPU",
}


def render_page(
    data: ReportData, tell: Callable[[str], None] = lambda _: None, differences: Sequence[Change] | None = None
) -> str:
    """The whole page.

    Args:
        tell: gets a line before each step that takes long.
        differences: from an earlier report; None where there is none to compare with.

    Raises: Fa4BuildError when matplotlib is not installed.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    tables: dict[str, list[VariantRow]] = {}
    for row in data.variants:
        tables.setdefault(f"{row.op}, {row.arch}", []).append(row)
    current = [row for row in data.variants if row.state == "compiled"]
    tiles = [("kernels implemented", len(data.variants)), ("compiled here", len(current))]
    tiles += [
        (words, sum(getattr(line, level) for line in data.coverage))
        for level, words in (("static", "checked"), ("simulated", "simulated"), ("silicon", "run on a GPU"))
    ]
    tiles.append(("not compiled here, verified elsewhere", sum(line.elsewhere for line in data.coverage)))
    tell("drawing")
    return environment.get_template("report.html.j2").render(
        data=data,
        differences=differences,
        limits=near_limits(data),
        shown_ratios=SHOWN_RATIOS,
        tiles=tiles,
        grids=tuple(grids(data.variants)),
        has_compiled={f"{row.op}, {row.arch}" for row in current},
        stages=[(stage, SIGNS[stage], STAGE_WORDS[stage]) for stage in STAGES],
        stage_of=stage_of,
        tables=tuple(tables.items()),
        open_rows=OPEN_ROWS,
        plots={
            "build": build_plots(data),
            "timing": comparison_plots(data.comparisons),
            "benchmarks": benchmark_plots(data.benchmarks),
            "models": model_plots(),
        },
    )


def near_limits(data: ReportData) -> tuple[VariantRow, ...]:
    """Compiled kernels that spill, or take the most registers a thread can have: the first to break by a change."""
    rows = [row for row in data.compiled() if row.facts.get("spill_bytes") or row.facts["registers"] >= REGISTERS_LIMIT]
    worst = sorted(rows, key=lambda row: (-row.facts.get("spill_bytes", 0), -row.facts["registers"], row.id))
    return tuple(worst[:MOST_LIMITS])


def write_report(
    data: ReportData,
    path: Path,
    tell: Callable[[str], None] = lambda _: None,
    differences: Sequence[Change] | None = None,
) -> int:
    """Write the page whole or not at all. Returns its size in bytes."""
    content = render_page(data, tell, differences).encode("utf-8")
    write_atomically(path, content)
    return len(content)
