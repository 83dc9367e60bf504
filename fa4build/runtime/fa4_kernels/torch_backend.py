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
from .api import attend_into, gradients_into
from .errors import InputError, NoKernelError
from .general import Call, Lists, backward, forward
from .problems import NO_WINDOW, canonical_mask, checked_scale

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
    """out and lse of either layout."""
    _keep_what_is_not_ours(q, dropout_p, return_debug_mask, alibi_slopes)
    _, left, right = canonical_mask(is_causal, (_side(window_size_left), _side(window_size_right)))
    if starts[0] is None:
        if seqused_k is not None or block_table is not None:
            raise _Kept("dense queries with seqused_k or block_table")
        if (window_size_left, window_size_right) not in ((None, None), (-1, -1)):
            return forward(_call(q, k, v, Lists(), scale, (left, right)))
        return _dense(q, k, v, scale, is_causal)
    if block_table is not None and seqused_k is None:
        raise _Kept("block_table without seqused_k")
    if block_table is None and starts[1] is None:
        raise _Kept("packed queries without cum_seq_k")
    starts_k = None if block_table is not None else starts[1]
    lists = Lists(starts[0], starts_k, block_table, None, seqused_k)
    bound_k = k.shape[1] * block_table.shape[1] if block_table is not None else bounds[1]
    call = _call(q, k, v, lists, scale, (left, right))
    return forward(call._replace(num_splits=num_splits or 0, max_seqlen_q=bounds[0], max_seqlen_k=bound_k))


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
    _, left, right = canonical_mask(is_causal, (_side(window_size_left), _side(window_size_right)))
    has_window = (window_size_left, window_size_right) not in ((None, None), (-1, -1))
    if cum_seq_q is None and not has_window:
        return _dense_gradients(query, key, value, out, logsumexp, grad_out, scale, is_causal)
    if (cum_seq_q is None) != (cum_seq_k is None):
        raise _Kept("packed queries without cum_seq_k")
    call = _call(query, key, value, Lists(cum_seq_q, cum_seq_k), scale, (left, right))
    deterministic = torch.are_deterministic_algorithms_enabled()
    return backward(call, out, logsumexp, grad_out, None, deterministic=deterministic)[:3]


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


def _side(window: int | None) -> int | None:
    return None if window is None or window < 0 else window


def _call(q: Tensor, k: Tensor, v: Tensor, lists: Lists, scale: float | None, window: tuple[int, int]) -> Call:
    return Call(q, k, v, lists, checked_scale(scale, q.shape[-1]), window)


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    """(out in the strides of q, lse); (batch, seqlen, num_heads, head_dim) all."""
    batch, seqlen_q, num_heads, _ = q.shape
    if seqlen_q <= _FEW_QUERIES and k.shape[1] >= _MANY_KEYS:
        _, left, right = canonical_mask(is_causal, NO_WINDOW)
        return forward(_call(q, k, v, Lists(), scale, (left, right))._replace(num_splits=0))
    out = _like(q) if q.shape[3] == v.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((batch, num_heads, seqlen_q), dtype=torch.float32)
    attend_into(q, k, v, out, lse, softmax_scale=scale, causal=is_causal)
    return out, lse


def _dense_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, scale: float | None, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the strides of q, k, v."""
    gradients = (_like(q), _like(k), _like(v))
    gradients_into(
        gradients,
        (q, k, v, out, lse),
        dout,
        softmax_scale=checked_scale(scale, q.shape[3]),
        causal=is_causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return gradients


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
