"""Asynchronous copies: cp.async, bulk copies, bulk groups, tensor copies, atomics. Results are the same in every
schedule.

A right program gives the same result whether a copy happens at issue, as late as possible, or at a random time.
"""

import numpy as np
import pytest

from fa4build.errors import SimulationError
from fa4build.simulate.hardware.tensor_map import TensorMap, pack
from tests.simulate.ptx_snippets import result, run

SCHEDULES = pytest.mark.parametrize("schedule", ["eager", "late", "random"])
ONE_THREAD = "setp.ne.s32 %p1, %r0, 0; @%p1 bra ISSUED;"
INIT = """
    mov.b32 %r5, smem; mov.b32 %r6, 1;
    setp.ne.s32 %p1, %r0, 0; @%p1 bra INITED; mbarrier.init.shared.b64 [%r5], %r6; INITED:
    fence.mbarrier_init.release.cluster; bar.sync 0;
"""
WAIT = "{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r5], 0, 10000000; @P bra.uni D; bra.uni W; D: }"
MY_WORD = "shl.b32 %r8, %r0, 2; add.s32 %r8, %r8, %r5;"


@SCHEDULES
def test_cp_async_fills_with_zeros_beyond_the_source_size(schedule):
    """16 bytes a lane, of which lane i reads 4 * (i % 5): the rest is zero, and nothing is read for size 0."""
    body = (
        "mov.b32 %r5, smem; shl.b32 %r6, %r0, 4; add.s32 %r7, %r5, %r6; cvt.u64.u32 %rd5, %r6; add.s64 %rd6, "
        "%rd2, %rd5;"
        "cp.async.cg.shared.global [%r7], [%rd6], 16, %r1; cp.async.commit_group; cp.async.wait_group 0;"
        "ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r7];" + "".join(result(k, f"%r{20 + k}") for k in range(4))
    )
    sizes = np.array([4 * (i % 5) for i in range(32)], np.uint32)
    data = np.arange(1, 129, dtype=np.uint32)
    out = run(body, sizes, words=4, data=data, schedule=schedule)

    assert out[0].tolist() == [0, 0, 0, 0]
    assert out[3].tolist() == [13, 14, 15, 0]
    assert out[4].tolist() == [17, 18, 19, 20]


@SCHEDULES
def test_cp_async_arrives_at_an_mbarrier_per_lane(schedule):
    """.noinc: 32 arrivals when the copies are done."""
    body = (
        INIT.replace("mov.b32 %r6, 1", "mov.b32 %r6, 32")
        + MY_WORD
        + "cvt.u64.u32 %rd5, %r0; shl.b64 %rd5, %rd5, 2; add.s64 %rd6, %rd2, %rd5; cp.async.ca.shared.global "
        "[%r8+128], [%rd6], 4, 4;"
        "cp.async.mbarrier.arrive.noinc.shared.b64 [%r5];" + WAIT + "ld.shared.b32 %r9, [%r8+128];" + result(0, "%r9")
    )
    out = run(body, data=np.arange(32, dtype=np.uint32), schedule=schedule)

    assert out[:, 0].tolist() == list(range(32))


@SCHEDULES
def test_bulk_load_completes_its_bytes(schedule):
    """128 bytes from global memory; the barrier opens when they are there."""
    body = (
        INIT
        + ONE_THREAD
        + "mov.b32 %r7, 128; mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r5], %r7; add.s32 %r8, %r5, 256;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r8], [%rd2], %r7, [%r5]; ISSUED:"
        + WAIT
        + MY_WORD
        + "ld.shared.b32 %r9, [%r8+256];"
        + result(0, "%r9")
    )
    out = run(body, data=np.arange(50, 82, dtype=np.uint32), schedule=schedule)

    assert out[:, 0].tolist() == list(range(50, 82))


