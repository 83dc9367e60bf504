"""Packs: many cubins and launch plans as a few solid xz groups and a manifest (docs/formats.md section 3).

Cubins of one family repeat each other, so a group is compressed as one stream. Which variants share a group follows
from their axes alone, never from the order they were built in: the same variants give the same bytes.
"""

import hashlib
import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fa4build.errors import WheelError
from fa4build.files import write_atomically
from fa4build.runtime.fa4_kernels.errors import PackError
from fa4build.runtime.fa4_kernels.trust import SEAL_FILE, Seal, Signature, check_sealed, read_seal
from fa4build.shipping.manifest import (
    FAMILY,
    MAX_GROUP_ENTRIES,
    Blob,
    Entry,
    Facts,
    Group,
    Manifest,
    collect,
    group_file_name,
    manifest_from_json,
    manifest_to_json,
    pack_import_name,
)
from fa4build.store.kernel_check import check_kernel, claim_of

MANIFEST_FILE = "manifest.json"
INIT_FILE = "__init__.py"

# The filter chain is written out, not a preset, so that the bytes do not follow a library's idea of a preset.
# pb=4: SASS instructions are 16 bytes long. The dictionary covers a full group of FA4-size cubins (64 x 60 KB).
_FILTERS = (
    {
        "id": lzma.FILTER_LZMA2,
        "dict_size": 8 << 20,
        "lc": 2,
        "lp": 2,
        "pb": 4,
        "mode": lzma.MODE_NORMAL,
        "nice_len": 273,
        "mf": lzma.MF_BT4,
        "depth": 512,
    },
)
# One kernel costs the decompression of its group: about 5 ms of a processor a MiB, and the first call may take 30 ms.
_GROUP_RAW_BYTES = 4 << 20
# A reader refuses a stream that needs more than this, so that a forged file cannot exhaust the machine.
_DECODER_MEMORY_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One built variant on its way into a pack: its facts and the bytes of cubin (ELF) and launch plan (JSON).

    `dependencies` are the kernel sources it was compiled from, as (relative path, sha256); the SBOM lists them, the
    pack does not hold them.
    """

    facts: Facts
    cubin: bytes
    plan: bytes
    dependencies: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """A manifest, the stored group files it names (file name -> xz bytes), and who signed it."""

    manifest: Manifest
    groups: Mapping[str, bytes]
    signatures: tuple[Signature, ...] = ()

    @property
    def seal(self) -> Seal:
        """The seal over all that the manifest does not cover."""
        digests = {name: _sha256(data) for name, data in self._sealed_files().items()}
        return Seal(files=digests, signatures=self.signatures)

    def files(self) -> dict[str, bytes]:
        """Every file of the import package, by name."""
        return {**self._sealed_files(), SEAL_FILE: self.seal.text(), **self.groups}

    def _sealed_files(self) -> dict[str, bytes]:
        name = self.manifest.pack
        targets = ", ".join(self.manifest.targets)
        init = f'"""{name}: FlashAttention kernels for {targets}; data only, read by fa4_kernels."""\n'
        return {INIT_FILE: init.encode(), MANIFEST_FILE: manifest_to_json(self.manifest).encode()}


def check_artifacts(artifacts: Iterable[Artifact], *, remedy: str) -> None:
    """Accept built variants if each cubin and plan is the kernel that its facts describe, see `check_kernel`.

    Raises: WheelError naming the first that is not.
    """
    for artifact in artifacts:
        check_kernel(claim_of(artifact.facts.id, artifact.facts), artifact.cubin, artifact.plan, remedy=remedy)


def build_pack(
    artifacts: Iterable[Artifact],
    *,
    pack: str,
    version: str,
    abi: str,
    toolchain: Mapping[str, str],
    family: str = FAMILY,
    recipes: Iterable[Mapping[str, Any]] = (),
) -> Pack:
    """Compress artifacts into a pack.

    Args:
        pack: distribution name, e.g. `fa4-kernels-sm90a`.
        version: version of the distribution.
        abi: hash of the operator signatures the plans were made for.
        toolchain: name -> version of what compiled the cubins.
        family, recipes: see `Manifest`.

    Raises: WheelError when there is no artifact, two share an id, or a recipe names a kernel that is not there.
    """
    ordered = sorted(artifacts, key=lambda artifact: _similarity_key(artifact.facts))
    slices = _slices(ordered)
    entries: list[Entry] = []
    groups: list[Group] = []
    stored: dict[str, bytes] = {}
    for number, members in enumerate(slices):
        raw, placed = _lay_out(number, members)
        data = lzma.compress(raw, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=[dict(f) for f in _FILTERS])
        name = group_file_name(number)
        groups.append(Group(file=name, sha256=_sha256(data), size=len(data), raw_size=len(raw)))
        stored[name] = data
        entries += placed
    manifest = collect(
        entries,
        groups=groups,
        pack=pack,
        version=version,
        abi=abi,
        toolchain=toolchain,
        family=family,
        recipes=recipes,
    )
    pack_import_name(pack)
    return Pack(manifest=manifest, groups=MappingProxyType(stored))


def write_pack(pack: Pack, directory: Path) -> Path:
    """Write the import package of a pack below `directory`; the manifest last, so a torn pack has none.

    Returns: the package's directory.
    """
    target = directory / pack_import_name(pack.manifest.pack)
    target.mkdir(parents=True, exist_ok=True)
    files = pack.files()
    for name in sorted(files, key=lambda name: (name == MANIFEST_FILE, name)):
        write_atomically(target / name, files[name])
    return target


def read_pack(path: Path) -> Pack:
    """Read and verify a pack, down to each kernel.

    Args:
        path: the import package's directory, or a wheel that holds one.

    Raises: WheelError when the manifest is missing, of a newer schema or damaged, payload and manifest disagree in
        either direction, a wheel holds other files, or a cubin is not the kernel that the manifest describes.
    """
    pack = _read_pack(path)
    check_artifacts(unpack(pack, origin=path.name), remedy=f"{path.name} is not what it says; get it from its maker.")
    return pack


def manifests_in(wheel: Path) -> tuple[Manifest, ...]:
    """The manifests of all packs in a wheel, none of a runtime wheel. Kernels are not read. Raises: WheelError."""
    from fa4build.shipping.wheel_file import read_wheel

    files = read_wheel(wheel).files
    names = sorted(name for name in files if name.endswith(f"/{MANIFEST_FILE}") and name.count("/") == 1)
    return tuple(manifest_from_json(files[name], origin=f"{wheel.name}: {name}") for name in names)


def _read_pack(path: Path) -> Pack:
    """The pack itself, its kernels unread."""
    if path.is_dir():
        files = {item.name: item.read_bytes() for item in sorted(path.iterdir()) if item.name != "__pycache__"}
        return pack_from_files(files, origin=str(path))
    from fa4build.shipping.wheel_file import read_wheel  # a directory needs no zip

    wheel = read_wheel(path)
    packages = sorted({name.split("/")[0] for name in wheel.files if name.endswith(f"/{MANIFEST_FILE}")})
    if len(packages) != 1:
        raise WheelError(
            f"{path}: holds {len(packages)} packs; exactly one is expected. Give a pack wheel or directory."
        )
    prefix = packages[0] + "/"
    beside = {"fa4_kernels"} if wheel.name == "fa4_kernels_single" else set()
    tops = {name.split("/")[0] for name in wheel.files} - {packages[0], wheel.dist_info} - beside
    if tops:
        raise WheelError(
            f"{path.name}: holds {', '.join(sorted(tops))} beside its pack, which pip would install and Python may "
            "run. A pack is data only; get the wheel from its maker."
        )
    points = wheel.files.get(f"{wheel.dist_info}/entry_points.txt", b"")
    if not beside and [line for line in points.splitlines() if line.startswith(b"[")] != [b"[fa4_kernels.packs]"]:
        raise WheelError(
            f"{path.name}: its entry points are not its pack alone, so pip would make a command or a plug-in of it. A "
            "pack is data only; get the wheel from its maker."
        )
    files = {name.removeprefix(prefix): data for name, data in wheel.files.items() if name.startswith(prefix)}
    pack = pack_from_files(files, origin=path.name)
    if pack_import_name(pack.manifest.pack) != packages[0] or pack.manifest.version != wheel.version:
        raise WheelError(
            f"{path.name}: the wheel says {packages[0]} {wheel.version}, its manifest {pack.manifest.pack} "
            f"{pack.manifest.version}. Rebuild the wheel."
        )
    return pack


def pack_from_files(files: Mapping[str, bytes], *, origin: str) -> Pack:
    """The pack made of these files (name in the package -> bytes), verified to the last blob.

    Raises: WheelError, as `read_pack`.
    """
    if MANIFEST_FILE not in files:
        raise WheelError(f"{origin}: no {MANIFEST_FILE}, so this is no pack. Give a pack's directory or wheel.")
    manifest = manifest_from_json(files[MANIFEST_FILE], origin=f"{origin}: {MANIFEST_FILE}")
    groups = {group.file: files[group.file] for group in manifest.groups if group.file in files}
    expected = {INIT_FILE, MANIFEST_FILE, SEAL_FILE, *(group.file for group in manifest.groups)}
    _refuse("missing", sorted(expected - set(files)), origin)
    _refuse("not in the manifest", sorted(set(files) - expected), origin)
    if files[INIT_FILE] != Pack(manifest=manifest, groups=groups).files()[INIT_FILE]:
        raise WheelError(f"{origin}: {INIT_FILE} is not the one fa4build writes. Packs hold data only; rebuild it.")
    try:
        seal = read_seal(files[SEAL_FILE])
        check_sealed(seal, {name: files[name] for name in (INIT_FILE, MANIFEST_FILE)})
    except PackError as error:
        raise WheelError(f"{origin}: {error}. Get the pack again, or rebuild it.") from error
    pack = Pack(manifest=manifest, groups=MappingProxyType(groups), signatures=seal.signatures)
    for _ in unpack(pack, origin=origin):
        pass
    return pack


def unpack(pack: Pack, *, origin: str = "pack") -> Iterable[Artifact]:
    """Each entry's bytes, group by group, each checked against its sha256.

    Raises: WheelError on the first group or blob that does not match.
    """
    for number, group in enumerate(pack.manifest.groups):
        raw = _decompress(group, pack.groups[group.file], origin)
        for entry in pack.manifest.entries:
            if entry.cubin.group == number:
                cubin = _cut(raw, entry.cubin, f"{origin}: cubin of {entry.id}")
                plan = _cut(raw, entry.plan, f"{origin}: launch plan of {entry.id}")
                yield Artifact(facts=entry.facts, cubin=cubin, plan=plan)


def _similarity_key(facts: Facts) -> tuple[object, ...]:
    """Sorts alike cubins next to each other without knowing what an axis means.

    Numbers (tile and head sizes) change a kernel most, so they decide first; words and flags come after them.
    """
    numbers = tuple((name, value) for name, value in sorted(facts.axes.items()) if type(value) is int)
    words = tuple((name, str(value)) for name, value in sorted(facts.axes.items()) if type(value) is not int)
    return (facts.target, facts.op, numbers, words, facts.id)


def _slices(ordered: Sequence[Artifact]) -> list[Sequence[Artifact]]:
    """Neighbours that share a group: as many as the two limits allow, at least one."""
    slices: list[list[Artifact]] = []
    size = 0
    for artifact in ordered:
        size += len(artifact.cubin) + len(artifact.plan)
        if not slices or len(slices[-1]) == MAX_GROUP_ENTRIES or size > _GROUP_RAW_BYTES:
            slices.append([])
            size = len(artifact.cubin) + len(artifact.plan)
        slices[-1].append(artifact)
    return slices


def _lay_out(number: int, members: Sequence[Artifact]) -> tuple[bytes, list[Entry]]:
    """The raw bytes of a group, all cubins and then all plans, and the entries that point into it."""
    blobs = [artifact.cubin for artifact in members] + [artifact.plan for artifact in members]
    placed: list[Blob] = []
    offset = 0
    for blob in blobs:
        placed.append(Blob(group=number, offset=offset, size=len(blob), sha256=_sha256(blob)))
        offset += len(blob)
    cubins, plans = placed[: len(members)], placed[len(members) :]
    entries = [
        Entry(facts=artifact.facts, cubin=cubin, plan=plan)
        for artifact, cubin, plan in zip(members, cubins, plans, strict=True)
    ]
    return b"".join(blobs), entries


def _decompress(group: Group, data: bytes, origin: str) -> bytes:
    """The raw bytes of a group; nothing is decompressed before its digest matched."""
    if len(data) != group.size or _sha256(data) != group.sha256:
        raise WheelError(
            f"{origin}: {group.file}: {len(data)} bytes with sha256 {_sha256(data)}, the manifest says {group.size} "
            f"bytes with {group.sha256}. The pack is damaged; get it again."
        )
    decoder = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_DECODER_MEMORY_BYTES)
    try:
        # One byte more than promised is enough to notice a longer stream.
        raw = decoder.decompress(data, max_length=group.raw_size + 1)
    except lzma.LZMAError as error:
        raise WheelError(f"{origin}: {group.file}: not an xz stream ({error}). Rebuild the pack.") from error
    if len(raw) != group.raw_size or not decoder.eof or decoder.unused_data:
        raise WheelError(
            f"{origin}: {group.file}: decompresses to other than the {group.raw_size} bytes of the manifest. "
            "Rebuild the pack."
        )
    return raw


def _cut(raw: bytes, blob: Blob, what: str) -> bytes:
    """The bytes of one blob, checked."""
    data = raw[blob.offset : blob.offset + blob.size]
    if _sha256(data) != blob.sha256:
        raise WheelError(
            f"{what}: sha256 {_sha256(data)}, the manifest says {blob.sha256}. The pack is damaged; get it again."
        )
    return data


def _refuse(problem: str, names: Sequence[str], origin: str) -> None:
    """Raise when a pack has files too few or too many."""
    if names:
        raise WheelError(
            f"{origin}: {', '.join(names)}: {problem}. Manifest and payload must be equal; rebuild the pack."
        )


def _sha256(data: bytes) -> str:
    """Hexadecimal sha256."""
    return hashlib.sha256(data).hexdigest()
