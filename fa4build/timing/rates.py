"""Unit throughputs of the timing model: what an instruction costs which unit, in cycles of the SM clock.

For comparing pipelines with one another, not for predicting times: barrier wake-up, TMEM bandwidth and issue rules are
assumptions. Every number carries where it is from. This module holds tables and arithmetic; who runs when is not here.

Source: ptx-semantics.md 14.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass

from fa4build.errors import SimulationError

SUB_PARTITIONS = 4  # of an SM; warp w issues in sub-partition w % 4
WARP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A number with its unit and where it comes from. `is_assumed`: no primary source."""

    value: float
    unit: str
    source: str
    is_assumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRates:
    """What one SM does per clock.

    fma: f32 lanes. alu: lanes of integer, minimum, selection, conversion. mufu: results (ex2, lg2, rcp). shared: bytes
    read or written. tensor: dense bf16 operations (2 per multiply-add). tensor_memory: bytes loaded, and as many
    stored; None where there is none. sm_count: of a GPU.
    """

    arch: str
    fma: Rate
    alu: Rate
    mufu: Rate
    shared: Rate
    tensor: Rate
    tensor_memory: Rate | None
    sm_count: int


_FA4 = "FlashAttention-4 paper and blog (Together AI)"
_MICROBENCH = "SemiAnalysis microbench-blackwell (Apache-2.0)"
_ULTRA = "NVIDIA Blackwell Ultra blog: twice the attention exponentials"
_HOPPER = "published H100 figures: m64n128k16 in 64 clocks"
_ALU = Rate(value=64, unit="lanes/clk", source="CUDA C++ Programming Guide, arithmetic throughput: 9.0; 10.x as 9.0")
_FMA = Rate(value=128, unit="lanes/clk", source="published; ptx-semantics.md 14 tags it [PUB]")
_SHARED = Rate(value=128, unit="bytes/clk", source="published; ptx-semantics.md 14 tags it [PUB]")
_TENSOR_MEMORY = Rate(value=512, unit="bytes/clk", source="32 lanes x 4 bytes x 4 warps", is_assumed=True)

RATES = {
    "sm90a": UnitRates(
        arch="sm90a",
        fma=_FMA,
        alu=_ALU,
        mufu=Rate(value=16, unit="results/clk", source=_FA4),
        shared=_SHARED,
        tensor=Rate(value=4096, unit="bf16 FLOP/clk", source=_HOPPER),
        tensor_memory=None,
        sm_count=132,
    ),
    "sm100a": UnitRates(
        arch="sm100a",
        fma=_FMA,
        alu=_ALU,
        mufu=Rate(value=16, unit="results/clk", source=_FA4),
        shared=_SHARED,
        tensor=Rate(value=8192, unit="bf16 FLOP/clk", source=_MICROBENCH),
        tensor_memory=_TENSOR_MEMORY,
        sm_count=148,
    ),
    "sm103a": UnitRates(
        arch="sm103a",
        fma=_FMA,
        alu=_ALU,
        mufu=Rate(value=32, unit="results/clk", source=_ULTRA),
        shared=_SHARED,
        tensor=Rate(value=8192, unit="bf16 FLOP/clk", source=_MICROBENCH),
        tensor_memory=_TENSOR_MEMORY,
        sm_count=160,
    ),
}


def rates_of(arch: str) -> UnitRates:
    """The rates of an architecture.

    Raises: SimulationError if there is no table for it.
    """
    if arch not in RATES:
        raise SimulationError(f"no timing table for {arch!r}; there are tables for {', '.join(RATES)}")
    return RATES[arch]


# ------------------------------------------------------------------------------------------------ tensor core

