"""`fa4build log ID`: what the compiler said."""

from pathlib import Path

import click

from fa4build.cli.common import cache_dir_option, family_option, open_cache
from fa4build.errors import NotCachedError


@click.command("log")
@click.argument("variant_id", metavar="ID")
@family_option
@cache_dir_option
def command(variant_id: str, family_name: str, cache_dir: Path | None) -> None:
    """Print the log of one variant's compile: of the one in the cache, or of the last one that failed.

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
        raise click.UsageError(f"{variant_id!r} is {len(others) + 1} variants; name one.")
    failed = cache.work_dir(recipe.name, recipe.key) / LOG_NAME
    if entry is not None:
        click.echo(cache.read(entry, "log"), nl=False)
    elif failed.is_file():
        click.echo(failed.read_bytes(), nl=False)
    else:
        raise NotCachedError(f"{variant_id}: was not compiled here. Run: fa4build matrix --select {variant_id}")
