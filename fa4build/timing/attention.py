"""Timing of attention kernels: clocks for one more block of the inner loop, and what a CTA costs besides.

Two lengths are timed and subtracted, so that prologue, masked blocks and epilogue fall out of the steady state.
Only shapes matter to the clocks: inputs are seeded random numbers. Rescales happen as often as they do in those.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fa4build.plan import LaunchPlan
from fa4build.timing.replay import Timing, time_plan

BLOCK = 128  # keys of a forward block, queries of a backward block
BLOCKS = (8, 16)  # lengths that are timed, in blocks
_SEED = 1
_NUM_SMS = 148


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The steady state between two lengths of the same kernel.

    cycles: clocks of one more block; quick_cycles: if copies were as quick as on an idle chip. fixed: clocks of a CTA
    beyond its blocks. busy: unit -> share of the steady state in use. softmax: instructions of one warp per block, by
    unit (`issue`: all), of the warps that exponentiate. instructions: role -> instructions of a warp per block. waited:
    role -> share of the steady state its warps wait at barriers. timing: the longer run.
    """

    cycles: float
    quick_cycles: float
    fixed: float
    busy: Mapping[str, float]
    softmax: Mapping[str, float]
    instructions: Mapping[str, float]
    waited: Mapping[str, float]
    timing: Timing

    @property
    def critical(self) -> str:
        """The unit that is in use most."""
        return max(self.busy, key=lambda unit: self.busy[unit])


def steady_state(short: Timing, long: Timing, blocks: tuple[int, int] = BLOCKS) -> Steady:
    """From two runs that differ in the number of blocks only."""
    more = blocks[1] - blocks[0]
    cycles = (long.cycles - short.cycles) / more
    pairs = list(zip(short.warps, long.warps, strict=True))
    roles = dict.fromkeys(w.role for w in long.warps)
    busy = {unit: (long.busy[unit] - short.busy.get(unit, 0.0)) / more / cycles for unit in long.busy}

    def mean(role: str, value: Callable) -> float:
        own = [value(b) - value(a) for a, b in pairs if b.role == role]
        return sum(own) / len(own) / more

    softmax = [r for r in roles if "softmax" in r]
    units = ("issue", "mufu", "fma", "alu", "tensor_memory_ld", "tensor_memory_st", "shared")
    return Steady(
        cycles=cycles,
        quick_cycles=(long.quick_cycles - short.quick_cycles) / more,
        fixed=long.cycles - blocks[1] * cycles,
        busy=busy,
        softmax={u: mean(softmax[0], lambda w, u=u: w.counts.get(u, 0)) for u in units} if softmax else {},
        instructions={role: mean(role, lambda w: w.instructions) for role in roles},
        waited={role: mean(role, lambda w: w.waited) / cycles for role in roles},
        timing=long,
    )


def time_forward(
    plan: LaunchPlan, ptx: str, arch: str, *, seqlen_q: int, head_dim: int, head_dim_v: int, is_causal: bool
) -> Steady:
    """The steady state of one of our forward kernels (dense, 16-bit), on the queries of one CTA.

    Args: seqlen_q: rows that one cluster takes at once.
    """
    window = (-1, 0) if is_causal else (-1, -1)
    runs = []
    for blocks in BLOCKS:
        rng = np.random.default_rng(_SEED)
        seqlen_k = blocks * BLOCK
        arrays = {
            "q": _draw(rng, 1, seqlen_q, 1, head_dim),
            "k": _draw(rng, 1, seqlen_k, 1, head_dim),
            "v": _draw(rng, 1, seqlen_k, 1, head_dim_v),
            "out": np.zeros((1, seqlen_q, 1, head_dim_v), np.uint16),
            "lse": np.zeros((1, 1, seqlen_q), np.float32),
        }
        scalars = _scalars(head_dim, window)
        runs += time_plan(plan, ptx, arrays, scalars, arch)
    return steady_state(runs[0], runs[1])


def time_backward(
    plan: LaunchPlan, ptx: str, arch: str, *, seqlen_k: int, head_dim: int, head_dim_v: int, is_causal: bool
) -> Steady:
    """The steady state of one of our main backward kernels, on the keys of one CTA.

    Args: seqlen_k: rows that one cluster takes at once.
    """
    window = (-1, 0) if is_causal else (-1, -1)
    runs = []
    for blocks in BLOCKS:
        rng = np.random.default_rng(_SEED)
        seqlen_q = blocks * BLOCK
        arrays = {
            "q": _draw(rng, 1, seqlen_q, 1, head_dim),
            "k": _draw(rng, 1, seqlen_k, 1, head_dim),
            "v": _draw(rng, 1, seqlen_k, 1, head_dim_v),
            "dout": _draw(rng, 1, seqlen_q, 1, head_dim_v),
            "dpsum": np.zeros((1, 1, seqlen_q), np.float32),
            "lse_log2": np.full((1, 1, seqlen_q), 10.0, np.float32),
            "dq_accum": np.zeros((1, 1, seqlen_q, head_dim), np.float32),
            "dq_semaphore": np.zeros((1, 1, blocks), np.int32),
            "dk": np.zeros((1, seqlen_k, 1, head_dim), np.uint16),
            "dv": np.zeros((1, seqlen_k, 1, head_dim_v), np.uint16),
        }
        runs += time_plan(plan, ptx, arrays, _scalars(head_dim, window), arch)
    return steady_state(runs[0], runs[1])


def _draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """bf16 bits of normal numbers; as f16 bits they are numbers too."""
    return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _scalars(head_dim: int, window: tuple[int, int]) -> dict:
    return {
        "softmax_scale": head_dim**-0.5,
        "window_left": window[0],
        "window_right": window[1],
        "num_sms": _NUM_SMS,
        "dev.sm_count": _NUM_SMS,
    }
