"""`fa4build verify --mutate` and `--coverage`: how good the verification is. Neither verifies anything itself."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from fa4build.cli.common import note, print_json

if TYPE_CHECKING:
    from fa4build.matrix.axes import Variant
    from fa4build.store.cache import Cache
    from fa4build.verify.mutation.campaign import Campaign, Outcome
    from fa4build.verify.mutation.coverage import Coverage
    from fa4build.verify.pool import End
    from fa4build.verify.runs import Request

_TOLD_EVERY = 25  # mutants


def mutate(
    variants: Sequence["Variant"], cache: "Cache", *, every: int, jobs: int, timeout_s: float, as_json: bool
) -> int:
    """Plants the mutants of every kernel. Exit code 10 when one is left that nothing explains."""
    from fa4build.errors import SimulationError
    from fa4build.verify.mutation.campaign import run_campaign

    campaigns = []
    for request in _requests(variants, cache):
        campaigns.append(run_campaign(request, jobs=jobs, tell=_tell, every=every, timeout_s=timeout_s))
        _print_campaign(campaigns[-1], as_json)
    if as_json:
        print_json({"campaigns": [campaign.document() for campaign in campaigns]})
    done = all(outcome.is_explained for campaign in campaigns for outcome in campaign.outcomes)
    return 0 if done else SimulationError.exit_code


def cover(variants: Sequence["Variant"], cache: "Cache", *, jobs: int, timeout_s: float, as_json: bool) -> int:
    """Runs the cases of every kernel and tells which lines none runs. Exit code 10 when one is left unexplained."""
    from fa4build.errors import SimulationError
    from fa4build.verify.mutation.coverage import coverage_of
    from fa4build.verify.pool import Task, run_tasks

    requests = _requests(variants, cache)
    found: dict[str, Coverage] = {}
    failed: list[str] = []
    run_tasks(
        [Task(name=request.variant_id, function=coverage_of, argument=request) for request in requests],
        jobs=jobs,
        timeout_s=timeout_s,
        on_message=lambda name, message: None,
        on_end=partial(_note_coverage, found=found, failed=failed, as_json=as_json),
    )
    if as_json:
        print_json({"coverage": [found[v.id].document() for v in variants if v.id in found], "failed": failed})
    return SimulationError.exit_code if failed or any(each.open for each in found.values()) else 0


def _requests(variants: Sequence["Variant"], cache: "Cache") -> list["Request"]:
    """Raises: NotCachedError naming variants that are not compiled; UsageError for one without acceptance cases."""
    from fa4build.cases.of_variant import has_cases
    from fa4build.pipeline import find_cached, require_cached
    from fa4build.verify.runs import Request

    if without := [variant.id for variant in variants if not has_cases(variant)]:
        raise click.UsageError(f"there are no acceptance cases for {', '.join(without)}; leave them out.")
    requests = []
    for entry in require_cached(find_cached(variants, cache)):
        texts = {name: cache.read(entry, name).decode() for name in ("ptx", "plan")}
        requests.append(
            Request(variant_id=entry.name, registers=entry.facts["registers"], seeds=(1,), sha256="", **texts)
        )
    return requests


def _tell(kernel: str, outcome: "Outcome", done: int, total: int) -> None:
    """Progress: every so many mutants."""
    if done % _TOLD_EVERY == 0 or done == total:
        note(f"[{done}/{total}] {kernel}")


def _print_campaign(campaign: "Campaign", as_json: bool) -> None:
    counts = {status: campaign.count(status) for status in ("killed", "survived", "unreached", "crashed")}
    open_ = sum(not outcome.is_explained for outcome in campaign.outcomes)
    told = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    line = f"{campaign.kernel}  {len(campaign.outcomes)} mutants of {campaign.operations} operations: {told}"
    line = f"{line}; {open_} unexplained, {campaign.seconds:.0f} s"
    note(line) if as_json else click.echo(line)
    for each in campaign.outcomes:
        if not each.is_explained:
            note(f"{campaign.kernel}: {each.status}: PTX line {each.line} {each.opcode}, {each.change}. {each.text}")


def _note_coverage(end: "End", *, found: dict[str, Any], failed: list[str], as_json: bool) -> None:
    if end.error is not None:
        failed.append(str(end.error))
        note(f"failed: {end.error}")
        return
    coverage = found[end.name] = end.result
    kinds = coverage.document()["allowed"]
    told = "".join(f", {number} {why}" for why, number in kinds.items())
    run = coverage.instructions - len(coverage.unrun)
    line = f"{coverage.kernel}  {run} of {coverage.instructions} instructions run{told}, {len(coverage.open)} open"
    note(line) if as_json else click.echo(line)
    for each in coverage.open:
        note(f"{coverage.kernel}: never run: PTX line {each.line}: {each.text[:100]}")
