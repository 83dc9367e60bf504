"""Contract: of every kernel class at least one specialization compiles, and neither spills nor needs local memory; its
blocks fit a multiprocessor, and the assembler takes the budgets of registers and the overlap of products as they are.

What is peculiar to a kernel, and what it computes, is in the other files of this folder, which build the same ones: a
kernel is compiled once in a run. A kernel without a row here fails the first test.
"""

import pytest

from fa4build.compiling.wiring import WIRINGS
from fa4build.matrix.variants import kernel_for, parse_variant
from tests.built import cubin_of

SHARED_MEMORY_LIMIT = 232448  # bytes a block may have, on each of the targets
KERNELS = {
    "fwd_sm90": ("fwd-sm90a-bf16-hd64-causal", "fwd-sm90a-fp16-hd128-local", "fwd-sm90a-bf16-hd256-full"),
    "fwd_sm90_varlen": (
        *("fwd-sm90a-bf16-hd64-causal-varlen-sink", "fwd-sm90a-fp16-hd128-local-paged"),
        "fwd-sm90a-bf16-hd256-full-varlen-split-softcap",
    ),
    "fwd_sm100": ("fwd-sm100a-bf16-hd128-causal-softcap",),
    "fwd_sm100_2cta": ("fwd-sm100a-bf16-hd128-full-2cta", "fwd-sm103a-fp16-hd192x128-full-2cta"),
    "fwd_sm100_2cta_hd256": ("fwd-sm100a-fp16-hd256-causal-2cta",),
    "fwd_sm100_varlen": (
        *("fwd-sm100a-bf16-hd64-local-paged", "fwd-sm103a-fp16-hd128-causal-varlen-sink"),
        *("fwd-sm100a-e4m3-hd64-full-paged-split", "fwd-sm100a-bf16-hd256-full-paged"),
    ),
    "fwd_combine": ("fwd_combine-sm90a-bf16-hd64",),
    "bwd_sm90": ("bwd-sm90a-bf16-hd128-causal", "bwd-sm90a-bf16-hd128-local-deterministic"),
    "bwd_sm90_hd256": ("bwd-sm90a-bf16-hd192x128-local", "bwd-sm90a-bf16-hd256-causal-deterministic"),
    "bwd_sm100": ("bwd-sm100a-bf16-hd128-full", "bwd-sm100a-bf16-hd64-local-deterministic"),
    "bwd_sm100_2cta_hd128": ("bwd-sm100a-bf16-hd128-causal-2cta", "bwd-sm103a-fp16-hd128-local-2cta-deterministic"),
    "bwd_sm100_2cta_hd192": ("bwd-sm100a-bf16-hd192x128-local-2cta-deterministic",),
    "bwd_sm100_2cta_hd256": ("bwd-sm100a-bf16-hd256-causal-2cta-deterministic",),
    "bwd_preprocess": ("bwd_preprocess-sm90a-fp16-hd64", "bwd_preprocess-sm100a-bf16-hd192x128"),
    "bwd_postprocess": ("bwd_postprocess-sm90a-bf16-hd96", "bwd_postprocess-sm103a-fp16-hd256"),
}
SLOW = {"bwd-sm100a-bf16-hd192x128-local-2cta-deterministic"}  # which no other test of the default run builds


def test_no_kernel_is_forgotten():
    """A row for every kernel class, with kernels of that class."""
    assert set(WIRINGS) == set(KERNELS)
    for wiring, names in KERNELS.items():
        assert {kernel_for(parse_variant(name)).wiring for name in names} == {wiring}


@pytest.mark.dsl
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for names in KERNELS.values()
        for name in names
    ],
)
def test_nothing_spills_and_a_block_fits(name):
    """Every role fits its registers, every block its shared memory, and the assembler serialises no product."""
    pytest.importorskip("cutlass")
    cubin = cubin_of(name)

    assert (cubin.spill_bytes, cubin.local_bytes) == (0, 0)
    assert ".local" not in cubin.ptx
    assert cubin.shared_bytes <= SHARED_MEMORY_LIMIT
    assert "serialized" not in cubin.log
    assert "setmaxnreg' ignored" not in cubin.log
