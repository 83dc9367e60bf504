"""Files that appear whole or not at all, and scratch directories that outlive nobody for long."""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file so that a reader, or a machine that stops, sees the old bytes or the new ones and nothing between.

    The directory must exist. The temporary file lies beside the target, so the rename stays in one file system.
    """
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise _told(error, path, len(data)) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):  # a full disk does not tell where it is
            raise _told(error, path, len(data)) from None
        raise
    _sync_directory(path.parent)


def write_many(root: Path, files: Mapping[str, bytes], mode: int = 0o644) -> None:
    """Write many files below a directory, each whole or not at all, and all of them on the disk when it returns.

    One flush for all of them: a flush a file takes most of an import. After a power cut a file may be there without its
    contents, as long as this function has not returned.
    """
    splits = {name: name.rpartition("/") for name in files}
    for folder in {folder for folder, _, _ in splits.values()}:
        (root / folder).mkdir(parents=True, exist_ok=True)
    own = f"{os.getpid()}.{threading.get_ident()}.tmp"
    for name, data in files.items():
        folder, slash, last = splits[name]
        _write_unflushed(f"{root}/{name}", f"{root}/{folder}{slash}.{last}.{own}", data, mode)
    os.sync()


def _write_unflushed(path: str, scratch: str, data: bytes, mode: int) -> None:
    """One of many; text paths, since a Path costs more than the calls."""
    try:
        handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.rename(scratch, path)  # noqa: PTH104
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(scratch)  # noqa: PTH108
        if isinstance(error, OSError):
            raise _told(error, path, len(data)) from None
        raise


def _told(error: OSError, path: Path | str, size: int) -> OSError:
    """The error with the path that was asked for, not a temporary name, and how much was to be written there."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OSError(error.errno, f"{error.strerror}: {size} bytes were to be written", str(path))
    error.filename = str(path)
    return error


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


_SCRATCH = "fa4build-scratch-"
_OF_OLD = re.compile(r"fa4build-((launcher|wheels|rebuild|farm)-)?[a-z0-9_]{8}")  # made before there were locks
_YOUNG_S, _OLD_S = 60.0, 24 * 3600.0


@contextlib.contextmanager
def scratch_directory(purpose: str) -> Iterator[Path]:
    """A directory among the temporary files, removed at the end; what killed processes left there is removed first."""
    path, release = make_scratch(purpose)
    try:
        yield path
    finally:
        release()


def make_scratch(purpose: str) -> tuple[Path, Callable[[], None]]:
    """A directory among the temporary files, and the function that removes it.

    It is locked as long as its owner lives, in whatever container that is: a process id would say nothing there.
    """
    sweep_scratch()
    path = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{purpose}-"))
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(handle, fcntl.LOCK_EX)

    def release() -> None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)

    return path, release


def sweep_scratch(now: float | None = None) -> int:
    """Remove this user's scratch directories whose owner is gone, and those that nobody locks once they are a day old.

    Returns: how many.
    """
    now = time.time() if now is None else now
    removed = 0
    for path in Path(tempfile.gettempdir()).glob("fa4build-*"):
        is_ours = path.name.startswith(_SCRATCH)
        if is_ours or _OF_OLD.fullmatch(path.name):
            with contextlib.suppress(OSError):
                removed += _remove_unowned(path, now - (_YOUNG_S if is_ours else _OLD_S))
    return removed


def _remove_unowned(path: Path, before: float) -> bool:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mtime > before:
        return False
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    finally:
        os.close(handle)


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
