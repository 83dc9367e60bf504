"""`fa4build verify`: prove compiled kernels, and keep the evidence."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa4build.cli.common import cache_dir_option, family_option, json_option, note, open_cache, print_json

if TYPE_CHECKING:
    from fa4build.store.cache import Cache
    from fa4build.verify.levels import Check, Event, VerifyReport

STATUSES = ("passed", "known", "failed", "unproven")
NOTES_SHOWN = 2  # of each check: they are no failures, and a kernel that has one tends to have many


@click.command("verify")
@click.argument("globs", nargs=-1, metavar="[GLOB]...")
@family_option
@click.option("--static", is_flag=True, help="Check registers, memory, plan and instruction mix of the binaries.")
@click.option("--simulate", is_flag=True, help="Run every acceptance case in the PTX simulator.")
@click.option(
    "--device",
    "record",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Import a record from a GPU, written by the scripts of --device-scripts.",
)
@click.option(
    "--device-scripts",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the scripts that verify wheels on a GPU into DIR. They need torch, but not fa4build.",
)
@click.option("--timing", is_flag=True, help="Instead, time the kernels in the model of docs/timing-model.md.")
@click.option(
    "--arch",
    "arches",
    multiple=True,
    metavar="ARCH",
    help="A target: sm90, sm100, sm103, or a GPU such as H200. Repeatable.",
)
@click.option(
    "--jobs", "-j", type=click.IntRange(min=1), help="The number of parallel simulations. Default: one per core."
)
@click.option(
    "--mutate", is_flag=True, help="Break every synchronisation of the named kernels in turn; each must be noticed."
)
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=1,
    help="With --mutate: break only every N-th operation. Default: all.",
)
@click.option("--coverage", is_flag=True, help="List the lines of PTX that no acceptance case runs.")
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="The number of draws of inputs and of adversarial schedules.",
)
@click.option(
    "--engine",
    type=click.Choice(("native", "python")),
    default="native",
    show_default=True,
    help="The simulator: the native engine, or the Python one, which is its oracle and a dozen times slower.",
)
@click.option("--fresh", is_flag=True, help="Also simulate kernels that passed before and have not changed.")
@click.option(
    "--keep",
    is_flag=True,
    help="With --simulate: add the results to evidence/ of the checkout, to be committed.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=1800.0,
    show_default=True,
    help="The time limit of the simulation of one variant, in seconds.",
)
@click.option(
    "--update-baseline", is_flag=True, help="Store the current static values as the baseline, and print the changes."
)
@click.option(
    "--baseline-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory of the baselines. Default: those of this fa4build.",
)
@click.option(
    "--evidence-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory that --device and --keep write to. Default: evidence/ of the checkout.",
)
@cache_dir_option
@json_option
def command(
    globs: tuple[str, ...],
    family_name: str,
    static: bool,
    simulate: bool,
    record: Path | None,
    device_scripts: Path | None,
    mutate: bool,
    every: int,
    coverage: bool,
    timing: bool,
    arches: tuple[str, ...],
    jobs: int | None,
    seeds: int,
    engine: str,
    fresh: bool,
    keep: bool,
    timeout_s: float,
    update_baseline: bool,
    baseline_dir: Path | None,
    evidence_dir: Path | None,
    cache_dir: Path | None,
    as_json: bool,
) -> int:
    """Test compiled kernels, and keep what they pass as evidence.

    Without --static, --simulate or --device, it runs the static check and the simulation. It reads kernels from the
    cache and compiles nothing. Evidence belongs to the bytes of a cubin, and goes into the manifest of the next
    `fa4build wheel`. The exit code is 10 if a kernel fails, or if none of the kernels could be tested.

    \b
    Examples:
      fa4build verify                                    the default matrix
      fa4build verify 'fwd-sm90a-*-causal' --simulate
      fa4build verify --arch sm100 --static
      fa4build verify --arch sm100 --simulate --keep     evidence for everyone who builds the same cubins
      fa4build verify --family flash-attn-4 'fwd-sm100a-bf16-hd64-*'   operators of another family
      fa4build verify --static --update-baseline         after an intended change
      fa4build verify --device-scripts device            what a GPU machine runs: python device/prove_forward.py dist
      fa4build verify --device record.json               import what it has verified
      fa4build verify fwd-sm90a-bf16-hd128-causal-varlen --mutate   whether its cases notice planted faults
      fa4build verify --arch sm100 --coverage            lines of PTX that no case runs
      fa4build verify 'fwd-sm100a-*-hd128-full' --timing  cycles per block, and a drawing of the warps
    """
    from fa4build.families.registry import DEFAULT, family_named

    if device_scripts is not None:
        from fa4build.verify.device_scripts import write_device_scripts

        number = len(write_device_scripts(device_scripts))
        print(f"{device_scripts}: {number} scripts; README.md there says how to run them")
        return 0

    cache = open_cache(cache_dir)
    levels = static or simulate or update_baseline
    if record is not None:
        if globs or arches or levels or family_name != DEFAULT:
            raise click.UsageError("--device imports the whole record; leave out GLOB and the other options.")
        return _install(record, cache, evidence_dir, as_json)
    if timing or mutate or coverage:
        _refuse_company(timing, mutate, coverage, levels=levels, of_a_family=family_name != DEFAULT, named=bool(globs))
    if timing:
        return _time(globs, arches, cache, as_json)
    if mutate or coverage:
        from fa4build.cli import verify_mutation
        from fa4build.verify.levels import built_variants

        chosen, how = built_variants(arches, globs), {"jobs": _jobs(jobs), "timeout_s": timeout_s, "as_json": as_json}
        if mutate:
            return verify_mutation.mutate(chosen, cache, every=every, **how)
        return verify_mutation.cover(chosen, cache, **how)

    from fa4build.shipping.release import committed_evidence
    from fa4build.verify.levels import Options, built_variants, family_kernels, keep_simulated, verify
    from fa4build.verify.static import BASELINE_DIR

    family = family_named(family_name)
    if keep and not (simulate and family.name == DEFAULT):
        raise click.UsageError("--keep needs --simulate, and works for the kernels of fa4 only.")
    keep_in = _evidence_dir(evidence_dir) if keep else None
    options = Options(
        static=static or update_baseline or not simulate,
        simulate=simulate or not (static or update_baseline),
        jobs=_jobs(jobs),
        seeds=tuple(range(1, seeds + 1)),
        engine=engine,
        fresh=fresh,
        timeout_s=timeout_s,
        nvdisasm=find_nvdisasm() if as_json else None,  # shown there alone
        update_baseline=update_baseline,
        baseline_dir=baseline_dir or BASELINE_DIR,
        evidence_dirs=tuple(dict.fromkeys((*committed_evidence(), *((keep_in,) if keep_in else ())))),
    )
    chosen = built_variants(arches, globs) if family.name == DEFAULT else family_kernels(family, arches, globs)
    with _progress() as tell:
        report = verify(chosen, cache, options, tell, family=family)
    for path in keep_simulated(report, keep_in) if keep_in else ():
        note(f"kept in {path}")
    _print(report, cache, options.seeds, as_json)
    return report.exit_code


def _evidence_dir(given: Path | None) -> Path:
    """Where records are kept. Raises: UsageError when nothing says where, and this is no checkout."""
    from fa4build.shipping.release import EVIDENCE_DIR
    from fa4build.shipping.wheel import checkout_root

    if given is None and checkout_root() is None:
        raise click.UsageError("this fa4build is installed, so there is no checkout to write to; give --evidence-dir.")
    return given or EVIDENCE_DIR


def _jobs(jobs: int | None) -> int:
    from fa4build.compiling.executors import worker_count

    return worker_count(jobs)


def find_nvdisasm() -> Path | None:
    """NVIDIA's disassembler: on PATH, or in the `nvidia-cuda-nvdisasm` package; None without one."""
    on_path = shutil.which("nvdisasm")
    if on_path is not None:
        return Path(on_path)
    found = (path for place in sys.path for path in sorted(Path(place).glob("nvidia/*/bin/nvdisasm")))
    return next(found, None)


