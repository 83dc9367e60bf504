"""Contract: tensor memory is 128 lanes x 512 columns; allocation, ld/st and MMA operands follow the PTX layouts.

Layouts are checked against the drawings of the PTX manual, written out here as single cells.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4build.errors import SimulationError
from fa4build.simulate.hardware import tmem as tm


def labelled() -> np.ndarray:
    """Tensor memory whose cell (lane, column) holds lane << 16 | column: its own address."""
    lanes, columns = np.arange(128, dtype=np.uint32)[:, None], np.arange(512, dtype=np.uint32)[None, :]
    return lanes << np.uint32(16) | columns


def cell(lane: int, column: int) -> int:
    return lane << 16 | column


# ---------------------------------------------------------------------------------------------- allocation


def test_first_allocation_of_all_columns_is_at_zero_and_blocks_the_next():
    """512 columns start at column 0; another request waits until they are freed."""
    allocator = tm.Allocator()

    assert 0 == allocator.allocate(512)
    assert allocator.allocate(32) is None
    allocator.free(0, 512)
    assert 0 == allocator.allocate(32)


def test_blocks_fill_the_lowest_place_and_are_owned():
    """256 + 128 columns lie at 0 and 256; ownership ends at 384; leftovers are listed until freed."""
    allocator = tm.Allocator()

    assert [0, 256] == [allocator.allocate(256), allocator.allocate(128)]
    assert allocator.owns(0, 384)
    assert not allocator.owns(383, 2)
    allocator.free(256, 128)
    assert {0: 256} == allocator.leftover()


@pytest.mark.parametrize(
    ("before", "action", "message"),
    [
        pytest.param([], lambda a: a.allocate(48), "allowed: 32", id="size"),
        pytest.param([64], lambda a: a.allocate(128), "must not grow", id="growing"),
        pytest.param([64], lambda a: a.free(0, 32), "0: 64", id="partial-free"),
        pytest.param([], lambda a: a.free(0, 32), "dealloc", id="free-of-nothing"),
        pytest.param([], lambda a: (a.relinquish(), a.allocate(32)), "relinquish", id="after-relinquish"),
    ],
)
def test_allocation_rules(before, action, message):
    """Sizes are powers of two from 32 to 512 and never grow; frees match; nothing after the permit is given up."""
    allocator = tm.Allocator()
    for size in before:
        allocator.allocate(size)
    with pytest.raises(SimulationError, match=message):
        action(allocator)


# ---------------------------------------------------------------------------------------------- ld and st


@pytest.mark.parametrize(
    ("shape", "repeat", "register", "thread", "expected"),
    [
        # 32x32b: thread t has lane t, register j column j.
        ("32x32b", 8, 5, 31, cell(31, 5)),
        # 16x64b: 4 threads for two rows: t0 (row 0, col 0), t1 (row 8, col 0), t2 (row 0, col 1), t3 (row 8, col 1).
        ("16x64b", 2, 0, 0, cell(0, 0)),
        ("16x64b", 2, 0, 1, cell(8, 0)),
        ("16x64b", 2, 0, 2, cell(0, 1)),
        ("16x64b", 2, 1, 7, cell(9, 3)),
        # 16x128b: row t/4, column t%4; register 1 is 8 rows down, register 2 the next 4 columns.
        ("16x128b", 2, 0, 6, cell(1, 2)),
        ("16x128b", 2, 1, 6, cell(9, 2)),
        ("16x128b", 2, 2, 31, cell(7, 7)),
        # 16x256b: the D fragment of mma: columns 2*(t%4), +1; registers 2, 3 are 8 rows down; 4.. the next 8 columns.
        ("16x256b", 2, 1, 5, cell(1, 3)),
        ("16x256b", 2, 2, 5, cell(9, 2)),
        ("16x256b", 2, 7, 31, cell(15, 15)),
        # 16x32bx2: threads 16.. read the same lanes, split_offset columns on.
        ("16x32bx2", 4, 3, 15, cell(15, 3)),
        ("16x32bx2", 4, 3, 16, cell(0, 23)),
    ],
)
def test_load_gives_each_register_its_cell(shape, repeat, register, thread, expected):
    """Register and thread to lane and column, as drawn in the manual; the base address adds to both."""
    registers = tm.load(labelled(), 0, 0, shape, repeat, split_offset=20)
    shifted = tm.load(labelled(), cell(64, 100), 2, shape, repeat, split_offset=20)

    assert expected == registers[register, thread]
    assert expected + cell(64, 100) == shifted[register, thread]


SHAPES = [("32x32b", 16), ("16x64b", 8), ("16x128b", 8), ("16x256b", 4), ("16x32bx2", 8)]


@pytest.mark.parametrize(("shape", "repeat"), SHAPES)
def test_store_then_load_gives_the_registers_back(shape, repeat):
    """st and ld of the same shape are inverse, write each cell once and touch nothing else."""
    memory = np.full((128, 512), 7, dtype=np.uint32)
    lanes, columns = tm.transfer_cells(shape, repeat, 8)
    registers = np.random.default_rng(1).integers(1000, 2**32, lanes.shape, dtype=np.uint64).astype(np.uint32)
    tm.store(memory, cell(96, 40), 3, shape, repeat, registers, split_offset=8)

    assert registers.tolist() == tm.load(memory, cell(96, 40), 3, shape, repeat, split_offset=8).tolist()
    assert registers.size == np.count_nonzero(memory != 7)
    assert tm.transfer_columns(shape, repeat, 8) == columns.max() + 1


@pytest.mark.parametrize(("shape", "repeat"), SHAPES)
def test_packed_transfers_hold_two_columns_per_register(shape, repeat):
    """pack::16b takes the low halves of adjacent columns, the lower column low; unpack::16b is its inverse."""
    memory = np.zeros((128, 512), dtype=np.uint32)
    count = tm.transfer_cells(shape, repeat)[0].shape[0]
    registers = np.random.default_rng(2).integers(0, 2**32, (count, 32), dtype=np.uint64).astype(np.uint32)
    tm.store(memory, 0, 0, shape, repeat, registers, split_offset=64, packed=True)

    assert registers.tolist() == tm.load(memory, 0, 0, shape, repeat, split_offset=64, packed=True).tolist()
    assert [registers[0, 0] & 0xFFFF, registers[0, 0] >> 16] == memory[0, :2].tolist()


@pytest.mark.parametrize(
    ("address", "warp", "shape", "repeat", "message"),
    [
        pytest.param(cell(32, 0), 0, "32x32b", 8, "lane 32 by warp 0", id="other-quarter"),
        pytest.param(cell(16, 0), 4, "32x32b", 8, "lane 0", id="half-quarter-32-lanes"),
        pytest.param(cell(48, 0), 4, "16x64b", 2, "lane 0 or 16", id="other-quarter-16-lanes"),
        pytest.param(cell(0, 500), 0, "32x32b", 16, "columns 500..515", id="columns"),
        pytest.param(cell(128, 0), 0, "32x32b", 8, "out of range", id="lane-128"),
        pytest.param(0, 0, "32x32b", 3, "power of two", id="repeat"),
        pytest.param(0, 0, "16x256b", 64, "up to 32", id="too-many-registers"),
        pytest.param(0, 0, "8x32b", 8, "unknown", id="shape"),
    ],
)
def test_transfers_outside_their_quarter_or_memory_are_refused(address, warp, shape, repeat, message):
    """Warp w reaches lanes 32*(w%4) to +31 only, and columns below 512."""
    with pytest.raises(SimulationError, match=message):
        tm.load(labelled(), address, warp, shape, repeat)


def test_a_16_lane_shape_may_use_the_upper_half_of_its_quarter():
    """Warp 5 (quarter 1) reads lanes 48 to 63."""
    assert cell(48, 3) == tm.load(labelled(), cell(48, 3), 5, "16x64b", 1)[0, 0]


def test_a_store_of_the_wrong_number_of_registers_is_refused():
    """x8 needs 8 registers."""
    with pytest.raises(SimulationError, match="needs"):
        tm.store(labelled(), 0, 0, "32x32b", 8, np.zeros((4, 32), dtype=np.uint32))


@given(st.integers(0, 2**32 - 1))
def test_load_reduce_returns_the_maximum_of_each_lane(seed):
    """ld.red gives the registers of ld and, per lane, their max, NaN ignored; .abs and .NaN as named."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((128, 512)).astype(np.float32)
    values[3, :8] = [np.nan, 1, -2, 0.5, -9, 3, 2, 1]
    values[4, :8] = np.nan
    memory = values.view(np.uint32)
    registers, largest = tm.load_reduce(memory, 0, 0, 8, "max")
    _, smallest = tm.load_reduce(memory, 0, 0, 8, "min", absolute=True)
    _, with_nan = tm.load_reduce(memory, 0, 0, 8, "max", propagate_nan=True)

    assert tm.load(memory, 0, 0, "32x32b", 8).tolist() == registers.tolist()
    assert np.max(values[5:32, :8], axis=1).tolist() == largest.view(np.float32)[5:].tolist()
    assert np.min(np.abs(values[5:32, :8]), axis=1).tolist() == smallest.view(np.float32)[5:].tolist()
    assert [3.0, 0.5] == [largest.view(np.float32)[3], smallest.view(np.float32)[3]]
    assert [0x7FFFFFFF] * 3 == [largest[4], with_nan[3], with_nan[4]]


