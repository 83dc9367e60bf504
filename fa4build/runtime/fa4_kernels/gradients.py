"""The backward pass as a recipe of three launches: preprocess, main, postprocess. Argument lists: docs/formats.md.

Workspaces come from torch's allocator and go back to it, ordered by the stream. Nothing here decides which kernels run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from .dispatch import OWN_FAMILY, Problem
from .errors import LayoutError, NoKernelError
from .loader import Runtime
from .packs import usable
from .recipes import call
from .windows import Offsets

_ROWS = 128  # of one tile of the workspaces
_MOST_SEQUENCES = 65535  # of a launch of the helpers: the third extent of a grid


class BackwardLaunches(NamedTuple):
    """The kernels of one configuration on one device, and what their calls need beside tensors.

    `new_floats` and `new_integers` allocate float32 and int32 tensors on the device.
    """

    preprocess: Callable[..., Any]
    main: Callable[..., Any]
    postprocess: Callable[..., Any]
    num_sms: int
    new_floats: Callable[..., torch.Tensor]
    new_integers: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeBackward:
    """The backward of another family, as its packs describe it: `recipes.call` chooses and binds it by the tensors.

    `ours` loads our own kernels, for what that family does not compute.
    """

    mask: str
    deterministic: bool
    ours: Callable[[], BackwardLaunches]


def load_backward(
    runtime: Runtime, problem: Problem, ordinal: int, device: torch.device
) -> BackwardLaunches | RecipeBackward:
    """Load the three kernels for a problem with op `bwd`; of another family, where one is asked for, its recipe.

    Raises: as Runtime.launch_for.
    """

    def ours() -> BackwardLaunches:
        return _load_ours(runtime, problem, ordinal, device)

    if problem.layout == "dense" and not problem.features and _has_recipe(runtime):
        return RecipeBackward(mask=problem.mask, deterministic=problem.deterministic, ours=ours)
    return ours()


def _load_ours(runtime: Runtime, problem: Problem, ordinal: int, device: torch.device) -> BackwardLaunches:
    helper = replace(problem, mask="full", deterministic=False, features=frozenset())
    problems = (
        replace(helper, op="bwd_preprocess"),
        problem,
        replace(helper, op="bwd_postprocess", head_dim_v=problem.head_dim),
    )
    preprocess, main, postprocess = (runtime.launch_for(each, ordinal).run for each in problems)
    new_floats = torch.empty(0, dtype=torch.float32, device=device).new_empty
    new_integers = torch.empty(0, dtype=torch.int32, device=device).new_empty
    num_sms = runtime.device(ordinal).sm_count
    return BackwardLaunches(preprocess, main, postprocess, num_sms, new_floats, new_integers)


def _has_recipe(runtime: Runtime) -> bool:
    """Whether another family is preferred, and an installed pack of it describes a backward."""
    if runtime.family in (None, OWN_FAMILY):
        return False
    packs = (pack for pack in usable(runtime.packs) if pack.manifest.family == runtime.family)
    return any(recipe["op"] == "bwd" for pack in packs for recipe in pack.manifest.recipes)


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""dq, dk, dv, and the sink's gradient if there is a sink."""


