"""Compare flash-attn-4's kernels from our wheels with flash-attn-4's own JIT, on a GPU.

    python device/prove_upstream.py WHEEL_DIR PEERS_PATH --out record.json

WHEEL_DIR holds the runtime wheel and a pack of the family `upstream`; PEERS_PATH is what must be on PYTHONPATH for
`import flash_attn` (the JIT with its compiler). Per case, both get the same inputs and the outputs are compared bit by
bit; gradients of queries that are summed in any order (non-deterministic) are compared by rounding. Then first call and
host time in a process that has never seen a compiler, and kernel times side by side. The record is one of schema 1
(fa4build/store/evidence.py), with `worst_ratio` 0 for equal bits. Exit status 1 if any case differs.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import driver_version, install

WINDOW = (256, 64)
PARTS = 6
DQ_TOLERANCE = 2.0**-6  # relative to the largest gradient: fp32 sums in another order, rounded to bf16


def forward_cases():
    """(name, keyword arguments of `make`)."""
    for head_dim in (128, 64, 256):
        for mask in ("full", "causal") + (("local",) if head_dim != 64 else ()):
            yield f"fwd-hd{head_dim}-{mask}", {"head_dim": head_dim, "mask": mask}
    yield "fwd-hd128-causal-gqa4", {"head_dim": 128, "mask": "causal", "ratio": 4}
    for mask in ("full", "causal", "local"):
        yield f"fwd-hd128-{mask}-varlen", {"head_dim": 128, "mask": mask, "layout": "varlen"}
        yield f"fwd-hd128-{mask}-paged", {"head_dim": 128, "mask": mask, "layout": "paged"}


def backward_cases():
    """As `forward_cases`."""
    for head_dim, mask in ((128, "full"), (128, "causal"), (128, "local"), (64, "causal"), (256, "causal")):
        yield f"bwd-hd{head_dim}-{mask}-det", {"head_dim": head_dim, "mask": mask, "deterministic": True}
    yield "bwd-hd128-causal-gqa4-det", {"head_dim": 128, "mask": "causal", "ratio": 4, "deterministic": True}
    yield "bwd-hd128-causal", {"head_dim": 128, "mask": "causal"}
    yield "bwd-hd128-causal-varlen", {"head_dim": 128, "mask": "causal", "layout": "varlen"}


SHAPES = ((2, 1000, 1000), (1, 129, 333), (2, 2048, 4096), (1, 77, 64))


def make(seed, shape, head_dim, mask, ratio=1, layout="dense", deterministic=False):
    """Tensors of one problem by name, and what both sides are called with."""
    import torch

    torch.manual_seed(seed)
    batch, seqlen_q, seqlen_k = shape
    heads_kv = 2
    heads = heads_kv * ratio

    def normal(*extents):
        return torch.randn(*extents, device="cuda", dtype=torch.float32).to(torch.bfloat16)

    tensors, lengths = {}, {}
    if layout == "varlen":
        parts_q, parts_k = (seqlen_q, 1, seqlen_q // 2 + 1), (seqlen_k, 5, seqlen_k // 2 + 3)
        for x, parts in (("q", parts_q), ("k", parts_k)):
            starts = torch.tensor([0, *parts], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
            tensors[f"cu_seqlens_{x}"], lengths[f"max_seqlen_{x}"] = starts, max(parts)
        rows_q, rows_k = (sum(parts_q),), (sum(parts_k),)
    elif layout == "paged":
        pages = -(-seqlen_k // 128)
        order = torch.randperm(batch * pages, device="cuda", dtype=torch.int32)
        tensors["page_table"] = order.reshape(batch, pages).contiguous()
        tensors["seqused_k"] = torch.full((batch,), seqlen_k, device="cuda", dtype=torch.int32)
        rows_q, rows_k = (batch, seqlen_q), (batch * pages, 128)
    else:
        rows_q, rows_k = (batch, seqlen_q), (batch, seqlen_k)
    tensors["q"] = normal(*rows_q, heads, head_dim)
    tensors["k"], tensors["v"] = (normal(*rows_k, heads_kv, head_dim) for _ in range(2))
    return {"tensors": tensors, "lengths": lengths, "mask": mask, "layout": layout, "deterministic": deterministic}


def ours(problem, backward=None):
    """(out, lse), or the three gradients when `backward` is (out, lse, dout)."""
    import fa4_kernels

    window = {"window_left": WINDOW[0], "window_right": WINDOW[1]} if problem["mask"] == "local" else {}
    options = {**problem["tensors"], **window, "mask": problem["mask"], "layout": problem["layout"]}
    if backward is None:
        if problem["layout"] == "varlen":
            options["max_seqlen_q"] = problem["lengths"]["max_seqlen_q"]
        return fa4_kernels.call("fwd", **options)
    out, lse, dout = backward
    return fa4_kernels.call("bwd", **options, out=out, lse=lse, dout=dout, deterministic=problem["deterministic"])


def theirs(problem, backward=None):
    """The same from the JIT."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    options = {
        "full": {},
        "causal": {"causal": True},
        "local": {"window_size_left": WINDOW[0], "window_size_right": WINDOW[1]},
    }[problem["mask"]]
    tensors = dict(problem["tensors"])
    q, k, v = (tensors.pop(name) for name in ("q", "k", "v"))
    options |= tensors | problem["lengths"]
    if backward is None:
        return _flash_attn_fwd(q, k, v, return_lse=True, **options)[:2]
    out, lse, dout = backward
    return _flash_attn_bwd(q, k, v, out, dout, lse, deterministic=problem["deterministic"], **options)


