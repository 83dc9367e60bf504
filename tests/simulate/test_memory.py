"""Loads and stores: bounds, alignment, widths, windows. An access outside every buffer names buffer, address, line
and warp.
"""

import struct

import numpy as np
import pytest

from fa4build.errors import SimulationError
from fa4build.simulate import GlobalMemory, SimLaunch, run_launch
from tests.simulate.ptx_snippets import lane0, result, run, text_of


def test_shared_round_trip_through_another_lane():
    """Lane i reads what lane 31-i stored; the window begins at 0x400."""
    body = (
        "mov.b32 %r5, smem;"
        + result(1, "%r5")
        + "shl.b32 %r6, %r0, 2; add.s32 %r6, %r6, %r5; st.shared.b32 [%r6], %r1;"
        "bar.sync 0; sub.s32 %r7, 31, %r0; shl.b32 %r7, %r7, 2; add.s32 %r7, %r7, %r5; ld.shared.b32 %r9, [%r7];"
        + result(0, "%r9")
    )
    out = run(body, np.arange(100, 132, dtype=np.uint32), words=2)

    assert out[:, 0].tolist() == list(range(131, 99, -1))
    assert out[0, 1] == 0x400


def test_vectors_are_consecutive_elements():
    """v4.b32 stored, read back as v2.b64 and as bytes: little endian, element 0 first."""
    body = (
        "mov.b32 %r5, smem; mov.b32 %r10, 0x03020100; mov.b32 %r11, 0x07060504; mov.b32 %r12, 8; mov.b32 %r13, 9;"
        "setp.eq.s32 %p1, %r0, 0; @%p1 st.shared.v4.b32 [%r5+16], {%r10, %r11, %r12, %r13}; bar.sync 0;"
        "ld.shared.v2.b64 {%rd8, %rd9}, [%r5+16]; mov.b64 {%r20, %r21}, %rd8; mov.b64 {%r22, %r23}, %rd9;"
        "ld.shared.u8 %r24, [%r5+21]; ld.shared.b16 %rs1, [%r5+18]; cvt.u32.u16 %r25, %rs1;"
        + "".join(result(k, f"%r{20 + k}") for k in range(6))
    )

    assert lane0(body, words=6) == [0x03020100, 0x07060504, 8, 9, 5, 0x0302]


def test_signed_loads_extend():
    """A signed element fills a wider register with its sign."""
    data = np.array([-2, 0, 0, 0], np.int32)
    body = "ld.global.s32 %rd9, [%rd2]; mov.b64 {%r20, %r21}, %rd9;" + result(0, "%r20") + result(1, "%r21")

    assert run(body, data=data, words=2)[0].tolist() == [0xFFFFFFFE, 0xFFFFFFFF]


def test_local_memory_is_private_to_a_thread():
    """Each lane reads back its own value from one local address."""
    body = (
        ".local .align 8 .b8 depot[16]; .reg .b64 %SPL; mov.b64 %SPL, depot; cvta.local.u64 %SPL, %SPL;"
        "st.local.b32 [%SPL+8], %r1; ld.local.b32 %r9, [%SPL+8];" + result(0, "%r9")
    )

    assert run(body, np.arange(32, dtype=np.uint32) * 3)[:, 0].tolist() == [3 * i for i in range(32)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param("mov.b32 %r5, smem; ld.shared.b32 %r9, [%r5+4096];", r"shared load of 4 bytes at 0x1400 "
            r"is outside", id="shared-past-end"),
        pytest.param("mov.b32 %r5, 0; st.shared.b32 [%r5], %r0;", r"shared store of 4 bytes at 0x0 is "
            r"outside", id="reserved-shared"),
        pytest.param("mov.b32 %r5, smem; ld.shared.v4.b32 {%r1,%r2,%r3,%r4}, [%r5+4];", r"16 bytes at "
            r"misaligned address 0x404", id="shared-align"),
        pytest.param("ld.global.b32 %r9, [%rd2+64];", r"load of 4 bytes at global address .* nearest buffer "
            r"is data \(64 bytes\), byte offset 64", id="global-past-end"),
        pytest.param("st.global.v2.b32 [%rd2+4], {%r0, %r0};", r"8 bytes at misaligned address", id="global-align"),
        pytest.param("ld.param.b64 %rd7, [snippet_in]; st.global.b32 [%rd7], %r0;", r"store to read-only "
            r"buffer in at byte offset 0", id="read-only"),
        pytest.param("mov.b64 %rd7, 0; ld.global.b32 %r9, [%rd7];", r"global address 0x0 is out of bounds", id="null"),
    ],
)  # fmt: skip
def test_bad_access_is_named(body, message):
    """The message has the access, the address, the nearest buffer, and the place."""
    with pytest.raises(SimulationError, match=message) as caught:
        run(body, data=np.zeros(16, np.uint32))

    assert "PTX line" in str(caught.value)
    assert "CTA (0, 0, 0), warp 0" in str(caught.value)


