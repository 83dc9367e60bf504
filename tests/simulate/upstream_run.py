"""One upstream operator in the simulator, as a process: `python -m tests.simulate.upstream_run '<json>'` prints
its errors as JSON.

The JSON has `op` (fwd or bwd), shapes, `schedule`, `checks`. A process each, because the package reads the target
from the environment when it is imported.
"""

import json
import sys
from itertools import pairwise

import numpy as np

from fa4build.simulate.units.float_formats import e4m3_to_f32, f32_to_bf16_rn, f32_to_e4m3_rn_satfinite
from tests.simulate.upstream_trace import Host, trace

# What upstream's own kernels do and the rules would object to: barriers left half complete by pipeline tails, a store
# not waited for before exit, warps of one warpgroup with different register budgets, tensor memory handed from thread
# to thread by barriers without tcgen05 fences and wait::ld.
KNOWN = ("R5-exit", "R7w", "R9-register", "R12", "R14", "R15-after", "R15-before")


def bits(values: np.ndarray) -> np.ndarray:
    """bf16 bits of float values."""
    return f32_to_bf16_rn(values.astype(np.float32).view(np.uint32))


def value(array: np.ndarray) -> np.ndarray:
    """float64 of bf16 bits."""
    return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def attention(q, k, v, visible):
    """O, natural-log LSE and probabilities of float64 attention."""
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    probability = weights / total
    return np.einsum("bhqk,bkhd->bqhd", probability, v), (np.log(total) + top)[..., 0], probability


def visibility(case: dict) -> np.ndarray:
    """Which key each query sees: causal aligned to the last query, or a window to the left."""
    sq, sk = case["seqlen_q"], case["seqlen_k"]
    i, j = np.arange(sq)[:, None] + sk - sq, np.arange(sk)[None]
    if case.get("window"):
        return (j <= i) & (j >= i - case["window"])
    return j <= i if case["causal"] else np.ones((sq, sk), bool)


def spread(kv: np.ndarray, group: int) -> np.ndarray:
    """KV heads repeated for the query heads that read them."""
    return np.repeat(kv, group, axis=2)


