"""What a family of kernels is to the core: values and functions, so that any CuTe-DSL kernel can be built and shipped.

The core (pipeline, compile, cache, packs, wheels, runtime) knows kernels, tensors and launch plans. What is computed,
for which shapes, by which sources and under which licence is what a family brings. `families.fa4` is ours; most others
are made by `kernel_family` from a list of kernels and need no more than a compile function.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from fa4build.compiling.compile import CompileOptions, CompileRequest, Worker
from fa4build.compiling.toolchain import Toolchain
from fa4build.families.proof import ProofCase
from fa4build.matrix.selection import Selection

RUNTIME_NAME = "fa4-kernels"


class Buildable(Protocol):
    """One kernel as it is asked for. `id` is its one spelling, `arch` the canonical name of its target."""

    @property
    def id(self) -> str: ...
    @property
    def arch(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One variant, ready to be looked up or compiled: its key, what went into it, and the compile."""

    name: str
    key: str
    inputs: dict
    request: CompileRequest
    options: CompileOptions


# --- calling several kernels as one operator --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A tensor that callers pass. In `shape` a number is an extent, a name a run-time extent, equal wherever it occurs.

    `dtype` is a plan's: bf16, fp16, f32, i32, i64, ... An optional input that is not passed has no extents.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A number that callers pass.

    `default` is an expression over extents, None where there is none. `dtype` is what the host's parameter is: f32, i32
    or i64; recipes do not repeat it, the launch plan has it.
    """

    name: str
    default: str | None = None
    dtype: str = "f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A tensor that the call allocates on the device of its inputs: a workspace, or a result.

    `shape` is of expressions. `fill` is written before the first step; None leaves the memory as it is.
    """

    name: str
    dtype: str
    shape: tuple[str, ...]
    fill: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One kernel of the same pack, by id, with its arguments in order: names of tensors, or expressions."""

    kernel: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecipe:
    """How an operator is computed: which kernels in which order, with which workspaces.

    Attributes:
        op: name that `fa4_kernels.call` takes.
        target: `sm_90a`.
        axes: what else a caller may ask for by name (`mask`, `deterministic`); compared for equality.
        when: an expression that must be true; empty is always.
        let: (name, expression), in order, for what several expressions share.
        results: names of buffers, in the order in which they are returned.

    Expressions are Python's, of integers and the names of extents, scalars and `let`: + - * // %, comparisons, `and`,
    `or`, `not`, `a if b else c`, and the functions min, max, ceil_div, round_up.
    """

    id: str
    op: str
    target: str
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    axes: Mapping[str, object] = field(default_factory=dict)
    when: str = ""
    scalars: tuple[Scalar, ...] = ()
    let: tuple[tuple[str, str], ...] = ()
    buffers: tuple[Buffer, ...] = ()

    def document(self) -> dict[str, Any]:
        """The JSON object of a manifest (docs/formats.md, section 5)."""
        document = json.loads(json.dumps(asdict(self)))
        for scalar in document["scalars"]:
            del scalar["dtype"]
        return document


# --- the family -------------------------------------------------------------------------------------------------------


def _no_recipes(kernels: Sequence[Any]) -> tuple[OpRecipe, ...]:
    return ()


def _no_notices() -> dict[str, bytes]:
    return {}


def _same_toolchain(toolchain: Toolchain) -> Toolchain:
    return toolchain


def _no_cases(recipe: OpRecipe) -> tuple[ProofCase, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of kernels.

    Attributes:
        name: in manifests, and for `FA4_KERNELS_FAMILY`; lower-case letters, digits and `_`.
        summary: one line for people.
        expand: the kernels that a selection names. Raises VariantError, NothingSelectedError.
        recipe: a kernel's key and compile request. Raises Fa4BuildError.
        toolchain: the compiler's toolchain -> with the family's own distributions and environment, which enter every
            key. Raises ToolchainError when a distribution is missing or of an untested version.
        worker: the process whose children compile.
        op_recipes: how operators are computed from these kernels; only those whose kernels are all there.
        cases: what an operator must compute, for `fa4build verify --simulate`; () is unproven.
        notices: file name -> licence text, carried by every wheel of the family.
        license_expression: SPDX, of the kernels' sources and what is compiled from them.
        pack_prefix: distributions are `<pack_prefix>-<arch>`.
        aliases: further names accepted on the command line.
        may_spill: kernels whose registers spill to memory are built and shipped as their authors wrote them.
    """

    name: str
    summary: str
    expand: Callable[[Selection], tuple[Any, ...]]
    recipe: Callable[[Any, Toolchain, CompileOptions], Recipe]
    toolchain: Callable[[Toolchain], Toolchain] = _same_toolchain
    worker: Worker = field(default_factory=Worker)
    op_recipes: Callable[[Sequence[Any]], tuple[OpRecipe, ...]] = _no_recipes
    cases: Callable[[OpRecipe], tuple[ProofCase, ...]] = _no_cases
    notices: Callable[[], dict[str, bytes]] = _no_notices
    license_expression: str = "Apache-2.0"
    pack_prefix: str = RUNTIME_NAME
    aliases: tuple[str, ...] = ()
    may_spill: bool = False

    def pack_name(self, arch: str) -> str:
        """The distribution that holds the family's kernels for one target."""
        return f"{self.pack_prefix}-{arch}"
