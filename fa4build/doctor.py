"""Whether this machine can build: one check a subject, each with what was found and what to do about it.

Checks are independent, so that all problems show at once. Nothing is changed; the cache directory is not made.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fa4build.compiling.compile import check_server, start_server
from fa4build.compiling.executors import BYTES_PER_COMPILE, available_memory_bytes, worker_count
from fa4build.compiling.render import kernels_source_dir
from fa4build.compiling.toolchain import DSL_VERSION, current_toolchain, damaged_files, refuse_steering
from fa4build.errors import Fa4BuildError
from fa4build.files import scratch_directory

MIN_FREE_BYTES = 1 << 30
"""Disk space below which a build is likely to run out: a full matrix with PTX and logs takes a few hundred MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One subject: `ok`; `warning`, builds work but something is not as it should be; `failed`, builds cannot work."""

    subject: str
    status: Literal["ok", "warning", "failed"]
    found: str


def examine(cache_dir: Path, environ: Mapping[str, str]) -> tuple[Check, ...]:
    """Every check, in order. Takes about two seconds: the compiler is loaded and its files are read."""
    subjects: tuple[tuple[str, Callable[[], Check]], ...] = (
        ("platform", _platform),
        ("toolchain", _toolchain),
        ("toolchain files", _toolchain_files),
        ("environment", lambda: _environment(environ)),
        ("compiler starts", _compiler_starts),
        ("kernel sources", lambda: _ok("kernel sources", str(kernels_source_dir()))),
        ("launcher compiler", _launcher_compiler),
        ("workers", _workers),
        ("cache directory", lambda: _cache_directory(cache_dir)),
        ("disk space", lambda: _disk_space(cache_dir)),
    )
    return tuple(_guarded(subject, check) for subject, check in subjects)


def _guarded(subject: str, check: Callable[[], Check]) -> Check:
    """A check whose subject raises has failed; the error says what to do."""
    try:
        return check()
    except (Fa4BuildError, OSError) as error:
        return Check(subject=subject, status="failed", found=str(error))


def _ok(subject: str, found: str) -> Check:
    return Check(subject=subject, status="ok", found=found)


def _platform() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    found = f"Python {version} on {sys.platform} {os.uname().machine}"
    if sys.platform != "linux":
        return Check(subject="platform", status="failed", found=f"{found}. The compiler runs on Linux only.")
    return _ok("platform", found)


def _toolchain() -> Check:
    toolchain = current_toolchain()
    return _ok("toolchain", f"nvidia-cutlass-dsl {toolchain.dsl_version}, {toolchain.backend} flavour")


def _toolchain_files() -> Check:
    names = [distribution.name for distribution in current_toolchain().distributions]
    damaged = [path for name in names for path in damaged_files(name)]
    if damaged:
        return Check(
            subject="toolchain files",
            status="failed",
            found=f"{len(damaged)} differ from what was installed, e.g. {damaged[0]}. Cache keys would be wrong. Run: "
            f"pip install --force-reinstall 'nvidia-cutlass-dsl[cu13]=={DSL_VERSION}'",
        )
    return _ok("toolchain files", f"as installed, {len(names)} distributions")


def _environment(environ: Mapping[str, str]) -> Check:
    refuse_steering(environ)
    return _ok("environment", "no variable changes what the compiler does")


def _compiler_starts() -> Check:
    toolchain = current_toolchain()
    with scratch_directory("doctor") as scratch, start_server(toolchain, Path(scratch)) as server:
        check_server(server, toolchain)
    return _ok("compiler starts", "no GPU or driver needed")


def _launcher_compiler() -> Check:
    if importlib.util.find_spec("ziglang") is None:
        found = "ziglang is not installed; `fa4build wheel` needs it for the launcher. Run: pip install ziglang"
        return Check(subject="launcher compiler", status="warning", found=found)
    return _ok("launcher compiler", "ziglang")


def _workers() -> Check:
    cores, workers = len(os.sched_getaffinity(0)), worker_count()
    memory = available_memory_bytes() / 2**30
    found = f"{workers} compiles at a time: {cores} cores, {memory:.1f} GiB of memory available"
    if workers < cores:
        each = BYTES_PER_COMPILE / 2**30
        return Check(
            subject="workers", status="warning", found=f"{found} at {each:.1f} GiB a compile. Free some memory."
        )
    return _ok("workers", found)


def _cache_directory(cache_dir: Path) -> Check:
    existing = _nearest_existing(cache_dir)
    if not existing.is_dir():
        raise NotADirectoryError(f"{cache_dir}: {existing} is not a directory. Choose another one with --cache-dir.")
    if not os.access(existing, os.W_OK):
        found = f"{cache_dir}: {existing} cannot be written. Choose another directory with --cache-dir."
        return Check(subject="cache directory", status="failed", found=found)
    return _ok("cache directory", str(cache_dir) if existing == cache_dir else f"{cache_dir}, not created yet")


def _disk_space(cache_dir: Path) -> Check:
    free = shutil.disk_usage(_nearest_existing(cache_dir)).free
    found = f"{free / 2**30:.1f} GiB free for {cache_dir}"
    if free < MIN_FREE_BYTES:
        return Check(subject="disk space", status="warning", found=f"{found}. Run: fa4build cache prune")
    return _ok("disk space", found)


def _nearest_existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())
