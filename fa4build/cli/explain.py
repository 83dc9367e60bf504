"""`fa4build explain ID`: everything known about one variant."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa4build.cli.common import cache_dir_option, family_option, json_option, open_cache
from fa4build.cli.output import human_bytes, print_json, status, wrapped
from fa4build.errors import ToolchainError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fa4build.explain import Explanation
    from fa4build.families.interface import Family
    from fa4build.matrix.axes import Variant
    from fa4build.store.cache import Cache


_CALLERS_SHOWN = 4


@click.command("explain")
@click.argument("variant_id", metavar="ID")
@family_option
@cache_dir_option
@json_option
def command(variant_id: str, family_name: str, cache_dir: Path | None, as_json: bool) -> None:
    """Show everything known about one variant.

    Shows its axes, whether it can be built and why not, its tuning with the source of each choice, how exp2 is
    computed, and the result of its compile.

    \b
    Examples:
      fa4build explain fwd-sm90a-bf16-hd128-causal
      fa4build explain fwd-sm90a-e4m3-hd128-full      an unsupported one, with the reasons
      fa4build explain --family flash-attn-4 fwd-sm90a-bf16-hd128-causal-r4
    """
    from fa4build.explain import explain
    from fa4build.families.registry import DEFAULT, family_named
    from fa4build.matrix.axes import parse_axes

    family = family_named(family_name)
    if family.name != DEFAULT:
        _explain_kernel(family, variant_id, open_cache(cache_dir), as_json)
        return
    explanation = explain(parse_axes(variant_id))
    compiled = _compiled(explanation.variant, open_cache(cache_dir), family) if explanation.is_written else None
    document = _document(explanation, compiled)
    if as_json:
        print_json(document)
    else:
        _print(explanation, document)


def _explain_kernel(family: "Family", name: str, cache: "Cache", as_json: bool) -> None:
    """A kernel of another family: its axes, the operators that call it, and what its compile gave."""
    from fa4build.errors import NothingSelectedError
    from fa4build.matrix.arch import arch_named
    from fa4build.matrix.selection import Selection

    chosen = family.expand(Selection(globs=(name,)))
    if len(chosen) > 1:
        raise NothingSelectedError(f"{name!r} matches {len(chosen)} kernels of {family.name}. Give the id of one.")
    (kernel,) = chosen
    of_arch = family.expand(Selection(arches=(kernel.arch,), globs=("*",)))
    callers = [r for r in family.op_recipes(of_arch) if any(step.kernel == kernel.id for step in r.steps)]
    compiled = _compiled(kernel, cache, family)
    document = {
        "id": kernel.id,
        "family": family.name,
        "status": "cached" if compiled else "implemented",
        "target": arch_named(kernel.arch).target,
        "axes": dict(kernel.axes),
        "tuning": dict(kernel.tuning),
        "operators": [{"op": recipe.op, "recipe": recipe.id, "when": recipe.when} for recipe in callers],
        "compiled": compiled,
    }
    if as_json:
        print_json(document)
        return
    click.echo(f"{kernel.id}: {document['status']}, of {family.name}")
    for word in ("axes", "tuning"):
        click.echo(wrapped(f"{word}: {_listed(document[word]) or 'none'}", " " * 4, "  "))
    for recipe in callers[:_CALLERS_SHOWN]:
        click.echo(f"  called by {recipe.op}: {recipe.id}" + (f", when {recipe.when}" if recipe.when else ""))
    if len(callers) > _CALLERS_SHOWN:
        click.echo(f"  and by {len(callers) - _CALLERS_SHOWN} more")
    _print_compiled(kernel.id, compiled)


def _compiled(variant: "Variant | Any", cache: "Cache", family: "Family") -> dict[str, Any] | None:
    """What the cache holds for a variant as it would be built now, with its evidence; None if nothing."""
    from fa4build.pipeline import find_cached
    from fa4build.shipping.release import committed_evidence
    from fa4build.store.evidence import committed_in, evidence_for, subject_of

    try:
        (_, entry), *_ = find_cached([variant], cache, family=family)
    except ToolchainError:
        return None
    if entry is None:
        return None
    digest = entry.objects["cubin"].sha256
    evidence = evidence_for(subject_of(entry), cache.root, committed_in(committed_evidence())).as_dict()
    sizes = {name: stored.size for name, stored in entry.objects.items()}
    return {"key": entry.key, "cubin_sha256": digest, **entry.facts, "sizes": sizes, "evidence": evidence}


def _document(explanation: "Explanation", compiled: dict[str, Any] | None) -> dict[str, Any]:
    row = explanation.tuning
    state = "unsupported" if explanation.refusals else "implemented" if explanation.is_written else "planned"
    return {
        "id": explanation.variant.id,
        "status": "cached" if compiled else state,
        "op": explanation.variant.op,
        "target": explanation.arch.target,
        "compute_capability": ".".join(map(str, explanation.arch.compute_capability)),
        "axes": dict(explanation.axes),
        "refusals": list(explanation.refusals),
        "tuning": {"row": row.name, "source": row.source, **dataclasses.asdict(row.tuning)} if row else None,
        "exp2_mode": explanation.exp2_mode,
        "template": explanation.template,
        "dependencies": dict(explanation.dependencies),
        "compiled": compiled,
    }


def _print(explanation: "Explanation", document: dict[str, Any]) -> None:
    """The document for people: a line a fact."""
    click.echo(f"{document['id']}: {status(document['status'])}")
    for reason in explanation.refusals:
        click.echo(wrapped(f"unsupported: {reason}", " " * 4, "  "))
    capability = f"compute capability {document['compute_capability']} only ({document['target']})"
    click.echo(f"  runs on: {capability}")
    click.echo(wrapped("axes: " + _listed(dict(explanation.axes)), " " * 4, "  "))
    if explanation.tuning is not None:
        tuning = dataclasses.asdict(explanation.tuning.tuning)
        click.echo(wrapped(f"tuning {explanation.tuning.name}: " + _listed(tuning), " " * 4, "  "))
        click.echo(wrapped(f"source: {explanation.tuning.source}", " " * 6, " " * 4))
    if explanation.exp2_mode is not None:
        click.echo(wrapped(f"exp2: {explanation.exp2_mode}", " " * 4, "  "))
    if explanation.template is not None:
        click.echo(f"  rendered for {explanation.template}, uses {len(explanation.dependencies)} kernel files")
    _print_compiled(document["id"], document["compiled"])


def _listed(values: "Mapping[str, object]") -> str:
    """`mask full, layout dense`."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _print_compiled(name: str, compiled: dict[str, Any] | None) -> None:
    if compiled is None:
        return
    text = (
        f"compiled: {compiled['registers']} registers, {compiled['spill_bytes']} bytes spilled, "
        f"{human_bytes(compiled['shared_bytes'])} of shared memory, cubin {human_bytes(compiled['sizes']['cubin'])}"
    )
    click.echo(wrapped(text, " " * 4, "  "))
    text = f"symbols: {', '.join(compiled['symbols'])}; ptxas {compiled['ptxas']}; key {compiled['key'][:16]}"
    click.echo(wrapped(text, " " * 6, " " * 4))
    levels = [level for level, record in compiled["evidence"].items() if record is not None]
    click.echo(f"  evidence: {', '.join(levels) or f'none yet. Run: fa4build verify {name}'}")
