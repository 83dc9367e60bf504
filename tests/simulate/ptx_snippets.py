"""Runs small PTX bodies in the simulator: the tests write instructions, not kernels.

In a body `%r0` is tid.x, `%r1`, `%r2`, ... hold the thread's words of the inputs, and `%rd0` is the address of the
thread's output record. `result(n, reg)` stores a 32-bit register to word n of it.
"""

import struct

import numpy as np

from fa4build.simulate import GlobalMemory, SimLaunch, run_launch

HEADER = """.version 9.4
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry snippet(
    .param .u64 snippet_out,
    .param .u64 snippet_in,
    .param .u64 snippet_data
)
.reqntid {threads}, 1, 1
{{
    .reg .pred %p<32>;
    .reg .b16 %rs<64>;
    .reg .b32 %r<512>;
    .reg .b32 %a<64>;
    .reg .b64 %rd<64>;
    .reg .b128 %q<4>;
    mov.u32 %r0, %tid.x;
    mov.u32 %a0, %ctaid.x;
    mad.lo.s32 %a1, %a0, {threads}, %r0;
    ld.param.b64 %rd0, [snippet_out];
    mul.wide.u32 %rd1, %a1, {record};
    add.s64 %rd0, %rd0, %rd1;
    ld.param.b64 %rd2, [snippet_data];
    {loads}
    {body}
    ret;
}}
"""


def result(word: int, register: str) -> str:
    """Stores a 32-bit register to a word of the thread's output record."""
    return f"st.global.b32 [%rd0+{4 * word}], {register};"


def text_of(body: str, *, threads: int = 32, inputs: int = 0, words: int = 1, target: str = "sm_90a") -> str:
    """The PTX module around a body."""
    loads = []
    if inputs:
        loads += ["ld.param.b64 %rd3, [snippet_in];", "mul.wide.u32 %rd4, %a1, 4;", "add.s64 %rd3, %rd3, %rd4;"]
        for k in range(inputs):
            loads.append(f"ld.global.b32 %r{k + 1}, [%rd3+{k * 4 * 4096}];")
    return HEADER.format(body=body, threads=threads, record=4 * words, loads="\n    ".join(loads), target=target)


def run(body: str, *inputs, threads=32, words=1, grid=1, **options) -> np.ndarray:
    """Output words as a (threads of the grid, words) array of u32; arguments as `run_report`."""
    out = np.zeros((threads * grid, words), np.uint32)
    run_report(body, *inputs, threads=threads, words=words, grid=grid, out=out, **options)
    return out


def run_report(
    body: str,
    *inputs,
    threads=32,
    words=1,
    smem=4096,
    grid=1,
    cluster=1,
    target="sm_90a",
    data=None,
    out=None,
    **options,
):
    """Runs a body and returns the simulator's report.

    Args:
        inputs: arrays of u32 (or float32, taken as bits), one word a thread.
        data: an array whose address is in `%rd2`.
        out: the (threads of the grid, words) array of output records.
        options: of `run_launch`; also `launch`, extra fields of `SimLaunch`, and `engine`, another `run_launch`.
    """
    total = threads * grid
    table = np.zeros((max(len(inputs), 1), 4096), np.uint32)
    for k, values in enumerate(inputs):
        table[k, :total] = (
            np.asarray(values).view(np.uint32) if hasattr(values, "view") else np.array(values, np.uint32)
        )
    out = np.zeros((total, words), np.uint32) if out is None else out
    memory = GlobalMemory()
    addresses = [memory.add("out", out), memory.add("in", table, read_only=True)]
    addresses.append(memory.add("data", data) if data is not None else 0)
    ptx = text_of(body, threads=threads, inputs=len(inputs), words=words, target=target)
    launch = SimLaunch(
        kernel="snippet",
        grid=(grid, 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1),
        smem=smem,
        parameters=struct.pack("<3Q", *addresses),
        **options.pop("launch", {}),
    )
    return options.pop("engine", run_launch)(ptx, launch, memory, **options)


def lane0(body: str, *values, **options) -> list[int]:
    """Output words of thread 0; scalar inputs are the same in every thread."""
    arrays = [np.full(options.get("threads", 32), v & 0xFFFFFFFF, np.uint32) for v in values]
    return run(body, *arrays, **options)[0].tolist()
