"""Contract: preprocess, main kernel and postprocess, one after the other on the same workspaces, give the gradients.

Each is proven alone by `fa4build verify --simulate`; here what one leaves behind is what the next one is given, with
nothing of it made by the reference. Deterministic gradients have the same bits under every schedule.
"""

import numpy as np
import pytest

pytestmark = pytest.mark.dsl
pytest.importorskip("cutlass")

from fa4build.cases.backward import (  # noqa: E402
    Gradients,
    draw_gradient,
    forward_results,
    gradient_bounds,
    gradient_errors,
    reference_gradients,
    same_dtype_gradients,
)
from fa4build.cases.bits import from_bits, to_bits  # noqa: E402
from fa4build.cases.forward import Case, draw_inputs, round_to, window_of  # noqa: E402
from fa4build.cases.schedules import RUNS  # noqa: E402
from fa4build.matrix.variants import parse_variant  # noqa: E402
from fa4build.plan import plan_to_json  # noqa: E402
from fa4build.verify.backward import ROWS  # noqa: E402
from fa4build.verify.runs import execute, filled, poisoned, scalars_for, softmax_scale  # noqa: E402
from fa4build.verify.simulated import request_for  # noqa: E402
from tests.built import cubin_of  # noqa: E402

# Two tiles of queries, three of keys, the last of each with an edge; two query heads share a key head.
CASE = Case(name="chain", seqlen_q=200, seqlen_k=300, num_heads_q=2, num_heads_kv=1)
PREPROCESSED = ("dpsum", "lse_log2", "dq_accum", "dq_semaphore")
CHAINS = ("sm100a-bf16-hd64-causal-deterministic", "sm90a-fp16-hd64-full")


@pytest.fixture(scope="module", params=CHAINS)
def chain(request):
    """(variant of the main kernel, {op: (request, plan)})."""
    main = parse_variant(f"bwd-{request.param}")
    helper = "-".join(request.param.split("-")[:3])
    kernels = {}
    for variant in (main, *(parse_variant(f"bwd_{step}-{helper}") for step in ("preprocess", "postprocess"))):
        cubin = cubin_of(variant.id)
        asked = request_for(
            variant, ptx=cubin.ptx, plan=plan_to_json(cubin.plan), registers=cubin.registers, seeds=(1,)
        )
        kernels[variant.op] = asked, cubin.plan
    return main, kernels


def gradients_of(chain, drawn, run) -> dict[str, np.ndarray]:
    """Bits of dq, dk and dv after the three launches; everything but the inputs starts as NaN."""
    variant, kernels = chain
    lse = drawn[5]
    rows = -(-CASE.seqlen_q // ROWS) * ROWS
    per_row = (CASE.batch, CASE.num_heads_q, rows)
    inputs = {
        name: to_bits(x, variant.dtype) for name, x in zip(("q", "k", "v", "dout", "out"), drawn[:5], strict=True)
    }
    shapes = {"dpsum": per_row, "lse_log2": per_row, "dq_accum": (*per_row, variant.head_dim)}
    shapes["dq_semaphore"] = (*per_row[:2], rows // ROWS)
    buffers = {name: filled(bits, run.padded) for name, bits in (inputs | {"lse": lse.view(np.uint32)}).items()}
    buffers |= {name: poisoned(shape, np.uint32, run.padded) for name, shape in shapes.items()}
    buffers |= {f"d{name}": poisoned(inputs[name].shape, np.uint16, run.padded) for name in "qkv"}
    buffers |= {"accumulator": buffers["dq_accum"], "gradient": buffers["dq"]}
    scalars = scalars_for(variant, CASE, run) | {"scale": softmax_scale(variant)}
    for op, writes, fresh in (
        ("bwd_preprocess", PREPROCESSED, PREPROCESSED),
        ("bwd", ("dk", "dv", "dq_accum", "dq_semaphore"), ("dk", "dv")),
        ("bwd_postprocess", ("gradient",), ("gradient",)),
    ):
        asked, plan = kernels[op]
        own = {arg.name: buffers[arg.name] for arg in plan.args if arg.kind == "tensor"}
        assert () == execute(asked, plan, own, writes, scalars, run, 1, fresh).faults
    return {name: buffers[name].view.copy() for name in ("dq", "dk", "dv")}


def test_three_kernels_give_the_gradients_under_every_schedule(chain):
    """Within the bound of each; dk and dv, and dq where the kernel is deterministic, bit for bit as in order."""
    variant, _ = chain
    scale, window = softmax_scale(variant), window_of(CASE, variant.mask)
    q, k, v = (round_to(x, variant.dtype) for x in draw_inputs(CASE, variant.head_dim, variant.head_dim_v, 1))
    dout = round_to(draw_gradient(CASE, variant.head_dim_v, 1), variant.dtype)
    out, lse = forward_results(q, k, v, scale, window, variant.dtype)
    ref = reference_gradients(q, k, v, dout, scale, window)
    bounds = gradient_bounds(ref, same_dtype_gradients(q, k, v, dout, scale, window, variant.dtype), variant.dtype)
    found = [gradients_of(chain, (q, k, v, dout, out, lse), run) for run in RUNS]

    for one in found:
        values = {name: from_bits(bits, variant.dtype) for name, bits in one.items()}
        errors = gradient_errors(Gradients(**values), ref)
        assert all(errors[name] <= bounds[name] for name in errors), (errors, bounds)
        for name in ("dq", "dk", "dv") if variant.deterministic else ("dk", "dv"):
            assert (one[name] == found[0][name]).all(), name
