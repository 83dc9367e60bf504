"""Contract: descriptors decode to the documented fields, bad ones are refused, and an operand gathered through a
descriptor is the matrix that a TMA copy (or plain stores in the canonical layout) put into shared memory.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4build.errors import SimulationError
from fa4build.simulate.hardware import smem_descriptor as sd
from fa4build.simulate.hardware import tma
from fa4build.simulate.hardware.smem_descriptor import SmemDescriptor
from fa4build.simulate.hardware.tensor_map import TensorMap

WINDOW = 1 << 18
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
TMA_TYPES = {1: "u8", 2: "bf16", 4: "f32"}


def random_matrix(rng, shape, elem_bytes):
    return rng.integers(0, 2 ** (8 * elem_bytes), shape, dtype=np.uint64).astype(UNSIGNED[elem_bytes])


def put_by_tma(smem, matrix, box_inner, swizzle, address):
    """Copies a row-major matrix into shared memory as boxes of `box_inner` columns and all rows, one after another."""
    rows, columns = matrix.shape
    size = matrix.dtype.itemsize
    memory = np.ascontiguousarray(matrix).view(np.uint8).reshape(-1)
    tmap = TensorMap(
        address=0,
        dtype=TMA_TYPES[size],
        dims=(columns, rows),
        strides=(columns * size,),
        box=(box_inner, rows),
        element_strides=(1, 1),
        swizzle=swizzle,
    )
    for number, column in enumerate(range(0, columns, box_inner)):
        target = address + number * rows * box_inner * size
        tma.load_box(tma.plan_box(tmap, (column, 0), target), memory, 0, smem)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("elem_bytes", [1, 2, 4])
def test_k_major_operand_reads_back_each_k_step_of_a_swizzled_tile(swizzle, elem_bytes):
    """A (64, K) tile copied with a swizzle is read 32 bytes of K at a time by advancing the start inside the span."""
    rng = np.random.default_rng(1)
    k_elems = swizzle // elem_bytes
    matrix = random_matrix(rng, (64, k_elems), elem_bytes)
    smem = np.zeros(WINDOW, dtype=np.uint8)
    put_by_tma(smem, matrix, k_elems, swizzle, 0x8400)
    step = 32 // elem_bytes
    for k in range(0, k_elems, step):
        desc = SmemDescriptor(start=0x8400 + k * elem_bytes, leading_bytes=0, stride_bytes=8 * swizzle, swizzle=swizzle)
        found = sd.load_matrix(smem, desc, 64, step, elem_bytes, "k")

        assert np.array_equal(matrix[:, k : k + step], found)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("elem_bytes", [1, 2])
def test_mn_major_operand_reads_back_a_transposed_tile(swizzle, elem_bytes):
    """A (K, N) tile copied row by row is an N x K operand: boxes of one span along N, LBO from box to box."""
    rng = np.random.default_rng(2)
    k_elems, n = 64, 3 * swizzle // elem_bytes
    matrix = random_matrix(rng, (k_elems, n), elem_bytes)
    smem = np.zeros(WINDOW, dtype=np.uint8)
    put_by_tma(smem, matrix, swizzle // elem_bytes, swizzle, 0x400)
    step = 32 // elem_bytes
    for k in range(0, k_elems, step):
        desc = SmemDescriptor(
            start=0x400 + k * swizzle, leading_bytes=k_elems * swizzle, stride_bytes=8 * swizzle, swizzle=swizzle
        )
        found = sd.load_matrix(smem, desc, n, step, elem_bytes, "mn")

        assert np.array_equal(matrix[k : k + step].T, found)


@pytest.mark.parametrize("elem_bytes", [1, 2, 4])
def test_plain_k_major_operand_is_made_of_8_by_16_byte_cores(elem_bytes):
    """Without swizzle, 8 rows x 16 bytes lie together; LBO leads to the next 16 bytes of K, SBO to the next 8 rows."""
    rng = np.random.default_rng(3)
    per_core = 16 // elem_bytes
    matrix = random_matrix(rng, (32, 2 * per_core), elem_bytes)
    # cores[row block][k block][row][16 bytes], row blocks 512 bytes apart, k blocks 128.
    cores = matrix.reshape(4, 8, 2, per_core).transpose(0, 2, 1, 3)
    smem = np.zeros(WINDOW, dtype=np.uint8)
    for row_block in range(4):
        block = np.ascontiguousarray(cores[row_block]).view(np.uint8).reshape(-1)
        smem[0x500 + 512 * row_block : 0x500 + 512 * row_block + block.size] = block
    desc = SmemDescriptor(start=0x500, leading_bytes=128, stride_bytes=512, swizzle=0)

    assert np.array_equal(matrix, sd.load_matrix(smem, desc, 32, 2 * per_core, elem_bytes, "k"))


def test_plain_mn_major_operand_is_made_of_16_byte_by_8_cores():
    """Without swizzle, 8 k x 16 bytes of N lie together; SBO leads to the next 16 bytes of N, LBO to the next 8 k."""
    rng = np.random.default_rng(4)
    matrix = random_matrix(rng, (24, 16), 2)  # N x K
    # cores[n block][k block][k][8 n]
    cores = matrix.reshape(3, 8, 2, 8).transpose(0, 2, 3, 1)
    smem = np.zeros(WINDOW, dtype=np.uint8)
    smem[0x400 : 0x400 + 768] = np.ascontiguousarray(cores).view(np.uint8).reshape(-1)
    desc = SmemDescriptor(start=0x400, leading_bytes=128, stride_bytes=256, swizzle=0)

    assert np.array_equal(matrix, sd.load_matrix(smem, desc, 24, 16, 2, "mn"))


def reference_address(desc, i, k, elem_bytes, major):
    """One element's address, scalar, straight from the canonical layouts."""
    span, t = desc.swizzle, 16 // elem_bytes
    if major == "k" and span:
        offset = i // 8 * desc.stride_bytes + i % 8 * span + k * elem_bytes
    elif major == "k":
        offset = i // 8 * desc.stride_bytes + i % 8 * 16 + k // t * desc.leading_bytes + k % t * elem_bytes
    elif span:
        e = span // elem_bytes
        offset = i // e * desc.leading_bytes + i % e * elem_bytes + k // 8 * desc.stride_bytes + k % 8 * span
    else:
        offset = i // t * desc.stride_bytes + i % t * elem_bytes + k // 8 * desc.leading_bytes + k % 8 * 16
    address = desc.start + offset
    return address ^ (address >> 7 & {0: 0, 32: 1, 64: 3, 128: 7}[span]) << 4


