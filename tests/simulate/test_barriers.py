"""mbarriers, named barriers, the cluster barrier, register budgets, and the deadlock report.

An mbarrier's phase ends when its arrivals and its bytes are both complete; waiting for parity p passes when the
phase in progress has the other parity. What can never happen is said with phase, counts, place and last arrivals.
"""

import pytest

from fa4build.errors import SimulationError
from tests.simulate.ptx_snippets import result, run

INIT = """
    mov.b32 %r5, smem;
    setp.ne.s32 %p1, %r0, 0;
    @%p1 bra INITED;
    mov.b32 %r6, {count};
    mbarrier.init.shared.b64 [%r5], %r6;
INITED:
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
WAIT = (
    "{{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r5], {parity}, 10000000; @P bra.uni D; "
    "bra.uni W; D: }}"
)


def _wait(parity: int) -> str:
    return WAIT.format(parity=parity)


def test_every_lane_arrives_by_itself():
    """A barrier of 64 completes when two warps arrive with all lanes."""
    body = (
        INIT.format(count=64)
        + "mbarrier.arrive.shared.b64 %rd9, [%r5];"
        + _wait(0)
        + "mov.b32 %r9, 1;"
        + result(0, "%r9")
    )

    assert run(body, threads=64)[:, 0].tolist() == [1] * 64


def test_fresh_barrier_passes_parity_one():
    """The phase before the first counts as over: producers start with parity 1."""
    body = INIT.format(count=1) + _wait(1) + "mov.b32 %r9, 1;" + result(0, "%r9")

    assert run(body)[0, 0] == 1


def test_phases_alternate():
    """Two phases: parity 0, then parity 1; a non-blocking test in between reports the truth."""
    body = (
        INIT.format(count=32)
        + "mbarrier.arrive.shared.b64 %rd9, [%r5];"
        + _wait(0)
        + "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r5], 1; selp.b32 %r9, 1, 0, %p2;"
        + result(0, "%r9")
        + "mbarrier.arrive.shared.b64 %rd9, [%r5];"
        + _wait(1)
        + "mbarrier.test_wait.parity.shared.b64 %p2, [%r5], 1; selp.b32 %r10, 1, 0, %p2;"
        + result(1, "%r10")
    )

    assert run(body, words=2)[0].tolist() == [0, 1]


def test_bytes_may_come_before_they_are_expected():
    """complete_tx before expect_tx within a phase: the count goes negative and back; the phase ends only at zero."""
    body = (
        INIT.format(count=1)
        + "setp.ne.s32 %p1, %r0, 0; @%p1 bra AFTER; mbarrier.complete_tx.relaxed.cta.shared.b64 [%r5], 128; "
        "mov.b32 %r7, 128;"
        "mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r5], %r7; AFTER:"
        + _wait(0)
        + "mov.b32 %r9, 1;"
        + result(0, "%r9")
    )

    assert run(body)[0, 0] == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(INIT.format(count=16) + "mbarrier.arrive.shared.b64 %rd9, [%r5];", r"32 arrivals at "
            r"mbarrier smem\+0.*expects only 16 more of 16.*over-arrival", id="over-arrival"),
        pytest.param("mov.b32 %r5, smem; mbarrier.arrive.shared.b64 %rd9, [%r5+8];", r"no initialised "
            r"mbarrier at smem\+8", id="not-initialised"),
        pytest.param("mov.b32 %r5, smem; mbarrier.arrive.shared.b64 %rd9, [%r5+4];",
            r"not a multiple of 8", id="misaligned"),
        pytest.param(INIT.format(count=1) + INIT.format(count=1).replace("INITED", "I2"), r"initialised "
            r"twice", id="twice"),
        pytest.param(INIT.format(count=0), r"count 0 is outside", id="count-zero"),
        pytest.param("mov.b32 %r5, 0x1000400; mbarrier.arrive.shared::cluster.b64 _, [%r5], 1;", r"names CTA "
            r"rank 1; the cluster has 1 CTAs", id="other-cta"),
    ],
)  # fmt: skip
def test_mbarrier_misuse(body, message):
    """Each misuse is named."""
    with pytest.raises(SimulationError, match=message):
        run(body)


def test_deadlock_report_says_who_waits_for_what():
    """A barrier of 64 with 32 arrivals: phase, pending arrivals, who arrived where, and the waiting line."""
    body = INIT.format(count=64) + "mbarrier.arrive.shared.b64 %rd9, [%r5];" + _wait(0)
    with pytest.raises(SimulationError) as caught:
        run(body, launch={"shared_names": (("k_full", 0, 16, 8),)})
    text = str(caught.value)

    assert "deadlock" in text
    assert "mbarrier k_full[0] of CTA 0, parity 0: phase 0, 32 of 64 arrivals pending, 0 bytes outstanding" in text
    assert "warp 0 of CTA 0 at line" in text
    assert "mbarrier.try_wait" in text


def test_deadlock_report_shows_the_cycle():
    """Two warps that each wait for the other's second arrival: the ring is named."""
    body = (
        INIT.replace("mov.b32 %r6, {count};", "mov.b32 %r6, 32; mbarrier.init.shared.b64 [%r5+8], %r6;").format()
        + "setp.ge.s32 %p3, %r0, 32; @%p3 bra OTHER; mbarrier.arrive.shared.b64 %rd9, [%r5+8];"
        + _wait(0)
        + "{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r5], 1, 10000000; @P bra.uni D; bra.uni W; D: }"
        "bra.uni OUT; OTHER: mbarrier.arrive.shared.b64 %rd9, [%r5]; add.s32 %r5, %r5, 8;"
        + _wait(0)
        + "{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r5], 1, 10000000; @P bra.uni D; "
        "bra.uni W; D: } OUT:"
    )
    with pytest.raises(SimulationError, match=r"cycle: .*, warp 1 -> .*, warp 0 -> .*, warp 1"):
        run(body, threads=64)


