"""The hazard checks on small programs: each rule finds its fault, and the right program next to it is clean.

Every case is a pair: a program with the fault, and the same with one line added that makes it right.
"""

import numpy as np
import pytest

from fa4build.errors import SimulationError
from tests.simulate.ptx_snippets import result, run, run_report

INIT = """
    mov.b32 %r5, smem; mov.b32 %r6, 1; setp.ne.s32 %p1, %r0, 0;
    @%p1 bra INITED; mbarrier.init.shared.b64 [%r5], %r6; INITED:
    fence.mbarrier_init.release.cluster; bar.sync 0; shl.b32 %r8, %r0, 2; add.s32 %r8, %r8, %r5;
"""
WAIT = "{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r5], 0, 10000000; @P bra.uni D; bra.uni W; D: }"
LOAD = (
    "@%p1 bra ISSUED; mov.b32 %r7, 256; mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r5], %r7; add.s32 %r9, %r5, 256;"
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%rd2], %r7, [%r5]; ISSUED:"
)
STORE = (
    "@%p1 bra STORED; mov.b32 %r7, 128; add.s32 %r9, %r5, 256; cp.async.bulk.global.shared::cta.bulk_group "
    "[%rd2], [%r9], %r7;"
    "cp.async.bulk.commit_group; {wait} STORED:"
)
READ = "ld.shared.b32 %r10, [%r8+256];" + result(0, "%r10")
FILL = "st.shared.b32 [%r8+256], %r0;"
READ_DONE = "cp.async.bulk.wait_group.read 0;"
FENCE = "fence.proxy.async.shared::cta;"


def _check(body: str, **options) -> None:
    run(body, data=np.zeros(64, np.uint32), checks=True, **options)


# name, rule, faulty program, right program
PAIRS = [
    pytest.param(
        r"R1 .*ld\.shared.*reads smem\+256 while the write by asynchronous copies of mbarrier smem\+0.* is "
        r"not known to be complete",
        INIT + LOAD + READ + WAIT,
        INIT + LOAD + WAIT + READ,
        id="read-before-the-copy-has-landed",
    ),
    pytest.param(
        r"R1 CTA rank 0 warps 0-1.*reads smem\+\d+ while the write by warp \d of CTA 0",
        INIT + FILL + "xor.b32 %r8, %r8, 128;" + READ,
        INIT + FILL + "bar.sync 0; xor.b32 %r8, %r8, 128;" + READ,
        id="read-of-another-warp-without-a-barrier",
    ),
    pytest.param(
        r"R2 .*st\.shared.*overwrites smem\+256 while the read by bulk of warp 0.* is not known to be over",
        INIT
        + FILL
        + FENCE
        + "bar.sync 0;"
        + STORE.format(wait="")
        + "bar.sync 0;"
        + FILL
        + "@%p1 bra END;"
        + READ_DONE
        + "END:",
        INIT + FILL + FENCE + "bar.sync 0;" + STORE.format(wait=READ_DONE) + "bar.sync 0;" + FILL,
        id="source-reused-before-it-was-read",
    ),
    pytest.param(
        r"R3 .*st\.shared.*writes smem\+\d+ while the write by warp",
        INIT + FILL + "xor.b32 %r8, %r8, 128;" + FILL,
        INIT + FILL + "bar.sync 0; xor.b32 %r8, %r8, 128;" + FILL,
        id="two-warps-write-unordered",
    ),
    pytest.param(
        r"R4 .*the asynchronous proxy reads smem\+256 written by .*st\.shared.* without a fence\.proxy\.async",
        INIT + FILL + "bar.sync 0;" + STORE.format(wait=READ_DONE),
        INIT + FILL + FENCE + "bar.sync 0;" + STORE.format(wait=READ_DONE),
        id="missing-proxy-fence",
    ),
    pytest.param(
        r"R5 .*generic read of the bytes of an mbarrier",
        INIT + "ld.shared.b32 %r10, [%r5+4];",
        INIT,
        id="mbarrier-read-as-data",
    ),
    pytest.param(
        r"R5-exit CTA \(0, 0, 0\) exits with mbarrier smem\+0 unbalanced: phase 0, 0 of 1 arrivals pending, "
        r"64 bytes outstanding",
        INIT + "@%p1 bra END; mov.b32 %r7, 64; mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r5], %r7; END:",
        INIT + "@%p1 bra END; mbarrier.arrive.shared.b64 %rd9, [%r5]; END:",
        id="bytes-expected-but-never-brought",
    ),
    pytest.param(
        r"R5-exit .*half-complete phase of mbarrier smem\+0: phase 0, 1 of 2 arrivals pending",
        INIT.replace("%r6, 1;", "%r6, 2;", 1) + "@%p1 bra END; mbarrier.arrive.shared.b64 %rd9, [%r5]; END:",
        INIT.replace("%r6, 1;", "%r6, 2;", 1) + "@%p1 bra END; mbarrier.arrive.shared.b64 %rd9, [%r5], 2; END:",
        id="leftover-arrivals",
    ),
    pytest.param(
        r"R9 .*reads shared memory never written, smem\+256",
        INIT + READ,
        INIT + FILL + READ,
        id="uninitialised-shared-memory",
    ),
    pytest.param(
        r"R12 CTA \(0, 0, 0\) warp 0 exits while bulk store of 128 bytes to data at line \d+ may still read "
        r"shared memory",
        INIT + FILL + FENCE + "bar.sync 0;" + STORE.format(wait=""),
        INIT + FILL + FENCE + "bar.sync 0;" + STORE.format(wait=READ_DONE),
        id="exit-with-a-store-under-way",
    ),
    pytest.param(
        r"R12 .*exits with an uncommitted bulk store",
        INIT + FILL + FENCE + "bar.sync 0;" + STORE.format(wait="").replace("cp.async.bulk.commit_group;", ""),
        INIT + FILL + FENCE + "bar.sync 0;" + STORE.format(wait=READ_DONE),
        id="store-never-committed",
    ),
]


