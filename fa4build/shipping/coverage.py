"""Closure of a set of packs: every problem of the declared domain has a kernel or a stated reason why not.

The runtime's own dispatcher is asked about every combination of axis values on every target. What it answers is
compared with what the matrix says: no kernel may answer a problem that it does not compute, none may be unreachable,
and none that was asked for may be absent. A problem that no kernel answers alone, such as split keys with a sink, is
answered if each of the kernels that the runtime launches for it in turn is there.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fa4build.errors import CoverageError
from fa4build.matrix.arch import ARCHES, Arch
from fa4build.matrix.axes import Variant
from fa4build.matrix.problems import lacking_helpers, problem_of
from fa4build.matrix.variants import (
    in_default_matrix,
    kernel_written,
    parse_variant,
    refused_variants,
    valid_variants,
)
from fa4build.runtime.fa4_kernels.dispatch import EQUAL_AXES, Device, Problem, dispatch, steps_of
from fa4build.runtime.fa4_kernels.errors import PackError
from fa4build.runtime.fa4_kernels.packs import Entry, Pack, read_manifest
from fa4build.shipping.manifest import FAMILY, manifest_to_json
from fa4build.shipping.pack import MANIFEST_FILE, read_pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What was found. Each problem of the domain is counted once, in `served`, or in one of the next six.

    Attributes:
        targets: of the packs.
        served: entry id -> how many problems it answers.
        composed: problems that several kernels answer in turn, none of them alone.
        refused: reason -> how many problems have no meaning or are ruled out for it.
        unwritten_problems: valid, without a kernel in this version; the reason is that nobody wrote it yet.
        on_request: a kernel is written, but built only for those who name it (`variants.ON_REQUEST`), and it is absent.
        missing_problems: a kernel of the default matrix that the pack for its target does not hold.
        other_targets: problems on targets for which there is no pack; the reason is the pack to install.
        unwritten: ids of the valid variants behind `unwritten_problems`.
        missing: ids of variants that no pack holds: of the default matrix, where a pack is for their target, and those
            that were asked for.
        wrong: problems that are answered by a kernel of another meaning.
        alternatives: ids of entries that fit a problem which another entry answers by other means (`cta_group`). They
            are reached when they have more evidence than the other, see `dispatch`.
        orphans: ids of entries that no problem reaches: they fit none, or another entry has the same axes.
    """

    targets: tuple[str, ...]
    num_problems: int
    served: Mapping[str, int]
    composed: int
    refused: Mapping[str, int]
    unwritten_problems: int
    on_request: int
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


def installed_form(paths: Iterable[Path], family: str = FAMILY) -> tuple[Pack, ...]:
    """Packs of one family as the runtime sees them, each proven first.

    Args:
        paths: pack wheels, pack directories, or directories of wheels (a bundle among them).
    Raises: WheelError for damage; CoverageError when there is no pack, or one the runtime refuses.
    """
    packs = []
    for path in _pack_paths(paths):
        manifest = read_pack(path).manifest
        if manifest.family != family:
            continue
        try:
            packs.append(Pack(manifest=read_manifest(manifest_to_json(manifest).encode()), directory=path))
        except PackError as error:
            raise CoverageError(f"{path}: the runtime of this fa4build refuses it: {error}. Build it again.") from error
    if not packs:
        whose, option = ("our own kernels", "") if family == FAMILY else (f"family {family}", f" --family {family}")
        raise CoverageError(f"no pack of {whose} among these files. Build some: fa4build wheel --arch sm90{option}.")
    return tuple(packs)


def made_for(paths: Iterable[Path], family: str = FAMILY) -> frozenset[str] | None:
    """Ids of the kernels of a family that bundles were made with, as these describe themselves.

    Returns: None if any path is no bundle.

    Raises: CoverageError for a description that is none.
    """
    found: set[str] = set()
    for path in paths:
        description = path / "bundle.json"
        if not description.is_file():
            return None
        try:
            packs = json.loads(description.read_bytes())["packs"]
            found |= {str(kernel) for pack in packs if pack["family"] == family for kernel in pack["kernels"]}
        except (ValueError, KeyError, TypeError) as error:
            raise CoverageError(f"{description}: describes no bundle ({error!r}). Copy the bundle again.") from error
    return frozenset(found)


