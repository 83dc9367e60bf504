"""Rotary embeddings, in torch's operations: `flash_attn.layers.rotary`, and what a cache call turns.

Numbers: products and sums in float32, rounded once to the type of the rows. Rows beyond the tables are not turned. No
number is read from the device, so everything here may be captured in a CUDA graph.
"""

from typing import Any

import torch

Tensor = torch.Tensor


def turned(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool, back: bool = False) -> Tensor:
    """The first 2 * cos.shape[1] columns of each row turned by its position, the others as they are.

    Args:
        x: (.., num_heads, head_dim). cos, sin: (rows, rotary_dim / 2). positions: the shape of x without its last two.
        interleaved: pairs are columns (0, 1), (2, 3), ..; else (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ..
        back: turn the other way, which is the derivative.
    """
    half = cos.shape[1]
    is_in = ((positions >= 0) & (positions < cos.shape[0]))[..., None, None]
    places = positions.clamp(0, cos.shape[0] - 1).long()
    c = torch.where(is_in, cos[places].unsqueeze(-2).float(), 1.0)
    s = torch.where(is_in, sin[places].unsqueeze(-2).float(), 0.0)
    s = -s if back else s
    head = x[..., : 2 * half].float()
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    pair = (a * c - b * s, a * s + b * c)
    both = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((both.to(x.dtype), x[..., 2 * half :]), -1)


def row_places(starts: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence, place within it, whether there is one) of each of `total` packed rows; int64, int64, bool."""
    rows = torch.arange(total, dtype=torch.int32, device=starts.device)
    sequence = (torch.searchsorted(starts, rows, right=True) - 1).clamp(0, starts.shape[0] - 2)
    return sequence, (rows - starts[sequence]).long(), rows < starts[-1]


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Of every row of x, from 0 in each sequence, plus its sequence's offset."""
    if cu_seqlens is None:
        places = torch.arange(x.shape[1], device=x.device)[None].expand(x.shape[0], -1)
        return places + (offsets[:, None] if isinstance(offsets, Tensor) else offsets)
    sequence, places, _ = row_places(cu_seqlens, x.shape[0])
    return places + (offsets[sequence] if isinstance(offsets, Tensor) else offsets)


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """`turned`, with positions from 0 plus `seqlen_offsets`; x: (batch, seqlen, ..), or (total, ..) with cu_seqlens.

    Returns: x itself where `inplace`.
    """
    found = turned(x, cos, sin, _positions(x, seqlen_offsets, cu_seqlens), interleaved=interleaved, back=conjugate)
    return x.copy_(found) if inplace else found


class _Turn(torch.autograd.Function):
    """apply_rotary with its derivative, also in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inplace: bool, offsets: Any, starts: Any
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, offsets if isinstance(offsets, Tensor) else None, starts)
        ctx.offsets, ctx.interleaved = None if isinstance(offsets, Tensor) else offsets, interleaved
        if inplace:
            ctx.mark_dirty(x)
        return apply_rotary(x, cos, sin, offsets, starts, interleaved=interleaved, inplace=inplace)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, offsets, starts = ctx.saved_tensors
        offsets = ctx.offsets if offsets is None else offsets
        turned_back = apply_rotary(dx, cos, sin, offsets, starts, interleaved=ctx.interleaved, conjugate=True)
        return (turned_back, *(None,) * 6)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """apply_rotary, differentiable in x."""
    turn: Any = _Turn.apply
    made: Tensor = turn(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens)
    return made


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Positions from 0; x: (batch, seqlen, num_heads, head_dim), cos and sin: (seqlen, ..) or (batch, seqlen, ..)."""
    half = cos.shape[-1]
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    head = x[..., : 2 * half]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    pair = (a * c - b * s, a * s + b * c)
    both = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((both, x[..., 2 * half :]), -1)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """q and k within (batch, seqlen, 3, num_heads, head_dim), or (batch, seqlen, heads of all, head_dim), in place."""
    if qkv.dim() == 5:
        q, k = slice(0, 1), slice(1, 2)
        parts = (qkv[:, :, 0], qkv[:, :, 1])
    else:
        assert num_heads_q is not None, "num_heads_q is needed where heads of q, k and v are in one dimension"
        num_heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k = slice(0, num_heads_q), slice(num_heads_q, num_heads_q + num_heads_k)
        parts = (qkv[:, :, q], qkv[:, :, k])
    tables = ((cos, sin), (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k))
    for part, place, table in zip(parts, (q, k), tables, strict=True):
        made = apply_rotary_emb(part, *table, interleaved, False, seqlen_offsets)
        qkv[:, :, place] = made.unsqueeze(2) if qkv.dim() == 5 else made
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """k within (batch, seqlen, 2, num_heads, head_dim), in place."""
    kv[:, :, 0] = apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, False, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """q and k of a layer turned by their positions, in place.

    Args:
        dim: columns that are turned. base: of the frequencies base ** (-2 i / dim). interleaved: as `turned`.
        scale_base: not None asks for xPos, which is not served here.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if scale_base is not None:
            raise NotImplementedError(f"scale_base is {scale_base}; xPos is not served. Pass None")
        self.dim, self.base, self.interleaved, self.scale_base, self.scale = dim, float(base), interleaved, None, None
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self._tables: tuple[Tensor, Tensor] | None = None

    def _compute_inv_freq(self, device: torch.device | None = None) -> Tensor:
        return 1.0 / self.base ** (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _cos_sin(self, seqlen: int, like: Tensor) -> tuple[Tensor, Tensor]:
        known = self._tables
        if (
            known is None
            or known[0].shape[0] < seqlen
            or known[0].device != like.device
            or known[0].dtype != like.dtype
        ):
            places = torch.arange(seqlen, device=like.device, dtype=torch.float32)
            angles = torch.outer(places, self._compute_inv_freq(like.device))
            self._tables = known = (angles.cos().to(like.dtype), angles.sin().to(like.dtype))
        return known

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """qkv: (batch, seqlen, 3, num_heads, head_dim), or heads in one dimension with num_heads_q; or q with `kv`
        (batch, seqlen, 2, num_heads, head_dim). max_seqlen: bound of the positions, needed for offsets in a tensor.
        Returns: qkv, or (q, kv)."""
        if isinstance(seqlen_offset, Tensor) and max_seqlen is None:
            raise ValueError("max_seqlen is needed where seqlen_offset is a tensor, which is not read here")
        last = qkv.shape[1] + seqlen_offset if max_seqlen is None else max_seqlen
        cos, sin = self._cos_sin(int(last), qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, None, None, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)


MODULES = {
    "flash_attn.layers.rotary": (
        "RotaryEmbedding",
        "apply_rotary_emb",
        "apply_rotary_emb_func",
        "apply_rotary_emb_kv_",
        "apply_rotary_emb_qkv_",
        "apply_rotary_emb_torch",
    ),
    "flash_attn.ops.triton.rotary": ("apply_rotary",),
}
