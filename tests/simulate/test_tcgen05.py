"""tcgen05 in the machine: allocation, loads and stores of tensor memory, products of one and two CTAs, commit.

Expected products are float64 sums of small integers, exact in bf16 and f32.
"""

import numpy as np
import pytest

from fa4build.errors import SimulationError
from tests.simulate.ptx_snippets import result, run

TARGET = "sm_100a"
ALLOC = """
    mov.b32 %r5, smem; shr.u32 %r4, %r0, 5;
    setp.ne.s32 %p1, %r4, 0; @%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r5+64], {columns};
    tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
    elect.sync _|%p2, -1; mov.b32 %r6, 1; @%p2 mbarrier.init.shared.b64 [%r5], %r6;
ALLOCATED:
    fence.mbarrier_init.release.cluster; bar.sync 0; ld.shared.b32 %r7, [%r5+64];
    shl.b32 %r8, %r4, 21; add.s32 %r8, %r8, %r7;
"""
FREE = """
    bar.sync 0; @%p1 bra FREED; tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r7, {columns}; FREED:
"""


def _alloc(columns: int = 32, group: int = 1) -> str:
    return ALLOC.format(columns=columns, group=group)


def _free(columns: int = 32, group: int = 1) -> str:
    return FREE.format(columns=columns, group=group)


def test_store_and_load_keep_lane_and_column():
    """Each warp owns its quarter of the lanes: warp w, lane t is row 32w + t; columns are registers."""
    body = (
        _alloc() + "add.s32 %r9, %r0, 1000; add.s32 %r10, %r0, 2000; tcgen05.st.sync.aligned.32x32b.x2.b32 [%r8+4], "
        "{%r9, %r10}; tcgen05.wait::st.sync.aligned;"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r11}, [%r8+5]; tcgen05.wait::ld.sync.aligned;"
        + result(0, "%r11")
        + _free()
    )
    out = run(body, threads=128, target=TARGET, checks=True)

    assert out[:, 0].tolist() == [2000 + t for t in range(128)]


def test_reducing_load_returns_the_row_maximum():
    """sm_103a: the registers and the largest of them per lane."""
    regs = ", ".join(f"%r{20 + j}" for j in range(4))
    body = (
        _alloc()
        + "cvt.rn.f32.u32 %r9, %r0; mov.b32 %r10, 0f41200000; neg.f32 %r11, %r9; mov.b32 %r12, 0f7FC00000;"
        "tcgen05.st.sync.aligned.32x32b.x4.b32 [%r8], {%r9, %r10, %r11, %r12}; tcgen05.wait::st.sync.aligned;"
        f"tcgen05.ld.red.sync.aligned.32x32b.x4.max.f32 {{{regs}}}, %r30, [%r8];"
        + result(0, "%r30") + result(1, "%r22") + _free()
    )  # fmt: skip
    out = run(body, threads=128, words=2, target="sm_103a").view(np.float32)

    assert out[:, 0].tolist() == [max(10.0, t) for t in range(128)]
    assert out[7, 1] == -7.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(_alloc(48), r"tcgen05.alloc of 48 columns; allowed", id="columns"),
        pytest.param(_alloc() + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r11}, [%r8+32];", r"columns 32..32 "
            r"are not allocated \(allocated: 0..31\)", id="not-allocated"),
        pytest.param(_alloc() + "xor.b32 %r8, %r8, 2097152; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r11}, "
            "[%r8];", r"tcgen05 ld/st 32x32b at lane 32 by warp 0", id="lane-quarter"),
        pytest.param(_alloc() + "add.s32 %r8, %r8, %r0; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r11}, "
            "[%r8];", r"tensor memory address must be the same in all lanes", id="non-uniform"),
        pytest.param(_alloc() + "@%p1 bra X; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 "
            "[%r5+64], 32; X:", r"after tcgen05.relinquish_alloc_permit", id="after-relinquish"),
        pytest.param(_alloc() + "@%p1 bra X; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 64; X:",
            r"tcgen05.dealloc of 64 columns at 0", id="dealloc-size"),
        pytest.param("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], 32;", r"is executed by "
            r"4 warps; one warp must allocate", id="all-warps"),
        pytest.param(_alloc() + "@%p1 bra X; tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r7, 32; X:",
            r"cta_group::2 after cta_group::1", id="mixed-groups"),
    ],
)  # fmt: skip
def test_misuse_of_tensor_memory(body, message):
    """Allocation rules, lane quarters, uniform addresses, one cta_group; the same with checks."""
    for checks in (False, True):
        with pytest.raises(SimulationError, match=message):
            run(body, threads=128, target=TARGET, checks=checks)


