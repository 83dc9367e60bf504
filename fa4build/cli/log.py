"""`fa4build log ID`: what the compiler said."""

from pathlib import Path

import click

from fa4build.cli.common import cache_dir_option, family_option, json_option, open_cache, print_json
from fa4build.errors import NotCachedError


@click.command("log")
@click.argument("variant_id", metavar="ID")
@family_option
@cache_dir_option
@json_option
def command(variant_id: str, family_name: str, cache_dir: Path | None, as_json: bool) -> None:
    """Print the compiler's output for one variant: of the compile in the cache, or of the last one that failed.

    \b
    Examples:
      fa4build log fwd-sm90a-bf16-hd128-causal
    """
    from fa4build.compiling.fork_server import LOG_NAME
    from fa4build.families.registry import family_named
    from fa4build.matrix.selection import Selection
    from fa4build.pipeline import find_cached

    cache, family = open_cache(cache_dir), family_named(family_name)
    ((recipe, entry), *others) = find_cached(family.expand(Selection(globs=(variant_id,))), cache, family=family)
    if others:
        raise click.UsageError(f"{variant_id!r} matches {len(others) + 1} variants. Give the id of one.")
    failed = cache.work_dir(recipe.name, recipe.key) / LOG_NAME
    if entry is not None:
        text = cache.read(entry, "log")
    elif failed.is_file():
        text = failed.read_bytes()
    else:
        raise NotCachedError(
            f"{variant_id} was not compiled with this cache. Run: fa4build matrix --select {variant_id}"
        )
    if as_json:
        status = "failed" if entry is None else "compiled"
        print_json({"id": recipe.name, "key": recipe.key, "status": status, "log": text.decode(errors="replace")})
    else:
        click.echo(text, nl=False)