@SCHEDULES
def test_bulk_reduction_adds_once_per_issuing_lane(schedule):
    """H200: 32 unpredicated lanes add 32 times. One elected lane adds once."""
    fill = MY_WORD.replace("%r5", "%r4") + "st.shared.b32 [%r8], 0f3F800000; fence.proxy.async.shared::cta; bar.sync 0;"
    reduce = "mov.b32 %r7, 128; cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd2], [%r4], %r7;"
    done = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    data = np.ones(32, np.float32)

    run("mov.b32 %r4, smem;" + fill + reduce + done, data=data, schedule=schedule)
    assert data.tolist() == [33.0] * 32

    run("mov.b32 %r4, smem;" + fill + ONE_THREAD + reduce + "ISSUED:" + done, data=data, schedule=schedule)
    assert data.tolist() == [34.0] * 32


def test_bulk_source_may_be_reused_after_wait_group_read():
    """wait_group.read waits for the source only: overwriting it afterwards must not change what is stored."""
    body = (
        "mov.b32 %r5, smem;" + MY_WORD + "st.shared.b32 [%r8], %r1; fence.proxy.async.shared::cta; bar.sync "
            "0;" + ONE_THREAD
        + "mov.b32 %r7, 128; cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r5], %r7; "
            "cp.async.bulk.commit_group;"
        "cp.async.bulk.wait_group.read 0; ISSUED: bar.sync 0; st.shared.b32 [%r8], 0;"
    )  # fmt: skip
    for schedule in ("eager", "late", "random"):
        data = np.zeros(32, np.uint32)
        run(body, np.arange(32, dtype=np.uint32), data=data, schedule=schedule)

        assert data.tolist() == list(range(32))


def test_late_copies_expose_a_missing_wait():
    """Without the wait the late schedule stores what was overwritten: the value shows the bug."""
    body = (
        "mov.b32 %r5, smem;" + MY_WORD + "st.shared.b32 [%r8], %r1; bar.sync 0;" + ONE_THREAD
        + "mov.b32 %r7, 128; cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r5], %r7; "
            "cp.async.bulk.commit_group; ISSUED: bar.sync 0;"
        "st.shared.b32 [%r8], 0; bar.sync 0; cp.async.bulk.wait_group 0;"
    )  # fmt: skip
    data = np.zeros(32, np.uint32)
    run(body, np.arange(1, 33, dtype=np.uint32), data=data, schedule="late")

    assert data.tolist() == [0] * 32


def test_push_to_another_cta():
    """Shared memory of rank 0 to rank 1, completing on rank 1's barrier; a barrier of the wrong CTA is an error."""
    body = (
        INIT
        + "mov.u32 %r10, %cluster_ctarank;"
        + MY_WORD
        + "mad.lo.s32 %r11, %r10, 100, %r0; st.shared.b32 [%r8+256], %r11; fence.proxy.async.shared::cta; bar.sync 0;"
        "setp.eq.s32 %p5, %r10, 0; or.pred %p6, %p1, %p5; mov.b32 %r7, 128; @!%p6 "
        "mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r5], %r7;"
        "barrier.cluster.arrive; barrier.cluster.wait;"
        "not.pred %p7, %p5; or.pred %p8, %p1, %p7; @%p8 bra ISSUED;"
        "add.s32 %r12, %r5, 512; mapa.shared::cluster.u32 %r13, %r12, 1; mapa.shared::cluster.u32 %r14, %r5, "
        "1; add.s32 %r15, %r5, 256;"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r13], [%r15], %r7, [%r14];"
        "ISSUED: @%p5 bra LEAVE;"
        + WAIT
        + "ld.shared.b32 %r9, [%r8+512];"
        + result(0, "%r9")
        + "LEAVE: barrier.cluster.arrive; barrier.cluster.wait;"
    )
    for schedule in ("eager", "late"):
        assert run(body, grid=2, cluster=2, schedule=schedule)[32:, 0].tolist() == list(range(32))
    with pytest.raises(SimulationError, match="signals an mbarrier of CTA rank 0; both must be the same"):
        run(body.replace("%r7, [%r14];", "%r7, [%r5];"), grid=2, cluster=2)


