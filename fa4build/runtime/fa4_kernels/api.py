"""Attention on torch tensors. Everything a call checks is checked before anything is launched.

The path of a call is short on purpose: a call like an earlier one is answered in C, where the tensors are read, checked
and launched (`_answer`). Any other comes here: shapes are compared, dtype, device and layout are checked in C. What
depends on neither pointers nor extents is decided once and kept in `_bound`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from . import loader, ops
from .abi import OUTPUT_DTYPES
from .allocation import CAN_ANSWER, lse_scratch, tensor_maker
from .attention import attend, backward, bound_backward, forward
from .autograd import Attention
from .calls import DENSE, Arguments, Call, Factors, call_of, plain, refuse_shapes, with_tensors
from .dispatch import Decision, extents_of, steps_of
from .errors import DriverError, InputError, LayoutError
from .gradients import run_copying
from .observers import autocast
from .packed import (
    flash_attn_combine,  # noqa: F401  public function of the package
    flash_attn_varlen_func,  # noqa: F401  public function of the package
    flash_attn_with_kvcache,  # noqa: F401  public function of the package
    refuse_unserved,
)
from .problems import DTYPES, FP8_DTYPES, TORCH_DTYPES, check_alike, ordinal_of, problem_for, requested_features
from .recipes import call, explain_call  # noqa: F401  public functions of the package
from .scalars import checked_flag, checked_softcap, checked_splits, default_scale, refuse_positional
from .windows import NO_WINDOW, Window, offsets, offsets_of

_MAX_BOUND = 4096
_MASKS = ("full", "causal", "local")  # numbered as in _calls.h


class _Bound(NamedTuple):
    """The kernel of one configuration of dense calls, and what its calls need.

    new_out, new_lse allocate: `tensor.new_empty(a, b, c)` of a tensor that has the dtype already is the fastest way
    torch documents. tell_extents: see `_tell`, or None.
    """

    run: Callable[..., Any]
    num_sms: int
    new_out: Callable[..., torch.Tensor]
    new_lse: Callable[..., torch.Tensor]
    tell_extents: Callable[..., None] | None


# (dtype, head_dim, head_dim_v, device, mask) -> what is bound.
_bound: dict[tuple[Any, ...], _Bound] = loader.remembered("dense")

_is_compiling = torch.compiler.is_compiling
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _answer_none(*arguments: object) -> Any:
    return None


# (q, k, v, softmax_scale, causal, window_size, return_lse) -> (out, lse), or None for a call unlike the earlier ones.
# It is the launcher's from the first kernel on.
_answer: Callable[..., Any] = _answer_none


_UNSERVED = (
    *("qv", "gather_kv_indices", "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars"),
    *("block_sparse_tensors", "block_sparse_tensors_bwd", "gather_bwd_recompute_p", "gather_bwd_token_chunk"),
)
_AFTER_TENSORS = ("softmax_scale", "causal", "window_size")


def _answered_first(complete: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function with `_answer` before it. Each keyword-only argument with a default costs a look-up at each call, so
    the rare ones are named by the complete function alone."""

    @functools.wraps(complete)
    def attention(
        q: Any,
        k: Any,
        v: Any,
        *positional: Any,
        softmax_scale: Any = None,
        causal: Any = False,
        window_size: Any = NO_WINDOW,
        return_lse: Any = False,
        **options: Any,
    ) -> Any:
        if positional:
            refuse_positional("flash_attn_func", "q, k and v", _AFTER_TENSORS, positional)
        if not options and not _is_dynamo_compiling():
            answer = _answer(q, k, v, softmax_scale, causal, window_size, return_lse)
            if answer is not None:
                return answer
        asked = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "return_lse": return_lse}
        return complete(q, k, v, **asked, **options)  # type: ignore[call-arg, arg-type]

    return attention


