"""Real kernels for tests: each is compiled once in a run, whichever test process asks first.

A compile server a process, started with the first kernel; what it makes lies in a folder that all processes of the run
share. `compile_kernel`, which starts a compiler for one kernel, is the contract of tests/compiling.
"""

import atexit
import functools
import os
import pickle
from pathlib import Path

from filelock import FileLock

from fa4build.compiling.compile import CompileOptions, Cubin, request_for
from fa4build.compiling.executors import LocalExecutor
from fa4build.compiling.render import render
from fa4build.compiling.toolchain import current_toolchain
from fa4build.matrix.tuning import tuning_for
from fa4build.matrix.variants import parse_variant

TIMEOUT_S = 300.0
SHARED_FOLDER = "FA4BUILD_TEST_KERNELS"  # the variable with its path; tests/conftest.py makes and removes it


@functools.cache
def cubin_of(kernel: str) -> Cubin:
    """The compiled kernel of this id. Raises what its compile raised."""
    folder = Path(os.environ[SHARED_FOLDER]) / kernel
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "cubin.pickle"
    with FileLock(folder / "lock"):
        if not kept.exists():
            cubin = _compiled(kernel, folder / "work")
            kept.write_bytes(pickle.dumps(cubin))
    return pickle.loads(kept.read_bytes())


def _compiled(kernel: str, work_dir: Path) -> Cubin:
    variant = parse_variant(kernel)
    executor = _executor()
    executor.submit(request_for(render(variant, tuning_for(variant))), CompileOptions(), work_dir)
    result = executor.wait().result
    if isinstance(result, Exception):
        raise result
    return result


@functools.cache
def _executor() -> LocalExecutor:
    executor = LocalExecutor(current_toolchain(), jobs=1, timeout_s=TIMEOUT_S)
    atexit.register(executor.__exit__)
    return executor