def test_a_quarter_beyond_the_last_is_told_as_such():
    """Lane 128 and up of an address that the warp's own quarter was added to twice."""
    body = (
        _alloc() + "shl.b32 %r9, %r4, 22; add.s32 %r8, %r8, %r9; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r11}, [%r8];"
    )
    with pytest.raises(SimulationError, match=r"tcgen05 ld/st 32x32b at lane 96 by warp 1|lane \d+, column 0\) is out"):
        run(body, threads=128, target=TARGET, checks=True)


M, N, K = 128, 16, 16


def _bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _core_matrices(matrix: np.ndarray) -> np.ndarray:
    """K-major without swizzle: 8 x 8 blocks of 128 bytes, LBO 128, SBO 256."""
    rows, cols = matrix.shape
    return _bf16(matrix).reshape(rows // 8, 8, cols // 8, 8).transpose(0, 2, 1, 3).reshape(-1)


def _operands(m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(8)
    return rng.integers(-4, 5, (m, K)).astype(float), rng.integers(-4, 5, (n, K)).astype(float)


LAYOUT = (128 >> 4) << 16 | (256 >> 4) << 32 | 1 << 46
# 4608 bytes (A 4096, B 512) to shared memory at +1024, 128 threads x 4 bytes x 9
COPY_IN = """
    shl.b32 %r9, %r0, 2; cvt.u64.u32 %rd5, %r9; add.s64 %rd5, %rd5, %rd2; add.s32 %r10, %r5, %r9; mov.b32 %r11, 0;
    mov.u32 %r12, %cluster_ctarank; mul.wide.u32 %rd6, %r12, 4608; add.s64 %rd5, %rd5, %rd6;
COPY:
    ld.global.b32 %r13, [%rd5]; st.shared.b32 [%r10+1024], %r13; add.s64 %rd5, %rd5, 512; add.s32 %r10, %r10, 512;
    add.s32 %r11, %r11, 1; setp.lt.s32 %p3, %r11, 9; @%p3 bra COPY;
    fence.proxy.async.shared::cta; bar.sync 0;
"""
DESCRIPTORS = (
    "and.b32 %r14, %r5, 262143; add.s32 %r15, %r14, 1024; shr.u32 %r15, %r15, 4; cvt.u64.u32 %rd10, %r15; "
    f"or.b64 %rd10, %rd10, {LAYOUT}; add.s32 %r16, %r14, 5120; shr.u32 %r16, %r16, 4; cvt.u64.u32 %rd11, "
    f"%r16; or.b64 %rd11, %rd11, {LAYOUT};"
)
WAIT = (
    "{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r5], 0, 10000000; @P bra.uni D; bra.uni W; D: }"
    "tcgen05.fence::after_thread_sync;"
)
LOAD = (
    "tcgen05.ld.sync.aligned.32x32b.x16.b32 {" + ", ".join(f"%r{40 + j}" for j in range(16)) + "}, [%r8]; "
        "tcgen05.wait::ld.sync.aligned;"
    + "".join(result(j, f"%r{40 + j}") for j in range(16))
)  # fmt: skip


def _idesc(m: int, n: int) -> int:
    """bf16 x bf16 -> f32, both K-major."""
    return 1 << 4 | 1 << 7 | 1 << 10 | (n >> 3) << 17 | (m >> 4) << 24


def _product_body(accumulate: str = "0") -> str:
    return (
        _alloc()
        + COPY_IN
        + DESCRIPTORS
        + f"mov.b32 %r17, {_idesc(M, N)}; @%p1 bra ISSUED; elect.sync _|%p4, -1; @!%p4 bra ISSUED;"
        "tcgen05.mma.cta_group::1.kind::f16 [%r7], %rd10, %rd11, %r17, 0;"
        f"tcgen05.mma.cta_group::1.kind::f16.collector::a::discard [%r7], %rd10, %rd11, %r17, {{0, 0, 0, "
        f"0}}, {accumulate};"
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5]; ISSUED:" + WAIT + LOAD + _free()
    )


def _data() -> np.ndarray:
    a, b = _operands(M, N)
    return np.concatenate([_core_matrices(a), _core_matrices(b)])


@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
@pytest.mark.parametrize(("accumulate", "factor"), [("0", 1), ("1", 2)])
def test_product_of_one_cta(schedule, accumulate, factor):
    """D = A B^T in tensor memory; a second MMA replaces or adds. Clean under every check."""
    a, b = _operands(M, N)
    out = run(
        _product_body(accumulate),
        threads=128,
        words=16,
        smem=8192,
        data=_data(),
        target=TARGET,
        schedule=schedule,
        checks=True,
    )

    assert (out.view(np.float32) == factor * (a @ b.T)).all()


def test_product_read_before_its_commit_is_poison_in_the_late_schedule_and_a_finding():
    """Without the wait the accumulator is whatever was there: NaN poison late, and a race when checks are on."""
    body = _product_body().replace(WAIT, "")
    out = run(body, threads=128, words=16, smem=8192, data=_data(), target=TARGET, schedule="late")

    assert np.isnan(out.view(np.float32)).all()
    with pytest.raises(
        SimulationError, match=r"R1 .*tcgen05\.ld.*reads tensor memory .* while the write by mma of warp 0 of CTA 0"
    ):
        run(body, threads=128, words=16, smem=8192, data=_data(), target=TARGET, checks=True)


def test_operand_from_tensor_memory():
    """A in tensor memory, two bf16 a column, lane = row."""
    a, b = _operands(M, N)
    packed = _bf16(a).reshape(M, 8, 2).astype(np.uint32)
    words = (packed[:, :, 0] | packed[:, :, 1] << 16).T
    store = (
        "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r8+16], {"
        + ", ".join(f"%r{100 + j}" for j in range(8))
        + "}; tcgen05.wait::st.sync.aligned;"
    )
    keep = "".join(f"mov.b32 %r{100 + j}, %r{j + 1};" for j in range(8))
    body = (
        keep
        + _alloc()
        + COPY_IN
        + DESCRIPTORS
        + store
        + "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;"
        f"mov.b32 %r17, {_idesc(M, N)}; @%p1 bra ISSUED; "
        f"elect.sync _|%p4, -1; @!%p4 bra ISSUED;"
        "add.s32 %r18, %r7, 16; tcgen05.mma.cta_group::1.kind::f16 [%r7], [%r18], %rd11, %r17, 0;"
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5]; ISSUED:" + WAIT + LOAD + _free()
    )
    out = run(body, *words, threads=128, words=16, smem=8192, data=_data(), target=TARGET, checks=True)

    assert (out.view(np.float32) == a @ b.T).all()


