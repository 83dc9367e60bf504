"""Prove and time the backward kernels of the wheels on a GPU: nothing but the wheels, torch and the scripts here.

    python device/prove_backward.py WHEEL_DIR --out record.json [--timing] [--no-acceptance]

Checks dq, dk and dv of every backward kernel of every pack that fits the GPU against float64, with guard zones around
the outputs; dk and dv must have the same bits in a repeat, and dq too where the kernel is deterministic (one case 1,000
times). `--timing` adds the whole backward pass, through autograd, beside torch's attention backends. Exit status 1 if
any case fails.
"""

import argparse
import sys
import time

from guard_zones import guarded, guards_intact
from harness import entries_here, median_ms, run_installed, setting, write
from prove_forward import PACKS, UNBOUNDED, WINDOWS, Case, draw, is_plain

LENGTHS = (1, 17, 127, 128, 129, 1000)
HEADS = ((2, 2), (4, 1))  # query heads, key heads
UNEQUAL = ((1, 1000), (17, 2048), (129, 127), (1000, 129), (127, 1000), (2048, 1000))
FILLS = ("large_logits", "rising", "zero_q", "one_key")
REPEATS = 1000
FLOAT32_NOISE = 2.0**-18  # fa4build/cases/backward.py, at head_dim 128; a sum's rounding grows with its terms


def cases_for(mask):
    """The acceptance set for one mask."""
    windows = {"full": ((UNBOUNDED, UNBOUNDED),), "causal": ((UNBOUNDED, 0),), "local": WINDOWS}[mask]
    first = windows[0]
    cases = [Case(f"s{n}-h{q}/{kv}", 2, n, n, q, kv, first) for n in LENGTHS for q, kv in HEADS]
    cases += [Case(f"q{q}-k{k}", 1, q, k, 5, 1, first) for q, k in UNEQUAL]
    cases += [Case(fill, 2, 300, 1000, 2, 1, first, fill) for fill in FILLS]
    cases += [Case(layout, 2, 200, 200, 2, 2, first, "normal", layout) for layout in ("bhsd", "packed")]
    for window in windows[1:]:
        cases.append(Case(f"window{window}", 2, 300, 333, 4, 2, window))
        cases.append(Case(f"window{window}-empty", 1, 300, 100, 2, 1, window))
    return cases


def reference(torch, q, k, v, dout, scale, window, dtype):
    """(dq, dk, dv), out and lse with every matrix in `dtype`: float64 is the reference, bf16 the yardstick."""
    group = q.shape[2] // k.shape[2]
    q, k, v, dout = (x.to(dtype).transpose(1, 2) for x in (q, k, v, dout))
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q * scale) @ keys.transpose(2, 3)
    diagonal = torch.arange(scores.shape[2], device="cuda")[:, None] + (scores.shape[3] - scores.shape[2])
    key = torch.arange(scores.shape[3], device="cuda")[None, :]
    hidden = (key < diagonal - window[0]) | (key > diagonal + window[1])
    scores.masked_fill_(hidden, float("-inf"))
    lse = torch.logsumexp(scores.double(), dim=-1)
    weights = torch.softmax(scores, dim=-1).masked_fill(hidden, 0)
    dweights = dout @ values.transpose(2, 3)
    dscores = weights * (dweights - (weights.double() * dweights.double()).sum(-1, keepdim=True).to(dtype))
    dq = (dscores @ keys) * scale
    dk, dv = dscores.transpose(2, 3) @ (q * scale), weights.transpose(2, 3) @ dout
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return tuple(x.transpose(1, 2) for x in (dq, dk, dv)), (weights @ values).transpose(1, 2), lse


