"""A family from a list of kernels, each compiled by a function of its own: what most families need.

See docs/package-your-own-kernel.md for the whole way, from a kernel to a wheel.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from fa4build.compiling.compile import WORKER, CompileOptions, CompileRequest, Worker
from fa4build.compiling.toolchain import Toolchain, installed_distribution
from fa4build.errors import NothingSelectedError, ToolchainError, VariantError
from fa4build.families.interface import RUNTIME_NAME, Buffer, Family, Input, OpRecipe, Recipe, Scalar, Step
from fa4build.families.sources import Ingredients, ingredients
from fa4build.matrix.arch import ARCHES, arch_named
from fa4build.matrix.selection import Selection
from fa4build.store.keys import key_inputs, key_of

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ID = re.compile(r"[A-Za-z][A-Za-z0-9_]*(-[A-Za-z0-9_]+)*")

TORCH_WORKER = Worker(setup="fa4build.families.tracing:setup", blocked_modules=())
"""A compile process in which torch can be imported, for kernels whose hosts are driven by torch tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyKernel:
    """One host function to be compiled for one target.

    Attributes:
        id: unique in the family, fields of letters, digits and `_` separated by `-`, the second one the arch:
            `rmsnorm-sm90a-bf16-n4096`.
        op: what it computes; an op of `fa4_kernels.abi.SIGNATURES` with the axes it needs is found by its functions.
        function: `module:name`, run in a fresh process as `function(request, options)`; it returns a `HostFunction`.
            The module's file, and what it imports, is part of the key.
        payload: what that function needs to know, JSON; it is `request["payload"]` there.
        axes: what the dispatcher compares, JSON scalars.
        tuning: what `explain` shows of how it is done, JSON scalars.
    """

    id: str
    op: str
    arch: str
    function: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, object] = field(default_factory=dict)
    tuning: Mapping[str, object] = field(default_factory=dict)

    @property
    def symbol(self) -> str:
        """The id as an identifier: the kernels' names must be `<symbol>_0`, `<symbol>_1`, ..."""
        return self.id.replace("-", "_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a kernel is compiled from, in the form of the cache's key: `variant` has op, arch and the axes."""

    variant: Mapping[str, object]
    sha256: str
    symbol: str
    function: str
    dependencies: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A distribution that the kernels come from: the versions this family was tested with, the newest last."""

    name: str
    tested: tuple[str, ...]


def kernel_family(
    *,
    name: str,
    summary: str,
    kernels: Callable[[str], Iterable[FamilyKernel]],
    sources: Sequence[str] = (),
    op_recipes: Callable[[Sequence[FamilyKernel]], tuple[OpRecipe, ...]] | None = None,
    distributions: Sequence[Pinned] = (),
    environment: Mapping[str, str] | None = None,
    worker: Worker | None = None,
    on_request: Callable[[FamilyKernel], str] = lambda kernel: "",
    **more: Any,
) -> Family:
    """A family from its kernels.

    Args:
        name: lower-case letters, digits and `_`, a letter first.
        kernels: arch name (`sm90a`) -> the kernels declared for it.
        sources: further files, or directories with all their files, whose content enters every key. Modules that the
            compile functions reach by import statements are found without being named; what else a compile reads
            (a data file, a module imported by a computed name) must be named here, or the compile is refused.
        op_recipes: see `Family`.
        distributions: installed packages that the kernels come from. Digests of their files enter every key, and of
            the packages that they require; those that the compiler itself requires, torch and numpy, do not.
        environment: variables of the compile process, pinned and part of every key.
        worker: where kernels compile; default: a process without torch.
        on_request: why a kernel is built only for those who name it by --select; "" for what everybody gets.
        more: further attributes of `Family`.
    Raises: VariantError for a name of another form.
    Contract: `toolchain` of the family reads the sources anew; `recipe` takes them as they were then.
    """
    if not _NAME.fullmatch(name):
        raise VariantError(f"family {name!r}: a name is lower-case letters, digits and _, a letter first.")
    worker = worker or Worker()
    of_worker = [one for one in (worker.setup, worker.warm) if one and not one.startswith(f"{WORKER}:")]
    known: dict[str, Ingredients] = {}
    by_arch = cache(lambda arch: _checked(name, tuple(kernels(arch))))

    def expand(selection: Selection) -> tuple[FamilyKernel, ...]:
        return _selected(name, by_arch, selection, on_request)

    def recipe(kernel: FamilyKernel, toolchain: Toolchain, options: CompileOptions) -> Recipe:
        if kernel.function not in known:
            functions = [kernel.function, *of_worker]
            known[kernel.function] = ingredients(name, functions, sources, [pinned.name for pinned in distributions])
        return _recipe(name, kernel, known[kernel.function], toolchain, options)

    def toolchain(base: Toolchain) -> Toolchain:
        known.clear()
        return _with_distributions(base, name, distributions, environment or {})

    options = {"pack_prefix": f"{RUNTIME_NAME}-{name.replace('_', '-')}", **more}
    if op_recipes is not None:
        options["op_recipes"] = op_recipes
    return Family(
        name=name,
        summary=summary,
        expand=expand,
        recipe=recipe,
        toolchain=toolchain,
        worker=worker,
        **options,
    )


def one_step(kernel: FamilyKernel, arguments: Sequence[Input | Scalar], results: Sequence[str]) -> OpRecipe:
    """The recipe of an operator that one kernel computes.

    Args:
        arguments: of the host function, in its order; those in `results` are allocated, the others are passed.
        results: names of the tensors that come back.
    Contract: every named extent of a result is an extent of an input, or `num_sms`.
    """
    tensors = [argument for argument in arguments if isinstance(argument, Input)]
    return OpRecipe(
        id=kernel.id,
        op=kernel.op,
        target=arch_named(kernel.arch).target,
        inputs=tuple(tensor for tensor in tensors if tensor.name not in results),
        scalars=tuple(argument for argument in arguments if isinstance(argument, Scalar)),
        buffers=tuple(
            Buffer(name=tensor.name, dtype=tensor.dtype, shape=tuple(map(str, tensor.shape)))
            for tensor in tensors
            if tensor.name in results
        ),
        steps=(Step(kernel=kernel.id, arguments=tuple(argument.name for argument in arguments)),),
        results=tuple(results),
    )


def licence_files(distribution: str) -> dict[str, bytes]:
    """The licence texts that an installed distribution carries, by `<distribution>-<file name>`.

    Raises: ToolchainError when there are none: what must be kept cannot be left out silently.
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import distribution as installed

    try:
        files = [file for file in installed(distribution).files or () if ".dist-info/licenses/" in file.as_posix()]
    except PackageNotFoundError:
        files = []
    if not files:
        raise ToolchainError(f"{distribution}: no licence text is installed with it. Reinstall it from its wheel.")
    return {f"{distribution}-{file.name}": file.locate().read_bytes() for file in sorted(files)}


def _checked(family: str, kernels: tuple[FamilyKernel, ...]) -> tuple[FamilyKernel, ...]:
    ids = [kernel.id for kernel in kernels]
    if repeated := sorted({i for i in ids if ids.count(i) > 1}):
        raise VariantError(f"family {family}: two kernels are called {', '.join(repeated)}; ids are unique.")
    for kernel in kernels:
        if not _ID.fullmatch(kernel.id) or kernel.id.split("-")[1:2] != [kernel.arch]:
            raise VariantError(
                f"family {family}: {kernel.id!r} is no kernel id. Fields of letters, digits and _ are separated by -, "
                f"the second one is the arch: {kernel.op}-{kernel.arch}-..."
            )
    return kernels


def _selected(
    family: str,
    by_arch: Callable[[str], tuple[FamilyKernel, ...]],
    selection: Selection,
    on_request: Callable[[FamilyKernel], str],
) -> tuple[FamilyKernel, ...]:
    """The kernels that a selection names: without globs the default ones, with globs also those on request.

    Raises: VariantError, NothingSelectedError.
    """
    if selection.specs:
        raise VariantError(
            f"family {family}: --spec and --model describe variants of fa4; name kernels with --arch and --select."
        )
    arches = {arch_named(name).name for name in selection.arches} or {arch.name for arch in ARCHES}
    named = [kernel for arch in ARCHES if arch.name in arches for kernel in by_arch(arch.name)]
    if not named:
        raise NothingSelectedError(f"family {family}: no kernel is declared for {', '.join(sorted(arches))}.")
    wanted: set[str] = set()
    ids = [kernel.id for kernel in named]
    for glob in selection.globs:
        matched = fnmatch.filter(ids, glob)
        if not matched:
            nearest = difflib.get_close_matches(glob, ids, n=3, cutoff=0)
            raise NothingSelectedError(f"{glob!r} matches no kernel of {family}. Nearest: {', '.join(nearest)}.")
        wanted.update(matched)
    if selection.globs:
        return tuple(kernel for kernel in named if kernel.id in wanted)
    return tuple(kernel for kernel in named if not on_request(kernel))


def _recipe(
    family: str, kernel: FamilyKernel, made_of: Ingredients, toolchain: Toolchain, options: CompileOptions
) -> Recipe:
    request = CompileRequest(
        name=kernel.id,
        target=arch_named(kernel.arch).target,
        symbol=kernel.symbol,
        function=kernel.function,
        payload=dict(kernel.payload),
        family=family,
        sources=made_of.files,
        distributions=made_of.distributions,
    )
    described = json.dumps([kernel.function, dict(kernel.payload)], sort_keys=True)
    source = Source(
        variant={"op": kernel.op, "arch": kernel.arch, **kernel.axes},
        sha256=hashlib.sha256(described.encode()).hexdigest(),
        symbol=kernel.symbol,
        function=kernel.function,
        dependencies=made_of.named,
    )
    inputs = key_inputs(source, dict(kernel.tuning), toolchain, options)
    return Recipe(name=kernel.id, key=key_of(inputs), inputs=inputs, request=request, options=options)


def _with_distributions(
    base: Toolchain, family: str, distributions: Sequence[Pinned], environment: Mapping[str, str]
) -> Toolchain:
    """The toolchain with what the family adds. Raises: ToolchainError for a missing or untested distribution."""
    found = []
    for pinned in distributions:
        installed = installed_distribution(pinned.name)
        tested = ", ".join(pinned.tested)
        remedy = f"Run: pip install --no-deps '{pinned.name}=={pinned.tested[-1]}'"
        if installed is None:
            raise ToolchainError(f"family {family} needs {pinned.name} (tested: {tested}), not installed. {remedy}")
        if installed.version not in pinned.tested:
            raise ToolchainError(
                f"family {family}: {pinned.name} {installed.version} is installed; tested: {tested}. {remedy}"
            )
        found.append(installed)
    return replace(
        base,
        distributions=tuple(sorted((*base.distributions, *found), key=lambda item: item.name)),
        environment=tuple(sorted({**dict(base.environment), **environment}.items())),
    )
