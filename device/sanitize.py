"""Run our kernels under compute-sanitizer on a GPU, from the wheels alone: memcheck, racecheck, synccheck.

    python device/sanitize.py WHEEL_DIR --out record.json [--sanitizer PATH]... [--peer]

Small problems in which only kernels named sm90a are checked and every tensor is an allocation of its own, so that a
byte read behind one is seen: forward dense, packed, paged and split with its combine; backward dense, deterministic,
packed. `--peer` also runs racecheck on flash-attn-4's kernels from a pack of the family `upstream`: what racecheck says
of a published kernel with the same instructions tells what its reports are worth.

The record holds the number of errors and warnings and the first reports of each run. Exit status 1 if memcheck or
synccheck found an error, or a run did not end.
"""

import argparse
import concurrent.futures
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import driver_version, environment_of, install, reason, write

DEVICE = "cuda"
TOOLS = ("memcheck", "racecheck", "synccheck")
PEER = "peer"  # flash-attn-4
KERNELS = "sm90a"  # in every kernel's symbol
REPORTS = 6
SUMMARY = re.compile(r"(\d+) errors?|(\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")


# --------------------------------------------------------------------------------------------------------------------
# What runs under the tool


def draw(torch, *shapes):
    """Standard normal numbers in bf16."""
    return [torch.randn(shape, device=DEVICE).to(torch.bfloat16) for shape in shapes]


def starts_of(torch, lengths):
    """cu_seqlens."""
    return torch.tensor([0, *(sum(lengths[: i + 1]) for i in range(len(lengths)))], dtype=torch.int32, device=DEVICE)


def forward_dense(torch, fa4, head_dim=128):
    """Full and causal, lengths that are no multiples of a tile, shared keys."""
    q, k, v = draw(torch, (1, 200, 2, head_dim), *2 * ((1, 333, 1, head_dim),))
    return [fa4.flash_attn_func(q, k, v, causal=causal, return_lse=True) for causal in (False, True)]


def packed_inputs(torch, head_dim):
    lengths = (133, 0, 1, 70)
    starts = starts_of(torch, lengths)
    return draw(torch, (sum(lengths), 2, head_dim), *2 * ((sum(lengths), 1, head_dim),)), starts, max(lengths)


def forward_packed(torch, fa4, head_dim=128):
    """One sequence without rows."""
    tensors, starts, longest = packed_inputs(torch, head_dim)
    return [fa4.flash_attn_varlen_func(*tensors, starts, starts, longest, longest, causal=True, return_lse=True)]


