"""Contract: a tile copy moves element (i0, i1, ..) of the box between global coordinate coords + i and the swizzled
shared address of its linear index; loads write zero outside the tensor, stores write nothing there but the rest of a
16-byte piece that holds an element.

The reference walks the box element by element with the formulas of the PTX manual; the pieces are as recorded on an
H200 (tests/simulate/probes/tensor_copies.py).
"""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4build.errors import SimulationError
from fa4build.simulate.hardware import tma
from fa4build.simulate.hardware.tensor_map import TensorMap

BASE = 0x7F0000000000
ELEMENT_BYTES = {"u8": 1, "bf16": 2, "f32": 4, "u64": 8}


def reference_pairs(tmap, coords, shared_address, dims=None):
    """(inside?, global address, shared address) of every element, straight from the manual."""
    size, dims = tmap.element_bytes, dims or tmap.dims
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[tmap.swizzle]
    pairs = []
    for linear, index in enumerate(itertools.product(*[range(extent) for extent in reversed(tmap.box)])):
        point = [c + i for c, i in zip(coords, reversed(index), strict=True)]
        inside = all(0 <= g < dim for g, dim in zip(point, dims, strict=True))
        address = tmap.address + point[0] * size + sum(g * s for g, s in zip(point[1:], tmap.strides, strict=True))
        target = shared_address + linear * size
        pairs.append((inside, address, target ^ (((target >> 7) & mask) << 4)))
    return pairs


