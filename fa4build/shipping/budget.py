"""How large wheels will be, told from a sample of their kernels, and how packs are split to stay within a limit.

A sample holds, for each target: every combination of op, head dimensions and mask once (its first variant), and of each
way in which further variants differ from those (another dtype, a softcap, ...) one for each head dimension, at masks
that take turns. The first are what fills a pack; what the others add is measured beside them.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fa4build.errors import WheelError
from fa4build.matrix.arch import Arch
from fa4build.shipping.pack import Artifact
from fa4build.shipping.wheel import PackLabels, pack_wheel_size

_CELL_AXES = ("head_dim", "head_dim_v", "mask")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A wheel before it is built. `size` (bytes) is None if the sample is not complete: then `missing` says of what."""

    name: str
    num_kernels: int
    num_sampled: int
    size: int | None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a forecast needs to know of a kernel: its id, op and axes."""

    id: str
    op: str
    axes: Mapping[str, Any]

    @property
    def cell(self) -> tuple[Hashable, ...]:
        """Kernels of one cell compute the same with other means or details."""
        return (self.op, *(self.axes.get(axis) for axis in _CELL_AXES))


def traits_of(kernel: Any) -> Traits:
    """Of a variant, or of any buildable that has its axes as fields."""
    fields = {field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel)}
    return Traits(id=kernel.id, op=fields.get("op", ""), axes=fields)


def sample_of(kernels: Sequence[Traits]) -> tuple[str, ...]:
    """Ids of the kernels that a forecast needs, in their order."""
    first, kinds = _kinds(kernels)
    chosen = {kernel.id for kernel in first.values()}
    for members in kinds.values():
        chosen |= {kernel.id for kernel in _probes(members)}
    return tuple(kernel.id for kernel in kernels if kernel.id in chosen)


def _kinds(
    kernels: Sequence[Traits],
) -> tuple[dict[tuple[Hashable, ...], Traits], dict[tuple[Hashable, ...], list[Traits]]]:
    """The first kernel of each cell, and all others by the way in which they differ from it."""
    first: dict[tuple[Hashable, ...], Traits] = {}
    kinds: dict[tuple[Hashable, ...], list[Traits]] = {}
    for kernel in kernels:
        model = first.setdefault(kernel.cell, kernel)
        if model is not kernel:
            changed = {name: value for name, value in kernel.axes.items() if model.axes.get(name) != value}
            kinds.setdefault((kernel.op, *sorted(map(repr, changed.items()))), []).append(kernel)
    return first, kinds


def _probes(members: Sequence[Traits]) -> list[Traits]:
    """One of each head dimension; the n-th head dimension gives its n-th member, so that masks take turns."""
    by_head: dict[tuple[Hashable, ...], list[Traits]] = {}
    for kernel in members:
        by_head.setdefault(kernel.cell[:-1], []).append(kernel)
    return [group[number % len(group)] for number, group in enumerate(by_head.values())]


def forecast(
    kernels: Sequence[Traits], sampled: Mapping[str, Artifact], *, arch: Arch, toolchain: Mapping[str, str], name: str
) -> Forecast:
    """The size of the wheel that holds these kernels of one target.

    Args:
        kernels: all of them, in the order of the matrix.
        sampled: id -> built kernel, for those of `sample_of` that there are (others are not looked at).
    Contract: within 15 % (tests/shipping/test_budget.py has the measured cases).
    """
    wanted = sample_of(kernels)
    missing = tuple(kernel_id for kernel_id in wanted if kernel_id not in sampled)
    if missing:
        sampled_count = len(wanted) - len(missing)
        return Forecast(name=name, num_kernels=len(kernels), num_sampled=sampled_count, size=None, missing=missing)
    first, kinds = _kinds(kernels)
    core = [sampled[kernel.id] for kernel in first.values()]
    core_size = pack_wheel_size(core, arch=arch, toolchain=toolchain)
    size = float(core_size)
    for members in kinds.values():
        probes = [sampled[kernel.id] for kernel in _probes(members)]
        with_probes = pack_wheel_size([*core, *probes], arch=arch, toolchain=toolchain)
        size += (with_probes - core_size) / len(probes) * len(members)
    return Forecast(name=name, num_kernels=len(kernels), num_sampled=len(wanted), size=round(size))


def split(
    kernels: Sequence[Traits], size_of: Callable[[str, Sequence[Traits]], int], limit_bytes: int
) -> dict[str, tuple[Traits, ...]]:
    """Part name -> its kernels, as few parts as the limit allows: everything, by direction, by direction and head_dim.

    Args:
        size_of: part name and kernels -> bytes of their wheel.
    Raises: WheelError if the kernels of one head_dim alone are over the limit.
    """
    return _split("", tuple(kernels), size_of, limit_bytes, (_direction, _head_dims))


def _split(
    part: str,
    kernels: tuple[Traits, ...],
    size_of: Callable[[str, Sequence[Traits]], int],
    limit_bytes: int,
    levels: tuple[Callable[[Traits], str], ...],
) -> dict[str, tuple[Traits, ...]]:
    size = size_of(part, kernels)
    if size <= limit_bytes:
        return {part: kernels}
    if not levels:
        raise WheelError(
            f"{part or 'a pack'}: {size} bytes with {len(kernels)} kernels, the limit is {limit_bytes}, and there is "
            "no smaller part. Select fewer variants, or raise --limit."
        )
    groups: dict[str, list[Traits]] = {}
    for kernel in kernels:
        name = levels[0](kernel)
        groups.setdefault(f"{part}-{name}" if part else name, []).append(kernel)
    if len(groups) == 1:  # nothing to divide here: no name for it either
        return _split(part, kernels, size_of, limit_bytes, levels[1:])
    parts: dict[str, tuple[Traits, ...]] = {}
    for name, members in sorted(groups.items()):
        parts |= _split(name, tuple(members), size_of, limit_bytes, levels[1:])
    return parts


def _direction(kernel: Traits) -> str:
    """`fwd` or `bwd`: an operator's kernels stay together."""
    return "bwd" if kernel.op.startswith("bwd") else "fwd"


def _head_dims(kernel: Traits) -> str:
    head_dim, head_dim_v = kernel.axes.get("head_dim"), kernel.axes.get("head_dim_v")
    return f"hd{head_dim}" if head_dim == head_dim_v else f"hd{head_dim}x{head_dim_v}"


def part_name(labels: PackLabels, part: str) -> str:
    """The distribution that holds a part: `fa4-kernels-sm100a-bwd`; everything together has the plain name."""
    return f"{labels.name}-{part}" if part else labels.name


def part_labels(labels: PackLabels, part: str, ids: Iterable[str]) -> PackLabels:
    """The labels of one part: its own name, and the recipes whose kernels it has.

    Raises: WheelError if a recipe's kernels would be torn apart.
    """
    if not part:
        return labels
    present = set(ids)
    needs = {str(recipe["id"]): {step["kernel"] for step in recipe["steps"]} for recipe in labels.recipes}
    torn = [name for name, kernels in needs.items() if kernels & present and not kernels <= present]
    if torn:
        raise WheelError(f"{part_name(labels, part)}: {', '.join(torn)} needs kernels of another part. Raise --limit.")
    kept = tuple(recipe for recipe in labels.recipes if needs[str(recipe["id"])] <= present)
    return dataclasses.replace(labels, name=part_name(labels, part), recipes=kept)