def test_arrival_at_a_cta_that_has_exited_is_an_error():
    """Rank 1 signals rank 0 and leaves; rank 0 signals back: that shared memory is gone."""
    body = (
        INIT.format(count=1)
        + "barrier.cluster.arrive; barrier.cluster.wait; mov.u32 %r10, %cluster_ctarank; xor.b32 %r12, %r10, 1;"
        "mapa.shared::cluster.u32 %r11, %r5, %r12; setp.eq.s32 %p3, %r10, 0; @%p3 bra RANK0;"
        "@!%p1 mbarrier.arrive.shared::cluster.b64 _, [%r11], 1; ret; RANK0:"
        + _wait(0)
        + "@!%p1 mbarrier.arrive.shared::cluster.b64 _, [%r11], 1;"
    )
    with pytest.raises(SimulationError, match=r"of CTA rank 1, which has exited"):
        run(body, grid=2, cluster=2)


def test_waiter_two_phases_late_is_an_error():
    """One warp waits for phase 0 while another ends phases 0 and 1 before it looks: the parity is back where it was."""
    body = (
        INIT.format(count=32)
        + "setp.ge.s32 %p3, %r0, 32; @%p3 bra OTHER; bar.arrive 1, 64;"
        + _wait(0)
        + "bra.uni OUT; OTHER: bar.sync 1, 64; mbarrier.arrive.shared.b64 %rd9, [%r5];"
        "mbarrier.arrive.shared.b64 %rd9, [%r5]; OUT:"
    )
    with pytest.raises(SimulationError, match=r"waits for the end of phase 0 of mbarrier smem\+0, which is in phase 2"):
        run(body, threads=64)


def test_missing_bytes_are_a_deadlock_with_the_byte_count():
    """expect_tx of 64 bytes that no copy brings."""
    body = (
        INIT.format(count=1)
        + "setp.ne.s32 %p1, %r0, 0; @%p1 bra AFTER; mov.b32 %r7, 64; mbarrier.arrive.expect_tx.shared.b64 "
        "%rd9, [%r5], %r7; AFTER:" + _wait(0)
    )
    with pytest.raises(SimulationError, match=r"0 of 1 arrivals pending, 64 bytes outstanding"):
        run(body)


