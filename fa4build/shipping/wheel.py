"""The wheels users install: one pack of kernels per target, and the runtime once per host platform.

What is in a wheel, how it is called and what its metadata says. The bytes of the file are wheel_file.py's, the
payload's are pack.py's and launcher_build.py's. A wheel whose inputs did not change is not built again: a digest over
them is kept in its SBOM.
"""

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fa4build import __version__
from fa4build.errors import WheelError
from fa4build.files import write_atomically
from fa4build.matrix.arch import ARCHES, Arch
from fa4build.runtime.fa4_kernels.abi import ABI_HASH
from fa4build.runtime.fa4_kernels.trust import Signature
from fa4build.shipping.launcher_build import (
    Platform,
    build_launcher,
    compiler_version,
    launcher_sources,
    platform_named,
    sources_digest,
)
from fa4build.shipping.manifest import (
    FAMILY,
    Manifest,
    canonical_json,
    evidence_summary,
    hardware_sentences,
    pack_import_name,
)
from fa4build.shipping.pack import Artifact, build_pack, check_artifacts, pack_from_files
from fa4build.shipping.sbom import SBOM_FILE, Component, pypi_component, sbom_inputs, sbom_json
from fa4build.shipping.signing import SigningKey, sign_pack
from fa4build.shipping.wheel_file import Metadata, WheelContents, WheelSource, parse_wheel, read_wheel, wheel_bytes

LICENSE = "Apache-2.0"
RUNTIME_NAME = "fa4-kernels"
ENTRY_POINT_GROUP = "fa4_kernels.packs"
PACK_TAG = "py3-none-any"
SIZE_LIMIT_BYTES = 100_000_000
"""What a package index accepts for one file unless asked for more."""

RUNTIME_REQUIRES = ("torch>=2.6",)
RUNTIME_DIR = Path(__file__).parents[1] / "runtime" / "fa4_kernels"

_FOREIGN_KERNEL = (
    "Nothing is packed, signed or written. The store holds other bytes than the compiler left: build the kernel again "
    "with an empty --cache-dir, and find out who writes to this store and to its --remote-cache."
)
_PACKING_MODULES = (
    "shipping/manifest.py",
    "shipping/pack.py",
    "shipping/sbom.py",
    "shipping/signing.py",
    "shipping/wheel.py",
    "shipping/wheel_file.py",
    "shipping/launcher_build.py",
    "runtime/fa4_kernels/trust.py",
)
_CLASSIFIERS = (
    "Environment :: GPU :: NVIDIA CUDA",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenWheel:
    """A wheel on disk. `is_new` is False when an equal one was there already; size in bytes."""

    path: Path
    sha256: str
    size: int
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedWheel:
    """A wheel that is ready to be written: `data` is None when an equal one is at `path` already."""

    path: Path
    data: bytes | None

    @property
    def size(self) -> int:
        """Bytes of the wheel."""
        return self.path.stat().st_size if self.data is None else len(self.data)

    def contents(self) -> WheelContents:
        """What is in it."""
        return read_wheel(self.path) if self.data is None else parse_wheel(self.data, self.path.name)

    def write(self) -> WrittenWheel:
        """Write it, whole or not at all."""
        if self.data is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, self.data)
        data = self.data if self.data is not None else self.path.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        return WrittenWheel(path=self.path, sha256=sha256, size=len(data), is_new=self.data is not None)


def pack_name(arch: Arch) -> str:
    """The distribution that holds the kernels of one target: `fa4-kernels-sm90a`."""
    return f"{RUNTIME_NAME}-{arch.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLabels:
    """How a pack is called and what belongs to it beside its kernels.

    Attributes:
        name: the distribution.
        family: of the kernels, as manifests spell it.
        summary: one line about the family.
        license_expression: SPDX, of the kernels.
        notices: file name -> licence text that the kernels' sources demand to be kept.
        recipes: how operators are called with these kernels (docs/formats.md, section 5).
    """

    name: str
    family: str = FAMILY
    summary: str = "FlashAttention-4 kernels"
    license_expression: str = LICENSE
    notices: Mapping[str, bytes] = field(default_factory=dict)
    recipes: tuple[Mapping[str, Any], ...] = ()


