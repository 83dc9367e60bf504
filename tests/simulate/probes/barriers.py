"""Probes of mbarriers and bulk copies: phases and parities, transaction bytes, a two-stage ring, bulk reductions."""

from __future__ import annotations

import numpy as np

from fa4build.simulate.units.float_formats import add_f32
from tests.simulate.probes.probe import (
    INPUT,
    OUTPUT,
    SHARED,
    THREAD,
    UNWRITTEN,
    Probe,
    by_first_thread,
    dump_shared,
    fill_shared,
    kernel_text,
    new_barrier,
    unwritten,
    wait_for,
)

_BULK_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group"
_BULK_REDUCE = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"


def _phase_probe() -> Probe:
    """One thread asks for the parity after each event; 1 means the phase of that parity has completed.

    Barrier 0 counts 2 arrivals, barrier 8 one arrival and 64 bytes, barrier 16 counts 3.
    """
    name = "mbarrier_phases"
    answers: list[int] = []
    lines = [new_barrier(0, 2), new_barrier(8, 1), new_barrier(16, 3), "\tfence.mbarrier_init.release.cluster;"]

    def ask(barrier: int, parity: int, answer: int) -> None:
        # test_wait does not block: it returns what is true now.
        lines.append(
            f"\tmbarrier.test_wait.parity.shared.b64 \t%p2, [{SHARED}+{barrier}], {parity};\n"
            f"\tselp.b32 \t%r20, 1, 0, %p2;\n\tst.global.b32 \t[{OUTPUT}+{4 * len(answers)}], %r20;"
        )
        answers.append(answer)

    def arrive(barrier: int, count: int) -> None:
        lines.append(f"\tmbarrier.arrive.shared.b64 \t%rd20, [{SHARED}+{barrier}], {count};")

    ask(0, 0, 0)  # phase 0 is running
    ask(0, 1, 1)  # the phase before the first counts as complete
    arrive(0, 1)
    ask(0, 0, 0)
    arrive(0, 1)
    ask(0, 0, 1)  # two arrivals completed phase 0
    ask(0, 1, 0)  # phase 1 is running
    arrive(0, 2)  # one arrival of count 2 completes phase 1
    ask(0, 1, 1)
    ask(0, 0, 0)
    # Transactions: an arrival that expects 64 bytes, then 48 + 16 bytes.
    lines.append(f"\tmbarrier.arrive.expect_tx.shared.b64 \t%rd20, [{SHARED}+8], 64;")
    ask(8, 0, 0)
    lines.append(f"\tadd.s32 \t%r21, {SHARED}, 256;\n\tadd.s32 \t%r22, {SHARED}, 8;\n\tmov.b32 \t%r23, 48;")
    lines.append(f"\t{_BULK_LOAD} \t[%r21], [{INPUT}], %r23, [%r22];")
    lines.append(f"\tadd.s32 \t%r21, {SHARED}, 304;\n\tadd.s64 \t%rd21, {INPUT}, 48;\n\tmov.b32 \t%r23, 16;")
    lines.append(f"\t{_BULK_LOAD} \t[%r21], [%rd21], %r23, [%r22];")
    lines.append(wait_for(8, 0, "bytes"))
    ask(8, 0, 1)
    ask(8, 1, 0)
    arrive(16, 3)
    ask(16, 0, 1)
    body = fill_shared(32, 96, None) + by_first_thread("\n".join(lines), "one")

    return Probe(
        name=name,
        ptx=kernel_text(name, 32, body),
        threads=32,
        shared_bytes=512,
        input=np.arange(16, dtype=np.uint32),
        output=unwritten(len(answers)),
        expected=lambda words: np.array(answers, dtype=np.uint32),
    )


_RING_STEPS, _STAGES, _STAGE_WORDS = 7, 2, 64


