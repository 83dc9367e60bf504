"""Contract of a campaign: a mutant is killed by the first finding of a case that reaches it, or it has to be explained.

A mutant that dies with the simulator, or that the simulator does not read, is not killed but a fault of the simulator.
The kernel is our forward of head dim 64 for sm90a as the compiler made it once.
"""

import json
import lzma

import pytest

from fa4build.errors import SimulationError
from fa4build.verify.mutation import campaign
from fa4build.verify.mutation.campaign import CRASHED, KILLED, SURVIVED, UNREACHED, Outcome, kind_of, run_campaign
from fa4build.verify.mutation.mutants import NOTHING, mutants_of
from fa4build.verify.mutation.survivors import REASONS, reasons_for
from fa4build.verify.pool import End
from fa4build.verify.runs import Request
from tests.simulate.mutations.kernels import HERE

NAME = "fwd-sm90a-bf16-hd64-full"


@pytest.fixture(scope="module")
def request_of_kernel() -> Request:
    """The kept kernel, to be proven."""
    document = json.loads(lzma.decompress((HERE / f"{NAME}.json.xz").read_bytes()))
    plan = json.dumps(document["plan"]) if isinstance(document["plan"], dict) else document["plan"]
    return Request(
        variant_id=NAME, ptx=document["ptx"], plan=plan, registers=document["registers"], seeds=(1,), sha256=""
    )


@pytest.fixture
def few_cases(monkeypatch):
    """The three quickest cases of the kernel."""
    whole = campaign.cases_of_variant
    monkeypatch.setattr(campaign, "cases_of_variant", lambda variant: whole(variant)[:3])


def test_mutants_are_killed_by_the_rule_that_they_break_or_have_a_reason(request_of_kernel, few_cases):
    """Three that are faults, and one that the assembler makes good."""
    wanted = {
        ("fence.proxy.async.shared::cta", "removed"): (KILLED, "R4"),
        ("bar.sync", "removed"): (KILLED, None),
        ("setmaxnreg.dec.sync.aligned.u32", "removed"): (KILLED, "deadlock"),
        ("setmaxnreg.inc.sync.aligned.u32", "removed"): (SURVIVED, "registers are the assembler's"),
    }
    first = next(m.number for m in mutants_of(request_of_kernel.ptx) if m.opcode == "bar.sync")

    def chosen(mutant):
        return (mutant.opcode, mutant.change) in wanted and (mutant.opcode != "bar.sync" or mutant.number == first)

    found = run_campaign(request_of_kernel, jobs=2, only=chosen)

    assert {(o.opcode, o.change) for o in found.outcomes} == set(wanted)
    for outcome in found.outcomes:
        status, by = wanted[outcome.opcode, outcome.change]
        assert (outcome.status, outcome.is_explained) == (status, True)
        assert by in (None, outcome.by)
    assert found.document()["counts"] == {KILLED: 3, SURVIVED: 1, UNREACHED: 0, CRASHED: 0}


def test_a_mutant_that_no_case_reaches_is_told_and_not_run(request_of_kernel, few_cases, monkeypatch):
    """It says nothing about the checks, but that a case is missing. Nothing is executed here."""
    monkeypatch.setattr(campaign._Judge, "proven", lambda *_: ({"warp_instructions": 0}, ()))
    monkeypatch.setattr(campaign, "_sites", lambda ptx: [0] * len(mutants_of(ptx)))

    (outcome,) = run_campaign(request_of_kernel, jobs=1, only=lambda m: m.opcode == "wgmma.fence.sync.aligned" and
                              m.line == 484).outcomes  # fmt: skip

    assert (outcome.status, outcome.is_explained) == (UNREACHED, False)


def test_a_kernel_that_fails_by_itself_is_no_ground_for_a_campaign(request_of_kernel, few_cases):
    """Every mutant would be killed by the kernel's own fault."""
    broken = Request(
        variant_id=NAME,
        ptx=request_of_kernel.ptx.replace("fence.proxy.async.shared::cta;", NOTHING),
        plan=request_of_kernel.plan,
        registers=request_of_kernel.registers,
        seeds=(1,),
        sha256="",
    )

    with pytest.raises(SimulationError, match=rf"(?s){NAME}: the kernel itself fails \S+: .*R4"):
        run_campaign(broken, jobs=1)


def test_a_mutant_without_an_end_is_killed_and_one_that_kills_the_simulator_is_not():
    """The first is a deadlock or a livelock that took too long; the second a fault of the simulator."""
    mutant = mutants_of("bar.sync 0;")[0]

    def ended(text: str) -> Outcome:
        return campaign._of_end(mutant, End(name="0", result=None, error=SimulationError(f"0: {text}"), seconds=1.0))

    assert ended("not finished after 300 s. Give it more with --timeout.").status == KILLED
    assert ended("its process was killed by signal 11 in odd, the eager schedule.").status == CRASHED
    assert not ended("its process was killed by signal 11 in odd, the eager schedule.").is_explained


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("k: 2 hazards:\n  R7w CTA (0, 0, 0) ..", "R7w"),
        ("k: 1 hazards:\n  R9-register line 3", "R9-register"),
        ("k: deadlock: no warp can go on\n  hazards found before that:\n R1 ..", "deadlock"),
        ("out is off by 0.3 at (batch, query, head, column) (0, 0, 0, 0); 0.01 is allowed", "results"),
        ("k: more than 20000000 instructions without an end: livelock?", "no end"),
        ("k: CTA (0, 0, 0), warp 0, PTX line 83: mbarrier count 0 is outside 1..2^20-1", "fault"),
    ],
)
def test_a_finding_has_a_kind(text, kind):
    """The rule, or what else a run ended with."""
    assert kind_of(text) == kind


def test_a_reason_holds_for_the_kernels_the_changes_and_the_number_that_it_names():
    """Elsewhere, or where more survive than it was argued for, it explains none."""
    increase = ("setmaxnreg.inc.sync.aligned.u32", "removed", SURVIVED)
    (name,) = reasons_for(NAME, [increase])

    assert name == "registers are the assembler's"
    assert reasons_for(NAME, [increase, increase]) == ["", ""]
    assert reasons_for(NAME, [("setmaxnreg.dec.sync.aligned.u32", "removed", SURVIVED)]) == [""]
    assert reasons_for("fwd-sm100a-bf16-hd64-full", [("wgmma.fence.sync.aligned", "removed", SURVIVED)]) == [""]
    assert reasons_for(NAME, [(*increase[:2], UNREACHED)]) == [""]


def test_reasons_have_names_of_their_own_and_say_why():
    """Records hold the name, docs/mutation.md and the table the argument."""
    assert len({reason.name for reason in REASONS}) == len(REASONS)
    assert all(reason.kernels and reason.most > 0 and len(reason.text) > 60 for reason in REASONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME])
def test_every_mutant_of_a_kernel_is_killed_or_explained(name, request_of_kernel):
    """The whole campaign of one small kernel; those of docs/mutation.md are run by hand."""
    left = [outcome for outcome in run_campaign(request_of_kernel, jobs=2).outcomes if not outcome.is_explained]

    assert left == []
