"""Types of the compiled launcher (_launcher.c)."""

from collections.abc import Callable, Hashable
from typing import Any

def use_errors(
    input: type[Exception], layout: type[Exception], driver: type[Exception], plan: type[Exception], /
) -> None: ...

class Driver:
    def __new__(cls, path: str = "libcuda.so.1") -> Driver: ...
    def device(self, ordinal: int, /) -> dict[str, Any]: ...
    def device_count(self) -> int: ...
    def version(self) -> tuple[int, int]: ...
    def load(self, cubin: bytes, /) -> Library: ...

class Library: ...

class Plan:
    def __new__(cls, encoded: bytes) -> Plan: ...
    def evaluate(self, leaves: dict[str, int | float], /) -> bytes: ...
    def failed_guard(self, leaves: dict[str, int | float], /) -> str | None: ...

class Launch:
    def __new__(
        cls,
        driver: Driver,
        plan: Plan,
        library: Library,
        device: int,
        stream_of: Callable[[int], int],
        device_type: int = 2,
    ) -> Launch: ...
    def run(self, *arguments: object) -> None: ...
    def leaves(self, *arguments: object) -> dict[str, int | float]: ...

Maker = tuple[Callable[..., Any] | None, Callable[..., Any], Any]
"""(empty_strided, new_empty, dtype); see allocation.py."""

Observers = tuple[tuple[Callable[[], Any], Callable[[Any], Any] | None], ...]
"""What may want to see a call of torch: (count, allows). While `count()` is true, a call is left to Python unless
`allows(tensor)`, asked with its first tensor, is."""

class ForwardCalls:
    def __new__(
        cls, tensor_type: type, is_grad_enabled: Callable[[], bool], observers: Observers = (), levels: Any = None
    ) -> ForwardCalls: ...
    def add(
        self,
        launch: Launch,
        mask: int,
        head_dim: int,
        head_dim_v: int,
        extents: tuple[int, int, int, int, int] | None,
        scale: float,
        num_sms: int,
        out: Maker,
        lse: Maker,
        scratch: Any | None,
        /,
    ) -> None: ...
    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        softmax_scale: float | None,
        causal: bool,
        window_size: Any,
        return_lse: bool,
        /,
    ) -> tuple[Any, Any] | None: ...
    def clear(self) -> None: ...

class RecipeCalls:
    """Answers calls by the dtypes, shapes and devices of their tensors and the values of everything else.

    Tensors are numbered: those among the arguments, then the buffers. An argument of a step is an object as it is, or
    (number of a tensor, how to see it): the sum of 2, the first two modes as one, 4, a mode of extent 1 before all, and
    1, the last two modes swapped, applied in this order. A result is the number of a tensor, or None. A differentiable
    call is not answered when a tensor wants a gradient, while an observer counts it, or while `levels._current_level`
    is at least 0.
    """

    def __new__(
        cls, tensor_type: type, is_grad_enabled: Callable[[], bool], observers: Observers = (), levels: Any = None
    ) -> RecipeCalls: ...
    def add(
        self,
        op: Hashable,
        arguments: dict[str, Any] | tuple[Any, ...],
        buffers: tuple[tuple[Maker, tuple[int, ...], float | None], ...],
        steps: tuple[tuple[Launch, tuple[Any, ...]], ...],
        results: tuple[int | None, ...],
        is_differentiable: bool = False,
        /,
    ) -> None: ...
    def run(self, op: Hashable, arguments: dict[str, Any] | tuple[Any, ...], /) -> Any: ...
    def clear(self) -> None: ...