def test_named_barrier_of_producer_and_consumer():
    """One warp arrives, the other waits: the data written before the arrival is there."""
    body = """
        mov.b32 %r5, smem; setp.ge.s32 %p1, %r0, 32; @%p1 bra CONSUMER;
        shl.b32 %r6, %r0, 2; add.s32 %r6, %r6, %r5; st.shared.b32 [%r6], 9; bar.arrive 3, 64; bra.uni OUT;
    CONSUMER:
        bar.sync 3, 64; sub.s32 %r6, %r0, 32; shl.b32 %r6, %r6, 2; add.s32 %r6, %r6, %r5; ld.shared.b32 %r9, [%r6];
        st.global.b32 [%rd0], %r9;
    OUT:
    """
    for schedule in ("eager", "late", "random"):
        assert run(body, threads=64, schedule=schedule)[:, 0].tolist() == [0] * 32 + [9] * 32


def test_arrivals_are_counted_even_twice_by_one_warp():
    """arrive and then sync by one warp make 64: the hardware counts arrivals, not warps."""
    body = "bar.arrive 1, 64; bar.sync 1, 64; mov.b32 %r9, 1;" + result(0, "%r9")

    assert run(body)[0, 0] == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(
            "bar.sync 1, 64;", r"named barrier 1: 32 of 64 threads arrived \(warp 0 at line \d+\)", id="too-few"
        ),
        pytest.param("bar.sync 16, 32;", r"barrier number 16 is outside 0..15", id="number"),
        pytest.param("bar.sync 1, 40;", r"thread count 40 is not a positive multiple of 32", id="count"),
    ],
)
def test_named_barrier_misuse(body, message):
    """Wrong counts and numbers."""
    with pytest.raises(SimulationError, match=message):
        run(body)


def test_disagreeing_counts_of_one_generation():
    """Two warps give different thread counts to one barrier."""
    body = "setp.ge.s32 %p1, %r0, 32; mov.b32 %r5, 64; @%p1 mov.b32 %r5, 96; bar.sync 1, %r5;"
    with pytest.raises(SimulationError, match=r"thread count must be the same|gives thread count 96"):
        run(body, threads=64, launch={"by_warp": True})


def test_cluster_barrier_and_remote_arrive():
    """Rank 1 arrives at rank 0's barrier through mapa; rank 0 waits for it."""
    body = (
        INIT.format(count=1)
        + "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
        + "mov.u32 %r10, %cluster_ctarank; setp.eq.s32 %p3, %r10, 0; @%p3 bra RANK0;"
        + "setp.ne.s32 %p4, %r0, 0; @%p4 bra LEAVE; mapa.shared::cluster.u32 %r11, %r5, 0; "
        "mbarrier.arrive.shared::cluster.b64 _, [%r11], 1; bra.uni LEAVE;"
        + "RANK0:"
        + _wait(0)
        + "mov.b32 %r9, 4;"
        + result(0, "%r9")
        + "LEAVE: barrier.cluster.arrive; barrier.cluster.wait;"
    )

    assert run(body, grid=2, cluster=2)[[0, 32], 0].tolist() == [4, 0]


def test_cluster_wait_without_arrive_is_an_error():
    """A wait belongs to an arrive of the same thread."""
    with pytest.raises(SimulationError, match=r"barrier.cluster.wait without an arrive"):
        run("barrier.cluster.wait;", grid=2, cluster=2)


def test_register_pool_blocks_an_increase_until_others_release():
    """Two warpgroups at 128: one grows to 200 only after the other shrank to 56; the pool is exactly used up."""
    body = """
        setp.ge.s32 %p1, %r0, 128; @%p1 bra GROW;
        setmaxnreg.dec.sync.aligned.u32 56; bra.uni OUT;
    GROW:
        setmaxnreg.inc.sync.aligned.u32 200;
    OUT:
    """
    run(body, threads=256, launch={"registers": 128})
    with pytest.raises(
        SimulationError,
        match=r"18432 registers for setmaxnreg.inc; the CTA's pool has 18304 free|registers for setmaxnreg",
    ):
        run(body.replace("200", "208"), threads=256, launch={"registers": 128})


def test_trap_is_reported():
    """An assertion of the kernel."""
    with pytest.raises(SimulationError, match="trap executed"):
        run("trap;")
