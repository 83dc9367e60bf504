"""The interface between packs and dispatcher, as plain data: operator signatures, plan version, manifest schema.

A pack states `ABI_HASH` of the builder that made it; a dispatcher loads a pack only if its own hash is equal. Nothing
here knows kernels, torch or CUDA. Source: docs/formats.md, sections 1 to 3.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable
from typing import Any

PLAN_FORMAT = "fa4build.launchplan"
PLAN_VERSION = 1
MANIFEST_SCHEMA = 1

WINDOW_UNBOUNDED = 1 << 30
"""Value of `window_left` / `window_right` for a side without a bound."""

TARGETS = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3)}
"""Target of a cubin -> the one compute capability that runs it (`a` targets are not forward compatible)."""

OUTPUT_DTYPES = {"bf16": "bf16", "fp16": "fp16", "e4m3": "bf16", "e5m2": "bf16"}
"""Variant dtype -> dtype of `out`."""

# Tensor: (name, "tensor", dtype, shape, alignment of pointer and strides in bytes). Scalar: (name, "scalar", dtype).
# dtype "variant" is the variant's own, "output" is OUTPUT_DTYPES of it. The last stride of every tensor is 1.
Row = tuple[Any, ...]


def _tensor(name: str, dtype: str, shape: str, alignment: int = 16) -> Row:
    return (name, "tensor", dtype, tuple(shape.split()), alignment)


def _scalars(dtype: str, names: str) -> tuple[Row, ...]:
    return tuple((name, "scalar", dtype) for name in names.split())


_SCALE_AND_WINDOW = (*_scalars("f32", "softmax_scale"), *_scalars("i32", "window_left window_right num_sms"))
_SOFTCAP = _scalars("f32", "softcap")
_SINK = (_tensor("sink", "f32", "num_heads_q", 4),)
_DESCALES = tuple(_tensor(f"{x}_descale", "f32", "batch num_heads_kv", 4) for x in "qkv")
_CU_SEQLENS_Q, _CU_SEQLENS_K = (_tensor(f"cu_seqlens_{x}", "i32", "batch_plus_one", 4) for x in "qk")
# No element means that the whole of every sequence is used.
_SEQUSED_Q, _SEQUSED_K = (_tensor(f"seqused_{x}", "i32", f"num_seqused_{x}", 4) for x in "qk")

# The rows of a query or key tensor by layout, and what follows the tensors.
_QUERY_ROWS = {"dense": "batch seqlen_q", "varlen": "total_q", "paged": "total_q"}
_KEY_ROWS = {"dense": "batch seqlen_k", "varlen": "total_k", "paged": "num_pages page_size"}
_PER_ROW = {
    "dense": "batch num_heads_q seqlen_q",
    "varlen": "num_heads_q total_q",
    "paged": "num_heads_q total_q",
}
_LENGTHS = {
    "dense": (),
    "varlen": (_CU_SEQLENS_Q, _CU_SEQLENS_K, _SEQUSED_Q, _SEQUSED_K),
    "paged": (_CU_SEQLENS_Q, _tensor("page_table", "i32", "batch max_pages", 4), _SEQUSED_Q, _SEQUSED_K),
}


def _inputs(layout: str) -> tuple[Row, ...]:
    queries, keys = _QUERY_ROWS[layout], _KEY_ROWS[layout]
    return (
        _tensor("q", "variant", f"{queries} num_heads_q head_dim"),
        _tensor("k", "variant", f"{keys} num_heads_kv head_dim"),
        _tensor("v", "variant", f"{keys} num_heads_kv head_dim_v"),
    )


def _forward(layout: str, *, fp8: bool, sink: bool, softcap: bool, split: bool) -> tuple[Row, ...]:
    out = f"{_QUERY_ROWS[layout]} num_heads_q head_dim_v"
    results = (_tensor("out", "output", out), _tensor("lse", "f32", _PER_ROW[layout], 4))
    if split:
        results = (
            _tensor("out_partial", "f32", f"num_splits {out}"),
            _tensor("lse_partial", "f32", f"num_splits {_PER_ROW[layout]}", 4),
        )
    features = (*(_DESCALES if fp8 else ()), *(_SINK if sink else ()), *(_SOFTCAP if softcap else ()))
    return (*_inputs(layout), *results, *_LENGTHS[layout], *_SCALE_AND_WINDOW, *features)


def _combine(*, sink: bool) -> tuple[Row, ...]:
    out, lse = "batch seqlen_q num_heads_q head_dim_v", _PER_ROW["dense"]
    return (
        _tensor("out_partial", "f32", f"num_splits {out}"),
        _tensor("lse_partial", "f32", f"num_splits {lse}", 4),
        _tensor("out", "output", out),
        _tensor("lse", "f32", lse, 4),
        *(_SINK if sink else ()),
    )


# The backward's workspaces: rows of every sequence rounded up to whole tiles.
_PADDED_ROWS = {"dense": "batch num_heads_q seqlen_q_rounded", "varlen": "num_heads_q total_q_padded"}
_TILES = {"dense": "batch num_heads_q num_m_blocks", "varlen": "num_heads_q num_m_blocks"}


def _workspaces(layout: str) -> tuple[Row, ...]:
    rows = _PADDED_ROWS[layout]
    return (
        _tensor("dpsum", "f32", rows),
        _tensor("lse_log2", "f32", rows),
        _tensor("dq_accum", "f32", f"{rows} head_dim"),
        _tensor("dq_semaphore", "i32", _TILES[layout], 4),
    )


def _preprocess(layout: str) -> tuple[Row, ...]:
    out = f"{_QUERY_ROWS[layout]} num_heads_q head_dim_v"
    outputs = (_tensor("out", "variant", out), _tensor("dout", "variant", out))
    given = (*outputs, _tensor("lse", "f32", _PER_ROW[layout], 4))
    return (*given, *_workspaces(layout), *(() if layout == "dense" else (_CU_SEQLENS_Q, _SEQUSED_Q)))


def _backward(layout: str, *, softcap: bool) -> tuple[Row, ...]:
    keys = _KEY_ROWS[layout]
    return (
        *_inputs(layout),
        _tensor("dout", "variant", f"{_QUERY_ROWS[layout]} num_heads_q head_dim_v"),
        *_workspaces(layout),
        _tensor("dk", "variant", f"{keys} num_heads_kv head_dim"),
        _tensor("dv", "variant", f"{keys} num_heads_kv head_dim_v"),
        *_LENGTHS[layout],
        *_SCALE_AND_WINDOW,
        *(_SOFTCAP if softcap else ()),
    )


def _postprocess(layout: str) -> tuple[Row, ...]:
    if layout == "dense":
        return (
            _tensor("accumulator", "f32", "batch num_heads seqlen_rounded head_dim"),
            _tensor("gradient", "variant", "batch seqlen num_heads head_dim"),
            *_scalars("f32", "scale"),
        )
    return (
        _tensor("accumulator", "f32", "num_heads total_padded head_dim"),
        _tensor("gradient", "variant", "total num_heads head_dim"),
        _tensor("cu_seqlens", "i32", "batch_plus_one", 4),
        _tensor("seqused", "i32", "num_seqused", 4),
        *_scalars("f32", "scale"),
    )


def _named(name: str, **switches: bool) -> str:
    return "/".join((name, *(switch for switch, is_on in switches.items() if is_on)))


def _signatures() -> dict[str, tuple[Row, ...]]:
    found = {}
    for layout in _QUERY_ROWS:
        for fp8, sink, softcap, split in itertools.product((False, True), repeat=4):
            # Dense keys are split as packed ones, and a sink joins the sum once, where splits are combined.
            if split and (layout == "dense" or sink):
                continue
            switches = {"fp8": fp8, "sink": sink, "softcap": softcap, "split": split}
            found[_named(f"fwd/{layout}", **switches)] = _forward(layout, **switches)
    for sink in (False, True):
        found[_named("fwd_combine/dense", sink=sink)] = _combine(sink=sink)
    for layout in _PADDED_ROWS:
        found[f"bwd_preprocess/{layout}"] = _preprocess(layout)
        for softcap in (False, True):
            found[_named(f"bwd/{layout}", softcap=softcap)] = _backward(layout, softcap=softcap)
        found[f"bwd_postprocess/{layout}"] = _postprocess(layout)
    return found


SIGNATURES: dict[str, tuple[Row, ...]] = _signatures()
"""`<op>/<layout>`, then `fp8` and the features that are on, in alphabetical order -> arguments in call order."""


def signature_name(op: str, layout: str, dtype: str, features: Iterable[str]) -> str:
    """The key of SIGNATURES for a kernel; one that is not there is called in a way this version does not know."""
    return "/".join((op, layout, *sorted({*features, *(("fp8",) if dtype in ("e4m3", "e5m2") else ())})))


def abi_hash() -> str:
    """Sha256 (hex) over everything a pack and a dispatcher must agree on."""
    facts = {
        "manifest_schema": MANIFEST_SCHEMA,
        "output_dtypes": OUTPUT_DTYPES,
        "plan_format": PLAN_FORMAT,
        "plan_version": PLAN_VERSION,
        "signatures": SIGNATURES,
        "window_unbounded": WINDOW_UNBOUNDED,
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


ABI_HASH = abi_hash()
