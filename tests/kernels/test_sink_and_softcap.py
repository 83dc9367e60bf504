"""Contract of the soft cap and of the attention sink, which are a function of one element and of one row.

The PTX of both, run in the simulator, against float64: within the stated error, for every magnitude, and never a NaN
that no argument held.
"""

import math
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fa4build.simulate import GlobalMemory, SimLaunch, run_launch

ROOT = Path(__file__).resolve().parents[2]
THREADS, SYMBOL = 1024, "toy_row"  # of tests/kernels/sink_kernel.py, which imports the compiler
TWO_LOG2_E = 2 * math.log2(math.e)
INF = math.inf

pytestmark = pytest.mark.dsl


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """PTX by name, compiled in a process of its own."""
    directory = tmp_path_factory.mktemp("sink")
    command = [sys.executable, "-m", "tests.kernels.sink_kernel", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True)
    return {name: (directory / f"{name}.ptx").read_text() for name in ("capped", "joined")}


def simulated(ptx: str, *arguments: np.ndarray) -> np.ndarray:
    """What the device code writes for up to three arguments of up to 1024 elements: (results, elements)."""
    columns = [np.zeros(THREADS, np.float32) for _ in range(3)]
    for column, argument in zip(columns, arguments, strict=False):
        column[: argument.size] = argument
    out = np.zeros(3 * THREADS, np.float32)
    memory = GlobalMemory()
    addresses = [memory.add(f"in{i}", column, read_only=True) for i, column in enumerate(columns)]
    addresses.append(memory.add("out", out))
    sizes = (THREADS, THREADS, THREADS, 3 * THREADS)
    parameters = b"".join(struct.pack("<QIxxxx", a, n) for a, n in zip(addresses, sizes, strict=True))
    launch = SimLaunch(kernel=f"{SYMBOL}_0", grid=(1, 1, 1), block=(THREADS, 1, 1), parameters=parameters)
    run_launch(ptx, launch, memory)
    return out.reshape(3, THREADS)[:, : arguments[0].size]


@pytest.mark.parametrize("softcap", [0.5, 15.0, 50.0, 250.0])
def test_a_capped_score_is_the_tangent_within_its_error(kernels, softcap):
    """|t - tanh| <= 4e-7 from tiny scores to ones that saturate; the cap is never exceeded; NaN stays NaN."""
    magnitudes = np.geomspace(1e-6, 1e6, 500)
    scores = np.concatenate([magnitudes, -magnitudes, [0.0, INF, -INF, np.nan]]).astype(np.float32)
    scale = 128**-0.5
    factor = np.full(scores.size, TWO_LOG2_E * scale / softcap, np.float32)
    found = simulated(kernels["capped"], scores, factor)[0]
    assert np.isnan(found[-1])
    exact = np.tanh(scores[:-1].astype(np.float64) * scale / softcap)
    assert np.abs(found[:-1] - exact).max() <= 4e-7
    assert np.abs(found[:-1]).max() <= 1.0


def test_a_row_with_its_sink_is_the_softmax_with_one_more_logit(kernels):
    """Output factor and log-sum-exp for references and sinks of any size, against the definition in float64."""
    values = [-1e30, -1e4, -300.0, -1.0, 0.0, 3.0, 140.0, 1e4, 1e30, 2.9e38]
    rows = [(r, s, k) for r in values for s in (1.0, 1e-3, 2000.0) for k in values]
    reference, total, sink = (np.array(column, np.float32) for column in zip(*rows, strict=True))
    joined, new_total, factor = simulated(kernels["joined"], reference, total, sink).astype(np.float64)
    largest = np.maximum(reference.astype(np.float64), sink)
    weights = np.exp2(reference - largest), np.exp2(sink - largest)
    denominator = weights[0] * total + weights[1]
    np.testing.assert_allclose(joined + np.log2(new_total), largest + np.log2(denominator), rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(factor / new_total, weights[0] / denominator, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize(
    ("reference", "total", "sink", "expected"),
    [
        (-INF, 0.0, 2.0, (2.0, 1.0, 0.0)),  # no key: the sink alone
        (-INF, 0.0, -INF, (0.0, 0.0, 0.0)),  # nothing at all: row sum 0, which is lse -inf
        (5.0, 3.0, -INF, (5.0, 3.0, 1.0)),  # a sink that weighs nothing
        (5.0, 3.0, INF, (3.0e38, 1.0, 0.0)),  # held finite
    ],
)
def test_edges_of_the_sink(kernels, reference, total, sink, expected):
    """Values without a weight on one side or on both."""
    arguments = (np.array([x], np.float32) for x in (reference, total, sink))
    np.testing.assert_array_equal(simulated(kernels["joined"], *arguments)[:, 0], np.array(expected, np.float32))
