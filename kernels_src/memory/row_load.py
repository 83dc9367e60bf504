"""Copies of a run of float32 statistics from global to shared memory by the copy engine, without a tensor map."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync


@cute.jit
def start_row_load(source, destination, barrier):
    """Starts the copy of a contiguous run, whose bytes complete on `barrier`.

    Contract: one whole, converged warp. Both addresses and the size are multiples of 16 bytes.
    """
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    with arch.elect_one():
        read, written = cpasync.group_bulk_copy_modes(source, destination)
        cute.copy(atom, read, written, mbar_ptr=barrier)
