"""How a command says that it failed: one message on stderr, and with --json a document on stdout as well."""

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from fa4build.cli.output import json_text
from fa4build.errors import Fa4BuildError, FileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """kind: class of the error. ids: the variants that it is about, all of them, where the message names some."""

    kind: str
    message: str
    exit_code: int
    ids: tuple[str, ...] = field(default=())

    def as_json(self) -> str:
        """`{"schema": 1, "error": {...}}`."""
        facts = {"kind": self.kind, "message": self.message, "exit_code": self.exit_code}
        return json_text({"error": facts | ({"ids": list(self.ids)} if self.ids else {})})


def failure_of(error: Exception) -> Failure:
    """A failure of our own, of the command line's arguments, or of the file system."""
    if isinstance(error, Fa4BuildError):
        ids = tuple(getattr(error, "ids", ()))
        return _failure(type(error).__name__, str(error), error.exit_code, ids)
    if isinstance(error, click.ClickException):
        return _failure("UsageError", error.format_message(), error.exit_code)
    if isinstance(error, OSError):
        return _failure("FileError", explained(error), FileError.exit_code)
    raise error


def _failure(kind: str, message: str, code: int, ids: Sequence[str] = ()) -> Failure:
    # Bytes of an argument that are no UTF-8 come as surrogates, which cannot be printed.
    readable = message.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return Failure(kind=kind, message=readable, exit_code=code, ids=tuple(ids))


_ADVICE = {
    errno.EACCES: "Choose another path, or change the permissions.",
    errno.EPERM: "Choose another path, or change the permissions.",
    errno.EROFS: "Choose a path on a file system that is not read-only.",
    errno.ENOSPC: "Free some space, or choose a path on another file system.",
    errno.EDQUOT: "Free some of your quota, or choose a path on another file system.",
    errno.ENOTDIR: "A part of the path is a file. Choose another path.",
    errno.EISDIR: "A file is needed here. Give the path of a file.",
    errno.EEXIST: "Choose another path, or remove it first.",
    errno.ENAMETOOLONG: "Choose a shorter path.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n), or use fewer --jobs.",
    errno.ENOMEM: "Use fewer --jobs, or free some memory.",
}


def explained(error: OSError) -> str:
    """Which path, what the system says, what to do."""
    path = None if error.filename is None else os.fsdecode(error.filename)
    reason = error.strerror or str(error) or type(error).__name__
    if path is None:
        return f"{reason}. {_ADVICE.get(error.errno or 0, 'Run `fa4build doctor` to check this machine.')}"
    return f"{path}: {_lower(reason)}. {_advice(error, Path(path))}"


def _advice(error: OSError, path: Path) -> str:
    if error.errno != errno.ENOENT:
        return _ADVICE.get(error.errno or 0, "Choose another path.")
    missing = next((each for each in reversed(path.parents) if not each.exists()), None)
    if missing is None:
        return "It could not be found or created. Choose another path."
    if not _can_be_made(missing):
        return f"{missing.parent} cannot contain it. Choose another path."
    return f"Create the directory first: mkdir -p {path.parent}"


def _can_be_made(directory: Path) -> bool:
    return directory.parent.is_dir() and os.access(directory.parent, os.W_OK) and not str(directory).startswith("/proc")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
