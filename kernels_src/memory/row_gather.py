"""Rows from anywhere in global memory into a tile in shared memory, and back: 16 bytes a lane, no copy engine.

For tiles whose rows are not a box of a tensor: packed query heads, whose rows enumerate (token, head of a group).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import arch

from kernels_src.memory.paged_keys import place_of
from kernels_src.memory.swizzled_rows import ELEMENTS, PIECE, piece_offset

WARP = 32


def packed_row(row, by_group) -> tuple:
    """(query, head of the group) of a packed row; `by_group`: query heads a key head, an int or a fast divisor."""
    return divmod(row, by_group)


def row_address(tensor: cute.Tensor, token, head) -> Int64:
    """Byte address of element 0 of a row of a (token, head, column) tensor."""
    return tensor[token, head, None].iterator.toint()


@cute.jit
def start_piece_load(address, shared_address, is_inside):
    """Starts the copy of 16 bytes by the calling lane (cp.async), zeros if not `is_inside`.

    Args: address: global, readable even if nothing is read; shared_address: 32 bits, multiple of 16.
    """
    count = Int32(PIECE) if is_inside else Int32(0)
    arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[shared_address, address, count]
    )


@cute.jit
def gather_packed_rows(
    tensor,
    shared_address,
    first_row,
    num_rows,
    first_token,
    first_head,
    by_group,
    worker,
    workers: cutlass.Constexpr[int],
    rows: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
):
    """Starts the copies of `rows` packed rows from `first_row` on; rows from `num_rows` on arrive as zeros.

    Args:
        tensor: (token, head, column), 16-bit, rows 16-byte aligned. shared_address: of a swizzled tile, 32 bits.
        first_row, num_rows: packed rows of this sequence: first of the tile, and how many there are (at least 1).
        first_token: of the sequence. first_head: of the group. worker: 0 .. workers - 1.
    Contract: the caller commits, waits, fences the async proxy and signals.
    Cost: a 16-byte piece costs a lane about 30 integer instructions.
    """
    pieces = columns // ELEMENTS
    for step in cutlass.range((rows * pieces + workers - 1) // workers, unroll=1):
        index = step * workers + worker
        if index < rows * pieces:
            row, piece = index // pieces, index % pieces
            is_inside = first_row + row < num_rows
            token, head = packed_row(cutlass.min(first_row + row, num_rows - 1), by_group)
            source = row_address(tensor, first_token + token, first_head + head) + piece * PIECE
            target = shared_address + piece_offset(row, piece, rows=rows, columns=columns)
            start_piece_load(source, target, is_inside)


@cute.jit
def gather_paged_rows(
    tensor,
    shared_address,
    page_table,
    sequence,
    head,
    first_key,
    num_keys,
    by_page_size,
    lane,
    rows: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
):
    """Starts the copies of `rows` keys of a paged cache from `first_key` on; keys from `num_keys` on arrive as zeros.

    For page sizes that the copy engine's boxes do not fit. Args: tensor: (page, row, head, column), 16-bit; page_table:
    (sequence, entry); the others as `gather_packed_rows`. Contract: as there; a whole warp calls it.
    Cost: a 16-byte piece costs a lane about 40 integer instructions and a load from the page table.
    """
    pieces = columns // ELEMENTS
    for step in cutlass.range(rows * pieces // WARP, unroll=1):
        index = step * WARP + lane
        row, piece = index // pieces, index % pieces
        key = first_key + row
        entry, within = place_of(cutlass.max(cutlass.min(key, num_keys - 1), 0), by_page_size)
        page = page_table[sequence, entry] if num_keys > 0 else Int32(0)
        source = tensor[page, within, head, None].iterator.toint() + piece * PIECE
        target = shared_address + piece_offset(row, piece, rows=rows, columns=columns)
        start_piece_load(source, target, key < num_keys)


@cute.jit
def store_packed_rows(
    tensor,
    shared_address,
    first_row,
    num_rows,
    first_token,
    first_head,
    by_group,
    worker,
    workers: cutlass.Constexpr[int],
    rows: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
):
    """Stores the rows of a swizzled tile that exist, 16 bytes a lane. Arguments as `gather_packed_rows`.

    Contract: the tile was written before a barrier that the caller passed. Cost: as `gather_packed_rows`.
    """
    pieces = columns // ELEMENTS
    for step in cutlass.range(rows * pieces // workers, unroll=1):
        index = step * workers + worker
        row, piece = index // pieces, index % pieces
        if first_row + row < num_rows:
            token, head = packed_row(first_row + row, by_group)
            target = row_address(tensor, first_token + token, first_head + head) + piece * PIECE
            source = shared_address + piece_offset(row, piece, rows=rows, columns=columns)
            arch.inline_ptx(
                "{ .reg .b32 a, b, c, d; ld.shared.v4.b32 {a, b, c, d}, [{$r0}]; "
                "st.global.v4.b32 [{$r1}], {a, b, c, d}; }",
                read_only_args=[source, target],
            )
