"""torch's own attention on our kernels: `F.scaled_dot_product_attention` and `torch.nn.attention.varlen`, unedited.

    fa4_kernels.provide("torch")                                             # or, as torch spells it:
    torch.nn.attention.activate_flash_attention_impl("fa4_kernels")          # after `import fa4_kernels.torch_backend`

Five operators of aten get another CUDA kernel: `_scaled_dot_product_flash_attention`, `_flash_attention_forward`, its
in-place form, and their backwards. A call that our kernels cannot take goes to the kernel that torch had, and is
counted with its reason (`served`). While it is active, flash attention comes first among the backends of
scaled_dot_product_attention, where torch prefers cuDNN on these GPUs, and varlen attention does not ask cuDNN.
Tried with torch 2.11 and 2.14. Windows and alignment are torch's: -1 is unbounded, causal is aligned bottom right.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import counts
from .allocation import tensor_for_all
from .api import attend_into
from .attention import backward, forward
from .calls import Arguments, Call, Lists, call_of, plain
from .errors import InputError, NoKernelError
from .windows import NO_WINDOW, Window, offsets_of, sides_without_negatives

Tensor = torch.Tensor
NAME = "fa4_kernels"
_FLASH, _CUDNN = 1, 3  # of torch's enumeration SDPBackend
_FEW_QUERIES, _MANY_KEYS = 16, 1024  # of a dense call whose keys may be split
_DTYPES = (torch.float16, torch.bfloat16)
_OPERATORS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_flash_attention_backward",
)
_DISPATCH_KEY = "CUDA"  # the tests put another in its place


class _Kept(Exception):
    """The call is torch's; the argument says why."""


def register() -> None:
    """Tell torch of the implementation `fa4_kernels`, without activating it. Doing so again changes nothing.

    Raises: InputError where this torch has no registry (before 2.11).
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        raise InputError(
            f"torch {torch.__version__} has no registry of flash attention implementations; 2.11 or later is needed. "
            "Call fa4_kernels.flash_attn_func, or use fa4_kernels.sdpa.scaled_dot_product_attention."
        ) from error
    register_flash_attention_impl(NAME, register_fn=activate)


def activate(**options: object) -> "Activation":
    """What torch calls on `activate_flash_attention_impl("fa4_kernels")`; torch keeps what it returns alive."""
    if options:
        raise InputError(f"fa4_kernels takes no options, {', '.join(options)} given")
    return Activation()


class Activation:
    """Our kernels in torch's operators, until `remove`. Forgetting the object removes them, too."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        implementations = (_sdpa, _sdpa_backward, _flash, _flash_inplace, _flash_backward)
        for name, implementation in zip(_OPERATORS, implementations, strict=True):
            overload = getattr(torch.ops.aten, name, None)
            if overload is None:  # the in-place form is younger than the others
                continue
            original = torch.library.get_kernel(f"aten::{name}", _DISPATCH_KEY)
            with warnings.catch_warnings():  # torch 2.11 warns of an override, which is what this is
                warnings.simplefilter("ignore", UserWarning)
                operator = _with_fallback(name, implementation, original)
                self._library.impl(name, operator, _DISPATCH_KEY, with_keyset=True)
        self._undo = [_prefer_flash(), _leave_cudnn_varlen()]

    def remove(self) -> None:
        """Give torch its own kernels and its own order of backends back."""
        if self._library is None:
            return
        self._library._destroy()
        self._library = None
        for undo in self._undo:
            undo()


def _prefer_flash() -> Callable[[], None]:
    """Flash attention before the other backends; returns what undoes it."""
    before = list(torch._C._get_sdp_priority_order())
    torch._C._set_sdp_priority_order([_FLASH, *(backend for backend in before if backend != _FLASH)])
    return lambda: torch._C._set_sdp_priority_order(before)


def _leave_cudnn_varlen() -> Callable[[], None]:
    """torch.nn.attention.varlen asks flash attention, not cuDNN; returns what undoes it."""
    from torch.nn.attention import varlen

    before = getattr(varlen, "_should_use_cudnn", None)
    if before is None:
        return lambda: None
    varlen._should_use_cudnn = lambda *_: False  # type: ignore[assignment]
    return lambda: setattr(varlen, "_should_use_cudnn", before)