def _map_in_data(address: int, columns: int = 16) -> np.ndarray:
    """A tensor map of 8 rows of u32, 16 apart, box 4 x 4, without swizzle, as 128 bytes."""
    tmap = TensorMap(address=address, dtype="u32", dims=(columns, 8), strides=(64,), box=(4, 4), element_strides=(1, 1))
    return np.frombuffer(pack(tmap), np.uint8).copy()


FIRST_BUFFER = 0x7000_0000_0000  # address of the output records, which serve as the tensor here


@SCHEDULES
def test_tensor_load_and_store(schedule):
    """A box at (12, -1) of a 14 x 8 tensor: columns 12 and 13 of rows 0..2 are inside, the rest is zero; stored
    back at (0, 0).
    """
    body = (
        "mad.lo.s32 %r9, %r0, 4, 1; st.global.b32 [%rd0], %r9; add.s32 %r9, %r9, 1; st.global.b32 [%rd0+4], "
        "%r9; add.s32 %r9, %r9, 1;"
        "st.global.b32 [%rd0+8], %r9; add.s32 %r9, %r9, 1; st.global.b32 [%rd0+12], %r9;"
        + INIT
        + ONE_THREAD
        + "mov.b32 %r7, 64; mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r5], %r7; add.s32 %r8, %r5, 1024; "
        "mov.b32 %r10, 12; mov.b32 %r11, -1;"
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r8], [%rd2, {%r10, "
        "%r11}], [%r5]; ISSUED:"
        + WAIT
        + "add.s32 %r8, %r5, 1024; mov.b32 %r10, 0; setp.ne.s32 %p1, %r0, 0; @%p1 bra STORED;"
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd2, {%r10, %r10}], [%r8]; "
        "cp.async.bulk.commit_group;"
        "cp.async.bulk.wait_group 0; STORED:"
    )
    out = run(body, words=4, data=_map_in_data(FIRST_BUFFER, 14), schedule=schedule).reshape(8, 16)

    # the memory was 1..128 in rows of 16: columns 12 and 13 of row 0 held 13, 14; of row 2 45, 46
    assert out[0, :5].tolist() == [0, 0, 0, 0, 5]
    assert out[1, :5].tolist() == [13, 14, 0, 0, 21]
    assert out[3, :4].tolist() == [45, 46, 0, 0]


def test_store_of_a_box_that_sticks_out_needs_only_its_inside_written():
    """Rows 2 and 3 of the box lie outside the tensor: they were never written, and that is no finding."""
    body = (
        "mov.b32 %r5, smem; shl.b32 %r6, %r0, 2; add.s32 %r6, %r6, %r5; setp.ge.u32 %p2, %r0, 8;"
        "@!%p2 st.shared.b32 [%r6+1024], {value}; fence.proxy.async.shared::cta; bar.sync 0; setp.ne.s32 %p1, %r0, 0;"
        "@%p1 bra ISSUED; add.s32 %r8, %r5, 1024; mov.b32 %r10, 0; mov.b32 %r11, 6;"
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd2, {{%r10, %r11}}], [%r8];"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; ISSUED:"
    )
    out = run(body.format(value="%r0"), words=4, data=_map_in_data(FIRST_BUFFER), checks=True).reshape(8, 16)

    assert out[6:, :4].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(SimulationError, match=r"R9 .*cp\.async\.bulk\.tensor.*reads smem\+1040, never written"):
        run(
            body.format(value="%r0").replace("%r0, 8;", "%r0, 4;"),
            words=4,
            data=_map_in_data(FIRST_BUFFER),
            checks=True,
        )


