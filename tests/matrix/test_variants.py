"""Contract of the variant matrix.

Every valid combination has exactly one id and every id exactly one value. What makes no sense is refused with a reason
by a rule of the table. A selection names written kernels or is an error: nothing is dropped silently.
"""

from collections import Counter
from dataclasses import fields, replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4build.errors import NothingSelectedError, VariantError
from fa4build.matrix import variants
from fa4build.matrix.axes import AXES, OPS, Variant, parse_axes
from fa4build.matrix.problems import lacking_helpers
from fa4build.matrix.unwritten import summary_of, why_unwritten
from fa4build.matrix.variants import (
    ON_REQUEST,
    RULES,
    Selection,
    default_variants,
    expand_matrix,
    expansion,
    kernel_written,
    parse_variant,
    reasons_on_request,
    refusals,
    refused_variants,
    use_rule,
    valid_variants,
    variant_axes,
    written_variants,
)

BASE = Variant(op="fwd", arch="sm90a", dtype="bf16", head_dim=128, head_dim_v=128)


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "fwd-sm90a-bf16-hd128-full"),
        ({"mask": "causal"}, "fwd-sm90a-bf16-hd128-causal"),
        (
            {"arch": "sm100a", "head_dim": 192, "mask": "full", "cta_group": 2},
            "fwd-sm100a-bf16-hd192x128-full-2cta",
        ),
        ({"mask": "local", "layout": "paged", "split": True}, "fwd-sm90a-bf16-hd128-local-paged-split"),
        ({"softcap": True, "sink": True}, "fwd-sm90a-bf16-hd128-full-softcap-sink"),
        ({"op": "bwd", "deterministic": True}, "bwd-sm90a-bf16-hd128-full-deterministic"),
        ({"op": "bwd_preprocess", "layout": "varlen"}, "bwd_preprocess-sm90a-bf16-hd128-varlen"),
        ({"op": "fwd_combine", "dtype": "fp16"}, "fwd_combine-sm90a-fp16-hd128"),
    ],
)
def test_an_id_spells_the_axes_in_order_and_leaves_defaults_out(changes, expected):
    """Op, arch, dtype, head_dim, mask, then what differs from the default; ops without a mask do not name one."""
    assert expected == replace(BASE, **changes).id


def test_every_valid_variant_round_trips_as_a_value():
    """Not only the string: the parsed value is equal, field by field."""
    for variant in valid_variants():
        assert variant == parse_variant(variant.id)


def test_every_refused_combination_still_has_an_id_that_round_trips():
    """`explain` must be able to name what is refused."""
    for refused in refused_variants():
        assert refused.variant == parse_axes(refused.variant.id)


def test_ids_and_symbols_are_unique():
    """Two variants never share an id, nor a symbol prefix."""
    variants = valid_variants()

    assert len(variants) == len({variant.id for variant in variants}) == len({v.symbol for v in variants})


def test_symbols_are_identifiers():
    """They become names in the cubin."""
    assert all(variant.symbol.isidentifier() and variant.symbol.isascii() for variant in valid_variants())


def test_numbers_never_touch_and_fields_have_no_dash():
    """hd192x128 rather than hd192128; every field is one of the known words."""
    words = set(AXES["op"] + AXES["arch"] + AXES["dtype"] + AXES["mask"] + AXES["layout"])
    words |= {"split", "2cta", "deterministic", "softcap", "sink"}
    dims = {"hd64", "hd96", "hd128", "hd192x128", "hd192", "hd256"}

    assert words | dims >= {field for variant in valid_variants() for field in variant.id.split("-")}


@given(text=st.text(alphabet="fwdb_-smahx0123456789calu", max_size=40))
def test_arbitrary_text_is_a_variant_error_or_the_one_spelling(text):
    """The parser has no other exception, and accepts nothing that it would not write."""
    try:
        variant = parse_axes(text)
    except VariantError:
        return

    assert text == variant.id


