"""The numeric units as a library of their own, and calls of them on arrays of any length."""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from fa4build.simulate.units import lg2_unit, mufu

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "fa4build" / "simulate" / "native"
BUILD = ROOT / "build" / "native-units"
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
LANES = 32
ALL = 0xFFFFFFFF
ROUNDINGS = {"rn": 0, "rz": 1, "rm": 2, "rp": 3}
SAFETY = (
    "-std=c11", "-O1", "-g", "-ffp-contract=off", "-fno-math-errno", "-fsanitize=undefined",
    "-fsanitize-trap=undefined", "-Wall", "-Wextra", "-Werror",
)  # fmt: skip


def compiler() -> list[str]:
    """The C compiler that the engine is built with."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        pytest.skip("ziglang is not installed")
    return [str(Path(spec.origin).parent / "zig"), "cc"]


def unit_sources() -> list[Path]:
    """The C files of the units."""
    return sorted(SOURCES.glob("units_*.c"))


def build(flags: tuple[str, ...] = FLAGS, more: tuple[Path, ...] = (), suffix: str = ".so") -> Path:
    """What the units and `more` sources compile to with these flags; once for each state of the sources."""
    headers = sorted(SOURCES.glob("units*.h"))
    digest = hashlib.sha256(repr(flags).encode())
    for path in (*unit_sources(), *more, *headers):
        digest.update(path.read_bytes())
    target = BUILD / f"units-{digest.hexdigest()[:16]}{suffix}"
    if target.exists():
        return target
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        made = Path(scratch) / "made"
        files = [str(path) for path in (*unit_sources(), *more)]
        environment = {**os.environ, "ZIG_LOCAL_CACHE_DIR": scratch, "ZIG_GLOBAL_CACHE_DIR": str(BUILD / "zig")}
        command = [*compiler(), *flags, f"-I{SOURCES}", *files, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        made.replace(target)
    return target


def compile_only(flags: tuple[str, ...], more: tuple[Path, ...] = ()) -> None:
    """Compiles the units and `more` for a machine whose C library is not wanted here."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        environment = {**os.environ, "ZIG_LOCAL_CACHE_DIR": scratch, "ZIG_GLOBAL_CACHE_DIR": str(BUILD / "zig")}
        for path in (*unit_sources(), *more):
            command = [*compiler(), *flags, f"-I{SOURCES}", "-c", str(path), "-o", str(Path(scratch) / "made.o")]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
            assert done.returncode == 0, done.stderr[-4000:]


@cache
def library() -> ctypes.CDLL:
    """The units of this host."""
    return ctypes.CDLL(str(build()))


class Tables(ctypes.Structure):
    """`units_tables`; keeps its arrays alive."""

    _fields_ = [("ex2", ctypes.c_void_p), ("rcp_delta", ctypes.c_void_p), ("squares", ctypes.c_void_p)]


@cache
def tables() -> Tables:
    """The tables that Python owns."""
    return Tables(mufu.ex2_table().ctypes.data, mufu._rcp_delta().ctypes.data, lg2_unit.squares().ctypes.data)


def _padded(values, dtype) -> np.ndarray:
    values = np.ascontiguousarray(values, dtype=dtype).reshape(-1)
    return np.concatenate([values, np.zeros(-len(values) % LANES, dtype)])


def lanes(
    name: str, *sources, args: tuple[int, ...] = (), table: bool = False, mask: int = ALL, old=None
) -> np.ndarray:
    """`units_<name>` over arrays of words (u64 for `_pairs`), 32 at a time; lanes outside `mask` keep `old`."""
    dtype = np.uint64 if name.endswith("_pairs") else np.uint32
    count = np.size(sources[0])
    arrays = [_padded(s, dtype) for s in sources]
    result = np.zeros(len(arrays[0]), dtype) if old is None else _padded(old, dtype)
    function = getattr(library(), f"units_{name}")
    step = LANES * dtype().itemsize
    front = (ctypes.byref(tables()),) if table else ()
    back = (*map(ctypes.c_int, args), ctypes.c_uint32(mask))
    bases = [result.ctypes.data, *(a.ctypes.data for a in arrays)]
    for offset in range(0, result.nbytes, step):
        function(*front, *(ctypes.c_void_p(base + offset) for base in bases), *back)
    return result[:count]


def one_by_one(name: str, *sources, args: tuple[int, ...] = (), result: type = ctypes.c_uint32) -> np.ndarray:
    """`units_<name>` of one value, over arrays."""
    function = getattr(library(), f"units_{name}")
    function.restype = result
    dtype = {ctypes.c_uint8: np.uint8, ctypes.c_uint16: np.uint16, ctypes.c_uint64: np.uint64}.get(result, np.uint32)
    rows = zip(*(np.asarray(s).tolist() for s in sources), strict=True)
    return np.array([function(*row, *args) for row in rows], dtype)


@cache
def nasty_f32() -> np.ndarray:
    """About 400 f32 patterns: zeros, subnormals, powers of two and their neighbours, ties of the narrower formats,
    limits of every format and range reduction, infinities, NaN with payloads; both signs.
    """
    near_limits = (
        "0 1 2 23 24 64 100 101 102 103 104 111 112 113 114 117 118 119 120 121 126 127 128 133 134 135 142 143"
    )
    exponents = np.array([*near_limits.split(), 149, 150, 151, 190, 191, 252, 253, 254]).astype(np.uint32)
    mantissas = np.array([0, 1, 0x400000, 0x7FFFFF, 0x001000, 0x0FF000], np.uint32)
    grid = (exponents[:, None] << np.uint32(23) | mantissas[None, :]).reshape(-1)
    special = np.array([
        0x7F800000, 0x7F800001, 0x7FC00000, 0x7FC17FC1, 0x7FFFFFFF, 0x42FC0000, 0x43160000, 0x43E00000, 0x43E80000,
        0x477FE000, 0x477FEFFF, 0x477FF000, 0x47600000, 0x47680000, 0x7F7F7FFF, 0x7F7F8000, 0x3F490FDB, 0x3FC90FDB,
        0x40490FDB, 0x41100000, 0x41102CB4, 0x3F000000, 0x3F400000,
    ], np.uint32)  # fmt: skip
    both = np.concatenate([grid, special])
    return np.concatenate([both, both | np.uint32(0x80000000)])


def random_f32(count: int, seed: int) -> np.ndarray:
    """Patterns of all kinds, half of them with few significant bits and nearby exponents."""
    rng = np.random.default_rng(seed)
    wild = rng.integers(0, 2**32, count, dtype=np.uint32)
    exponent = rng.integers(100, 154, count, dtype=np.uint32)
    mantissa = rng.integers(0, 2**10, count, dtype=np.uint32) << rng.integers(0, 14, count, dtype=np.uint32)
    near = (wild & np.uint32(0x80000000)) | exponent << np.uint32(23) | mantissa & np.uint32(0x7FFFFF)
    return np.where(np.arange(count) % 2 == 0, wild, near)


def same(got: np.ndarray, expected: np.ndarray, *inputs) -> None:
    """Asserts equal bits and shows the first difference with its inputs."""
    got, expected = np.asarray(got), np.asarray(expected)
    wrong = np.flatnonzero(got.reshape(-1) != expected.reshape(-1))
    if len(wrong):
        at = wrong[0]
        shown = ", ".join(f"{int(np.asarray(x).reshape(-1)[at]):#x}" for x in inputs)
        pytest.fail(
            f"{len(wrong)} of {got.size} differ; first at {at}: of ({shown}) got {int(got.reshape(-1)[at]):#x}, "
            f"expected {int(expected.reshape(-1)[at]):#x}"
        )
