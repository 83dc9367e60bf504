"""From cached compiles to the set of wheels that users install: everything is prepared before anything is written."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fa4build.arch import ARCHES, Arch
from fa4build.cache import Cache, CacheEntry
from fa4build.errors import WheelError
from fa4build.evidence import evidence_for, silicon_records
from fa4build.families.interface import Family
from fa4build.families.registry import family_named
from fa4build.launcher_build import PLATFORMS, platform_named
from fa4build.manifest import Facts
from fa4build.pack import Artifact
from fa4build.pipeline import find_cached, require_cached
from fa4build.selection import Selection
from fa4build.signing import SigningKey
from fa4build.wheel import (
    SIZE_LIMIT_BYTES,
    PackLabels,
    PreparedWheel,
    WrittenWheel,
    checkout_root,
    prepare_pack_wheel,
    prepare_runtime_wheel,
)

EVIDENCE_DIR = Path(__file__).parent.parent / "evidence"
"""Records from GPUs in a checkout. An installed fa4build has none, whatever lies there: see `checkout_root`."""

ALL_PLATFORMS = tuple(platform.tag for platform in PLATFORMS)
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
) -> tuple[WrittenWheel, ...]:
    """Write one pack wheel for each selected target and one runtime wheel for each platform.

    Args:
        selection: the variants; all of them must be in the cache.
        platforms: tags or machine names of the hosts; none = packs alone.
        evidence_dirs: committed records from GPUs; directories that do not exist count as empty. Default: `evidence/`
            of the checkout; an installed fa4build has none.
        limit_bytes: refuse a larger wheel.
        allow_spills: whether kernels whose registers spill to memory are packed.
        family: whose kernels; default: our own.
        sign: the key that signs the packs.

    Returns: packs by target, then runtimes by platform. Wheels whose inputs did not change are left as they are.

    Raises: VariantError, NothingSelectedError from the selection; NotCachedError naming what is missing; WheelError;
        ToolchainError when the launcher does not compile. Nothing is written then.
    """
    targets = [platform_named(name) for name in platforms]
    family = family or family_named()
    kernels = family.expand(selection)
    entries = require_cached(find_cached(kernels, cache, family=family))
    _refuse_spills(entries, allow_spills)
    silicon = silicon_records(_committed_evidence() if evidence_dirs is None else evidence_dirs)
    by_target: dict[str, list[CacheEntry]] = {}
    for entry in entries:
        by_target.setdefault(entry.facts["target"], []).append(entry)
    packs = [
        _pack(
            *(arch, by_target[arch.target], cache, silicon),
            out_dir=out_dir,
            limit_bytes=limit_bytes,
            labels=_labels(family, kernels, arch),
            sign=sign,
        )
        for arch in ARCHES
        if arch.target in by_target
    ]
    runtimes = [
        prepare_runtime_wheel(target, out_dir, limit_bytes=limit_bytes, compiler_cache=cache.root / "zig")
        for target in targets
    ]
    return tuple(prepared.write() for prepared in (*packs, *runtimes))


def _committed_evidence() -> tuple[Path, ...]:
    """Where a checkout keeps records from GPUs."""
    return () if checkout_root() is None else (EVIDENCE_DIR,)


def artifact_of(entry: CacheEntry, cache: Cache, silicon: Mapping[str, Mapping[str, Any]]) -> Artifact:
    """A cached compile as a pack takes it, with the evidence there is for its very cubin.

    Args:
        silicon: from `silicon_records`.
    Raises: CacheCorruptError when stored bytes do not match their digest.
    """
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
        evidence=evidence_for(entry.objects["cubin"].sha256, cache.root, silicon),
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


def _pack(
    arch: Arch,
    entries: list[CacheEntry],
    cache: Cache,
    silicon: Mapping[str, Mapping[str, Any]],
    **options: Any,
) -> PreparedWheel:
    """The pack wheel of one target; options as for `prepare_pack_wheel`."""
    artifacts = [artifact_of(entry, cache, silicon) for entry in entries]
    return prepare_pack_wheel(artifacts, arch=arch, toolchain=toolchain_of(entries), **options)


def _labels(family: Family, kernels: Sequence[Any], arch: Arch) -> PackLabels:
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


def _plain(value: Any) -> Any:
    """A value of a cache key as ordinary JSON: type marks dropped, exact floats as numbers."""
    if isinstance(value, Mapping):
        if set(value) == {"$float"}:
            return float.fromhex(value["$float"])
        return {name: _plain(item) for name, item in value.items() if name != "$type"}
    return [_plain(item) for item in value] if isinstance(value, list) else value