@given(data=st.data())
def test_changing_one_character_of_an_id_never_gives_the_same_variant(data):
    """A typo is an error or another variant, never silently the same one."""
    variant = data.draw(st.sampled_from(valid_variants()))
    position = data.draw(st.integers(0, len(variant.id) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz0123456789-_x"))
    text = variant.id[:position] + letter + variant.id[position + 1 :]
    if text == variant.id:
        return
    try:
        assert variant != parse_axes(text)
    except VariantError:
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fwd", "'fwd' is not a variant id: it needs op, arch, dtype and head_dim"),
        ("fwd-sm90a-bf16-128-full", "field '128' is not a head_dim such as hd128"),
        ("fwd-sm90a-bf16-hd0128-full", "Write 'fwd-sm90a-bf16-hd128-full'"),
        ("fwd-sm90a-bf16-hd128x128-full", "Write 'fwd-sm90a-bf16-hd128-full'"),
        ("fwd-sm90a-bf16-hd128", "Write 'fwd-sm90a-bf16-hd128-full'"),
        ("fwd-sm90a-bf16-hd128-sink-full", "Write 'fwd-sm90a-bf16-hd128-full-sink'"),
        ("fwd-sm90a-bf16-hd128-full-causal", "field 'causal' sets mask a second time"),
        ("fwd-sm90a-bf16-hd128-full-3cta", "field '3cta' is unknown. Fields after head_dim: full, causal, local"),
        ("fwd-sm90-bf16-hd128-full", "arch 'sm90' is unknown; allowed: sm90a, sm100a, sm103a"),
        ("fwd-sm90a-fp32-hd128-full", "dtype 'fp32' is unknown; allowed: bf16, fp16, e4m3, e5m2"),
        ("fwd-sm90a-bf16-hd80-full", "head_dim 80 is unknown"),
        ("fwd-sm90a-bf16-hd128-full-2cta", "is refused: 2-CTA MMA (cta_group::2) needs sm100a"),
        ("bwd_preprocess-sm90a-bf16-hd128-causal", "is refused: bwd_preprocess has no axis mask"),
        ("fwd-sm90a-bf16-hd192-full", "is refused: fwd is not built for hd192; allowed: hd64, hd96, hd128, hd192x128"),
    ],
)
def test_a_bad_id_is_an_error_that_says_what_is_wrong(text, message):
    """The value, the rule, and the spelling or the values that are allowed."""
    with pytest.raises(VariantError) as caught:
        parse_variant(text)

    assert repr(text) in str(caught.value)
    assert message in str(caught.value)


# --- validity ---------------------------------------------------------------------------------------------------------


def test_the_matrix_has_the_size_of_the_product_minus_the_exclusions():
    """Literal counts, op by op.

    fwd: dtypes * head_dims * masks * (layouts * softcap * sink + split (varlen, paged) * softcap) = 2*5*3*(3*2*2 + 2*2)
    = 480 with 16-bit types and one CTA; fp8 (sm100a, sm103a) 2*2*3*16 = 192; 2cta: 16-bit dense full hd128 and
    hd192x128 2*2*4 = 16, hd256 with any mask and layout 2*3*3*4 = 72, fp8 dense full hd128 2*4 = 8; together
    480 + 192 + 96 = 768.
    bwd: dtypes * head_dims * masks * layouts * deterministic * softcap = 2*5*3*2*2*2 = 240 on sm90a; Blackwell: one
    CTA up to hd128 144, 2cta from hd128 on 144.
    bwd_preprocess 2*5*2 = 20; bwd_postprocess 2*5*2 = 20; fwd_combine 2*4*2 (sink).
    """
    sm90a = {"fwd": 480, "bwd": 240, "bwd_preprocess": 20, "bwd_postprocess": 20, "fwd_combine": 16}
    blackwell = {"fwd": 768, "bwd": 288, "bwd_preprocess": 20, "bwd_postprocess": 20, "fwd_combine": 16}
    counts = Counter((variant.arch, variant.op) for variant in valid_variants())

    for arch, expected in (("sm90a", sm90a), ("sm100a", blackwell), ("sm103a", blackwell)):
        assert expected == {op: counts[arch, op] for op in AXES["op"]}
    assert 776 + 1112 + 1112 == len(valid_variants())


def test_valid_variants_are_those_without_refusals():
    """The space and the public check agree, both ways."""
    assert not any(refusals(variant) for variant in valid_variants())
    assert all(refused.reasons == refusals(refused.variant) for refused in refused_variants())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_is_needed(rule):
    """Some combination is refused by this rule alone: without it the matrix would be larger."""
    assert any(refused.reasons == (rule.reason,) for refused in refused_variants())


