"""Installed packs: finding them, reading their manifests, and taking proven bytes out of their groups.

A pack is a Python package of data (docs/formats.md, section 3). A pack that cannot be used is never an exception while
looking around: it becomes a `RefusedPack` with its reason, so that one damaged pack does not hide the others.
"""

import hashlib
import json
import lzma
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .abi import ABI_HASH, MANIFEST_SCHEMA
from .errors import PackError
from .trust import NO_TRUST, SEAL_FILE, SEALED_FILES, TrustPolicy, check_sealed, read_seal

ENTRY_POINT_GROUP = "fa4_kernels.packs"
# A reader refuses a stream that needs more than this, so that a forged file cannot exhaust the machine.
_DECODER_MEMORY_BYTES = 128 << 20
_MAX_GROUP_BYTES = 1 << 30


class Directory(Protocol):
    """Where a pack's files lie: `pathlib.Path`, or what `importlib.resources.files` gives for a zipped package."""

    def joinpath(self, name: str, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Bytes of a decompressed group."""

    group: int
    offset: int
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One xz file of a pack. Sizes in bytes, as stored and decompressed."""

    file: str
    sha256: str
    size: int
    raw_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One kernel of a pack, as the dispatcher sees it."""

    id: str
    op: str
    target: str
    axes: Mapping[str, object]
    cubin: Blob
    plan: Blob
    symbols: tuple[str, ...]
    evidence: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The index of one pack."""

    pack: str
    version: str
    targets: tuple[str, ...]
    groups: tuple[Group, ...]
    entries: tuple[Entry, ...]
    family: str = "fa4"
    recipes: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """A usable pack and where its files lie."""

    manifest: Manifest
    directory: Directory = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPack:
    """An installed pack that cannot be used, and why."""

    name: str
    reason: str


def installed_packs(trust: TrustPolicy = NO_TRUST) -> tuple[Pack | RefusedPack, ...]:
    """Every pack that an installed distribution announces, sorted by name. Reads manifests only, runs no code of it."""
    from importlib import metadata  # 10 ms of imports that a process without a kernel call never needs

    found = []
    for point in sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda p: (p.name, p.value)):
        try:
            found.append(open_pack(point.name, _directory_of(point.value), trust))
        except ImportError as error:
            reason = f"its package {point.value} cannot be imported ({error}); install the pack again"
            found.append(RefusedPack(name=point.name, reason=reason))
    return tuple(found)


def _directory_of(package: str) -> Directory:
    """Where the files of a top-level package lie. It is not imported: a pack is data, whatever its __init__ says."""
    from importlib import util

    spec = util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("no such package")
    directory = Path(spec.submodule_search_locations[0])
    if directory.is_dir():
        return directory
    reader = getattr(spec.loader, "get_resource_reader", lambda _: None)(package)
    if reader is None:
        raise ImportError("its files cannot be reached")
    return reader.files()  # inside a zip file


def open_pack(name: str, directory: Directory, trust: TrustPolicy = NO_TRUST) -> Pack | RefusedPack:
    """The pack in `directory`, or why it cannot be used: it is damaged, not for this version, or not trusted."""
    try:
        files = {file: directory.joinpath(file).read_bytes() for file in SEALED_FILES}
        seal = read_seal(directory.joinpath(SEAL_FILE).read_bytes())
        check_sealed(seal, files)
        refusal = trust.refusal(seal)
        if refusal is not None:
            return RefusedPack(name=name, reason=refusal)
        manifest = read_manifest(files["manifest.json"])
    except OSError as error:
        return RefusedPack(name=name, reason=f"its files cannot be read ({error}); install the pack again")
    except PackError as error:
        return RefusedPack(name=name, reason=str(error))
    return Pack(manifest=manifest, directory=directory)


