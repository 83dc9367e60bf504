"""Attention over packed sequences, caches and pages, and the merge of split keys: the public functions.

Each makes a `Call` of its arguments (calls.py), which says what is checked, and hands it on.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from . import answers, loader
from .attention import bound_combine, forward, run_operator
from .calls import (
    NO_FACTORS,
    Arguments,
    Factors,
    batch_of,
    call_of,
    capacity_of,
    check_tensors,
    checked_sink,
    used_lengths,
    with_tensors,
)
from .errors import InputError, LayoutError, NoKernelError
from .observers import autocast, refuse_transforms
from .problems import DTYPES, FP8_DTYPES, SERVED_FEATURES, ordinal_of, problem_for, requested_features
from .scalars import checked_flag, refuse_positional
from .windows import NO_WINDOW, Window, offsets_of

Tensor = torch.Tensor
_AFTER_LENGTHS = ("seqused_q", "seqused_k", "page_table", "softmax_scale", "causal", "window_size")
_AFTER_PAGES = ("cu_seqlens_q", "max_seqlen_q", "softmax_scale", "causal", "window_size")
_AFTER_OUT = ("cu_seqlens", "seqused", "virtual_batch_idx", "return_lse")
_Result = tuple[Tensor, Tensor | None]
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _answered(*arguments: Any) -> Any:
    """What the launcher says to a call that `Arguments` describe, or None."""
    try:
        return answers.answer(arguments)
    except LayoutError:
        return None


def _packed_answered_first(complete: Callable[_P, _R]) -> Callable[_P, _R]:
    """flash_attn_varlen_func with `_answered` before it; as api.py, with the rare arguments left to the function."""

    @functools.wraps(complete)
    def attention(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        max_seqlen_q: Any = None,
        max_seqlen_k: Any = None,
        *positional: Any,
        seqused_q: Any = None,
        seqused_k: Any = None,
        page_table: Any = None,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = NO_WINDOW,
        learnable_sink: Any = None,
        softcap: Any = 0.0,
        num_splits: Any = 1,
        return_lse: Any = False,
        **options: Any,
    ) -> Any:
        if positional:
            accepted = "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k"
            refuse_positional("flash_attn_varlen_func", accepted, _AFTER_LENGTHS, positional)
        if not options and not _is_dynamo_compiling():
            answer = _answered(
                q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, learnable_sink, max_seqlen_q,
                max_seqlen_k, softmax_scale, causal, window_size, softcap, num_splits, return_lse,
            )  # fmt: skip
            if answer is not None:
                return answer
        return complete(  # type: ignore[call-arg]
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k,
            page_table=page_table, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
            learnable_sink=learnable_sink, softcap=softcap, num_splits=num_splits, return_lse=return_lse, **options,
        )  # type: ignore[arg-type]  # fmt: skip

    return attention


def _cached_answered_first(complete: Callable[_P, _R]) -> Callable[_P, _R]:
    """flash_attn_with_kvcache likewise."""

    @functools.wraps(complete)
    def attention(
        q: Any,
        k_cache: Any,
        v_cache: Any,
        cache_seqlens: Any = None,
        page_table: Any = None,
        *positional: Any,
        cu_seqlens_q: Any = None,
        max_seqlen_q: Any = None,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = NO_WINDOW,
        learnable_sink: Any = None,
        softcap: Any = 0.0,
        num_splits: Any = 0,
        return_lse: Any = False,
        **options: Any,
    ) -> Any:
        if positional:
            accepted = "q, k_cache, v_cache, cache_seqlens and page_table"
            refuse_positional("flash_attn_with_kvcache", accepted, _AFTER_PAGES, positional)
        if not options and not _is_dynamo_compiling():
            answer = _answered(
                q, k_cache, v_cache, cu_seqlens_q, None, None, cache_seqlens, page_table, learnable_sink, max_seqlen_q,
                None, softmax_scale, causal, window_size, softcap, num_splits, return_lse,
            )  # fmt: skip
            if answer is not None:
                return answer
        return complete(  # type: ignore[call-arg]
            q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, learnable_sink=learnable_sink,
            softcap=softcap, num_splits=num_splits, return_lse=return_lse, **options,
        )  # type: ignore[arg-type]  # fmt: skip

    return attention


@_packed_answered_first
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    min_seqlen_k: int | None = None,
    scheduler_metadata: object = None,
    disable_scheduler_metadata: bool = False,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    score_mod: object = None,
    score_mod_bwd: object = None,
    mask_mod: object = None,
    aux_tensors: object = None,
    aux_scalars: object = None,
    block_sparse_tensors: object = None,
    block_sparse_tensors_bwd: object = None,
    seqlen_k_per_split: int | None = None,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> _Result:
    """Attention of sequences that differ in length, each with its own keys; differentiable in q, k, v and the sink.

    Args:
        q: (total_q, num_heads_q, head_dim) with `cu_seqlens_q`, or (batch, seqlen_q, num_heads_q, head_dim) without.
        k, v: (total_k, num_heads_kv, ..) with `cu_seqlens_k`; (batch, seqlen_k, num_heads_kv, ..) without; or pages
            (num_pages, page_size, num_heads_kv, ..) with `page_table` and `seqused_k`.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1), from 0, rising: sequence b is rows [cu[b], cu[b + 1]).
        max_seqlen_q, max_seqlen_k: bounds of the lengths; used to choose `num_splits`, results do not depend on them. A
            tensor without dimensions is never read, and stands for None.
        seqused_q, seqused_k: int32 (batch): only so many rows of each sequence exist.
        page_table: int32 (batch, max_pages): key j of sequence b is row j % page_size of page page_table[b, j //
            page_size]. Entries behind the last used one may hold anything.
        softmax_scale, causal, window_size, deterministic, return_lse: as flash_attn_func, with each sequence's own
            lengths.
        learnable_sink: (num_heads_q), one more logit of every row, without a value.
        softcap: > 0: scores become softcap * tanh(score / softcap).
        num_splits: parts that keys are divided into; 0 or less: chosen from shapes and `max_seqlen_k`. Above 1 the
            results differ in rounding.
        q_descale, k_descale, v_descale: fp8 only, float32 (batch, num_heads_kv): factors of q, k, v; default 1.
        min_seqlen_k, pack_gqa, scheduler_metadata, disable_scheduler_metadata: hints about speed; not used.
        score_mod, mask_mod, ...: need kernels built with them.
        All after `max_seqlen_k` are passed by name: releases of flash-attention differ in their order.
    Returns: (out, lse). out in the shape of q with head_dim_v columns; lse (num_heads_q, total_q), or (batch,
        num_heads_q, seqlen_q) for a q with a batch, float32, natural logarithm; None unless asked for. Rows that see no
        key: out = 0, lse = -inf or the sink. Rows that do not exist hold anything.
    Raises: as flash_attn_func.
    Contract: no number is read from the device, so the function may be captured in a CUDA graph.
    """
    unserved = {"qv": qv, "gather_kv_indices": gather_kv_indices, "score_mod": score_mod, "mask_mod": mask_mod}
    unserved |= {"aux_tensors": aux_tensors, "aux_scalars": aux_scalars, "block_sparse_tensors": block_sparse_tensors}
    unserved |= {"score_mod_bwd": score_mod_bwd, "block_sparse_tensors_bwd": block_sparse_tensors_bwd}
    unserved |= {"seqlen_k_per_split": seqlen_k_per_split, "gather_bwd_token_chunk": gather_bwd_token_chunk}
    unserved |= {"gather_bwd_recompute_p": gather_bwd_recompute_p or None}
    if any(x is not None for x in unserved.values()):
        check_tensors(q=q, k=k, v=v)
        refuse_unserved(q, v, causal, window_size, "paged" if page_table is not None else "varlen", unserved)
    given = Arguments(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, learnable_sink, max_seqlen_q,
        max_seqlen_k, softmax_scale, causal, window_size, softcap, num_splits, return_lse,
    )  # fmt: skip
    return _attend_packed(given, (q_descale, k_descale, v_descale), deterministic)


def _attend_packed(
    given: Arguments, descales: Factors, deterministic: bool | None, names: tuple[str, ...] = ("k", "v")
) -> _Result:
    cast = with_tensors(given, *autocast(given.q, given.k, given.v))
    return_lse = checked_flag("return_lse", given.return_lse)
    call = call_of(cast, descales, deterministic, names=names)
    if call.needs_gradients or call.is_for_operator:
        out, lse = run_operator(call)
    else:
        out, lse = forward(call)
        if call.descales is NO_FACTORS and cast is given:
            answers.note(given, call)
    out, lse = call.as_given(out, lse)
    return out, (lse if return_lse else None)


@_cached_answered_first
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | int | None = None,
    page_table: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 0,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> _Result:
    """Attention of new queries to a cache of keys that already holds theirs: decoding.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), or (total_q, ..) with `cu_seqlens_q`.
        k_cache, v_cache: (batch, max_seqlen_k, num_heads_kv, ..), or pages (num_pages, page_size, num_heads_kv, ..)
            with `page_table`. They are read; nothing is appended. A cache whose sequences do not lie one behind the
            other, as a slice of a longer one, is copied.
        cache_seqlens: keys in use, int32 (batch) on the device of q or one number for all; None: all of a cache without
            pages.
        num_splits: as flash_attn_varlen_func; chosen from shapes by default.
        others: as flash_attn_varlen_func. All after `page_table` are passed by name.
    Returns: as flash_attn_varlen_func.
    """
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    used = used_lengths(cache_seqlens, batch_of(q, cu_seqlens_q), q.device, capacity_of(k_cache, page_table))
    given = Arguments(
        q, k_cache, v_cache, cu_seqlens_q, None, None, used, page_table, learnable_sink, max_seqlen_q, None,
        softmax_scale, causal, window_size, softcap, num_splits, return_lse,
    )  # fmt: skip
    return _attend_packed(given, (q_descale, k_descale, v_descale), None, names=())


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *positional: object,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
    learnable_sink: Tensor | None = None,
) -> _Result:
    """Merge the results of split keys.

    Args:
        out_partial: (num_splits, batch, seqlen, num_heads, head_dim_v) or (num_splits, total, num_heads, head_dim_v);
            other types than float32 are converted.
        lse_partial: (num_splits, batch, seqlen, num_heads) or (num_splits, total, num_heads), float32; -inf for a part
            without a key, whose out_partial may hold anything.
        out: where to write; its dtype, or `out_dtype`, must be bfloat16 or float16.
        cu_seqlens, seqused: accepted; rows are merged one by one, whichever sequence they are of.
        learnable_sink: (num_heads), joins every row's sum here.
    Returns: (out, lse): (batch, seqlen, num_heads, head_dim_v) and (batch, seqlen, num_heads), or without batch; lse is
        a view whose rows lie one behind the other. A row without a part: out = 0, lse = -inf or the sink.
    Raises: InputError, also for inputs that require gradients while gradients are recorded; NoKernelError.
    """
    if positional:
        refuse_positional("flash_attn_combine", "out_partial, lse_partial, out and out_dtype", _AFTER_OUT, positional)
    _refuse_derivatives(out_partial=out_partial, lse_partial=lse_partial, learnable_sink=learnable_sink)
    if virtual_batch_idx is not None:
        raise NoKernelError("virtual_batch_idx: no kernel takes it. Order the batch before the call.")
    if out_partial.dim() not in (4, 5) or lse_partial.shape != out_partial.shape[:-1]:
        raise InputError(
            f"out_partial has shape {tuple(out_partial.shape)} and lse_partial {tuple(lse_partial.shape)}; "
            "(num_splits, [batch,] seqlen, num_heads, head_dim_v) and the same without head_dim_v are expected"
        )
    dtype = out.dtype if out is not None else out_dtype or out_partial.dtype
    if dtype not in DTYPES or dtype in FP8_DTYPES:
        raise InputError(f"the result would be {dtype}; pass out_dtype=torch.bfloat16 or torch.float16")
    has_batch = out_partial.dim() == 5
    parts = out_partial.float() if has_batch else out_partial.float().unsqueeze(1)
    parts = parts if parts.stride(-1) == 1 else parts.contiguous()
    lses = lse_partial.float().transpose(-1, -2)
    lses = lses if lses.stride(-1) == 1 else lses.contiguous()
    lses = lses if has_batch else lses.unsqueeze(1)
    _num_splits, batch, seqlen, num_heads, head_dim_v = parts.shape
    sink = checked_sink(learnable_sink, num_heads, parts.device)
    run = bound_combine(parts, dtype, has_sink=sink is not None)
    result = parts.new_empty((batch, seqlen, num_heads, head_dim_v), dtype=dtype)
    _check_target(out, out_partial)
    lse = parts.new_empty((batch, num_heads, seqlen))
    if result.numel():
        run(parts, lses, result, lse, *(() if sink is None else (sink,)))
    result, lse_rows = (result, lse.transpose(1, 2)) if has_batch else (result[0], lse[0].T)
    if out is not None:
        result = out.copy_(result)
    return result, (lse_rows if return_lse else None)


# --- checks -----------------------------------------------------------------------------------------------------------


def refuse_unserved(
    q: Tensor, v: Tensor, causal: bool, window_size: Window, layout: str, options: dict[str, Any]
) -> None:
    """Raises NoKernelError for features that no argument list has, with what was considered."""
    features = requested_features(options)
    if features - SERVED_FEATURES:
        mask = offsets_of(causal, window_size).mask
        problem = problem_for(q, v, mask, layout=layout, features=features)
        decision = loader.runtime().decide(problem, ordinal_of(q))
        asked = (name for name, value in options.items() if value is not None)
        raise NoKernelError(f"{', '.join(sorted(asked))}: {decision}")


def _check_target(out: Tensor | None, parts: Tensor) -> None:
    """Raises InputError for a tensor that is not the result's size: copying would repeat the rows."""
    if out is not None and (out.shape != parts.shape[1:] or out.device != parts.device):
        raise InputError(
            f"out has shape {tuple(out.shape)} on {out.device}; that of a part, {tuple(parts.shape[1:])} on "
            f"{parts.device}, is expected"
        )


def _refuse_derivatives(**tensors: Tensor | None) -> None:
    """Raises InputError or NoKernelError where derivatives are asked for that nothing here computes."""
    refuse_transforms(**tensors)
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"{name} requires grad, and merging records no gradients. Call under torch.no_grad(), or pass "
                f"{name}.detach()"
            )
