"""Rows from anywhere in global memory into a tile in shared memory, and back: 16 bytes a lane, no copy engine.

For tiles whose rows are not a box of a tensor: packed query heads, whose rows enumerate (token, head of a group).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import arch
from cutlass.cutlass_dsl import select_

from kernels_src.memory.paged_keys import place_of
from kernels_src.memory.swizzled_rows import ELEMENTS, PIECE, piece_offset

WARP = 32


def packed_row(row, by_group) -> tuple:
    """(query, head of the group) of a packed row; `by_group`: query heads a key head, an int or a fast divisor."""
    return divmod(row, by_group)


def row_address(tensor: cute.Tensor, token, head) -> Int64:
    """Byte address of element 0 of a row of a (token, head, column) tensor."""
    return tensor[token, head, None].iterator.toint()


def row_of_worker(worker, pieces: int):
    """worker // pieces, for workers below 1024 and at most 32 pieces: a product and a shift."""
    return worker * (65536 // pieces + 1) >> 16


def select(condition, if_true, if_false):
    """As integers.select, for device integers of any one width."""
    return select_(condition, if_true, if_false)


@cute.jit
def start_piece_load(address, shared_address, is_inside):
    """Starts the copy of 16 bytes by the calling lane (cp.async), zeros if not `is_inside`.

    Args: address: global, readable even if nothing is read; shared_address: 32 bits, multiple of 16.
    """
    count = Int32(PIECE) if is_inside else Int32(0)
    arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[shared_address, address, count]
    )


class RowWalk(NamedTuple):
    """A lane's way through the rows of a tile, every so many rows: address is that of its 16 bytes in row `row`."""

    row: object
    head: object
    address: object


class RowSteps(NamedTuple):
    """What a step adds: rows and heads; bytes; bytes more where the head wraps round to the next token."""

    rows: object
    heads: object
    group: object
    advance: object
    wrap: object

    def after(self, walk: RowWalk) -> RowWalk:
        """The walk one step further. Cost: about six integer instructions."""
        head, address = walk.head + self.heads, walk.address + self.advance
        wraps = head >= self.group
        return RowWalk(
            walk.row + self.rows, select(wraps, head - self.group, head), address + select(wraps, self.wrap, Int64(0))
        )


def start_walk(tensor, first_row, first_token, first_head, by_group, worker, workers: int, columns: int) -> tuple:
    """(RowWalk, RowSteps) of one of `workers` lanes through packed rows from `first_row` on; lanes side by side share a
    row. Cost: two divisions."""
    pieces = columns // ELEMENTS
    step_rows = workers // pieces
    row = row_of_worker(worker, pieces)
    token, head = packed_row(first_row + row, by_group)
    step_tokens, step_heads = packed_row(Int32(step_rows), by_group)
    origin = row_address(tensor, 0, 0)
    token_bytes, head_bytes = row_address(tensor, 1, 0) - origin, row_address(tensor, 0, 1) - origin
    group = by_group.divisor
    address = row_address(tensor, first_token + token, first_head + head) + (worker - row * pieces) * PIECE
    steps = RowSteps(
        rows=step_rows,
        heads=step_heads,
        group=group,
        advance=token_bytes * step_tokens + head_bytes * step_heads,
        wrap=token_bytes - head_bytes * group,
    )
    return RowWalk(row, head, address), steps


def _offset_in_tiles(row, piece, rows: int, tile_rows: int, columns: int):
    """As piece_offset, in tiles of `tile_rows` rows (0: one tile of `rows`) that lie one behind the other."""
    if tile_rows in (0, rows):
        return piece_offset(row, piece, rows=rows, columns=columns)
    tile = row >> (tile_rows.bit_length() - 1)
    within = piece_offset(row & (tile_rows - 1), piece, rows=tile_rows, columns=columns)
    return within + tile * (tile_rows * columns * 2)


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
    tile_rows: cutlass.Constexpr[int] = 0,
):
    """Starts the copies of `rows` packed rows from `first_row` on; rows from `num_rows` on arrive as zeros.

    Args:
        tensor: (token, head, column), 16-bit, rows 16-byte aligned. shared_address: of a swizzled tile, 32 bits.
        first_row, num_rows: packed rows of this sequence: first of the tile, and how many there are (at least 1).
        first_token: of the sequence. first_head: of the group. by_group: fast divisor. worker: 0 .. workers - 1, with
            workers >= columns / 8.
        tile_rows: rows of one tile, a power of two, where several tiles lie one behind the other; 0: one of `rows`.
    Contract: the caller commits, waits, fences the async proxy and signals.
    Cost: a 16-byte piece costs a lane about 20 integer instructions.
    """
    pieces = columns // ELEMENTS
    walk, steps = start_walk(tensor, first_row, first_token, first_head, by_group, worker, workers, columns)
    piece = worker - walk.row * pieces
    fallback = row_address(tensor, first_token, first_head)
    for _ in cutlass.range((rows + steps.rows - 1) // steps.rows, unroll=4):
        if (walk.row < rows) & (worker < steps.rows * pieces):
            is_inside = first_row + walk.row < num_rows
            target = shared_address + _offset_in_tiles(walk.row, piece, rows, tile_rows, columns)
            start_piece_load(select(is_inside, walk.address, fallback), target, is_inside)
        walk = steps.after(walk)


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

    Contract: the tile was written before a barrier that the caller passed. Cost: as `gather_packed_rows`, and four
    registers a step.
    """
    pieces = columns // ELEMENTS
    walk, steps = start_walk(tensor, first_row, first_token, first_head, by_group, worker, workers, columns)
    piece = worker - walk.row * pieces
    for _ in cutlass.range_constexpr((rows + steps.rows - 1) // steps.rows):
        if (walk.row < rows) & (first_row + walk.row < num_rows) & (worker < steps.rows * pieces):
            source = shared_address + piece_offset(walk.row, piece, rows=rows, columns=columns)
            words = arch.inline_ptx(
                "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Int32] * 4,
                read_only_args=[source],
            )
            arch.inline_ptx(
                "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[walk.address, *words]
            )
        walk = steps.after(walk)
