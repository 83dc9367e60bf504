"""What can be asked for: which combinations make sense, which kernels are written, and selecting among them.

A `Variant` says what is computed; how is `tuning.py`'s business. Nothing here knows a tile size.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType

from fa4build.errors import NothingSelectedError, VariantError
from fa4build.matrix.arch import arch_named
from fa4build.matrix.axes import (
    AXES,
    DTYPES_16_BIT,
    DTYPES_FP8,
    OPS,
    OPTIONAL_AXES,
    Variant,
    meant,
    parse_axes,
    spell_head_dims,
    unknown_values,
)
from fa4build.matrix.selection import Selection
from fa4build.matrix.spec import Block, Spec, read_spec

VARLEN_QUERY_LAYOUTS = ("varlen", "paged")


# --- validity ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One reason why a combination of known axis values is refused."""

    name: str
    refuses: Callable[[Variant], bool]
    reason: str


def _two_cta(variant: Variant) -> bool:
    return variant.cta_group == 2


def _two_cta_forward_needs_full_mask(v: Variant) -> bool:
    fits = v.mask == "full" and v.head_dims in ((128, 128), (192, 128))
    return v.op == "fwd" and _two_cta(v) and v.head_dim != 256 and not fits


RULES: tuple[Rule, ...] = (
    Rule(
        name="fp8-needs-blackwell",
        refuses=lambda v: v.dtype in DTYPES_FP8 and v.arch == "sm90a",
        reason="fp8 kernels exist for sm100a and sm103a only; choose bf16 or fp16 on sm90a",
    ),
    Rule(
        name="fp8-is-forward-only",
        refuses=lambda v: v.dtype in DTYPES_FP8 and v.op.startswith("bwd"),
        reason="fp8 has no gradients; choose bf16 or fp16 for backward ops",
    ),
    Rule(
        name="fp8-output-is-bf16",
        refuses=lambda v: v.dtype in DTYPES_FP8 and v.op == "fwd_combine",
        reason="an fp8 forward writes bf16, so its partial results are merged by the bf16 combine",
    ),
    Rule(
        name="fp8-head-dims",
        refuses=lambda v: v.dtype in DTYPES_FP8 and v.head_dims not in ((64, 64), (128, 128)),
        reason="fp8 is built for head_dim 64 and 128",
    ),
    Rule(
        name="two-cta-needs-blackwell",
        refuses=lambda v: _two_cta(v) and v.arch == "sm90a",
        reason="2-CTA MMA (cta_group::2) needs sm100a or sm103a",
    ),
    Rule(
        name="two-cta-forward-masks",
        refuses=_two_cta_forward_needs_full_mask,
        reason="a 2cta forward exists for mask full with head_dim 128 or (192, 128), or any mask with head_dim 256",
    ),
    Rule(
        name="two-cta-and-split",
        refuses=lambda v: _two_cta(v) and v.split,
        reason="split-KV leaves too few query rows for 2 CTAs; choose split or 2cta",
    ),
    Rule(
        name="two-cta-forward-dense-queries",
        refuses=lambda v: v.op == "fwd" and _two_cta(v) and v.layout in VARLEN_QUERY_LAYOUTS and v.head_dim != 256,
        reason="a 2cta forward over varlen queries would pair rows of different sequences, except at head_dim 256",
    ),
    Rule(
        name="two-cta-backward-head-dims",
        refuses=lambda v: v.op == "bwd" and _two_cta(v) and v.head_dim < 128,
        reason="a 2cta backward needs head_dim 128 or more; smaller tiles are not bound by shared memory",
    ),
    Rule(
        # One block's accumulators: S 128 + dP 128 + dK head_dim + dV head_dim_v columns, of 512.
        name="wide-backward-needs-two-cta",
        refuses=lambda v: v.op == "bwd" and v.arch != "sm90a" and v.head_dim > 128 and not _two_cta(v),
        reason="with head_dim over 128 the accumulators do not fit the tensor memory of one CTA; choose 2cta",
    ),
    Rule(
        name="paged-is-forward-only",
        refuses=lambda v: v.layout == "paged" and v.op.startswith("bwd"),
        reason="gradients of paged keys and values are not defined; choose dense or varlen",
    ),
    Rule(
        name="split-needs-packed-keys",
        refuses=lambda v: v.op == "fwd" and v.split and v.layout == "dense",
        reason="split-KV treats a dense KV sequence as varlen, which is a view of it; choose varlen or paged",
    ),
    Rule(
        name="sink-after-split",
        refuses=lambda v: v.op == "fwd" and v.split and v.sink,
        reason="the attention sink is added once, where the splits are merged; use fwd_combine with sink",
    ),
)


