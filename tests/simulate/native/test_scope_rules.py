"""Contract of scopes, orders and state spaces: synchronisation that is relaxed or too narrow orders no memory.

PTX ISA: an mbarrier operation that is .relaxed gives no ordering and no visibility; .scope names who observes what it
orders; a proxy fence holds for objects of the state space that it names; mbarrier.init reaches others by
fence.mbarrier_init and a barrier behind it.
"""

import pytest

from tests.simulate.native.rule_snippets import LANE, SHARED, made, told, wait

# Warp 0 writes and arrives, all of its lanes; warp 1 waits and reads.
HANDED_ON = (
    SHARED + made(32) + "setp.ge.u32 %p2, %r0, 32; @%p2 bra OTHER; st.shared.b32 [%r6], %r0; {before}"
    "mbarrier.arrive{arrive}.shared.b64 _, [%r5]; bra BOTH; OTHER: {wait} {behind} ld.shared.b32 %r10, [%r6]; BOTH:"
)


def _handed_on(arrive="", how="", before="", behind="") -> str:
    return told(HANDED_ON.format(arrive=arrive, wait=wait(how=how), before=before, behind=behind), threads=64)


@pytest.mark.parametrize(
    ("arrive", "before", "is_ordered"),
    [
        ("", "", True),
        (".release.cta", "", True),
        (".release.cluster", "", True),
        (".relaxed.cta", "", False),
        (".relaxed.cluster", "", False),
        (".relaxed.cta", "fence.acq_rel.cta;", True),
        (".relaxed.cta", "fence.mbarrier_init.release.cluster;", False),
        (".relaxed.cta", "fence.proxy.async.shared::cta;", False),
    ],
)
def test_a_relaxed_arrival_hands_on_no_memory_but_behind_a_fence(arrive, before, is_ordered):
    """R1 at the read of what was written before it."""
    text = _handed_on(arrive, before=before)

    assert text == "" if is_ordered else "R1" in text


# CTA 1 writes its own shared memory; CTA 0 learns of it through a barrier of its own, and reads it there.
REMOTE = (
    LANE + SHARED + made(32) + "barrier.cluster.arrive; barrier.cluster.wait; mov.u32 %r20, %cluster_ctarank;"
    "setp.eq.u32 %p2, %r20, 0; mapa.shared::cluster.u32 %r21, %r5, 0; mapa.shared::cluster.u32 %r22, %r6, 1;"
    "@%p2 bra FIRST; st.shared.b32 [%r6], %r0; {before} mbarrier.arrive{arrive}.shared::cluster.b64 _, [%r21];"
    "bra BOTH; FIRST: {wait} ld.shared::cluster.b32 %r10, [%r22];"
    "BOTH: barrier.cluster.arrive; barrier.cluster.wait;"
)


def _remote(arrive="", how="", before="", **options) -> str:
    return told(REMOTE.format(arrive=arrive, wait=wait(how=how), before=before), cluster=2, grid=2, **options)


@pytest.mark.parametrize(
    ("arrive", "how", "is_ordered"),
    [
        (".release.cluster", ".acquire.cluster", True),
        (".release.cta", ".acquire.cluster", False),
        (".release.cluster", ".acquire.cta", False),
        (".relaxed.cluster", ".acquire.cluster", False),
        ("", "", True),  # by the assumption on scopes that are not written
    ],
)
def test_another_cta_is_reached_by_the_scope_of_the_cluster(arrive, how, is_ordered):
    """On both sides."""
    text = _remote(arrive, how)

    assert text == "" if is_ordered else "R1" in text


def test_without_the_assumption_a_scope_that_is_not_written_is_the_cta():
    """As the manual has it; inside one CTA nothing changes."""
    assert "R1" in _remote(without=("mbarrier-default-scope",))
    assert _remote(".release.cluster", ".acquire.cluster", without=("mbarrier-default-scope",)) == ""
    assert told(HANDED_ON.format(arrive="", wait=wait(), before="", behind=""), threads=64,
                without=("mbarrier-default-scope",)) == ""  # fmt: skip


def test_another_ctas_memory_is_looked_at_for_races_and_what_was_never_written():
    """ld.shared::cluster and st.shared::cluster as any other access."""
    body = SHARED + "{} mapa.shared::cluster.u32 %r22, %r6, 1; ld.shared::cluster.b32 %r10, [%r22]; {}"
    synced = "barrier.cluster.arrive; barrier.cluster.wait;"

    assert "never written" in told(body.format(synced, synced), cluster=2, grid=2)
    assert "R13" in told(body.format("st.shared.b32 [%r6], %r0;", synced), cluster=2, grid=2)
    assert "the cluster" in told(body.replace("%r6, 1", "%r6, 2").format(synced, synced), cluster=2, grid=2)


@pytest.mark.parametrize(
    ("fence", "is_visible"),
    [
        ("", False),
        ("fence.proxy.async;", True),
        ("fence.proxy.async.shared::cta;", True),
        ("fence.proxy.async.shared::cluster;", True),
        ("fence.proxy.async.global;", False),
        ("fence.acq_rel.gpu;", False),
    ],
)
def test_a_proxy_fence_holds_for_its_state_space(fence, is_visible):
    """R4 at a bulk store of what a thread wrote."""
    body = SHARED + f"setp.ne.u32 %p1, %r0, 0; @%p1 bra DONE; st.shared.v4.b32 [%r6], {{%r0, %r0, %r0, %r0}}; {fence}"
    body += "cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r6], 16; cp.async.bulk.commit_group;"
    text = told(body + "cp.async.bulk.wait_group 0; DONE:", words=4)

    assert text == "" if is_visible else "R4" in text


@pytest.mark.parametrize(
    ("fence", "barrier", "told_as"),
    [
        ("fence.mbarrier_init.release.cluster;", "barrier.cluster.arrive.relaxed; barrier.cluster.wait;", ""),
        ("", "barrier.cluster.arrive; barrier.cluster.wait;", "without a fence.mbarrier_init"),
        ("fence.proxy.async.shared::cta;", "barrier.cluster.arrive; barrier.cluster.wait;", "fence.mbarrier_init"),
        ("fence.mbarrier_init.release.cluster;", "", "R13"),
    ],
)
def test_another_ctas_barrier_is_used_when_it_is_known_to_be_there(fence, barrier, told_as):
    """Initialised, fenced, and then a cluster barrier; a relaxed one will do."""
    body = SHARED + made(64, fence=fence) + barrier + "mapa.shared::cluster.u32 %r21, %r5, 0;"
    body += "mbarrier.arrive.shared::cluster.b64 _, [%r21]; barrier.cluster.arrive; barrier.cluster.wait;"
    text = told(body, cluster=2, grid=2)

    assert told_as in text
    assert bool(text) == bool(told_as)


def test_a_barrier_is_used_by_threads_that_know_of_its_initialisation():
    """Also where they happen to run later."""
    body = SHARED + made(64).replace("bar.sync 0;", "") + "mbarrier.arrive.shared.b64 _, [%r5];"

    assert "whose initialisation" in told(body, threads=64)
    assert told(SHARED + made(64) + "mbarrier.arrive.shared.b64 _, [%r5];", threads=64) == ""


def test_an_aligned_cluster_barrier_wants_the_whole_warp():
    """And one that is not aligned takes any part of it."""
    body = "setp.eq.u32 %p1, %r0, 3; @%p1 barrier.cluster.arrive{a}; @!%p1 barrier.cluster.arrive{a};"
    body += "barrier.cluster.wait;"

    assert "needs all 32 lanes" in told(body.format(a=".aligned"))
