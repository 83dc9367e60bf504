"""Contract of flash-attn-4's kernels as a build makes them (optional package, marker `upstream`).

- Launch plans take the names of the operator signature, and refuse by name what the kernel was not compiled for.
- A number of multiprocessors that a trace baked in is an input of the plan.
- The library's choice of tiles is compared with the declared one; another version of the library is refused.
- Every declared kernel is one that the library chooses, with the declared tiles and clusters.
- The wheel carries the licences and the versions.
"""

import importlib.util
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from fa4build.compiling.compile import CompileOptions
from fa4build.compiling.executors import LocalExecutor
from fa4build.compiling.toolchain import current_toolchain
from fa4build.errors import CompileError, ToolchainError
from fa4build.families import flash_attn_4
from fa4build.families.registry import family_named
from fa4build.matrix.selection import Selection
from fa4build.pipeline import build_matrix, find_cached
from fa4build.plan import LaunchPlan, evaluate, failed_guard, plan_from_json
from fa4build.runtime.fa4_kernels.abi import SIGNATURES
from fa4build.shipping.release import write_wheels
from fa4build.store.cache import Cache

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn-4 is not installed"),
]
HOPPER = "fwd-sm90a-bf16-hd128-causal-r4"
PERSISTENT = "fwd-sm100a-bf16-hd128-full-r1-2cta"
FAMILY = family_named("flash-attn-4")
SELECTION = Selection(globs=(HOPPER, PERSISTENT))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """Two forward kernels, built."""
    cache = Cache(tmp_path_factory.mktemp("upstream"))
    report = build_matrix(SELECTION, cache, 1, family=FAMILY)
    assert report.exit_code == 0, [outcome.message for outcome in report.outcomes]
    return cache


@pytest.fixture(scope="module")
def plans(cache: Cache) -> dict[str, LaunchPlan]:
    """Their launch plans by id."""
    found = find_cached(FAMILY.expand(SELECTION), cache, family=FAMILY)
    return {recipe.name: plan_from_json(cache.read(entry, "plan").decode()) for recipe, entry in found}


def inputs_of(heads_q: int, heads_kv: int) -> dict[str, int | float]:
    """A dense problem of compact tensors: batch 2, 300 queries, 500 keys, head_dim 128."""
    shapes = {"q": (2, 300, heads_q, 128), "out": (2, 300, heads_q, 128), "lse": (2, heads_q, 300)}
    shapes |= dict.fromkeys(("k", "v"), (2, 500, heads_kv, 128))
    inputs: dict[str, int | float] = {"softmax_scale": 0.125, "dev.sm_count": 148}
    for number, (name, shape) in enumerate(shapes.items(), 1):
        inputs[f"{name}.ptr"] = number << 24
        step = 1
        for i in reversed(range(len(shape))):
            inputs[f"{name}.shape[{i}]"], inputs[f"{name}.stride[{i}]"] = shape[i], step
            step *= shape[i]
    return inputs


@pytest.mark.parametrize("name", [HOPPER, PERSISTENT])
def test_arguments_are_those_of_the_signature(plans, name):
    """Every argument but device facts, so the functions of fa4_kernels call it like one of ours."""
    signature = [row[0] for row in SIGNATURES["fwd/dense"]]
    named = [arg.name for arg in plans[name].args if arg.kind != "device"]

    assert named == [argument for argument in signature if argument in named]
    assert {"q", "k", "v", "out", "lse", "softmax_scale"} == set(named)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q.shape[3]": 64}, "q.shape[3] is head_dim and must be 128"),
        ({"v.shape[3]": 64}, "v.shape[3] is head_dim_v and must be 128"),
        ({"k.shape[2]": 1, "v.shape[2]": 1}, "q.shape[2] is num_heads_q and must be 4 times k.shape[2]"),
        ({"v.shape[1]": 499}, "v.shape[1] is seqlen_k and must be equal to k.shape[1]"),
        ({"k.ptr": 24}, "k.ptr must be aligned to 16 bytes"),
        ({"q.stride[3]": 2}, "q.stride[3] must be 1"),
        ({"q.stride[1]": 1028}, "q.stride[1] must be a multiple of 8 elements, from 0 to 549755813880"),
    ],
)
def test_what_it_was_not_compiled_for_is_refused_by_name(plans, change, message):
    """Head dimension, GQA ratio, equal extents, alignment, strides: the library's host code checks few of them."""
    inputs = inputs_of(8, 2)

    assert failed_guard(plans[HOPPER], inputs) is None
    assert failed_guard(plans[HOPPER], inputs | change) == message


