"""Contract: where an accumulator element of a 64-row warpgroup product sits, by the PTX ISA's fragment figure."""

import pytest

wgmma = pytest.importorskip("kernels_src.mma.wgmma", reason="the CuTe DSL is not installed")


def ptx_place(thread: int, register: int) -> tuple[int, int]:
    """(row, column) of accumulator `register` of thread 0..127: PTX ISA, wgmma.mma_async.m64nNk16, matrix D."""
    warp, lane = divmod(thread, 32)
    row = 16 * warp + lane // 4 + 8 * (register // 2 % 2)
    return row, 8 * (register // 4) + 2 * (lane % 4) + register % 2


@pytest.mark.parametrize("tile_n", [64, 80, 128, 176])
def test_rows_and_columns_match_the_fragment(tile_n):
    """Element (r, i) of the rows view is register 4 (i // 2) + 2 r + i % 2; together they cover the tile once."""
    places = set()
    for thread in range(128):
        for r in range(2):
            for i in range(tile_n // 4):
                place = (
                    wgmma.row_of_thread(thread) + 8 * r,
                    wgmma.column_of_thread(thread) + wgmma.column_offset(i),
                )
                assert place == ptx_place(thread, 4 * (i // 2) + 2 * r + i % 2)
                places.add(place)
    assert places == {(row, column) for row in range(64) for column in range(tile_n)}
