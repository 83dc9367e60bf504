"""Matrix products of the backward pass on sm_90a: which operand lies how, for one consumer warpgroup of 64 keys.

    S^T  (64, tile_m)        = K Q^T          both from shared memory, contiguous along head_dim
    dP^T (64, tile_m)        = V dO^T         the same
    dV   (64, head_dim_v)   += P^T dO         P^T from registers: S^T's accumulator, rounded, is that operand
    dK   (64, head_dim)     += dS^T Q         the same, or dS^T from shared memory
    dQ   (tile_m, head_dim)  = dS K           dS through shared memory: its rows come from both warpgroups

Keys are the rows, so the products that sum over queries (dV, dK) need no exchange between threads. dQ is split between
the warpgroups by its rows if there are 128, else by its columns.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

ROWS = 64


def key_gradient_mma(dtype, columns: int):
    """Tiled MMA of dK += dS^T Q for one warpgroup with dS^T from shared memory, contiguous along queries."""
    mma = hopper.make_trivial_tiled_mma(
        dtype,
        dtype,
        OperandMajorMode.K,
        OperandMajorMode.MN,
        cutlass.Float32,
        atom_layout_mnk=(1, 1, 1),
        tiler_mn=(ROWS, columns),
    )
    mma.set(warpgroup.Field.ACCUMULATE, True)
    return mma


def query_gradient_mma(dtype, columns: int, accumulate: bool, by_keys: bool = False):
    """Tiled MMA of dQ = dS K for one warpgroup: dS contiguous along queries or keys, K along head_dim."""
    mma = hopper.make_trivial_tiled_mma(
        dtype,
        dtype,
        OperandMajorMode.K if by_keys else OperandMajorMode.MN,
        OperandMajorMode.MN,
        cutlass.Float32,
        atom_layout_mnk=(1, 1, 1),
        tiler_mn=(ROWS, columns),
    )
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    return mma


def rows_layout(dtype, rows: int, columns: int, stages: int, parts: int = 1):
    """Shared memory of (rows, columns, stages), contiguous along columns, as an operand summed over columns.

    Args: parts: into how many equal runs of columns a product may take it apart; the swizzle must not cross them.
    """
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, columns // parts)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (rows, columns, stages), (0, 1, 2))


def columns_layout(dtype, rows: int, columns: int, stages: int, parts: int = 1):
    """The same memory seen as (columns, rows, stages), as an operand summed over rows."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.COL_MAJOR, dtype, columns // parts)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (columns, rows, stages), (1, 0, 2))


def write_operand(mma, operand, accumulator, shared, thread, transpose: bool = False) -> None:
    """Writes a 16-bit operand, rounded from `accumulator`, to shared memory at the accumulator's places.

    Args: mma: the tiled MMA the accumulator belongs to; thread: 0..127 in the warpgroup; transpose: the memory is
    contiguous along the accumulator's rows.
    Contract: the caller fences the async proxy and synchronises before a product reads.
    Cost: one stmatrix.x4 for 8 elements a thread.
    """
    tiled = cute.make_tiled_copy_C(
        cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=transpose, num_matrices=4), operand.element_type), mma
    )
    source = cute.make_tensor(operand.iterator, accumulator.layout)
    cute.copy(tiled, tiled.retile(source), tiled.get_slice(thread).partition_D(shared))
