"""Packed attention like an earlier call's, answered by the launcher alone (`RecipeCalls` in _calls.h).

Decoding asks the same at every step: other pointers, the same shapes. What a call of packed.py allocates and launches
follows from the shapes of its tensors and from its other arguments; this module says it to the launcher once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import loader
from .allocation import CAN_ANSWER, SCRATCH_ROWS, Maker, is_kept, lse_scratch, tensor_maker
from .attention import ForwardLaunches, launches_for
from .calls import Arguments, Call
from .problems import FP8_DTYPES

Tensor = torch.Tensor

_OP = object()  # among what the launcher keeps: no recipe's operator
_AS_IT_IS, _MERGED, _LED = 0, 2, 4  # ways to see a tensor, see _launcher.pyi
_NUM_TENSORS = 9  # the first of Arguments
_MAX_COUNTED = 4096
_TOLD_AGAIN = 64  # the launcher may have forgotten it
_counts: dict[tuple[Any, ...], int] = loader.remembered("count")


def _answer_none(arguments: tuple[Any, ...]) -> Any:
    return None


answer: Callable[[tuple[Any, ...]], Any] = _answer_none
"""(out, lse or None) for a call like one that the launcher was told of, or None for another.

Raises: LayoutError where a tensor must be copied; else as a launch.
"""


def note(arguments: Arguments, call: Call) -> None:
    """Count a call that was just served without gradients, and tell the launcher of it when it comes again.

    Telling takes longer than the call, and pays for shapes that repeat alone.
    """
    if not CAN_ANSWER or call.is_empty or call.lists.layout == "dense" or call.q.dtype in FP8_DTYPES:
        return
    if arguments.return_lse and arguments.q.dim() == 4:
        return  # the caller's lse is a view, which the launcher does not make
    if call.sink is not arguments.learnable_sink or not _is_plain(arguments):
        return  # converted at each call
    if not all(getattr(arguments, name) is not None or is_kept(x) for name, x in _named_lists(call)):
        return  # made at each call
    key = tuple(x.shape if isinstance(x, Tensor) else x for x in arguments)
    count = _counts[key] = _counts.get(key, 0) + 1
    if len(_counts) > _MAX_COUNTED:
        _counts.clear()
    if count % _TOLD_AGAIN == 2 and not loader.runtime().is_capturing:
        _tell(arguments, call)


def _is_plain(arguments: Arguments) -> bool:
    """Whether all but the tensors are numbers: the launcher compares shapes of tensors, not what they hold."""
    *numbers, window, softcap, num_splits, return_lse = arguments[_NUM_TENSORS:]
    if type(window) is not tuple:
        return False
    return all(x is None or isinstance(x, (int, float)) for x in (*numbers, *window, softcap, num_splits, return_lse))


def _tell(arguments: Arguments, call: Call) -> None:
    """What attention.forward does, as data."""
    global answer
    num_splits, launches = launches_for(call)
    values = _Values(arguments, call.q.device)
    tensors = [values.seen(name, as_rank=getattr(call, name).dim()) for name in "qkv"]
    lists = [values.seen(*given) for given in _named_lists(call)]
    sink = [] if call.sink is None else [values.seen("learnable_sink")]
    softcap = [call.softcap] if call.softcap else []
    rest = [*lists, call.softmax_scale, *call.window, launches.num_sms]
    results, outputs, merge = _outputs(values, arguments, call, launches, num_splits)
    if num_splits == 1:
        steps = [(launches.launch, (*tensors, *outputs, *rest, *sink, *softcap))]
    else:
        steps = [(launches.launch, (*tensors, *outputs, *rest, *softcap)), (launches.combine, (*merge, *sink))]
    calls = loader.compiled_calls("RecipeCalls")
    calls.add(_OP, tuple(arguments), tuple(values.buffers), tuple(steps), results, True)
    answer = partial(calls.run, _OP)


class _Values:
    """The tensors of a call by number: those among its arguments, then buffers."""

    def __init__(self, arguments: Arguments, device: torch.device) -> None:
        self._arguments, self._device = arguments, device
        named = [name for name, x in zip(Arguments._fields, arguments, strict=True) if isinstance(x, Tensor)]
        self._numbers = {name: number for number, name in enumerate(named)}
        self.buffers: list[tuple[Maker, tuple[int, ...], None]] = []

    def seen(self, name: str, constant: Tensor | None = None, *, as_rank: int | None = None) -> Any:
        """An argument by its number, with two modes as one where the kernel's has a mode less; or a constant."""
        if name not in self._numbers:
            return constant
        rank = getattr(self._arguments, name).dim()
        return self._numbers[name], _AS_IT_IS if as_rank in (None, rank) else _MERGED

    def new(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """The number of a buffer."""
        self.buffers.append((tensor_maker(dtype, self._device), shape, None))
        return len(self._numbers) + len(self.buffers) - 1


def _named_lists(call: Call) -> list[tuple[str, Tensor]]:
    keys = "cu_seqlens_k" if call.lists.page_table is None else "page_table"
    names = ("cu_seqlens_q", keys, "seqused_q", "seqused_k")
    return list(zip(names, call.lists.arguments(), strict=True))


def _outputs(
    values: _Values, arguments: Arguments, call: Call, launches: ForwardLaunches, num_splits: int
) -> tuple[tuple[int, int | None], list[Any], list[Any]]:
    """(numbers of out and lse, what the first kernel writes, what the second reads and writes)."""
    q, device = call.q, call.q.device
    rows, heads, head_dim_v = q.shape[0], q.shape[1], call.v.shape[-1]
    way = _AS_IT_IS if arguments.q.dim() == q.dim() else _MERGED
    out = values.new(launches.out_dtype, (*arguments.q.shape[:-1], head_dim_v))
    scratch = None
    if not arguments.return_lse and rows * heads <= SCRATCH_ROWS:
        scratch = lse_scratch(device)
    lse = values.new(torch.float32, (heads, rows)) if scratch is None else None
    place = (lse, _AS_IT_IS) if scratch is None else scratch[: rows * heads].view(heads, rows)
    results = (out, lse if arguments.return_lse else None)
    if num_splits == 1:
        return results, [(out, way), place], []
    out_partial = values.new(torch.float32, (num_splits, 1, rows, heads, head_dim_v))
    lse_partial = values.new(torch.float32, (num_splits, 1, heads, rows))
    parts = [(out_partial, _MERGED), (lse_partial, _MERGED)]
    merged = place.unsqueeze(0) if isinstance(place, Tensor) else (lse, _LED)
    return results, parts, [(out_partial, _AS_IT_IS), (lse_partial, _AS_IT_IS), (out, way | _LED), merged]
