"""Contract of the native engine's machine: memory, barriers, copies, branches and errors are those of the Python
engine, in every schedule, with and without checks.

Where a text names the warps of a gang, the native engine names one of them; `without_places` leaves them out.
"""

import numpy as np
import pytest

from fa4build.errors import SimulationError
from fa4build.simulate import SimLaunch
from fa4build.simulate.hardware.engine import SCHEDULES
from fa4build.simulate.native.build import library
from fa4build.simulate.native.orders import BACKWARD, ORDERS, Order, starving
from fa4build.simulate.native.run import run_launch
from tests.simulate.native.engine_pair import Values, assert_equal, both, run_in, without_places
from tests.simulate.ptx_snippets import result, text_of

WINDOW = "mov.u32 %r12, smem; shl.b32 %r13, %r0, 4; add.s32 %r13, %r13, %r12;"
READY = (
    "mov.u32 %r5, smem; setp.eq.s32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r5], 1;"
    "@%p1 fence.mbarrier_init.release.cluster; bar.sync 0;"
)
WAIT = "LOOP: mbarrier.try_wait.parity.shared.b64 %p3, [%r5], 0, 1000; @!%p3 bra LOOP;"
TEST = "LOOP: mbarrier.try_wait.parity.shared.b64 %p3, [%r5], 0; @!%p3 bra LOOP;"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checks", [False, True])
def test_words_go_through_shared_memory_from_thread_to_thread(schedule, checks, monkeypatch):
    """A reversal of 128 threads: v4 stores, a barrier, loads."""
    body = (
        f"{WINDOW} st.shared.v4.b32 [%r13], {{%r1, %r2, %r1, %r0}}; bar.sync 0; xor.b32 %r14, %r0, 127;"
        "shl.b32 %r14, %r14, 4; add.s32 %r14, %r14, %r12; ld.shared.v2.b32 {%r15, %r16}, [%r14];"
        f"ld.shared.u8 %r17, [%r14+12]; {result(0, '%r15')}{result(1, '%r16')}{result(2, '%r17')}"
    )
    words = Values().words

    outcome = assert_equal(
        body, words(128), words(128), threads=128, words=3, schedule=schedule, checks=checks, monkeypatch=monkeypatch
    )

    assert outcome.error == ""


LOOP = (
    "and.b32 %r4, %r1, 15; mov.b32 %r9, 0; mov.b32 %r10, 0;"
    "TOP: setp.ge.u32 %p1, %r10, %r4; @%p1 bra DONE; and.b32 %r5, %r10, 1; setp.eq.s32 %p2, %r5, 0;"
    "@%p2 bra EVEN; add.s32 %r9, %r9, 100; bra.uni NEXT; EVEN: add.s32 %r9, %r9, 1; NEXT: add.s32 %r10, %r10, 1;"
    f"bra.uni TOP; DONE: {result(0, '%r9')}"
)
EARLY = f"{result(0, '%r1')} setp.lt.u32 %p1, %r0, 21; @%p1 ret; add.s32 %r9, %r1, 1; {result(0, '%r9')}"


@pytest.mark.parametrize("body", [LOOP, EARLY], ids=["loop", "early-exit"])
@pytest.mark.parametrize("threads", [32, 72])
def test_lanes_that_go_apart_meet_again(body, threads, monkeypatch):
    """Loops of different lengths, an if inside, lanes that leave early, a block that is no whole number of warps."""
    outcome = assert_equal(body, Values().words(threads), threads=threads, monkeypatch=monkeypatch)

    assert outcome.error == ""


