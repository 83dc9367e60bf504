"""Locks on files of a store, which the kernel drops when their holder dies, however it dies.

A lock is an flock on a file below `locks/`. Whoever has got one makes sure that the file is still the one that the path
names: a prune removes lock files that nobody has used for long, and does so while it holds them, so that two processes
never hold "the" lock of one key on two files.
"""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

_RETRY_S = 0.05


def take(path: Path, *, shared: bool = False, wait_s: float | None = 0.0) -> Callable[[], None] | None:
    """Take the lock of a file, which is made if it is not there.

    Args:
        shared: any number of holders, as long as nobody holds it alone.
        wait_s: how long to wait for it; None = as long as it takes.
    Returns: the function that releases it, in any thread, or None if it is held by others.
    Raises: OSError if the file can neither be made nor read.
    """
    give_up = None if wait_s is None else time.monotonic() + wait_s
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        handle = _open(path)
        try:
            fcntl.flock(handle, kind if give_up is None else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            if give_up is None or time.monotonic() >= give_up:
                return None
            time.sleep(_RETRY_S)
            continue
        except BaseException:
            os.close(handle)
            raise
        if _is_at(handle, path):
            return lambda: os.close(handle)
        os.close(handle)


def remove_unused(path: Path, older_than: float) -> bool:
    """Remove a lock file that nobody holds and that was last taken before `older_than` (seconds since the epoch)."""
    release = take(path)
    if release is None:
        return False
    try:
        if path.stat().st_mtime > older_than:
            return False
        path.unlink()
        return True
    finally:
        release()


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock; nothing is made."""
    if not path.exists():
        return True
    release = take(path)
    if release is not None:
        release()
    return release is not None


def _open(path: Path) -> int:
    """Reading is enough for an flock on a local disk, and all that a store of somebody else allows; NFS wants more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _is_at(handle: int, path: Path) -> bool:
    """Whether the open file is the one that the path names."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(handle)
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)
