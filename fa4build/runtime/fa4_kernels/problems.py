"""What tensors ask of the dispatcher: their problem, their device, their features."""

from collections.abc import Mapping
from typing import Any

import torch

from . import loader
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
