"""Least cycles that one tile of attention occupies each unit of a multiprocessor, by counting. No latency, no
overlap lost.

Units: `mma` (tensor core, dense bf16), `shared` (bytes through shared memory), `exp` (results of the exponential unit).
Rates are those of the timing model (`timing/rates.py`): 8192 operations, 128 bytes and 16 exponentials a clock on
sm_100a. Operands in tensor memory cost no shared-memory traffic; a second 128-row tile of Q reads K and V again.
Source of the method: FlashAttention-4 (arXiv 2603.05451), its roofline of forward and backward.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fa4build.timing.rates import rates_of

ELEMENT_BYTES = 2  # bf16
ACCUMULATOR_BYTES = 4  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Cycles by unit. `shared` is the sum of `shared_parts`, by what moves."""

    mma: float
    exp: float
    shared_parts: Mapping[str, float]

    @property
    def shared(self) -> float:
        """Cycles of shared memory in all."""
        return sum(self.shared_parts.values())

    @property
    def excess(self) -> float:
        """How much longer the busiest other unit takes than the tensor core: 0.3 is 30 % above; negative is below."""
        return max(self.shared, self.exp) / self.mma - 1


def forward_bounds(arch: str, tile_m: int, tile_n: int, head_dim: int) -> Bounds:
    """One block of keys for one tile of queries: S = Q K^T from shared memory, O += P V with P in tensor memory.

    Args: tile_m: a multiple of 128 (the rows of one instruction); head_dim: of Q, K and V.
    """
    rates = rates_of(arch)
    instructions = tile_m // 128
    bytes_ = {
        "Q": instructions * 128 * head_dim * ELEMENT_BYTES,
        "K": instructions * tile_n * head_dim * ELEMENT_BYTES,
        "V": instructions * tile_n * head_dim * ELEMENT_BYTES,
    }
    return Bounds(
        mma=2 * 2 * tile_m * tile_n * head_dim / rates.tensor.value,
        exp=tile_m * tile_n / rates.mufu.value,
        shared_parts={name: count / rates.shared.value for name, count in bytes_.items()},
    )


def exp_to_mma(arch: str, head_dim: int) -> float:
    """T_exp / T_mma of the forward; the tile cancels. On sm_100a (1/16) / (4 d / 8192) = 128 / d."""
    bounds = forward_bounds(arch, 128, 128, head_dim)
    return bounds.exp / bounds.mma


def backward_bounds(arch: str, head_dim: int, cta_group: int = 1, tile: int = 128) -> Bounds:
    """One 128 x 128 block of the backward a CTA: S, dP, dV, dK, dQ.

    Args: cta_group: 1, or 2 for a pair whose instructions are 256 rows tall, so that each CTA reads half of B.
    Contract of the count, operands from shared memory: S and dP both; dV and dK only B (P and dS stay in tensor
        memory); dQ both. dS is written once for dQ. dQ's float32 tile is staged and read by the reduction into
        global memory. In a pair, half of each CTA's dS goes to the other: staged, read, and received, three passes
        over half a tile; and each CTA reduces half of dQ, whose product then runs over both CTAs' keys.
    """
    rates = rates_of(arch)
    operand, square = tile * head_dim * ELEMENT_BYTES, tile * tile * ELEMENT_BYTES
    share = 1 / cta_group
    s_and_dp, dv_and_dk = 2 * (operand + operand * share), 2 * operand * share
    # In a pair a CTA has half the rows of dS over twice the keys, and half the columns of K over both: as many bytes.
    dq = square + operand
    parts = {
        "operands": s_and_dp + dv_and_dk + dq,
        "dS": square,
        "dQ": 2 * tile * head_dim * ACCUMULATOR_BYTES * share,
    }
    if cta_group == 2:
        parts["dS exchange"] = 3 * square / 2
    return Bounds(
        mma=5 * 2 * tile * tile * head_dim / rates.tensor.value,
        exp=tile * tile / rates.mufu.value,
        shared_parts={name: count / rates.shared.value for name, count in parts.items()},
    )