# Steady-state clocks of one tcgen05.mma (32 bytes of K) by N. Source: SemiAnalysis microbench-blackwell, on B200.
# Keys: (cta_group, M, A in tensor memory). cta_group::2 figures are for the pair.
_TCGEN05_CLOCKS: dict[tuple[int, int, bool], dict[int, float]] = {
    (1, 128, False): {64: 48.6, 128: 64.6, 256: 128.6},
    (1, 128, True): {64: 32.5, 128: 64.5, 256: 128.5},
    (1, 64, False): {64: 32.5, 128: 64.5, 256: 128.5},
    (1, 64, True): {64: 32.5, 128: 64.5, 256: 128.5},
    (2, 128, False): {64: 25.7, 128: 32.7, 256: 64.7},
    (2, 256, False): {64: 43.7, 128: 64.75, 256: 128.75},
    (2, 256, True): {64: 32.6, 128: 64.6, 256: 128.6},
}
# Clocks from issue over commit to the observed wait, without the MMAs' own. Keys: (cta_group, A in tensor memory).
_TCGEN05_LATENCY = {(1, False): 148.0, (1, True): 116.0, (2, False): 182.0, (2, True): 150.0}


def mma_cycles(m: int, n: int, cta_group: int, a_in_tensor_memory: bool) -> float:
    """Steady-state clocks of one tcgen05.mma with 32 bytes of K (16 bf16, 32 fp8).

    Between the measured N (64, 128, 256) the clocks are interpolated; below 64 they are those of 64.
    M 128 of a CTA pair with A in tensor memory was not measured: it takes the figures of A in shared memory.
    Raises: SimulationError for a shape that does not exist. Source: ptx-semantics.md 14.
    """
    clocks = _TCGEN05_CLOCKS.get((cta_group, m, a_in_tensor_memory)) or _TCGEN05_CLOCKS.get((cta_group, m, False))
    if clocks is None or not 8 <= n <= 256:
        raise SimulationError(f"no clocks for tcgen05.mma M {m}, N {n}, cta_group::{cta_group}")
    if n <= 64:
        return clocks[64]
    low, high = (64, 128) if n <= 128 else (128, 256)
    return clocks[low] + (clocks[high] - clocks[low]) * (n - low) / (high - low)


def mma_latency(cta_group: int, a_in_tensor_memory: bool) -> float:
    """Clocks that a chain of MMAs takes from issue to the observed commit beyond `mma_cycles` each. Source: 14."""
    return _TCGEN05_LATENCY[cta_group, a_in_tensor_memory]


def wgmma_cycles(n: int) -> float:
    """Clocks of one wgmma m64nNk16 at the dense rate: 64 * n * 16 * 2 / 4096 = n / 2. Source: 14."""
    return 64 * n * 16 * 2 / RATES["sm90a"].tensor.value


# ------------------------------------------------------------------------------------------------ copies

# Clocks from issue to completion of a TMA load, by bytes, with all SMs loading. Source: SemiAnalysis microbench.
_TMA_CLOCKS = ((8192, 1000.0), (16384, 3590.0), (32768, 4586.0), (65536, 5405.0))


