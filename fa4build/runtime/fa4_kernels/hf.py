"""Attention for Hugging Face transformers:

    import fa4_kernels.hf
    fa4_kernels.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa4_kernels", dtype=torch.bfloat16)

Batches must have no padding. Sequences packed into one row (`position_ids` that start again, or `cu_seq_lens_q` and
`cu_seq_lens_k`) do not see each other.
"""

import weakref
from typing import Any

import torch

from .api import flash_attn_func
from .errors import InputError
from .packed import flash_attn_varlen_func

NAME = "fa4_kernels"


def register(name: str = NAME) -> None:
    """Make the implementation known to transformers under `name`. May be called again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, no_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each attention layer.

    Args:
        query: (batch, num_heads_q, seqlen_q, head_dim), key and value alike.
        sliding_window: keys that a query sees, itself included.
        softcap: cap of the scores. s_aux: (num_heads_q), a sink.
        is_causal: default what the module says, else True.
        position_ids, cu_seq_lens_q, ...: of sequences packed into a batch of one.
    Returns: (batch, seqlen_q, num_heads_q, head_dim_v), and no weights.
    Raises: InputError for a mask or dropout in training.
    Cost: the first layer that sees a `position_ids` reads on the host whether sequences are packed. Pass
        `cu_seq_lens_q` and `cu_seq_lens_k` to avoid that, and inside torch.compile, where it is not looked at.
    """
    for argument, value_given in (("attention_mask", attention_mask), ("dropout", dropout or None)):
        if value_given is not None:
            raise InputError(
                f"{NAME} attention takes no {argument}. Choose another attn_implementation for this model."
            )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {
        "causal": is_causal,
        "window_size": (None, None) if sliding_window is None else (sliding_window - 1, None),
        "softcap": softcap or 0.0,
        "learnable_sink": s_aux,
    }
    if cu_seq_lens_q is None and q.shape[1] == k.shape[1]:
        cu_seq_lens_q = cu_seq_lens_k = _starts_of(position_ids, q.shape[1])
    if cu_seq_lens_q is None:
        return flash_attn_func(q, k, v, scaling, **options)[0], None
    if q.shape[0] != 1:
        raise InputError(f"cu_seq_lens_q is given and the batch is {q.shape[0]}; packed sequences are a batch of 1")
    options |= {"cu_seqlens_q": cu_seq_lens_q.int(), "max_seqlen_q": max_length_q, "max_seqlen_k": max_length_k}
    options["cu_seqlens_k"] = (cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k).int()
    out, _lse = flash_attn_varlen_func(q[0], k[0], v[0], softmax_scale=scaling, **options)
    return out[None], None


# The position_ids that were looked at last, with what they said: every layer of a model is given the same tensor.
_seen: tuple[weakref.ref[torch.Tensor], int, torch.Tensor | None] | None = None


def _starts_of(position_ids: torch.Tensor | None, seqlen: int) -> torch.Tensor | None:
    """cu_seqlens where positions start again, int32; None for one sequence, or inside torch.compile."""
    global _seen
    if position_ids is None or position_ids.shape != (1, seqlen) or seqlen < 2 or torch.compiler.is_compiling():
        return None
    if _seen is None or _seen[0]() is not position_ids or _seen[1] != position_ids._version:
        _seen = (weakref.ref(position_ids), position_ids._version, _read_starts(position_ids[0]))
    return _seen[2]


def _read_starts(positions: torch.Tensor) -> torch.Tensor | None:
    begins = (positions.diff() != 1).nonzero().flatten() + 1
    if not begins.numel():
        return None
    return torch.nn.functional.pad(torch.nn.functional.pad(begins, (1, 0)), (0, 1), value=len(positions)).int()


def no_mask(*args: Any, attention_mask: torch.Tensor | None = None, **_: Any) -> None:
    """What transformers calls to make a mask: none is needed, since the kernels know causal ones and windows.

    Raises: InputError if the batch is padded.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise InputError(f"{NAME} attention takes batches without padding. Choose another attn_implementation.")
