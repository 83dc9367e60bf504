"""`fa4build wheel`: pack compiled kernels and the runtime into wheels."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fa4build.cli.cache import Quantity
from fa4build.cli.common import (
    cache_dir_option,
    evidence_line,
    family_option,
    human_bytes,
    jobs_option,
    json_option,
    note,
    open_cache,
    print_json,
    remote_cache_options,
    selection_options,
)

if TYPE_CHECKING:
    from fa4build.families.interface import Family
    from fa4build.matrix.selection import Selection
    from fa4build.shipping.wheel import WrittenWheel
    from fa4build.store.cache import Cache


@click.command("wheel")
@selection_options
@family_option
@click.option(
    "--platform",
    "platforms",
    multiple=True,
    help="A host platform of the runtime: x86_64, aarch64 (default: both), x86_64-cp314t, ...",
)
@click.option("--no-runtime", is_flag=True, help="Write only the packs of kernels.")
@click.option(
    "--out",
    "out_dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("dist"),
    show_default=True,
    help="The directory for the wheels.",
)
@jobs_option
@cache_dir_option
@remote_cache_options
@click.option("--assert-cached", is_flag=True, help="Fail if anything is not in the cache.")
@click.option("--allow-spills", is_flag=True, help="Accept kernels that spill registers to memory.")
@click.option("--sign", "key_file", type=click.Path(path_type=Path), help="The private key that signs the packs.")
@click.option(
    "--limit",
    "limit_bytes",
    type=Quantity("size", "BkMG", "100M"),
    default="100M",
    show_default=True,
    help="The size limit of a wheel. A larger pack is split by direction, then by head_dim.",
)
@click.option(
    "--single-file", is_flag=True, help="Write one wheel per platform that contains the runtime and the packs."
)
@click.option(
    "--dry-run", is_flag=True, help="Only print which wheels would be written, their sizes, and what is not compiled."
)
@click.option("--sample", is_flag=True, help="With --dry-run: compile the kernels that the sizes are estimated from.")
@json_option
def command(
    wanted: "Selection",
    family_name: str,
    platforms: tuple[str, ...],
    no_runtime: bool,
    out_dir: Path,
    jobs: int | None,
    cache_dir: Path | None,
    remote_cache: str | None,
    remote_cache_write: bool,
    assert_cached: bool,
    allow_spills: bool,
    key_file: Path | None,
    limit_bytes: float,
    single_file: bool,
    dry_run: bool,
    sample: bool,
    as_json: bool,
) -> int:
    """Pack compiled kernels and the runtime into wheels.

    Writes one wheel of kernels for each selected target, which is for every host, and one wheel of the runtime for each
    host platform. Variants that are not in the cache are compiled first. A wheel that would not change is not
    rewritten.

    \b
    Examples:
      fa4build wheel --arch sm90                          into dist/
      fa4build wheel --arch sm100 --arch sm103 --out wheelhouse
      fa4build wheel --arch sm90 --platform aarch64
      fa4build wheel --model gpt-oss/ --model qwen3/ --gpu H200 --page-size 16    the kernels of two models
      fa4build wheel --select 'fwd-sm90a-*-hd128-causal' --no-runtime
      fa4build wheel --arch sm100 --dry-run --sample       sizes, estimated from a sample
      fa4build wheel --arch sm90 --platform x86_64 --single-file
      fa4build wheel --family flash-attn-4 --arch sm90 --no-runtime
    """
    from fa4build.compiling.toolchain import refuse_steering
    from fa4build.families.registry import family_named
    from fa4build.shipping.release import ALL_PLATFORMS, write_wheels
    from fa4build.shipping.signing import load_key

    refuse_steering(os.environ)
    if no_runtime and platforms:
        raise click.UsageError("--no-runtime writes no wheel that --platform could choose; give one of the two.")
    if sample and not dry_run:
        raise click.UsageError("--sample needs --dry-run: it compiles only the kernels that sizes are estimated from.")
    if no_runtime and single_file:
        raise click.UsageError("--single-file joins the runtime and the packs; leave out --no-runtime.")
    hosts = () if no_runtime else platforms or ALL_PLATFORMS
    family = family_named(family_name)
    cache = open_cache(cache_dir, remote_cache, remote_cache_write)
    key = None if key_file is None else load_key(key_file)
    limit = round(limit_bytes)
    if dry_run:
        if sample:
            _compile_sample(wanted, cache, family, jobs, allow_spills)
        return _dry_run(wanted, cache, family, hosts, out_dir, limit, as_json)
    if not assert_cached:
        from fa4build.cli.matrix import build

        code = build(wanted, cache, jobs=jobs, allow_spills=allow_spills, family=family).exit_code
        if code:
            return code
    options = {
        "out_dir": out_dir,
        "platforms": hosts,
        "allow_spills": allow_spills,
        "family": family,
        "sign": key,
        "limit_bytes": limit,
        "single_file": single_file,
    }
    wheels = write_wheels(wanted, cache, **options)
    _print(wheels, as_json)
    return 0


def _compile_sample(
    wanted: "Selection", cache: "Cache", family: "Family", jobs: int | None, allow_spills: bool
) -> None:
    """Compile what forecasts need. A kernel that fails is reported, and missing in the forecast."""
    from fa4build.cli.matrix import build
    from fa4build.matrix.selection import Selection
    from fa4build.shipping.budget import sample_of, traits_of

    kernels = family.expand(wanted)
    globs = tuple(
        name
        for arch in sorted({kernel.arch for kernel in kernels})
        for name in sample_of([traits_of(kernel) for kernel in kernels if kernel.arch == arch])
    )
    build(Selection(globs=globs, alone=True), cache, jobs=jobs, allow_spills=allow_spills, family=family)


def _dry_run(
    wanted: "Selection",
    cache: "Cache",
    family: "Family",
    hosts: tuple[str, ...],
    out_dir: Path,
    limit: int,
    as_json: bool,
) -> int:
    """Names and sizes of the wheels, and the variants that would be compiled first."""
    from fa4build.shipping.launcher_build import platform_named
    from fa4build.shipping.release import forecasts
    from fa4build.shipping.wheel import RUNTIME_NAME

    found = forecasts(wanted, cache, family=family, limit_bytes=limit)
    runtimes = [f"{RUNTIME_NAME} ({platform_named(host).name})" for host in hosts]
    if as_json:
        packs = [dataclasses.asdict(forecast) for forecast in found.packs]
        names = [*(forecast.name for forecast in found.packs), *runtimes]
        facts = {"out_dir": str(out_dir), "wheels": names, "variants": found.num_variants, "limit": limit}
        print_json({**facts, "packs": packs, "missing": list(found.missing)})
        return 0
    for forecast in found.packs:
        size = "size unknown" if forecast.size is None else f"about {human_bytes(forecast.size)}"
        sampled = f"estimated from {forecast.num_sampled} of {forecast.num_kernels} kernels"
        click.echo(f"would write {forecast.name} into {out_dir}/: {size}, {sampled}")
    for name in runtimes:
        click.echo(f"would write {name} into {out_dir}/")
    for name in found.missing:
        click.echo(f"would compile {name}")
    if any(forecast.missing for forecast in found.packs):
        note("Sizes are estimated from a sample of compiled kernels; --sample compiles the sample.")
    return 0


def _print(wheels: tuple["WrittenWheel", ...], as_json: bool) -> None:
    if as_json:
        names = ("sha256", "size", "is_new")
        rows = [{"path": str(wheel.path), **{name: getattr(wheel, name) for name in names}} for wheel in wheels]
        print_json({"wheels": rows})
        return
    for wheel in wheels:
        state = "" if wheel.is_new else ", unchanged"
        click.echo(f"{wheel.path}  {human_bytes(wheel.size)}  sha256 {wheel.sha256[:16]}{state}")
    if line := evidence_line(wheel.path for wheel in wheels):
        click.echo(line)
