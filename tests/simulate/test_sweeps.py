"""Contract: over whole ranges of inputs an H200, the specification and the simulator give the same bits.

The hardware's results are in tests/golden/h200_probes.npz as one SHA-256 for each segment of a sweep, written by
tests/recordings/record_probes.py.
"""

import numpy as np
import pytest

from tests.simulate.probes.catalog import RECORDING, ptx_digest
from tests.simulate.probes.sweeps import EXP2_EMULATION, LG2_ALL_POSITIVE, SWEEPS, digest
from tests.simulate.test_probes import run_in_simulator

BELOW_ONE, FROM_ONE = 126, 127  # exponent fields of [0.5, 1) and [1, 2)


def recorded(sweep):
    """Digest of each segment's results."""
    with np.load(RECORDING) as data:
        assert ptx_digest(sweep) == str(data[f"{sweep.name}.ptx"]), "run tests/recordings/record_probes.py on an H200"
        return data[f"{sweep.name}.sha256"].tolist()


def specified(sweep, segments):
    """Digests of what the formulas give."""
    return [digest(sweep.expected(segment.patterns())) for segment in segments]


def simulated(sweep, segments):
    """Digests of what the kernel writes in the simulator."""
    probes = [sweep.probe(segment) for segment in segments]
    return [digest(run_in_simulator(probe, probe.input, "eager")) for probe in probes]


def test_emulated_power_of_two_on_a_million_inputs():
    """The host oracle of `exp2_emulated_pair` gives the bits of the H200 for each degree: the same operations, one
    element at a time, on 1,179,648 inputs.
    """
    segments = EXP2_EMULATION.segments

    assert sum(segment.count for segment in segments) >= 1_000_000
    assert recorded(EXP2_EMULATION) == specified(EXP2_EMULATION, segments)


@pytest.mark.parametrize("name", ["exp2_emulation", "mufu_all_fields"])
def test_specification_and_simulator_agree_with_the_hardware(name):
    """Formulas: every segment; the simulator: every segment of a prime stride (all exponents are still met)."""
    sweep = SWEEPS[name]
    expected = recorded(sweep)

    assert expected == specified(sweep, sweep.segments)
    assert expected[::3] == simulated(sweep, sweep.segments[::3])


@pytest.mark.parametrize("field", [BELOW_ONE, FROM_ONE])
def test_logarithm_of_every_number_of_a_binade(field):
    """All 2^23 results on either side of 1, where the sum of exponent and fraction cancels or is exact."""
    segment = LG2_ALL_POSITIVE.segments[field]

    assert [recorded(LG2_ALL_POSITIVE)[field]] == specified(LG2_ALL_POSITIVE, [segment])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_logarithm_of_every_positive_number():
    """All 2^31 of them, subnormals, infinity and NaN included."""
    assert recorded(LG2_ALL_POSITIVE) == specified(LG2_ALL_POSITIVE, LG2_ALL_POSITIVE.segments)


@pytest.mark.slow
def test_simulator_agrees_with_the_hardware_on_every_segment():
    """The kernels in the simulator, every segment."""
    for sweep in (EXP2_EMULATION, SWEEPS["mufu_all_fields"]):
        assert recorded(sweep) == simulated(sweep, sweep.segments)
