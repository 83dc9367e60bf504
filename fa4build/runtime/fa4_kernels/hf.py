"""Attention for Hugging Face transformers:

    import fa4_kernels.hf
    fa4_kernels.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa4_kernels", dtype=torch.bfloat16)

Batches must have no padding. Sequences packed into rows (`position_ids` that start again, or `cu_seq_lens_q` and
`cu_seq_lens_k`) do not see each other. Static caches are read as far as they are filled. Masks that are no causal one
and no window are refused: chunked attention beyond its first chunk, blocks of image tokens that see each other.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .api import flash_attn_func
from .errors import CaptureError, InputError
from .packed import flash_attn_varlen_func
from .windows import sliding

NAME = "fa4_kernels"


def register(name: str = NAME) -> None:
    """Make the implementation known to transformers under `name`. May be called again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, used_lengths)


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
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each attention layer.

    Args:
        query: (batch, num_heads_q, seqlen_q, head_dim), key and value alike.
        attention_mask: None, or what `used_lengths` gave.
        sliding_window: keys that a query sees to the left, itself included; where it sees to the right, as many there.
        softcap: cap of the scores. s_aux: (num_heads_q), a sink.
        is_causal: default what the module says, else True.
        position_ids: (batch, seqlen_q); cu_seq_lens_q, ...: of sequences packed into a batch of one.
    Returns: (batch, seqlen_q, num_heads_q, head_dim_v), and no weights.
    Raises: InputError for a mask or dropout in training.
    Cost: the first layer that sees a `position_ids` reads on the host whether sequences are packed. Pass
        `cu_seq_lens_q` and `cu_seq_lens_k` to avoid that, and inside torch.compile, where it is not looked at.
    """
    used = attention_mask if _are_used_lengths(attention_mask) else None
    for argument, is_given in (("attention_mask", attention_mask is not used), ("dropout", bool(dropout))):
        if is_given:
            raise InputError(
                f"{NAME} attention takes no {argument}. Choose another attn_implementation for this model."
            )
    if others.get("position_bias") is not None:
        raise InputError(f"{NAME} attention takes no position_bias. Choose another attn_implementation for this model.")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "causal": is_causal,
        "window_size": sliding(sliding_window),
        "softcap": softcap or 0.0,
        "learnable_sink": s_aux,
    }
    if used is not None:
        return flash_attn_varlen_func(q, k, v, seqused_k=used.flatten(), **options)[0], None
    if cu_seq_lens_q is None and q.shape[1] == k.shape[1]:
        cu_seq_lens_q = cu_seq_lens_k = _starts_of(position_ids, q.shape[0], q.shape[1])
    elif cu_seq_lens_q is not None and q.shape[0] != 1:
        raise InputError(f"cu_seq_lens_q is given and the batch is {q.shape[0]}; packed sequences are a batch of 1")
    if cu_seq_lens_q is None:
        return flash_attn_func(q, k, v, **options)[0], None
    options |= {"cu_seqlens_q": cu_seq_lens_q.int(), "max_seqlen_q": max_length_q, "max_seqlen_k": max_length_k}
    options["cu_seqlens_k"] = (cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k).int()
    out, _lse = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), **options)
    return out.unflatten(0, q.shape[:2]), None


# The position_ids that were looked at last, with what they said: every layer of a model is given the same tensor.
_seen: tuple[weakref.ref[torch.Tensor], int, int, torch.Tensor | None] | None = None


def _starts_of(position_ids: torch.Tensor | None, batch: int, seqlen: int) -> torch.Tensor | None:
    """cu_seqlens of all rows, one behind the other, where positions start again within one, int32; None where they
    never do, or inside torch.compile.

    Raises: CaptureError for sequences that are packed, or may be, while a CUDA graph is captured.
    """
    global _seen
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != seqlen or seqlen < 2:
        return None
    if torch.compiler.is_compiling() or position_ids.shape[0] not in (1, batch):
        return None
    is_known = _seen is not None and _seen[0]() is position_ids and _seen[1:3] == (position_ids._version, batch)
    found = _seen[3] if is_known and _seen is not None else None
    if position_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        if is_known and found is None:
            return None
        raise CaptureError(
            "position_ids would be read on the host, or kept for a graph, while a CUDA graph is being captured. Pass "
            "cu_seq_lens_q and cu_seq_lens_k for packed sequences, or no position_ids."
        )
    if not is_known:
        with torch.inference_mode(False), torch.no_grad():  # kept for other calls, which may record gradients
            found = _read_starts(position_ids.expand(batch, seqlen))
        _seen = (weakref.ref(position_ids), position_ids._version, batch, found)
    return found


def _read_starts(positions: torch.Tensor) -> torch.Tensor | None:
    batch, seqlen = positions.shape
    restarts = positions.diff(dim=1) != 1
    if not restarts.any():
        return None
    begins = torch.nn.functional.pad(restarts, (1, 0), value=True).flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(begins, (0, 1), value=batch * seqlen).int()
    if starts.is_cuda:  # other streams may be given it
        torch.cuda.current_stream(starts.device).synchronize()
    return starts


def _are_used_lengths(mask: torch.Tensor | None) -> bool:
    return mask is not None and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[1:] == (1, 1, 1)


def used_lengths(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    config: Any = None,
    use_vmap: bool = False,
    **others: Any,
) -> torch.Tensor | None:
    """What transformers calls to make a mask: the kernels know causal ones and windows, so none is needed but where a
    cache is longer than what it holds (a static one).

    Returns: None, or the keys in use, int32 (batch, 1, 1, 1), which models hand on as a mask that was prepared; the
        last query sees the last of them.
    Raises: InputError if the batch is padded, or the mask is none that kernels know. Inside torch.compile it cannot be
        looked into: masks of a model's own and chunks are refused there, blocks of image tokens are not seen.
    """
    if torch.compiler.is_compiling():
        chunk = getattr(config, "attention_chunk_size", None)
        if use_vmap or (chunk is not None and chunk < kv_offset + kv_length):
            raise InputError(f"{NAME} attention knows causal masks and windows. Choose another attn_implementation.")
        is_causal = "allow_is_bidirectional_skip" not in others
    else:
        if mask_function is not None:
            _refuse_mask(mask_function, kv_offset + kv_length)
        is_causal = _is_causal(mask_function)
    num_tokens = q_offset + q_length - kv_offset
    if attention_mask is not None:
        seen = attention_mask[:, kv_offset : kv_offset + kv_length]
        if not bool(seen.all() if is_causal else attention_mask.all()):
            raise InputError(f"{NAME} attention takes batches without padding. Choose another attn_implementation.")
    if not is_causal or (isinstance(num_tokens, int) and num_tokens == kv_length):
        return None
    if isinstance(num_tokens, int) and not 0 <= num_tokens <= kv_length:
        raise InputError(
            f"queries {q_offset} to {q_offset + q_length} are to see keys {kv_offset} to {kv_offset + kv_length}; the "
            f"last query must be one of the keys. Choose another attn_implementation."
        )
    used = torch.zeros(batch_size, 1, 1, 1, dtype=torch.int32, device=device) + num_tokens
    return used.to(torch.int32)


def _is_causal(mask_function: Callable[..., Any] | None) -> bool:
    """Whether a key is compared with the query's own place. Full attention sees every key of a cache."""
    return mask_function is None or any(part == "causal_mask_function" for part, _ in _parts_of(mask_function))


