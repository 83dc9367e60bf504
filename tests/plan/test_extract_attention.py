"""Contract under test: extraction works on real attention kernels, ours and upstream's.

- Our forward: the four tensor maps, guards and launch facts are those of the operator's signature (docs/formats.md, 1).
- Upstream's flash-attn-4 and quack (optional packages, marker `upstream`): every host function of the listed cases
  gives a plan that fits PTX and cubin; an SM count that a trace baked in becomes the input `dev.sm_count`.
"""

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fa4build.compiling.compile import Cubin
from fa4build.matrix.variants import parse_variant
from fa4build.plan import (
    LaunchPlan,
    TensorMapParam,
    evaluate,
    failed_guard,
    plan_from_json,
    plan_to_json,
)
from fa4build.plan.extract import extract_plan, validate_plan
from fa4build.plan.extract.device_facts import StandInDevice, with_device_inputs
from fa4build.plan.extract.vectors import replay
from fa4build.plan.guards import add_guards
from tests.built import cubin_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def forward() -> Cubin:
    """Our causal forward with head dimension 128, compiled as a build does it."""
    variant = parse_variant("fwd-sm90a-bf16-hd128-causal")
    return cubin_of(variant.id)


def forward_inputs(rng: random.Random) -> dict[str, int | float]:
    """A problem of random extents with packed rows: strides as torch gives them for contiguous tensors."""
    batch, heads_kv, ratio = rng.randrange(1, 5), rng.randrange(1, 9), rng.randrange(1, 9)
    seqlen_q, seqlen_k, heads_q = rng.randrange(1, 5000), rng.randrange(1, 5000), heads_kv * ratio
    shapes = {
        "q": (batch, seqlen_q, heads_q, 128),
        "k": (batch, seqlen_k, heads_kv, 128),
        "v": (batch, seqlen_k, heads_kv, 128),
        "out": (batch, seqlen_q, heads_q, 128),
        "lse": (batch, heads_q, seqlen_q),
    }
    inputs: dict[str, int | float] = {"softmax_scale": 0.125, "window_left": 1 << 30, "window_right": 0, "num_sms": 132}
    for name, shape in shapes.items():
        inputs[f"{name}.ptr"] = rng.randrange(1, 1 << 39) * 256
        step = 1
        for i in reversed(range(len(shape))):
            inputs[f"{name}.shape[{i}]"], inputs[f"{name}.stride[{i}]"] = shape[i], step
            step *= shape[i]
    return inputs


@pytest.mark.dsl
@pytest.mark.parametrize("seed", range(20))
def test_our_forward_maps_its_tensors(forward: Cubin, seed: int) -> None:
    """Maps of q, k, v, out run over (head_dim, seqlen, heads, batch) of the caller's tensor, strides in bytes."""
    inputs = forward_inputs(random.Random(seed))
    (launch,) = evaluate(forward.plan, inputs)
    maps = [param for param in launch.params if isinstance(param, TensorMapParam)]

    assert failed_guard(forward.plan, inputs) is None
    assert [m.addr for m in maps] == [inputs[f"{name}.ptr"] for name in ("q", "k", "v", "out")]
    for m, name in zip(maps, ("q", "k", "v", "out"), strict=True):
        assert m.dims == tuple(inputs[f"{name}.shape[{i}]"] for i in (3, 1, 2, 0))
        assert m.strides == tuple(2 * inputs[f"{name}.stride[{i}]"] for i in (1, 2, 0))
        assert (m.dtype, m.swizzle, m.oob_fill, m.elem_strides) == ("bf16", 128, "zero", (1, 1, 1, 1))


@pytest.mark.dsl
def test_our_forward_fits_ptx_and_cubin_and_round_trips(forward: Cubin) -> None:
    """What a build stores is valid, replays its vectors, and reads back equal."""
    validate_plan(forward.plan, forward.ptx, forward.elf)
    assert plan_from_json(plan_to_json(forward.plan)) == forward.plan
    assert replay(forward.plan) is forward.plan
    assert [launch.kernel for launch in forward.plan.launches] == ["fwd_sm90a_bf16_hd128_causal_0"]


