"""Contract: a fresh process that has torch, a driver and a pack needs nothing else: packs come by entry point, the
driver by its usual name, and FA4_KERNELS_TRACE=1 prints each decision once.

The driver is the stand-in under the name libcuda.so.1. torch here sees no GPU, so nothing is launched.
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests.runtime.conftest import RUNTIME
from tests.runtime.fake import write_pack

pytest.importorskip("torch")

CODE = """
import fa4_kernels
fa4_kernels.__path__.append({launcher!r})
from fa4_kernels import loader
from fa4_kernels.dispatch import Problem
problem = Problem(dtype="bf16", head_dim=128, head_dim_v=128, mask="causal")
runtime = loader.runtime()
assert loader.runtime() is runtime
print(runtime.decide(problem, 0).entry.id)
print(fa4_kernels.preload([0], "*-causal"))
"""


@pytest.fixture
def environment(tmp_path, launcher, fake_driver_path):
    """Variables of a process with the pack installed and the stand-in driver found by name."""
    site = tmp_path / "site"
    write_pack(site / "fa4_kernels_test", ["fwd-sm90a-bf16-hd128-causal"])
    info = site / "fa4_kernels_test-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fa4-kernels-test\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[fa4_kernels.packs]\nfa4-kernels-test = fa4_kernels_test\n")
    shutil.copy(fake_driver_path, tmp_path / "libcuda.so.1")
    return {"PYTHONPATH": f"{RUNTIME}:{site}", "LD_LIBRARY_PATH": str(tmp_path), "PATH": os.environ["PATH"]}


@pytest.mark.parametrize(("trace", "is_traced"), [(None, False), ("1", True)])
def test_a_fresh_process_finds_driver_and_packs(environment, launcher, trace, is_traced):
    """Standard output has the chosen kernel; standard error has the decision only when asked for."""
    from pathlib import Path

    code = CODE.format(launcher=str(Path(launcher.__file__).parent))
    variables = environment | ({} if trace is None else {"FA4_KERNELS_TRACE": trace})
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)

    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["fwd-sm90a-bf16-hd128-causal", "('fwd-sm90a-bf16-hd128-causal',)"]
    expected = "fa4_kernels: fwd, dense, bf16, head_dim 128, mask causal on Fake GPU 0"
    assert result.stderr.count(expected) == int(is_traced)


def test_a_fresh_process_records_what_it_lacks(environment, launcher, tmp_path):
    """FA4_KERNELS_RECORD names a file: the refused problem is in it once; without the variable nothing is written."""
    import json
    from pathlib import Path

    code = CODE.format(launcher=str(Path(launcher.__file__).parent)).replace('mask="causal"', 'mask="local"')
    code = code.split("print(")[0] + "print([runtime.decide(problem, 0).entry for _ in range(2)])\n"
    record = tmp_path / "misses.jsonl"
    for variables in ({}, {"FA4_KERNELS_RECORD": str(record)}):
        assert not record.exists()
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=300)
        assert result.stdout == "[None, None]\n", result.stderr

    (line,) = record.read_text().splitlines()
    assert json.loads(line)["problem"]["mask"] == "local"
