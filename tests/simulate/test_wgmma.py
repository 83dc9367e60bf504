"""wgmma in the machine: fragments, operands from registers and shared memory, groups, and the fault classes around
them.

The expected product is computed with plain float64 sums of small integers, which bf16 and f32 hold exactly.
"""

import numpy as np
import pytest

from fa4build.errors import SimulationError
from fa4build.simulate.instructions.wgmma import accumulator_fragment, accumulator_matrix, operand_matrix
from tests.simulate.ptx_snippets import run

N, K = 16, 16


def _bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _operands() -> tuple[np.ndarray, np.ndarray]:
    """A (64, 16) and B (16, 16) of small integers."""
    rng = np.random.default_rng(5)
    return rng.integers(-4, 5, (64, K)).astype(float), rng.integers(-4, 5, (N, K)).astype(float)


def _core_matrices(matrix: np.ndarray) -> np.ndarray:
    """K-major, no swizzle: 8 x 8 blocks of 128 bytes; LBO 128 to the next block along K, SBO 256 to the next along
    rows.
    """
    rows, cols = matrix.shape
    return _bf16(matrix).reshape(rows // 8, 8, cols // 8, 8).transpose(0, 2, 1, 3).reshape(-1)


# start >> 4 | LBO >> 4 << 16 | SBO >> 4 << 32
LAYOUT = (128 >> 4) << 16 | (256 >> 4) << 32
COPY_IN = """
    mov.b32 %r5, smem; shl.b32 %r6, %r0, 2; cvt.u64.u32 %rd5, %r6; add.s64 %rd5, %rd5, %rd2; add.s32 %r7, %r5, %r6;
    mov.b32 %r8, 0;
COPY:
    ld.global.b32 %r9, [%rd5]; st.shared.b32 [%r7], %r9; add.s64 %rd5, %rd5, 512; add.s32 %r7, %r7, 512; add.s32
    %r8, %r8, 1; setp.lt.s32 %p1, %r8, 5; @%p1 bra COPY;
    fence.proxy.async.shared::cta; bar.sync 0;
"""
D = "{" + ", ".join(f"%r{40 + i}" for i in range(8)) + "}"
ZERO = "".join(f"mov.b32 %r{40 + i}, 0f3F800000;" for i in range(8))
STORE = "".join(f"st.global.b32 [%rd0+{4 * i}], %r{40 + i};" for i in range(8))
DESCRIPTORS = (
    f"shr.u32 %r10, %r5, 4; cvt.u64.u32 %rd10, %r10; or.b64 %rd11, %rd10, {LAYOUT};"
    f"add.s32 %r11, %r5, 2048; shr.u32 %r11, %r11, 4; cvt.u64.u32 %rd12, %r11; or.b64 %rd12, %rd12, {LAYOUT};"
)
MMA = f"wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {D}, %rd11, %rd12, %p2, 1, 1, 0, 0;"


def _body(scale: int, mma: str = MMA, wait: str = "wgmma.wait_group.sync.aligned 0;") -> str:
    return (
        COPY_IN
        + ZERO
        + DESCRIPTORS
        + f"mov.pred %p2, {scale}; wgmma.fence.sync.aligned; {mma} wgmma.commit_group.sync.aligned; {wait}"
        + STORE
    )


def _data() -> np.ndarray:
    a, b = _operands()
    return np.concatenate([_core_matrices(a), _core_matrices(b)])


@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
@pytest.mark.parametrize("scale", [0, 1])
@pytest.mark.parametrize("by_warp", [False, True], ids=["lockstep", "by-warp"])
def test_product_of_shared_operands(schedule, scale, by_warp):
    """D = A B^T, plus the accumulator (all ones) when scale-d is set; four warps that arrive apart become one
    warpgroup.
    """
    a, b = _operands()
    out = run(
        _body(scale), threads=128, words=8, smem=8192, data=_data(), schedule=schedule, launch={"by_warp": by_warp}
    )

    assert (accumulator_matrix(out.T.copy().view(np.float32)) == a @ b.T + scale).all()


def _apart(predicate: str, name: str) -> str:
    """A branch whose two ways meet only behind the product, since either could end there (none does)."""
    return f"@{predicate} bra {name}; @%p6 bra END; bra M{name}; {name}: @%p6 bra END; M{name}:"


def test_warps_that_went_apart_as_a_whole_are_one_warpgroup():
    """Warps 0 and 1 part from 2 and 3, then from each other. No lane of a warp is apart from another, so the product
    is that of all four, though they did not meet where their ways do.
    """
    a, b = _operands()
    ways = "shr.u32 %r20, %r0, 5; setp.lt.u32 %p3, %r20, 2; setp.eq.u32 %p5, %r20, 0; setp.gt.u32 %p6, %r20, 99;"
    body = _body(0, ways + _apart("%p3", "FIRST") + _apart("%p5", "SECOND") + "wgmma.fence.sync.aligned;" + MMA)
    body = body.replace("wgmma.wait_group", "END: wgmma.wait_group")
    out = run(body, threads=128, words=8, smem=8192, data=_data())

    assert (accumulator_matrix(out.T.copy().view(np.float32)) == a @ b.T).all()


def test_operand_from_registers():
    """The A fragment in registers gives the same product."""
    a, b = _operands()
    # A's registers, from the fragment rule: row 16w + t/4 + 8(j%2), k = 2(t%4) + 8(j/2)
    lanes = np.arange(128)
    words = []
    for j in range(4):
        row, k = 16 * (lanes // 32) + lanes % 32 // 4 + 8 * (j % 2), 2 * (lanes % 4) + 8 * (j // 2)
        words.append(_bf16(a[row, k]).astype(np.uint32) | _bf16(a[row, k + 1]).astype(np.uint32) << 16)
    mma = f"wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {D}, {{%r1, %r2, %r3, %r4}}, %rd12, %p2, 1, 1, 0;"
    out = run(_body(0, mma), *words, threads=128, words=8, smem=8192, data=_data())

    assert (accumulator_matrix(out.T.copy().view(np.float32)) == a @ b.T).all()


def test_two_chained_products_accumulate_in_order():
    """Two MMAs on one accumulator in one group: twice the product."""
    a, b = _operands()
    for schedule in ("eager", "late"):
        out = run(
            _body(0, MMA + "mov.pred %p2, 1;" + MMA), threads=128, words=8, smem=8192, data=_data(), schedule=schedule
        )

        assert (accumulator_matrix(out.T.copy().view(np.float32)) == 2 * (a @ b.T)).all()


def test_results_read_before_the_wait_are_poison_in_the_late_schedule():
    """A missing wait_group shows up as NaN instead of luck."""
    out = run(_body(0, wait=""), threads=128, words=8, smem=8192, data=_data(), schedule="late")

    assert np.isnan(out.view(np.float32)).all()


def test_part_of_a_warpgroup_is_a_deadlock_that_names_the_missing_warps():
    """Three warps issue, one leaves: the report says which warp the others wait for."""
    body = COPY_IN + ZERO + DESCRIPTORS + f"setp.ge.u32 %p3, %r0, 96; @%p3 bra OUT; mov.pred %p2, 0; {MMA} OUT:"
    with pytest.raises(SimulationError, match=r"waits for warps \[3\] of its warpgroup to reach wgmma"):
        run(body, threads=128, words=8, smem=8192, data=_data())


def test_reserved_descriptor_bits_are_an_error():
    """A descriptor with a base offset is not modelled and says so, with the line."""
    body = _body(0).replace(
        "wgmma.fence.sync.aligned;", f"or.b64 %rd12, %rd12, {1 << 49}; wgmma.fence.sync.aligned;", 1
    )
    with pytest.raises(SimulationError, match=r"wgmma descriptor .* has base offset 1"):
        run(body, threads=128, words=8, smem=8192, data=_data())


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        pytest.param(("wgmma.fence.sync.aligned;", ""), r"R8 wgmma.*: no wgmma.fence before it", id="no-fence"),
        pytest.param(
            ("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; mov.b32 %r41, 0f40000000;"),
            r"R8 wgmma.*: accumulator registers \(%r41, ...\) were written after the last wgmma.fence",
            id="written-after-the-fence",
        ),
        pytest.param(
            ("wgmma.wait_group.sync.aligned 0;", ""),
            r"R8 .*exits with wgmma operations not waited for",
            id="not-waited-for",
        ),
        pytest.param(("fence.proxy.async.shared::cta;", ""), r"R4 .*without a fence.proxy.async", id="no-proxy-fence"),
    ],
)
def test_faults_around_a_product_are_findings(faulty, message):
    """wgmma.fence, wait_group and the proxy fence: each is missed when it is gone, and the whole program is clean."""
    run(_body(1), threads=128, words=8, smem=8192, data=_data(), checks=True)
    with pytest.raises(SimulationError, match=message):
        run(_body(1).replace(*faulty), threads=128, words=8, smem=8192, data=_data(), checks=True)


