"""Wheels to the byte: a small deterministic writer and a reader that trusts nothing.

A wheel here is a pure function of its contents: fixed times, order and modes, nothing compressed by the zip layer. The
payload is compressed already, and bytes of deflate depend on the zlib a Python was built with. That also gives the
reader its strongest check: it writes what it read once more, and any byte that differs, headers included, is damage.

Sources: binary distribution format (file name, WHEEL, RECORD), core metadata 2.4, PEP 639 (licences), PEP 770 (SBOM).
"""

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import EmailPolicy
from pathlib import Path

from fa4build.errors import WheelError
from fa4build.files import write_atomically

METADATA_VERSION = "2.4"
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold
_MODE = 0o100644
_MAX_WHEEL_BYTES = 2 << 30
_POLICY = EmailPolicy(utf8=True, mangle_from_=False, refold_source="none", max_line_length=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """The core metadata of a distribution. `extras` maps an extra to its requirements."""

    name: str
    version: str
    summary: str
    description: str
    license_expression: str
    requires_python: str = ">=3.10"
    classifiers: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSource:
    """Everything that becomes one wheel.

    `tag` is a complete compatibility tag (`py3-none-any`). `files` are the installed files by path. `entry_points`
    maps group to (name -> value). `licenses` and `sboms` map file names below their dist-info directories to bytes.
    """

    metadata: Metadata
    tag: str
    is_pure: bool
    files: Mapping[str, bytes]
    licenses: Mapping[str, bytes]
    sboms: Mapping[str, bytes]
    entry_points: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The file name, which follows from metadata and tag."""
        return f"{_stem(self.metadata.name, self.metadata.version)}-{self.tag}.whl"


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelContents:
    """A wheel that was read and verified. `files` holds every member but RECORD, by path."""

    file_name: str
    name: str
    version: str
    tag: str
    dist_info: str
    files: Mapping[str, bytes]

    def sbom(self) -> bytes | None:
        """The first SBOM, or None."""
        prefix = f"{self.dist_info}/sboms/"
        return next((data for name, data in sorted(self.files.items()) if name.startswith(prefix)), None)


def wheel_bytes(source: WheelSource) -> bytes:
    """The wheel as bytes; equal sources give equal bytes on every machine.

    Raises: WheelError when a path is unsafe or lies inside the dist-info directory.
    """
    dist_info = f"{_stem(source.metadata.name, source.metadata.version)}.dist-info"
    for name in source.files:
        _check_path(name)
        if name.split("/")[0].endswith((".dist-info", ".data")):
            raise WheelError(f"{name}: installed files must lie outside {dist_info}; move it.")
    info = {
        "METADATA": _metadata_text(source),
        "WHEEL": _wheel_text(source),
        **{f"licenses/{name}": data for name, data in source.licenses.items()},
        **{f"sboms/{name}": data for name, data in source.sboms.items()},
    }
    if source.entry_points:
        info["entry_points.txt"] = _entry_points_text(source.entry_points)
    members = {**source.files, **{f"{dist_info}/{name}": data for name, data in info.items()}}
    return _archive(members, dist_info)


def write_wheel(source: WheelSource, out_dir: Path) -> Path:
    """Write the wheel whole or not at all; an equal one already there is left alone.

    Returns: its path, `out_dir` / `source.file_name`.
    """
    data = wheel_bytes(source)
    path = out_dir / source.file_name
    if not (path.is_file() and path.read_bytes() == data):
        out_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    return path


def read_wheel(path: Path) -> WheelContents:
    """Read a wheel that fa4build wrote and verify every byte of it.

    Raises: WheelError when it is no wheel, truncated, disagrees with its RECORD in either direction, is named
        differently from its metadata, or is not byte for byte what fa4build writes for these members.
    """
    _parse_file_name(path.name)
    try:
        if path.stat().st_size > _MAX_WHEEL_BYTES:
            raise WheelError(f"{path.name}: larger than 2 GiB, which fa4build never writes.")
        data = path.read_bytes()
    except OSError as error:
        raise WheelError(f"{path}: cannot be read ({error.strerror}). Give the path of a wheel.") from error
    return parse_wheel(data, path.name)


def parse_wheel(data: bytes, file_name: str) -> WheelContents:
    """The wheel in `data`, verified as `read_wheel` does. Raises: WheelError."""
    name, version, tag = _parse_file_name(file_name)
    members = _members(data, file_name)
    dist_info = f"{_stem(name, version)}.dist-info"
    record = members.pop(f"{dist_info}/RECORD", None)
    if record is None or f"{dist_info}/METADATA" not in members:
        raise WheelError(f"{file_name}: no {dist_info}/RECORD or METADATA. The file was renamed, or is no wheel.")
    _check_record(members, record, dist_info, file_name)
    _check_identity(members[f"{dist_info}/METADATA"], name, version, file_name)
    if f"Tag: {tag}\n".encode() not in members.get(f"{dist_info}/WHEEL", b""):
        raise WheelError(f"{file_name}: WHEEL does not name the tag {tag}. The file was renamed; use its own name.")
    if _archive(members, dist_info) != data:
        raise WheelError(
            f"{file_name}: bytes outside its members differ from what fa4build writes. Get the wheel again."
        )
    return WheelContents(file_name=file_name, name=name, version=version, tag=tag, dist_info=dist_info, files=members)


def _archive(members: Mapping[str, bytes], dist_info: str) -> bytes:
    """The zip: installed files by name, then dist-info by name, RECORD last."""
    record_name = f"{dist_info}/RECORD"
    order = sorted(members, key=lambda name: (name.startswith(f"{dist_info}/"), name))
    record = _record_text({name: members[name] for name in order}, record_name)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in [*((name, members[name]) for name in order), (record_name, record)]:
            entry = zipfile.ZipInfo(name, _ZIP_EPOCH)
            entry.create_system = 3  # Unix, whatever this machine is: gives the mode below its meaning
            entry.external_attr = _MODE << 16
            archive.writestr(entry, data)
    return buffer.getvalue()


def _record_text(members: Mapping[str, bytes], record_name: str) -> bytes:
    """RECORD: path, sha256 and size of each member; itself without."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, data in members.items():
        rows.writerow([name, _record_digest(data), len(data)])
    rows.writerow([record_name, "", ""])
    return text.getvalue().encode()


def _record_digest(data: bytes) -> str:
    """sha256 as RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _metadata_text(source: WheelSource) -> bytes:
    """METADATA; the description is the body."""
    metadata = source.metadata
    message = EmailMessage(_POLICY)
    message["Metadata-Version"] = METADATA_VERSION
    message["Name"] = metadata.name
    message["Version"] = metadata.version
    message["Summary"] = metadata.summary
    message["License-Expression"] = metadata.license_expression
    for name in sorted(source.licenses):
        message["License-File"] = name
    for classifier in metadata.classifiers:
        message["Classifier"] = classifier
    message["Requires-Python"] = metadata.requires_python
    for requirement in metadata.requires:
        message["Requires-Dist"] = requirement
    for extra, requirements in sorted(metadata.extras.items()):
        message["Provides-Extra"] = extra
        for requirement in requirements:
            message["Requires-Dist"] = f'{requirement}; extra == "{extra}"'
    message["Description-Content-Type"] = "text/markdown"
    return message.as_bytes() + metadata.description.encode()


def _wheel_text(source: WheelSource) -> bytes:
    """WHEEL: one Tag line a tag, for a compressed tag set expands to several."""
    python, abi, platform = source.tag.split("-")
    message = EmailMessage(_POLICY)
    message["Wheel-Version"] = "1.0"
    message["Generator"] = "fa4build"
    message["Root-Is-Purelib"] = "true" if source.is_pure else "false"
    for one in (f"{p}-{a}-{f}" for p in python.split(".") for a in abi.split(".") for f in platform.split(".")):
        message["Tag"] = one
    return message.as_bytes()


def _entry_points_text(groups: Mapping[str, Mapping[str, str]]) -> bytes:
    """entry_points.txt, groups and names sorted."""
    lines: list[str] = []
    for group, points in sorted(groups.items()):
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in sorted(points.items())), ""]
    return "\n".join(lines).encode()


def _members(data: bytes, origin: str) -> dict[str, bytes]:
    """Every member of the zip; only what fa4build writes is accepted: stored, unique, safe paths."""
    members: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(data):
                    raise WheelError(f"{origin}: {entry.filename} is not stored plainly, so fa4build did not write it.")
                if entry.filename in members:
                    raise WheelError(f"{origin}: {entry.filename} is there twice. Get the wheel again.")
                _check_path(entry.filename)
                members[entry.filename] = archive.read(entry)
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise WheelError(
            f"{origin}: not a complete zip file ({error}). The download stopped early or bytes changed; get it again."
        ) from error
    return members


def _check_record(members: Mapping[str, bytes], record: bytes, dist_info: str, origin: str) -> None:
    """RECORD and members must agree both ways. The comparison of the whole text also fixes its order."""
    order = sorted(members, key=lambda name: (name.startswith(f"{dist_info}/"), name))
    expected = _record_text({name: members[name] for name in order}, f"{dist_info}/RECORD")
    if record == expected:
        return
    listed = set(record.decode(errors="replace").splitlines())
    wrong = next((line for line in expected.decode().splitlines() if line not in listed), "a file that is not there")
    raise WheelError(f"{origin}: RECORD disagrees with the contents at {wrong.split(',')[0]}. Get the wheel again.")


def _check_identity(metadata: bytes, name: str, version: str, origin: str) -> None:
    """File name and METADATA must name the same distribution."""
    message = BytesParser(policy=_POLICY).parsebytes(metadata, headersonly=True)
    stem = _stem(str(message["Name"]), str(message["Version"]))
    if stem != _stem(name, version):
        raise WheelError(f"{origin}: METADATA says {stem}. The file was renamed; give it its own name back.")


def _parse_file_name(file_name: str) -> tuple[str, str, str]:
    """Name, version and tag out of a wheel's file name."""
    match = re.fullmatch(r"([A-Za-z0-9_.]+)-([A-Za-z0-9_.!+]+)-([a-z0-9_.]+-[a-z0-9_.]+-[a-z0-9_.]+)\.whl", file_name)
    if match is None:
        raise WheelError(f"{file_name}: not the name of a wheel. Expected name-version-python-abi-platform.whl.")
    return match[1], match[2], match[3]


def _stem(name: str, version: str) -> str:
    """`name-version` as file names write it: runs of `-_.` are one underscore, lower case."""
    return f"{re.sub(r'[-_.]+', '_', name).lower()}-{version.replace('-', '_')}"


def _check_path(name: str) -> None:
    """Refuse a member path that could leave the directory it is unpacked in."""
    parts = name.split("/")
    if not re.fullmatch(r"[A-Za-z0-9_.+/-]+", name) or any(part in ("", ".", "..") for part in parts):
        raise WheelError(f"{name!r}: not a safe path inside a wheel. Allowed: relative, ASCII, no '..'.")
