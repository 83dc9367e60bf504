"""`fa4build cache ...`: look after the cache of compiled kernels."""

import dataclasses
import difflib
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa4build.cli.common import cache_dir_option, human_bytes, json_option, note, open_cache, print_json, print_table
from fa4build.errors import CacheCorruptError, NothingSelectedError

if TYPE_CHECKING:
    from fa4build.store.entries import CacheEntry

_UNITS = {"": 1, "B": 1, "k": 10**3, "M": 10**6, "G": 10**9, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class Quantity(click.ParamType):
    """A number with one of some units."""

    def __init__(self, name: str, units: str, example: str) -> None:
        self.name = name
        self._pattern = re.compile(rf"(\d+(?:\.\d+)?)([{units}])B?")
        self._example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number in seconds or bytes."""
        match = self._pattern.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is not a valid {self.name}; write it like {self._example}.", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


@click.group("cache")
def command() -> None:
    """Maintain the cache of compiled kernels.

    \b
    Examples:
      fa4build cache ls
      fa4build cache verify
      fa4build cache prune --older-than 30d --max-size 2G
      fa4build cache export kernels.tar && fa4build cache import kernels.tar --cache-dir elsewhere
    """


@command.command("ls")
@cache_dir_option
@json_option
def list_entries(cache_dir: Path | None, as_json: bool) -> None:
    """List the entries with variant, key, registers, size and last use."""
    cache = open_cache(cache_dir, as_it_is=True)
    entries = cache.entries()
    if as_json:
        print_json({"entries": [_document(entry) for entry in entries]})
        return
    now = time.time()
    rows = [
        (entry.name, entry.key[:12], entry.facts["registers"], human_bytes(entry.size), _ago(now - entry.last_use))
        for entry in entries
    ]
    print_table(("variant", "key", "registers", "size", "last use"), rows)


@command.command("info")
@click.argument("key", required=False)
@cache_dir_option
@json_option
def info(key: str | None, cache_dir: Path | None, as_json: bool) -> None:
    """Show the size of the cache, or everything about one entry.

    KEY is a key, the beginning of a key, or the id of a variant.
    """
    cache = open_cache(cache_dir, as_it_is=True)
    if key is None:
        size = cache.size()
        if as_json:
            print_json({"cache_dir": str(cache.root), **dataclasses.asdict(size)})
            return
        click.echo(f"{cache.root}: {size.entries} entries, {size.objects} objects, {human_bytes(size.object_bytes)}")
        if size.unreferenced_bytes:
            click.echo(
                f"{human_bytes(size.unreferenced_bytes)} belong to no entry. `fa4build cache prune` removes them."
            )
        if any(size.beside.values()):
            parts = ", ".join(f"{name}/ {human_bytes(held)}" for name, held in size.beside.items() if held)
            click.echo(
                f"also in the directory: {parts}; these are rebuilt when needed. `prune --older-than` removes old ones."
            )
        return
    found = [entry for entry in cache.entries() if entry.key.startswith(key) or entry.name == key]
    if not found:
        near = difflib.get_close_matches(key, {entry.name for entry in cache.entries()}, n=1, cutoff=0.8)
        meant = f"Did you mean {near[0]}?" if near else "`fa4build cache ls` lists the entries."
        raise NothingSelectedError(f"{key!r}: no entry has this key or id. {meant}")
    print_json({"entries": [{**_document(entry), "inputs": dict(entry.inputs)} for entry in found]})


@command.command("verify")
@cache_dir_option
@json_option
def verify(cache_dir: Path | None, as_json: bool) -> None:
    """Read every file and compare it with its digest. Fails if anything is damaged.

    The next build compiles a damaged entry again; `prune` removes it.
    """
    cache = open_cache(cache_dir, as_it_is=True)
    problems = cache.verify()
    size = cache.size()
    if as_json:
        print_json({"cache_dir": str(cache.root), "entries": size.entries, "problems": problems})
    if problems:
        for problem in problems:
            note(problem)
        raise CacheCorruptError(
            f"{len(problems)} problems in {cache.root}. The next build compiles the damaged entries again."
        )
    if not as_json:
        click.echo(f"{cache.root}: {size.entries} entries are intact.")


@command.command("prune")
@click.option(
    "--older-than",
    "max_age",
    type=Quantity("age", "smhdw", "30d"),
    help="Remove entries that were not used for this long.",
)
@click.option(
    "--max-size",
    type=Quantity("size", "BkMG", "2G"),
    help="Then remove the least recently used entries until the cache is this small.",
)
@cache_dir_option
@json_option
def prune(max_age: float | None, max_size: float | None, cache_dir: Path | None, as_json: bool) -> None:
    """Remove old entries, and always remove unreferenced files.

    Files that verification keeps (forms/, native/, zig/) are removed with --older-than.

    \b
    Examples:
      fa4build cache prune                        only unreferenced files
      fa4build cache prune --older-than 30d
      fa4build cache prune --max-size 500M
    """
    from fa4build.files import sweep_scratch

    limits = {"max_age_s": max_age, "max_bytes": max_size}
    pruned = open_cache(cache_dir, as_it_is=True).prune(
        **{name: limit for name, limit in limits.items() if limit is not None}
    )
    sweep_scratch()
    if as_json:
        print_json(dataclasses.asdict(pruned))
        return
    click.echo(
        f"removed {pruned.removed_entries} entries, {human_bytes(pruned.freed_bytes)}; "
        f"left: {pruned.kept_entries}, {human_bytes(pruned.kept_bytes)}"
    )


@command.command("export")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--select", "globs", multiple=True, metavar="GLOB", help="The variants to export. Repeatable; default: all."
)
@cache_dir_option
@json_option
def export(file: Path, globs: tuple[str, ...], cache_dir: Path | None, as_json: bool) -> None:
    """Write entries into a tar FILE for another machine."""
    import fnmatch

    cache = open_cache(cache_dir, as_it_is=True)
    entries = cache.entries()
    chosen = [entry for entry in entries if not globs or any(fnmatch.fnmatchcase(entry.name, glob) for glob in globs)]
    if not chosen:
        raise NothingSelectedError(
            f"nothing to export from {cache.root}: --select matches none of {len(entries)} entries. "
            "`fa4build cache ls` lists the entries."
        )
    count = cache.export_tar(file, [entry.key for entry in chosen])
    _tell_moved(file, count, "exported", as_json)


@command.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@cache_dir_option
@json_option
def import_(file: Path, cache_dir: Path | None, as_json: bool) -> None:
    """Read the entries of a tar FILE that `export` wrote. The whole file is checked before anything is stored."""
    _tell_moved(file, open_cache(cache_dir, as_it_is=True).import_tar(file), "imported", as_json)


def _tell_moved(file: Path, count: int, verb: str, as_json: bool) -> None:
    if as_json:
        print_json({"file": str(file), verb: count})
    else:
        click.echo(f"{verb} {count} entries: {file}")


def _document(entry: "CacheEntry") -> dict[str, Any]:
    return {
        "id": entry.name,
        "key": entry.key,
        "facts": entry.facts,
        "objects": {name: dataclasses.asdict(stored) for name, stored in entry.objects.items()},
        "last_use": entry.last_use,
    }


def _ago(seconds: float) -> str:
    """`today`, `3 days ago`: last use is known to within a day."""
    days = int(seconds // 86400)
    return "today" if days < 1 else f"{days} days ago"
