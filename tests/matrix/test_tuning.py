"""Contract of the tuning tables.

Every valid forward variant has a row with a source. No row exceeds the register file, and none lets a stored
probability overflow its type. Expected values are the published tables', copied by hand into this file.
"""

import math
from dataclasses import fields, replace

import pytest

from fa4build.errors import VariantError
from fa4build.matrix.arch import ARCHES, arch_named
from fa4build.matrix.tuning import (
    MAX_FINITE,
    WITHOUT_TUNING,
    Tuning,
    check_tuning,
    emulated_share,
    exp2_mode,
    has_tuning,
    tuning_for,
    tuning_row_for,
)
from fa4build.matrix.variants import parse_variant, valid_variants

FORWARDS = tuple(variant for variant in valid_variants() if variant.op == "fwd")


def tuning_of(variant_id: str) -> Tuning:
    """The tuning of an id."""
    return tuning_for(parse_variant(variant_id))


@pytest.mark.parametrize(
    ("variant_id", "tile", "consumers", "registers"),
    [
        # (tile_m, tile_n), consumer warpgroups of 64 rows each, (consumer, producer) registers
        ("fwd-sm90a-bf16-hd64-full", (192, 128), 3, (160, 32)),
        ("fwd-sm90a-bf16-hd64-local", (192, 96), 3, (160, 32)),
        ("fwd-sm90a-fp16-hd96-causal", (192, 96), 3, (160, 32)),
        ("fwd-sm90a-bf16-hd128-causal", (128, 128), 2, (240, 24)),
        ("fwd-sm90a-bf16-hd192x128-full", (128, 112), 2, (240, 24)),
        ("fwd-sm90a-bf16-hd192x128-local", (128, 128), 2, (240, 24)),
        ("fwd-sm90a-bf16-hd256-causal", (128, 64), 2, (240, 24)),
        ("fwd-sm90a-bf16-hd256-local", (128, 64), 2, (240, 24)),
    ],
)
def test_hopper_forward_rows(variant_id, tile, consumers, registers):
    """One row for each head dimension and mask."""
    tuning = tuning_of(variant_id)

    assert tile == (tuning.tile_m, tuning.tile_n)
    assert consumers == tuning.consumer_warpgroups
    assert registers == (tuning.consumer_registers, tuning.producer_registers)


@pytest.mark.parametrize(
    ("variant_id", "exp2", "registers"),
    [
        # (frequency, start), (softmax, correction, other) registers
        ("fwd-sm100a-bf16-hd64-full", (16, 1), (184, 104, 40)),
        ("fwd-sm100a-bf16-hd128-full-2cta", (16, 1), (184, 104, 40)),
        ("fwd-sm100a-fp16-hd128-causal", (16, 1), (184, 104, 40)),
        ("fwd-sm100a-bf16-hd192x128-full-2cta", (16, 0), (184, 104, 40)),
        ("fwd-sm100a-bf16-hd192x128-causal", (32, 1), (184, 104, 40)),
        ("fwd-sm100a-bf16-hd256-full-2cta", (14, 0), (256, 160, 48)),
        ("fwd-sm100a-bf16-hd256-causal-2cta", (14, 0), (256, 160, 48)),
        ("fwd-sm100a-bf16-hd256-causal-varlen", (0, 0), (200, 120, 96)),
        ("fwd-sm103a-fp16-hd256-local-paged-split", (0, 0), (200, 120, 96)),
        ("fwd-sm100a-e4m3-hd128-full-2cta", (10, 1), (160, 72, 120)),
        ("fwd-sm100a-e4m3-hd128-causal", (8, 1), (184, 104, 40)),
        ("fwd-sm100a-e5m2-hd64-full", (16, 1), (168, 96, 80)),
        # Without a row: 192 and 80, and the rest of 512: (512 - 2*192 - 80) / 1 = 48, or with one Q stage
        # (512 - 192 - 80) / 2 = 120.
        ("fwd-sm100a-bf16-hd96-local", (16, 1), (184, 96, 48)),
        ("fwd-sm100a-bf16-hd96-full", (16, 1), (184, 104, 40)),
        ("fwd-sm100a-bf16-hd128-full", (16, 1), (184, 104, 40)),
        ("fwd-sm100a-bf16-hd192x128-full", (0, 0), (184, 104, 40)),
        ("fwd-sm100a-bf16-hd256-full", (0, 0), (184, 104, 112)),
        ("fwd-sm103a-bf16-hd64-full", (0, 0), (184, 104, 40)),
        ("fwd-sm103a-bf16-hd128-full-2cta", (0, 0), (184, 104, 40)),
        ("fwd-sm103a-bf16-hd128-causal", (0, 0), (184, 104, 40)),
        ("fwd-sm103a-bf16-hd192x128-full-2cta", (0, 0), (184, 104, 40)),
        ("fwd-sm103a-bf16-hd192x128-causal", (0, 0), (184, 104, 40)),
    ],
)
def test_blackwell_forward_rows(variant_id, exp2, registers):
    """The published table, cell by cell."""
    tuning = tuning_of(variant_id)

    assert exp2 == (tuning.exp2_frequency, tuning.exp2_start)
    assert registers == (tuning.consumer_registers, tuning.correction_registers, tuning.producer_registers)