def _refuse_company(
    timing: bool, mutate: bool, coverage: bool, *, levels: bool, of_a_family: bool, named: bool
) -> None:
    """Raises: UsageError where one of the options that verify nothing stands beside what does not go with it."""
    given = {"--timing": timing, "--mutate": mutate, "--coverage": coverage}
    option, *others = (name for name, is_given in given.items() if is_given)
    if others:
        raise click.UsageError(f"{option} and {others[0]} do different things; give one of them.")
    if levels:
        raise click.UsageError(f"{option} verifies nothing; leave out --static, --simulate and --update-baseline.")
    if of_a_family:
        raise click.UsageError(f"{option} supports the kernels of fa4 only; leave out --family.")
    if mutate and not named:
        raise click.UsageError("--mutate takes minutes for each kernel; name the kernels.")


def _install(record: Path, cache: "Cache", evidence_dir: Path | None, as_json: bool) -> int:
    """Check and keep a record from a GPU."""
    from fa4build.verify.levels import install_record

    kept = install_record(record, cache, _evidence_dir(evidence_dir))
    if as_json:
        names = ("arch", "device", "proven", "missing")
        print_json({"path": str(kept.path), **{name: getattr(kept, name) for name in names}})
        return 0
    for name in kept.missing:
        note(f"not in the record: {name}")
    click.echo(f"{len(kept.proven)} variants verified on {kept.device}; kept as {kept.path}")
    return 0


