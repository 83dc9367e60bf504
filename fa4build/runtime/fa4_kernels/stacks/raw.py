"""Forward and backward without derivatives, into tensors that the caller may have made: what the private functions of
flash-attention's interfaces are.
"""

from typing import NamedTuple

import torch

from .. import answers, general, packed
from ..errors import InputError, LayoutError, NoKernelError
from ..problems import Offsets

Tensor = torch.Tensor
Factors = tuple[Tensor | None, Tensor | None, Tensor | None]


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
    given: answers.Arguments, results: Results, descales: Factors = packed.NO_FACTORS, offsets: Offsets | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call, in `results` where they are given. Nothing is recorded for derivatives.

    Raises: InputError, NoKernelError before anything is launched.
    """
    with torch.no_grad():
        call, batch_shape = packed.prepared(given, descales, offsets)
        if packed.is_for_operator(call):
            out, lse = packed.run_operator(call, False)
        elif batch_shape is None and results.out is not None and results.lse is not None:
            _check_results(call, results)
            try:
                return general.forward(call, (results.out, results.lse))
            except LayoutError:
                out, lse = general.forward(call)
        else:
            out, lse = general.forward(call)
        if batch_shape is not None:
            out, lse = out.unflatten(0, batch_shape), lse.unflatten(1, batch_shape).transpose(0, 1)
        return _kept_or_copied("out", out, results.out), _kept_or_copied("lse", lse, results.lse)


def _check_results(call: general.Call, results: Results) -> None:
    """What the launcher does not see before it writes: that the shapes and types are those of the call."""
    q, is_dense = call.q, call.lists.layout == "dense"
    rows = (q.shape[0], q.shape[2], q.shape[1]) if is_dense else (q.shape[1], q.shape[0])
    out_dtype = torch.bfloat16 if q.element_size() == 1 else q.dtype
    _check("out", results.out, (*q.shape[:-1], call.v.shape[-1]), out_dtype, q.device)
    _check("lse", results.lse, rows, torch.float32, q.device)


def _check(name: str, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if given is not None and (given.shape != shape or given.dtype != dtype or given.device != device):
        raise InputError(
            f"{name} is {given.dtype} {tuple(given.shape)} on {given.device}; {dtype} {tuple(shape)} on {device} is "
            "expected"
        )


def _kept_or_copied(name: str, made: Tensor, given: Tensor | None) -> Tensor:
    if given is None:
        return made
    _check(name, given, tuple(made.shape), made.dtype, made.device)
    return given.copy_(made)


def backward_into(
    given: answers.Arguments,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    deterministic: bool = False,
    offsets: Offsets | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in the shapes of q, k, v, in `gradients` where they are given, and the sink's gradient or None.

    Args: out, lse, dout, dlse: in the shapes that the forward returned.
    Raises: InputError, NoKernelError before anything is launched.
    """
    with torch.no_grad():
        call, batch_shape = packed.prepared(given, packed.NO_FACTORS, offsets)
        shape = (*given.q.shape[:-1], given.v.shape[-1])
        for name, x in (("out", out), ("dout", dout)):
            _check(name, x, shape, given.q.dtype, given.q.device)
        if batch_shape is not None:
            out, dout = out.flatten(0, 1), dout.flatten(0, 1)
            lse, dlse = (None if x is None else x.transpose(0, 1).flatten(1) for x in (lse, dlse))  # type: ignore[assignment]
        inputs = (given.q, given.k, given.v)
        for name, x, like in zip(("dq", "dk", "dv"), gradients, inputs, strict=True):
            _check(name, x, tuple(like.shape), like.dtype, like.device)
        found = _gradients(call, (out, lse.contiguous()), (dout, dlse), gradients, deterministic)
        made = (x.view(like.shape) for x, like in zip(found[:3], inputs, strict=True))
        dq, dk, dv = (_in(x, into) for x, into in zip(made, gradients, strict=True))
        return dq, dk, dv, found[3]


def _in(made: Tensor, given: Tensor | None) -> Tensor:
    if given is None:
        return made
    return given if given.data_ptr() == made.data_ptr() else given.copy_(made)


def _gradients(
    call: general.Call,
    results: tuple[Tensor, Tensor],
    tangents: tuple[Tensor, Tensor | None],
    into: tuple[Tensor | None, Tensor | None, Tensor | None],
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Written where they are wanted, if kernels take those strides."""
    dq, dk, dv = into
    if dq is not None and dk is not None and dv is not None and dq.dim() == call.q.dim():
        try:
            return general.backward(call, *results, *tangents, deterministic=deterministic, gradients=(dq, dk, dv))
        except LayoutError:
            pass
    return general.backward(call, *results, *tangents, deterministic=deterministic)
