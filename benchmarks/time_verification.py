"""What the proof of a kernel costs in the simulator: seconds of one core, phase by phase.

    python -m benchmarks.time_verification --cache-dir DIR [--repeat 3] [--beside ID] [--json FILE] [ID ...]

The kernels must be in the cache (`fa4build matrix --select ID`), for the whole cost of a backward those of its chain
too. Without ids: every 64th kernel of the standing matrix, and the two of the target. Each is proven in a process of
its own as `fa4build verify` does it, every case in every order with every check, `--repeat` times; the median counts.
Seconds are those of the processor in that process (user and system); making the request in the parent is a phase of
its own. `--beside` proves a kernel in the Python engine too, in the same run.

The mean of the sample times the number of kernels is an extrapolation, and is called one.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from fa4build.cases.schedules import runs_of
from fa4build.matrix.variants import parse_variant
from fa4build.store.cache import Cache
from fa4build.verify.chain import companions_of
from fa4build.verify.native import native_launches
from fa4build.verify.pool import Task, run_tasks
from fa4build.verify.runs import Link, Request
from fa4build.verify.simulated import prove, request_for

STANDING_KERNELS = 1286
TARGETS = ("fwd-sm100a-bf16-hd128-full", "bwd-sm100a-bf16-hd128-full-2cta")
SAMPLE = (
    "fwd-sm90a-bf16-hd64-causal-paged",
    "fwd-sm90a-bf16-hd128-local-paged-split-softcap",
    "fwd-sm90a-fp16-hd96-full-paged",
    "fwd-sm100a-bf16-hd64-full-paged-split",
    "fwd-sm100a-bf16-hd128-local-varlen-softcap",
    "fwd-sm100a-fp16-hd96-local",
    "fwd-sm100a-e4m3-hd64-local-varlen-split",
    "fwd-sm103a-bf16-hd64-local",
    "fwd-sm103a-bf16-hd192x128-full-2cta",
    "fwd-sm103a-fp16-hd128-full-paged",
    "fwd-sm103a-e4m3-hd128-causal-varlen",
    "bwd-sm90a-bf16-hd128-full-softcap",
    "bwd-sm90a-fp16-hd96-causal-deterministic",
    "bwd-sm100a-bf16-hd96-local-deterministic",
    "bwd-sm100a-fp16-hd64-full-deterministic",
    "bwd-sm100a-fp16-hd256-causal-2cta-deterministic",
    "bwd-sm103a-bf16-hd128-local-varlen-2cta",
    "bwd-sm103a-fp16-hd128-causal-varlen-deterministic",
    "bwd_preprocess-sm100a-bf16-hd256-varlen",
    "bwd_postprocess-sm100a-fp16-hd96-varlen",
)  # the 14th, the 78th, ... of `fa4build matrix --dry-run`
PHASES = {
    "reading the PTX": (
        ("fa4build.simulate.plan_launch", "parse_module"),
        ("fa4build.simulate.native.run", "program_for"),
        ("fa4build.simulate.native.run", "_undefined"),
        ("fa4build.simulate.native.run", "mask_of"),
        ("fa4build.simulate.launch", "program_for"),
    ),
    "launch plans": (("fa4build.verify.runs", "_evaluated"), ("fa4build.verify.simulated", "plan_from_json")),
    "inputs and references": (
        ("fa4build.verify.simulated", "draw_inputs"),
        ("fa4build.verify.simulated", "reference"),
        ("fa4build.verify.simulated", "same_dtype_attention"),
        ("fa4build.verify.backward", "_drawn"),
        ("fa4build.verify.backward", "_expected_gradients"),
        ("fa4build.verify.varlen", "problem_of"),
        ("fa4build.cases.varlen_backward", "_expected_gradients"),
        ("fa4build.verify.chain", "reference_gradients"),
        ("fa4build.verify.chain", "same_dtype_gradients"),
    ),
    "memory around a run": (("fa4build.verify.runs", "memory_faults"),),
    "running": (("fa4build.simulate.plan_launch", "run_launch"),),
}


class Clock:
    """Seconds of the processor by phase; a phase inside another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._inner = [0.0]

    def timed(self, phase: str, function: Callable) -> Callable:
        """The function, its time added to the phase."""

        def call(*args, **options):
            start = time.process_time()
            self._inner.append(0.0)
            try:
                result = function(*args, **options)
                return list(result) if isinstance(result, Iterator) else result
            finally:
                spent, inner = time.process_time() - start, self._inner.pop()
                self.seconds[phase] += spent - inner
                self._inner[-1] += spent

        return call


