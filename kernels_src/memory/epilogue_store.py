"""Output of one warpgroup: registers -> shared memory (stmatrix) -> global memory (TMA), and the log-sum-exp.

Every warpgroup stores its own 64 rows, so groups never wait for one another. The tensor map clips rows beyond seqlen_q.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, warp

from kernels_src.mma.wgmma import column_offset


def make_tile_store(tensor, smem_layout, tile):
    """(copy atom, coordinate tensor) for storing boxes of `tile` of `tensor`."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, smem_layout, tile)


def write_tile(mma, output, shared, dtype, thread):
    """Converts a warpgroup's (64, head_dim_v) float32 accumulator to `dtype` and writes it to shared memory.

    Args: mma: the tiled MMA the accumulator belongs to; thread: 0..127 in the warpgroup.
    Contract: the caller fences the async proxy and synchronises the warpgroup before the store reads.
    Cost: half a conversion an element, one stmatrix.x4 for 8 elements a thread.
    """
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
    tiled = cute.make_tiled_copy_C(store, mma)
    converted = cute.make_rmem_tensor(output.layout, dtype)
    converted.store(output.load().to(dtype))
    cute.copy(tiled, tiled.retile(converted), tiled.get_slice(thread).partition_D(shared))


@cute.jit
def store_tile(atom, shared, destination):
    """Starts the store of a tile.

    Contract: one whole, converged warp; the same warp waits before the tile is reused.
    """
    source, target = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(destination, 0, 2)
    )
    with arch.elect_one():
        cute.copy(atom, source, target)
        arch.cp_async_bulk_commit_group()


@cute.jit
def wait_until_read():
    """Blocks until this warp's stores have read their shared memory. (The elected thread owns the bulk groups.)"""
    with arch.elect_one():
        arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def store_lse(lse_rows, values, row, seqlen_q, thread):
    """Stores the two rows of a thread; the four threads of a row hold the same values and the first of them stores."""
    if thread % 4 == 0:
        if row < seqlen_q:
            lse_rows[row] = values[0]
        if row + 8 < seqlen_q:
            lse_rows[row + 8] = values[1]


@cute.jit
def store_row(rows, r: cutlass.Constexpr[int], address):
    """Stores a thread's float32 elements of its row `r`, straight from the accumulator: two neighbours a store.

    Args: rows: rows_view of the accumulator; address: of the thread's first column in the row, 8-byte aligned.
    Cost: an 8-byte store for two elements; the four threads of a row fill a sector of 32 bytes.
    """
    for i in cutlass.range_constexpr(0, cute.size(rows, mode=[1]), 2):
        arch.inline_ptx(
            "st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};",
            read_only_args=[address + 4 * column_offset(i), rows[r, i], rows[r, i + 1]],
        )
