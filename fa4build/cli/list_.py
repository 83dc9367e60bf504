"""`fa4build list`: what there is."""

import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa4build.cli.common import cache_dir_option, json_option, open_cache, print_json
from fa4build.errors import NothingSelectedError, ToolchainError

if TYPE_CHECKING:
    from fa4build.matrix.axes import Variant


@click.command("list")
@click.option("--arch", "arches", multiple=True, metavar="ARCH", help="Target, e.g. sm90 or sm100. Repeatable.")
@click.option("--select", "globs", multiple=True, metavar="GLOB", help="Ids to list, e.g. '*-hd128-*'. Repeatable.")
@click.option("--all", "everything", is_flag=True, help="Also valid variants whose kernel is not written yet.")
@click.option("--refused", is_flag=True, help="Instead, combinations that make no sense, with the reasons.")
@cache_dir_option
@json_option
def command(
    arches: tuple[str, ...],
    globs: tuple[str, ...],
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
    """
    from fa4build.matrix.arch import arch_named
    from fa4build.matrix.variants import kernel_written, reasons_on_request, refused_variants, valid_variants

    wanted_arches = {arch_named(name).name for name in arches}

    def wanted(variant: "Variant") -> bool:
        in_arch = not wanted_arches or variant.arch in wanted_arches
        return in_arch and (not globs or any(fnmatch.fnmatchcase(variant.id, glob) for glob in globs))

    if refused:
        found = [item for item in refused_variants() if wanted(item.variant)]
        rows = [{"id": item.variant.id, "status": "refused", "reasons": list(item.reasons)} for item in found]
    else:
        valid = [variant for variant in valid_variants() if wanted(variant)]
        written = [variant for variant in valid if kernel_written(variant)]
        status = _statuses(written, cache_dir)
        shown = valid if everything else written
        rows = [{"id": variant.id, "status": status.get(variant.id, "planned")} for variant in shown]
        for row, variant in zip(rows, shown, strict=True):
            if row["status"] == "written" and (reasons := reasons_on_request(variant)):
                row |= {"status": "on request", "reasons": list(reasons)}
    if not rows:
        raise NothingSelectedError("no variant matches. `fa4build list --all` shows every valid one.")
    _print(rows, as_json)


def _statuses(written: list["Variant"], cache_dir: Path | None) -> dict[str, str]:
    """`cached` or `written`, by id. Without a usable compiler there are no keys, so nothing counts as cached."""
    from fa4build.pipeline import find_cached

    try:
        found = find_cached(written, open_cache(cache_dir))
    except ToolchainError:
        return {variant.id: "written" for variant in written}
    return {recipe.name: "written" if entry is None else "cached" for recipe, entry in found}


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    for row in rows:
        reasons = "".join(f"\n           {reason}" for reason in row.get("reasons", ()))
        click.echo(f"{row['status']:10} {row['id']}{reasons}")
