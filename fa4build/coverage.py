"""Closure of a set of packs: every problem of the declared domain has a kernel or a stated reason why not.

The runtime's own dispatcher is asked about every combination of axis values on every target. What it answers is
compared with what the matrix says: no kernel may answer a problem that it does not compute, none may be unreachable,
and none that was asked for may be absent.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fa4build.arch import ARCHES, Arch
from fa4build.axes import Variant
from fa4build.errors import CoverageError
from fa4build.manifest import FAMILY, manifest_to_json
from fa4build.pack import MANIFEST_FILE, read_pack
from fa4build.runtime.fa4_kernels.dispatch import Device, Problem, dispatch
from fa4build.runtime.fa4_kernels.errors import PackError
from fa4build.runtime.fa4_kernels.packs import Entry, Pack, read_manifest
from fa4build.variants import kernel_written, refused_variants, valid_variants

_FEATURES = ("split", "softcap", "sink")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What was found. Each problem of the domain is counted in one of `served`, `refused` and the next three.

    Attributes:
        targets: of the packs.
        served: entry id -> how many problems it answers.
        refused: reason -> how many problems have no meaning or are ruled out for it.
        unwritten_problems: valid, without a kernel in this version; the reason is that nobody wrote it yet.
        missing_problems: a kernel is written and there is a pack for the target, and it does not hold it.
        other_targets: problems on targets for which there is no pack; the reason is the pack to install.
        unwritten: ids of the valid variants behind `unwritten_problems`.
        missing: ids of written variants that no pack holds, though one is for their target, or they were asked for.
        wrong: problems that are answered by a kernel of another meaning.
        alternatives: ids of entries that fit a problem which another entry answers by other means (`cta_group`). They
            are reached when they have more evidence than the other, see `dispatch`.
        orphans: ids of entries that no problem reaches: they fit none, or another entry has the same axes.
    """

    targets: tuple[str, ...]
    num_problems: int
    served: Mapping[str, int]
    refused: Mapping[str, int]
    unwritten_problems: int
    missing_problems: int
    other_targets: int
    unwritten: tuple[str, ...]
    missing: tuple[str, ...]
    wrong: tuple[str, ...]
    alternatives: tuple[str, ...]
    orphans: tuple[str, ...]

    @property
    def is_closed(self) -> bool:
        """Whether every problem has its kernel or a stated reason, and every kernel a problem."""
        return not (self.missing or self.wrong or self.orphans)

    def as_dict(self) -> dict[str, object]:
        """JSON form."""
        document = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**document, "is_closed": self.is_closed}


def installed_form(paths: Iterable[Path]) -> tuple[Pack, ...]:
    """Packs as the runtime sees them, each proven first.

    Args:
        paths: pack wheels, pack directories, or directories of wheels (a bundle among them).
    Raises: WheelError for damage; CoverageError when there is no pack, or one the runtime refuses.
    """
    packs = []
    for path in _pack_paths(paths):
        manifest = read_pack(path).manifest
        if manifest.family != FAMILY:
            continue
        try:
            packs.append(Pack(manifest=read_manifest(manifest_to_json(manifest).encode()), directory=path))
        except PackError as error:
            raise CoverageError(f"{path}: the runtime of this fa4build refuses it: {error}.") from error
    if not packs:
        raise CoverageError("no pack of our own kernels among these files. Build some: fa4build wheel.")
    return tuple(packs)


