"""Prove and time the wheels on a GPU: nothing but the wheels, torch and the scripts here.

    python device/prove_forward.py WHEEL_DIR --out record.json

Installs the wheels found in WHEEL_DIR into an empty directory, checks that no kernel compiler can be imported, runs the
acceptance set against float64 references for every forward kernel of every pack that fits the GPU, and writes one JSON
record (schema 1, see fa4build/store/evidence.py). `--timing` adds kernel times beside torch's attention backends, host
time a call, import time and first-call time. Exit status 1 if any case fails.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from guard_zones import guarded, guards_intact
from harness import entries_here, median_ms, run_installed, setting, write

PACKS = "fa4_kernels_sm*"  # of our own family
UNBOUNDED = 2**30
LENGTHS = (1, 17, 127, 128, 129, 1000, 4096)
HEADS = ((2, 2), (4, 1), (8, 1))  # query heads, key heads: groups of 1, 4, 8
UNEQUAL = ((1, 1000), (17, 4096), (129, 127), (1000, 129), (127, 1000), (1000, 4096), (4096, 1000))
WINDOWS = ((64, 0), (100, 30), (UNBOUNDED, 7), (16, UNBOUNDED), (0, 0), (-5, 70))
FILLS = ("large_logits", "rising", "creeping", "zero_q", "one_key")


@dataclass(frozen=True)
class Case:
    """One problem; `layout` says how q, k and v lie in memory."""

    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    fill: str = "normal"
    layout: str = "bshd"


def cases_for(mask):
    """The acceptance set for one mask."""
    windows = {"full": ((UNBOUNDED, UNBOUNDED),), "causal": ((UNBOUNDED, 0),), "local": WINDOWS}[mask]
    first = windows[0]
    cases = []
    for length in LENGTHS:
        batch = 1 if length == 4096 else 2
        for heads_q, heads_kv in HEADS:
            cases.append(Case(f"s{length}-h{heads_q}/{heads_kv}", batch, length, length, heads_q, heads_kv, first))
    for seqlen_q, seqlen_k in UNEQUAL:
        cases.append(Case(f"q{seqlen_q}-k{seqlen_k}", 1, seqlen_q, seqlen_k, 5, 1, first))
    for fill in FILLS:
        cases.append(Case(fill, 2, 300, 1000, 2, 1, first, fill))
    for layout in ("bhsd", "packed"):
        cases.append(Case(layout, 2, 200, 200, 2, 2, first, "normal", layout))
    for window in windows[1:]:
        cases.append(Case(f"window{window}", 2, 300, 333, 4, 2, window))
        cases.append(Case(f"window{window}-empty", 1, 300, 100, 2, 1, window))
    return cases


# --------------------------------------------------------------------------------------------------------------------
# Inputs, reference, one case


def draw(torch, case, head_dim, head_dim_v, dtype, generator):
    """q, k, v on the GPU in `dtype`; fresh numbers a case."""

    def normal(seqlen, heads, dim):
        return torch.randn(case.batch, seqlen, heads, dim, device="cuda", generator=generator)

    q = normal(case.seqlen_q, case.heads_q, head_dim)
    k = normal(case.seqlen_k, case.heads_kv, head_dim)
    v = normal(case.seqlen_k, case.heads_kv, head_dim_v)
    if case.fill == "large_logits":
        q = q * 8
    elif case.fill in ("rising", "creeping"):
        rise = {"rising": 4.0, "creeping": 0.5}[case.fill]
        q = q * 0.1 + 1
        k = k * 0.1 + (rise * torch.arange(case.seqlen_k, device="cuda") / 32 / head_dim**0.5)[None, :, None, None]
    elif case.fill == "zero_q":
        q = torch.zeros_like(q)
    elif case.fill == "one_key":
        k[:, case.seqlen_k // 3] = 32 * q[:, 0, : case.heads_kv]
    return tuple(arrange(torch, x.to(dtype), case.layout) for x in (q, k, v))


def arrange(torch, x, layout):
    """The same values with other strides: heads outside sequence, or a slice of a packed (.., 3, heads, dim) tensor."""
    if layout == "bhsd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":
        packed = torch.full((*x.shape[:2], 3, *x.shape[2:]), float("nan"), dtype=x.dtype, device=x.device)
        packed[:, :, 1] = x
        return packed[:, :, 1]
    return x


def attention(torch, q, k, v, scale, window, dtype):
    """Unfused attention with every matrix in `dtype`: (out, lse); float64 gives the reference, bf16 the yardstick."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q * scale) @ k.transpose(2, 3)
    seqlen_q, seqlen_k = scores.shape[2:]
    diagonal = torch.arange(seqlen_q, device="cuda")[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device="cuda")[None, :]
    hidden = (key < diagonal - window[0]) | (key > diagonal + window[1])
    scores.masked_fill_(hidden, float("-inf"))
    empty = hidden.all(dim=1)
    lse = torch.logsumexp(scores.double(), dim=-1)
    probabilities = torch.softmax(scores, dim=-1).masked_fill(empty[:, None], 0)
    return (probabilities @ v).transpose(1, 2), lse


