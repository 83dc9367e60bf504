"""Contract under test: `extract_plan` turns the host half of any compiled CuTe-DSL function into a launch plan.

- For every shape, stride, pointer and scalar the plan launches what the host function launches: compared byte for byte
  with `tests/oracles/plan_toy.py`, which was written from the toy kernels' definitions.
- Undefined bytes stay undefined; what the entry checks becomes a guard in the caller's words.
- What is not understood (an operation, a call, a loop whose length depends on data) is an error that names its place.
- `validate_plan` refuses a plan that does not fit PTX and cubin.
"""

import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fa4build.errors import LaunchPlanError
from fa4build.plan import (
    BytesParam,
    BytesTemplate,
    Launch,
    LaunchPlan,
    TensorMapParam,
    TensorMapTemplate,
    canonical_digest,
    evaluate,
    failed_guard,
    plan_from_json,
    plan_to_json,
    render_plan,
)
from fa4build.plan.extract import extract_plan, validate_plan
from fa4build.plan.extract.mlir_text import parse_module
from fa4build.plan.extract.tensor_map import pack_map
from fa4build.plan.extract.vectors import replay
from tests.oracles import plan_toy

ROOT = Path(__file__).parents[2]
SPEC = {
    "head_dim": 64,
    "shapes": {
        "x": ["batch", "seqlen", "num_heads", "head_dim"],
        "y": ["batch", "seqlen", "num_heads", 64],
        "row_sum": ["batch", "num_heads", "seqlen"],
    },
}

pytestmark = pytest.mark.dsl


class Compiled:
    """What a compile of the toy kernels left in a directory, and the plans extracted from it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def text(self, name: str) -> str:
        """Host module in generic form."""
        return (self._directory / f"{name}.mlir").read_text(encoding="utf-8")

    def ptx(self, name: str) -> str:
        """PTX of all kernels of a host function."""
        return (self._directory / f"{name}.ptx").read_text(encoding="utf-8")

    def elf(self, name: str) -> bytes:
        """Cubin of a host function."""
        return (self._directory / f"{name}.cubin").read_bytes()

    def plan(self, name: str, spec: dict[str, Any] | None = None) -> LaunchPlan:
        """Extracted plan."""
        return extract_plan(self.text(name), elf=self.elf(name), ptx=self.ptx(name), spec=spec or {})


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """All toy kernels, compiled in one fresh process."""
    directory = tmp_path_factory.mktemp("toys")
    command = [sys.executable, "-m", "tests.kernels_toy.compile_all", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return Compiled(directory)


def check(launches: tuple[Launch, ...], expected: list[dict]) -> None:
    """Every launch that is not empty equals the oracle's, undefined bytes taken as 0."""
    launches = tuple(launch for launch in launches if not launch.is_empty)
    assert [launch.kernel for launch in launches] == [e["kernel"] for e in expected]
    for launch, e in zip(launches, expected, strict=True):
        assert (launch.grid, launch.block, launch.cluster) == (e["grid"], e["block"], e["cluster"])
        assert (launch.smem, launch.pdl, launch.cooperative) == (e["smem"], e["pdl"], False)
        assert len(launch.params) == len(e["params"])
        for param, wanted in zip(launch.params, e["params"], strict=True):
            if isinstance(param, BytesParam):
                assert param.data == wanted
            else:
                assert {name: getattr(param, name) for name in wanted} == wanted


def tensor_inputs(name: str, tensor: tuple) -> dict[str, int]:
    """Input leaves of one tensor (pointer, shape, stride)."""
    pointer, shape, stride = tensor
    leaves = {f"{name}.ptr": pointer}
    leaves |= {f"{name}.shape[{i}]": extent for i, extent in enumerate(shape)}
    return leaves | {f"{name}.stride[{i}]": step for i, step in enumerate(stride)}


def random_rows(rng: random.Random) -> tuple:
    """A (batch, seqlen, num_heads, 64) tensor, rows contiguous or not."""
    shape = [rng.randrange(1, 9), rng.choice([1, 17, 63, 64, 65, 1000, 4096, 1 << 20]), rng.randrange(1, 33), 64]
    stride = [8 * rng.randrange(8, 1 << 30), 8 * rng.randrange(8, 1 << 16), 8 * rng.randrange(8, 1 << 10), 1]
    return rng.randrange(1, 1 << 43) * 16, shape, stride


