"""Forward and backward without derivatives, into tensors that the caller may have made: what the private functions of
flash-attention's interfaces are.
"""

from typing import NamedTuple

import torch

from ..attention import backward, forward, run_operator
from ..calls import NO_FACTORS, Arguments, Call, Factors, call_of
from ..errors import InputError, LayoutError, NoKernelError
from ..windows import Offsets

Tensor = torch.Tensor


class Results(NamedTuple):
    """Where a forward writes; None for what is to be made. Shapes as flash_attn_varlen_func returns them."""

    out: Tensor | None = None
    lse: Tensor | None = None


def refuse(**arguments: object) -> None:
    """Raises NoKernelError for arguments that no kernel here knows; None, False, 0 and 0.0 ask for nothing."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) or value:
            shown = "" if isinstance(value, torch.Tensor) or callable(value) else f" = {value!r}"
            raise NoKernelError(
                f"{name}{shown}: no kernel of fa4-kernels takes it. Leave it out, or provide(.., fallback=True)"
            )


def forward_into(
    given: Arguments, results: Results, descales: Factors = NO_FACTORS, window: Offsets | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call, in `results` where they are given. Nothing is recorded for derivatives.

    Raises: InputError, NoKernelError before anything is launched.
    """
    with torch.no_grad():
        call = call_of(given, descales, False, window=window)
        if call.is_for_operator:
            out, lse = run_operator(call)
        else:
            out, lse = _forward(call, Results() if call.batch_shape else results)
        out, lse = call.as_given(out, lse)
        return _kept_or_copied("out", out, results.out), _kept_or_copied("lse", lse, results.lse)


def _forward(call: Call, results: Results) -> tuple[Tensor, Tensor]:
    """Written where it is wanted, if kernels take those strides."""
    if results.out is None:
        return forward(call)
    q = call.q
    out_dtype = torch.bfloat16 if q.element_size() == 1 else q.dtype
    _check("out", results.out, call.out_shape, out_dtype, q.device)
    _check("lse", results.lse, call.lse_shape, torch.float32, q.device)
    try:
        lse = q.new_empty(call.lse_shape, dtype=torch.float32) if results.lse is None else results.lse
        return forward(call, (results.out, lse))
    except LayoutError:
        return forward(call)


def _check(name: str, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if given is not None and (given.shape != shape or given.dtype != dtype or given.device != device):
        raise InputError(
            f"{name} is {given.dtype} {tuple(given.shape)} on {given.device}; {dtype} {tuple(shape)} on {device} is "
            "expected"
        )


def _kept_or_copied(name: str, made: Tensor, given: Tensor | None) -> Tensor:
    if given is None or given is made:
        return made
    _check(name, given, tuple(made.shape), made.dtype, made.device)
    return given.copy_(made)


def backward_into(
    given: Arguments,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    deterministic: bool = False,
    window: Offsets | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in the shapes of q, k, v, in `gradients` where they are given, and the sink's gradient or None.

    Args: out, lse, dout, dlse: in the shapes that the forward returned.
    Raises: InputError, NoKernelError before anything is launched.
    """
    with torch.no_grad():
        call = call_of(given, NO_FACTORS, deterministic, window=window)
        shape = (*given.q.shape[:-1], given.v.shape[-1])
        _check("out", out, shape, given.q.dtype, given.q.device)
        _check("dout", dout, shape, given.q.dtype, given.q.device)
        if call.batch_shape is not None:
            (out, lse), dout = call.as_launched(out, lse), dout.flatten(0, 1)
            dlse = None if dlse is None else dlse.transpose(0, 1).flatten(1)
        _check("lse", lse, call.lse_shape, torch.float32, given.q.device)
        _check("dlse", dlse, call.lse_shape, torch.float32, given.q.device)
        inputs = (given.q, given.k, given.v)
        for name, into, like in zip(("dq", "dk", "dv"), gradients, inputs, strict=True):
            _check(name, into, tuple(like.shape), like.dtype, like.device)
        found = _gradients(call, (out, lse.contiguous()), (dout, dlse), gradients)
        made = (x.view(like.shape) for x, like in zip(found[:3], inputs, strict=True))
        dq, dk, dv = (_in(x, into) for x, into in zip(made, gradients, strict=True))
        return dq, dk, dv, found[3]


def _in(made: Tensor, given: Tensor | None) -> Tensor:
    if given is None:
        return made
    return given if given.data_ptr() == made.data_ptr() else given.copy_(made)


def _gradients(
    call: Call,
    results: tuple[Tensor, Tensor],
    tangents: tuple[Tensor, Tensor | None],
    into: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Written where they are wanted, if kernels take those strides."""
    dq, dk, dv = into
    if dq is not None and dk is not None and dv is not None and dq.dim() == call.q.dim():
        try:
            return backward(call, results, *tangents, (dq, dk, dv))
        except LayoutError:
            pass
    return backward(call, results, *tangents)
