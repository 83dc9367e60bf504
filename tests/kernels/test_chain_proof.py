"""Contract of the proof of whole gradients (fa4build/verify/chain.py): the four kernels run on each other's results,
and a fault in any of them that reaches the gradients is told.
"""

import dataclasses

import pytest

pytestmark = pytest.mark.dsl
pytest.importorskip("cutlass")

from fa4build.cases.schedules import RUNS  # noqa: E402
from fa4build.matrix.variants import parse_variant  # noqa: E402
from fa4build.plan import plan_to_json  # noqa: E402
from fa4build.verify.chain import CASES, companions_of, prove_chain_case  # noqa: E402
from fa4build.verify.runs import Link, Request  # noqa: E402
from fa4build.verify.simulated import request_for  # noqa: E402
from tests.built import cubin_of  # noqa: E402

MAIN = parse_variant("bwd-sm90a-bf16-hd64-causal")
SMALL = CASES[1]


@pytest.fixture(scope="module")
def request_of_chain() -> Request:
    """The main kernel with its companions, compiled here."""
    cubins = {}
    for variant in (MAIN, *companions_of(MAIN)):
        cubins[variant.op] = cubin_of(variant.id)
    texts = {op: {"ptx": c.ptx, "plan": plan_to_json(c.plan), "registers": c.registers} for op, c in cubins.items()}
    links = tuple(Link(op=variant.op, **texts[variant.op]) for variant in companions_of(MAIN))
    return request_for(MAIN, **texts["bwd"], seeds=(1,), chain=links)


def test_the_chain_of_right_kernels_gives_the_gradients(request_of_chain):
    """Both cases, in order and late."""
    for case in CASES:
        row, faults = prove_chain_case(MAIN, request_of_chain, case, 1, RUNS[:2])
        assert faults == ()
        assert 0 < row["ratio"] <= 1


def test_what_another_kernel_gets_wrong_shows_in_the_gradients(request_of_chain):
    """A forward whose log-sum-exp is wrong: the proof of the main kernel alone never runs it."""
    links = tuple(
        dataclasses.replace(link, ptx=link.ptx.replace("lg2.approx", "ex2.approx")) if link.op == "fwd" else link
        for link in request_of_chain.chain
    )
    faults = prove_chain_case(MAIN, dataclasses.replace(request_of_chain, chain=links), SMALL, 1, RUNS[:1])[1]

    assert any(" is off by " in fault for fault in faults)


def test_only_a_dense_backward_without_features_has_a_chain():
    """The forward has the mask and both head dimensions; the helpers have neither mask nor order of sums."""
    local = parse_variant("bwd-sm100a-fp16-hd128-local-2cta-deterministic")

    assert [v.id for v in companions_of(local)] == [
        "fwd-sm100a-fp16-hd128-local",
        "bwd_preprocess-sm100a-fp16-hd128",
        "bwd_postprocess-sm100a-fp16-hd128",
    ]
    assert companions_of(parse_variant("bwd-sm90a-bf16-hd192x128-full"))[2].id == "bwd_postprocess-sm90a-bf16-hd192"
    for name in ("fwd-sm90a-bf16-hd64-full", "bwd-sm90a-bf16-hd64-full-varlen", "bwd_preprocess-sm90a-bf16-hd64"):
        assert companions_of(parse_variant(name)) == ()
