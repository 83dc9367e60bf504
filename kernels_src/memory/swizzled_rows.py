"""Where the 16-byte pieces of a row lie in a tile of 16-bit elements in shared memory, as matrix instructions want it.

A tile is cut into chunks of columns as wide as the swizzle pattern (the widest of 128, 64 and 32 bytes that divides a
row); a chunk holds its columns of all rows, one row behind the other. Within a chunk the 16-byte pieces of a row are
permuted by the row's number. Tiles of Q and K (contiguous along head_dim) and of V and O (contiguous along head_dim_v)
are alike. Integers only: runs on the host and in a kernel.

Source: CUDA driver API, CUtensorMapSwizzle; PTX ISA, shared-memory layout of warpgroup matrix instructions.
"""

PIECE = 16  # bytes of one piece
ELEMENTS = 8  # 16-bit elements of one piece


def swizzle_bytes(columns: int) -> int:
    """Width of the swizzle pattern for rows of `columns` 16-bit elements."""
    return next(size for size in (128, 64, 32) if 2 * columns % size == 0)


def chunk_columns(columns: int) -> int:
    """Elements of a row that one chunk holds."""
    return swizzle_bytes(columns) // 2


def piece_offset(row, piece, *, rows: int, columns: int):
    """Byte offset of piece `piece` (0 .. columns / 8 - 1) of a row, from the tile's start.

    Args: row, piece: >= 0; rows, columns: of the tile, compile-time; columns a multiple of 16.
    Contract: the tile starts at a multiple of eight times the pattern. Cost: about six integer instructions.
    """
    width = swizzle_bytes(columns)
    within_bits = {128: 3, 64: 2, 32: 1}[width]  # log2 of the pieces a pattern permutes
    row_bits = 3 - within_bits  # 2^row_bits rows of a narrow pattern share a line of 128 bytes, and one permutation
    mask = (1 << within_bits) - 1
    permuted = (piece & mask) ^ ((row >> row_bits) & mask)
    return (piece >> within_bits) * (rows * width) + row * width + permuted * PIECE