def tma_load_latency(size_bytes: int) -> float:
    """Clocks from issue to the completed mbarrier on a loaded chip; interpolated, linear beyond 64 KiB. Source: 14."""
    if size_bytes <= _TMA_CLOCKS[0][0]:
        return _TMA_CLOCKS[0][1]
    sizes = [size for size, _ in _TMA_CLOCKS]
    upper = min(bisect_left(sizes, size_bytes), len(sizes) - 1)
    (low, low_clocks), (high, high_clocks) = _TMA_CLOCKS[upper - 1], _TMA_CLOCKS[upper]
    return low_clocks + (high_clocks - low_clocks) * (size_bytes - low) / (high - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Bulk loads of one SM: clocks to the completed mbarrier beyond the transfer, and bytes a clock."""

    latency: Rate
    bandwidth: Rate


LOADED = Copies(
    latency=Rate(value=1000, unit="clk", source=f"{_MICROBENCH}: up to 8 KiB, 1000 to 2000 on a loaded chip"),
    bandwidth=Rate(value=40, unit="bytes/clk", source=f"{_MICROBENCH}: slope from 32 to 64 KiB, all SMs loading"),
)
# What a pipeline would do if copies were no bound: a second figure beside every result.
QUICK = Copies(
    latency=Rate(value=700, unit="clk", source="second-level cache hit on a quiet chip", is_assumed=True),
    bandwidth=Rate(value=64, unit="bytes/clk", source="port of an SM to the second-level cache", is_assumed=True),
)
CP_ASYNC_LATENCY = Rate(value=1150, unit="clk", source=f"{_MICROBENCH}: 1100 to 1200")
MBARRIER_WAKE = Rate(value=30, unit="clk", source="20 to 40", is_assumed=True)
NAMED_BARRIER_WAKE = Rate(value=25, unit="clk", source="20 to 30", is_assumed=True)
BARRIER_TEST = Rate(value=15, unit="clk", source="a wait for a phase that is over", is_assumed=True)
REMOTE_LATENCY = Rate(value=180, unit="clk", source="published distributed shared memory latency of Hopper")
TENSOR_STORE_LATENCY = Rate(value=24, unit="clk", source="as assumed for loads", is_assumed=True)
WGMMA_LATENCY = Rate(value=64, unit="clk", source="from the last wgmma to the passed wait", is_assumed=True)
BRANCH = Rate(value=6, unit="clk", source="until the instruction at the target issues", is_assumed=True)


# ------------------------------------------------------------------------------------------------ warp instructions


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a warp instruction occupies: a unit of its sub-partition, for so many clocks; and an issue slot."""

    unit: str
    clocks: float


_MUFU = re.compile(r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\.approx")
_FMA_PIPE = re.compile(r"(add|sub|mul|fma)\.(?:\w+\.)*f32(x2|\.bf16)?$")
_SHARED_ACCESS = re.compile(r"(?:ld|st)\.shared(?:::\w+)?(?:\.v([24]))?\.[bfsu](8|16|32|64)$")
_MATRIX_ACCESS = re.compile(r"(?:ld|st)matrix\..*\.x([124])")
_TENSOR_MEMORY_ACCESS = re.compile(r"tcgen05\.(ld|st)\.(?:red\.)?sync\.aligned\.(\w+?)\.x(\d+)")
_REGISTERS_PER_REPEAT = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


def instruction_cost(opcode: str, arch: str) -> Cost:
    """The unit a warp instruction occupies in its sub-partition (or the SM for `shared`), and for how long.

    Integer, minimum and conversion take the ALU. What the assembler folds into others or into register allocation
    (`is_folded`) costs nothing. Asynchronous ones (MMA, TMA, bulk copies) cost
    their issue slot only: their own time is in `mma_cycles`, `wgmma_cycles` and `tma_load_latency`.
    Source: ptx-semantics.md 14; bank conflicts are not modelled.
    """
    rates = rates_of(arch)
    if _MUFU.match(opcode):
        return Cost(unit="mufu", clocks=WARP * SUB_PARTITIONS / rates.mufu.value)
    if found := _FMA_PIPE.match(opcode):
        lanes = WARP * (2 if found[2] == "x2" else 1)
        return Cost(unit="fma", clocks=lanes * SUB_PARTITIONS / rates.fma.value)
    if found := _SHARED_ACCESS.match(opcode):
        return Cost(unit="shared", clocks=WARP * int(found[1] or 1) * int(found[2]) / 8 / rates.shared.value)
    if found := _MATRIX_ACCESS.match(opcode):
        return Cost(unit="shared", clocks=WARP * 4 * int(found[1]) / rates.shared.value)
    if found := _TENSOR_MEMORY_ACCESS.match(opcode):
        if rates.tensor_memory is None:
            raise SimulationError(f"{opcode}: {arch} has no tensor memory")
        registers = _REGISTERS_PER_REPEAT[found[2]] * int(found[3])
        per_sub_partition = rates.tensor_memory.value / SUB_PARTITIONS
        return Cost(unit=f"tensor_memory_{found[1]}", clocks=WARP * 4 * registers / per_sub_partition)
    if is_folded(opcode) or _CONTROL.match(opcode):
        return Cost(unit="none", clocks=0.0)
    return Cost(unit="alu", clocks=WARP * SUB_PARTITIONS / rates.alu.value)


_FOLDED = re.compile(
    r"mov\.(?!u32$)|cvta|ld\.param|cvt\.[us](?:16|32|64)\.[us](?:8|16|32|64)$|not\.pred|(?:and|or|xor)\.pred|elect\.sync"
    r"|bar\.warp|tcgen05\.fence|ret$|prefetch|griddepcontrol"
)
_CONTROL = re.compile(
    r"bra|exit|mbarrier|bar|barrier|fence|membar|cp\.|tcgen05|wgmma|setmaxnreg|nanosleep|trap|st\.|ld\.|red\.|atom"
)


def is_folded(opcode: str) -> bool:
    """Whether the assembler makes no instruction of its own of it, as seen in machine code of attention kernels.

    Moves and packings become register allocation, parameters become constant operands, predicate logic becomes
    operands; elections around single instructions are merged.
    """
    return _FOLDED.match(opcode) is not None


# Clocks from issue until a dependent instruction may issue. Sources: for arithmetic and shared memory, published
# microbenchmarks of Volta to Hopper; for tensor memory none.
_LATENCIES = (
    (re.compile(r"(?:ld\.(?:volatile|acquire|relaxed|weak)?\.?(?:\w+\.)?global|atom|ld\.acquire)"), 600.0),
    (re.compile(r"ld\.shared|ldmatrix"), 30.0),
    (re.compile(r"shfl|redux"), 24.0),
    (re.compile(r"vote|activemask|elect"), 12.0),
    (_MUFU, 18.0),
    (re.compile(r"tcgen05\.ld"), 24.0),
)
_ARITHMETIC_LATENCY = 4.0


def result_latency(opcode: str) -> float:
    """Clocks from the last clock in its unit until the result may be read."""
    if is_folded(opcode):
        return 0.0
    for pattern, clocks in _LATENCIES:
        if pattern.match(opcode):
            return clocks
    return _ARITHMETIC_LATENCY


# ------------------------------------------------------------------------------------------------ bounds


def forward_tile_bounds(
    arch: str, tile_m: int, tile_n: int, head_dim: int, head_dim_v: int, emulated_exponentials: float = 0.0
) -> dict[str, float]:
    """Least clocks each unit needs for one tile_m x tile_n block of forward attention in bf16, on one SM.

    Args: emulated_exponentials: fraction of exponentials computed on the FMA pipe (FlashAttention-4's polynomial:
        about 6 f32 operations each) instead of the MUFU.
    Returns: clocks by unit: qk, pv (tensor core), mufu, fma (scaling and emulation). The largest of
        qk + pv, mufu, fma bounds the tile.
    Source: ptx-semantics.md 14.
    """
    rates = rates_of(arch)
    if arch == "sm90a":
        qk = tile_m / 64 * head_dim / 16 * wgmma_cycles(tile_n)
        pv = tile_m / 64 * tile_n / 16 * wgmma_cycles(head_dim_v)
    else:
        qk = tile_m / 128 * head_dim / 16 * mma_cycles(128, tile_n, 1, False)
        pv = tile_m / 128 * tile_n / 16 * mma_cycles(128, head_dim_v, 1, True)
    scores = tile_m * tile_n
    # One fused multiply-add scales each score before its exponential.
    operations = scores * (1 + 6 * emulated_exponentials)
    return {
        "qk": qk,
        "pv": pv,
        "mufu": scores * (1 - emulated_exponentials) / rates.mufu.value,
        "fma": operations / rates.fma.value,
    }