BLACKWELL = {"arch": "sm100a"}
TWO_CTA = {"arch": "sm100a", "cta_group": 2}
HD256 = {"head_dim": 256, "head_dim_v": 256}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"dtype": "e4m3"}, "fp8-needs-blackwell"),
        (BLACKWELL | {"op": "bwd", "dtype": "e5m2"}, "fp8-is-forward-only"),
        (BLACKWELL | {"op": "fwd_combine", "dtype": "e4m3"}, "fp8-output-is-bf16"),
        (BLACKWELL | {"dtype": "e4m3", "head_dim": 96, "head_dim_v": 96}, "fp8-head-dims"),
        ({"cta_group": 2}, "two-cta-needs-blackwell"),
        (TWO_CTA | {"mask": "causal"}, "two-cta-forward-masks"),
        (TWO_CTA | {"head_dim": 64, "head_dim_v": 64}, "two-cta-forward-masks"),
        (TWO_CTA | HD256 | {"layout": "varlen", "split": True}, "two-cta-and-split"),
        (TWO_CTA | {"layout": "varlen"}, "two-cta-forward-dense-queries"),
        (TWO_CTA | {"layout": "paged"}, "two-cta-forward-dense-queries"),
        (TWO_CTA | {"op": "bwd", "head_dim": 96, "head_dim_v": 96}, "two-cta-backward-head-dims"),
        (BLACKWELL | {"op": "bwd", "head_dim": 192}, "wide-backward-needs-two-cta"),
        ({"op": "bwd", "layout": "paged"}, "paged-is-forward-only"),
        ({"split": True}, "split-needs-packed-keys"),
        ({"layout": "paged", "split": True, "sink": True}, "sink-after-split"),
    ],
)
def test_a_contradiction_is_refused_with_its_reason(changes, rule):
    """One example for each rule."""
    reason = next(r.reason for r in RULES if r.name == rule)

    assert (reason,) == refusals(replace(BASE, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "varlen", "split": True, "softcap": True},
        {"layout": "paged", "sink": True},
        {"op": "fwd_combine", "sink": True},
        {"head_dim": 192},
        BLACKWELL | {"dtype": "e4m3", "layout": "paged", "split": True},
        TWO_CTA,
        TWO_CTA | {"head_dim": 192},
        TWO_CTA | {"head_dim": 256, "head_dim_v": 256, "mask": "local", "layout": "varlen"},
        TWO_CTA | {"op": "bwd", "mask": "causal", "deterministic": True},
        {"op": "bwd_postprocess", "head_dim": 192, "head_dim_v": 192},
    ],
)
def test_one_step_inside_the_rules_is_valid(changes):
    """The bounds are tight: nothing next to a refused combination is refused with it."""
    assert () == refusals(replace(BASE, **changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"deterministic": True}, "fwd has no axis deterministic; leave it False"),
        ({"op": "bwd", "split": True}, "bwd has no axis split; leave it False"),
        ({"op": "bwd_postprocess", "mask": "causal"}, "bwd_postprocess has no axis mask; leave it 'full'"),
        ({"op": "fwd_combine", "layout": "paged"}, "fwd_combine has no axis layout; leave it 'dense'"),
        ({"op": "bwd_postprocess", "cta_group": 2, "arch": "sm100a"}, "bwd_postprocess has no axis cta_group"),
        ({"op": "fwd_combine", "head_dim": 192}, "fwd_combine is not built for hd192x128; allowed: hd64, hd96"),
        ({"mask": "diagonal"}, "mask 'diagonal' is unknown; allowed: full, causal, local"),
        ({"cta_group": 3}, "cta_group 3 is unknown; allowed: 1, 2"),
        ({"split": 1}, "split 1 is unknown; allowed: False, True"),
        ({"op": "forward"}, "op 'forward' is unknown; allowed: fwd, bwd"),
    ],
)
def test_an_axis_without_meaning_or_with_an_unknown_value_is_refused(changes, reason):
    """Axes that do not apply have one canonical value, so that one kernel has one id. 1 is not True."""
    reasons = refusals(replace(BASE, **changes))

    assert 1 == len(reasons)
    assert reasons[0].startswith(reason)


def test_every_field_of_a_variant_is_an_axis():
    """A new field must join the axes table, or ids and refusals would not know it."""
    names = {field.name for field in fields(Variant)}

    assert (set(AXES) - {"head_dims"}) | {"head_dim", "head_dim_v"} == names
    assert names - {"op", "arch"} == set(variant_axes(BASE))
    assert set(AXES["op"]) == set(OPS)


# --- selecting --------------------------------------------------------------------------------------------------------


def test_the_default_matrix_is_what_is_written_less_what_is_built_on_request():
    """Nothing given: every variant with a kernel but those that a rule leaves out, each rule some; these by name."""
    matrix = expand_matrix(Selection())
    left_out = sorted(set(written_variants()) - set(matrix), key=lambda variant: variant.id)

    assert default_variants() == matrix
    assert all(map(kernel_written, matrix))
    assert all(map(reasons_on_request, left_out))
    assert {rule.reason for rule in ON_REQUEST} == {reason for v in left_out for reason in reasons_on_request(v)}
    assert (left_out[0],) == expand_matrix(Selection(globs=(left_out[0].id,), alone=True))


