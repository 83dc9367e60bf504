"""Memory of a call from torch's allocator: how the launcher makes tensors, and where an unwanted log-sum-exp goes."""

from collections.abc import Callable

import torch

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


def lse_scratch(device: torch.device, *, is_capturing: bool = False) -> torch.Tensor | None:
    """Where kernels may write a log-sum-exp that nobody asked for: one float32 tensor a device, SCRATCH_ROWS long.

    Nothing ever reads it, so launches on any streams may write it at once. It is made once and never freed: kernels in
    flight and captured graphs hold its address. The stream it is made on is waited for, because torch may give memory
    that earlier work of that stream still reads, and launches on other streams would not wait.
    Returns: None during a capture, whose allocations belong to its graph, unless it was made before.
    """
    scratch = _scratches.get(device)
    if scratch is not None or is_capturing:
        return scratch
    scratch = torch.empty(SCRATCH_ROWS, dtype=torch.float32, device=device)
    if type(scratch) is not torch.Tensor:  # under a mode that makes fake tensors
        return None
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return _scratches.setdefault(device, scratch)
