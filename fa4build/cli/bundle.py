"""`fa4build bundle OUT`: wheels, a package index and the means to check them, as one directory."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fa4build.cli.common import (
    cache_dir_option,
    evidence_line,
    family_option,
    human_bytes,
    jobs_option,
    json_option,
    open_cache,
    print_json,
    remote_cache_options,
    selection_options,
)

if TYPE_CHECKING:
    from fa4build.matrix.selection import Selection
    from fa4build.shipping.bundle import Bundle


@click.command("bundle")
@click.argument("out", type=click.Path(path_type=Path))
@selection_options
@family_option
@click.option(
    "--platform",
    "platforms",
    multiple=True,
    help="A host platform of the runtime: x86_64, aarch64 (default: both), x86_64-cp314t, ...",
)
@click.option(
    "--include",
    "include",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="A wheel or a directory of wheels that the machines lack, e.g. torch. Repeatable.",
)
@click.option(
    "--sign", "key_file", type=click.Path(path_type=Path), help="The private key that signs the packs and the bundle."
)
@jobs_option
@cache_dir_option
@remote_cache_options
@click.option("--assert-cached", is_flag=True, help="Fail if anything is not in the cache.")
@click.option("--allow-spills", is_flag=True, help="Accept kernels that spill registers to memory.")
@json_option
def command(
    out: Path,
    wanted: "Selection",
    family_name: str,
    platforms: tuple[str, ...],
    include: tuple[Path, ...],
    key_file: Path | None,
    jobs: int | None,
    cache_dir: Path | None,
    remote_cache: str | None,
    remote_cache_write: bool,
    assert_cached: bool,
    allow_spills: bool,
    as_json: bool,
) -> int:
    """Write a bundle for machines without a network into OUT.

    The bundle contains the selected packs, the runtime for each platform, a static package index, a requirements file
    with digests, an SBOM, a page for the operator, and a check that needs only Python. An older bundle in OUT is
    replaced as a whole.

    \b
    Examples:
      fa4build bundle out --arch sm90 --platform x86_64
      fa4build bundle out --arch sm100 --arch sm103 --sign release.key
      fa4build bundle out --arch sm90 --include wheels-of-torch/
    """

    from fa4build.compiling.toolchain import refuse_steering
    from fa4build.families.registry import family_named
    from fa4build.files import scratch_directory
    from fa4build.shipping.bundle import check_target, write_bundle
    from fa4build.shipping.release import ALL_PLATFORMS, write_wheels
    from fa4build.shipping.signing import load_key

    refuse_steering(os.environ)
    check_target(out)
    cache = open_cache(cache_dir, remote_cache, remote_cache_write)
    family = family_named(family_name)
    key = None if key_file is None else load_key(key_file)
    if not assert_cached:
        from fa4build.cli.matrix import build

        code = build(wanted, cache, jobs=jobs, allow_spills=allow_spills, family=family).exit_code
        if code:
            return code
    with scratch_directory("wheels") as directory:
        options: dict[str, Any] = {"platforms": platforms or ALL_PLATFORMS, "allow_spills": allow_spills, "sign": key}
        wheels = write_wheels(wanted, cache, out_dir=directory, family=family, **options)
        bundle = write_bundle(out, [wheel.path for wheel in wheels], include=include, sign=key)
    _print(bundle, as_json)
    return 0


def _print(bundle: "Bundle", as_json: bool) -> None:
    if as_json:
        wheels = {wheel.file_name: {"sha256": wheel.sha256, "size": wheel.size} for wheel in bundle.wheels}
        facts = {"path": str(bundle.path), "files": bundle.num_files, "size": bundle.size, "key_id": bundle.key_id}
        print_json({**facts, "wheels": wheels})
        return
    for wheel in bundle.wheels:
        click.echo(f"{wheel.file_name}  {human_bytes(wheel.size)}  sha256 {wheel.sha256[:16]}")
    signed = f", signed by {bundle.key_id}" if bundle.key_id else ""
    ours = [wheel.file_name for wheel in bundle.wheels if wheel.project.startswith("fa4-kernels")]
    if line := evidence_line(bundle.path / "wheels" / name for name in ours):
        click.echo(line)
    click.echo(f"{bundle.path}: {bundle.num_files} files, {human_bytes(bundle.size)}{signed}. Check: sh verify.sh")