# ---------------------------------------------------------------------------------------------- MMA operands


@pytest.mark.parametrize(
    ("m", "n", "group", "row", "column", "expected"),
    [
        # (cta, lane, column)
        pytest.param(128, 256, 1, 77, 200, (0, 77, 200), id="D"),
        pytest.param(64, 64, 1, 17, 5, (0, 33, 5), id="F-second-quarter"),
        pytest.param(64, 64, 1, 63, 63, (0, 111, 63), id="F-last"),
        pytest.param(256, 128, 2, 130, 9, (1, 2, 9), id="A-second-cta"),
        pytest.param(128, 128, 2, 5, 63, (0, 5, 63), id="B-left-half"),
        pytest.param(128, 128, 2, 5, 64, (0, 69, 0), id="B-right-half"),
        pytest.param(128, 128, 2, 70, 127, (1, 70, 63), id="B-second-cta"),
    ],
)
def test_accumulator_elements_lie_where_the_layouts_say(m, n, group, row, column, expected):
    """Writing one element of D sets exactly one cell; reading gives D back."""
    tmems = [np.zeros((128, 512), dtype=np.uint32) for _ in range(group)]
    d = np.zeros((m, n), dtype=np.uint32)
    d[row, column] = 0x3F800000
    tm.write_accumulator(tmems, d, group, address=0)
    found = [(cta, *map(int, place)) for cta in range(group) for place in np.argwhere(tmems[cta])]

    assert [expected] == found
    assert d.tolist() == tm.read_accumulator(tmems, m, n, group, 0).tolist()