@pytest.mark.parametrize(("message", "faulty", "right"), PAIRS)
def test_fault_is_found_and_its_repair_is_clean(message, faulty, right):
    """The faulty program raises with rule and places; the right one passes in every schedule."""
    with pytest.raises(SimulationError, match=message):
        _check(faulty, threads=64)
    for schedule in ("eager", "late", "random"):
        _check(right, threads=64, schedule=schedule)


def test_checks_are_off_by_default():
    """A racy program runs when nobody asks."""
    run(INIT + READ, data=np.zeros(64, np.uint32), threads=64)


def test_allowed_rules_become_notes():
    """A known pattern can be allowed by its rule."""
    _check(INIT + READ, threads=64, allowed=("R9",))


def test_bytes_of_neighbours_in_one_granule_are_told_apart():
    """Two warps use alternate words of the same 16 bytes: no race."""
    body = (
        INIT + "shr.u32 %r11, %r0, 5; shl.b32 %r11, %r11, 2; add.s32 %r12, %r5, %r11; st.shared.b32 [%r12+512], "
        "%r0; ld.shared.b32 %r10, [%r12+512];"
    )
    _check(body, threads=64)


def test_producer_consumer_through_a_named_barrier_is_ordered():
    """bar.arrive releases, bar.sync acquires."""
    body = (
        INIT + "setp.ge.s32 %p3, %r0, 32; @%p3 bra CONSUMER; st.shared.b32 [%r8+256], %r0; bar.arrive 2, 64; "
        "bra.uni OUT; CONSUMER: bar.sync 2, 64;"
        "ld.shared.b32 %r10, [%r8+128]; OUT:"
    )
    _check(body, threads=64)


