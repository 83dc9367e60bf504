"""Adds a float32 tile in shared memory to global memory by the copy engine (TMA reduction).

The additions of one element by different CTAs happen in any order, so sums differ in the last bits from run to run
unless the caller orders them (scheduling.turns).
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import arch
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync


def make_tile_reduce(tensor, smem_layout, tile):
    """(copy atom, coordinate tensor) for adding boxes of `tile` to `tensor`."""
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD), tensor, smem_layout, tile
    )


def write_accumulator(mma, accumulator, shared, thread):
    """Writes a warpgroup's float32 accumulator to shared memory, two elements a store.

    Args: mma: the tiled MMA the accumulator belongs to; thread: 0..127 in the warpgroup.
    Contract: the caller fences the async proxy and synchronises before the reduction reads.
    Cost: one 8-byte store for two elements; with the 128-byte swizzle two wavefronts a warp, the least possible.
    """
    store = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=64)
    tiled = cute.make_tiled_copy_C(store, mma)
    cute.copy(tiled, tiled.retile(accumulator), tiled.get_slice(thread).partition_D(shared))


@cute.jit
def reduce_tile(atom, shared, destination):
    """Starts the addition of a tile, as a bulk group of the elected lane. Contract: one whole, converged warp."""
    source, target = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(destination, 0, 2)
    )
    cute.copy(atom, source, target)
    with arch.elect_one():
        arch.cp_async_bulk_commit_group()


@cute.jit
def wait_until_added():
    """Blocks until this warp's additions are performed, so that another CTA may add after them."""
    with arch.elect_one():
        arch.cp_async_bulk_wait_group(0, read=False)
