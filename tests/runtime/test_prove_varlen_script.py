"""Contract of device/prove_varlen.py: right kernels pass every check, wrong ones fail, one that raises is
a fault of its case alone, and what is not of the script is left to the other two.

On the CPU, with kernels that are loops (reference_kernels.py), and small cases.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from fa4_kernels.dispatch import Problem  # noqa: E402

from fa4build.matrix.variants import parse_variant, variant_axes  # noqa: E402
from tests.runtime.reference_kernels import ReferenceRuntime  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "device"))
import prove_forward  # noqa: E402
import prove_varlen as script  # noqa: E402
import varlen_backward_checks  # noqa: E402
import varlen_problems  # noqa: E402


def entry_of(variant_id):
    variant = parse_variant(variant_id)
    cubin = SimpleNamespace(sha256="")
    return SimpleNamespace(id=variant_id, op=variant.op, axes=variant_axes(variant), cubin=cubin, target="sm_90a")


def problem_of(entry):
    axes = entry.axes
    features = frozenset(name for name in ("split", "softcap", "sink") if axes[name])
    names = ("dtype", "head_dim", "head_dim_v", "mask", "layout", "deterministic")
    return Problem(op=entry.op, features=features, **{name: axes[name] for name in names})


def entry_for(problem):
    head_dims = f"hd{problem.head_dim}" + (f"x{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
    layout = "" if problem.layout == "dense" else f"-{problem.layout}"
    return entry_of(f"{problem.op}-sm90a-{problem.dtype}-{head_dims}{layout}")


class Runtime(ReferenceRuntime):
    """Entries stand for their problems; `spoil(name, arguments)` may change what a launch has written."""

    def __init__(self, spoil=lambda named: None):
        super().__init__()
        self._spoil = spoil

    def load(self, pack, entry, ordinal):
        launch = self.launch_for(problem_of(entry), ordinal)
        return SimpleNamespace(run=lambda *arguments: (launch.run(*arguments), self._spoil(arguments)))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(script, "DEVICE", "cpu")
    monkeypatch.setattr(varlen_backward_checks, "find", lambda runtime, problem: (None, entry_for(problem)))
    few = ("single", "empty-ones", "used-lengths", "group-of-five", "odd", "batch")
    cut = [case for case in varlen_problems.PACKED if case.name in few]
    cut.append(varlen_problems.Case("unequal", (13, 7, 20, 1), (13, 7, 30, 1)))
    cut.append(varlen_problems.Case("decode-1", (1, 1), (90, 3), heads_q=4))
    monkeypatch.setattr(varlen_problems, "PACKED", tuple(cut))
    monkeypatch.setattr(varlen_problems, "DENSE", tuple(case for case in varlen_problems.DENSE if case.name in few))
    monkeypatch.setattr(script, "COMBINE", script.COMBINE[:3])


@pytest.mark.parametrize(
    "variant_id",
    [
        "fwd-sm90a-bf16-hd64-causal-varlen",
        "fwd-sm90a-fp16-hd64-local-varlen-softcap-sink",
        "fwd-sm90a-bf16-hd64-full-paged-split",
        "fwd-sm90a-bf16-hd64-causal-softcap-sink",
        "fwd-sm100a-e4m3-hd64-full-paged",
        "fwd_combine-sm90a-bf16-hd64-sink",
        "bwd-sm90a-bf16-hd64-causal-varlen-softcap",
        "bwd-sm90a-fp16-hd64-local-softcap",
    ],
)
def test_right_kernels_pass(variant_id):
    """Every case of a kernel of each kind."""
    row = script.check_kernel(torch, Runtime(), None, entry_of(variant_id), seed=1)

    assert row["failures"] == []
    assert row["passed"]
    assert row["cases"] >= 3
    assert 0 < row["worst_ratio"] <= 1
    assert script.is_ours(entry_of(variant_id))


@pytest.mark.parametrize(
    ("variant_id", "spoil", "fault"),
    [
        ("fwd-sm90a-bf16-hd64-causal-varlen", lambda a: a[3][:1].zero_(), "out is off"),
        ("fwd-sm90a-bf16-hd64-causal-varlen", lambda a: a[3][-1:].zero_(), "wrote rows that do not exist"),
        ("fwd-sm90a-bf16-hd64-causal-varlen", lambda a: a[4].mul_(1.01), "lse is off"),
        ("fwd-sm90a-bf16-hd64-full-varlen-split", lambda a: a[4].sub_(float("inf")), "lse is -inf on other rows"),
        ("fwd_combine-sm90a-bf16-hd64", lambda a: a[2].add_(1), "out is off"),
        ("bwd-sm90a-bf16-hd64-causal-varlen", lambda a: a[8].mul_(2) if len(a) > 12 else None, "dk is off"),
        (
            "bwd-sm90a-bf16-hd64-causal-varlen",
            lambda a: a[9][-1:].fill_(1) if len(a) > 12 else None,
            "dv holds numbers",
        ),
    ],
)
def test_a_wrong_kernel_fails(variant_id, spoil, fault):
    """What is told is what is wrong."""
    row = script.check_kernel(torch, Runtime(spoil), None, entry_of(variant_id), seed=1)

    assert not row["passed"]
    assert any(fault in text for case in row["failures"] for text in case["faults"]), row["failures"]


def test_a_case_that_raises_is_a_fault_and_the_rest_go_on():
    """The third launch raises."""
    launches = []

    def spoil(arguments):
        launches.append(arguments)
        if len(launches) == 3:
            raise RuntimeError("lost")

    row = script.check_kernel(torch, Runtime(spoil), None, entry_of("fwd-sm90a-bf16-hd64-full-varlen"), seed=1)

    assert len(row["failures"]) == 1
    assert row["failures"][0]["faults"][0].startswith("RuntimeError: lost (test_prove_varlen_script.py:")
    assert row["cases"] > 3


def test_plain_kernels_are_left_to_the_other_scripts():
    """Each kernel is proven by one of the three; preprocess and postprocess with the main kernel."""
    plain = ("fwd-sm90a-bf16-hd64-full", "bwd-sm90a-bf16-hd64-full-deterministic")
    for variant_id in plain:
        assert prove_forward.is_plain(entry_of(variant_id))
        assert not script.is_ours(entry_of(variant_id))
    assert not script.is_ours(entry_of("bwd_preprocess-sm90a-bf16-hd64-varlen"))
    assert not prove_forward.is_plain(entry_of("fwd-sm100a-e4m3-hd64-full"))


CHILD = """
import json, os, sys
skip, rows = int(sys.argv[sys.argv.index("--skip") + 1]), open(sys.argv[1], "a")
print(json.dumps({"facts": {"device": "d"}, "kernels": ["a", "b", "c", "d"]}), file=rows, flush=True)
for name in "abcd"[skip:]:
    if name == "b":
        os._exit(9)
    if name == "c":
        import time
        time.sleep(60)
    print(json.dumps({"id": name, "passed": True, "cases": 1}), file=rows, flush=True)
    print(name, flush=True)
"""


def test_a_kernel_that_ends_or_blocks_its_process_fails_and_the_rest_go_on(tmp_path, monkeypatch):
    """b dies, c says nothing: both fail; a and d pass, in three processes."""
    monkeypatch.setattr(script, "SILENCE_S", 2)
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, "-c", CHILD, str(path)]
    facts, kernels, rows = script.prove(command, None, path, script.time.monotonic() + 60)

    assert facts == {"device": "d"}
    assert kernels == ["a", "b", "c", "d"]
    assert [(row["id"], row["passed"]) for row in rows] == [("a", True), ("b", False), ("c", False), ("d", True)]
    assert "status 9" in rows[1]["failures"][0]["faults"][0]


def test_a_torn_line_of_a_killed_child_is_left_out(tmp_path):
    """Facts of the first line, whole rows, nothing of the rest."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"facts": {"device": "d"}, "kernels": ["a", "b"]}\n{"id": "a"}\n{"id": "b", "pas')

    assert script.read_rows(path) == ({"device": "d"}, ["a", "b"], [{"id": "a"}])