def test_order_is_transitive_over_two_barriers():
    """Warp 0 writes and arrives at barrier 1; warp 1 passes it and arrives at barrier 2; warp 2 passes that and
    may read.
    """
    body = (
        INIT + "shr.u32 %r11, %r0, 5; and.b32 %r12, %r0, 31; shl.b32 %r12, %r12, 2; add.s32 %r12, %r12, %r5;"
        "setp.eq.s32 %p3, %r11, 1; @%p3 bra ONE; setp.eq.s32 %p3, %r11, 2; @%p3 bra TWO;"
        "st.shared.b32 [%r12+256], %r0; bar.arrive 1, 64; bra.uni OUT; ONE: bar.sync 1, 64; bar.arrive 2, "
        "64; bra.uni OUT;"
        "TWO: bar.sync 2, 64; ld.shared.b32 %r10, [%r12+256]; OUT:"
    )
    _check(body, threads=96)
    with pytest.raises(SimulationError, match=r"R2 .*overwrites smem\+256 while the read by warp 2"):
        _check(body.replace("bar.sync 1, 64; bar.arrive 2, 64;", "bar.arrive 2, 64; bar.sync 1, 64;"), threads=96)


def test_unequal_register_budgets_of_a_warpgroup():
    """All warps of a warpgroup must execute the same setmaxnreg."""
    body = (
        "setp.lt.s32 %p1, %r0, 96; @!%p1 bra OTHER; setmaxnreg.dec.sync.aligned.u32 24; bra.uni OUT; "
        "OTHER: setmaxnreg.dec.sync.aligned.u32 32; OUT:"
    )
    with pytest.raises(
        SimulationError, match=r"R14 warps 0-3 have unequal register budgets: setmaxnreg \[\(24,\), \(32,\)\]"
    ):
        _check(body, threads=128)


def test_every_finding_is_in_the_message():
    """One run reports all faults, not just the first."""
    with pytest.raises(SimulationError, match=r"2 hazards:") as caught:
        _check(INIT + READ + "ld.shared.b32 %r11, [%r5];", threads=32)

    assert "R9" in str(caught.value)
    assert "R5" in str(caught.value)


def test_lanes_of_a_warp_need_a_warp_barrier():
    """Lane i reads what lane 31-i wrote: a note without bar.warp.sync, silence with it."""
    body = (
        "mov.b32 %r5, smem; shl.b32 %r6, %r0, 4; add.s32 %r7, %r5, %r6; st.shared.v4.b32 [%r7+64], {{%r0, "
        "%r0, %r0, %r0}};"
        "{sync} xor.b32 %r6, %r6, 496; add.s32 %r8, %r5, %r6; ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r8+64];"
    )
    for sync, expected in (("", 1), ("bar.warp.sync -1;", 0), ("shfl.sync.idx.b32 %r9, %r0, 0, 31, -1;", 0)):
        report = run_report(body.format(sync=sync), checks=True)

        assert len([n for n in report.notes if n.startswith("R10")]) == expected


def test_a_barrier_used_by_a_copy_needs_its_initialisation_published():
    """A note without fence.mbarrier_init (or fence.proxy.async), silence with it."""
    body = """
        mov.b32 %r5, smem; setp.ne.s32 %p1, %r0, 0; @%p1 bra MADE; mov.b32 %r6, 1; mbarrier.init.shared.b64 [%r5], %r6;
        {fence} MADE: bar.sync 0; @%p1 bra ISSUED; mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 128;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5+128], [%rd2], 128, [%r5];
    ISSUED:
        {{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r5], 0, 10000000; @P bra.uni D; bra.uni W; D: }}
    """
    for fence, expected in (
        ("", 1),
        ("fence.mbarrier_init.release.cluster;", 0),
        ("fence.proxy.async.shared::cta;", 0),
    ):
        report = run_report(body.format(fence=fence), checks=True, data=np.zeros(64, np.uint32), smem=4096)

        assert len([n for n in report.notes if "without a fence.mbarrier_init" in n]) == expected
