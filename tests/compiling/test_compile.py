"""Contract of a compile.

It happens in a fresh process, with no GPU. The same source gives the same bytes: in any order, in any directory, forked
from a server or in an interpreter of its own. What came out is read back and compared with what was asked for. One that
fails, crashes or does not end is an error that names the variant and the log; the others are not touched.
"""

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fa4build.compiling.compile import WORKER, CompileOptions, CompileRequest, Cubin, compile_kernel, prepare
from fa4build.compiling.executors import Finished, LocalExecutor
from fa4build.compiling.fork_server import LOG_NAME
from fa4build.compiling.render import KernelSource, kernels_source_dir
from fa4build.compiling.toolchain import current_toolchain
from fa4build.errors import CompileError, Fa4BuildError, LaunchPlanError, ToolchainError
from fa4build.matrix.axes import parse_axes
from fa4build.plan import evaluate, failed_guard
from tests.toy import PACKED_ID, TEXT, VARIANT_ID, packed_text, toy_request

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.dsl


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    """One compile server for all tests of this file."""
    with LocalExecutor(current_toolchain(), jobs=2, timeout_s=60) as executor:
        yield executor


def finish(executor: LocalExecutor, request: CompileRequest, work_dir: Path, **options) -> Finished:
    """One compile from start to end."""
    executor.submit(request, CompileOptions(**options), work_dir)
    return executor.wait()


def compiled(executor: LocalExecutor, request: CompileRequest, work_dir: Path, **options) -> Cubin:
    """The cubin of a compile that works."""
    result = finish(executor, request, work_dir, **options).result
    if isinstance(result, Fa4BuildError):
        raise result
    return result


def failed(executor: LocalExecutor, request: CompileRequest, work_dir: Path) -> Fa4BuildError:
    """The error of a compile that does not."""
    result = finish(executor, request, work_dir).result
    assert isinstance(result, Fa4BuildError)
    return result


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
def test_a_kernel_compiles_for_every_target_without_a_gpu(executor, tmp_path, target):
    """Target and entry name are those of the cubin, not those of the request."""
    cubin = compiled(executor, toy_request(target=target), tmp_path / "work")

    assert (cubin.target, cubin.symbols) == (target, ("toy_0",))
    assert cubin.elf.startswith(b"\x7fELF")
    assert f".target {target}" in cubin.ptx
    assert (cubin.spill_bytes, cubin.local_bytes, cubin.shared_bytes) == (0, 0, 0)
    assert 8 <= cubin.registers <= 64
    assert cubin.ptxas.startswith("V13.")
    assert "ptxas info" in cubin.log


def test_the_launch_plan_comes_with_it(executor, tmp_path):
    """One cubin for every shape: the grid follows the arguments. ceil(1000 / 128) = 8 blocks, 6 heads, batch 2."""
    plan = compiled(executor, toy_request(), tmp_path / "work").plan
    inputs = dense_inputs(batch=2, seqlen=1000, num_heads=6, head_dim=64)
    (launch,) = evaluate(plan, inputs)

    assert failed_guard(plan, inputs) is None
    assert (launch.kernel, launch.grid, launch.block) == ("toy_0", (8, 6, 2), (128, 1, 1))
    assert plan.spec["head_dim"] == 64


def test_alignment_is_promised_and_so_guarded(executor, tmp_path):
    """Strides of 8 elements (16 bytes) are what tensor maps need; 4 elements are refused by the plan."""
    plan = compiled(executor, toy_request(), tmp_path / "work").plan
    inputs = dense_inputs(batch=2, seqlen=1000, num_heads=6, head_dim=64)

    assert failed_guard(plan, {**inputs, "q.stride[1]": 6 * 64 + 4}) is not None
    assert failed_guard(plan, {**inputs, "q.ptr": inputs["q.ptr"] + 8}) is not None


def test_packed_sequences_and_features_are_arguments_like_any_other(executor, tmp_path):
    """Lists of numbers, tensors that may have no element, features at the end: compiled, and guarded as published.

    800 rows of 3 sequences: ceil(800 / 128) = 7 blocks, 4 heads, 3 sequences.
    """
    request = toy_request(text=packed_text(), variant_id=PACKED_ID)
    plan = compiled(executor, request, tmp_path / "work").plan
    shapes = {"q": (800, 4, 64), "k": (900, 2, 64), "v": (900, 2, 64), "out": (800, 4, 64), "lse": (4, 800)}
    shapes |= {"cu_seqlens_q": (4,), "cu_seqlens_k": (4,), "seqused_q": (0,), "seqused_k": (3,), "sink": (4,)}
    scalars = {"softmax_scale": 1.0, "softcap": 20.0, "window_left": 0, "window_right": 0, "num_sms": 132}
    (launch,) = evaluate(plan, leaves_of(shapes) | scalars)

    assert failed_guard(plan, leaves_of(shapes) | scalars) is None
    assert launch.grid == (7, 4, 3)
    for wrong in ({"seqused_k": (2,)}, {"cu_seqlens_k": (5,)}, {"sink": (5,)}, {"k": (901, 2, 64)}, {"lse": (4, 801)}):
        assert failed_guard(plan, leaves_of(shapes | wrong) | scalars) is not None, wrong


