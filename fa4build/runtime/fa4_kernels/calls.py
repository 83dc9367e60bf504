"""What a call asks for, as one value: arguments as a caller writes them become a `Call`, or one clear error.

Every front door builds its `Call` here (`call_of`, or `plain` for dense tensors without features), and everything
behind takes nothing else. A check looks at shapes, dtypes and devices alone: what lists of lengths say is the kernels'
business, and is never read. Lists must be int32 on the device of q.
"""

import operator
from typing import Any, NamedTuple, NoReturn

import torch

from .allocation import equal_starts, no_numbers
from .errors import InputError
from .observers import is_observed, may_be_transformed, refuse_transforms
from .problems import FP8_DTYPES
from .scalars import checked_bound, checked_flag, checked_scale, checked_softcap, checked_splits
from .windows import Offsets, offsets_of

Tensor = torch.Tensor
Factors = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_FACTORS: Factors = (None, None, None)
_are_deterministic = torch.are_deterministic_algorithms_enabled
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled


class Lists(NamedTuple):
    """Where sequences lie, int32 on the device of q; all None for the dense layout.

    cu_seqlens_q, cu_seqlens_k: (batch + 1). page_table: (batch, max_pages). seqused_q, seqused_k: (batch).
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    page_table: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None

    @property
    def layout(self) -> str:
        """Of the kernels that read these."""
        return "dense" if self.cu_seqlens_q is None else "varlen" if self.page_table is None else "paged"

    def arguments(self) -> tuple[Tensor, ...]:
        """In the order of the signatures; a list without elements where none is given."""
        if self.cu_seqlens_q is None:
            return ()
        keys = self.cu_seqlens_k if self.page_table is None else self.page_table
        assert keys is not None
        used_q, used_k = self.seqused_q, self.seqused_k
        if used_q is None or used_k is None:
            nothing = no_numbers(self.cu_seqlens_q.device)
            used_q, used_k = nothing if used_q is None else used_q, nothing if used_k is None else used_k
        return self.cu_seqlens_q, keys, used_q, used_k


DENSE = Lists()


def with_tensors(given: "Arguments", q: Tensor, k: Tensor, v: Tensor) -> "Arguments":
    """The arguments with these in place of theirs; themselves where none is another."""
    same = q is given.q and k is given.k and v is given.v
    return given if same else given._replace(q=q, k=k, v=v)


class Call(NamedTuple):
    """One call, checked: q, k, v in the shapes of the signature that `lists` selects, any strides.

    window: as kernels take it; the mask follows from it. softcap: 0 = none. sink: float32 (num_heads_q). descales:
    float32 (batch, num_heads_kv) for q, k, v; None = 1. num_splits: below 1 = chosen by what launches. max_seqlen_q,
    max_seqlen_k: bounds that the caller knows, or None. deterministic: of the gradients. batch_shape: (batch, seqlen_q)
    of the caller's q where its rows were put one behind the other, else None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lists: Lists
    softmax_scale: float
    window: Offsets
    softcap: float = 0.0
    sink: Tensor | None = None
    descales: Factors = NO_FACTORS
    num_splits: int = 1
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    deterministic: bool = False
    batch_shape: tuple[int, int] | None = None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        starts = self.lists.cu_seqlens_q
        return self.q.shape[0] if starts is None else starts.shape[0] - 1

    @property
    def is_empty(self) -> bool:
        """Whether no query can see a key, so that nothing is launched."""
        if not (self.q.numel() and self.k.numel() and self.v.numel()) or self.window.sees_nothing:
            return True
        return self.lists is not DENSE and not self.batch

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of the result, in the shape of q."""
        return (*self.q.shape[:-1], self.v.shape[-1])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """One number a row: (batch, num_heads_q, seqlen_q), or (num_heads_q, total_q)."""
        *batch, rows, heads = self.q.shape[:-1]
        return (*batch, heads, rows)

    @property
    def is_for_operator(self) -> bool:
        """Whether a compiler or a mode of torch looks on."""
        if _is_compiling() or is_observed(self.q, self.k, self.v):
            return True
        return (self.lists is not DENSE and is_observed(*self.lists)) or is_observed(self.sink)

    @property
    def needs_gradients(self) -> bool:
        """Whether gradients are recorded for one of the inputs."""
        if not _is_grad_enabled():
            return False
        sink_needs = self.sink is not None and self.sink.requires_grad
        return self.q.requires_grad or self.k.requires_grad or self.v.requires_grad or sink_needs

    def as_given(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Results in the shapes of the caller's q."""
        if self.batch_shape is None:
            return out, lse
        return out.unflatten(0, self.batch_shape), lse.unflatten(1, self.batch_shape).transpose(0, 1)

    def as_launched(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """What `as_given` gave, or something like it, in the shapes that kernels have."""
        if self.batch_shape is None:
            return out, lse
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


class Arguments(NamedTuple):
    """What a call depends on, as flash_attn_varlen_func names it; `answer` takes a plain tuple in this order."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    page_table: Tensor | None
    learnable_sink: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int | None, int | None]
    softcap: float
    num_splits: int
    return_lse: bool


# --- building ---------------------------------------------------------------------------------------------------------


def call_of(
    given: Arguments,
    descales: Factors = NO_FACTORS,
    deterministic: bool | None = None,
    *,
    window: Offsets | None = None,
    names: tuple[str, ...] = ("k", "v"),
    is_operator: bool = False,
) -> Call:
    """The call that these arguments ask for.

    Args:
        deterministic: None follows torch.use_deterministic_algorithms.
        window: in place of `causal` and `window_size`.
        names: what the caller calls k and v; empty where it has had them checked.
        is_operator: whether this is the inside of an operator of torch, which sees no tangent and no transform.
    Raises: InputError; NoKernelError for tangents and tensors inside a transform of torch.
    """
    q, k, v = given.q, given.k, given.v
    if names:
        check_tensors(**dict(zip(("q", *names), (q, k, v), strict=True)))
    lists = Lists(given.cu_seqlens_q, given.cu_seqlens_k, given.page_table, given.seqused_q, given.seqused_k)
    sink = given.learnable_sink
    if not is_operator and may_be_transformed():
        refuse_transforms(q=q, k=k, v=v, learnable_sink=sink, **lists._asdict(), **_named(descales))
    longest = checked_bound("max_seqlen_q", given.max_seqlen_q), checked_bound("max_seqlen_k", given.max_seqlen_k)
    if q.dim() == k.dim() == 4 and all(x is None for x in lists):
        placed = _dense(q, k, v)
    else:
        placed = _packed((q, k, v), lists, longest)
    call = Call(
        *placed.rows,
        placed.lists,
        checked_scale(given.softmax_scale, q.shape[-1]),
        offsets_of(given.causal, given.window_size) if window is None else window,
        checked_softcap(given.softcap),
        checked_sink(sink, q.shape[-2], q.device),
        NO_FACTORS,
        checked_splits(given.num_splits),
        *placed.longest,
        _is_deterministic(deterministic),
        placed.batch_shape,
    )
    if descales is NO_FACTORS or all(factor is None for factor in descales):
        return call
    return call._replace(descales=_checked_descales(descales, q, (call.batch, k.shape[-2])))


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    window: Offsets,
    deterministic: bool | None = None,
    *,
    is_operator: bool = False,
) -> Call:
    """The same for dense tensors without features: (batch, seqlen, num_heads, head_dim) all. The shorter way.

    Raises: as call_of.
    """
    try:
        batch, _, num_heads_q, head_dim = q.shape
        batch_k, seqlen_k, num_heads_kv, head_dim_k = k.shape
        batch_v, seqlen_v, num_heads_v, _ = v.shape
    except (AttributeError, ValueError):
        refuse_shapes(q, k, v)
    if (
        not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor))
        or head_dim != head_dim_k
        or batch != batch_k
        or batch != batch_v
        or seqlen_k != seqlen_v
        or num_heads_kv != num_heads_v
        or (num_heads_q % num_heads_kv if num_heads_kv else num_heads_q)
    ):
        refuse_shapes(q, k, v)
    if not is_operator and may_be_transformed():
        refuse_transforms(q=q, k=k, v=v)
    is_deterministic = _is_deterministic(deterministic)
    return Call(q, k, v, DENSE, checked_scale(softmax_scale, head_dim), window, deterministic=is_deterministic)


def _is_deterministic(deterministic: bool | None) -> bool:
    return _are_deterministic() if deterministic is None else checked_flag("deterministic", deterministic)


def _named(descales: Factors) -> dict[str, Tensor | None]:
    return dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))


class _Placed(NamedTuple):
    """Where kernels find the rows of a call: q, k, v and what `Call` says about them. longest: of both lengths."""

    rows: tuple[Tensor, Tensor, Tensor]
    lists: Lists
    longest: tuple[int | None, int | None]
    batch_shape: tuple[int, int] | None


def _dense(q: Tensor, k: Tensor, v: Tensor) -> _Placed:
    if q.shape[0] != k.shape[0]:
        raise InputError(f"batch differs: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    return _Placed((q, k, v), DENSE, (None, None), None)


def _packed(rows: tuple[Tensor, Tensor, Tensor], lists: Lists, longest: tuple[int | None, int | None]) -> _Placed:
    """With the rows of every sequence behind the other, keys in pages apart, and complete lists."""
    (q, k, v), (cu_seqlens_q, cu_seqlens_k, page_table, seqused_q, seqused_k) = rows, lists
    batch, device, (longest_q, longest_k), batch_shape = batch_of(q, cu_seqlens_q), q.device, longest, None
    for name, given in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_list(name, given, (batch + 1,), device)
    for name, given in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        check_list(name, given, (batch,), device)
    check_list("page_table", page_table, (batch, None), device)
    if cu_seqlens_q is None:
        longest_q = q.shape[1]
        batch_shape = (batch, longest_q)
        cu_seqlens_q, q = equal_starts(batch, longest_q, device), q.flatten(0, 1)
    if page_table is not None:
        _check_pages(k, cu_seqlens_k, seqused_k)
        longest_k = page_table.shape[1] * k.shape[1] if longest_k is None else longest_k
    elif cu_seqlens_k is None:
        _check_keys_of_batch(k, batch)
        longest_k = k.shape[1] if longest_k is None else longest_k
        cu_seqlens_k, k, v = equal_starts(batch, k.shape[1], device), k.flatten(0, 1), v.flatten(0, 1)
    elif k.dim() != 3:
        raise InputError(
            f"k has shape {tuple(k.shape)}; with cu_seqlens_k (total_k, num_heads_kv, head_dim) is expected"
        )
    complete = Lists(cu_seqlens_q, cu_seqlens_k, page_table, seqused_q, seqused_k)
    return _Placed((q, k, v), complete, (longest_q, longest_k), batch_shape)


def _check_keys_of_batch(k: Tensor, batch: int) -> None:
    if k.dim() != 4 or k.shape[0] != batch:
        raise InputError(
            f"k has shape {tuple(k.shape)} and there is no cu_seqlens_k; "
            f"({batch}, seqlen_k, num_heads_kv, head_dim) is expected"
        )


# --- checks -----------------------------------------------------------------------------------------------------------


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


def batch_of(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    """Number of sequences of q. Raises: InputError for shapes that have none."""
    if cu_seqlens_q is None:
        if q.dim() != 4:
            raise InputError(
                f"q has shape {tuple(q.shape)} and there is no cu_seqlens_q; (batch, seqlen_q, num_heads, head_dim) is "
                "expected, or cu_seqlens_q"
            )
        return q.shape[0]
    if not isinstance(cu_seqlens_q, Tensor):
        check_list("cu_seqlens_q", cu_seqlens_q, (None,), q.device)
    if q.dim() != 3 or cu_seqlens_q.dim() != 1 or not cu_seqlens_q.numel():
        raise InputError(
            f"q has shape {tuple(q.shape)} and cu_seqlens_q {tuple(cu_seqlens_q.shape)}; "
            "(total_q, num_heads, head_dim) and (batch + 1) are expected"
        )
    return cu_seqlens_q.shape[0] - 1


def _check_pages(k: Tensor, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None) -> None:
    if k.dim() != 4:
        raise InputError(f"k has shape {tuple(k.shape)}; (num_pages, page_size, num_heads_kv, head_dim) is expected")
    if cu_seqlens_k is not None:
        raise InputError("cu_seqlens_k and page_table are both given; pages have no starts. Leave cu_seqlens_k out.")
    if seqused_k is None:
        raise InputError("page_table is given and seqused_k is not; say how many keys each sequence has")


def checked_sink(sink: Tensor | None, num_heads: int, device: torch.device) -> Tensor | None:
    """In float32, differentiable. Raises: InputError for another shape or device."""
    if sink is None:
        return None
    if not isinstance(sink, Tensor):
        raise InputError(f"learnable_sink is a {type(sink).__name__}; a tensor ({num_heads},) on {device} is expected")
    if not sink.is_floating_point():
        raise InputError(f"learnable_sink is {sink.dtype}; logits of a floating type are expected")
    if sink.shape != (num_heads,) or sink.device != device:
        raise InputError(
            f"learnable_sink has shape {tuple(sink.shape)} on {sink.device}; ({num_heads},), one a query head, "
            f"on {device} is expected"
        )
    return sink.float().contiguous()


def _checked_descales(descales: Factors, q: Tensor, shape: tuple[int, int]) -> Factors:
    for name, given in _named(descales).items():
        if given is None:
            continue
        if q.dtype not in FP8_DTYPES:
            raise InputError(f"{name} is given for {q.dtype}; factors belong to fp8 tensors. Leave it out.")
        if given.shape != shape or given.dtype != torch.float32 or given.device != q.device:
            raise InputError(
                f"{name} is {given.dtype} {tuple(given.shape)} on {given.device}; float32 {shape}, one a sequence and "
                f"key head, on {q.device} is expected"
            )
        if given.requires_grad and _is_grad_enabled():
            raise InputError(f"{name} requires grad, and no kernel computes its gradient; pass {name}.detach()")
    q_factor, k_factor, v_factor = (None if given is None else given.contiguous() for given in descales)
    return q_factor, k_factor, v_factor


def capacity_of(cache: Tensor, page_table: Tensor | None) -> int | None:
    """Keys that the cache of a sequence holds; None where shapes do not say, which is another check's error."""
    if cache.dim() != 4 or (page_table is not None and (not isinstance(page_table, Tensor) or page_table.dim() != 2)):
        return None
    return cache.shape[1] * (1 if page_table is None else page_table.shape[1])


def used_lengths(cache_seqlens: Any, batch: int, device: torch.device, capacity: int | None) -> Tensor | None:
    """One number a sequence. Raises: InputError for what is neither a list of numbers nor a number up to `capacity`,
    the keys that a sequence's cache holds; a list is not looked into."""
    if cache_seqlens is None:
        return None
    if not isinstance(cache_seqlens, Tensor):
        if isinstance(cache_seqlens, bool) or not hasattr(cache_seqlens, "__index__"):
            raise InputError(f"cache_seqlens must be an int or an int32 tensor ({batch},), it is {cache_seqlens!r}")
        number = operator.index(cache_seqlens)
        if number < 0 or (capacity is not None and number > capacity):
            raise InputError(f"cache_seqlens is {number}; a sequence's cache holds 0 to {capacity} keys")
        return torch.full((batch,), number, dtype=torch.int32, device=device)
    if cache_seqlens.is_floating_point():
        raise InputError(
            f"cache_seqlens is {cache_seqlens.dtype} of shape {tuple(cache_seqlens.shape)}; int32 ({batch},), the keys "
            "in use, is expected. New keys and values are not appended here: write them into the cache first"
        )
    check_list("cache_seqlens", cache_seqlens, (batch,), device)
    return cache_seqlens


def refuse_shapes(q: Tensor, k: Tensor, v: Tensor) -> NoReturn:
    """The error of dense tensors that do not go together: which, and what is expected."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}, a torch tensor is expected")
        if tensor.dim() != 4:
            expected = "(batch, seqlen, num_heads, head_dim)"
            raise InputError(f"{name} has shape {tuple(tensor.shape)}; {expected} is expected")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.shape[0] != k.shape[0] or q.shape[0] != v.shape[0]:
        raise InputError(f"batch differs: {shapes}")
    if k.shape[1] != v.shape[1]:
        raise InputError(f"seqlen_k of k and v differs: {shapes}")
    if k.shape[2] != v.shape[2]:
        raise InputError(f"num_heads_kv of k and v differs: {shapes}")
    if q.shape[3] != k.shape[3]:
        raise InputError(f"head_dim of q and k differs: {shapes}")
    raise InputError(f"num_heads_q = {q.shape[2]} is no multiple of num_heads_kv = {k.shape[2]}: {shapes}")
