"""Contract of the simulator as a judge: a fault planted in a right kernel is caught, and told as what it is.

The kernel is our forward for sm90a, compiled on the spot; each fault is a small edit of its PTX (tests/simulate/
mutations/faults.py). It runs as `fa4build verify` runs it: through its launch plan, in order, late and at random, with
every check. The kernel as it is must pass, so that a report is the fault's and not the simulator's.
"""

import re

import pytest

from fa4build.acceptance import Case
from fa4build.cache import Cache
from fa4build.codegen.launch_plan import LaunchPlan, plan_from_json
from fa4build.pipeline import build_matrix, find_cached
from fa4build.variants import Selection, parse_variant
from fa4build.verify_simulate import Request, prove_case
from tests.simulate.mutations.faults import PLANTED, Planted

pytestmark = pytest.mark.dsl

VARIANT = parse_variant("fwd-sm90a-bf16-hd64-full")
# 4 blocks of 128 keys, the last with 116: both slots of a ring are filled twice, and the mask has an edge.
CASE = Case(name="planted", seqlen_q=100, seqlen_k=500)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, LaunchPlan, int]:
    """PTX, launch plan and registers of the right kernel."""
    cache = Cache(tmp_path_factory.mktemp("cache"))
    assert build_matrix(Selection(globs=(VARIANT.id,)), cache, 1).exit_code == 0
    ((_, entry),) = find_cached((VARIANT,), cache)
    assert entry is not None
    plan = plan_from_json(cache.read(entry, "plan").decode())
    return cache.read(entry, "ptx").decode(), plan, entry.facts["registers"]


def report_of(ptx: str, plan: LaunchPlan, registers: int) -> str:
    """What a proof of the case says is wrong, "" for nothing."""
    request = Request(variant_id=VARIANT.id, ptx=ptx, plan="", registers=registers, seeds=(1,), sha256="")
    return "\n".join(prove_case(VARIANT, request, plan, CASE, 1)[1])


def test_the_right_kernel_has_nothing_to_report(kernel):
    """The control of the experiment."""
    assert report_of(*kernel) == ""


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_is_caught_as_what_it_is(kernel, planted: Planted):
    """One edit, one expected diagnosis."""
    ptx, plan, registers = kernel
    broken = planted.edit(ptx)
    assert broken != ptx

    assert re.search(planted.expected, report_of(broken, plan, registers), re.DOTALL)


def test_at_least_twenty_different_faults_are_planted():
    """Each under a name of its own."""
    assert len({planted.name for planted in PLANTED}) == len(PLANTED) >= 20
