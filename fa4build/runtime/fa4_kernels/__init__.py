"""FlashAttention-4 kernels compiled ahead of time: nothing is compiled, downloaded or written at run time.

    from fa4_kernels import flash_attn_func
    out, _ = flash_attn_func(q, k, v, causal=True)

Importing this package imports neither torch nor the launcher; the first function asked for does.
"""

from typing import TYPE_CHECKING, Any

from .errors import (
    CaptureError,
    DriverError,
    FA4KernelsError,
    InputError,
    LayoutError,
    NoKernelError,
    PackError,
    TrustError,
)

if TYPE_CHECKING:
    from .api import (
        call,
        explain,
        explain_call,
        flash_attn_combine,
        flash_attn_func,
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
        preload,
        require_evidence,
    )
    from .stacks import provide, served

__version__ = "0.1.0"

_FUNCTIONS = (
    "call",
    "explain",
    "explain_call",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "preload",
    "require_evidence",
)
_OF_STACKS = ("provide", "served")
__all__ = [
    "CaptureError",
    "DriverError",
    "FA4KernelsError",
    "InputError",
    "LayoutError",
    "NoKernelError",
    "PackError",
    "TrustError",
    "call",
    "explain",
    "explain_call",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "preload",
    "provide",
    "require_evidence",
    "served",
]


def __getattr__(name: str) -> Any:
    """The functions, imported when first asked for, because most of them import torch."""
    if name in _OF_STACKS:
        from . import stacks as module
    elif name in _FUNCTIONS:
        from . import api as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = function = getattr(module, name)
    return function
