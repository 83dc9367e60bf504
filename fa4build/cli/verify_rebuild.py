"""`fa4build verify-rebuild WHEEL`: whether a wheel comes out again from its recorded inputs."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fa4build.cli.common import jobs_option, json_option, print_json
from fa4build.files import scratch_directory

if TYPE_CHECKING:
    from fa4build.families.interface import Family
    from fa4build.matrix.selection import Selection
    from fa4build.shipping.rebuild import Rebuild


@click.command("verify-rebuild")
@click.argument("wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@jobs_option
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="A cache with compiled kernels, to compare the packing alone. Default: an empty one; everything is compiled.",
)
@json_option
def command(wheel: Path, jobs: int | None, cache_dir: Path | None, as_json: bool) -> int:
    """Build a wheel again and compare it byte for byte.

    The ids, tuning, toolchain and sources that the wheel records must be the same here; otherwise the command prints
    the first difference and compiles nothing. Then it compares every cubin and launch plan, and the whole wheel. A
    signed wheel is packed with its own signatures, so the key is not needed.

    \b
    Examples:
      fa4build verify-rebuild dist/fa4_kernels_sm90a-0.1.0-py3-none-any.whl
      fa4build verify-rebuild dist/fa4_kernels-0.1.0-cp310-abi3-manylinux_2_28_aarch64.whl
    """
    from fa4build.compiling.toolchain import refuse_steering
    from fa4build.errors import RebuildError
    from fa4build.shipping.rebuild import rebuild
    from fa4build.store.cache import Cache

    refuse_steering(os.environ)
    with scratch_directory("rebuild") as scratch:
        cache = Cache(cache_dir or Path(scratch))

        def build_all(selection: "Selection", family: "Family") -> None:
            from fa4build.cli.matrix import build

            build(selection, cache, jobs=jobs, family=family, allow_spills=True)

        result = rebuild(wheel, cache, build_all)
    _print(result, as_json)
    return 0 if result.is_reproduced else RebuildError.exit_code


def _print(result: "Rebuild", as_json: bool) -> None:
    if as_json:
        print_json({**dataclasses.asdict(result), "is_reproduced": result.is_reproduced})
        return
    for difference in result.differences:
        click.echo(f"{difference.what}: {difference.reason}")
    if result.num_kernels:
        click.echo(f"{result.num_equal} of {result.num_kernels} kernels are equal")
    click.echo(f"{result.wheel}: {'equal, byte for byte' if result.is_reproduced else 'NOT reproduced'}")
