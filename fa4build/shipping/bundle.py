"""Bundles: everything a machine without a network needs to install and check kernels, as one directory.

    wheels/             wheels, each with its METADATA beside it
    simple/             a static package index over them
    requirements.txt    every wheel with its sha256
    bundle.json         what is in it, for programs
    bundle.cdx.json     SBOM of all wheels
    README.md           for the operator
    verify.sh, tools/   the check, in Python's standard library
    SHA256SUMS          of all files above; SHA256SUMS.sig, if it is signed

Equal wheels give equal bundles, byte for byte. A bundle appears whole or not at all.
"""

import base64
import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from fa4build import __version__
from fa4build.errors import BundleError
from fa4build.files import replace_directory
from fa4build.matrix.arch import ARCHES
from fa4build.runtime import bundle_check
from fa4build.runtime.bundle_check import SIGNATURE_FILE, SIGNED_PREFIX, SUMS_FILE
from fa4build.runtime.fa4_kernels.abi import ABI_HASH
from fa4build.runtime.fa4_kernels.trust import SEAL_FILE
from fa4build.shipping.index import WHEELS_DIR, IndexedWheel, describe_wheel, file_sha256, index_files
from fa4build.shipping.inspect import inspect_file
from fa4build.shipping.manifest import Entry, Manifest, evidence_summary, hardware_sentences, pack_import_name
from fa4build.shipping.pack import read_pack
from fa4build.shipping.sbom import Component, pypi_component, sbom_components, sbom_json
from fa4build.shipping.signing import SigningKey
from fa4build.shipping.wheel import ENTRY_POINT_GROUP, LICENSE, RUNTIME_DIR, RUNTIME_NAME, pack_name
from fa4build.shipping.wheel_file import read_wheel