def read_manifest(text: bytes) -> Manifest:
    """The manifest in `text`.

    Raises: PackError when it is damaged, of a newer schema, or made for another ABI.
    """
    try:
        document = json.loads(text)
        schema = document["schema"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PackError(f"its manifest is damaged ({type(error).__name__}: {error}); install the pack again") from error
    if type(schema) is not int or not 1 <= schema <= MANIFEST_SCHEMA:
        raise PackError(
            f"its manifest has schema {schema!r}, this fa4-kernels reads 1 to {MANIFEST_SCHEMA}; upgrade fa4-kernels"
        )
    if document.get("abi") != ABI_HASH:
        raise PackError(
            f"it was made for ABI {str(document.get('abi'))[:12]}, this fa4-kernels has {ABI_HASH[:12]}; "
            "install pack and fa4-kernels of the same version"
        )
    try:
        manifest = Manifest(
            pack=document["pack"],
            version=document["version"],
            targets=tuple(document["targets"]),
            groups=tuple(Group(**group) for group in document["groups"]),
            entries=tuple(_read_entry(entry) for entry in document["entries"]),
            family=str(document["family"]),
            recipes=tuple(document.get("recipes", ())),
        )
        _check_blobs(manifest)
        _check_recipes(manifest)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise PackError(f"its manifest is damaged ({type(error).__name__}: {error}); install the pack again") from error
    return manifest


def _read_entry(document: Mapping[str, Any]) -> Entry:
    return Entry(
        id=document["id"],
        op=document["op"],
        target=document["target"],
        axes=dict(document["axes"]),
        cubin=Blob(**document["cubin"]),
        plan=Blob(**document["plan"]),
        symbols=tuple(document["symbols"]),
        evidence=dict(document["evidence"]),
    )


def _check_recipes(manifest: Manifest) -> None:
    """Recipes have every part that a call reads, and launch kernels of the same pack."""
    known = {entry.id for entry in manifest.entries}
    parts = {"id", "op", "target", "axes", "when", "inputs", "scalars", "let", "buffers", "steps", "results"}
    for recipe in manifest.recipes:
        if set(recipe) != parts:
            raise ValueError(f"a recipe with the parts {sorted(recipe)}")
        if missing := {step["kernel"] for step in recipe["steps"]} - known:
            raise ValueError(f"recipe {recipe['id']} needs {sorted(missing)}")


def _check_blobs(manifest: Manifest) -> None:
    """Groups are plain files of the package; blobs lie inside their groups."""
    for group in manifest.groups:
        if not 0 <= group.raw_size <= _MAX_GROUP_BYTES or not group.file.replace("-", "").replace(".", "").isalnum():
            raise ValueError(f"group {group.file!r} of {group.raw_size} bytes")
    for entry in manifest.entries:
        for blob in (entry.cubin, entry.plan):
            if not 0 <= blob.group < len(manifest.groups):
                raise ValueError(f"{entry.id}: group {blob.group} of {len(manifest.groups)}")
            if blob.offset < 0 or blob.size < 1 or blob.offset + blob.size > manifest.groups[blob.group].raw_size:
                raise ValueError(f"{entry.id}: bytes {blob.offset} to {blob.offset + blob.size} of its group")


class PackReader:
    """Takes blobs out of packs. Keeps the group decompressed last, for the next kernel of the same group."""

    def __init__(self) -> None:
        self._last: tuple[str, bytes] | None = None
        self._ahead: dict[str, Any] = {}

    def expect(self, pack: Pack, group: Group) -> None:
        """Begins to decompress a group that will be read soon, in a thread of its own; faults are told by that read."""
        from concurrent.futures import ThreadPoolExecutor

        executor = ThreadPoolExecutor(1)
        self._ahead[group.sha256] = executor.submit(_decompress, pack, group)
        executor.shutdown(wait=False)

    def read(self, pack: Pack, entry: Entry) -> tuple[bytes, bytes]:
        """Cubin and launch plan (JSON) of an entry, each proven by its sha256.

        Raises: PackError when a byte differs from what the manifest promises.
        """
        return self._blob(pack, entry, entry.cubin), self._blob(pack, entry, entry.plan)

    def _blob(self, pack: Pack, entry: Entry, blob: Blob) -> bytes:
        data = self._group(pack, pack.manifest.groups[blob.group])[blob.offset : blob.offset + blob.size]
        if hashlib.sha256(data).hexdigest() != blob.sha256:
            raise PackError(_damaged(pack, f"{entry.id}: bytes of its group differ from the manifest's sha256"))
        return data

    def _group(self, pack: Pack, group: Group) -> bytes:
        if self._last is None or self._last[0] != group.sha256:
            ahead = self._ahead.pop(group.sha256, None)
            self._last = (group.sha256, _decompress(pack, group) if ahead is None else ahead.result())
        return self._last[1]


def _decompress(pack: Pack, group: Group) -> bytes:
    try:
        stored = pack.directory.joinpath(group.file).read_bytes()
    except OSError as error:
        raise PackError(_damaged(pack, f"{group.file} cannot be read ({error})")) from error
    if len(stored) != group.size or hashlib.sha256(stored).hexdigest() != group.sha256:
        raise PackError(_damaged(pack, f"{group.file} differs from the manifest's size or sha256"))
    decoder = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_DECODER_MEMORY_BYTES)
    try:
        raw = decoder.decompress(stored, max_length=group.raw_size + 1)
    except lzma.LZMAError as error:
        raise PackError(_damaged(pack, f"{group.file} is no xz stream ({error})")) from error
    if len(raw) != group.raw_size:
        raise PackError(_damaged(pack, f"{group.file} holds {len(raw)} bytes, the manifest says {group.raw_size}"))
    return raw


