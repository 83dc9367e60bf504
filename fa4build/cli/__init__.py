"""The command line: the only part that prints, reads the environment, or ends the process.

One module a command, imported when the command runs. Results go to stdout, everything said on the way to stderr, so
that `--json` leaves nothing but one JSON document on stdout.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

import click

from fa4build import __version__
from fa4build.errors import Fa4BuildError

COMMANDS = {
    "plan": ("plan", "Say which kernels models need, from their config.json."),
    "matrix": ("matrix", "Compile the variant matrix into the cache."),
    "wheel": ("wheel", "Pack compiled kernels and the runtime into wheels."),
    "verify": ("verify", "Prove compiled kernels: binaries, simulation, records from GPUs."),
    "list": ("list_", "List variants: built, written, planned, refused."),
    "log": ("log", "Print what the compiler said about one variant."),
    "explain": ("explain", "Tell everything known about one variant."),
    "inspect": ("inspect", "Look into a wheel, pack, manifest, cubin or launch plan."),
    "bundle": ("bundle", "Wheels, index, digests and checks for machines without a network."),
    "coverage": ("coverage", "Prove that packs answer every problem, or say why not."),
    "verify-rebuild": ("verify_rebuild", "Build a wheel again from its recorded inputs, and compare."),
    "key": ("key", "Make and show keys that sign packs and bundles."),
    "cache": ("cache", "Look after the cache of compiled kernels."),
    "numerics": ("numerics", "Reproduce the published figures behind the design."),
    "report": ("report", "Write one HTML page about everything built and proven."),
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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `--help`, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="fa4build")
def cli() -> None:
    """Build FlashAttention-4 kernels ahead of time: no GPU to build, no compiler to run.

    \b
    Examples:
      fa4build matrix --arch sm90        compile every variant for Hopper into the cache
      fa4build wheel --arch sm90         pack them, with the runtime, into dist/
      fa4build list --select '*hd128*'   what there is

    \b
    Every command takes --json, and -h for its own help and examples.
    Errors end with a code of their own: 2 variant, 3 nothing selected, 4 render, 5 compile,
    6 toolchain, 7 cache, 8 wheel, 9 launch plan, 10 simulation, 11 not cached,
    12 key, 13 coverage, 14 rebuild, 15 bundle.
    """


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process. `argv` is without the program's name; default: the process's."""
    warnings.showwarning = _show_warning
    try:
        code = cli.main(args=None if argv is None else list(argv), prog_name="fa4build", standalone_mode=False)
    except Fa4BuildError as error:
        code = _report(str(error), error.exit_code)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = _report("interrupted. What was finished is kept; run the same command again to go on.", INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads our output any more: no second error about that
        code = 1
    except OSError as error:
        code = _report(str(error), 1)
    sys.exit(code if isinstance(code, int) else 0)


def _report(message: str, code: int) -> int:
    click.echo(f"fa4build: error: {message}", err=True)
    return code


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"fa4build: warning: {message}", err=True)
