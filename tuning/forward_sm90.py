"""Development run of the sm90a forward kernel on a Hopper GPU: checks against float64, then times tuning candidates.

Needs torch, nvidia-cutlass-dsl and tvm_ffi; flash-attn-4 (`flash_attn.cute`) is timed beside it when it imports.
Candidates are compiled and checked by several processes at once; timings run one at a time. Prints tables and writes
JSON lines to --out.

    python tuning/forward_sm90.py --out DIR --only '128.*full' --phases check,time

This is the tool for choosing tuning rows; the proof of shipped kernels is device/prove_forward.py.
"""

import argparse
import json
import math
import multiprocessing
import re
import statistics
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

UNBOUNDED = 2**30
TIMED_WINDOW = 1024  # keys to the left in timed local variants
GUARD = 5  # rows of O and LSE beyond each sequence that must stay untouched
EDGE_SEQLENS = (1, 17, 127, 128, 129, 1000, 4096)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One specialization under one name. `tuning` are keyword arguments of ForwardSm90."""

    name: str
    dtype: str = "bf16"
    head_dim: int = 128
    head_dim_v: int = 0
    mask: str = "full"
    tuning: dict = field(default_factory=dict)
    thorough: bool = False  # all cases, not only the short list


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Shapes and inputs of one check."""

    batch: int = 1
    seqlen_q: int
    seqlen_k: int
    heads_q: int = 1
    heads_kv: int = 1
    window: tuple = (UNBOUNDED, UNBOUNDED)
    inputs: str = "normal"  # normal, large (q x 6), rising (maxima rise from block to block), strided (views)


def groups(count: int) -> dict:
    """Register split for `count` consumer warpgroups."""
    registers = {1: (240, 56), 2: (240, 24), 3: (160, 32)}[count]
    return {
        "tile_m": 64 * count,
        "consumer_warpgroups": count,
        "consumer_registers": registers[0],
        "producer_registers": registers[1],
    }


def tuned(count=2, n=128, stages=2, **more) -> dict:
    return {**groups(count), "tile_n": n, "kv_stages": stages, **more}


def symbol_of(name: str) -> str:
    return "fwd_dev_" + re.sub(r"\W", "_", name)


