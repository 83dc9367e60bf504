"""The interface of FlashAttention-4 (flash-attn-4 4.0.0b36, module `flash_attn.cute`): names, order, defaults, results.

Its meaning: None in a window is no bound, and a number is an offset from the diagonal, also a negative one; two sides
whose sum is negative are no window; causal sets the right side to 0. (out, lse) is returned; lse is None unless it is
asked for or an input requires gradients. The private forward returns four values, the last two of which are None.
"""

from typing import Any, NamedTuple

import torch

from .. import api, packed
from ..calls import Arguments, check_list
from ..windows import Window, offsets_from_diagonal
from .flash_attn_2 import given
from .modules import original_of, served_as
from .raw import Results, backward_into, forward_into, refuse

Tensor = torch.Tensor
STACK = "flash_attn.cute"
_served = served_as(STACK)


def _is_wanted(return_lse: bool, *inputs: Tensor | None) -> tuple[bool, bool]:
    """(whether lse is returned, whether it has a gradient)."""
    return bool(return_lse) or any(getattr(x, "requires_grad", False) for x in inputs), bool(return_lse)


def _results(found: tuple[Tensor, Tensor | None], has_gradient: bool) -> tuple[Tensor, Tensor | None]:
    out, lse = found
    return out, lse if has_gradient or lse is None else lse.detach()


@_served
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """q: (batch, seqlen_q, num_heads_q, head_dim), k, v: (batch, seqlen_k, num_heads_kv, ..).

    Returns: (out, lse (batch, num_heads_q, seqlen_q)).
    """
    refuse(qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd)
    refuse(mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars)
    refuse(block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd)
    is_wanted, has_gradient = _is_wanted(return_lse, q, k, v, learnable_sink)
    causal, window = offsets_from_diagonal(causal, *window_size).as_asked
    rare = given(learnable_sink=learnable_sink, softcap=softcap, deterministic=deterministic)
    rare |= {} if num_splits == 1 else {"num_splits": num_splits}
    found = api.flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window, return_lse=is_wanted, **rare,
    )  # fmt: skip
    return _results(found, has_gradient)


@_served
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """q: (total_q, num_heads_q, head_dim) with cu_seqlens_q, or with a batch; k, v likewise, or pages.

    Returns: (out, lse (num_heads_q, total_q), or (batch, num_heads_q, seqlen_q)).
    """
    refuse(qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd)
    refuse(mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars)
    refuse(block_sparse_tensors=block_sparse_tensors, seqlen_k_per_split=seqlen_k_per_split)
    is_wanted, has_gradient = _is_wanted(return_lse, q, k, v, learnable_sink)
    causal, window = offsets_from_diagonal(causal, *window_size).as_asked
    found = packed.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k,
        page_table=page_table, softmax_scale=softmax_scale, causal=causal, window_size=window,
        learnable_sink=learnable_sink, softcap=softcap or 0.0, num_splits=num_splits, return_lse=is_wanted,
        **given(deterministic=deterministic),
    )  # fmt: skip
    return _results(found, has_gradient)


@_served
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of parts of the keys: (num_splits, [batch,] seqlen, num_heads, ..)."""
    return packed.flash_attn_combine(
        out_partial, lse_partial, out, out_dtype, cu_seqlens=cu_seqlens, seqused=seqused,
        virtual_batch_idx=virtual_batch_idx, return_lse=return_lse,
    )  # fmt: skip


class SchedulerMetadataTensorsTorch(NamedTuple):
    """What `get_scheduler_metadata` returns, with nothing in it: our kernels find their tiles themselves."""

    num_m_blocks_ptr: Tensor | None = None
    num_splits_dynamic_ptr: Tensor | None = None
    virtual_batch_idx_ptr: Tensor | None = None
    num_nheads_in_l2_ptr: Tensor | None = None
    tile_count_semaphore: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_total_splits_m_blocks: Tensor | None = None
    blocks_to_batch_idx: Tensor | None = None


def get_scheduler_metadata(*arguments: Any, **options: Any) -> Any:
    """A record without anything in it. Where calls may fall back, that of the installed package."""
    original = original_of(STACK, "get_scheduler_metadata")
    return SchedulerMetadataTensorsTorch() if original is None else original(*arguments, **options)


get_scheduler_metadata.is_of_fa4_kernels = True  # type: ignore[attr-defined]


@_served
def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    tile_mn: tuple[int, int] | None = None,
    mma_pv_is_rs: bool | None = None,
    intra_wg_overlap: bool | None = None,
    num_threads: int = 384,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    _arch: int | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None, None, None]:
    """(out, lse, None, None), in `out` and `lse` where they are given: without derivatives.

    page_table with cu_seqlens_k, as torch calls it: the pages count, and `seqused_k` or else the starts say how many
    keys there are. Tiles, threads, and pack_gqa are choices of other kernels, and not used.
    """
    refuse(qv=qv, score_mod=score_mod, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors)
    refuse(aux_tensors=aux_tensors, aux_scalars=aux_scalars, gather_kv_indices=gather_kv_indices)
    refuse(seqlen_k_per_split=seqlen_k_per_split)
    if page_table is not None and cu_seqlens_k is not None:
        check_list("cu_seqlens_k", cu_seqlens_k, (None,), q.device)
        seqused_k, cu_seqlens_k = cu_seqlens_k.diff() if seqused_k is None else seqused_k, None
    call = Arguments(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, learnable_sink, max_seqlen_q,
        max_seqlen_k, softmax_scale, False, (None, None), softcap or 0.0, num_splits, True,
    )  # fmt: skip
    window = offsets_from_diagonal(causal, window_size_left, window_size_right)
    made, made_lse = forward_into(call, Results(out, lse), (q_descale, k_descale, v_descale), window)
    is_wanted = (
        return_lse or lse is not None or any(x.requires_grad for x in (q, k, v, learnable_sink) if x is not None)
    )
    return made, made_lse if is_wanted else None, None, None


@_served
def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    m_block_size: int = 64,
    n_block_size: int = 128,
    num_threads: int = 256,
    pack_gqa: bool = False,
    num_stages_Q: int = 2,
    num_stages_dO: int = 2,
    SdP_swapAB: bool = False,
    dKV_swapAB: bool = False,
    dQ_swapAB: bool = False,
    AtomLayoutMSdP: int = 2,
    AtomLayoutNdKV: int = 2,
    AtomLayoutMdQ: int = 2,
    V_in_regs: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    dlse: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv), in the tensors of those names where they are given, and where there is a sink its gradient."""
    refuse(score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors)
    refuse(aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors)
    call = Arguments(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, None, learnable_sink, max_seqlen_q, max_seqlen_k,
        softmax_scale, False, (None, None), softcap or 0.0, 1, True,
    )  # fmt: skip
    *gradients, dsink = backward_into(
        call, out, lse, dout, dlse, gradients=(dq, dk, dv), deterministic=bool(deterministic),
        window=offsets_from_diagonal(causal, window_size_left, window_size_right),
    )  # fmt: skip
    return (
        (*gradients, dsink.to(learnable_sink.dtype))
        if learnable_sink is not None and dsink is not None
        else (*gradients,)
    )


_PUBLIC = ("flash_attn_func", "flash_attn_varlen_func")
_MORE = ("_flash_attn_bwd", "_flash_attn_fwd", "flash_attn_combine", "get_scheduler_metadata")
MODULES = {
    "flash_attn.cute": _PUBLIC,
    "flash_attn.cute.interface": (*_PUBLIC, *_MORE, "SchedulerMetadataTensorsTorch"),
}