def write_pack_wheel(artifacts: Iterable[Artifact], **options: Any) -> WrittenWheel:
    """Prepare and write a pack wheel; arguments as for `prepare_pack_wheel`."""
    return prepare_pack_wheel(artifacts, **options).write()


def write_runtime_wheel(platform: Platform | str, out_dir: Path, **options: Any) -> WrittenWheel:
    """Prepare and write a runtime wheel; arguments as for `prepare_runtime_wheel`."""
    return prepare_runtime_wheel(platform, out_dir, **options).write()


def prepare_pack_wheel(
    artifacts: Iterable[Artifact],
    *,
    arch: Arch,
    toolchain: Mapping[str, str],
    out_dir: Path,
    version: str = __version__,
    limit_bytes: int = SIZE_LIMIT_BYTES,
    labels: PackLabels | None = None,
    sign: SigningKey | None = None,
    signatures: tuple[Signature, ...] = (),
) -> PreparedWheel:
    """Pack the artifacts of one target into `fa4_kernels_<arch>-<version>-py3-none-any.whl`.

    Args:
        artifacts: built variants, all for `arch`, at least one.
        toolchain: name -> version of what compiled them; distributions of the package index under their own names.
        out_dir: where the wheel will be; nothing is written yet.
        limit_bytes: refuse a larger wheel.
        labels: name, family, licences and recipes; default: our own family's.
        sign: the key that signs the manifest.
        signatures: made before, of the same manifest: for building a signed wheel again without its key.

    Raises: WheelError when there is nothing to pack, an artifact is for another target or is not the kernel that its
        facts describe, ids repeat, or the wheel would be larger than the limit.
    """
    ordered = sorted(artifacts, key=lambda artifact: artifact.facts.id)
    labels = labels or PackLabels(name=pack_name(arch))
    name = labels.name
    _check_targets(ordered, arch)
    check_artifacts(ordered, remedy=_FOREIGN_KERNEL)
    inputs = _digest(
        {
            "version": version,
            "abi": ABI_HASH,
            "toolchain": dict(toolchain),
            "packing": _packing_digest(),
            "labels": {
                **{field: getattr(labels, field) for field in labels.__dataclass_fields__},
                "notices": {file: hashlib.sha256(text).hexdigest() for file, text in labels.notices.items()},
            },
            "artifacts": [_artifact_inputs(artifact) for artifact in ordered],
            "signed_by": sorted({*(s.key_id for s in signatures), *([] if sign is None else [sign.key_id])}),
        }
    )
    path = out_dir / f"{pack_import_name(name)}-{version}-{PACK_TAG}.whl"
    if _is_current(path, inputs):
        return PreparedWheel(path=path, data=None)
    pack = build_pack(
        ordered,
        pack=name,
        version=version,
        abi=ABI_HASH,
        toolchain=toolchain,
        family=labels.family,
        recipes=labels.recipes,
    )
    pack = replace(pack, signatures=signatures)
    if sign is not None:
        pack = sign_pack(pack, sign)
    package = pack_import_name(name)
    pack_from_files(pack.files(), origin=name)  # as a reader will: manifest and payload equal, every blob whole
    source = WheelSource(
        metadata=_pack_metadata(labels, arch, version, pack.manifest),
        tag=PACK_TAG,
        is_pure=True,
        files={f"{package}/{file}": data for file, data in pack.files().items()},
        entry_points={ENTRY_POINT_GROUP: {name: package}},
        licenses={"LICENSE": license_text(), **labels.notices},
        sboms={SBOM_FILE: _pack_sbom(labels, version, ordered, toolchain, inputs)},
    )
    return _prepared(source, out_dir, limit_bytes)