def compile_candidate(candidate: Candidate):
    """The compiled host function, callable with torch tensors."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from kernels_src.forward.sm90 import ForwardSm90

    dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[candidate.dtype]
    head_dim_v = candidate.head_dim_v or candidate.head_dim
    kernel = ForwardSm90(
        symbol=symbol_of(candidate.name),
        dtype=dtype,
        head_dim=candidate.head_dim,
        head_dim_v=head_dim_v,
        mask=candidate.mask,
        **candidate.tuning,
    )

    def tensor(last):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        shape = (cute.sym_int(), cute.sym_int(), cute.sym_int(), last)
        return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=16)

    lse_shape = (cute.sym_int(), cute.sym_int(), cute.sym_int())
    lse = make_fake_tensor(Float32, lse_shape, stride=(cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)
    q, k, v, out = (tensor(n) for n in (candidate.head_dim, candidate.head_dim, head_dim_v, head_dim_v))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = "--gpu-arch sm_90a --enable-tvm-ffi"
    return cute.compile(kernel, q, k, v, out, lse, Float32(1), Int32(0), Int32(0), Int32(132), stream, options=options)


def problems_for(candidate: Candidate) -> list[Problem]:
    """Short list for every candidate; the thorough ones get every edge."""
    short = [
        Problem(seqlen_q=129, seqlen_k=129),
        Problem(batch=2, seqlen_q=1000, seqlen_k=1000, heads_q=4, heads_kv=1, inputs="strided"),
        Problem(seqlen_q=300, seqlen_k=1025, heads_q=8, heads_kv=8, inputs="large"),
        Problem(seqlen_q=1025, seqlen_k=300, heads_q=2, heads_kv=2, inputs="rising"),
        Problem(batch=2, seqlen_q=2048, seqlen_k=2048, heads_q=10, heads_kv=2),
    ]
    edges = [
        *(Problem(seqlen_q=n, seqlen_k=n, heads_q=2, heads_kv=2) for n in EDGE_SEQLENS),
        *(Problem(seqlen_q=m, seqlen_k=n, batch=2, heads_q=8) for m in (1, 64, 257) for n in (1, 63, 129, 1000)),
        *(Problem(seqlen_q=777, seqlen_k=n, heads_q=4, heads_kv=4, inputs="rising") for n in (777, 2100)),
        Problem(seqlen_q=4096, seqlen_k=1, heads_q=1, heads_kv=1),
        Problem(seqlen_q=64, seqlen_k=32, inputs="large"),
        Problem(batch=5, seqlen_q=33, seqlen_k=4096, heads_q=6, heads_kv=2, inputs="rising"),
    ]
    problems = short + (edges if candidate.thorough else [])
    if candidate.mask != "local":
        return problems
    windows = [(64, 0), (0, 0), (UNBOUNDED, 5), (100, UNBOUNDED), (200, 300), (-3, 200), (256, -7), (-4000, UNBOUNDED)]
    if not candidate.thorough:
        windows = windows[:2] + windows[4:5]
    smaller = [p for p in problems if p.seqlen_q * p.seqlen_k < 2**23]
    return [Problem(**{**p.__dict__, "window": window}) for p in smaller for window in windows]


def draw(problem: Problem, candidate: Candidate, seed: int):
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[candidate.dtype]
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    b, sq, sk, d = problem.batch, problem.seqlen_q, problem.seqlen_k, candidate.head_dim
    dv = candidate.head_dim_v or d
    q, k, v = normal(b, sq, problem.heads_q, d), normal(b, sk, problem.heads_kv, d), normal(b, sk, problem.heads_kv, dv)
    if problem.inputs == "large":
        q = q * 6
    if problem.inputs == "rising":
        k = k * torch.linspace(12, 0.1, sk, device="cuda")[None, :, None, None]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if problem.inputs == "strided":
        q = torch.cat([q, q + 1], dim=2)[:, :, : problem.heads_q]
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        v = torch.cat([v - 1, v], dim=1)[:, sk:]
    return q, k, v


def reference(q, k, v, scale: float, mask: str, window: tuple, dtype):
    """(O, lse) of the definition, computed in `dtype`."""
    import torch

    ratio = q.shape[2] // k.shape[2]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(ratio, 2), v.to(dtype).repeat_interleave(ratio, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q * scale, k)
    sq, sk = q.shape[1], k.shape[1]
    position = torch.arange(sq, device="cuda")[:, None] + sk - sq
    key = torch.arange(sk, device="cuda")[None]
    left, right = {"full": (UNBOUNDED, UNBOUNDED), "causal": (UNBOUNDED, 0), "local": window}[mask]
    hidden = (key < position - left) | (key > position + right)
    scores.masked_fill_(hidden, -math.inf)
    lse = torch.logsumexp(scores, -1)
    probabilities = torch.nan_to_num(torch.softmax(scores, -1))
    return torch.einsum("bhij,bjhd->bihd", probabilities, v), lse


def guarded(problem: Problem, candidate: Candidate):
    """Outputs inside larger buffers of NaN: (out, lse, function that says whether the surroundings are untouched)."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[candidate.dtype]
    dv = candidate.head_dim_v or candidate.head_dim
    b, sq, h = problem.batch, problem.seqlen_q, problem.heads_q
    out = torch.full((b, sq + GUARD, h, dv), math.nan, dtype=dtype, device="cuda")
    lse = torch.full((b, h, sq + GUARD), math.nan, device="cuda")

    def untouched():
        return bool(out[:, sq:].isnan().all()) and bool(lse[:, :, sq:].isnan().all())

    return out[:, :sq], lse[:, :, :sq], untouched


def check(function, candidate: Candidate, problem: Problem, seed: int) -> dict:
    """One check: error against float64 within twice torch's own, guards, repeats bit-equal."""
    import torch

    q, k, v = draw(problem, candidate, seed)
    scale = candidate.head_dim**-0.5
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    results = []
    for _ in range(2):
        out, lse, untouched = guarded(problem, candidate)
        function(q, k, v, out, lse, scale, problem.window[0], problem.window[1], sms)
        torch.cuda.synchronize()
        results.append((out, lse, untouched()))
    (out, lse, clean), (out2, lse2, clean2) = results
    exact, exact_lse = reference(q, k, v, scale, candidate.mask, problem.window, torch.float64)
    own, _ = reference(q, k, v, scale, candidate.mask, problem.window, q.dtype)
    error = (out.double() - exact).abs().max().item()
    rounding = 2 * (exact.to(q.dtype).double() - exact).abs().max().item()
    allowed = 2 * (own.double() - exact).abs().max().item() + rounding
    finite = exact_lse.isfinite()
    lse_error = (lse.double() - exact_lse)[finite].abs().max().item() if finite.any() else 0.0
    lse_allowed = 1e-4 + 2e-6 * (exact_lse[finite].abs().max().item() if finite.any() else 0.0)
    empty_ok = bool((lse[~finite] == -math.inf).all()) and bool((out.transpose(1, 2)[~finite] == 0).all())
    verdicts = {
        "value": error <= allowed,
        "lse": lse_error <= lse_allowed,
        "empty_rows": empty_ok,
        "guards": clean and clean2,
        "repeat": bool((out == out2).all()) and bool((lse == lse2).all()),
    }
    failed = sorted(name for name, ok in verdicts.items() if not ok)
    return {"error": error, "allowed": allowed, "lse_error": lse_error, "failed": failed}