def check_case(torch, kernel, axes, case, generator):
    """Run one case twice: a row with the error over its bound (`ratio` <= 1 passes) and every fault seen."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[axes["dtype"]]
    q, k, v = draw(torch, case, axes["head_dim"], axes["head_dim_v"], dtype, generator)
    scale = axes["head_dim"] ** -0.5
    outputs = []
    for _ in range(2):
        out_whole, out = guarded(torch, (*q.shape[:3], axes["head_dim_v"]), dtype)
        lse_whole, lse = guarded(torch, (q.shape[0], q.shape[2], q.shape[1]), torch.float32)
        kernel(q, k, v, out, lse, scale, *case.window)
        torch.cuda.synchronize()
        outputs.append((out_whole, out, lse_whole, lse))
    out_whole, out, lse_whole, lse = outputs[0]

    ref, ref_lse = attention(torch, q, k, v, scale, case.window, torch.float64)
    same, _ = attention(torch, q, k, v, scale, case.window, dtype)
    rounding = ref.abs().max().item() * 2.0 ** (-8 if dtype == torch.bfloat16 else -11)
    bound = 2 * (same.double() - ref).abs().max().item() + rounding
    error = (out.double() - ref).abs().max().item()
    infinite = torch.isneginf(ref_lse)
    lse_difference = ((lse.double() - ref_lse) / ref_lse.abs().clamp(min=1)).masked_fill(infinite, 0)
    lse_error = lse_difference.abs().max().item()
    faults = []
    if not guards_intact(torch, out_whole) or not guards_intact(torch, lse_whole):
        faults.append("wrote outside the outputs")
    if torch.isnan(out).any() or torch.isnan(lse).any():
        faults.append("NaN or unwritten output")
    if not torch.equal(torch.isneginf(lse), infinite):
        faults.append("lse is -inf on other rows than the empty ones")
    if not (torch.equal(out, outputs[1][1]) and torch.equal(lse, outputs[1][3])):
        faults.append("a repeat gave other bits")
    if not error <= bound:
        faults.append(f"out is off by {error:.3g}, allowed {bound:.3g}")
    if not lse_error <= 1e-4:
        faults.append(f"lse is off by {lse_error:.3g}, allowed 1e-4")
    ratio = error / bound if bound else float(error > 0)
    return {"case": case.name, "ratio": ratio, "error": error, "lse_error": lse_error, "faults": faults}


def check_variant(torch, kernel, entry, seed):
    """All cases of one kernel: a row of the record."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    rows = [check_case(torch, kernel, entry.axes, case, generator) for case in cases_for(entry.axes["mask"])]
    failed = [row for row in rows if row["faults"]]
    return {
        "id": entry.id,
        "cubin_sha256": entry.cubin.sha256,
        "passed": not failed,
        "cases": len(rows),
        "worst_ratio": max(row["ratio"] for row in rows),
        "worst_error": max(row["error"] for row in rows),
        "worst_lse_error": max(row["lse_error"] for row in rows),
        "failures": failed,
    }


# --------------------------------------------------------------------------------------------------------------------
# Timing


def time_forward(torch, flash_attn_func, head_dim, causal, seqlen):
    """TFLOP/s of ours and of torch's cuDNN and FlashAttention-2 backends: bf16, 32k tokens, model dim 2048."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, heads = 32768 // seqlen, 2048 // head_dim
    sets = [
        [torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        for _ in range(3)
    ]
    transposed = [[x.transpose(1, 2) for x in tensors] for tensors in sets]
    flop = 4 * batch * heads * seqlen * seqlen * head_dim / (2 if causal else 1)

    def sdpa(i):
        return torch.nn.functional.scaled_dot_product_attention(*transposed[i % 3], is_causal=causal)

    row = {"head_dim": head_dim, "causal": causal, "seqlen": seqlen}
    row["fa4_kernels"] = flop / median_ms(torch, lambda i: flash_attn_func(*sets[i % 3], causal=causal)) / 1e9
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            row[name] = flop / median_ms(torch, sdpa) / 1e9
    row["fa4_kernels_again"] = flop / median_ms(torch, lambda i: flash_attn_func(*sets[i % 3], causal=causal)) / 1e9
    return row


def host_microseconds(torch, flash_attn_func, calls=2000):
    """Host time a call, microseconds: a small problem queued back to back, median of 5 rounds; torch's too."""
    q = torch.randn(1, 128, 1, 128, device="cuda", dtype=torch.bfloat16)
    t = q.transpose(1, 2)

    def per_call(call):
        rounds = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            rounds.append((time.perf_counter() - start) / calls * 1e6)
        return statistics.median(rounds)

    with torch.no_grad():
        return {
            "fa4_kernels": per_call(lambda: flash_attn_func(q, q, q)),
            "sdpa": per_call(lambda: torch.nn.functional.scaled_dot_product_attention(t, t, t)),
            "empty_like_twice": per_call(lambda: (torch.empty_like(q), torch.empty_like(q))),
        }


