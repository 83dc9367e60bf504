"""Contract: the forward of two CTAs that share every product issues what it should, and what
it computes in the simulator is right when several pairs run at once, in adversarial order and with all checks on.

The acceptance cases are those of `fa4build verify --simulate`; here are the ones that concern pairs.
"""

import re

import pytest

pytestmark = pytest.mark.dsl
pytest.importorskip("cutlass")

from fa4build.cases.forward import Case  # noqa: E402
from fa4build.cases.schedules import RUNS, Run  # noqa: E402
from fa4build.matrix.tuning import tuning_for  # noqa: E402
from fa4build.matrix.variants import parse_variant  # noqa: E402
from fa4build.plan import plan_to_json  # noqa: E402
from fa4build.verify.simulated import prove_case, request_for  # noqa: E402
from tests.built import cubin_of  # noqa: E402

LENGTHS = (1, 17, 127, 128, 129, 200, 333, 512)
# 512 rows, or 256 of head_dim 256, are one work item of a pair. More rows than that, two heads on one key head, two
# sequences.
MANY_PAIRS = Case(name="many-pairs", batch=2, seqlen_q=600, seqlen_k=300, num_heads_q=2, num_heads_kv=1)
ALL_AT_ONCE = Run(schedule="random", padded=False, num_sms=8, concurrent_clusters=4, by_warp=True)


@pytest.fixture(
    scope="module",
    params=["sm100a-bf16-hd128-full-2cta", "sm103a-fp16-hd192x128-full-2cta", "sm100a-fp16-hd256-causal-2cta"],
)
def built(request):
    """(variant, tuning, cubin)."""
    variant = parse_variant(f"fwd-{request.param}")
    tuning = tuning_for(variant)
    cubin = cubin_of(variant.id)
    return variant, tuning, cubin


def prove(built, case, runs):
    """What is wrong with one case."""
    variant, _, cubin = built
    request = request_for(variant, ptx=cubin.ptx, plan=plan_to_json(cubin.plan), registers=cubin.registers, seeds=(1,))
    return prove_case(variant, request, cubin.plan, case, 1, runs)[1]


def test_every_product_is_of_the_pair(built):
    """All products have 256 rows, and every commit arrives in both CTAs: instruction descriptors hold M / 16 and N / 8
    (PTX ISA 9.7.16.4.2), of S 128 keys and of O head_dim_v columns."""
    variant, _, cubin = built
    products = re.findall(r"tcgen05\.mma\.cta_group::(\d)\.kind::f16 \[[^]]*\], \S+, \S+, (\d+)", cubin.ptx)
    assert {group for group, _ in products} == {"2"}
    shapes = {(int(word) >> 24 << 4, (int(word) >> 17 & 63) << 3) for _, word in products}
    assert shapes == {(256, 128), (256, variant.head_dim_v)}
    commits = re.findall(r"tcgen05\.commit[.:\w]*", cubin.ptx)
    assert commits
    assert all("cta_group::2" in commit and "multicast::cluster" in commit for commit in commits)


@pytest.mark.parametrize("run", [ALL_AT_ONCE, pytest.param(RUNS[1], marks=pytest.mark.slow)], ids=["at once", "late"])
def test_pairs_do_not_disturb_each_other(built, run):
    """Two pairs of CTAs in one go, rows beyond the sequence in both CTAs of the last."""
    assert prove(built, MANY_PAIRS, (run,)) == ()


@pytest.mark.slow
@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_every_length_meets_every_other(built, seqlen_q, seqlen_k):
    """Around the ends of tiles, of blocks and of a CTA's rows, under every schedule."""
    assert prove(built, Case(name="lengths", seqlen_q=seqlen_q, seqlen_k=seqlen_k), RUNS) == ()
