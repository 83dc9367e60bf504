"""Contract of the native engine as a judge of what lanes, scopes, state spaces and CTA pairs may do.

Faults planted in kernels as the compiler made them once (tests/simulate/mutations/faults_lanes.py, faults_scopes.py)
are caught as what they are; the kernels as they are have nothing to report. What holds only by a named assumption is
told when the assumption is not made.
"""

import functools
import re

import pytest

from fa4build.cases.forward import Case
from fa4build.cases.of_variant import cases_of_variant
from fa4build.cases.schedules import RUNS
from fa4build.matrix.variants import parse_variant
from fa4build.simulate.native.run import ASSUMPTIONS, run_launch
from fa4build.verify import engines
from fa4build.verify.backward import prove_backward_case
from fa4build.verify.runs import Request
from fa4build.verify.simulated import prove_case
from tests.simulate.mutations.faults_lanes import PLANTED_LANES
from tests.simulate.mutations.faults_scopes import BACKWARD, FORWARD
from tests.simulate.mutations.kernels import Kernel, kept

ONE_CTA, PAIR = "fwd-sm100a-bf16-hd128-full", "fwd-sm100a-bf16-hd128-full-2cta"
PAIR_BACKWARD = "bwd-sm100a-bf16-hd128-full-2cta"
# 200 queries are both tiles of the forward (2 x 128), 500 keys are 4 blocks of 128, the last with 116.
CASES = {ONE_CTA: Case(name="planted", seqlen_q=200, seqlen_k=500)}
QUICK = 2  # of a table; the others are slow tests


@functools.cache
def _kernel(name: str) -> Kernel:
    return kept(name)


def _case(name: str):
    return CASES.get(name) or next(case for case in cases_of_variant(parse_variant(name)) if case.name == "odd")


def _told(name: str, ptx: str, runs, monkeypatch, **options) -> str:
    """What a proof of the kernel's case says is wrong, "" for nothing."""
    monkeypatch.setattr(engines, "run_native", functools.partial(run_launch, **options))
    kernel, variant = _kernel(name), parse_variant(name)
    request = Request(variant_id=name, ptx=ptx, plan="", registers=kernel.registers, seeds=(1,), sha256="")
    prove = prove_case if variant.op == "fwd" else prove_backward_case
    return "\n".join(prove(variant, request, kernel.plan, _case(name), 1, runs)[1])


def _rows() -> list:
    rows = []
    for name, table in ((ONE_CTA, PLANTED_LANES), (PAIR, FORWARD), (PAIR_BACKWARD, BACKWARD)):
        for number, planted in enumerate(table):
            marks = [] if number < QUICK else [pytest.mark.slow]
            rows.append(pytest.param(name, planted, id=f"{name}: {planted.name}", marks=marks))
    return rows


@pytest.mark.parametrize("name", [ONE_CTA, PAIR, PAIR_BACKWARD])
def test_the_right_kernel_has_nothing_to_report(name, monkeypatch):
    """The control of the experiment."""
    assert _told(name, _kernel(name).ptx, RUNS[:2], monkeypatch) == ""


@pytest.mark.parametrize(("name", "planted"), _rows())
def test_a_planted_fault_is_caught_as_what_it_is(name, planted, monkeypatch):
    """One edit, one expected diagnosis, in the order in which everything happens at once."""
    broken = planted.edit(_kernel(name).ptx)
    assert broken != _kernel(name).ptx

    assert re.search(planted.expected, _told(name, broken, RUNS[:1], monkeypatch), re.DOTALL)


@pytest.mark.parametrize(
    ("name", "assumption", "expected"),
    [
        (ONE_CTA, "tcgen05-issue-order", r"R7-order .*tcgen05\.mma.*does not order the two"),
        (PAIR_BACKWARD, "mbarrier-default-scope", r"R1 .*tcgen05\.mma.*while the write by asynchronous copies"),
    ],
)
def test_what_an_assumption_covers_is_told_without_it(name, assumption, expected, monkeypatch):
    """Each is named, and can be left out (docs/what-is-proven.md)."""
    assert assumption in ASSUMPTIONS
    told = _told(name, _kernel(name).ptx, RUNS[:1], monkeypatch, without=(assumption,))

    assert re.search(expected, told, re.DOTALL)
