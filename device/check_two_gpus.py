"""Check fa4_kernels with two GPUs in one process, from the wheels alone.

    python device/check_two_gpus.py WHEEL_DIR --out record.json

The same problems (dense, packed, paged and split, with gradients where there are) give the same bits on both devices:

* own: each device being the current one.
* other: the device of the tensors not being the current one, which stays current; calls decided in Python and in C.
* order: a call waits for what the tensors' device was told before, and what it is told afterwards waits for the call.
* streams: side streams on both devices at once. threads: a thread a device.
* graph: captured and replayed on the second device, also while the first is current.
* mixed: tensors of two devices are refused, and nothing is launched.

Each check that fails or raises is told; the others go on. Exit status 1 if one did.
"""

import argparse
import functools
import sys
import threading
import time

from harness import run_checks, run_installed, setting

DEVICES = ("cuda:0", "cuda:1")
LENGTHS = (300, 1, 77, 500)
PAUSE_CYCLES = 400_000_000  # about 0.2 s
ROUNDS = 100


def ints(torch, device, *numbers):
    """A list for the kernels."""
    return torch.tensor(numbers, dtype=torch.int32).to(device)


def starts_of(torch, device):
    """cu_seqlens of LENGTHS."""
    return ints(torch, device, 0, *(sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS))))


def drawn(torch, device, seed, *shapes):
    """Drawn on the host, so that no device gets its numbers from another."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16).to(device) for shape in shapes]


def problems(torch, fa4_kernels):
    """Name -> (function of a device that makes inputs, function of them that returns tensors)."""
    total = sum(LENGTHS)

    def dense_inputs(device):
        return drawn(torch, device, 1, (2, 700, 4, 128), *2 * ((2, 700, 2, 128),))

    def packed_inputs(device):
        return [*drawn(torch, device, 2, (total, 4, 128), *2 * ((total, 2, 128),)), starts_of(torch, device)]

    def paged_inputs(device):
        table = torch.randperm(40, generator=torch.Generator().manual_seed(3)).int().view(2, 20).to(device)
        shapes = ((2, 1, 16, 128), *2 * ((40, 64, 2, 128),))
        return [*drawn(torch, device, 4, *shapes), ints(torch, device, 1280, 777), table]

    def with_gradients(call):
        def run(q, k, v, *rest):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out, lse = call(*leaves, *rest)
            loss = (out.float() ** 2).mean() + lse.mean()
            return (out, lse, *torch.autograd.grad(loss, leaves))

        return run

    def dense(q, k, v):
        return fa4_kernels.flash_attn_func(q, k, v, causal=True, return_lse=True, deterministic=True)

    def packed(q, k, v, starts):
        options = {"causal": True, "return_lse": True, "deterministic": True}
        return fa4_kernels.flash_attn_varlen_func(q, k, v, starts, starts, max(LENGTHS), max(LENGTHS), **options)

    def plain(q, k, v):
        return fa4_kernels.flash_attn_func(q, k, v, causal=True, return_lse=True)

    def paged(q, k, v, lengths, table):
        options = {"causal": True, "num_splits": 3, "return_lse": True}
        return fa4_kernels.flash_attn_with_kvcache(q, k, v, lengths, table, **options)

    return {
        "dense": (dense_inputs, plain),
        "dense_gradients": (dense_inputs, with_gradients(dense)),
        "packed_gradients": (packed_inputs, with_gradients(packed)),
        "paged_split": (paged_inputs, paged),
    }


def bits(torch, results):
    """On the host."""
    return [x.detach().cpu().contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()]) for x in results]


def same(torch, found, expected):
    """Whether all are on the host and hold the same bits."""
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def synchronize(torch):
    """Wait for both."""
    for device in DEVICES:
        torch.cuda.synchronize(device)


def expected_of(torch, make, run):
    """Results of the first device, it being the current one."""
    with torch.cuda.device(DEVICES[0]):
        results = bits(torch, run(*make(DEVICES[0])))
    if not any(x.any() for x in results):
        raise AssertionError("results are all zero: nothing would be compared")
    return results


# --------------------------------------------------------------------------------------------------------------------
# Checks


def check_own(torch, make, run):
    """Each device current."""
    expected = expected_of(torch, make, run)
    with torch.cuda.device(DEVICES[1]):
        found = bits(torch, run(*make(DEVICES[1])))
    return {"passed": same(torch, found, expected), "tensors": len(expected)}


def check_other(torch, make, run):
    """The first current, tensors on the second, and the other way round; several calls each."""
    expected, wrong = expected_of(torch, make, run), []
    for current, device in (DEVICES, DEVICES[::-1]):
        with torch.cuda.device(current):
            before = torch.cuda.current_device()
            for call in range(4):
                results = run(*make(device))
                if any(str(x.device) != device for x in results) or torch.cuda.current_device() != before:
                    wrong.append(f"{device}, call {call}: results or the current device are elsewhere")
                if not same(torch, bits(torch, results), expected):
                    wrong.append(f"{device}, call {call}: other bits")
    return {"passed": not wrong, "wrong": wrong}


def check_order(torch, make, run):
    """Inputs arrive late on the tensors' device, which is not current; results are overwritten behind the call."""
    expected = expected_of(torch, make, run)
    good = make(DEVICES[1])
    late = [torch.zeros_like(x) for x in good]
    with torch.cuda.device(DEVICES[0]):
        run(*good)
        synchronize(torch)
        with torch.cuda.device(DEVICES[1]):
            torch.cuda._sleep(PAUSE_CYCLES)
            for x, y in zip(late, good, strict=True):
                x.copy_(y, non_blocking=True)
        results = run(*late)
        copies = [x.clone() for x in results]
        for x in results:
            x.detach().zero_()
    return {"passed": same(torch, bits(torch, copies), expected)}