def gather(gradient: np.ndarray, group: int) -> np.ndarray:
    """Gradients of repeated heads summed."""
    b, s, h, d = gradient.shape
    return gradient.reshape(b, s, h // group, group, d).sum(3)


def forward(case: dict, options: dict) -> dict:
    """Largest errors of O and LSE."""
    fp8 = case.get("fp8", False)

    def operator(torch, interface):
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        if case.get("varlen"):
            return _varlen_forward(torch, interface, case)
        q, k, v = (torch.empty(shape, dtype=dtype, device="cuda") for shape in _shapes(case))
        extra = {"window_size_left": case["window"], "window_size_right": 0} if case.get("window") else {}
        if case.get("num_splits"):
            extra["num_splits"] = case["num_splits"]
        out, lse, *_ = interface._flash_attn_fwd(q, k, v, causal=case["causal"], return_lse=True, **extra)
        return q, k, v, out, lse

    calls, tensors = trace(operator)
    host = Host()
    q, k, v, out, lse = (host.array(t) for t in tensors[:5])
    rng = np.random.default_rng(case.get("seed", 1))
    for array in (q, k, v):
        sample = rng.standard_normal(array.shape).astype(np.float32)
        array[...] = f32_to_e4m3_rn_satfinite(sample.view(np.uint32)) if fp8 else bits(sample)
    if case.get("varlen"):
        return _varlen_errors(host, calls, tensors, case, options)
    executed = host.run(calls, **options)
    read = (lambda x: e4m3_to_f32(x).view(np.float32).astype(np.float64)) if fp8 else value
    group = case["heads_q"] // case["heads_kv"]
    expected, expected_lse, _ = attention(read(q), spread(read(k), group), spread(read(v), group), visibility(case))
    return {
        "out": float(np.abs(value(out) - expected).max()),
        "lse": float(np.abs(lse - expected_lse).max()),
        "warp_instructions": executed,
        "clusters": host.clusters,
    }


def _varlen_forward(torch, interface, case: dict) -> tuple:
    """Sequences one after the other, told apart by cumulative lengths."""
    heads, d, count = case["heads_q"], case["head_dim"], len(case["varlen"])
    total = sum(case["varlen"])
    q, k, v = (torch.empty(total, heads, d, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    starts = torch.empty(count + 1, dtype=torch.int32, device="cuda")
    longest = max(case["varlen"])
    out, lse, *_ = interface._flash_attn_fwd(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest,
        causal=case["causal"], return_lse=True,
    )  # fmt: skip
    return q, k, v, out, lse, starts


def _varlen_errors(host: Host, calls: list, tensors: tuple, case: dict, options: dict) -> dict:
    """Each sequence against attention of its own."""
    q, k, v, out, lse, starts = (host.array(t) for t in tensors)
    starts[...] = np.cumsum([0, *case["varlen"]])
    executed = host.run(calls, **options)
    worst_out = worst_lse = 0.0
    for first, last in pairwise(starts.tolist()):
        part = slice(first, last)
        shape = {**case, "seqlen_q": last - first, "seqlen_k": last - first}
        expected, expected_lse, _ = attention(
            value(q[None, part]), value(k[None, part]), value(v[None, part]), visibility(shape)
        )
        worst_out = max(worst_out, float(np.abs(value(out[part]) - expected[0]).max()))
        worst_lse = max(worst_lse, float(np.abs(lse[:, part] - expected_lse[0]).max()))
    return {"out": worst_out, "lse": worst_lse, "warp_instructions": executed, "clusters": host.clusters}


def _shapes(case: dict) -> tuple:
    d, dv = case["head_dim"], case.get("head_dim_v", case["head_dim"])
    b, sq, sk = case.get("batch", 1), case["seqlen_q"], case["seqlen_k"]
    return (b, sq, case["heads_q"], d), (b, sk, case["heads_kv"], d), (b, sk, case["heads_kv"], dv)


def backward(case: dict, options: dict) -> dict:
    """Largest errors of dQ, dK and dV."""

    def operator(torch, interface):
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in _shapes(case))
        out, dout = torch.empty_like(q), torch.empty_like(q)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device="cuda")
        deterministic = case.get("deterministic", False)
        gradients = interface._flash_attn_bwd(
            q, k, v, out, dout, lse, causal=case["causal"], deterministic=deterministic
        )
        return q, k, v, out, dout, lse, *gradients[:3]

    calls, tensors = trace(operator)
    host = Host()
    q, k, v, out, dout, lse, dq, dk, dv = (host.array(t) for t in tensors)
    rng = np.random.default_rng(case.get("seed", 1))
    for array in (q, k, v, dout):
        array[...] = bits(rng.standard_normal(array.shape))
    group = case["heads_q"] // case["heads_kv"]
    keys, values = spread(value(k), group), spread(value(v), group)
    expected, expected_lse, p = attention(value(q), keys, values, visibility(case))
    out[...], lse[...] = bits(expected), expected_lse
    executed = host.run(calls, **options)
    g, scale = value(dout), 1 / np.sqrt(case["head_dim"])
    row = np.einsum("bqhd,bqhd->bhq", g, expected)
    ds = p * (np.einsum("bqhd,bkhd->bhqk", g, values) - row[..., None])
    return {
        "dq": float(np.abs(value(dq) - np.einsum("bhqk,bkhd->bqhd", ds, keys) * scale).max()),
        "dk": float(np.abs(value(dk) - gather(np.einsum("bhqk,bqhd->bkhd", ds, value(q)) * scale, group)).max()),
        "dv": float(np.abs(value(dv) - gather(np.einsum("bhqk,bqhd->bkhd", p, g), group)).max()),
        "warp_instructions": executed,
        "clusters": host.clusters,
    }


def main() -> None:
    """Runs the case given as JSON and prints the result as the last line."""
    case = json.loads(sys.argv[1])
    options = {"schedule": case.get("schedule", "eager"), "seed": case.get("seed", 1)}
    if case.get("checks"):
        options.update(checks=True, allowed=KNOWN)
    print(json.dumps((forward if case["op"] == "fwd" else backward)(case, options)))


if __name__ == "__main__":
    main()
