"""In the compile process: what adapters of foreign kernels need. Imports the compiler, inside functions only.

- `compile_host` compiles a host object of one's own.
- `setup` is the worker of families whose hosts are driven by torch tensors.
- `rewrite_functions` does ahead, in the server, what every child would do again.
- `name_kernels` gives a class's kernels the symbol that was asked for.
- `Recorder` stands in for `cute.compile` while a library's own Python code decides what to compile.
- `TracedDevice` answers questions about the device, and notes that they were asked.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fa4build.compiling import compile_worker, inputs_read
from fa4build.compiling.compile_worker import HostFunction
from fa4build.errors import CompileError
from fa4build.families.interface import Input, Scalar
from fa4build.families.kernel_views import KernelViews
from fa4build.plan.extract.device_facts import StandInDevice, pretend

DEVICES = (
    StandInDevice(sm_count=143, l2_bytes=52_428_815),
    StandInDevice(sm_count=207, l2_bytes=67_108_879),
)
_LIBRARIES = (
    ("flash_attn.cute.interface",),
    ("quack.rmsnorm", "quack.softmax", "quack.cross_entropy"),
)


def setup() -> dict[str, str]:
    """The compiler, torch, and the libraries whose kernels are compiled, as far as they are installed."""
    facts = compile_worker.setup()
    inputs_read.compiler_loads(_import_torch)
    for modules in _LIBRARIES:
        with contextlib.suppress(ModuleNotFoundError):
            for name in modules:
                importlib.import_module(name)
    return facts


def _import_torch() -> None:
    """Part of the environment, as the compiler is; it looks for plugins and libraries while it is imported."""
    if importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch._subclasses.fake_tensor")


def rewrite_functions(modules: Iterable[str]) -> int:
    """Let the DSL rewrite the source of every function of these modules that it would trace; returns how many.

    It does so once a process, when a function is first called: part of every child's trace, unless the server that
    they are forked from has done it. Nothing is traced, and nothing of the device is asked.
    """
    from cutlass.base_dsl.dsl import BaseDSL

    found = {id(function): function for name in modules for function in _decorated(sys.modules[name])}
    for function in found.values():
        BaseDSL._preprocess_and_replace_code(function)
    return len(found)


def _decorated(module: Any) -> Iterator[Any]:
    """What `@cute.jit` and `@cute.kernel` wrapped, in a module and in its classes."""
    for value in list(vars(module).values()):
        for member in list(vars(value).values()) if isinstance(value, type) else (value,):
            wrapper = getattr(member, "__func__", member)
            if callable(getattr(wrapper, "set_name_prefix", None)):
                function = inspect.unwrap(wrapper)
                if getattr(function, "_decorator_kind", None) in ("jit", "kernel"):
                    yield function


def name_kernels(host: Any, symbol: str) -> None:
    """Call the kernels of a host object `<symbol>_0` and so on. `host` is an instance whose methods launch them.

    Kernels are what `@cute.kernel` made, found by its `set_name_prefix`, also in objects that `host` holds.
    """
    for holder in (host, *vars(host).values()) if hasattr(host, "__dict__") else (host,):
        for name in dir(type(holder)):
            kernel = getattr(type(holder), name, None)
            if "kernel" in name and callable(getattr(kernel, "set_name_prefix", None)):
                kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)


_TYPES = {
    "bf16": "BFloat16",
    "fp16": "Float16",
    "e4m3": "Float8E4M3FN",
    "e5m2": "Float8E5M2",
    "f32": "Float32",
    "i32": "Int32",
    "i64": "Int64",
    "u8": "Uint8",
}
_SCALAR_TYPES = ("f32", "i32", "i64")
_ALIGN_BYTES = 16


def compile_host(
    host: Any, arguments: Sequence[Input | Scalar], request: Mapping[str, Any], options: str
) -> HostFunction:
    """Compile a host object whose `__call__` takes `arguments` in order and, last, the stream.

    Args:
        host: an instance whose method `kernel` (or `..kernel..`) is a `@cute.kernel`.
        arguments: named as the host's parameters. A tensor's last stride is 1, its address and other strides are
            multiples of 16 bytes where its last extent is; a named extent is free, and equal wherever it occurs.
    Raises: CompileError for a dtype that a tensor or a scalar cannot have.
    """
    import cutlass
    import cutlass.cute as cute

    for argument in arguments:
        _check_dtype(argument, request["name"])
    tensors = [argument for argument in arguments if isinstance(argument, Input)]
    named = sorted({extent for tensor in tensors for extent in tensor.shape if isinstance(extent, str)})
    symbols = {name: cute.sym_int32(symbol=name) for name in named}

    def fake(argument: Input | Scalar) -> Any:
        if isinstance(argument, Scalar):
            return getattr(cutlass, _TYPES[argument.dtype])(0)
        dtype = getattr(cutlass, _TYPES[argument.dtype])
        last = argument.shape[-1]
        align = math.gcd(_ALIGN_BYTES, last * dtype.width // 8) if isinstance(last, int) else dtype.width // 8
        strides = (cute.sym_int64(divisibility=align * 8 // dtype.width) for _ in argument.shape[1:])
        return cute.runtime.make_fake_tensor(
            dtype,
            tuple(symbols[extent] if isinstance(extent, str) else extent for extent in argument.shape),
            stride=(*strides, 1),
            assumed_align=align,
        )

    name_kernels(host, request["symbol"])
    stream = cute.runtime.make_fake_stream()
    compiled = compile_worker.compile_host(host, *map(fake, arguments), stream, options=options)
    return HostFunction(compiled=compiled, spec={"shapes": {tensor.name: list(tensor.shape) for tensor in tensors}})


def _check_dtype(argument: Input | Scalar, name: str) -> None:
    allowed = _SCALAR_TYPES if isinstance(argument, Scalar) else tuple(_TYPES)
    if argument.dtype not in allowed:
        raise CompileError(f"{name}: {argument.name} has dtype {argument.dtype!r}. Allowed: {', '.join(allowed)}.")


def use_target(target: str) -> None:
    """Make the compiler's default target `target` (`sm_90a`), for libraries that ask for it before they compile.

    The compiler reads `CUTE_DSL_ARCH` once, in the server; a child serves one target and knows it only now.
    """
    from cutlass.cutlass_dsl import CuTeDSL

    os.environ["CUTE_DSL_ARCH"] = target
    CuTeDSL._get_dsl().envar.arch = target


class TracedDevice:
    """Makes `HardwareInfo` answer for invented devices; `was_asked` tells whether a trace depends on them.

    `was_asked_by_kernel` tells whether code of a kernel, not of its host, has asked.
    """

    def __init__(self, views: KernelViews) -> None:
        self.was_asked = self.was_asked_by_kernel = False
        self._views = views

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
            self.was_asked_by_kernel |= self._views.is_inside
            return answer(*args, **kwargs)

        return ask


class Recorder:
    """Takes the place of `cute.compile`: notes what a library would compile, and hands out functions that do nothing.

    A library compiles several host functions in one call; only the wanted one is worth the time, and which that is may
    show only at the end.
    """

    def __init__(self, compile_: Any) -> None:
        self._compile = compile_
        self.asked: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, host: Any, *args: Any, **kwargs: Any) -> Callable[..., None]:
        self.asked.append((host, args, kwargs))
        return _launch_nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compile, name)

    def pick(self, wanted: tuple[str, int], name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """What was asked for with the `wanted[1]`-th host object of class `wanted[0]`; -1 is the last.

        Raises: CompileError naming what was asked for when it is not among it.
        """
        kind, index = wanted
        found = [item for item in self.asked if type(item[0]).__name__ == kind]
        if not -len(found) <= index < len(found):
            seen = ", ".join(type(item[0]).__name__ for item in self.asked)
            raise CompileError(f"{name}: the library compiled {seen or 'nothing'}, no {kind} number {index}.")
        return found[index]


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
    types: Mapping[str, str] | None = None,
    check: Callable[[Any], None] | None = None,
) -> HostFunction:
    """Run a library's own Python code on fake tensors and keep one of the host functions that it compiles.

    Args:
        call: the library's function with its arguments, run under torch's fake tensors.
        wanted: which host object, as for `Recorder.pick`.
        check: called with it before it is compiled; raises if it is not what was expected.
        spec, names, bindings, types: as of `HostFunction`.
        forget: empties the library's caches, before a second trace.
    Raises: CompileError when the wanted host function is not among what the library compiles.
    """
    import cutlass.cute as cute
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    views = KernelViews()
    device = TracedDevice(views)
    torch.cuda.current_device = lambda: 0
    real = cute.compile

    def traced(stand_in: StandInDevice, seen: KernelViews, with_bodies: bool = True) -> Any:
        device.be(stand_in)
        recorder = Recorder(real)
        cute.compile = recorder
        with FakeTensorMode():
            try:
                call()
            finally:
                cute.compile = real
            host, args, kwargs = recorder.pick(wanted, request["name"])
            if check is not None:
                check(host)
            name_kernels(host, request["symbol"])
            with seen.watch(with_bodies=with_bodies):
                return compile_worker.compile_host(host, *args, **kwargs | {"options": options})

    def again(with_kernels: bool) -> Any:
        if not with_kernels and (views.seen is None or device.was_asked_by_kernel):
            return None
        forget()
        of_second = KernelViews()
        second = traced(DEVICES[1], of_second, with_bodies=with_kernels)
        return second if with_kernels or of_second.seen == views.seen else None

    compiled = traced(DEVICES[0], views)
    return HostFunction(
        compiled=compiled,
        spec=spec,
        names=names,
        bindings=bindings or {},
        types=types or {},
        on_other_device=again if device.was_asked else None,
        devices=DEVICES,
    )
