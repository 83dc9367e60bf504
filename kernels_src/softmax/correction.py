"""What the correction warps do to an output accumulator in tensor memory, one row a thread.

They stand outside the softmax warps' critical path: rescale O when a reference point has moved, and turn the finished
accumulator into the output. Source: FlashAttention-4 (arXiv 2603.05451), correction warpgroup.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import arch
from cutlass.cute.nvgpu import tcgen05

RESCALE_COLUMNS = 16  # columns in registers at a time: the correction warps have few registers

LN2 = 0.6931471805599453


def row_copies(accumulator, columns: int, thread_row, store: bool):
    """Tensor-memory copies of `columns` columns at a time for the row of this thread: (copy, tensor-memory view).

    The view has modes (value, 1, piece).
    """
    op = tcgen05.St32x32bOp if store else tcgen05.Ld32x32bOp
    atom = cute.make_copy_atom(op(tcgen05.Repetition(columns)), Float32)
    tile = accumulator[(None, None), 0, 0]
    copy = tcgen05.make_tmem_copy(atom, tile)
    slice_ = copy.get_slice(thread_row)
    return copy, slice_.partition_D(tile) if store else slice_.partition_S(tile)


def row_max_copies(accumulator, columns: int, thread_row):
    """As `row_copies` for loads that also give the maximum of their columns: copy to [values, (1,) maximum]. sm103a."""
    op = tcgen05.LdRed32x32bOp(tcgen05.Repetition(columns), redOp=tcgen05.TmemLoadRedOp.MAX)
    tile = accumulator[(None, None), 0, 0]
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), tile)
    return copy, copy.get_slice(thread_row).partition_S(tile)


@cute.jit
def rescale(accumulator, factor: Float32, thread_row):
    """O *= factor for the row of this thread. The whole warp calls; ends with the stores complete.

    Cost: head_dim_v / 16 loads and stores of 16 columns, head_dim_v / 2 packed multiplications.
    """
    load, source = row_copies(accumulator, RESCALE_COLUMNS, thread_row, False)
    store, target = row_copies(accumulator, RESCALE_COLUMNS, thread_row, True)
    for piece in cutlass.range_constexpr(cute.size(source, mode=[2])):
        registers = cute.make_rmem_tensor(((RESCALE_COLUMNS, 1), 1), Float32)
        cute.copy(load, source[None, None, piece], registers)
        arch.fence_view_async_tmem_load()
        for i in cutlass.range_constexpr(0, RESCALE_COLUMNS, 2):
            registers[i], registers[i + 1] = arch.mul_packed_f32x2((registers[i], registers[i + 1]), (factor, factor))
        cute.copy(store, registers, target[None, None, piece])
    arch.fence_view_async_tmem_store()


@cute.jit
def final_factor(row_sum: Float32) -> Float32:
    """1 / row_sum; 1 for a row that saw no key (its O is 0) and for a NaN (which stays visible in O)."""
    is_bad = (row_sum == Float32(0.0)) | (row_sum != row_sum)
    return arch.rcp_approx(Float32(1.0) if is_bad else row_sum)


@cute.jit
def log_sum_exp(reference: Float32, row_sum: Float32, scale_log2: Float32) -> Float32:
    """Natural log of the softmax denominator; -inf for a row that saw no key or holds a NaN.

    Args: reference in units of unscaled scores; row_sum relative to it.
    """
    is_bad = (row_sum == Float32(0.0)) | (row_sum != row_sum)
    value = (reference * scale_log2 + cute.math.log2(row_sum, fastmath=True)) * Float32(LN2)
    return -Float32.inf if is_bad else value
