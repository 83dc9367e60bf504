"""The native hazard checks as a library for tests: built once a process, called through ctypes."""

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fa4build.shipping.launcher_build import _compiler
from fa4build.simulate.native.check_texts import RECORD, records_at

ROOM = Path(__file__).resolve().parents[3] / "fa4build" / "simulate" / "native"
LANES, SCOPES, SPACES = 1, 2, 4  # CHK_RULES_*
OK, BAD_INPUT, NO_MEMORY, TOO_MANY_COMPONENTS = range(4)
IS_MOVE, IS_GUARDED = 1, 2
_FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")


class Buffer(ctypes.Structure):
    """chk_buffer."""

    _fields_ = (("base", ctypes.c_uint64), ("size", ctypes.c_uint64), ("written", ctypes.c_void_p))


class Replayed(ctypes.Structure):
    """chk_replayed."""

    _fields_ = (("events", ctypes.c_size_t), ("refused", ctypes.c_size_t))


class Code(ctypes.Structure):
    """chk_code."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("num_registers", "num_instructions", "num_blocks")),
        *((name, ctypes.c_void_p) for name in ("flags", "used_start", "used", "read_start", "read")),
        *((name, ctypes.c_void_p) for name in ("written_start", "written", "block_start", "block_stop")),
        *((name, ctypes.c_void_p) for name in ("next_start", "next")),
    )


def sources() -> list[Path]:
    """The C files of the checks."""
    return sorted(ROOM.glob("checks_*.c"))


@functools.cache
def library() -> ctypes.CDLL:
    """The checks, built with the compiler that builds the launcher."""
    folder = tempfile.TemporaryDirectory(prefix="fa4build-checks-")
    target = Path(folder.name) / "checks.so"
    command = [str(_compiler()), "cc", "-shared", *_FLAGS, "-fno-sanitize=all"]
    command += [*map(str, sources()), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    loaded = ctypes.CDLL(str(target))
    loaded.chk_launch_create.restype = ctypes.c_void_p
    loaded.chk_findings.restype = ctypes.c_size_t
    loaded.folder = folder
    return loaded


class Launch:
    """A chk_launch. `buffers`: (base, bytes, words or None) of each; the words are written to. `rules`: CHK_RULES_*."""

    def __init__(self, buffers: Sequence[tuple[int, int, np.ndarray | None]] = (), max_bytes: int = 0, rules: int = 0):
        rows = [Buffer(b, size, None if w is None else w.ctypes.data) for b, size, w in buffers]
        array = (Buffer * max(len(rows), 1))(*rows)
        self._keep = [w for _, _, w in buffers]
        self.handle = library().chk_launch_create(array, ctypes.c_size_t(len(rows)), ctypes.c_size_t(max_bytes))
        assert self.handle, "chk_launch_create had no memory"
        library().chk_launch_rules(ctypes.c_void_p(self.handle), ctypes.c_uint32(rules))

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_) -> None:
        library().chk_launch_destroy(ctypes.c_void_p(self.handle))

    def replay(self, words: np.ndarray) -> tuple[int, Replayed]:
        """Status, and what was replayed, of a stream of i64 words."""
        words, done = np.ascontiguousarray(words, np.int64), Replayed()
        status = library().chk_replay(
            ctypes.c_void_p(self.handle),
            words.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(len(words)),
            ctypes.byref(done),
        )
        return status, done

    def undefined(self, code: Code) -> int:
        """Status of chk_undefined."""
        return library().chk_undefined(ctypes.c_void_p(self.handle), ctypes.byref(code))

    def records(self) -> tuple[np.ndarray, int]:
        """Findings (RECORD) and how many were lost."""
        place, lost = ctypes.c_void_p(), ctypes.c_size_t()
        count = library().chk_findings(ctypes.c_void_p(self.handle), ctypes.byref(place), ctypes.byref(lost))
        return records_at(place.value, count), lost.value


def lists(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Lists of numbers as (starts, all numbers), as chk_code has them."""
    starts = np.cumsum([0, *map(len, rows)]).astype(np.uint32)
    numbers = np.array([n for row in rows for n in row] or [0], np.uint32)
    return starts, numbers


assert RECORD.itemsize == 80