@pytest.mark.dsl
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q.shape[3]": 64}, "q.shape[3] is head_dim and must be 128"),
        ({"v.shape[3]": 64}, "v.shape[3] is head_dim_v and must be 128"),
        ({"k.shape[0]": 77}, "k.shape[0] is batch and must be equal to q.shape[0]"),
        ({"v.shape[1]": 7777}, "v.shape[1] is seqlen_k and must be equal to k.shape[1]"),
        ({"k.ptr": 24}, "k.ptr must be aligned to 16 bytes"),
        ({"q.stride[3]": 2}, "q.stride[3] must be 1"),
        ({"k.shape[2]": 77, "v.shape[2]": 77}, "q.shape[2] is num_heads_q and must be a multiple of k.shape[2]"),
    ],
)
def test_our_forward_refuses_what_it_was_not_compiled_for(forward: Cubin, change: dict[str, int], message: str) -> None:
    """With the signature's extents in the spec, every mistake is refused by name."""
    spec = {
        **{"dtype": "bf16", "head_dim": 128, "head_dim_v": 128},
        "shapes": {
            "q": ["batch", "seqlen_q", "num_heads_q", "head_dim"],
            "k": ["batch", "seqlen_k", "num_heads_kv", "head_dim"],
            "v": ["batch", "seqlen_k", "num_heads_kv", "head_dim_v"],
            "out": ["batch", "seqlen_q", "num_heads_q", "head_dim_v"],
            "lse": ["batch", "num_heads_q", "seqlen_q"],
        },
        "multiples": [["num_heads_q", "num_heads_kv"]],
    }
    plan = add_guards(replace(forward.plan, spec=spec, vectors=()))
    inputs = forward_inputs(random.Random(0))

    assert failed_guard(plan, inputs) is None
    assert failed_guard(plan, inputs | change) == message


def compile_upstream(directory: Path, arch: str, sm_count: int, *cases: str) -> None:
    """Compile upstream's host functions in a fresh process."""
    command = [sys.executable, "-m", "tests.kernels_toy.compile_upstream", str(directory), arch, str(sm_count), *cases]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)


def load_plan(directory: Path, name: str) -> LaunchPlan:
    """Extract a module that `compile_upstream` left, and check the plan against PTX and cubin."""
    ptx, elf = (directory / f"{name}.ptx").read_text(encoding="utf-8"), (directory / f"{name}.cubin").read_bytes()
    plan = extract_plan((directory / f"{name}.mlir").read_text(encoding="utf-8"), elf=elf, ptx=ptx, spec={})
    validate_plan(plan, ptx, elf)
    return plan


@pytest.mark.upstream
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("arch", "refused"),
    [
        ("90", {"fwd_split", "fwd_fp8"}),  # upstream has neither for compute capability 9.0
        ("100", set()),
    ],
)
def test_every_upstream_host_function_becomes_a_plan(tmp_path: Path, arch: str, refused: set[str]) -> None:
    """Forward, backward with its pre- and postprocessing, combine, quack: all extract, validate and replay."""
    pytest.importorskip("flash_attn")
    from tests.kernels_toy.compile_upstream import CASES

    compile_upstream(tmp_path, arch, 143)
    names = sorted(path.stem for path in tmp_path.glob("*-?.mlir"))

    # a case whose every module was compiled by an earlier case leaves none: fwd_* first, so only backwards may
    missing = set(CASES) - {name.rpartition("-")[0] for name in names}
    assert missing == refused
    for name in names:
        replay(load_plan(tmp_path, name))


@pytest.mark.upstream
@pytest.mark.slow
def test_upstreams_baked_sm_count_becomes_an_input(tmp_path: Path) -> None:
    """The persistent forward for compute capability 10.0 launches at most one block a multiprocessor of the device."""
    pytest.importorskip("flash_attn")
    plans = []
    for sm_count in (143, 159):
        directory = tmp_path / str(sm_count)
        directory.mkdir()
        compile_upstream(directory, "100", sm_count, "fwd_full")
        plans.append(load_plan(directory, "fwd_full-0"))

    devices = [StandInDevice(sm_count=sm_count, l2_bytes=52_428_815) for sm_count in (143, 159)]
    plan = with_device_inputs(plans[0], plans[1], devices[0], devices[1])
    inputs = dict(plan.vectors[0].inputs) | {"mQ.shape[0]": 64, "mQ.shape[1]": 65536, "mQ.shape[2]": 64}
    grids = [evaluate(plan, inputs | {"dev.sm_count": count})[0].grid[0] for count in (1 << 20, 148, 160)]
    assert grids[1:] == [148, 160]
    assert grids[0] > 160
