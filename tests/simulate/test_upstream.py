"""Independent kernels in the simulator: the published flash-attn-4, compiled on the spot, must compute attention.

They are known good on silicon, so one that fails points at the simulator. Parameters come from launch plans extracted
from their host code. Errors are those of bf16 outputs near 1 (half an ulp: 0.004) and of the kernels' bf16 P and dS.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn-4 is not installed"),
]

BASE = {"seqlen_q": 200, "seqlen_k": 333, "heads_q": 1, "heads_kv": 1, "head_dim": 128, "causal": True}
FORWARD = {
    "hd128-causal": {},
    "hd128-full": {"causal": False},
    "hd128-full-2cta": {"causal": False, "seqlen_q": 600},
    "hd64-causal": {"head_dim": 64},
    "hd64-full": {"head_dim": 64, "causal": False},
    "hd192-128": {"head_dim": 192, "head_dim_v": 128},
    "hd256": {"head_dim": 256},
    "gqa": {"heads_q": 4},
    "window": {"causal": False, "window": 64},
    "fp8": {"fp8": True},
    "fp8-hd64": {"fp8": True, "head_dim": 64},
    "varlen": {"varlen": [100, 257, 40]},
    "cluster-launch-control": {"seqlen_q": 600, "seqlen_k": 600, "environment": {"FA_CLC": "1"}},
    "split-kv": {"seqlen_q": 8, "seqlen_k": 700, "num_splits": 3},
}
BACKWARD = {
    "hd128-causal-2cta": {},
    "hd128-full-2cta": {"causal": False},
    "hd128-causal-1cta": {"environment": {"FA_DISABLE_2CTA": "1"}},
    "hd64-causal": {"head_dim": 64},
    "hd64-full": {"head_dim": 64, "causal": False},
    "deterministic": {"deterministic": True},
    "gqa": {"heads_q": 4},
}
SM90_FORWARD = ("hd128-causal", "hd128-full", "hd64-causal", "hd256", "gqa", "window", "varlen")
SM90_BACKWARD = ("hd128-causal-2cta", "hd64-causal", "deterministic", "gqa")
OUT_ERROR, FP8_OUT_ERROR, LSE_ERROR, GRADIENT_ERROR = 0.008, 0.04, 1e-4, 0.01


def _run(arch: int, case: dict, tmp_path) -> dict:
    environment = dict(
        os.environ,
        CUTE_DSL_ARCH=f"sm_{arch}a",
        FLASH_ATTENTION_ARCH=str(arch),
        FLASH_ATTENTION_NUM_SMS="148",
        CUTE_DSL_KEEP="ptx,cubin",
        CUTE_DSL_DUMP_DIR=str(tmp_path),
        **case.get("environment", {}),
    )
    command = [sys.executable, "-m", "tests.simulate.upstream_run", json.dumps(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _forward_cases() -> list:
    cases = [pytest.param(100, name, id=f"sm100a-{name}") for name in FORWARD]
    cases += [pytest.param(103, name, id=f"sm103a-{name}") for name in ("hd128-causal", "hd128-full")]
    return cases + [pytest.param(90, name, id=f"sm90a-{name}") for name in SM90_FORWARD]


@pytest.mark.parametrize(("arch", "name"), _forward_cases())
def test_forward(arch, name, tmp_path):
    """O and LSE against float64, with every check on."""
    case = {**BASE, **FORWARD[name], "op": "fwd", "checks": True}
    result = _run(arch, case, tmp_path)

    assert result["out"] < (FP8_OUT_ERROR if case.get("fp8") else OUT_ERROR)
    assert result["lse"] < LSE_ERROR
    if "2cta" in name:
        assert result["clusters"] == [2]


def _backward_cases() -> list:
    cases = [pytest.param(100, name, id=f"sm100a-{name}") for name in BACKWARD]
    return cases + [pytest.param(90, name, id=f"sm90a-{name}") for name in SM90_BACKWARD]


@pytest.mark.parametrize(("arch", "name"), _backward_cases())
def test_backward(arch, name, tmp_path):
    """dQ, dK and dV of the whole chain (preprocess, main, postprocess) against float64, with every check on."""
    result = _run(arch, {**BASE, **BACKWARD[name], "op": "bwd", "checks": True}, tmp_path)

    assert max(result["dq"], result["dk"], result["dv"]) < GRADIENT_ERROR


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_results_do_not_depend_on_the_schedule(schedule, tmp_path):
    """Copies and products as late as possible, or at random times: the same errors to the last digit."""
    case = {**BASE, "op": "fwd", "seqlen_k": 500}
    first = _run(100, case, tmp_path)
    other = _run(100, {**case, "schedule": schedule}, tmp_path)

    assert (first["out"], first["lse"]) == (other["out"], other["lse"])
