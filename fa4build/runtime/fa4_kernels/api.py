"""Attention on torch tensors. Everything a call checks is checked before anything is launched.

The path of a call is short on purpose: a call like an earlier one is answered in C, where the tensors are read, checked
and launched (`_answer`). Any other comes here: shapes are compared, dtype, device and layout are checked in C. What
depends on neither pointers nor extents is decided once and kept in `_bound`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from . import loader, ops
from .abi import OUTPUT_DTYPES, WINDOW_UNBOUNDED
from .allocation import CAN_ANSWER, lse_scratch, tensor_maker
from .autograd import Attention
from .dispatch import Decision, extents_of, steps_of
from .errors import DriverError, InputError, LayoutError, NoKernelError
from .general import Call, Lists, forward
from .gradients import BackwardLaunches, compute_gradients, load_backward, run_copying
from .observers import autocast, is_observed, refuse_transforms
from .packed import (
    attend_with_features,
    flash_attn_combine,  # noqa: F401  public function of the package
    flash_attn_varlen_func,  # noqa: F401  public function of the package
    flash_attn_with_kvcache,  # noqa: F401  public function of the package
)
from .problems import (
    DTYPES,
    FP8_DTYPES,
    NO_WINDOW,
    TORCH_DTYPES,
    Offsets,
    canonical_mask,
    check_alike,
    checked_flag,
    checked_scale,
    checked_softcap,
    ordinal_of,
    problem_for,
    refuse_positional,
    requested_features,
)
from .recipes import call, explain_call  # noqa: F401  public functions of the package
from .splitting import checked_splits

_MAX_BOUND = 4096
_MASKS = ("full", "causal", "local")  # numbered as in _calls.h

# (dtype, head_dim, head_dim_v, device, mask) -> (run, num_sms, default softmax_scale, new_out, new_lse, tell_extents).
# The two before the last allocate: `tensor.new_empty(a, b, c)` of a tensor that has the dtype already is the fastest
# way torch documents. For the last, or None, see `_tell`.
# ("bwd", dtype, head_dim, head_dim_v, device, mask, deterministic) -> BackwardLaunches.
_bound: dict[tuple[Any, ...], Any] = loader.bound

_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _answer_none(*arguments: object) -> Any:
    return None


# (q, k, v, softmax_scale, causal, window_size, return_lse) -> (out, lse), or None for a call unlike the earlier ones.
# It is the launcher's from the first kernel on.
_answer: Callable[..., Any] = _answer_none


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
    window_size: tuple[int | None, int | None] = NO_WINDOW,
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
    unserved = {"qv": qv, "gather_kv_indices": gather_kv_indices, "score_mod": score_mod, "mask_mod": mask_mod}
    unserved |= {"aux_tensors": aux_tensors, "aux_scalars": aux_scalars, "block_sparse_tensors": block_sparse_tensors}
    unserved |= {"score_mod_bwd": score_mod_bwd, "block_sparse_tensors_bwd": block_sparse_tensors_bwd}
    unserved |= {"gather_bwd_token_chunk": gather_bwd_token_chunk}
    unserved |= {"gather_bwd_recompute_p": gather_bwd_recompute_p or None}
    served = {"learnable_sink": learnable_sink, "softcap": checked_softcap(softcap) or None}
    served |= {"num_splits": None if checked_splits(num_splits) == 1 else num_splits}
    descales = (q_descale, k_descale, v_descale)
    if any(x is not None for x in (*unserved.values(), *served.values(), *descales)):
        features = {"learnable_sink": learnable_sink, "softcap": softcap, "num_splits": num_splits}
        features |= {"deterministic": deterministic, "return_lse": return_lse, "descales": descales}
        return attend_with_features(q, k, v, softmax_scale, causal, window_size, **features, **unserved)

    q, k, v = autocast(q, k, v)
    if not _is_compiling():  # with options that ask for nothing
        answer = _answer(q, k, v, softmax_scale, causal, window_size, return_lse)
        if answer is not None:
            return answer

    try:
        batch, _, num_heads_q, head_dim = q.shape
        batch_k, seqlen_k, num_heads_kv, head_dim_k = k.shape
        batch_v, seqlen_v, num_heads_v, _ = v.shape
        needs_grad = _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    except (AttributeError, ValueError):
        _refuse_shapes(q, k, v)
    if (
        head_dim != head_dim_k
        or batch != batch_k
        or batch != batch_v
        or seqlen_k != seqlen_v
        or num_heads_kv != num_heads_v
        or (num_heads_q % num_heads_kv if num_heads_kv else num_heads_q)
    ):
        _refuse_shapes(q, k, v)
    refuse_transforms(q=q, k=k, v=v)
    mask, left, right = canonical_mask(causal, window_size)
    return_lse = checked_flag("return_lse", return_lse)
    if softmax_scale is not None:
        softmax_scale = checked_scale(softmax_scale, head_dim)
    if needs_grad or _is_compiling() or is_observed(q, k, v):
        return _attend(q, k, v, softmax_scale, (mask, left, right), deterministic, return_lse)
    out, lse = _dense(q, k, v, softmax_scale, mask, left, right)
    return out, (lse if return_lse else None)


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    mask: str,
    left: int,
    right: int,
    results: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a call that has been checked, without gradients and whoever looks on.

    results: where they are to be written, in any strides that the kernel takes; 16-bit types only.
    """
    batch, seqlen_q, num_heads_q, head_dim = q.shape
    seqlen_k, head_dim_v, device = k.shape[1], v.shape[3], q.get_device()
    bound = _bound.get((q.dtype, head_dim, head_dim_v, device, mask))
    if bound is None:
        if q.dtype in FP8_DTYPES:
            return forward(Call(q, k, v, Lists(), checked_scale(softmax_scale, head_dim), (left, right)))
        bound = _bind(q, k, v, mask)
    run, num_sms, default_scale, new_out, new_lse, tell_extents = bound
    if softmax_scale is None:
        softmax_scale = default_scale
    if results is None:
        results = new_out(batch, seqlen_q, num_heads_q, head_dim_v), new_lse(batch, num_heads_q, seqlen_q)
    out, lse = results
    if not (batch and seqlen_q and num_heads_q and seqlen_k) or left + right < 0:
        check_alike(q, k, v)
        out.zero_()
        lse.fill_(-math.inf)
    else:
        try:
            run(q, k, v, out, lse, softmax_scale, left, right, num_sms)
        except LayoutError:
            run_copying(run, [q, k, v], (out, lse, softmax_scale, left, right, num_sms))
        if tell_extents is not None:
            tell_extents(q, k, v)
    return out, lse


