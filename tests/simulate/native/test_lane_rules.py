"""Contract of the rules between lanes of a warp: only bar.warp.sync and barriers order what lanes do in memory.

PTX ISA: bar.warp.sync guarantees memory ordering among the threads that take part; shfl.sync, vote.sync and elect.sync
say of nothing but their own values. elect.sync may choose any member, the same one every time.
"""

import pytest

from fa4build.simulate.native.orders import ORDERS, Order
from fa4build.simulate.native.run import run_launch
from tests.simulate.native.rule_snippets import LANE, SHARED, made, template, told, wait
from tests.simulate.ptx_snippets import result, run

# Lane i writes 16 bytes; what stands between; lane i reads what lane 31 - i wrote.
EXCHANGE = (
    LANE + SHARED + "shl.b32 %r7, %r60, 4; add.s32 %r8, %r6, %r7; xor.b32 %r7, %r7, 496; add.s32 %r9, %r6, %r7;"
    "st.shared.v4.b32 [%r8], {{%r0, %r0, %r0, %r0}}; {between} ld.shared.b32 %r10, [%r9];"
)
# Every lane of warp 0 reads or writes 16 bytes; {between}; one lane arrives; warp 1 waits and overwrites or reads.
HANDED_ON = (
    LANE + SHARED + made(1) + "shl.b32 %r7, %r60, 4; add.s32 %r8, %r6, %r7; setp.ge.u32 %p2, %r0, 32;"
    "@!%p2 st.shared.v4.b32 [%r8], {{%r0, %r0, %r0, %r0}}; @%p2 bra OTHER;"
    "{between} setp.ne.u32 %p1, %r60, {lane}; @%p1 bra BOTH; mbarrier.arrive.shared.b64 _, [%r5]; bra BOTH;"
    "OTHER: " + template(wait()) + " ld.shared.b32 %r10, [%r8]; BOTH:"
)


@pytest.mark.parametrize(
    ("between", "is_ordered"),
    [
        ("", False),
        ("bar.warp.sync -1;", True),
        ("bar.sync 0;", True),
        ("shfl.sync.idx.b32 %r20, %r0, 0, 31, -1;", False),
        ("vote.sync.ballot.b32 %r20, %p1, -1;", False),
        ("elect.sync %r20|%p3, -1;", False),
    ],
)
def test_lanes_exchange_through_memory_behind_a_barrier_only(between, is_ordered):
    """R10, in whatever order lanes run."""
    text = told(EXCHANGE.format(between=between))

    assert (text == "") == is_ordered
    assert is_ordered or ("R10" in text and "lane 0 reads" in text and "lane 31 of the same warp wrote" in text)


def test_lanes_overwrite_what_others_have_read_behind_a_barrier_only():
    """R10 the other way round."""
    body = LANE + SHARED + "@%p4 st.shared.b32 [%r6], %r0; ld.shared.b32 %r10, [%r5]; {} setp.eq.u32 %p1, %r60, 3;"
    body = "setp.eq.u32 %p4, %r0, 0;" + body + "mov.b32 %r5, smem; @%p1 st.shared.b32 [%r5], %r0;"
    zero = "mov.b32 %r5, smem; st.shared.b32 [%r5], 0; bar.sync 0;"

    assert "R10" in told(zero + body.format(""))
    assert told(zero + body.format("bar.warp.sync -1;")) == ""


def test_a_shuffle_ends_reads_by_assumption_only():
    """What was read before a shuffle of the whole warp may be overwritten behind it; what was written, not."""
    shuffle, without = "shfl.sync.idx.b32 %r20, %r10, 0, 31, -1;", ("shuffle-ends-reads",)
    body = "mov.b32 %r5, smem; st.shared.b32 [%r5], 0; bar.sync 0; ld.shared.b32 %r10, [%r5];" + shuffle
    body += LANE + "setp.eq.u32 %p1, %r60, 3; @%p1 st.shared.b32 [%r5], %r0;"

    assert told(body) == ""
    assert "R10" in told(body, without=without)
    assert "R10" in told(body.replace("-1;", "0xFFFF;", 1).replace("shfl", "setp.lt.u32 %p4, %r0, 16; @%p4 shfl"))


@pytest.mark.parametrize("lane", [0, 31])
@pytest.mark.parametrize("between", ["", "shfl.sync.idx.b32 %r20, %r0, 0, 31, -1;", "elect.sync %r20|%p3, -1;"])
def test_one_lane_arrives_for_the_others_behind_bar_warp_sync_only(between, lane):
    """What the other 31 wrote is not handed on, whoever arrives; with the barrier it is."""
    text = told(HANDED_ON.format(between=between, lane=lane), threads=64)

    assert "R1" in text
    assert "one lane's arrival does not speak for the others" in text
    assert told(HANDED_ON.format(between=between + "bar.warp.sync -1;", lane=lane), threads=64) == ""