@pytest.mark.parametrize("seed", range(100))
def test_tma_maps_divisors_and_scalars_equal_the_oracle(compiled: Compiled, seed: int) -> None:
    """Random shapes and strides give byte-equal parameters and equal tensor maps."""
    rng = random.Random(seed)
    x, y = random_rows(rng), random_rows(rng)
    row_sum = (rng.randrange(1 << 40) * 4, [x[1][0], x[1][2], x[1][1]], [rng.randrange(1 << 33), rng.randrange(99), 1])
    scale = struct.unpack("<f", struct.pack("<f", rng.uniform(-3, 3)))[0]
    num_sms = rng.choice([1, 78, 132, 148, 100000])
    inputs = tensor_inputs("x", x) | tensor_inputs("y", y) | tensor_inputs("row_sum", row_sum)
    inputs |= {"scale": scale, "num_sms": num_sms}

    plan = _cached_plan(compiled, "tma")

    check(evaluate(plan, inputs), plan_toy.tma_copy(x, y, row_sum, scale, num_sms))


@pytest.mark.parametrize("seed", range(50))
def test_cluster_and_dependent_launch_equal_the_oracle(compiled: Compiled, seed: int) -> None:
    """Two launches of one host function keep their order and attributes; a host branch becomes a choice."""
    rng = random.Random(seed)
    extent, limit = rng.randrange(1, 1 << 20), rng.randrange(-5, 1 << 20)
    scale = struct.unpack("<f", struct.pack("<f", rng.uniform(-3, 3)))[0]
    offset, pointer = rng.randrange(-(1 << 62), 1 << 62), rng.randrange(1 << 40) * 4
    inputs = tensor_inputs("x", (pointer, [extent], [1]))
    inputs |= {"scale": scale, "offset": offset, "limit": limit}

    plan = _cached_plan(compiled, "two")

    check(evaluate(plan, inputs), plan_toy.two_launches(pointer, extent, scale, offset, limit))


@pytest.mark.parametrize("enabled", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_a_conditional_launch_is_empty_where_it_is_not_made(compiled: Compiled, seed: int, enabled: int) -> None:
    """A launch under a branch gets grid 0 on the other side; members of a tuple are `pair[0]`, `pair[1]`."""
    rng = random.Random(seed)
    pointer, extent, stride, rows = (
        rng.randrange(1 << 40) * 4,
        rng.randrange(1, 999),
        rng.randrange(8, 99),
        rng.randrange(-9, 999),
    )
    inputs = tensor_inputs("x", (pointer, [extent, 8], [stride, 1]))
    inputs |= {"pair[0]": 0.5, "pair[1]": rows, "enabled": enabled}

    plan = _cached_plan(compiled, "conditional")

    expected = plan_toy.conditional_launch(pointer, extent, stride, 0.5, rows, bool(enabled))
    check(evaluate(plan, inputs), expected)


_PLANS: dict[tuple[int, str], LaunchPlan] = {}


def _cached_plan(compiled: Compiled, name: str) -> LaunchPlan:
    key = (id(compiled), name)
    if key not in _PLANS:
        _PLANS[key] = compiled.plan(name, SPEC if name == "tma" else None)
    return _PLANS[key]


def good_inputs(plan: LaunchPlan) -> dict[str, int | float]:
    """Inputs of a stored vector: every guard allows them."""
    return dict(plan.vectors[0].inputs)


def test_struct_padding_is_undefined(compiled: Compiled) -> None:
    """The 2 bytes behind a fast divisor, and the 4 between a row of int32 and int64, are not defined."""
    plan = _cached_plan(compiled, "tma")
    launch = evaluate(plan, good_inputs(plan))[0]

    # parameter 4 is {pointer, 3 x int32, 4 bytes of padding, 2 x int64}, parameter 5 a fast divisor of 10 bytes
    assert launch.params[4].mask == b"\xff" * 20 + bytes(4) + b"\xff" * 16
    assert launch.params[5].mask == b"\xff" * 10 + bytes(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"x.ptr": 8}, "x.ptr must be aligned to 16 bytes", id="alignment"),
        pytest.param({"x.shape[3]": 96}, "x.shape[3] is head_dim and must be 64", id="fact of the spec"),
        pytest.param({"y.shape[3]": 96}, "y.shape[3] must be 64", id="number of the spec"),
        pytest.param({"y.shape[0]": 10**6}, "y.shape[0] is batch and must be equal to x.shape[0]", id="equal extents"),
        pytest.param({"x.stride[3]": 2}, "x.stride[3] must be 1", id="unit stride"),
        pytest.param({"x.stride[1]": 68, "x.shape[1]": 5, "y.shape[1]": 5, "row_sum.shape[2]": 5},
                     "x.stride[1] must be divisible by 8", id="stride divisibility"),
        pytest.param({"x.shape[1]": 0, "y.shape[1]": 0, "row_sum.shape[2]": 0},
                     "x.shape[1] must be at least 1", id="empty"),
        pytest.param({"x.stride[2]": 1 << 40, "x.shape[2]": 2, "y.shape[2]": 2, "row_sum.shape[1]": 2},
                     "x.stride[2] must be a multiple of 8 elements, from 0 to 549755813880", id="map stride range"),
    ],
)  # fmt: skip
def test_guards_refuse_in_the_callers_words(compiled: Compiled, change: dict[str, int], message: str) -> None:
    """Each kind of guard (entry, spec, tensor map) is the first to fail, and says what must hold."""
    plan = _cached_plan(compiled, "tma")

    assert failed_guard(plan, good_inputs(plan)) is None
    assert failed_guard(plan, good_inputs(plan) | change) == message


