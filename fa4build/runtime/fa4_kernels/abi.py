"""The interface between packs and dispatcher, as plain data: operator signatures, plan version, manifest schema.

A pack states `ABI_HASH` of the builder that made it; a dispatcher loads a pack only if its own hash is equal. Nothing
here knows kernels, torch or CUDA. Source: docs/formats.md, sections 1 to 3.
"""

import hashlib
import json
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
SIGNATURES: dict[str, tuple[tuple[Any, ...], ...]] = {
    "fwd/dense": (
        ("q", "tensor", "variant", ("batch", "seqlen_q", "num_heads_q", "head_dim"), 16),
        ("k", "tensor", "variant", ("batch", "seqlen_k", "num_heads_kv", "head_dim"), 16),
        ("v", "tensor", "variant", ("batch", "seqlen_k", "num_heads_kv", "head_dim_v"), 16),
        ("out", "tensor", "output", ("batch", "seqlen_q", "num_heads_q", "head_dim_v"), 16),
        ("lse", "tensor", "f32", ("batch", "num_heads_q", "seqlen_q"), 4),
        ("softmax_scale", "scalar", "f32"),
        ("window_left", "scalar", "i32"),
        ("window_right", "scalar", "i32"),
        ("num_sms", "scalar", "i32"),
    ),
    "bwd_preprocess/dense": (
        ("out", "tensor", "variant", ("batch", "seqlen_q", "num_heads_q", "head_dim_v"), 16),
        ("dout", "tensor", "variant", ("batch", "seqlen_q", "num_heads_q", "head_dim_v"), 16),
        ("lse", "tensor", "f32", ("batch", "num_heads_q", "seqlen_q"), 4),
        ("dpsum", "tensor", "f32", ("batch", "num_heads_q", "seqlen_q_rounded"), 16),
        ("lse_log2", "tensor", "f32", ("batch", "num_heads_q", "seqlen_q_rounded"), 16),
        ("dq_accum", "tensor", "f32", ("batch", "num_heads_q", "seqlen_q_rounded", "head_dim"), 16),
        ("dq_semaphore", "tensor", "i32", ("batch", "num_heads_q", "num_m_blocks"), 4),
    ),
    "bwd/dense": (
        ("q", "tensor", "variant", ("batch", "seqlen_q", "num_heads_q", "head_dim"), 16),
        ("k", "tensor", "variant", ("batch", "seqlen_k", "num_heads_kv", "head_dim"), 16),
        ("v", "tensor", "variant", ("batch", "seqlen_k", "num_heads_kv", "head_dim_v"), 16),
        ("dout", "tensor", "variant", ("batch", "seqlen_q", "num_heads_q", "head_dim_v"), 16),
        ("dpsum", "tensor", "f32", ("batch", "num_heads_q", "seqlen_q_rounded"), 16),
        ("lse_log2", "tensor", "f32", ("batch", "num_heads_q", "seqlen_q_rounded"), 16),
        ("dq_accum", "tensor", "f32", ("batch", "num_heads_q", "seqlen_q_rounded", "head_dim"), 16),
        ("dq_semaphore", "tensor", "i32", ("batch", "num_heads_q", "num_m_blocks"), 4),
        ("dk", "tensor", "variant", ("batch", "seqlen_k", "num_heads_kv", "head_dim"), 16),
        ("dv", "tensor", "variant", ("batch", "seqlen_k", "num_heads_kv", "head_dim_v"), 16),
        ("softmax_scale", "scalar", "f32"),
        ("window_left", "scalar", "i32"),
        ("window_right", "scalar", "i32"),
        ("num_sms", "scalar", "i32"),
    ),
    "bwd_postprocess/dense": (
        ("accumulator", "tensor", "f32", ("batch", "num_heads", "seqlen_rounded", "head_dim"), 16),
        ("gradient", "tensor", "variant", ("batch", "seqlen", "num_heads", "head_dim"), 16),
        ("scale", "scalar", "f32"),
    ),
}
"""`<op>/<layout>` -> arguments in call order."""


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
