"""Attention with any layout and feature: one forward and one backward of plain tensors and numbers.

The plain dense call has a path of its own (api.py); everything else comes through here, in eager mode and as operators
of torch (ops.py). Which kernels run is decided, and they are loaded, before anything is launched. No number is ever
read from a device.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import loader
from .abi import OUTPUT_DTYPES
from .allocation import equal_starts, no_numbers
from .dispatch import Problem, combine_problem, steps_of
from .errors import NoKernelError
from .gradients import BackwardLaunches, compute_gradients, compute_packed_gradients, load_backward, run_copying
from .problems import (
    DTYPES,
    FP8_DTYPES,
    TORCH_DTYPES,
    check_alike,
    mask_of,
    ordinal_of,
    problem_for,
)
from .splitting import Keys, Rows, chosen_splits, key_blocks, visible_keys

Tensor = torch.Tensor


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


class Call(NamedTuple):
    """One call, checked: q, k, v in the shapes of the signature that `lists` selects.

    sink: float32 (num_heads_q). descales: float32 (batch, num_heads_kv) for q, k, v; None = 1. softcap: 0 = none.
    num_splits: below 1 = chosen here. max_seqlen_q, max_seqlen_k: bounds that the caller knows, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lists: Lists
    softmax_scale: float
    window: tuple[int, int]
    softcap: float = 0.0
    sink: Tensor | None = None
    descales: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    num_splits: int = 1
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        starts = self.lists.cu_seqlens_q
        return self.q.shape[0] if starts is None else starts.shape[0] - 1

    @property
    def is_empty(self) -> bool:
        """Whether no query can see a key, so that nothing is launched."""
        return not (self.q.numel() and self.k.numel() and self.v.numel() and self.batch) or sum(self.window) < 0


class ForwardLaunches(NamedTuple):
    """The kernels of one configuration on one device, from runtime.launch_for; `combine` where keys are split."""

    launch: Any
    combine: Any | None
    num_sms: int
    out_dtype: torch.dtype


# --- forward ----------------------------------------------------------------------------------------------------------


