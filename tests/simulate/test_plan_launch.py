"""Launching through launch plans: the product's own parameters reach the kernel, and a plan that does not match
says so.
"""

import json

import numpy as np
import pytest

from fa4build.errors import SimulationError
from fa4build.plan import TensorMapParam, plan_from_json
from fa4build.simulate import simulate
from fa4build.simulate.plan_launch import legal_strides
from tests.simulate.ptx_snippets import text_of


def _plan(**changes):
    """`snippet` on one CTA: out.ptr, x.ptr and x.ptr + 4 * x.stride[0] as its three parameters."""
    launch = {
        "kernel": "snippet",
        "grid": [6, 7, 7],
        "block": [32, 1, 1],
        "cluster": [1, 1, 1],
        "smem": 0,
        "pdl": False,
        "cooperative": False,
        "params": [{"kind": "bytes", "size": 8, "align": 8, "fields": [[0, node]]} for node in (0, 1, 5)],
    }
    plan = {
        "format": "fa4build.launchplan",
        "version": 1,
        "origin": {"kind": "handwritten"},
        "spec": {},
        "args": [
            {"name": "out", "kind": "tensor", "dtype": "i32", "rank": 1},
            {"name": "x", "kind": "tensor", "dtype": "i32", "rank": 2},
        ],
        "nodes": [
            ["in", "i64", "out.ptr"],
            ["in", "i64", "x.ptr"],
            ["in", "i64", "x.stride[0]"],
            ["const", "i64", 4],
            ["mul", "i64", 2, 3],
            ["add", "i64", 1, 4],
            ["const", "i32", 1],
            ["const", "i32", 1],
        ],
        "guards": [],
        "launches": [{**launch, **changes}],
        "vectors": [],
    }
    return plan_from_json(json.dumps(plan))


BODY = text_of(
    "mul.wide.u32 %rd5, %r0, 4; add.s64 %rd5, %rd5, %rd2; ld.global.b32 %r9, [%rd5]; st.global.b32 [%rd0], %r9;"
)


def test_arrays_reach_the_kernel_by_name_shape_and_stride():
    """x is a strided view: the third parameter points at its second row."""
    base = np.arange(200, dtype=np.int32).reshape(2, 100)
    out = np.zeros(32, np.int32)
    (report,) = simulate(_plan(), BODY, {"out": out, "x": base[:, 10:42]}, {}, checks=True, unwritten=("out",))

    assert out.tolist() == list(range(110, 142))
    assert report.warp_instructions > 0


def test_missing_array_is_named():
    """The plan's arguments are the contract."""
    with pytest.raises(SimulationError, match=r"tensor argument 'x'; arrays given: out"):
        simulate(_plan(), BODY, {"out": np.zeros(32, np.int32)}, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "other"}, r"the plan launches other, the PTX holds snippet"),
        ({"block": [64, 1, 1]}, r"launched with 64 threads, the PTX requires 32"),
        ({"params": []}, r"0 parameters given, the PTX declares 3"),
    ],
)
def test_plan_of_another_kernel_is_refused(changes, message):
    """Kernel name, block and parameters must agree with the PTX."""
    arrays = {"out": np.zeros(32, np.int32), "x": np.zeros((2, 32), np.int32)}
    with pytest.raises(SimulationError, match=message):
        simulate(_plan(**changes), BODY, arrays, {})


def test_stride_of_an_extent_of_one_is_made_legal():
    """docs/formats.md: the inner extent in bytes, rounded up to 16; other strides stay."""
    param = TensorMapParam(
        dtype="bf16", addr=0, dims=(17, 1, 5), strides=(7, 640), box=(8, 1, 1), elem_strides=(1, 1, 1), swizzle=0,
        interleave=0, l2_promotion=128, oob_fill="zero",
    )  # fmt: skip

    # 17 elements of 2 bytes are 34, rounded up 48
    assert legal_strides(param) == (48, 640)