def _with_fallback(name: str, ours: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """`ours`, or torch's own kernel where it cannot serve; nothing has been launched by then."""

    def operator(keys: Any, *arguments: Any, **options: Any) -> Any:
        try:
            results = ours(*arguments, **options)
        except (_Kept, NoKernelError, InputError) as reason:
            counts.kept("torch", name, str(reason).partition("\n")[0])
            return original.call_boxed(keys, *arguments, **options)
        counts.answered("torch", name)
        return results

    return operator


# --- the operators ----------------------------------------------------------------------------------------------------


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """q, k, v: (batch, num_heads, seqlen, head_dim); out in the strides of q."""
    _keep_what_is_not_ours(query, dropout_p, return_debug_mask)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out, lse = _dense(q, k, v, scale, is_causal)
    state, unused = _random_state(query.device)
    return out.transpose(1, 2), lse, None, None, query.shape[2], key.shape[2], state, unused, _no_debug_mask(query)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> tuple[Any, ...]:
    """Dense (batch, seqlen, num_heads, head_dim), or packed (total, num_heads, head_dim) with cum_seq_q."""
    starts, bounds = (cum_seq_q, cum_seq_k), (max_q, max_k)
    out, lse = _attend(query, key, value, starts, bounds, dropout_p, is_causal, return_debug_mask, **options)
    return out, lse, *_random_state(query.device), _no_debug_mask(query)


def _flash_inplace(out: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """As `_flash`, with the result in `out`; returns the log-sum-exp."""
    starts, bounds, rest = arguments[:2], arguments[2:4], arguments[4:]
    result, lse = _attend(query, key, value, starts, bounds, *rest, **options)
    out.copy_(result)
    return lse


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor | None, Tensor | None],
    bounds: tuple[int, int],
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of either layout, out in the strides of q."""
    _keep_what_is_not_ours(q, dropout_p, return_debug_mask, alibi_slopes)
    window = sides_without_negatives((window_size_left, window_size_right))
    if starts[0] is None:
        if seqused_k is not None or block_table is not None:
            raise _Kept("dense queries with seqused_k or block_table")
        return _dense(q, k, v, scale, is_causal, window)
    if block_table is not None and seqused_k is None:
        raise _Kept("block_table without seqused_k")
    if block_table is None and starts[1] is None:
        raise _Kept("packed queries without cum_seq_k")
    starts_k = None if block_table is not None else starts[1]
    bound_k = k.shape[1] * block_table.shape[1] if block_table is not None else bounds[1]
    lists = Lists(starts[0], starts_k, block_table, None, seqused_k)
    call = _packed(q, k, v, lists, scale, is_causal, window)
    return _forward(call._replace(num_splits=num_splits or 0, max_seqlen_q=bounds[0], max_seqlen_k=bound_k))


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of `_sdpa`, in the strides of q, k and v."""
    _keep_what_is_not_ours(query, dropout_p)
    q, k, v, o, do = (x.transpose(1, 2) for x in (query, key, value, out, grad_out))
    return tuple(x.transpose(1, 2) for x in _dense_gradients(q, k, v, o, logsumexp, do, scale, is_causal))


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `_flash`."""
    _keep_what_is_not_ours(query, dropout_p)
    window = sides_without_negatives((window_size_left, window_size_right))
    if cum_seq_q is None and cum_seq_k is None:
        return _dense_gradients(query, key, value, out, logsumexp, grad_out, scale, is_causal, window)
    if cum_seq_q is None or cum_seq_k is None:
        raise _Kept("packed queries without cum_seq_k")
    call = _packed(query, key, value, Lists(cum_seq_q, cum_seq_k), scale, is_causal, window)
    return _gradients(call, out, logsumexp, grad_out)


# --- what they share --------------------------------------------------------------------------------------------------


def _keep_what_is_not_ours(
    query: Tensor, dropout_p: float, return_debug_mask: bool = False, alibi_slopes: Tensor | None = None
) -> None:
    """Raises _Kept for what no kernel of ours computes; head dims and masks are the dispatcher's to judge."""
    if dropout_p:
        raise _Kept("dropout")
    if return_debug_mask:
        raise _Kept("return_debug_mask")
    if alibi_slopes is not None:
        raise _Kept("alibi_slopes")
    if query.dtype not in _DTYPES:
        raise _Kept(f"dtype {query.dtype}")


def _packed(
    q: Tensor, k: Tensor, v: Tensor, lists: Lists, scale: float | None, is_causal: bool, window: Window
) -> Call:
    given = Arguments(q, k, v, *_in_order(lists), None, None, None, scale, is_causal, window, 0.0, 1, True)
    return call_of(given, is_operator=True)


def _in_order(lists: Lists) -> tuple[Tensor | None, ...]:
    return lists.cu_seqlens_q, lists.cu_seqlens_k, lists.seqused_q, lists.seqused_k, lists.page_table


def _dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool, window: Window = NO_WINDOW
) -> tuple[Tensor, Tensor]:
    """(out in the strides of q, lse); (batch, seqlen, num_heads, head_dim) all."""
    call = plain(q, k, v, scale, offsets_of(is_causal, window), is_operator=True)
    if call.q.shape[1] <= _FEW_QUERIES and k.shape[1] >= _MANY_KEYS:
        return _forward(call._replace(num_splits=0))
    results = _results(call)
    attend_into(call, *results)
    return results


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    return forward(call, _results(call))


def _results(call: Call) -> tuple[Tensor, Tensor]:
    """Where a forward writes: out in the strides of q, as the operators promise."""
    q = call.q
    out = _like(q) if q.shape[-1] == call.v.shape[-1] else q.new_empty(call.out_shape)
    return out, q.new_empty(call.lse_shape, dtype=torch.float32)


def _dense_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float | None,
    is_causal: bool,
    window: Window = NO_WINDOW,
) -> tuple[Tensor, Tensor, Tensor]:
    call = plain(q, k, v, scale, offsets_of(is_causal, window), is_operator=True)
    return _gradients(call, out, lse, dout)


def _gradients(call: Call, out: Tensor, lse: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the strides of q, k, v."""
    return backward(call, (out, lse), dout, None, (_like(call.q), _like(call.k), _like(call.v)))[:3]


def _like(x: Tensor) -> Tensor:
    """Of the strides that torch's own kernels give, where a kernel of ours can write them."""
    made = torch.empty_like(x)
    return made if made.stride(-1) == 1 else x.new_empty(x.shape)


_states: dict[torch.device, Tensor] = {}


def _random_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """What the operators return in place of a seed and an offset: there is no dropout, and nobody writes them."""
    state = _states.get(device)
    if state is None:
        state = tensor_for_all(lambda: torch.zeros(2, dtype=torch.uint64, device=device), device)
        if state is None:
            state = torch.zeros(2, dtype=torch.uint64, device=device)
        else:
            state = _states.setdefault(device, state)
    return state, state[0]


def _no_debug_mask(query: Tensor) -> Tensor:
    return query.new_empty(0)
