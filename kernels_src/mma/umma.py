"""Matrix products of the fifth-generation tensor core (tcgen05) into tensor memory.

One whole warp calls; the DSL elects the issuing thread inside, always the same one, so a later commit covers every
product issued before it. Operands: A from shared or tensor memory, B from shared memory, fp32 accumulator in
tensor memory. Cost: one instruction for each 32 bytes of the summed dimension (16 elements of a 16-bit type).
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import tcgen05


@cute.jit
def multiply(
    mma, accumulator, fragment_a, fragment_b, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int], accumulate
):
    """accumulator (+)= A B over the k-steps [begin, end); the first of them overwrites unless `accumulate`.

    Args:
        mma: TiledMma.
        accumulator: tensor in tensor memory, from `accumulator_at`.
        fragment_a, fragment_b: one stage, modes (mma, m or n, k).
        accumulate: Boolean, keep what the accumulator holds.
    """
    mma.set(tcgen05.Field.ACCUMULATE, accumulate)
    for step in cutlass.range_constexpr(begin, end):
        cute.gemm(mma, accumulator, fragment_a[None, None, step], fragment_b[None, None, step], accumulator)
        mma.set(tcgen05.Field.ACCUMULATE, True)


def accumulator_at(mma, shape_mn, tmem_base, column: int):
    """View of an fp32 accumulator that starts at a tensor-memory column."""
    layout = mma.make_fragment_C(mma.partition_shape_C(shape_mn)).layout
    return cute.make_tensor(tmem_base + column, layout)


def operand_a_at(mma, shape_mk, tmem_base, column: int, dtype):
    """View of operand A in tensor memory, packed, starting at a column."""
    layout = mma.make_fragment_A(mma.partition_shape_A(shape_mk)).layout
    return cute.make_tensor(cute.recast_ptr(tmem_base + column, dtype=dtype), layout)


def fence_before_arrive():
    """Orders this thread's tensor-memory accesses before an arrival that others wait for (PTX ISA 9.7.16.6)."""
    arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after_wait():
    """Orders this thread's later tensor-memory accesses after the wait it has just passed (PTX ISA 9.7.16.6)."""
    arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def commit(barrier):
    """Arrive once on `barrier` when every product issued so far is complete. The whole warp calls."""
    with arch.elect_one():
        tcgen05.commit(barrier)
