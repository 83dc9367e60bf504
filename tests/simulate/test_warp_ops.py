"""Shuffles, votes, elections, reductions and matrix fragments, and what a missing lane means."""

import numpy as np
import pytest

from fa4build.errors import SimulationError
from tests.simulate.ptx_snippets import result, run

LANES = np.arange(32, dtype=np.uint32)


@pytest.mark.parametrize(
    ("mode", "b", "c", "source"),
    [
        ("idx", 5, 31, lambda i: 5),
        ("bfly", 1, 31, lambda i: i ^ 1),
        ("bfly", 16, 31, lambda i: i ^ 16),
        ("down", 4, 31, lambda i: i + 4 if i + 4 < 32 else i),
        ("up", 4, 0, lambda i: i - 4 if i >= 4 else i),
        # 0x181F: segments of 8 lanes; 0x1C1F: of 4
        ("bfly", 4, 0x181F, lambda i: i ^ 4),
        ("idx", 2, 0x1C1F, lambda i: i // 4 * 4 + 2),
        ("down", 3, 0x181F, lambda i: i + 3 if i % 8 + 3 < 8 else i),
        ("up", 3, 0x1800, lambda i: i - 3 if i % 8 >= 3 else i),
    ],
)
def test_shuffle(mode, b, c, source):
    """Which lane each lane reads; out of the segment it keeps its own value."""
    out = run(f"shfl.sync.{mode}.b32 %r9, %r1, {b}, {c}, -1;" + result(0, "%r9"), LANES * 10)

    assert out[:, 0].tolist() == [10 * source(i) for i in range(32)]


def test_shuffle_stays_within_each_warp():
    """Two warps in lockstep do not see each other's lanes."""
    out = run("shfl.sync.idx.b32 %r9, %r0, 0, 31, -1;" + result(0, "%r9"), threads=64)

    assert out[:, 0].tolist() == [0] * 32 + [32] * 32


def test_votes():
    """Ballot bits, any and all, per warp."""
    body = (
        "setp.lt.s32 %p1, %r0, 3; vote.sync.ballot.b32 %r9, %p1, -1; vote.sync.any.pred %p2, %p1, -1; "
        "vote.sync.all.pred %p3, %p1, -1;"
        "selp.b32 %r10, 1, 0, %p2; selp.b32 %r11, 1, 0, %p3;" + result(0, "%r9") + result(1, "%r10") + result(2, "%r11")
    )
    out = run(body, threads=64, words=3)

    assert out[0].tolist() == [0b111, 1, 0]
    assert out[32].tolist() == [0, 0, 0]


def test_elect_chooses_the_lowest_lane_of_the_mask():
    """H200: with mask 0xffffffe0 lane 5 is elected; the data result is its lane id in every lane."""
    body = "elect.sync %r9|%p1, 0xffffffe0; selp.b32 %r10, 1, 0, %p1;" + result(0, "%r9") + result(1, "%r10")
    out = run(body, words=2)

    assert out[:, 0].tolist() == [5] * 32
    assert out[:, 1].tolist() == [int(i == 5) for i in range(32)]


def test_elect_under_a_single_lane_branch_is_reported_as_what_it_is():
    """The bug "TMA copy under if tid == 0": elect.sync of all lanes executed by one. Hardware hangs; here it is
    named.
    """
    body = """
        setp.ne.s32 %p1, %r0, 0;
        @%p1 bra SKIP;
        elect.sync %r9|%p2, -1;
    SKIP:
    """
    with pytest.raises(
        SimulationError,
        match=r"elect.sync with member mask 0xffffffff is executed by lanes 0 of warp 0 only.*if tid == 0",
    ):
        run(body)


@pytest.mark.parametrize(
    "instruction", ["shfl.sync.idx.b32 %r9, %r0, 0, 31, -1;", "bar.warp.sync -1;", "vote.sync.ballot.b32 %r9, %p1, -1;"]
)
def test_full_mask_in_divergent_code_is_an_error(instruction):
    """A lane named in the member mask that is elsewhere would be waited for."""
    with pytest.raises(SimulationError, match=r"executed by lanes 0-15 of warp 0 only"):
        run(f"setp.ge.s32 %p1, %r0, 16; @%p1 bra SKIP; {instruction} SKIP:")


def test_partial_mask_in_divergent_code_is_fine():
    """Lanes outside the mask need not be there."""
    body = (
        "mov.b32 %r9, 77; setp.ge.s32 %p1, %r0, 16; @%p1 bra SKIP; shfl.sync.idx.b32 %r9, %r0, 3, 31, 0xffff; SKIP:"
        + result(0, "%r9")
    )

    assert run(body)[:, 0].tolist() == [3] * 16 + [77] * 16


@pytest.mark.parametrize(
    ("operation", "expected"), [("add", 496), ("max", 31), ("min", 0), ("or", 31), ("xor", 0), ("and", 0)]
)
def test_warp_reduction(operation, expected):
    """redux.sync over lane ids 0..31: sum 496."""
    kind = "b32" if operation in ("or", "xor", "and") else "u32"
    out = run(f"redux.sync.{operation}.{kind} %r9, %r0, -1;" + result(0, "%r9"))

    assert set(out[:, 0].tolist()) == {expected}


def _matrix_body(store: str, load: str, count: int) -> str:
    """Row address of lane l: 16 * l; the fragment register j holds 1000 * j + lane in both halves' low bits."""
    regs = ", ".join(f"%r{10 + j}" for j in range(count))
    loads = ", ".join(f"%r{20 + j}" for j in range(count))
    fill = "".join(
        f"shl.b32 %r{10 + j}, %r0, 16; or.b32 %r{10 + j}, %r{10 + j}, {1000 * (j + 1)};" for j in range(count)
    )
    return (
        "mov.b32 %r5, smem; shl.b32 %r6, %r0, 4; add.s32 %r5, %r5, %r6;"
        + fill
        + f"stmatrix.sync.aligned.m8n8.x{count}{store}.shared.b16 [%r5], {{{regs}}}; bar.sync 0;"
        + f"ldmatrix.sync.aligned.m8n8.x{count}{load}.shared.b16 {{{loads}}}, [%r5];"
        + "".join(result(j, f"%r{20 + j}") for j in range(count))
        + "ld.shared.b32 %r30, [%r5]; "
        + result(count, "%r30")
    )


@pytest.mark.parametrize("transpose", ["", ".trans"])
def test_ldmatrix_is_the_inverse_of_stmatrix(transpose):
    """Registers come back, with and without transposition on both sides."""
    out = run(_matrix_body(transpose, transpose, 4), words=5)

    assert [out[t, j] for t in (0, 31) for j in range(4)] == [
        t << 16 | 1000 * (j + 1) for t in (0, 31) for j in range(4)
    ]


def test_stmatrix_places_row_and_column():
    """Lane t holds row t/4, columns 2(t%4), +1 of matrix j; lanes 8j..8j+7 give its rows.

    Row 1 begins with lane 4's register.
    """
    out = run(_matrix_body("", "", 2), words=3)

    assert out[1, 2] == 4 << 16 | 1000
    assert out[8, 2] == 0 << 16 | 2000


def test_transposed_stmatrix_swaps_row_and_column():
    """Stored row 1 of matrix 0 starts with the second elements of column pairs: (0,1) of lane 0 and (1,1) of lane 4."""
    out = run(_matrix_body(".trans", ".trans", 2), words=3)

    # element (row, col) of the fragment goes to stored (col, row): stored row 1, columns 0, 1 = fragment (0,1), (1,1)
    # = high half of lane 0 (0) and of lane 4 (4)
    assert out[1, 2] == 4 << 16 | 0