def same_bits(a, b):
    """Number of elements whose bits differ."""
    import torch

    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())


def compare(name, options):
    """One row of the record: elements that differ over all shapes, and the worst difference of free sums."""
    import torch

    row = {"case": name, "outputs": 0, "elements": 0, "different": 0, "free_sums_worst": 0.0}
    for seed, shape in enumerate(SHAPES):
        problem = make(seed, shape, **options)
        if name.startswith("fwd"):
            pairs = list(zip(ours(problem), theirs(problem), strict=True))
        else:
            out, lse = theirs(problem)
            backward = (out, lse, torch.randn_like(out))
            pairs = list(zip(ours(problem, backward), theirs(problem, backward), strict=True))
            if not options.get("deterministic"):
                mine, other = pairs.pop(0)
                worst = (mine.float() - other.float()).abs().max() / other.float().abs().max()
                row["free_sums_worst"] = max(row["free_sums_worst"], float(worst))
        torch.cuda.synchronize()
        for mine, other in pairs:
            row["outputs"] += 1
            row["elements"] += mine.numel()
            row["different"] += same_bits(mine, other)
    row["passed"] = row["different"] == 0 and row["free_sums_worst"] <= DQ_TOLERANCE
    return row


def run_compare(part):
    """Every PARTS-th case; one JSON line each."""
    cases = [*forward_cases(), *backward_cases()][part::PARTS]
    for name, options in cases:
        try:
            row = compare(name, options)
        except Exception as error:
            row = {"case": name, "passed": False, "error": f"{type(error).__name__}: {str(error)[:600]}"}
        print(json.dumps(row), flush=True)


