"""Check on a GPU that torch's own attention runs on our kernels once they are provided, with the wheels alone.

    python device/check_torch_backend.py WHEEL_DIR --out torch_backend.json

`F.scaled_dot_product_attention` (eager, torch.compile, CUDA graphs) and `torch.nn.attention.varlen` against float64,
with gradients; what our kernels do not compute goes to torch and is counted; host time of a step beside torch's
kernels in the same process. Exit status 1 if a check fails.
"""

import argparse
import statistics
import sys
import time

from harness import run_checks, run_installed, setting

DEVICE = "cuda"
LIMIT = 0.02  # relative to the largest number; bf16 gives 0.004 to 0.01


def reference(torch, q, k, v, causal):
    """(batch, heads, seqlen, head_dim), float64, bottom right."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, -1) @ v


def off(found, expected):
    """Largest difference, relative to the largest number expected."""
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


def drawn(torch, *shape):
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)


class Checks:
    def __init__(self, torch, fa4_kernels):
        self.torch, self.fa4 = torch, fa4_kernels
        self.attend = torch.nn.functional.scaled_dot_product_attention

    def answered(self, work):
        """What `work` returned, and how many calls of each operator ours answered and kept meanwhile."""
        from fa4_kernels import counts

        counts.reset()
        result = work()
        self.torch.cuda.synchronize()
        return result, counts.served()

    def values(self, head_dim, causal, attend=None, heads_kv=8):
        torch = self.torch
        q, k, v = drawn(torch, 2, 8, 777, head_dim), *(drawn(torch, 2, heads_kv, 777, head_dim) for _ in range(2))
        dout = torch.randn_like(q)
        options = {"is_causal": causal} | ({"enable_gqa": True} if heads_kv != 8 else {})

        def work():
            out = (attend or self.attend)(q, k, v, **options)
            return out, *torch.autograd.grad(out, (q, k, v), dout)

        found, served = self.answered(work)
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        expected = reference(torch, *wide, causal)
        right = (expected, *torch.autograd.grad(expected, wide, dout.double()))
        worst = max(off(a, b) for a, b in zip(found, right, strict=True))
        answered = sum(served.answered.values())
        return {"passed": worst < LIMIT and answered == 2 and not served.kept, "worst": worst, "answered": answered,
                "kept": {str(key): count for key, count in served.kept.items()}}  # fmt: skip

    def compiled(self):
        torch = self.torch
        return self.values(
            128, True, torch.compile(lambda q, k, v, is_causal: self.attend(q, k, v, is_causal=is_causal))
        )

    def varlen(self):
        torch = self.torch
        from torch.nn.attention.varlen import varlen_attn

        lengths = [100, 1, 333, 57]
        starts = torch.tensor([0, 100, 101, 434, 491], dtype=torch.int32, device=DEVICE)
        q, dout = drawn(torch, 491, 4, 128), torch.randn(491, 4, 128, device=DEVICE, dtype=torch.bfloat16)
        window = {"window_size": (-1, 0)}
        if "is_causal" in varlen_attn.__code__.co_varnames[: varlen_attn.__code__.co_argcount]:
            window = {"is_causal": True}  # torch 2.11

        def work():
            out = varlen_attn(q, q, q, starts, starts, max(lengths), max(lengths), **window)
            return out, torch.autograd.grad(out, q, dout)[0]

        (out, gradient), served = self.answered(work)
        wide = q.detach().double().requires_grad_()
        parts = [x.transpose(0, 1)[None] for x in wide.split(lengths)]
        expected = torch.cat([reference(torch, x, x, x, True)[0].transpose(0, 1) for x in parts])
        right = torch.autograd.grad(expected, wide, dout.double())[0]
        worst = max(off(out, expected), off(gradient, right))
        return {"passed": worst < LIMIT and sum(served.answered.values()) == 2, "worst": worst,
                "kept": {str(key): count for key, count in served.kept.items()}}  # fmt: skip

    def kept(self):
        """A boolean mask, dropout and float32 are torch's."""
        torch = self.torch
        q = drawn(torch, 1, 2, 128, 64)

        def work():
            return self.attend(q, q, q, dropout_p=0.1), self.attend(q.float(), q.float(), q.float())

        _, served = self.answered(work)
        return {"passed": not served.answered, "kept": {str(key): count for key, count in served.kept.items()}}

    def graph(self):
        torch = self.torch
        q = torch.randn(2, 8, 500, 128, device=DEVICE, dtype=torch.bfloat16)
        self.attend(q, q, q, is_causal=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.attend(q, q, q, is_causal=True)
        q.copy_(torch.randn_like(q))
        graph.replay()
        worst = off(out, reference(torch, q.double(), q.double(), q.double(), True))
        return {"passed": worst < LIMIT, "worst": worst}

    def decoding(self):
        torch = self.torch
        q, k = (torch.randn(3, 8, rows, 128, device=DEVICE, dtype=torch.bfloat16) for rows in (1, 5000))
        out, served = self.answered(lambda: self.attend(q, k, k))
        worst = off(out, reference(torch, q.double(), k.double(), k.double(), False))
        return {"passed": worst < LIMIT and sum(served.answered.values()) == 1, "worst": worst}

    def host_time(self, provide):
        """Microseconds of host time a call, by who answers; a step is forward and backward."""
        torch = self.torch
        q = [drawn(torch, 2, 16, 1024, 128) for _ in range(3)]
        dout = torch.randn_like(q[0])

        def forward():
            with torch.no_grad():
                self.attend(*q, is_causal=True)

        def step():
            torch.autograd.grad(self.attend(*q, is_causal=True), q, dout)

        def fa4_step():
            out, _ = self.fa4.flash_attn_func(*(x.transpose(1, 2) for x in q), causal=True)
            torch.autograd.grad(out, q, dout.transpose(1, 2))

        from torch.nn.attention import SDPBackend, sdpa_kernel

        found = {}
        for name in ("torch, as it chooses", "torch, flash", "ours through torch"):
            provided = provide("torch") if name.startswith("ours") else None
            for what, call in (("forward", forward), ("step", step)):
                if name == "torch, flash":
                    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                        found[f"{name}, {what}"] = host_us(torch, call)
                else:
                    found[f"{name}, {what}"] = host_us(torch, call)
            if provided:
                provided.remove()
        found["ours, step"] = host_us(torch, fa4_step)
        return {"passed": True, "us": found}


def host_us(torch, call, repeats=60, rounds=7):
    """Median over rounds of the mean host time of a call whose device work is queued."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - started) / repeats * 1e6)
    torch.cuda.synchronize()
    return round(statistics.median(times[1:]), 2)


def child(arguments):
    import fa4_kernels
    import torch

    torch.manual_seed(1)
    record = setting(torch)
    checks = Checks(torch, fa4_kernels)
    before = checks.host_time(fa4_kernels.provide)
    fa4_kernels.provide("torch")
    cases = {
        f"hd{d} {'causal' if c else 'full'}": (lambda d=d, c=c: checks.values(d, c))
        for d in (64, 128)
        for c in (False, True)
    }
    cases |= {"GQA": lambda: checks.values(128, True, heads_kv=2), "compiled": checks.compiled, "varlen": checks.varlen}
    cases |= {"kept": checks.kept, "graph": checks.graph, "decoding": checks.decoding, "host time": lambda: before}
    return run_checks(cases, record, arguments.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel_dir")
    parser.add_argument("--out", default="torch_backend.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return child(arguments) if arguments.child else run_installed(__file__, arguments.wheel_dir)


if __name__ == "__main__":
    sys.exit(main())