def _pair_data(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Each CTA's rows of A (256) and of B (32)."""
    return np.concatenate(
        [
            np.concatenate([_core_matrices(a[128 * r : 128 * r + 128]), _core_matrices(b[16 * r : 16 * r + 16])])
            for r in range(2)
        ]
    )


def _pair_body(load: str) -> str:
    """cta_group::2, M 256: each CTA supplies its rows of A and half of B, and holds its rows of D; `load` after one
    multicast commit.
    """
    return (
        _alloc(32, 2)
        + COPY_IN
        + DESCRIPTORS
        + f"barrier.cluster.arrive; barrier.cluster.wait; mov.b32 %r17, {_idesc(256, 32)}; mov.b16 %rs1, 3;"
        "setp.ne.s32 %p6, %r12, 0; or.pred %p7, %p6, %p1; @%p7 bra ISSUED; elect.sync _|%p4, -1; @!%p4 bra ISSUED;"
        "tcgen05.mma.cta_group::2.kind::f16 [%r7], %rd10, %rd11, %r17, 0;"
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r5], %rs1; ISSUED:"
        + load
        + _free(32, 2)
    )


def _run_pair(body: str, a: np.ndarray, b: np.ndarray, schedule: str) -> np.ndarray:
    return run(
        body,
        threads=128,
        words=32,
        smem=8192,
        grid=2,
        cluster=2,
        data=_pair_data(a, b),
        target=TARGET,
        schedule=schedule,
        checks=True,
    ).view(np.float32)


