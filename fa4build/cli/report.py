"""`fa4build report`: one HTML page about everything built and proven."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fa4build.cli.common import (
    cache_dir_option,
    family_option,
    human_bytes,
    json_option,
    note,
    open_cache,
    print_json,
    selection_options,
)

if TYPE_CHECKING:
    from fa4build.matrix.selection import Selection

EXISTING = click.Path(exists=True, path_type=Path)


@click.command("report")
@selection_options
@family_option
@click.option("--out", "out_file", type=click.Path(dir_okay=False, path_type=Path), help="The file for the page.")
@click.option("--pack", "packs", multiple=True, type=EXISTING, help="A wheel or pack of kernels. Repeatable.")
@click.option(
    "--evidence",
    "evidence_dirs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A directory of records. Repeatable. Default: the records that belong to this fa4build.",
)
@click.option(
    "--benchmarks",
    "benchmark_dirs",
    multiple=True,
    type=click.Path(path_type=Path),
    default=("benchmarks",),
    show_default=True,
    help="A directory of measurements (JSON). Repeatable.",
)
@click.option(
    "--timelines",
    "timeline_dirs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A directory of drawings of the timing model (SVG). Repeatable.",
)
@cache_dir_option
@json_option
def command(
    wanted: "Selection",
    family_name: str,
    out_file: Path | None,
    packs: tuple[Path, ...],
    evidence_dirs: tuple[Path, ...],
    benchmark_dirs: tuple[Path, ...],
    timeline_dirs: tuple[Path, ...],
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Write one self-contained HTML page: coverage, sizes, registers, proof, benchmarks, rooflines, numerics.

    It is about every kernel that is written, or about those of a selection or of another family.

    It needs no network, follows light and dark themes, and prints. With --json what it shows is printed as data; then
    --out may be left out. Needs the extra `report`: pip install 'fa4build[report]'.

    \b
    Examples:
      fa4build report --out report.html
      fa4build report --out report.html --pack dist/fa4_kernels_sm90a-0.1.0-py3-none-any.whl
      fa4build report --json
      fa4build report --out serving.html --spec serving.toml    the kernels of a specification alone
    """
    from fa4build.families.registry import DEFAULT, family_named
    from fa4build.report.collect import collect
    from fa4build.report.page import write_report
    from fa4build.shipping.release import committed_evidence

    evidence_dirs = evidence_dirs or committed_evidence()
    if out_file is None and not as_json:
        raise click.UsageError("--out FILE.html says where the page goes; with --json it may be left out.")
    start = time.monotonic()
    family = family_named(family_name)
    is_all = family.name == DEFAULT and wanted.names_nothing
    measured = [path for folder in (*benchmark_dirs, *evidence_dirs) for path in sorted(folder.rglob("*.json"))]
    data = collect(
        open_cache(cache_dir),
        packs=packs,
        evidence_dirs=evidence_dirs,
        benchmarks=measured,
        timelines=timeline_dirs,
        kernels=None if is_all else family.expand(wanted),
        family=family,
    )
    if out_file is not None:
        size = write_report(data, out_file)
        note(f"{out_file}: {human_bytes(size)}, {time.monotonic() - start:.1f} s")
    if as_json:
        print_json(data.as_dict())
