"""From cached compiles to the set of wheels that users install: everything is prepared before anything is written."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa4build.errors import WheelError
from fa4build.families.interface import Family
from fa4build.families.registry import DEFAULT, family_named
from fa4build.matrix.arch import ARCHES, Arch
from fa4build.matrix.problems import lacking_helpers
from fa4build.matrix.selection import Selection
from fa4build.pipeline import find_cached, require_cached
from fa4build.shipping.budget import Forecast, Traits, forecast, part_labels, part_name, sample_of, split, traits_of
from fa4build.shipping.launcher_build import PLATFORMS, platform_named
from fa4build.shipping.manifest import EVIDENCE_STATES, Facts
from fa4build.shipping.pack import Artifact, manifests_in
from fa4build.shipping.signing import SigningKey
from fa4build.shipping.wheel import (
    RUNTIME_NAME,
    SIZE_LIMIT_BYTES,
    PackLabels,
    PreparedWheel,
    WrittenWheel,
    checkout_root,
    prepare_pack_wheel,
    prepare_runtime_wheel,
    prepare_single_wheel,
)
from fa4build.store.cache import Cache
from fa4build.store.entries import CacheEntry
from fa4build.store.evidence import Committed, committed_in, evidence_for, subject_of
from fa4build.store.kernel_check import claim_of_entry

EVIDENCE_DIR = Path(__file__).parents[2] / "evidence"
"""Records from GPUs and of the simulator in a checkout."""

INSTALLED_EVIDENCE_DIR = Path(__file__).parents[1] / "committed_evidence"
"""The same records in an installed fa4build, which came with it."""

ALL_PLATFORMS = tuple(platform.tag for platform in PLATFORMS)
_SHOWN = 3  # kernels in a message
_SEPARATE_FIELDS = ("$type", "op", "arch")  # of a variant: the manifest has fields of its own for them


def write_wheels(
    selection: Selection,
    cache: Cache,
    *,
    out_dir: Path,
    platforms: Iterable[str] = ALL_PLATFORMS,
    evidence_dirs: Iterable[Path] | None = None,
    limit_bytes: int = SIZE_LIMIT_BYTES,
    allow_spills: bool = False,
    family: Family | None = None,
    sign: SigningKey | None = None,
    single_file: bool = False,
) -> tuple[WrittenWheel, ...]:
    """Write one pack wheel for each selected target, more if it is over the limit, and one runtime for each platform.

    Args:
        selection: the variants; all of them must be in the cache.
        platforms: tags or machine names of the hosts; none = packs alone.
        evidence_dirs: committed records; directories that do not exist count as empty. Default: those that belong to
            this fa4build, see `committed_evidence`.
        limit_bytes: split a pack that is larger, refuse a wheel that cannot be split.
        allow_spills: whether kernels whose registers spill to memory are packed.
        family: whose kernels; default: our own.
        sign: the key that signs the packs.
        single_file: write one wheel for each platform that holds runtime and packs, instead of several.

    Returns: packs by target, then runtimes by platform. Wheels whose inputs did not change are left as they are.

    Raises: VariantError, NothingSelectedError from the selection; NotCachedError naming what is missing; WheelError,
        also for kernels without those that they are launched with; ToolchainError when the launcher does not compile.
        Nothing is written then.
    """
    targets = [platform_named(name) for name in platforms]
    family = family or family_named()
    kernels = family.expand(selection)
    _refuse_lacking(family, kernels)
    entries = require_cached(find_cached(kernels, cache, family=family))
    _refuse_spills(entries, allow_spills or family.may_spill)
    committed = committed_in(committed_evidence() if evidence_dirs is None else evidence_dirs)
    by_target: dict[str, list[CacheEntry]] = {}
    for entry in entries:
        by_target.setdefault(entry.facts["target"], []).append(entry)
    packs = {
        arch: _packs(
            *(arch, by_target[arch.target], cache, committed, limit_bytes),
            out_dir=out_dir,
            labels=labels_of(family, kernels, arch),
            sign=sign,
        )
        for arch in ARCHES
        if arch.target in by_target
    }
    parts = {arch.name: tuple(wheels) for arch, wheels in packs.items()} if family.pack_prefix == RUNTIME_NAME else {}
    options: dict[str, Any] = {"limit_bytes": limit_bytes, "compiler_cache": cache.root / "zig", "parts": parts}
    runtimes = [prepare_runtime_wheel(target, out_dir, **options) for target in targets]
    prepared = [wheel for wheels in packs.values() for wheel in wheels.values()]
    if single_file:
        return tuple(prepare_single_wheel(runtime, prepared, out_dir).write() for runtime in runtimes)
    return tuple(wheel.write() for wheel in (*prepared, *runtimes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasts:
    """What `write_wheels` would make: packs, parts of packs where the limit asks for them, and what is not compiled."""

    packs: tuple[Forecast, ...]
    num_variants: int
    missing: tuple[str, ...]


def forecasts(selection: Selection, cache: Cache, *, family: Family, limit_bytes: int) -> Forecasts:
    """Tell the sizes of packs from those kernels that are compiled already. Compiles and writes nothing."""
    kernels = family.expand(selection)
    found = find_cached(kernels, cache, family=family)
    entries = {recipe.name: entry for recipe, entry in found if entry is not None}
    packs: list[Forecast] = []
    for arch in ARCHES:
        traits = [traits_of(kernel) for kernel in kernels if kernel.arch == arch.name]
        if traits:
            packs += _forecast_parts(arch, traits, entries, cache, labels_of(family, kernels, arch), limit_bytes)
    missing = tuple(recipe.name for recipe, entry in found if entry is None)
    return Forecasts(packs=tuple(packs), num_variants=len(kernels), missing=missing)


def _forecast_parts(
    arch: Arch,
    traits: Sequence[Traits],
    entries: Mapping[str, CacheEntry],
    cache: Cache,
    labels: PackLabels,
    limit_bytes: int,
) -> list[Forecast]:
    """One forecast for each part of a target; a pack of unknown size is not split."""
    needed = [entries[name] for name in sample_of(traits) if name in entries]
    sampled = {entry.name: artifact_of(entry, cache, Committed()) for entry in needed}
    made: dict[str, Forecast] = {}

    def size_of(part: str, kernels: Sequence[Traits]) -> int:
        name = part_name(labels, part)
        made[part] = forecast(kernels, sampled, arch=arch, toolchain=toolchain_of(needed), name=name)
        return made[part].size or 0

    return [made[part] for part in split(traits, size_of, limit_bytes)]


def committed_evidence() -> tuple[Path, ...]:
    """Where the records from GPUs and of the simulator lie that belong to this fa4build, checkout or installed."""
    return (INSTALLED_EVIDENCE_DIR,) if checkout_root() is None else (EVIDENCE_DIR,)


def evidence_counts(wheels: Iterable[Path]) -> dict[str, int]:
    """How many kernels of these wheels have which highest level of evidence, of all packs in them together.

    Returns: `silicon`, `simulated`, `static`, `claimed`, `none` -> number; levels without a kernel are left out.
    """
    found: Counter[str] = Counter()
    for path in wheels:
        found.update(entry.evidence_level for manifest in manifests_in(path) for entry in manifest.entries)
    return {level: found[level] for level in EVIDENCE_STATES if found[level]}


def artifact_of(entry: CacheEntry, cache: Cache, committed: Committed) -> Artifact:
    """A cached compile as a pack takes it, with the evidence there is for its very cubin.

    Raises: CacheCorruptError when stored bytes do not match their digest; WheelError when the entry is of another
        variant than its key.
    """
    claim_of_entry(entry.name, entry.inputs, entry.facts)
    source = entry.inputs["source"]
    variant = source["variant"]
    facts = Facts(
        id=entry.name,
        op=variant["op"],
        target=entry.facts["target"],
        axes={name: value for name, value in variant.items() if name not in _SEPARATE_FIELDS},
        symbols=tuple(entry.facts["symbols"]),
        registers=entry.facts["registers"],
        spill_bytes=entry.facts["spill_bytes"],
        shared_bytes=entry.facts["shared_bytes"],
        source_sha256=source["sha256"],
        key=entry.key,
        tuning=_plain(entry.inputs["tuning"]),
        evidence=evidence_for(subject_of(entry), cache.root, committed),
    )
    return Artifact(
        facts=facts,
        cubin=cache.read(entry, "cubin"),
        plan=cache.read(entry, "plan"),
        dependencies=tuple((path, sha256) for path, sha256 in source["dependencies"]),
    )


def toolchain_of(entries: Iterable[CacheEntry]) -> dict[str, str]:
    """Name -> version of what compiled these entries: distributions, compiler backend, assembler.

    Raises: WheelError when they were compiled by different toolchains.
    """
    seen: dict[str, str] = {}
    for entry in entries:
        toolchain = entry.inputs["toolchain"]
        versions = {distribution["name"]: distribution["version"] for distribution in toolchain["distributions"]}
        versions |= {"backend": toolchain["backend"], "ptxas": entry.facts["ptxas"]}
        if seen and versions != seen:
            raise WheelError(f"{entry.name}: compiled by {versions}, others by {seen}. Build all with one toolchain.")
        seen = versions
    return seen


def _packs(
    arch: Arch,
    entries: list[CacheEntry],
    cache: Cache,
    committed: Committed,
    limit_bytes: int,
    *,
    labels: PackLabels,
    **options: Any,
) -> dict[str, PreparedWheel]:
    """Name -> wheel: the pack of one target, or its parts. Options as for `prepare_pack_wheel`."""
    artifacts = {entry.name: artifact_of(entry, cache, committed) for entry in entries}
    toolchain = toolchain_of(entries)
    prepared: dict[str, PreparedWheel] = {}

    def size_of(part: str, kernels: Sequence[Traits]) -> int:
        ids = [kernel.id for kernel in kernels]
        named = part_labels(labels, part, ids)
        chosen = [artifacts[name] for name in ids]
        wheel = prepare_pack_wheel(
            chosen, arch=arch, toolchain=toolchain, labels=named, limit_bytes=sys.maxsize, **options
        )
        prepared[part] = wheel
        return wheel.size

    kernels = [Traits(id=name, op=a.facts.op, axes=a.facts.axes) for name, a in artifacts.items()]
    parts = split(kernels, size_of, limit_bytes)
    return {part_name(labels, part): prepared[part] for part in parts}


def labels_of(family: Family, kernels: Sequence[Any], arch: Arch) -> PackLabels:
    """What a family says of its pack for one target."""
    of_arch = [kernel for kernel in kernels if kernel.arch == arch.name]
    return PackLabels(
        name=family.pack_name(arch.name),
        family=family.name,
        summary=family.summary,
        license_expression=family.license_expression,
        notices=family.notices(),
        recipes=tuple(recipe.document() for recipe in family.op_recipes(of_arch)),
    )


def _refuse_spills(entries: Iterable[CacheEntry], allow_spills: bool) -> None:
    """Kernels that spill are shipped knowingly or not at all."""
    spilling = [f"{entry.name} ({entry.facts['spill_bytes']} bytes)" for entry in entries if entry.facts["spill_bytes"]]
    if spilling and not allow_spills:
        raise WheelError(
            f"registers spill to memory in {', '.join(spilling)}. Give the kernel smaller tiles or more registers a "
            "role, leave it out with --select, or pass --allow-spills."
        )


def _refuse_lacking(family: Family, kernels: Sequence[Any]) -> None:
    """Kernels that cannot be called without another one are not shipped without it."""
    lacking = list(lacking_helpers(kernels)) if family.name == DEFAULT else []
    if lacking:
        shown = "; ".join(f"{variant.id} needs {helper.id}" for variant, helper in lacking[:_SHOWN])
        more = f"; and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
        raise WheelError(f"the pack could not be called: {shown}{more}. Select these, too.")


def _plain(value: Any) -> Any:
    """A value of a cache key as ordinary JSON: type marks dropped, exact floats as numbers."""
    if isinstance(value, Mapping):
        if set(value) == {"$float"}:
            return float.fromhex(value["$float"])
        return {name: _plain(item) for name, item in value.items() if name != "$type"}
    return [_plain(item) for item in value] if isinstance(value, list) else value
