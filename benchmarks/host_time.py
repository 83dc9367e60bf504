"""Host time of a forward call, and of its stages.

    python benchmarks/host_time.py                  CPU tensors, a stand-in for the driver; from a checkout
    python benchmarks/host_time.py WHEEL_DIR        on a GPU, from the wheels found there

Prints microseconds a call, the median of rounds of calls queued back to back, few enough that the queue never fills:
ours for each family of kernels in the packs, the same with everything but the launch done in Python, torch's SDPA, two
allocations, and the parts of which a call consists. `--json FILE` also writes them. With `--fake-driver FILE` a GPU run
measures the stand-in on the same machine too: the difference is what the real driver and the GPU's allocator cost.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "device"))

from harness import driver_version, run_installed

ROOT = Path(__file__).resolve().parents[1]
CALLS = 50  # a round; the stand-in keeps 64 launches, a GPU's queue some more
SHAPE = (1, 128, 1, 128)


def per_call_us(call, prepare, rounds):
    """Median over rounds of the time of one call, microseconds."""
    times = []
    for _ in range(rounds):
        prepare()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - started) / CALLS * 1e6)
    return statistics.median(times)


# --------------------------------------------------------------------------------------------------------------------
# What is measured


def baselines(torch, device):
    """Name -> call: what torch itself does."""
    q = torch.zeros(SHAPE, dtype=torch.bfloat16, device=device)
    transposed = q.transpose(1, 2)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    strides = q.stride()
    rows = {} if device == "cpu" else {"torch SDPA": lambda: sdpa(transposed, transposed, transposed)}
    rows |= {
        "two torch.empty, dtype and device given": lambda: (
            torch.empty(SHAPE, dtype=torch.bfloat16, device=device),
            torch.empty(SHAPE[:3], dtype=torch.float32, device=device),
        ),
        "two torch.empty_like": lambda: (torch.empty_like(q), torch.empty_like(q)),
        "part: new_empty": lambda: q.new_empty(SHAPE),
        "part: an empty Python call": lambda: None,
        "part: torch.compiler.is_compiling": lambda: torch.compiler.is_compiling(),
    }
    empty_strided = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}", None)
    if empty_strided is not None:
        rows["part: empty_strided as torch's compiler calls it"] = lambda: empty_strided(SHAPE, strides, torch.bfloat16)
    return rows


def forward_calls(torch, device, mask):
    """Name -> call: flash_attn_func, and its parts."""
    from fa4_kernels import api, flash_attn_func, loader
    from fa4_kernels.dispatch import Problem

    q, k, v = (torch.zeros(SHAPE, dtype=torch.bfloat16, device=device) for _ in range(3))
    causal = mask == "causal"
    out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True)
    runtime = loader.runtime()
    launch = runtime.launch_for(Problem(dtype="bf16", head_dim=128, head_dim_v=128, mask=mask), 0)
    num_sms = runtime.device(0).sm_count
    if isinstance(launch, loader.ByExtents):
        launch = launch.launch_for(q, k, v)
    window = (1 << 30, 0 if causal else 1 << 30)
    answer = api._answer

    def in_python():
        api._answer = api._answer_none
        try:
            return flash_attn_func(q, k, v, causal=causal)
        finally:
            api._answer = answer

    return {
        "flash_attn_func": lambda: flash_attn_func(q, k, v, causal=causal),
        "flash_attn_func, return_lse": lambda: flash_attn_func(q, k, v, causal=causal, return_lse=True),
        "flash_attn_func, decided and allocated in Python": in_python,
        "part: answer in C": lambda: answer(q, k, v, None, causal, (None, None), False),
        "part: launch, outputs given": lambda: launch.run(q, k, v, out, lse, 0.1, *window, num_sms),
    }


def decoding_calls(torch, device, mask):
    """Name -> call: flash_attn_with_kvcache over 4096 keys of four sequences, where its kernels are installed."""
    from fa4_kernels import NoKernelError, answers, flash_attn_with_kvcache

    def zeros(*extents):
        return torch.zeros(*extents, 128, dtype=torch.bfloat16, device=device)

    dense = (zeros(4, 1, 32), *(zeros(4, 4096, 8) for _ in range(2)))
    lengths = torch.full((4,), 4096, dtype=torch.int32, device=device)
    pages = (dense[0], *(zeros(256, 64, 8) for _ in range(2)))
    table = torch.arange(256, dtype=torch.int32, device=device).view(4, 64)
    causal = mask == "causal"

    def in_python(num_splits):
        kept = answers.answer, answers.note
        answers.answer, answers.note = answers._answer_none, lambda arguments, call: None
        try:
            return flash_attn_with_kvcache(*dense, lengths, causal=causal, num_splits=num_splits)
        finally:
            answers.answer, answers.note = kept

    calls = {
        "decoding, a cache, one part": lambda: flash_attn_with_kvcache(*dense, lengths, causal=causal, num_splits=1),
        "decoding, a cache, parts": lambda: flash_attn_with_kvcache(*dense, lengths, causal=causal, num_splits=8),
        "decoding, pages, one part": lambda: flash_attn_with_kvcache(
            *pages, lengths, table, causal=causal, num_splits=1
        ),
        "decoding, pages, parts": lambda: flash_attn_with_kvcache(*pages, lengths, table, causal=causal, num_splits=8),
        "decoding, a cache, one part, in Python": lambda: in_python(1),
        "decoding, a cache, parts, in Python": lambda: in_python(8),
    }
    try:
        for call in calls.values():
            call(), call()  # the launcher is told at the second
    except NoKernelError:
        return {}
    return calls


def recipe_calls(torch, device, mask):
    """Name -> call: the same kernel through `call`, or nothing where no recipe is installed."""
    from fa4_kernels import NoKernelError, call

    q, k, v = (torch.zeros(SHAPE, dtype=torch.bfloat16, device=device) for _ in range(3))
    try:
        call("fwd", q=q, k=k, v=v, mask=mask, layout="dense")
    except NoKernelError:
        return {}
    return {"call('fwd')": lambda: call("fwd", q=q, k=k, v=v, mask=mask, layout="dense")}


def measure(torch, device, prepare, rounds, mask):
    """Microseconds by name; families one after another, ours and torch's in turn so that a slow phase meets both."""
    from fa4_kernels import loader
    from fa4_kernels.packs import usable

    families = sorted({pack.manifest.family for pack in usable(loader.runtime().packs)})
    fixed = loader.runtime() if device == "cpu" else None
    table = {}
    with torch.no_grad():
        for family in families:
            if fixed is None:
                os.environ["FA4_KERNELS_FAMILY"] = family
                loader.use_runtime(None)
            calls = forward_calls(torch, device, mask) | recipe_calls(torch, device, mask)
            calls |= decoding_calls(torch, device, mask) | baselines(torch, device)
            rows = {name: [] for name in calls}
            for _ in range(5):
                for name, call in calls.items():
                    prepare()
                    call()
                    rows[name].append(per_call_us(call, prepare, rounds))
            table[family] = {name: statistics.median(times) for name, times in rows.items()}
    return table


