"""Attention as operators of torch.library, which torch.compile can put into a graph without looking inside.

`torch.ops.fa4_kernels.attention(q, k, v, softmax_scale, window_left, window_right, deterministic) -> (out, lse)` and
`torch.ops.fa4_kernels.attention_backward(...) -> (dq, dk, dv)`. Windows are plain integers, 2^30 for a side without a
bound: (2^30, 0) is causal, (2^30, 2^30) no mask.

`torch.ops.fa4_kernels.general_attention(q, k, v, cu_seqlens_q, ..., softcap, ...) -> (out, lse)` is the same with every
layout and feature; `general_attention_backward` also returns the gradient of the sink.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from .abi import OUTPUT_DTYPES
from .errors import NoKernelError

NAMESPACE = "fa4_kernels"
_ARGUMENTS = "float softmax_scale, SymInt window_left, SymInt window_right, bool deterministic"
_FORWARD = f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)

_LISTS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? page_table, Tensor? seqused_q, Tensor? seqused_k"
_GENERAL = (
    f"(Tensor q, Tensor k, Tensor v, {_LISTS}, Tensor? sink, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    f"{_ARGUMENTS}, float softcap, int num_splits, SymInt? max_seqlen_q, SymInt? max_seqlen_k) -> (Tensor, Tensor)"
)
_GENERAL_BACKWARD = (
    f"(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_LISTS}, Tensor? sink, "
    f"{_ARGUMENTS}, float softcap) -> (Tensor, Tensor, Tensor, Tensor)"
)

_library = torch.library.Library(NAMESPACE, "DEF")


def define(forward: Callable[..., Any], backward: Callable[..., Any], dtypes: dict[torch.dtype, str]) -> None:
    """Register both operators, what they return without running, and the derivative of the first. Called once.

    Args: forward, backward: do the work, with the operators' own arguments. dtypes: torch's types -> ours.
    """
    _library.define("attention" + _FORWARD)
    _library.define("attention_backward" + _BACKWARD)
    _library.impl("attention", forward, "CompositeExplicitAutograd")
    _library.impl("attention_backward", backward, "CompositeExplicitAutograd")
    outputs = {torch_dtype: OUTPUT_DTYPES[name] for torch_dtype, name in dtypes.items()}
    by_name = {name: torch_dtype for torch_dtype, name in dtypes.items()}

    def fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
        batch, seqlen_q, num_heads, _head_dim = q.shape
        out = q.new_empty((batch, seqlen_q, num_heads, v.shape[3]), dtype=by_name[outputs[q.dtype]])
        return out, q.new_empty((batch, num_heads, seqlen_q), dtype=torch.float32)

    def fake_backward(
        dout: object, dlse: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
    ) -> tuple[torch.Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in (q, k, v))

    torch.library.register_fake(f"{NAMESPACE}::attention", fake_forward, lib=_library)
    torch.library.register_fake(f"{NAMESPACE}::attention_backward", fake_backward, lib=_library)
    torch.library.register_autograd(f"{NAMESPACE}::attention", _derivative, setup_context=_remember, lib=_library)
    torch.library.register_autograd(f"{NAMESPACE}::attention_backward", _no_second_derivative, lib=_library)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _derivative(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    nothing = (None,) * len(ctx.options)
    if dout is None and dlse is None:
        return (None, None, None, *nothing)
    backward = torch.ops.fa4_kernels.attention_backward
    return (*backward(dout, dlse, *ctx.saved_tensors, *ctx.options), *nothing)


def _no_second_derivative(ctx: Any, *gradients: object) -> NoReturn:
    raise NoKernelError(
        "a second derivative of attention is asked for (create_graph=True), and no kernel computes it. Use "
        "torch.nn.functional.scaled_dot_product_attention with the math backend for this part of the model."
    )


# --- every layout and feature -----------------------------------------------------------------------------------------

_NUM_LISTS = 5


def define_general(forward: Callable[..., Any], backward: Callable[..., Any], dtypes: dict[torch.dtype, str]) -> None:
    """Register the two general operators like `define` does the plain ones. Called once."""
    _library.define("general_attention" + _GENERAL)
    _library.define("general_attention_backward" + _GENERAL_BACKWARD)
    _library.impl("general_attention", forward, "CompositeExplicitAutograd")
    _library.impl("general_attention_backward", backward, "CompositeExplicitAutograd")
    by_name = {name: torch_dtype for torch_dtype, name in dtypes.items()}

    def fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=by_name[OUTPUT_DTYPES[dtypes[q.dtype]]])
        *batch, rows, num_heads, _head_dim = q.shape
        return out, q.new_empty((*batch, num_heads, rows), dtype=torch.float32)

    def fake_backward(
        dout: object, dlse: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...]:
        has_sink = rest[2 + _NUM_LISTS] is not None
        dsink = q.new_empty((q.shape[-2] if has_sink else 0,), dtype=torch.float32)
        return (*(x.new_empty(x.shape) for x in (q, k, v)), dsink)

    name = f"{NAMESPACE}::general_attention"
    torch.library.register_fake(name, fake_forward, lib=_library)
    torch.library.register_fake(f"{name}_backward", fake_backward, lib=_library)
    torch.library.register_autograd(name, _general_derivative, setup_context=_remember_general, lib=_library)
    torch.library.register_autograd(f"{name}_backward", _no_second_derivative, lib=_library)


def _remember_general(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *rest = inputs
    lists, sink, numbers = rest[:_NUM_LISTS], rest[_NUM_LISTS], rest[_NUM_LISTS + 4 :]
    ctx.num_inputs, ctx.numbers = len(inputs), numbers[:5]
    ctx.save_for_backward(q, k, v, *output, *lists, sink)
    ctx.set_materialize_grads(False)


def _general_derivative(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    gradients: list[torch.Tensor | None] = [None] * ctx.num_inputs
    if dout is None and dlse is None:
        return tuple(gradients)
    saved = ctx.saved_tensors
    dq, dk, dv, dsink = torch.ops.fa4_kernels.general_attention_backward(dout, dlse, *saved, *ctx.numbers)
    gradients[:3] = dq, dk, dv
    if saved[-1] is not None:
        gradients[3 + _NUM_LISTS] = dsink
    return tuple(gradients)