def _ring_probe() -> Probe:
    """A producer warp fills a two-stage ring with bulk copies; two consumer warps read it, full/empty mbarriers.

    Consumer thread t writes word t of every step plus the step number: 7 steps wrap the ring three times.
    """
    name = "mbarrier_ring"
    full, empty, data = 0, 16, 1024
    stage_bytes = 4 * _STAGE_WORDS
    init = [new_barrier(full + 8 * s, 1) + "\n" + new_barrier(empty + 8 * s, _STAGE_WORDS) for s in range(_STAGES)]
    init.append("\tfence.mbarrier_init.release.cluster;")
    made = by_first_thread("\n".join(init), "made")
    body = f"""{made}
\tbar.sync \t0;
\tmov.b32 \t%r10, 0;
\tsetp.ge.s32 \t%p2, {THREAD}, 32;
\t@%p2 bra \t$L__consume;
\tsetp.ne.s32 \t%p3, {THREAD}, 0;
\t@%p3 bra \t$L__end;
$L__produce:
\tand.b32 \t%r11, %r10, 1;
\tshr.u32 \t%r12, %r10, 1;
\txor.b32 \t%r12, %r12, 1;
\tand.b32 \t%r12, %r12, 1;
\tshl.b32 \t%r13, %r11, 3;
\tadd.s32 \t%r13, %r13, {SHARED};
$L__wait_empty:
\tmbarrier.try_wait.parity.shared.b64 \t%p4, [%r13+{empty}], %r12;
\t@!%p4 bra \t$L__wait_empty;
\tmbarrier.arrive.expect_tx.shared.b64 \t%rd20, [%r13], {stage_bytes};
\tmul.lo.s32 \t%r14, %r11, {stage_bytes};
\tadd.s32 \t%r14, %r14, {SHARED};
\tadd.s32 \t%r14, %r14, {data};
\tmul.wide.u32 \t%rd21, %r10, {stage_bytes};
\tadd.s64 \t%rd21, {INPUT}, %rd21;
\tmov.b32 \t%r15, {stage_bytes};
\t{_BULK_LOAD} \t[%r14], [%rd21], %r15, [%r13];
\tadd.s32 \t%r10, %r10, 1;
\tsetp.lt.s32 \t%p5, %r10, {_RING_STEPS};
\t@%p5 bra \t$L__produce;
\tbra \t$L__end;
$L__consume:
\tsub.s32 \t%r16, {THREAD}, 32;
\tshl.b32 \t%r17, %r16, 2;
$L__next:
\tand.b32 \t%r11, %r10, 1;
\tshr.u32 \t%r12, %r10, 1;
\tand.b32 \t%r12, %r12, 1;
\tshl.b32 \t%r13, %r11, 3;
\tadd.s32 \t%r13, %r13, {SHARED};
$L__wait_full:
\tmbarrier.try_wait.parity.shared.b64 \t%p4, [%r13], %r12;
\t@!%p4 bra \t$L__wait_full;
\tmul.lo.s32 \t%r14, %r11, {stage_bytes};
\tadd.s32 \t%r14, %r14, {SHARED};
\tadd.s32 \t%r14, %r14, %r17;
\tld.shared.b32 \t%r18, [%r14+{data}];
\tadd.s32 \t%r18, %r18, %r10;
\tmbarrier.arrive.shared.b64 \t%rd20, [%r13+{empty}], 1;
\tmul.wide.u32 \t%rd22, %r10, {stage_bytes};
\tmul.wide.u32 \t%rd23, %r16, 4;
\tadd.s64 \t%rd22, %rd22, %rd23;
\tadd.s64 \t%rd22, {OUTPUT}, %rd22;
\tst.global.b32 \t[%rd22], %r18;
\tadd.s32 \t%r10, %r10, 1;
\tsetp.lt.s32 \t%p5, %r10, {_RING_STEPS};
\t@%p5 bra \t$L__next;
$L__end:"""

    def expected(words: np.ndarray) -> np.ndarray:
        steps = words.reshape(_RING_STEPS, _STAGE_WORDS) + np.arange(_RING_STEPS, dtype=np.uint32)[:, None]
        return steps.reshape(-1)

    return Probe(
        name=name,
        ptx=kernel_text(name, 32 + _STAGE_WORDS, body),
        threads=32 + _STAGE_WORDS,
        shared_bytes=data + _STAGES * stage_bytes,
        input=np.random.default_rng(31)
        .integers(0, 2**32, _RING_STEPS * _STAGE_WORDS, dtype=np.uint64)
        .astype(np.uint32),
        output=unwritten(_RING_STEPS * _STAGE_WORDS),
        expected=expected,
    )


_LOAD_SIZES = (16, 2048, 48, 128)
_BULK_WORDS = 1024


