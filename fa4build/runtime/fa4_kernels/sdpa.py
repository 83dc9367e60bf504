"""A stand-in for torch.nn.functional.scaled_dot_product_attention, with its arguments and its layout."""

import torch

from .api import flash_attn_func
from .errors import InputError
from .scalars import checked_flag
from .windows import top_left


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(scale * query key^T + mask) value; differentiable.

    Args:
        query: (batch, num_heads_q, seqlen_q, head_dim); key, value: (batch, num_heads_kv, seqlen_k, ..).
        attn_mask, dropout_p: must be None and 0.
        is_causal: query i sees keys 0..i (aligned top left, as in torch).
        scale: default 1 / sqrt(head_dim). enable_gqa: allows num_heads_kv to be a divisor of num_heads_q.
    Returns: (batch, num_heads_q, seqlen_q, head_dim_v), a transposed view of a contiguous tensor.
    Raises: as flash_attn_func; InputError for a mask, dropout or heads that differ without enable_gqa.
    """
    if attn_mask is not None:
        raise InputError("attn_mask is given; the kernels take is_causal or no mask. Pass attn_mask=None.")
    if dropout_p:
        raise InputError(f"dropout_p is {dropout_p}; the kernels have no dropout. Pass 0.")
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise InputError(
            f"query has {query.dim()}, key {key.dim()} and value {value.dim()} dimensions; "
            "(batch, num_heads, seqlen, head_dim) is expected"
        )
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise InputError(
            f"query has {query.shape[1]} heads, key has {key.shape[1]}; pass enable_gqa=True if heads share keys"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal, window = top_left(checked_flag("is_causal", is_causal), q.shape[1], k.shape[1])
    out, _ = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, window_size=window)
    return out.transpose(1, 2)
