"""Contract of checks.h where no comparison of findings reaches: names, bounds, undefined registers."""

import random
import re
from types import SimpleNamespace

import numpy as np
import pytest

from fa4build.errors import SimulationError
from fa4build.simulate.checks import undefined
from fa4build.simulate.checks.clocks import COMPONENTS as MAX_COMPONENTS
from fa4build.simulate.checks.clocks import Clocks
from fa4build.simulate.native.check_texts import COMPONENTS, KINDS, MAX_FINDINGS, RECORD
from tests.simulate.native import checks_library as native
from tests.simulate.native import checks_machine, checks_recorder
from tests.simulate.native.checks_recorder import EVENTS, NUMBER

HEADER = (native.ROOM / "checks.h").read_text(encoding="utf-8")
REPLAY = (native.ROOM / "checks_replay.h").read_text(encoding="utf-8")


NATIVE_COMPONENTS = int(re.search(r"#define CHK_COMPONENTS (\d+)", HEADER)[1])


def _enum(text: str, name: str) -> list[str]:
    """Members of an enum of C, in order."""
    body = re.search(r"typedef enum \{([^{}]*)\} " + name + ";", re.sub(r"/\*.*?\*/", "", text, flags=re.S))
    assert body is not None
    return [member.split("=")[0].strip() for member in body[1].split(",") if member.strip()]


def test_kinds_of_findings_are_numbered_alike_on_both_sides():
    """A text is chosen by the number alone."""
    assert _enum(HEADER, "chk_kind")[:-1] == [f"CHK_{kind}" for kind in KINDS]


def test_components_are_numbered_alike_on_both_sides():
    """No finding names a lane's component. The C checks have more room, for those."""
    assert len(_enum(HEADER, "chk_component_kind")) == len(COMPONENTS) + 2
    assert f"#define CHK_MAX_FINDINGS {MAX_FINDINGS} " in HEADER
    assert NATIVE_COMPONENTS >= 2 * MAX_COMPONENTS


def test_events_are_numbered_alike_on_both_sides():
    """A recorded stream says nothing but numbers."""
    assert _enum(REPLAY, "chk_event")[:-1] == [f"CHK_EV_{event}" for event in EVENTS]


def test_every_kind_has_its_words():
    """A finding without a text would be lost."""
    observer = checks_recorder.RecordingObserver(checks_machine.program(), ())
    machine = checks_recorder.Recording(observer).machine()
    findings = checks_recorder.Findings("k", observer.program.function.instructions)
    from fa4build.simulate.native import check_texts

    assert set(check_texts._TELL) == set(KINDS)
    assert machine.warps_a_cta == 1
    check_texts.tell(findings, np.zeros(0, RECORD), machine, lost=3)
    assert findings.errors == [
        "R0 more than 8192 findings; 3 further ones were not kept. Mend the first ones and run again"
    ]


# --- bounds -----------------------------------------------------------------------------------------------------------


def _stream(*events: tuple) -> np.ndarray:
    return np.array([word for name, *words in events for word in (NUMBER[name], len(words), *words)], np.int64)


def _begin(limit: int = 4096) -> tuple:
    return ("CLUSTER_BEGIN", 0, 0, 1, 4, limit)


def test_more_components_than_there_are_is_an_error_of_its_own():
    """As in the Python checks, which raise."""
    gang = (0, 0, 1, 0, 0xFFFFFFFF)
    limit = 8 * (NATIVE_COMPONENTS + 8)
    made = [("CREATED", *gang, 8 * k, 0, k) for k in range(NATIVE_COMPONENTS)]
    passed = [("PASSED", *gang, k, 1, 1, 0, 0) for k in range(NATIVE_COMPONENTS)]
    with native.Launch() as launch:
        status, done = launch.replay(_stream(_begin(limit), *made, *passed))
    assert status == native.TOO_MANY_COMPONENTS
    assert done.events == 1 + NATIVE_COMPONENTS + NATIVE_COMPONENTS - 4 + 1

    clocks = Clocks(4)
    for k in range(MAX_COMPONENTS - 4):
        clocks.component(("mbarrier", 0, k), "m")
    with pytest.raises(SimulationError, match="more than 512 clock components"):
        clocks.component(("mbarrier", 1, 0), "m")


def test_memory_is_bounded_and_its_end_is_an_error_of_its_own():
    """Every word of global memory with a release on it keeps a clock."""
    gang = (0, 0, 1, 0, 1)
    events = [("ATOMIC", *gang, 2, 2, 0, 1, 4 * k) for k in range(20_000)]
    with native.Launch(max_bytes=8 << 20) as launch:
        status, done = launch.replay(_stream(_begin(), *events))
    assert status == native.NO_MEMORY
    assert 2000 < done.events < 20_000


