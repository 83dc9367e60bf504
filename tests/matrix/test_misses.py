"""Contract of the way from a machine that lacks a kernel to the specification that builds it.

Each refused problem is written once a process, as one line; many processes may share the file; what cannot be written
never breaks a call. Read back, each miss is a written variant, or has the reason why not. The specification selects
exactly those variants.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fa4build import cli
from fa4build.errors import NothingSelectedError, VariantError
from fa4build.matrix.arch import ARCHES
from fa4build.matrix.misses import plan_for, read_misses, spec_text
from fa4build.matrix.spec import parse_spec
from fa4build.matrix.variants import Selection, expand_matrix, valid_variants, written_variants
from fa4build.runtime.fa4_kernels.dispatch import Device, Problem, dispatch
from fa4build.runtime.fa4_kernels.record import MissRecorder, RecordWarning, miss_line
from fa4build.shipping.coverage import problem_of

CAUSAL = Problem(dtype="bf16", head_dim=128, head_dim_v=128, mask="causal")
HOPPER = Device(name="H200", compute_capability=(9, 0))


def decision(problem: Problem = CAUSAL, device: Device = HOPPER):
    """The dispatcher's answer where nothing is installed."""
    return dispatch(problem, device, ())


def recorded(path: Path, *decisions) -> Path:
    """A file with these misses."""
    recorder = MissRecorder(str(path))
    for one in decisions:
        recorder.note(one)
    return path


def test_a_miss_is_written_once_a_process(tmp_path: Path) -> None:
    """The same problem on the same target again is not news; on another target it is."""
    other = Device(name="B200", compute_capability=(10, 0))
    path = recorded(tmp_path / "m", decision(), decision(), decision(device=other))

    assert path.read_text() == miss_line(decision()) + miss_line(decision(device=other))
    assert json.loads(miss_line(decision())) == {
        "format": "fa4-kernels miss",
        "version": 1,
        "compute_capability": [9, 0],
        "target": "sm_90a",
        "problem": {
            "op": "fwd",
            "layout": "dense",
            "dtype": "bf16",
            "head_dim": 128,
            "head_dim_v": 128,
            "mask": "causal",
            "deterministic": False,
            "features": [],
        },
    }


def test_a_file_that_cannot_be_written_is_told_once_and_breaks_nothing(tmp_path: Path) -> None:
    """A directory stands where the file should be."""
    recorder = MissRecorder(str(tmp_path))
    with pytest.warns(RecordWarning, match="misses are not recorded"):
        recorder.note(decision())
    recorder.note(decision(device=Device(name="B200", compute_capability=(10, 0))))

    assert list(tmp_path.iterdir()) == []