DESCRIPTION_FILE = "bundle.json"
FORMAT, FORMAT_VERSION = "fa4build.shipping.bundle", 1
KEY_FILE = "signer.pub"
_CHECK_FILES = ("ed25519.py", "errors.py", "trust.py")  # of the runtime: one implementation for both


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle on disk: its wheels (ours first), number of files and size of all of them (bytes)."""

    path: Path
    wheels: tuple[IndexedWheel, ...]
    num_files: int
    size: int
    key_id: str | None


def write_bundle(
    out: Path, wheels: Iterable[Path], *, include: Iterable[Path] = (), sign: SigningKey | None = None
) -> Bundle:
    """Write a bundle of these wheels.

    Args:
        out: the bundle's directory. One that is there already is replaced if it is a bundle, else refused.
        wheels: wheels of fa4build; each is verified down to the last kernel.
        include: wheels of others, or directories of such: what the runtime requires and the target machines lack.
            Packs and runtimes among them were made elsewhere, and are verified like those in `wheels`.
        sign: the key that signs the listing of digests.

    Raises: BundleError; WheelError if one of our wheels is damaged. `out` is as before then.
    """
    check_target(out)
    included = _included(include)
    ours = sorted([*wheels, *filter(_is_ours, included)], key=lambda path: path.name)
    others = sorted((path for path in included if path not in ours), key=lambda path: path.name)
    described = [describe_wheel(path) for path in (*ours, *others)]
    _check_set(described)
    manifests = [manifest for path in ours if (manifest := _manifest(path)) is not None]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        root = Path(scratch) / "bundle"
        (root / WHEELS_DIR).mkdir(parents=True)
        for path in (*ours, *others):
            shutil.copyfile(path, root / WHEELS_DIR / path.name)
        for name, data in _files(ours, described, manifests, sign).items():
            _write(root / name, data)
        _seal(root, sign)
        _make_modes(root)
        size, count = _measure(root)
        replace_directory(root, out)
    key_id = None if sign is None else sign.key_id
    return Bundle(path=out, wheels=tuple(described), num_files=count, size=size, key_id=key_id)


def _included(paths: Iterable[Path]) -> list[Path]:
    """The wheels among files and directories."""
    found: list[Path] = []
    for path in paths:
        wheels = sorted(path.glob("*.whl")) if path.is_dir() else [path]
        if not wheels:
            raise BundleError(f"--include {path}: holds no wheel. `pip download --dest {path} torch` fetches some.")
        found += wheels
    return found


def _is_ours(path: Path) -> bool:
    """Whether a wheel holds what the runtime would load, or is the runtime, whoever made it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            points = (archive.read(name) for name in names if name.endswith(".dist-info/entry_points.txt"))
            announced = any(ENTRY_POINT_GROUP.encode() in text for text in points)
    except (OSError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return False  # `describe_wheel` says what is wrong with it
    packages = {name.split("/")[0] for name in names if name.endswith(f"/{SEAL_FILE}")}
    return announced or path.name.startswith(pack_import_name(RUNTIME_NAME)) or bool(packages)


def check_target(out: Path) -> None:
    """Nothing but a bundle is ever replaced, and a bundle needs a directory that can be written to.

    Raises: BundleError. Call it before long work.
    """
    above = next((path for path in out.absolute().parents if path.exists()), Path("/"))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        reason = "cannot be written to" if above.is_dir() else "is no directory"
        raise BundleError(f"{out}: {above} {reason}. Give a new directory where you may write.")
    if out.exists() and not (out / DESCRIPTION_FILE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise BundleError(f"{out}: is there and is no bundle, so it is left alone. Give a new directory.")


def _check_set(wheels: Sequence[IndexedWheel]) -> None:
    """One wheel a file name, one version a project: a locked set has no choice."""
    names = [wheel.file_name for wheel in wheels]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise BundleError(f"{', '.join(repeated)}: twice. A bundle holds each wheel once.")
    if not any(wheel.project.startswith(RUNTIME_NAME) for wheel in wheels):
        raise BundleError(f"no wheel of {RUNTIME_NAME}. Build it: fa4build wheel --arch sm90.")
    versions: dict[str, str] = {}
    for wheel in wheels:
        if versions.setdefault(wheel.project, wheel.version) != wheel.version:
            both = f"{versions[wheel.project]} and {wheel.version}"
            raise BundleError(f"{wheel.project}: {both}. A bundle locks one version of each project.")


def _manifest(path: Path) -> Manifest | None:
    """The manifest of a pack wheel, verified to the kernel; None for a runtime wheel, verified to its launcher."""
    wheel = read_wheel(path)
    if any(name.count("/") == 1 and name.endswith("/manifest.json") for name in wheel.files):
        manifest = read_pack(path).manifest
        if manifest.abi != ABI_HASH:
            raise BundleError(f"{path.name}: made for ABI {manifest.abi[:12]}, the runtime here has {ABI_HASH[:12]}.")
        return manifest
    inspect_file(path)
    return None


def _files(
    ours: Sequence[Path], wheels: Sequence[IndexedWheel], manifests: Sequence[Manifest], sign: SigningKey | None
) -> dict[str, bytes]:
    """Every file but the wheels and the digests."""
    files = {
        **index_files(wheels),
        "requirements.txt": requirements_text(wheels),
        DESCRIPTION_FILE: _description(wheels, manifests),
        "bundle.cdx.json": _sbom(ours, wheels),
        "README.md": _readme(wheels, manifests, sign),
        "verify.sh": _template("verify.sh").encode(),
        "tools/__main__.py": b"import sys\n\nfrom bundle_check import main\n\nsys.exit(main())\n",
        "tools/bundle_check/__init__.py": Path(bundle_check.__file__).read_bytes(),
        **{f"tools/bundle_check/{name}": (RUNTIME_DIR / name).read_bytes() for name in _CHECK_FILES},
    }
    if sign is not None:
        files[KEY_FILE] = sign.public_pem.encode()
    return files


def requirements_text(wheels: Sequence[IndexedWheel]) -> bytes:
    """A requirements file for `pip install --require-hashes`: each project, its version, the sha256 of each wheel."""
    projects: dict[str, list[IndexedWheel]] = {}
    for wheel in sorted(wheels, key=lambda wheel: wheel.file_name):
        projects.setdefault(wheel.project, []).append(wheel)
    lines = ["# pip install --no-index --find-links wheels --require-hashes -r requirements.txt"]
    for name, members in sorted(projects.items()):
        hashes = [f"    --hash=sha256:{wheel.sha256}" for wheel in members]
        lines += [f"{name}=={members[0].version} \\", *(f"{line} \\" for line in hashes[:-1]), hashes[-1]]
    return ("\n".join(lines) + "\n").encode()


def _description(wheels: Sequence[IndexedWheel], manifests: Sequence[Manifest]) -> bytes:
    """bundle.json."""
    document = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "fa4build": __version__,
        "abi": ABI_HASH,
        "wheels": [
            {"file": w.file_name, "project": w.project, "version": w.version, "sha256": w.sha256, "size": w.size}
            for w in wheels
        ],
        "packs": [
            {
                "pack": manifest.pack,
                "family": manifest.family,
                "targets": list(manifest.targets),
                "toolchain": dict(manifest.toolchain),
                "kernels": [entry.id for entry in manifest.entries],
            }
            for manifest in manifests
        ],
    }
    return (json.dumps(document, sort_keys=True, indent=1) + "\n").encode()


def _sbom(ours: Sequence[Path], wheels: Sequence[IndexedWheel]) -> bytes:
    """One SBOM: the wheels, and everything that went into ours."""
    parts = {}
    tools = {component.reference: component for component in (pypi_component("fa4build", __version__),)}
    for wheel in wheels:
        purl = f"pkg:pypi/{wheel.project}@{wheel.version}?file_name={wheel.file_name}"
        part = Component(kind="library", name=wheel.file_name, version=wheel.version, sha256=wheel.sha256, purl=purl)
        parts[part.reference] = part
    for path in ours:
        try:
            wheel_tools, wheel_parts = sbom_components(read_wheel(path).sbom() or b"")
        except ValueError as error:
            raise BundleError(f"{path.name}: {error}. Build the wheel again.") from error
        for known, found in ((tools, wheel_tools), (parts, wheel_parts)):
            for component in found:
                if known.setdefault(component.reference, component) != component:
                    raise BundleError(
                        f"{path.name}: {component.name} differs from that of another wheel. Build all wheels of a "
                        "bundle from one checkout with one toolchain."
                    )
    return sbom_json(
        name=f"{RUNTIME_NAME}-bundle",
        version=__version__,
        license_expression=LICENSE,
        tools=tools.values(),
        parts=parts.values(),
        inputs=ABI_HASH,
    )


def _readme(wheels: Sequence[IndexedWheel], manifests: Sequence[Manifest], sign: SigningKey | None) -> bytes:
    """The operator's page."""
    rows = [f"| `{w.file_name}` | {w.size:,} | `{w.sha256[:16]}` |" for w in wheels]
    packs = [
        f"| `{m.pack}` | {', '.join(m.targets)} | {len(m.entries)} | {evidence_summary(m.entries)} |" for m in manifests
    ]
    entries = [entry for manifest in manifests for entry in manifest.entries]
    targets = sorted({entry.facts.target for entry in entries})
    installs = sorted({_requirement(manifest) for manifest in manifests})
    has_torch = any(wheel.project == "torch" for wheel in wheels)
    text = _template("README.md")
    values = {
        "WHEELS": "\n".join(rows),
        "PACKS": "\n".join(packs),
        "HARDWARE": hardware_sentences(entries),
        "RUNS_ON": _runs_on(targets),
        "INSTALL": "\n".join(f"    pip install --no-index --find-links wheels {name}" for name in installs),
        "INDEX_INSTALL": "\n".join(
            f"    pip install --index-url file:///path/to/bundle/simple/ {name}" for name in installs
        ),
        **_first_call(entries),
        "KEY": _signed_text(sign),
        "TORCH": "It is in this bundle." if has_torch else "It is not in this bundle: have it installed before.",
        "PROJECTS": " ".join(sorted({w.project for w in wheels if w.project.startswith(RUNTIME_NAME)})),
    }
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text.encode()


def _first_call(entries: Sequence[Entry]) -> dict[str, str]:
    """Head dim, dtype and mask that a plain forward of the bundle serves; usual ones where it has none."""
    dtypes = {"bf16": "bfloat16", "fp16": "float16"}
    for axes in (entry.facts.axes for entry in entries if entry.facts.op == "fwd"):
        is_plain = not any(axes.get(name) for name in ("split", "softcap", "sink")) and axes.get("layout") == "dense"
        is_square = axes.get("head_dim") == axes.get("head_dim_v")
        if is_plain and is_square and axes.get("dtype") in dtypes and axes.get("mask") in ("full", "causal"):
            causal = str(axes["mask"] == "causal")
            return {"HEAD_DIM": str(axes["head_dim"]), "DTYPE": dtypes[str(axes["dtype"])], "CAUSAL": causal}
    return {"HEAD_DIM": "128", "DTYPE": "bfloat16", "CAUSAL": "True"}


def _requirement(manifest: Manifest) -> str:
    """What installs a pack with the runtime: the extra of its target, or the pack by name where no extra names it."""
    named = {pack_name(arch): arch.aliases[0] for arch in ARCHES}
    if manifest.pack in named:
        return f"'{RUNTIME_NAME}[{named[manifest.pack]}]'"
    return f"{RUNTIME_NAME} {manifest.pack}"


def _runs_on(targets: Sequence[str]) -> str:
    """`A cubin for sm_90a runs on compute capability 9.0 only, sm_100a on 10.0 only.`"""
    capability = {arch.target: ".".join(map(str, arch.compute_capability)) for arch in ARCHES}
    first, *rest = [f"{target} {{}} {capability[target]} only" for target in targets] or [""]
    return ", ".join([first.format("runs on compute capability"), *(text.format("on") for text in rest)])


def _signed_text(sign: SigningKey | None) -> str:
    if sign is None:
        return "This bundle is not signed."
    return (
        f"This bundle is signed by key `{sign.key_id}`. The key in `{KEY_FILE}` came with it and proves nothing by "
        "itself: compare it with the one its maker published, and keep your own copy."
    )


def _template(name: str) -> str:
    return resources.files("fa4build.shipping").joinpath("templates", "bundle", name).read_text(encoding="utf-8")


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _seal(root: Path, sign: SigningKey | None) -> None:
    """The listing of digests, in the form that sha256sum reads, and its signature."""
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    sums = "".join(f"{file_sha256(root / name)}  {name}\n" for name in names).encode()
    _write(root / SUMS_FILE, sums)
    if sign is not None:
        signature = sign.sign(SIGNED_PREFIX + sums)
        line = f"signature {signature.key_id} {base64.b64encode(signature.value).decode()}\n"
        _write(root / SIGNATURE_FILE, line.encode())


def _make_modes(root: Path) -> None:
    """The same for every user and umask."""
    root.chmod(0o755)
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.name == "verify.sh" else 0o644)


def _measure(root: Path) -> tuple[int, int]:
    """Bytes and number of all files."""
    sizes = [path.stat().st_size for path in root.rglob("*") if path.is_file()]
    return sum(sizes), len(sizes)
