"""`fa4build matrix`: compile what is selected and not yet in the cache."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa4build.cli.common import (
    cache_dir_option,
    family_option,
    jobs_option,
    json_option,
    note,
    open_cache,
    print_json,
    remote_cache_options,
    selection_options,
    tell_left_out,
)

if TYPE_CHECKING:
    from fa4build.families.interface import Family
    from fa4build.matrix.selection import Selection
    from fa4build.pipeline import BuildReport, Event, Outcome
    from fa4build.store.cache import Cache


def _parse_shard(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, int]:
    if value is None:
        return 1, 1
    match = re.fullmatch(r"(\d+)/(\d+)", value)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise click.BadParameter(f"{value!r} is not a shard. Write I/N with 1 <= I <= N, e.g. 1/4.")
    return int(match[1]), int(match[2])


@click.command("matrix")
@selection_options
@family_option
@jobs_option
@cache_dir_option
@remote_cache_options
@click.option(
    "--from-misses",
    "misses",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file that FA4_KERNELS_RECORD wrote: build the kernels that calls did not find.",
)
@click.option(
    "--write-spec",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --from-misses: write a specification and compile nothing.",
)
@click.option("--dry-run", is_flag=True, help="Only print what is cached and what would be compiled.")
@click.option("--assert-cached", is_flag=True, help="Fail if anything is not in the cache.")
@click.option(
    "--shard", callback=_parse_shard, metavar="I/N", help="Compile only the I-th of N parts, for several machines."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=300.0,
    help="The time limit of one compile, in seconds.",
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="How often to retry a compile that was killed.",
)
@click.option("--fail-fast", is_flag=True, help="Start no more compiles after the first failure.")
@click.option(
    "--executor",
    type=click.Choice(("local", "dask")),
    default="local",
    show_default=True,
    help="Where compiles run; see docs/farm.md.",
)
@click.option("--scheduler", metavar="ADDRESS", help="With --executor dask: the scheduler, tcp://host:8786.")
@click.option(
    "--junit",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a JUnit report with one test case per variant.",
)
@click.option("--annotate", is_flag=True, help="Also print failures as GitHub Actions annotations.")
@click.option("--allow-spills", is_flag=True, help="Accept kernels that spill registers to memory.")
@json_option
def command(
    wanted: "Selection",
    family_name: str,
    jobs: int | None,
    cache_dir: Path | None,
    remote_cache: str | None,
    remote_cache_write: bool,
    misses: Path | None,
    write_spec: Path | None,
    dry_run: bool,
    assert_cached: bool,
    shard: tuple[int, int],
    timeout_s: float,
    retries: int,
    fail_fast: bool,
    executor: str,
    scheduler: str | None,
    junit: Path | None,
    annotate: bool,
    allow_spills: bool,
    as_json: bool,
) -> int:
    """Compile the variant matrix into the cache.

    Needs no GPU. A variant that is in the cache is not compiled again, so a build that was stopped or killed continues
    where it was. One failed variant does not stop the others; the exit code is that of the first failure.

    \b
    Examples:
      fa4build matrix --arch sm90                     the default matrix for Hopper
      fa4build matrix --select 'fwd-sm90a-*-hd128-causal'
      fa4build matrix --spec serving.toml --jobs 8
      fa4build matrix --model config.json --gpu H200 --page-size 16    the kernels of a model
      fa4build matrix --from-misses misses.jsonl      the kernels that calls did not find
      fa4build matrix --arch sm100 --shard 2/4        the second quarter, on this machine
      fa4build matrix --executor dask --scheduler tcp://build-1:8786   on the workers of a dask cluster
      fa4build matrix --assert-cached                 check that nothing is left to compile
      fa4build matrix --family flash-attn-4 --arch sm90    upstream's kernels
    """
    from fa4build.cli.build_reports import annotation_lines, junit_text
    from fa4build.compiling.toolchain import refuse_steering
    from fa4build.families.registry import family_named
    from fa4build.files import write_atomically

    refuse_steering(os.environ)
    if misses is not None:
        if wanted.globs or wanted.specs:
            raise click.UsageError("--from-misses selects what to build; leave out --select, --spec and --model.")
        wanted = replace(wanted, globs=_from_misses(misses, write_spec))
        if write_spec is not None:
            return 0
    elif write_spec is not None:
        raise click.UsageError("--write-spec needs --from-misses.")
    cache, family = open_cache(cache_dir, remote_cache, remote_cache_write), family_named(family_name)
    if dry_run or assert_cached:
        return _look_up(wanted, cache, family, shard, assert_cached=assert_cached, as_json=as_json)
    options: dict[str, Any] = {"timeout_s": timeout_s, "allow_spills": allow_spills, "part": shard, "family": family}
    options |= {"executor": executor, "scheduler": scheduler, "retries": retries, "fail_fast": fail_fast}
    report = build(wanted, cache, jobs=jobs, **options)
    if junit is not None:
        write_atomically(junit, junit_text(report))
    if annotate:
        for line in annotation_lines(report):
            click.echo(line, err=as_json)
    if as_json:
        print_json(report_document(report, cache))
    else:
        click.echo(f"{_summary(report)}; cache: {cache.root}")
    return report.exit_code


def _from_misses(path: Path, write_spec: Path | None) -> tuple[str, ...]:
    """Ids to build; those that cannot be built are told, with reasons. Writes the specification if asked to."""
    from fa4build.files import write_atomically
    from fa4build.matrix.misses import plan_for, read_misses, spec_text

    plan = plan_for(read_misses(path))
    text = spec_text(plan, path.name)
    for miss, reason in plan.hopeless:
        note(f"not built: {miss}: {reason}")
    if write_spec is not None:
        write_atomically(write_spec, text.encode())
        click.echo(f"{write_spec}: {len(plan.buildable)} variants, {len(plan.hopeless)} misses cannot be built")
    return plan.buildable


def build(wanted: "Selection", cache: "Cache", *, jobs: int | None, **options: Any) -> "BuildReport":
    """Build with progress on stderr, and every failure told at the end."""
    from fa4build.pipeline import build_matrix

    tell_left_out(wanted, options["family"])
    with _progress() as on_event:
        report = build_matrix(wanted, cache, jobs, on_event, **options)
    for outcome in report.outcomes:
        if outcome.status == "failed":
            note(f"\nfailed: {outcome.message}")
    return report


def _look_up(
    wanted: "Selection",
    cache: "Cache",
    family: "Family",
    part: tuple[int, int],
    *,
    assert_cached: bool,
    as_json: bool,
) -> int:
    """The answer of --dry-run and --assert-cached."""
    from fa4build.pipeline import find_cached, require_cached, shard

    tell_left_out(wanted, family)
    found = find_cached(shard(family.expand(wanted), *part), cache, family=family)
    if assert_cached:
        require_cached(found)
    rows = [
        {"id": recipe.name, "key": recipe.key, "status": "missing" if entry is None else "cached"}
        for recipe, entry in found
    ]
    missing = sum(row["status"] == "missing" for row in rows)
    if as_json:
        counts = {"cached": len(rows) - missing, "missing": missing}
        print_json({"cache_dir": str(cache.root), "counts": counts, "variants": rows})
        return 0
    for row in rows:
        click.echo(f"{row['status']:8} {row['id']}")
    click.echo(f"{len(rows)} variants: {len(rows) - missing} cached, {missing} to compile; cache: {cache.root}")
    return 0


@contextmanager
def _progress() -> Iterator[Callable[["Event"], None]]:
    """A function to call on each event: a live bar on a terminal, a line for each compile elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    times = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("looking up", total=None)
        compiling: list[str] = []

        def show(event: "Event") -> None:
            if event.outcome is None:
                compiling.append(event.name)
            elif event.name in compiling:
                compiling.remove(event.name)
                bar.console.print(_line(event.outcome), highlight=False, markup=False)
            names = ", ".join(compiling[:2]) + (f" +{len(compiling) - 2}" if len(compiling) > 2 else "")
            bar.update(task, completed=event.done, total=event.total, description=names or "looking up")

        yield show