LOAD_32 = LOAD.replace("x16", "x32").replace(
    ", ".join(f"%r{40 + j}" for j in range(16)), ", ".join(f"%r{40 + j}" for j in range(32))
) + "".join(result(j, f"%r{40 + j}") for j in range(16, 32))


@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_product_of_a_cta_pair(schedule):
    """Rows 0..127 in the first CTA, 128..255 in the second, all columns in both."""
    a, b = _operands(256, 32)

    assert (
        _run_pair(_pair_body(WAIT + LOAD_32 + "barrier.cluster.arrive; barrier.cluster.wait;"), a, b, schedule)
        == a @ b.T
    ).all()


@pytest.mark.parametrize("schedule", ["eager", "late"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_pair_must_not_free_what_the_product_of_the_first_may_still_write(schedule, rank):
    """The product is issued in the first CTA and writes both; one of them frees without waiting for the commit."""
    a, b = _operands(256, 32)
    wait_of_the_other = f"setp.eq.s32 %p8, %r12, {rank}; @%p8 bra UNSEEN;" + WAIT + "UNSEEN:"
    race = rf"R6-free CTA rank {rank} warp 0, .*tcgen05\.dealloc.*: frees .* write by mma of warp 0 of CTA 0"
    message = rf"{race}|tcgen05\.mma.*columns 0\.\.31 are not allocated"  # where the second was faster
    with pytest.raises(SimulationError, match=message):
        _run_pair(_pair_body(wait_of_the_other), a, b, schedule)


def test_tensor_memory_left_allocated_is_a_finding():
    """All columns must be freed before exit."""
    with pytest.raises(SimulationError, match=r"R6 CTA \(0, 0, 0\) exits with tensor memory not freed: \{0: 32\}"):
        run(_alloc(), threads=128, target=TARGET, checks=True)


@pytest.mark.parametrize(
    ("shape", "first_source_row"),
    [
        ("128x128b", (0, 32, 64, 96)),
        ("32x128b.warpx4", (0, 0, 0, 0)),
        ("64x128b.warpx2::02_13", (0, 32, 0, 32)),
        ("64x128b.warpx2::01_23", (0, 0, 32, 32)),
    ],
)
def test_copy_from_shared_memory(shape, first_source_row):
    """tcgen05.cp: rows of 16 bytes to lanes; the narrow shapes repeat over the quarters of the lanes."""
    columns = ", ".join(f"%r{40 + j}" for j in range(4))
    body = (
        _alloc() + "shl.b32 %r9, %r0, 4; add.s32 %r10, %r5, %r9; mul.lo.s32 %r11, %r0, 4; add.s32 %r12, %r11, 1; "
        "add.s32 %r13, %r11, 2;"
        "add.s32 %r14, %r11, 3; st.shared.v4.b32 [%r10+1024], {%r11, %r12, %r13, %r14}; "
        "fence.proxy.async.shared::cta; bar.sync 0;"
        + DESCRIPTORS.replace(str(LAYOUT), str((128 >> 4) << 32 | 1 << 46))
        + f"@%p1 bra ISSUED; elect.sync _|%p4, -1; @!%p4 bra ISSUED; tcgen05.cp.cta_group::1.{shape} [%r7], %rd10;"
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5]; ISSUED:"
        + WAIT
        + f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {{{columns}}}, [%r8]; tcgen05.wait::ld.sync.aligned;"
        + "".join(result(j, f"%r{40 + j}") for j in range(4))
        + _free()
    )
    out = run(body, threads=128, words=4, smem=8192, target=TARGET, checks=True)

    for quarter, row in enumerate(first_source_row):
        assert out[32 * quarter + 5].tolist() == [4 * (row + 5) + j for j in range(4)]
