"""The axes of the kernel family, the value `Variant` they make up, and its one spelling.

Which combinations make sense, and which kernels exist, is `variants.py`'s business.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fa4build.errors import VariantError
from fa4build.matrix.arch import ARCHES

DTYPES_16_BIT = ("bf16", "fp16")
DTYPES_FP8 = ("e4m3", "e5m2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel as it is asked for. Values are not checked on construction: see `refusals`.

    Attributes:
        op: `fwd`, `bwd`, `bwd_preprocess`, `bwd_postprocess` or `fwd_combine`.
        arch: canonical target name, `sm90a`.
        dtype: of q, k, v (fwd, bwd), or of the 16-bit tensors read and written (other ops).
        head_dim: of q and k. Where an op sees one head dimension only, the same as `head_dim_v`.
        head_dim_v: of v and out.
        mask: `full`, `causal` or `local` (a window with both bounds given at run time).
        layout: `dense`; `varlen` (sequences packed, cu_seqlens); `paged` (packed queries, keys and values in pages).
        split: split-KV, the KV sequence divided over several CTAs; `fwd_combine` merges the partial results.
        cta_group: CTAs that share one MMA, 1 or 2.
        deterministic: gradients summed in a fixed order.
        softcap: scores become cap * tanh(score / cap), cap given at run time.
        sink: one extra logit per head takes part in the softmax sum.
    """

    op: str
    arch: str
    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str = "full"
    layout: str = "dense"
    split: bool = False
    cta_group: int = 1
    deterministic: bool = False
    softcap: bool = False
    sink: bool = False

    @property
    def head_dims(self) -> tuple[int, int]:
        """Both head dimensions, as the axis `head_dims` lists them."""
        return self.head_dim, self.head_dim_v

    @property
    def id(self) -> str:
        """The one spelling of this variant, `fwd-sm90a-bf16-hd128-causal`. `parse_variant` is its inverse."""
        return "-".join(_fields(self))

    @property
    def symbol(self) -> str:
        """The id as an identifier: prefix of the kernel's symbols, `fwd_sm90a_bf16_hd128_causal`."""
        return self.id.replace("-", "_")


HeadDims = tuple[int, int]
_EQUAL_64_TO_256: tuple[HeadDims, ...] = ((64, 64), (96, 96), (128, 128), (256, 256))

