"""Contract of the simulator as a judge: a fault planted in a right kernel is caught, and told as what it is.

The kernels are our forwards for sm90a and sm100a, compiled on the spot; each fault is a small edit of their PTX
(tests/simulate/mutations). They run as `fa4build verify` runs them: through their launch plans, in order, late and at
random, with every check. A kernel as it is must pass, so that a report is the fault's and not the simulator's.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from fa4build.acceptance import Case
from fa4build.axes import Variant
from fa4build.cache import Cache
from fa4build.codegen.launch_plan import LaunchPlan, plan_from_json
from fa4build.pipeline import build_matrix, find_cached
from fa4build.variants import Selection, kernel_written, parse_variant
from fa4build.verify_simulate import Request, prove_case
from tests.simulate.mutations.faults import PLANTED, Planted
from tests.simulate.mutations.faults_sm100 import PLANTED_SM100

pytestmark = pytest.mark.dsl

# 4 blocks of 128 keys, the last with 116: rings of slots are filled again, and the mask has an edge. 100 queries are
# one tile of sm90a (192 rows), 200 are both tiles of sm100a (2 x 128).
CASES = {
    "sm90a": Case(name="planted", seqlen_q=100, seqlen_k=500),
    "sm100a": Case(name="planted", seqlen_q=200, seqlen_k=500),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A compiled kernel: variant, PTX, launch plan, registers a thread."""

    variant: Variant
    ptx: str
    plan: LaunchPlan
    registers: int

    def report(self, ptx: str) -> str:
        """What a proof of the case says is wrong with this text, "" for nothing."""
        request = Request(variant_id=self.variant.id, ptx=ptx, plan="", registers=self.registers, seeds=(1,), sha256="")
        return "\n".join(prove_case(self.variant, request, self.plan, CASES[self.variant.arch], 1)[1])


def compiled(name: str, directory: Path) -> Kernel:
    """The kernel of a variant; skips the test where nobody has written it."""
    variant = parse_variant(name)
    if not kernel_written(variant):
        pytest.skip(f"no kernel is written for {name}")
    cache = Cache(directory)
    assert build_matrix(Selection(globs=(name,)), cache, 1, allow_spills=True).exit_code == 0
    ((_, entry),) = find_cached((variant,), cache)
    assert entry is not None
    return Kernel(
        variant=variant,
        ptx=cache.read(entry, "ptx").decode(),
        plan=plan_from_json(cache.read(entry, "plan").decode()),
        registers=entry.facts["registers"],
    )


@pytest.fixture(scope="module")
def sm90(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """TMA, rings, WGMMA, ping-pong."""
    return compiled("fwd-sm90a-bf16-hd64-full", tmp_path_factory.mktemp("sm90a"))


@pytest.fixture(scope="module")
def sm100(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """Tensor memory and tcgen05."""
    return compiled("fwd-sm100a-bf16-hd128-full", tmp_path_factory.mktemp("sm100a"))


def test_the_right_kernel_of_sm90a_has_nothing_to_report(sm90: Kernel):
    """The control of the experiment."""
    assert sm90.report(sm90.ptx) == ""


def test_the_right_kernel_of_sm100a_has_nothing_to_report(sm100: Kernel):
    """The control of the experiment."""
    assert sm100.report(sm100.ptx) == ""


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_fault_planted_in_the_kernel_of_sm90a_is_caught_as_what_it_is(sm90: Kernel, planted: Planted):
    """One edit, one expected diagnosis."""
    broken = planted.edit(sm90.ptx)
    assert broken != sm90.ptx

    assert re.search(planted.expected, sm90.report(broken), re.DOTALL)


@pytest.mark.parametrize("planted", PLANTED_SM100, ids=lambda planted: planted.name)
def test_a_fault_planted_in_the_kernel_of_sm100a_is_caught_as_what_it_is(sm100: Kernel, planted: Planted):
    """One edit, one expected diagnosis."""
    broken = planted.edit(sm100.ptx)
    assert broken != sm100.ptx

    assert re.search(planted.expected, sm100.report(broken), re.DOTALL)


@pytest.mark.parametrize("table", [PLANTED, PLANTED_SM100], ids=["sm90a", "sm100a"])
def test_at_least_twenty_different_faults_are_planted(table):
    """Each under a name of its own."""
    assert len({planted.name for planted in table}) == len(table) >= 20
