"""Contract of the simulator as a judge between clusters, between kernels and at the exit of a CTA.

The kernels are ours as the compiler made them once: deterministic backwards, whose CTAs add to dQ in turns; a forward
with two CTAs, whose leader's commits arrive in both; the combination of split forwards, which starts while the split
forward runs. They run in the native engine with every check and many clusters in flight. A deterministic backward loses
its proof when any part of its turns is taken out or weakened, since it is the order that is checked, and not whether
one run in this order gave other bits.
"""

import re

import pytest

from fa4build.cases.forward import Case
from fa4build.cases.of_variant import cases_of_variant
from fa4build.cases.schedules import Run
from fa4build.matrix.variants import parse_variant
from fa4build.verify.simulated import Request, case_prover
from tests.simulate.mutations.faults_clusters import EXITS, KERNELS, TURNS
from tests.simulate.mutations.kernels import kept

# Four blocks of 128 keys (two pairs of CTAs) and two heads: eight CTAs that add to dQ, four to each tile.
TURNS_CASE = Case(name="turns", seqlen_q=130, seqlen_k=500, num_heads_q=2, num_heads_kv=2)
SM90, SM100, PAIR = (
    f"bwd-{name}-deterministic"
    for name in ("sm90a-bf16-hd128-full", "sm100a-bf16-hd128-full", "sm100a-bf16-hd128-full-2cta")
)
FORWARD, FORWARD_CASE = "fwd-sm100a-bf16-hd128-full-2cta", Case(name="pair", seqlen_q=300, seqlen_k=500)
COMBINE = "fwd_combine-sm90a-bf16-hd64"
ALL_AT_ONCE = tuple(
    Run(schedule=name, padded=False, num_sms=132, checks=True, concurrent_clusters=16)
    for name in ("eager", "clusters reversed", "random")
)


def report(name: str, case, edit=lambda ptx: ptx) -> str:
    """What a proof of one case says is wrong with a kept kernel whose text was edited."""
    kernel, variant = kept(name), parse_variant(name)
    ptx = edit(kernel.ptx)
    request = Request(variant_id=name, ptx=ptx, plan="", registers=kernel.registers, seeds=(1,), sha256="")
    return "\n".join(case_prover(variant)(variant, request, kernel.plan, case, 1, ALL_AT_ONCE)[1])


def judged(name: str, case, planted) -> None:
    """A fault planted in a kernel is told as what it is."""
    assert re.search(planted.expected, report(name, case, planted.edit), re.DOTALL)


@pytest.mark.parametrize(
    "name", [SM100, pytest.param(SM90, marks=pytest.mark.slow), pytest.param(PAIR, marks=pytest.mark.slow)]
)
def test_a_right_deterministic_backward_has_nothing_to_report(name):
    """The control of the experiment; also with two CTAs."""
    assert report(name, TURNS_CASE) == ""


@pytest.mark.parametrize("planted", TURNS, ids=lambda planted: planted.name)
def test_a_deterministic_backward_needs_every_part_of_its_turns(planted):
    """One part of the order taken out or weakened."""
    judged(SM100, TURNS_CASE, planted)


@pytest.mark.slow
@pytest.mark.parametrize("name", [SM90, PAIR])
@pytest.mark.parametrize("planted", TURNS, ids=lambda planted: planted.name)
def test_so_do_the_backward_of_sm90a_and_that_with_two_ctas(name, planted):
    """The same faults."""
    judged(name, TURNS_CASE, planted)


def test_a_backward_without_turns_may_add_in_any_order():
    """By name: only `deterministic` variants promise the bits of dQ. The same text without its spin passes then."""
    spin = next(planted for planted in TURNS if planted.name == "no load")
    kernel, variant = kept(SM100), parse_variant(SM100.removesuffix("-deterministic"))
    request = Request(
        variant_id=variant.id, ptx=spin.edit(kernel.ptx), plan="", registers=kernel.registers, seeds=(1,), sha256=""
    )
    assert case_prover(variant)(variant, request, kernel.plan, TURNS_CASE, 1, ALL_AT_ONCE)[1] == ()


def test_a_right_forward_with_two_ctas_has_nothing_to_report():
    """The control of the experiment."""
    assert report(FORWARD, FORWARD_CASE) == ""


@pytest.mark.parametrize("planted", EXITS, ids=lambda planted: planted.name)
def test_nothing_arrives_in_a_cta_that_has_left(planted):
    """Commits of the leader are waited for in both CTAs."""
    judged(FORWARD, FORWARD_CASE, planted)


def test_a_right_combination_has_nothing_to_report():
    """The control of the experiment."""
    assert report(COMBINE, cases_of_variant(parse_variant(COMBINE))[0]) == ""


@pytest.mark.parametrize("planted", KERNELS, ids=lambda planted: planted.name)
def test_a_dependent_launch_touches_nothing_before_the_kernel_in_front_is_over(planted):
    """Its plan launches it as a programmatic dependent."""
    judged(COMBINE, cases_of_variant(parse_variant(COMBINE))[0], planted)
