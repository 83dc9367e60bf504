"""The numbers and switches of a call: one argument -> its checked value, or one InputError that names it.

Nothing is read from a device, so a tensor is never taken for a number.
"""

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from .errors import InputError

MAX_SPLITS = 256
_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def whole(name: str, value: Any) -> int:
    """An int, or what stands for one (numpy's, torch.SymInt). Raises: InputError for a bool, a float, a tensor."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, (bool, torch.Tensor)) or not hasattr(value, "__index__"):
        hint = ", which would have to be read from its device" if isinstance(value, torch.Tensor) else ""
        raise InputError(f"{name} must be made of ints, {value!r} is a {type(value).__name__}{hint}")
    return operator.index(value)


def checked_flag(name: str, value: Any) -> bool:
    """True or False; 0 and 1 stand for them. Raises: InputError for anything else, as a text or a tensor."""
    if value is True or value is False or isinstance(value, torch.SymBool):
        return bool(value)
    if isinstance(value, torch.Tensor) or type(value).__name__ not in ("bool", "bool_", "int") or value not in (0, 1):
        raise InputError(f"{name} must be True or False, it is {_shown(value)}")
    return bool(value)


def checked_number(name: str, value: Any, *, allowed: str, fits: Callable[[float], bool]) -> float:
    """A float, from an int, a float or numpy's. Raises: InputError for a bool, a tensor, or what does not fit."""
    is_number = isinstance(value, (int, float, torch.SymFloat, torch.SymInt)) or _is_numpy_number(value)
    if isinstance(value, bool) or not is_number or not fits(value):
        hint = "; a tensor would have to be read from its device" if isinstance(value, torch.Tensor) else ""
        raise InputError(f"{name} must be {allowed}, it is {_shown(value)}{hint}")
    return value if isinstance(value, (torch.SymFloat, torch.SymInt)) else float(value)


def _is_numpy_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and type(value).__module__ == "numpy" and "bool" not in type(value).__name__


def _shown(value: Any) -> str:
    """A value in a message; of a tensor what it is, since its numbers may lie on a device."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return repr(value)


def default_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim): the scale of a call that names none. Raises: InputError for a head without columns."""
    if head_dim < 1:
        raise InputError(f"head_dim of q and k is {head_dim}; at least 1 is expected")
    return 1.0 / math.sqrt(head_dim)


def checked_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The scale of a call, 1 / sqrt(head_dim) if it names none. Raises: InputError unless positive and finite."""
    if softmax_scale is None:
        return default_scale(head_dim)
    allowed = "a positive finite number that float32 holds"
    return checked_number("softmax_scale", softmax_scale, allowed=allowed, fits=lambda scale: _LEAST <= scale <= _MOST)


def checked_softcap(softcap: float | None) -> float:
    """The cap of a call, 0 for none. Raises: InputError for a number below 0, and for one that float32 does not hold:
    kernels divide by it."""
    if softcap is None or (softcap == 0 and type(softcap) in (int, float)):
        return 0.0
    allowed = "a finite number of at least 0 that float32 holds (0: none)"
    return checked_number("softcap", softcap, allowed=allowed, fits=lambda cap: cap == 0 or _LEAST <= cap <= _MOST)


def checked_splits(num_splits: int) -> int:
    """The number as asked for. Raises: InputError unless it is an int of at most MAX_SPLITS."""
    if not isinstance(num_splits, int) or isinstance(num_splits, bool) or num_splits > MAX_SPLITS:
        raise InputError(f"num_splits must be an int up to {MAX_SPLITS} (below 1: chosen here), it is {num_splits!r}")
    return num_splits


def checked_bound(name: str, value: Any) -> int | None:
    """A bound of lengths that a caller knows, or None.

    A tensor of one element is taken for unknown: some callers have it on the GPU, where reading it would wait for the
    device and break the capture of a graph. Raises: InputError for a negative number, a bool, or another tensor.
    """
    if value is None or (isinstance(value, torch.Tensor) and value.dim() == 0):
        return None
    if isinstance(value, torch.Tensor):
        raise InputError(f"{name} is {_shown(value)}; an int, or a tensor without dimensions, is expected")
    bound = whole(name, value)
    if bound < 0:
        raise InputError(f"{name} must be at least 0, it is {bound}")
    return bound


def refuse_positional(function: str, accepted: str, names: tuple[str, ...], given: tuple[Any, ...]) -> NoReturn:
    """The error of arguments that are passed by position where releases of flash-attention differ in their order."""
    named = ", ".join(f"{name}=.." for name in names[: len(given)])
    raise InputError(
        f"{function} takes {accepted} by position; what follows has another order in each release of flash-attention. "
        f"Pass the other {len(given)} by name. As they are ordered here: {named}"
    )
