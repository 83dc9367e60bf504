"""Attention for Hugging Face transformers:

    import fa4_kernels.hf
    fa4_kernels.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa4_kernels", dtype=torch.bfloat16)

Batches must have no padding: kernels over packed sequences are not called from here.
"""

from typing import Any

import torch

from .api import flash_attn_func
from .errors import InputError

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
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each attention layer.

    Args:
        query: (batch, num_heads_q, seqlen_q, head_dim), key and value alike.
        sliding_window: keys that a query sees, itself included.
        is_causal: default what the module says, else True.
    Returns: (batch, seqlen_q, num_heads_q, head_dim_v), and no weights.
    Raises: InputError for a mask, dropout in training or a softcap.
    """
    for argument, value_given in (
        ("attention_mask", attention_mask),
        ("softcap", softcap),
        ("dropout", dropout or None),
    ):
        if value_given is not None:
            raise InputError(
                f"{NAME} attention takes no {argument}. Choose another attn_implementation for this model."
            )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    window = (None, None) if sliding_window is None else (sliding_window - 1, None)
    out, _lse = flash_attn_func(q, k, v, scaling, causal=is_causal, window_size=window)
    return out, None


def no_mask(*args: Any, attention_mask: torch.Tensor | None = None, **_: Any) -> None:
    """What transformers calls to make a mask: none is needed, since the kernels know causal ones and windows.

    Raises: InputError if the batch is padded.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise InputError(f"{NAME} attention takes batches without padding. Choose another attn_implementation.")