@_answered_first
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    deterministic: bool | None = None,
    return_lse: bool = False,
    qv: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    pack_gqa: bool | None = None,
    score_mod: object = None,
    score_mod_bwd: object = None,
    mask_mod: object = None,
    aux_tensors: object = None,
    aux_scalars: object = None,
    block_sparse_tensors: object = None,
    block_sparse_tensors_bwd: object = None,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(softmax_scale * q k^T + mask) v, on one device, in one launch; differentiable in q, k and v.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), bf16 or fp16 (fp8 where a pack has it), CUDA.
        k: (batch, seqlen_k, num_heads_kv, head_dim), v: (batch, seqlen_k, num_heads_kv, head_dim_v), dtype and device
            of q. num_heads_q is a multiple of num_heads_kv; query head h reads head h // (num_heads_q // num_heads_kv).
        softmax_scale: positive; default 1 / sqrt(head_dim).
        causal: query i sees key j up to i + seqlen_k - seqlen_q (bottom-right aligned).
        window_size: (left, right) keys seen around i + seqlen_k - seqlen_q, both ends included. None and -1 are
            unbounded, as in FlashAttention-2 and 3 and in torch; (FlashAttention-4 takes -1 for an offset.) Other
            negative numbers are refused, except that two negative ones mean no window. With causal, right is 0.
        deterministic: whether dq must have the same bits in every run, which costs time; the rest always has. None
            follows torch.use_deterministic_algorithms.
        return_lse: also return the log-sum-exp of the scaled scores. It is differentiable.
        learnable_sink, softcap, num_splits, q_descale, k_descale, v_descale: as flash_attn_varlen_func.
        score_mod, mask_mod, ...: need kernels built with them.
        pack_gqa: a hint about speed; not used.
        All but q, k and v are passed by name: releases of flash-attention differ in their order.
    Returns: (out, lse). out: (batch, seqlen_q, num_heads_q, head_dim_v), contiguous, dtype of q (bf16 for fp8).
        lse: (batch, num_heads_q, seqlen_q), float32, natural logarithm; None unless asked for. Rows that see no key:
        out = 0, lse = -inf.
    Raises:
        InputError: the tensors do not belong together, or are not on a GPU.
        NoKernelError: no installed kernel fits, with what was considered and why not; also for inputs that require
            gradients while no backward kernel fits, and for tangents of forward-mode differentiation.
        CaptureError: the kernel is not loaded and a CUDA graph is being captured; see `preload`.
    Contract: a tensor whose last stride is not 1, whose pointer or other strides are not multiples of 16 bytes, or that
        is expanded (stride 0) is copied first. Others are read where they lie. Launches on the current stream. Under
        torch.autocast q, k and v are converted as torch's scaled_dot_product_attention does it; under other modes and
        transforms of torch the call is the operator `torch.ops.fa4_kernels.attention`. There are no second derivatives.
    """
    softcap, num_splits = checked_softcap(softcap), checked_splits(num_splits)
    features = (
        learnable_sink, q_descale, k_descale, v_descale, qv, gather_kv_indices, score_mod, score_mod_bwd, mask_mod,
        aux_tensors, aux_scalars, block_sparse_tensors, block_sparse_tensors_bwd, gather_bwd_recompute_p or None,
        gather_bwd_token_chunk,
    )  # fmt: skip
    if softcap or num_splits != 1 or _is_any_given(features):
        if _is_any_given(features[4:]):
            _refuse_features(q, k, v, causal, window_size, dict(zip(_UNSERVED, features[4:], strict=True)))
        numbers = (None, None, softmax_scale, causal, window_size, softcap, num_splits, return_lse)
        given = Arguments(q, k, v, *DENSE, learnable_sink, *numbers)
        return _attend_with_features(given, (q_descale, k_descale, v_descale), deterministic)
    q, k, v = autocast(q, k, v)
    if not _is_compiling():  # with options that ask for nothing
        answer = _answer(q, k, v, softmax_scale, causal, window_size, return_lse)
        if answer is not None:
            return answer
    asked = plain(q, k, v, softmax_scale, offsets_of(causal, window_size), deterministic)
    return_lse = checked_flag("return_lse", return_lse)
    if asked.is_for_operator or asked.needs_gradients:
        out, lse = _attend(asked, return_lse)
    else:
        out, lse = _dense(asked)
    return out, (lse if return_lse else None)


def _is_any_given(features: tuple[Any, ...]) -> bool:
    for feature in features:
        if feature is not None:
            return True
    return False


def _refuse_features(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window_size: Window, given: dict[str, Any]
) -> None:
    """The error of features that no kernel takes, unless the tensors are no call at all."""
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in (q, k, v)):
        refuse_shapes(q, k, v)
    refuse_unserved(q, v, causal, window_size, "dense", given)


def _attend_with_features(
    given: Arguments, descales: Factors, deterministic: bool | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """flash_attn_func for a call with features."""
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in given[:3]):
        refuse_shapes(*given[:3])
    return_lse = checked_flag("return_lse", given.return_lse)
    cast = with_tensors(given, *autocast(given.q, given.k, given.v))
    out, lse = attend(call_of(cast, descales, deterministic))
    return out, (lse if return_lse else None)


def _attend(asked: Call, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with gradients, inside torch.compile, or while something of torch looks on."""
    q, k, v, scale = asked.q, asked.k, asked.v, asked.softmax_scale
    if asked.is_for_operator:
        return torch.ops.fa4_kernels.attention(q, k, v, scale, *asked.window, asked.deterministic)

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _operator_forward(q, k, v, scale, *asked.window, asked.deterministic)

    launches = bound_backward(asked)
    return Attention.apply(q, k, v, launch, launches, scale, asked.window, asked.deterministic, return_lse)


