"""Which acceptance cases a variant has."""

from fa4build.cases.backward import backward_cases_for
from fa4build.cases.forward import MANTISSA_BITS, Case, cases_for
from fa4build.cases.varlen import PackedCase, packed_cases_for
from fa4build.cases.varlen_backward import packed_backward_cases_for
from fa4build.matrix.axes import Variant

BACKWARD_OPS = ("bwd_preprocess", "bwd", "bwd_postprocess")


def is_packed(variant: Variant) -> bool:
    """Whether its cases are those of `varlen`: everything but dense 16-bit attention without features."""
    plain = variant.layout == "dense" and not (variant.softcap or variant.sink) and variant.dtype in MANTISSA_BITS
    return variant.op == "fwd_combine" or not plain


def cases_of(variant: Variant) -> tuple[PackedCase, ...]:
    """Acceptance cases of a variant that `is_packed`."""
    is_backward = variant.op.startswith("bwd")
    return packed_backward_cases_for(variant) if is_backward else packed_cases_for(variant)


def has_cases(variant: Variant) -> bool:
    """Whether there are acceptance cases: for every op that we write kernels for."""
    return variant.op in ("fwd", "fwd_combine", *BACKWARD_OPS)


def cases_of_variant(variant: Variant) -> tuple[Case | PackedCase, ...]:
    """Acceptance cases of a variant that `has_cases`, in order."""
    if is_packed(variant):
        return cases_of(variant)
    return cases_for(variant) if variant.op == "fwd" else backward_cases_for(variant)
