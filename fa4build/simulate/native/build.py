"""Builds the native engine with the C compiler of the ziglang distribution, once for each host and each state of its
sources, and loads it.

The library lies in a folder of the user's cache under the digest of all that it is made from: the tokens of the
sources (comments and line breaks cost nothing), the flags, the compiler's version and the host's processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import filelock

from fa4build.errors import ToolchainError

HERE = Path(__file__).parent
_TIMEOUT_S = 300
FLAGS = (
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-O2",
    "-g0",
    "-fno-sanitize=all",
    "-fno-strict-aliasing",
    "-ffp-contract=off",  # a product and a sum stay two operations: bits are equal on every host
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\w+|[^\w\s]')


def sources() -> tuple[Path, ...]:
    """All C files and headers of the engine."""
    return tuple(sorted([*HERE.glob("*.c"), *HERE.glob("*.h")]))


def tokens(text: str) -> str:
    """A C text without comments and layout; preprocessor lines keep their ends."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = text.replace("\\\n", " ")
    return "\n".join(" ".join(_TOKEN.findall(line)) for line in text.split("\n") if line.strip())


def _processor() -> str:
    """What tells one host's instruction set from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    facts = dict.fromkeys(line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part")))
    return platform.machine() + "\n".join(facts)


def _compiler() -> tuple[Path, str]:
    """(the program, its version)."""
    from importlib.metadata import version

    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise ToolchainError("ziglang is not installed; it brings the C compiler. Run: pip install ziglang")
    return Path(spec.origin).parent / "zig", version("ziglang")


def digest() -> str:
    """Digest of everything the library is made from."""
    found = hashlib.sha256()
    for path in sources():
        found.update(f"{path.name}\0{tokens(path.read_text(encoding='utf-8'))}\0".encode())
    found.update("\0".join([*FLAGS, _compiler()[1], _processor()]).encode())
    return found.hexdigest()


def default_folder() -> Path:
    """Where libraries are kept: in the user's cache, beside the kernels."""
    import platformdirs

    return platformdirs.user_cache_path("fa4build") / "native"


def build(folder: Path | None = None) -> Path:
    """The library of this host, compiled if it is not there yet.

    Raises: ToolchainError where the compiler is missing or fails; its output is in the message.
    """
    folder = folder or default_folder()
    target = folder / f"simulator-{digest()[:32]}.so"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / f"{target.name}.lock"):  # of several that want it, one compiles
        if not target.is_file():
            _compile_into(folder, target)
    return target


def _compile_into(folder: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fa4build-native-", dir=folder) as scratch:
        made = Path(scratch) / "simulator.so"
        _compile(made, Path(scratch))
        made.replace(target)  # whole or not at all


def _compile(made: Path, scratch: Path) -> None:
    compiler, _ = _compiler()
    units = [path.name for path in sources() if path.suffix == ".c"]
    environment = {
        "LC_ALL": "C.UTF-8",
        "PATH": os.defpath,
        "ZIG_GLOBAL_CACHE_DIR": str(made.parent.parent / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(scratch / "zig-local"),
    }
    command = [str(compiler), "cc", *FLAGS, *units, "-lm", "-o", str(made)]
    try:
        result = subprocess.run(
            command, cwd=HERE, env=environment, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ToolchainError(f"the C compiler did not end within {_TIMEOUT_S} s: {' '.join(command)}") from None
    if result.returncode != 0:
        raise ToolchainError(f"the C compiler failed (status {result.returncode}):\n{result.stderr.strip()[-4000:]}")


@cache
def library() -> ctypes.CDLL:
    """The engine, built and loaded."""
    loaded = ctypes.CDLL(str(build()))
    loaded.sim_run.argtypes = loaded.sim_release.argtypes = [ctypes.c_void_p]
    loaded.sim_run.restype, loaded.sim_release.restype = ctypes.c_int, None
    loaded.chk_findings.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)]
    loaded.chk_findings.restype = ctypes.c_size_t
    return loaded
