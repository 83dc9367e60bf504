"""Contract of the order of global memory between clusters (docs/ptx-semantics.md 7.6, 7.8 and 13.3).

Two clusters of one warp each are in flight; the first writes a word of data, the second reads, writes or adds to it. A
pattern of PTX orders the two or does not, by chapter 8 of the PTX ISA, and the check must say which, whatever the run
happened to do. Bulk copies and CTAs that leave are in test_cluster_mutations.
"""

import re
import time

import numpy as np
import pytest

from fa4build.simulate.native.orders import Order
from tests.simulate.native.engine_pair import run_in

FLAG, DATA = "[%rd2]", "[%rd2+128]"
ONE, FOUR = "mov.b32 %r9, 1;", "mov.b32 %r8, 0f40800000;"


def two(first: str, second: str) -> str:
    """A body in which lane 0 of cluster 0 does one thing and lane 0 of cluster 1 another."""
    return f"""
    {ONE} {FOUR}
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra DONE;
    setp.ne.u32 %p1, %a0, 0;
    @%p1 bra SECOND;
    {first}
    bra.uni DONE;
SECOND:
    {second}
DONE:
    """


def wait_for(load: str) -> str:
    """Spins until the flag is set."""
    return f"SPIN: {load}.b32 %r5, {FLAG}; setp.eq.u32 %p2, %r5, 0; @%p2 bra SPIN;"


WRITE, READ = f"st.global.b32 {DATA}, %r9;", f"ld.global.b32 %r6, {DATA};"
ADD = f"red.global.add.f32 {DATA}, %r8;"
RELEASE = f"red.release.gpu.global.add.u32 {FLAG}, 1;"
ACQUIRE = wait_for("ld.acquire.gpu.global")


@pytest.fixture
def told(monkeypatch):
    """The error of a body, in every order in which the two clusters can run."""

    def run(body: str, **options) -> str:
        texts = []
        for order in (Order(longest_run=64), Order(longest_run=64, reversed_clusters=True)):
            data = np.zeros(64, np.uint32)
            outcome = run_in(
                "native", body, data=data, grid=2, schedule=order, checks=True, concurrent_clusters=2,
                monkeypatch=monkeypatch, **options,
            )  # fmt: skip
            texts.append(outcome.error)
        return "\n".join(texts)

    return run


ORDERED = {
    "release and acquire of the GPU": (WRITE + RELEASE, ACQUIRE + READ),
    "release and acquire of the system": (
        WRITE + f"red.release.sys.global.add.u32 {FLAG}, 1;",
        wait_for("ld.acquire.sys.global") + READ,
    ),
    "a store that releases": (WRITE + f"st.release.gpu.global.b32 {FLAG}, %r9;", ACQUIRE + READ),
    "fences around relaxed accesses": (
        WRITE + f"fence.acq_rel.gpu; st.relaxed.gpu.global.b32 {FLAG}, %r9;",
        wait_for("ld.relaxed.gpu.global") + "fence.acq_rel.gpu;" + READ,
    ),
    "threadfence and volatile": (
        WRITE + f"fence.sc.gpu; st.volatile.global.b32 {FLAG}, %r9;",
        wait_for("ld.volatile.global") + "fence.sc.gpu;" + READ,
    ),
    "an atomic that does both": (
        WRITE + f"atom.acq_rel.gpu.global.add.u32 %r7, {FLAG}, 1;",
        f"SPIN: atom.acq_rel.gpu.global.add.u32 %r5, {FLAG}, 0; setp.eq.u32 %p2, %r5, 0; @%p2 bra SPIN;" + READ,
    ),
}
UNORDERED = {
    "nothing": (WRITE, READ, "R[12] "),
    "a relaxed release": (WRITE + f"red.relaxed.gpu.global.add.u32 {FLAG}, 1;", ACQUIRE + READ, "R1 "),
    "a release without a word for it": (WRITE + f"red.global.add.u32 {FLAG}, 1;", ACQUIRE + READ, "R1 "),
    "a relaxed acquire": (WRITE + RELEASE, wait_for("ld.relaxed.gpu.global") + READ, "R1 "),
    "no fence behind a relaxed load": (
        WRITE + f"fence.acq_rel.gpu; st.relaxed.gpu.global.b32 {FLAG}, %r9;",
        wait_for("ld.relaxed.gpu.global") + READ,
        "R1 ",
    ),
    "a fence of the CTA": (
        WRITE + f"fence.acq_rel.cta; st.relaxed.gpu.global.b32 {FLAG}, %r9;",
        wait_for("ld.relaxed.gpu.global") + "fence.acq_rel.gpu;" + READ,
        "R1 ",
    ),
    "a fence of the cluster behind": (
        WRITE + f"fence.acq_rel.gpu; st.relaxed.gpu.global.b32 {FLAG}, %r9;",
        wait_for("ld.relaxed.gpu.global") + "fence.acq_rel.cluster;" + READ,
        "R1 ",
    ),
    "a release before the write": (RELEASE + WRITE, ACQUIRE + READ, "R[12] "),
    "a flag that nobody waits for": (WRITE + RELEASE, f"ld.acquire.gpu.global.b32 %r5, {FLAG};" + READ, "R[12] "),
    "a plain flag": (WRITE + f"st.global.b32 {FLAG}, %r9;", ACQUIRE + READ, "R1 .*reads data at byte 0"),
    "two writes": (WRITE, WRITE, "R3 "),
    "a release of the CTA": (WRITE + f"red.release.cta.global.add.u32 {FLAG}, 1;", ACQUIRE + READ, "R1 "),
    "an acquire of the cluster": (WRITE + RELEASE, wait_for("ld.acquire.cluster.global") + READ, "R1 "),
}