@pytest.mark.parametrize(("m", "n", "group"), [(128, 64, 1), (64, 128, 1), (256, 64, 2), (128, 256, 2)])
def test_writing_and_reading_an_accumulator_are_inverse(m, n, group):
    """Every element has its own cell, at any column offset."""
    tmems = [np.zeros((128, 512), dtype=np.uint32) for _ in range(group)]
    d = np.arange(1, m * n + 1, dtype=np.uint32).reshape(m, n)
    tm.write_accumulator(tmems, d, group, address=32)

    assert d.tolist() == tm.read_accumulator(tmems, m, n, group, 32).tolist()
    assert m * n == sum(np.count_nonzero(t) for t in tmems)


def test_layout_f_may_start_at_lane_16():
    """M 64 with 16 in the lane field uses the upper half of each quarter."""
    memory = np.zeros((128, 512), dtype=np.uint32)
    tm.write_accumulator([memory], np.ones((64, 8), dtype=np.uint32), 1, address=cell(16, 0))

    assert [lane for quarter in range(4) for lane in range(32 * quarter + 16, 32 * quarter + 32)] == np.flatnonzero(
        memory[:, 0]
    ).tolist()


def test_disabled_lanes_keep_their_value():
    """disable-output-lane suppresses single lanes."""
    memory = np.zeros((128, 512), dtype=np.uint32)
    disabled = np.zeros(128, dtype=bool)
    disabled[[0, 100]] = True
    tm.write_accumulator([memory], np.ones((128, 8), dtype=np.uint32), 1, 0, [disabled])

    assert [0, 100] == np.flatnonzero(memory[:, 0] == 0).tolist()


@pytest.mark.parametrize(
    ("m", "n", "group", "address", "message"),
    [
        pytest.param(192, 64, 1, 0, "no M 192", id="m"),
        pytest.param(256, 64, 1, 0, "no M 256", id="m-of-a-pair"),
        pytest.param(128, 64, 1, cell(16, 0), "lane 16", id="lane"),
        pytest.param(128, 256, 1, 300, "columns 300..555", id="columns"),
    ],
)
def test_accumulators_that_do_not_exist_are_refused(m, n, group, address, message):
    """Shape, lane and columns are checked."""
    with pytest.raises(SimulationError, match=message):
        tm.accumulator_blocks(m, n, group, address)


def test_a_operand_is_packed_along_columns():
    """bf16 A: k in the low half, k + 1 in the high half of column k/2; CTA r has rows r*M/2 on."""
    pair = [np.zeros((128, 512), dtype=np.uint32) for _ in range(2)]
    a = np.arange(256 * 16, dtype=np.uint16).reshape(256, 16)
    for cta in range(2):
        part = a[128 * cta : 128 * cta + 128].astype(np.uint32)
        pair[cta][:, 64:72] = part[:, 0::2] | part[:, 1::2] << np.uint32(16)

    assert a.tolist() == tm.read_a_operand(pair, 256, 2, 64, 2).tolist()
    assert a[:128].tolist() == tm.read_a_operand(pair[:1], 128, 1, 64, 2).tolist()
    assert (128, 32) == tm.read_a_operand(pair[:1], 128, 1, 64, 1).shape


def test_a_operand_of_layout_b_must_stand_in_both_halves():
    """M 128 of a CTA pair: rows in lanes 0 to 63 again in 64 to 127."""
    pair = [np.zeros((128, 512), dtype=np.uint32) for _ in range(2)]
    for cta in range(2):
        pair[cta][:64, 0] = pair[cta][64:, 0] = np.arange(64) + 64 * cta

    assert list(range(128)) == tm.read_a_operand(pair, 128, 2, 0, 2)[:, 0].tolist()
    pair[1][64, 0] = 5
    with pytest.raises(SimulationError, match="repeat lanes"):
        tm.read_a_operand(pair, 128, 2, 0, 2)


def test_a_operand_outside_memory_is_refused():
    """Eight columns from a lane-0 address."""
    with pytest.raises(SimulationError, match="8 columns"):
        tm.read_a_operand([labelled()], 128, 1, 510, 2)
    with pytest.raises(SimulationError, match="M 64"):
        tm.read_a_operand([labelled()], 64, 1, 0, 2)
