"""`fa4build coverage`: whether packs are closed: every problem has a kernel or a reason, every kernel a problem."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fa4build.cli.common import family_option, json_option, print_json, selection_options

if TYPE_CHECKING:
    from fa4build.matrix.selection import Selection
    from fa4build.shipping.coverage import Coverage

_SHOWN = 10


@click.command("coverage")
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
@selection_options
@family_option
@click.option(
    "--against",
    type=click.Choice(("made", "bundle", "api")),
    default="made",
    show_default=True,
    help="What must be there: what the packs were made for (bundle: accept bundles only), or everything that the "
    "functions of fa4_kernels accept.",
)
@json_option
def command(
    files: tuple[Path, ...],
    wanted: "Selection",
    family_name: str,
    against: str,
    as_json: bool,
) -> int:
    """Check that every supported call has a kernel or a documented refusal.

    FILES are pack wheels, pack directories, directories of wheels or bundles; default: dist. The check runs the
    dispatcher on every combination of axis values. Each must map to a kernel that computes it, or to a reason why there
    is none. A kernel that no call reaches is an error. So is a missing kernel: one that a bundle was made with, one
    that is launched together with a kernel in the packs, or one of a selection.

    \b
    Examples:
      fa4build coverage
      fa4build coverage dist/fa4_kernels_sm90a-0.1.0-py3-none-any.whl
      fa4build coverage out/                       a bundle, compared with what it was made with
      fa4build coverage --model config.json --gpu H200 --page-size 16    the kernels of a model
      fa4build coverage out/ --against api --arch sm90 --arch sm100
      fa4build coverage --family flash-attn-4      operators of another family
    """
    from fa4build.errors import CoverageError
    from fa4build.families.registry import DEFAULT, family_named
    from fa4build.shipping.coverage import cover, installed_form, judged, made_for
    from fa4build.shipping.coverage_family import cover_family

    family = family_named(family_name)
    kernels = () if wanted.names_nothing else family.expand(wanted)
    files = files or (Path("dist"),)
    listed = None if against == "api" else made_for(files, family.name)
    if against == "bundle" and listed is None:
        raise click.UsageError("--against bundle needs bundles alone, as `fa4build bundle` writes them.")
    packs = installed_form(files, family.name)
    coverage = cover(packs, kernels) if family.name == DEFAULT else cover_family(packs, family, kernels)
    # What a pack of another family was made for is what its family declares: its recipes need the kernels together.
    as_made = against != "api" and (family.name == DEFAULT or listed is not None or not wanted.names_nothing)
    if as_made:
        coverage = judged(coverage, packs, asked=[kernel.id for kernel in kernels], listed=listed or ())
    if as_json:
        print_json(coverage.as_dict())
    else:
        _print(coverage, as_made=as_made)
    return 0 if coverage.is_closed else CoverageError.exit_code


def _print(coverage: "Coverage", *, as_made: bool) -> None:
    served = sum(coverage.served.values())
    click.echo(f"{coverage.num_problems} configurations; packs for {', '.join(coverage.targets)}")
    click.echo(f"{served:7} dispatched to one of {len(coverage.served)} kernels")
    click.echo(f"{coverage.composed:7} dispatched to a sequence of kernels")
    for reason, count in coverage.refused.items():
        click.echo(f"{count:7} refused: {reason}")
    click.echo(f"{coverage.unwritten_problems:7} refused: no kernel implements it in this version")
    click.echo(f"{coverage.on_request:7} refused: the kernel is opt-in, built only when selected")
    click.echo(f"{coverage.other_targets:7} refused: the target has no pack among these files")
    outside = "not among the kernels that the packs were made for" if as_made else "missing from the packs"
    click.echo(f"{coverage.missing_problems:7} {outside}")
    if coverage.alternatives:
        click.echo(f"{len(coverage.alternatives)} kernels are alternatives that the dispatcher does not choose first")
    for what, names in (("missing", coverage.missing), ("unreachable", coverage.orphans), ("wrong", coverage.wrong)):
        for name in names[:_SHOWN]:
            click.echo(f"{what}: {name}")
        if len(names) > _SHOWN:
            click.echo(f"{what}: and {len(names) - _SHOWN} more")
    click.echo("complete" if coverage.is_closed else "NOT complete")
