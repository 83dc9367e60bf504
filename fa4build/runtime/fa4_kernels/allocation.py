"""Memory of a call from torch's allocator: how the launcher makes tensors, and where an unwanted log-sum-exp goes."""

from collections.abc import Callable

import torch

from .observers import may_keep

Maker = tuple[Callable[..., torch.Tensor] | None, Callable[..., torch.Tensor], torch.dtype]

CAN_ANSWER = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
"""Whether the launcher can read this torch's tensors without a Python object for each number, and so answer calls."""

SCRATCH_ROWS = 1 << 20
"""Rows of log-sum-exp that the scratch of a device holds: 4 MiB. Larger problems run long enough to allocate."""

_scratches: dict[torch.device, torch.Tensor] = {}


def tensor_maker(dtype: torch.dtype, device: torch.device) -> Maker:
    """How the launcher allocates on a device: (empty_strided, new_empty, dtype).

    `empty_strided(sizes, strides, dtype)` is what torch's own compiler calls from generated code: the allocation of
    torch.empty on the current device, without the dispatcher around it. None where torch has none. The launcher uses it
    if the device is current, looks at what it got, and otherwise calls `new_empty(sizes)`.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    empty_strided = getattr(guards, f"_empty_strided_{device.type}", None)
    return empty_strided, torch.empty(0, dtype=dtype, device=device).new_empty, dtype


_streams: dict[torch.device, torch.cuda.Stream] = {}


def tensor_for_all(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """A tensor of `make()` that may serve calls on every stream, with and without gradients, for as long as it is held.

    It is made outside inference mode, on a stream of its own, and is ready when this returns. That stream alone is
    waited for, so that work of other streams goes on. Whoever keeps it must never let go of it: kernels in flight and
    captured graphs hold its address.
    Returns: None while torch traces or a mode is active, where `make` would give no plain tensor, and during a capture,
        whose allocations belong to its graph.
    """
    if not may_keep():
        return None
    with torch.inference_mode(False), torch.no_grad():
        if device.type != "cuda":
            tensor = make()
            return tensor if type(tensor) is torch.Tensor else None
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = _streams.get(device)
        if stream is None:
            stream = _streams[device] = torch.cuda.Stream(device, priority=-1)
        with torch.cuda.stream(stream):
            tensor = make()
        stream.synchronize()
        return tensor if type(tensor) is torch.Tensor else None


def lse_scratch(device: torch.device, *, is_capturing: bool = False) -> torch.Tensor | None:
    """Where kernels may write a log-sum-exp that nobody asked for: one float32 tensor a device, SCRATCH_ROWS long.

    Nothing ever reads it, so launches on any streams may write it at once. It is made once and never freed.
    Returns: None where no tensor can be kept (`tensor_for_all`), unless it was made before.
    """
    scratch = _scratches.get(device)
    if scratch is not None or is_capturing:
        return scratch
    scratch = tensor_for_all(lambda: torch.empty(SCRATCH_ROWS, dtype=torch.float32, device=device), device)
    return None if scratch is None else _scratches.setdefault(device, scratch)


_MAX_KEPT = 1 << 14
_starts: dict[tuple[int, int, torch.device], torch.Tensor] = {}
_nothing: dict[torch.device, torch.Tensor] = {}


def equal_starts(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """cu_seqlens of `batch` sequences of one length, int32 (batch + 1).

    Decoding asks for the same at every step, so the first _MAX_KEPT of a process are kept for its life; after those,
    during a capture and inside torch.compile a new one is made on the current stream.
    """
    if type(batch) is not int or type(length) is not int or not may_keep():
        return torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    key = (batch, length, device)
    starts = _starts.get(key)
    if starts is None and len(_starts) < _MAX_KEPT:
        # Copied from the host, which needs no multiprocessor that other work may hold.
        starts = tensor_for_all(lambda: (_count(batch + 1, torch.device("cpu")) * length).to(device), device)
        starts = starts if starts is None else _starts.setdefault(key, starts)
    return _count(batch + 1, device) * length if starts is None else starts


def _count(number: int, device: torch.device) -> torch.Tensor:
    return torch.arange(number, dtype=torch.int32, device=device)


def no_numbers(device: torch.device) -> torch.Tensor:
    """A list without elements, int32, which takes no memory."""
    nothing = _nothing.get(device)
    if nothing is None:
        with torch.inference_mode(False):
            nothing = torch.empty(0, dtype=torch.int32, device=device)
        if may_keep():
            nothing = _nothing.setdefault(device, nothing)
    return nothing


def is_kept(tensor: torch.Tensor) -> bool:
    """Whether a list made here lives as long as the process, so that others may keep its address."""
    return not tensor.numel() or any(tensor is kept for kept in list(_starts.values()))
