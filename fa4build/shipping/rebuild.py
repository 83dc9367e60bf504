"""Whether a wheel comes out again from what it says it was made of.

A pack names its kernels by id, with the digest of each rendered source, the cache key over everything that went in, and
the toolchain. Rebuilding compiles them anew and compares: inputs first, then each cubin and plan, then the wheel.
Where a cubin differs, the ELF sections that differ are named. A runtime wheel is rebuilt from the launcher's sources.
"""

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from email.parser import BytesParser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from fa4build import __version__
from fa4build.compiling.compile import CompileOptions
from fa4build.compiling.toolchain import current_toolchain
from fa4build.errors import RebuildError, WheelError
from fa4build.families.interface import Family
from fa4build.families.registry import family_named, family_names
from fa4build.matrix.arch import ARCHES, Arch
from fa4build.matrix.selection import Selection
from fa4build.pipeline import find_cached
from fa4build.runtime.fa4_kernels.trust import Signature
from fa4build.shipping.launcher_build import FREE_THREADED_PLATFORMS, PLATFORMS
from fa4build.shipping.manifest import Entry, Manifest, pack_import_name
from fa4build.shipping.pack import Artifact, read_pack, unpack
from fa4build.shipping.release import artifact_of, labels_of, toolchain_of
from fa4build.shipping.wheel import RUNTIME_NAME, prepare_pack_wheel, prepare_runtime_wheel
from fa4build.shipping.wheel_file import WheelContents, read_wheel
from fa4build.store.cache import Cache
from fa4build.store.entries import CacheEntry
from fa4build.store.evidence import Committed


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not as recorded. `what`: a kernel's id, or the wheel's file name."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """The outcome. `num_equal`: kernels whose cubin and plan came out equal; `is_wheel_equal`: None if not compared."""

    wheel: str
    sha256: str
    num_kernels: int
    num_equal: int
    is_wheel_equal: bool | None
    differences: tuple[Difference, ...]

    @property
    def is_reproduced(self) -> bool:
        """Nothing differs."""
        return not self.differences


def changed_inputs(path: Path) -> tuple[Difference, ...]:
    """What this checkout and toolchain would compile differently, without compiling. Empty for a runtime wheel."""
    manifest = _manifest(path)
    return () if manifest is None else tuple(_changed_inputs(manifest, _family(manifest)))


def rebuild(path: Path, cache: Cache, build: Callable[[Selection, Family], None]) -> Rebuild:
    """Build the kernels of a wheel again and compare.

    Args:
        cache: where `build` puts what it compiles; empty for a proof, as what is cached is not compiled again.
        build: compiles a selection of a family into `cache`.
    Raises: WheelError if the wheel itself is damaged; RebuildError if its inputs are not those of this machine.
    """
    manifest = _manifest(path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    if manifest is None:
        return _rebuild_runtime(path, sha256, cache)
    family = _family(manifest)
    changed = list(_changed_inputs(manifest, family))
    if changed:
        lines = "".join(f"\n  {difference.what}: {difference.reason}" for difference in changed[:5])
        raise RebuildError(
            f"{path.name}: {len(changed)} of its {len(manifest.entries)} kernels have other inputs here:{lines}\n"
            "Check out the version it was built from, with the toolchain of its manifest."
        )
    selection = Selection(globs=tuple(entry.id for entry in manifest.entries), alone=True)
    build(selection, family)
    return _compare(path, sha256, selection, cache, family)


def _manifest(path: Path) -> Manifest | None:
    """The manifest of a pack wheel; None for a runtime wheel."""
    wheel = read_wheel(path)
    if any(name.endswith("/manifest.json") and name.count("/") == 1 for name in wheel.files):
        return read_pack(path).manifest
    return None


def _family(manifest: Manifest) -> Family:
    """The family whose kernels these are."""
    for name in family_names():
        family = family_named(name)
        if family.name == manifest.family:
            return family
    raise RebuildError(f"pack {manifest.pack}: its family {manifest.family} is not installed here.")


def _changed_inputs(manifest: Manifest, family: Family) -> Iterable[Difference]:
    """Kernels whose key would be another here, with the first part of it that differs."""
    ids = tuple(entry.id for entry in manifest.entries)
    toolchain, options = family.toolchain(current_toolchain()), CompileOptions()
    recipes = {
        kernel.id: family.recipe(kernel, toolchain, options)
        for kernel in family.expand(Selection(globs=ids, alone=True))
    }
    for entry in manifest.entries:
        recipe = recipes[entry.id]
        if recipe.key != entry.facts.key:
            yield Difference(what=entry.id, reason=_why(entry, recipe.inputs, manifest.toolchain))


def _why(entry: Entry, inputs: Mapping[str, Any], recorded: Mapping[str, str]) -> str:
    """Which input differs, as far as a manifest tells."""
    here = {item["name"]: item["version"] for item in inputs["toolchain"]["distributions"]}
    versions = [f"{name} {recorded.get(name)}, here {version}" for name, version in here.items()]
    other = [
        text for (name, version), text in zip(here.items(), versions, strict=True) if recorded.get(name) != version
    ]
    if other:
        return f"toolchain: {'; '.join(other)}"
    if inputs["source"]["sha256"] != entry.facts.source_sha256:
        return "its rendered source is another"
    return "kernel sources, options, or builds of the toolchain under the same version are others"


def _compare(path: Path, sha256: str, selection: Selection, cache: Cache, family: Family) -> Rebuild:
    """Kernels one by one, then the wheel as a whole."""
    pack = read_pack(path)
    recorded = {artifact.facts.id: artifact for artifact in unpack(pack, origin=path.name)}
    found = find_cached(family.expand(selection), cache, family=family)
    entries = [entry for _, entry in found if entry is not None]
    built = {entry.name: artifact_of(entry, cache, Committed()) for entry in entries}
    differences = [
        difference
        for name, artifact in recorded.items()
        if (difference := _difference(name, artifact, built.get(name))) is not None
    ]
    is_equal = None
    if not differences:
        artifacts = [_with_evidence(built[name], recorded[name]) for name in recorded]
        again = _wheel_again(path, artifacts, entries, family, pack.signatures)
        is_equal = again == path.read_bytes()
        if not is_equal:
            reason = "its kernels are equal, its other files are not: they follow from fa4build's own version"
            differences.append(Difference(what=path.name, reason=reason))
    num_changed = sum(difference.what != path.name for difference in differences)
    return Rebuild(
        wheel=path.name,
        sha256=sha256,
        num_kernels=len(recorded),
        num_equal=len(recorded) - num_changed,
        is_wheel_equal=is_equal,
        differences=tuple(differences),
    )


def _difference(name: str, recorded: Artifact, built: Artifact | None) -> Difference | None:
    if built is None:
        return Difference(what=name, reason="did not compile")
    if built.cubin != recorded.cubin:
        sections = ", ".join(differing_sections(recorded.cubin, built.cubin))
        return Difference(what=name, reason=f"its cubin differs in {sections}")
    if built.plan != recorded.plan:
        return Difference(what=name, reason="its launch plan differs")
    return None


def differing_sections(first: bytes, second: bytes) -> list[str]:
    """Names of the ELF sections that differ between two cubins, or what else does."""
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        sections = [
            {section.name: section.data() for section in ELFFile(io.BytesIO(data)).iter_sections()}
            for data in (first, second)
        ]
    except ELFError:
        return ["its ELF structure"]
    names = sorted(sections[0].keys() | sections[1].keys())
    return [n or "headers" for n in names if sections[0].get(n) != sections[1].get(n)] or ["ELF headers"]


def _with_evidence(built: Artifact, recorded: Artifact) -> Artifact:
    """The rebuilt kernel with the recorded evidence: it belongs to a cubin's digest, and the cubins are equal."""
    return replace(built, facts=replace(built.facts, evidence=recorded.facts.evidence))