@SCHEDULES
def test_multicast_load_reaches_every_cta_of_the_mask(schedule):
    """One load, mask 3: the same offsets of both CTAs, and the bytes complete on both barriers."""
    body = (
        "add.s32 %r9, %a1, 1; st.global.b32 [%rd0], %r9;"
        + INIT
        + "mov.b32 %r7, 64; @!%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r5], %r7; barrier.cluster.arrive;"
        "barrier.cluster.wait; mov.u32 %r12, %cluster_ctarank; setp.ne.s32 %p3, %r12, 0; or.pred %p4, %p1, "
        "%p3; @%p4 bra ISSUED;"
        "add.s32 %r8, %r5, 1024; mov.b32 %r10, 0; mov.b16 %rs1, 3;"
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%r8], [%rd2, {%r10, %r10}], [%r5], %rs1; ISSUED:"
        + WAIT
        + "ld.shared.b32 %r9, [%r5+1040]; st.global.b32 [%rd0], %r9; barrier.cluster.arrive; barrier.cluster.wait;"
    )
    tmap = TensorMap(address=FIRST_BUFFER, dtype="u32", dims=(16, 4), strides=(64,), box=(4, 4), element_strides=(1, 1))
    data = np.frombuffer(pack(tmap), np.uint8).copy()
    out = run(body, grid=2, cluster=2, data=data, schedule=schedule)

    # box row 1 begins with element (1, 0) of rows of 16: value 17
    assert out[[0, 32], 0].tolist() == [17, 17]


@SCHEDULES
def test_tensor_reduction_adds_what_is_inside(schedule):
    """f32 box 8 x 4 at (12, 0) of a 16 x 4 tensor of ones: four columns get +2, the rest of the box is outside."""
    body = (
        "st.global.b32 [%rd0], 0f3F800000; st.global.b32 [%rd0+4], 0f3F800000; mov.b32 %r5, smem; shl.b32 %r6, %r0, 2;"
        "add.s32 %r6, %r6, %r5; st.shared.b32 [%r6+1024], 0f40000000; fence.proxy.async.shared::cta; bar.sync 0;"
        "setp.ne.s32 %p1, %r0, 0; @%p1 bra ISSUED; add.s32 %r8, %r5, 1024; mov.b32 %r10, 12; mov.b32 %r11, 0;"
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd2, {%r10, %r11}], [%r8];"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ISSUED:"
    )
    tmap = TensorMap(address=FIRST_BUFFER, dtype="f32", dims=(16, 4), strides=(64,), box=(8, 4), element_strides=(1, 1))
    data = np.frombuffer(pack(tmap), np.uint8).copy()
    out = run(body, words=2, data=data, schedule=schedule).view(np.float32).reshape(4, 16)

    assert out[2].tolist() == [1.0] * 12 + [3.0] * 4


