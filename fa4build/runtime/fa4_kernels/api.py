"""Attention on torch tensors. Everything a call checks is checked before anything is launched.

The path of a call is short on purpose: shapes are compared here, dtype, device and layout in C while the tensors are
read. What depends on neither pointers nor extents is decided once and kept in `_bound`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch

from . import loader, ops
from .abi import OUTPUT_DTYPES, WINDOW_UNBOUNDED
from .autograd import Attention
from .dispatch import Decision, Problem, extents_of
from .errors import InputError, LayoutError, NoKernelError
from .gradients import BackwardLaunches, compute_gradients, load_backward, run_copying
from .recipes import call, explain_call  # noqa: F401  public functions of the package

_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
_NO_WINDOW = (None, None)
_MAX_BOUND = 4096

# (dtype, head_dim, head_dim_v, device, mask) -> (run, num_sms, default softmax_scale, new_out, new_lse); the last two
# allocate. `tensor.new_empty(a, b, c)` of a tensor that has the dtype already is the fastest way torch offers.
# ("bwd", dtype, head_dim, head_dim_v, device, mask, deterministic) -> BackwardLaunches.
_bound: dict[tuple[Any, ...], Any] = loader.bound

_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = _NO_WINDOW,
    *,
    deterministic: bool | None = None,
    return_lse: bool = False,
    qv: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
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
        window_size: (left, right) keys seen around i + seqlen_k - seqlen_q, both ends included. None is unbounded. A
            negative number is an offset like any other, except that two negative ones mean no window.
        deterministic: whether dq must have the same bits in every run, which costs time; the rest always has. None
            follows torch.use_deterministic_algorithms.
        return_lse: also return the log-sum-exp of the scaled scores. It is differentiable.
        softcap, learnable_sink, num_splits > 1, score_mod, ...: need kernels built with them.
        pack_gqa: a hint about speed; not used.
    Returns: (out, lse). out: (batch, seqlen_q, num_heads_q, head_dim_v), contiguous, dtype of q (bf16 for fp8).
        lse: (batch, num_heads_q, seqlen_q), float32, natural logarithm; None unless asked for. Rows that see no key:
        out = 0, lse = -inf.
    Raises:
        InputError: the tensors do not belong together, or are not on a GPU.
        NoKernelError: no installed kernel fits, with what was considered and why not; also for inputs that require
            gradients while no backward kernel fits.
        CaptureError: the kernel is not loaded and a CUDA graph is being captured; see `preload`.
    Contract: a tensor whose last stride is not 1, whose pointer or other strides are not multiples of 16 bytes, or that
        is expanded (stride 0) is copied first. Others are read where they lie. Launches on the current stream.
    """
    if (
        qv is not None
        or gather_kv_indices is not None
        or learnable_sink is not None
        or softcap
        or num_splits > 1
        or score_mod is not None
        or mask_mod is not None
        or aux_tensors is not None
        or aux_scalars is not None
        or block_sparse_tensors is not None
    ):
        given: dict[str, Any] = {"qv": qv, "gather_kv_indices": gather_kv_indices, "learnable_sink": learnable_sink}
        given |= {"score_mod": score_mod, "mask_mod": mask_mod, "aux_tensors": aux_tensors, "aux_scalars": aux_scalars}
        given |= {"block_sparse_tensors": block_sparse_tensors, "softcap": softcap, "num_splits": num_splits}
        _refuse_features(explain(q, k, v, causal=causal, window_size=window_size, **given))

    try:
        batch, seqlen_q, num_heads_q, head_dim = q.shape
        batch_k, seqlen_k, num_heads_kv, head_dim_k = k.shape
        batch_v, seqlen_v, num_heads_v, head_dim_v = v.shape
        needs_grad = _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        device = q.get_device()
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
    if needs_grad or _is_compiling():
        return _attend(q, k, v, softmax_scale, causal, window_size, deterministic, return_lse)

    if window_size == _NO_WINDOW:
        mask, left = ("causal" if causal else "full"), WINDOW_UNBOUNDED
        right = 0 if causal else WINDOW_UNBOUNDED
    else:
        mask, left, right = canonical_mask(causal, window_size)
    bound = _bound.get((q.dtype, head_dim, head_dim_v, device, mask))
    if bound is None:
        bound = _bind(q, k, v, mask)
    run, num_sms, default_scale, new_out, new_lse = bound
    if softmax_scale is None:
        softmax_scale = default_scale
    elif not (isinstance(softmax_scale, (int, float)) and 0 < softmax_scale < math.inf):
        raise InputError(f"softmax_scale must be a positive finite number, it is {softmax_scale!r}")

    out = new_out(batch, seqlen_q, num_heads_q, head_dim_v)
    lse = new_lse(batch, num_heads_q, seqlen_q)
    if not (batch and seqlen_q and num_heads_q and seqlen_k) or left + right < 0:
        _check_unlaunched(q, k, v)
        out.zero_()
        lse.fill_(-math.inf)
    else:
        try:
            run(q, k, v, out, lse, softmax_scale, left, right, num_sms)
        except LayoutError:
            run_copying(run, [q, k, v], (out, lse, softmax_scale, left, right, num_sms))
    return out, (lse if return_lse else None)