def test_findings_are_bounded_and_the_rest_is_counted():
    """A finding for each place; places without end."""
    gang = (0, 0, 1, 0, 1)
    events = [("SHARED", *gang, 4, k, 0, 1, 1024) for k in range(MAX_FINDINGS + 100)]
    with native.Launch() as launch:
        status, _ = launch.replay(_stream(_begin(), *events))
        records, lost = launch.records()
    assert (status, len(records), lost) == (native.OK, MAX_FINDINGS, 100)


@pytest.mark.parametrize(
    "event",
    [
        ("SHARED", 0, 1, 1, 0, 1, 4, 0, 0, 1, 1024),  # no such CTA
        ("SHARED", 0, 0, 1, 4, 1, 4, 0, 0, 1, 1024),  # no such warp
        ("SHARED", 0, 0, 2, 1, 0, 1, 1, 4, 0, 0, 2, 1024, 1028),  # warps out of order
        ("SHARED", 1, 0, 1, 0, 1, 4, 0, 0, 1, 1024),  # no such cluster
        ("TMEM", 0, 0, 1, 0, 1, 0, 510, 4, 0, 0),  # columns beyond the last
        ("ARRIVE", 0, 0, 1, 0, 1, 0, 0, 1, 1, 2, 0, 0),  # no such barrier
        ("ISSUE", 0, 0, 1, 0, 1, 0, 0, 1, -1, 0, 0, 0, 1, 0, 0, 250, 0, 0, 0, 0, 100),  # granules beyond the last
        ("ISSUE", 0, 0, 1, 0, 1, 0, 0, 5, -1, 0, 0, 0, 0),  # no such channel
    ],
)
def test_what_is_outside_the_machine_is_refused(event):
    """And the stream goes on."""
    with native.Launch() as launch:
        status, done = launch.replay(_stream(_begin(), event, ("WARP_BARRIER", 0, 0, 1, 0, 1)))
    assert (status, done.events, done.refused) == (native.OK, 3, 1)


def test_an_access_out_of_bounds_is_left_to_the_machine():
    """One lane outside, and nothing is recorded of the others."""
    gang = (0, 0, 1, 0, 3)
    events = (("SHARED", *gang, 4, 0, 1, 2, 1024, 1 << 20), ("SHARED", 0, 0, 1, 0, 1, 4, 1, 0, 1, 1024))
    with native.Launch() as launch:
        assert launch.replay(_stream(_begin(), *events))[0] == native.OK
        records, _ = launch.records()
    assert [KINDS[r["kind"]] for r in records] == ["SHARED_UNWRITTEN"]


@pytest.mark.parametrize("size", [32, 33])
def test_accesses_wider_than_a_granule_are_looked_at_up_to_32_bytes(size):
    """A lane of 32 bytes stands for its first granule, as in the Python checks; nothing is wider."""
    events = [("SHARED", 0, 0, 1, 0, 1, size, site, 1, 1, 1024) for site in range(2)]
    with native.Launch() as launch:
        status, done = launch.replay(_stream(_begin(), *events))
    assert (status, done.refused) == (native.OK, 0 if size == 32 else 2)


# --- undefined registers ----------------------------------------------------------------------------------------------


def _random_code(seed: int) -> SimpleNamespace:
    """Basic blocks in a random graph, instructions that read and write a few registers."""
    draw = random.Random(seed)
    registers, blocks, instructions = draw.choice([3, 40, 70]), [], []
    for _ in range(draw.randint(1, 9)):
        start = len(instructions)
        for _ in range(draw.randrange(5)):
            few = lambda: [draw.randrange(registers) for _ in range(draw.randrange(3))]  # noqa: E731
            guard = SimpleNamespace(register=draw.randrange(registers)) if draw.random() < 0.2 else None
            opcode = draw.choice(["mov.b32", "add.s32"])
            instructions.append(SimpleNamespace(opcode=opcode, guard=guard, reads=few(), writes=few()))
        blocks.append(SimpleNamespace(start=start, stop=len(instructions)))
    for block in blocks:
        block.successors = tuple({draw.randrange(len(blocks) + 1) for _ in range(draw.randrange(3))})
    function = SimpleNamespace(register_names=[f"%r{k}" for k in range(registers)], instructions=instructions)
    return SimpleNamespace(function=function, blocks=tuple(blocks))


def test_undefined_registers_of_random_code_are_those_of_the_python_checks(monkeypatch):
    """First uses, in the same order, of 400 programs."""
    for module in (undefined, checks_recorder):
        monkeypatch.setattr(module, "read_registers", lambda ins: ins.reads)
        monkeypatch.setattr(module, "written_registers", lambda ins: ins.writes)
    found = 0
    for seed in range(400):
        code = _random_code(seed)
        expected = [(use.site, use.register) for use in undefined.undefined_uses(code.function, code.blocks)]
        with native.Launch() as launch:
            assert launch.undefined(checks_recorder.code_of(code)) == native.OK
            records, _ = launch.records()
        assert [(int(r["site"]), int(r["extra"][0])) for r in records] == expected, seed
        found += len(expected)
    assert found > 400
