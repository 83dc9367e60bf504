"""Check fa4_kernels inside torch on a GPU, from the wheels alone: compile, CUDA graphs, streams, training.

    python benchmarks/check_torch_on_device.py WHEEL_DIR --out record.json

* torch.compile(fullgraph=True) with inductor: gradients as in eager mode.
* Forward and backward captured in a CUDA graph after preload(): replays give the bits of an eager run.
* A side stream: the same bits.
* A small GPT, 200 steps with our attention, with torch's and with torch's again from the same start: the losses of ours
  differ from torch's by at most what bf16 makes of it (the mean of the last 20 steps within 0.02), and it has learnt:
  the loss is below that of guessing, ln 64, by 0.5.
* Host time of forward and backward together, beside torch's.

Exit status 1 if a check fails.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

from prove_backward_on_device import run_with_wheels

STEPS, BATCH, SEQLEN, WIDTH, HEADS, LAYERS, VOCABULARY = 200, 16, 256, 256, 4, 4, 64
LAST = 20
LOSS_TOLERANCE = 0.02


def inputs(torch, seqlen=1000, heads=4, heads_kv=2, head_dim=64):
    """q, k, v that require gradients."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    shapes = ((2, seqlen, heads, head_dim), *2 * ((2, seqlen, heads_kv, head_dim),))
    return [torch.randn(s, device="cuda", generator=generator).to(torch.bfloat16).requires_grad_() for s in shapes]


def loss_of(flash_attn_func):
    """A scalar of out and lse, summed in a fixed order."""

    def loss(q, k, v):
        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True, deterministic=True)
        return (out.float() ** 2).mean() + lse.mean()

    return loss


def eager_gradients(torch, flash_attn_func):
    tensors = inputs(torch)
    loss_of(flash_attn_func)(*tensors).backward()
    return [x.grad for x in tensors]


def check_compile(torch, flash_attn_func):
    """Largest difference of a gradient from eager mode, relative to the largest gradient."""
    expected, tensors = eager_gradients(torch, flash_attn_func), inputs(torch)
    torch.compile(loss_of(flash_attn_func), fullgraph=True)(*tensors).backward()
    worst = max(((x.grad - e).abs().max() / e.abs().max()).item() for x, e in zip(tensors, expected, strict=True))
    return {"passed": worst < 0.01, "worst": worst}


def check_graph(torch, flash_attn_func, preload):
    """A captured step, replayed ten times."""
    preload(select="*hd64*")
    expected, tensors = eager_gradients(torch, flash_attn_func), inputs(torch)
    loss = loss_of(flash_attn_func)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        loss(*tensors).backward()
    torch.cuda.synchronize()
    for x in tensors:
        x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss(*tensors).backward()
    equal = True
    for _ in range(10):
        for x in tensors:
            x.grad.zero_()
        graph.replay()
        equal &= all(torch.equal(x.grad, e) for x, e in zip(tensors, expected, strict=True))
    return {"passed": equal}


def check_stream(torch, flash_attn_func):
    """Forward and backward on a side stream while another is busy."""
    expected, tensors = eager_gradients(torch, flash_attn_func), inputs(torch)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy * 0.01
    with torch.cuda.stream(side):
        loss_of(flash_attn_func)(*tensors).backward()
    side.synchronize()
    return {"passed": all(torch.equal(x.grad, e) for x, e in zip(tensors, expected, strict=True))}


def make_gpt(torch, attend):
    """A GPT of LAYERS blocks; `attend(q, k, v)` takes and gives (batch, seqlen, heads, head_dim)."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x):
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
            x = x + self.project(attend(q, k, v).flatten(2))
            return x + self.mlp(self.norm2(x))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQLEN, WIDTH)
            self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens):
            return self.head(self.blocks(self.token(tokens) + self.place.weight))

    return Gpt().cuda()


def train(torch, attend):
    """Losses of STEPS steps. The data repeat with a period that differs from row to row: only attention can tell."""
    torch.manual_seed(0)
    model = make_gpt(torch, attend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator(device="cuda").manual_seed(2)
    losses = []
    for _ in range(STEPS):
        pattern = torch.randint(VOCABULARY, (BATCH, SEQLEN + 1), device="cuda", generator=generator)
        period = torch.randint(5, 40, (BATCH, 1), device="cuda", generator=generator)
        tokens = pattern.gather(1, torch.arange(SEQLEN + 1, device="cuda")[None] % period)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def check_training(torch, flash_attn_func):
    def ours(q, k, v):
        return flash_attn_func(q, k, v, causal=True)[0]

    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    curves = {"fa4_kernels": train(torch, ours), "sdpa": train(torch, theirs), "sdpa_again": train(torch, theirs)}
    ends = {name: statistics.mean(curve[-LAST:]) for name, curve in curves.items()}
    difference = abs(ends["fa4_kernels"] - ends["sdpa"])
    has_learnt = ends["fa4_kernels"] < math.log(VOCABULARY) - 0.5
    first = {name: curve[0] for name, curve in curves.items()}
    return {"passed": difference < LOSS_TOLERANCE and has_learnt, "ends": ends, "first": first, "curves": curves}


def host_microseconds(torch, flash_attn_func, calls=500):
    """Host time of forward and backward of a small problem, queued back to back; median of 5 rounds."""
    q = torch.randn(1, 128, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    t = q.transpose(1, 2)
    g, gt = torch.randn_like(q), torch.randn_like(t)

    def per_call(call):
        rounds = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            rounds.append((time.perf_counter() - start) / calls * 1e6)
        return statistics.median(rounds)

    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "fa4_kernels": per_call(lambda: torch.autograd.grad(flash_attn_func(q, q, q)[0], q, g)),
        "sdpa": per_call(lambda: torch.autograd.grad(sdpa(t, t, t), q, gt)),
    }


def child(arguments):
    import torch
    from fa4_kernels import flash_attn_func, preload

    results = {
        "training": check_training(torch, flash_attn_func),
        "graph": check_graph(torch, flash_attn_func, preload),
        "stream": check_stream(torch, flash_attn_func),
        "host_us": host_microseconds(torch, flash_attn_func),
        "compile": check_compile(torch, flash_attn_func),
    }
    for name, result in results.items():
        print(name, {key: value for key, value in result.items() if key != "curves"}, flush=True)
    record = {"device": torch.cuda.get_device_name(), "driver": arguments.driver, "torch": torch.__version__, **results}
    Path(arguments.out).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return 0 if all(result.get("passed", True) for result in results.values()) else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel_dir")
    parser.add_argument("--out", default="torch.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return child(arguments) if arguments.child else run_with_wheels(__file__, arguments.wheel_dir)


if __name__ == "__main__":
    sys.exit(main())