def test_many_processes_share_a_file(tmp_path: Path) -> None:
    """8 processes, 50 misses each, written at once: 400 whole lines."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from fa4_kernels.dispatch import *; "
        "from fa4_kernels.record import MissRecorder; r = MissRecorder(sys.argv[2])\n"
        "for n in range(50): r.note(dispatch(Problem(dtype='bf16', head_dim=int(sys.argv[3]) * 50 + n, head_dim_v=1), "
        "Device(name='', compute_capability=(9, 0)), ()))"
    )
    runtime = Path(__file__).resolve().parents[2] / "fa4build" / "runtime"
    command = [sys.executable, "-c", code, str(runtime), str(tmp_path / "m")]
    running = [subprocess.Popen([*command, str(number)], env=dict(os.environ)) for number in range(8)]
    assert [process.wait(60) for process in running] == [0] * 8

    assert sorted(miss.head_dim for miss in read_misses(tmp_path / "m")) == list(range(400))


def test_every_written_variant_comes_back_from_its_own_miss(tmp_path: Path) -> None:
    """Record the problem of each, read, plan: exactly the written variants, each by its own id or a twin's that
    computes the same by other means."""
    devices = {arch.name: Device(name=arch.name, compute_capability=arch.compute_capability) for arch in ARCHES}
    decisions = [decision(problem_of(v), devices[v.arch]) for v in written_variants()]
    plan = plan_for(read_misses(recorded(tmp_path / "m", *decisions)))
    by_id = {variant.id: variant for variant in valid_variants()}

    assert plan.hopeless == ()
    assert {(v.arch, problem_of(v)) for v in map(by_id.__getitem__, plan.buildable)} == {
        (v.arch, problem_of(v)) for v in written_variants()
    }


@pytest.mark.parametrize(
    ("problem", "device", "reason"),
    [
        pytest.param(
            Problem(dtype="e4m3", head_dim=128, head_dim_v=128), HOPPER, "fp8 kernels exist for", id="refused"
        ),
        pytest.param(
            Problem(dtype="bf16", head_dim=80, head_dim_v=80), HOPPER, "allowed: 64, 96", id="unknown head_dim"
        ),
        pytest.param(
            Problem(dtype="bf16", head_dim=128, head_dim_v=128, features=frozenset({"score_mod"})),
            *(HOPPER, "no kernel can be built with score_mod"),
            id="unknown feature",
        ),
        pytest.param(
            CAUSAL, Device(name="A100", compute_capability=(8, 0)), "compute capability 9.0, 10.0, 10.3", id="old GPU"
        ),
    ],
)
def test_what_cannot_be_built_keeps_its_reason(tmp_path: Path, problem, device, reason: str) -> None:
    """From the rule table, or from what the axes allow; it stands in the specification as a comment."""
    plan = plan_for(read_misses(recorded(tmp_path / "m", decision(problem, device), decision())))
    text = spec_text(plan, "m")

    assert [why for _, why in plan.hopeless if reason in why], plan.hopeless
    assert reason in text
    assert plan.buildable == ("fwd-sm90a-bf16-hd128-causal",)
    with pytest.raises(NothingSelectedError, match="none of these 1 misses can be built"):
        spec_text(plan_for(read_misses(recorded(tmp_path / "n", decision(problem, device)))), "n")


def test_the_specification_selects_what_was_missed(tmp_path: Path) -> None:
    """Written, parsed, expanded."""
    path = recorded(tmp_path / "m", decision(), decision(Problem(dtype="fp16", head_dim=64, head_dim_v=64)))
    text = spec_text(plan_for(read_misses(path)), "m")
    variants = expand_matrix(Selection(specs=(parse_spec(text, path="spec.toml"),)))

    assert [variant.id for variant in variants] == ["fwd-sm90a-bf16-hd128-causal", "fwd-sm90a-fp16-hd64-full"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nonsense\n", "line 1: no recorded miss"),
        ('{"format":"other"}\n', "line 1: no recorded miss"),
        (miss_line(decision()) + miss_line(decision()).replace('"version":1', '"version":2'), "line 2: version 2"),
        (miss_line(decision()).replace('"features":[]', '"features":[[]]'), "line 1: no recorded miss"),
    ],
    ids=["text", "format", "version", "types"],
)
def test_what_is_no_miss_is_named_by_its_line(tmp_path: Path, text: str, reason: str) -> None:
    """Nothing is guessed."""
    (tmp_path / "m").write_text(text)

    with pytest.raises(VariantError, match=reason):
        read_misses(tmp_path / "m")


def test_a_line_under_way_is_left_out(tmp_path: Path) -> None:
    """A process was stopped in the middle of its write."""
    (tmp_path / "m").write_text(miss_line(decision()) + miss_line(decision())[:20])

    assert len(read_misses(tmp_path / "m")) == 1


def test_the_command_writes_the_specification(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And with --dry-run tells what it would compile; a contradiction is one message."""
    path = str(recorded(tmp_path / "m", decision()))
    spec = tmp_path / "spec.toml"
    cache = ["--cache-dir", str(tmp_path / "cache")]
    for arguments, code, said in (
        (["--from-misses", path, "--write-spec", str(spec)], 0, "1 variants, 0 misses cannot be built"),
        (["--from-misses", path, "--dry-run", *cache], 0, "missing  fwd-sm90a-bf16-hd128-causal"),
        (["--from-misses", path, "--select", "*"], 2, "leave out --select"),
        (["--write-spec", str(spec)], 2, "needs --from-misses"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["matrix", *arguments])
        captured = capsys.readouterr()
        assert ended.value.code == code, captured.err
        assert said in captured.out + captured.err
    assert 'select = [\n  "fwd-sm90a-bf16-hd128-causal",\n]' in spec.read_text()