def canonical_mask(causal: bool, window_size: tuple[int | None, int | None]) -> tuple[str, int, int]:
    """(mask, window_left, window_right) of a call: which kernel, and the numbers it gets.

    Contract: two negative sides mean no window; causal sets the right side to 0; (None, 0) is causal; anything else
        with a side is local. Sides are clipped to +-2^30. Source: fa4-kernels.md, section 1.2.
    """
    try:
        left, right = window_size
        if left is not None and right is not None and left < 0 and right < 0:
            left = right = None
        if causal:
            right = 0
        mask = "local" if left is not None or right not in (None, 0) else "causal" if right == 0 else "full"
        sides = (WINDOW_UNBOUNDED if side is None else int(side) for side in (left, right))
        left, right = (max(-WINDOW_UNBOUNDED, min(side, WINDOW_UNBOUNDED)) for side in sides)
    except (TypeError, ValueError) as error:
        raise InputError(f"window_size must be (left, right) of int or None, it is {window_size!r}") from error
    return mask, left, right


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = _NO_WINDOW,
    *,
    deterministic: bool = False,
    op: str = "fwd",
    layout: str = "dense",
    **options: object,
) -> Decision:
    """Which kernel a call would use and why each other was refused; print it. Loads and launches nothing.

    Args: as flash_attn_func; `op` and `layout` ask about other kernels.
    Raises: InputError when the tensors are not on a GPU or of a dtype no kernel takes.
    """
    mask = canonical_mask(causal, window_size)[0]
    features = _requested_features(options)
    problem = _problem(q, v, mask, op=op, layout=layout, deterministic=deterministic, features=features)
    ordinal = _ordinal(q)  # before the driver is opened: CPU tensors on a machine without one are the caller's mistake
    runtime = loader.runtime()
    if layout == "dense" and q.dim() == k.dim() == 4:
        extents = extents_of("fwd/dense", (q, k), runtime.device(ordinal).sm_count)
        problem = replace(problem, extents=extents)
    return runtime.decide(problem, ordinal)


def preload(devices: list[int] | None = None, select: str | list[str] = "*") -> tuple[str, ...]:
    """Load kernels now instead of at their first call: before capturing a CUDA graph, or before serving.

    Args:
        devices: CUDA ordinals; the current device if None. A device not used by this process so far gets a context.
        select: glob, or globs, over variant ids such as `fwd-sm90a-bf16-*`.
    Returns: the ids that are loaded, sorted.
    """
    if devices is None:
        devices = [0 if loader.serves_cpu() else torch.cuda.current_device()]
    return loader.runtime().preload(devices, select)


def require_evidence(level: str | None) -> None:
    """Use only kernels that have passed `level`: static, simulated or silicon; None lifts it. Holds for the process."""
    from .dispatch import EVIDENCE_LEVELS

    if level is not None and level not in EVIDENCE_LEVELS:
        raise InputError(f"evidence level {level!r} is unknown. Allowed: {', '.join(EVIDENCE_LEVELS)}.")
    loader.runtime().evidence = level
    _bound.clear()


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: object, **kwargs: object
) -> NoReturn:
    """Attention over packed sequences, or paged keys and values if `page_table` is given.

    Raises: NoKernelError with the reasons, as no installed pack has such kernels that this version can call.
    """
    layout = "paged" if kwargs.get("page_table") is not None else "varlen"
    window = kwargs.get("window_size", _NO_WINDOW)
    mask = canonical_mask(bool(kwargs.get("causal", False)), window)[0]  # type: ignore[arg-type]
    problem, ordinal = _problem(q, v, mask, layout=layout), _ordinal(q)
    loader.runtime().launch_for(problem, ordinal)
    raise NoKernelError(f"this fa4-kernels has no calling convention for layout {layout}; upgrade fa4-kernels")


def flash_attn_combine(
    out_partial: torch.Tensor, lse_partial: torch.Tensor, *args: object, **kwargs: object
) -> NoReturn:
    """Merge partial results of split keys.

    Raises: NoKernelError with the reasons, as no installed pack has such kernels that this version can call.
    """
    problem, ordinal = _problem(out_partial, out_partial, "full", op="fwd_combine"), _ordinal(out_partial)
    loader.runtime().launch_for(problem, ordinal)
    raise NoKernelError("this fa4-kernels has no calling convention for fwd_combine; upgrade fa4-kernels")


# Below: taken once a configuration, or on the way to an error.

# Argument -> the axis a kernel must have been built with. Others, `return_lse` for one, ask for no other kernel.
_FEATURES = {
    "qv": "qv",
    "gather_kv_indices": "gather_kv_indices",
    "learnable_sink": "sink",
    "score_mod": "score_mod",
    "mask_mod": "mask_mod",
    "aux_tensors": "aux_tensors",
    "aux_scalars": "aux_scalars",
    "block_sparse_tensors": "block_sparsity",
}