@pytest.mark.parametrize(
    ("variant_id", "share"),
    [
        ("fwd-sm100a-bf16-hd128-full-2cta", 0.125),  # 8 of 32 columns in fragments 1 and 2, of 4
        ("fwd-sm100a-bf16-hd128-causal", 0.125),  # 8 of 32 in two fragments
        ("fwd-sm100a-bf16-hd192x128-full-2cta", 0.1875),  # 8 of 32 in three fragments
        ("fwd-sm100a-bf16-hd192x128-causal", 0.0625),  # 4 of 32 in two fragments
        ("fwd-sm100a-bf16-hd256-full-2cta", 0.1875),  # 8 of 32 in three fragments
        ("fwd-sm100a-e4m3-hd128-causal", 0.25),  # 16 of 32 in two fragments
        ("fwd-sm103a-bf16-hd128-causal", 0.0),
        ("fwd-sm90a-bf16-hd128-causal", 0.0),
    ],
)
def test_emulated_share_of_exponentials(variant_id, share):
    """Derived from frequency and start: the last fragment is never emulated."""
    assert share == emulated_share(tuning_of(variant_id))


def test_exp2_is_native_wherever_the_unit_is_fast():
    """sm103a computes 32 a clock: emulation would be a loss there, and is no axis."""
    for variant in FORWARDS:
        if arch_named(variant.arch).exp2_per_clock == 32:
            assert "native" == exp2_mode(tuning_for(variant))
    assert "12.50% of each row on the FMA pipe, the rest native" == exp2_mode(tuning_of("fwd-sm100a-bf16-hd128-full"))


@pytest.mark.parametrize(
    ("variant_id", "stages"),
    [
        # (224 KiB - Q - O) / larger of the K and V tiles, in KiB:
        ("fwd-sm100a-bf16-hd128-full", 3),  # (224 - 64 - 64) / 32
        ("fwd-sm100a-bf16-hd128-full-2cta", 6),  # tiles halved
        ("fwd-sm100a-bf16-hd64-full", 10),  # (224 - 32 - 32) / 16
        ("fwd-sm100a-bf16-hd192x128-causal", 3),  # K V K: 48 + 32 + 48 of 224 - 96
        ("fwd-sm100a-bf16-hd192x128-full-2cta", 6),  # three of 24 and three of 16, of 128
        ("fwd-sm100a-bf16-hd256-full-2cta", 5),  # (224 - 64) / 32, one Q stage, O over Q
        ("fwd-sm100a-bf16-hd128-full-varlen-split", 5),  # rows of O through the memory of Q: (224 - 64) / 32
        ("fwd-sm100a-bf16-hd256-full-varlen", 5),  # one Q stage and tiles of 64 keys: (224 - 64) / 32
    ],
)
def test_stages_that_fit_beside_q_and_o(variant_id, stages):
    """Shared-memory plan of the Blackwell forward."""
    assert stages == tuning_of(variant_id).kv_stages


def test_every_valid_forward_has_a_row_with_a_source_that_its_target_can_hold():
    """Over the whole space, also of kernels not written yet."""
    for variant in FORWARDS:
        row = tuning_row_for(variant)

        assert row.source
        assert row.name.startswith(f"fwd-{variant.arch}-")
        assert row.tuning.registers <= arch_named(variant.arch).register_file == 65536
        assert row.tuning.kv_stages >= 2


