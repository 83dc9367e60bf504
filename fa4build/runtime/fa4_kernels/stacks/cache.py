"""Attention to a cache to which new keys are appended, rotary embeddings included, as FlashAttention-2 and 3 have it.

New keys are turned and written into the caller's cache by torch's operations (no kernel of ours does it), then our
kernels read it. No number is read from the device: it may be captured in a CUDA graph. Keys that do not begin at row 0
of a sequence (`leftpad`) and rows of the cache in another order (`rows`) become lists that the kernels follow; the
cache is not copied for them.
"""

from typing import Any, NamedTuple

import torch

from .. import attention, packed
from ..calls import Arguments, Factors, call_of, capacity_of, check_list, check_tensors, used_lengths
from ..errors import InputError
from .rotary import row_places, turned

Tensor = torch.Tensor


class Cache(NamedTuple):
    """keys, values: (rows, seqlen, num_heads, ..), or pages (num_pages, page_size, num_heads, ..) with `pages`.

    used: keys in use, int32 (batch), or one number, or None. rows: int32 (batch), which row each sequence has.
    leftpad: int32 (batch), where its keys begin. pages: int32 (batch, max_pages).
    """

    keys: Tensor
    values: Tensor
    used: Tensor | int | None
    rows: Tensor | None
    leftpad: Tensor | None
    pages: Tensor | None


class New(NamedTuple):
    """Keys and values to append: (batch, seqlen_new, num_heads, ..), or (total_new, ..) with `starts`."""

    keys: Tensor
    values: Tensor
    starts: Tensor | None


class Rotary(NamedTuple):
    """cos, sin: (rows, rotary_dim / 2). begin: int32 (batch), position of the first new key; None: `used`."""

    cos: Tensor
    sin: Tensor
    begin: Tensor | None
    interleaved: bool


class Query(NamedTuple):
    """rows: (batch, seqlen_q, num_heads, head_dim), or (total_q, ..) with `starts`. options: as of
    flash_attn_with_kvcache, by name. moves: whether a query's position is its own, or that of the first new key.
    wants_lse: a call without is answered sooner."""

    rows: Tensor
    starts: Tensor | None
    max_seqlen: int | None
    options: dict[str, Any]
    moves: bool
    wants_lse: bool


def attend(query: Query, cache: Cache, new: New | None, rotary: Rotary | None) -> tuple[Tensor, Tensor | None]:
    """out, and lse where it is wanted. The cache has the new keys afterwards.

    Raises: InputError, NoKernelError before the cache is changed or anything is launched.
    """
    q = query.rows
    batch = q.shape[0] if query.starts is None else query.starts.shape[0] - 1
    used, total = _checked(query, cache, new, rotary, batch)
    with torch.no_grad():
        if new is not None:
            call = call_of(_arguments(q, query, cache, total), _factors(query.options))
            if not call.is_for_operator:
                attention.launches_for(call)
            if rotary is not None:
                begin = used if rotary.begin is None else rotary.begin
                q, new = _turned(query, new, rotary, begin)
            _append(new, cache, used)
        return _attend(q, query, cache, total)


# --- checks -----------------------------------------------------------------------------------------------------------


def _checked(query: Query, cache: Cache, new: New | None, rotary: Rotary | None, batch: int) -> tuple[Tensor, Tensor]:
    """(keys in use before, and after), int32 (batch)."""
    _check_cache(query, cache, batch)
    capacity = capacity_of(cache.keys, cache.pages)
    assert capacity is not None
    if new is None:
        if rotary is not None:
            raise InputError(
                "rotary_cos is given without k and v; only what is appended is turned, and its queries with it"
            )
        used = _lengths(capacity if cache.used is None else cache.used, batch, query.rows, capacity)
        return used, used
    _check_new(query.rows, cache, new, batch)
    if cache.used is None:
        raise InputError("k and v are given without cache_seqlens; say how many keys each sequence has so far")
    if isinstance(cache.used, int) and new.starts is None and cache.used + new.keys.shape[1] > capacity:
        raise InputError(
            f"{new.keys.shape[1]} keys are to be appended to {cache.used}, and the cache holds {capacity} a sequence"
        )
    if rotary is not None:
        _check_rotary(rotary, query.rows, capacity, batch)
    used = _lengths(cache.used, batch, query.rows, capacity)
    return used, used + (new.keys.shape[1] if new.starts is None else new.starts.diff())


