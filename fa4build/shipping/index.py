"""A package index as static files: PEP 503 (HTML), PEP 691 (JSON), PEP 658 and 714 (metadata beside each wheel).

Any web server that serves files serves it, and so does `file://`. Everything is a pure function of the wheels.
"""

import hashlib
import html
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path
from urllib.parse import quote

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from fa4build.errors import BundleError

WHEELS_DIR = "wheels"
SIMPLE_DIR = "simple"
JSON_TYPE = "application/vnd.pypi.simple.v1+json"
_API_VERSION = "1.1"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedWheel:
    """What an index says of a wheel: project (canonical), version, digest, size (bytes), and its METADATA."""

    file_name: str
    project: str
    version: str
    sha256: str
    size: int
    requires_python: str | None
    metadata: bytes

    @property
    def metadata_sha256(self) -> str:
        """Digest of METADATA."""
        return hashlib.sha256(self.metadata).hexdigest()


def describe_wheel(path: Path) -> IndexedWheel:
    """Read what an index needs from any wheel, ours or not.

    Raises: BundleError if it is no wheel, or is named differently from its metadata.
    """
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            (member,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1]
            metadata = archive.read(member)
    except (InvalidWheelFilename, zipfile.BadZipFile, OSError, ValueError) as error:
        raise BundleError(f"{path}: no wheel ({error}). A bundle takes wheels alone.") from error
    headers = BytesParser().parsebytes(metadata, headersonly=True)
    if canonicalize_name(str(headers["Name"])) != name or str(headers["Version"]) != str(version):
        raise BundleError(f"{path.name}: its METADATA says {headers['Name']} {headers['Version']}. It was renamed.")
    return IndexedWheel(
        file_name=path.name,
        project=name,
        version=str(version),
        sha256=file_sha256(path),
        size=path.stat().st_size,
        requires_python=headers["Requires-Python"],
        metadata=metadata,
    )


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file of any size."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def index_files(wheels: Sequence[IndexedWheel]) -> dict[str, bytes]:
    """Every file of the index, by path: pages below `simple/`, and metadata beside the wheels in `wheels/`."""
    projects: dict[str, list[IndexedWheel]] = {}
    for wheel in sorted(wheels, key=lambda wheel: wheel.file_name):
        projects.setdefault(wheel.project, []).append(wheel)
    files = {
        f"{SIMPLE_DIR}/index.html": _page("Packages", [f'<a href="{name}/">{name}</a>' for name in sorted(projects)]),
        f"{SIMPLE_DIR}/index.json": _json({"projects": [{"name": name} for name in sorted(projects)]}),
    }
    for name, members in projects.items():
        files[f"{SIMPLE_DIR}/{name}/index.html"] = _page(name, [_link(wheel) for wheel in members])
        versions = sorted({wheel.version for wheel in members})
        document = {"name": name, "versions": versions, "files": [_file(wheel) for wheel in members]}
        files[f"{SIMPLE_DIR}/{name}/index.json"] = _json(document)
    return files | {f"{WHEELS_DIR}/{wheel.file_name}.metadata": wheel.metadata for wheel in wheels}


def _url(wheel: IndexedWheel) -> str:
    """Relative to a project's page."""
    return f"../../{WHEELS_DIR}/{quote(wheel.file_name)}"


def _link(wheel: IndexedWheel) -> str:
    digest = f"sha256={wheel.metadata_sha256}"
    # Both names of the attribute: PEP 714 tells clients to try the newer one first, older pips know the other alone.
    attributes = {"data-core-metadata": digest, "data-dist-info-metadata": digest}
    if wheel.requires_python is not None:
        attributes["data-requires-python"] = wheel.requires_python
    written = "".join(f' {name}="{html.escape(value)}"' for name, value in attributes.items())
    return f'<a href="{_url(wheel)}#sha256={wheel.sha256}"{written}>{wheel.file_name}</a>'


def _file(wheel: IndexedWheel) -> dict[str, object]:
    document: dict[str, object] = {
        "filename": wheel.file_name,
        "url": _url(wheel),
        "hashes": {"sha256": wheel.sha256},
        "size": wheel.size,
        "core-metadata": {"sha256": wheel.metadata_sha256},
    }
    if wheel.requires_python is not None:
        document["requires-python"] = wheel.requires_python
    return document


def _page(title: str, links: Sequence[str]) -> bytes:
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        f'<head><meta charset="utf-8"><meta name="pypi:repository-version" content="{_API_VERSION}">',
        f"<title>{title}</title></head>",
        "<body>",
        *(f"{link}<br>" for link in links),
        "</body>",
        "</html>",
    ]
    return ("\n".join(lines) + "\n").encode()


def _json(document: Mapping[str, object]) -> bytes:
    whole = {"meta": {"api-version": _API_VERSION}, **document}
    return (json.dumps(whole, sort_keys=True, indent=1) + "\n").encode()