def _dense(asked: Call, results: tuple[torch.Tensor, torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a dense call without features, without gradients and whoever looks on.

    results: where they are to be written, in any strides that the kernel takes; 16-bit types only.
    """
    q, k, v, window = asked.q, asked.k, asked.v, asked.window
    (batch, seqlen_q, num_heads, head_dim), head_dim_v, mask = q.shape, v.shape[3], window.mask
    bound = _bound.get((q.dtype, head_dim, head_dim_v, q.get_device(), mask))
    if bound is None:
        if q.dtype in FP8_DTYPES:
            return forward(asked)
        bound = _bind(q, k, v, mask)
    if results is None:
        results = bound.new_out(batch, seqlen_q, num_heads, head_dim_v), bound.new_lse(batch, num_heads, seqlen_q)
    out, lse = results
    if asked.is_empty:
        check_alike(q, k, v)
        return out.zero_(), lse.fill_(-math.inf)
    try:
        bound.run(q, k, v, out, lse, asked.softmax_scale, *window, bound.num_sms)
    except LayoutError:
        run_copying(bound.run, [q, k, v], (out, lse, asked.softmax_scale, *window, bound.num_sms))
    if bound.tell_extents is not None:
        bound.tell_extents(q, k, v)
    return out, lse


def attend_into(asked: Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Forward of a dense call without features into `out` and `lse`, for the operators of others: 16-bit types, no
    gradients, no modes.

    Args: out: (batch, seqlen_q, num_heads_q, head_dim_v), any strides with a last one of 1 and others of multiples of
        16 bytes. lse: (batch, num_heads_q, seqlen_q), float32, contiguous.
    Raises: NoKernelError, InputError, LayoutError before anything is launched.
    """
    _dense(asked, (out, lse))


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    deterministic: bool = False,
    op: str = "fwd",
    layout: str = "dense",
    **options: object,
) -> Decision:
    """Which kernel a call would use and why each other was refused; print it. Loads and launches nothing.

    Args: as flash_attn_func; `op` and `layout` ask about other kernels. Where a call needs several kernels, the answer
        is about the first that is missing, or else about the first.
    Raises: InputError when the tensors are not on a GPU or of a dtype no kernel takes.
    """
    mask = offsets_of(causal, window_size).mask
    features = requested_features(options)
    problem = problem_for(q, v, mask, op=op, layout=layout, deterministic=deterministic, features=features)
    ordinal = ordinal_of(
        q
    )  # before the driver is opened: CPU tensors on a machine without one are the caller's mistake
    runtime = loader.runtime()
    if layout == "dense" and q.dim() == k.dim() == 4 and not features and q.dtype not in FP8_DTYPES:
        extents = extents_of("fwd/dense", (q, k), runtime.device(ordinal).sm_count)
        return runtime.decide(replace(problem, extents=extents), ordinal)
    decisions = [runtime.decide(step, ordinal) for step in steps_of(problem)]
    return next((decision for decision in decisions if decision.entry is None), decisions[0])


def preload(devices: list[int] | None = None, select: str | list[str] = "*") -> tuple[str, ...]:
    """Load kernels now instead of at their first call: before capturing a CUDA graph, or before serving.

    Args:
        devices: CUDA ordinals; the current device if None. A device not used by this process so far gets a context.
        select: glob, or globs, over variant ids such as `fwd-sm90a-bf16-*`.
    Returns: the ids that are loaded, sorted.
    """
    runtime = loader.runtime()
    if devices is None:
        devices = [0 if loader.serves_cpu() else _current_device()]
    loaded = runtime.preload(devices, select)
    # torch's allocator may start later, with the first tensor.
    if CAN_ANSWER and (loader.serves_cpu() or torch.cuda.is_initialized()):
        for ordinal in devices:
            device = torch.device("cpu") if loader.serves_cpu() else torch.device("cuda", ordinal)
            lse_scratch(device, is_capturing=runtime.is_capturing)
    return loaded


def _current_device() -> int:
    try:
        return torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:  # a torch without CUDA, or one that finds no device
        raise DriverError(
            f"torch {torch.__version__} has no current CUDA device ({error}). Install a torch built for CUDA, or name "
            "the devices: preload(devices=[0])"
        ) from error


def require_evidence(level: str | None, *, accept_claims: bool = False) -> None:
    """Use only kernels that have passed `level`: static, simulated or silicon; None lifts it. Holds for the process.

    Args:
        accept_claims: whether a pack's word is enough where no record in it backs the level.
    """
    from .dispatch import EVIDENCE_LEVELS

    if level is not None and level not in EVIDENCE_LEVELS:
        raise InputError(f"evidence level {level!r} is unknown. Allowed: {', '.join(EVIDENCE_LEVELS)}.")
    loader.require_evidence(level, accept_claims=accept_claims)


# Below: taken once a configuration, or on the way to an error.


def _bind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str) -> _Bound:
    """Decide, load and remember. Everything in the key of `_bound` is all that the result depends on."""
    check_alike(q, k, v)
    problem, ordinal, head_dim = problem_for(q, v, mask), ordinal_of(q), q.shape[-1]
    runtime = loader.runtime()
    if len(_bound) >= _MAX_BOUND:
        _bound.clear()
    launch = runtime.launch_for(problem, ordinal)
    num_sms = runtime.device(ordinal).sm_count
    out = tensor_maker(TORCH_DTYPES[OUTPUT_DTYPES[problem.dtype]], q.device)
    lse = tensor_maker(torch.float32, q.device)
    bound = _Bound(launch.run, num_sms, out[1], lse[1], None)
    if CAN_ANSWER:
        scratch = lse_scratch(q.device, is_capturing=runtime.is_capturing)
        if scratch is None:  # a capture: its calls are decided each, and the first one after it is remembered
            return bound
        facts = (default_scale(head_dim), num_sms, out, lse, scratch)
        bound = bound._replace(tell_extents=_tell(launch, (_MASKS.index(mask), head_dim, v.shape[-1]), facts))
    _bound[(q.dtype, head_dim, v.shape[-1], q.get_device(), mask)] = bound
    return bound


def _tell(launch: Any, key: tuple[int, int, int], facts: tuple[Any, ...]) -> Callable[..., None] | None:
    """Let the launcher answer further calls, at once or, where the kernel depends on them, for the extents of a call:
    then it returns what is to be called with q, k, v."""
    global _answer
    calls = loader.compiled_calls("ForwardCalls")
    _answer = calls.run
    if not isinstance(launch, loader.ByExtents):
        calls.add(launch, *key, None, *facts)
        return None

    def tell_extents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        calls.add(launch.launch_for(q, k, v), *key, (*q.shape[:3], *k.shape[1:3]), *facts)

    return tell_extents


def _operator_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, left: int, right: int, deterministic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        window = offsets(left, right)
        answer = _answer(q, k, v, softmax_scale, *window.as_asked, True)
        if answer is not None:
            return answer
        return _dense(Call(q, k, v, DENSE, softmax_scale, window))


def _operator_backward(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    left: int,
    right: int,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    asked = Call(q, k, v, DENSE, softmax_scale, offsets(left, right), deterministic=deterministic)
    return backward(asked, (out, lse), dout, dlse)[:3]


ops.define(_operator_forward, _operator_backward, DTYPES)
