"""Contract of the orders of the native engine's proof: each finds a fault that none of the others finds.

A fault is a small kernel that is right only as long as things happen in no certain way. Its warps write down what they
see, and where that is what only one order shows, they give up (`trap`). So a proof without that order would let it
pass. All runs are with every check: these faults are none that the checks see in any order.
"""

import numpy as np
import pytest

from fa4build.cases.schedules import NATIVE_RUNS, RUNS, runs_of_case
from fa4build.simulate.native.orders import order_named
from fa4build.simulate.native.program import program_for
from fa4build.simulate.native.roles import roles_of
from tests.simulate.native.engine_pair import run_in
from tests.simulate.ptx_snippets import text_of

COPIES = 8  # of 16 bytes; barrier n at smem + 8n, its bytes at smem + 256 + 16n
FIRST = "setp.eq.s32 %p1, %r0, 0;"  # thread 0
SMEM = "mov.u32 %r5, smem;"


def barriers(count: int) -> str:
    """Thread 0 makes so many, of one arrival each."""
    made = "".join(f"@%p1 mbarrier.init.shared.b64 [%r5+{8 * n}], 1;" for n in range(count))
    return f"{SMEM}{FIRST}{made}@%p1 fence.mbarrier_init.release.cluster; bar.sync 0;"


def copies(count: int) -> str:
    """Thread 0 issues a copy to each barrier, in order."""
    lines = "add.s32 %r7, %r5, 256;"
    for n in range(count):
        lines += f"add.s32 %r8, %r5, {8 * n}; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 16;"
        lines += f"add.s32 %r9, %r7, {16 * n}; @%p1 cp.async.bulk.shared::cluster.global"
        lines += ".mbarrier::complete_tx::bytes [%r9], [%rd2], 16, [%r8];"
    return lines


def asked(count: int) -> str:
    """%r20: which copies are over, bit n for barrier n, each asked once and not waited for."""
    lines = "mov.b32 %r20, 0;"
    for n in range(count):
        lines += f"mbarrier.test_wait.parity.shared.b64 %p3, [%r5+{8 * n}], 0; selp.b32 %r21, {1 << n}, 0, %p3;"
        lines += "or.b32 %r20, %r20, %r21;"
    return lines


def waits(count: int) -> str:
    """All copies are over behind it."""
    return "".join(
        f"WAIT{n}: mbarrier.try_wait.parity.shared.b64 %p3, [%r5+{8 * n}], 0, 1000; @!%p3 bra WAIT{n};"
        for n in range(count)
    )


def trap_if(condition: str) -> str:
    """`condition` sets %p9."""
    return f"{condition} @!%p9 bra FINE; trap; FINE:"


def rounds(count: int) -> str:
    """All warps meet so often."""
    return "bar.sync 0;" * count


# A copy that is over as soon as it was issued: the way for it was never tried.
AT_ONCE = f"{barriers(1)} @!%p1 bra JOIN; {copies(1)} {asked(1)}{trap_if('setp.ne.s32 %p9, %r20, 0;')} JOIN: {waits(1)}"
# Warps meet thirty times, and no copy has come yet: somebody has counted on that.
NOT_YET = (
    f"{barriers(COPIES)} {copies(COPIES)} {rounds(30)} setp.lt.u32 %p2, %r0, 32; @!%p2 bra JOIN;"
    f"{asked(COPIES)} {trap_if('setp.eq.s32 %p9, %r20, 0;')} JOIN: {waits(COPIES)}"
)
# Some copies have come, none of them before an earlier one: somebody has waited for the last one to be first.
PREFIX = "add.s32 %r22, %r20, 1; and.b32 %r22, %r22, %r20; setp.eq.s32 %p9, %r22, 0; setp.gt.s32 %p8, %r20, 1;"
PREFIX += f"and.pred %p9, %p9, %p8; setp.ne.s32 %p8, %r20, {(1 << COPIES) - 1}; and.pred %p9, %p9, %p8;"
IN_ORDER = (
    f"{barriers(COPIES)} {copies(COPIES)} {rounds(1)} setp.lt.u32 %p2, %r0, 96; @%p2 bra JOIN;"
    f"{asked(COPIES)} {trap_if(PREFIX)} JOIN: {waits(COPIES)}"
)
# Some copies have come, and all of them behind one that has not: the last barrier was taken for all.
SUFFIX = f"xor.b32 %r20, %r20, {(1 << COPIES) - 1}; {PREFIX}"
AGAINST_ORDER = IN_ORDER.replace(PREFIX, SUFFIX)
# The last of eight clusters comes first: lower ones were thought to be ahead.
TICKET = "atom.global.add.u32 %r20, [%rd2], 1;"
LAST_CLUSTER = (
    f"{FIRST} @!%p1 bra FINE; {TICKET} setp.eq.s32 %p8, %r20, 0; setp.eq.s32 %p9, %a0, 7; and.pred %p9, %p9, %p8;"
    "@!%p9 bra FINE; trap; FINE:"
)
# Two threads add to a word without an atomic: a stop between the load and the store loses an addition.
LOST = (
    "and.b32 %r3, %r0, 31; setp.eq.s32 %p1, %r3, 0; @!%p1 bra OUT; mov.b32 %r10, 0;"
    "TOP: ld.relaxed.gpu.global.b32 %r20, [%rd2]; add.s32 %r20, %r20, 1; st.relaxed.gpu.global.b32 [%rd2], %r20;"
    "add.s32 %r10, %r10, 1; setp.lt.u32 %p2, %r10, 200; @%p2 bra TOP; atom.global.add.u32 %r21, [%rd2+4], 1;"
    "setp.ne.s32 %p2, %r21, 3; @%p2 bra OUT; ld.relaxed.gpu.global.b32 %r20, [%rd2];"
    f"{trap_if('setp.ne.s32 %p9, %r20, 800;')} OUT:"
)


