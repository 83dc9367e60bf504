"""Contract of the scripts of device/ and benchmarks/ for a GPU: with right kernels every check passes, a
check that goes wrong is told and the others go on, and what is printed and written is what was measured.

On the CPU, with kernels that are loops (reference_kernels.py), small problems, and stand-ins for events, streams and
graphs.
"""

import contextlib
import json
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import fa4_kernels  # noqa: E402
from fa4_kernels import answers, api, loader  # noqa: E402
from fa4_kernels.errors import LayoutError  # noqa: E402

from tests.runtime.reference_kernels import ReferenceRuntime  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "device"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import check_streams  # noqa: E402
import check_torch  # noqa: E402
import check_two_gpus  # noqa: E402
import compare_on_device  # noqa: E402
import harness  # noqa: E402
import sanitize  # noqa: E402


class Runtime(ReferenceRuntime):
    """Refuses what the launcher refuses, so that callers copy it."""

    is_capturing = None

    def launch_for(self, problem, ordinal):
        launch = super().launch_for(problem, ordinal)

        def run(*arguments):
            for position, x in enumerate(arguments):
                if isinstance(x, torch.Tensor) and (x.stride(-1) != 1 or 0 in x.stride() or x.data_ptr() % 16):
                    raise LayoutError("to be copied", position)
            launch.run(*arguments)

        return SimpleNamespace(run=run)

    def preload(self, devices, select):
        return ("kernel",)


class Event:
    def __init__(self, enable_timing=True):
        self._at = None

    def record(self):
        self._at = time.perf_counter()

    def elapsed_time(self, end):
        return (end._at - self._at) * 1e3


class Stream:
    def __init__(self, device=None):
        pass

    def synchronize(self):
        pass

    def wait_stream(self, other):
        pass


