"""The table: a fault planted in a kernel, and what the report must say about it.

All are planted in the forward kernel of sm90a: one producer warp that loads by TMA, three consumer warpgroups of 64
rows that take turns, rings of three K and three V slots. `expected` is a regular expression that the report must match;
it names the mechanism, not only that something is wrong. Rules R1 to R15: the checks of fa4build.simulate.checks.
"""

from dataclasses import dataclass

from tests.simulate.mutations.edits import Edit, before, drop, drop_wait, moved, substitute

ARRIVE = r"mbarrier\.arrive\.shared"
EXPECT = r"mbarrier\.arrive\.expect_tx"
INIT = r"(mbarrier\.init\.shared\.b64\s+\[[^\]]*\]), (%r\d+);"
LOAD = r"cp\.async\.bulk\.tensor\.4d\.shared"
ELECTED = r"^(\s*elect\.sync[^;]*;\s*not\.pred[^;]*;\s*@%p\d+ bra\s+(\$\w+);)"
ELECTED_ARRIVE = rf"elect\.sync[^;]*;\s*not\.pred[^;]*;[^;]*;\s*mov[^;]*;\s*{ARRIVE}[^;]*;\s*\$\w+:"
WAIT = r"\], %r\d+, 10000000"
LSE_STORE = r"st\.global\.b32\s+\[(%rd\d+)\]"

# Upper half of the matrix descriptors of Q and K (PTX ISA, "Matrix descriptor format"): its bits 30-31 are 1, 128-byte
# swizzle (2 is 64-byte); bits 0-13 are 64, a stride of 1024 bytes in units of 16.
DESCRIPTOR = rf"(mov\.b32\s+%r\d+), {(1 << 30) + 64};"
SWIZZLE_64, STRIDE_512 = (2 << 30) + 64, (1 << 30) + 32

# Which wait, in the order of the text: the producer's for free slots, then the consumers' for full ones.
FREE_K, FULL_Q, FULL_FIRST_K, FULL_K, FULL_V = 2, 5, 6, 7, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """One fault. `name` says what was done to the kernel."""

    name: str
    edit: Edit
    expected: str


def under_one_thread(which: int) -> Edit:
    """What `if tid == 0: cute.copy(...)` compiles to: the election is reached by lane 0 alone."""
    guard = r"{ .reg .b32 lane; .reg .pred other; mov.u32 lane, %laneid; setp.ne.u32 other, lane, 0; @other bra \2; }"
    return substitute(ELECTED, rf"{guard}\n\1", which)


def scaled_bytes(shift: str, which: int) -> Edit:
    """expect_tx of twice (`shl`) or half (`shr`) the bytes."""
    return substitute(rf"({EXPECT}[^;]*), (%r\d+);", rf"{{ .reg .b32 n; {shift}.b32 n, \2, 1; \1, n; }}", which)


def counted(change: int, which: int) -> Edit:
    """An arrival count that is off by `change`."""
    return substitute(INIT, rf"{{ .reg .b32 n; add.s32 n, \2, {change}; \1, n; }}", which)


