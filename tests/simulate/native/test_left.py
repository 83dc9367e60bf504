"""Contract of exits: nothing touches the shared memory of a CTA that may have left (docs/ptx-semantics.md, R12).

Two CTAs of one cluster, one warp each. What rank 1 does to rank 0 must be known to be over to some thread of rank 0
before its last thread exits; that the run went well is not enough.
"""

import numpy as np
import pytest

from fa4build.simulate.native.orders import Order
from tests.simulate.native.engine_pair import run_in

SETUP = """
    mov.u32 %a2, %cluster_ctarank; mov.u32 %a3, smem; setp.ne.u32 %p0, %r0, 0; setp.ne.u32 %p1, %a2, 0;
    mov.b32 %r9, 7; mov.b32 %r8, 1; mapa.shared::cluster.u32 %a4, %a3, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%a3], 1; st.shared.b32 [%a3+64], %r9;
    fence.mbarrier_init.release.cluster;
READY:
    bar.warp.sync -1; barrier.cluster.arrive; barrier.cluster.wait;
"""
MEET = "bar.warp.sync -1; barrier.cluster.arrive; barrier.cluster.wait;"


def by_rank_1(body: str) -> str:
    """Lane 0 of rank 1 does something."""
    return f"@%p0 bra DONE; @!%p1 bra DONE; {body} DONE:"


@pytest.fixture
def told(monkeypatch):
    """The error of a body in two orders."""

    def run(body: str, **options) -> str:
        texts = []
        for order in (Order(), Order(warps=1)):
            outcome = run_in(
                "native", SETUP + body, data=np.zeros(64, np.uint32), grid=2, cluster=2, schedule=order, checks=True,
                monkeypatch=monkeypatch, **options,
            )  # fmt: skip
            texts.append(outcome.error)
        return "\n".join(texts)

    return run


READ = "ld.shared::cluster.b32 %r5, [%a4+64];"
WRITE = "st.shared::cluster.b32 [%a4+128], %r9;"
ARRIVE = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%a4], %r8;"


@pytest.mark.parametrize("access", [READ, WRITE], ids=["a read", "a write"])
def test_an_access_of_another_cta_is_over_before_that_one_leaves(told, access):
    """A cluster barrier says so; nothing else is between the two."""
    assert told(by_rank_1(access) + MEET).strip() == ""
    assert "R12" in told(by_rank_1(access)) or "has exited" in told(by_rank_1(access))


def test_a_cluster_barrier_that_only_arrives_says_nothing_to_who_does_not_wait(told):
    """Rank 1 waits, rank 0 leaves behind its arrival."""
    body = by_rank_1(READ) + "bar.warp.sync -1; barrier.cluster.arrive; @%p1 barrier.cluster.wait;"
    assert "R12" in told(body) or "has exited" in told(body)


def test_an_arrival_is_waited_for_where_it_arrives(told):
    """By a wait for its phase, or by a barrier behind it."""
    wait = "@%p1 bra GONE; WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%a3], 0, 1000; @!%p2 bra WAIT; GONE:"
    assert told(by_rank_1(ARRIVE) + wait).strip() == ""
    assert told(by_rank_1(ARRIVE) + MEET).strip() == ""
    alone = told(by_rank_1(ARRIVE))
    assert "R12" in alone or "has exited" in alone


def test_a_copy_of_its_own_is_over_before_a_cta_leaves(told):
    """Bytes that land behind the exit would land in the next CTA's memory."""
    copy = """@%p0 bra DONE;
    mbarrier.arrive.expect_tx.shared.b64 _, [%a3], 16; add.u32 %a5, %a3, 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%a5], [%rd2], 16, [%a3]; DONE:"""
    copy = copy.replace("[%rd2], 16", "[%rd2], %r7").replace("@%p0", "mov.b32 %r7, 16; @%p0", 1)
    copy = copy.replace("%a5, %a3, 256;", "%a5, %a3, 256; mapa.shared::cluster.u32 %a5, %a5, %a2;")
    wait = "WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%a3], 0, 1000; @!%p2 bra WAIT;"
    assert told(copy + wait).strip() == ""
    assert "R12" in told(copy)
