"""`fa4build inspect FILE`: what a file holds."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fa4build.cli.common import json_option
from fa4build.cli.output import print_json, print_table, wrapped

if TYPE_CHECKING:
    from fa4build.shipping.inspect import Report


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def command(file: Path, as_json: bool) -> None:
    """Show the contents of a wheel, pack, manifest, cubin, launcher or launch plan.

    Digests are checked as the file is read. A damaged file is an error.

    \b
    Examples:
      fa4build inspect dist/fa4_kernels_sm90a-0.1.0-py3-none-any.whl
      fa4build inspect kernel.cubin
    """
    from fa4build.errors import WheelError
    from fa4build.shipping.inspect import inspect_file

    if file.is_dir() and not (file / "manifest.json").is_file():
        raise WheelError(f"{file}: is a directory without a pack. Give a wheel, a pack directory, or another file.")
    report = inspect_file(file)
    if as_json:
        print_json(report.as_dict())
    else:
        _print(report)


def _print(report: "Report") -> None:
    """A line a fact, then the parts as a table."""
    click.echo(f"{report.kind}: {report.name}")
    for name, value in report.facts.items():
        click.echo(wrapped(f"{name}: {_text(value)}", " " * 4, "  "))
    if report.rows:
        click.echo("")
        print_table(tuple(report.rows[0]), [[_text(value) for value in row.values()] for row in report.rows])


_DIGEST = re.compile(r"[0-9a-f]{64}")


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    text = str(value)
    return text[:16] if _DIGEST.fullmatch(text) else text  # --json has all of it