def prepare_runtime_wheel(
    platform: Platform | str,
    out_dir: Path,
    *,
    version: str = __version__,
    package_dir: Path = RUNTIME_DIR,
    compiler_cache: Path | None = None,
    limit_bytes: int = SIZE_LIMIT_BYTES,
    parts: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> PreparedWheel:
    """Build `fa4_kernels-<version>-cp310-abi3-manylinux_2_28_<machine>.whl`: dispatcher and compiled launcher.

    Args:
        platform: a host, or its name, see `platform_named`; free-threaded ones give wheels of their own tag.
        out_dir: where the wheel will be; nothing is written yet.
        compiler_cache: see `build_launcher`.
        parts: target name -> names of the packs its kernels are split over; a target left out has one.

    Raises: ToolchainError when the launcher does not compile; WheelError when the platform is unknown, the launcher is
        not what the tag promises, or the wheel would be larger than the limit.
    """
    target = platform_named(platform) if isinstance(platform, str) else platform
    sources = launcher_sources(package_dir)
    modules = runtime_modules(package_dir)
    compiler = compiler_version()
    extras = runtime_extras(parts)
    inputs = _digest(
        {
            "version": version,
            "platform": target.name,
            "packing": _packing_digest(),
            "launcher": sources_digest(sources),
            "modules": sources_digest(modules),
            "ziglang": compiler,
            "extras": {extra: list(names) for extra, names in extras.items()},
        }
    )
    path = out_dir / f"{pack_import_name(RUNTIME_NAME)}-{version}-{target.wheel_tag}.whl"
    if _is_current(path, inputs):
        return PreparedWheel(path=path, data=None)
    launcher = build_launcher(sources, target, compiler_cache=compiler_cache)
    package = pack_import_name(RUNTIME_NAME)
    source = WheelSource(
        metadata=_runtime_metadata(version, extras),
        tag=target.wheel_tag,
        is_pure=False,
        files={
            **{f"{package}/{name}": data for name, data in modules.items()},
            f"{package}/{target.launcher_file}": launcher,
        },
        licenses={"LICENSE": license_text()},
        sboms={SBOM_FILE: _runtime_sbom(version, sources, compiler, inputs)},
    )
    return _prepared(source, out_dir, limit_bytes)


def prepare_single_wheel(runtime: PreparedWheel, packs: Sequence[PreparedWheel], out_dir: Path) -> PreparedWheel:
    """Join a runtime wheel and pack wheels to one: `fa4_kernels_single-<version>-cp310-abi3-<platform>.whl`.

    For places that take one file and resolve no extras. It holds the same packages under the same import names, so it
    is installed instead of the others, never beside them.

    Raises: WheelError when there is no pack.
    """
    if not packs:
        raise WheelError("a single-file wheel needs at least one pack. Select variants that are written.")
    whole = [wheel.contents() for wheel in (runtime, *packs)]
    base = whole[0]
    files: dict[str, bytes] = {}
    licenses: dict[str, bytes] = {}
    entry_points: dict[str, str] = {}
    sboms: dict[str, bytes] = {}
    for wheel in whole:
        info = f"{wheel.dist_info}/"
        files |= {name: data for name, data in wheel.files.items() if not name.startswith(info)}
        parts = {name.removeprefix(info): data for name, data in wheel.files.items() if name.startswith(info)}
        licenses |= {n.removeprefix("licenses/"): data for n, data in parts.items() if n.startswith("licenses/")}
        sboms |= {f"{wheel.name}.cdx.json": data for n, data in parts.items() if n.startswith("sboms/")}
        entry_points |= {wheel.name.replace("_", "-"): wheel.name} if wheel is not base else {}
    names = ", ".join(entry_points)
    source = WheelSource(
        metadata=Metadata(
            name=f"{RUNTIME_NAME}-single",
            version=base.version,
            summary="FlashAttention-4 kernels compiled ahead of time: runtime and packs in one file",
            description=f"# {RUNTIME_NAME}-single\n\nInstall it instead of `{RUNTIME_NAME}` with {names}.\n",
            license_expression=LICENSE,
            classifiers=_CLASSIFIERS,
            requires=RUNTIME_REQUIRES,
        ),
        tag=base.tag,
        is_pure=False,
        files=files,
        entry_points={ENTRY_POINT_GROUP: entry_points},
        licenses=licenses,
        sboms=sboms,
    )
    return _prepared(source, out_dir, sys.maxsize)


def pack_wheel_size(artifacts: Iterable[Artifact], *, arch: Arch, toolchain: Mapping[str, str]) -> int:
    """Bytes of the wheel that `prepare_pack_wheel` would make, whatever the limit. Nothing is written."""
    prepared = prepare_pack_wheel(
        artifacts, arch=arch, toolchain=toolchain, out_dir=Path(os.devnull), limit_bytes=sys.maxsize
    )
    assert prepared.data is not None  # there is no such wheel in os.devnull that could be current
    return len(prepared.data)


def runtime_modules(package_dir: Path) -> dict[str, bytes]:
    """The Python part of the runtime, by path below its package."""
    files = [
        path for path in sorted(package_dir.rglob("*")) if path.suffix in (".py", ".pyi") or path.name == "py.typed"
    ]
    return {path.relative_to(package_dir).as_posix(): path.read_bytes() for path in files}


def runtime_extras(parts: Mapping[str, Sequence[str]] = MappingProxyType({})) -> dict[str, tuple[str, ...]]:
    """`fa4-kernels[sm90]` and so on; `all` for every target. No version: the ABI hash decides whether a pack fits.

    Args:
        parts: as for `prepare_runtime_wheel`.
    """
    extras = {arch.aliases[0]: tuple(sorted(parts.get(arch.name, (pack_name(arch),)))) for arch in ARCHES}
    return {**extras, "all": tuple(sorted(name for names in extras.values() for name in names))}


def checkout_root() -> Path | None:
    """The checkout this fa4build runs from, None when it is installed: site-packages holds other projects' files."""
    root = Path(__file__).parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "LICENSE").is_file() else None


