"""`fa4build doctor`: can this machine build?"""

import dataclasses
import os
from pathlib import Path

import click

from fa4build.cli.common import cache_dir_option, default_cache_dir, json_option, print_json
from fa4build.cli.output import status, wrapped
from fa4build.errors import ToolchainError


@click.command("doctor")
@cache_dir_option
@json_option
def command(cache_dir: Path | None, as_json: bool) -> int:
    """Check whether this machine can build.

    Checks the compiler and its files, the environment, memory, the cache directory, and the C compiler for the
    launcher. Needs no GPU. The exit code is 6 if a build cannot work here.

    \b
    Example:
      fa4build doctor
    """
    from fa4build.doctor import examine

    checks = examine(cache_dir or default_cache_dir(), os.environ)
    if as_json:
        print_json({"checks": [dataclasses.asdict(check) for check in checks]})
    else:
        for check in checks:
            click.echo(wrapped(f"{check.subject}: {check.found}", " " * 9, status(check.status, 8) + " "))
    return ToolchainError.exit_code if any(check.status == "failed" for check in checks) else 0