def rounds_ms(calls: dict, inputs, options) -> dict[str, list[float]]:
    """Device times of every call, in rounds over all of them so that clock and temperature drift hit each alike.

    A round times `options.repeats` launches of each call between one pair of events, rotating the inputs; with several
    launches queued, the host time of a call does not count while it is shorter than the kernel. The order turns by one
    from round to round: under a power limit whoever follows a weaker kernel runs at higher clocks.
    """
    import torch

    times, order = {name: [] for name in calls}, list(calls.items())
    for round_ in range(options.rounds + 1):
        order = [*order[1:], order[0]]
        for name, call in order:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call(*inputs[0])  # keeps the device busy while the start event and the next launches are queued
            start.record()
            for i in range(options.repeats):
                call(*inputs[i % len(inputs)])
            stop.record()
            stop.synchronize()
            if round_:  # the first round warms up
                times[name].append(start.elapsed_time(stop) / options.repeats)
    return times


def flops(b, s, h, d, dv, mask: str) -> float:
    visible = {"full": s, "causal": s / 2, "local": min(TIMED_WINDOW + 1, s)}[mask]
    return 2.0 * b * h * s * visible * (d + dv)


def timing_inputs(candidate: Candidate, batch: int, seqlen: int, heads: int):
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[candidate.dtype]
    d, dv = candidate.head_dim, candidate.head_dim_v or candidate.head_dim
    sets = []
    for _ in range(3):
        q, k = (torch.randn(batch, seqlen, heads, d, device="cuda", dtype=dtype) for _ in range(2))
        v = torch.randn(batch, seqlen, heads, dv, device="cuda", dtype=dtype)
        sets.append((q, k, v))
    return sets


