"""Exported entries: a tar file that holds actions and objects, as `fa4build cache export` writes it."""

import io
import os
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

from fa4build.errors import CacheCorruptError
from fa4build.store.entries import no_collection

_MEMBER = re.compile(r"actions/[0-9a-f]{64}\.json|objects/([0-9a-f]{2})/\1[0-9a-f]{62}")
_BLOCK = 512  # of a tar file
_NO_EXPORT = "`fa4build cache export` writes one."


def tar_of(members: Mapping[str, bytes]) -> bytes:
    """A tar file of these members, in their order: the same bytes for the same members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(data), 0o444, 0
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def read_members(path: Path) -> dict[str, bytes]:
    """Name and contents of everything in a tar file; only what `export` writes is let through.

    Read here and not by `tarfile`, which takes longer for a member than all that is done with it.
    """
    members: dict[str, bytes] = {}
    whole_size = path.stat().st_size
    with path.open("rb") as file, no_collection():
        while (header := file.read(_BLOCK)) != bytes(_BLOCK):
            name, size = _member(header, path)
            data = file.read(min(size, whole_size))
            file.seek(-size % _BLOCK, os.SEEK_CUR)
            if len(data) != size:
                raise CacheCorruptError(f"{path}: no exported cache (cut short in {name}). {_NO_EXPORT}")
            members[name] = data
    return members


def _member(header: bytes, path: Path) -> tuple[str, int]:
    """Name and size of the member that a header (POSIX ustar) announces. Raises: CacheCorruptError."""
    try:
        if len(header) != _BLOCK:
            raise ValueError("cut short" if header else "it ends without an end")
        total = sum(header) - sum(header[148:156]) + 8 * ord(" ")
        if header[257:262] != b"ustar" or int(header[148:156].split(b"\0")[0], 8) != total:
            raise ValueError("no tar file")
        name, size = header[:100].rstrip(b"\0").decode(), int(header[124:136].split(b"\0")[0], 8)
    except ValueError as error:
        raise CacheCorruptError(f"{path}: no exported cache ({error}). {_NO_EXPORT}") from error
    if header[156:157] not in (b"0", b"\0") or header[345:500].strip(b"\0") or not _MEMBER.fullmatch(name):
        raise CacheCorruptError(f"{path}: {name!r} is no part of an exported cache.")
    return name, size