def dense_inputs(*, batch: int, seqlen: int, num_heads: int, head_dim: int) -> dict[str, int | float]:
    """Leaves of the dense forward's arguments, all tensors contiguous."""
    inputs: dict[str, int | float] = {"softmax_scale": 1.0, "window_left": 0, "window_right": 0, "num_sms": 132}
    shapes = dict.fromkeys(("q", "k", "v", "out"), (batch, seqlen, num_heads, head_dim))
    return inputs | leaves_of({**shapes, "lse": (batch, num_heads, seqlen)})


def leaves_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Leaves of contiguous tensors."""
    inputs: dict[str, int] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        inputs[f"{name}.ptr"] = 0x10000000 * (number + 1)
        stride = 1
        for mode in reversed(range(len(shape))):
            inputs[f"{name}.shape[{mode}]"], inputs[f"{name}.stride[{mode}]"] = shape[mode], stride
            stride *= shape[mode]
    return inputs


# --- the same bytes ---------------------------------------------------------------------------------------------------


def outputs(cubin: Cubin) -> tuple:
    """What is shipped."""
    return cubin.elf, cubin.ptx, cubin.plan


ALONE = """
import os, sys
from pathlib import Path
from fa4build.compiling import inputs_read
from fa4build.compiling.compile_worker import run