def _time(globs: tuple[str, ...], arches: tuple[str, ...], cache: "Cache", as_json: bool) -> int:
    """Time kernels in the model: a line each, or one document."""
    from fa4build.verify.levels import built_variants
    from fa4build.verify.timed import is_timed, time_variants

    chosen = built_variants(arches, globs)
    found = []
    for timed in time_variants(chosen if globs else filter(is_timed, chosen), cache):
        steady = timed.steady
        found.append(
            {
                "id": timed.name,
                "cycles_per_block": steady.cycles,
                "cycles_per_block_with_quick_copies": steady.quick_cycles,
                "cycles_besides": steady.fixed,
                "cycles": steady.timing.cycles,
                "critical": steady.critical,
                "in_use": dict(steady.busy),
                "waiting": dict(steady.waited),
                "timeline": str(timed.svg),
            }
        )
        if not as_json:
            used = ", ".join(
                f"{unit} {share:.0%}" for unit, share in sorted(steady.busy.items(), key=lambda x: -x[1])[:4]
            )
            click.echo(
                f"{timed.name}  {steady.cycles:.0f} cycles per KV block (quick copies: {steady.quick_cycles:.0f}), "
                f"{steady.fixed:.0f} besides; in use: {used}; {timed.svg}"
            )
    if as_json:
        print_json({"variants": found})
    return 0


# --- progress ---------------------------------------------------------------------------------------------------------


@contextmanager
def _progress() -> Iterator[Callable[["Event"], None]]:
    """A function to call on each event: a live bar on a terminal, a line for each finished check elsewhere."""
    if not sys.stderr.isatty():
        yield _print_event
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading binaries", total=None)
        running: dict[str, str] = {}

        def show(event: "Event") -> None:
            if event.check is None:
                running[event.name] = event.message
            else:
                running.pop(event.name, None)
                if event.check.status in ("passed", "failed"):
                    bar.console.print(_line(event.check), highlight=False, markup=False, soft_wrap=True)
            first = next((f"{name} {message}".rstrip() for name, message in running.items()), "reading binaries")
            more = f" +{len(running) - 1}" if len(running) > 1 else ""
            bar.update(task, completed=event.done, total=event.total, description=first + more)

        yield show


def _print_event(event: "Event") -> None:
    """A line for each check that was made; what was known before, or cannot be checked, is silent."""
    if event.check is not None and event.check.status in ("passed", "failed"):
        note(f"[{event.done}/{event.total}] {_line(event.check)}")


def _line(check: "Check") -> str:
    """`passed  simulated  fwd-...  12 cases, worst 0.29 of the bound, 6.3 s`."""
    return f"{check.status:7} {check.level:9} {check.name}  {_figures(check)}{check.seconds:.1f} s"


def _figures(check: "Check") -> str:
    summary = check.summary
    if check.status == "failed" or not summary:
        return ""
    if check.level == "static":
        return f"{summary['registers']} registers, {summary['shared_bytes']} bytes of shared memory, "
    cases = summary["cases"] + summary.get("chain_cases", 0)
    worst = max(summary["worst_ratio"], summary.get("chain_worst_ratio", 0.0))
    return f"{cases} cases, worst {worst:.2f} of the bound, "


# --- results ----------------------------------------------------------------------------------------------------------


def _print(report: "VerifyReport", cache: "Cache", seeds: tuple[int, ...], as_json: bool) -> None:
    """Failures and notes on stderr, the summary or the document on stdout."""
    for check in report.checks:
        for text in check.failures:
            note(f"failed: {check.name}: {check.level}: {text}")
    if as_json:
        print_json(report_document(report, cache, seeds))
        return
    for check in report.checks:
        for text in check.notes[:NOTES_SHOWN]:
            note(f"note: {check.name}: {text}")
        if len(check.notes) > NOTES_SHOWN:
            note(f"note: {check.name}: and {len(check.notes) - NOTES_SHOWN} more; --json shows all of them")
    for line in report.baseline_changes:
        click.echo(f"baseline: {line}")
    if {check.status for check in report.checks} == {"unproven"}:
        note(f"nothing was verified: {len(report.checks)} unproven; there is no test for these kernels yet")
    click.echo(f"{_summary(report)} in {report.seconds:.1f} s; evidence: {cache.root / 'evidence'}")


def _summary(report: "VerifyReport") -> str:
    """`18 variants: static 18 passed; simulated 17 passed, 1 failed`."""
    parts = []
    for level in ("static", "simulated"):
        counts = [(report.count(level, status), status) for status in STATUSES]
        told = ", ".join(f"{number} {status}" for number, status in counts if number)
        if told:
            parts.append(f"{level} {told}")
    return f"{len(report.digests)} variants: {'; '.join(parts)}"


def report_document(report: "VerifyReport", cache: "Cache", seeds: tuple[int, ...]) -> dict[str, Any]:
    """A verification as JSON."""
    names = ("status", "seconds", "summary", "details", "failures", "notes")
    variants: dict[str, dict[str, Any]] = {
        name: {"id": name, "cubin_sha256": digest, "checks": {}} for name, digest in report.digests.items()
    }
    for check in report.checks:
        variants[check.name]["checks"][check.level] = {name: getattr(check, name) for name in names}
    levels = {check.level for check in report.checks}
    counts = {level: {status: report.count(level, status) for status in STATUSES} for level in levels}
    return {
        "cache_dir": str(cache.root),
        "seconds": report.seconds,
        "seeds": list(seeds),
        "counts": counts,
        "baseline_changes": list(report.baseline_changes),
        "variants": list(variants.values()),
    }