def _bulk_load_probe() -> Probe:
    """Bulk copies of several sizes from global to shared memory, one mbarrier for all."""
    name = "bulk_loads"
    lines = [f"\tmbarrier.arrive.expect_tx.shared.b64 \t%rd20, [{SHARED}], {sum(_LOAD_SIZES)};"]
    for number, size in enumerate(_LOAD_SIZES):
        # Sources 16 bytes apart from each other's ends, destinations in reverse order.
        source, target = sum(_LOAD_SIZES[:number]) + 16 * number, 1024 + sum(_LOAD_SIZES[number + 1 :])
        lines.append(f"\tadd.s64 \t%rd21, {INPUT}, {source};\n\tadd.s32 \t%r21, {SHARED}, {target};")
        lines.append(f"\tmov.b32 \t%r22, {size};\n\t{_BULK_LOAD} \t[%r21], [%rd21], %r22, [{SHARED}];")
    body = "".join(
        [
            fill_shared(32, (1024 + 4 * _BULK_WORDS) // 4, None),
            by_first_thread(f"{new_barrier(0, 1)}\n\tfence.mbarrier_init.release.cluster;", "made"),
            "\n\tbar.sync \t0;",
            by_first_thread("\n".join(lines), "issued"),
            wait_for(0, 0, "arrived"),
            dump_shared(32, 256, _BULK_WORDS),
        ]
    )

    def expected(words: np.ndarray) -> np.ndarray:
        memory = np.full(4 * _BULK_WORDS, UNWRITTEN & 0xFF, dtype=np.uint8)
        source = words.view(np.uint8)
        for number, size in enumerate(_LOAD_SIZES):
            start, target = sum(_LOAD_SIZES[:number]) + 16 * number, sum(_LOAD_SIZES[number + 1 :])
            memory[target : target + size] = source[start : start + size]
        return memory.view(np.uint32)

    return Probe(
        name=name,
        ptx=kernel_text(name, 32, body),
        threads=32,
        shared_bytes=1024 + 4 * _BULK_WORDS,
        input=np.random.default_rng(32).integers(0, 2**32, 640, dtype=np.uint64).astype(np.uint32),
        output=unwritten(_BULK_WORDS),
        expected=expected,
    )


def _bulk_reduce_probe() -> Probe:
    """A bulk store, then f32 reductions into other words of the output: nearest even, subnormals kept."""
    name = "bulk_reduce"
    rng = np.random.default_rng(33)
    output = rng.standard_normal(512).astype(np.float32)
    output[::5] = 1e-40
    source = rng.standard_normal(512).astype(np.float32)
    source[::7] = 1e-40
    source[1::9] = np.float32(2.0**-24)
    store, reduce_a, reduce_b = (0, 512, 0), (512, 1024, 512), (1600, 256, 1552)  # (shared, bytes, output)
    lines = []
    for opcode, (shared, size, target) in ((_BULK_STORE, store), (_BULK_REDUCE, reduce_a), (_BULK_REDUCE, reduce_b)):
        lines.append(f"\tadd.s32 \t%r21, {SHARED}, {shared};\n\tadd.s64 \t%rd21, {OUTPUT}, {target};")
        lines.append(f"\tmov.b32 \t%r22, {size};\n\t{opcode} \t[%rd21], [%r21], %r22;")
        lines.append("\tcp.async.bulk.commit_group;")
    lines.append("\tcp.async.bulk.wait_group.read \t1;\n\tcp.async.bulk.wait_group \t0;")
    body = fill_shared(32, 512, INPUT) + by_first_thread("\n".join(lines), "done")

    def expected(words: np.ndarray) -> np.ndarray:
        result = output.view(np.uint32).copy()
        result[:128] = words[:128]
        for shared, size, target in (reduce_a, reduce_b):
            at, count = target // 4, size // 4
            result[at : at + count] = add_f32(result[at : at + count], words[shared // 4 : shared // 4 + count])
        return result

    return Probe(
        name=name,
        ptx=kernel_text(name, 32, body),
        threads=32,
        shared_bytes=2048,
        input=source.view(np.uint32),
        output=output.view(np.uint32),
        expected=expected,
    )


PROBES = (_phase_probe(), _ring_probe(), _bulk_load_probe(), _bulk_reduce_probe())