def test_a_stride_of_extent_one_is_free(compiled: Compiled) -> None:
    """A stride that is never used may be anything."""
    plan = _cached_plan(compiled, "tma")
    ones = {"x.shape[0]": 1, "y.shape[0]": 1, "row_sum.shape[0]": 1}

    assert failed_guard(plan, good_inputs(plan) | ones | {"x.stride[0]": 3}) is None


def test_vectors_are_replayed(compiled: Compiled) -> None:
    """Stored vectors give their digests, after a round trip through JSON too; a changed node makes replay fail."""
    plan = _cached_plan(compiled, "tma")
    again = plan_from_json(plan_to_json(plan))

    assert again == plan
    assert len(plan.vectors) == 4
    assert all(canonical_digest(evaluate(plan, v.inputs)) == v.sha256 for v in plan.vectors)
    index = next(i for i, node in enumerate(plan.nodes) if node == ("const", "i32", 64))
    changed = replace(plan, nodes=(*plan.nodes[:index], ("const", "i32", 128), *plan.nodes[index + 1 :]))
    with pytest.raises(LaunchPlanError, match=r"vectors\[\d\] gives"):
        replay(changed)


def test_extraction_is_deterministic(compiled: Compiled) -> None:
    """Same module, same bytes."""
    assert plan_to_json(compiled.plan("tma")) == plan_to_json(compiled.plan("tma"))


def test_plans_fit_their_ptx_and_cubin(compiled: Compiled) -> None:
    """The extracted plans of all kernels pass validation."""
    for name in ("tma", "two", "conditional"):
        validate_plan(_cached_plan(compiled, name), compiled.ptx(name), compiled.elf(name))


def test_a_plan_of_another_kernel_is_refused(compiled: Compiled) -> None:
    """PTX and cubin of another host function do not have the kernel."""
    plan = _cached_plan(compiled, "tma")

    with pytest.raises(LaunchPlanError, match=r"plan launches toy_tma_0; the PTX has toy_two_fill_0, toy_two_shift_1"):
        validate_plan(plan, compiled.ptx("two"), compiled.elf("two"))


def _first_launch(plan: LaunchPlan, **changes: Any) -> LaunchPlan:
    return replace(plan, launches=(replace(plan.launches[0], **changes), *plan.launches[1:]), vectors=())


def _changed_param(plan: LaunchPlan, index: int, param: Any) -> LaunchPlan:
    params = plan.launches[0].params
    return _first_launch(plan, params=(*params[:index], param, *params[index + 1 :]))


def _bytes_param(plan: LaunchPlan, index: int) -> BytesTemplate:
    param = plan.launches[0].params[index]
    assert isinstance(param, BytesTemplate)
    return param


