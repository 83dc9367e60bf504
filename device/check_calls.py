"""Check on a GPU that calls answered in C give what the Python code beside them gives, and touch nobody's memory.

    python device/check_calls.py WHEEL_DIR --out record.json

Each check runs flash_attn_func of bf16, head_dim 128, whose log-sum-exp goes to the scratch of the device:

* shapes and masks: the bits of the Python code's result.
* streams: eight at once, results freed and made again all the time, against a run one after another.
* threads: four, each on a stream of its own.
* graph: captured after preload(), replayed after everything was forgotten and torch's cache emptied, with much of the
  memory that torch then gives out marked: the same bits, and no mark changed.
* record_stream: memory of a result in use on another stream is not given out again.
* memory: a thousand calls leave as much allocated as before.
* recipe: call("fwd"), where a recipe is installed, the same bits again.

And flash_attn_with_kvcache, whose parts and scratch are memory of each call:

* decoding: caches and pages, one part and many: the bits of the Python code's result.
* decoding_streams: eight at once, in parts.
* decoding_graph: captured, replayed with other lengths of the cache.
* decoding_memory: a thousand calls leave as much allocated as before.

Exit status 1 if a check fails.
"""

import argparse
import itertools
import json
import sys
import threading
from pathlib import Path

from harness import run_installed

LENGTHS = (1, 17, 128, 129, 1000)
MARK = 0x5A


def tensors_of(torch, seqlen, batch=2, heads=4, heads_kv=4, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(count):
        shape = (batch, seqlen, count, 128)
        return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)

    return normal(heads), normal(heads_kv), normal(heads_kv)


def in_python(api, *args, **options):
    """The call as if nothing were answered in C."""
    answer, api._answer = api._answer, api._answer_none
    try:
        return api.flash_attn_func(*args, **options)
    finally:
        from fa4_kernels import loader

        api._answer = loader.compiled_calls("ForwardCalls").run if answer is api._answer_none else answer


def in_c(api, *args, **options):
    """The call, which must be answered in C."""
    bound, api._bound = api._bound, None
    try:
        return api.flash_attn_func(*args, **options)
    finally:
        api._bound = bound


def check_shapes(torch, api):
    equal = True
    for causal in (False, True):
        for seqlen in LENGTHS:
            q, k, v = tensors_of(torch, seqlen)
            expected = in_python(api, q, k, v, causal=causal, return_lse=True)
            for return_lse in (True, False):
                out, lse = in_c(api, q, k, v, causal=causal, return_lse=return_lse)
                equal &= torch.equal(out, expected[0]) and (lse is None or torch.equal(lse, expected[1]))
    return {"passed": equal}


