"""Contract: the timing tables give the published clocks, and the bounds of a tile follow from them.

The anchors are the figures of the specification for a 128 x 128 block with head_dim 128 in bf16.
"""

import pytest

from fa4build.errors import SimulationError
from fa4build.timing import rates as timing


def test_anchors_of_a_128_tile_on_b200():
    """QK: 8 instructions of 64.6 clocks = 517; PV: 8 of 64.5 = 516; exponentials: 16384 / 16 = 1024 clocks."""
    bounds = timing.forward_tile_bounds("sm100a", 128, 128, 128, 128)

    assert (516.8, 516.0, 1024.0) == pytest.approx((bounds["qk"], bounds["pv"], bounds["mufu"]))


def test_blackwell_ultra_halves_the_exponentials():
    """32 results a clock instead of 16: 512 clocks; the tensor core stays."""
    b200, b300 = (timing.forward_tile_bounds(arch, 128, 128, 128, 128) for arch in ("sm100a", "sm103a"))

    assert (b200["mufu"] / 2, b200["qk"]) == (b300["mufu"], b300["qk"])


def test_hopper_runs_m64n128k16_in_64_clocks():
    """A 128 x 128 block with head_dim 128: 2 x 8 wgmma of 64 clocks = 1024."""
    assert 64 == timing.wgmma_cycles(128)
    assert 1024 == timing.forward_tile_bounds("sm90a", 128, 128, 128, 128)["qk"]


def test_emulation_moves_exponentials_from_the_mufu_to_the_fma_pipe():
    """A quarter emulated: 768 MUFU clocks; FMA: 16384 * (1 + 6/4) / 128 = 320."""
    bounds = timing.forward_tile_bounds("sm100a", 128, 128, 128, 128, emulated_exponentials=0.25)

    assert (768.0, 320.0) == (bounds["mufu"], bounds["fma"])


@pytest.mark.parametrize(
    ("m", "n", "group", "in_tmem", "clocks"),
    [
        (128, 64, 1, False, 48.6),
        (128, 64, 1, True, 32.5),
        (128, 256, 1, False, 128.6),
        (256, 128, 2, False, 64.75),
        (128, 128, 2, False, 32.7),
        (128, 192, 1, False, 96.6),  # halfway between 64.6 and 128.6
        (128, 32, 1, False, 48.6),  # not below the clocks of N 64
        (128, 128, 2, True, 32.7),  # not measured: as from shared memory
    ],
)
def test_mma_clocks(m, n, group, in_tmem, clocks):
    """Measured values are returned as they are, others interpolated."""
    assert clocks == pytest.approx(timing.mma_cycles(m, n, group, in_tmem))


@pytest.mark.parametrize(
    ("opcode", "unit", "clocks"),
    [
        ("ex2.approx.ftz.f32", "mufu", 8),  # 32 lanes at 4 results a clock and sub-partition
        ("fma.rn.f32", "fma", 1),
        ("fma.rn.f32x2", "fma", 2),
        ("add.f32", "fma", 1),
        ("mul.rn.ftz.f32", "fma", 1),
        ("add.s32", "alu", 2),  # 64 lanes a clock and SM
        ("cvt.rn.bf16x2.f32", "alu", 2),
        ("mov.b64", "none", 0),  # register allocation
        ("fma.rn.f32.bf16", "fma", 1),
        ("ld.shared.v4.b32", "shared", 4),  # 512 bytes at 128 a clock
        ("st.shared.b16", "shared", 0.5),
        ("stmatrix.sync.aligned.m8n8.x4.shared.b16", "shared", 4),
        ("tcgen05.ld.sync.aligned.32x32b.x32.b32", "tensor_memory_ld", 32),  # 4096 bytes at 128 a clock
        ("tcgen05.st.sync.aligned.32x32b.x16.b32", "tensor_memory_st", 16),
        ("tcgen05.ld.red.sync.aligned.32x32b.x32.max.f32", "tensor_memory_ld", 32),
    ],
)
def test_instruction_costs(opcode, unit, clocks):
    """Unit and clocks of one warp instruction on B200."""
    cost = timing.instruction_cost(opcode, "sm100a")

    assert (unit, clocks) == (cost.unit, cost.clocks)


def test_ultra_halves_the_clocks_of_ex2():
    """32 results a clock: a warp takes 4."""
    assert 4 == timing.instruction_cost("ex2.approx.ftz.f32", "sm103a").clocks


def test_tma_latency_grows_with_size():
    """1000 clocks up to 8 KiB; 3590 at 16 KiB; between 32 and 64 KiB linear; beyond, the last slope."""
    assert [1000, 1000, 3590] == [timing.tma_load_latency(size) for size in (16, 8192, 16384)]
    assert (4586 + 5405) / 2 == timing.tma_load_latency(49152)
    assert 5405 + 819 == timing.tma_load_latency(98304)


def test_every_rate_names_its_source_and_assumptions_are_marked():
    """Tensor-memory bandwidth has no primary source and says so."""
    for rates in timing.RATES.values():
        named = [rates.fma, rates.mufu, rates.shared, rates.tensor, rates.tensor_memory]
        assert all(rate.source for rate in named if rate is not None)
    assert timing.RATES["sm100a"].tensor_memory.is_assumed
    assert not timing.RATES["sm100a"].mufu.is_assumed


def test_what_has_no_table_is_refused():
    """Unknown architectures, shapes that do not exist, tensor memory on Hopper."""
    with pytest.raises(SimulationError, match="sm90a, sm100a, sm103a"):
        timing.rates_of("sm120a")
    with pytest.raises(SimulationError, match="M 192"):
        timing.mma_cycles(192, 64, 1, False)
    with pytest.raises(SimulationError, match="no tensor memory"):
        timing.instruction_cost("tcgen05.ld.sync.aligned.32x32b.x32.b32", "sm90a")