def _lengths(given: Tensor | int, batch: int, q: Tensor, capacity: int) -> Tensor:
    lengths = used_lengths(given, batch, q.device, capacity)
    assert lengths is not None
    return lengths


def _check_cache(query: Query, cache: Cache, batch: int) -> None:
    device = query.rows.device
    check_tensors(q=query.rows, k_cache=cache.keys, v_cache=cache.values)
    for name, given in (("cache_batch_idx", cache.rows), ("cache_leftpad", cache.leftpad)):
        check_list(name, given, (batch,), device)
    check_list("block_table", cache.pages, (batch, None), device)
    check_list("cu_seqlens_q", query.starts, (None,), device)
    if cache.pages is None and cache.rows is None and cache.keys.shape[0] < batch:
        raise InputError(f"k_cache has {cache.keys.shape[0]} rows for {batch} sequences; pass cache_batch_idx")
    if cache.pages is not None and cache.rows is not None:
        raise InputError("cache_batch_idx and a table of pages are both given; pages say where a sequence lies")


def _check_new(q: Tensor, cache: Cache, new: New, batch: int) -> None:
    check_list("cu_seqlens_k_new", new.starts, (batch + 1,), q.device)
    for name, x, into in (("k", new.keys, cache.keys), ("v", new.values, cache.values)):
        if not isinstance(x, Tensor) or x.dtype != into.dtype or x.device != into.device:
            raise InputError(f"{name} must be a tensor of the cache's dtype and device, {into.dtype} on {into.device}")
        if x.dim() != (4 if new.starts is None else 3) or x.shape[-2:] != into.shape[-2:]:
            rows = "(batch, seqlen_new" if new.starts is None else "(total_new"
            raise InputError(
                f"{name} has shape {tuple(x.shape)}; {rows}, {into.shape[-2]}, {into.shape[-1]}) is expected"
            )
    if new.keys.shape[:-1] != new.values.shape[:-1] or (new.starts is None and new.keys.shape[0] != batch):
        shapes = f"k {tuple(new.keys.shape)}, v {tuple(new.values.shape)}"
        raise InputError(f"k and v must have as many rows, and the batch of q, {batch}: {shapes}")


def _check_rotary(rotary: Rotary, q: Tensor, capacity: int, batch: int) -> None:
    cos, sin = rotary.cos, rotary.sin
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or cos.dim() != 2 or cos.shape != sin.shape:
        raise InputError("rotary_cos and rotary_sin must be tensors of one shape, (rows, rotary_dim / 2)")
    if 2 * cos.shape[1] > q.shape[-1] or cos.shape[0] < capacity:
        raise InputError(
            f"rotary_cos has shape {tuple(cos.shape)}; at least {capacity} rows, as the cache has, and at most "
            f"{q.shape[-1] // 2} columns, half of head_dim, are expected"
        )
    if cos.device != q.device or sin.device != q.device:
        raise InputError(f"rotary_cos and rotary_sin must be on the device of q, {q.device}")
    check_list("rotary_seqlens", rotary.begin, (batch,), q.device)


# --- appending --------------------------------------------------------------------------------------------------------


def _turned(query: Query, new: New, rotary: Rotary, begin: Tensor) -> tuple[Tensor, New]:
    """Queries and new keys at their positions."""

    def of(x: Tensor, starts: Tensor | None, moves: bool) -> Tensor:
        if starts is None:
            places = (
                torch.arange(x.shape[1], device=x.device) if moves else torch.zeros(x.shape[1], device=x.device).long()
            )
            positions = begin[:, None] + places
        else:
            sequence, places, _ = row_places(starts, x.shape[0])
            positions = begin[sequence] + places * moves
        return turned(x, rotary.cos, rotary.sin, positions, interleaved=rotary.interleaved)

    return of(query.rows, query.starts, query.moves), new._replace(keys=of(new.keys, new.starts, True))


def _append(new: New, cache: Cache, used: Tensor) -> None:
    """Write the new keys and values behind those in use."""
    if new.starts is None:
        batch, length = new.keys.shape[:2]
        sequence = torch.arange(batch, device=used.device)[:, None].expand(-1, length)
        places, exist = used[:, None].long() + torch.arange(length, device=used.device), None
    else:
        sequence, places, exist = row_places(new.starts, new.keys.shape[0])
        places = places + used[sequence]
    if not places.numel():
        return
    for into, rows in ((cache.keys, new.keys), (cache.values, new.values)):
        where = _place_of(cache, into, sequence, places)
        if exist is not None:
            where, rows = _without_absent(into, where, rows, exist)
        into.index_put_(where, rows)