@st.composite
def boxes(draw):
    dtype = draw(st.sampled_from(sorted(ELEMENT_BYTES)))
    size = ELEMENT_BYTES[dtype]
    rank = draw(st.integers(1, 4))
    swizzle = draw(st.sampled_from([0, 32, 64, 128]))
    inner = 16 // size * draw(st.integers(1, (swizzle or 64) // 16))
    dims = tuple(draw(st.integers(1, 40)) for _ in range(rank))
    strides, pitch = [], dims[0] * size
    for extent in dims[1:]:
        pitch = (pitch + 15) // 16 * 16 + 16 * draw(st.integers(0, 2))
        strides.append(pitch)
        pitch *= extent
    tmap = TensorMap(
        address=BASE + 16 * draw(st.integers(0, 3)),
        dtype=dtype,
        dims=dims,
        strides=tuple(strides),
        box=(inner, *(draw(st.integers(1, 6)) for _ in range(rank - 1))),
        element_strides=(1,) * rank,
        swizzle=swizzle,
    )
    pieces = (dims[0] * size + 15) // 16
    coords = (16 // size * draw(st.integers(-2, pieces)), *(draw(st.integers(-8, 40)) for _ in range(rank - 1)))
    return tmap, coords, 128 * draw(st.integers(0, 20))


def whole_pieces(tmap):
    """The dims with the first rounded up to 16 bytes."""
    per_piece = 16 // tmap.element_bytes
    return ((tmap.dims[0] + per_piece - 1) // per_piece * per_piece, *tmap.dims[1:])


def memory_for(tmap, rng):
    last = tmap.address - BASE + whole_pieces(tmap)[0] * tmap.element_bytes
    last += sum((dim - 1) * stride for dim, stride in zip(tmap.dims[1:], tmap.strides, strict=True))
    return rng.integers(0, 256, (last + 15) // 16 * 16, dtype=np.uint8)


@given(boxes(), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_load_moves_every_element_and_zeroes_the_rest(box, seed):
    """Each element of the box arrives at its swizzled place; outside the tensor zero arrives; all else stays."""
    tmap, coords, shared_address = box
    rng = np.random.default_rng(seed)
    memory, shared = memory_for(tmap, rng), rng.integers(0, 256, 1 << 16, dtype=np.uint8)
    expected = shared.copy()
    size = tmap.element_bytes
    for inside, source, target in reference_pairs(tmap, coords, shared_address):
        expected[target : target + size] = memory[source - BASE : source - BASE + size] if inside else 0

    tma.load_box(tma.plan_box(tmap, coords, shared_address), memory, BASE, shared)

    assert np.array_equal(expected, shared)


@given(boxes(), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_store_writes_only_pieces_that_begin_inside_the_tensor(box, seed):
    """The reverse copy, of 16-byte pieces; bytes between rows and outside the tensor keep their value."""
    tmap, coords, shared_address = box
    coords = tuple(max(c, 0) for c in coords)
    rng = np.random.default_rng(seed)
    memory, shared = memory_for(tmap, rng), rng.integers(0, 256, 1 << 16, dtype=np.uint8)
    expected = memory.copy()
    size = tmap.element_bytes
    for inside, target, source in reference_pairs(tmap, coords, shared_address, whole_pieces(tmap)):
        if inside:
            expected[target - BASE : target - BASE + size] = shared[source : source + size]

    tma.store_box(tma.plan_box(tmap, coords, shared_address, outgoing=True), shared, memory, BASE)

    assert np.array_equal(expected, memory)


ATTENTION_TILE = TensorMap(
    address=BASE,
    dtype="bf16",
    dims=(128, 300, 2, 1),
    strides=(256, 76800, 153600),
    box=(64, 128, 1, 1),
    element_strides=(1, 1, 1, 1),
    swizzle=128,
)


def test_an_attention_tile_moves_in_units_of_16_bytes():
    """A 64 x 128 bf16 box inside the tensor: 1024 units, all valid, 16384 bytes for the mbarrier."""
    plan = tma.plan_box(ATTENTION_TILE, (64, 128, 1, 0), 0x8400)

    assert (16, 1024, None, 16384) == (plan.unit_bytes, plan.global_addresses.size, plan.valid, plan.box_bytes)
    # Row 1 of the box (128 bytes on) starts at unit 1 of its line: 0x8480 ^ 0x10.
    assert [BASE + 128 + 128 * 256 + 76800, 0x8400] == [plan.global_addresses[0], plan.shared_addresses[0]]
    assert [BASE + 128 + 129 * 256 + 76800, 0x8490] == [plan.global_addresses[8], plan.shared_addresses[8]]


def test_the_last_tile_of_a_sequence_is_cut_at_the_end():
    """Rows 256..383 of 300: 44 valid rows of 8 units."""
    plan = tma.plan_box(ATTENTION_TILE, (0, 256, 0, 0), 0x8000)

    assert 44 * 8 == np.count_nonzero(plan.valid)
    assert 16384 == plan.box_bytes


def test_a_map_whose_base_lies_below_the_buffer_reaches_the_buffer():
    """Only the addresses of elements count: a base 2^30 bytes below with coordinates that lead back is fine."""
    memory = np.arange(4096, dtype=np.uint16).view(np.uint8)
    tmap = dataclasses.replace(
        ATTENTION_TILE, address=BASE - 2**30, dims=(64, 2**31), strides=(128,), box=(64, 1), element_strides=(1, 1)
    )
    shared = np.zeros(1024, dtype=np.uint8)
    tma.load_box(tma.plan_box(tmap, (0, 2**30 // 128 + 3), 0), memory, BASE, shared)

    assert list(range(192, 256)) == shared[:128].view(np.uint16).tolist()


def test_reduction_adds_in_f32_and_keeps_subnormals():
    """1e-40 + 1e-40 = 2e-40 (an H200 does not flush). The piece of the last element is added whole, the next not."""
    tmap = TensorMap(address=BASE, dtype="f32", dims=(3,), strides=(), box=(8,), element_strides=(1,))
    memory = np.array([1e-40, 1.0, 2.0, 7.0, 8.0, 0, 0, 0], dtype=np.float32).view(np.uint8)
    shared = np.array([1e-40, 0.5, -2.0, 1.0, 1.0, 1, 1, 1], dtype=np.float32).view(np.uint8)
    plan = tma.plan_box(tmap, (0,), 0, outgoing=True, per_element=True)
    tma.reduce_add_f32_box(plan, shared, memory, BASE)

    assert [2 * float(np.float32(1e-40)), 1.5, 0.0, 8.0, 8.0] == memory.view(np.float32)[:5].tolist()


@pytest.mark.parametrize(
    ("coords", "outgoing", "message"),
    [
        pytest.param((-4, 0, 0, 0), False, "multiple of 16 bytes", id="load-between-pieces"),
        pytest.param((12, 0, 0, 0), True, "multiple of 16 bytes", id="store-between-pieces"),
        pytest.param((-8, 0, 0, 0), True, "must not be negative", id="store-before-a-row"),
        pytest.param((0, 0, -1, 0), True, "must not be negative", id="store-before-a-plane"),
    ],
)
def test_coordinates_that_end_a_kernel_are_refused(coords, outgoing, message):
    """On an H200 each of these is an illegal instruction; loads may begin before the tensor, 16 bytes at a time."""
    with pytest.raises(SimulationError, match=message):
        tma.plan_box(ATTENTION_TILE, coords, 0, outgoing=outgoing)
    tma.plan_box(ATTENTION_TILE, (-8, -3, -1, 0), 0)


@pytest.mark.parametrize(
    ("change", "coords", "shared_address", "message"),
    [
        pytest.param({}, (0, 0, 0), 0, "rank 4", id="rank"),
        pytest.param({}, (0, 0, 0, 0), 64, "multiple of 128", id="shared-alignment"),
        pytest.param({"element_strides": (1, 2, 1, 1)}, (0, 0, 0, 0), 0, "element strides", id="element-stride"),
        pytest.param({"interleave": 16, "swizzle": 0}, (0, 0, 0, 0), 0, "interleave", id="interleave"),
        pytest.param({"oob_fill": "nan"}, (0, 0, 0, 0), 0, "NaN fill", id="nan-fill"),
    ],
)
def test_what_is_not_simulated_is_refused(change, coords, shared_address, message):
    """A mode outside the contract is an error, never a guess."""
    with pytest.raises(SimulationError, match=message):
        tma.plan_box(dataclasses.replace(ATTENTION_TILE, **change), coords, shared_address)


def test_a_copy_outside_memory_is_refused_and_writes_nothing():
    """A box inside the tensor whose bytes leave the buffer, or the shared window, is an out-of-bounds access."""
    memory, shared = np.ones(4096, dtype=np.uint8), np.ones(16384, dtype=np.uint8)
    plan = tma.plan_box(ATTENTION_TILE, (0, 0, 0, 0), 0)

    with pytest.raises(SimulationError, match="global byte"):
        tma.load_box(plan, memory, BASE, shared)
    with pytest.raises(SimulationError, match="shared byte"):
        tma.load_box(tma.plan_box(ATTENTION_TILE, (0, 0, 0, 0), 1024), np.ones(160000, np.uint8), BASE, shared)
    assert 16384 == shared.sum()


def test_a_reduction_needs_element_units():
    """Sixteen-byte units cannot be added."""
    with pytest.raises(SimulationError, match="per_element"):
        tma.reduce_add_f32_box(
            tma.plan_box(ATTENTION_TILE, (0, 0, 0, 0), 0), np.zeros(16384, np.uint8), np.zeros(8, np.uint8), BASE
        )