def license_text() -> bytes:
    """The licence of fa4build and of what it makes, from the checkout or the installed distribution."""
    root = checkout_root()
    if root is not None:
        return (root / "LICENSE").read_bytes()
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        text = distribution("fa4build").read_text("licenses/LICENSE")
    except PackageNotFoundError:
        text = None
    if text is None:
        raise WheelError("the licence text of fa4build is missing, so no wheel can carry it. Install fa4build again.")
    return text.encode()


def _prepared(source: WheelSource, out_dir: Path, limit_bytes: int) -> PreparedWheel:
    """The bytes of a wheel that is within its limit."""
    data = wheel_bytes(source)
    if len(data) > limit_bytes:
        raise WheelError(
            f"{source.file_name}: {len(data)} bytes, the limit is {limit_bytes}. "
            "Select fewer variants, or raise the limit."
        )
    return PreparedWheel(path=out_dir / source.file_name, data=data)


def _is_current(path: Path, inputs: str) -> bool:
    """Whether the wheel at `path` is whole and was made from these inputs. A damaged one is written anew."""
    try:
        return path.is_file() and sbom_inputs(read_wheel(path).sbom() or b"") == inputs
    except WheelError:
        return False


def _check_targets(artifacts: Sequence[Artifact], arch: Arch) -> None:
    """All artifacts are for one target."""
    wrong = [a.facts.id for a in artifacts if a.facts.target != arch.target]
    if wrong:
        raise WheelError(f"{pack_name(arch)}: {', '.join(wrong)}: not for {arch.target}. One pack holds one target.")


def _artifact_inputs(artifact: Artifact) -> dict[str, object]:
    """What of an artifact reaches the wheel."""
    facts = {name: getattr(artifact.facts, name) for name in artifact.facts.__dataclass_fields__}
    facts["axes"], facts["tuning"] = dict(artifact.facts.axes), dict(artifact.facts.tuning)
    facts["evidence"] = artifact.facts.evidence.as_dict()
    return {
        **facts,
        "cubin": hashlib.sha256(artifact.cubin).hexdigest(),
        "plan": hashlib.sha256(artifact.plan).hexdigest(),
        "dependencies": artifact.dependencies,
    }


def _packing_digest() -> str:
    """Digest of the code that decides a wheel's bytes, so that a changed builder never reuses an old wheel."""
    here = Path(__file__).parents[1]
    return sources_digest({name: (here / name).read_bytes() for name in _PACKING_MODULES})


