"""Attention of a `Call`, with any layout and feature: one forward, one backward, and torch's operators around them.

The plain dense forward has a path of its own (api.py); everything else comes through here. Which kernels run is
decided, and they are loaded, before anything is launched. No number is ever read from a device.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import loader, ops
from .abi import OUTPUT_DTYPES
from .allocation import equal_starts
from .calls import Call, Lists
from .dispatch import Problem, combine_problem, steps_of
from .errors import NoKernelError
from .gradients import (
    BackwardLaunches,
    RecipeBackward,
    compute_gradients,
    compute_packed_gradients,
    load_backward,
    run_copying,
)
from .problems import DTYPES, FP8_DTYPES, TORCH_DTYPES, check_alike, ordinal_of, problem_for
from .splitting import Keys, Rows, chosen_splits, key_blocks, visible_keys
from .windows import offsets

Tensor = torch.Tensor


class ForwardLaunches(NamedTuple):
    """The kernels of one configuration on one device, from runtime.launch_for; `combine` where keys are split."""

    launch: Any
    combine: Any | None
    num_sms: int
    out_dtype: torch.dtype


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """out and lse of a call: launched, or as an operator where gradients or something of torch ask for one."""
    return run_operator(call) if call.needs_gradients or call.is_for_operator else forward(call)


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
    out = call.q.new_empty(call.out_shape, dtype=launches.out_dtype)
    return out, call.q.new_empty(call.lse_shape, dtype=torch.float32)


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

_forwards: dict[tuple[Any, ...], ForwardLaunches | NoKernelError] = loader.remembered("forward")
_merges: dict[tuple[Any, ...], Callable[..., Any]] = loader.remembered("merge")
_backwards: dict[tuple[Any, ...], BackwardLaunches | RecipeBackward] = loader.remembered("backward")


def forward_problem(call: Call, *, is_split: bool) -> Problem:
    """What a call asks for."""
    features = {"softcap"} if call.softcap else set()
    features |= ({"sink"} if call.sink is not None else set()) | ({"split"} if is_split else set())
    return problem_for(call.q, call.v, call.window.mask, layout=call.lists.layout, features=frozenset(features))


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
    return queries, Keys(blocks, (q.shape[-1], v.shape[-1]), q.element_size(), call.window.mask)


def _bound_forward(call: Call, *, is_split: bool) -> ForwardLaunches:
    """Decide, load and remember; also that there is no kernel."""
    q, v = call.q, call.v
    switches = (call.lists.layout, call.window.mask, bool(call.softcap), call.sink is not None, is_split)
    key = (q.dtype, q.shape[-1], v.shape[-1], q.get_device(), *switches)
    launches = _forwards.get(key)
    if launches is None:
        try:
            launches = _load_forward(call, is_split=is_split)
        except NoKernelError as error:
            launches = error
        _forwards[key] = launches
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
    key = (dtype, out_partial.shape[-1], out_partial.get_device(), has_sink)
    run = _merges.get(key)
    if run is None:
        problem = combine_problem(DTYPES[dtype], out_partial.shape[-1], has_sink=has_sink)
        run = loader.runtime().launch_for(problem, ordinal_of(out_partial)).run
        _merges[key] = run
    return run


# --- backward ---------------------------------------------------------------------------------------------------------


def bound_backward(call: Call) -> BackwardLaunches | RecipeBackward:
    """Decide, load and remember the kernels of the backward pass. Raises: NoKernelError, ..."""
    q, v = call.q, call.v
    switches = (call.lists.layout, call.window.mask, bool(call.softcap), call.deterministic)
    key = (q.dtype, q.shape[-1], v.shape[-1], q.get_device(), *switches)
    launches = _backwards.get(key)
    if launches is None:
        launches = _backwards[key] = _load_backward(call)
    return launches


def _load_backward(call: Call) -> BackwardLaunches | RecipeBackward:
    check_alike(call.q, call.k, call.v)
    ordinal, features = ordinal_of(call.q), frozenset({"softcap"} if call.softcap else ())
    more = {"layout": call.lists.layout, "deterministic": call.deterministic, "features": features}
    problem = problem_for(call.q, call.v, call.window.mask, op="bwd", **more)
    try:
        return load_backward(loader.runtime(), problem, ordinal, call.q.device)
    except NoKernelError as error:
        raise NoKernelError(
            "an input requires grad, and no backward kernel can be used. Call under torch.no_grad(), or pass "
            f"detached tensors, if only the result is wanted.\n{error}"
        ) from error


def backward(
    call: Call,
    results: tuple[Tensor, Tensor],
    dout: Tensor | None,
    dlse: Tensor | None,
    gradients: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in the shapes of q, k, v, and the sink's gradient (float32) if there is a sink.

    Args: results: out and lse of the forward. dout, dlse: their gradients, None for zeros. gradients: where dq, dk and
        dv are to be written.
    Raises: LayoutError for strides of `gradients` that no kernel takes.
    """
    launches = bound_backward(call)
    tensors = (call.q, call.k, call.v, *results)
    options: dict[str, Any] = {"softcap": call.softcap, "sink": call.sink, "gradients": gradients}
    if call.lists.layout == "dense":
        return compute_gradients(launches, tensors, dout, dlse, call.softmax_scale, call.window, **options)
    starts_q, starts_k, _, *used = call.lists
    assert starts_q is not None
    assert starts_k is not None
    assert isinstance(launches, BackwardLaunches)  # recipes are dense
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


# --- as operators -----------------------------------------------------------------------------------------------------


def run_operator(call: Call) -> tuple[Tensor, Tensor]:
    """out and lse through torch's dispatcher."""
    if not call.is_for_operator:
        bound_backward(call)
    return torch.ops.fa4_kernels.general_attention(
        *(call.q, call.k, call.v, *call.lists, call.sink, *call.descales),
        *(call.softmax_scale, *call.window, call.deterministic, call.softcap),
        *(call.num_splits, call.max_seqlen_q, call.max_seqlen_k),
    )


_NUM_LISTS = len(Lists._fields)


def _operator_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """In the order of the operator's schema, which is that of `run_operator`."""
    lists, (sink, *descales), numbers = rest[:_NUM_LISTS], rest[_NUM_LISTS:][:4], rest[_NUM_LISTS + 4 :]
    scale, left, right, deterministic, softcap, num_splits, *bounds = numbers
    call = _call(q, k, v, lists, (scale, left, right, deterministic, softcap), sink)
    factors = (descales[0], descales[1], descales[2])
    call = call._replace(descales=factors, num_splits=num_splits, max_seqlen_q=bounds[0], max_seqlen_k=bounds[1])
    with torch.no_grad():
        return forward(call)


def _operator_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lists, sink, numbers = rest[:_NUM_LISTS], rest[_NUM_LISTS], rest[_NUM_LISTS + 1 :]
    dq, dk, dv, dsink = backward(_call(q, k, v, lists, numbers, sink), (out, lse), dout, dlse)
    return dq, dk, dv, q.new_empty(0, dtype=torch.float32) if dsink is None else dsink


def _call(q: Tensor, k: Tensor, v: Tensor, lists: Any, numbers: Any, sink: Tensor | None) -> Call:
    """What the two operators have in common."""
    scale, left, right, deterministic, softcap = numbers
    more: dict[str, Any] = {"softcap": softcap, "sink": sink, "deterministic": deterministic}
    return Call(q, k, v, Lists(*lists), scale, offsets(left, right), **more)


ops.define_general(_operator_forward, _operator_backward, DTYPES)
