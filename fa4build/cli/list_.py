"""`fa4build list`: what there is."""

import fnmatch
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa4build.cli.common import cache_dir_option, family_option, json_option, open_cache, selection_options
from fa4build.cli.output import print_json, status, wrapped
from fa4build.errors import NothingSelectedError, ToolchainError

if TYPE_CHECKING:
    from fa4build.families.interface import Family
    from fa4build.matrix.axes import Variant
    from fa4build.matrix.selection import Selection

STATES = ("cached", "implemented", "opt-in", "planned", "unsupported")
_WIDTH = max(map(len, STATES))


@click.command("list")
@selection_options
@family_option
@click.option("--all", "everything", is_flag=True, help="Also list planned variants, which have no kernel yet.")
@click.option(
    "--unsupported", "--refused", "refused", is_flag=True, help="Instead, list unsupported combinations with reasons."
)
@click.option("--grid", "as_grid", is_flag=True, help="Print a table per target and op instead of a list.")
@cache_dir_option
@json_option
def command(
    wanted: "Selection",
    family_name: str,
    everything: bool,
    refused: bool,
    as_grid: bool,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """List variants and their state.

    `cached` is compiled, `implemented` can be compiled, `opt-in` can be compiled but is built only when selected,
    `planned` is valid but has no kernel yet, `unsupported` is a combination that makes no sense.

    \b
    Examples:
      fa4build list                                what can be built
      fa4build list --grid --arch sm90             the same as a table
      fa4build list --arch sm100 --all             also what is planned
      fa4build list --unsupported --select '*2cta*'    what cannot be built, and why
      fa4build list --model config.json --gpu H200    the kernels of a model
      fa4build list --family quack                 the kernels of another family
    """
    from fa4build.families.registry import DEFAULT, family_named

    family = family_named(family_name)
    if refused and (wanted.specs or family.name != DEFAULT):
        raise click.UsageError("--unsupported lists combinations of axes; leave out --spec, --model and --family.")
    if as_grid and (refused or family.name != DEFAULT):
        raise click.UsageError("--grid shows the kernels of fa4; leave out --unsupported and --family.")
    if family.name != DEFAULT:
        rows = _of_family(family, wanted, cache_dir)
    elif refused:
        rows = _refused(wanted)
    else:
        rows = _valid(family, wanted, cache_dir, with_planned=everything)
    if not rows:
        raise _nothing(wanted, among_refused=refused)
    if as_json:
        print_json({"variants": rows})
    else:
        for line in _grid_lines(rows) if as_grid else _lines(rows):
            click.echo(line)


def _nothing(wanted: "Selection", *, among_refused: bool) -> NothingSelectedError:
    """Why no variant matches."""
    from fa4build.matrix.variants import no_match, valid_variants

    ids = [variant.id for variant in valid_variants()]
    for glob in () if among_refused else wanted.globs:
        if not any(fnmatch.fnmatchcase(name, glob) for name in ids):
            return no_match(glob, ids)
    if among_refused:
        return NothingSelectedError("no unsupported combination matches. `fa4build list --all` shows the valid ones.")
    return NothingSelectedError("no implemented variant matches. `fa4build list --all` also shows planned ones.")


def _matches(wanted: "Selection", variant: "Variant") -> bool:
    """Whether arch and globs hold."""
    from fa4build.matrix.arch import arch_named

    in_arch = not wanted.arches or variant.arch in {arch_named(name).name for name in wanted.arches}
    return in_arch and (not wanted.globs or any(fnmatch.fnmatchcase(variant.id, glob) for glob in wanted.globs))


def _refused(wanted: "Selection") -> list[dict[str, Any]]:
    from fa4build.matrix.variants import refused_variants

    found = [item for item in refused_variants() if _matches(wanted, item.variant)]
    return [{"id": item.variant.id, "status": "unsupported", "reasons": list(item.reasons)} for item in found]


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
    states = _statuses(written, cache_dir, family)
    shown = valid if with_planned else written
    rows = [{"id": variant.id, "status": states.get(variant.id, "planned")} for variant in shown]
    for row, variant in zip(rows, shown, strict=True):
        if row["status"] == "implemented" and (reasons := reasons_on_request(variant)):
            row |= {"status": "opt-in", "reasons": list(reasons)}
    return rows


def _of_family(family: "Family", wanted: "Selection", cache_dir: Path | None) -> list[dict[str, Any]]:
    """Of another family: every declared kernel; those outside its default matrix are `opt-in`."""
    from dataclasses import replace

    from fa4build.matrix.selection import Selection

    named = family.expand(wanted if wanted.globs else replace(wanted, globs=("*",)))
    default = {kernel.id for kernel in family.expand(Selection(arches=wanted.arches))}
    states = _statuses(named, cache_dir, family)
    opt_in = {kernel.id for kernel in named} - default
    return [
        {"id": name, "status": "opt-in" if state == "implemented" and name in opt_in else state}
        for name, state in states.items()
    ]


def _statuses(kernels: Sequence[Any], cache_dir: Path | None, family: "Family") -> dict[str, str]:
    """`cached` or `implemented`, by id. Without a usable compiler there are no keys, so nothing counts as cached."""
    from fa4build.pipeline import find_cached

    try:
        found = find_cached(kernels, open_cache(cache_dir), family=family)
    except ToolchainError:
        return {kernel.id: "implemented" for kernel in kernels}
    return {recipe.name: "implemented" if entry is None else "cached" for recipe, entry in found}


# --- for people -------------------------------------------------------------------------------------------------------


def _lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line a variant; each reason once, by a number, at the end; then the totals."""
    numbers: dict[str, int] = {}
    for row in rows:
        marks = [numbers.setdefault(reason, len(numbers) + 1) for reason in row.get("reasons", ())]
        yield f"{status(row['status'], _WIDTH)} {row['id']}" + "".join(f" [{number}]" for number in marks)
    if numbers:
        yield ""
    for reason, number in numbers.items():
        yield wrapped(reason, " " * 5, f"[{number}]".ljust(5))
    yield _total(rows)


def _total(rows: list[dict[str, Any]]) -> str:
    counts = Counter(row["status"] for row in rows)
    return f"{len(rows)} variants: " + ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])


SIGNS = {"cached": "#", "implemented": "o", "opt-in": "+", "planned": "."}


def _grid_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A table for each op and target: features against head dims; in a cell a sign for each mask of each dtype."""
    from fa4build.matrix.axes import parse_axes

    groups: dict[str, dict[Any, str]] = {}
    for row in rows:
        variant = parse_axes(row["id"])
        groups.setdefault(f"{variant.op}, {variant.arch}", {})[variant] = SIGNS[row["status"]]
    for title, signs in groups.items():
        yield from _one_grid(title, signs)
    yield "# cached, o implemented, + opt-in, . planned"
    yield _total(rows)


def _one_grid(title: str, signs: "dict[Variant, str]") -> Iterator[str]:
    """Blocks of signs: dtypes apart, masks side by side."""
    dims, dtypes, masks = (
        list(dict.fromkeys(getattr(variant, axis) for variant in signs)) for axis in ("head_dims", "dtype", "mask")
    )
    placed = {(_kind(v), v.head_dims, v.dtype, v.mask): sign for v, sign in signs.items()}
    kinds = list(dict.fromkeys(_kind(variant) for variant in signs))
    cells = {
        (kind, dim): " ".join("".join(placed.get((kind, dim, t, m), " ") for m in masks) for t in dtypes).rstrip()
        for kind in kinds
        for dim in dims
    }
    columns = [str(a) if a == b else f"{a}x{b}" for a, b in dims]
    widths = [
        max(len(name), *(len(cells[kind, dim]) for kind in kinds)) for name, dim in zip(columns, dims, strict=True)
    ]
    first = max(map(len, (*kinds, title)))
    yield "  ".join((title.ljust(first), *(n.ljust(w) for n, w in zip(columns, widths, strict=True)))).rstrip()
    for kind in kinds:
        line = (cells[kind, dim].ljust(width) for dim, width in zip(dims, widths, strict=True))
        yield "  ".join((kind.ljust(first), *line)).rstrip()
    yield f"  in a cell: {', '.join(dtypes)}" + (f"; each {', '.join(masks)}" if len(masks) > 1 else "")
    yield ""


def _kind(variant: "Variant") -> str:
    """`dense`, `varlen split softcap`."""
    named = [(variant.cta_group == 2, "2cta")]
    named += [(getattr(variant, axis), axis) for axis in ("split", "deterministic", "softcap", "sink")]
    return " ".join((variant.layout, *(word for is_on, word in named if is_on)))