def _digest(document: object) -> str:
    """Sha256 of canonical JSON."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


def _pack_metadata(labels: PackLabels, arch: Arch, version: str, manifest: Manifest) -> Metadata:
    """Metadata of a pack: data without requirements, so that any runtime with the same ABI can use it."""
    capability = ".".join(map(str, arch.compute_capability))
    install = f"{RUNTIME_NAME}[{arch.aliases[0]}]" if labels.family == FAMILY else f"{RUNTIME_NAME}' '{labels.name}"
    description = (
        f"# {labels.name}\n\n"
        f"{labels.summary} for NVIDIA GPUs of compute capability {capability} ({arch.target}), compiled "
        f"ahead of time. Data only: the package `{RUNTIME_NAME}` finds and launches them.\n\n"
        f"    pip install '{install}'\n\n"
        f"Evidence: {evidence_summary(manifest.entries)}. {hardware_sentences(manifest.entries)}\n\n"
        f"Kernels:\n\n" + "".join(f"- `{entry.id}`: {entry.evidence_level}\n" for entry in manifest.entries)
    )
    return Metadata(
        name=labels.name,
        version=version,
        summary=f"{labels.summary} for {arch.target}, compiled ahead of time",
        description=description,
        license_expression=labels.license_expression,
        classifiers=_CLASSIFIERS,
    )


def _runtime_metadata(version: str, extras: Mapping[str, tuple[str, ...]]) -> Metadata:
    """Metadata of the runtime: torch, and one extra per target."""
    lines = "".join(f"    pip install {RUNTIME_NAME}[{extra}]\n" for extra in extras)
    description = (
        f"# {RUNTIME_NAME}\n\n"
        "FlashAttention-4 without a compiler: kernels are compiled ahead of time and shipped in packs, one per GPU "
        "target. Nothing is compiled, downloaded or written at run time.\n\n"
        "No kernel for sm_100a or sm_103a has run on hardware so far. The metadata of a pack says which of its kernels "
        "have, and which tests each has passed.\n\n"
        f"{lines}\n"
        "    from fa4_kernels import flash_attn_func\n"
    )
    return Metadata(
        name=RUNTIME_NAME,
        version=version,
        summary="FlashAttention-4 kernels compiled ahead of time: dispatcher and launcher",
        description=description,
        license_expression=LICENSE,
        classifiers=_CLASSIFIERS,
        requires=RUNTIME_REQUIRES,
        extras=extras,
    )


def _pack_sbom(
    labels: PackLabels, version: str, artifacts: Sequence[Artifact], toolchain: Mapping[str, str], inputs: str
) -> bytes:
    """What a pack was compiled from and by."""
    sources = sorted({dependency for artifact in artifacts for dependency in artifact.dependencies})
    parts = [Component(kind="file", name=path, sha256=sha256) for path, sha256 in sources]
    parts += [Component(kind="file", name=f"rendered/{a.facts.id}.py", sha256=a.facts.source_sha256) for a in artifacts]
    parts += _licenses({"LICENSE": license_text(), **labels.notices})
    if len({part.reference for part in parts}) != len(parts):
        raise WheelError(
            f"{labels.name}: its kernels were compiled from different versions of one source. Build them again."
        )
    tools = [_tool(tool, tool_version) for tool, tool_version in toolchain.items()]
    return sbom_json(
        name=labels.name,
        version=version,
        license_expression=labels.license_expression,
        tools=[*tools, pypi_component("fa4build", __version__)],
        parts=parts,
        inputs=inputs,
    )


def _runtime_sbom(version: str, sources: Mapping[str, bytes], compiler: str, inputs: str) -> bytes:
    """What the launcher was compiled from and by."""
    parts = [
        Component(kind="file", name=name, sha256=hashlib.sha256(data).hexdigest()) for name, data in sources.items()
    ]
    parts += _licenses({"LICENSE": license_text()})
    return sbom_json(
        name=RUNTIME_NAME,
        version=version,
        license_expression=LICENSE,
        tools=[pypi_component("fa4build", __version__), pypi_component("ziglang", compiler)],
        parts=parts,
        inputs=inputs,
    )


def _licenses(texts: Mapping[str, bytes]) -> list[Component]:
    """Licence texts as parts; the texts themselves are in the wheel."""
    return [
        Component(kind="file", name=f"licenses/{name}", sha256=hashlib.sha256(text).hexdigest())
        for name, text in texts.items()
    ]


def _tool(name: str, version: str) -> Component:
    """A compiler by name: distributions of the package index have a URL, the assembler inside one has none."""
    if name not in ("backend", "ptxas"):
        return pypi_component(name, version)
    return Component(kind="application", name=name, version=version)
