"""Contract of the native hazard checks on real kernels: our forwards as the compiler made them, and faults planted in
them.

One schedule of each is recorded and replayed: kernels as they are have nothing to report in either twin, and of a
broken one both report the same.
"""

import pytest

from fa4build.cases.forward import Case
from fa4build.cases.schedules import RUNS
from fa4build.simulate import launch
from tests.simulate.mutations.faults import PLANTED
from tests.simulate.mutations.faults_sm100 import PLANTED_SM100
from tests.simulate.mutations.kernels import kept
from tests.simulate.native.checks_recorder import RecordingObserver, compare

SM90, SM90_CASE = kept("fwd-sm90a-bf16-hd64-full"), Case(name="planted", seqlen_q=70, seqlen_k=300)
SM100, SM100_CASE = kept("fwd-sm100a-bf16-hd128-full"), Case(name="planted", seqlen_q=130, seqlen_k=300)


@pytest.fixture
def recordings(monkeypatch):
    made = []
    monkeypatch.setattr(RecordingObserver, "made", made)
    monkeypatch.setattr(launch, "Observer", RecordingObserver)
    return made


def _run(kernel, ptx: str, case: Case, run) -> None:
    kernel.report(ptx, case, "python", (run,))


@pytest.mark.parametrize(("kernel", "case"), [(SM90, SM90_CASE), (SM100, SM100_CASE)], ids=["sm90a", "sm100a"])
def test_of_a_right_kernel_both_twins_say_nothing(kernel, case, recordings):
    """All three schedules: warps in gangs, late, and warp by warp with two clusters at once."""
    for run in RUNS:
        _run(kernel, kernel.ptx, case, run)
    for recording in recordings:
        compare(recording)
        assert recording.python_findings() == ([], [])
    assert sum(recording.events for recording in recordings) > 1000


@pytest.mark.parametrize(
    ("kernel", "case", "table"),
    [(SM90, SM90_CASE, PLANTED), (SM100, SM100_CASE, PLANTED_SM100)],
    ids=["sm90a", "sm100a"],
)
def test_of_a_broken_kernel_both_twins_say_the_same(kernel, case, table, recordings):
    """Every seventh fault, the first two schedules in turn: they reach the checks by different ways."""
    for number, planted in enumerate(table[::7]):
        _run(kernel, planted.edit(kernel.ptx), case, RUNS[number % 2])
    for recording in recordings:
        compare(recording)
    assert any(recording.python_findings()[0] for recording in recordings)