def _pack_paths(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if not path.is_dir() or (path / MANIFEST_FILE).is_file():
            found.append(path)
            continue
        wheels = sorted((path / "wheels" if (path / "wheels").is_dir() else path).glob("*.whl"))
        found += [wheel for wheel in wheels if wheel.name.endswith("-py3-none-any.whl") and _holds_pack(wheel)]
    return found


def _holds_pack(wheel: Path) -> bool:
    """Whether this is a pack of ours, by its name: a bundle also has wheels of others."""
    return wheel.name.startswith("fa4_kernels_")


def cover(packs: Iterable[Pack], requested: Iterable[Variant] = ()) -> Coverage:
    """Ask the dispatcher about the whole domain.

    Args:
        packs: from `installed_form`.
        requested: variants that must be there, whatever target the packs are for.
    """
    packs = tuple(packs)
    entries = {entry.id: entry for pack in packs for entry in pack.manifest.entries}
    targets = tuple(sorted({entry.target for entry in entries.values()}))
    wanted = {variant.id for variant in requested}
    served: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    without: Counter[str] = Counter()
    unwritten, missing, wrong = [], [], []
    alternatives: set[str] = set()
    domain, index = _domain(), narrowed(packs)
    for (arch, problem), (valid, reasons) in domain.items():
        answers = _answers(problem, arch, index)
        chosen = answers[0].id if answers else None
        alternatives |= {other.id for other in answers[1:] if other.axes != answers[0].axes}
        absent = [variant.id for variant in valid if kernel_written(variant) and variant.id not in entries]
        if chosen is not None:
            served[chosen] += 1
            if chosen not in {variant.id for variant in valid}:
                wrong.append(f"{problem} on {arch.target}: {chosen}")
            missing += [name for name in absent if name in wanted]
        elif not valid:
            refused[reasons[0]] += 1
        elif not any(map(kernel_written, valid)):
            without["unwritten"] += 1
            unwritten += [variant.id for variant in valid]
        elif arch.target not in targets:
            without["other target"] += 1
            missing += [name for name in absent if name in wanted]
        else:
            without["missing"] += 1
            missing += absent
    return Coverage(
        targets=targets,
        num_problems=len(domain),
        served=dict(sorted(served.items())),
        refused=dict(sorted(refused.items())),
        unwritten_problems=without["unwritten"],
        missing_problems=without["missing"],
        other_targets=without["other target"],
        unwritten=tuple(sorted(unwritten)),
        missing=tuple(sorted(set(missing) | (wanted - entries.keys() - set(unwritten)))),
        wrong=tuple(wrong),
        alternatives=tuple(sorted(alternatives - served.keys())),
        orphans=tuple(sorted(entries.keys() - served.keys() - alternatives)),
    )


def problem_of(variant: Variant) -> Problem:
    """What a call asks for when this variant is what answers it."""
    return Problem(
        op=variant.op,
        layout=variant.layout,
        dtype=variant.dtype,
        head_dim=variant.head_dim,
        head_dim_v=variant.head_dim_v,
        mask=variant.mask,
        deterministic=variant.deterministic,
        features=frozenset(name for name in _FEATURES if getattr(variant, name)),
    )


def _domain() -> dict[tuple[Arch, Problem], tuple[list[Variant], list[str]]]:
    """Every problem on every target -> the valid variants that compute it, and the reasons against the others."""
    arches = {arch.name: arch for arch in ARCHES}
    domain: dict[tuple[Arch, Problem], tuple[list[Variant], list[str]]] = {}
    for variant in valid_variants():
        domain.setdefault((arches[variant.arch], problem_of(variant)), ([], []))[0].append(variant)
    for refused in refused_variants():
        key = (arches[refused.variant.arch], problem_of(refused.variant))
        domain.setdefault(key, ([], []))[1].extend(refused.reasons)
    return domain


_Index = dict[tuple[str, str, object], tuple[Pack, ...]]


def narrowed(packs: Iterable[Pack]) -> _Index:
    """(target, op, head_dim) -> the packs with only such entries: the dispatcher refuses every other one.

    It makes the enumeration fast. That it changes no answer is a test.
    """
    index: dict[tuple[str, str, object], list[Pack]] = {}
    for pack in packs:
        parts: dict[tuple[str, str, object], list[Entry]] = {}
        for entry in pack.manifest.entries:
            parts.setdefault((entry.target, entry.op, entry.axes.get("head_dim")), []).append(entry)
        for key, entries in parts.items():
            part = dataclasses.replace(pack.manifest, entries=tuple(entries))
            index.setdefault(key, []).append(dataclasses.replace(pack, manifest=part))
    return {key: tuple(parts) for key, parts in index.items()}


def _answers(problem: Problem, arch: Arch, index: _Index) -> tuple[Entry, ...]:
    """The entry that the dispatcher chooses, then others that it found to fit."""
    device = Device(name=arch.name, compute_capability=arch.compute_capability)
    decision = dispatch(problem, device, index.get((arch.target, problem.op, problem.head_dim), ()))
    if decision.entry is None:
        return ()
    fitting = (item.entry for item in decision.trace if not item.reasons)
    return (decision.entry, *(entry for entry in fitting if entry.id != decision.entry.id))