class Kernels:
    """The three launches of a backward pass, the main one being exactly `entry`: the product's loader, no dispatch."""

    def __init__(self, torch, runtime, pack, entry):
        from fa4_kernels.dispatch import Problem

        axes = entry.axes
        problem = {"dtype": axes["dtype"], "head_dim": axes["head_dim"]}
        self._torch, self.num_sms = torch, runtime.device(0).sm_count
        self._main = runtime.load(pack, entry, 0)
        self._before = runtime.launch_for(Problem(op="bwd_preprocess", head_dim_v=axes["head_dim_v"], **problem), 0)
        self._after = runtime.launch_for(Problem(op="bwd_postprocess", head_dim_v=axes["head_dim"], **problem), 0)

    def run(self, q, k, v, dout, out, lse, gradients, scale, window):
        """Fills dq, dk, dv."""
        batch, seqlen_q, heads, head_dim = q.shape
        rounded = -(-seqlen_q // 128) * 128
        new = self._torch.empty
        rows = [new(batch, heads, rounded, device="cuda").fill_(float("nan")) for _ in range(2)]
        accumulator = new(batch, heads, rounded, head_dim, device="cuda").fill_(float("nan"))
        counters = new(batch, heads, rounded // 128, device="cuda", dtype=self._torch.int32).fill_(77)
        self._before.run(out, dout, lse, *rows, accumulator, counters)
        numbers = (scale, *window, self.num_sms)
        self._main.run(q, k, v, dout, *rows, accumulator, counters, *gradients[1:], *numbers)
        self._after.run(accumulator, gradients[0], scale)


def check_case(torch, kernels, axes, case, generator):
    """Run one case twice: a row with the worst error over its bound (`ratio` <= 1 passes) and every fault seen."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[axes["dtype"]]
    q, k, v = draw(torch, case, axes["head_dim"], axes["head_dim_v"], dtype, generator)
    dout = torch.randn(*q.shape[:3], axes["head_dim_v"], device="cuda", generator=generator).to(dtype)
    scale = axes["head_dim"] ** -0.5
    expected, out, lse = reference(torch, q, k, v, dout, scale, case.window, torch.float64)
    same, _, _ = reference(torch, q, k, v, dout, scale, case.window, dtype)
    out, lse = out.to(dtype).contiguous(), lse.float()
    runs = []
    for _ in range(2):
        buffers = [guarded(torch, x.shape, dtype) for x in (q, k, v)]
        kernels.run(q, k, v, dout, out, lse, [view for _, view in buffers], scale, case.window)
        torch.cuda.synchronize()
        runs.append(buffers)

    faults, worst = [], 0.0
    for i, name in enumerate(("dq", "dk", "dv")):
        whole, found = runs[0][i]
        rounding = expected[i].abs().max().item() * 2.0 ** (-8 if dtype == torch.bfloat16 else -11)
        bound = (
            2 * (same[i].double() - expected[i]).abs().max().item()
            + rounding
            + FLOAT32_NOISE * max(1, axes["head_dim"] / 128)
        )
        error = (found.double() - expected[i]).abs().max().item()
        worst = max(worst, error / bound)
        if not error <= bound:
            faults.append(f"{name} is off by {error:.3g}, allowed {bound:.3g}")
        if not guards_intact(torch, whole):
            faults.append(f"wrote outside {name}")
        if (i > 0 or axes["deterministic"]) and not torch.equal(found, runs[1][i][1]):
            faults.append(f"a repeat gave other bits of {name}")
    return {"case": case.name, "ratio": worst, "faults": faults}


def check_repeats(torch, kernels, axes, generator):
    """Whether REPEATS runs of one problem with many key tiles give the same bits."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[axes["dtype"]]
    window = {"full": (UNBOUNDED, UNBOUNDED), "causal": (UNBOUNDED, 0), "local": (300, 0)}[axes["mask"]]
    case = Case("repeats", 2, 1000, 1500, 4, 2, window)
    q, k, v = draw(torch, case, axes["head_dim"], axes["head_dim_v"], dtype, generator)
    dout = torch.randn(*q.shape[:3], axes["head_dim_v"], device="cuda", generator=generator).to(dtype)
    _, out, lse = reference(torch, q, k, v, dout, 0.1, window, torch.float64)
    first, again = ([torch.empty_like(x) for x in (q, k, v)] for _ in range(2))
    arguments = (q, k, v, dout, out.to(dtype).contiguous(), lse.float())
    kernels.run(*arguments, first, 0.1, window)
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(REPEATS):
        kernels.run(*arguments, again, 0.1, window)
        for a, b in zip(first, again, strict=True):
            different += (a.view(torch.int16) != b.view(torch.int16)).sum()
    faults = [f"{REPEATS} repeats: {different.item()} elements differ"] if different.item() else []
    return {"case": "repeats", "ratio": 0.0, "faults": faults}


def check_variant(torch, runtime, pack, entry, seed):
    """All cases of one kernel: a row of the record."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    kernels = Kernels(torch, runtime, pack, entry)
    rows = [check_case(torch, kernels, entry.axes, case, generator) for case in cases_for(entry.axes["mask"])]
    if entry.axes["deterministic"]:
        rows.append(check_repeats(torch, kernels, entry.axes, generator))
    failed = [row for row in rows if row["faults"]]
    return {
        "id": entry.id,
        "cubin_sha256": entry.cubin.sha256,
        "passed": not failed,
        "cases": len(rows),
        "worst_ratio": max(row["ratio"] for row in rows),
        "failures": failed,
    }


# --------------------------------------------------------------------------------------------------------------------
# Timing


def time_backward(torch, flash_attn_func, head_dim, causal, seqlen, has_deterministic):
    """TFLOP/s of the backward pass of ours and of torch's backends: bf16, 32k tokens, model dim 2048."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, heads = 32768 // seqlen, 2048 // head_dim
    q, k, v, dout = (torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    # Five products of 2 * seqlen^2 * head_dim operations, half of them under a causal mask.
    flop = 10 * batch * heads * seqlen * seqlen * head_dim / (2 if causal else 1)
    row = {"head_dim": head_dim, "causal": causal, "seqlen": seqlen}

    def measure(out, gradient):
        def backward(_):
            torch.autograd.grad(out, inputs, gradient, retain_graph=True)

        return flop / median_ms(torch, backward, repeats=11, warmup=3) / 1e9

    def ours(**options):
        return measure(flash_attn_func(q, k, v, causal=causal, **options)[0], dout)

    row["fa4_kernels"] = ours()
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            transposed = [x.transpose(1, 2) for x in (q, k, v)]
            out = torch.nn.functional.scaled_dot_product_attention(*transposed, is_causal=causal)
            row[name] = measure(out, dout.transpose(1, 2))
    row["deterministic"] = ours(deterministic=True) if has_deterministic else float("nan")
    row["fa4_kernels_again"] = ours()
    return row


def timing(torch, flash_attn_func, dims, seqlens, has_deterministic):
    """Every head dim, full and causal."""
    rows = []
    for head_dim in dims:
        for causal in (False, True):
            for seqlen in seqlens:
                rows.append(time_backward(torch, flash_attn_func, head_dim, causal, seqlen, has_deterministic))
                r = rows[-1]
                print(
                    f"hd{head_dim} {'causal' if causal else 'full':6s} {seqlen:5d}: ours {r['fa4_kernels']:.0f} "
                    f"({r['fa4_kernels_again']:.0f}, deterministic {r['deterministic']:.0f})  cudnn {r['cudnn']:.0f}  "
                    f"fa2 {r['fa2']:.0f} TFLOP/s  ours/best {r['fa4_kernels'] / max(r['cudnn'], r['fa2']):.2f}",
                    flush=True,
                )
    return rows


# --------------------------------------------------------------------------------------------------------------------
# The two processes


def child(arguments):
    """Runs with the installed wheels on the path."""
    import torch

    record = {"schema": 1, **setting(torch), "seed": arguments.seed}
    from fa4_kernels import flash_attn_func, loader

    entries = entries_here(torch, lambda entry: entry.op == "bwd" and is_plain(entry))
    started, variants = time.time(), []
    for pack, entry in entries if arguments.acceptance else ():
        variants.append(check_variant(torch, loader.runtime(), pack, entry, arguments.seed))
        row = variants[-1]
        verdict = "pass" if row["passed"] else f"FAIL {row['failures'][:2]}"
        print(f"{row['id']:44s} {row['cases']:3d} cases  worst {row['worst_ratio']:.2f}  {verdict}", flush=True)
    record |= {"acceptance_seconds": round(time.time() - started, 1), "variants": variants}
    failed = [row["id"] for row in variants if not row["passed"]]
    print(
        f"{len(variants)} variants, {sum(row['cases'] for row in variants)} cases, {len(failed)} failed, "
        f"{record['acceptance_seconds']} s"
    )
    if arguments.timing:
        # 2048 columns are shared out evenly among heads, and torch's backends take one head dim for all tensors.
        dims = sorted({e.axes["head_dim"] for _, e in entries if e.axes["head_dim"] == e.axes["head_dim_v"]})
        has_deterministic = any(entry.axes["deterministic"] for _, entry in entries)
        rows = timing(torch, flash_attn_func, dims, arguments.seqlens, has_deterministic)
        record["timing"] = {"backward_tflops": rows}
    write(record, arguments.out)
    return 1 if failed or not entries else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel_dir")
    parser.add_argument("--out", default="record.json")
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--timing", action="store_true")
    parser.add_argument("--seqlens", type=int, nargs="+", default=(1024, 4096, 16384))
    parser.add_argument("--no-acceptance", dest="acceptance", action="store_false")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return child(arguments) if arguments.child else run_installed(__file__, arguments.wheel_dir, PACKS)


if __name__ == "__main__":
    sys.exit(main())
