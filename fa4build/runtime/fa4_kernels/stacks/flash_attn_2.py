"""The interface of FlashAttention-2 (flash-attn 2.8.3): names, order, defaults and results of its functions.

Its meaning: -1 in a window is no bound; causal and windows are aligned bottom right; out alone is returned unless
probabilities are asked for, then (out, lse, an empty tensor), as without dropout there are none; the lse of a row that
sees no key is +inf. Dropout and ALiBi are not served.
"""

from typing import Any

import torch

from .. import api, packed
from ..calls import Arguments, check_list
from ..errors import InputError
from ..windows import Window, sides_without_negatives
from .cache import Cache, New, Query, Rotary, attend
from .modules import served_as
from .raw import Results, backward_into, forward_into, refuse

Tensor = torch.Tensor
STACK = "flash_attn"
_served = served_as(STACK)


def given(**options: Any) -> dict[str, Any]:
    """Those that ask for something: a call without rare options is answered sooner. `deterministic` = False is a
    default, and leaves it to torch.use_deterministic_algorithms."""
    return {name: value for name, value in options.items() if isinstance(value, Tensor) or value}


def _lse(lse: Tensor) -> Tensor:
    """+inf for rows that see no key."""
    return lse.masked_fill(torch.isneginf(lse), torch.inf)


def _results(found: tuple[Tensor, Tensor | None], return_attn_probs: bool) -> Any:
    out, lse = found
    if not return_attn_probs:
        return out
    assert lse is not None
    return out, _lse(lse), out.new_empty(0)


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
) -> Any:
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    found = api.flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=sides_without_negatives(window_size),
        return_lse=bool(return_attn_probs), **given(softcap=softcap, deterministic=deterministic),
    )  # fmt: skip
    return _results(found, return_attn_probs)


def _packed(
    rows: tuple[Tensor, Tensor, Tensor],
    lists: tuple[Tensor, Tensor, int, int],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    block_table: Tensor | None = None,
) -> Any:
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    starts_q, starts_k, max_q, max_k = lists
    used = None
    if block_table is not None:  # pages have no starts: the lists say how many keys each sequence has
        check_list("cu_seqlens_k", starts_k, (None,), rows[0].device)
        starts_k, used = None, starts_k.diff()  # type: ignore[assignment]
    found = packed.flash_attn_varlen_func(
        *rows, starts_q, starts_k, max_q, max_k, seqused_k=used, page_table=block_table, softmax_scale=softmax_scale,
        causal=causal, window_size=sides_without_negatives(window_size), softcap=softcap,
        return_lse=bool(return_attn_probs), **given(deterministic=deterministic),
    )  # fmt: skip
    return _results(found, return_attn_probs)


@_served
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q: (batch, seqlen_q, num_heads_q, head_dim), k, v: (batch, seqlen_k, num_heads_kv, head_dim).

    Returns: out, or (out, lse (batch, num_heads_q, seqlen_q), empty) with return_attn_probs.
    """
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _dense(q, k, v, *rest)


@_served
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """qkv: (batch, seqlen, 3, num_heads, head_dim)."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(2)
    return _dense(q, k, v, *rest)


@_served
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q: (batch, seqlen_q, num_heads_q, head_dim), kv: (batch, seqlen_k, 2, num_heads_kv, head_dim)."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = kv.unbind(2)
    return _dense(q, k, v, *rest)


@_served
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """q: (total_q, num_heads_q, head_dim), k, v: (total_k, num_heads_kv, head_dim), or pages with block_table.

    Returns: out, or (out, lse (num_heads_q, total_q), empty) with return_attn_probs.
    """
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _packed((q, k, v), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), *rest, block_table)


