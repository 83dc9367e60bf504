"""Attention as a differentiable function of torch, for eager mode; for torch.compile see ops.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .gradients import BackwardLaunches, compute_gradients
from .observers import is_observed
from .windows import Offsets


class Attention(torch.autograd.Function):
    """out, lse = Attention.apply(q, k, v, forward, launches, softmax_scale, window, deterministic, lse_has_gradient).

    Args:
        forward: (q, k, v) -> (out, lse), called without gradients.
        launches: kernels of the backward pass.
        window: as the kernels take it.
        lse_has_gradient: False marks lse as not differentiable.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        forward: Callable[..., Any],
        launches: BackwardLaunches,
        softmax_scale: float,
        window: Offsets,
        deterministic: bool,
        lse_has_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.launches, ctx.softmax_scale, ctx.window, ctx.deterministic = launches, softmax_scale, window, deterministic
        ctx.set_materialize_grads(False)
        if not lse_has_gradient:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        nothing = (None,) * 6
        if dout is None and dlse is None:
            return (None, None, None, *nothing)
        if is_observed(*ctx.saved_tensors, dout, dlse):
            backward = torch.ops.fa4_kernels.attention_backward
            numbers = (ctx.softmax_scale, *ctx.window, ctx.deterministic)
            return (*backward(dout, dlse, *ctx.saved_tensors, *numbers), *nothing)
        *gradients, _ = compute_gradients(ctx.launches, ctx.saved_tensors, dout, dlse, ctx.softmax_scale, ctx.window)
        return (*gradients, *nothing)