BARRIERS = (
    Planted(
        name="nobody announces the second K block",
        edit=drop(EXPECT, 2),
        expected=r"deadlock.* waits for mbarrier .*1 of 1 arrivals pending, -16384 bytes outstanding",
    ),
    Planted(
        name="consumers never release a K slot",
        edit=drop(ARRIVE, 2),
        expected=r"deadlock.*warp 0, .* waits for mbarrier .*12 of 12 arrivals pending, .*nobody has arrived",
    ),
    Planted(
        name="no wait before a slot is refilled",
        edit=drop_wait(WAIT, FREE_K),
        expected=r"deadlock.* waits for mbarrier .*parity 0: phase 2",  # a whole phase was missed
    ),
    Planted(
        name="expect_tx without its bytes",
        edit=substitute(rf"{EXPECT}([^,]*, \[[^\]]*\]), [^;]*;", r"mbarrier.arrive\1;", 2),
        expected=r"deadlock.*0 of 1 arrivals pending, -\d+ bytes outstanding",
    ),
    Planted(
        name="expect_tx of half the bytes",
        edit=scaled_bytes("shr", 2),
        expected=r"deadlock.*0 of 1 arrivals pending, -8192 bytes outstanding",
    ),
    Planted(
        name="expect_tx of twice the bytes",
        edit=scaled_bytes("shl", 2),
        expected=r"deadlock.*0 of 1 arrivals pending, 16384 bytes outstanding",
    ),
    Planted(
        name="arrival count one too high",
        edit=counted(1, 5),
        expected=r"deadlock.*warp 0, .* waits for mbarrier .*1 of 13 arrivals pending",
    ),
    Planted(name="arrival count one too low", edit=counted(-1, 5), expected=r"R5 .*of 11 arrivals pending"),
    Planted(
        name="a barrier that nobody initialises",
        edit=drop(r"mbarrier\.init", 4),
        expected=r"warp 0, .*no initialised mbarrier at smem\+\d+",
    ),
    Planted(
        name="the producer arrives twice",
        edit=substitute(rf"({EXPECT}[^;]*;)", r"\1 \1", 2),
        expected=r"over-arrival: an arrival count is wrong, or a warp arrives twice",
    ),
    Planted(
        name="wait for the wrong parity",
        edit=substitute(r"(mbarrier\.try_wait[^;]*\]), %r\d+, 10000000", r"\1, 1, 10000000", FULL_FIRST_K),
        expected=r"deadlock.* waits for mbarrier .*parity 1: phase 1, 1 of 1 arrivals pending",
    ),
    Planted(
        name="no wait for Q", edit=drop_wait(WAIT, FULL_Q), expected=r"R1 .*wgmma.*while the write by .*cp\.async\.bulk"
    ),
    Planted(
        name="no wait for the first K block",
        edit=drop_wait(WAIT, FULL_FIRST_K),
        expected=r"R1 .*wgmma.*while the write by .*cp\.async\.bulk",
    ),
    Planted(
        name="no wait for a K block in the loop",
        edit=drop_wait(WAIT, FULL_K),
        expected=r"R1 .*wgmma.*while the write by .*cp\.async\.bulk",
    ),
    Planted(
        name="no wait for V", edit=drop_wait(WAIT, FULL_V), expected=r"R1 .*wgmma.*while the write by .*cp\.async\.bulk"
    ),
    Planted(
        name="slot released before it is read",
        edit=moved(ELECTED_ARRIVE, r"wgmma\.fence\S*;", 1),
        expected=r"R2 .*cp\.async\.bulk.*overwrites .* while the read by wgmma",
    ),
    Planted(
        name="ping-pong turn never handed on",
        edit=drop(r"bar\.arrive", -1),
        expected=r"deadlock.* waits for named barrier \d: 128 of 256 threads arrived",
    ),
    Planted(
        name="ping-pong never started",
        edit=drop(r"bar\.arrive", 0),
        expected=r"deadlock.* waits for named barrier \d: 128 of 256 threads arrived",
    ),
    Planted(
        name="named barrier with too many threads",
        edit=substitute(r"bar\.sync\s+(%r\d+), 128;", r"bar.sync \1, 160;"),
        expected=r"deadlock.* waits for named barrier \d: 128 of 160 threads arrived",
    ),
    Planted(
        name="no barrier between the writes of O and its store",
        edit=drop(r"bar\.sync\s+%r\d+, 128", -1),
        expected=r"R1 .*cp\.async\.bulk.*global.*while the write by warp \d+ .*stmatrix",
    ),
    Planted(
        name="no block barrier after barrier init",
        edit=drop(r"bar\.sync\s+0"),
        expected=r"R5 .*whose initialisation at line \d+ .*is not known to have come first",
    ),
)

ASYNCHRONOUS = (
    Planted(
        name="no proxy fence before the store of O",
        edit=drop(r"fence\.proxy\.async"),
        expected=r"R4 .*reads .* written by .*stmatrix.* without a fence\.proxy\.async",
    ),
    Planted(
        name="the last store outlives its block",
        edit=drop(r"cp\.async\.bulk\.wait_group", -1),
        expected=r"R12 .*exits while tensor store .*may still read shared memory",
    ),
    Planted(
        name="no wgmma fence",
        edit=drop(r"wgmma\.fence"),
        expected=r"R8 wgmma\.mma_async.*: no wgmma\.fence before it",
    ),
    Planted(
        name="no wait for the first Q.K",
        edit=drop(r"wgmma\.wait_group\.sync\.aligned\s+0", 0),
        expected=r"R2 .*cp\.async\.bulk.*overwrites .* while the read by wgmma",
    ),
    Planted(
        name="no wait for Q.K in the loop",
        edit=drop(r"wgmma\.wait_group\.sync\.aligned\s+1", 0),
        expected=r"R2 .*cp\.async\.bulk.*overwrites .* while the read by wgmma",
    ),
    Planted(
        name="no wait for the last P.V",
        edit=drop(r"wgmma\.wait_group\.sync\.aligned\s+0", -1),
        expected=r"R8 .*exits with wgmma operations not waited for",
    ),
    Planted(
        name="no commit of wgmma",
        edit=drop(r"wgmma\.commit_group", 0),
        expected=r"R2 .*cp\.async\.bulk.*overwrites .* while the read by wgmma",
    ),
    Planted(
        name="TMA under tid == 0",
        edit=under_one_thread(2),
        expected=r"elect\.sync .*executed by lanes 0 of warp 0 only; .*never under `if tid == 0`",
    ),
    Planted(
        name="consumers ask for too many registers",
        edit=substitute(r"(setmaxnreg\.inc[^;]*)160", r"\g<1>240"),
        expected=r"deadlock.* waits for 3584 registers for setmaxnreg\.inc",  # 32 * (240 - 128)
    ),
    Planted(
        name="producer keeps its registers",
        edit=drop(r"setmaxnreg\.dec"),
        expected=r"deadlock.* registers for setmaxnreg\.inc; the CTA's pool has 0 free of 65536",
    ),
)