@given(
    st.builds(
        SmemDescriptor,
        start=st.integers(0, 4095).map(lambda x: 16 * x),
        leading_bytes=st.integers(0, 600).map(lambda x: 16 * x),
        stride_bytes=st.integers(0, 128).map(lambda x: 16 * x),
        swizzle=st.sampled_from([0, 32, 64, 128]),
    ),
    st.sampled_from([8, 24, 64]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["k", "mn"]),
)
@settings(max_examples=100, deadline=None)
def test_gathering_equals_the_canonical_layout_element_by_element(desc, rows, elem_bytes, major):
    """Any start, strides and swizzle: element (i, k) comes from the address the manual gives."""
    k_elems = 32 // elem_bytes
    smem = np.random.default_rng(5).integers(0, 256, WINDOW, dtype=np.uint8)
    addresses = sd.element_addresses(desc, rows, k_elems, elem_bytes, major)
    found = sd.load_matrix(smem, desc, rows, k_elems, elem_bytes, major)
    units = sd.operand_units(desc, rows, k_elems, elem_bytes, major)
    for i, k in [(0, 0), (rows - 1, k_elems - 1), (7, 3), (rows // 2, 1), (3, k_elems // 2)]:
        address = reference_address(desc, i, k, elem_bytes, major)

        assert address == addresses[i, k]
        assert smem[address : address + elem_bytes].view(UNSIGNED[elem_bytes])[0] == found[i, k]
    assert set((addresses // 16).ravel().tolist()) <= set(units.ravel().tolist())


def test_wgmma_descriptor_fields():
    """Start 0x8420, LBO 16, SBO 1024, code 1 = 128-byte swizzle."""
    word = 0x8420 >> 4 | 16 >> 4 << 16 | 1024 >> 4 << 32 | 1 << 62

    assert SmemDescriptor(start=0x8420, leading_bytes=16, stride_bytes=1024, swizzle=128) == sd.decode_wgmma(word)
    assert [0, 64, 32] == [sd.decode_wgmma(code << 62).swizzle for code in (0, 2, 3)]


@pytest.mark.parametrize(("high", "stride", "swizzle"), [(0x40004040, 1024, 128), (0x80004020, 512, 64)])
def test_tcgen05_descriptor_words_of_the_compiler(high, stride, swizzle):
    """The two upper words seen in compiled attention kernels."""
    desc = sd.decode_tcgen05(high << 32 | 0x0840)

    assert SmemDescriptor(start=0x8400, leading_bytes=0, stride_bytes=stride, swizzle=swizzle) == desc


@pytest.mark.parametrize(
    ("decode", "word", "message"),
    [
        pytest.param(sd.decode_wgmma, 1 << 49 | 1 << 62, "base offset 1", id="wgmma-base-offset"),
        pytest.param(sd.decode_wgmma, 1 << 14, "must be zero", id="wgmma-reserved"),
        pytest.param(sd.decode_wgmma, 1 << 46, "must be zero", id="wgmma-with-tcgen05-version"),
        pytest.param(sd.decode_wgmma, 1 << 64, "64 bits", id="wgmma-too-wide"),
        pytest.param(sd.decode_tcgen05, 2 << 61, "bits 46-48", id="tcgen05-version"),
        pytest.param(sd.decode_tcgen05, 1 << 46 | 1 << 52, "absolute LBO", id="tcgen05-lbo-mode"),
        pytest.param(sd.decode_tcgen05, 1 << 46 | 1 << 61, "swizzle code 1", id="tcgen05-atom32"),
        pytest.param(sd.decode_tcgen05, 1 << 46 | 3 << 61, "swizzle code 3", id="tcgen05-no-such-swizzle"),
        pytest.param(sd.decode_tcgen05, 1 << 46 | 1 << 53, "must be zero", id="tcgen05-reserved"),
        pytest.param(sd.decode_tcgen05, 1 << 46 | 1 << 51 | 2 << 61, "base offset 4", id="tcgen05-base-offset"),
    ],
)
def test_descriptors_with_unknown_bits_are_refused(decode, word, message):
    """A swapped or stray field is an error with the word, never another matrix."""
    with pytest.raises(SimulationError, match=message):
        decode(word)


@pytest.mark.parametrize(
    ("word", "kind", "group", "expected"),
    [
        # word, kind, cta_group -> (M, N, K, A, B, D, A major, B major); words seen in compiled kernels
        (0x08200490, "f16", 1, (128, 128, 16, "bf16", "bf16", "f32", "k", "k")),
        (0x08210490, "f16", 1, (128, 128, 16, "bf16", "bf16", "f32", "k", "mn")),
        (0x08218490, "f16", 1, (128, 128, 16, "bf16", "bf16", "f32", "mn", "mn")),
        (0x08110490, "f16", 1, (128, 64, 16, "bf16", "bf16", "f32", "k", "mn")),
        (0x10310490, "f16", 2, (256, 192, 16, "bf16", "bf16", "f32", "k", "mn")),
        (0x08418490, "f16", 2, (128, 256, 16, "bf16", "bf16", "f32", "mn", "mn")),
        (0x08200010, "f16", 1, (128, 128, 16, "f16", "f16", "f32", "k", "k")),
        (0x10210010, "f8f6f4", 2, (256, 128, 32, "e4m3", "e4m3", "f32", "k", "mn")),
    ],
)
def test_instruction_descriptor_words_of_the_compiler(word, kind, group, expected):
    """Shapes, types and majors of the words listed in the specification."""
    d = sd.decode_instruction(word, kind, group)

    assert expected == (d.m, d.n, d.k, d.a_type, d.b_type, d.d_type, d.a_major, d.b_major)
    assert (False, False) == (d.negate_a, d.negate_b)


@pytest.mark.parametrize(
    ("word", "kind", "group", "message"),
    [
        pytest.param(0x08200490, "i8", 1, "kind::i8", id="kind"),
        pytest.param(0x08200490, "f16", 3, "cta_group::3", id="group"),
        pytest.param(0x08200494, "f16", 1, "sparsity", id="sparse"),
        pytest.param(0x08200090, "f8f6f4", 1, None, id="e5m2-is-fine"),
        pytest.param(0x08200890, "f16", 1, "types", id="tf32-in-f16"),
        pytest.param(0x082004A0, "f16", 1, "types", id="s32-accumulator"),
        pytest.param(0x08200480, "f16", 1, "types", id="f16-accumulator"),
        pytest.param(0x10200490, "f16", 1, "M 256", id="m256-one-cta"),
        pytest.param(0x04200490, "f16", 2, "M 64", id="m64-two-ctas"),
        pytest.param(0x10020490 | 1 << 17, "f16", 2, "N 8|N 24|N", id="n-step"),
        pytest.param(0x08000490, "f16", 1, "N 0", id="n-zero"),
    ],
)
def test_instruction_descriptors_out_of_range_are_refused(word, kind, group, message):
    """A shape, type or flag that the instruction does not have is an error."""
    if message is None:
        assert "e5m2" == sd.decode_instruction(word, kind, group).a_type
        return
    with pytest.raises(SimulationError, match=message):
        sd.decode_instruction(word, kind, group)


def test_operands_outside_the_window_or_the_span_are_refused():
    """Reading past the window, and a K-major row longer than its swizzle span, are errors."""
    desc = SmemDescriptor(start=0x3FC00, leading_bytes=0, stride_bytes=1024, swizzle=128)
    smem = np.zeros(WINDOW, dtype=np.uint8)

    assert (8, 16) == sd.load_matrix(smem, desc, 8, 16, 2, "k").shape
    with pytest.raises(SimulationError, match="outside the window"):
        sd.load_matrix(smem, desc, 16, 16, 2, "k")
    with pytest.raises(SimulationError, match="swizzle span of 64"):
        sd.load_matrix(smem, dataclasses.replace(desc, start=0, swizzle=64), 8, 64, 2, "k")
    with pytest.raises(SimulationError, match="major"):
        sd.load_matrix(smem, desc, 8, 16, 2, "n")
    with pytest.raises(SimulationError, match="3 bytes"):
        sd.load_matrix(smem, desc, 8, 16, 3, "k")
