"""How fast the two engines of the simulator are: forward hd128 causal, 512 x 512, one head, phase by phase.

    python -m benchmarks.simulator_speed --cache-dir DIR [--variant ID] [--engine python|native]

The variant must be in the cache (`fa4build matrix --select ID`). Both engines run side by side in one process, unless
one is asked for. A line each: reading the PTX, the first functional run (with the translation that a second case of the
same kernel does not repeat), functional again, with every check; seconds of the processor, so that other work on the
machine counts for little, warp instructions a second, and the peak of resident memory so far. Outputs of the engines
must be equal bit for bit.
"""

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from fa4build.plan import plan_from_json
from fa4build.simulate import simulate
from fa4build.simulate.native.build import library
from fa4build.simulate.native.tables import table
from fa4build.simulate.ptx.parser import parse_module
from fa4build.store.cache import Cache
from fa4build.verify.engines import ENGINES, engine_named

SEQLEN, HEAD_DIM = 512, 128
RUNS = (("functional, first", {}), ("functional, again", {}), ("with checks", {"checks": True}))


def arrays() -> dict[str, np.ndarray]:
    """bf16 inputs of one head and empty outputs."""
    rng = np.random.default_rng(1)
    shape = (1, SEQLEN, 1, HEAD_DIM)
    drawn = {n: (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for n in "qkv"}
    return {**drawn, "out": np.zeros(shape, np.uint16), "lse": np.zeros((1, 1, SEQLEN), np.float32)}


def timed(function: Callable) -> tuple[float, object]:
    """(seconds of the processor, result)."""
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def show(engine: str, phase: str, seconds: float, executed: int = 0) -> None:
    """One line."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rate = f"{executed / seconds:12,.0f} warp instructions/s" if executed else " " * 32
    print(f"{engine:7} {phase:18} {seconds:7.3f} s {rate}  peak {peak:,.0f} MiB")


def measure(engine: str, plan, ptx: str) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Prints the runs of one engine; yields (phase, arrays behind it)."""
    scalars = {"softmax_scale": HEAD_DIM**-0.5, "window_left": -1, "window_right": 0, "num_sms": 148}
    run_launch = engine_named(engine).run_launch
    for phase, options in RUNS:
        tensors = arrays()
        seconds, reports = timed(lambda t=tensors, o=options: simulate(plan, ptx, t, scalars, engine=run_launch, **o))
        show(engine, phase, seconds, sum(report.warp_instructions for report in reports))
        yield phase, tensors


def prepare() -> None:
    """What is done once for all kernels: the library is built, tables are made or mapped."""
    seconds, _ = timed(library)
    show("native", "library", seconds)
    seconds, _ = timed(lambda: [table(name) for name in ("ex2", "rcp_delta", "squares")])
    show("native", "tables", seconds)


def main() -> None:
    """Measures, and compares the outputs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--variant", default="fwd-sm100a-bf16-hd128-causal")
    parser.add_argument("--engine", choices=ENGINES, action="append")
    arguments = parser.parse_args()
    cache = Cache(arguments.cache_dir)
    entry = next((e for e in cache.entries() if e.name == arguments.variant), None)
    if entry is None:
        raise SystemExit(f"{arguments.variant} is not in the cache; build it with fa4build matrix")
    plan, ptx = plan_from_json(cache.read(entry, "plan").decode()), cache.read(entry, "ptx").decode()
    engines = tuple(arguments.engine or ENGINES)
    if "native" in engines:
        prepare()
    seconds, _ = timed(lambda: parse_module(ptx))
    show("both", "reading the PTX", seconds)
    results = [dict(measure(engine, plan, ptx)) for engine in engines]
    for phase, tensors in results[0].items():
        for other in results[1:]:
            differing = [name for name in tensors if not np.array_equal(tensors[name], other[phase][name])]
            if differing:
                raise SystemExit(f"{phase}: the engines differ in {', '.join(differing)}")
    if len(results) > 1:
        print("outputs are equal")


if __name__ == "__main__":
    main()