def test_fragment_maps_are_inverse():
    """Matrix to registers and back."""
    matrix = np.arange(64 * 24, dtype=np.float32).reshape(64, 24)

    assert (accumulator_matrix(accumulator_fragment(matrix)) == matrix).all()
    # register 2 (third) of lane 5 (warp 0, row 1, column pair 1): row 1 + 8, column 2
    assert accumulator_fragment(matrix)[2, 5] == matrix[9, 2]


def test_fp8_operand_fragment():
    """8-bit A: register j of lane t holds k = 4(t%4) + 16(j/2) + 0..3 of row t/4 + 8(j%2)."""
    fragment = np.zeros((4, 128), np.uint32)
    fragment[3, 6] = 0x04030201
    matrix = operand_matrix(fragment, 1)

    assert matrix[1 + 8, 8 + 16 : 8 + 20].tolist() == [1, 2, 3, 4]


def test_fp8_is_refused():
    """Hopper cuts 8-bit products to other bits than the model of tensor_core.py: no wrong proof is given."""
    opcode = "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3"
    body = opcode + " {%r10, %r11, %r12, %r13}, %rd10, %rd11, 0, 1, 1;"
    with pytest.raises(SimulationError, match=r"e4m3\.e4m3: 8-bit operands are not modelled for sm_90a"):
        run(body, threads=128)
