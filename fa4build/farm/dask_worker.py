"""On a worker of a cluster: one compile, from a name to bytes.

A worker needs fa4build and the compiler, no checkout of anything else and no shared disk. It makes the recipe anew; its
key says whether its fa4build, toolchain and sources are those of whoever asks.
"""

import hashlib
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa4build.compiling.compile import LOG_NAME, CompileOptions, Cubin
from fa4build.compiling.executors import LocalExecutor
from fa4build.compiling.toolchain import current_toolchain
from fa4build.errors import Fa4BuildError
from fa4build.families.interface import Recipe
from fa4build.families.registry import family_named
from fa4build.farm.local import WatchedExecutor
from fa4build.files import scratch_directory
from fa4build.matrix.selection import Selection

_thread = threading.local()  # a compile server for each of the worker's threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a worker sends back.

    Attributes:
        cubin: the compiled kernel with the sha256 of its bytes, or None.
        error, log: of a failed compile; the text of the compile's log.
        refused: why this worker may not compile it, or None.
        seconds: wall time in the compile process.
    """

    worker: str
    cubin: Cubin | None = None
    sha256: str = ""
    error: Fa4BuildError | None = None
    log: str = ""
    refused: str | None = None
    seconds: float = 0.0


def compile_here(family: str, name: str, key: str, options: CompileOptions, timeout_s: float) -> Answer:
    """Compile one kernel, if this worker would make exactly what is asked for."""
    where = socket.gethostname()
    try:
        recipe = _recipe(family, name, options)
    except Fa4BuildError as error:
        return Answer(worker=where, refused=str(error))
    if recipe.key != key:
        reason = f"it would make {recipe.key[:16]} of {name}, wanted is {key[:16]}"
        return Answer(worker=where, refused=f"{reason}: its fa4build, compiler or sources are others")
    with scratch_directory("farm") as work_dir:
        return _compile(recipe, work_dir / "work", where, _executor(family, timeout_s))


def _recipe(family_name: str, name: str, options: CompileOptions) -> Recipe:
    family = family_named(family_name)
    (variant,) = family.expand(Selection(globs=(name,)))
    return family.recipe(variant, family.toolchain(current_toolchain()), options)


def _compile(recipe: Recipe, work_dir: Path, where: str, executor: LocalExecutor) -> Answer:
    executor.submit(recipe.request, recipe.options, work_dir)
    finished = executor.wait()
    if isinstance(finished.result, Fa4BuildError):
        log = work_dir / LOG_NAME
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return Answer(worker=where, error=finished.result, log=text, seconds=finished.seconds)
    digest = hashlib.sha256(finished.result.elf).hexdigest()
    return Answer(worker=where, cubin=finished.result, sha256=digest, seconds=finished.seconds)


def _executor(family: str, timeout_s: float) -> LocalExecutor:
    """This thread's compile server, started with its first compile and kept."""
    known: dict[Any, LocalExecutor] = _thread.__dict__.setdefault("executors", {})
    if (family, timeout_s) not in known:
        chosen = family_named(family)
        toolchain = chosen.toolchain(current_toolchain())
        known[family, timeout_s] = WatchedExecutor(toolchain, jobs=1, timeout_s=timeout_s, worker=chosen.worker)
    return known[family, timeout_s]
