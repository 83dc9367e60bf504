"""Argument lists of the kernels' host functions: one for each op and layout.

The names are shared by the rendered entry, the launch plan, the launcher and the simulator. docs/formats.md, section 1,
says what each argument means.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4build.axes import DTYPES_FP8, Variant
from fa4build.errors import VariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorArg:
    """A tensor parameter. The last stride is 1; the other strides are free.

    Attributes:
        dtype: `bf16`, `fp16`, `e4m3`, `e5m2` or `f32`.
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

_TENSOR_ALIGN_BYTES = 16  # tensor maps need it of addresses and strides
_F32_BYTES = 4


def output_dtype(dtype: str) -> str:
    """What a forward writes: its own 16-bit type, bf16 for fp8."""
    return "bf16" if dtype in DTYPES_FP8 else dtype


def signature_for(variant: Variant) -> tuple[Arg, ...]:
    """The host function's parameters in order, without the stream that ends them.

    Raises: VariantError if no argument list is defined for this op and layout.
    """
    if (variant.op, variant.layout) == ("fwd", "dense") and not variant.split and not variant.sink:
        return _dense_forward(variant)
    raise VariantError(f"{variant.id}: no argument list is defined yet for this op, layout and features.")


def _dense_forward(variant: Variant) -> tuple[Arg, ...]:
    def tensor(name: str, dtype: str, *shape: str | int) -> TensorArg:
        return TensorArg(name=name, dtype=dtype, shape=shape, align_bytes=_TENSOR_ALIGN_BYTES)

    head_dim, head_dim_v = variant.head_dims
    return (
        tensor("q", variant.dtype, "batch", "seqlen_q", "num_heads_q", head_dim),
        tensor("k", variant.dtype, "batch", "seqlen_k", "num_heads_kv", head_dim),
        tensor("v", variant.dtype, "batch", "seqlen_k", "num_heads_kv", head_dim_v),
        tensor("out", output_dtype(variant.dtype), "batch", "seqlen_q", "num_heads_q", head_dim_v),
        TensorArg(name="lse", dtype="f32", shape=("batch", "num_heads_q", "seqlen_q"), align_bytes=_F32_BYTES),
        ScalarArg(name="softmax_scale", dtype="f32"),
        ScalarArg(name="window_left", dtype="i32"),
        ScalarArg(name="window_right", dtype="i32"),
        ScalarArg(name="num_sms", dtype="i32"),
    )


def spec_for(variant: Variant) -> dict[str, str | int]:
    """What is fixed at compile time and the launch plan must hold callers to: its `spec` object."""
    return {"dtype": variant.dtype, "head_dim": variant.head_dim, "head_dim_v": variant.head_dim_v}