def _parts_of(function: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, function) of a mask function and of all that it is made of; the name is empty for another's function."""
    is_known = getattr(function, "__module__", None) == "transformers.masking_utils"
    yield (function.__qualname__.split(".")[0] if is_known else ""), function
    for cell in getattr(function, "__closure__", None) or ():
        contents = cell.cell_contents
        for content in contents if isinstance(contents, tuple) else (contents,):
            if callable(content) and hasattr(content, "__qualname__"):
                yield from _parts_of(content)


_UNSERVED = {
    "chunked_overlay": "chunks of tokens that see no other chunk",
    "blockwise_overlay": "blocks of tokens that see each other, as those of an image",
}


def _refuse_mask(mask_function: Callable[..., Any], num_keys: int) -> None:
    """Raises InputError for a mask that is more than causal attention, a window and packed sequences."""
    for name, part in _parts_of(mask_function):
        closed_over = [cell.cell_contents for cell in getattr(part, "__closure__", None) or ()]
        if name == "chunked_overlay" and num_keys <= min(x for x in closed_over if isinstance(x, int)):
            continue
        reason = _UNSERVED.get(name)
        if not name and any(isinstance(x, torch.Tensor) for x in closed_over):
            reason = "a mask of its own that depends on the tokens"
        if reason is None and not name and not torch.compiler.is_compiling() and not _is_band(mask_function, num_keys):
            reason = "a mask of its own"
        if reason is not None:
            raise InputError(
                f"the model asks for {reason}; {NAME} attention knows causal masks, windows and packed sequences. "
                "Choose another attn_implementation for this model."
            )


def _is_band(mask_function: Callable[..., Any], num_keys: int) -> bool:
    """Whether what the first and the last keys see is one range of distances, with the key itself, as in windows."""
    places = torch.tensor(sorted({*range(min(num_keys, 48)), *range(max(0, num_keys - 48), num_keys)}))
    zero = torch.zeros((), dtype=torch.long)
    try:
        seen = [[bool(mask_function(zero, zero, q, k)) for k in places] for q in places]
    except (RuntimeError, TypeError, IndexError, ValueError):
        return False
    by_distance: dict[int, set[bool]] = {}
    for q, row in zip(places.tolist(), seen, strict=True):
        for k, is_seen in zip(places.tolist(), row, strict=True):
            by_distance.setdefault(k - q, set()).add(is_seen)
    seen_at = [by_distance[distance] == {True} for distance in sorted(by_distance)]
    changes = sum(a != b for a, b in itertools.pairwise(seen_at))
    has_own = by_distance.get(0) == {True}
    return has_own and all(len(found) == 1 for found in by_distance.values()) and changes <= 2
