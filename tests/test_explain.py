"""Contract of `explain`: axes, validity, tuning with its source, exp2 mode, template and dependencies, of any variant.

Valid or refused, written or not: whatever has an id can be explained.
"""

import pytest

from fa4build.explain import explain
from fa4build.matrix.axes import parse_axes


def test_a_written_variant_is_explained_in_full():
    """All parts are there."""
    explanation = explain(parse_axes("fwd-sm90a-bf16-hd128-causal"))

    assert explanation.is_valid
    assert explanation.is_written
    assert "sm_90a" == explanation.arch.target
    assert (
        ("dtype", "bf16"),
        ("head_dim", 128),
        ("head_dim_v", 128),
        ("mask", "causal"),
        ("layout", "dense"),
        ("split", False),
        ("cta_group", 1),
        ("deterministic", False),
        ("softcap", False),
        ("sink", False),
    ) == explanation.axes
    assert "fwd-sm90a-hd128-causal" == explanation.tuning.name
    assert explanation.tuning.source
    assert "native" == explanation.exp2_mode
    assert "fwd_sm90" == explanation.template
    assert "kernels_src/forward/sm90.py" in dict(explanation.dependencies)


def test_a_valid_variant_without_a_kernel_shows_the_tuning_it_will_have():
    """Nothing to render, so no template and no dependencies."""
    explanation = explain(parse_axes("fwd-sm90a-bf16-hd128-causal-paged-softcap-sink"))

    assert explanation.is_valid
    assert not explanation.is_written
    assert 128 == explanation.tuning.tuning.tile_n
    assert (None, ()) == (explanation.template, explanation.dependencies)


@pytest.mark.parametrize(
    ("variant_id", "mode"),
    [
        ("fwd-sm100a-bf16-hd128-full-2cta", "12.50% of each row on the FMA pipe, the rest native"),
        ("fwd-sm103a-bf16-hd128-full-2cta", "native"),
    ],
)
def test_the_exp2_mode_follows_from_the_target(variant_id, mode):
    """The same problem, another instruction mix: derived, and no axis."""
    assert mode == explain(parse_axes(variant_id)).exp2_mode


def test_a_refused_combination_gives_its_reasons_and_nothing_else():
    """Two contradictions, two reasons; no tuning is shown for what cannot be."""
    explanation = explain(parse_axes("fwd-sm90a-e4m3-hd128-full-2cta"))

    assert not explanation.is_valid
    assert not explanation.is_written
    assert 2 == len(explanation.refusals)
    assert (None, None) == (explanation.tuning, explanation.exp2_mode)


def test_an_op_without_tuning_is_explained_as_far_as_it_goes():
    """Valid, known axes, no rows yet."""
    explanation = explain(parse_axes("fwd_combine-sm90a-bf16-hd128"))

    assert explanation.is_valid
    assert (None, None) == (explanation.tuning, explanation.exp2_mode)