def _requested_features(options: Mapping[str, Any]) -> frozenset[str]:
    """The features that the arguments of a call ask for. Neutral values ask for none."""
    features = {axis for name, axis in _FEATURES.items() if options.get(name) is not None}
    features |= {"softcap"} if options.get("softcap") else set()
    features |= {"split"} if (options.get("num_splits") or 0) > 1 else set()
    return frozenset(features)


def _problem(q: torch.Tensor, v: torch.Tensor, mask: str, **more: Any) -> Problem:
    dtype = _DTYPES.get(q.dtype)
    if dtype is None:
        allowed = ", ".join(str(dtype) for dtype in _DTYPES)
        raise InputError(f"q is {q.dtype}; kernels take {allowed}. Convert q, k and v first.")
    return Problem(dtype=dtype, head_dim=q.shape[-1], head_dim_v=v.shape[-1], mask=mask, **more)


def _ordinal(q: torch.Tensor) -> int:
    """CUDA ordinal of a tensor; 0 for CPU tensors where the runtime is for those."""
    if loader.serves_cpu():
        return 0
    if not q.is_cuda:
        raise InputError(f"q is on {q.device}; the kernels run on CUDA devices. Move q, k and v to one first.")
    return q.get_device()


def _bind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str) -> tuple[Any, int, float, Any, Any]:
    """Decide, load and remember. Everything in the key of `_bound` is all that the result depends on."""
    _check_unlaunched(q, k, v)
    problem, ordinal, head_dim = _problem(q, v, mask), _ordinal(q), q.shape[-1]
    runtime = loader.runtime()
    if len(_bound) >= _MAX_BOUND:
        _bound.clear()
    launch = runtime.launch_for(problem, ordinal)
    out_dtype = _TORCH_DTYPES[OUTPUT_DTYPES[problem.dtype]]
    new_out = torch.empty(0, dtype=out_dtype, device=q.device).new_empty
    new_lse = torch.empty(0, dtype=torch.float32, device=q.device).new_empty
    bound = (launch.run, runtime.device(ordinal).sm_count, 1.0 / math.sqrt(head_dim), new_out, new_lse)
    _bound[(q.dtype, head_dim, v.shape[-1], q.get_device(), mask)] = bound
    return bound


def _check_unlaunched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """One dtype, one device: what the launcher checks when something is launched."""
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise InputError(f"{name} is {tensor.dtype}, q is {q.dtype}; q, k and v must have one dtype")
        if tensor.device != q.device:
            raise InputError(f"{name} is on {tensor.device}, q is on {q.device}; q, k and v must be on one device")


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


def _refuse_features(decision: Decision) -> NoReturn:
    raise NoKernelError(f"{', '.join(sorted(decision.problem.features))}: {decision}")


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    deterministic: bool | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with gradients, or inside torch.compile."""
    mask, left, right = canonical_mask(causal, window_size)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if softmax_scale is None:
        softmax_scale = q.shape[3] ** -0.5
    if _is_compiling():
        out, lse = torch.ops.fa4_kernels.attention(q, k, v, softmax_scale, left, right, deterministic)
        return out, (lse if return_lse else None)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return flash_attn_func(q, k, v, softmax_scale, causal, window_size, return_lse=True)

    launches = _bind_backward(q, k, v, mask, deterministic)
    out, lse = Attention.apply(q, k, v, forward, launches, softmax_scale, (left, right), return_lse)
    return out, (lse if return_lse else None)


def _bind_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str, deterministic: bool
) -> BackwardLaunches:
    """Decide, load and remember the kernels of the backward pass."""
    key = ("bwd", q.dtype, q.shape[3], v.shape[3], q.get_device(), mask, deterministic)
    launches = _bound.get(key)
    if launches is None:
        _check_unlaunched(q, k, v)
        ordinal = _ordinal(q)
        problem = _problem(q, v, mask, op="bwd", deterministic=deterministic)
        try:
            launches = load_backward(loader.runtime(), problem, ordinal, q.device)
        except NoKernelError as error:
            raise NoKernelError(
                "q, k or v requires grad, and no backward kernel can be used. Call under torch.no_grad(), or pass "
                f"detached tensors, if only the result is wanted.\n{error}"
            ) from error
        _bound[key] = launches
    return launches


def _window_size(left: int, right: int) -> tuple[int | None, int | None]:
    """The window_size that canonical_mask brings to these numbers."""
    return None if left == WINDOW_UNBOUNDED else left, None if right == WINDOW_UNBOUNDED else right


def _operator_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, left: int, right: int, deterministic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        out, lse = flash_attn_func(q, k, v, softmax_scale, False, _window_size(left, right), return_lse=True)
    assert lse is not None
    return out, lse


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
    mask = canonical_mask(False, _window_size(left, right))[0]
    launches = _bind_backward(q, k, v, mask, deterministic)
    return compute_gradients(launches, (q, k, v, out, lse), dout, dlse, softmax_scale, (left, right))


ops.define(_operator_forward, _operator_backward, _DTYPES)
