"""What several commands share: options, how the cache is found, and how values are shown."""

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fa4build.cli.output import human_bytes, note, print_json, print_table

if TYPE_CHECKING:
    from fa4build.families.interface import Family
    from fa4build.matrix.selection import Selection
    from fa4build.runtime.fa4_kernels.models.needs import Use
    from fa4build.store.cache import Cache

__all__ = ["human_bytes", "note", "print_json", "print_table"]

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else."
)

cache_dir_option = click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="FA4BUILD_CACHE_DIR",
    show_envvar=True,
    help="The cache of compiled kernels. Default: in the user's cache directory.",
)


def remote_cache_options(command: Command) -> Command:
    """`--remote-cache` and `--remote-cache-write`."""
    for option in (
        click.option("--remote-cache-write", is_flag=True, help="Also upload what is compiled here."),
        click.option(
            "--remote-cache",
            metavar="URL",
            envvar="FA4BUILD_REMOTE_CACHE",
            show_envvar=True,
            help="A shared cache to read: http(s)://host/ (bazel-remote's /ac and /cas) or file:///directory.",
        ),
    ):
        command = option(command)
    return command


jobs_option = click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    help="The number of parallel compiles. Default: one per core, as memory allows.",
)


family_option = click.option(
    "--family",
    "family_name",
    default="fa4",
    show_default=True,
    metavar="NAME",
    help="The family of kernels: fa4, flash-attn-4, quack, another installed family, or module:ATTRIBUTE.",
)


_SELECTION = (
    click.option(
        "--arch",
        "arches",
        multiple=True,
        metavar="ARCH",
        help="A target: sm90, sm100, sm103, or a GPU such as H200. Repeatable.",
    ),
    click.option(
        "--select",
        "globs",
        multiple=True,
        metavar="GLOB",
        help="A glob pattern over ids, e.g. '*-hd128-*'. Repeatable.",
    ),
    click.option(
        "--spec",
        "specs",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="A specification, a TOML file that lists variants. Several add up.",
    ),
    click.option(
        "--model",
        "models",
        multiple=True,
        metavar="CONFIG",
        help="A model's config.json, or its directory: the kernels that its layers call on --gpu. Several add up.",
    ),
)
_USE = (
    click.option(
        "--gpu", "gpus", multiple=True, metavar="GPU", help="A GPU such as H200, or a target such as sm90. Repeatable."
    ),
    click.option(
        "--for", "purpose", type=click.Choice(("serving", "training")), default="serving", show_default=True,
        help="What the models are used for.",
    ),
    click.option("--page-size", type=click.IntRange(min=1), help="Serving: KV tokens per page. Default: no pages."),
    click.option("--cache-dtype", metavar="DTYPE", help="Serving: bf16, fp16, e4m3 (fp8), e5m2. Default: the model's."),
    click.option(
        "--query-rows", type=click.IntRange(min=1), default=1, show_default=True,
        help="Serving: query tokens per sequence in a decoding step; more than 1 with speculative decoding.",
    ),
    click.option("--deterministic", is_flag=True, help="Training: gradients with the same bits in every run."),
    click.option("--tp", "ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Parallel ranks."),
)  # fmt: skip


def use_options(command: Command) -> Command:
    """`--gpu`, `--for` and what goes with them; the command gets `gpus` and `use`, a `needs.Use`."""

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        return command(**_with_use(given))

    return _decorated(run, _USE)


_OF_USE = ("purpose", "page_size", "cache_dtype", "query_rows", "deterministic", "ranks")


def _without_use(given: dict[str, Any]) -> dict[str, Any]:
    """Without a model there is no use; what a use is made of costs a tenth of a cached matrix to import."""
    return {name: value for name, value in given.items() if name not in _OF_USE} | {"use": None}


def _with_use(given: dict[str, Any]) -> dict[str, Any]:
    from fa4build.runtime.fa4_kernels.models.needs import Use

    given["use"] = Use(
        purpose=given.pop("purpose"),
        page_size=given.pop("page_size"),
        cache_dtype=given.pop("cache_dtype"),
        query_rows=given.pop("query_rows"),
        deterministic=given.pop("deterministic"),
        tensor_parallel=given.pop("ranks"),
    )
    return given


def selection_options(command: Command) -> Command:
    """Which kernels, by target, pattern, specification or model; the command gets `wanted`, a `Selection`.

    Specifications and models add up; --arch, --gpu and --select narrow them.
    """

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        given = _with_use(given) if given["models"] else _without_use(given)
        chosen = {name: given.pop(name) for name in ("arches", "globs", "specs", "models", "gpus", "use")}
        return command(wanted=selection(**chosen), **given)

    return _decorated(run, (*_SELECTION, *_USE))