# Every axis with its values, the canonical (for optional axes: the default) value first.
AXES: MappingProxyType[str, tuple] = MappingProxyType(
    {
        "op": ("fwd", "bwd", "bwd_preprocess", "bwd_postprocess", "fwd_combine"),
        "arch": tuple(arch.name for arch in ARCHES),
        "dtype": DTYPES_16_BIT + DTYPES_FP8,
        "head_dims": ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)),
        "mask": ("full", "causal", "local"),
        "layout": ("dense", "varlen", "paged"),
        "split": (False, True),
        "cta_group": (1, 2),
        "deterministic": (False, True),
        "softcap": (False, True),
        "sink": (False, True),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Which head dimensions an op is built for, and which of the optional axes mean anything to it."""

    head_dims: tuple[HeadDims, ...]
    axes: frozenset[str]


_Q_K_V_DIMS: tuple[HeadDims, ...] = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
OPS: MappingProxyType[str, Op] = MappingProxyType(
    {
        "fwd": Op(head_dims=_Q_K_V_DIMS, axes=frozenset({"mask", "layout", "split", "cta_group", "softcap", "sink"})),
        "bwd": Op(head_dims=_Q_K_V_DIMS, axes=frozenset({"mask", "layout", "cta_group", "deterministic", "softcap"})),
        # Row sums of dO * O over head_dim_v, and the dQ accumulator of head_dim columns set to zero.
        "bwd_preprocess": Op(head_dims=_Q_K_V_DIMS, axes=frozenset({"layout"})),
        # Converts one fp32 accumulator of dQ, so it sees one head dimension; 192 is that of (192, 128).
        "bwd_postprocess": Op(
            head_dims=((64, 64), (96, 96), (128, 128), (192, 192), (256, 256)), axes=frozenset({"layout"})
        ),
        # Merges partial outputs of head_dim_v columns. Packed rows are one batch to it, so layouts make no difference.
        "fwd_combine": Op(head_dims=_EQUAL_64_TO_256, axes=frozenset({"sink"})),
    }
)

OPTIONAL_AXES = tuple(name for name in AXES if name not in ("op", "arch", "dtype", "head_dims"))

# How optional axes other than the mask are spelled in an id; the default value is left out.
_SPELLINGS: MappingProxyType[tuple[str, object], str] = MappingProxyType(
    {
        ("layout", "varlen"): "varlen",
        ("layout", "paged"): "paged",
        ("split", True): "split",
        ("cta_group", 2): "2cta",
        ("deterministic", True): "deterministic",
        ("softcap", True): "softcap",
        ("sink", True): "sink",
    }
)
_SPELLED = {text: axis_value for axis_value, text in _SPELLINGS.items()}


def spell_head_dims(head_dims: HeadDims) -> str:
    """`hd128`, or `hd192x128` where the two differ."""
    head_dim, head_dim_v = head_dims
    return f"hd{head_dim}" if head_dim == head_dim_v else f"hd{head_dim}x{head_dim_v}"


def _fields(variant: Variant) -> Iterator[str]:
    yield from (variant.op, variant.arch, variant.dtype, spell_head_dims(variant.head_dims))
    op = OPS.get(variant.op)
    if op is None or "mask" in op.axes or variant.mask != "full":
        yield variant.mask
    for axis in OPTIONAL_AXES:
        value = getattr(variant, axis)
        if axis != "mask" and value != AXES[axis][0]:
            yield _SPELLINGS.get((axis, value), f"{axis}={value}")


def unknown_values(variant: Variant) -> Iterator[str]:
    """One message for every axis whose value does not exist, whatever the op."""
    for axis, values in AXES.items():
        value = getattr(variant, axis)
        # True == 1 in Python, so the type is compared too.
        if not any(value == known and type(value) is type(known) for known in values):
            yield _unknown(axis, value, variant.op)


def _unknown(axis: str, value: object, op: str) -> str:
    """`head_dim 80 is unknown; allowed: 64, 96`: of an op that is known, its own head dims."""
    if axis != "head_dims":
        return f"{axis} {value!r} is unknown; allowed: {', '.join(map(str, AXES[axis]))}"
    known = OPS[op].head_dims if op in OPS else AXES[axis]
    allowed = ", ".join(spell_head_dims(dims).removeprefix("hd") for dims in known)
    return f"head_dim {spell_head_dims(value).removeprefix('hd')} is unknown; allowed: {allowed}"


def _parse_head_dims(text: str) -> HeadDims | None:
    numbers = text.removeprefix("hd").split("x")
    # `isdecimal` alone admits digits of other scripts, and leading zeros would give one value two spellings.
    if not text.startswith("hd") or len(numbers) > 2 or not all(n.isascii() and n.isdecimal() for n in numbers):
        return None
    return int(numbers[0]), int(numbers[-1])


def _nearest(word: str, known: Iterable[str]) -> str:
    """The known word that is most like this one, or the word itself. Of words that end in a number only the rest is
    guessed: hd80 and sm80 are no slips of hd64 and sm90."""
    lower, exact = word.lower(), {name.lower(): name for name in known}
    for candidate in (lower, f"hd{lower}"):
        if candidate in exact:
            return exact[candidate]
    wordy = [name for name in exact if name.isalpha() or "_" in name]
    return next(iter(difflib.get_close_matches(lower, wordy, n=1, cutoff=0.6)), word)


_ARCH_NAMES = MappingProxyType({alias: arch.name for arch in ARCHES for alias in (arch.name, *arch.aliases)})
_FIRST_FIELDS = (
    AXES["op"],
    tuple(_ARCH_NAMES),
    AXES["dtype"],
    tuple(spell_head_dims(dims) for dims in AXES["head_dims"]),
)
_LATER_FIELDS = (*AXES["mask"], *_SPELLED)


def meant(text: str) -> str:
    """An id, or a pattern over ids, with each field replaced by the known one that is nearest; wildcards stay."""
    fields = text.split("-")
    is_in_order = not set(fields[0]) & set("*?[")
    anywhere = (*(word for words in _FIRST_FIELDS for word in words), *_LATER_FIELDS)
    found = []
    for number, field in enumerate(fields):
        known = anywhere if not is_in_order else _FIRST_FIELDS[number] if number < 4 else _LATER_FIELDS
        bare = field.strip("*?")
        better = _nearest(bare, known) if bare and "[" not in bare else bare
        found.append(field.replace(bare, _ARCH_NAMES.get(better, better)) if bare else field)
    return "-".join(found)


def _did_you_mean(text: str) -> str:
    """` Did you mean fwd-sm90a-bf16-hd64-full?`, or nothing."""
    better = meant(text)
    with contextlib.suppress(VariantError):
        if better != text and _parsed(better).id:
            return f" Did you mean {better}?"
    return ""


def parse_axes(text: str) -> Variant:
    """The variant an id spells, valid or not: what `explain` needs to say why a combination is refused.

    Raises: VariantError if the text is no id, or is not the one spelling of its variant; it names the id that is meant.
    """
    try:
        return _parsed(text)
    except VariantError as error:
        raise VariantError(f"{error}{_did_you_mean(text)}") from None


def _parsed(text: str) -> Variant:
    """`parse_axes` without a suggestion."""
    example = "an id looks like fwd-sm90a-bf16-hd128-causal"
    fields = text.split("-")
    if len(fields) < 4:
        raise VariantError(f"{text!r} is not a variant id: it needs op, arch, dtype and head_dim; {example}.")
    head_dims = _parse_head_dims(fields[3])
    if head_dims is None:
        raise VariantError(f"{text!r}: field {fields[3]!r} is not a head_dim such as hd128 or hd192x128; {example}.")
    axes: dict[str, Any] = {}
    for field in fields[4:]:
        axis, value = ("mask", field) if field in AXES["mask"] else _SPELLED.get(field, (None, None))
        if axis is None or axis in axes:
            known = ", ".join((*AXES["mask"], *_SPELLED))
            trouble = "is unknown" if axis is None else f"sets {axis} a second time"
            raise VariantError(f"{text!r}: field {field!r} {trouble}. Fields after head_dim: {known}.")
        axes[axis] = value
    variant = Variant(
        op=fields[0], arch=fields[1], dtype=fields[2], head_dim=head_dims[0], head_dim_v=head_dims[1], **axes
    )
    unknown = tuple(unknown_values(variant))
    if unknown:
        raise VariantError(f"{text!r}: {'; '.join(unknown)}.")
    if variant.id != text:
        raise VariantError(f"{text!r} is not the spelling of this variant. Write {variant.id!r}.")
    return variant