def _map_param(plan: LaunchPlan) -> TensorMapTemplate:
    param = plan.launches[0].params[0]
    assert isinstance(param, TensorMapTemplate)
    return param


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        pytest.param(lambda p: _first_launch(p, params=p.launches[0].params[:-1]),
                     "V1: the plan has 8 parameters, PTX 9", id="a parameter less"),
        pytest.param(lambda p: _changed_param(p, 1, replace(_bytes_param(p, 1), size=16)),
                     r"V1: parameter 1 has \(size, align\) \(16, 4\) in the plan, \(12, 4\) in PTX", id="size"),
        pytest.param(lambda p: _changed_param(p, 4, replace(_bytes_param(p, 4), align=4)),
                     "V1: parameter 4", id="align"),
        pytest.param(lambda p: _first_launch(p, block=(256, 1, 1)), r"V3: block is \(256, 1, 1\)", id="block"),
        pytest.param(lambda p: _first_launch(p, smem=232449), "V3: 232449 bytes", id="shared memory"),
        pytest.param(lambda p: _changed_param(p, 0, replace(_map_param(p), box=(128, 64, 1, 1))),
                     "V4: tensor map 0 has an inner box of 256 bytes and swizzle 128", id="box beyond swizzle"),
        pytest.param(lambda p: _changed_param(p, 0, replace(_map_param(p), dtype="f32", box=(32, 64, 1, 1))),
                     "V4: tensor map 0 has f32 elements over a tensor of bf16", id="map dtype"),
        pytest.param(lambda p: _changed_param(p, 5, replace(_bytes_param(p, 5), fields=_bytes_param(p, 5).fields[:-1])),
                     "V6: the kernel reads byte 9 of toy_tma_0_param_5", id="undefined byte"),
    ],
)  # fmt: skip
def test_validation_refuses_a_mutated_plan(
    compiled: Compiled, mutate: Callable[[LaunchPlan], LaunchPlan], message: str
) -> None:
    """Each rule is broken by the smallest change to a good plan."""
    with pytest.raises(LaunchPlanError, match=message):
        validate_plan(mutate(_cached_plan(compiled, "tma")), compiled.ptx("tma"), compiled.elf("tma"))


def test_validation_reads_offsets_from_the_cubin(compiled: Compiled) -> None:
    """V2: a cubin whose parameter table says something else is refused, PTX being equal."""
    elf = compiled.elf("tma")
    # KPARAM_INFO payload of parameter 7 of toy_tma_0: index 0, ordinal 7, offset 0x1c0, size 4; moved to 0x1b8
    record = bytes.fromhex("000000000700c00100f01100")
    assert elf.count(record) == 1

    with pytest.raises(LaunchPlanError, match="V2: parameter 7 is at 448 with 4 bytes in the plan, at 440"):
        validate_plan(
            _cached_plan(compiled, "tma"),
            compiled.ptx("tma"),
            elf.replace(record, bytes.fromhex("000000000700b80100f01100")),
        )
    with pytest.raises(LaunchPlanError, match="cannot be read"):
        validate_plan(_cached_plan(compiled, "tma"), compiled.ptx("tma"), elf[:100])


