"""Control flow: lanes part and meet at the immediate post-dominator, warps of a gang part and merge, convergence
is checked.
"""

import numpy as np
import pytest

from fa4build.errors import SimulationError
from tests.simulate.ptx_snippets import result, run

LANES = np.arange(32, dtype=np.uint32)


def test_both_sides_of_a_branch_run_and_meet():
    """Odd lanes add 1, even lanes 2; after the join everyone shuffles, which needs all lanes."""
    body = """
        and.b32 %r5, %r0, 1; setp.eq.s32 %p1, %r5, 0;
        @%p1 bra EVEN;
        add.s32 %r9, %r0, 1; bra.uni JOIN;
    EVEN:
        add.s32 %r9, %r0, 2;
    JOIN:
        shfl.sync.bfly.b32 %r9, %r9, 1, 31, -1;
    """
    out = run(body + result(0, "%r9"))

    # lane 0 gets lane 1's 1 + 1, lane 1 gets lane 0's 0 + 2
    assert out[:4, 0].tolist() == [2, 2, 4, 4]


def test_loops_with_a_trip_count_per_lane():
    """Lane i loops i times; lanes that leave wait for the others before the vote."""
    body = """
        mov.b32 %r9, 0; mov.b32 %r5, 0;
    LOOP:
        setp.ge.s32 %p1, %r5, %r0;
        @%p1 bra DONE;
        add.s32 %r9, %r9, %r5; add.s32 %r5, %r5, 1;
        bra.uni LOOP;
    DONE:
        vote.sync.ballot.b32 %r10, %p1, -1;
    """
    out = run(body + result(0, "%r9") + result(1, "%r10"), words=2)

    assert out[:, 0].tolist() == [i * (i - 1) // 2 for i in range(32)]
    assert set(out[:, 1].tolist()) == {0xFFFFFFFF}


def test_nested_divergence():
    """A branch inside a branch: four groups of lanes, each with its own path."""
    body = """
        mov.b32 %r9, 0;
        setp.ge.s32 %p1, %r0, 16;
        @%p1 bra HIGH;
        setp.ge.s32 %p2, %r0, 8; @%p2 bra MID;
        add.s32 %r9, %r9, 1; bra.uni JOIN1;
    MID: add.s32 %r9, %r9, 2;
    JOIN1: add.s32 %r9, %r9, 100; bra.uni JOIN;
    HIGH: add.s32 %r9, %r9, 3;
    JOIN: add.s32 %r9, %r9, 1000;
    """
    out = run(body + result(0, "%r9"))

    assert out[[0, 8, 16, 31], 0].tolist() == [1101, 1102, 1003, 1003]


def test_lanes_that_returned_are_gone():
    """After `ret` of half the lanes the other half goes on; the barrier counts live threads."""
    body = "setp.ge.s32 %p1, %r0, 16; @%p1 ret; mov.b32 %r9, 5;" + result(0, "%r9")

    assert run(body)[:, 0].tolist() == [5] * 16 + [0] * 16


@pytest.mark.parametrize("by_warp", [False, True], ids=["lockstep", "one-gang-per-warp"])
def test_warps_take_their_own_way(by_warp):
    """Warps branch apart by role, meet again and exchange through shared memory."""
    body = """
        shr.u32 %r5, %r0, 5; mov.b32 %r6, smem; shl.b32 %r7, %r0, 2; add.s32 %r7, %r7, %r6;
        setp.eq.s32 %p1, %r5, 2; @%p1 bra TWO;
        setp.eq.s32 %p2, %r5, 1; @%p2 bra ONE;
        st.shared.b32 [%r7], 10; bra.uni JOIN;
    ONE: st.shared.b32 [%r7], 11; bra.uni JOIN;
    TWO: st.shared.b32 [%r7], 12;
    JOIN: bar.sync 0;
        xor.b32 %r8, %r0, 32; shl.b32 %r8, %r8, 2; add.s32 %r8, %r8, %r6; ld.shared.b32 %r9, [%r8];
    """
    out = run(body + result(0, "%r9"), threads=128, launch={"by_warp": by_warp})

    assert out[::32, 0].tolist() == [11, 10, 10, 12]


def test_uniform_branch_that_is_not_uniform_is_an_error():
    """`bra.uni` promises that active lanes agree."""
    with pytest.raises(SimulationError, match=r"bra.uni at line \d+: lanes of one warp disagree"):
        run("setp.eq.s32 %p1, %r0, 3; @%p1 bra.uni OUT; mov.b32 %r9, 1; OUT:")


@pytest.mark.parametrize(
    "instruction",
    [
        "bar.sync 0;",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r5], {%r6};",
        "setmaxnreg.dec.sync.aligned.u32 24;",
        "wgmma.fence.sync.aligned;",
        "tcgen05.wait::ld.sync.aligned;",
    ],
)
def test_aligned_instruction_needs_the_whole_warp(instruction):
    """An .aligned instruction under a lane branch names the lanes that are there."""
    body = f"mov.b32 %r5, smem; mov.b32 %r6, 0; setp.ge.s32 %p1, %r0, 4; @%p1 bra SKIP; {instruction} SKIP:"
    with pytest.raises(SimulationError, match=r"needs all 32 lanes of warp 0, but only lanes 0-3 execute it"):
        run(body)


def test_special_registers():
    """tid, ctaid, laneid, warp id, grid size, cluster rank."""
    body = "".join(
        f"mov.u32 %r{20 + k}, {name};" + result(k, f"%r{20 + k}")
        for k, name in enumerate(
            [
                "%tid.x",
                "%ctaid.x",
                "%nctaid.x",
                "%laneid",
                "%cluster_ctarank",
                "%clusterid.x",
                "%ntid.x",
                "%nclusterid.x",
            ]
        )
    )
    out = run(body, threads=64, words=8, grid=4, cluster=2)

    assert out[64 * 3 + 40].tolist() == [40, 3, 4, 8, 1, 1, 64, 2]


def test_endless_loop_without_blocking_is_reported(monkeypatch):
    """A loop that never ends hits the instruction limit instead of hanging the build."""
    monkeypatch.setattr("fa4build.simulate.launch.INSTRUCTION_LIMIT", 10_000)
    with pytest.raises(SimulationError, match="livelock"):
        run("LOOP: add.s32 %r9, %r9, 1; bra.uni LOOP;")


def test_a_branch_around_nothing_changes_nothing():
    """What an optimiser may leave: lanes part over an empty block and are together again."""
    body = "and.b32 %r5, %r0, 1; setp.eq.s32 %p1, %r5, 0; @%p1 bra NEXT; NEXT: shfl.sync.bfly.b32 %r9, %r0, 1, 31, -1;"

    assert run(body + result(0, "%r9"))[:, 0].tolist() == [i ^ 1 for i in range(32)]
    assert run(body + result(0, "%r9"), threads=64)[32:, 0].tolist() == [32 + (i ^ 1) for i in range(32)]