def _wheel_again(
    path: Path,
    artifacts: Sequence[Artifact],
    entries: Sequence[CacheEntry],
    family: Family,
    signatures: tuple[Signature, ...],
) -> bytes:
    """The wheel, packed again under the recorded name and with the recorded signatures."""
    arch = _arch(artifacts[0].facts.target)
    manifest = read_pack(path).manifest
    kernels = family.expand(Selection(globs=tuple(artifact.facts.id for artifact in artifacts), alone=True))
    labels = replace(labels_of(family, kernels, arch), name=manifest.pack)
    prepared = prepare_pack_wheel(
        artifacts,
        arch=arch,
        toolchain=toolchain_of(entries),
        out_dir=Path(os.devnull),
        version=manifest.version,
        labels=labels,
        signatures=signatures,
    )
    assert prepared.data is not None
    return prepared.data


def _arch(target: str) -> Arch:
    return next(arch for arch in ARCHES if arch.target == target)


def _parts(wheel: WheelContents) -> dict[str, tuple[str, ...]]:
    """Target name -> the packs that the extra of this target names."""
    headers = BytesParser().parsebytes(wheel.files[f"{wheel.dist_info}/METADATA"], headersonly=True)
    requirements = [Requirement(text) for text in headers.get_all("Requires-Dist", ())]
    conditional = [(requirement.name, requirement.marker) for requirement in requirements]
    return {
        arch.name: tuple(
            name for name, marker in conditional if marker is not None and marker.evaluate({"extra": arch.aliases[0]})
        )
        for arch in ARCHES
    }


def _rebuild_runtime(path: Path, sha256: str, cache: Cache) -> Rebuild:
    """Compile the launcher again."""
    wheel = read_wheel(path)
    known = (*PLATFORMS, *FREE_THREADED_PLATFORMS)
    platform = next((platform for platform in known if wheel.tag == platform.wheel_tag), None)
    if platform is None or wheel.name != pack_import_name(RUNTIME_NAME):
        raise RebuildError(f"{path.name}: neither a pack nor the runtime for a known platform.")
    try:
        prepared = prepare_runtime_wheel(
            platform, Path(os.devnull), version=wheel.version, parts=_parts(wheel), compiler_cache=cache.root / "zig"
        )
    except WheelError as error:
        raise RebuildError(f"{path.name}: {error}") from error
    is_equal = prepared.data == path.read_bytes()
    reason = f"does not come out equal from the sources of fa4build {__version__}"
    differences = () if is_equal else (Difference(what=path.name, reason=reason),)
    return Rebuild(
        wheel=path.name,
        sha256=sha256,
        num_kernels=0,
        num_equal=0,
        is_wheel_equal=is_equal,
        differences=differences,
    )
