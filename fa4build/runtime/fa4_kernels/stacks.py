"""One line that puts a program's own attention calls on our kernels, and takes them off again.

    provided = fa4_kernels.provide("torch")
    ...
    provided.remove()

What a stack asks for that no installed kernel serves stays with the stack, and is counted: `fa4_kernels.served()`.
"""

from collections.abc import Callable
from typing import Protocol

from .counts import Served
from .counts import served as served
from .errors import InputError


class Provided(Protocol):
    """What `provide` has put in place."""

    def remove(self) -> None:
        """Put back what was there before. A second call does nothing."""


def provide(stack: str) -> Provided:
    """Put the attention of `stack` on our kernels, for this process.

    Args:
        stack: "torch": `F.scaled_dot_product_attention` and `torch.nn.attention.varlen`, through torch's registry of
            flash attention implementations. "transformers": `attn_implementation="fa4_kernels"` becomes known.
    Returns: what takes it off again.
    Raises: InputError for a stack that is unknown or not installed.
    """
    made = _STACKS.get(stack)
    if made is None:
        raise InputError(f"stack {stack!r} is unknown. Allowed: {', '.join(_STACKS)}")
    return made()


class _Torch:
    def remove(self) -> None:
        from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

        from .torch_backend import NAME

        if current_flash_attention_impl() == NAME:
            restore_flash_attention_impl()


def _torch() -> Provided:
    from torch.nn.attention import activate_flash_attention_impl

    from .torch_backend import NAME, register

    register()
    activate_flash_attention_impl(NAME)
    return _Torch()


class _Transformers:
    def remove(self) -> None:
        """A name that is known to transformers stays known; no model uses it unless it is told to."""


def _transformers() -> Provided:
    from .hf import register

    register()
    return _Transformers()


_STACKS: dict[str, Callable[[], Provided]] = {"torch": _torch, "transformers": _transformers}

__all__ = ["Provided", "Served", "provide", "served"]
