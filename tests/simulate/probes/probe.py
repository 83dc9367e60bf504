"""What a probe is, and the frame of its PTX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fa4build.simulate.hardware.tensor_map import TensorMap

UNWRITTEN = 0xCDCDCDCD  # initial content of outputs and shared memory, so that bytes never written show

SHARED_BASE = 0x400  # address of dynamic shared memory in the CTA's window
INPUT, OUTPUT, THREAD, SHARED = "%rd1", "%rd2", "%r1", "%r2"  # registers the frame sets up


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferMap:
    """A tensor map on a buffer: `tmap.address` is a byte offset into `buffer` (`input` or `output`)."""

    buffer: str
    tmap: TensorMap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """One kernel and its data.

    ptx: module text; the entry has the probe's name and the parameters input, output (u64), then one tensor map each.
    threads, shared_bytes: of a CTA. ctas: CTAs of the only cluster, along x. input: u32 words.
    output: u32 words before the launch. expected: output words after it, from the input.
    """

    name: str
    ptx: str
    threads: int
    shared_bytes: int
    input: np.ndarray
    output: np.ndarray
    expected: Callable[[np.ndarray], np.ndarray]
    maps: tuple[BufferMap, ...] = ()
    ctas: int = 1

    def assembly_text(self) -> str:
        """The PTX for the assembler: a cluster's size is part of it, as a plain launch does not carry one."""
        if self.ctas == 1:
            return self.ptx
        return self.ptx.replace("\n.minnctapersm 1\n", f"\n.reqnctapercluster {self.ctas}, 1, 1\n")


def unwritten(words: int) -> np.ndarray:
    """An output buffer no byte of which has been written."""
    return np.full(words, UNWRITTEN, dtype=np.uint32)


def kernel_text(name: str, threads: int, body: str, num_maps: int = 0) -> str:
    """PTX of a kernel: loads the two pointers, the thread number and the shared address, then runs `body`.

    The body may use %p1.., %rs1.., %r3.., %rd5.. and the maps `%rd3`-style through `map_address`.
    """
    params = [f".param .u64 {name}_param_0", f".param .u64 {name}_param_1"]
    params += [f".param .align 64 .b8 {name}_param_{2 + m}[128]" for m in range(num_maps)]
    addresses = "\n".join(
        f"\tmov.b64 \t%rd{100 + m}, {name}_param_{2 + m};\n\tcvta.param.u64 \t%rd{110 + m}, %rd{100 + m};"
        for m in range(num_maps)
    )
    parameters = ",\n\t".join(params)
    return f""".version 8.6
.target sm_90a
.address_size 64

.extern .shared .align 1024 .b8 __dynamic_shmem__0[];

.visible .entry {name}(
\t{parameters}
)
.reqntid {threads}, 1, 1
.minnctapersm 1
{{
\t.reg .pred \t%p<64>;
\t.reg .b16 \t%rs<64>;
\t.reg .b32 \t%r<256>;
\t.reg .b64 \t%rd<128>;

\tld.param.b64 \t{INPUT}, [{name}_param_0];
\tld.param.b64 \t{OUTPUT}, [{name}_param_1];
\tmov.u32 \t{THREAD}, %tid.x;
\tmov.b32 \t{SHARED}, __dynamic_shmem__0;
{addresses}
{body}
\tret;
}}
"""


def map_address(index: int) -> str:
    """Register with the generic address of tensor map `index`."""
    return f"%rd{110 + index}"


def fill_shared(threads: int, words: int, source: str | None) -> str:
    """All threads copy `words` words from `source` (a pointer register) to shared memory, or fill it as unwritten.

    Ends with the fence that lets the asynchronous proxy see the words, and a CTA barrier. Uses %r3..%r6, %rd5, %rd6.
    """
    load = f"\tadd.s64 \t%rd6, {source}, %rd5;\n\tld.global.b32 \t%r5, [%rd6];" if source else ""
    value = "%r5" if source else "%r6"
    return f"""
\tmov.b32 \t%r6, {UNWRITTEN};
\tmov.b32 \t%r3, {THREAD};
$L__fill:
\tmul.wide.u32 \t%rd5, %r3, 4;
{load}
\tshl.b32 \t%r4, %r3, 2;
\tadd.s32 \t%r4, %r4, {SHARED};
\tst.shared.b32 \t[%r4], {value};
\tadd.s32 \t%r3, %r3, {threads};
\tsetp.lt.s32 \t%p60, %r3, {words};
\t@%p60 bra \t$L__fill;
\tfence.proxy.async.shared::cta;
\tbar.sync \t0;"""


def dump_shared(threads: int, first_word: int, words: int) -> str:
    """All threads copy `words` words of shared memory from `first_word` on to the output. Uses %r3..%r5, %rd5, %rd6."""
    return f"""
\tmov.b32 \t%r3, {THREAD};
$L__dump:
\tshl.b32 \t%r4, %r3, 2;
\tadd.s32 \t%r4, %r4, {SHARED};
\tld.shared.b32 \t%r5, [%r4+{4 * first_word}];
\tmul.wide.u32 \t%rd5, %r3, 4;
\tadd.s64 \t%rd6, {OUTPUT}, %rd5;
\tst.global.b32 \t[%rd6], %r5;
\tadd.s32 \t%r3, %r3, {threads};
\tsetp.lt.s32 \t%p60, %r3, {words};
\t@%p60 bra \t$L__dump;"""


def by_first_thread(body: str, label: str) -> str:
    """`body` executed by thread 0 only."""
    return f"""
\tsetp.ne.s32 \t%p61, {THREAD}, 0;
\t@%p61 bra \t$L__{label};
{body}
$L__{label}:"""


def wait_for(barrier_offset: int, parity: int, label: str) -> str:
    """All threads wait until the phase of the mbarrier at a shared offset has completed."""
    return f"""
$L__{label}:
\tmbarrier.try_wait.parity.shared.b64 \t%p62, [{SHARED}+{barrier_offset}], {parity};
\t@!%p62 bra \t$L__{label};"""


def new_barrier(barrier_offset: int, count: int) -> str:
    """Thread 0's code to create an mbarrier at a shared offset."""
    return f"\tmbarrier.init.shared.b64 \t[{SHARED}+{barrier_offset}], {count};"
