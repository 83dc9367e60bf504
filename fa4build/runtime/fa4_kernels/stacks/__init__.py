"""One line that puts a program's own attention calls on our kernels, and takes them off again.

    provided = fa4_kernels.provide("torch")
    ...
    provided.remove()

A stack is torch, transformers, or the name of a module that programs import. What a stack asks for that no installed
kernel serves stays with it where it can run that, and is counted: `fa4_kernels.served()`.
"""

from collections.abc import Callable
from typing import Protocol

from ..counts import Served
from ..counts import served as served
from ..errors import InputError
from .modules import MODULE_STACKS, Names


class Provided(Protocol):
    """What `provide` has put in place."""

    def remove(self) -> None:
        """Put back what was there before. A second call does nothing."""


def provide(stack: str, *, fallback: bool = False, workers: bool = False) -> Provided:
    """Put the attention of `stack` on our kernels, for this process.

    Args:
        stack: "torch": `F.scaled_dot_product_attention` and `torch.nn.attention.varlen`, through torch's registry of
            flash attention implementations. "transformers": `attn_implementation="fa4_kernels"` becomes known.
            "flash_attn", "flash_attn_interface", "flash_attn.cute": the modules of FlashAttention-2, 3 and 4, whether
            installed or not. Call it before the program imports them: names that were taken out of them stay.
        fallback: of those modules: a call that is not served goes to the installed package, instead of raising.
            (torch always has its own kernels to go to.)
        workers: of those modules: processes that this one starts later find the same, by its environment.
    Returns: what takes it off again.
    Raises: InputError for a stack that is unknown or not installed, and for a fallback to what is not installed.
    """
    if stack in MODULE_STACKS:
        return _modules(stack, fallback, workers)
    made = _STACKS.get(stack)
    if made is None:
        raise InputError(f"stack {stack!r} is unknown. Allowed: {', '.join((*_STACKS, *MODULE_STACKS))}")
    if workers or (fallback and stack != "torch"):
        raise InputError(f"fallback and workers are for {', '.join(MODULE_STACKS)}; leave them out for {stack}")
    return made()


def _modules(stack: str, fallback: bool, workers: bool) -> Provided:
    names = Names(stack, fallback=fallback)
    if not workers:
        return names
    from .workers import ForWorkers

    return ForWorkers(names)


class _Torch:
    def remove(self) -> None:
        from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

        from ..torch_backend import NAME

        if current_flash_attention_impl() == NAME:
            restore_flash_attention_impl()


def _torch() -> Provided:
    from torch.nn.attention import activate_flash_attention_impl

    from ..torch_backend import NAME, register

    register()
    activate_flash_attention_impl(NAME)
    return _Torch()


class _Transformers:
    def remove(self) -> None:
        """A name that is known to transformers stays known; no model uses it unless it is told to."""


def _transformers() -> Provided:
    from ..hf import register

    register()
    return _Transformers()


_STACKS: dict[str, Callable[[], Provided]] = {"torch": _torch, "transformers": _transformers}

__all__ = ["Provided", "Served", "provide", "served"]
