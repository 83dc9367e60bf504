"""Compare our kernels on a GPU with flash-attn-4's, cuDNN's and FlashAttention-2's, all from wheels and torch.

    python benchmarks/compare_on_device.py WHEEL_DIR --out compare.json

WHEEL_DIR holds the runtime wheel, our pack and, for flash-attn-4, a pack of the family `upstream`. bf16, 32k tokens,
2048 columns of heads: head dims 64, 128, 256, full and causal, 1k, 4k and 16k, forward and backward, the backward also
deterministic, and ours with packed sequences of equal length. Then decoding over 16k keys as a share of the memory's
bandwidth.

Everything of a row is measured in turn, in alternating order, several calls at a time, queued so that the host is
never waited for: clocks and power are the same for all, host time does not count. Medians of ROUNDS. The backward is
the whole pass from saved tensors to gradients. TFLOP/s count 4 (forward) and 10 (backward) seqlen^2 head_dim a head,
half under a causal mask. The results of a row are compared with each other first.

Goals: forward 0.95 and backward 0.85 of the best other, decoding 75 % of the bandwidth. Exit status 1 if something
could not be run or differed; a missed goal is no error.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "device"))

from harness import reason, run_installed, setting, write

DEVICE = "cuda"
HEAD_DIMS, SEQLENS = (64, 128, 256), (1024, 4096, 16384)
TOKENS, COLUMNS = 32768, 2048
ROUNDS, SLOT_MS = 15, 3.0
GOALS = {"forward": 0.95, "backward": 0.85, "decoding": 0.75}
PEERS = ("flash_attn_4", "cudnn", "fa2")
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION"}
PEAK_BYTES_A_SECOND = {"H200": 4.8e12, "H100": 3.35e12}
BATCHES = (1, 8, 32)
DECODING = {"keys": 16384, "heads_q": 64, "heads_kv": 8, "head_dim": 128}
LIMIT = 0.05  # of differences between results; bf16 gives 0.02
ROTATED_BYTES = 512 << 20  # several times the L2 cache


# --------------------------------------------------------------------------------------------------------------------
# Timing


def interleaved_ms(torch, calls, rounds):
    """Name -> milliseconds of one call in each round, ascending. Calls take turns of SLOT_MS each."""
    counts = {name: math.ceil(SLOT_MS / _first_ms(torch, call)) for name, call in calls.items()}
    spans = {name: [] for name in calls}
    for turn in range(rounds):
        names = list(calls)
        names = names[turn % len(names) :] + names[: turn % len(names)]
        for name in reversed(names) if turn % 2 else names:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(counts[name]):
                calls[name]()
            end.record()
            spans[name].append((start, end))
    torch.cuda.synchronize()
    return {name: sorted(s.elapsed_time(e) / counts[name] for s, e in spans[name]) for name in calls}


def _first_ms(torch, call):
    """Of one call after two others; at least 0.01."""
    for _ in range(2):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return max(start.elapsed_time(end), 0.01)


# --------------------------------------------------------------------------------------------------------------------
# Training shapes


def draw(torch, *shape):
    """Standard normal numbers in bf16."""
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def starts_of(torch, batch, seqlen):
    """cu_seqlens of equal lengths."""
    return torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * seqlen


def makers(torch, fa4_kernels, seqlen):
    """Name -> (q, k, v, causal) -> out, differentiable, in the shape of q; flash-attn-4's is made by `upstream`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def dense(q, k, v, causal, deterministic=False):
        return fa4_kernels.flash_attn_func(q, k, v, causal=causal, deterministic=deterministic)[0]

    def packed(q, k, v, causal, deterministic=False):
        starts, flat = starts_of(torch, q.shape[0], seqlen), (x.flatten(0, 1) for x in (q, k, v))
        options = {"causal": causal, "deterministic": deterministic}
        out = fa4_kernels.flash_attn_varlen_func(*flat, starts, starts, seqlen, seqlen, **options)[0]
        return out.view(*q.shape[:3], v.shape[3])

    def backend(which):
        def attend(q, k, v, causal):
            with sdpa_kernel(getattr(SDPBackend, which)):
                transposed = (x.transpose(1, 2) for x in (q, k, v))
                attention = torch.nn.functional.scaled_dot_product_attention
                return attention(*transposed, is_causal=causal).transpose(1, 2)

        return attend

    return {"fa4_kernels": dense, "fa4_kernels_packed": packed} | {n: backend(b) for n, b in BACKENDS.items()}


