"""Contract: the forward of head_dim 256 over packed, paged and split keys on sm100a and sm103a
issues products of one CTA with two S tiles in turn, and computes attention in the simulator with every check on.

The acceptance cases are those of `fa4build verify --simulate`; here are the ones that concern its ring of K and V
tiles, its turns of S tiles, and pages of sizes that no acceptance case has.
"""

import dataclasses
import re

import pytest

pytestmark = pytest.mark.dsl
pytest.importorskip("cutlass")

from fa4build.cases.schedules import RUNS  # noqa: E402
from fa4build.cases.varlen import PackedCase  # noqa: E402
from fa4build.matrix.tuning import tuning_for  # noqa: E402
from fa4build.matrix.variants import parse_variant  # noqa: E402
from fa4build.verify.runs import Request  # noqa: E402
from fa4build.verify.varlen import prove_packed_case  # noqa: E402
from tests.built import cubin_of  # noqa: E402

# With 449 less these: 1 to 7 blocks of 64 keys, more than twice round the five slots of K and V.
KEYS = (1, 64, 128, 193)


@pytest.fixture(
    scope="module",
    params=[
        "sm100a-bf16-hd256-full-paged",
        pytest.param("sm100a-bf16-hd256-causal-varlen", marks=pytest.mark.slow),
        pytest.param("sm103a-fp16-hd256-local-paged-split", marks=pytest.mark.slow),
    ],
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
    request = Request(variant_id=variant.id, ptx=cubin.ptx, plan="", registers=cubin.registers, seeds=(1,), sha256="")
    if variant.layout == "paged":
        case = dataclasses.replace(case, used_k=case.used_k or case.seqlens_k)
    row, faults = prove_packed_case(variant, request, cubin.plan, case, 1, runs)
    return faults, row["notes"]


def test_products_are_of_one_cta_and_of_whole_head_dims(built):
    """S: 128 rows, 64 keys. O: 128 rows, 256 columns. Descriptors hold M / 16 and N / 8 (PTX ISA 9.7.16.4.2)."""
    _, _, cubin = built
    products = re.findall(r"tcgen05\.mma\.cta_group::(\d)\.kind::f16 \[[^]]*\], \S+, \S+, (\d+)", cubin.ptx)
    assert {group for group, _ in products} == {"1"}
    assert {(int(word) >> 24 << 4, (int(word) >> 17 & 63) << 3) for _, word in products} == {(128, 64), (128, 256)}


@pytest.mark.parametrize("keys", KEYS)
def test_blocks_go_round_the_ring_and_the_score_tiles_take_turns(built, keys):
    """Any number of blocks, odd and even, ending within a block or with it. 195 rows of a key head are two CTAs."""
    case = PackedCase(name="blocks", seqlens_q=(3, 65), seqlens_k=(keys, 449 - keys), num_heads_q=3, num_splits=2)
    assert prove(built, case, RUNS[1:2]) == ((), ())


@pytest.mark.parametrize("page_size", [1, 24, 48])
def test_pages_of_any_size(built, page_size):
    """Row by row, and in boxes of 16 rows; pages behind the used ones hold NaN, page numbers there are garbage."""
    if built[0].layout != "paged":
        pytest.skip("keys without pages")
    case = PackedCase(
        name="pages", seqlens_q=(1, 40), seqlens_k=(150, 90), num_heads_q=2, page_size=page_size, num_splits=2
    )
    assert prove(built, case, RUNS[1:2]) == ((), ())


def test_values_beyond_a_sequence_do_not_matter(built):
    """Used lengths that end within a block, sequences without keys and without queries; NaN lies behind all of them."""
    case = PackedCase(
        name="used",
        seqlens_q=(20, 30, 5, 7),
        seqlens_k=(150, 90, 10, 80),
        used_q=(17, 30, 0, 7),
        used_k=(129, 63, 10, 0),
        tail=3,
        num_heads_q=2,
        num_heads_kv=2,
        page_size=16,
        num_splits=2,
    )
    assert prove(built, case, RUNS[:2]) == ((), ())