def run_first_call():
    """Import, first call and host time of ours; no compiler can be imported here."""
    import torch

    for name in ("cutlass", "flash_attn"):
        sys.modules[name] = None
    q, k, v = (torch.randn(2, 1024, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.cuda.synchronize()
    started = time.perf_counter()
    from fa4_kernels import explain, flash_attn_func

    imported = time.perf_counter()
    flash_attn_func(q, k, v, causal=True)
    torch.cuda.synchronize()
    called = time.perf_counter()
    row = {"import_s": imported - started, "first_call_s": called - imported}
    row["decision"] = str(explain(q, k, v, causal=True)).splitlines()[0]
    row["host_us"] = host_us(lambda *x: flash_attn_func(*x, causal=True))
    row["launch_us"] = launch_us()
    print(json.dumps(row), flush=True)


def host_us(call):
    """Microseconds a call takes on the host, kernels tiny and the queue never full: median of 30 rounds."""
    import torch

    q, k, v = (torch.randn(1, 128, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    rounds = []
    for _ in range(30):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(50):
            call(q, k, v)
        rounds.append((time.perf_counter() - started) / 50 * 1e6)
    return sorted(rounds)[len(rounds) // 2]


def launch_us():
    """As `host_us`, of the loaded kernel alone: outputs allocated beforehand, nothing decided."""
    import torch
    from fa4_kernels import loader
    from fa4_kernels.dispatch import Problem

    runtime = loader.runtime()
    out, lse = torch.empty(1, 128, 1, 128, device="cuda", dtype=torch.bfloat16), torch.empty(1, 1, 128, device="cuda")
    problem = Problem(dtype="bf16", head_dim=128, head_dim_v=128, mask="causal")
    run, num_sms = runtime.launch_for(problem, 0).run, runtime.device(0).sm_count
    return host_us(lambda q, k, v: run(q, k, v, out, lse, 0.1, 1 << 30, 0, num_sms))


def gpu_ms(calls):
    """Milliseconds of each call on the GPU, in turn and in turned order, median of 15."""
    import torch

    times = {name: [] for name in calls}
    for turn in range(18):
        for name in sorted(calls, reverse=bool(turn % 2)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                calls[name]()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(start.elapsed_time(end) / 10)
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def run_timing():
    """Kernel times side by side, and the JIT's import, first call and host time."""
    import torch

    started = time.perf_counter()
    from flash_attn.cute.interface import flash_attn_func

    row = {"jit_import_s": time.perf_counter() - started}
    q, k, v = (torch.randn(2, 1024, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.cuda.synchronize()
    started = time.perf_counter()
    flash_attn_func(q, k, v, causal=True)
    torch.cuda.synchronize()
    row["jit_first_call_s"] = time.perf_counter() - started
    row["jit_host_us"] = host_us(lambda *x: flash_attn_func(*x, causal=True))
    for mask in ("full", "causal"):
        problem = make(0, (4, 8192, 8192), head_dim=128, mask=mask, ratio=1)
        for name in ("q", "k", "v"):
            problem["tensors"][name] = torch.randn(4, 8192, 16, 128, device="cuda", dtype=torch.bfloat16)
        times = gpu_ms({"ours": lambda p=problem: ours(p), "jit": lambda p=problem: theirs(p)})
        row[f"fwd-hd128-{mask}"] = {**times, "ratio": times["ours"] / times["jit"]}
    out, lse = theirs(problem)
    backward = (out, lse, torch.randn_like(out))
    times = gpu_ms({"ours": lambda: ours(problem, backward), "jit": lambda: theirs(problem, backward)})
    row["bwd-hd128-causal"] = {**times, "ratio": times["ours"] / times["jit"]}
    print(json.dumps(row), flush=True)


def recipe_id(name, options):
    """The recipe that a case calls."""
    layout, ratio = options.get("layout", "dense"), options.get("ratio", 1)
    fields = [name[:3], "sm90a", "bf16", f"hd{options['head_dim']}", options["mask"]]
    fields += [layout] if layout != "dense" else []
    fields += [f"r{ratio}", *(["deterministic"] if options.get("deterministic") else [])]
    return "-".join(fields)


def variants_of(cases, manifest):
    """One row for each kernel that a case launched: what evidence.py reads."""
    options = dict((*forward_cases(), *backward_cases()))
    recipes = {recipe["id"]: recipe for recipe in manifest["recipes"]}
    entries = {entry["id"]: entry["cubin"]["sha256"] for entry in manifest["entries"]}
    rows = {}
    for case in cases:
        for step in recipes[recipe_id(case["case"], options[case["case"]])]["steps"]:
            row = rows.setdefault(step["kernel"], {"passed": True, "cases": 0, "worst_ratio": 0.0})
            row |= {"id": step["kernel"], "cubin_sha256": entries[step["kernel"]]}
            row["passed"] &= case["passed"]
            row["worst_ratio"] = max(row["worst_ratio"], case.get("free_sums_worst", 1.0) / DQ_TOLERANCE)
            row["cases"] += len(SHAPES)
    return [rows[name] for name in sorted(rows)]


def machine(directory):
    """Device, driver and torch of this run."""
    code = "import json, torch; print(json.dumps([torch.cuda.get_device_name(), torch.__version__]))"
    device, torch_version = json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=directory))
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"schema": 1, "date": date, "device": device, "driver": driver_version(), "torch": torch_version}


def start(arguments, installed, peers):
    """This file again, in a process that sees our wheels and, where named, the JIT."""
    path = os.pathsep.join([str(installed), *([peers] if peers else [])])
    environment = {**os.environ, "PYTHONPATH": path, "FA4_KERNELS_FAMILY": "upstream"}
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows_of(process):
    """The JSON lines that a process printed; its errors go to ours."""
    output, errors = process.communicate()
    if process.returncode:
        print(errors[-3000:], file=sys.stderr)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("peers")
    parser.add_argument("--out", type=Path, default=Path("upstream.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        install(options.wheels, directory)
        parts = [start(["--part", str(i)], directory, options.peers) for i in range(PARTS)]
        cases = [row for process in parts for row in rows_of(process)]
        first = rows_of(start(["--first-call"], directory, ""))
        timing = rows_of(start(["--timing"], directory, options.peers))
        manifest = json.loads(next(Path(directory).glob("fa4_kernels_upstream_*/manifest.json")).read_bytes())
        record = machine(directory)
    expected = len([*forward_cases(), *backward_cases()])
    record |= {"variants": variants_of(cases, manifest), "cases": cases, "expected": expected}
    record |= {"first_call": first, "timing": timing}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    for row in cases:
        print("ok  " if row["passed"] else "FAIL", json.dumps(row))
    print(json.dumps({"first_call": first, "timing": timing}, indent=1))
    return 0 if len(cases) == expected and all(row["passed"] for row in cases) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        sys.exit(run_compare(int(sys.argv[2])))
    if sys.argv[1:2] == ["--first-call"]:
        sys.exit(run_first_call())
    if sys.argv[1:2] == ["--timing"]:
        sys.exit(run_timing())
    sys.exit(main())
