"""`fa4build explain ID`: everything known about one variant."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa4build.cli.common import cache_dir_option, family_option, human_bytes, json_option, open_cache, print_json
from fa4build.errors import ToolchainError

if TYPE_CHECKING:
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
    """Tell everything known about one variant.

    Its axes, whether it can be built and why not, how it is tuned and by which source, how powers of two are computed,
    and what its compile gave.

    \b
    Examples:
      fa4build explain fwd-sm90a-bf16-hd128-causal
      fa4build explain fwd-sm90a-e4m3-hd128-full      a refused one: the reasons
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
        raise NothingSelectedError(f"{name!r} is {len(chosen)} kernels of {family.name}; name one.")
    (kernel,) = chosen
    of_arch = family.expand(Selection(arches=(kernel.arch,), globs=("*",)))
    callers = [r for r in family.op_recipes(of_arch) if any(step.kernel == kernel.id for step in r.steps)]
    compiled = _compiled(kernel, cache, family)
    document = {
        "id": kernel.id,
        "family": family.name,
        "status": "cached" if compiled else "declared",
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
        click.echo(f"  {word}: " + (", ".join(f"{key} {value}" for key, value in document[word].items()) or "none"))
    for recipe in callers[:_CALLERS_SHOWN]:
        click.echo(f"  called by {recipe.op}: {recipe.id}" + (f", when {recipe.when}" if recipe.when else ""))
    if len(callers) > _CALLERS_SHOWN:
        click.echo(f"  and by {len(callers) - _CALLERS_SHOWN} more")
    _print_compiled(compiled)


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
    status = "refused" if explanation.refusals else "written" if explanation.is_written else "planned"
    return {
        "id": explanation.variant.id,
        "status": "cached" if compiled else status,
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
    click.echo(f"{document['id']}: {document['status']}")
    for reason in explanation.refusals:
        click.echo(f"  refused: {reason}")
    click.echo(f"  runs on: compute capability {document['compute_capability']} only ({document['target']})")
    click.echo("  axes: " + ", ".join(f"{name} {value}" for name, value in explanation.axes))
    if explanation.tuning is not None:
        tuning = dataclasses.asdict(explanation.tuning.tuning)
        click.echo(
            f"  tuning {explanation.tuning.name}: " + ", ".join(f"{name} {value}" for name, value in tuning.items())
        )
        click.echo(f"    source: {explanation.tuning.source}")
    if explanation.exp2_mode is not None:
        click.echo(f"  exp2: {explanation.exp2_mode}")
    if explanation.template is not None:
        click.echo(f"  rendered for {explanation.template}, reaches {len(explanation.dependencies)} kernel files")
    _print_compiled(document["compiled"])


def _print_compiled(compiled: dict[str, Any] | None) -> None:
    if compiled is None:
        return
    click.echo(
        f"  compiled: {compiled['registers']} registers, {compiled['spill_bytes']} bytes spilled, "
        f"{human_bytes(compiled['shared_bytes'])} of shared memory, cubin {human_bytes(compiled['sizes']['cubin'])}"
    )
    click.echo(f"    symbols: {', '.join(compiled['symbols'])}; ptxas {compiled['ptxas']}; key {compiled['key'][:16]}")
    levels = [level for level, record in compiled["evidence"].items() if record is not None]
    click.echo(f"  evidence: {', '.join(levels) or 'none yet; run fa4build verify'}")
