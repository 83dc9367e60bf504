"""In the compile process: whether kernels could depend on the device that they are traced for.

Host code asks for the number of multiprocessors to size a grid; its kernels hardly ever see the answer. A trace on a
second device then needs no kernels: it is enough that they were given the same things on both. What a kernel is given
are its arguments with everything that can be reached from them; numbers of Python count by value, values of the IR by
their type, in which layouts and extents are spelled out.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice)
_KERNEL_FACTS = ("_dsl_kernel_sym", "_dsl_kernel_name")  # the DSL leaves them on the function it traced


class UnreadableError(Exception):
    """Something a kernel is given cannot be compared."""


class KernelViews:
    """The kernels of one trace: what each was given, and whether its body is running.

    Attributes:
        seen: what the kernels were given, in order; None once something could not be compared.
        is_inside: true while the body of a kernel is traced.
    """

    def __init__(self) -> None:
        self.seen: list[Any] | None = []
        self.is_inside = False

    @contextmanager
    def watch(self, *, with_bodies: bool) -> Iterator[None]:
        """For as long as this lasts, note what kernels are given. Without bodies, every kernel traced is empty."""
        from cutlass.base_dsl.dsl import BaseDSL

        real = BaseDSL.kernel_launcher

        def kernel_launcher(dsl: Any, *args: Any, **options: Any) -> Callable[..., Any]:
            decorate = real(dsl, *args, **options)
            return lambda body: self._watched(decorate, body, with_bodies)

        BaseDSL.kernel_launcher = kernel_launcher
        try:
            yield
        finally:
            BaseDSL.kernel_launcher = real

    def _watched(self, decorate: Callable[..., Any], body: Callable[..., Any], with_bodies: bool) -> Callable[..., Any]:
        @functools.wraps(body)
        def view(*args: Any, **kwargs: Any) -> Any:
            self._note(body, args, kwargs)
            if not with_bodies:
                return None
            self.is_inside = True
            try:
                return body(*args, **kwargs)
            finally:
                self.is_inside = False

        launch = decorate(view)

        def launched(*args: Any, **kwargs: Any) -> Any:
            result = launch(*args, **kwargs)
            for name in _KERNEL_FACTS:
                setattr(body, name, getattr(view, name))
            return result

        return launched

    def _note(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.seen is None:
            return
        try:
            self.seen.append((body.__qualname__, describe((args, kwargs))))
        except UnreadableError:
            self.seen = None


def describe(value: Any) -> Any:
    """A value that is equal for equal things given to a kernel, built of tuples and plain values.

    Raises: UnreadableError for an object whose parts cannot be listed.
    """
    return _describe(value, {})


def _describe(value: Any, known: dict[int, int]) -> Any:
    if isinstance(value, enum.Enum):
        return (type(value).__qualname__, value.name)
    if isinstance(value, _PLAIN):
        return (type(value).__qualname__, repr(value))
    if isinstance(value, (type, types.ModuleType)):
        return (getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__))
    if type(value).__module__.startswith("cutlass._mlir"):
        return _described_ir(value)
    if id(value) in known:
        return ("again", known[id(value)])
    known[id(value)] = len(known)
    return (type(value).__qualname__, *(_describe(part, known) for part in _parts(value)))


def _described_ir(value: Any) -> Any:
    """A value of the IR by its type; types and attributes by their text."""
    from cutlass._mlir import ir

    if isinstance(value, (ir.Type, ir.Attribute)):
        return str(value)
    if isinstance(value, ir.Value):
        return ("value", str(value.type))
    if isinstance(value, (ir.Location, ir.Context)):
        return type(value).__qualname__
    raise UnreadableError(type(value).__qualname__)


def _parts(value: Any) -> Iterator[Any]:
    """Everything that can be reached from an object in one step."""
    if isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, (set, frozenset)):
        yield from sorted(value, key=repr)
    elif isinstance(value, (dict, types.MappingProxyType)):
        for item in value.items():
            yield from item
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield value.__module__ + value.__qualname__
        yield from (value.__defaults__, value.__kwdefaults__)
        yield from value.__closure__ or ()
    elif isinstance(value, types.CellType):
        yield from _contents(value)
    elif isinstance(value, types.CodeType):
        yield from (value.co_code, value.co_consts, value.co_names)
    elif isinstance(value, (types.BuiltinFunctionType, property, staticmethod, classmethod)):
        yield repr(value)
    else:
        yield from _attributes(value)


def _attributes(value: Any) -> Iterator[Any]:
    """Names and values of an object's attributes, those in slots included."""
    slots = [name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    if not hasattr(value, "__dict__") and not slots:
        raise UnreadableError(type(value).__qualname__)
    for name in slots:
        if hasattr(value, name):
            yield from (name, getattr(value, name))
    for name, part in vars(value).items() if hasattr(value, "__dict__") else ():
        yield from (name, part)


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # still empty
        return ()


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if name != "__dict__")
