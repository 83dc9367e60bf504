"""Contract: sm100a and sm103a forward kernels over packed, paged and split keys, and dense ones with soft cap or sink,
are compiled to what they should be.

What they compute is proven in the simulator by `fa4build verify --simulate`; a small case of that is run here. Then:
what the compiler made of them, read from the PTX, and which combinations the constructor refuses.
"""

import re

import pytest

from fa4build.cases.of_variant import cases_of
from fa4build.cases.schedules import RUNS
from fa4build.matrix.tuning import tuning_for
from fa4build.matrix.variants import parse_variant
from fa4build.verify.runs import Request
from fa4build.verify.varlen import prove_packed_case
from tests.built import cubin_of

pytestmark = pytest.mark.dsl

PACKED = ["sm100a-bf16-hd64-local-paged", "sm103a-fp16-hd128-causal-varlen-sink", "sm100a-e4m3-hd64-full-paged-split"]


@pytest.fixture(scope="module", params=[*PACKED, "sm100a-bf16-hd128-causal-softcap"])
def built(request):
    """(variant, tuning, cubin)."""
    variant = parse_variant(f"fwd-{request.param}")
    tuning = tuning_for(variant)
    cubin = cubin_of(variant.id)
    return variant, tuning, cubin


def test_roles_trade_registers(built):
    """One setmaxnreg a role, with the budgets of the tuning row."""
    _, tuning, cubin = built
    budgets = {
        ("dec", str(tuning.correction_registers)),
        ("dec", str(tuning.producer_registers)),
        ("inc", str(tuning.consumer_registers)),
    }
    assert set(re.findall(r"setmaxnreg\.(\w+)\.sync\.aligned\.u32\s+(\d+)", cubin.ptx)) == budgets


def test_keys_come_by_tensor_copies_and_queries_by_rows(built):
    """Packed: K and V as boxes of a map over all rows or over pages, Q by 16-byte copies, rows stored one by one.
    Dense: everything by tensor copies of rank 4."""
    variant, _, cubin = built
    rank = {"dense": 4, "varlen": 3, "paged": 4}[variant.layout]
    is_packed = variant.layout != "dense"
    assert set(re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared::cta\.global", cubin.ptx)) == {str(rank)}
    assert ("cp.async.cg.shared.global" in cubin.ptx) == is_packed
    assert ("cp.async.bulk.tensor.4d.global" in cubin.ptx) != is_packed
    assert ("st.global.v4.b32" in cubin.ptx) == is_packed


def test_a_small_case_in_the_simulator(built):
    """Against float64, with every check on: the acceptance case with groups of five query heads."""
    variant, _, cubin = built
    request = Request(variant_id=variant.id, ptx=cubin.ptx, plan="", registers=cubin.registers, seeds=(0,), sha256="")
    case = next(case for case in cases_of(variant) if "group" in case.name)
    row, faults = prove_packed_case(variant, request, cubin.plan, case, 0, RUNS[:1])
    assert faults == ()
    assert row["notes"] == ()


def test_row_maxima_come_with_the_scores_on_sm103a(built):
    """Four loads of 32 columns that also give their maximum; the other target has no such instruction."""
    variant, _, cubin = built
    assert cubin.ptx.count("tcgen05.ld.red.sync.aligned.32x32b.x32.max.f32") == (4 if variant.arch == "sm103a" else 0)


def test_a_cap_is_taken_of_every_column(built):
    """A reciprocal for every column of a block belongs to the tangent; without a cap there are those of rows alone."""
    variant, _, cubin = built
    reciprocals = cubin.ptx.count("rcp.approx")
    assert (reciprocals >= 128) == variant.softcap  # the columns of a block


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"layout": "dense"}, "layout 'dense': must be varlen or paged"),
        ({"has_split": True, "has_sink": True}, "has_split and has_sink: a sink joins the sum once"),
        # Softmax hands over 72 columns of P, the product waits for 64: each would wait for the other.
        ({"tile_n": 96}, "tile_n 96: must be a multiple of 64"),
    ],
)
def test_what_cannot_run_is_refused(changed, words):
    """Before anything is traced; the message has the value and what is allowed."""
    import cutlass

    from kernels_src.forward.sm100_varlen import ForwardSm100Packed

    row = {"head_dim": 128, "head_dim_v": 128, "mask": "full", "kv_stages": 2, "layout": "varlen", "has_split": False}
    row |= {"softmax_registers": 184, "correction_registers": 80, "other_registers": 64}
    row |= {"exp2_frequency": 0, "exp2_first_fragment": 0} | changed
    with pytest.raises(ValueError, match=re.escape(words)):
        ForwardSm100Packed(symbol="refused", dtype=cutlass.BFloat16, **row)
