"""Contract: the backward of head_dim 256 on sm100a and sm103a, one kernel for each gradient: what is in tensor memory
at one time fits, and what the three compute in the simulator is right, with all checks on, and has the
same bits in every schedule, dQ too.

Each kernel is built as the product builds it, and proven as `fa4build verify --simulate` proves it.
"""

import json

import pytest

pytestmark = pytest.mark.dsl
pytest.importorskip("cutlass")

from fa4build.cases.backward import backward_cases_for  # noqa: E402
from fa4build.cases.forward import Case  # noqa: E402
from fa4build.cases.of_variant import cases_of, is_packed  # noqa: E402
from fa4build.cases.schedules import RUNS, Run  # noqa: E402
from fa4build.matrix.tuning import tuning_for  # noqa: E402
from fa4build.matrix.variants import parse_variant  # noqa: E402
from fa4build.plan import plan_to_json  # noqa: E402
from fa4build.verify.backward import prove_backward_case  # noqa: E402
from fa4build.verify.simulated import request_for  # noqa: E402
from fa4build.verify.varlen import prove_packed_case  # noqa: E402
from kernels_src.backward.sm100_2cta_hd256 import columns_of  # noqa: E402
from tests.built import cubin_of  # noqa: E402

REGISTERS = 65536  # of a multiprocessor
# Three pairs of tiles of keys by four of queries, two query heads on one key head, a window that some lie outside of.
MANY_TILES = Case(name="many-tiles", seqlen_q=500, seqlen_k=600, num_heads_q=2, num_heads_kv=1, window=(100, 20))
ALL_AT_ONCE = Run(schedule="random", padded=False, num_sms=8, concurrent_clusters=8, by_warp=True)

VARIANT = "bwd-sm100a-bf16-hd256-causal-2cta-deterministic"
OTHERS = (
    "bwd-sm103a-fp16-hd256-local-2cta",
    "bwd-sm100a-bf16-hd256-full-2cta-softcap",
    "bwd-sm103a-bf16-hd256-local-varlen-2cta-deterministic",
)


@pytest.fixture(scope="module", params=[VARIANT])
def built(request):
    """(variant, cubin)."""
    variant = parse_variant(request.param)
    return variant, cubin_of(variant.id)


def prove(built, case, runs):
    """What is wrong with one case."""
    variant, cubin = built
    request = request_for(variant, ptx=cubin.ptx, plan=plan_to_json(cubin.plan), registers=cubin.registers, seeds=(1,))
    prove_case = prove_packed_case if is_packed(variant) else prove_backward_case
    return prove_case(variant, request, cubin.plan, case, 1, runs)[1]


@pytest.mark.parametrize(
    ("score_tiles", "has_dscores", "expected"),
    [
        (2, False, (0, 256, 256, 512)),  # dV: two tiles of 128 columns, and 256
        (1, True, (0, 128, 256, 512)),  # dK and dQ: scores, dP, and 256
    ],
)
def test_tensor_memory_is_full(score_tiles, has_dscores, expected):
    """All 512 columns, and none twice."""
    assert expected == columns_of(score_tiles, has_dscores, 256)


def test_what_does_not_fit_is_refused():
    """Three tiles: 3 * 128 + 256 = 640."""
    with pytest.raises(ValueError, match="need 640 tensor-memory columns"):
        columns_of(2, True, 256)


def test_registers_of_all_roles_fit():
    """128 * (2 * 216 + 72) = 64512; a role more than a warpgroup is none."""
    tuning = tuning_for(parse_variant(VARIANT))

    assert (64512, 0) == (tuning.registers, tuning.correction_registers)
    assert tuning.registers <= REGISTERS


def test_one_launch_a_gradient(built):
    """In a fixed order, each with pairs of thread blocks of 12 warps."""
    launches = json.loads(plan_to_json(built[1].plan))["launches"]

    assert [([384, 1, 1], [2, 1, 1])] * 3 == [(launch["block"], launch["cluster"]) for launch in launches]


@pytest.mark.parametrize("name", ["odd", pytest.param("batch-and-groups", marks=pytest.mark.slow)])
def test_small_cases_in_every_schedule(built, name):
    """A deterministic variant has the same bits in all of them; so have the others, whose code is equal."""
    case = next(case for case in backward_cases_for(built[0]) if case.name == name)

    assert () == prove(built, case, (*RUNS, ALL_AT_ONCE))


@pytest.mark.slow
@pytest.mark.parametrize("built", [VARIANT, *OTHERS], indirect=True)
def test_every_acceptance_case(built):
    """In order with all checks on; adversarial schedules are `fa4build verify`'s and the next test's."""
    variant, cubin = built
    assert (0, 0) == (cubin.spill_bytes, cubin.local_bytes)
    for case in cases_of(variant) if is_packed(variant) else backward_cases_for(variant):
        assert () == prove(built, case, RUNS[:1]), case


@pytest.mark.slow
@pytest.mark.parametrize("built", ["bwd-sm100a-bf16-hd256-local-2cta-deterministic"], indirect=True)
def test_many_tiles_in_every_schedule(built):
    """Also with all thread blocks in flight; the same bits of everything."""
    assert () == prove(built, MANY_TILES, (*RUNS, ALL_AT_ONCE))
