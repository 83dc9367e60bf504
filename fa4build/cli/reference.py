"""docs/reference.md, made from the commands themselves: `python -m fa4build.cli.reference docs/reference.md`."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from fa4build import errors
from fa4build.cli import cli
from fa4build.files import write_atomically

HEAD = """\
# Command reference

Made from the commands by `python -m fa4build.cli.reference docs/reference.md`; do not edit. Every command takes `-h`.
"""


def reference() -> str:
    """The whole page, the same on every machine."""
    parts = [HEAD]
    for name in cli.list_commands(click.Context(cli)):
        parts += _command_pages(cli.get_command(click.Context(cli), name), f"fa4build {name}")
    parts.append(_exit_codes())
    return "\n".join(parts)


def _command_pages(command: click.Command | None, path: str) -> Iterator[str]:
    """A section for a command; a group's commands follow it."""
    assert command is not None
    yield _section(command, path)
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            yield from _command_pages(command.get_command(click.Context(command), name), f"{path} {name}")


def _section(command: click.Command, path: str) -> str:
    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    lines = [f"## {path}", "", "```text", usage, "```", "", *_description(command.help or "")]
    rows = [_option_row(parameter) for parameter in command.params if isinstance(parameter, click.Option)]
    if rows:
        lines += ["", "| option | meaning |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _description(text: str) -> Iterator[str]:
    """Help as markdown; what click is told not to wrap (`\\b`) becomes a block."""
    for number, paragraph in enumerate(inspect.cleandoc(text).split("\n\n")):
        if number:
            yield ""
        if paragraph.startswith("\b"):
            yield from ("```text", *paragraph.split("\n")[1:], "```")
        else:
            yield paragraph


def _option_row(option: click.Option) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    value = (
        "" if option.is_flag else f" {option.make_metavar(click.Context(click.Command('x'))).removesuffix(' RANGE')}"
    )
    notes = [option.help or ""]
    if option.multiple and "Repeatable" not in notes[0]:
        notes.append("Repeatable.")
    if option.show_default and not option.is_flag:
        default = option.default if isinstance(option.default, (tuple, list)) else (option.default,)
        notes.append(f"Default: {', '.join(map(str, default))}.")
    if option.required:
        notes.append("Needed.")
    if option.envvar:
        notes.append(f"Environment: `{option.envvar}`.")
    meaning = " ".join(filter(None, notes)).replace("|", "\\|")
    return f"| `{names}{value}`".replace("|", "\\|").replace("\\|", "|", 1) + f" | {meaning} |"


def _exit_codes() -> str:
    """From the tree of errors."""
    root = errors.Fa4BuildError
    kinds = [
        kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, root) and kind != root
    ]
    rows = [
        f"| {kind.exit_code} | {re.sub(chr(10) + ' *', ' ', (kind.__doc__ or '').strip())} |"
        for kind in sorted(kinds, key=lambda kind: kind.exit_code)
    ]
    return (
        "\n".join(
            [
                "## Exit codes",
                "",
                "| code | meaning |",
                "|---|---|",
                "| 0 | All went well. |",
                "| 1 | Any other error. |",
                *rows,
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    write_atomically(Path(sys.argv[1]), reference().encode("utf-8"))