def our_call(function, candidate: Candidate, inputs):
    """call(q, k, v) with outputs allocated once."""
    import torch

    batch, seqlen, heads, _ = inputs[0][0].shape
    out = torch.empty_like(inputs[0][2])
    lse = torch.empty(batch, heads, seqlen, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    scale, window = candidate.head_dim**-0.5, (TIMED_WINDOW, 0)
    return lambda q, k, v: function(q, k, v, out, lse, scale, *window, sms)


def peer_calls(candidate: Candidate) -> dict:
    """Other implementations of the same problem: name -> call(q, k, v)."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    causal, is_local = candidate.mask == "causal", candidate.mask == "local"
    window = (TIMED_WINDOW, 0) if is_local else (None, None)

    def sdpa(backend):
        def call(q, k, v):
            with sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal
                )

        return call

    calls = {} if is_local else {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION)}
    try:
        from flash_attn.cute import flash_attn_func

        calls["fa4"] = lambda q, k, v: flash_attn_func(q, k, v, causal=causal, window_size=window)
    except ImportError as error:
        print("no flash_attn.cute:", error)
    return calls


def group_of(candidate: Candidate) -> str:
    return f"{candidate.dtype} hd{candidate.head_dim}/{candidate.head_dim_v or candidate.head_dim} {candidate.mask}"


def compile_all(candidates: list[Candidate], results) -> list:
    ready = []
    for candidate in candidates:
        try:
            ready.append((candidate, compile_candidate(candidate)))
        except Exception:
            results.put({"kind": "broken", "name": candidate.name, "log": traceback.format_exc()[-1500:]})
    return ready


def check_all(ready: list, options, results) -> None:
    for candidate, function in ready:
        for i, problem in enumerate(problems_for(candidate)):
            if time.time() > options.check_until:
                results.put({"kind": "skipped", "name": candidate.name, "log": f"from check {i} on"})
                return
            try:
                row = check(function, candidate, problem, seed=i + options.seed)
            except Exception:
                row = {"failed": ["exception"], "log": traceback.format_exc()[-700:]}
            results.put({"kind": "check", "name": candidate.name, "problem": problem.__dict__, **row})


def usable_peers(candidate: Candidate, results) -> dict:
    """Peers that run this problem; the first call compiles what compiles at first use."""
    usable = {}
    for name, call in peer_calls(candidate).items():
        try:
            call(*timing_inputs(candidate, 1, 512, 2)[0])
            usable[name] = call
        except Exception:
            results.put({"kind": "skipped", "name": f"{name} {candidate.name}", "log": traceback.format_exc()[-200:]})
    return usable


def time_all(ready: list, others: dict, options, results) -> None:
    """Times a group, candidates and peers side by side, at every size."""
    kind = ready[0][0]
    for batch, seqlen, heads in options.sizes:
        if time.time() > options.time_until:
            results.put({"kind": "skipped", "name": group_of(kind), "log": f"timing at {seqlen}"})
            return
        inputs = timing_inputs(kind, batch, seqlen, heads)
        calls = {candidate.name: our_call(function, candidate, inputs) for candidate, function in ready} | others
        for name, times in rounds_ms(calls, inputs, options).items():
            ms = statistics.median(times)
            work = flops(batch, seqlen, heads, kind.head_dim, kind.head_dim_v or kind.head_dim, kind.mask)
            row = {"batch": batch, "seqlen": seqlen, "heads": heads, "ms": ms, "tflops": work / ms * 1e-9}
            spread = {"best": work / min(times) * 1e-9, "worst": work / max(times) * 1e-9}
            results.put({"kind": "time", "group": group_of(kind), "name": name, **row, **spread})


def work(candidates, options, barrier, lock, results):
    """One process, one group of candidates: compiles and checks, waits for all others, then times in turn."""
    ready = compile_all(candidates, results)
    if "check" in options.phases:
        check_all(ready, options, results)
    others = usable_peers(candidates[0], results) if "time" in options.phases and options.peers else {}
    barrier.wait()
    if "time" in options.phases and ready:
        with lock:
            time_all(ready, others, options, results)
    results.put(None)


def names_of(rows: list[dict]) -> set:
    return {row["name"] for row in rows}


def report(rows: list[dict]) -> None:
    for row in rows:
        if row["kind"] in ("broken", "skipped"):
            print(row["kind"].upper(), row["name"], row["log"])
    checks = [row for row in rows if row["kind"] == "check"]
    bad = [row for row in checks if row["failed"]]
    for row in bad[:12]:
        print("FAILED", {key: value for key, value in row.items() if key != "kind"})
    for name in sorted(names_of(bad)):
        mine = [row for row in checks if row["name"] == name]
        print(f"  {name}: {sum(bool(row['failed']) for row in mine)} of {len(mine)} failed")
    ratios = [row["error"] / row["allowed"] for row in checks if row.get("allowed")]
    print(f"checks: {len(checks)}, failed: {len(bad)}, worst error / allowed: {max(ratios, default=0):.3f}")
    times = [row for row in rows if row["kind"] == "time"]
    for group in sorted({row["group"] for row in times}):
        print(group)
        mine = [row for row in times if row["group"] == group]
        tables = {
            name: {row["seqlen"]: row["tflops"] for row in mine if row["name"] == name} for name in names_of(mine)
        }
        for name, cells in sorted(tables.items(), key=lambda item: -max(item[1].values())):
            print("  ", " ".join(f"{s}:{cells[s]:6.1f}" for s in sorted(cells)), name.removeprefix(group.split(" ")[0]))


def main() -> None:
    from forward_sm90_candidates import CANDIDATES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--only", default="", help="regular expression over candidate names")
    parser.add_argument("--rows-only", action="store_true", help="only the rows of fa4build/matrix/tuning.py")
    parser.add_argument("--phases", default="check,time")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4, help="launches of each candidate in a round")
    parser.add_argument("--seed", type=int, default=0, help="shifts the random inputs of the checks")
    parser.add_argument("--check-seconds", type=float, default=150)
    parser.add_argument("--time-seconds", type=float, default=300)
    parser.add_argument("--peers", type=int, default=1)
    options = parser.parse_args()
    options.sizes = [(32, 1024, 16), (8, 4096, 16), (2, 16384, 16)]
    options.check_until = time.time() + options.check_seconds
    options.time_until = time.time() + options.time_seconds
    candidates = [c for c in CANDIDATES if re.search(options.only, c.name) and (c.thorough or not options.rows_only)]
    groups_ = sorted({group_of(c) for c in candidates})
    shares = [[c for c in candidates if group_of(c) == group] for group in groups_]
    context = multiprocessing.get_context("spawn")
    barrier, lock, results = context.Barrier(len(shares)), context.Lock(), context.Queue()
    targets = [(work, (share, options, barrier, lock, results)) for share in shares]
    processes = [context.Process(target=target, args=args, daemon=True) for target, args in targets]
    start = time.time()
    for process in processes:
        process.start()
    rows, open_ends = [], len(processes)
    with (options.out / "forward_sm90_dev.jsonl").open("w") as log:
        while open_ends:
            try:
                row = results.get(timeout=5)
            except Exception:
                if any(process.exitcode not in (None, 0) for process in processes):
                    print("a process died:", [process.exitcode for process in processes])
                    break
                if time.time() > options.time_until + 60:
                    print("time is up")
                    break
                continue
            if row is None:
                open_ends -= 1
                continue
            rows.append(row)
            log.write(json.dumps(row) + "\n")
            log.flush()
    report(rows)
    import torch

    print(torch.cuda.get_device_name(), "torch", torch.__version__, f"{time.time() - start:.0f} s")
    sys.exit(any(row["kind"] == "broken" or row.get("failed") for row in rows) or open_ends > 0)


if __name__ == "__main__":
    main()