def check_streams(torch, make, run):
    """ROUNDS calls on a side stream of each device, queued alternately."""
    expected = expected_of(torch, make, run)
    inputs, streams, last = {}, {}, {}
    for device in DEVICES:
        inputs[device] = make(device)
        streams[device] = torch.cuda.Stream(device)
    different = {device: torch.zeros((), dtype=torch.int64, device=device) for device in DEVICES}
    synchronize(torch)
    for _ in range(ROUNDS):
        for device in DEVICES:
            with torch.cuda.stream(streams[device]):
                results = run(*inputs[device])
                if device in last:
                    for a, b in zip(results, last[device], strict=True):
                        different[device] += (a != b).sum()
                last[device] = results
    synchronize(torch)
    equal = all(same(torch, bits(torch, last[device]), expected) for device in DEVICES)
    counts = {device: int(count) for device, count in different.items()}
    return {"passed": equal and not any(counts.values()), "different": counts}


def check_threads(torch, make, run):
    """A thread a device, ROUNDS calls each, at once."""
    expected, wrong = expected_of(torch, make, run), []

    def work(device):
        try:
            inputs = make(device)
            with torch.cuda.stream(torch.cuda.Stream(device)):
                torch.cuda.synchronize(device)
                for _ in range(ROUNDS):
                    results = run(*inputs)
                if not same(torch, bits(torch, results), expected):
                    wrong.append(f"{device}: other bits")
        except Exception as error:
            wrong.append(f"{device}: {type(error).__name__}: {str(error)[:200]}")

    threads = [threading.Thread(target=work, args=(device,)) for device in DEVICES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"passed": not wrong, "wrong": wrong}


def check_graph(torch, fa4_kernels, make, run):
    """Captured on the second device, replayed from either."""
    expected = expected_of(torch, make, run)
    loaded = fa4_kernels.preload([1], select="*hd128*")
    inputs = make(DEVICES[1])
    with torch.cuda.device(DEVICES[1]):
        with torch.cuda.stream(torch.cuda.Stream()):
            run(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run(*inputs)
    wrong = []
    for current in DEVICES:
        for x in results:
            x.detach().zero_()
        synchronize(torch)
        with torch.cuda.device(current):
            graph.replay()
        synchronize(torch)
        if not same(torch, bits(torch, results), expected):
            wrong.append(f"replayed while {current} is current: other bits")
    return {"passed": not wrong and bool(loaded), "wrong": wrong, "preloaded": len(loaded)}


def check_mixed(torch, fa4_kernels):
    """k on the other device."""
    from fa4_kernels import InputError

    make, run = problems(torch, fa4_kernels)["dense"]
    q, k, v = make(DEVICES[0])
    run(q, k, v)
    try:
        run(q, k.to(DEVICES[1]), v)
    except InputError as error:
        return {"passed": True, "message": str(error)}
    return {"passed": False, "error": "was not refused"}


def checks_of(torch, fa4_kernels):
    """Name -> check."""
    checks = {}
    for name, (make, run) in problems(torch, fa4_kernels).items():
        for check in (check_own, check_other, check_order, check_streams, check_threads):
            checks[f"{check.__name__.removeprefix('check_')} {name}"] = functools.partial(check, torch, make, run)
        checks[f"graph {name}"] = functools.partial(check_graph, torch, fa4_kernels, make, run)
    return checks | {"mixed": functools.partial(check_mixed, torch, fa4_kernels)}


def child(arguments):
    import fa4_kernels
    import torch

    if torch.cuda.device_count() < 2:
        raise SystemExit(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    record = setting(torch) | {"devices": [torch.cuda.get_device_name(device) for device in DEVICES]}
    deadline = time.monotonic() + arguments.seconds
    return run_checks(checks_of(torch, fa4_kernels), record, arguments.out, deadline)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel_dir")
    parser.add_argument("--out", default="two_gpus.json")
    parser.add_argument("--seconds", type=float, default=90, help="after which no further check is begun")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return child(arguments) if arguments.child else run_installed(__file__, arguments.wheel_dir)


if __name__ == "__main__":
    sys.exit(main())