def _damaged(pack: Pack, what: str) -> str:
    return (
        f"pack {pack.manifest.pack} {pack.manifest.version} is damaged: {what}. Nothing was loaded; install it again."
    )


def usable(packs: Iterable[Pack | RefusedPack]) -> tuple[Pack, ...]:
    """The packs that can be used."""
    return tuple(pack for pack in packs if isinstance(pack, Pack))


def newest_of(kernels: Iterable[tuple[Pack, Entry]]) -> dict[tuple[str, str], Manifest]:
    """(family, id) -> the manifest of the newest version among packs that have this kernel.

    An older pack stays installed where a split pack replaces a whole one, or the other way round.
    """
    newest: dict[tuple[str, str], Manifest] = {}
    for pack, entry in kernels:
        key = (pack.manifest.family, entry.id)
        best = newest.setdefault(key, pack.manifest)
        if _version_key(pack.manifest.version) > _version_key(best.version):
            newest[key] = pack.manifest
    return newest


def newer_than(pack: Pack, kernel: str, newest: Mapping[tuple[str, str], Manifest]) -> str | None:
    """The pack and version, of `newest_of`, that takes the place of this pack's kernel; None if none does."""
    best = newest.get((pack.manifest.family, kernel), pack.manifest)
    is_older = _version_key(pack.manifest.version) < _version_key(best.version)
    return f"{best.pack} {best.version}" if is_older else None


def _version_key(version: str) -> tuple[tuple[int, ...], tuple[int, str, int]]:
    """Sorts versions as pip does, as far as packs have them: 0.9 < 0.10.0.dev1 < 0.10.0rc2 < 0.10.0 < 0.10.0.post1."""
    match = re.match(r"v?(\d+(?:\.\d+)*)[._-]?(dev|a|b|rc|post)?[._-]?(\d*)", str(version).lower())
    if match is None:
        return (), (0, "", 0)
    release = tuple(int(part) for part in match[1].split("."))
    while release and release[-1] == 0:
        release = release[:-1]
    rank = {"dev": 0, "a": 1, "b": 1, "rc": 1, None: 2, "post": 3}[match[2]]
    return release, (rank, match[2] or "", int(match[3] or 0))


def refused(packs: Iterable[Pack | RefusedPack]) -> tuple[RefusedPack, ...]:
    """The packs that cannot."""
    return tuple(pack for pack in packs if isinstance(pack, RefusedPack))