def forward(call: Call, results: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """out and lse (float32) in the shapes of the signature of the call's layout, contiguous.

    results: where they are to be written, in any strides that the kernels take.
    Raises: NoKernelError, InputError, ... before anything is launched; LayoutError for strides of `results`.
    """
    check_alike(call.q, call.k, call.v)
    num_splits, launches = launches_for(call)
    out, lse = results or _new_results(call, launches)
    if call.is_empty:
        return out.zero_(), _fill_unseen(lse, call.sink)
    if num_splits > 1 and call.lists.layout == "dense":
        return _dense_in_parts(call, num_splits, launches, (out, lse))
    features = (*_descales(call), *_given(call.sink if num_splits == 1 else None), *_given(call.softcap or None))
    rest = (*call.lists.arguments(), call.softmax_scale, *call.window, launches.num_sms, *features)
    if num_splits == 1:
        run_copying(launches.launch.run, [call.q, call.k, call.v], (out, lse, *rest))
    else:
        parts = tuple(x.new_empty((num_splits, *x.shape), dtype=torch.float32) for x in (out, lse))
        run_copying(launches.launch.run, [call.q, call.k, call.v], (*parts, *rest))
        _combine(launches, parts[0].unsqueeze(1), parts[1].unsqueeze(1), out.unsqueeze(0), lse.unsqueeze(0), call.sink)
    return out, lse


def _given(value: Any) -> tuple[Any, ...]:
    return () if value is None else (value,)


def _new_results(call: Call, launches: ForwardLaunches) -> tuple[Tensor, Tensor]:
    q, is_dense = call.q, call.lists.layout == "dense"
    out = q.new_empty((*q.shape[:-1], call.v.shape[-1]), dtype=launches.out_dtype)
    rows = (q.shape[0], q.shape[2], q.shape[1]) if is_dense else (q.shape[1], q.shape[0])
    return out, q.new_empty(rows, dtype=torch.float32)


def _fill_unseen(lse: Tensor, sink: Tensor | None) -> Tensor:
    """What rows have that see no key; heads are the mode before the last."""
    return lse.fill_(-math.inf) if sink is None else lse.copy_(sink[:, None].expand_as(lse))


def _descales(call: Call) -> tuple[Tensor, ...]:
    if call.q.dtype not in FP8_DTYPES:
        return ()
    shape = (call.batch, call.k.shape[-2])
    ones = call.q.new_ones(shape, dtype=torch.float32)
    return tuple(ones if given is None else given for given in call.descales)


def _combine(
    launches: ForwardLaunches, out_partial: Tensor, lse_partial: Tensor, out: Tensor, lse: Tensor, sink: Tensor | None
) -> None:
    assert launches.combine is not None
    launches.combine.run(out_partial, lse_partial, out, lse, *_given(sink))


def _dense_in_parts(
    call: Call, num_splits: int, launches: ForwardLaunches, results: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Dense tensors as packed ones, which is a view of them where heads and tokens lie one behind the other."""
    out, lse = results
    batch, seqlen_q, num_heads, _ = call.q.shape
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (call.q, call.k, call.v))
    starts = tuple(equal_starts(batch, length, q.device) for length in (seqlen_q, call.k.shape[1]))
    rest = (*Lists(*starts).arguments(), call.softmax_scale, *call.window, launches.num_sms)
    out_partial = out.new_empty((num_splits, batch * seqlen_q, *out.shape[2:]), dtype=torch.float32)
    lse_partial = lse.new_empty((num_splits, num_heads, batch * seqlen_q))
    features = (*_descales(call), *_given(call.softcap or None))
    run_copying(launches.launch.run, [q, k, v], (out_partial, lse_partial, *rest, *features))
    by_batch = lse_partial.view(num_splits, num_heads, batch, seqlen_q).transpose(1, 2)
    _combine(launches, out_partial.view(num_splits, *out.shape), by_batch, out, lse, call.sink)
    return out, lse


# --- which kernels ----------------------------------------------------------------------------------------------------


def forward_problem(call: Call, *, is_split: bool) -> Problem:
    """What a call asks for."""
    features = {"softcap"} if call.softcap else set()
    features |= ({"sink"} if call.sink is not None else set()) | ({"split"} if is_split else set())
    mask = mask_of(*call.window)
    return problem_for(call.q, call.v, mask, layout=call.lists.layout, features=frozenset(features))


def launches_for(call: Call) -> tuple[int, ForwardLaunches]:
    """Number of splits and kernels. A number chosen here is 1 where no kernel splits."""
    if call.num_splits >= 1:
        return call.num_splits, _bound_forward(call, is_split=call.num_splits > 1)
    device = loader.runtime().device(ordinal_of(call.q))
    queries, keys = _shape_of(call)
    chosen = chosen_splits(queries, keys, num_sms=device.sm_count, major=device.compute_capability[0])
    if chosen > 1:
        try:
            return chosen, _bound_forward(call, is_split=True)
        except NoKernelError:
            pass
    return 1, _bound_forward(call, is_split=False)


def _shape_of(call: Call) -> tuple[Rows, Keys]:
    """What the number of splits is chosen from."""
    q, k, v = call.q, call.k, call.v
    is_dense = call.lists.layout == "dense"
    max_seqlen_q, max_seqlen_k = (q.shape[1], k.shape[1]) if is_dense else (call.max_seqlen_q, call.max_seqlen_k)
    total_q = q.shape[0] * (q.shape[1] if is_dense else 1)
    queries = Rows(call.batch, total_q, max_seqlen_q, q.shape[-2], k.shape[-2])
    blocks = key_blocks(visible_keys(call.window, max_seqlen_q, max_seqlen_k))
    return queries, Keys(blocks, (q.shape[-1], v.shape[-1]), q.element_size(), mask_of(*call.window))


def _bound_forward(call: Call, *, is_split: bool) -> ForwardLaunches:
    """Decide, load and remember; also that there is no kernel."""
    q, v = call.q, call.v
    switches = (call.lists.layout, mask_of(*call.window), bool(call.softcap), call.sink is not None, is_split)
    key = ("general", q.dtype, q.shape[-1], v.shape[-1], q.get_device(), *switches)
    launches = loader.bound.get(key)
    if launches is None:
        try:
            launches = _load_forward(call, is_split=is_split)
        except NoKernelError as error:
            launches = error
        loader.bound[key] = launches
    if isinstance(launches, NoKernelError):
        raise NoKernelError(str(launches))
    return launches


def _load_forward(call: Call, *, is_split: bool) -> ForwardLaunches:
    ordinal, runtime = ordinal_of(call.q), loader.runtime()
    problem = forward_problem(call, is_split=is_split)
    launch, *combine = (runtime.launch_for(step, ordinal) for step in steps_of(problem))
    out_dtype = TORCH_DTYPES[OUTPUT_DTYPES[problem.dtype]]
    return ForwardLaunches(launch, combine[0] if combine else None, runtime.device(ordinal).sm_count, out_dtype)


def bound_combine(out_partial: Tensor, dtype: torch.dtype, *, has_sink: bool) -> Callable[..., Any]:
    """The kernel that merges parts to `dtype`. Raises: NoKernelError, ..."""
    key = ("combine", dtype, out_partial.shape[-1], out_partial.get_device(), has_sink)
    run = loader.bound.get(key)
    if run is None:
        problem = combine_problem(DTYPES[dtype], out_partial.shape[-1], has_sink=has_sink)
        run = loader.runtime().launch_for(problem, ordinal_of(out_partial)).run
        loader.bound[key] = run
    return run


# --- backward ---------------------------------------------------------------------------------------------------------


def bound_backward(call: Call, *, deterministic: bool) -> BackwardLaunches:
    """Decide, load and remember the kernels of the backward pass. Raises: NoKernelError, ..."""
    q, v, mask = call.q, call.v, mask_of(*call.window)
    switches = (call.lists.layout, mask, bool(call.softcap), deterministic)
    key = ("general bwd", q.dtype, q.shape[-1], v.shape[-1], q.get_device(), *switches)
    launches = loader.bound.get(key)
    if launches is None:
        check_alike(q, call.k, v)
        features = frozenset({"softcap"} if call.softcap else ())
        more = {"layout": call.lists.layout, "deterministic": deterministic, "features": features}
        problem, ordinal = problem_for(q, v, mask, op="bwd", **more), ordinal_of(q)
        try:
            launches = load_backward(loader.runtime(), problem, ordinal, q.device)
        except NoKernelError as error:
            raise NoKernelError(
                "an input requires grad, and no backward kernel can be used. Call under torch.no_grad(), or pass "
                f"detached tensors, if only the result is wanted.\n{error}"
            ) from error
        loader.bound[key] = launches
    return launches


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    *,
    deterministic: bool,
    gradients: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in the shapes of q, k, v, and the sink's gradient (float32) if there is a sink.

    gradients: where dq, dk and dv are to be written. Raises: LayoutError for strides of them that no kernel takes.
    """
    launches = bound_backward(call, deterministic=deterministic)
    tensors = (call.q, call.k, call.v, out, lse)
    options: dict[str, Any] = {"softcap": call.softcap, "sink": call.sink, "gradients": gradients}
    if call.lists.layout == "dense":
        return compute_gradients(launches, tensors, dout, dlse, call.softmax_scale, call.window, **options)
    starts_q, starts_k, _, *used = call.lists
    assert starts_q is not None
    assert starts_k is not None
    return compute_packed_gradients(
        launches,
        tensors,
        dout,
        dlse,
        call.softmax_scale,
        call.window,
        starts=(starts_q, starts_k),
        used=(used[0], used[1]),
        **options,
    )
