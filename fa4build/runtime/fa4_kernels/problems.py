"""What a call on tensors asks for: its problem, its device, its window. Shared by every function that takes tensors."""

import math
import numbers
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch

from . import loader
from .abi import WINDOW_UNBOUNDED
from .dispatch import Problem
from .errors import InputError

DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
"""torch's types -> how kernels name them."""

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max

Window = tuple[int | None, int | None]
NO_WINDOW: Window = (None, None)


class Offsets(NamedTuple):
    """A window as kernels take it: how far a query sees to each side of its diagonal. 2^30 is unbounded, a negative
    number an offset like any other. For callers within the package, and for front doors whose own meaning is this."""

    left: int
    right: int


def canonical_mask(causal: bool, window_size: Window | Offsets) -> tuple[str, int, int]:
    """(mask, window_left, window_right) of a call: which kernel, and the numbers it gets.

    Contract: None and -1 are sides without a bound, as in FlashAttention-2 and 3 and in torch; two negative sides mean
        no window; causal sets the right side to 0; (None, 0) is causal; anything else with a side is local. Sides are
        clipped to 2^30. Source: fa4-kernels.md, section 1.2.
    Raises: InputError for another negative number, which is unbounded to some and an offset to others, and for a side
        that is no int.
    """
    checked_flag("causal", causal)
    if isinstance(window_size, Offsets):
        left, right = (max(-WINDOW_UNBOUNDED, min(side, WINDOW_UNBOUNDED)) for side in window_size)
    else:
        left, right = _sides(window_size)
        right = 0 if causal else right
    if left != WINDOW_UNBOUNDED or right not in (0, WINDOW_UNBOUNDED):
        return "local", left, right
    return ("full" if right else "causal"), left, right


def _sides(window_size: Window) -> tuple[int, int]:
    try:
        left, right = (None if side is None else _whole("window_size", side) for side in window_size)
    except (TypeError, ValueError) as error:
        raise InputError(f"window_size must be (left, right) of int or None, it is {window_size!r}") from error
    if left is not None and right is not None and left < 0 and right < 0:
        return WINDOW_UNBOUNDED, WINDOW_UNBOUNDED
    for side in (left, right):
        if side is not None and side < -1:
            raise InputError(
                f"window_size is ({left}, {right}); a side is a number of keys from 0 on, or -1 or None for no bound. "
                "A window that lies beside the diagonal is no window here"
            )
    return _bounded(left), _bounded(right)


def _bounded(side: int | None) -> int:
    return WINDOW_UNBOUNDED if side is None or side == -1 else min(side, WINDOW_UNBOUNDED)


def _whole(name: str, value: Any) -> int:
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


def checked_bound(name: str, value: Any) -> int | None:
    """A bound of lengths that a caller knows, or None.

    A tensor of one element is taken for unknown: some callers have it on the GPU, where reading it would wait for the
    device and break the capture of a graph. Raises: InputError for a negative number, a bool, or another tensor.
    """
    if value is None or (isinstance(value, torch.Tensor) and value.dim() == 0):
        return None
    if isinstance(value, torch.Tensor):
        raise InputError(f"{name} is {_shown(value)}; an int, or a tensor without dimensions, is expected")
    bound = _whole(name, value)
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


@lru_cache(maxsize=1024)
def mask_of(left: int, right: int) -> str:
    """The mask of a window as kernels take it."""
    return canonical_mask(False, Offsets(left, right))[0]


def checked_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The scale of a call, 1 / sqrt(head_dim) if it names none. Raises: InputError unless positive and finite."""
    if softmax_scale is None:
        return float(head_dim**-0.5)
    allowed = "a positive finite number that float32 holds"
    return checked_number("softmax_scale", softmax_scale, allowed=allowed, fits=lambda scale: _LEAST <= scale <= _MOST)


def checked_softcap(softcap: float | None) -> float:
    """The cap of a call, 0 for none. Raises: InputError unless finite and at least 0."""
    allowed = "a finite number of at least 0 (0: none)"
    given = 0.0 if softcap is None else softcap
    return checked_number("softcap", given, allowed=allowed, fits=lambda cap: 0 <= cap < math.inf)


def problem_for(q: torch.Tensor, v: torch.Tensor, mask: str, **more: Any) -> Problem:
    """The problem of a call with these tensors. Raises: InputError for a dtype no kernel takes."""
    dtype = DTYPES.get(q.dtype)
    if dtype is None:
        allowed = ", ".join(str(dtype) for dtype in DTYPES)
        raise InputError(f"q is {q.dtype}; kernels take {allowed}. Convert q, k and v first.")
    return Problem(dtype=dtype, head_dim=q.shape[-1], head_dim_v=v.shape[-1], mask=mask, **more)


def ordinal_of(q: torch.Tensor) -> int:
    """CUDA ordinal of a tensor; 0 for CPU tensors where the runtime is for those."""
    if loader.serves_cpu():
        return 0
    if not q.is_cuda:
        raise InputError(f"q is on {q.device}; the kernels run on CUDA devices. Move q, k and v to one first.")
    return q.get_device()


def check_alike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """One dtype, one device: what the launcher checks when something is launched."""
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise InputError(f"{name} is {tensor.dtype}, q is {q.dtype}; q, k and v must have one dtype")
        if tensor.device != q.device:
            raise InputError(f"{name} is on {tensor.device}, q is on {q.device}; q, k and v must be on one device")


# Argument -> the axis a kernel must have been built with. Others, `return_lse` for one, ask for no other kernel.
_FEATURES = {
    "qv": "qv",
    "gather_kv_indices": "gather_kv_indices",
    "learnable_sink": "sink",
    "score_mod": "score_mod",
    "mask_mod": "mask_mod",
    "aux_tensors": "aux_tensors",
    "aux_scalars": "aux_scalars",
    "block_sparse_tensors": "block_sparsity",
    "score_mod_bwd": "score_mod",
    "block_sparse_tensors_bwd": "block_sparsity",
    "gather_bwd_token_chunk": "gather_kv_indices",
    "gather_bwd_recompute_p": "gather_kv_indices",
    "seqlen_k_per_split": "seqlen_k_per_split",
}
SERVED_FEATURES = frozenset({"sink", "softcap", "split"})
"""Features for which argument lists exist; whether a kernel does is the packs' business."""


def requested_features(options: Mapping[str, Any]) -> frozenset[str]:
    """The features that the arguments of a call ask for. Neutral values ask for none."""
    features = {axis for name, axis in _FEATURES.items() if options.get(name) is not None}
    features |= {"softcap"} if options.get("softcap") else set()
    features |= {"split"} if (options.get("num_splits") or 0) > 1 else set()
    return frozenset(features)
