"""Contract of the argument lists: docs/formats.md, section 1, as data."""

from dataclasses import replace

import pytest

from fa4build.compiling.signature import ScalarArg, TensorArg, signature_for, spec_for
from fa4build.errors import VariantError
from fa4build.matrix.variants import parse_variant, valid_variants


def test_the_dense_forward_list_is_the_published_one():
    """Names, types, shapes and alignments in order; extents of the last modes are fixed, all others free."""
    q_shape, k_shape = ("batch", "seqlen_q", "num_heads_q", 192), ("batch", "seqlen_k", "num_heads_kv", 192)
    v_shape, out_shape = ("batch", "seqlen_k", "num_heads_kv", 128), ("batch", "seqlen_q", "num_heads_q", 128)

    assert (
        TensorArg(name="q", dtype="fp16", shape=q_shape, align_bytes=16),
        TensorArg(name="k", dtype="fp16", shape=k_shape, align_bytes=16),
        TensorArg(name="v", dtype="fp16", shape=v_shape, align_bytes=16),
        TensorArg(name="out", dtype="fp16", shape=out_shape, align_bytes=16),
        TensorArg(name="lse", dtype="f32", shape=("batch", "num_heads_q", "seqlen_q"), align_bytes=4),
        ScalarArg(name="softmax_scale", dtype="f32"),
        ScalarArg(name="window_left", dtype="i32"),
        ScalarArg(name="window_right", dtype="i32"),
        ScalarArg(name="num_sms", dtype="i32"),
    ) == signature_for(parse_variant("fwd-sm90a-fp16-hd192x128-full"))


def test_the_list_is_the_same_on_every_architecture_and_for_every_mask():
    """One operator, one argument list."""
    lists = {
        signature_for(parse_variant(f"fwd-{arch}-bf16-hd128-{mask}"))
        for arch in ("sm90a", "sm100a", "sm103a")
        for mask in ("full", "causal", "local")
    }

    assert 1 == len(lists)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3", "e5m2"])
def test_16_bit_types_write_themselves_and_fp8_writes_bf16(dtype):
    """q, k and v share the variant's type."""
    q, k, v, out, *_ = signature_for(parse_variant(f"fwd-sm100a-{dtype}-hd128-full"))
    expected = {"bf16": "bf16", "fp16": "fp16", "e4m3": "bf16", "e5m2": "bf16"}[dtype]

    assert (dtype, dtype, dtype, expected) == (q.dtype, k.dtype, v.dtype, out.dtype)


def names_of(variant_id):
    """Parameters of a variant in order."""
    return [argument.name for argument in signature_for(parse_variant(variant_id))]


LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"]
LAST = ["softmax_scale", "window_left", "window_right", "num_sms"]
DESCALES = ["q_descale", "k_descale", "v_descale"]


@pytest.mark.parametrize(
    ("variant_id", "names"),
    [
        ("fwd-sm90a-bf16-hd128-full-varlen", ["q", "k", "v", "out", "lse", *LENGTHS, *LAST]),
        (
            "fwd-sm90a-bf16-hd128-full-paged",
            ["q", "k", "v", "out", "lse", "cu_seqlens_q", "page_table", "seqused_q", "seqused_k", *LAST],
        ),
        ("fwd-sm90a-bf16-hd128-full-softcap-sink", ["q", "k", "v", "out", "lse", *LAST, "sink", "softcap"]),
        (
            "fwd-sm100a-e4m3-hd128-full-varlen-split-softcap",
            ["q", "k", "v", "out_partial", "lse_partial", *LENGTHS, *LAST, *DESCALES, "softcap"],
        ),
        ("fwd_combine-sm90a-bf16-hd128-sink", ["out_partial", "lse_partial", "out", "lse", "sink"]),
    ],
)
def test_features_and_layouts_add_their_arguments(variant_id, names):
    """Lengths behind the tensors, features behind the scalars of every forward; partial results in place of whole."""
    assert names == names_of(variant_id)


def test_a_list_that_no_version_defines_is_an_error():
    """A sink joins where splits are merged: no forward takes both. No argument is made up."""
    both = replace(parse_variant("fwd-sm90a-bf16-hd128-full-varlen-split"), sink=True)

    with pytest.raises(VariantError, match=f"{both.id}: no argument list is defined for this op"):
        signature_for(both)


def test_every_valid_variant_has_a_list():
    """Also those whose kernel is not written yet: the lists come first."""
    for variant in valid_variants():
        assert signature_for(variant)


def test_the_plan_is_told_what_is_fixed_at_compile_time():
    """Head dimensions and type, the name of every extent, and which extents must divide."""
    spec = spec_for(parse_variant("fwd-sm100a-bf16-hd192x128-full"))

    assert {"dtype": "bf16", "head_dim": 192, "head_dim_v": 128} == {
        name: spec[name] for name in ("dtype", "head_dim", "head_dim_v")
    }
    assert ["batch", "seqlen_k", "num_heads_kv", "head_dim_v"] == spec["shapes"]["v"]
    assert {"q", "k", "v", "out", "lse"} == set(spec["shapes"])
    assert [["num_heads_q", "num_heads_kv"]] == spec["multiples"]
