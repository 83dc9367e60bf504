"""Probes of cp.async and of named barriers between warps that arrive and warps that wait."""

from __future__ import annotations

import numpy as np

from tests.simulate.probes.probe import (
    INPUT,
    OUTPUT,
    SHARED,
    THREAD,
    UNWRITTEN,
    Probe,
    dump_shared,
    fill_shared,
    kernel_text,
    unwritten,
)

_COPY_THREADS = 64
_COPY_WORDS = 4 * _COPY_THREADS + _COPY_THREADS


def _cp_async_probe() -> Probe:
    """Each thread copies 16 bytes, of which it reads 0, 8 or 16 (the rest becomes zero), and then 4 bytes.

    The first goes through cp.async.cg and group 1, the second through cp.async.ca and group 2; all wait for both.
    """
    name = "cp_async"
    second = 16 * _COPY_THREADS
    body = f"""{fill_shared(_COPY_THREADS, _COPY_WORDS, None)}
\trem.u32 \t%r11, {THREAD}, 3;
\tshl.b32 \t%r11, %r11, 3;
\tshl.b32 \t%r12, {THREAD}, 4;
\tadd.s32 \t%r12, %r12, {SHARED};
\tmul.wide.u32 \t%rd20, {THREAD}, 16;
\tadd.s64 \t%rd20, {INPUT}, %rd20;
\tcp.async.cg.shared.global \t[%r12], [%rd20], 16, %r11;
\tcp.async.commit_group;
\tshl.b32 \t%r13, {THREAD}, 2;
\tadd.s32 \t%r13, %r13, {SHARED};
\tmul.wide.u32 \t%rd21, {THREAD}, 4;
\tadd.s64 \t%rd21, {INPUT}, %rd21;
\tcp.async.ca.shared.global \t[%r13+{second}], [%rd21+64], 4, 4;
\tcp.async.commit_group;
\tcp.async.wait_group \t1;
\tcp.async.wait_group \t0;
\tbar.sync \t0;
{dump_shared(_COPY_THREADS, 0, _COPY_WORDS)}"""

    def expected(words: np.ndarray) -> np.ndarray:
        first = words[: 4 * _COPY_THREADS].reshape(_COPY_THREADS, 4).copy()
        for thread in range(_COPY_THREADS):
            first[thread, 2 * (thread % 3) :] = 0
        return np.concatenate([first.reshape(-1), words[16 : 16 + _COPY_THREADS]])

    return Probe(
        name=name,
        ptx=kernel_text(name, _COPY_THREADS, body),
        threads=_COPY_THREADS,
        shared_bytes=4 * _COPY_WORDS,
        input=np.random.default_rng(61).integers(0, 2**32, 4 * _COPY_THREADS, dtype=np.uint64).astype(np.uint32),
        output=unwritten(_COPY_WORDS),
        expected=expected,
    )


_WARPS, _ROUNDS = 4, 3


def _named_barrier_probe() -> Probe:
    """Warps 1 to 3 write a word per round and arrive at barrier 1; warp 0 waits there, adds the words, then frees them
    through barrier 2 (it arrives, the others wait). Three rounds: each barrier is used again and again."""
    name = "named_barriers"
    threads = 32 * _WARPS
    body = f"""{fill_shared(threads, threads, None)}
\tmul.wide.u32 \t%rd20, {THREAD}, 4;
\tadd.s64 \t%rd21, {INPUT}, %rd20;
\tadd.s64 \t%rd22, {OUTPUT}, %rd20;
\tld.global.b32 \t%r10, [%rd21];
\tshl.b32 \t%r11, {THREAD}, 2;
\tadd.s32 \t%r11, %r11, {SHARED};
\tmov.b32 \t%r12, 0;
\tsetp.lt.s32 \t%p2, {THREAD}, 32;
\t@%p2 bra \t$L__collect;
$L__write:
\tmul.lo.s32 \t%r13, %r10, %r12;
\tadd.s32 \t%r13, %r13, {THREAD};
\tst.shared.b32 \t[%r11], %r13;
\tbar.arrive \t1, {threads};
\tbar.sync \t2, {threads};
\tadd.s32 \t%r12, %r12, 1;
\tsetp.lt.s32 \t%p3, %r12, {_ROUNDS};
\t@%p3 bra \t$L__write;
\tbra \t$L__end;
$L__collect:
\tbar.sync \t1, {threads};
\tld.shared.b32 \t%r14, [%r11+128];
\tld.shared.b32 \t%r15, [%r11+256];
\tld.shared.b32 \t%r16, [%r11+384];
\tbar.arrive \t2, {threads};
\tadd.s32 \t%r14, %r14, %r15;
\tadd.s32 \t%r14, %r14, %r16;
\tst.global.b32 \t[%rd22], %r14;
\tadd.s64 \t%rd22, %rd22, 128;
\tadd.s32 \t%r12, %r12, 1;
\tsetp.lt.s32 \t%p3, %r12, {_ROUNDS};
\t@%p3 bra \t$L__collect;
$L__end:"""

    def expected(words: np.ndarray) -> np.ndarray:
        lane = np.arange(32, dtype=np.uint32)
        rounds = []
        for number in range(_ROUNDS):
            total = np.zeros(32, dtype=np.uint32)
            for warp in range(1, _WARPS):
                total += words[32 * warp + lane] * np.uint32(number) + (np.uint32(32 * warp) + lane)
            rounds.append(total)
        return np.concatenate([*rounds, np.full(32, UNWRITTEN, dtype=np.uint32)])

    return Probe(
        name=name,
        ptx=kernel_text(name, threads, body),
        threads=threads,
        shared_bytes=4 * threads,
        input=np.random.default_rng(62).integers(0, 2**32, threads, dtype=np.uint64).astype(np.uint32),
        output=unwritten(32 * (_ROUNDS + 1)),
        expected=expected,
    )


PROBES = (_cp_async_probe(), _named_barrier_probe())
