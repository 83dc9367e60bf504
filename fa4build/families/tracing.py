"""In the compile process: what adapters of foreign kernels need. Imports the compiler, inside functions only.

- `setup` is the worker of families whose hosts are driven by torch tensors.
- `name_kernels` gives a class's kernels the symbol that was asked for.
- `Recorder` stands in for `cute.compile` while a library's own Python code decides what to compile.
- `TracedDevice` answers questions about the device, and notes that they were asked.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from fa4build.codegen import compile_worker
from fa4build.codegen.compile_worker import HostFunction
from fa4build.codegen.extract.device_facts import StandInDevice, pretend
from fa4build.errors import CompileError

DEVICES = (
    StandInDevice(sm_count=143, l2_bytes=52_428_815),
    StandInDevice(sm_count=207, l2_bytes=67_108_879),
)


def setup() -> dict[str, str]:
    """The compiler, torch, and the libraries whose kernels are compiled, as far as they are installed."""
    facts = compile_worker.setup()
    for name in ("torch", "torch._subclasses.fake_tensor", "flash_attn.cute.interface", "quack.rmsnorm"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    for name in ("quack.softmax", "quack.cross_entropy"):
        importlib.import_module(name)
    return facts


def name_kernels(host: Any, symbol: str) -> None:
    """Call the kernels of a host object `<symbol>_0` and so on. `host` is an instance whose methods launch them.

    Kernels are what `@cute.kernel` made, found by its `set_name_prefix`, also in objects that `host` holds.
    """
    for holder in (host, *vars(host).values()) if hasattr(host, "__dict__") else (host,):
        for name in dir(type(holder)):
            kernel = getattr(type(holder), name, None)
            if "kernel" in name and callable(getattr(kernel, "set_name_prefix", None)):
                kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)


def use_target(target: str) -> None:
    """Make the compiler's default target `target` (`sm_90a`), for libraries that ask for it before they compile.

    The compiler reads `CUTE_DSL_ARCH` once, in the server; a child serves one target and knows it only now.
    """
    from cutlass.cutlass_dsl import CuTeDSL

    os.environ["CUTE_DSL_ARCH"] = target
    CuTeDSL._get_dsl().envar.arch = target


class TracedDevice:
    """Makes `HardwareInfo` answer for invented devices; `was_asked` tells whether a trace depends on them."""

    def __init__(self) -> None:
        self.was_asked = False

    def be(self, device: StandInDevice) -> None:
        """From now on, be this device."""
        import cutlass.utils

        info = cutlass.utils.HardwareInfo
        pretend(info, device)
        for name in ("get_device_multiprocessor_count", "get_l2_cache_size_in_bytes"):
            setattr(info, name, self._noting(getattr(info, name)))

    def _noting(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            self.was_asked = True
            return answer(*args, **kwargs)

        return ask


class Recorder:
    """Takes the place of `cute.compile`: compiles only what is wanted, and hands out functions that do nothing.

    Args:
        compile_: the real `cute.compile`.
        wanted: class name of the host object, and which of the compiles of that class, from 0.
        options: the compiler's option string, in place of the library's.
        check: called with the wanted host object before it is compiled; raises if it is not what was expected.
    """

    def __init__(
        self,
        compile_: Any,
        wanted: tuple[str, int],
        symbol: str,
        options: str,
        check: Callable[[Any], None] | None = None,
    ) -> None:
        self._check = check
        self._compile = compile_
        self._wanted = wanted
        self._symbol = symbol
        self._options = options
        self.seen: list[str] = []
        self.compiled: Any = None

    def __call__(self, host: Any, *args: Any, **kwargs: Any) -> Callable[..., None]:
        name = type(host).__name__
        if (name, self.seen.count(name)) == self._wanted:
            if self._check is not None:
                self._check(host)
            name_kernels(host, self._symbol)
            self.compiled = self._compile(host, *args, **kwargs | {"options": self._options})
        self.seen.append(name)
        return _launch_nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compile, name)


def _launch_nothing(*_args: Any, **_kwargs: Any) -> None:
    """What a library gets to call in place of a compiled function."""


def compile_by_library(
    call: Callable[[], object],
    *,
    wanted: tuple[str, int],
    request: Mapping[str, Any],
    options: str,
    spec: Mapping[str, Any],
    names: Mapping[str, str],
    forget: Callable[[], None],
    bindings: Mapping[str, str] | None = None,
    check: Callable[[Any], None] | None = None,
) -> HostFunction:
    """Run a library's own Python code on fake tensors and keep one of the host functions that it compiles.

    Args:
        call: the library's function with its arguments, run under torch's fake tensors.
        wanted, check: as for `Recorder`.
        spec, names, bindings: as of `HostFunction`.
        forget: empties the library's caches, before a second trace.
    Raises: CompileError naming what was compiled when the wanted host function is not among it.
    """
    import cutlass.cute as cute
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    device = TracedDevice()
    torch.cuda.current_device = lambda: 0
    real = cute.compile

    def traced(stand_in: StandInDevice) -> Any:
        device.be(stand_in)
        recorder = Recorder(real, wanted, request["symbol"], options, check)
        cute.compile = recorder
        try:
            with FakeTensorMode():
                call()
        finally:
            cute.compile = real
        if recorder.compiled is None:
            raise CompileError(
                f"{request['name']}: {wanted[0]} number {wanted[1]} was not compiled; compiled: {recorder.seen}."
            )
        return recorder.compiled

    def again() -> Any:
        forget()
        return traced(DEVICES[1])

    compiled = traced(DEVICES[0])
    return HostFunction(
        compiled=compiled,
        spec=spec,
        names=names,
        bindings=bindings or {},
        on_other_device=again if device.was_asked else None,
        devices=DEVICES,
    )
