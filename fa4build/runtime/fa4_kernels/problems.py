"""What a call on tensors asks for: its problem, its device, its window. Shared by every function that takes tensors."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

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

Window = tuple[int | None, int | None]
NO_WINDOW: Window = (None, None)


def canonical_mask(causal: bool, window_size: Window) -> tuple[str, int, int]:
    """(mask, window_left, window_right) of a call: which kernel, and the numbers it gets.

    Contract: two negative sides mean no window; causal sets the right side to 0; (None, 0) is causal; anything else
        with a side is local. Sides are clipped to +-2^30. Source: fa4-kernels.md, section 1.2.
    """
    try:
        left, right = window_size
        if left is not None and right is not None and left < 0 and right < 0:
            left = right = None
        if causal:
            right = 0
        mask = "local" if left is not None or right not in (None, 0) else "causal" if right == 0 else "full"
        sides = (WINDOW_UNBOUNDED if side is None else int(side) for side in (left, right))
        left, right = (max(-WINDOW_UNBOUNDED, min(side, WINDOW_UNBOUNDED)) for side in sides)
    except (TypeError, ValueError) as error:
        raise InputError(f"window_size must be (left, right) of int or None, it is {window_size!r}") from error
    return mask, left, right


@lru_cache(maxsize=1024)
def mask_of(left: int, right: int) -> str:
    """The mask of a window as kernels take it."""
    return canonical_mask(False, window_size_of(left, right))[0]


def window_size_of(left: int, right: int) -> Window:
    """The window_size that canonical_mask brings to these numbers."""
    return None if left == WINDOW_UNBOUNDED else left, None if right == WINDOW_UNBOUNDED else right


def checked_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The scale of a call, 1 / sqrt(head_dim) if it names none. Raises: InputError unless positive and finite."""
    if softmax_scale is None:
        return float(head_dim**-0.5)
    if not (isinstance(softmax_scale, (int, float)) and 0 < softmax_scale < math.inf):
        raise InputError(f"softmax_scale must be a positive finite number, it is {softmax_scale!r}")
    return float(softmax_scale)


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
