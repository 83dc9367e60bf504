"""Contract of the native hazard checks against the Python ones: equal on any stream of events.

The streams are random (checks_machine): gangs of one warp and of many, partial masks, clusters of one CTA and of two,
every hook of the observer. Every rule finds something in them.
"""

import collections

import pytest

from fa4build.simulate.native.check_texts import KINDS
from tests.simulate.native import checks_library, checks_machine
from tests.simulate.native.checks_recorder import RecordingObserver, compare

BEYOND_PYTHON = {"TENSOR_LANES", "TENSOR_ORDER", "LANE_RACE", "BARRIER_EARLY", "OUT_OF_ROOM"}
"""Of rules that only the C checks have; without them by default."""
OF_THE_MACHINE = {
    "UNDEFINED_REGISTER",
    "WGMMA_NO_FENCE",
    "WGMMA_WRITTEN",
    "NOTE_NAMED_TWICE",
    "NOTE_WGMMA_PART",
    *("ORDER_READ", "ORDER_WRITE", "ORDER_OVERWRITE", "ORDER_PROXY", "ORDER_SUMS", "PARENT_EARLY", "PARENT_NEVER"),
    *("LEFT_TOUCHED", "LEFT_LATE"),
}


def _recording(seed: int, events: int):
    observer = RecordingObserver(checks_machine.program(), ("R5-exit",) if seed % 3 == 0 else ())
    checks_machine.Machine(seed, observer).run(events)
    return observer.recording


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_random_events_give_the_same_findings_in_the_same_order(first):
    """Errors, notes, and who wrote which word of global memory."""
    for seed in range(first, first + 20):
        compare(_recording(seed, 40 if seed % 2 else 300))


def test_every_rule_finds_something_in_the_random_events(monkeypatch):
    """The comparison is not of nothing with nothing: all kinds but those that the machine itself reports occur."""
    seen: collections.Counter = collections.Counter()
    original = checks_library.Launch.records

    def counted(self):
        seen.update(KINDS[kind] for kind in original(self)[0]["kind"])
        return original(self)

    monkeypatch.setattr(checks_library.Launch, "records", counted)
    for seed in range(200, 240):
        _recording(seed, 60).native_findings()
    assert set(KINDS) - OF_THE_MACHINE - BEYOND_PYTHON - set(seen) == set()
