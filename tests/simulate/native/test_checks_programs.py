"""Contract of the native hazard checks: told the same as the Python checks, they find the same in the same words.

Every small program of the tests of the checks runs once more here, with a record of what the machine tells the checks;
the record is replayed into the C code. Errors and notes are compared as texts, in their order, and with them who wrote
which word of global memory.
"""

import pytest

from fa4build.simulate import launch
from tests.simulate import test_hazards, test_tcgen05, test_tensor_rules, test_wgmma
from tests.simulate.native.checks_recorder import RecordingObserver, compare


@pytest.fixture(autouse=True)
def _both_twins(monkeypatch):
    made = []
    monkeypatch.setattr(RecordingObserver, "made", made)
    monkeypatch.setattr(launch, "Observer", RecordingObserver)
    yield
    for recording in made:
        compare(recording)


def _tests_of(module) -> dict:
    """The tests of a module, under names of their own here."""
    prefix = module.__name__.rpartition(".")[2]
    return {f"{prefix}__{n[5:]}": f for n, f in vars(module).items() if n.startswith("test_") and callable(f)}


for _module in (test_hazards, test_tensor_rules, test_wgmma, test_tcgen05):
    globals().update(_tests_of(_module))