class Graph:
    """Runs nothing when replayed: what was captured has run already."""

    def replay(self):
        pass


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Reference kernels; torch.cuda's events, streams and graphs replaced."""
    made = Runtime()
    loader.use_runtime(made)
    for module in (api, answers):
        monkeypatch.setattr(module, "CAN_ANSWER", False)
    for module in (check_streams, check_torch, compare_on_device, sanitize):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    fakes = {
        "Event": Event,
        "CUDAGraph": Graph,
        "Stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph": lambda graph: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_stream": lambda device=None: Stream(),
        "current_device": lambda: 0,
        "_sleep": lambda cycles: None,
        "get_device_name": lambda device=None: "NVIDIA H200",
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    yield made
    loader.use_runtime(None)


# --- checks one by one ------------------------------------------------------------------------------------------------


def test_checks_fail_alone_and_are_on_disk(tmp_path, capsys):
    """One raises, one is over the deadline: both are failures with a reason."""

    def broken():
        raise ValueError("lost")

    path, record = tmp_path / "record.json", {"device": "d"}
    status = harness.run_checks({"a": lambda: {"passed": True}, "b": broken}, record, path)
    assert status == 1
    found = json.loads(path.read_text())
    assert found["device"] == "d"
    assert found["checks"]["a"]["passed"]
    assert found["checks"]["b"]["error"].startswith("ValueError: lost (test_device_scripts.py:")

    status = harness.run_checks({"c": lambda: {"passed": True}}, {}, path, deadline=time.monotonic() - 1)
    assert status == 1
    assert json.loads(path.read_text())["checks"]["c"]["error"] == "not run: out of time"
    assert "FAIL b" in capsys.readouterr().out


def write_wheel(directory, name, tag):
    """A wheel of one file that holds its tag."""
    info = f"{name}-1.dist-info"
    files = {
        f"{name}/tag.txt": tag,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(directory / f"{name}-1-{tag}.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def test_the_runtime_that_fits_and_packs_of_every_family_are_installed(tmp_path):
    """Beside it lie runtimes for another machine and for an interpreter that this is not."""
    machine, site = f"manylinux_2_17_{harness.platform.machine()}", tmp_path / "site"
    for tag in (f"cp310-abi3-{machine}", f"cp39-cp39t-{machine}", "cp310-abi3-manylinux_2_17_other"):
        write_wheel(tmp_path, "fa4_kernels", tag)
    for name in ("fa4_kernels_sm90a", "fa4_kernels_upstream_sm90a"):
        write_wheel(tmp_path, name, "py3-none-any")
    harness.install(tmp_path, site)

    found = {path.parent.name: path.read_text() for path in site.glob("*/tag.txt")}
    packs = {"fa4_kernels_sm90a": "py3-none-any", "fa4_kernels_upstream_sm90a": "py3-none-any"}
    assert found == {"fa4_kernels": f"cp310-abi3-{machine}"} | packs


@pytest.mark.parametrize(
    ("wheel", "told"), [("fa4_kernels", "fa4_kernels-1-cp310-abi3-.*"), ("fa4_kernels_upstream_sm90a", "neither")]
)
def test_wheels_that_lack_the_runtime_or_a_pack_are_refused(tmp_path, wheel, told):
    """The packs asked for are our own."""
    machine = harness.platform.machine()
    write_wheel(tmp_path, wheel, f"cp310-abi3-manylinux_2_17_{machine}")
    with pytest.raises(SystemExit, match=f"needs the fa4_kernels wheel for {machine} and a pack wheel; it has {told}$"):
        harness.install(tmp_path, tmp_path / "site", "fa4_kernels_sm*")


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Problems that loops in Python finish."""
    sizes = {"ROWS": 20, "LENGTHS": (9, 1, 17), "REPEATS": 2, "FEW": 12, "BUSY": 8, "STEPS": 2, "BATCH": 2}
    sizes |= {"SEQLEN": 16, "LAST": 1, "WIDTH": 64, "HEADS": 1, "LAYERS": 1, "COMPILER": "aot_eager"}
    for name, value in sizes.items():
        monkeypatch.setattr(check_torch, name, value)


RUN_HERE = ("repeats_dense", "repeats_packed", "empty", "sdpa", "stream_dense", "stream_packed", "layouts")
RUN_HERE += ("compile_packed", "host_time", "decoding_graph")


@pytest.mark.parametrize("name", [*RUN_HERE, pytest.param("transformers", marks=pytest.mark.slow)])
def test_right_kernels_pass_each_check(small, name, monkeypatch):
    """All but training, which two steps do not teach, and the graph of a backward, which no stand-in can replay."""
    if name == "transformers":
        pytest.importorskip("transformers")
    if name == "decoding_graph":  # the stand-in keeps the results of the capture
        monkeypatch.setattr(torch, "equal", lambda a, b: a.shape == b.shape)
    if name == "host_time":
        monkeypatch.setattr(check_torch.host_microseconds, "__defaults__", (2,))
    result = check_torch.checks_of(torch, fa4_kernels)[name]()

    assert result["passed"], result


def test_training_runs_and_needs_learning(small):
    """Two steps of three models; curves are kept."""
    result = check_torch.check_training(torch, fa4_kernels)

    assert {len(curve) for curve in result["curves"].values()} == {2}
    assert abs(result["ends"]["fa4_kernels"] - result["ends"]["sdpa"]) < 0.02
    assert not result["passed"]


def test_a_wrong_gradient_is_seen(small, on_the_cpu, monkeypatch):
    """Other bits at each repeat."""
    attend = fa4_kernels.flash_attn_func
    monkeypatch.setattr(fa4_kernels, "flash_attn_func", lambda q, *a, **o: attend(q * torch.rand(()).item(), *a, **o))
    problem = check_torch.Problem(torch, fa4_kernels, "dense")

    assert not check_torch.equal_bits(torch, problem.gradients(), problem.gradients())
    assert not check_torch.check_stream(torch, fa4_kernels, "dense")["passed"]


# --- two devices ------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(monkeypatch):
    """Both are the CPU."""
    monkeypatch.setattr(check_two_gpus, "DEVICES", ("cpu", "cpu"))
    monkeypatch.setattr(check_two_gpus, "LENGTHS", (9, 1, 17))
    monkeypatch.setattr(check_two_gpus, "ROUNDS", 2)
    originals = check_two_gpus.drawn

    def small(torch_, device, seed, *shapes):
        return originals(torch_, device, seed, *(tuple(min(x, 128) if x != 700 else 12 for x in s) for s in shapes))

    monkeypatch.setattr(check_two_gpus, "drawn", small)


@pytest.mark.parametrize("problem", ["dense", "dense_gradients", "packed_gradients", "paged_split"])
def test_two_devices(two, problem):
    """Every check of a problem, but that of tensors on two devices."""
    checks = check_two_gpus.checks_of(torch, fa4_kernels)
    names = [name for name in checks if name.endswith(f" {problem}")]
    assert len(names) == 6
    for name in names:
        result = checks[name]()
        assert result["passed"] or name.startswith("graph"), (name, result)


def test_other_bits_on_the_second_device_are_seen(two):
    """A kernel that gives something else at every call."""
    make, _ = check_two_gpus.problems(torch, fa4_kernels)["dense"]
    noise = iter(range(1, 1000))
    result = check_two_gpus.check_other(torch, make, lambda *x: [torch.full((3,), float(next(noise)))])

    assert not result["passed"]
    assert any("other bits" in text for text in result["wrong"])


# --- comparison -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    """One head dim, one length; flash-attn-4's recipes stand for nothing here and are errors."""
    values = {"HEAD_DIMS": (64,), "SEQLENS": (16,), "TOKENS": 32, "COLUMNS": 64, "ROUNDS": 3, "SLOT_MS": 0.01}
    values |= {"BACKENDS": {"cudnn": "MATH", "fa2": "MATH"}, "ROTATED_BYTES": 1}
    values |= {"DECODING": {"keys": 64, "heads_q": 2, "heads_kv": 1, "head_dim": 64}, "BATCHES": (1, 2)}
    for name, value in values.items():
        monkeypatch.setattr(compare_on_device, name, value)
    monkeypatch.setattr(compare_on_device, "copy_share", lambda torch_: 4.0)

    def call(op, **named):
        if named.get("deterministic"):
            raise RuntimeError("no recipe")
        q, k, v = (named[x].detach().requires_grad_() for x in "qkv")
        with torch.enable_grad():
            out, lse = fa4_kernels.flash_attn_func(q, k, v, causal=named["mask"] == "causal", return_lse=True)
            return (out, lse) if op == "fwd" else torch.autograd.grad(out, (q, k, v), named["dout"])

    monkeypatch.setattr(fa4_kernels, "call", call)


def test_comparison_fills_every_row(tiny, tmp_path, capsys):
    """Forward and backward, every name a number, what could not run told; the file is what the report reads."""
    from fa4build.report.benchmarks import read_benchmarks

    path, record = tmp_path / "compare.json", {"device": "d"}
    errors = compare_on_device.measure(torch, fa4_kernels, record, path)

    assert errors == 2  # flash-attn-4's deterministic backward, full and causal
    for row in record["forward_tflops"]:
        assert {"fa4_kernels", "fa4_kernels_packed", "flash_attn_4", "cudnn", "fa2"} <= set(row)
    for row in record["backward_tflops"]:
        assert {"fa4_kernels", "fa4_kernels_packed", "fa4_kernels_deterministic", "flash_attn_4", "fa2"} <= set(row)
    assert all(max(notes["difference"].values()) < 0.02 for notes in record["notes"].values())
    assert len(record["decoding"]) == 2 * 2 * (4 + 5)
    assert all(row["share"] > 0 for row in record["decoding"])
    assert json.loads(path.read_text()) == record
    assert [b.name for b in read_benchmarks([path])] == ["backward_tflops", "forward_tflops"]
    assert "hd64 causal 16" in capsys.readouterr().out


def test_plot_is_drawn_from_a_record(tmp_path):
    """Every series that a row has, and the goal of decoding; the same record gives the same bytes."""
    pytest.importorskip("matplotlib")
    import plot_comparison

    peers = {"fa4_kernels": 100.0, "cudnn": 90.0, "fa2": 50.0}
    rows = [{"head_dim": 64, "causal": causal, "seqlen": 1024} | peers for causal in (False, True)]
    decoding = [{"layout": "paged", "batch": 1, "rows": n, "num_splits": 0, "share": 0.5} for n in (1, 2)]
    record = {"device": "d", "driver": "1", "torch": "2", "cudnn": "9", "decoding": decoding}
    record |= {"forward_tflops": rows, "backward_tflops": rows}
    for name in ("a.svg", "b.svg"):
        plot_comparison.draw(record, tmp_path / name)

    first = (tmp_path / "a.svg").read_bytes()
    assert first.startswith(b"<?xml")
    assert first == (tmp_path / "b.svg").read_bytes()


def test_goals_are_those_of_the_best_peer():
    """0.94 of the best is a miss in the forward and none in the backward; a share below 75 % is one, a sweep is not."""
    row = {"head_dim": 64, "causal": True, "seqlen": 1024, "fa4_kernels": 94.0, "cudnn": 100.0, "fa2": 50.0}
    decoding = [
        {"layout": "paged", "batch": 1, "rows": 1, "num_splits": 0, "share": 0.74},
        {"layout": "paged", "batch": 8, "rows": 1, "num_splits": 0, "share": 0.76},
        {"layout": "paged", "batch": 8, "rows": 1, "num_splits": 4, "share": 0.1},
    ]
    record = {"forward_tflops": [row], "backward_tflops": [row], "decoding": decoding}

    assert compare_on_device.summary(record) == {
        "forward hd64 causal 1024": 0.94,
        "decoding paged batch 1 rows 1": 0.74,
    }


def test_results_that_differ_are_told():
    """The difference is relative to the largest number of a peer's results."""
    found = {"fa4_kernels": (torch.tensor([1.0, 2.0]),), "cudnn": (torch.tensor([1.0, 4.0]),)}

    assert compare_on_device.differences(found) == {"fa4_kernels": 0.5, "cudnn": 0.0}


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["second_stream", "threads", "training_after_inference"])
def test_streams_are_checked(name, monkeypatch):
    """With right kernels each check passes; on the CPU there is one stream alone."""
    for constant, small in {"CACHE": 64, "NUM_THREADS": 2, "ROUNDS": 2, "HEAD_DIM": 64}.items():
        monkeypatch.setattr(check_streams, constant, small)
    check = check_streams.checks_of(torch, fa4_kernels)[name]
    assert check()["passed"]


def test_a_list_that_was_freed_is_told(monkeypatch):
    """Replays that hold what an eager run does not: the graph is wrong, and the length is named."""
    for constant, small in {"CACHE": 64, "OTHERS": 3, "HEAD_DIM": 64}.items():
        monkeypatch.setattr(check_streams, constant, small)
    checks = check_streams.checks_of(torch, fa4_kernels)
    found = checks["graph_1_calls_lse"]()  # the stand-in for a graph replays nothing, and results were set to zero
    assert not found["passed"]
    assert found["wrong"] == [64, 45, 517, 63]
    assert found["intact"]


# --- compute-sanitizer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["forward", "backward"])
def test_every_problem_runs(group, capsys, monkeypatch):
    """With right kernels nothing is wrong; the small problems are those of the device."""
    assert sanitize.run_group(group) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("RAN ")]
    assert len(lines) == len(sanitize.GROUPS[group])
    assert all(line.endswith(": right") for line in lines)


MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at fwd_sm90a_bf16_hd128_full_0+0x1230
========= Invalid __global__ read of size 4 bytes
=========     at fwd_sm90a_bf16_hd128_full_0+0x1240
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Warning: Race reported between Write access at fwd_sm90a_bf16_hd128_full_0+0x10
=========     and Read access at fwd_sm90a_bf16_hd128_full_0+0x20 [64 hazards]
=========
========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)
"""


def test_reports_are_counted():
    """Errors and warnings of the summary; reports by kind, with offsets left out."""
    memory, races = sanitize.parse(MEMCHECK), sanitize.parse(RACECHECK)

    assert (memory["errors"], memory["warnings"]) == (2, 0)
    assert memory["kinds"] == {"Invalid __global__ read of size N bytes": 2}
    assert (races["errors"], races["warnings"]) == (1, 2)
    kind = "Warning: Race reported between Write access at fwd_sm90a_bf16_hd128_full_0+N"
    assert races["kinds"] == {kind: 1}
    assert sanitize.parse("Device not supported") is None


def test_what_is_bad():
    """No summary, a problem that did not run, errors; but not what racecheck reports."""
    ran = [f"forward, {name}: right" for name in sanitize.GROUPS["forward"]]
    good = {"tool": "memcheck", "group": "forward", "ran": ran, "errors": 0}

    assert not sanitize.is_bad(good)
    assert not sanitize.is_bad(good | {"tool": "racecheck", "errors": 3})
    assert sanitize.is_bad(good | {"errors": 1})
    assert sanitize.is_bad(good | {"ran": ran[1:]})
    assert sanitize.is_bad({"tool": "racecheck", "group": "forward", "ran": ran})