def test_dense_forward_on_hopper_is_written():
    """Two types, three head dimensions at least, three masks; no split, softcap or sink."""
    written = {variant.id for variant in expand_matrix(Selection(arches=("sm90",)))}
    expected = {
        f"fwd-sm90a-{dtype}-hd{head_dim}-{mask}"
        for dtype in ("bf16", "fp16")
        for head_dim in (64, 128, 256)
        for mask in ("full", "causal", "local")
    }

    assert expected <= written


def test_matrices_are_in_the_order_of_the_axes_and_without_doubles():
    """The same selection gives the same tuple, however often a variant is named."""
    globs = ("fwd-sm90a-fp16-hd128-*l", "fwd-sm90a-bf16-hd128-full", "fwd-sm90a-*16-hd128-full")
    ids = [variant.id for variant in expand_matrix(Selection(globs=globs))]

    assert [
        "fwd-sm90a-bf16-hd128-full",
        "fwd-sm90a-fp16-hd128-full",
        "fwd-sm90a-fp16-hd128-causal",
        "fwd-sm90a-fp16-hd128-local",
    ] == ids


def test_arches_and_globs_must_both_hold():
    """A glob over all targets is narrowed by the arch."""
    selection = Selection(arches=("sm90",), globs=("fwd-*-bf16-hd128-causal",))

    assert ["fwd-sm90a-bf16-hd128-causal"] == [variant.id for variant in expand_matrix(selection)]


def only_plain_dense_kernels(monkeypatch):
    """As if no kernel with another layout or a feature were written."""
    plain = tuple(
        replace(
            kernel, axes=MappingProxyType({**kernel.axes, "layout": ("dense",), "softcap": (False,), "sink": (False,)})
        )
        for kernel in variants.KERNELS
    )
    monkeypatch.setattr(variants, "KERNELS", plain)
    monkeypatch.setattr(variants, "kernel_for", variants.kernel_for.__wrapped__)  # what is known is of the whole table


def test_a_glob_takes_what_is_written_and_says_what_it_leaves_out(monkeypatch):
    """3 layouts * softcap * sink, and split of 2 layouts * softcap: 16, of which the plain dense one is written."""
    only_plain_dense_kernels(monkeypatch)
    found = expansion(Selection(globs=("fwd-sm90a-bf16-hd128-causal*",)))

    assert ["fwd-sm90a-bf16-hd128-causal"] == [variant.id for variant in found.variants]
    assert 15 == len(found.left_out)
    assert "fwd-sm90a-bf16-hd128-causal-sink" in {variant.id for variant in found.left_out}


def test_a_glob_over_unwritten_kernels_alone_is_an_error_that_names_them(monkeypatch):
    """Nothing to build is never the answer. 6: softcap * sink without split, softcap with it."""
    only_plain_dense_kernels(monkeypatch)
    with pytest.raises(NothingSelectedError, match="6 of 6 selected variants have no kernel yet: fwd-sm90a-bf16-hd12"):
        expand_matrix(Selection(globs=("fwd-sm90a-bf16-hd128-causal-varlen*",)))


def ids_of(*globs: str, **more: object) -> list[str]:
    """Ids that globs come to."""
    return [variant.id for variant in expand_matrix(Selection(globs=globs, **more))]


def test_kernels_bring_those_they_are_launched_with():
    """Split keys their merge, with a sink where a kernel has one; a backward both its sides."""
    split = "fwd-sm90a-bf16-hd64-causal-paged-split"

    assert [split, "fwd_combine-sm90a-bf16-hd64"] == ids_of(split)
    assert [split, "fwd_combine-sm90a-bf16-hd64-sink"] == ids_of(split, "fwd_combine-sm90a-bf16-hd64-sink")
    assert ["fwd_combine-sm90a-bf16-hd64", "fwd_combine-sm90a-bf16-hd64-sink"] == ids_of(
        split, "fwd-sm90a-bf16-hd64-local-paged-sink"
    )[2:]
    assert ["fwd-sm100a-e4m3-hd64-full-varlen-split", "fwd_combine-sm100a-bf16-hd64"] == ids_of(
        "fwd-sm100a-e4m3-hd64-full-varlen-split"
    )
    assert [
        "bwd-sm90a-bf16-hd192x128-causal-varlen-deterministic",
        "bwd_preprocess-sm90a-bf16-hd192x128-varlen",
        "bwd_postprocess-sm90a-bf16-hd192-varlen",
    ] == ids_of("bwd-sm90a-bf16-hd192x128-causal-varlen-deterministic")
    assert [split] == ids_of(split, alone=True)


