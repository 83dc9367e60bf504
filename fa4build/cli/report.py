"""`fa4build report`: one HTML page about everything built and proven."""

import dataclasses
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
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The JSON of an earlier report: show what changed since.",
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
    against: Path | None,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Write one self-contained HTML page: coverage, evidence, what is slow, what changed, sizes, rooflines, numerics.

    The page is about every implemented kernel, or about those of a selection or of another family.

    It needs no network, follows light and dark themes, and prints. --json prints the contents as data; --out is
    optional then. The page needs the extra `report`: pip install 'fa4build[report]'.

    \b
    Examples:
      fa4build report --out report.html
      fa4build report --out report.html --pack dist/fa4_kernels_sm90a-0.1.0-py3-none-any.whl
      fa4build report --json > report.json
      fa4build report --out report.html --against report.json    what changed since
      fa4build report --out serving.html --spec serving.toml    only the kernels of a specification
    """
    from fa4build.cli.commit import commit
    from fa4build.families.registry import DEFAULT, family_named
    from fa4build.report.changes import changes, read_earlier
    from fa4build.report.collect import collect
    from fa4build.report.page import write_report
    from fa4build.shipping.release import committed_evidence

    evidence_dirs = evidence_dirs or committed_evidence()
    if out_file is None and not as_json:
        raise click.UsageError("--out FILE.html is needed; only with --json can it be left out.")
    start = time.monotonic()
    earlier = None if against is None else read_earlier(against)
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
        tell=note,
        commit=(commit() or "")[:12],
        about=_about(wanted, family.name, is_all=is_all),
    )
    found = None if earlier is None else changes(data, earlier)
    if out_file is not None:
        size = write_report(data, out_file, note, found)
        note(f"{out_file}: {human_bytes(size)}, {time.monotonic() - start:.1f} s")
    if as_json:
        rows = {} if found is None else {"changes": [dataclasses.asdict(change) for change in found]}
        print_json({**data.as_dict(), **rows})


def _about(wanted: "Selection", family: str, *, is_all: bool) -> str:
    """Which kernels the page is about, in words."""
    if is_all:
        return "every implemented kernel"
    named = [
        *wanted.arches,
        *wanted.globs,
        *(getattr(spec, "path", None) or Path(str(spec)).name for spec in wanted.specs),
    ]
    return f"{', '.join(named) or 'the default matrix'}" + ("" if family == "fa4" else f" of {family}")
