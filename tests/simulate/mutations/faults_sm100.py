"""Faults planted in the forward kernel of sm100a: what tensor memory and tcgen05 add to the table of `faults`.

One warp allocates tensor memory and issues the matrix instructions of two query tiles, two warpgroups do the softmax of
a tile each (S read from and P written to tensor memory), one rescales and writes O.
"""

import re

from tests.simulate.mutations.edits import Edit, drop, drop_all, drop_wait_before, substitute
from tests.simulate.mutations.faults import EXPECT, Planted

MMA = r"tcgen05\.mma\.cta_group::1\.\S+"
COMMIT = r"tcgen05\.commit"
ALLOC_512 = r"(mov\.b32\s+%r\d+), 512;(\s+tcgen05\.alloc)"
ELECTED_MMA = rf"(elect\.sync[^;]*;\s*not\.pred[^;]*;\s*)@%p\d+ bra\s+(\$\w+);((?:(?!elect)[^;]*;){{0,9}}\s*{MMA})"
ACCUMULATE = r"(\s+%p\d+), {};(\s+mov\.b32[^;]*;\s+tcgen05\.mma)"

# Instruction descriptor of kind::f16 (PTX ISA, "Instruction descriptor"): bits 4-5 are 1, sums in f32; bits 7-9 and
# 10-12 are 1, bf16 operands; bits 17-22 are N / 8; bits 24-28 are M / 16. Both 128.
BF16 = 1
DESCRIPTOR = (1 << 4) + (BF16 << 7) + (BF16 << 10) + (128 // 8 << 17) + (128 // 16 << 24)
# Matrix descriptor: bits 61-63 are 2, 128-byte swizzle (4 is 64-byte); bit 46 is 1; stride 1024 / 16; bits 16-29 are 1.
MATRIX = (2 << 61) + (1 << 46) + (64 << 32) + (1 << 16)
MATRIX_SWIZZLE_64 = (4 << 61) + (1 << 46) + (64 << 32) + (1 << 16)


def at_address(opcode: str, change: int) -> Edit:
    """The first such access of tensor memory at another address: lane in bits 16 and up, column below."""
    return substitute(
        rf"({opcode}[^;\[]*)\[(%r\d+)\]([^;]*);", rf"{{ .reg .b32 t; add.s32 t, \2, {change}; \1[t]\3; }}"
    )


def with_descriptor(value: int) -> Edit:
    """The first matrix instruction with another instruction descriptor."""
    return substitute(rf"(mov\.b32\s+%r\d+), {DESCRIPTOR};", rf"\1, {value};")


def same_columns(ptx: str) -> str:
    """The second tile's scores go where the first tile's are."""
    matches = list(re.finditer(rf"{MMA}\s+\[(%r\d+)\]", ptx))
    first = matches[0][1]
    other = next(match for match in matches if match[1] != first)
    return ptx[: other.start(1)] + first + ptx[other.end(1) :]


PLANTED_SM100 = (
    # Allocation
    Planted(
        name="tensor memory is not freed",
        edit=drop(r"tcgen05\.dealloc"),
        expected=r"R6 .*exits with tensor memory not freed: \{0: 512\}",
    ),
    Planted(
        name="half of the tensor memory is allocated",
        edit=substitute(ALLOC_512, r"\1, 256;\2"),
        expected=r"tensor memory columns \d+\.\.\d+ are not allocated \(allocated: 0\.\.255\)",
    ),
    Planted(
        name="alloc of 500 columns",
        edit=substitute(ALLOC_512, r"\1, 500;\2"),
        expected=r"tcgen05\.alloc of 500 columns; allowed: 32, 64, 128, 256, 512",
    ),
    Planted(
        name="freed by another number",
        edit=substitute(r"(tcgen05\.dealloc\S*\s+%r\d+), %r\d+;", r"\1, 256;"),
        expected=r"tcgen05\.dealloc of 256 columns at 0; allocated blocks \(column: size\): \{0: 512\}",
    ),
    Planted(
        name="freed while other warps may still read",
        edit=drop(r"bar\.sync\s+0", -1),
        expected=r"R6-free .*tcgen05\.dealloc.*frees tensor memory .* while the (?:read|write) by .* is not known",
    ),
    Planted(
        name="freed while its last load may be under way",
        edit=drop(r"tcgen05\.wait::ld", -1),
        expected=r"R7w .*tcgen05\.dealloc.*frees tensor memory .*tcgen05\.ld.*without a tcgen05\.wait::ld",
    ),
    Planted(
        name="no block barrier after alloc",
        edit=drop(r"bar\.sync\s+0"),
        expected=r"R9 .*ld\.shared.*reads shared memory never written",
    ),
    # Who waits for what
    Planted(
        name="S is never committed",
        edit=drop(COMMIT, 0),
        expected=r"deadlock.* waits for mbarrier .*1 of 1 arrivals pending, 0 bytes outstanding; nobody has arrived",
    ),
    Planted(
        name="no wait for S",
        edit=drop_wait_before(r"tcgen05\.ld"),
        expected=r"R9 .*tcgen05\.ld.*reads tensor memory .*never written|R1 .*tcgen05\.ld.*while the write by mma",
    ),
    Planted(
        name="no wait for Q before the first product",
        edit=drop_wait_before(MMA),
        expected=r"R1 .*tcgen05\.mma.*reads smem\+\d+ while the write by .*cp\.async\.bulk",
    ),
    Planted(
        name="P announced before it is in tensor memory",
        edit=drop(r"tcgen05\.wait::st"),
        expected=r"R1 .*tcgen05\.mma.*while the write by tcgen05\.st .*is not known to be complete",
    ),
    Planted(
        name="S may be overwritten before it is loaded",
        edit=drop_all(r"tcgen05\.wait::ld"),
        expected=r"R7w .*tcgen05\.st.*overwrites tensor memory .*tcgen05\.ld.*without a tcgen05\.wait::ld",
    ),
    Planted(
        name="no fence before P is announced",
        edit=drop(r"tcgen05\.fence::before_thread_sync", 1),
        expected=r"R15-before .*tcgen05\.mma.*reads tensor memory .*tcgen05\.st.*no tcgen05\.fence::before_thread_sync",
    ),
    Planted(
        name="no fence behind any wait",
        edit=drop_all(r"tcgen05\.fence::after_thread_sync"),
        expected=r"R15-after .*tcgen05\.ld.*reads tensor memory .*tcgen05\.mma.*no tcgen05\.fence::after_thread_sync",
    ),
    Planted(
        name="softmax never says that P is there",
        edit=drop(r"mbarrier\.arrive\.shared"),
        expected=r"deadlock.* waits for mbarrier .*arrivals pending",
    ),
    Planted(
        name="expect_tx of twice the bytes",
        edit=substitute(rf"({EXPECT}[^;]*), (%r\d+);", r"{ .reg .b32 n; shl.b32 n, \2, 1; \1, n; }"),
        expected=r"deadlock.* waits for mbarrier .*0 of 1 arrivals pending, \d+ bytes outstanding",
    ),
    Planted(
        name="no proxy fence before the store of O",
        edit=drop_all(r"fence\.proxy\.async"),
        expected=r"R4 .*the asynchronous proxy reads .* written by .*st\.shared.* without a fence\.proxy\.async",
    ),
    Planted(
        name="the last store outlives its block",
        edit=drop_all(r"cp\.async\.bulk\.wait_group"),
        expected=r"R12 .*exits while tensor store .*may still read shared memory",
    ),
    # Places in tensor memory
    Planted(
        name="both tiles in the same columns",
        edit=same_columns,
        expected=r"R1 .*tcgen05\.ld.*reads tensor memory .*while the write by mma|R9 .*never written",
    ),
    Planted(
        name="load of columns beyond the end",
        edit=at_address(r"tcgen05\.ld", 512),
        expected=r"tcgen05\.ld.*tensor memory columns 512\.\.\d+ are not allocated",
    ),
    Planted(
        name="store into columns beyond the end",
        edit=at_address(r"tcgen05\.st", 512),
        expected=r"tcgen05\.st.*tensor memory columns 5\d\d\.\.\d+ are not allocated",
    ),
    # Matrix instructions
    Planted(
        name="first product accumulates",
        edit=substitute(r"mov\.pred" + ACCUMULATE.format("0"), r"mov.pred\1, -1;\2"),
        expected=r"R9 .*tcgen05\.mma.*reads tensor memory .*never written",
    ),
    Planted(
        name="a later product does not accumulate",
        edit=substitute(r"mov\.pred" + ACCUMULATE.format("-1"), r"mov.pred\1, 0;\2"),
        expected=r"out is off by",
    ),
    Planted(
        name="instruction descriptor with N = 64",
        edit=with_descriptor(DESCRIPTOR - (64 // 8 << 17)),
        expected=r"R9 .*tcgen05\.mma.*column 64, never written",
    ),
    Planted(
        name="instruction descriptor with fp16 operands",
        edit=with_descriptor(DESCRIPTOR - (BF16 << 7)),
        expected=r"out is off by.*lse is off by",
    ),
    Planted(
        name="matrix descriptor with the wrong swizzle",
        edit=substitute(rf"(or\.b64\s+%rd\d+, %rd\d+), {MATRIX};", rf"\1, {MATRIX_SWIZZLE_64 - (1 << 64)};"),
        expected=r"out is off by.*lse is off by",
    ),
    Planted(
        name="matrix instruction issued by all threads",
        edit=substitute(ELECTED_MMA, r"\1\3"),
        expected=r"tcgen05\.mma.* is executed by 32 threads; .*Elect one thread",
    ),
    Planted(
        name="matrix instruction under tid == 0",
        edit=substitute(
            ELECTED_MMA,
            r"{ .reg .b32 lane; .reg .pred other; mov.u32 lane, %laneid; setp.ne.u32 other, lane, 0; @other bra \2; }"
            r"\n\g<0>",
        ),
        expected=r"elect\.sync .*executed by lanes 0 of warp \d+ only",
    ),
)
