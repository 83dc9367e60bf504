"""`fa4build list`: what there is."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa4build.cli.common import (
    cache_dir_option,
    family_option,
    json_option,
    open_cache,
    print_json,
    selection_options,
)
from fa4build.errors import NothingSelectedError, ToolchainError

if TYPE_CHECKING:
    from fa4build.families.interface import Family
    from fa4build.matrix.axes import Variant
    from fa4build.matrix.selection import Selection


@click.command("list")
@selection_options
@family_option
@click.option("--all", "everything", is_flag=True, help="Also valid variants whose kernel is not written yet.")
@click.option("--refused", is_flag=True, help="Instead, combinations that make no sense, with the reasons.")
@cache_dir_option
@json_option
def command(
    wanted: "Selection",
    family_name: str,
    everything: bool,
    refused: bool,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """List variants and their state.

    `cached` is compiled, `written` can be compiled, `on request` too but is built only where it is named, `planned`
    is valid but has no kernel yet, `refused` makes no sense.

    \b
    Examples:
      fa4build list                                what can be built
      fa4build list --arch sm100 --all             and what is planned
      fa4build list --refused --select '*2cta*'    what cannot be, and why
      fa4build list --model config.json --gpu H200    what a model is served with
      fa4build list --family quack                 the kernels of another family
    """
    from fa4build.families.registry import DEFAULT, family_named

    family = family_named(family_name)
    if refused and (wanted.specs or family.name != DEFAULT):
        raise click.UsageError("--refused lists combinations of axes; leave out --spec, --model and --family.")
    if family.name != DEFAULT:
        rows = _of_family(family, wanted, cache_dir)
    elif refused:
        rows = _refused(wanted)
    else:
        rows = _valid(family, wanted, cache_dir, with_planned=everything)
    if not rows:
        raise NothingSelectedError("no variant matches. `fa4build list --all` shows every valid one.")
    _print(rows, as_json)


def _matches(wanted: "Selection", variant: "Variant") -> bool:
    """Whether arch and globs hold."""
    from fa4build.matrix.arch import arch_named

    in_arch = not wanted.arches or variant.arch in {arch_named(name).name for name in wanted.arches}
    return in_arch and (not wanted.globs or any(fnmatch.fnmatchcase(variant.id, glob) for glob in wanted.globs))


def _refused(wanted: "Selection") -> list[dict[str, Any]]:
    from fa4build.matrix.variants import refused_variants

    found = [item for item in refused_variants() if _matches(wanted, item.variant)]
    return [{"id": item.variant.id, "status": "refused", "reasons": list(item.reasons)} for item in found]


def _valid(
    family: "Family", wanted: "Selection", cache_dir: Path | None, *, with_planned: bool
) -> list[dict[str, Any]]:
    """Of our own kernels; of a specification or a plan with the helpers that they are launched with."""
    from fa4build.matrix.selection import Selection
    from fa4build.matrix.variants import expansion, kernel_written, reasons_on_request, valid_variants

    valid: Sequence[Variant] = valid_variants()
    if wanted.specs:
        named = expansion(Selection(specs=wanted.specs))
        valid = (*named.variants, *named.left_out)
    valid = [variant for variant in valid if _matches(wanted, variant)]
    written = [variant for variant in valid if kernel_written(variant)]
    status = _statuses(written, cache_dir, family)
    shown = valid if with_planned else written
    rows = [{"id": variant.id, "status": status.get(variant.id, "planned")} for variant in shown]
    for row, variant in zip(rows, shown, strict=True):
        if row["status"] == "written" and (reasons := reasons_on_request(variant)):
            row |= {"status": "on request", "reasons": list(reasons)}
    return rows


def _of_family(family: "Family", wanted: "Selection", cache_dir: Path | None) -> list[dict[str, Any]]:
    """Of another family: every declared kernel; those outside its default matrix are `on request`."""
    from dataclasses import replace

    from fa4build.matrix.selection import Selection

    named = family.expand(wanted if wanted.globs else replace(wanted, globs=("*",)))
    default = {kernel.id for kernel in family.expand(Selection(arches=wanted.arches))}
    status = _statuses(named, cache_dir, family)
    on_request = {kernel.id for kernel in named} - default
    return [
        {"id": name, "status": "on request" if state == "written" and name in on_request else state}
        for name, state in status.items()
    ]


def _statuses(kernels: Sequence[Any], cache_dir: Path | None, family: "Family") -> dict[str, str]:
    """`cached` or `written`, by id. Without a usable compiler there are no keys, so nothing counts as cached."""
    from fa4build.pipeline import find_cached

    try:
        found = find_cached(kernels, open_cache(cache_dir), family=family)
    except ToolchainError:
        return {kernel.id: "written" for kernel in kernels}
    return {recipe.name: "written" if entry is None else "cached" for recipe, entry in found}


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    for row in rows:
        reasons = "".join(f"\n           {reason}" for reason in row.get("reasons", ()))
        click.echo(f"{row['status']:10} {row['id']}{reasons}")