def lapped(role: int) -> str:
    """Two warps meet at a barrier again and again; the third, of this role, follows its phases without a say."""
    others = tuple(warp for warp in range(3) if warp != role)
    turn = "xor.b32 %r11, %r11, 1; add.s32 %r10, %r10, 1; setp.lt.u32 %p2, %r10, 12;"
    job = (
        f"ROUND#: {'bar.sync 1, 64;' * 4} @%p7 mbarrier.arrive.shared.b64 _, [%r5], 1;"
        f"OWN#: mbarrier.try_wait.parity.shared.b64 %p3, [%r5], %r11, 1000; @!%p3 bra OWN#; {turn}"
        "@%p2 bra ROUND#; bra.uni OUT;"
    )
    watch = (
        "WATCH: mbarrier.try_wait.parity.shared.b64 %p3, [%r5], %r11, 1000; @!%p3 bra WATCH;"
        f"{turn} @%p2 bra WATCH; bra.uni OUT;"
    )
    parts = {others[0]: job.replace("#", "A"), others[1]: job.replace("#", "B"), role: watch}
    return (
        f"{SMEM}{FIRST} @%p1 mbarrier.init.shared.b64 [%r5], 2; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;"
        "mov.b32 %r10, 0; mov.b32 %r11, 0; and.b32 %r3, %r0, 31; setp.eq.s32 %p7, %r3, 0;"
        "shr.u32 %r12, %r0, 5; shfl.sync.idx.b32 %r13, %r12, 0, 31, -1;"
        "setp.eq.s32 %p4, %r13, 0; @%p4 bra ROLE0; setp.eq.s32 %p5, %r13, 1; @%p5 bra ROLE1;"
        f"{parts[2]} ROLE0: {parts[0]} ROLE1: {parts[1]} OUT:"
    )


FAULTS = {
    "eager": (AT_ONCE, {"threads": 64}),
    "late": (NOT_YET, {"threads": 128}),
    "copies in order": (IN_ORDER, {"threads": 128}),
    "copies against order": (AGAINST_ORDER, {"threads": 128}),
    "clusters reversed": (LAST_CLUSTER, {"grid": 8}),
    "role 0 starved": (lapped(0), {"threads": 96}),
    "role 1 starved": (lapped(1), {"threads": 96}),
    "random": (LOST, {"threads": 128}),
}


def found_by(body: str, options: dict, monkeypatch) -> dict[str, str]:
    """What each order of the first case's proof finds, by its name; nothing where all is well."""
    errors = {}
    for run in runs_of_case("native", 0):
        outcome = run_in(
            "native",
            body,
            data=np.zeros(64, np.uint32),
            checks=run.checks,
            schedule=run.schedule,
            seed=0,
            concurrent_clusters=run.concurrent_clusters,
            monkeypatch=monkeypatch,
            **options,
        )
        if outcome.error:
            errors[run.schedule] = outcome.error
    return errors


@pytest.mark.parametrize("order", FAULTS)
def test_an_order_finds_what_no_other_finds(order, monkeypatch):
    """Without it the fault planted for it would be proven right."""
    body, options = FAULTS[order]

    errors = found_by(body, options, monkeypatch)

    assert list(errors) == [order], errors


def test_every_order_of_a_case_has_a_fault_of_its_own():
    """So that none can be left out, or added without one."""
    assert [run.schedule for run in runs_of_case("native", 0)] == list(FAULTS)
    assert len(NATIVE_RUNS) >= 8
    assert all(run.checks for run in NATIVE_RUNS)


def test_roles_are_the_warps_that_start_alike():
    """Three in the kernels above, one a warp; where all warps start alike, their two halves."""
    roles = roles_of(program_for(text_of(lapped(0), threads=96), "snippet"), (96, 1, 1))
    halves = roles_of(program_for(text_of(rounds(1), threads=128), "snippet"), (128, 1, 1))

    assert roles == (0b001, 0b010, 0b100)
    assert halves == (0b0011, 0b1100)


def test_roles_take_turns_from_case_to_case():
    """Two a case, so that some cases starve every role."""
    starved = [
        run.schedule for number in range(3) for run in runs_of_case("native", number) if "starved" in run.schedule
    ]

    assert starved == [f"role {n} starved" for n in range(6)]
    assert [order_named(name).role for name in starved] == list(range(6))


def test_the_python_engine_keeps_its_three():
    """And makes fewer of them where a case says so."""
    assert runs_of_case("python", 5) == RUNS
    assert runs_of_case("python", 5, most=1) == RUNS[:1]
