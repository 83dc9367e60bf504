"""The backward pass as a recipe of three launches: preprocess, main, postprocess. Argument lists: docs/formats.md.

Workspaces come from torch's allocator and go back to it, ordered by the stream. Nothing here decides which kernels run.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from .dispatch import Problem
from .errors import LayoutError
from .loader import Runtime

_ROWS = 128  # of one tile of the workspaces


class BackwardLaunches(NamedTuple):
    """The kernels of one configuration on one device, and what their calls need beside tensors.

    `new_floats` and `new_integers` allocate float32 and int32 tensors on the device.
    """

    preprocess: Callable[..., Any]
    main: Callable[..., Any]
    postprocess: Callable[..., Any]
    num_sms: int
    new_floats: Callable[..., torch.Tensor]
    new_integers: Callable[..., torch.Tensor]


def load_backward(runtime: Runtime, problem: Problem, ordinal: int, device: torch.device) -> BackwardLaunches:
    """Load the three kernels for a problem with op `bwd`. Raises: as Runtime.launch_for."""
    helper = replace(problem, mask="full", deterministic=False)
    problems = (
        replace(helper, op="bwd_preprocess"),
        problem,
        replace(helper, op="bwd_postprocess", head_dim_v=problem.head_dim),
    )
    preprocess, main, postprocess = (runtime.launch_for(each, ordinal).run for each in problems)
    new_floats = torch.empty(0, dtype=torch.float32, device=device).new_empty
    new_integers = torch.empty(0, dtype=torch.int32, device=device).new_empty
    num_sms = runtime.device(ordinal).sm_count
    return BackwardLaunches(preprocess, main, postprocess, num_sms, new_floats, new_integers)


def compute_gradients(
    launches: BackwardLaunches,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    softmax_scale: float,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, contiguous, with the shapes and dtype of q, k, v.

    Args:
        tensors: q, k, v, and the forward's out and lse.
        dout, dlse: gradients of out and lse; None means zeros.
        window: (window_left, window_right) as the kernels take it.
    Contract: launches on the current stream. Inputs that a kernel cannot read where they lie are copied.
    Source: d lse / d s = p, so dlse enters where dpsum leaves: ds = p * (dp - (dpsum - dlse)).
    """
    q, k, v, out, lse = tensors
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    batch, seqlen_q, num_heads, head_dim = q.shape
    if not (q.numel() and k.numel() and v.numel()) or sum(window) < 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return dq, dk, dv
    dout = torch.zeros_like(out) if dout is None else dout
    rounded = -(-seqlen_q // _ROWS) * _ROWS
    dpsum = launches.new_floats(batch, num_heads, rounded)
    lse_log2 = launches.new_floats(batch, num_heads, rounded)
    dq_accum = launches.new_floats(batch, num_heads, rounded, head_dim)
    semaphore = launches.new_integers(batch, num_heads, rounded // _ROWS)

    inputs = [out, dout, lse]
    run_copying(launches.preprocess, inputs, (dpsum, lse_log2, dq_accum, semaphore))
    if dlse is not None:
        dpsum[:, :, :seqlen_q].sub_(dlse)
    run_copying(
        launches.main,
        [q, k, v, inputs[1]],
        (dpsum, lse_log2, dq_accum, semaphore, dk, dv, softmax_scale, *window, launches.num_sms),
    )
    launches.postprocess(dq_accum, dq, softmax_scale)
    return dq, dk, dv


def run_copying(run: Callable[..., Any], inputs: list[torch.Tensor], rest: tuple[Any, ...]) -> None:
    """Launch with those of `inputs` copied that the kernel cannot read where they lie; the list keeps the copies."""
    for _ in range(len(inputs) + 1):
        try:
            run(*inputs, *rest)
        except LayoutError as error:
            if error.position >= len(inputs):
                raise
            tensor = inputs[error.position]
            inputs[error.position] = tensor.clone(memory_format=torch.contiguous_format)
        else:
            return
    raise AssertionError("a fresh contiguous tensor was refused")