def check_streams(torch, api, rounds=200):
    problems = [tensors_of(torch, 64 + 31 * i, seed=i) for i in range(8)]
    expected = [in_python(api, *x, causal=True)[0] for x in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    wrong = torch.zeros(len(problems), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(rounds):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                out, _ = in_c(api, *problems[i], causal=True)
                wrong[i] += (out != expected[i]).sum()
    torch.cuda.synchronize()
    return {"passed": not wrong.any().item(), "calls": rounds * len(problems)}


def check_threads(torch, api, rounds=300):
    problems = [tensors_of(torch, 100 + 57 * i, seed=i) for i in range(4)]
    expected = [in_python(api, *x)[0] for x in problems]
    torch.cuda.synchronize()
    wrong = []

    def work(i):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(rounds):
                out, _ = api.flash_attn_func(*problems[i])
                if not torch.equal(out, expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"passed": not wrong, "calls": rounds * len(problems)}


def check_graph(torch, api):
    from fa4_kernels import loader

    loader.forget_calls()
    api.preload(select="fwd-*")
    q, k, v = tensors_of(torch, 1000)
    expected = in_python(api, q, k, v)[0]
    loader.forget_calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            out, _ = api.flash_attn_func(q, k, v)
    loader.forget_calls()
    torch.cuda.empty_cache()
    marked = [torch.full((1 << 20,), MARK, dtype=torch.uint8, device="cuda") for _ in range(256)]
    equal = True
    for _ in range(20):
        out.zero_()
        graph.replay()
        equal &= torch.equal(out, expected)
    intact = all(bool((block == MARK).all()) for block in marked)
    return {"passed": equal and intact, "equal": equal, "intact": intact}


def check_record_stream(torch, api):
    q, k, v = tensors_of(torch, 1000)
    in_python(api, q, k, v)
    out, _ = in_c(api, q, k, v)
    expected, address, side = out.clone(), out.data_ptr(), torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(40):
            busy = busy @ busy * 0.01
        copy = out.clone()
    out.record_stream(side)
    del out
    others = [torch.zeros_like(expected) for _ in range(8)]
    reused = any(x.data_ptr() == address for x in others)
    torch.cuda.synchronize()
    return {"passed": torch.equal(copy, expected) and not reused}


def check_memory(torch, api):
    q, k, v = tensors_of(torch, 128)
    in_python(api, q, k, v)
    in_c(api, q, k, v)
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        in_c(api, q, k, v)
    after = torch.cuda.memory_allocated()
    return {"passed": after == before, "bytes": after - before}


def check_recipe(torch, api):
    from fa4_kernels import NoKernelError, recipes

    q, k, v = tensors_of(torch, 300)
    arguments = {"q": q, "k": k, "v": v, "mask": "causal", "layout": "dense"}
    try:
        first = api.call("fwd", **arguments)
    except NoKernelError:
        return {"passed": True, "recipe": "not installed"}
    bound, recipes._bound = recipes._bound, None
    try:
        second = api.call("fwd", **arguments)
    finally:
        recipes._bound = bound
    return {"passed": all(torch.equal(a, b) for a, b in zip(first, second, strict=True))}


# --------------------------------------------------------------------------------------------------------------------
# Decoding


def decoding_in_python(*args, **options):
    """flash_attn_with_kvcache as if nothing were answered in C."""
    from fa4_kernels import answers, packed

    kept = answers.answer, answers.note
    answers.answer, answers.note = (lambda arguments: None), (lambda arguments, call: None)
    try:
        return packed.flash_attn_with_kvcache(*args, **options)
    finally:
        answers.answer, answers.note = kept


def decoding_in_c(*args, **options):
    """The call, which must be answered in C from the third time on."""
    from fa4_kernels import packed

    forward, packed.forward = packed.forward, None
    try:
        return packed.flash_attn_with_kvcache(*args, **options)
    finally:
        packed.forward = forward


def told(*args, **options):
    """Twice in Python: the second time the launcher is told."""
    from fa4_kernels import packed

    for _ in range(2):
        packed.flash_attn_with_kvcache(*args, **options)


def decoding_problem(torch, rows, page_size, seed=0, batch=3, keys=2048):
    """q, caches, lengths and, of pages, their table: bf16, 8 query heads, 2 key heads."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shape = (batch * keys // page_size, page_size) if page_size else (batch, keys)
    normal = [
        torch.randn(*extents, heads, 128, device="cuda", generator=generator).to(torch.bfloat16)
        for extents, heads in (((batch, rows), 8), (shape, 2), (shape, 2))
    ]
    lengths = torch.tensor([keys, 77 + seed, 1000], dtype=torch.int32, device="cuda")
    if not page_size:
        return *normal, lengths
    table = torch.randperm(shape[0], device="cuda", generator=generator).int().view(batch, -1)
    return *normal, lengths, table


def check_decoding(torch, api):
    equal, cases = True, 0
    for rows, page_size, num_splits in itertools.product((1, 3), (0, 64), (1, 7, 0)):
        args = decoding_problem(torch, rows, page_size)
        expected, _ = decoding_in_python(*args, causal=True, num_splits=num_splits)
        told(*args, causal=True, num_splits=num_splits)
        for seed in (1, 2):
            other = decoding_problem(torch, rows, page_size, seed)
            right, _ = decoding_in_python(*other, causal=True, num_splits=num_splits)
            equal &= torch.equal(decoding_in_c(*args, causal=True, num_splits=num_splits)[0], expected)
            equal &= torch.equal(decoding_in_c(*other, causal=True, num_splits=num_splits)[0], right)
            cases += 2
    return {"passed": equal, "calls": cases}


def check_decoding_streams(torch, api, rounds=200):
    problems = [decoding_problem(torch, 1, 64, seed) for seed in range(8)]
    expected = [decoding_in_python(*args)[0] for args in problems]
    told(*problems[0])
    streams = [torch.cuda.Stream() for _ in problems]
    wrong = torch.zeros(len(problems), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(rounds):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                wrong[i] += (decoding_in_c(*problems[i])[0] != expected[i]).sum()
    torch.cuda.synchronize()
    return {"passed": not wrong.any().item(), "calls": rounds * len(problems)}


def check_decoding_graph(torch, api):
    args = decoding_problem(torch, 1, 0)
    told(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = decoding_in_c(*args)
    equal = True
    for lengths in ([2048, 77, 1000], [1, 2, 3], [0, 2048, 129]):
        args[3].copy_(torch.tensor(lengths, dtype=torch.int32))
        out.zero_()
        graph.replay()
        equal &= torch.equal(out, decoding_in_python(*args)[0])
    return {"passed": equal}


def check_decoding_memory(torch, api):
    args = decoding_problem(torch, 1, 64)
    told(*args)
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        decoding_in_c(*args)
    after = torch.cuda.memory_allocated()
    return {"passed": after == before, "bytes": after - before}


CHECKS = (
    *(check_shapes, check_streams, check_threads, check_graph, check_record_stream, check_memory, check_recipe),
    *(check_decoding, check_decoding_streams, check_decoding_graph, check_decoding_memory),
)


def child(arguments):
    import torch
    from fa4_kernels import api

    record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "checks": {}}
    with torch.no_grad():
        for check in CHECKS:
            name = check.__name__.removeprefix("check_")
            record["checks"][name] = check(torch, api)
            print(name, record["checks"][name], flush=True)
    Path(arguments.out).write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(result["passed"] for result in record["checks"].values()) else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel_dir")
    parser.add_argument("--out", default="calls.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return child(arguments) if arguments.child else run_installed(__file__, arguments.wheel_dir)


if __name__ == "__main__":
    sys.exit(main())
