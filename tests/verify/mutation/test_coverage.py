"""Contract of line coverage: what no case ran is listed, unless it cannot run and something says so.

The engine notes the first execution of every instruction, by any lane of any warp in any launch that is watched.
"""

import numpy as np
import pytest

from fa4build.simulate.native import run as native_run
from fa4build.simulate.native.executed import executed_instructions
from fa4build.simulate.native.program import program_for
from fa4build.verify.mutation.coverage import DEAD, WAIT_LOOP, unrun_instructions
from tests.simulate import ptx_snippets


def unrun(monkeypatch, body: str, *inputs, threads: int = 32, **options) -> list[tuple[str, str]]:
    """(opcode, why) of what a run of a body leaves out."""
    monkeypatch.setattr(ptx_snippets, "run_launch", native_run.run_launch)
    with executed_instructions() as marks:
        ptx_snippets.run(body, *inputs, threads=threads, **options)
    ((key, executed),) = marks.items()
    return [(each.text.split()[0], each.why) for each in unrun_instructions(program_for(*key), executed)]


SKIP = "setp.eq.u32 %p1, {0}, 7; @%p1 bra RARE; bra END; RARE: mov.u32 %r9, 1; mov.u32 %r9, 2; END:"


def test_what_ran_is_not_listed(monkeypatch):
    """A straight body, from its first instruction to its end."""
    assert unrun(monkeypatch, "mov.u32 %r9, 1;") == []


def test_a_side_that_depends_on_data_is_open_until_some_lane_takes_it(monkeypatch):
    """Of 32 lanes one is enough."""
    common, rare = np.zeros(32, np.uint32), np.arange(32, dtype=np.uint32)

    assert unrun(monkeypatch, SKIP.format("%r1"), common) == [("mov.u32", "")] * 2
    assert unrun(monkeypatch, SKIP.format("%r1"), rare) == []


def test_an_instruction_whose_guard_holds_for_no_lane_did_not_run(monkeypatch):
    """Its line was reached, and did nothing."""
    assert unrun(monkeypatch, "setp.eq.u32 %p1, %r0, 99; @%p1 mov.u32 %r9, 1;") == [("@%p1", "")]


def test_a_side_that_the_number_of_a_thread_decides_against_is_dead(monkeypatch):
    """No warp of a block of 32 threads has a thread 40 or more; two warps have."""
    body = "setp.lt.u32 %p1, %r0, 40; @%p1 bra END; mov.u32 %r9, 1; END:"

    assert unrun(monkeypatch, body) == [("mov.u32", DEAD)]
    assert unrun(monkeypatch, body, threads=64) == []


def test_the_way_back_of_a_wait_with_a_time_limit_may_stay(monkeypatch):
    """A wait of the simulator ends when its phase is over, and never before."""
    body = (
        "mov.u32 %r9, smem; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r9], 32; bar.warp.sync -1; "
        "mbarrier.arrive.shared.b64 _, [%r9]; "
        "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r9], 0, 1000; @%p2 bra.uni DONE; bra.uni AGAIN; DONE:"
    )

    assert unrun(monkeypatch, body, smem=64) == [("bra.uni", WAIT_LOOP)]


def test_marks_of_several_launches_add_up_and_nobody_watches_afterwards(monkeypatch):
    """Two launches of one text have one row."""
    monkeypatch.setattr(ptx_snippets, "run_launch", native_run.run_launch)
    with executed_instructions() as marks:
        for value in (0, 7):
            ptx_snippets.run(SKIP.format("%r1"), np.full(32, value, np.uint32))
    with executed_instructions() as later:
        pass

    ((_, executed),) = marks.items()
    assert executed.all()
    assert later == {}


@pytest.mark.parametrize("checks", [False, True])
def test_watching_changes_no_result(monkeypatch, checks):
    """With and without the rules of the simulator."""
    monkeypatch.setattr(ptx_snippets, "run_launch", native_run.run_launch)
    body = "add.u32 %r9, %r0, 5; " + ptx_snippets.result(0, "%r9")
    plain = ptx_snippets.run(body, checks=checks)
    with executed_instructions():
        watched = ptx_snippets.run(body, checks=checks)

    assert (plain == watched).all()
