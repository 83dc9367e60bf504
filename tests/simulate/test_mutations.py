"""Contract of the simulator as a judge: a fault planted in a right kernel is caught, and told as what it is.

The kernels are our forwards for sm90a and sm100a as the compiler made them once; each fault is a small edit of their
PTX (tests/simulate/mutations). They run as `fa4build verify` runs them: through their launch plans, in order, late and
at random, with every check. A kernel as it is must pass, so that a report is the fault's and not the simulator's.
"""

import re

import pytest

from fa4build.cases.forward import Case
from tests.simulate.mutations.faults import PLANTED, Planted
from tests.simulate.mutations.faults_sm100 import PLANTED_SM100
from tests.simulate.mutations.kernels import kept

# 756 keys are 6 blocks of 128, the last with 116: three slots are filled twice, and the mask has an edge.
# 100 queries are one tile of sm90a (192 rows); 200 are both tiles of sm100a (2 x 128).
SM90, SM90_CASE = kept("fwd-sm90a-bf16-hd64-full"), Case(name="planted", seqlen_q=100, seqlen_k=756)
SM100, SM100_CASE = kept("fwd-sm100a-bf16-hd128-full"), Case(name="planted", seqlen_q=200, seqlen_k=500)


@pytest.mark.parametrize(("kernel", "case"), [(SM90, SM90_CASE), (SM100, SM100_CASE)], ids=["sm90a", "sm100a"])
def test_the_right_kernel_has_nothing_to_report(kernel, case):
    """The control of the experiment."""
    assert kernel.report(kernel.ptx, case) == ""


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_fault_planted_in_the_kernel_of_sm90a_is_caught_as_what_it_is(planted: Planted):
    """One edit, one expected diagnosis."""
    broken = planted.edit(SM90.ptx)
    assert broken != SM90.ptx

    assert re.search(planted.expected, SM90.report(broken, SM90_CASE), re.DOTALL)


@pytest.mark.parametrize("planted", PLANTED_SM100, ids=lambda planted: planted.name)
def test_a_fault_planted_in_the_kernel_of_sm100a_is_caught_as_what_it_is(planted: Planted):
    """One edit, one expected diagnosis."""
    broken = planted.edit(SM100.ptx)
    assert broken != SM100.ptx

    assert re.search(planted.expected, SM100.report(broken, SM100_CASE), re.DOTALL)


@pytest.mark.parametrize("table", [PLANTED, PLANTED_SM100], ids=["sm90a", "sm100a"])
def test_at_least_twenty_different_faults_are_planted(table):
    """Each under a name of its own."""
    assert len({planted.name for planted in table}) == len(table) >= 20