@_served
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """qkv: (total, 3, num_heads, head_dim)."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(1)
    return _packed((q, k, v), (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), *rest)


@_served
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q: (total_q, num_heads_q, head_dim), kv: (total_k, 2, num_heads_kv, head_dim)."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = kv.unbind(1)
    return _packed((q, k, v), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), *rest)


@_served
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """q: (batch, seqlen_q, num_heads_q, head_dim); k, v: (batch, seqlen_new, num_heads_kv, head_dim), written into the
    cache behind `cache_seqlens`; see cache.py. There are no derivatives.

    Returns: out, or (out, lse (batch, num_heads_q, seqlen_q)) with return_softmax_lse.
    """
    refuse(alibi_slopes=alibi_slopes)
    window = sides_without_negatives(window_size)
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    has_window = any(side is not None and side < capacity for side in window)
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window, "softcap": softcap}
    out, lse = attend(
        Query(
            q, None, None, options | {"num_splits": num_splits}, bool(causal) or has_window, bool(return_softmax_lse)
        ),
        Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table),
        new_rows(k, v),
        rotary_of(rotary_cos, rotary_sin, None, rotary_interleaved),
    )
    return out if lse is None else (out, _lse(lse))


def new_rows(k: Tensor | None, v: Tensor | None, starts: Tensor | None = None) -> New | None:
    """What is to be appended. Raises: InputError for one of the two alone."""
    if (k is None) != (v is None):
        raise InputError("k and v are appended together; one of them is None")
    return None if k is None or v is None else New(k, v, starts)


def rotary_of(cos: Tensor | None, sin: Tensor | None, begin: Tensor | None, interleaved: bool) -> Rotary | None:
    """The tables of a call. Raises: InputError for one of the two alone."""
    if (cos is None) != (sin is None):
        raise InputError("rotary_cos and rotary_sin belong together; one of them is None")
    return None if cos is None or sin is None else Rotary(cos, sin, begin, interleaved)


# --- private functions that others call -------------------------------------------------------------------------------


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    starts: tuple[Tensor | None, Tensor | None] = (None, None),
    bounds: tuple[int | None, int | None] = (None, None),
    pages: Tensor | None = None,
    used: Tensor | None = None,
    num_splits: int = 1,
) -> Arguments:
    window = sides_without_negatives(window_size)
    return Arguments(
        q, k, v, *starts, None, used, pages, None, *bounds, softmax_scale, causal, window, softcap, num_splits, True
    )


def _nothing_drawn(out: Tensor) -> tuple[Tensor, Tensor]:
    """In place of the dropout mask and the state of the generator."""
    return out.new_empty(0), torch.zeros(2, dtype=torch.int64, device=out.device)


@_served
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, empty, state): without derivatives."""
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_softmax=return_softmax)
    window = (window_size_left, window_size_right)
    out, lse = forward_into(_arguments(q, k, v, softmax_scale, causal, window, softcap), Results())
    return (out, _lse(lse), *_nothing_drawn(out))


@_served
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse (num_heads_q, total_q), empty, state): without derivatives. zero_tensors: rows that no sequence has are
    not promised zeros."""
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_softmax=return_softmax, leftpad_k=leftpad_k)
    refuse(zero_tensors=zero_tensors)
    used, starts_k = seqused_k, cu_seqlens_k
    if block_table is not None:
        check_list("cu_seqlens_k", cu_seqlens_k, (None,), q.device)
        used, starts_k = cu_seqlens_k.diff() if used is None else used, None  # type: ignore[assignment]
    lists, bounds = (cu_seqlens_q, starts_k), (max_seqlen_q, max_seqlen_k)
    window = (window_size_left, window_size_right)
    call = _arguments(q, k, v, softmax_scale, causal, window, softcap, lists, bounds, block_table, used, num_splits)
    out, lse = forward_into(call, Results())
    return (out, _lse(lse), *_nothing_drawn(out))


@_served
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes dq, dk and dv. Returns: an empty tensor, in place of the row sums, which stay in a workspace."""
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    call = _arguments(q, k, v, softmax_scale, causal, (window_size_left, window_size_right), softcap)
    backward_into(call, out, softmax_lse, dout, gradients=(dq, dk, dv), deterministic=bool(deterministic))
    return softmax_lse.new_empty(0)


@_served
def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """The same for packed sequences; rows that no sequence has get zeros."""
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    lists, bounds = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    window = (window_size_left, window_size_right)
    call = _arguments(q, k, v, softmax_scale, causal, window, softcap, lists, bounds)
    backward_into(call, out, softmax_lse, dout, gradients=(dq, dk, dv), deterministic=bool(deterministic))
    return softmax_lse.new_empty(0)


_PUBLIC = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)
_PRIVATE = (
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
)
MODULES = {"flash_attn": _PUBLIC, "flash_attn.flash_attn_interface": (*_PUBLIC, *_PRIVATE)}
