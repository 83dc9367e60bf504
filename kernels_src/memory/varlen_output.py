"""Output rows of packed tiles: from an accumulator in tensor memory, one row a thread, to rows anywhere in memory.

A warp passes its 32 rows through shared memory of its own, so that neighbouring lanes store neighbouring bytes; no
other warp is waited for. The output's element type decides whether rows are 16-bit results or float32 partial results.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute import arch

from kernels_src.memory.row_gather import row_address
from kernels_src.memory.swizzled_rows import ELEMENTS, PIECE, piece_offset
from kernels_src.softmax import correction

WARP = 32


@cute.jit
def store_tile_rows(
    out,
    accumulator,
    shared_address,
    row,
    factor: Float32,
    address: Int64,
    num_rows,
    columns: cutlass.Constexpr[int],
    shared_row_bytes: cutlass.Constexpr[int],
):
    """out = accumulator * factor for the rows of a tile that exist.

    Args:
        out: (token, head, column), 16-bit or float32; rows 16-byte aligned. accumulator: fp32 in tensor memory.
        shared_address: 128 rows of `shared_row_bytes`, 1024-byte aligned, which nothing else uses any more. A row goes
            through it in as many equal parts as it takes.
        row: 0 .. 127, of the calling thread; factor, address: of its row, the address anything if there is no such row.
        num_rows: rows of the tile that exist, the first ones. columns: of out; those of a part a multiple of 16.
    Contract: whole, converged warps. Cost: columns / 16 loads, columns / 8 (float32: columns / 4) 16-byte accesses of
    shared memory each way and as many stores.
    """
    lane, warp = row % WARP, row // WARP
    shared = shared_address + warp * (WARP * shared_row_bytes)
    row_bytes = columns * out.element_type.width // 8
    parts = next(n for n in (1, 2, 4) if row_bytes <= n * shared_row_bytes)
    part_columns, part_as_16_bit = columns // parts, row_bytes // parts // 2
    load, source = correction.row_copies(accumulator, correction.RESCALE_COLUMNS, row, False)
    for part in cutlass.range_constexpr(parts):
        for step in cutlass.range_constexpr(part_columns // correction.RESCALE_COLUMNS):
            values = cute.make_rmem_tensor(((correction.RESCALE_COLUMNS, 1), 1), Float32)
            piece = (part * part_columns) // correction.RESCALE_COLUMNS + step
            cute.copy(load, source[None, None, piece], values)
            arch.fence_view_async_tmem_load()
            for j in cutlass.range_constexpr(0, correction.RESCALE_COLUMNS, 2):
                values[j], values[j + 1] = arch.mul_packed_f32x2((values[j], values[j + 1]), (factor, factor))
            converted = cute.make_rmem_tensor((correction.RESCALE_COLUMNS,), out.element_type)
            converted.store(values.load().reshape(converted.shape).to(out.element_type))
            words = cute.recast_tensor(converted, Int32)
            pieces = cute.size(words) // 4
            for j in cutlass.range_constexpr(pieces):
                target = shared + piece_offset(lane, step * pieces + j, rows=WARP, columns=part_as_16_bit)
                arch.inline_ptx(
                    "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[target, *(words[4 * j + word] for word in range(4))],
                )
        arch.sync_warp()
        store_rows_of_warp(address + part * (row_bytes // parts), shared, num_rows - warp * WARP, part_as_16_bit)
        arch.sync_warp()


@cute.jit
def store_rows_of_warp(address: Int64, shared, num_rows, columns: cutlass.Constexpr[int]):
    """Stores up to 32 rows of a swizzled tile of 16-bit elements (or of as many bytes), 16 bytes a lane.

    Args: address: where the row of this lane's number goes; num_rows: how many of the 32 exist, any integer.
    Contract: a whole, converged warp; the tile was written before a warp barrier.
    Cost: for each columns / 8 * rows / 32 pieces a lane has two shuffles, an access of shared memory and a store.
    """
    lane, pieces = arch.lane_idx(), columns // ELEMENTS
    rows_a_step = WARP // pieces
    place, piece = lane // pieces, lane % pieces
    for step in cutlass.range((WARP + rows_a_step - 1) // rows_a_step, unroll=1):
        row = step * rows_a_step + place
        target = arch.shuffle_sync(address, row & (WARP - 1)) + piece * PIECE
        if (place < rows_a_step) & (row < cutlass.min(num_rows, WARP)):
            source = shared + piece_offset(row, piece, rows=WARP, columns=columns)
            arch.inline_ptx(
                "{ .reg .b32 a, b, c, d; ld.shared.v4.b32 {a, b, c, d}, [{$r0}]; "
                "st.global.v4.b32 [{$r1}], {a, b, c, d}; }",
                read_only_args=[source, target],
            )


@cute.jit
def zero_rows_of_output(out, token, head, columns: cutlass.Constexpr[int]):
    """out[token, head, :] = 0 by the calling thread. Cost: a store for 16 bytes; for the rare tiles without a key."""
    start = row_address(out, token, head)
    for offset in cutlass.range_constexpr(0, columns * out.element_type.width // 8, PIECE):
        arch.inline_ptx(
            "{ .reg .b32 z; mov.b32 z, 0; st.global.v4.b32 [{$r0}], {z, z, z, z}; }", read_only_args=[start + offset]
        )