def judged(
    coverage: Coverage, packs: Iterable[Pack], *, asked: Iterable[str] = (), listed: Iterable[str] = ()
) -> Coverage:
    """The same, with nothing missing but what the packs were made for.

    Args:
        packs: those that `coverage` is about.
        asked: ids that somebody wants to be there. listed: ids that a bundle says it was made with.
    Returns: missing are those of `asked` and `listed` that are absent, and kernels that one in the packs is launched
        with; nobody can use it without them.
    """
    entries = [entry.id for pack in packs if pack.manifest.family == FAMILY for entry in pack.manifest.entries]
    held = {entry.id for pack in packs for entry in pack.manifest.entries}
    helpers = {helper.id for _, helper in lacking_helpers(map(parse_variant, entries))}
    kept = set(coverage.missing) & set(asked)
    return dataclasses.replace(coverage, missing=tuple(sorted(kept | (set(listed) - held) | helpers)))


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
        absent = [variant.id for variant in valid if in_default_matrix(variant) and variant.id not in entries]
        steps = steps_of(problem)
        if chosen is not None:
            served[chosen] += 1
            is_stand_in = chosen in _stand_ins(domain, arch, problem)
            if chosen not in {variant.id for variant in valid} and not is_stand_in:
                wrong.append(f"{problem} on {arch.target}: {chosen}")
            missing += [name for name in absent if name in wanted or is_stand_in]
        elif not valid and not _has_steps(domain, arch, steps):
            refused[reasons[0]] += 1
        elif not valid and all(_answers(step, arch, index) for step in steps):
            without["composed"] += 1
        elif not valid:  # what its steps lack is named where they are counted themselves
            without[_lack_of_steps(domain, arch, steps, targets)] += 1
        elif not any(map(kernel_written, valid)):
            without["unwritten"] += 1
            unwritten += [variant.id for variant in valid]
        elif not any(map(in_default_matrix, valid)):
            without["on request"] += 1
            missing += [variant.id for variant in valid if variant.id in wanted]
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
        composed=without["composed"],
        refused=dict(sorted(refused.items())),
        unwritten_problems=without["unwritten"],
        on_request=without["on request"],
        missing_problems=without["missing"],
        other_targets=without["other target"],
        unwritten=tuple(sorted(unwritten)),
        missing=tuple(sorted(set(missing) | (wanted - entries.keys() - set(unwritten)))),
        wrong=tuple(wrong),
        alternatives=tuple(sorted(alternatives - served.keys())),
        orphans=tuple(sorted(entries.keys() - served.keys() - alternatives)),
    )


_Domain = dict[tuple[Arch, Problem], tuple[list[Variant], list[str]]]


def _has_steps(domain: _Domain, arch: Arch, steps: tuple[Problem, ...]) -> bool:
    """Whether a problem without a valid kernel of its own has some for each of its steps."""
    return len(steps) > 1 and all(domain.get((arch, step), ([], []))[0] for step in steps)


def _lack_of_steps(domain: _Domain, arch: Arch, steps: tuple[Problem, ...], targets: Iterable[str]) -> str:
    """Why not all steps are answered."""
    if not all(any(map(kernel_written, domain[arch, step][0])) for step in steps):
        return "unwritten"
    if not all(any(map(in_default_matrix, domain[arch, step][0])) for step in steps):
        return "on request"
    return "missing" if arch.target in targets else "other target"


def _stand_ins(domain: _Domain, arch: Arch, problem: Problem) -> set[str]:
    """Kernels that compute more than was asked: gradients summed in a fixed order where any order would do."""
    if problem.deterministic:
        return set()
    valid, _ = domain.get((arch, dataclasses.replace(problem, deterministic=True)), ([], []))
    return {variant.id for variant in valid}


def _domain() -> _Domain:
    """Every problem on every target -> the valid variants that compute it, and the reasons against the others."""
    arches = {arch.name: arch for arch in ARCHES}
    domain: _Domain = {}
    for variant in valid_variants():
        domain.setdefault((arches[variant.arch], problem_of(variant)), ([], []))[0].append(variant)
    for refused in refused_variants():
        key = (arches[refused.variant.arch], problem_of(refused.variant))
        domain.setdefault(key, ([], []))[1].extend(refused.reasons)
    return domain


_Index = dict[tuple[object, ...], tuple[Pack, ...]]


def narrowed(packs: Iterable[Pack]) -> _Index:
    """(target, op, axes that must be equal) -> the packs with only such entries: the dispatcher refuses every other.

    It makes the enumeration fast. That it changes no answer is a test.
    """
    index: dict[tuple[object, ...], list[Pack]] = {}
    for pack in packs:
        parts: dict[tuple[object, ...], list[Entry]] = {}
        for entry in pack.manifest.entries:
            key = (entry.target, entry.op, *(entry.axes.get(axis) for axis in EQUAL_AXES))
            parts.setdefault(key, []).append(entry)
        for key, entries in parts.items():
            part = dataclasses.replace(pack.manifest, entries=tuple(entries))
            index.setdefault(key, []).append(dataclasses.replace(pack, manifest=part))
    return {key: tuple(parts) for key, parts in index.items()}


def key_of(problem: Problem, arch: Arch) -> tuple[object, ...]:
    """Where `narrowed` keeps the entries that may answer a problem on a target."""
    return (arch.target, problem.op, *(getattr(problem, axis) for axis in EQUAL_AXES))


def _answers(problem: Problem, arch: Arch, index: _Index) -> tuple[Entry, ...]:
    """The entry that the dispatcher chooses, then others that it found to fit."""
    device = Device(name=arch.name, compute_capability=arch.compute_capability)
    decision = dispatch(problem, device, index.get(key_of(problem, arch), ()))
    if decision.entry is None:
        return ()
    fitting = (item.entry for item in decision.trace if not item.reasons)
    return (decision.entry, *(entry for entry in fitting if entry.id != decision.entry.id))
