"""Who in torch wants to see a call, or changes what it computes: modes, transforms, tensors of other types, tangents,
autocast.

A call that nobody looks at is served at once, mostly in C, past torch's dispatcher. Any other becomes an operator of
torch (ops.py), which modes, transforms and subclasses of Tensor know how to treat.
"""

from typing import Any

import torch
from torch.autograd import forward_ad

from .errors import NoKernelError

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CAST = (torch.float32, torch.bfloat16, torch.float16)


def _none() -> int:
    return 0


_num_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", _none)
_num_function_modes = getattr(torch._C, "_len_torch_function_stack", _none)
_is_any_autocast_enabled = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)
_transform = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)
_is_transformed = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda x: False)


def _only_default_devices(tensor: object = None) -> bool:
    """Whether every function mode is torch.set_default_device's, which concerns functions that make tensors alone."""
    from torch.utils._device import DeviceContext

    modes = (torch._C._get_function_stack_at(i) for i in range(_num_function_modes()))
    return all(type(mode) is DeviceContext for mode in modes)


def _autocast_keeps(tensor: torch.Tensor) -> bool:
    """Whether autocast leaves a tensor as it is."""
    kind = tensor.device.type
    return not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) == tensor.dtype


OBSERVERS = (
    (_num_dispatch_modes, None),
    (_num_function_modes, _only_default_devices),
    (_is_any_autocast_enabled, _autocast_keeps),
)
"""For the launcher, which leaves a call to Python while one counts it (`Observers` in _launcher.pyi)."""

LEVELS = forward_ad
"""For the launcher: has `_current_level`, at least 0 while tensors may have tangents."""


def is_observed(*tensors: Any) -> bool:
    """Whether a call with these tensors is to be an operator of torch. Not asked inside torch.compile."""
    if _num_dispatch_modes():
        from . import flops

        flops.register()
        return True
    if _num_function_modes() and not _only_default_devices():
        return True
    for x in tensors:
        if type(x) not in _PLAIN and isinstance(x, torch.Tensor):
            return True
    return False


def may_keep() -> bool:
    """Whether a tensor made now is a plain one that later calls can use."""
    return not (torch.compiler.is_compiling() or _num_dispatch_modes() or _transform() is not None)


def may_be_transformed() -> bool:
    """Whether a tensor can have a tangent now, or be inside a transform: whether `refuse_transforms` looks."""
    return not torch.compiler.is_compiling() and (_transform() is not None or forward_ad._current_level >= 0)


def refuse_transforms(**tensors: Any) -> None:
    """Raises NoKernelError, a NotImplementedError, for tensors within a transform of torch.func, and for tangents.

    Inside torch.compile the operator refuses them.
    """
    if not may_be_transformed():
        return
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            continue
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise NoKernelError(
                f"{name} has a tangent, and no kernel computes forward-mode derivatives. Use backward(), or take the "
                "tangent off: torch.autograd.forward_ad.unpack_dual(x).primal"
            )
        if _is_transformed(x):
            raise NoKernelError(
                f"{name} is inside torch.func.vmap, grad or another transform, which no kernel knows. For vmap put its "
                "dimension into the batch; for gradients use torch.autograd.grad or backward()"
            )


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors as torch's scaled_dot_product_attention takes them under torch.autocast: bf16, fp16 and float32 in
    the dtype that it asks for. Others, and all without autocast, as they are."""
    first = tensors[0]
    if not isinstance(first, torch.Tensor) or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in _CAST else x for x in tensors)