def _idle_axes(variant: Variant) -> Iterator[str]:
    op = OPS[variant.op]
    if variant.head_dims not in op.head_dims:
        allowed = ", ".join(map(spell_head_dims, op.head_dims))
        yield f"{variant.op} is not built for {spell_head_dims(variant.head_dims)}; allowed: {allowed}"
    for axis in OPTIONAL_AXES:
        value, canonical = getattr(variant, axis), AXES[axis][0]
        if axis not in op.axes and value != canonical:
            yield f"{variant.op} has no axis {axis}; leave it {canonical!r}"


def refusals(variant: Variant) -> tuple[str, ...]:
    """Every reason why this combination is refused; empty if it is valid."""
    unknown = tuple(unknown_values(variant))
    if unknown:
        return unknown
    return (*_idle_axes(variant), *(rule.reason for rule in RULES if rule.refuses(variant)))


def parse_variant(text: str) -> Variant:
    """The valid variant with this id: `parse_variant(v.id) == v`.

    Raises: VariantError if the text is no id, or its axes contradict each other (with every reason).
    """
    variant = parse_axes(text)
    reasons = refusals(variant)
    if reasons:
        raise VariantError(f"{text!r} is refused: {'; '.join(reasons)}.")
    return variant


# --- the whole space --------------------------------------------------------------------------------------------------