def test_out_of_bounds_of_inactive_lanes_is_no_error():
    """A guarded access touches memory in its active lanes only."""
    body = (
        "mul.wide.u32 %rd6, %r0, 4096; add.s64 %rd6, %rd2, %rd6; setp.eq.s32 %p1, %r0, 0; @%p1 ld.global.b32 "
        "%r9, [%rd6];" + result(0, "%r9")
    )

    assert run(body, data=np.full(4, 7, np.uint32))[0, 0] == 7


def test_mapa_replaces_the_rank_bits():
    """H200: mapa(0x408, 1) = 0x1000408, also from an address that carries a rank."""
    body = "mov.b32 %r5, 0x3000408; mapa.shared::cluster.u32 %r9, %r5, 1;" + result(0, "%r9")

    assert lane0(body) == [0x1000408]


def test_views_of_one_array_share_its_memory():
    """A strided view is registered as the array it was cut from, so strides reach every element."""
    base = np.arange(24, dtype=np.uint32).reshape(2, 3, 4)
    memory = GlobalMemory()
    first, second = memory.add_view("a", base[:, 1]), memory.add_view("a", base)

    assert first - second == 16
    assert memory.gather(np.array([first], np.uint64), 4).tolist() == [4]


def test_parameter_reads_are_bounded():
    """A load past the end of a parameter is an error of the PTX."""
    with pytest.raises(SimulationError, match="reads past the end of snippet_data"):
        run("ld.param.b64 %rd9, [snippet_data+4];")


def test_shared_memory_of_another_cta():
    """Rank 0 reads and writes rank 1's words through shared::cluster."""
    body = (
        "mov.b32 %r5, smem; shl.b32 %r6, %r0, 2; add.s32 %r6, %r6, %r5; mov.u32 %r10, %cluster_ctarank;"
        "mad.lo.s32 %r7, %r10, 100, %r0; st.shared.b32 [%r6], %r7; barrier.cluster.arrive; barrier.cluster.wait;"
        "xor.b32 %r11, %r10, 1; mapa.shared::cluster.u32 %r12, %r6, %r11; ld.shared::cluster.b32 %r9, [%r12];"
        "st.shared::cluster.b32 [%r12+128], %r9; barrier.cluster.arrive; barrier.cluster.wait; ld.shared.b32 "
        "%r13, [%r6+128];" + result(0, "%r9") + result(1, "%r13")
    )
    out = run(body, grid=2, cluster=2, words=2)

    assert out[3].tolist() == [103, 3]
    assert out[35].tolist() == [3, 103]


def test_reading_an_output_before_it_is_written_is_a_finding():
    """A buffer marked unwritten: reading it first is R9, reading what was written is fine."""
    text = text_of("ld.global.b32 %r9, [%rd2];")
    for body, is_faulty in (
        (text, True),
        (text.replace("ld.global.b32 %r9", "st.global.b32 [%rd2], %r0; ld.global.b32 %r9"), False),
    ):
        memory = GlobalMemory()
        data = memory.add("data", np.zeros(8, np.uint32))
        memory.mark_unwritten(data)
        launch = SimLaunch(
            kernel="snippet", grid=(1, 1, 1), block=(32, 1, 1), smem=64, parameters=struct.pack("<3Q", data, data, data)
        )
        if is_faulty:
            with pytest.raises(SimulationError, match=r"R9 .*reads data at byte 0, never written"):
                run_launch(body, launch, memory, checks=True)
        else:
            run_launch(body, launch, memory, checks=True)


def test_two_ctas_that_write_one_word_of_an_output_are_a_finding():
    """Each element of an output is written by one CTA; the words of a CTA's own threads may overlap."""
    for body, is_faulty in (
        ("st.global.b32 [%rd2], %r0;", True),
        ("mul.wide.u32 %rd6, %a1, 4; add.s64 %rd6, %rd6, %rd2; st.global.b32 [%rd6], %r0;", False),
    ):
        memory = GlobalMemory()
        data = memory.add("data", np.zeros(64, np.uint32))
        memory.mark_unwritten(data)
        launch = SimLaunch(
            kernel="snippet", grid=(2, 1, 1), block=(32, 1, 1), smem=64, parameters=struct.pack("<3Q", data, data, data)
        )
        for _ in range(2):  # a second launch may write the same again
            if is_faulty:
                with pytest.raises(
                    SimulationError, match=r"R3 .*writes data at byte 0, which another CTA of this launch"
                ):
                    run_launch(text_of(body), launch, memory, checks=True)
            else:
                run_launch(text_of(body), launch, memory, checks=True)
