"""Check on a GPU that what fa4_kernels keeps between calls serves every stream, graph, mode and thread, from the wheels
alone.

    python device/check_streams.py WHEEL_DIR --out record.json

* second_stream: the first use of a length on one stream, behind a kernel that keeps it busy; at once the same on
  another stream, idle. Both give the bits of a run one after another. The log-sum-exp's scratch is new each time too.
* busy_host: making what is kept does not wait for the busy stream.
* training_after_inference: the same shapes in torch.inference_mode, then with gradients: those of a process without it.
* graph: a decoding step captured after 1 and 3 calls, with and without its log-sum-exp, in one part and in several;
  then 300 other lengths, memory emptied and filled with numbers that no list of lengths may hold: replays follow the
  cache and give an eager run's bits.
* threads: eight, each on a stream of its own, all with the same lengths that nobody has used before.

Memory that could have been given out again is filled with POISON, so that a list that was freed is seen. A check that
fails or raises is told; the others go on. Exit status 1 if one did.
"""

import argparse
import functools
import sys
import threading
import time

from harness import run_checks, run_installed, setting

DEVICE = "cuda"
HEADS, HEADS_KV, HEAD_DIM = 8, 2, 128
CACHE, PROMPT = 1024, 5
BUSY_CYCLES = 400_000_000  # of a kernel that only waits: about 0.2 s
POISON = 0x3FFFFFFF  # as a start, far behind every tensor
OTHERS = 300
NUM_THREADS, ROUNDS = 8, 20