def test_the_default_matrix_lacks_no_helper():
    """What is built without a selection can be launched."""
    assert [] == list(lacking_helpers(default_variants()))


def test_why_a_variant_has_no_kernel_is_the_least_that_no_kernel_has():
    """Read off the table of kernels, never out of a list of texts."""
    reasons = {
        "fwd-sm90a-bf16-hd192x128-causal-paged-sink": "no fwd kernel of sm90a has paged with sink and hd192x128",
        "fwd-sm90a-bf16-hd64-causal-softcap-sink": "no fwd kernel of sm90a has softcap with sink",
        "fwd-sm100a-bf16-hd96-causal-varlen-softcap": "no fwd kernel of sm100a has varlen with softcap and hd96",
    }

    assert reasons == {name: why_unwritten(parse_variant(name)) for name in reasons}
    line = summary_of(map(parse_variant, reasons), 5)
    assert line.startswith("skipped 3 of 8 matching variants, which have no kernel: no fwd kernel of sm")


def test_a_single_unwritten_id_is_an_error_that_names_it(monkeypatch):
    """The same for an id without wildcards."""
    only_plain_dense_kernels(monkeypatch)
    with pytest.raises(NothingSelectedError, match=r"no kernel yet: fwd-sm90a-bf16-hd128-causal-varlen\."):
        expand_matrix(Selection(globs=("fwd-sm90a-bf16-hd128-causal-varlen",)))


def test_an_arch_without_kernels_is_an_error_until_one_is_written():
    """A target whose default matrix would be empty says so."""
    for arch in AXES["arch"]:
        if any(variant.arch == arch for variant in written_variants()):
            continue
        with pytest.raises(NothingSelectedError, match=f"no kernel is written for {arch} yet"):
            expand_matrix(Selection(arches=(arch,)))


def test_a_glob_that_matches_nothing_lists_the_nearest_ids():
    """A typo in a pattern is answered with what was likely meant."""
    with pytest.raises(NothingSelectedError) as caught:
        expand_matrix(Selection(globs=("fwd-sm90a-bf16-hd128-casual*",)))

    assert "'fwd-sm90a-bf16-hd128-casual*' matches no variant. Did you mean 'fwd-sm90a-bf16-hd128-causal*'?" in str(
        caught.value
    )
    assert "fwd-sm90a-bf16-hd128-causal" in str(caught.value)


def test_one_empty_glob_among_good_ones_is_still_an_error():
    """Otherwise half of what was asked for would be missing without a word."""
    with pytest.raises(NothingSelectedError, match="matches no variant"):
        expand_matrix(Selection(globs=("fwd-sm90a-bf16-hd128-full", "bwd-sm80-*")))


def test_a_refused_id_is_an_error_with_its_reason():
    """Selecting a contradiction says why it is one."""
    with pytest.raises(VariantError, match="fp8 kernels exist for sm100a and sm103a only"):
        expand_matrix(Selection(globs=("fwd-sm90a-e4m3-hd128-full",)))


def test_an_id_outside_the_chosen_arch_says_so():
    """Both parts are fine alone, together they select nothing."""
    with pytest.raises(NothingSelectedError, match="is valid, but the other selection options exclude it"):
        expand_matrix(Selection(arches=("sm100",), globs=("fwd-sm90a-bf16-hd128-full",)))


def test_an_unknown_arch_is_a_variant_error():
    """Exit code 2, as for any axis."""
    with pytest.raises(VariantError, match="arch 'sm80' is unknown"):
        expand_matrix(Selection(arches=("sm80",)))


@pytest.mark.parametrize(
    ("variant_id", "rule"),
    [
        ("fwd-sm100a-bf16-hd128-full-2cta", {"when": "seqlen_q > 256"}),
        ("fwd-sm103a-fp16-hd192x128-full-2cta", {"when": "seqlen_q > 256"}),
        ("fwd-sm100a-bf16-hd128-full", {}),
        ("fwd-sm100a-bf16-hd256-causal-2cta", {}),  # the only kernel of its head_dim
        ("bwd-sm100a-bf16-hd128-full-2cta", {}),
    ],
)
def test_a_forward_of_two_blocks_leaves_few_queries_to_its_twin(variant_id, rule):
    """A pair takes 512 rows at once, one block 256."""
    variant = parse_variant(variant_id)

    assert rule == use_rule(variant)