def _decorated(command: Any, options: Sequence[Callable[[Any], Any]]) -> Any:
    for option in reversed(options):
        command = option(command)
    return command


def selection(
    arches: Sequence[str],
    globs: Sequence[str],
    specs: Sequence[Path] = (),
    models: Sequence[str] = (),
    gpus: Sequence[str] = (),
    use: "Use | None" = None,
) -> "Selection":
    """The value of the selection options. What models have no kernel for is told on stderr."""
    from fa4build.matrix.selection import Selection

    if not models:
        return Selection(arches=(*arches, *map(_arch_of_gpu, gpus)), globs=tuple(globs), specs=tuple(specs))
    from fa4build.matrix.planning import plan_of_files
    from fa4build.runtime.fa4_kernels.models.needs import Use

    plan = plan_of_files(models, (*gpus, *(() if gpus else arches)), use or Use())
    for lack in plan.unserved:
        note(f"without a kernel: {lack}")
    return Selection(arches=tuple(arches), globs=tuple(globs), specs=(*specs, plan.spec()))


def _arch_of_gpu(name: str) -> str:
    from fa4build.errors import VariantError
    from fa4build.runtime.fa4_kernels.errors import InputError
    from fa4build.runtime.fa4_kernels.models.gpus import gpu_named

    try:
        return gpu_named(name).target
    except InputError as error:
        raise VariantError(str(error)) from error


def tell_left_out(wanted: "Selection", family: "Family") -> None:
    """One line on stderr about variants that patterns match and nobody has written; nothing where there are none."""
    from fa4build.families.registry import DEFAULT

    if family.name != DEFAULT or not (wanted.globs or wanted.specs):
        return
    from fa4build.matrix.unwritten import summary_of
    from fa4build.matrix.variants import expansion

    found = expansion(wanted)
    if found.left_out:
        note(summary_of(found.left_out, len(found.variants) - len(found.helpers)))
    if found.helpers:
        note(f"with {', '.join(variant.id for variant in found.helpers)}, which the selected kernels are launched with")


def open_cache(
    cache_dir: Path | None, remote: str | None = None, remote_write: bool = False, *, as_it_is: bool = False
) -> "Cache":
    """The cache that `--cache-dir` names, or the user's; in front of the remote one, if there is one.

    One that this user may not write is read, and what it lacks is kept elsewhere, which a line on stderr says; unless
    the directory is wanted `as_it_is`.
    """
    from fa4build.store.cache import Cache, lack_of_rights

    root = cache_dir or default_cache_dir()
    below = None
    if not as_it_is and (lack := lack_of_rights(root)):
        below, root = Cache(root), _writable_instead(root)
        note(f"{below.root}: {lack}; it is read, and what it lacks is kept in {root}")
    if not remote:
        if remote_write:
            raise click.UsageError("--remote-cache-write needs --remote-cache URL.")
        return Cache(root, below=below)
    from fa4build.store.remote_cache import SharedCache, store_at

    try:
        return SharedCache(root, store_at(remote), writes=remote_write, below=below)
    except ValueError as error:
        raise click.UsageError(f"--remote-cache: {error}.") from None


def _writable_instead(root: Path) -> Path:
    """The user's own cache, or a folder of the user's among the temporary files."""
    import os
    import tempfile

    from fa4build.store.cache import lack_of_rights

    own = default_cache_dir()
    if own.resolve() != root.resolve() and not lack_of_rights(own):
        return own
    instead = Path(tempfile.gettempdir()) / f"fa4build-cache-{os.getuid()}"
    instead.mkdir(mode=0o700, exist_ok=True)
    if instead.is_symlink() or instead.stat().st_uid != os.getuid():
        raise click.UsageError(f"{root} cannot be written, and {instead} is somebody else's. Give a --cache-dir.")
    return instead


def default_cache_dir() -> Path:
    """Where the platform keeps caches of this user."""
    import platformdirs

    return platformdirs.user_cache_path("fa4build")


def evidence_line(wheels: Iterable[Path]) -> str:
    """What the kernels of these wheels have passed: `evidence: 2 kernels simulated, 1 none`; empty without a pack."""
    from fa4build.shipping.release import evidence_counts

    counts = [(count, level) for level, count in evidence_counts(wheels).items()]
    told = [f"{count} {'kernel' if count == 1 else 'kernels'} {level}" for count, level in counts[:1]]
    return ", ".join(["evidence: " + told[0], *(f"{count} {level}" for count, level in counts[1:])]) if told else ""