def forward_calls(torch, fa4_kernels, tensors, causal):
    """Name -> call that returns out."""
    q, k, v = tensors

    def ours_of(make):
        return lambda: make(q, k, v, causal)

    calls = {name: ours_of(make) for name, make in makers(torch, fa4_kernels, q.shape[1]).items()}
    mask = "causal" if causal else "full"
    calls["flash_attn_4"] = lambda: fa4_kernels.call("fwd", q=q, k=k, v=v, mask=mask, layout="dense")[0]
    return calls


def backward_calls(torch, fa4_kernels, tensors, dout, causal):
    """Name -> function that runs the forward and returns a call that returns dq, dk, dv."""
    q, k, v = tensors

    def by_autograd(make, **options):
        def prepare():
            leaves = [x.detach().requires_grad_() for x in tensors]
            with torch.enable_grad():
                out = make(*leaves, causal, **options)
            return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

        return prepare

    def upstream(deterministic):
        def prepare():
            how = {"mask": "causal" if causal else "full", "layout": "dense"}
            out, lse = fa4_kernels.call("fwd", q=q, k=k, v=v, **how)
            saved = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout}
            return lambda: fa4_kernels.call("bwd", **saved, **how, deterministic=deterministic)

        return prepare

    made = makers(torch, fa4_kernels, q.shape[1])
    calls = {name: by_autograd(make) for name, make in made.items()}
    calls["fa4_kernels_deterministic"] = by_autograd(made["fa4_kernels"], deterministic=True)
    return calls | {"flash_attn_4": upstream(False), "flash_attn_4_deterministic": upstream(True)}


def differences(found):
    """Name -> largest difference from a peer's results, relative to the largest number there; over LIMIT is a fault."""
    reference = found[next(name for name in (*PEERS, *found) if name in found)]
    off = dict.fromkeys(found, 0.0)
    for i, expected in enumerate(reference):
        largest = max(expected.abs().max().item(), 1e-20)
        for name, results in found.items():
            off[name] = max(off[name], (results[i].float() - expected.float()).abs().max().item() / largest)
    return off