START_UP = """
import sys, time
import torch
x = torch.randn(1, 256, 2, 128, device="cuda", dtype=torch.bfloat16); torch.cuda.synchronize()
a = time.perf_counter()
from fa4_kernels import flash_attn_func
b = time.perf_counter()
flash_attn_func(x, x, x); torch.cuda.synchronize()
c = time.perf_counter()
print((b - a) * 1e3, (c - b) * 1e3)
"""


def start_up_ms(environment):
    """Import time on top of torch, and first call with tensors on the GPU; median of 5 processes, milliseconds."""
    rows = []
    for _ in range(5):
        output = subprocess.run(
            [sys.executable, "-c", START_UP], env=environment, check=True, capture_output=True, text=True
        ).stdout
        rows.append([float(x) for x in output.split()])
    return {"import": statistics.median(r[0] for r in rows), "first_call": statistics.median(r[1] for r in rows)}


# --------------------------------------------------------------------------------------------------------------------
# The two processes


def child(arguments):
    """Runs with the installed wheels on the path."""
    import torch

    record = {"schema": 1, **setting(torch), "seed": arguments.seed}
    from fa4_kernels import flash_attn_func, loader

    started = time.time()
    variants = []
    for pack, entry in entries_here(torch, lambda entry: entry.op == "fwd" and is_plain(entry)):
        kernel = forward_kernel(loader.runtime(), pack, entry)
        row = check_variant(torch, kernel, entry, arguments.seed)
        variants.append(row)
        verdict = "pass" if row["passed"] else f"FAIL {row['failures'][:2]}"
        print(f"{row['id']:34s} {row['cases']:3d} cases  worst {row['worst_ratio']:.2f}  {verdict}", flush=True)
    record |= {"acceptance_seconds": round(time.time() - started, 1), "variants": variants}
    if arguments.timing:
        record["timing"] = timing(torch, flash_attn_func, variants)
    write(record, arguments.out)
    failed = [row["id"] for row in variants if not row["passed"]]
    print(f"{len(variants)} variants, {sum(row['cases'] for row in variants)} cases, {len(failed)} failed")
    return 1 if failed or not variants else 0


def is_plain(entry):
    """Dense 16-bit attention without features; prove_varlen.py proves the others."""
    axes = entry.axes
    features = any(axes.get(name) for name in ("softcap", "sink", "split"))
    return axes["layout"] == "dense" and not features and axes["dtype"] in ("bf16", "fp16")


def forward_kernel(runtime, pack, entry):
    """A callable that launches exactly this entry into given outputs: no dispatch, but the product's loader."""
    launch = runtime.load(pack, entry, 0)
    num_sms = runtime.device(0).sm_count

    def run(q, k, v, out, lse, scale, window_left, window_right):
        launch.run(q, k, v, out, lse, scale, window_left, window_right, num_sms)

    return run


def timing(torch, flash_attn_func, variants):
    """Every built bf16 head dim, full and causal, at 1k, 4k and 16k keys."""
    dims = sorted({(row["id"].split("-hd")[1].split("-")[0]) for row in variants if "-bf16-" in row["id"]})
    rows = []
    for head_dim in (int(dim) for dim in dims if dim.isdigit() and 2048 % int(dim) == 0):
        for causal in (False, True):
            for seqlen in (1024, 4096, 16384):
                rows.append(time_forward(torch, flash_attn_func, head_dim, causal, seqlen))
                r = rows[-1]
                print(
                    f"hd{head_dim} {'causal' if causal else 'full':6s} {seqlen:5d}: ours {r['fa4_kernels']:.0f} "
                    f"({r['fa4_kernels_again']:.0f})  cudnn {r['cudnn']:.0f}  fa2 {r['fa2']:.0f} TFLOP/s  "
                    f"ours/cudnn {r['fa4_kernels'] / r['cudnn']:.2f}",
                    flush=True,
                )
    host = host_microseconds(torch, flash_attn_func)
    start_up = start_up_ms(dict(os.environ))
    print(f"host microseconds a call: {host}\nstart-up milliseconds: {start_up}")
    return {"forward_tflops": rows, "host_us": host, "start_up_ms": start_up}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel_dir")
    parser.add_argument("--out", default="record.json")
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--timing", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return child(arguments) if arguments.child else run_installed(__file__, arguments.wheel_dir, PACKS)


if __name__ == "__main__":
    sys.exit(main())
