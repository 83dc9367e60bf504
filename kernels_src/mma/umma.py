"""Matrix products of the fifth-generation tensor core (tcgen05) into tensor memory.

One whole warp calls; the DSL elects the issuing thread inside, always the same one, so a later commit covers every
product issued before it. Operands: A from shared or tensor memory, B from shared memory, fp32 accumulator in
tensor memory. Cost: one instruction for each 32 bytes of the summed dimension (16 elements of a 16-bit type).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int16, Int32
from cutlass.cute import arch
from cutlass.cute.nvgpu import tcgen05

BOTH_CTAS = 3  # mask of a commit that arrives in both CTAs of a pair
MMA_K = 16  # elements of a 16-bit type that one instruction sums over


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


def instruction_descriptor(dtype, m: int, n: int, b_is_n_major: bool) -> int:
    """Descriptor of a kind::f16 product with fp32 accumulator and K-major A. Source: PTX ISA 9.7.16.4.2.

    Args: dtype: cutlass.BFloat16 or Float16, of A and B; m, n: of one instruction, of both CTAs of a pair.
    """
    fp32, operand = 1 << 4, 1 if dtype is BFloat16 else 0
    return fp32 | operand << 7 | operand << 10 | int(b_is_n_major) << 16 | n >> 3 << 17 | m >> 4 << 24


def held(value: Int32) -> Int32:
    """The value, computed here: not where the compiler would move it, behind the wait before its use."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


class Operand(NamedTuple):
    """Where a chain of products finds an operand: `address` is a tensor-memory address, or the low word of a
    shared-memory descriptor; `high` its high word (None in tensor memory); `steps`: what each k-step adds to the low
    word or the address, Python integers (so an Operand is made where it is used, not carried through loops)."""

    address: Int32
    high: Int32 | None
    steps: tuple[int, ...]


def shared_operand(fragment) -> Operand:
    """One stage of an operand in shared memory, modes (mma, m or n, k)."""
    descriptor = tcgen05.smem_descriptor_to_int(fragment.iterator)
    steps = tuple(cute.crd2idx((0, 0, k), fragment.layout) for k in range(cute.size(fragment, mode=[2])))
    return Operand(held(descriptor.to(Int32)), (descriptor >> 32).to(Int32), steps)


def tensor_operand(tmem_address, k: int) -> Operand:
    """Operand A of a 16-bit type in tensor memory: two elements a column."""
    return Operand(tmem_address, None, tuple(range(0, k // 2, MMA_K // 2)))


def multiply_chain(
    accumulator, a: Operand, b: Operand, begin: int, end: int, accumulate, descriptor: int, cta_group: int = 1
):
    """accumulator (+)= A B over the k-steps [begin, end); as `multiply`, but one election for all of them and nothing
    computed between them except additions to addresses: an issuing warp that waits for its operands issues at once.

    Args: accumulator: tensor-memory address. accumulate: 1 to keep what it holds, else 0. descriptor: from
        `instruction_descriptor`.
    """
    source, more = ("[x]", []) if a.high is None else ("dx", [a.high])
    code = ["{ .reg .pred p; .reg .b32 x, y; .reg .b64 dx, dy; setp.ne.b32 p, {$r3}, 0;"]
    for step in range(begin, end):
        code.append(f"add.u32 x, {{$r1}}, {a.steps[step]}; add.u32 y, {{$r2}}, {b.steps[step]};")
        code.append("mov.b64 dy, {y, {$r4}};" + (" mov.b64 dx, {x, {$r5}};" if more else ""))
        code.append(f"tcgen05.mma.cta_group::{cta_group}.kind::f16 [{{$r0}}], {source}, dy, {descriptor}, p;")
        if step == begin:
            code.append("setp.eq.b32 p, 0, 0;")
    with arch.elect_one():
        arch.inline_ptx(
            " ".join([*code, "}"]), read_only_args=[accumulator, a.address, b.address, accumulate, b.high, *more]
        )


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


@cute.jit
def commit_to_pair(barrier):
    """As `commit`, of products that two CTAs share: arrives in both. The whole warp calls."""
    with arch.elect_one():
        tcgen05.commit(barrier, Int16(BOTH_CTAS), tcgen05.CtaGroup.TWO)