def test_a_data_dependent_loop_is_refused_with_its_place(compiled: Compiled) -> None:
    """Only the power-of-two search of fast division may loop over data."""
    with pytest.raises(
        LaunchPlanError, match=r"DataDependentLoop.*, line \d+ of the generic form: a loop depends on data"
    ):
        compiled.plan("loop")


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"),
    [
        pytest.param('"llvm.sdiv"', '"llvm.intr.unheard_of"',
                     r"line \d+.*llvm.intr.unheard_of is not understood", id="operation"),
        pytest.param("callee = @_cudaLaunchKernelEx", "callee = @_cudaMallocAsync",
                     r"line \d+.*a call of _cudaMallocAsync", id="call"),
        pytest.param(r'<\{value = 4 : i32\}> : \(\) -> i32', "<{value = 9 : i32}> : () -> i32",
                     "a launch has attribute 9; a plan knows 4", id="launch attribute"),
        pytest.param("!llvm.array<1 x ptr>", "!llvm.target<1 x ptr>",
                     "has the type '!llvm.target<1 x ptr>'", id="type"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_an_error_with_its_place(
    compiled: Compiled, pattern: str, replacement: str, message: str
) -> None:
    """A module with something new in it fails; nothing is guessed."""
    text = compiled.text("two")
    start = text.index('sym_name = "cutlass___call__')
    changed = text[:start] + re.sub(pattern, replacement, text[start:], count=1)
    assert changed != text

    with pytest.raises(LaunchPlanError, match=message):
        extract_plan(changed, elf=compiled.elf("two"), ptx=compiled.ptx("two"), spec={})


def test_the_interpreter_finds_a_wrong_execution(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """V8: if the symbolic machine took a division for a multiplication, extraction would fail, not ship it."""
    from fa4build.plan.extract import machine

    monkeypatch.setitem(machine._BINARY, "sdiv", "udiv")
    monkeypatch.setitem(machine._BINARY, "udiv", "mul")
    with pytest.raises(LaunchPlanError, match=r"differs|in the plan|not packed as known"):
        compiled.plan("tma")


def test_a_module_without_entry_is_refused(compiled: Compiled) -> None:
    """Compiled without --enable-tvm-ffi there is no entry, and the error says so."""
    text = compiled.text("two").replace('sym_name = "__tvm_ffi_cutlass', 'sym_name = "renamed')

    with pytest.raises(LaunchPlanError, match="0 tvm-ffi entries, one is needed; compile with --enable-tvm-ffi"):
        extract_plan(text, elf=b"", ptx="", spec={})


def test_a_spec_that_does_not_fit_is_refused(compiled: Compiled) -> None:
    """Facts about tensors the host function does not have are mistakes, not guards to drop."""
    with pytest.raises(LaunchPlanError, match="gives z 1 extents"):
        compiled.plan("two", {"shapes": {"z": [1]}})
    with pytest.raises(LaunchPlanError, match="names num_heads_q and num_heads_kv"):
        compiled.plan("two", {"shapes": {"x": ["n"]}, "multiples": [["num_heads_q", "num_heads_kv"]]})


def test_packed_words_follow_the_worked_example() -> None:
    """A map that a driver encoded: bf16, dims 128 x 1000 x 7 x 3, box 64 x 128, 128-byte swizzle and promotion."""
    param = TensorMapParam(
        dtype="bf16",
        addr=0x7F1234567000,
        dims=(128, 1000, 7, 3),
        strides=(2048, 2048000, 14336000),
        box=(64, 128, 1, 1),
        elem_strides=(1, 1, 1, 1),
        swizzle=128,
        interleave=0,
        l2_promotion=128,
        oob_fill="zero",
    )

    # 0x80 << 32: stride 2048 in units of 16; below it rank, dtype 10, swizzle and promotion as the driver writes them
    expected = (0x00007F1234567000, 0x0000008000046530, 0x000DAC000001F400, 0, 0x000003E70000007F, 0x0000000200000006)
    assert pack_map(param) == (*expected, 0x3F00000000000000, 0x7F)


def test_extraction_is_fast_enough(compiled: Compiled) -> None:
    """Far below a second of a core a module: it must not matter beside a compile of one to two seconds."""
    import time

    start = time.process_time()  # other processes are no part of it
    compiled.plan("tma")

    assert time.process_time() - start < 1.0


def test_a_rendered_plan_names_arguments_and_launches(compiled: Compiled) -> None:
    """The readable form shows the caller's names, the map and the guards."""
    text = render_plan(_cached_plan(compiled, "tma"))

    assert "launch toy_tma_0" in text
    assert "tmap bf16 at x.ptr dims=[64, " in text
    assert "guard x.shape[3] == 64  (spec: x.shape[3] is head_dim and must be 64)" in text


def test_parsing_finds_functions_strings_and_lines(compiled: Compiled) -> None:
    """The parser keeps names, texts and the line of every operation."""
    text = compiled.text("two")
    module = parse_module(text)

    entry = next(name for name in module.functions if name.startswith("__tvm_ffi_cutlass"))
    op = module.functions[entry].blocks["bb0"].ops[0]
    assert '"llvm.' + op.name + '"' in text.split("\n")[op.line - 1]
    assert any("x: Tensor([n0], float32), scale: float32" in value for value in module.strings.values())