inputs_read.check_inputs = lambda *_: None  # torch's own libraries are no inputs of a server, which blocks torch
os.chdir(sys.argv[1])
run(Path(sys.argv[1]))
"""


def test_a_forked_child_makes_the_bytes_that_an_interpreter_of_its_own_makes(executor, tmp_path):
    """The server's imports leave nothing behind that shows. The interpreter also has torch, if it is installed."""
    alone = tmp_path / "alone"
    prepare(toy_request(), CompileOptions(), alone)
    with (alone / LOG_NAME).open("wb") as log:
        subprocess.run(
            [sys.executable, "-c", ALONE, str(alone)],
            env={**dict(current_toolchain().environment), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
            stdout=log,
            stderr=log,
            check=True,
            timeout=60,
        )
    compiled(executor, toy_request(symbol="other"), tmp_path / "before")
    forked = tmp_path / "a rather longer path" / "forked"
    compiled(executor, toy_request(), forked)

    for name in ("kernel.cubin", "kernel.ptx", "plan.json", "facts.json"):
        assert (alone / name).read_bytes() == (forked / name).read_bytes()


def toy_source() -> KernelSource:
    """The toy as if it had been rendered."""
    text = TEXT.replace("SYMBOL", "toy")
    package = kernels_source_dir() / "__init__.py"  # imported with every rendered module
    reached = (("kernels_src/__init__.py", hashlib.sha256(package.read_bytes()).hexdigest()),)
    return KernelSource(variant=parse_axes(VARIANT_ID), text=text, sha256="", symbol="toy", dependencies=reached)


def test_one_kernel_can_be_compiled_without_a_pipeline(tmp_path, executor):
    """`compile_kernel`: a rendered source in, a cubin out."""
    alone = compile_kernel(toy_source(), current_toolchain(), tmp_path / "alone")

    assert outputs(alone) == outputs(compiled(executor, toy_request(), tmp_path / "forked"))


def test_order_and_company_do_not_matter(executor, tmp_path):
    """Three kernels one after another, and the other way round at the same time."""
    requests = [toy_request(symbol=symbol) for symbol in ("one", "two", "three")]
    alone = {request.symbol: compiled(executor, request, tmp_path / request.symbol) for request in requests}
    jobs = {
        executor.submit(request, CompileOptions(), tmp_path / f"{request.symbol} again"): request.symbol
        for request in reversed(requests)
    }
    again = {}
    for _ in requests:
        finished = executor.wait()
        again[jobs[finished.job]] = finished.result

    assert {symbol: outputs(cubin) for symbol, cubin in alone.items()} == {
        symbol: outputs(cubin) for symbol, cubin in again.items()
    }


def test_no_path_gets_into_what_is_shipped(executor, tmp_path):
    """Neither cubin nor plan nor PTX names the work directory."""
    work_dir = tmp_path / "findable_directory_name"
    cubin = compiled(executor, toy_request(), work_dir)
    shipped = cubin.elf + cubin.ptx.encode() + (work_dir / "plan.json").read_bytes()

    assert b"findable_directory_name" not in shipped


@pytest.mark.parametrize(
    ("options", "differs"),
    [({"opt_level": 1}, True), ({"ptxas_options": "--maxrregcount=32"}, True), ({}, False)],
    ids=["opt_level", "ptxas_options", "none"],
)
def test_options_reach_the_compiler(executor, tmp_path, options, differs):
    """The cubin notes how the assembler was called, so every option shows."""
    plain = compiled(executor, toy_request(), tmp_path / "plain")
    other = compiled(executor, toy_request(), tmp_path / "other", **options)

    assert (plain.elf != other.elf) == differs


# --- what goes wrong --------------------------------------------------------------------------------------------------

AT_IMPORT = {
    "crash": "import ctypes; ctypes.string_at(0)\n",
    "exit": "import os; os._exit(7)\n",
    "hang": "import time; time.sleep(600)\n",
    "out of memory": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n",
    "torch": "import torch\n",
}


@pytest.mark.parametrize(
    ("text", "error", "reason"),
    [
        pytest.param(AT_IMPORT["crash"] + TEXT, CompileError, "ended with signal 11", id="crash"),
        pytest.param(AT_IMPORT["exit"] + TEXT, CompileError, "ended with exit 7", id="exit"),
        pytest.param(AT_IMPORT["out of memory"] + TEXT, CompileError, "short of memory", id="killed"),
        pytest.param(AT_IMPORT["torch"] + TEXT, CompileError, "import of torch halted", id="torch"),
        pytest.param(TEXT.replace("q.shape[1]", "q.shpae[1]"), CompileError, "shpae", id="error in the kernel"),
        pytest.param(TEXT + "\nx = (\n", CompileError, "SyntaxError", id="no Python"),
        pytest.param(
            TEXT.replace("SYMBOL", "another"), CompileError, "entries are another_0; they must be toy_0", id="symbol"
        ),
        pytest.param(
            TEXT.replace('Toy(symbol="SYMBOL")(q, out, lse, softmax_scale, stream)', "return"),
            Fa4BuildError,
            "",
            id="launches nothing",
        ),
    ],
)
def test_a_bad_compile_is_an_error_with_its_log(executor, tmp_path, text, error, reason):
    """It names the variant, says what happened, and where the log is; the next compile works."""
    failure = failed(executor, toy_request("bad-variant", text=text), tmp_path / "bad")

    assert isinstance(failure, error)
    assert "bad-variant" in str(failure)
    assert reason in str(failure)
    assert str(tmp_path / "bad" / "log.txt") in str(failure)
    assert compiled(executor, toy_request(), tmp_path / "good").symbols == ("toy_0",)


def test_a_compile_that_does_not_end_is_stopped(tmp_path):
    """The time limit is hard: nothing the compiler does can outlast it."""
    with LocalExecutor(current_toolchain(), jobs=1, timeout_s=1.0) as executor:
        failure = failed(executor, toy_request("slow-variant", text=AT_IMPORT["hang"] + TEXT), tmp_path / "slow")

    assert "slow-variant: stopped after 1 s without an end" in str(failure)


def test_the_error_of_a_launch_plan_stays_one(executor, tmp_path):
    """The kind of error crosses the process, and with it the exit code. Here the host function prints at run time."""
    text = TEXT.replace("        grid = (cute", '        cute.printf("{}", q.shape[1])\n        grid = (cute')
    failure = failed(executor, toy_request(text=text), tmp_path / "work")

    assert type(failure) is LaunchPlanError
    assert failure.exit_code == 9


def test_a_compiler_of_another_flavour_is_refused(tmp_path):
    """The DSL picks its flavour by the driver; one that the key does not name must not compile."""
    toolchain = dataclasses.replace(current_toolchain(), backend="cu12")
    with LocalExecutor(toolchain, jobs=1) as executor, pytest.raises(ToolchainError, match=r"cu13.*cu12.*driver"):
        executor.submit(toy_request(), CompileOptions(), tmp_path / "work")


def test_a_kernel_sees_the_pinned_environment_only(executor, tmp_path, monkeypatch):
    """Whatever the user has set."""
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    dump = 'import json, os, pathlib; pathlib.Path("env.json").write_text(json.dumps(dict(os.environ)))\n'
    compiled(executor, toy_request(text=dump + TEXT), tmp_path / "work")
    seen = json.loads((tmp_path / "work" / "env.json").read_text())
    pinned = dict(current_toolchain().environment)

    assert {name: seen[name] for name in pinned} == pinned
    assert set(seen) - set(pinned) == {"PATH", "HOME", "TMPDIR", "CUTE_DSL_CACHE_DIR"}


def test_what_an_earlier_compile_left_in_the_work_directory_is_gone(executor, tmp_path):
    """Half-written results of a killed build must not be taken for results."""
    work_dir = tmp_path / "work"
    work_dir.mkdir()
    (work_dir / "kernel.cubin").write_bytes(b"old")
    (work_dir / "failure.json").write_text("{}")

    assert compiled(executor, toy_request(), work_dir).elf != b"old"


def test_a_directory_with_other_files_is_not_emptied(tmp_path):
    """Somebody's home directory, given by mistake."""
    (tmp_path / "thesis.tex").write_text("precious")

    with pytest.raises(CompileError, match="holds files that no compile made"):
        compile_kernel(toy_source(), current_toolchain(), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_only_the_worker_and_what_it_calls_import_the_compiler():
    """The worker, and the functions of families that run in its process: everything else starts fast."""
    root = ROOT / "fa4build"
    users = [path for path in root.rglob("*.py") if "import cutlass" in path.read_text()]

    assert sorted(path.relative_to(root).with_suffix("").as_posix() for path in users) == [
        "compiling/compile_worker",
        "families/quack",
        "families/tracing",
    ]
    assert WORKER == "fa4build.compiling.compile_worker"
