"""Contract: sm90a forward kernels over packed, paged and split keys are compiled to what they should be.

What they compute is tested in the simulator (`fa4build verify --simulate`) and on a GPU. Here: what the compiler made
of them, read from the PTX, and which combinations the constructor refuses.
"""

import re

import pytest

from fa4build.matrix.tuning import tuning_for
from fa4build.matrix.variants import parse_variant
from tests.built import cubin_of

pytestmark = pytest.mark.dsl


@pytest.fixture(
    scope="module",
    params=["bf16-hd64-causal-varlen-sink", "fp16-hd128-local-paged", "bf16-hd256-full-varlen-split-softcap"],
)
def built(request):
    """(variant, tuning, cubin)."""
    variant = parse_variant(f"fwd-sm90a-{request.param}")
    tuning = tuning_for(variant)
    cubin = cubin_of(variant.id)
    return variant, tuning, cubin


def test_roles_trade_registers_if_there_are_several_consumers(built):
    """One setmaxnreg each way, an increase that is one, from what the launch gave; one consumer has enough."""
    _, tuning, cubin = built
    trades = [("dec", str(tuning.producer_registers)), ("inc", str(tuning.consumer_registers))]
    expected = trades if tuning.consumer_warpgroups > 1 else []
    assert re.findall(r"setmaxnreg\.(\w+)\.sync\.aligned\.u32\s+(\d+)", cubin.ptx) == expected
    assert cubin.registers <= tuning.consumer_registers
    if trades == expected:
        assert tuning.registers <= cubin.registers * 128 * (1 + tuning.consumer_warpgroups)


def test_keys_come_by_tensor_copies_and_queries_by_rows(built):
    """K and V as boxes of a map over all rows, or over pages; Q by 16-byte copies; no tensor copy stores."""
    variant, _, cubin = built
    rank = {"varlen": 3, "paged": 4}[variant.layout]
    assert set(re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared::cta\.global", cubin.ptx)) == {str(rank)}
    assert "cp.async.cg.shared.global" in cubin.ptx
    assert "cp.async.bulk.tensor.3d.global" not in cubin.ptx
    stores = "st.global.v2.f32" if variant.split else "st.global.v4.b32"
    assert stores in cubin.ptx


def test_kernels_for_split_keys_start_before_the_one_in_front_ends(built):
    """Launched so, they read and write nothing before it has ended; other kernels are launched the plain way."""
    variant, _, cubin = built
    (launch,) = cubin.plan.launches
    wait = cubin.ptx.find("griddepcontrol.wait;")
    assert launch.pdl == (wait >= 0) == variant.split
    if variant.split:
        assert re.search(r"(ld|st|red)\.global|cp\.async", cubin.ptx).start() > wait
        assert cubin.ptx.index("griddepcontrol.launch_dependents;") > wait


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"layout": "dense"}, "layout 'dense': must be varlen or paged"),
        ({"split": True, "persistent": True}, "persistent must be False"),
        ({"tile_m": 192}, "tile_m 192: must be 128"),
    ],
)
def test_what_cannot_run_is_refused(changed, words):
    """Before anything is traced; the message has the value and what is allowed."""
    import cutlass

    from kernels_src.forward.sm90_varlen import ForwardSm90Packed

    row = {"head_dim": 128, "head_dim_v": 128, "mask": "full", "tile_m": 128, "tile_n": 128, "kv_stages": 2}
    row |= {"consumer_warpgroups": 2, "consumer_registers": 232, "producer_registers": 40, "layout": "varlen"} | changed
    with pytest.raises(ValueError, match=re.escape(words)):
        ForwardSm90Packed(symbol="refused", dtype=cutlass.BFloat16, **row)
