"""Copies of tiles from global to shared memory by the tensor memory accelerator (TMA).

A tensor map describes a tensor as (head_dim, seqlen, heads, batch) with arbitrary 16-byte strides; rows beyond the
sequence arrive as zeros, so no bounds check and no stale data. Completion is counted in bytes on an mbarrier.
"""

import cutlass.cute as cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync


def make_tile_load(tensor, smem_layout, tile):
    """(copy atom, coordinate tensor) for boxes of `tile` of `tensor`; both modes of the tile are modes 0 and 1."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, smem_layout, tile)


def partition_load(atom, shared, tiles):
    """(shared, global) views whose mode 0 is one tile and whose other modes count stages and tiles."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )


def partition_boxes(atom, shared, boxes):
    """As `partition_load`, for a tensor divided into boxes: mode 0 of `boxes` is a box, mode 1 counts them."""
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), boxes)


@cute.jit
def expect_bytes(barrier, num_bytes):
    """Announces the bytes of a stage and makes its one arrival. Contract: called by one whole, converged warp."""
    with arch.elect_one():
        arch.mbarrier_arrive_and_expect_tx(barrier, num_bytes)


def start_load(atom, source, destination, barrier):
    """Starts the copy of one tile. Contract: called by one whole, converged warp (the copy elects a lane)."""
    cute.copy(atom, source, destination, tma_bar_ptr=barrier)
