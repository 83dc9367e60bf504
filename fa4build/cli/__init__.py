"""The command line: the only part that prints, reads the environment, or ends the process.

One module a command, imported when the command runs. Results go to stdout, everything said on the way to stderr, so
that `--json` leaves nothing but one JSON document on stdout.
"""

import difflib
import importlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from fa4build import __version__
from fa4build.cli.commit import commit
from fa4build.cli.failures import failure_of
from fa4build.cli.output import Spoken
from fa4build.errors import Fa4BuildError

COMMANDS = {
    "plan": ("plan", "List the kernels that models call, from their config.json."),
    "matrix": ("matrix", "Compile the variant matrix into the cache."),
    "wheel": ("wheel", "Pack compiled kernels and the runtime into wheels."),
    "verify": ("verify", "Test compiled kernels: binaries, simulation, records from GPUs."),
    "list": ("list_", "List variants: cached, implemented, planned, unsupported."),
    "log": ("log", "Print the compiler's output for one variant."),
    "explain": ("explain", "Show everything known about one variant."),
    "inspect": ("inspect", "Show the contents of a wheel, pack, manifest, cubin or launch plan."),
    "bundle": ("bundle", "Write wheels, index, digests and checks for machines without a network."),
    "coverage": ("coverage", "Check that every supported call has a kernel or a documented refusal."),
    "verify-rebuild": ("verify_rebuild", "Rebuild a wheel from its recorded inputs and compare."),
    "key": ("key", "Make and show the keys that sign packs and bundles."),
    "cache": ("cache", "Maintain the cache of compiled kernels."),
    "numerics": ("numerics", "Recompute the published values behind the design."),
    "report": ("report", "Write one HTML page about everything built and verified."),
    "doctor": ("doctor", "Check whether this machine can build."),
}
"""Name -> (module in this package with a click command called `command`, one line of help)."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


class LazyGroup(click.Group):
    """A group that knows its commands by name, and imports the one that is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"{__name__}.{COMMANDS[cmd_name][0]}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does; a name that is unknown is answered with the nearest ones."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=3, cutoff=0.5)
            meant = f"Did you mean {' or '.join(near)}?" if near else "`fa4build --help` lists the commands."
            raise click.UsageError(f"There is no command {args[0]!r}. {meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `--help`, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _version(ctx: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    """`fa4build 0.1.0 (commit 0123456789ab)`."""
    if is_wanted and not ctx.resilient_parsing:
        found = commit()
        click.echo(f"fa4build {__version__}" + (f" (commit {found[:12]})" if found else ""))
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_version,
    help="Show the version and the commit, and exit.",
)
def cli() -> None:
    """Build FlashAttention-4 kernels ahead of time. Building needs no GPU, running needs no compiler.

    \b
    Examples:
      fa4build matrix --arch sm90        compile the default matrix for Hopper into the cache
      fa4build wheel --arch sm90         pack the kernels and the runtime into dist/
      fa4build list --select '*hd128*'   show what exists

    \b
    Every command accepts --json, and -h for its own help and examples.
    Every kind of error has its own exit code: 2 variant, 3 nothing selected, 4 render, 5 compile,
    6 toolchain, 7 cache, 8 wheel, 9 launch plan, 10 simulation, 11 not cached,
    12 key, 13 coverage, 14 rebuild, 15 bundle, 16 file.
    """


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process. `argv` is without the program's name; default: the process's."""
    warnings.showwarning = _show_warning
    arguments, spoken = list(sys.argv[1:] if argv is None else argv), Spoken()
    try:
        code: Any = cli.main(args=arguments, prog_name="fa4build", standalone_mode=False, obj=spoken)
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED
        _say("interrupted. Finished work is kept; run the same command again to continue.")
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads our output any more: no second error about that
        code = 1
    except (Fa4BuildError, click.ClickException, OSError) as error:
        code = _fail(error, as_json="--json" in arguments and not spoken.has_document)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(error: Exception, *, as_json: bool) -> int:
    """One message on stderr, and with --json a document on stdout unless there is one already. The exit code."""
    failure = failure_of(error)
    if isinstance(error, click.ClickException):
        error.show()
    else:
        _say(failure.message)
    if as_json:
        click.echo(failure.as_json())
    return failure.exit_code


def _say(message: str) -> None:
    click.echo(f"fa4build: error: {message}", err=True)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"fa4build: warning: {message}", err=True)
