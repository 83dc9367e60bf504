"""`fa4build numerics`: the figures the design rests on, computed here and now."""

import dataclasses
import time
from typing import TYPE_CHECKING

import click

from fa4build.cli.common import json_option, note, print_json, print_table

if TYPE_CHECKING:
    from fa4build.numerics.figures import Figure

GROUPS = ("exp2", "rescaling", "bf16 P", "fp8 P", "roofline")


@click.command("numerics")
@click.option("--group", "groups", multiple=True, type=click.Choice(GROUPS), help="Only these. Repeatable.")
@click.option("--notes", is_flag=True, help="Also explain each tolerance.")
@json_option
@click.pass_context
def command(ctx: click.Context, groups: tuple[str, ...], notes: bool, as_json: bool) -> None:
    """Recompute the published values behind the design from the kernels' own device code.

    Polynomial exp2, conditional rescaling, P in bf16 and fp8, rooflines: prints each published value beside ours, with
    its tolerance. The exit code is 1 if a value is outside its tolerance. Needs neither a GPU nor a compiler.

    \b
    Examples:
      fa4build numerics                      everything
      fa4build numerics --group roofline     one group, which is quick
      fa4build numerics --json
    """
    from fa4build.numerics import figures

    start = time.monotonic()
    found: list[Figure] = []
    for group in groups or GROUPS:
        rows = figures.figures(group)
        found += rows
        if not as_json:
            _print(group, rows, notes)
    outside = sum(not figure.holds for figure in found)
    if as_json:
        print_json({"values": [dataclasses.asdict(figure) | {"holds": figure.holds} for figure in found]})
    note(f"{len(found)} values, {outside} outside their tolerance, {time.monotonic() - start:.1f} s")
    ctx.exit(1 if outside else 0)


def _print(group: str, rows: "tuple[Figure, ...]", notes: bool) -> None:
    click.echo(f"\n{group}")
    head = ("", "published", "here", "tolerance", "", *(("",) if notes else ()))
    print_table(
        head,
        [
            (
                figure.name,
                _number(figure.published, figure.unit),
                _number(figure.ours, figure.unit),
                f"± {figure.tolerance:.2g}" if figure.tolerance else "exact",
                "ok" if figure.holds else "OUTSIDE",
                *((figure.note,) if notes else ()),
            )
            for figure in rows
        ],
    )


def _number(value: float, unit: str) -> str:
    """Three or so significant digits; shares of 99 % and more keep three decimals."""
    if unit == "%":
        return f"{value:.3f} %" if 99 <= value < 100 else f"{value:.1f} %"
    return f"{value:g} {unit}".rstrip() if value == round(value) else f"{value:.3g} {unit}".rstrip()