@contextmanager
def watched(clock: Clock) -> Iterator[None]:
    """The functions of `PHASES` tell the clock meanwhile."""
    before = []
    for phase, places in PHASES.items():
        for module, name in places:
            holder = import_module(module)
            before.append((holder, name, getattr(holder, name)))
            setattr(holder, name, clock.timed(phase, before[-1][2]))
    try:
        yield
    finally:
        for holder, name, function in before:
            setattr(holder, name, function)


def timed_proof(argument: tuple[Request, str], tell: Callable[[str], None]) -> dict[str, Any]:
    """One proof, in this process: seconds by phase, its peak of memory, and whether the kernel passed."""
    request, engine = argument
    clock, start = Clock(), time.process_time()
    with native_launches() if engine == "native" else nullcontext(), watched(clock):
        proof = prove(request, tell, engine)
    everything = time.process_time() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    phases = {phase: round(seconds, 3) for phase, seconds in clock.seconds.items()}
    return {
        "seconds": round(used.ru_utime + used.ru_stime, 3),
        "phases": phases | {"the rest": round(everything - sum(clock.seconds.values()), 3)},
        "peak_mib": used.ru_maxrss // 1024,
        "warp_instructions": proof.summary["warp_instructions"],
        "failures": list(proof.failures),
    }


def request_of(cache: Cache, name: str) -> Request:
    """The request that `fa4build verify` makes, with its chain where that is compiled."""
    entries = {entry.name: entry for entry in cache.entries()}
    if name not in entries:
        raise SystemExit(f"{name} is not in the cache; build it with fa4build matrix --select {name}")

    def files(kernel: str) -> dict[str, Any]:
        entry = entries[kernel]
        texts = {part: cache.read(entry, part).decode() for part in ("ptx", "plan")}
        return {**texts, "registers": entry.facts["registers"]}

    companions = companions_of(parse_variant(name))
    complete = all(other.id in entries for other in companions)
    chain = tuple(Link(op=other.op, **files(other.id)) for other in companions) if complete else ()
    return request_for(parse_variant(name), seeds=(0,), chain=chain, **files(name))


def measure(cache: Cache, name: str, engine: str, repeat: int) -> dict[str, Any]:
    """The median of some proofs."""
    start = time.process_time()
    request = request_of(cache, name)
    asked = time.process_time() - start
    found = []
    for _ in range(repeat):
        task = Task(name=name, function=timed_proof, argument=(request, engine))
        run_tasks([task], jobs=1, timeout_s=3600, on_message=lambda *_: None, on_end=found.append)
    broken = next((end.error for end in found if end.error is not None), None)
    if broken is not None:
        raise SystemExit(f"{name}: {broken}")
    proofs = sorted((end.result for end in found), key=lambda proof: proof["seconds"])
    row = proofs[(len(proofs) - 1) // 2] | {"kernel": name, "engine": engine, "orders": len(runs_of(engine))}
    row["all_seconds"] = [proof["seconds"] for proof in proofs]
    row["request_seconds"] = round(asked, 3)
    show(row)
    return row


def show(row: dict[str, Any]) -> None:
    """One line and one for the phases."""
    print(
        f"{row['kernel']:52} {row['engine']:7} {row['orders']} orders {row['seconds']:7.2f} s {row['peak_mib']:5} MiB"
    )
    print("    " + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in row["phases"].items()), flush=True)
    for failure in row["failures"]:
        print(f"    FAILED {failure.splitlines()[0]}")


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of the sample, and what it would make of all kernels."""
    seconds = [row["seconds"] for row in rows if row["kernel"] in SAMPLE]
    if len(seconds) < len(SAMPLE):
        return {}
    mean = statistics.mean(seconds)
    return {
        "sample": len(seconds),
        "mean_seconds": round(mean, 3),
        "extrapolated_minutes_on_two_cores": round(mean * STANDING_KERNELS / 2 / 60, 1),
        "kernels": STANDING_KERNELS,
        "note": "extrapolated: the mean of the sample times the kernels, all of them proven, none shared by targets",
    }


def main() -> None:
    """Measures, prints, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="ID")
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--beside", action="append", default=[], metavar="ID", help="in the Python engine too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cache = Cache(arguments.cache_dir)
    names = arguments.kernels or [*TARGETS, *SAMPLE]
    rows = [measure(cache, name, "native", arguments.repeat) for name in names]
    beside = [measure(cache, name, "python", 1) for name in arguments.beside]
    record = {"orders": [run.schedule for run in runs_of("native")], **summary_of(rows), "rows": rows, "beside": beside}
    print(json.dumps({key: value for key, value in record.items() if key not in ("rows", "beside")}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
