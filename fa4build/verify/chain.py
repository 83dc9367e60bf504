"""Proof of a whole gradient in the PTX simulator: forward, preprocess, main kernel and postprocess one after the other.

The proof of each kernel alone (verify/simulated.py, verify/backward.py) hands it what a right predecessor would leave.
Here each gets what the one before has left; only q, k, v and the gradient of the output are drawn. The gradients are
compared with float64, under the bound of the main kernel's proof.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from fa4build.cases.backward import (
    Gradients,
    draw_gradient,
    gradient_bounds,
    gradient_errors,
    reference_gradients,
    same_dtype_gradients,
)
from fa4build.cases.bits import from_bits, to_bits
from fa4build.cases.forward import Case, draw_inputs, round_to, window_of
from fa4build.cases.of_variant import is_packed
from fa4build.cases.schedules import Run
from fa4build.errors import Fa4BuildError
from fa4build.matrix.axes import Variant
from fa4build.plan import plan_from_json
from fa4build.verify.backward import ROWS
from fa4build.verify.runs import Buffer, Ran, Request, execute, filled, poisoned, scalars_for, softmax_scale

# Two tiles of queries and three of keys with an edge each, two query heads on one key head; and less than a tile.
CASES = (
    Case(name="chain", seqlen_q=200, seqlen_k=300, num_heads_q=2, num_heads_kv=1, window=(150, 20)),
    Case(name="chain-small", batch=2, seqlen_q=33, seqlen_k=70, window=(20, 3)),
)
# (op, what it writes, what of it holds nothing yet)
_STEPS = (
    ("fwd", ("out", "lse"), ("out", "lse")),
    ("bwd_preprocess", ("dpsum", "lse_log2", "dq_accum", "dq_semaphore"), ("dpsum", "lse_log2", "dq_accum")),
    ("bwd", ("dk", "dv", "dq_accum", "dq_semaphore"), ("dk", "dv")),
    ("bwd_postprocess", ("gradient",), ("gradient",)),
)


def companions_of(variant: Variant) -> tuple[Variant, ...]:
    """The other kernels of a chain whose main kernel this is; none unless it is a dense backward without features."""
    if variant.op != "bwd" or is_packed(variant):
        return ()
    plain = dataclasses.replace(variant, deterministic=False, cta_group=1)
    preprocess = dataclasses.replace(plain, op="bwd_preprocess", mask="full")
    postprocess = dataclasses.replace(plain, op="bwd_postprocess", mask="full", head_dim_v=variant.head_dim)
    return dataclasses.replace(plain, op="fwd"), preprocess, postprocess


def prove_chain_case(
    variant: Variant, request: Request, case: Case, seed: int, runs: tuple[Run, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Runs of one chain up to the first bad one: a row of figures (`ratio` <= 1 is allowed), and what is wrong."""
    row = {"case": case.name, "seed": seed, "ratio": 0.0, "lse_error": 0.0, "warp_instructions": 0, "notes": ()}
    q, k, v = (round_to(x, variant.dtype) for x in draw_inputs(case, variant.head_dim, variant.head_dim_v, seed))
    dout = round_to(draw_gradient(case, variant.head_dim_v, seed), variant.dtype)
    scale, window = softmax_scale(variant), window_of(case, variant.mask)
    ref = reference_gradients(q, k, v, dout, scale, window)
    bounds = gradient_bounds(ref, same_dtype_gradients(q, k, v, dout, scale, window, variant.dtype), variant.dtype)
    for run in runs:
        where = f"{run.schedule} schedule, forward to postprocess"
        buffers = _buffers(variant, case, {"q": q, "k": k, "v": v, "dout": dout}, run)
        for op, writes, fresh in _STEPS:
            try:
                ran = _launch(variant, request, op, case, buffers, writes, fresh, run, seed)
            except Fa4BuildError as error:
                return row, (f"{where}: {op}: {error}",)
            row["warp_instructions"] += ran.warp_instructions
            row["notes"] = tuple(sorted({*row["notes"], *ran.notes}))
            if ran.faults:
                return row, tuple(f"{where}: {op}: {fault}" for fault in ran.faults)
        found = Gradients(**{name: from_bits(buffers[name].view, variant.dtype) for name in ("dq", "dk", "dv")})
        errors = gradient_errors(found, ref)
        row["ratio"] = max(row["ratio"], *(errors[name] / bounds[name] for name in errors))
        wrong = [
            f"{where}: {name} is off by {error:.3g}; {bounds[name]:.3g} is allowed"
            for name, error in errors.items()
            if not error <= bounds[name]
        ]
        if wrong:
            return row, tuple(wrong)
    return row, ()


def _buffers(variant: Variant, case: Case, drawn: Mapping[str, np.ndarray], run: Run) -> dict[str, Buffer]:
    """All tensors of the four kernels by argument name; everything but the inputs is NaN."""
    rows = -(-case.seqlen_q // ROWS) * ROWS
    per_row = (case.batch, case.num_heads_q, rows)
    words = {"dpsum": per_row, "lse_log2": per_row, "dq_accum": (*per_row, variant.head_dim)}
    words |= {"dq_semaphore": (*per_row[:2], rows // ROWS), "lse": (*per_row[:2], case.seqlen_q)}
    halves = {f"d{name}": drawn[name].shape for name in "qkv"} | {"out": drawn["dout"].shape}
    buffers = {name: filled(to_bits(x, variant.dtype), run.padded) for name, x in drawn.items()}
    buffers |= {name: poisoned(shape, np.uint32, run.padded) for name, shape in words.items()}
    buffers |= {name: poisoned(shape, np.uint16, run.padded) for name, shape in halves.items()}
    return buffers | {"accumulator": buffers["dq_accum"], "gradient": buffers["dq"]}


_plan = functools.lru_cache(maxsize=8)(plan_from_json)


def _launch(
    variant: Variant,
    request: Request,
    op: str,
    case: Case,
    buffers: Mapping[str, Buffer],
    writes: tuple[str, ...],
    fresh: tuple[str, ...],
    run: Run,
    seed: int,
) -> Ran:
    """One kernel of the chain on the tensors it takes."""
    link = next((link for link in request.chain if link.op == op), None)
    if link is not None:
        request = dataclasses.replace(request, ptx=link.ptx, plan=link.plan, registers=link.registers)
    plan = _plan(request.plan)
    own = {arg.name: buffers[arg.name] for arg in plan.args if arg.kind == "tensor"}
    scalars = scalars_for(variant, case, run) | {"scale": softmax_scale(variant)}
    return execute(request, plan, own, writes, scalars, run, seed, fresh)
