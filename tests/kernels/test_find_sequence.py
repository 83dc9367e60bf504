"""Contract of the search for a tile's sequence: every tile of every sequence is found once, in order, and nothing else.

The device code runs in the simulator; the oracle walks the sequences one by one.
"""

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fa4build.simulate import GlobalMemory, SimLaunch, run_launch

ROOT = Path(__file__).resolve().parents[2]
SYMBOL, TILE_M = "toy_find_0", 64  # of tests/kernels/find_sequence_kernel.py, which imports the compiler

pytestmark = pytest.mark.dsl


@pytest.fixture(scope="module")
def ptx(tmp_path_factory) -> str:
    """Compiled in a process of its own."""
    directory = tmp_path_factory.mktemp("find")
    command = [sys.executable, "-m", "tests.kernels.find_sequence_kernel", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True)
    return (directory / "find.ptx").read_text()


def found(ptx: str, cu: np.ndarray, used: np.ndarray, group: int, heads: int, blocks: int) -> list[tuple[int, ...]]:
    """What each block found."""
    results = np.full((blocks, 3), -7, np.int32)
    memory = GlobalMemory()
    tensors = {"cu": cu, "used": used, "found": results}
    addresses = [memory.add(name, array, read_only=name != "found") for name, array in tensors.items()]
    parameters = b"".join(
        struct.pack("<QIxxxx", address, len(array)) for address, array in zip(addresses, tensors.values(), strict=True)
    )
    launch = SimLaunch(
        kernel=SYMBOL, grid=(blocks, 1, 1), block=(32, 1, 1), parameters=parameters + struct.pack("<II", group, heads)
    )
    run_launch(ptx, launch, memory)
    return [tuple(row) for row in results.tolist()]


@pytest.mark.parametrize("batch", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("gives_used", [False, True])
def test_every_tile_is_found_once_and_surplus_blocks_find_nothing(ptx, batch, gives_used):
    """Many sequences are empty; the number of tiles is known to the oracle alone."""
    rng = np.random.default_rng(batch)
    group, heads = 5, 2
    rows = rng.integers(0, 40, batch) * (rng.random(batch) < 0.4)
    cu = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    used = (rows * rng.random(batch)).astype(np.int32) if gives_used else np.zeros(0, np.int32)
    lengths = used if gives_used else rows
    tiles = [-(-int(length) * group // TILE_M) * heads for length in lengths]
    expected = [(1, sequence, tile) for sequence, count in enumerate(tiles) for tile in range(count)]
    surplus = 3
    assert found(ptx, cu, used, group, heads, len(expected) + surplus) == expected + [(0, 0, 0)] * surplus
