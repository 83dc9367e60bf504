"""The page: one HTML file that needs no network, follows the reader's light or dark theme, and prints."""

from pathlib import Path

from fa4build.files import write_atomically
from fa4build.report.collect import ReportData, VariantRow
from fa4build.report.grid import SIGNS, STAGES, grids, stage_of
from fa4build.report.model_plots import model_plots
from fa4build.report.plots import benchmark_plots, build_plots, comparison_plots

TEMPLATES = Path(__file__).parent / "templates"
OPEN_ROWS = 100
"""Up to so many kernels are listed when the page opens; more are folded, by target and op."""

STAGE_WORDS = {
    "written": "has a kernel, not compiled",
    "outdated": "compiled from other sources than now",
    "compiled": "compiled, nothing proven",
    "static": "binary checked",
    "simulated": "runs right in the simulator",
    "silicon": "runs right on a GPU",
}


def render_page(data: ReportData) -> str:
    """The whole page.

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
    tiles = [("kernels written", len(data.variants)), ("compiled", len(current))]
    tiles += [
        (words, sum(getattr(line, level) for line in data.coverage))
        for level, words in (("static", "checked"), ("simulated", "simulated"), ("silicon", "run on a GPU"))
    ]
    return environment.get_template("report.html.j2").render(
        data=data,
        tiles=tiles,
        grids=tuple(grids(data.variants)),
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


def write_report(data: ReportData, path: Path) -> int:
    """Write the page whole or not at all. Returns its size in bytes."""
    content = render_page(data).encode("utf-8")
    write_atomically(path, content)
    return len(content)
