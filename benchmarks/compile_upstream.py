"""Compile speed of the family `upstream` beside flash-attn-4's own compiles of the same kernels.

    python benchmarks/compile_upstream.py --arch sm90 --select 'fwd-sm90a-bf16-hd128-*' --jobs 2 --rounds 2

Both sides start with nothing: ours is `build_matrix` into an empty cache (fork server, one child a kernel, extraction,
checks, storing); the other is as many processes as jobs, each of which imports flash-attn-4 once and lets the library
compile its share one after the other, with the library's own options and nothing else. Rounds alternate which goes
first. Prints wall and processor seconds of each round, and the ratios of speed, ours over theirs; on a machine that
does other work too, the processor seconds are the ones to compare.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def kernels_of(options):
    """The selected kernels whose compile is one call of the library: forwards."""
    from fa4build.families.registry import family_named
    from fa4build.matrix.selection import Selection

    selection = Selection(arches=(options.arch,), globs=tuple(options.select))
    found = family_named("flash-attn-4").expand(selection)
    return [kernel for kernel in found if kernel.payload["call"] == "forward"]


def ours(kernels, jobs):
    """Seconds of a cold build."""
    from fa4build.families.registry import family_named
    from fa4build.matrix.selection import Selection
    from fa4build.pipeline import build_matrix
    from fa4build.store.cache import Cache

    with tempfile.TemporaryDirectory() as directory:
        started = time.monotonic()
        selection = Selection(globs=tuple(kernel.id for kernel in kernels))
        family = family_named("flash-attn-4")
        report = build_matrix(selection, Cache(Path(directory)), jobs, family=family, allow_spills=True)
        seconds = time.monotonic() - started
    assert report.count("compiled") == len(kernels), [outcome.message for outcome in report.outcomes]
    return seconds


def theirs(kernels, jobs, arch):
    """Seconds until every process has compiled its share."""
    number = arch.removeprefix("sm").rstrip("a")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FLASH_ATTENTION_ARCH": number,
        "FLASH_ATTENTION_NUM_SMS": "148",
        "CUTE_DSL_ARCH": f"sm_{number}a",
        "OMP_NUM_THREADS": "1",
    }
    shares = [[dict(kernel.payload) for kernel in kernels[part::jobs]] for part in range(jobs)]
    started = time.monotonic()
    command = [sys.executable, __file__, "--compile"]
    running = [
        subprocess.Popen([*command, json.dumps(share)], env=environment, stdout=subprocess.PIPE)
        for share in shares
        if share
    ]
    outputs = [process.communicate()[0] for process in running]
    seconds = time.monotonic() - started
    assert sum(json.loads(output.splitlines()[-1]) for output in outputs) == len(kernels)
    return seconds


def processor_seconds():
    """Of this process and all that it started and that has ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def compile_share(payloads):
    """In a process of its own: the library's forward on fake tensors, nothing patched but what asks for a GPU."""
    import cutlass.utils
    import torch
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fa4build.families.flash_attn_4.compiling import forward_call
    from fa4build.plan.extract.device_facts import StandInDevice, pretend

    pretend(cutlass.utils.HardwareInfo, StandInDevice(sm_count=148, l2_bytes=52_428_800))
    torch.cuda.current_device = lambda: 0
    with FakeTensorMode():
        for payload in payloads:
            forward_call(interface, payload)()
    print(len(interface._flash_attn_fwd.compile_cache.cache))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm90")
    parser.add_argument("--select", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    kernels = kernels_of(options)
    rows = []
    for turn in range(options.rounds):
        sides = {
            "ours": lambda: ours(kernels, options.jobs),
            "theirs": lambda: theirs(kernels, options.jobs, options.arch),
        }
        row = {}
        for name in sorted(sides, reverse=bool(turn % 2)):
            before = processor_seconds()
            row[name] = sides[name]()
            row[f"{name}_cpu"] = processor_seconds() - before
        ratios = {"ratio": row["theirs"] / row["ours"], "cpu_ratio": row["theirs_cpu"] / row["ours_cpu"]}
        rows.append({**row, **ratios})
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"kernels": len(kernels), "jobs": options.jobs, "rounds": rows}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_share(json.loads(sys.argv[2]))
    else:
        sys.path.insert(0, str(ROOT))
        main()
