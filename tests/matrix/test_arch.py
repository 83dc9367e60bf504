"""Contract of the target table.

Every target has one name, is found under its aliases, and a cubin runs on exactly one compute capability.
Capacities are those of the vendor's specification tables.
"""

import pytest

from fa4build.errors import VariantError
from fa4build.matrix.arch import ARCHES, GPUS, arch_named, runs_on
from fa4build.runtime.fa4_kernels import abi
from fa4build.runtime.fa4_kernels.models.gpus import GPUS as GPUS_OF_RUNTIME


@pytest.mark.parametrize(
    ("given", "name", "target", "compute_capability"),
    [
        ("sm90", "sm90a", "sm_90a", (9, 0)),
        ("sm90a", "sm90a", "sm_90a", (9, 0)),
        ("sm_90a", "sm90a", "sm_90a", (9, 0)),
        ("sm100", "sm100a", "sm_100a", (10, 0)),
        ("sm100a", "sm100a", "sm_100a", (10, 0)),
        ("sm103", "sm103a", "sm_103a", (10, 3)),
        ("sm_103", "sm103a", "sm_103a", (10, 3)),
    ],
)
def test_a_target_is_found_by_name_and_alias(given, name, target, compute_capability):
    """Users write sm90; ids, compilers and manifests have one spelling each."""
    arch = arch_named(given)

    assert (name, target, compute_capability) == (arch.name, arch.target, arch.compute_capability)


@pytest.mark.parametrize("name", ["sm80", "90", "", "sm120a"])
def test_an_unknown_target_is_an_error_that_lists_what_is_allowed(name):
    """No target is guessed: sm80 and sm120a are other GPUs, not slips of ours."""
    with pytest.raises(VariantError) as caught:
        arch_named(name)

    allowed = "sm90a (or sm90), sm100a (or sm100), sm103a (or sm103), or a GPU such as H200 or B200."
    assert f"arch {name!r} is unknown. Allowed: {allowed}" == str(caught.value)


@pytest.mark.parametrize(
    ("given", "name"), [("SM90", "sm90a"), ("h200", "sm90a"), ("B200", "sm100a"), ("GB300", "sm103a")]
)
def test_case_does_not_count_and_a_product_stands_for_its_target(given, name):
    """As people say it."""
    assert name == arch_named(given).name


def test_a_product_that_is_misspelled_is_suggested():
    """Names of products are words; the numbers of targets are not."""
    with pytest.raises(VariantError, match=r"Did you mean H200\?"):
        arch_named("H2000")


def test_the_builder_and_the_runtime_know_the_same_products():
    """The runtime is shipped alone, so it has its own list."""
    assert {gpu.name: gpu.target for gpu in GPUS_OF_RUNTIME} == {
        gpu: arch_named(name).target for name, gpus in GPUS.items() for gpu in gpus
    }


def test_names_and_aliases_are_unambiguous():
    """No spelling stands for two targets."""
    spellings = [spelling for arch in ARCHES for spelling in (arch.name, *arch.aliases)]

    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize(
    ("arch", "compute_capability", "expected"),
    [
        ("sm90a", (9, 0), True),
        ("sm90a", (10, 0), False),
        ("sm100a", (10, 0), True),
        ("sm100a", (10, 3), False),  # the suffix `a` promises no newer minor version
        ("sm103a", (10, 3), True),
        ("sm103a", (10, 0), False),
    ],
)
def test_a_cubin_runs_on_its_own_compute_capability_only(arch, compute_capability, expected):
    """Architecture-specific code is not forward compatible, not even within a family."""
    assert expected == runs_on(arch_named(arch), compute_capability)


def test_the_runtime_has_the_same_rule():
    """The dispatcher is shipped alone, so it has its own copy of targets and compute capabilities."""
    assert abi.TARGETS == {arch.target: arch.compute_capability for arch in ARCHES}


def test_capacities_are_those_of_the_specification():
    """227 KiB of shared memory a block, 64 Ki registers, 512 tensor-memory columns on Blackwell."""
    capacities = {
        arch.name: (arch.smem_bytes, arch.register_file, arch.tmem_columns, arch.exp2_per_clock, arch.cta_groups)
        for arch in ARCHES
    }

    assert {
        "sm90a": (232448, 65536, 0, 16, (1,)),
        "sm100a": (232448, 65536, 512, 16, (1, 2)),
        "sm103a": (232448, 65536, 512, 32, (1, 2)),
    } == capacities