def forward_paged(torch, fa4, head_dim=128, num_splits=1):
    """Pages in any order, behind the used ones a page number that does not exist."""
    q, k, v = draw(torch, (2, 3, 8, head_dim), *2 * ((8, 64, 2, head_dim),))
    table = torch.tensor([[5, 0, 3, 7, 2**30], [1, 6, 2**30, 2**30, -1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([250, 70], dtype=torch.int32, device=DEVICE)
    options = {"causal": True, "num_splits": num_splits, "return_lse": True}
    return [fa4.flash_attn_with_kvcache(q, k, v, lengths, table, **options)]


def forward_split(torch, fa4):
    """Parts of the keys, and their merge."""
    return forward_paged(torch, fa4, num_splits=3)


def gradients(torch, call, tensors):
    """Of q, k, v."""
    leaves = [x.requires_grad_() for x in tensors]
    out, lse = call(*leaves)
    return [torch.autograd.grad((out.float() ** 2).sum() + lse.sum(), leaves)]


def backward_dense(torch, fa4, head_dim=128, deterministic=False):
    """Causal, three query heads a key head."""
    tensors = draw(torch, (1, 200, 3, head_dim), *2 * ((1, 270, 1, head_dim),))
    options = {"causal": True, "return_lse": True, "deterministic": deterministic}
    return gradients(torch, lambda *x: fa4.flash_attn_func(*x, **options), tensors)


def backward_deterministic(torch, fa4):
    """Several tiles of keys in a fixed order."""
    return backward_dense(torch, fa4, deterministic=True)


def backward_packed(torch, fa4, head_dim=128):
    """As forward_packed."""
    tensors, starts, longest = packed_inputs(torch, head_dim)
    options = {"causal": True, "return_lse": True}
    call = lambda *x: fa4.flash_attn_varlen_func(*x, starts, starts, longest, longest, **options)  # noqa: E731
    return gradients(torch, call, tensors)


def peer_forward(torch, fa4):
    """flash-attn-4's kernel on the problem of forward_dense, without shared keys."""
    q, k, v = draw(torch, (1, 200, 2, 128), *2 * ((1, 333, 2, 128),))
    return [fa4.call("fwd", q=q, k=k, v=v, mask="causal", layout="dense")]


def peer_backward(torch, fa4):
    """flash-attn-4's backward."""
    q, k, v, dout = draw(torch, *4 * ((1, 270, 2, 128),))
    out, lse = fa4.call("fwd", q=q, k=k, v=v, mask="causal", layout="dense")
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout}
    return [fa4.call("bwd", **tensors, mask="causal", layout="dense", deterministic=False)]


GROUPS = {
    "forward": {
        "dense": forward_dense,
        "dense, head_dim 64": lambda torch, fa4: forward_dense(torch, fa4, 64),
        "packed": forward_packed,
        "paged": forward_paged,
        "split": forward_split,
    },
    "backward": {
        "dense": backward_dense,
        "dense, head_dim 256": lambda torch, fa4: backward_dense(torch, fa4, 256),
        "deterministic": backward_deterministic,
        "packed": backward_packed,
    },
    PEER: {"forward": peer_forward, "backward": peer_backward},
}


def run_group(group):
    """Runs the problems of a group. What they give must be finite and not all zero: then they are known to have run."""
    import fa4_kernels
    import torch

    status = 0
    for name, problem in GROUPS[group].items():
        torch.manual_seed(1)
        try:
            results = problem(torch, fa4_kernels)
            tensors = [x for part in results for x in part if x.numel()]
            is_right = all(torch.isfinite(x).all().item() and x.any().item() for x in tensors)
            text = "right" if is_right else "not finite, or all zero"
        except Exception as error:
            text = reason(error)
        status |= text != "right"
        print(f"RAN {group}, {name}: {text}", flush=True)
    return status


# --------------------------------------------------------------------------------------------------------------------
# The tool


def parse(output):
    """Errors, warnings and the first reports of one run; None for a run without a summary."""
    last = None
    for line in output.splitlines():
        match = SUMMARY.search(line) if "SUMMARY" in line else None
        if match:
            last = match
    if last is None:
        return None
    errors, _, hazard_errors, warnings = last.groups()
    lines = [line.removeprefix("=========").strip() for line in output.splitlines() if line.startswith("=========")]
    heads = [line for line in lines if re.match(r"(Error|Warning|Info|Invalid|Barrier|Program|Potential|Race)", line)]
    kinds = {}
    for line in heads:
        kind = re.sub(r"0x[0-9a-f]+|\b\d+\b", "N", line)
        kinds[kind] = kinds.get(kind, 0) + 1
    facts = {"errors": int(errors if errors is not None else hazard_errors), "warnings": int(warnings or 0)}
    top = dict(sorted(kinds.items(), key=lambda item: -item[1])[:REPORTS])
    return facts | {"kinds": {kind[:200]: count for kind, count in top.items()}, "first": lines[2:40] if heads else []}


def run_tool(sanitizer, tool, group, site, seconds):
    """A row of the record."""
    environment = environment_of(site) | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, "--print-limit", "20000"]
    command += ["--kernel-name", f"kernel_substring={KERNELS}"] if group != PEER else []
    command += [sys.executable, __file__, "unused", "--group", group]
    row, started = {"tool": tool, "group": group}, time.monotonic()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
        output, row["status"] = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        output, row["status"] = (error.stdout or b"").decode(errors="replace"), "out of time"
    row["seconds"] = round(time.monotonic() - started, 1)
    row["ran"] = [line.removeprefix("RAN ") for line in output.splitlines() if line.startswith("RAN ")]
    found = parse(output)
    return row | (found if found is not None else {"output": output[-3000:]})


def version_of(sanitizer):
    """As it prints it."""
    output = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
    return next((line for line in output.splitlines() if line.startswith("Version")), "unknown")


def is_bad(row):
    """A problem that did not run or gave nonsense, or errors. Racecheck's reports are for people to judge."""
    has_run = sum(text.endswith(": right") for text in row["ran"]) == len(GROUPS[row["group"]])
    return not has_run or "errors" not in row or (row["tool"] != "racecheck" and row["errors"] > 0)


def show(row):
    """A line."""
    count = f"{row.get('errors', '?')} errors, {row.get('warnings', '?')} warnings"
    reports = json.dumps(row.get("kinds", row.get("output", "")[-300:]))
    print(f"{'BAD' if is_bad(row) else 'ok '} {row['tool']:9s} {row['group']:9s} {count:26s} {row['seconds']:5.1f} s  "
          f"{reports[:400]}", flush=True)  # fmt: skip
    for text in row["ran"]:
        if not text.endswith(": right"):
            print(f"    {text[:300]}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel_dir")
    parser.add_argument("--out", default="sanitizer.json")
    parser.add_argument("--sanitizer", action="append", help="the program; default: the one on the PATH. Repeatable")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=120, help="one run may take")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.group:
        return run_group(arguments.group)
    sanitizers = [path for path in arguments.sanitizer or ["compute-sanitizer"] if shutil.which(path)]
    if not sanitizers:
        raise SystemExit(f"none of {arguments.sanitizer or ['compute-sanitizer']} is installed")
    record = {"driver": driver_version(), "python": sys.version.split()[0], "runs": []}
    pairs = [(tool, group) for group in ("forward", "backward") for tool in TOOLS]
    pairs += [("racecheck", PEER)] if arguments.peer else []
    with tempfile.TemporaryDirectory() as site, concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        install(arguments.wheel_dir, site)
        futures = {}
        for sanitizer in sanitizers:
            version = version_of(sanitizer)
            for tool, group in pairs:
                future = pool.submit(run_tool, sanitizer, tool, group, Path(site), arguments.seconds)
                futures[future] = version
        for future in concurrent.futures.as_completed(futures):
            row = future.result() | {"sanitizer": futures[future]}
            record["runs"].append(row)
            show(row)
            record["runs"].sort(key=lambda r: (r["sanitizer"], r["group"], r["tool"]))
            write(record, arguments.out)
    bad = [f"{row['tool']} {row['group']}" for row in record["runs"] if is_bad(row)]
    print(f"{len(record['runs'])} runs, {len(bad)} bad{': ' + ', '.join(bad) if bad else ''}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
