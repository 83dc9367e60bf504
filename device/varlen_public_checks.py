"""Decoding beside the memory's bandwidth, and the public functions of packed attention: graphs, gradients, compile."""

import json
import math

from harness import median_ms, reason
from varlen_problems import PACKED, Drawn

PEAK_BYTES_A_SECOND = {"H200": 4.8e12, "H100": 3.35e12, "B200": 8e12, "B300": 8e12}


def time_decoding(torch, fa4_kernels, batch, heads_q, heads_kv, rows, keys, page_size, num_splits, causal=True):
    """Milliseconds of one step, and the share of the memory's bandwidth that reading keys and values once takes."""
    head_dim = 128
    q = torch.randn(batch, rows, heads_q, head_dim, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    table = None
    shape = (batch, keys, heads_kv, head_dim)
    if page_size:
        pages = batch * keys // page_size
        shape = (pages, page_size, heads_kv, head_dim)
        table = torch.randperm(pages, device="cuda").int().view(batch, -1)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def step(_):
        fa4_kernels.flash_attn_with_kvcache(q, k, v, lengths, table, causal=causal, num_splits=num_splits)

    milliseconds = median_ms(torch, step)
    peak = next((rate for name, rate in PEAK_BYTES_A_SECOND.items() if name in torch.cuda.get_device_name()), math.nan)
    share = 2 * batch * keys * heads_kv * head_dim * 2 / (milliseconds * 1e-3) / peak
    return {
        "batch": batch,
        "heads": f"{heads_q}/{heads_kv}",
        "rows": rows,
        "keys": keys,
        "page_size": page_size,
        "num_splits": num_splits,
        "ms": milliseconds,
        "bandwidth_share": share,
    }


def decoding_rows(torch, fa4_kernels):
    """Decoding over 16k keys: few and many sequences, with and without pages, split by choice and not at all."""
    rows = []
    for page_size in (0, 16, 64, 128):
        for batch, heads_q, heads_kv, queries in (
            (1, 32, 8, 1),
            (4, 32, 8, 1),
            (32, 32, 8, 1),
            (64, 32, 4, 1),
            (32, 32, 8, 4),
        ):
            for num_splits in (0, 1):
                try:
                    arguments = (batch, heads_q, heads_kv, queries, 16384, page_size, num_splits)
                    row = time_decoding(torch, fa4_kernels, *arguments)
                except Exception as error:
                    row = {"error": reason(error), "page_size": page_size, "batch": batch}
                rows.append(row)
                print("decode", json.dumps(row), flush=True)
    return rows


def check_graph(torch, fa4_kernels):
    """A captured step follows the lengths of the cache at each replay."""
    q = torch.randn(2, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 1024, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([100, 1000], dtype=torch.int32, device="cuda")
    call = lambda: fa4_kernels.flash_attn_with_kvcache(q, k, v, lengths, num_splits=2)[0]  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for numbers in ([100, 1000], [1024, 3], [0, 517]):
        lengths.copy_(torch.tensor(numbers, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, call()), f"lengths {numbers}"


def check_autograd(torch, fa4_kernels):
    """flash_attn_varlen_func with a sink: gradients against float64, sequence by sequence."""
    axes = {"dtype": "bf16", "head_dim": 128, "head_dim_v": 128, "mask": "causal", "layout": "varlen", "sink": True}
    drawn = Drawn(torch, PACKED[1], axes, torch.Generator(device="cuda").manual_seed(3))
    named = drawn.arguments()
    total = sum(PACKED[1].lengths_q)
    q, k, v = (named[name][:total].clone().requires_grad_() for name in "qkv")
    sink = drawn.sink.clone().requires_grad_()
    starts = (named["cu_seqlens_q"], named["cu_seqlens_k"])
    out, lse = fa4_kernels.flash_attn_varlen_func(q, k, v, *starts, causal=True, learnable_sink=sink, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (q, k, v, sink), (dout, dlse))
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v, sink)]
    loss = 0
    for place in drawn.places():
        parts = [x[place] for x in inputs[:3]]
        scores = torch.einsum("qhd,khd->hqk", *parts[:2]) * drawn.scale
        n = scores.shape[1]
        scores = scores.masked_fill(torch.ones(n, n, device="cuda").triu(1).bool(), -math.inf)
        logits = torch.cat([scores, inputs[3][:, None, None].expand(-1, n, 1)], -1)
        one = torch.einsum("hqk,khd->qhd", torch.softmax(logits, -1)[..., :-1], parts[2])
        loss = loss + (one * dout[place].double()).sum() + (torch.logsumexp(logits, -1) * dlse[:, place].double()).sum()
    for name, a, b in zip(("dq", "dk", "dv", "dsink"), found, torch.autograd.grad(loss, inputs), strict=True):
        off, largest = (a.double() - b).abs().max().item(), b.abs().max().item()
        assert off <= 0.03 * largest, f"{name} is off by {off:.3g} of {largest:.3g}"


def check_compile(torch, fa4_kernels):
    """torch.compile(fullgraph=True) gives what eager mode gives."""
    q, k, v = (torch.randn(300, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    starts = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    call = lambda q, k, v: fa4_kernels.flash_attn_varlen_func(q, k, v, starts, starts, causal=True)[0]  # noqa: E731
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v))


def public_checks(torch, fa4_kernels):
    """Name -> `pass` or what went wrong."""
    results = {}
    for check in (check_graph, check_autograd, check_compile):
        try:
            check(torch, fa4_kernels)
            results[check.__name__] = "pass"
        except Exception as error:
            results[check.__name__] = reason(error)
        print(check.__name__, results[check.__name__], flush=True)
    return results
