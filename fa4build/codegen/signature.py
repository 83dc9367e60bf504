"""Argument lists of the kernels' host functions, with the types and fixed extents of one variant filled in.

The lists themselves are data of the interface that packs and dispatcher share, `abi.py`; docs/formats.md, section 1,
says what each argument means. Their names are those of the rendered entry, launch plan, launcher and simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4build.axes import Variant
from fa4build.errors import VariantError
from fa4build.runtime.fa4_kernels import abi


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorArg:
    """A tensor parameter. The last stride is 1; the other strides are free.

    Attributes:
        dtype: `bf16`, `fp16`, `e4m3`, `e5m2`, `f32` or `i32`.
        shape: one extent per mode: the name of a run-time extent (equal names, equal extents), or a number.
        align_bytes: divides the address and, in bytes, every stride of a mode with more than one element.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    align_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarArg:
    """A parameter passed by value; `dtype` is `i32` or `f32`."""

    name: str
    dtype: str


Arg = TensorArg | ScalarArg


def signature_for(variant: Variant) -> tuple[Arg, ...]:
    """The host function's parameters in order, without the stream that ends them.

    Raises: VariantError if no argument list is defined for this op, layout and features.
    """
    rows = abi.SIGNATURES.get(_signature_name(variant))
    if rows is None:
        raise VariantError(f"{variant.id}: no argument list is defined for this op, layout and features.")
    return tuple(_argument(variant, *row) for row in rows)


def _signature_name(variant: Variant) -> str:
    features = (name for name in ("sink", "softcap", "split") if getattr(variant, name))
    return abi.signature_name(variant.op, variant.layout, variant.dtype, features)


def _argument(
    variant: Variant, name: str, kind: str, dtype: str, shape: tuple[str, ...] = (), align_bytes: int = 0
) -> Arg:
    if kind == "scalar":
        return ScalarArg(name=name, dtype=dtype)
    dtypes = {"variant": variant.dtype, "output": abi.OUTPUT_DTYPES[variant.dtype]}
    fixed = {"head_dim": variant.head_dim, "head_dim_v": variant.head_dim_v}
    extents = tuple(fixed.get(extent, extent) for extent in shape)
    return TensorArg(name=name, dtype=dtypes.get(dtype, dtype), shape=extents, align_bytes=align_bytes)


# Extents of which one must be a multiple of the other: query heads are shared out evenly among key heads.
_MULTIPLES = (("num_heads_q", "num_heads_kv"),)


def spec_for(variant: Variant) -> dict[str, object]:
    """What is fixed at compile time and the launch plan must hold callers to: its `spec` object.

    `shapes` names the extents of every tensor, so that a refusal says which extent is wrong; `multiples` lists the
    pairs of extents that must divide.
    """
    rows = abi.SIGNATURES[_signature_name(variant)]
    shapes = {name: list(rest[0]) for name, kind, _dtype, *rest in rows if kind == "tensor"}
    named = {extent for shape in shapes.values() for extent in shape}
    return {
        "dtype": variant.dtype,
        "head_dim": variant.head_dim,
        "head_dim_v": variant.head_dim_v,
        "shapes": shapes,
        "multiples": [list(pair) for pair in _MULTIPLES if named.issuperset(pair)],
    }
