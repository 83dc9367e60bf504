"""`fa4build plan CONFIG...`: which kernels models need, and why each."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa4build.cli.common import (
    cache_dir_option,
    human_bytes,
    json_option,
    open_cache,
    print_json,
    print_table,
    use_options,
)

if TYPE_CHECKING:
    from fa4build.matrix.planning import Plan
    from fa4build.runtime.fa4_kernels.models.layers import Model
    from fa4build.runtime.fa4_kernels.models.needs import Use
    from fa4build.store.cache import Cache


@click.command("plan")
@click.argument("configs", metavar="CONFIG...", nargs=-1, required=True)
@use_options
@click.option(
    "--write-spec",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the plan as a specification for --spec of other commands.",
)
@cache_dir_option
@json_option
def command(
    configs: tuple[str, ...],
    gpus: tuple[str, ...],
    use: "Use",
    write_spec: Path | None,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """List the kernels that models call on a GPU, with reasons and sizes.

    CONFIG is a Hugging Face config.json or its directory; several models make one plan. Layers without a kernel are
    listed with the reason. Nothing is compiled: `matrix`, `wheel` and `bundle` accept the same options after --model.

    \b
    Examples:
      fa4build plan gpt-oss-120b/config.json --gpu H200 --page-size 16
      fa4build plan qwen3/ gemma3/ --gpu H200 --gpu B200 --write-spec serving.toml
      fa4build plan config.json --gpu B300 --for training --deterministic
      fa4build plan config.json --gpu B200 --page-size 64 --cache-dtype fp8 --query-rows 4 --tp 8
    """
    from fa4build.files import write_atomically
    from fa4build.matrix.planning import plan_of_files, spec_text

    plan = plan_of_files(configs, gpus, use)
    if write_spec is not None:
        write_atomically(write_spec, spec_text(plan).encode())
    sizes = _sizes(plan, open_cache(cache_dir))
    if as_json:
        print_json(_document(plan, sizes))
        return
    _print(plan, sizes, configs)
    if write_spec is not None:
        click.echo(f"{write_spec}: {len(plan.planned)} variants")


def _sizes(plan: "Plan", cache: "Cache") -> dict[str, int]:
    """Id -> bytes of the cubin, of those that are compiled."""
    from fa4build.errors import ToolchainError
    from fa4build.pipeline import find_cached

    try:
        found = find_cached([item.variant for item in plan.planned], cache)
    except ToolchainError:
        return {}
    return {recipe.name: entry.objects["cubin"].size for recipe, entry in found if entry is not None}


def _document(plan: "Plan", sizes: dict[str, int]) -> dict[str, Any]:
    kernels = [
        {
            "id": item.variant.id,
            "cubin_bytes": sizes.get(item.variant.id),
            "reasons": [{"where": where, "why": why, "layers": layers} for where, why, layers in item.reasons],
        }
        for item in plan.planned
    ]
    names = ("model", "part", "gpu", "layers", "reason")
    return {
        "models": [_model_document(model, plan) for model in plan.models],
        "gpus": [{"name": gpu.name, "target": gpu.target} for gpu in plan.gpus],
        "use": str(plan.use),
        "kernels": kernels,
        "unserved": [{name: getattr(lack, name) for name in names} for lack in plan.unserved],
        "notes": [{"where": where, "note": text} for where, text in plan.notes],
    }


def _model_document(model: "Model", plan: "Plan") -> dict[str, Any]:
    from fa4build.runtime.fa4_kernels.models.needs import heads_per_rank

    parts = [
        {
            "part": part.label,
            "unknown": part.unknown,
            "layers": [
                {
                    "count": count,
                    "attention": str(attention),
                    "heads_per_rank": heads_per_rank(attention, plan.use.tensor_parallel),
                }
                for attention, count in part.kinds().items()
            ],
        }
        for part in model.parts
    ]
    return {"name": model.name, "model_type": model.model_type, "dtype": model.dtype, "parts": parts}


def _print(plan: "Plan", sizes: dict[str, int], configs: tuple[str, ...]) -> None:
    for model in plan.models:
        click.echo(f"{model.name}: {model.model_type}, {model.dtype}; {plan.use}")
        for line in _layer_lines(model, plan.use.tensor_parallel):
            click.echo(f"  {line}")
    rows = []
    for item in plan.planned:
        for number, (where, why, layers) in enumerate(item.reasons):
            size = human_bytes(sizes[item.variant.id]) if item.variant.id in sizes else ""
            rows.append(
                (item.variant.id if number == 0 else "", size if number == 0 else "", layers, f"{why}: {where}")
            )
    if rows:
        print_table(("kernel", "cubin", "layers", "called for"), rows)
    for lack in plan.unserved:
        click.echo(f"without a kernel: {lack}")
    for where, text in plan.notes:
        click.echo(f"note: {where}: {text}")
    click.echo(_summary(plan, sizes))
    if len(sizes) < len(plan.planned):
        click.echo(f"build: fa4build wheel {_options(plan, configs)}")


def _layer_lines(model: "Model", ranks: int) -> list[str]:
    from fa4build.runtime.fa4_kernels.models.needs import heads_per_rank

    lines = []
    for part in model.parts:
        prefix = f"{part.label}: " if len(model.parts) > 1 else ""
        if not part.layers and not part.unknown:
            lines.append(f"{prefix}no attention")
        for attention, count in part.kinds().items():
            a_rank = "/".join(map(str, heads_per_rank(attention, ranks)))
            lines.append(f"{prefix}{count} of {attention}" + (f"; {a_rank} a rank" if ranks > 1 else ""))
    return lines


def _summary(plan: "Plan", sizes: dict[str, int]) -> str:
    count = len(plan.planned)
    known = f"; {len(sizes)} compiled, {human_bytes(sum(sizes.values()))} of cubins" if sizes else "; none compiled yet"
    lacking = sum(lack.layers for lack in plan.unserved)
    rest = f"; {len(plan.unserved)} gaps, of {lacking} layers" if plan.unserved else "; every layer has a kernel"
    return f"{count} kernels for {', '.join(gpu.name for gpu in plan.gpus)}{known if count else ''}{rest}"


def _options(plan: "Plan", configs: tuple[str, ...]) -> str:
    from fa4build.runtime.fa4_kernels.models.needs import use_as_options

    models = " ".join(f"--model {config}" for config in configs)
    gpus = " ".join(f"--gpu {gpu.name}" for gpu in plan.gpus)
    return " ".join(filter(None, (models, gpus, use_as_options(plan.use))))