def test_a_probability_never_overflows_its_type():
    """max_offset + threshold < log2(largest finite): 8 + 0 < 8.807 for e4m3, 0 + 8 < 15.999 for fp16."""
    for variant in FORWARDS:
        tuning = tuning_for(variant)

        assert tuning.max_offset + tuning.rescale_threshold < math.log2(MAX_FINITE[variant.dtype])


@pytest.mark.parametrize(
    ("dtype", "threshold", "offset", "allowed"),
    [
        ("e4m3", 0.0, 8.0, True),
        ("e4m3", 0.75, 8.0, True),
        ("e4m3", 0.875, 8.0, False),  # 8.875 > log2(448) = 8.807
        ("e4m3", 4.0, 8.0, False),  # 2**12 = 4096 > 448
        ("e5m2", 4.0, 8.0, True),
        ("e5m2", 8.0, 8.0, False),  # 16 > log2(57344) = 15.807
        ("fp16", 8.0, 0.0, True),
        ("fp16", 16.0, 0.0, False),  # 16 > log2(65504) = 15.999
        ("bf16", 16.0, 0.0, True),
        ("bf16", 128.0, 0.0, False),
    ],
)
def test_the_rescale_rule_is_tight(dtype, threshold, offset, allowed):
    """One step past the type's range is refused."""
    tuning = replace(tuning_of("fwd-sm100a-bf16-hd128-full"), rescale_threshold=threshold, max_offset=offset)
    if allowed:
        check_tuning(tuning, arch=arch_named("sm100a"), dtype=dtype)
        return

    with pytest.raises(VariantError, match=f"but {dtype} holds no 2\\*\\*{threshold + offset}"):
        check_tuning(tuning, arch=arch_named("sm100a"), dtype=dtype)


def test_roles_share_one_register_file():
    """128 threads * (2*192 + 80 + 48) is exactly 65536; 8 more for any role are refused."""
    tuning = tuning_of("fwd-sm100a-bf16-hd128-full")

    assert 65536 == tuning.registers
    check_tuning(tuning, arch=arch_named("sm100a"), dtype="bf16")
    for role in ("consumer_registers", "correction_registers", "producer_registers"):
        larger = replace(tuning, **{role: getattr(tuning, role) + 8})
        with pytest.raises(VariantError, match=r"roles need 6\d+ registers, sm100a has 65536"):
            check_tuning(larger, arch=arch_named("sm100a"), dtype="bf16")


@pytest.mark.parametrize("value", [0, 16, 20, 161, 264])
@pytest.mark.parametrize("role", ["consumer_registers", "producer_registers"])
def test_register_budgets_are_what_setmaxnreg_takes(role, value):
    """Multiples of 8 from 24 to 256."""
    tuning = replace(tuning_of("fwd-sm90a-bf16-hd128-full"), **{role: value})

    with pytest.raises(VariantError, match=f"{role} is {value}; setmaxnreg takes multiples of 8"):
        check_tuning(tuning, arch=arch_named("sm90a"), dtype="bf16")


def test_an_unknown_order_is_refused():
    """The kernel would have to guess."""
    tuning = replace(tuning_of("fwd-sm90a-bf16-hd128-full"), order="random")

    with pytest.raises(VariantError, match="order 'random' is unknown; allowed: natural, longest_first"):
        check_tuning(tuning, arch=arch_named("sm90a"), dtype="bf16")


def test_masked_tiles_go_longest_first_and_equal_ones_in_order():
    """Causal tiles differ in length; full ones do not; those of a window do at its edges alone (in order on sm90a)."""
    for variant in FORWARDS:
        if variant.layout == "dense":
            is_uneven = variant.mask == "causal" or (variant.mask == "local" and variant.arch != "sm90a")
            assert is_uneven == (tuning_for(variant).order == "longest_first")


def test_an_op_without_rows_is_an_error():
    """Nothing is made up for kernels that have no tuning yet."""
    for variant in valid_variants():
        if has_tuning(variant) or variant.op in WITHOUT_TUNING:
            continue
        with pytest.raises(VariantError, match=f"{variant.id}: there is no tuning for op {variant.op} yet"):
            tuning_for(variant)


def test_a_tuning_holds_numbers_and_words_only():
    """Whatever steers a kernel can be written as a literal, and so can join a cache key."""
    tuning = tuning_of("fwd-sm90a-bf16-hd128-full")

    assert {int, float, bool, str} >= {type(getattr(tuning, field.name)) for field in fields(Tuning)}
    assert 3 == len(ARCHES)  # a new target needs rows of its own here
