"""Contract: a tensor map packs to the bytes the driver writes, reads back to the same value, and refuses bad fields.

Bits without known meaning and the tail of the 128 bytes do not matter when reading.
"""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4build.errors import SimulationError
from fa4build.simulate.hardware.tensor_map import ELEMENT_TYPES, TensorMap, pack, repaired, unpack

# The driver's own output for this map (first 64 bytes, little-endian 64-bit words).
EXAMPLE = TensorMap(
    address=0x7F1234567000,
    dtype="bf16",
    dims=(128, 1000, 7, 3),
    strides=(2048, 2048000, 14336000),
    box=(64, 128, 1, 1),
    element_strides=(1, 1, 1, 1),
    swizzle=128,
    l2_promotion=128,
)
EXAMPLE_WORDS = [
    0x00007F1234567000,
    0x0000008000046530,
    0x000DAC000001F400,
    0x0000000000000000,
    0x000003E70000007F,
    0x0000000200000006,
    0x3F00000000000000,
    0x000000000000007F,
]


def words_of(data: bytes) -> list[int]:
    return [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(8)]


def test_packing_the_worked_example_gives_the_drivers_words():
    """bf16, rank 4, swizzle 128, L2 promotion 128 B: the eight words that cuTensorMapEncodeTiled wrote."""
    assert EXAMPLE_WORDS == words_of(pack(EXAMPLE))
    assert 128 == len(pack(EXAMPLE))


def test_unknown_bits_and_the_tail_are_ignored():
    """CuTe-DSL sets bits 1 and 21 of word 1 and leaves garbage behind the first 64 bytes: the value is the same."""
    data = bytearray(pack(EXAMPLE))
    data[8:16] = (0x0000008000246532).to_bytes(8, "little")
    data[64:] = bytes(range(64))

    assert EXAMPLE == unpack(bytes(data))


@st.composite
def tensor_maps(draw):
    rank = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(sorted(ELEMENT_TYPES)))
    units = 16 // ELEMENT_TYPES[dtype].size_bytes

    def per_dim(values):
        return draw(st.tuples(*[values] * rank))

    box = (units * draw(st.integers(1, 2)), *per_dim(st.integers(1, 256))[1:])
    return TensorMap(
        address=16 * draw(st.integers(0, 2**60 - 1)),
        dtype=dtype,
        dims=per_dim(st.integers(1, 2**32)),
        strides=per_dim(st.integers(0, 2**36 - 1).map(lambda x: 16 * x))[1:],
        box=box,
        element_strides=per_dim(st.integers(1, 8)),
        swizzle=draw(st.sampled_from([0, 32, 64, 128])),
        interleave=draw(st.sampled_from([0, 16, 32])),
        l2_promotion=draw(st.sampled_from([0, 64, 128, 256])),
        oob_fill=draw(st.sampled_from(["zero", "nan"])),
    )


@given(tensor_maps())
def test_packing_and_unpacking_are_inverse(tmap):
    """Every legal map comes back as the same value, high stride bits included."""
    assert tmap == unpack(pack(tmap))


def test_fields_sit_at_their_documented_bits():
    """One field at a time against the bit table."""
    assert 0xF << 36 == words_of(pack(dataclasses.replace(EXAMPLE, strides=(16, 0xF << 36, 16))))[3]
    assert 0x3F00000000000000 | 2 << 35 == words_of(pack(dataclasses.replace(EXAMPLE, element_strides=(1, 3, 1, 1))))[6]
    assert 1 << 15 | 0x8000046530 == words_of(pack(dataclasses.replace(EXAMPLE, oob_fill="nan")))[1]
    # rank 4: 3 << 4; type 7 << 7; swizzle 64: 2 << 13; tf32: 1 << 16; L2 128 B: 2 << 17; stride 2048 >> 4 = 0x80.
    tf32 = dataclasses.replace(EXAMPLE, dtype="tf32", box=(16, 128, 1, 1), swizzle=64)
    assert 0x80000543B0 == words_of(pack(tf32))[1]


def test_strides_of_dims_of_extent_one_are_repaired():
    """Dims 3 x 1 x 5 x 1 of f32: 12 inner bytes round up to 16, 60 to 64; the stride of extent 5 stays."""
    tmap = TensorMap(
        address=0,
        dtype="f32",
        dims=(3, 1, 5, 1),
        strides=(7, 48, 2**62),
        box=(4, 1, 1, 1),
        element_strides=(1, 1, 1, 1),
    )

    assert (16, 48, 64) == repaired(tmap).strides
    assert repaired(tmap) == unpack(pack(repaired(tmap)))
    with pytest.raises(SimulationError, match="repaired"):
        pack(tmap)


def test_box_bytes_count_the_full_box():
    """64 x 128 bf16 elements are 16384 bytes."""
    assert 16384 == EXAMPLE.box_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"dtype": "e4m3"}, "allowed: u8", id="type"),
        pytest.param({"address": 0x7F1234567008}, "multiple of 16", id="address"),
        pytest.param({"dims": (128, 0, 7, 3)}, "dims", id="zero-dim"),
        pytest.param({"dims": (128, 1000)}, "rank 2", id="rank-mismatch"),
        pytest.param({"strides": (2040, 2048000, 14336000)}, "multiples of 16", id="stride"),
        pytest.param({"box": (64, 257, 1, 1)}, "1..256", id="box"),
        pytest.param({"element_strides": (1, 9, 1, 1)}, "1..8", id="element-stride"),
        pytest.param({"swizzle": 256}, "swizzle", id="swizzle"),
        pytest.param({"box": (128, 128, 1, 1)}, "exceeds the swizzle span", id="box-over-span"),
        pytest.param({"box": (60, 128, 1, 1)}, "multiple of 16", id="inner-box"),
        pytest.param({"oob_fill": "one"}, "oob_fill", id="fill"),
    ],
)
def test_bad_fields_are_refused(change, message):
    """What the driver refuses is an error that names the field."""
    with pytest.raises(SimulationError, match=message):
        dataclasses.replace(EXAMPLE, **change)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(bytes(64), "64 bytes", id="truncated"),
        pytest.param(bytes([0] * 8 + [0x70] + [0] * 119), "rank 8", id="rank"),
        pytest.param(bytes([0] * 9 + [0x07] + [0] * 118), "code 14", id="type"),
    ],
)
def test_bytes_that_are_no_tensor_map_are_refused(data, message):
    """Wrong length, rank or type code is an error, not a guess."""
    with pytest.raises(SimulationError, match=message):
        unpack(data)
