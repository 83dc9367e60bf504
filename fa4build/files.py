"""Files that appear whole or not at all."""

import contextlib
import ctypes
import os
import tempfile
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file so that a reader, or a machine that stops, sees the old bytes or the new ones and nothing between.

    The directory must exist. The temporary file lies beside the target, so the rename stays in one file system.
    """
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        error.filename = str(path)  # what was asked for, not the temporary name
        raise
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, temporary):
            error.filename = str(path)  # a full disk does not tell where it is
        raise
    _sync_directory(path.parent)


def replace_directory(new: Path, target: Path) -> None:
    """Put a finished directory in the place of another, or of none; the old one takes the place of the new one.

    Both lie in one file system. On Linux the two are exchanged in one step, so that a reader, or a kill at any moment,
    finds the old directory or the new one. Where the file system cannot do that, the old one is moved aside first and
    put back if the second step fails.
    """
    if not target.exists():
        new.rename(target)
    elif not _exchange(new, target):
        aside = new.with_name(f"{new.name}.replaced")
        target.rename(aside)
        try:
            new.rename(target)
        except BaseException:
            aside.rename(target)
            raise
    _sync_directory(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step, if this system can."""
    with contextlib.suppress(OSError, AttributeError):
        rename = ctypes.CDLL(None).renameat2
        names = os.fsencode(first), os.fsencode(second)
        return rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0
    return False


def _sync_directory(directory: Path) -> None:
    """Make the rename itself durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