class _Lines:
    """A line for each variant that was compiled or failed, with the time left; what is cached is silent."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._ended = 0

    def __call__(self, event: "Event") -> None:
        now = time.monotonic()
        if event.outcome is None:
            self._started = self._started or now
        elif event.outcome.status != "cached":
            self._ended += 1
            left = (event.total - event.done) * (now - (self._started or now)) / self._ended
            note(f"[{event.done}/{event.total}] {_line(event.outcome)}" + (f"; {_duration(left)} left" if left else ""))


def _duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`: as exact as a guess is."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _line(outcome: "Outcome") -> str:
    took = f"{outcome.seconds:.1f} s"
    if outcome.status == "skipped":
        return f"skipped   {outcome.name}"
    if outcome.facts is None:
        return f"failed    {outcome.name}  {took}"
    return f"{outcome.status:9} {outcome.name}  {took}, {outcome.facts['registers']} registers"


def _counts(report: "BuildReport") -> dict[str, int]:
    """How many variants have which status; `skipped` only where there are any."""
    skipped = ("skipped",) if report.count("skipped") else ()
    return {status: report.count(status) for status in ("cached", "compiled", "failed", *skipped)}


def _summary(report: "BuildReport") -> str:
    counts = ", ".join(f"{number} {status}" for status, number in _counts(report).items())
    return f"{len(report.outcomes)} variants: {counts} in {report.seconds:.1f} s"


def report_document(report: "BuildReport", cache: "Cache") -> dict[str, Any]:
    """A build as JSON."""
    names = ("key", "status", "seconds", "cpu_seconds", "peak_bytes", "facts", "message", "exit_code")
    variants = [{"id": outcome.name, **{name: getattr(outcome, name) for name in names}} for outcome in report.outcomes]
    return {
        "cache_dir": str(cache.root),
        "seconds": report.seconds,
        "workers": report.workers,
        "counts": _counts(report),
        "variants": variants,
    }