def test_every_lane_may_arrive_for_itself():
    """A count of 32 needs no bar.warp.sync."""
    body = HANDED_ON.replace("setp.ne.u32 %p1, %r60, {lane}; @%p1 bra BOTH;", "").format(between="")
    body = body.replace("mov.b32 %r50, 1;", "mov.b32 %r50, 32;")

    assert told(body, threads=64) == ""


def test_one_lane_waits_for_itself_only():
    """The others learn of it behind bar.warp.sync."""
    body = (
        LANE + SHARED + made(32) + "setp.ge.u32 %p2, %r0, 32; @%p2 bra OTHER; st.shared.b32 [%r6], %r0;"
        "mbarrier.arrive.shared.b64 _, [%r5]; bra BOTH; OTHER: setp.ne.u32 %p1, %r60, 0; @%p1 bra WAITED;"
    )
    body += template(wait()) + " WAITED: {} ld.shared.b32 %r10, [%r6]; BOTH:"

    assert "R1" in told(body.format(""), threads=64, schedule=Order(starved=2))
    assert told(body.format("bar.warp.sync -1;"), threads=64) == ""


def test_a_copy_reads_what_its_own_lane_has_written():
    """The elected lane's TMA store needs the other lanes' writes ordered, and fenced."""
    body = (
        LANE + SHARED + "shl.b32 %r7, %r60, 4; add.s32 %r8, %r6, %r7; st.shared.v4.b32 [%r8], {{%r0, %r0, %r0, %r0}};"
        "fence.proxy.async.shared::cta; {} setp.ne.u32 %p1, %r60, {lane}; @%p1 bra DONE;"
        "cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r6], {size}; cp.async.bulk.commit_group;"
        "cp.async.bulk.wait_group 0; DONE:"
    )

    assert "R1" in told(body.format("", lane=0, size=512), words=4)
    assert told(body.format("bar.warp.sync -1;", lane=0, size=512), words=4) == ""
    assert told(body.format("", lane=0, size=16), words=4) == ""  # its own 16 bytes


def test_a_lanes_store_is_waited_for_by_that_lane():
    """wait_group of the others says nothing of it: they overwrite the source only behind bar.warp.sync."""
    body = (
        SHARED + LANE + "st.shared.b32 [%r6], %r0; fence.proxy.async.shared::cta; bar.warp.sync -1;"
        "setp.ne.u32 %p1, %r60, 0; @%p1 bra WAIT; cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r6], 16;"
        "WAIT: cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; {} setp.eq.u32 %p2, %r60, 5;"
        "@%p2 st.shared.b32 [%r6], %r0; @!%p1 cp.async.bulk.wait_group 0;"
    ).replace("st.shared.b32 [%r6], %r0; fence", "st.shared.v4.b32 [%r6], {{%r60, %r60, %r60, %r60}}; fence")

    assert "R2" in told(body.format(""), words=4)
    assert told(body.format("bar.warp.sync -1;"), words=4) == ""


def test_an_election_may_choose_any_lane():
    """A kernel that takes the elected lane for lane 0 gives other words; the choice is the same each time."""
    body = "elect.sync %r9|%p1, -1; setp.ge.u32 %p3, %r0, 16; @%p3 bra X; elect.sync %r8|%p2, 0xFFFF; X:"
    body += "elect.sync %r7|%p1, -1;"
    body += result(0, "%r9") + result(1, "%r8") + result(2, "%r7")
    chosen = {tuple(run(body, words=3, engine=run_launch, schedule=order)[0].tolist()) for order in ORDERS.values()}

    assert len({first for first, _, _ in chosen}) > 2
    assert all(first == again and second < 16 for first, second, again in chosen)


@pytest.mark.parametrize("opcode", ["bar.warp.sync {m}", "elect.sync _|%p1, {m}", "vote.sync.any.pred %p1, %p2, {m}"])
def test_who_executes_a_warp_operation_is_among_its_members(opcode):
    """Undefined otherwise, and a wait for ever where a member is missing."""
    assert "not among its members" in told(opcode.format(m="0xFFFF") + ";")
    missing = "setp.ge.u32 %p3, %r0, 16; @%p3 bra X; " + opcode.format(m="-1") + "; X:"
    assert "waits for the others for ever" in told(missing)
    assert "different member masks" in told("add.s32 %r61, %r0, -64; " + opcode.format(m="%r61") + ";")
