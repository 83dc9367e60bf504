"""Warpgroup matrix instructions of sm_90a: shapes, register layouts, and issuing a product.

One consumer warpgroup computes 64 rows: S (64, tile_n) = Q K^T with both operands in shared memory, then O (64,
head_dim_v) += P V with P in registers. Every accumulator element has a place given by the two functions below; masks
and LSE use them.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

ROWS = 64


def row_of_thread(thread):
    """First of the two rows (the other is 8 further) whose elements thread 0..127 of a warpgroup holds.

    Source: PTX ISA, wgmma accumulator fragment; tests/kernels/test_wgmma_layout.py.
    """
    return (thread // 32) * 16 + (thread % 32) // 4


def column_of_thread(thread):
    """First column that a thread holds; its others are at column_offset(0..)."""
    return 2 * (thread % 4)


def column_offset(index: int) -> int:
    """Distance of a thread's element `index` of one row (0 .. tile_n / 4 - 1) from its first column."""
    return 8 * (index // 2) + index % 2


def scores_mma(dtype, tile_n: int, accumulate: bool):
    """Tiled MMA of S = Q K^T for one warpgroup, both operands from shared memory, contiguous along head_dim."""
    mma = hopper.make_trivial_tiled_mma(
        dtype,
        dtype,
        OperandMajorMode.K,
        OperandMajorMode.K,
        cutlass.Float32,
        atom_layout_mnk=(1, 1, 1),
        tiler_mn=(ROWS, tile_n),
    )
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    return mma


def output_mma(dtype, head_dim_v: int):
    """Tiled MMA of O += P V for one warpgroup: P from registers, V from shared memory, contiguous along head_dim_v."""
    mma = hopper.make_trivial_tiled_mma(
        dtype,
        dtype,
        OperandMajorMode.K,
        OperandMajorMode.MN,
        cutlass.Float32,
        atom_layout_mnk=(1, 1, 1),
        tiler_mn=(ROWS, head_dim_v),
        a_source=warpgroup.OperandSource.RMEM,
    )
    mma.set(warpgroup.Field.ACCUMULATE, True)
    return mma


def rows_view(accumulator):
    """An accumulator as (2 rows, columns of this thread): (r, i) is row + 8 r, column + column_offset(i)."""
    columns = cute.size(accumulator) // 2
    layout = cute.make_layout((2, (2, columns // 2)), stride=(2, (1, 4)))
    return cute.make_tensor(accumulator.iterator, layout)


def issue_scores(mma_first, mma_rest, scores, queries, keys):
    """Starts S = Q K^T (asynchronous) as one commit group.

    Args: queries, keys: descriptor fragments (.., .., head_dim / 16) of one stage. `mma_first` overwrites, `mma_rest`
    adds.
    Contract: the whole warpgroup calls it; `scores` is not touched before a wait that covers the group.
    """
    warpgroup.fence()
    for k in range(cute.size(queries, mode=[2])):
        mma = mma_first if k == 0 else mma_rest
        cute.gemm(mma, scores, queries[None, None, k], keys[None, None, k], scores)
    warpgroup.commit_group()


def issue_output(mma, output, probabilities, values):
    """Starts O += P V (asynchronous) as one commit group. P is in registers, untouched until the group ends."""
    warpgroup.fence()
    for k in range(cute.size(probabilities, mode=[2])):
        cute.gemm(mma, output, probabilities[None, None, k], values[None, None, k], output)
    warpgroup.commit_group()


def round_to_operand(accumulator, operand, dtype) -> None:
    """Rounds a float32 accumulator to 16 bits, to be the A operand of a next product.

    The accumulator's elements have, pair for pair and in order, the places of a 16-bit A operand, so nothing moves
    between threads. The conversions are volatile assembly to hold their place: LLVM would otherwise sink them past the
    product that overwrites the accumulator, and both copies would be live (seen as spills with dsl 4.8.1).
    """
    packed = cute.recast_tensor(operand, cutlass.Int32)
    for i in range(cute.size(packed)):
        packed[i] = rounded_pair(accumulator[2 * i], accumulator[2 * i + 1], dtype)


def rounded_pair(low, high, dtype):
    """Two float32 values as 16-bit values of one register."""
    code = f"cvt.rn.{'bf16' if dtype is cutlass.BFloat16 else 'f16'}x2.f32 {{$w0}}, {{$r0}}, {{$r1}};"
    return arch.inline_ptx(code, write_only_types=[cutlass.Int32], read_only_args=[high, low])