def test_the_number_of_multiprocessors_is_an_input(plans):
    """2 heads, 2 batches, ceil(300 / 512) clusters of 2 blocks: 8 blocks, or what the device has, in whole clusters."""
    grids = {}
    for sm_count in (148, 7):
        (launch,) = evaluate(plans[PERSISTENT], inputs_of(2, 2) | {"dev.sm_count": sm_count})
        grids[sm_count] = launch.grid[0]

    assert plans[PERSISTENT].launches[0].cluster == (2, 1, 1)
    assert {148: 8, 7: 6} == grids


def test_the_wheel_carries_licences_and_versions(cache, tmp_path):
    """BSD-3 of flash-attn-4, Apache-2.0 of quack, and both versions in the manifest."""
    only = Selection(globs=(HOPPER,))
    (wheel,) = write_wheels(only, cache, out_dir=tmp_path, platforms=(), family=FAMILY)
    with zipfile.ZipFile(wheel.path) as archive:
        texts = {Path(n).name: archive.read(n).decode() for n in archive.namelist() if "/licenses/" in n}
        manifest = json.loads(archive.read("fa4_kernels_upstream_sm90a/manifest.json"))
        metadata = next(archive.read(n).decode() for n in archive.namelist() if n.endswith("METADATA"))

    assert "Redistributions in binary form must reproduce" in texts["flash-attn-4-LICENSE"]
    assert {"LICENSE", "flash-attn-4-LICENSE", "quack-kernels-LICENSE"} <= set(texts)
    assert manifest["toolchain"]["flash-attn-4"] == "4.0.0b36"
    assert (manifest["family"], manifest["pack"]) == ("upstream", "fa4-kernels-upstream-sm90a")
    assert "License-Expression: BSD-3-Clause AND Apache-2.0" in metadata


def test_another_version_is_refused_with_the_tested_ones(monkeypatch):
    """Before anything is compiled."""
    real = flash_attn_4.FAMILY.toolchain(current_toolchain())
    version = next(d.version for d in real.distributions if d.name == "flash-attn-4")
    assert version == "4.0.0b36"

    def newer(name, search_path=None):
        return replace(next(d for d in real.distributions if d.name == name), version="4.1.0")

    monkeypatch.setattr("fa4build.families.kernels.installed_distribution", newer)
    with pytest.raises(
        ToolchainError, match=r"flash-attn-4 4\.1\.0 is installed; tested: 4\.0\.0b36\. Run: pip install"
    ):
        FAMILY.toolchain(current_toolchain())


@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm103"])
def test_every_declared_kernel_is_one_that_the_library_chooses(arch):
    """Class, tiles and cluster, for shapes of the kernel's class of lengths; a process, which the target is set for."""
    command = [sys.executable, "-m", "tests.kernels_toy.declared_upstream", arch]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=900, check=True)
    found = json.loads(done.stdout.splitlines()[-1])

    assert found["wrong"] == {}
    assert found["chosen"] == found["declared"] == len(FAMILY.expand(Selection(arches=(arch,), globs=("*",))))


def test_a_wrong_declaration_fails_the_build(tmp_path):
    """The tile of a workspace is the library's choice; a declared one that differs is told with both figures."""
    (kernel,) = FAMILY.expand(Selection(globs=("bwd_preprocess-sm90a-bf16-hd128-m64",)))
    wrong = replace(kernel, payload={**kernel.payload, "expected": {"tile_m": 80}})
    toolchain = FAMILY.toolchain(current_toolchain())
    recipe = FAMILY.recipe(wrong, toolchain, CompileOptions())
    with LocalExecutor(toolchain, jobs=1, timeout_s=300, worker=FAMILY.worker) as executor:
        executor.submit(recipe.request, recipe.options, tmp_path / "work")
        result = executor.wait().result

    assert isinstance(result, CompileError)
    assert "the library chose tile_m = 64, the matrix declares 80" in str(result)
