"""Contract: each probe kernel leaves the same words in its output in the simulator, by the specification's formulas
(`Probe.expected`), and on an H200.

The hardware's outputs are in tests/golden/h200_probes.npz, written by tests/recordings/record_probes.py; a probe that
has not been recorded, or whose PTX has changed since, is skipped with a note.
"""

import dataclasses
import struct

import numpy as np
import pytest

from fa4build.simulate.hardware.global_memory import GlobalMemory
from fa4build.simulate.launch import SimLaunch, parameter_block, run_launch
from fa4build.simulate.ptx.parser import parse_module
from fa4build.simulate.units.float_formats import canonical_nan
from tests.simulate.probes.catalog import PROBES, RECORDING, ptx_digest

EACH_PROBE = pytest.mark.parametrize("name", sorted(PROBES))


def run_in_simulator(probe, words, schedule):
    """Output words of the probe's kernel for the given input words."""
    memory, output = GlobalMemory(), probe.output.copy()
    addresses = {
        "input": memory.add("input", words.copy(), read_only=True),
        "output": memory.add("output", output),
    }
    maps = [dataclasses.replace(m.tmap, address=addresses[m.buffer] + m.tmap.address) for m in probe.maps]
    pointers = [struct.pack("<Q", addresses[name]) for name in ("input", "output")]
    launch = SimLaunch(
        kernel=probe.name,
        grid=(probe.ctas, 1, 1),
        cluster=(probe.ctas, 1, 1),
        block=(probe.threads, 1, 1),
        smem=probe.shared_bytes,
        parameters=parameter_block(parse_module(probe.ptx).entries[probe.name], [*pointers, *maps]),
    )
    run_launch(probe.ptx, launch, memory, schedule=schedule)
    return output


def differing(name, expected, found):
    """Indices and words that differ. The simulator's plain f32 arithmetic keeps NaN payloads, the hardware does not."""
    if name in ("f32_arithmetic", "contraction"):
        expected, found = canonical_nan(expected), canonical_nan(found)
    places = np.flatnonzero(expected != found)
    return [(int(i), f"{expected[i]:08x}", f"{found[i]:08x}") for i in places]


def recorded(name):
    """(input, output) words of an H200."""
    if not RECORDING.exists():
        pytest.skip("no recording; run tests/recordings/record_probes.py on an H200")
    with np.load(RECORDING) as data:
        if f"{name}.ptx" not in data or str(data[f"{name}.ptx"]) != ptx_digest(PROBES[name]):
            pytest.skip(f"{name} has not been recorded since its PTX changed; run tests/recordings/record_probes.py")
        return data[f"{name}.input"], data[f"{name}.output"]


# The random schedule lets a non-blocking mbarrier test miss now and then; that probe counts on exact answers.
RUNS = [(n, s) for n in sorted(PROBES) for s in ("eager", "late", "random") if (n, s) != ("mbarrier_phases", "random")]


@pytest.mark.parametrize(("name", "schedule"), RUNS)
def test_simulator_and_specification_agree(name, schedule):
    """The simulator's output is what the formulas of the specification give, whatever the asynchronous timing."""
    probe = PROBES[name]

    assert [] == differing(name, probe.expected(probe.input), run_in_simulator(probe, probe.input, schedule))


@EACH_PROBE
def test_every_probe_writes_its_output(name):
    """A probe whose expected output is its initial content could not fail."""
    probe = PROBES[name]

    assert np.count_nonzero(probe.expected(probe.input) != probe.output) > 0


@EACH_PROBE
def test_specification_agrees_with_the_hardware(name):
    """The formulas give the H200's words, bit for bit."""
    words, output = recorded(name)

    assert [] == np.flatnonzero(PROBES[name].expected(words) != output).tolist()


@EACH_PROBE
def test_simulator_agrees_with_the_hardware(name):
    """The simulator gives the H200's words."""
    words, output = recorded(name)

    assert [] == differing(name, output, run_in_simulator(PROBES[name], words, "eager"))
