"""Between variants and the problems that the runtime's dispatcher is asked: what answers what, and with whose help."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fa4build.matrix.arch import arch_named
from fa4build.matrix.axes import Variant
from fa4build.runtime.fa4_kernels.dispatch import Problem
from fa4build.runtime.fa4_kernels.models.needs import helpers_of

FEATURES = ("split", "softcap", "sink")


def problem_of(variant: Variant) -> Problem:
    """What a call asks for when this variant is what answers it."""
    return Problem(
        op=variant.op,
        layout=variant.layout,
        dtype=variant.dtype,
        head_dim=variant.head_dim,
        head_dim_v=variant.head_dim_v,
        mask=variant.mask,
        deterministic=variant.deterministic,
        features=frozenset(name for name in FEATURES if getattr(variant, name)),
    )


def variants_of(problem: Problem, arch: str) -> tuple[Variant, ...]:
    """Every variant of a target that computes a problem, valid or not, written or not."""
    return tuple(
        Variant(
            op=problem.op,
            arch=arch,
            dtype=problem.dtype,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            mask=problem.mask,
            layout=problem.layout,
            cta_group=cta_group,
            deterministic=problem.deterministic and problem.op == "bwd",  # every other op is anyway
            **{name: name in problem.features for name in FEATURES},
        )
        for cta_group in arch_named(arch).cta_groups
    )


def helpers_for(variant: Variant) -> tuple[Variant, ...]:
    """The kernels that a variant is launched together with: the merge of split keys, both sides of a backward."""
    return tuple(variants_of(helper, variant.arch)[0] for helper, _ in helpers_of(problem_of(variant)))


def lacking_helpers(variants: Iterable[Variant]) -> Iterator[tuple[Variant, Variant]]:
    """(variant, helper that it needs and that is not among them), in the order of the variants.

    One merge is enough for split keys: with a sink, without, or both where kernels of both kinds are there.
    """
    variants = tuple(variants)
    have = set(variants)
    sinks = {_shape(v) for v in variants if v.op == "fwd" and v.sink}
    for variant in variants:
        for helper in helpers_for(variant):
            with_sink = _with_sink(helper)
            if helper in have or (variant.op == "fwd" and with_sink in have):
                continue
            yield variant, helper
            if variant.op == "fwd" and _shape(variant) in sinks:
                yield variant, with_sink


def _shape(variant: Variant) -> tuple[object, ...]:
    return variant.arch, variant.dtype, variant.head_dims, variant.layout


def _with_sink(merge: Variant) -> Variant:
    return replace(merge, sink=merge.op == "fwd_combine")