ADDRESSES = (
    Planted(
        name="store of lse out of bounds",
        edit=substitute(LSE_STORE, r"st.global.b32 [\1+1073741824]"),
        expected=r"store of 4 bytes .* is out of bounds: nearest buffer is lse",
    ),
    Planted(
        name="misaligned store of lse",
        edit=substitute(LSE_STORE, r"st.global.b32 [\1+2]"),
        expected=r"global store of 4 bytes at misaligned address .*multiple of 4",
    ),
    Planted(
        name="lse is read before it is written",
        edit=before(LSE_STORE, r"{ .reg .b32 old; ld.global.b32 old, [\2]; }"),
        expected=r"R9 .*ld\.global.*reads lse at byte \d+, never written",
    ),
    Planted(
        name="TMA into the wrong place",
        edit=substitute(rf"({LOAD}\S* \[%r\d+)\]", r"\1+128]"),
        expected=r"R9 .*wgmma.*never written",
    ),
    Planted(
        name="TMA to a misaligned address",
        edit=substitute(rf"({LOAD}\S* \[%r\d+)\]", r"\1+16]"),
        expected=r"shared address 0x[0-9a-f]+ is not a multiple of 128",
    ),
    Planted(
        name="TMA beyond shared memory",
        edit=substitute(rf"({LOAD}\S* \[%r\d+)\+\d+\]", r"\1+901120]"),
        expected=r"tensor copy touches shared bytes .* outside CTA rank 0's shared memory",
    ),
)

WRONG_VALUES = (
    Planted(
        name="TMA coordinates swapped",
        edit=substitute(rf"({LOAD}\S* \[[^\]]*\], \[%rd\d+, {{)([^,]*), ([^,]*), ", r"\1\3, \2, ", -2),
        expected=r"out is off by",
    ),
    Planted(
        name="descriptor with the wrong swizzle",
        edit=substitute(DESCRIPTOR, rf"\1, {SWIZZLE_64};"),
        expected=r"out is off by.*lse is off by",
    ),
    Planted(
        name="descriptor with the wrong stride",
        edit=substitute(DESCRIPTOR, rf"\1, {STRIDE_512};"),
        expected=r"out is off by.*lse is off by",
    ),
    Planted(
        name="operands of wgmma swapped",
        edit=substitute(r"(wgmma\.mma_async[^;]*}), (%rd\d+), (%rd\d+),", r"\1, \3, \2,"),
        expected=r"out is off by.*lse is off by",
    ),
    Planted(
        name="V not transposed",
        edit=substitute(r"(wgmma\.mma_async[^;]*}), (\{[^;]*), 1,\s*1,\s*1;", r"\1, \2, 1, 1, 0;"),
        expected=r"out is off by",
    ),
    Planted(
        name="write of O with the wrong swizzle",
        edit=substitute(r"and\.b32(\s+%r\d+, %r\d+), 112;(\s+xor[^;]*;[^;]*;\s*stmatrix)", r"and.b32\1, 48;\2", -1),
        expected=r"R9 .*cp\.async\.bulk.*reads smem\+\d+, never written",
    ),
    Planted(
        name="mask edge off by one",  # of the 116 keys in the last block
        edit=substitute(r"setp\.lt\.s32(\s+%p\d+, %r\d+), 114;", r"setp.lt.s32\1, 115;"),
        expected=r"lse is off by",
    ),
)

NOT_PTX = (
    Planted(
        name="truncated file",
        edit=lambda ptx: ptx[: len(ptx) * 2 // 3],
        expected=r"PTX line \d+: text ends inside entry .*truncated file\?",
    ),
    Planted(
        name="unknown opcode",
        edit=before(r"setmaxnreg\.dec", "dance.sync.aligned.u32 1;"),
        expected=r"PTX line \d+: opcode 'dance\.sync\.aligned\.u32' is not in the simulator's table",
    ),
    Planted(
        name="unknown modifier",
        edit=substitute(r"ex2\.approx\.ftz\.f32", "ex2.exact.f32"),
        expected=r"PTX line \d+: opcode 'ex2\.exact\.f32' is not in the simulator's table",
    ),
)

PLANTED = (*BARRIERS, *ASYNCHRONOUS, *ADDRESSES, *WRONG_VALUES, *NOT_PTX)
