"""Attention over packed sequences, caches and pages, and with features: the public functions and their checks.

Every check looks at shapes, dtypes and devices alone: what lists of lengths say is the kernels' business, and is never
read here. Lists must be int32 on the device of q.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from . import answers, loader, ops
from .allocation import equal_starts
from .errors import InputError, LayoutError, NoKernelError
from .general import Call, Lists, backward, bound_backward, bound_combine, forward
from .observers import autocast, is_observed, refuse_transforms
from .problems import (
    DTYPES,
    FP8_DTYPES,
    NO_WINDOW,
    SERVED_FEATURES,
    Offsets,
    Window,
    canonical_mask,
    checked_bound,
    checked_flag,
    checked_scale,
    checked_softcap,
    ordinal_of,
    problem_for,
    refuse_positional,
    requested_features,
)
from .splitting import checked_splits

Tensor = torch.Tensor
NO_FACTORS = (None, None, None)
_AFTER_LENGTHS = ("seqused_q", "seqused_k", "page_table", "softmax_scale", "causal", "window_size")
_AFTER_PAGES = ("cu_seqlens_q", "max_seqlen_q", "softmax_scale", "causal", "window_size")
_AFTER_OUT = ("cu_seqlens", "seqused", "virtual_batch_idx", "return_lse")
_Factors = tuple[Tensor | None, Tensor | None, Tensor | None]
_Result = tuple[Tensor, Tensor | None]
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _answered(*arguments: Any) -> Any:
    """What the launcher says to a call that answers.Arguments describe, or None."""
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
    check_tensors(q=q, k=k, v=v)
    _refuse_unserved(q, v, causal, window_size, "paged" if page_table is not None else "varlen", unserved)
    given = answers.Arguments(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, learnable_sink, max_seqlen_q,
        max_seqlen_k, softmax_scale, causal, window_size, softcap, num_splits, return_lse,
    )  # fmt: skip
    return _attend_packed(given, (q_descale, k_descale, v_descale), deterministic)


def _attend_packed(given: answers.Arguments, descales: _Factors, deterministic: bool | None) -> _Result:
    q, k, v = autocast(given.q, given.k, given.v)
    return_lse = checked_flag("return_lse", given.return_lse)
    call, batch_shape = prepared(given._replace(q=q, k=k, v=v), descales)
    if _wants_operator(call):
        out, lse = run_operator(call, deterministic)
    else:
        out, lse = forward(call)
        if call.descales is NO_FACTORS and q is given.q:
            answers.note(given, call)
    if batch_shape is not None:
        out = out.unflatten(0, batch_shape)
        lse = lse.unflatten(1, batch_shape).transpose(0, 1)
    return out, (lse if return_lse else None)


def prepared(
    given: answers.Arguments, descales: _Factors = NO_FACTORS, offsets: Offsets | None = None
) -> tuple[Call, tuple[int, int] | None]:
    """A call that has been checked, and (batch, seqlen_q) where queries with a batch have been made packed ones.

    offsets: the window as kernels take it, in place of `causal` and `window_size`.
    """
    q, k, v = given.q, given.k, given.v
    refuse_transforms(q=q, k=k, v=v, learnable_sink=given.learnable_sink)
    lists = Lists(given.cu_seqlens_q, given.cu_seqlens_k, given.page_table, given.seqused_q, given.seqused_k)
    batch_shape = None
    bounds = tuple(checked_bound(name, getattr(given, name)) for name in ("max_seqlen_q", "max_seqlen_k"))
    if all(x is None for x in lists) and q.dim() == k.dim() == 4:
        rows: tuple[Tensor, Tensor, Tensor] = (q, k, v)
        bounds = (None, None)
    else:
        rows, lists, batch_shape, bounds = _as_packed(q, k, v, lists, bounds)
    causal, window = (given.causal, given.window_size) if offsets is None else (False, offsets)
    call = _call(
        rows, lists, bounds, given.softmax_scale, causal, window, given.learnable_sink, given.softcap,
        given.num_splits, descales,
    )  # fmt: skip
    return call, batch_shape


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
    used = used_lengths(cache_seqlens, _batch_of(q, cu_seqlens_q), q.device)
    given = answers.Arguments(
        q, k_cache, v_cache, cu_seqlens_q, None, None, used, page_table, learnable_sink, max_seqlen_q, None,
        softmax_scale, causal, window_size, softcap, num_splits, return_lse,
    )  # fmt: skip
    return _attend_packed(given, (q_descale, k_descale, v_descale), None)


def used_lengths(cache_seqlens: Any, batch: int, device: torch.device) -> Tensor | None:
    """One number a sequence. Raises: InputError for what is neither a number nor a list of numbers."""
    if cache_seqlens is None:
        return None
    if not isinstance(cache_seqlens, Tensor):
        if isinstance(cache_seqlens, bool) or not hasattr(cache_seqlens, "__index__"):
            raise InputError(f"cache_seqlens must be an int or an int32 tensor ({batch},), it is {cache_seqlens!r}")
        return torch.full((batch,), operator.index(cache_seqlens), dtype=torch.int32, device=device)
    if cache_seqlens.is_floating_point():
        raise InputError(
            f"cache_seqlens is {cache_seqlens.dtype} of shape {tuple(cache_seqlens.shape)}; int32 ({batch},), the keys "
            "in use, is expected. New keys and values are not appended here: write them into the cache first"
        )
    check_list("cache_seqlens", cache_seqlens, (batch,), device)
    return cache_seqlens


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
    sink = _checked_sink(learnable_sink, num_heads, parts.device)
    run = bound_combine(parts, dtype, has_sink=sink is not None)
    result = parts.new_empty((batch, seqlen, num_heads, head_dim_v), dtype=dtype)
    lse = parts.new_empty((batch, num_heads, seqlen))
    if result.numel():
        run(parts, lses, result, lse, *(() if sink is None else (sink,)))
    result, lse_rows = (result, lse.transpose(1, 2)) if has_batch else (result[0], lse[0].T)
    if out is not None:
        result = out.copy_(result)
    return result, (lse_rows if return_lse else None)


def attend_with_features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    *,
    deterministic: bool | None,
    return_lse: bool,
    learnable_sink: Tensor | None,
    softcap: float,
    num_splits: int,
    descales: _Factors,
    **options: object,
) -> _Result:
    """flash_attn_func for a call with features."""
    check_tensors(q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise InputError(f"{name} has shape {tuple(x.shape)}; (batch, seqlen, num_heads, head_dim) is expected")
    _refuse_unserved(q, v, causal, window_size, "dense", options)
    return_lse = checked_flag("return_lse", return_lse)
    q, k, v = autocast(q, k, v)
    refuse_transforms(q=q, k=k, v=v, learnable_sink=learnable_sink)
    call = _call(
        (q, k, v), Lists(), (None, None), softmax_scale, causal, window_size, learnable_sink, softcap, num_splits,
        descales,
    )  # fmt: skip
    out, lse = run_operator(call, deterministic) if _wants_operator(call) else forward(call)
    return out, (lse if return_lse else None)


# --- checks -----------------------------------------------------------------------------------------------------------


def _refuse_unserved(
    q: Tensor, v: Tensor, causal: bool, window_size: Window, layout: str, options: dict[str, Any]
) -> None:
    """Raises NoKernelError for features that no argument list has, with what was considered."""
    features = requested_features(options)
    if features - SERVED_FEATURES:
        mask = canonical_mask(causal, window_size)[0]
        problem = problem_for(q, v, mask, layout=layout, features=features)
        decision = loader.runtime().decide(problem, ordinal_of(q))
        asked = (name for name, value in options.items() if value is not None)
        raise NoKernelError(f"{', '.join(sorted(asked))}: {decision}")


def _refuse_derivatives(**tensors: Tensor | None) -> None:
    """Raises InputError or NoKernelError where derivatives are asked for that nothing here computes."""
    refuse_transforms(**tensors)
    for name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"{name} requires grad, and merging records no gradients. Call under torch.no_grad(), or pass "
                f"{name}.detach()"
            )


def check_tensors(**named: Tensor) -> None:
    """Of q, k and v, in this order, by the caller's names."""
    (q, k, v), (_, name_k, name_v) = named.values(), named
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}, a torch tensor is expected")
        if tensor.dim() not in (3, 4):
            expected = "([batch,] rows, num_heads, head_dim) or pages (num_pages, page_size, num_heads, head_dim)"
            raise InputError(f"{name} has shape {tuple(tensor.shape)}; {expected} is expected")
    shapes = f"q {tuple(q.shape)}, {name_k} {tuple(k.shape)}, {name_v} {tuple(v.shape)}"
    if k.shape[:-1] != v.shape[:-1]:
        raise InputError(f"{name_k} and {name_v} differ in more than the last extent: {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise InputError(f"head_dim of q and {name_k} differs: {shapes}")
    num_heads_q, num_heads_kv = q.shape[-2], k.shape[-2]
    if num_heads_q % num_heads_kv if num_heads_kv else num_heads_q:
        raise InputError(f"num_heads_q = {num_heads_q} is no multiple of num_heads_kv = {num_heads_kv}: {shapes}")


def check_list(name: str, given: Tensor | None, shape: tuple[int | None, ...], device: torch.device) -> None:
    """A list of numbers for the kernels. `None` in `shape` is any extent."""
    if given is None:
        return
    if not isinstance(given, torch.Tensor):
        raise InputError(f"{name} is a {type(given).__name__}; an int32 tensor on {device} is expected")
    if given.dtype != torch.int32:
        raise InputError(f"{name} is {given.dtype}; torch.int32 is expected: {name}.int()")
    if given.device != device:
        raise InputError(f"{name} is on {given.device}, q is on {device}; move it there first")
    expected = tuple("any" if extent is None else extent for extent in shape)
    fits = given.dim() == len(shape) and all(
        wanted is None or extent == wanted for extent, wanted in zip(given.shape, shape, strict=True)
    )
    if not fits:
        raise InputError(f"{name} has shape {tuple(given.shape)}; {expected} is expected")
    if given.shape[-1] > 1 and given.stride(-1) != 1:
        raise InputError(f"{name} has stride {given.stride()}; the last must be 1: {name}.contiguous()")


def _batch_of(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    if cu_seqlens_q is None:
        if q.dim() != 4:
            raise InputError(
                f"q has shape {tuple(q.shape)} and there is no cu_seqlens_q; (batch, seqlen_q, num_heads, head_dim) is "
                "expected, or cu_seqlens_q"
            )
        return q.shape[0]
    if q.dim() != 3 or cu_seqlens_q.dim() != 1 or not cu_seqlens_q.numel():
        raise InputError(
            f"q has shape {tuple(q.shape)} and cu_seqlens_q {tuple(cu_seqlens_q.shape)}; "
            "(total_q, num_heads, head_dim) and (batch + 1) are expected"
        )
    return cu_seqlens_q.shape[0] - 1


def _as_packed(
    q: Tensor, k: Tensor, v: Tensor, lists: Lists, bounds: tuple[int | None, int | None]
) -> tuple[tuple[Tensor, Tensor, Tensor], Lists, tuple[int, int] | None, tuple[int | None, int | None]]:
    """(q, k, v) as kernels take them, complete lists, (batch, seqlen_q) of a q that had a batch, bounds of lengths."""
    cu_seqlens_q, cu_seqlens_k, page_table, seqused_q, seqused_k = lists
    batch, device = _batch_of(q, cu_seqlens_q), q.device
    max_seqlen_q, max_seqlen_k = bounds
    for name, given in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_list(name, given, (batch + 1,), device)
    for name, given in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        check_list(name, given, (batch,), device)
    check_list("page_table", page_table, (batch, None), device)
    batch_shape = None
    if cu_seqlens_q is None:
        batch_shape = (batch, q.shape[1])
        cu_seqlens_q, max_seqlen_q = equal_starts(batch, q.shape[1], device), q.shape[1]
        q = q.reshape(-1, *q.shape[2:])
    if page_table is not None:
        _check_pages(k, cu_seqlens_k, seqused_k)
        max_seqlen_k = page_table.shape[1] * k.shape[1] if max_seqlen_k is None else max_seqlen_k
    elif cu_seqlens_k is None:
        if k.dim() != 4 or k.shape[0] != batch:
            raise InputError(
                f"k has shape {tuple(k.shape)} and there is no cu_seqlens_k; "
                f"({batch}, seqlen_k, num_heads_kv, head_dim) is expected"
            )
        max_seqlen_k = k.shape[1] if max_seqlen_k is None else max_seqlen_k
        cu_seqlens_k = equal_starts(batch, k.shape[1], device)
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    elif k.dim() != 3:
        raise InputError(
            f"k has shape {tuple(k.shape)}; with cu_seqlens_k (total_k, num_heads_kv, head_dim) is expected"
        )
    complete = Lists(cu_seqlens_q, cu_seqlens_k, page_table, seqused_q, seqused_k)
    return (q, k, v), complete, batch_shape, (max_seqlen_q, max_seqlen_k)


def _check_pages(k: Tensor, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None) -> None:
    if k.dim() != 4:
        raise InputError(f"k has shape {tuple(k.shape)}; (num_pages, page_size, num_heads_kv, head_dim) is expected")
    if cu_seqlens_k is not None:
        raise InputError("cu_seqlens_k and page_table are both given; pages have no starts. Leave cu_seqlens_k out.")
    if seqused_k is None:
        raise InputError("page_table is given and seqused_k is not; say how many keys each sequence has")


def _checked_sink(sink: Tensor | None, num_heads: int, device: torch.device) -> Tensor | None:
    """In float32, differentiable. Raises: InputError for another shape or device."""
    if sink is None:
        return None
    if not isinstance(sink, Tensor):
        raise InputError(f"learnable_sink is a {type(sink).__name__}; a tensor ({num_heads},) on {device} is expected")
    if sink.shape != (num_heads,) or sink.device != device:
        raise InputError(
            f"learnable_sink has shape {tuple(sink.shape)} on {sink.device}; ({num_heads},), one a query head, "
            f"on {device} is expected"
        )
    return sink.float().contiguous()


def _call(
    rows: tuple[Tensor, Tensor, Tensor],
    lists: Lists,
    bounds: tuple[int | None, int | None],
    softmax_scale: float | None,
    causal: bool,
    window_size: Window | Offsets,
    sink: Tensor | None,
    softcap: float | None,
    num_splits: int,
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Call:
    q, k, v = rows
    if lists.layout == "dense" and (q.shape[0] != k.shape[0]):
        raise InputError(f"batch differs: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    batch = q.shape[0] if lists.cu_seqlens_q is None else lists.cu_seqlens_q.shape[0] - 1
    return Call(
        q=q,
        k=k,
        v=v,
        lists=lists,
        softmax_scale=checked_scale(softmax_scale, q.shape[-1]),
        window=canonical_mask(causal, window_size)[1:],
        softcap=checked_softcap(softcap),
        sink=_checked_sink(sink, q.shape[-2], q.device),
        descales=_checked_descales(descales, q, (batch, k.shape[-2])),
        num_splits=checked_splits(num_splits),
        max_seqlen_q=bounds[0],
        max_seqlen_k=bounds[1],
    )


def _checked_descales(
    descales: tuple[Tensor | None, Tensor | None, Tensor | None], q: Tensor, shape: tuple[int, int]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if all(given is None for given in descales):
        return NO_FACTORS
    for name, given in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if given is None:
            continue
        if q.dtype not in FP8_DTYPES:
            raise InputError(f"{name} is given for {q.dtype}; factors belong to fp8 tensors. Leave it out.")
        if given.shape != shape or given.dtype != torch.float32 or given.device != q.device:
            raise InputError(
                f"{name} is {given.dtype} {tuple(given.shape)} on {given.device}; float32 {shape}, one a sequence and "
                f"key head, on {q.device} is expected"
            )
    q_factor, k_factor, v_factor = (None if given is None else given.contiguous() for given in descales)
    return q_factor, k_factor, v_factor


# --- running ----------------------------------------------------------------------------------------------------------


def _wants_operator(call: Call) -> bool:
    """Whether gradients or a compiler want an operator of torch around the kernels."""
    inputs = (call.q, call.k, call.v, call.sink)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return needs_grad or is_for_operator(call)


def is_for_operator(call: Call) -> bool:
    """Whether a compiler or a mode of torch looks on."""
    return torch.compiler.is_compiling() or is_observed(call.q, call.k, call.v, call.sink, *call.lists)


def run_operator(call: Call, deterministic: bool | None) -> tuple[Tensor, Tensor]:
    """out and lse through torch's dispatcher."""
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    deterministic = checked_flag("deterministic", deterministic)
    inputs = (call.q, call.k, call.v, call.sink)
    if not torch.compiler.is_compiling() and not is_observed(*inputs, *call.lists):
        bound_backward(call, deterministic=deterministic)
    return torch.ops.fa4_kernels.general_attention(
        *(call.q, call.k, call.v, *call.lists, call.sink, *call.descales),
        *(call.softmax_scale, *call.window, deterministic, call.softcap),
        *(call.num_splits, call.max_seqlen_q, call.max_seqlen_k),
    )


def _operator_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    page_table: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    sink: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    deterministic: bool,
    softcap: float,
    num_splits: int,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[Tensor, Tensor]:
    call = Call(
        q=q,
        k=k,
        v=v,
        lists=Lists(cu_seqlens_q, cu_seqlens_k, page_table, seqused_q, seqused_k),
        softmax_scale=softmax_scale,
        window=(window_left, window_right),
        softcap=softcap,
        sink=sink,
        descales=(q_descale, k_descale, v_descale),
        num_splits=num_splits,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    with torch.no_grad():
        return forward(call)


def _operator_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    page_table: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    sink: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    deterministic: bool,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = Call(
        q=q,
        k=k,
        v=v,
        lists=Lists(cu_seqlens_q, cu_seqlens_k, page_table, seqused_q, seqused_k),
        softmax_scale=softmax_scale,
        window=(window_left, window_right),
        softcap=softcap,
        sink=sink,
    )
    dq, dk, dv, dsink = backward(call, out, lse, dout, dlse, deterministic=deterministic)
    return dq, dk, dv, q.new_empty(0, dtype=torch.float32) if dsink is None else dsink


ops.define_general(_operator_forward, _operator_backward, DTYPES)
