"""What commands print: one JSON document, lines that fit the terminal, and colour where a person reads them.

In a pipe or a file nothing is cut, wrapped or coloured, so that other programs get whole lines.
"""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import click

JSON_SCHEMA = 1
"""Version of every JSON document that a command prints; it changes when a field is renamed or removed."""

_COLORS = {
    "ok": "green", "passed": "green", "cached": "green", "complete": "green",
    "compiled": "green", "warning": "yellow", "opt-in": "cyan", "planned": "bright_black", "missing": "yellow",
    "unsupported": "red", "failed": "red", "OUTSIDE": "red", "NOT complete": "red",
}  # fmt: skip
_LEAST_WIDTH = 40
_LEAST_CELL = 12


@dataclass(slots=True)
class Spoken:
    """What a run of the command line has printed so far; the root context's `obj`."""

    has_document: bool = False


def print_json(document: Mapping[str, object]) -> None:
    """The one document on stdout. `schema` is its version."""
    context = click.get_current_context(silent=True)
    if context is not None and isinstance(context.obj, Spoken):
        context.obj.has_document = True
    click.echo(json_text(document))


def json_text(document: Mapping[str, object]) -> str:
    """A document as commands print it."""
    return json.dumps({"schema": JSON_SCHEMA, **document}, indent=1, sort_keys=True)


def note(message: str) -> None:
    """Something said on the way, on stderr."""
    click.echo(message, err=True)


def width_of_terminal() -> int | None:
    """Columns of the terminal that stdout is, None if it is none."""
    return max(shutil.get_terminal_size().columns, _LEAST_WIDTH) if sys.stdout.isatty() else None


def status(word: str, width: int = 0) -> str:
    """A status in its colour, padded. Colour is dropped by click.echo unless stdout is a terminal, and by NO_COLOR."""
    color = _COLORS.get(word)
    padded = word.ljust(width)
    return padded if color is None or os.environ.get("NO_COLOR") else click.style(padded, fg=color)


def wrapped(text: str, indent: str = "  ", first: str = "") -> str:
    """Text in lines that fit the terminal; later lines are indented. Elsewhere the text in one line."""
    width = width_of_terminal()
    if width is None:
        return first + text
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns, numbers to the right. On a terminal the widest columns are shortened until a line fits."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    widths = fitted(widths, width_of_terminal())
    for line in lines:
        cells = [_aligned(shortened(cell, width), width) for cell, width in zip(line, widths, strict=True)]
        click.echo("  ".join(cells).rstrip())


def fitted(widths: Sequence[int], room: int | None) -> list[int]:
    """Widths of columns whose sum, with two spaces between columns, is at most `room` where that can be."""
    found = list(widths)
    while room is not None and sum(found) + 2 * (len(found) - 1) > room and max(found) > _LEAST_CELL:
        found[found.index(max(found))] -= 1
    return found


def shortened(text: str, width: int) -> str:
    """A text of at most `width` characters; the middle goes, since ids differ at both ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def _aligned(cell: str, width: int) -> str:
    return cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)


def human_bytes(size: float) -> str:
    """A size for people: `714 B`, `12.3 kB`, `1.2 GB`."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
