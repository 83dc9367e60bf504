"""The interface of FlashAttention-3 (flash-attn-3, module `flash_attn_interface`): names, order, defaults and results.

Its meaning: as FlashAttention-2 for windows and alignment; out alone is returned, or (out, lse) with return_attn_probs;
the lse of a row that sees no key is -inf. `qv` and `attention_chunk` are not served; `pack_gqa`, `sm_margin` and
`scheduler_metadata` are hints about speed, and not used.
"""

from typing import Any

import torch

from .. import api, packed
from ..calls import Arguments
from ..errors import InputError
from ..windows import Window, sides_without_negatives
from .cache import Cache, Query, attend
from .flash_attn_2 import given, new_rows, rotary_of
from .modules import original_of, served_as
from .raw import Results, backward_into, forward_into, refuse

Tensor = torch.Tensor
STACK = "flash_attn_interface"
_served = served_as(STACK)


@_served
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """q: (batch, seqlen_q, num_heads_q, head_dim), k, v: (batch, seqlen_k, num_heads_kv, ..).

    Returns: out, or (out, lse (batch, num_heads_q, seqlen_q)) with return_attn_probs.
    """
    refuse(qv=qv, attention_chunk=attention_chunk)
    rare = given(softcap=softcap, deterministic=deterministic)
    rare |= given(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    rare |= {} if num_splits == 1 else {"num_splits": num_splits}
    found = api.flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=sides_without_negatives(window_size),
        return_lse=bool(return_attn_probs), **rare,
    )  # fmt: skip
    return found if return_attn_probs else found[0]


@_served
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """qkv: (batch, seqlen, 3, num_heads, head_dim), or (batch, seqlen, heads of all, head_dim) with num_heads_q."""
    refuse(attention_chunk=attention_chunk)
    q, k, v = _unpacked(qkv, num_heads_q)
    rare = given(softcap=softcap, deterministic=deterministic)
    rare |= given(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    found = api.flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=sides_without_negatives(window_size),
        return_lse=bool(return_attn_probs), **rare,
    )  # fmt: skip
    return found if return_attn_probs else found[0]


def _unpacked(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    if qkv.dim() == 5:
        return qkv.unbind(2)
    if num_heads_q is None:
        raise InputError(f"qkv has shape {tuple(qkv.shape)}; with heads of q, k and v in one dimension say num_heads_q")
    num_heads_k = (qkv.shape[2] - num_heads_q) // 2
    return qkv.split((num_heads_q, num_heads_k, num_heads_k), 2)


@_served
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """q: (total_q, num_heads_q, head_dim), k, v: (total_k, num_heads_kv, ..).

    Returns: out, or (out, lse (num_heads_q, total_q)) with return_attn_probs.
    """
    refuse(qv=qv, attention_chunk=attention_chunk)
    found = packed.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k,
        softmax_scale=softmax_scale, causal=causal, window_size=sides_without_negatives(window_size), softcap=softcap,
        num_splits=num_splits, return_lse=bool(return_attn_probs),
        **given(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, deterministic=deterministic),
    )  # fmt: skip
    return found if return_attn_probs else found[0]


@_served
def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of parts of the keys: (num_splits, batch, seqlen, num_heads, ..)."""
    return packed.flash_attn_combine(out_partial, lse_partial, out, out_dtype)


@_served
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """q: (batch, seqlen_q, num_heads_q, head_dim), or (total_q, ..) with cu_seqlens_q; k, v: new rows, written into the
    cache behind `cache_seqlens`; see cache.py. There are no derivatives.

    Returns: out, or (out, lse, empty, empty) with return_softmax_lse: there are no results of parts to show.
    """
    refuse(qv=qv, attention_chunk=attention_chunk)
    sides = sides_without_negatives(window_size)
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    bound = max_seqlen_q if isinstance(max_seqlen_q, int) else q.shape[0]
    longest_q = q.shape[1] if cu_seqlens_q is None else bound
    has_left = sides[0] is not None and sides[0] < capacity - 1
    has_right = sides[1] is not None and sides[1] < longest_q - 1
    moves = bool(causal) or has_left or has_right
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "window_size": sides}
    options |= {"softcap": softcap, "num_splits": num_splits}
    options |= given(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    out, lse = attend(
        Query(q, cu_seqlens_q, max_seqlen_q, options, moves, bool(return_softmax_lse)),
        Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, page_table),
        new_rows(k, v, cu_seqlens_k_new),
        rotary_of(rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved),
    )
    return out if lse is None else (out, lse, lse.new_empty(0), lse.new_empty(0))


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """A list of the size that callers expect, int32 zeros: our kernels find their tiles themselves. Where calls may
    fall back, that of the installed package."""
    original = original_of(STACK, "get_scheduler_metadata")
    if original is not None:
        return original(
            batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype,
            headdim_v, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad, page_size, max_seqlen_k_new, causal, window_size,
            attention_chunk, has_softcap, num_splits, pack_gqa, sm_margin,
        )  # fmt: skip
    return torch.zeros(4 * (-(-batch_size // 4) * 4) + 1, dtype=torch.int32, device=cache_seqlens.device)


get_scheduler_metadata.is_of_fa4_kernels = True  # type: ignore[attr-defined]


# --- private functions that others call -------------------------------------------------------------------------------


@_served
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, empty, empty), out in `out_`: without derivatives. flash_attn_with_kvcache is what changes a cache."""
    refuse(k_new=k_new, v_new=v_new, qv=qv, attention_chunk=attention_chunk, kv_batch_idx=kv_batch_idx)
    refuse(leftpad_k=leftpad_k, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    window = sides_without_negatives((window_size_left, window_size_right))
    call = Arguments(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, None, max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, window, softcap, num_splits, True,
    )  # fmt: skip
    out, lse = forward_into(call, Results(out_), (q_descale, k_descale, v_descale))
    return out, lse, lse.new_empty(0), lse.new_empty(0)


@_served
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Writes dq, dk and dv. Returns: an empty tensor, in place of the row sums, which stay in a workspace."""
    window = sides_without_negatives((window_size_left, window_size_right))
    call = Arguments(
        q, k, v, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, None, None, max_seqlen_q, max_seqlen_k,
        softmax_scale, is_causal, window, softcap, 1, True,
    )  # fmt: skip
    backward_into(call, out, softmax_lse, dout, gradients=(dq, dk, dv), deterministic=bool(deterministic))
    return softmax_lse.new_empty(0)


_NAMES = (
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
)
MODULES = {"flash_attn_interface": _NAMES, "flash_attn_3.flash_attn_interface": _NAMES}