@pytest.mark.parametrize("pattern", ORDERED)
def test_a_pattern_that_orders_two_clusters_is_accepted(told, pattern):
    """Nothing is said in any order."""
    assert told(two(*ORDERED[pattern])).strip() == ""


@pytest.mark.parametrize("pattern", UNORDERED)
def test_a_pattern_that_does_not_is_a_race(told, pattern):
    """R1, R2 or R3, as the side that comes later reads or writes."""
    first, second, expected = UNORDERED[pattern]
    assert re.search(expected, told(two(first, second)))


def test_order_is_handed_on_by_a_third_cluster(monkeypatch):
    """0 releases to 1 by one word, 1 to 2 by another; without the second release 2 has not heard of 0."""
    third = "[%rd2+4]"
    hand_on = f"red.release.gpu.global.add.u32 {third}, 1;"

    def run(middle: str) -> str:
        last = ACQUIRE.replace(FLAG, third).replace("SPIN", "AGAIN").replace("%p2", "%p3")
        second = f"setp.ne.u32 %p4, %a0, 1; @%p4 bra THIRD; {ACQUIRE} {middle} bra.uni DONE; THIRD: {last} {READ}"
        return run_in(
            "native", two(WRITE + RELEASE, second), data=np.zeros(64, np.uint32), grid=3, checks=True,
            concurrent_clusters=3, monkeypatch=monkeypatch,
        ).error  # fmt: skip

    assert run(hand_on) == ""
    assert "R1 " in run(hand_on.replace("release", "relaxed"))


def test_floats_are_added_in_a_fixed_order_or_by_name_in_none(told):
    """Strong additions are no race, but the bits of the sum depend on who comes first."""
    assert "R16" in told(two(ADD, ADD))
    assert told(two(ADD, ADD), launch={"free_sums": True}).strip() == ""
    assert told(two(ADD + RELEASE, ACQUIRE + ADD)).strip() == ""
    assert told(two(f"red.global.add.u32 {DATA}, 1;", f"red.global.add.u32 {DATA}, 1;")).strip() == ""


def test_additions_of_a_narrow_scope_are_a_race(told):
    """red.cta of two clusters; also of integers."""
    assert "R3" in told(two(f"red.relaxed.cta.global.add.u32 {DATA}, 1;", f"red.relaxed.cta.global.add.u32 {DATA}, 1;"))


def test_reads_of_two_clusters_need_no_order(told):
    """Nor do writes of different bytes."""
    assert told(two(READ, READ)).strip() == ""
    assert told(two(f"st.global.b16 {DATA}, 1;", "st.global.b16 [%rd2+130], 1;")).strip() == ""


def test_a_dependent_launch_waits_before_it_touches_memory(told):
    """R17: also for a write, and where another warp has waited but no barrier says so."""
    wait = "griddepcontrol.wait;"
    assert "R17" in told(READ, launch={"dependent": True})
    assert told(wait + READ, launch={"dependent": True}, words=1).count("R17") == 0
    assert "before griddepcontrol.wait" in told(READ + wait, launch={"dependent": True})
    assert told(READ).count("R17") == 0
    one_waits = f"setp.ge.u32 %p1, %r0, 32; @%p1 bra OTHER; {wait} OTHER: "
    assert "R17" in told(one_waits + READ, threads=64, launch={"dependent": True})
    assert told(one_waits + "bar.sync 0;" + READ, threads=64, launch={"dependent": True}).count("R17") == 0


def test_a_dependent_launch_without_a_wait_ends_too_early(told):
    """Who waits for it does not wait for the kernel in front of it."""
    assert "no thread executes griddepcontrol.wait" in told("add.u32 %r9, %r0, 1;", launch={"dependent": True})


def test_the_reads_of_many_clusters_cost_as_much_as_they_are(monkeypatch):
    """A page of lengths that every cluster reads: eight times the clusters take at most twice as long each."""

    def seconds(grid: int) -> float:
        def once() -> float:
            start = time.process_time()
            outcome = run_in(
                "native", READ, data=np.zeros(64, np.uint32), grid=grid, checks=True, concurrent_clusters=64,
                monkeypatch=monkeypatch,
            )  # fmt: skip
            assert outcome.error == ""
            return time.process_time() - start

        return min(once() for _ in range(3))

    assert seconds(8 * 1500) < 16 * seconds(1500)


def test_a_write_meets_the_reads_of_every_cluster(told):
    """Reads of clusters lie apart; who writes looks at all of them."""
    assert "R2" in told(two(READ, WRITE))