COPIES = {
    "cp.async": f"{WINDOW} shl.b32 %r14, %r0, 4; cvt.u64.u32 %rd5, %r14; add.s64 %rd5, %rd5, %rd2;"
    "cp.async.cg.shared.global [%r13], [%rd5], 16, 12; cp.async.commit_group; cp.async.wait_group 0;"
    f"ld.shared.v4.b32 {{%r15, %r16, %r17, %r18}}, [%r13]; {result(0, '%r16')}{result(1, '%r18')}",
    "bulk": f"{READY} @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 512;"
    "add.s32 %r6, %r5, 128; @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    f" [%r6], [%rd2], 512, [%r5]; {WAIT} shl.b32 %r14, %r0, 4; add.s32 %r14, %r14, %r6;"
    f"ld.shared.v2.b32 {{%r15, %r16}}, [%r14]; {result(0, '%r15')}{result(1, '%r16')}",
    "store": f"{WINDOW} st.shared.v4.b32 [%r13], {{%r0, %r0, %r0, %r0}}; fence.proxy.async.shared::cta; bar.sync 0;"
    "setp.eq.s32 %p1, %r0, 0; @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r12], 256;"
    "@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd2+512], [%r12], 128;"
    "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_moves_the_same_bytes_in_every_schedule(name, schedule, monkeypatch):
    """With checks, whose findings would be errors here."""
    data = np.arange(256, dtype=np.uint32)

    outcome = assert_equal(
        COPIES[name], words=2, data=data, schedule=schedule, checks=True, smem=4096, monkeypatch=monkeypatch
    )

    assert outcome.error == ""


ATOMICS = [
    "add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "exch.b32", "inc.u32", "dec.u32", "add.f32",
]  # fmt: skip


@pytest.mark.parametrize("operation", ATOMICS)
def test_lanes_are_served_in_order_by_an_atomic(operation, monkeypatch):
    """Each sees the result of the one before."""
    values = Values().floats(32) if operation.endswith("f32") else Values().words(32) & 0xFF
    body = f"atom.global.{operation} %r9, [%rd2], %r1; {result(0, '%r9')}"

    outcome = assert_equal(body, values, data=np.array([5, 6], np.uint32), monkeypatch=monkeypatch)

    assert outcome.error == ""


FAULTS = {
    "misaligned": f"{WINDOW} ld.shared.b32 %r9, [%r13+2];",
    "outside shared": f"{WINDOW} st.shared.b32 [%r13+8192], %r0;",
    "outside global": "ld.global.b32 %r9, [%rd2+4096];",
    "division": "div.s32 %r9, %r0, %r0;",
    "no barrier": "mov.u32 %r5, smem; mbarrier.arrive.shared.b64 _, [%r5], 1;",
    "twice": "mov.u32 %r5, smem; setp.eq.s32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r5], 1;"
    "@%p1 mbarrier.init.shared.b64 [%r5], 1;",
    "over-arrival": "mov.u32 %r5, smem; setp.eq.s32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r5], 1;"
    "mbarrier.arrive.shared.b64 _, [%r5], 1;",
    "barrier number": "bar.sync 16;",
    "apart": "setp.eq.s32 %p1, %r0, 0; @%p1 bar.sync 0;",
    "trap": "trap;",
    "members": "setp.eq.s32 %p1, %r0, 0; @!%p1 bra OUT; shfl.sync.idx.b32 %r9, %r1, 0, 31, -1; OUT:",
    "deadlock": f"{READY} {WAIT}",
    "poll": "LOOP: ld.global.acquire.gpu.b32 %r9, [%rd2]; setp.eq.s32 %p1, %r9, 0; @%p1 bra LOOP;",
    "uninitialised": f"{WINDOW} ld.shared.b32 %r9, [%r13]; {result(0, '%r9')}",
    "bulk left": f"{WINDOW} st.shared.v4.b32 [%r13], {{%r0, %r0, %r0, %r0}}; fence.proxy.async.shared::cta;"
    "bar.warp.sync -1; setp.eq.s32 %p1, %r0, 0;"
    "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r12], 256;",
    "no fence": f"{WINDOW} st.shared.v4.b32 [%r13], {{%r0, %r0, %r0, %r0}}; bar.warp.sync -1;"
    "setp.eq.s32 %p1, %r0, 0; @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r12], 256;"
    "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
    "undefined": f"add.s32 %r9, %r44, 1; {result(0, '%r9')}",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_in_the_same_words(name, monkeypatch):
    """One warp, with checks: errors and findings, text by text."""
    python, native = both(
        FAULTS[name], np.arange(32, dtype=np.uint32), data=np.zeros(64, np.uint32), checks=True, monkeypatch=monkeypatch
    )

    assert native.error
    assert without_places(python.error) == without_places(native.error)


def test_hazards_before_a_deadlock_are_told_with_it(monkeypatch):
    """They may be its cause; the Python engine tells the deadlock alone."""
    body = f"{WINDOW} ld.shared.b32 %r9, [%r13+1024]; {READY} {WAIT}"
    python, native = both(body, checks=True, monkeypatch=monkeypatch)

    assert "deadlock" in python.error
    assert "deadlock" in native.error
    assert "hazards found before that" in native.error
    assert "R9 " in native.error


def test_a_miss_of_a_barrier_test_at_random_is_no_wait_for_the_next_phase(monkeypatch):
    """A test that reports false although the phase is over must be asked again: no seed may end in a deadlock."""
    body = f"{READY} @%p1 mbarrier.arrive.shared.b64 _, [%r5], 1; bar.sync 0; {TEST} {result(0, '%r0')}"
    for seed in range(40):
        _, native = both(body, threads=64, schedule="random", seed=seed, monkeypatch=monkeypatch)
        assert native.error == ""


def test_clusters_exchange_words(monkeypatch):
    """mapa, remote arrive, ld.shared::cluster, the cluster barrier, two clusters in flight."""
    body = (
        f"{READY} mov.u32 %r7, %cluster_ctarank; xor.b32 %r8, %r7, 1; {WINDOW} st.shared.b32 [%r13+64], %a1;"
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
        "mapa.shared::cluster.u32 %r14, %r13, %r8; ld.shared::cluster.b32 %r9, [%r14+64];"
        "mapa.shared::cluster.u32 %r15, %r5, %r8;"
        "@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r15], 1;"
        f"{WAIT} barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; {result(0, '%r9')}"
    )
    for schedule in SCHEDULES:
        outcome = assert_equal(
            body, grid=4, cluster=2, schedule=schedule, concurrent_clusters=2, checks=True, monkeypatch=monkeypatch
        )
        assert outcome.error == ""


TICKETS = f"atom.global.add.u32 %r9, [%rd2], 1; {result(0, '%r9')}"


def test_orders_are_data_and_change_who_comes_first(monkeypatch):
    """Warps forward and backward, one starved, clusters in reverse: tickets of an atomic show the order. Clusters start
    in the order of the grid, so only those that are in flight together can run in reverse."""

    def firsts(order: Order, **options) -> list[int]:
        outcome = run_in(
            "native", TICKETS, data=np.zeros(1, np.uint32), schedule=order, monkeypatch=monkeypatch, **options
        )
        return outcome.words[::32, 0].tolist()

    assert firsts(Order(), threads=96) == [0, 32, 64]
    assert firsts(Order(warps=BACKWARD), threads=96) == [64, 32, 0]
    assert firsts(starving(range(1)), threads=96) == [64, 0, 32]
    assert firsts(Order(reversed_clusters=True), grid=3) == [0, 32, 64]
    assert firsts(Order(reversed_clusters=True), grid=3, concurrent_clusters=3) == [64, 32, 0]
    assert firsts(Order(reversed_clusters=True), grid=3, concurrent_clusters=2) == [32, 0, 64]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("copy", COPIES)
def test_every_order_gives_the_same_bytes(name, copy, monkeypatch):
    """With checks."""
    data = np.arange(256, dtype=np.uint32)
    options = {"words": 2, "data": data, "checks": True, "monkeypatch": monkeypatch}

    plain, other = (run_in("native", COPIES[copy], schedule=s, **options) for s in ("eager", name))

    assert plain.error == other.error == ""
    assert plain.words.tolist() == other.words.tolist()
    assert plain.data.tolist() == other.data.tolist()


@pytest.mark.parametrize("schedule", ["eager", "random"])
def test_registers_hold_poison_when_a_warp_starts(schedule, monkeypatch):
    """Those of a warp that has ended are poisoned again where its code wrote: words, wide ones, predicates."""
    for body in (LOOP, EARLY, *COPIES.values()):
        run_in("native", body, Values().words(32), data=np.zeros(256, np.uint32), words=2, schedule=schedule,
               monkeypatch=monkeypatch)  # fmt: skip

    assert library().sim_kept_is_poison()


def test_a_launch_that_does_not_fit_its_ptx_is_refused(monkeypatch):
    """Before the engine is asked: the same sentences."""
    launch = SimLaunch(kernel="snippet", grid=(1, 1, 1), block=(64, 1, 1), parameters=b"\0" * 24)

    with pytest.raises(SimulationError, match=r"launched with 64 threads, the PTX requires 32"):
        run_launch(text_of(""), launch, None)
    crowd = SimLaunch(kernel="snippet", grid=(32, 1, 1), block=(32, 1, 1), cluster=(32, 1, 1), parameters=b"\0" * 24)
    with pytest.raises(SimulationError, match=r"a cluster of 32 CTAs; the native engine runs up to 16"):
        run_launch(text_of(""), crowd, None)
    with pytest.raises(SimulationError, match="schedule 'never' is unknown"):
        run_launch(text_of(""), launch, None, schedule="never")