def test_tensor_load_by_many_lanes_is_an_error():
    """Every lane would repeat the copy and its bytes."""
    body = (
        INIT + "add.s32 %r8, %r5, 1024; mov.b32 %r10, 0; "
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r8], [%rd2, {%r10, "
        "%r10}], [%r5];"
    )
    with pytest.raises(SimulationError, match="is executed by 32 threads; each repeats the copy"):
        run(body, words=4, data=_map_in_data(FIRST_BUFFER))


def test_tensor_copy_outside_every_buffer_is_an_error():
    """The tensor map points past the buffer: the copy is named with the nearest buffer."""
    body = (
        INIT + ONE_THREAD + "add.s32 %r8, %r5, 1024; mov.b32 %r10, 0; "
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r8], [%rd2, {%r10, "
        "%r10}], [%r5]; ISSUED:"
    )
    with pytest.raises(SimulationError, match=r"tensor copy .* out of bounds: nearest buffer is out"):
        run(body, words=1, data=_map_in_data(FIRST_BUFFER))


@pytest.mark.parametrize(
    ("instruction", "initial", "operand", "expected"),
    [
        ("atom.global.add.u32 %r9, [%rd2], %r1;", 5, 1, 37),
        ("red.release.gpu.global.add.s32 [%rd2], %r1;", 5, 0xFFFFFFFF, 0xFFFFFFE5),
        ("atom.global.max.s32 %r9, [%rd2], %r1;", 5, 0xFFFFFFFF, 5),
        ("atom.global.max.u32 %r9, [%rd2], %r1;", 5, 0xFFFFFFFF, 0xFFFFFFFF),
        ("atom.global.min.s32 %r9, [%rd2], %r1;", 5, 0xFFFFFFFF, 0xFFFFFFFF),
        ("atom.global.exch.b32 %r9, [%rd2], %r1;", 5, 9, 9),
        ("atom.global.acq_rel.cas.b32 %r9, [%rd2], 5, %r1;", 5, 6, 6),
        ("atom.global.add.f32 %r9, [%rd2], %r1;", 0, 0x3F800000, 0x42000000),  # 32 times 1.0
        ("atom.global.inc.u32 %r9, [%rd2], %r1;", 0, 9, 2),  # counts 0..9: 32 increments end at 2
    ],
)
def test_atomics(instruction, initial, operand, expected):
    """All 32 lanes on one word."""
    data = np.full(4, initial, np.uint32)
    run(instruction, np.full(32, operand, np.uint32), data=data)

    assert data[0] == expected


def test_atomic_returns_are_a_permutation_of_the_order():
    """Each lane sees a different old value."""
    data = np.zeros(4, np.uint32)
    out = run("atom.global.add.u32 %r9, [%rd2], 1;" + result(0, "%r9"), data=data)

    assert sorted(out[:, 0].tolist()) == list(range(32))


def test_spin_on_a_semaphore_waits_for_another_cluster():
    """Cluster 0 spins until cluster 1 releases: works with two clusters in flight, is a deadlock with one."""
    body = (
        "setp.ne.s32 %p1, %a0, 0; @%p1 bra SIGNAL; SPIN: ld.global.acquire.gpu.b32 %r9, [%rd2]; setp.ne.s32 "
        "%p2, %r9, 32; @%p2 bra SPIN; bra.uni OUT;"
        "SIGNAL: red.release.gpu.global.add.s32 [%rd2], 1; OUT:" + result(0, "%r9")
    )
    out = run(body, grid=2, data=np.zeros(4, np.uint32), concurrent_clusters=2)

    assert out[0, 0] == 32
    with pytest.raises(SimulationError, match=r"global word at 0x.*, last read 0, to change"):
        run(body, grid=2, data=np.zeros(4, np.uint32))


def test_cluster_launch_control_hands_out_work_in_order():
    """The first cluster claims the others one by one and finally gets no more: each claimed index is recorded."""
    body = (
        INIT
        + "mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; add.s32 %r8, %r5, 64; NEXT:"
        + "setp.ne.s32 %p1, %r0, 0; @%p1 bra ISSUED; mov.b32 %r7, 16; mbarrier.arrive.expect_tx.shared.b64 "
        "%rd9, [%r5], %r7;"
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 "
        "[%r8], [%r5]; ISSUED:"
        "{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r5], %r22, 10000000; @P bra.uni D; "
        "bra.uni W; D: } xor.b32 %r22, %r22, 1;"
        "ld.shared.v2.b64 {%rd8, %rd9}, [%r8]; mov.b128 %q0, {%rd8, %rd9};"
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q0; @!%p3 bra OUT;"
        "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r23, %q0; mul.lo.s32 %r20, %r20, 10; "
        "add.s32 %r20, %r20, %r23;"
        "add.s32 %r21, %r21, 1; fence.proxy.async.shared::cta; bar.sync 0; bra.uni NEXT; OUT:"
        + result(0, "%r20")
        + result(1, "%r21")
    )
    out = run(body, grid=4, words=2, target="sm_100a")

    assert out[0].tolist() == [123, 3]
    assert out[32].tolist() == [0, 0]
