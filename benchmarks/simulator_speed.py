"""How fast the simulator is: forward hd128 causal, 512 x 512, one head, functional and with every check.

    python -m benchmarks.simulator_speed --cache-dir DIR [--variant ID]

The variant must be in the cache (`fa4build matrix --select ID`). Prints warp instructions a second, seconds and the
peak of resident memory. The goals are 3 s functional, 12 s with checks and 2 GB, on one core; times are of the
processor, so that other work on the machine counts for little, and include the translation of the PTX, which a second
case of the same kernel does not repeat.
"""

import argparse
import resource
import time
from pathlib import Path

import numpy as np

from fa4build.plan import plan_from_json
from fa4build.simulate import simulate
from fa4build.store.cache import Cache

SEQLEN, HEAD_DIM = 512, 128


def arrays() -> dict[str, np.ndarray]:
    """bf16 inputs of one head and empty outputs."""
    rng = np.random.default_rng(1)
    shape = (1, SEQLEN, 1, HEAD_DIM)
    drawn = {n: (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for n in "qkv"}
    return {**drawn, "out": np.zeros(shape, np.uint16), "lse": np.zeros((1, 1, SEQLEN), np.float32)}


def main() -> None:
    """Runs functional (first and second time) and checked, and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--variant", default="fwd-sm100a-bf16-hd128-causal")
    arguments = parser.parse_args()
    cache = Cache(arguments.cache_dir)
    entry = next((e for e in cache.entries() if e.name == arguments.variant), None)
    if entry is None:
        raise SystemExit(f"{arguments.variant} is not in the cache; build it with fa4build matrix")
    plan, ptx = plan_from_json(cache.read(entry, "plan").decode()), cache.read(entry, "ptx").decode()
    scalars = {"softmax_scale": HEAD_DIM**-0.5, "window_left": -1, "window_right": 0, "num_sms": 148}
    for name, options in (("functional, first", {}), ("functional, again", {}), ("with checks", {"checks": True})):
        start = time.process_time()
        reports = simulate(plan, ptx, arrays(), scalars, **options)
        seconds = time.process_time() - start
        executed = sum(report.warp_instructions for report in reports)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{name:18} {seconds:6.2f} s  {executed / seconds:10,.0f} warp instructions/s  peak {peak:,.0f} MiB")


if __name__ == "__main__":
    main()
