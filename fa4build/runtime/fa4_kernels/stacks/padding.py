"""`flash_attn.bert_padding`: rows with padding to packed rows and back, in torch's operations."""

import torch
from torch.nn.functional import pad

Tensor = torch.Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows at `indices`; differentiable."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """`first_axis_dim` rows of zeros with `values` at `indices`; differentiable."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The rows at `indices`, and the input, whose gradients join."""
    return input[indices], input


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Rows (batch, seqlen, ..) that a mask (batch, seqlen) keeps, one behind the other.

    Args: attention_mask: 1 or True for rows in use; unused_mask: for rows that are kept, but not in use.
    Returns: (rows, their places, cu_seqlens, longest sequence, rows in use of each), lists in int32, places in int64.
    Reads from the device how many rows there are.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = (mask.sum(-1, dtype=torch.int32) for mask in (kept, attention_mask))
    places = kept.flatten().nonzero().flatten()
    rows = hidden_states.flatten(0, 1)[places]
    return rows, places, _starts(lengths), int(lengths.max().item()), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same for rows that hold several sequences: the mask begins with their lengths, and has zeros behind them."""
    seqlen = attention_mask_in_length.shape[-1]
    in_use = torch.arange(seqlen, device=hidden_states.device)[None] < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths.nonzero().flatten()].int()
    places = in_use.flatten().nonzero().flatten()
    return hidden_states.flatten(0, 1)[places], places, _starts(lengths), int(lengths.max().item())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed rows back at their places in (batch, seqlen, ..), with zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _starts(lengths: Tensor) -> Tensor:
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


MODULES = {
    "flash_attn.bert_padding": (
        "index_first_axis",
        "index_first_axis_residual",
        "index_put_first_axis",
        "pad_input",
        "unpad_input",
        "unpad_input_for_concatenated_sequences",
    )
}