def compute_gradients(
    launches: BackwardLaunches | RecipeBackward,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    softmax_scale: float,
    window: Offsets,
    *,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> Gradients:
    """dq, dk, dv with the shapes and dtype of q, k, v, contiguous; the sink's gradient in float32.

    Args:
        tensors: q, k, v, and the forward's out and lse.
        dout, dlse: gradients of out and lse; None means zeros.
        window: as the kernels take it.
        softcap: > 0 where the kernels are built with it. sink: float32 (num_heads_q), as of the forward.
        gradients: where dq, dk and dv are to be written, in strides as of a forward's out.
    Contract: launches on the current stream. Inputs that a kernel cannot read where they lie are copied.
    Source: d lse / d s = p, so dlse enters where dpsum leaves: ds = p * (dp - (dpsum - dlse)).
    """
    q, k, v, out, lse = tensors
    dq, dk, dv = gradients or (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    batch, seqlen_q, num_heads, head_dim = q.shape
    if not (q.numel() and k.numel() and v.numel()) or window.sees_nothing:
        return dq.zero_(), dk.zero_(), dv.zero_(), _unseen_sink_gradient(sink, lse, dlse, (0, 2))
    dout = torch.zeros_like(out) if dout is None else dout
    if isinstance(launches, RecipeBackward):
        is_known = dlse is None and sink is None
        found = _by_recipe(launches, (*tensors, dout), softmax_scale, window) if is_known else None
        if found is not None and gradients is None:
            return found
        if found is not None:
            return dq.copy_(found[0]), dk.copy_(found[1]), dv.copy_(found[2]), None
        options: dict[str, Any] = {"softcap": softcap, "sink": sink, "gradients": (dq, dk, dv)}
        return compute_gradients(launches.ours(), tensors, dout, dlse, softmax_scale, window, **options)
    rounded = -(-seqlen_q // _ROWS) * _ROWS
    dpsum = launches.new_floats(batch, num_heads, rounded)
    lse_log2 = launches.new_floats(batch, num_heads, rounded)
    dq_accum = launches.new_floats(batch, num_heads, rounded, head_dim)
    semaphore = launches.new_integers(batch, num_heads, rounded // _ROWS)

    inputs = [out, dout, lse]
    for given in _launchable(inputs, (dpsum, lse_log2, dq_accum, semaphore)):
        run_copying(launches.preprocess, *given)
    row_sums = dpsum[:, :, :seqlen_q]
    if dlse is not None:
        row_sums.sub_(dlse)
    dsink = None if sink is None else _sink_gradient(sink[:, None], lse, row_sums, (0, 2))
    scalars = (softmax_scale, *window, launches.num_sms, *((softcap,) if softcap else ()))
    run_copying(launches.main, [q, k, v, inputs[1]], (dpsum, lse_log2, dq_accum, semaphore, dk, dv, *scalars))
    for _, (accumulated, gradient) in _launchable([], (dq_accum, dq)):
        launches.postprocess(accumulated, gradient, softmax_scale)
    return dq, dk, dv, dsink


def _launchable(
    inputs: list[torch.Tensor], rest: tuple[torch.Tensor, ...]
) -> Iterator[tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]]:
    """The arguments of a helper kernel, as they are or a part of the sequences at a time: a grid has no more there."""
    batch = rest[0].shape[0]
    if batch <= _MOST_SEQUENCES:
        yield inputs, rest
        return
    for first in range(0, batch, _MOST_SEQUENCES):
        part = slice(first, first + _MOST_SEQUENCES)
        yield [x[part] for x in inputs], tuple(x[part] for x in rest)


def _by_recipe(
    backward: RecipeBackward,
    tensors: tuple[torch.Tensor, ...],
    softmax_scale: float,
    window: Offsets,
) -> Gradients | None:
    """Gradients by a recipe `bwd`, which knows no gradient of lse and no sink; None where no recipe fits."""
    names = ("q", "k", "v", "out", "lse", "dout")
    arguments: dict[str, Any] = {name: x.contiguous() for name, x in zip(names, tensors, strict=True)}
    if backward.mask == "local":
        arguments |= {"window_left": window[0], "window_right": window[1]}
    how = {"mask": backward.mask, "deterministic": backward.deterministic, "softmax_scale": softmax_scale}
    try:
        dq, dk, dv = call("bwd", **arguments, **how)
    except NoKernelError:
        return None
    return dq, dk, dv, None


def compute_packed_gradients(
    launches: BackwardLaunches,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    softmax_scale: float,
    window: Offsets,
    *,
    starts: tuple[torch.Tensor, torch.Tensor],
    used: tuple[torch.Tensor | None, torch.Tensor | None],
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> Gradients:
    """The same for packed sequences; rows of no sequence, and beyond the used lengths, have gradients of zero.

    Args:
        tensors: q (total_q, num_heads_q, head_dim), ..., lse (num_heads_q, total_q).
        starts: cu_seqlens_q, cu_seqlens_k. used: seqused_q, seqused_k or None each; all int32 on the device of q.
    """
    q, k, v, out, lse = tensors
    if gradients is None:
        gradients = (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
    dq, dk, dv = (x.zero_() for x in gradients)
    total_q, num_heads, head_dim = q.shape
    batch = starts[0].shape[0] - 1
    rows = _PackedRows(starts[0], used[0], total_q)
    if not (q.numel() and k.numel() and v.numel() and batch) or window.sees_nothing:
        return dq, dk, dv, _unseen_sink_gradient(sink, lse, dlse, 1, rows.exist if batch else None)
    dout = torch.zeros_like(out) if dout is None else dout
    used_q, used_k = (starts[0].new_empty(0) if x is None else x for x in used)
    padded = (total_q + _ROWS * batch) // _ROWS * _ROWS
    dpsum = launches.new_floats(num_heads, padded)
    lse_log2 = launches.new_floats(num_heads, padded)
    dq_accum = launches.new_floats(num_heads, padded, head_dim)
    semaphore = launches.new_integers(num_heads, padded // _ROWS)

    inputs = [out, dout, lse]
    run_copying(launches.preprocess, inputs, (dpsum, lse_log2, dq_accum, semaphore, starts[0], used_q))
    if dlse is not None:
        dpsum.index_add_(1, rows.places, torch.where(rows.exist, -dlse, 0).to(torch.float32))
    dsink = None
    if sink is not None:
        row_sums = dpsum.index_select(1, rows.places)
        dsink = _sink_gradient(sink[:, None], lse, row_sums, 1, rows.exist)
    scalars = (softmax_scale, *window, launches.num_sms, *((softcap,) if softcap else ()))
    workspaces = (dpsum, lse_log2, dq_accum, semaphore)
    run_copying(launches.main, [q, k, v, inputs[1]], (*workspaces, dk, dv, *starts, used_q, used_k, *scalars))
    launches.postprocess(dq_accum, dq, starts[0], used_q, softmax_scale)
    return dq, dk, dv, dsink


class _PackedRows:
    """Where packed rows lie in the workspaces, found on the device when asked for.

    places: int64 (total_q), within the workspace; exist: bool (total_q), False for rows of no sequence or not used.
    """

    def __init__(self, cu_seqlens: torch.Tensor, seqused: torch.Tensor | None, total: int) -> None:
        self._cu_seqlens, self._seqused, self._total = cu_seqlens, seqused, total

    @cached_property
    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = self._cu_seqlens
        batch = starts.shape[0] - 1
        row = torch.arange(self._total, dtype=torch.int32, device=starts.device)
        sequence = (torch.searchsorted(starts, row, right=True) - 1).clamp_(0, batch - 1)
        offset = row - starts[sequence]
        lengths = starts.diff() if self._seqused is None else self._seqused
        tile = (starts[sequence] + _ROWS * sequence) // _ROWS * _ROWS
        return tile + offset, (offset >= 0) & (offset < lengths[sequence])

    @property
    def places(self) -> torch.Tensor:
        return self._rows[0]

    @property
    def exist(self) -> torch.Tensor:
        return self._rows[1]


def _sink_gradient(
    sink: torch.Tensor,
    lse: torch.Tensor,
    row_sums: torch.Tensor,
    rows: int | tuple[int, ...],
    exist: torch.Tensor | None = None,
) -> torch.Tensor:
    """Minus the sum of exp(sink - lse) * (dpsum - dlse) over the modes `rows`. Source: docs/formats.md, section 1.

    A row with lse = -inf has neither a key nor a sink.
    """
    terms = torch.where(torch.isneginf(lse), 0, torch.exp(sink - lse)) * row_sums
    if exist is not None:
        terms = torch.where(exist, terms, 0)
    return -terms.sum(rows)


def _unseen_sink_gradient(
    sink: torch.Tensor | None,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    rows: int | tuple[int, ...],
    exist: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Where no row sees a key: lse is the sink itself."""
    if sink is None:
        return None
    if dlse is None:
        return torch.zeros_like(sink)
    return _sink_gradient(sink[:, None], lse, -dlse, rows, exist)


def run_copying(run: Callable[..., Any], inputs: list[torch.Tensor], rest: tuple[Any, ...]) -> None:
    """Launch with those of `inputs` copied that the kernel cannot read where they lie; the list keeps the copies."""
    for _ in range(len(inputs) + 1):
        try:
            run(*inputs, *rest)
        except LayoutError as error:
            if error.position >= len(inputs):
                raise
            tensor = inputs[error.position]
            inputs[error.position] = tensor.clone(memory_format=torch.contiguous_format)
        else:
            return
    raise AssertionError("a fresh contiguous tensor was refused")