def attend_into(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
) -> None:
    """Forward into `out` and `lse`, for the operators of others: no gradients, no modes, shapes not looked at.

    Args: q, k, v: as flash_attn_func, 16-bit. out: (batch, seqlen_q, num_heads_q, head_dim_v), any strides with a last
        one of 1 and others of multiples of 16 bytes. lse: (batch, num_heads_q, seqlen_q), float32, contiguous.
    Raises: NoKernelError, InputError, LayoutError before anything is launched.
    """
    _dense(q, k, v, softmax_scale, *canonical_mask(causal, NO_WINDOW), (out, lse))


def gradients_into(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    deterministic: bool,
) -> None:
    """Backward into dq, dk, dv, for the operators of others. tensors: q, k, v, and the forward's out and lse.

    Raises: NoKernelError, InputError before anything is launched.
    """
    q, k, v, *_ = tensors
    mask, left, right = canonical_mask(causal, NO_WINDOW)
    launches = _bind_backward(q, k, v, mask, deterministic)
    compute_gradients(launches, tensors, dout, None, softmax_scale, (left, right), gradients=gradients)


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = NO_WINDOW,
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
    mask = canonical_mask(causal, window_size)[0]
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


def _bind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str) -> tuple[Any, int, float, Any, Any, Any]:
    """Decide, load and remember. Everything in the key of `_bound` is all that the result depends on."""
    check_alike(q, k, v)
    problem, ordinal, head_dim = problem_for(q, v, mask), ordinal_of(q), q.shape[-1]
    runtime = loader.runtime()
    if len(_bound) >= _MAX_BOUND:
        _bound.clear()
    launch = runtime.launch_for(problem, ordinal)
    num_sms, default_scale = runtime.device(ordinal).sm_count, 1.0 / math.sqrt(head_dim)
    out = tensor_maker(TORCH_DTYPES[OUTPUT_DTYPES[problem.dtype]], q.device)
    lse = tensor_maker(torch.float32, q.device)
    bound = (launch.run, num_sms, default_scale, out[1], lse[1], None)
    if CAN_ANSWER:
        scratch = lse_scratch(q.device, is_capturing=runtime.is_capturing)
        if scratch is None:  # a capture: its calls are decided each, and the first one after it is remembered
            return bound
        told = ((_MASKS.index(mask), head_dim, v.shape[-1]), (default_scale, num_sms, out, lse, scratch))
        bound = (*bound[:5], _tell(launch, *told))
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


def _refuse_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> NoReturn:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
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


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    window: tuple[str, int, int],
    deterministic: bool | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with gradients, inside torch.compile, or while something of torch looks on."""
    mask, left, right = window
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    deterministic = checked_flag("deterministic", deterministic)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    if _is_compiling() or is_observed(q, k, v):
        out, lse = torch.ops.fa4_kernels.attention(q, k, v, scale, left, right, deterministic)
        return out, (lse if return_lse else None)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _operator_forward(q, k, v, scale, left, right, deterministic)

    launches = _bind_backward(q, k, v, mask, deterministic)
    out, lse = Attention.apply(q, k, v, forward, launches, scale, (left, right), deterministic, return_lse)
    return out, (lse if return_lse else None)


def _bind_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str, deterministic: bool
) -> BackwardLaunches:
    """Decide, load and remember the kernels of the backward pass."""
    key = ("bwd", q.dtype, q.shape[3], v.shape[3], q.get_device(), mask, deterministic)
    launches = _bound.get(key)
    if launches is None:
        check_alike(q, k, v)
        ordinal = ordinal_of(q)
        problem = problem_for(q, v, mask, op="bwd", deterministic=deterministic)
        try:
            launches = load_backward(loader.runtime(), problem, ordinal, q.device)
        except NoKernelError as error:
            raise NoKernelError(
                "q, k or v requires grad, and no backward kernel can be used. Call under torch.no_grad(), or pass "
                f"detached tensors, if only the result is wanted.\n{error}"
            ) from error
        _bound[key] = launches
    return launches


def _operator_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, left: int, right: int, deterministic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        sides = tuple(None if side == WINDOW_UNBOUNDED else side for side in (left, right))
        if min(left, right) >= 0:  # a negative number is an offset here, which the launcher is never asked about
            answer = _answer(q, k, v, softmax_scale, False, sides, True)
            if answer is not None:
                return answer
        return _dense(q, k, v, softmax_scale, *canonical_mask(False, Offsets(left, right)))


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
    mask = canonical_mask(False, Offsets(left, right))[0]
    launches = _bind_backward(q, k, v, mask, deterministic)
    return compute_gradients(launches, (q, k, v, out, lse), dout, dlse, softmax_scale, (left, right))[:3]


ops.define(_operator_forward, _operator_backward, DTYPES)