def show(title, table):
    """One table a family."""
    for family, rows in table.items():
        print(f"\n{title}, kernels of {family}: microseconds a call")
        for name, microseconds in rows.items():
            print(f"  {name:50s} {microseconds:7.2f}")


# --------------------------------------------------------------------------------------------------------------------
# The two machines


def measure_stand_in(torch, driver, rounds):
    """The table with CPU tensors and the stand-in driver at a path."""
    from fa4_kernels import loader, packs

    sys.path.insert(0, str(ROOT))
    from tests.runtime.fake import FakeDriver, write_pack

    fake = FakeDriver(driver)
    fake.reset()
    with tempfile.TemporaryDirectory() as directory:
        pack = packs.open_pack("test", write_pack(Path(directory) / "pack", ["fwd-sm90a-bf16-hd128-full"]))
        options = {"driver_path": str(driver), "device_type": loader.CPU, "packs": [pack]}
        loader.use_runtime(loader.Runtime(**options, stream_of=lambda ordinal: 0))
        table = measure(torch, "cpu", fake.reset_launches, rounds, "full")
    loader.use_runtime(None)
    return table


def compile_here(source, output, *flags):
    """A shared object from C, by the compiler of the `ziglang` package."""
    command = [sys.executable, "-m", "ziglang", "cc", "-std=c11", "-O2", "-shared", "-fPIC", *flags, str(source)]
    subprocess.run([*command, "-o", str(output)], check=True)


def from_checkout(arguments):
    """CPU: launcher and stand-in compiled from this checkout."""
    import torch

    runtime = ROOT / "fa4build" / "runtime"
    sys.path.insert(0, str(runtime))
    import fa4_kernels

    with tempfile.TemporaryDirectory() as directory:
        driver, include = Path(directory) / "libcuda_fake.so", "-I" + sysconfig.get_paths()["include"]
        compile_here(runtime / "fa4_kernels" / "_launcher.c", Path(directory) / "_launcher.abi3.so", include)
        compile_here(ROOT / "tests" / "runtime" / "fake_driver.c", driver)
        fa4_kernels.__path__.append(directory)
        table = measure_stand_in(torch, driver, arguments.rounds)
    show("stand-in driver", table)
    return {"torch": torch.__version__, "python": platform.python_version(), "stand_in_us": table}


def from_wheels(arguments):
    """GPU: the wheels are on the path."""
    import torch

    record = {"torch": torch.__version__, "python": platform.python_version()}
    record["device"] = torch.cuda.get_device_name()
    record["driver"] = driver_version()
    print(record)
    record["gpu_us"] = measure(torch, "cuda", torch.cuda.synchronize, arguments.rounds, arguments.mask)
    show(record["device"], record["gpu_us"])
    if arguments.fake_driver:
        os.environ.pop("FA4_KERNELS_FAMILY", None)
        record["stand_in_us"] = measure_stand_in(torch, Path(arguments.fake_driver).absolute(), arguments.rounds)
        show("stand-in driver", record["stand_in_us"])
    return record


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel_dir", nargs="?")
    parser.add_argument("--mask", choices=("full", "causal"), default="full", help="of the kernels on the GPU")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--fake-driver", help="tests/runtime/fake_driver.c, compiled to a shared object")
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.wheel_dir and not arguments.child:
        return run_installed(__file__, arguments.wheel_dir)
    record = from_wheels(arguments) if arguments.child else from_checkout(arguments)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
