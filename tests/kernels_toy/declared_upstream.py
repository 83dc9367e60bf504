"""Asks flash-attn-4 for every declared kernel of a target: `python -m tests.kernels_toy.declared_upstream sm90`.

Nothing is compiled. Prints a JSON object: how many are declared, how many chosen as declared, and what is wrong, by id.
"""

import importlib
import json
import os
import sys
from typing import Any

from fa4build.compiling import compile_worker
from fa4build.compiling.toolchain import current_toolchain
from fa4build.errors import Fa4BuildError
from fa4build.families import tracing
from fa4build.families.flash_attn_4 import compiling
from fa4build.families.registry import family_named
from fa4build.matrix.selection import Selection

CACHED = (
    "_flash_attn_fwd",
    "_flash_attn_fwd_combine",
    "_flash_attn_bwd",
    "_bwd_preprocess",
    "_bwd_postprocess_convert",
)


def main(arch: str) -> dict[str, Any]:
    """Let the library choose for each declared kernel; its host object is checked and not compiled."""
    family = family_named("flash-attn-4")
    os.environ |= dict(family.toolchain(current_toolchain()).environment)
    tracing.setup()
    interface = importlib.import_module("flash_attn.cute.interface")
    chosen: list[str] = []
    compile_worker.compile_host = lambda host, *_args, **_options: chosen.append(type(host).__name__)
    wrong = {}
    kernels = family.expand(Selection(arches=(arch,), globs=("*",)))
    for kernel in kernels:
        for name in CACHED:
            getattr(interface, name).compile_cache.clear()
        target = f"sm_{kernel.arch[2:]}"
        request = {"name": kernel.id, "target": target, "symbol": kernel.symbol, "payload": dict(kernel.payload)}
        try:
            compiling.compile_kernel(request, "")
        except Fa4BuildError as error:
            wrong[kernel.id] = str(error)
    return {"declared": len(kernels), "chosen": len(chosen), "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
