"""Contract: the gradients of every kind of sm90a backward kernel, computed in the simulator from a right forward, are
those of attention: within the acceptance rule for every case, under eager, late and random schedules with all checks
on. A deterministic kernel gives the same bits of dq under all of them.
"""

import numpy as np
import pytest

pytestmark = pytest.mark.dsl
pytest.importorskip("cutlass")

from fa4build.cases.backward import (  # noqa: E402
    Gradients,
    backward_cases_for,
    draw_gradient,
    forward_results,
    gradient_bounds,
    gradient_errors,
    reference_gradients,
    same_dtype_gradients,
)
from fa4build.cases.forward import Case, draw_inputs, round_to, window_of  # noqa: E402
from fa4build.matrix.variants import parse_variant  # noqa: E402
from fa4build.simulate import simulate  # noqa: E402
from fa4build.simulate.native.run import run_launch  # noqa: E402
from tests.built import cubin_of  # noqa: E402

LOG2_E = 1.4426950408889634
MANY_TILES = Case(name="many-tiles", seqlen_q=300, seqlen_k=500, num_heads_q=2, num_heads_kv=1, window=(100, 20))


@pytest.fixture(
    scope="module",
    params=[
        "bf16-hd128-full",
        "fp16-hd64-causal",
        "bf16-hd128-causal",
        "bf16-hd96-local",
        "bf16-hd128-local-deterministic",
        "bf16-hd192x128-local",
        "bf16-hd256-causal-deterministic",
    ],
)
def built(request):
    """(variant, cubin)."""
    variant = parse_variant(f"bwd-sm90a-{request.param}")
    return variant, cubin_of(variant.id)


def as_bits(values, dtype):
    """Rounded values as the 16-bit patterns a kernel reads."""
    if dtype == "fp16":
        return values.astype(np.float16).view(np.uint16)
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits, dtype):
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def run_backward(variant, cubin, case, **options):
    """(gradients from the simulator, inputs q, k, v, dout as float64, scale, window, dq_accum)."""
    dtype, scale, window = variant.dtype, variant.head_dim**-0.5, window_of(case, variant.mask)
    q, k, v = (round_to(x, dtype) for x in draw_inputs(case, variant.head_dim, variant.head_dim_v, seed=3))
    dout = round_to(draw_gradient(case, variant.head_dim_v, seed=3), dtype)
    out, lse = forward_results(q, k, v, scale, window, dtype)
    batch, seqlen_q, heads, head_dim = q.shape
    rounded = -(-seqlen_q // 128) * 128
    lse_log2 = np.full((batch, heads, rounded), np.inf, np.float32)
    lse_log2[..., :seqlen_q] = np.where(np.isneginf(lse), np.inf, lse * LOG2_E)
    dpsum = np.zeros((batch, heads, rounded), np.float32)
    dpsum[..., :seqlen_q] = (dout * out).sum(-1).transpose(0, 2, 1)
    arrays = {name: as_bits(x, dtype) for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout))}
    arrays |= {"dpsum": dpsum, "lse_log2": lse_log2}
    arrays["dq_accum"] = np.zeros((batch, heads, rounded, head_dim), np.float32)
    arrays["dq_semaphore"] = np.zeros((batch, heads, rounded // 128), np.int32)
    arrays |= {name: np.full(x.shape, 0x7E01, np.uint16) for name, x in (("dk", k), ("dv", v))}
    scalars = {"softmax_scale": scale, "window_left": window[0], "window_right": window[1], "num_sms": 132}
    options = {"engine": run_launch, "free_sums": not variant.deterministic, **options}
    simulate(cubin.plan, cubin.ptx, arrays, scalars, **options)
    dq = arrays["dq_accum"][:, :, :seqlen_q].transpose(0, 2, 1, 3).astype(np.float64) * scale
    found = Gradients(dq=dq, dk=from_bits(arrays["dk"], dtype), dv=from_bits(arrays["dv"], dtype))
    return found, (q, k, v, dout, scale, window), arrays["dq_accum"]


def assert_within_bounds(variant, case, **options):
    found, inputs, accumulator = run_backward(*variant, case, **options)
    dtype = variant[0].dtype
    expected = reference_gradients(*inputs)
    bounds = gradient_bounds(expected, same_dtype_gradients(*inputs, dtype), dtype)
    errors = gradient_errors(found, expected)
    assert all(errors[name] <= bounds[name] for name in bounds), (case.name, errors, bounds)
    return accumulator


def test_gradients_of_every_acceptance_case(built):
    """Odd lengths, groups of heads, more queries than keys and the reverse, windows, large logits."""
    for case in backward_cases_for(built[0]):
        assert_within_bounds(built, case)


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_no_schedule_changes_more_than_the_order_of_sums(built, schedule):
    """With all checks: no race, no missing fence, no wait in vain. Several CTAs at once, so that they meet at dQ."""
    options = {"checks": True, "schedule": schedule, "seed": 5, "concurrent_clusters": 8}
    accumulator = assert_within_bounds(built, MANY_TILES, **options)
    if built[0].deterministic:
        _, _, alone = run_backward(*built, MANY_TILES)
        assert np.array_equal(accumulator.view(np.uint32), alone.view(np.uint32))


def test_a_deterministic_kernel_needs_no_cta_that_starts_later(built):
    """CTAs one after another, in the order of their numbers, all come to an end."""
    if built[0].deterministic:
        assert_within_bounds(built, MANY_TILES, concurrent_clusters=1)