def _place_of(cache: Cache, into: Tensor, sequence: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """(row or page, place within it) of keys by their sequence and number."""
    if cache.pages is not None:
        size = into.shape[1]
        return cache.pages[sequence, places // size].long(), places % size
    return (sequence if cache.rows is None else cache.rows[sequence].long()), places


def _without_absent(
    into: Tensor, where: tuple[Tensor, Tensor], rows: Tensor, exist: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Rows behind the last sequence write what the first row does; where there is no row at all, what is there."""
    first = where[0][:1].clamp(0, into.shape[0] - 1), where[1][:1].clamp(0, into.shape[1] - 1)
    here = torch.where(exist[:1, None, None], rows[:1], into[first[0], first[1]])  # an index without dimensions is read
    there = tuple(torch.where(exist, x, x0) for x, x0 in zip(where, first, strict=True))
    return (there[0], there[1]), torch.where(exist[:, None, None], rows, here)


# --- attention --------------------------------------------------------------------------------------------------------


def _factors(options: dict[str, Any]) -> Factors:
    return options.get("q_descale"), options.get("k_descale"), options.get("v_descale")


class _Keys(NamedTuple):
    """keys, values and the lists of flash_attn_varlen_func that find a sequence's in them."""

    keys: Tensor
    values: Tensor
    starts: Tensor | None
    pages: Tensor | None
    used: Tensor


def _found(cache: Cache, total: Tensor) -> _Keys:
    keys, values, batch = cache.keys, cache.values, total.shape[0]
    if cache.leftpad is None:
        if cache.pages is not None:
            return _Keys(keys, values, None, cache.pages, total)
        if cache.rows is not None:  # a row of the cache is a page
            return _Keys(keys, values, None, cache.rows[:, None], total)
        return _Keys(keys[:batch], values[:batch], None, None, total)
    used = (total - cache.leftpad).clamp(min=0)
    if cache.pages is None and cache.rows is None:
        begin = torch.nn.functional.pad(cache.leftpad, (0, 1))
        begin = begin + torch.arange(batch + 1, dtype=torch.int32, device=begin.device) * keys.shape[1]
        return _Keys(keys[:batch].flatten(0, 1), values[:batch].flatten(0, 1), begin, None, used)
    table = _single_rows(cache, batch)
    return _Keys(keys.flatten(0, 1).unsqueeze(1), values.flatten(0, 1).unsqueeze(1), None, table, used)


def _single_rows(cache: Cache, batch: int) -> Tensor:
    """A table of pages of one key each, from where a sequence's keys begin."""
    size = cache.keys.shape[1]
    capacity = size * (1 if cache.pages is None else cache.pages.shape[1])
    assert cache.leftpad is not None
    places = cache.leftpad[:, None].long() + torch.arange(capacity, device=cache.leftpad.device)
    places = places.clamp(max=capacity - 1)
    sequence = torch.arange(batch, device=places.device)[:, None].expand_as(places)
    row, place = _place_of(cache, cache.keys, sequence, places)
    return (row * size + place).int()


def _arguments(q: Tensor, query: Query, cache: Cache, total: Tensor) -> Arguments:
    """The call as packed.py takes it."""
    found, options = _found(cache, total), query.options
    return Arguments(
        q, found.keys, found.values, query.starts, found.starts, None, found.used, found.pages, None, query.max_seqlen,
        None, options["softmax_scale"], options["causal"], options["window_size"], options["softcap"],
        options["num_splits"], True,
    )  # fmt: skip


def _attend(q: Tensor, query: Query, cache: Cache, total: Tensor) -> tuple[Tensor, Tensor | None]:
    found = _found(cache, total)
    lists: dict[str, Any] = {"cu_seqlens_q": query.starts, "max_seqlen_q": query.max_seqlen}
    lists["return_lse"] = query.wants_lse
    if found.starts is None:
        return packed.flash_attn_with_kvcache(
            q, found.keys, found.values, found.used, found.pages, **lists, **query.options
        )
    return packed.flash_attn_varlen_func(
        q, found.keys, found.values, cu_seqlens_k=found.starts, seqused_k=found.used, **lists,
        **query.options,
    )  # fmt: skip
