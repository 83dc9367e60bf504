"""Contract: what the backward kernels of sm100a and sm103a compute in the simulator is right for every acceptance case,
under eager, late and random schedules with all checks on.

Each kernel is built as the product builds it, and proven as `fa4build verify --simulate` proves it.
"""

import pytest

pytestmark = pytest.mark.dsl
pytest.importorskip("cutlass")

from fa4build.cases.backward import backward_cases_for  # noqa: E402
from fa4build.cases.forward import Case  # noqa: E402
from fa4build.cases.of_variant import cases_of, is_packed  # noqa: E402
from fa4build.cases.schedules import RUNS, Run  # noqa: E402
from fa4build.matrix.variants import parse_variant  # noqa: E402
from fa4build.plan import plan_to_json  # noqa: E402
from fa4build.verify.backward import prove_backward_case  # noqa: E402
from fa4build.verify.simulated import request_for  # noqa: E402
from fa4build.verify.varlen import prove_packed_case  # noqa: E402
from tests.built import cubin_of  # noqa: E402

# Five tiles of keys by four of queries, two query heads on one key head, and a window that some of them lie outside of.
MANY_TILES = Case(name="many-tiles", seqlen_q=500, seqlen_k=600, num_heads_q=2, num_heads_kv=1, window=(100, 20))
ALL_AT_ONCE = Run(schedule="random", padded=False, num_sms=8, concurrent_clusters=8, by_warp=True)

MAIN = (
    "bwd-sm100a-bf16-hd128-full",
    "bwd-sm103a-fp16-hd96-causal-deterministic",
    "bwd-sm100a-bf16-hd64-local-deterministic",
    "bwd-sm100a-bf16-hd128-causal-2cta",
    "bwd-sm103a-fp16-hd128-local-2cta-deterministic",
    pytest.param("bwd-sm100a-bf16-hd192x128-local-2cta-deterministic", marks=pytest.mark.slow),
)
PACKED = (
    "bwd-sm100a-bf16-hd128-causal-varlen-2cta",
    "bwd-sm103a-fp16-hd192x128-local-varlen-2cta-deterministic",
)
HELPERS = (
    "bwd_preprocess-sm90a-fp16-hd64",
    "bwd_preprocess-sm100a-bf16-hd192x128",
    "bwd_postprocess-sm90a-bf16-hd96",
    "bwd_postprocess-sm103a-fp16-hd256",
)


@pytest.fixture(scope="module", params=[*MAIN, *HELPERS])
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


def test_every_acceptance_case(built):
    """In order with all checks on; adversarial schedules are `fa4build verify`'s and the next test's."""
    variant, _ = built
    for case in backward_cases_for(variant):
        assert () == prove(built, case, RUNS[:1]), case


def test_many_tiles_in_every_schedule(built):
    """Also with all thread blocks in flight; the same bits of whatever must have them (dQ if deterministic)."""
    assert () == prove(built, MANY_TILES, (*RUNS, ALL_AT_ONCE))


@pytest.mark.slow
@pytest.mark.parametrize("built", PACKED, indirect=True)
def test_packed_sequences_by_pairs(built):
    """Whatever lies behind a sequence, for the keys of both thread blocks; with all thread blocks in flight as well."""
    variant, _ = built
    for case in cases_of(variant):
        assert () == prove(built, case, (RUNS[0], ALL_AT_ONCE)), case