def _combinations(op_name: str, arch: str) -> Iterator[Variant]:
    """Every combination of the values of the axes that mean something to an op, valid or not."""
    op = OPS[op_name]
    axes = [name for name in OPTIONAL_AXES if name in op.axes]
    choices = (AXES["dtype"], op.head_dims, *(AXES[name] for name in axes))
    for dtype, (head_dim, head_dim_v), *values in itertools.product(*choices):
        yield Variant(
            op=op_name,
            arch=arch,
            dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            **dict(zip(axes, values, strict=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A combination of known values that makes no sense, and why."""

    variant: Variant
    reasons: tuple[str, ...]


@cache
def _judged(op_name: str, arch: str) -> tuple[tuple[Variant, ...], tuple[Refused, ...]]:
    valid: list[Variant] = []
    refused: list[Refused] = []
    for variant in _combinations(op_name, arch):
        reasons = tuple(rule.reason for rule in RULES if rule.refuses(variant))
        if reasons:
            refused.append(Refused(variant=variant, reasons=reasons))
        else:
            valid.append(variant)
    return tuple(valid), tuple(refused)


def valid_variants(arches: Container[str] = AXES["arch"]) -> tuple[Variant, ...]:
    """Every valid variant of these targets, written or not, in the order of the axes."""
    return tuple(itertools.chain.from_iterable(_judged(*place)[0] for place in _places(arches)))


def refused_variants() -> tuple[Refused, ...]:
    """Every combination that the rules refuse, each with all its reasons, in the order of the axes."""
    return tuple(itertools.chain.from_iterable(_judged(*place)[1] for place in _places(AXES["arch"])))


def _places(arches: Container[str]) -> list[tuple[str, str]]:
    return [(op, arch) for op in AXES["op"] for arch in AXES["arch"] if arch in arches]


# --- which kernels are written ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel class of `kernels_src`, and the variants it is written for.

    Attributes:
        wiring: row of `fa4build/compiling/wiring.py`, which names the class and the numbers it takes.
        axes: allowed values of every axis; `head_dims` stands for both head dimensions.
    """

    wiring: str
    axes: MappingProxyType[str, tuple]


def _forward(wiring: str, arches: tuple[str, ...], **axes: tuple) -> Kernel:
    """A row of forward kernels; an axis it leaves out has all masks, and of everything else the plain form alone."""
    plain = {
        "op": ("fwd",),
        "arch": arches,
        "dtype": DTYPES_16_BIT,
        "mask": AXES["mask"],
        "layout": ("dense",),
        "split": (False,),
        "cta_group": (1,),
        "deterministic": (False,),
        "softcap": (False,),
        "sink": (False,),
    }
    return Kernel(wiring=wiring, axes=MappingProxyType(plain | axes))


def _backward(wiring: str, arches: tuple[str, ...], head_dims: tuple[tuple[int, int], ...], cta_group: int) -> Kernel:
    """A row of backward kernels: every mask, dense and packed, deterministic and not, with a soft cap and without."""
    axes = {
        "op": ("bwd",),
        "arch": arches,
        "dtype": DTYPES_16_BIT,
        "head_dims": head_dims,
        "mask": AXES["mask"],
        "layout": ("dense", "varlen"),
        "cta_group": (cta_group,),
        "deterministic": (False, True),
        "softcap": (False, True),
    }
    return Kernel(wiring=wiring, axes=MappingProxyType(axes))


def _helper(wiring: str, **axes: tuple) -> Kernel:
    """A row of kernels before or after the main one, of 16-bit types on every target."""
    return Kernel(wiring=wiring, axes=MappingProxyType({"dtype": DTYPES_16_BIT} | axes))


_HOPPER = ("sm90a",)
_BLACKWELL = ("sm100a", "sm103a")
_PACKED = ("varlen", "paged")
_EITHER = (False, True)
_ONLY = (True,)

_UP_TO_128 = ((64, 64), (96, 96), (128, 128))
_UP_TO_192 = (*_UP_TO_128, (192, 128))
_UP_TO_256 = (*_UP_TO_192, (256, 256))
_64_AND_128 = ((64, 64), (128, 128))
_64_TO_256 = (*_64_AND_128, (256, 256))
_256 = ((256, 256),)

KERNELS: tuple[Kernel, ...] = (
    _forward("fwd_sm90", _HOPPER, head_dims=_UP_TO_256, softcap=_EITHER),
    _forward("fwd_sm90", _HOPPER, head_dims=_UP_TO_256, sink=_ONLY),
    _forward("fwd_sm90_varlen", _HOPPER, head_dims=_UP_TO_256, layout=_PACKED, split=_EITHER),
    _forward("fwd_sm90_varlen", _HOPPER, head_dims=_64_TO_256, layout=_PACKED, split=_EITHER, softcap=_ONLY),
    _forward("fwd_sm90_varlen", _HOPPER, head_dims=_64_TO_256, layout=_PACKED, sink=_ONLY),
    _forward("fwd_sm100", _BLACKWELL, dtype=DTYPES_FP8, head_dims=_64_AND_128),
    _forward("fwd_sm100", _BLACKWELL, head_dims=_UP_TO_192, softcap=_EITHER),
    _forward("fwd_sm100", _BLACKWELL, head_dims=_UP_TO_192, sink=_ONLY),
    _forward("fwd_sm100_2cta", _BLACKWELL, head_dims=((128, 128), (192, 128)), mask=("full",), cta_group=(2,)),
    _forward("fwd_sm100_2cta_hd256", _BLACKWELL, head_dims=_256, cta_group=(2,)),
    _forward("fwd_sm100_varlen", _BLACKWELL, dtype=DTYPES_FP8, head_dims=_64_AND_128, layout=_PACKED, split=_EITHER),
    _forward("fwd_sm100_varlen", _BLACKWELL, head_dims=_UP_TO_192, layout=_PACKED, split=_EITHER),
    _forward("fwd_sm100_varlen", _BLACKWELL, head_dims=_64_AND_128, layout=_PACKED, split=_EITHER, softcap=_ONLY),
    _forward("fwd_sm100_varlen", _BLACKWELL, head_dims=_64_AND_128, layout=_PACKED, sink=_ONLY),
    _forward("fwd_sm100_varlen", _BLACKWELL, head_dims=_256, layout=_PACKED, split=_EITHER, softcap=_EITHER),
    _forward("fwd_sm100_varlen", _BLACKWELL, head_dims=_256, layout=_PACKED, sink=_ONLY),
    _backward("bwd_sm90", _HOPPER, _UP_TO_128, cta_group=1),
    _backward("bwd_sm90_hd256", _HOPPER, ((192, 128), (256, 256)), cta_group=1),
    _backward("bwd_sm100", _BLACKWELL, _UP_TO_128, cta_group=1),
    _backward("bwd_sm100_2cta_hd128", _BLACKWELL, ((128, 128),), cta_group=2),
    _backward("bwd_sm100_2cta_hd192", _BLACKWELL, ((192, 128),), cta_group=2),
    _backward("bwd_sm100_2cta_hd256", _BLACKWELL, _256, cta_group=2),
    _helper("fwd_combine", op=("fwd_combine",), sink=_EITHER),
    _helper("bwd_preprocess", op=("bwd_preprocess",), layout=("dense", "varlen")),
    _helper("bwd_postprocess", op=("bwd_postprocess",), layout=("dense", "varlen"), cta_group=(1,), sink=(False,)),
)


def _covers(kernel: Kernel, variant: Variant) -> bool:
    return all(getattr(variant, axis) in values for axis, values in kernel.axes.items())


@lru_cache(maxsize=1 << 14)  # coverage and lists ask thousands of times about the same few thousand variants
def kernel_for(variant: Variant) -> Kernel | None:
    """The kernel written for this variant, or None."""
    return next((kernel for kernel in KERNELS if _covers(kernel, variant)), None)


def kernel_written(variant: Variant) -> bool:
    """Whether `kernels_src` holds a kernel for this variant."""
    return kernel_for(variant) is not None


def written_variants() -> tuple[Variant, ...]:
    """Every valid variant whose kernel is written."""
    return tuple(filter(kernel_written, valid_variants()))


# Written, but built only for those who name them, by id or from a model's configuration: with these, the default matrix
# would be half again as large. A reason says what the default matrix has, not what models may need.
ON_REQUEST: tuple[Rule, ...] = (
    Rule(
        name="softcap-as-models-have-it",
        refuses=lambda v: v.softcap and (v.dtype == "fp16" or v.head_dims not in ((128, 128), (256, 256))),
        reason="the default matrix has softcap for head_dim 128 and 256 in bf16 only",
    ),
    Rule(
        name="wide-softcap-on-blackwell",
        refuses=lambda v: v.softcap and v.arch != "sm90a" and v.head_dim == 256,
        reason="the default matrix for Blackwell has no softcap with head_dim 256",
    ),
    Rule(
        name="sink-as-models-have-it",
        refuses=lambda v: v.sink and (v.dtype == "fp16" or v.head_dims not in ((64, 64), (128, 128))),
        reason="the default matrix has attention sinks for head_dim 64 and 128 in bf16 only",
    ),
    Rule(
        name="one-extra-at-a-time",
        refuses=lambda v: v.softcap and (v.sink or v.deterministic),
        reason="the default matrix has no softcap together with a sink or with deterministic gradients",
    ),
)


def reasons_on_request(variant: Variant) -> tuple[str, ...]:
    """Why a written variant is not in the default matrix; empty if it is."""
    return tuple(rule.reason for rule in ON_REQUEST if rule.refuses(variant))


def in_default_matrix(variant: Variant) -> bool:
    """Whether a valid variant is written, and built when nobody names any."""
    return kernel_written(variant) and not reasons_on_request(variant)


def default_variants() -> tuple[Variant, ...]:
    """The default matrix, in the order of the axes."""
    return tuple(filter(in_default_matrix, valid_variants()))


def use_rule(variant: Variant) -> dict[str, str]:
    """The axis `when` (docs/formats.md section 5) of a kernel that others stand in for, or nothing."""
    # Two CTAs take 512 query rows at once; with 256 or fewer one of them would be idle.
    has_one_cta_twin = variant.op == "fwd" and variant.cta_group == 2 and variant.head_dim != 256
    return {"when": "seqlen_q > 256"} if has_one_cta_twin else {}


def variant_axes(variant: Variant) -> dict[str, object]:
    """All axes but op and arch, by name: the `axes` object of a manifest entry."""
    names = ("dtype", "head_dim", "head_dim_v", *OPTIONAL_AXES)
    return {name: getattr(variant, name) for name in names}


# --- selecting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """What a selection comes to, each in the order of the axes.

    Attributes:
        variants: what is built. helpers: those of them that nobody named, and that named ones are launched with.
        left_out: valid variants that a pattern matched and that have no kernel.
    """

    variants: tuple[Variant, ...]
    helpers: tuple[Variant, ...] = ()
    left_out: tuple[Variant, ...] = ()


def expand_matrix(selection: Selection) -> tuple[Variant, ...]:
    """The written variants that a selection names, and their helpers, in the order of the axes; see `expansion`."""
    return expansion(selection).variants


def expansion(selection: Selection) -> Expansion:
    """What a selection names.

    Globs and specifications take the variants that are written among those that match; `arches` alone takes the default
    matrix. Kernels that are launched together with a named one are taken, too.

    Raises: VariantError for an unknown arch, a bad specification, or an id without wildcards that is refused;
        NothingSelectedError if a glob, a specification or an arch selects nothing that is written, if an id without
        wildcards has no kernel, or a listed value of a specification none.
    """
    arches = {arch_named(name).name for name in selection.arches} or set(AXES["arch"])
    among = valid_variants(arches)
    if not selection.specs and not selection.globs:
        return Expansion(variants=_default_matrix(among, arches))
    named = among
    if selection.specs:
        specs = [spec if isinstance(spec, Spec) else read_spec(spec) for spec in selection.specs]
        taken = {variant for spec in specs for variant in _named_by_spec(spec, among)}
        named = tuple(variant for variant in among if variant in taken)
    if selection.globs:
        named = _named_by_globs(selection.globs, named)
    written = tuple(filter(kernel_written, named))
    if not written:
        raise _unwritten(named)
    helpers = () if selection.alone else _helpers_of(written)
    wanted = {*written, *helpers}
    return Expansion(
        variants=tuple(variant for variant in valid_variants() if variant in wanted),
        helpers=helpers,
        left_out=tuple(variant for variant in named if not kernel_written(variant)),
    )


def _helpers_of(variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
    from fa4build.matrix.problems import lacking_helpers  # the dispatcher's rules, which whole matrices do not need

    return tuple(dict.fromkeys(helper for _, helper in lacking_helpers(variants)))


def _default_matrix(valid: tuple[Variant, ...], arches: set[str]) -> tuple[Variant, ...]:
    default = tuple(filter(in_default_matrix, valid))
    if not default:
        names = ", ".join(sorted(arches))
        raise NothingSelectedError(
            f"no kernel is implemented for {names} yet ({len(valid)} valid variants). `fa4build list` shows more."
        )
    return default


def _unwritten(named: tuple[Variant, ...]) -> NothingSelectedError:
    shown = ", ".join(variant.id for variant in named[:5]) + (", ..." if len(named) > 5 else "")
    return NothingSelectedError(
        f"{len(named)} of {len(named)} selected variants have no kernel yet: {shown}. "
        "Choose other variants; `fa4build list` shows which are implemented."
    )


def _require_written(name: str, variant: Variant) -> None:
    """Raises NothingSelectedError for an id that was given in full and has no kernel."""
    if name == variant.id and not kernel_written(variant):
        raise _unwritten((variant,))


def _matcher(globs: tuple[str, ...]) -> Callable[[str], re.Match | None]:
    return re.compile("|".join(f"(?:{fnmatch.translate(glob)})" for glob in globs)).match


def _named_by_globs(globs: tuple[str, ...], among: tuple[Variant, ...]) -> tuple[Variant, ...]:
    ids = {variant.id: variant for variant in among}
    wanted: set[str] = set()
    for glob in globs:
        matched = list(filter(_matcher((glob,)), ids))
        if not matched:
            raise no_match(glob, tuple(ids))
        _require_written(glob, ids[matched[0]])
        wanted.update(matched)
    return tuple(variant for name, variant in ids.items() if name in wanted)


def no_match(glob: str, ids: Sequence[str]) -> NothingSelectedError:
    """Why an id or a pattern selects none of these ids, with what is probably meant.

    Raises: VariantError for a single id that is no id, or is refused.
    """
    if not set(glob) & set("*?["):
        # A single id: say why it cannot be, rather than what is near.
        parse_variant(glob)
        return NothingSelectedError(f"{glob!r} is valid, but the other selection options exclude it.")
    better = meant(glob)
    if better != glob and any(map(_matcher((better,)), ids)):
        return NothingSelectedError(f"{glob!r} matches no variant. Did you mean {better!r}?")
    nearest = difflib.get_close_matches(re.sub(r"[*?\[\]]", "", glob), ids, n=3, cutoff=0.6)
    near = f"Nearest: {', '.join(nearest)}." if nearest else "`fa4build list --grid` shows what exists."
    return NothingSelectedError(f"{glob!r} matches no variant. {near}")


def _named_by_spec(spec: Spec, among: tuple[Variant, ...]) -> tuple[Variant, ...]:
    wanted = set(_named_by_globs(spec.select, among)) if spec.select else set()
    for block in spec.blocks:
        wanted.update(_named_by_block(spec, block, among))
    excluded = _matcher(spec.exclude) if spec.exclude else lambda _: None
    named = tuple(variant for variant in among if variant in wanted and not excluded(variant.id))
    if not named:
        raise NothingSelectedError(f"{spec.path}: `exclude` removes everything that was selected.")
    from fa4build.matrix.problems import lacking_helpers

    for variant, helper in lacking_helpers(named):
        if excluded(helper.id):
            raise NothingSelectedError(
                f"{spec.path}: `exclude` removes {helper.id}, which {variant.id} is launched with. "
                "Exclude both or neither."
            )
    return named


def _named_by_block(spec: Spec, block: Block, among: tuple[Variant, ...]) -> tuple[Variant, ...]:
    """The valid variants of a block. A listed value that none of them has is an error: it would be dropped silently."""
    switches = {axis: AXES[axis][:1] for axis in OPTIONAL_AXES if axis != "mask"}
    wanted = switches | dict(block.axes)
    named = tuple(v for v in among if all(getattr(v, axis) in values for axis, values in wanted.items()))
    if not named:
        raise NothingSelectedError(
            f"{spec.path}: {block.place}: no combination of the listed values is valid and within the selection. "
            "`fa4build list --unsupported` gives the reasons."
        )
    written = tuple(filter(kernel_written, named))
    if not written:
        raise _unwritten(named)
    for axis, values in block.axes.items():
        missing = set(values) - {getattr(variant, axis) for variant in written}
        if missing:
            raise NothingSelectedError(
                f"{spec.path}: {block.place}: no selected variant has {axis} {min(missing)!r}. "
                "Remove it, or list more values of the other axes; `fa4build list --unsupported` gives the reasons."
            )
    return named