def compare(torch, fa4_kernels, direction, head_dim, causal, seqlen):
    """One row of TFLOP/s by name, and notes: spread of the rounds, differences between results, what could not run."""
    batch, heads = TOKENS // seqlen, COLUMNS // head_dim
    tensors = [draw(torch, batch, seqlen, heads, head_dim) for _ in range(3)]
    dout = draw(torch, batch, seqlen, heads, head_dim)
    if direction == "forward":
        prepared = {n: (lambda c=c: c) for n, c in forward_calls(torch, fa4_kernels, tensors, causal).items()}
    else:
        prepared = backward_calls(torch, fa4_kernels, tensors, dout, causal)
    calls, found, errors = {}, {}, {}
    for name, prepare in prepared.items():
        try:
            call = prepare()
            results = call()
            found[name] = results if isinstance(results, tuple) else (results,)
            torch.cuda.synchronize()
            calls[name] = call
        except Exception as error:
            errors[name] = reason(error)
    off = differences({name: found[name] for name in calls}) if calls else {}
    errors |= {name: f"results differ by {worst:.3g}" for name, worst in off.items() if not worst <= LIMIT}
    found.clear()
    times = interleaved_ms(torch, calls, ROUNDS)
    flop = (4 if direction == "forward" else 10) * batch * heads * seqlen**2 * head_dim / (2 if causal else 1)
    row = {"head_dim": head_dim, "causal": causal, "seqlen": seqlen}
    row |= {name: float(f"{flop / statistics.median(rounds) / 1e9:.5g}") for name, rounds in times.items()}
    spread = {name: round(r[-1 - len(r) // 4] / r[len(r) // 4] - 1, 4) for name, r in times.items()}
    return row, {"spread": spread, "difference": off, "errors": errors}


def ratio_to_best(row, name="fa4_kernels"):
    """(ratio, who is best among the others), or None."""
    others = {peer: row[peer] for peer in PEERS if peer in row}
    if name not in row or not others:
        return None
    best = max(others, key=others.get)
    return row[name] / others[best], best


def title(row):
    """hd128 causal 4096."""
    return f"hd{row['head_dim']} {'causal' if row['causal'] else 'full'} {row['seqlen']}"


def show(direction, row, notes):
    """A line."""
    best = ratio_to_best(row)
    cells = [f"{n} {row[n]:.0f}" for n in row if n not in ("head_dim", "causal", "seqlen")]
    verdict = f"ours/{best[1]} {best[0]:.3f}{'' if best[0] >= GOALS[direction] else ' MISSED'}" if best else "no peer"
    print(f"{direction[:3]} {title(row):20s} {verdict:32s} {', '.join(cells)}", flush=True)
    for name, text in notes["errors"].items():
        print(f"    {name}: {text[:300]}", flush=True)


# --------------------------------------------------------------------------------------------------------------------
# Decoding


def captured(torch, step):
    """A replay of what `step` launches, as serving engines run it."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def decoding_step(torch, fa4_kernels, layout, batch, rows, num_splits, page_size=64):
    """(function that decodes once with each of several caches, their number, bytes of keys and values of one)."""
    keys, heads_kv, head_dim = (DECODING[name] for name in ("keys", "heads_kv", "head_dim"))
    size = 2 * batch * keys * heads_kv * head_dim * 2
    count = max(1, -(-ROTATED_BYTES // size))
    q = draw(torch, batch, rows, DECODING["heads_q"], head_dim)
    lengths, table = torch.full((batch,), keys, dtype=torch.int32, device=DEVICE), None
    shape = (batch, keys, heads_kv, head_dim)
    if layout == "paged":
        shape = (batch * keys // page_size, page_size, heads_kv, head_dim)
        table = torch.randperm(shape[0], device=DEVICE).int().view(batch, -1)
    caches = [(draw(torch, *shape), draw(torch, *shape)) for _ in range(count)]

    def step():
        for k, v in caches:
            options = {"causal": True, "num_splits": num_splits}
            fa4_kernels.flash_attn_with_kvcache(q, k, v, lengths, table, **options)

    return step, count, size


def time_decoding(torch, fa4_kernels, layout, batch, rows, num_splits):
    """A row: milliseconds of one step, and the share of the bandwidth that reading keys and values once takes."""
    row = {"layout": layout, "batch": batch, "rows": rows, "num_splits": num_splits}
    try:
        step, count, size = decoding_step(torch, fa4_kernels, layout, batch, rows, num_splits)
        replay = captured(torch, step)
        rounds = interleaved_ms(torch, {"step": replay}, ROUNDS)["step"]
        milliseconds = statistics.median(rounds) / count
        peak = next((rate for name, rate in PEAK_BYTES_A_SECOND.items() if name in torch.cuda.get_device_name()), None)
        row |= {"ms": milliseconds, "bytes": size}
        row["share"] = round(size / (milliseconds * 1e-3) / peak, 4) if peak else None
        print(f"decode {layout:6s} batch {batch:3d} rows {rows} splits {num_splits:2d}: {milliseconds * 1e3:8.1f} us"
              f"  {row['share'] or 0:.1%} of the bandwidth", flush=True)  # fmt: skip
    except Exception as error:
        row["error"] = reason(error)
        print(f"decode {layout} batch {batch} rows {rows} splits {num_splits}: {row['error'][:300]}", flush=True)
    return row


def copy_share(torch):
    """Bytes read and written a second by a copy on the device, TB/s: what the memory gives in this run."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    rounds = interleaved_ms(torch, {"copy": lambda: target.copy_(source)}, ROUNDS)["copy"]
    return 2 * source.numel() / (statistics.median(rounds) * 1e-3) / 1e12


def decoding_rows(torch, fa4_kernels):
    """Numbers of splits as chosen; then a sweep of them."""
    caches = [(layout, batch) for layout in ("paged", "varlen") for batch in BATCHES]
    cases = [(*cache, rows, 0) for cache in caches for rows in (1, 2, 4, 8)]
    cases += [(*cache, 1, num_splits) for cache in caches for num_splits in (1, 2, 4, 8, 16)]
    return [time_decoding(torch, fa4_kernels, *case) for case in cases]


# --------------------------------------------------------------------------------------------------------------------


def kernels_chosen(torch, fa4_kernels):
    """Ids of our kernels behind the rows of training shapes; raises if a call would go elsewhere."""
    ids = []
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            q = draw(torch, 1, 128, 1, head_dim)
            for op in ("fwd", "bwd"):
                decision = fa4_kernels.explain(q, q, q, causal=causal, op=op)
                if decision.entry is None or decision.pack.manifest.family != "fa4":
                    raise SystemExit(f"{op} at head_dim {head_dim} is not answered by our kernels: {decision}")
                ids.append(decision.entry.id)
    return ids


def summary(record):
    """Goals missed, by row."""
    missed = {}
    for direction in ("forward", "backward"):
        for row in record[f"{direction}_tflops"]:
            best = ratio_to_best(row)
            if best is None or best[0] < GOALS[direction]:
                missed[f"{direction} {title(row)}"] = None if best is None else round(best[0], 3)
    for row in record["decoding"]:
        if not row["num_splits"] and not (row.get("share") or 0) >= GOALS["decoding"]:
            missed[f"decoding {row['layout']} batch {row['batch']} rows {row['rows']}"] = row.get("share")
    return missed


def measure(torch, fa4_kernels, record, path):
    """Fills the record, row by row. Returns the number of things that could not run or differed."""
    errors = 0
    record |= {"forward_tflops": [], "backward_tflops": [], "notes": {}, "decoding": []}
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            for seqlen in SEQLENS:
                for direction in ("forward", "backward"):
                    try:
                        with torch.no_grad():
                            row, notes = compare(torch, fa4_kernels, direction, head_dim, causal, seqlen)
                    except Exception as error:
                        row = {"head_dim": head_dim, "causal": causal, "seqlen": seqlen}
                        notes = {"errors": {"row": reason(error)}}
                    record[f"{direction}_tflops"].append(row)
                    record["notes"][f"{direction} {title(row)}"] = notes
                    errors += len(notes["errors"])
                    show(direction, row, notes)
        write(record, path)
    with torch.no_grad():
        record["copy_terabytes_a_second"] = copy_share(torch)
        print(f"copy on the device: {record['copy_terabytes_a_second']:.2f} TB/s", flush=True)
        record["decoding"] = decoding_rows(torch, fa4_kernels)
    errors += sum("error" in row for row in record["decoding"])
    record["missed"] = summary(record)
    write(record, path)
    return errors


def child(arguments):
    import fa4_kernels
    import torch

    torch.manual_seed(1)
    record = setting(torch) | {"kernels": kernels_chosen(torch, fa4_kernels)}
    errors = measure(torch, fa4_kernels, record, arguments.out)
    print(f"goals missed: {json.dumps(record['missed'])}\n{errors} could not run or differed", flush=True)
    return 1 if errors else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel_dir")
    parser.add_argument("--out", default="compare.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return child(arguments) if arguments.child else run_installed(__file__, arguments.wheel_dir)


if __name__ == "__main__":
    sys.exit(main())