def normal(torch, seed, *shapes):
    """Standard normal numbers in bf16, one tensor a shape."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return [torch.randn(shape, device=DEVICE, generator=generator).to(torch.bfloat16) for shape in shapes]


class Decoding:
    """New queries to a cache, whose lengths are read on the device."""

    def __init__(self, torch, fa4, rows=PROMPT, batch=4, cache=CACHE, seed=0):
        self._fa4, shape = fa4, (batch, cache, HEADS_KV, HEAD_DIM)
        self.q, self.k, self.v = normal(torch, seed, (batch, rows, HEADS, HEAD_DIM), shape, shape)
        self.used = torch.full((batch,), cache, dtype=torch.int32, device=DEVICE)

    def step(self, return_lse=False, num_splits=1):
        """out, or (out, lse)."""
        options = {"causal": True, "num_splits": num_splits, "return_lse": return_lse}
        out, lse = self._fa4.flash_attn_with_kvcache(self.q, self.k, self.v, self.used, **options)
        return (out, lse) if return_lse else (out,)

    def listed(self, torch):
        """The same with lists of its own, so that nothing that is kept is used."""
        batch, rows = self.q.shape[:2]
        starts = [torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * n for n in (rows, self.k.shape[1])]
        flat = [x.flatten(0, 1) for x in (self.q, self.k, self.v)]
        out, _ = self._fa4.flash_attn_varlen_func(*flat, *starts, rows, seqused_k=self.used, causal=True)
        return out.view(self.q.shape)


def equal(torch, found, expected):
    """Whether all tensors hold the same bits."""
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def worst(found, expected):
    """The largest difference, as a number."""
    return (found.float() - expected.float()).abs().max().item()


def forget():
    """What was kept, as in a new process. Tensors that others may still read are held by the caller."""
    from fa4_kernels import allocation, loader

    held = (dict(allocation._starts), dict(allocation._scratches))
    allocation._starts.clear(), allocation._scratches.clear()
    loader.forget_calls()
    return held


def poison(torch):
    """Blocks of the sizes of lists, filled and let go of, on the current stream: what is made next may get them."""
    blocks = [
        torch.full((n,), POISON, dtype=torch.int32, device=DEVICE) for n in (4, 8, 64, 128, 1024) for _ in range(64)
    ]
    torch.cuda.synchronize()
    return blocks


# --------------------------------------------------------------------------------------------------------------------
# Checks. Each returns a dict with `passed`.


def check_second_stream(torch, fa4):
    """Largest differences on both streams, of lengths that are new each time."""
    off, held = [], []
    for rows in range(PROMPT, PROMPT + 10):
        problem = Decoding(torch, fa4, rows=rows, seed=rows)
        expected = problem.listed(torch)
        torch.cuda.synchronize()
        held.append(forget())
        poison(torch)
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(first):
            torch.cuda._sleep(BUSY_CYCLES)
            (late,) = problem.step()
        with torch.cuda.stream(second):
            (early,) = problem.step()
        torch.cuda.synchronize()
        off.append(max(worst(late, expected), worst(early, expected)))
    return {"passed": max(off) == 0, "worst": max(off), "cases": len(off)}


def check_busy_host(torch, fa4):
    """Seconds until a first call returns to the host while its stream is busy for much longer. Kernels are loaded."""
    problem = Decoding(torch, fa4, rows=PROMPT + 20)
    Decoding(torch, fa4, rows=PROMPT).step()
    held = forget()
    problem.step()  # decides again; the next forgets lists alone
    torch.cuda.synchronize()
    from fa4_kernels import allocation

    kept, allocation._starts = allocation._starts, {}
    torch.cuda._sleep(5 * BUSY_CYCLES)
    started = time.perf_counter()
    problem.step()
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    whole = time.perf_counter() - started
    del held, kept
    return {"passed": host < whole / 2, "host_seconds": round(host, 4), "device_seconds": round(whole, 4)}


def check_training_after_inference(torch, fa4):
    """Gradients with lists of their own, and with those that inference mode has made."""
    held, wrong = forget(), []
    sink = torch.zeros(HEADS, dtype=torch.float32, device=DEVICE)
    for name, options in (("used", {}), ("sink", {"learnable_sink": sink})):
        problem = Decoding(torch, fa4, rows=64, cache=64)

        def attend(q, k, v, problem=problem, options=options):
            return fa4.flash_attn_varlen_func(
                q, k, v, seqused_k=problem.used, causal=True, deterministic=True, **options
            )[0]

        with torch.inference_mode():
            attend(problem.q, problem.k, problem.v)
        leaves = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
        found = torch.autograd.grad(attend(*leaves).float().square().sum(), leaves)
        dense = fa4.flash_attn_func(*leaves, causal=True, deterministic=True, **options)[0]
        expected = torch.autograd.grad(dense.float().square().sum(), leaves)
        off = max(worst(a, b) / b.float().abs().max().item() for a, b in zip(found, expected, strict=True))
        if not off < 0.02:
            wrong.append(f"{name}: {off}")
    del held
    return {"passed": not wrong, "wrong": wrong}


def captured(torch, problem, calls, **options):
    """(graph, its results) of a step, captured after so many calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(calls):
            problem.step(**options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = problem.step(**options)
    return graph, results


def check_graph(torch, fa4, calls, return_lse, num_splits):
    """Replays that differ from an eager run, after OTHERS other lengths."""
    fa4.preload(select="*hd128*")
    options = {"return_lse": return_lse, "num_splits": num_splits}
    problem, held = Decoding(torch, fa4, rows=PROMPT + 40), forget()
    graph, results = captured(torch, problem, calls, **options)
    for i in range(OTHERS):
        other = Decoding(torch, fa4, rows=1, batch=1 + i % 7, cache=64 + i, seed=i)
        for _ in range(3):
            other.step(**options)
    del held, other
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    blocks, wrong = poison(torch), []
    for length in (CACHE, PROMPT + 40, 517, CACHE - 1):
        problem.used.fill_(length)
        for x in results:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        if not equal(torch, results, problem.step(**options)):
            wrong.append(length)
    intact = all(bool((block == POISON).all()) for block in blocks)
    return {"passed": not wrong and intact, "wrong": wrong, "intact": intact}


def check_threads(torch, fa4):
    """Results that differ from a run one after another, of NUM_THREADS threads; errors of threads."""
    problems = [Decoding(torch, fa4, rows=100 + i % 3, seed=i) for i in range(NUM_THREADS)]
    expected = [problem.listed(torch) for problem in problems]
    torch.cuda.synchronize()
    wrong, errors, held = [], [], []
    barrier = threading.Barrier(NUM_THREADS)

    def work(i):
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                for _ in range(ROUNDS):
                    (out,) = problems[i].step()
                    if not torch.equal(out, expected[i]):
                        wrong.append(i)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            barrier.abort()

    for _ in range(3):
        held.append(forget())
        poison(torch)
        barrier.reset()
        threads = [threading.Thread(target=work, args=(i,)) for i in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
    return {"passed": not wrong and not errors, "wrong": len(wrong), "errors": errors[:3]}


# --------------------------------------------------------------------------------------------------------------------


def checks_of(torch, fa4):
    """Name -> check."""
    checks = {"second_stream": check_second_stream, "busy_host": check_busy_host, "threads": check_threads}
    checks["training_after_inference"] = check_training_after_inference
    for calls in (1, 3):
        for return_lse, num_splits in ((False, 1), (True, 1), (False, 4)):
            name = (
                f"graph_{calls}_calls"
                + ("_lse" if return_lse else "")
                + (f"_{num_splits}_parts" if num_splits > 1 else "")
            )
            options = {"calls": calls, "return_lse": return_lse, "num_splits": num_splits}
            checks[name] = functools.partial(check_graph, **options)
    return {name: functools.partial(check, torch, fa4) for name, check in checks.items()}


def child(arguments):
    import fa4_kernels
    import torch

    torch.zeros(1, device=DEVICE)
    deadline = time.monotonic() + arguments.seconds
    return run_checks(checks_of(torch, fa4_kernels), setting(torch), arguments.out, deadline)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel_dir")
    parser.add_argument("--out", default="streams.json")
    parser.add_argument("--seconds", type=float, default=300, help="after which no further check is begun")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return child(arguments) if arguments.child else run_installed(__file__, arguments.wheel_dir)


if __name__ == "__main__":
    sys.exit(main())
