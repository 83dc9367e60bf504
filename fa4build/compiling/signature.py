"""Argument lists of the kernels' host functions, with the types and fixed extents of one variant filled in.

The lists themselves are data of the interface that packs and dispatcher share, `abi.py`; docs/formats.md, section 1,
says what each argument means. Their names are those of the rendered entry, launch plan, launcher and simulator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fa4build.errors import VariantError
from fa4build.matrix.axes import Variant
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


# (extent, extent[, quotient]): the first is a multiple of the second. Query heads are shared out evenly among key
# heads; the backward's workspaces have whole tiles of 128 rows.
_MULTIPLES = (
    ("num_heads_q", "num_heads_kv"),
    ("seqlen_q_rounded", "num_m_blocks", 128),
    ("total_q_padded", "num_m_blocks", 128),
)
# (extent, extent, number): the first is the second plus the number.
_SUMS = (("batch_plus_one", "batch", 1),)
# The same, or 0: the tensor may be left out.
_SUMS_OR_ZERO = tuple((f"num_seqused{suffix}", "batch_plus_one", -1) for suffix in ("_q", "_k", ""))


def spec_for(variant: Variant) -> dict[str, object]:
    """What is fixed at compile time and the launch plan must hold callers to: its `spec` object.

    `shapes` names the extents of every tensor, so that a refusal says which extent is wrong; the others list the
    extents that depend on each other. Source of the names: plan/guards.py.
    """
    rows = abi.SIGNATURES[_signature_name(variant)]
    shapes = {name: list(rest[0]) for name, kind, _dtype, *rest in rows if kind == "tensor"}
    named = {extent for shape in shapes.values() for extent in shape}

    def known(relations: Iterable[tuple[str | int, ...]]) -> list[list[str | int]]:
        return [list(relation) for relation in relations if named.issuperset(relation[:2])]

    sums, optional = known(_SUMS), known(_SUMS_OR_ZERO)
    return {
        "dtype": variant.dtype,
        "head_dim": variant.head_dim,
        "head_dim_v": variant.head_dim_v,
        "shapes": shapes,
        "multiples": known(_MULTIPLES),
        **({"sums": sums} if sums else {}),
        **({"sums_or_zero": optional} if optional else {}),
    }
