"""From a variant and its tuning to the values a template fills in. Every choice a template would need is made here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from fa4build.compiling.signature import Arg, ScalarArg, signature_for
from fa4build.compiling.wiring import Wiring
from fa4build.errors import RenderError
from fa4build.matrix.axes import Variant
from fa4build.matrix.tuning import AnyTuning

CUTLASS_TYPES = {
    "bf16": "cutlass.BFloat16",
    "fp16": "cutlass.Float16",
    "e4m3": "cutlass.Float8E4M3FN",
    "e5m2": "cutlass.Float8E5M2",
}

_SCALAR_TYPES = {"f32": "cutlass.Float32", "i32": "cutlass.Int32"}
_STREAM = "stream"
MAX_COLUMNS = 120  # of a rendered line


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributePath:
    """A dotted name that stands for itself in rendered text: the one value that is no plain literal."""

    path: str


def context_for(variant: Variant, tuning: AnyTuning) -> dict[str, object]:
    """What a specialization is made of: `variant_id`, `symbol`, and every axis and tuning field under its own name.

    `dtype` is the compiler's type; `op` and `arch` are in the id and decide the kernel and the compile target.
    `parameters` and `arguments` are text: the host function's parameters with their types, and the same names as
    keyword arguments of the kernel, one a line, so that one template serves every layout and feature.
    """
    names = [(argument.name, _annotation(argument)) for argument in signature_for(variant)]
    return {
        "variant_id": variant.id,
        "symbol": variant.symbol,
        **asdict(variant),
        "dtype": AttributePath(path=CUTLASS_TYPES[variant.dtype]),
        **asdict(tuning),
        "parameters": _lines([f"{name}: {kind}" for name, kind in names] + [_STREAM], indent=4),
        "arguments": _lines([f"{name}={name}" for name in (*(name for name, _ in names), _STREAM)], indent=8),
    }


def wired(values: Mapping[str, object], wiring: Wiring, literal: Callable[[object], str]) -> dict[str, object]:
    """The template's values for a kernel: `values`, its class, and as text its constants and how they reach it.

    Args: literal: Python source of a value.
    Raises: RenderError for a field that is neither an axis nor a tuning value.
    """
    missing = [of for _, of in wiring.fields if of not in values]
    if missing:
        raise RenderError(
            f"{wiring.kernel} takes {', '.join(missing)}, which is no axis or tuning value of its variant."
        )
    constants = "".join(f"{name.upper()} = {literal(values[of])}\n" for name, of in wiring.fields)
    names = [f"{name}={name.upper()}" for name, _ in wiring.fields]
    line = ", ".join(names)
    is_short = len(f"    {wiring.kernel}({line})(") <= MAX_COLUMNS
    return {
        **values,
        "module": wiring.module,
        "kernel": wiring.kernel,
        "constants": constants,
        "configuration": line if is_short else _lines(names, indent=8),
    }


def _annotation(argument: Arg) -> str:
    return _SCALAR_TYPES[argument.dtype] if isinstance(argument, ScalarArg) else "cute.Tensor"


def _lines(items: list[str], *, indent: int) -> str:
    """One item a line, as the formatter writes them between parentheses that stand `indent - 4` columns in."""
    return "".join(f"\n{' ' * indent}{item}," for item in items) + "\n" + " " * (indent - 4)
