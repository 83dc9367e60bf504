"""In the compile process: one host function of flash-attn-4, through the library's own Python code on fake tensors.

The library chooses kernel class, tiles and flags from shapes; we choose the shapes, and check the choice it made.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from fa4build.compiling.compile_worker import HostFunction
from fa4build.errors import CompileError
from fa4build.families.tracing import compile_by_library, rewrite_functions, use_target

HEADS_KV = 2
BATCH = 2
SEQLEN_K = 4096
# The number of multiprocessors by which the library chooses between kernels where only the shape does not decide. None
# of the declared kernels depends on it.
NUM_SMS_FOR_SELECTION = "148"

_PASSED_AS_BYTES = ("e4m3", "e5m2")

_TENSORS = {"mQ": "q", "mK": "k", "mV": "v", "mO": "out", "mLSE": "lse"}
_VARLEN = {"mCuSeqlensQ": "cu_seqlens_q", "mCuSeqlensK": "cu_seqlens_k"}
_PAGED = {"mPageTable": "page_table", "mSeqUsedK": "seqused_k"}
_WINDOW = {"window_size_left": "window_left", "window_size_right": "window_right"}
_QUERY, _KEY = ("batch", "seqlen_q"), ("batch", "seqlen_k")


# Whose functions most kernels trace; those of single kernels are rewritten by the child that needs them.
_COMMON_MODULES = (
    "block_info",
    "flash_bwd_postprocess",
    "flash_bwd_preprocess",
    "flash_bwd_sm100",
    "flash_bwd_sm90",
    "flash_fwd",
    "flash_fwd_sm100",
    "flash_fwd_sm90",
    "mask",
    "pack_gqa",
    "softmax",
    "tile_scheduler",
)


def warm() -> None:
    """In the server, before it forks for several compiles."""
    rewrite_functions(f"flash_attn.cute.{name}" for name in _COMMON_MODULES)


def compile_kernel(request: Mapping[str, Any], options: str) -> HostFunction:
    """Compile what `matrix` declares. Raises: CompileError when the library chose another kernel than was declared."""
    wanted = request["payload"]
    arch = request["target"][3:].rstrip("a")
    os.environ |= {"FLASH_ATTENTION_ARCH": arch, "FLASH_ATTENTION_NUM_SMS": NUM_SMS_FOR_SELECTION}
    use_target(request["target"])
    interface = importlib.import_module("flash_attn.cute.interface")
    caches = [
        function.compile_cache
        for function in (
            interface._flash_attn_fwd,
            interface._flash_attn_fwd_combine,
            interface._flash_attn_bwd,
            interface._bwd_preprocess,
            interface._bwd_postprocess_convert,
        )
    ]
    is_forward = wanted["call"] in ("forward", "split", "combine")
    return compile_by_library(
        forward_call(interface, wanted) if is_forward else backward_call(interface, wanted),
        wanted=_wanted(wanted["call"], arch, (wanted["head_dim"], wanted["head_dim_v"])),
        request=request,
        options=options,
        spec=spec(wanted),
        names=names(wanted, arch),
        bindings={"max_seqlen_q": "mQ.shape[1]"} if _binds_length(wanted, arch) else {},
        types=dict.fromkeys(("mQ", "mK", "mV"), wanted["dtype"]) if wanted["dtype"] in _PASSED_AS_BYTES else {},
        forget=lambda: [cache.clear() for cache in caches] and None,
        check=lambda host: check(request["name"], host, wanted),
    )


def _binds_length(wanted: Mapping[str, Any], arch: str) -> bool:
    """Whether the host takes the longest query as a number of its own, though a tensor's extent says it."""
    return wanted["call"] == "forward" and arch != "90" and wanted["layout"] != "varlen"


def _wanted(call: str, arch: str, dims: tuple[int, int]) -> tuple[str, int]:
    """Class of the host object, and which of that class in the order of the library's compiles."""
    family = "90" if arch == "90" else "100"
    return {
        "forward": (f"FlashAttentionForwardSm{family}", 0),
        "split": (f"FlashAttentionForwardSm{family}", 0),
        "combine": ("FlashAttentionForwardCombine", 0),
        "bwd_preprocess": ("FlashAttentionBackwardPreprocess", 0),
        "bwd": (f"FlashAttentionBackwardSm{family}", 0),
        "bwd_dq": ("FlashAttentionBackwardPostprocess", 0),
        # The last: where dq, dk and dv are converted by equal kernels, the library compiles one.
        "bwd_dkv": ("FlashAttentionBackwardPostprocess", -1),
    }[call]


def check(name: str, host: Any, wanted: Mapping[str, Any]) -> None:
    """What the library chose must be what the matrix says, since workspaces and rules follow from that."""
    given = {
        "tile_m": getattr(host, "tile_m", None),
        "tile_n": getattr(host, "tile_n", None),
        "cta_group": 2 if getattr(host, "use_2cta_instrs", False) else 1,
    }
    # A postprocess calls the rows it converts tile_m, also those of keys, and has no other tile.
    if wanted["call"] == "bwd_dkv":
        given["tile_m"], given["tile_n"] = None, given["tile_m"]
    for fact, expected in wanted.get("expected", {}).items():
        if wanted["call"].startswith(("bwd_", "combine")) and fact == "cta_group":
            continue
        if given[fact] is not None and given[fact] != expected:
            raise CompileError(f"{name}: the library chose {fact} = {given[fact]}, the matrix declares {expected}.")


# --- calls ------------------------------------------------------------------------------------------------------------


def _makers() -> tuple[Callable[..., Any], dict[str, Any]]:
    import torch

    dtypes = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "e4m3": torch.float8_e4m3fn,
        "f32": torch.float32,
        "i32": torch.int32,
    }

    def tensor(dtype: str, *shape: int) -> Any:
        return torch.empty(*shape, dtype=dtypes[dtype], device="cuda")

    return tensor, dtypes


def _mask(wanted: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "full": {},
        "causal": {"causal": True},
        "local": {"window_size_left": 256, "window_size_right": 64},
    }[wanted["mask"]]


def forward_call(interface: Any, wanted: Mapping[str, Any]) -> Callable[[], object]:
    """The library's forward on fake tensors of the shapes that lead to the wanted kernel."""

    def call() -> None:
        tensor, _ = _makers()
        dtype, ratio, layout = wanted["dtype"], wanted["ratio"], wanted["layout"]
        seqlen_q = wanted["rows"] // ratio
        heads = HEADS_KV * ratio
        rows_q = (BATCH * seqlen_q,) if layout == "varlen" else (BATCH, seqlen_q)
        rows_k = {"dense": (BATCH, SEQLEN_K), "varlen": (BATCH * SEQLEN_K,), "paged": (64, wanted["page_size"])}[layout]
        options: dict[str, Any] = _mask(wanted)
        if layout == "varlen":
            starts = tensor("i32", BATCH + 1)
            options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
            options |= {"max_seqlen_q": seqlen_q, "max_seqlen_k": SEQLEN_K}
        if layout == "paged":
            options |= {"page_table": tensor("i32", BATCH, 32), "seqused_k": tensor("i32", BATCH)}
        if wanted["call"] in ("split", "combine"):
            options["num_splits"] = 4
        if wanted.get("sink"):
            options["learnable_sink"] = tensor("bf16", heads)
        if wanted.get("softcap"):
            options["softcap"] = wanted["softcap"]
        interface._flash_attn_fwd(
            tensor(dtype, *rows_q, heads, wanted["head_dim"]),
            tensor(dtype, *rows_k, HEADS_KV, wanted["head_dim"]),
            tensor(dtype, *rows_k, HEADS_KV, wanted["head_dim_v"]),
            return_lse=True,
            **options,
        )

    return call


def backward_call(interface: Any, wanted: Mapping[str, Any]) -> Callable[[], object]:
    """The library's backward on fake tensors."""

    def call() -> None:
        tensor, _ = _makers()
        dtype, heads, seqlen = wanted["dtype"], HEADS_KV * wanted["ratio"], wanted["rows"]
        is_varlen = wanted["layout"] == "varlen"
        rows = (BATCH * seqlen,) if is_varlen else (BATCH, seqlen)
        options = {**_mask(wanted), "deterministic": wanted["deterministic"]}
        if is_varlen:
            starts = tensor("i32", BATCH + 1)
            options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
            options |= {"max_seqlen_q": seqlen, "max_seqlen_k": seqlen}
        interface._flash_attn_bwd(
            tensor(dtype, *rows, heads, wanted["head_dim"]),
            tensor(dtype, *rows, HEADS_KV, wanted["head_dim"]),
            tensor(dtype, *rows, HEADS_KV, wanted["head_dim_v"]),
            tensor(dtype, *rows, heads, wanted["head_dim_v"]),
            tensor(dtype, *rows, heads, wanted["head_dim_v"]),
            tensor("f32", *((heads, BATCH * seqlen) if is_varlen else (BATCH, heads, seqlen))),
            **options,
        )

    return call


# --- names and facts that host code does not check --------------------------------------------------------------------


def names(wanted: Mapping[str, Any], arch: str) -> dict[str, str]:
    """The library's parameter names -> ours, of the forward; the backward's steps are called by position."""
    if wanted["call"] != "forward":
        return {}
    layout = {"dense": {}, "varlen": _VARLEN, "paged": _PAGED}[wanted["layout"]]
    sink = {"learnable_sink": "sink"} if wanted.get("sink") else {}
    return {**_TENSORS, **layout, **(_WINDOW if wanted["mask"] == "local" else {}), **sink}


def spec(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Extents that are fixed, equal or multiples, under the library's names (docs: `plan.guards`)."""
    facts = {name: wanted[name] for name in ("dtype", "head_dim", "head_dim_v", "mask", "layout")}
    facts |= {name: wanted[name] for name in ("softcap",) if name in wanted}
    shapes = _SHAPES[wanted["call"]](wanted)
    return {**facts, "shapes": shapes, "multiples": _multiples(shapes, wanted["ratio"])}


def _multiples(shapes: Mapping[str, list[Any]], ratio: int) -> list[list[Any]]:
    named = {extent for shape in shapes.values() for extent in shape}
    return [["num_heads_q", "num_heads_kv", ratio]] if {"num_heads_q", "num_heads_kv"} <= named else []


def _forward_shapes(wanted: Mapping[str, Any]) -> dict[str, list[Any]]:
    layout = wanted["layout"]
    rows_q = ["total_q"] if layout == "varlen" else [*_QUERY]
    rows_k = {"dense": [*_KEY], "varlen": ["total_k"], "paged": ["num_pages", wanted["page_size"]]}[layout]
    shapes = {
        "mQ": [*rows_q, "num_heads_q", "head_dim"],
        "mK": [*rows_k, "num_heads_kv", "head_dim"],
        "mV": [*rows_k, "num_heads_kv", "head_dim_v"],
        "mO": [*rows_q, "num_heads_q", "head_dim_v"],
        "mLSE": ["num_heads_q", "total_q"] if layout == "varlen" else ["batch", "num_heads_q", "seqlen_q"],
    }
    if layout == "varlen":
        shapes |= {"mCuSeqlensQ": ["batch_plus_1"], "mCuSeqlensK": ["batch_plus_1"]}
    if layout == "paged":
        shapes |= {"mPageTable": ["batch", "max_pages"], "mSeqUsedK": ["batch"]}
    if wanted.get("sink"):
        shapes |= {"learnable_sink": ["num_heads_q"]}
    return shapes


def _split_shapes(wanted: Mapping[str, Any]) -> dict[str, list[Any]]:
    shapes = _forward_shapes(wanted)
    return shapes | {"mO": ["num_splits", *shapes["mO"]], "mLSE": ["num_splits", *shapes["mLSE"]]}


def _combine_shapes(wanted: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {
        "mO_partial": ["num_splits", *_QUERY, "num_heads_q", "head_dim_v"],
        "mLSE_partial": ["num_splits", *_QUERY, "num_heads_q"],
        "mO": [*_QUERY, "num_heads_q", "head_dim_v"],
        "mLSE": [*_QUERY, "num_heads_q"],
    }


def _backward_shapes(wanted: Mapping[str, Any]) -> dict[str, list[Any]]:
    is_varlen = wanted["layout"] == "varlen"
    rows_q, rows_k = (["total_q"], ["total_k"]) if is_varlen else ([*_QUERY], [*_KEY])
    return {
        "mQ": [*rows_q, "num_heads_q", "head_dim"],
        "mK": [*rows_k, "num_heads_kv", "head_dim"],
        "mV": [*rows_k, "num_heads_kv", "head_dim_v"],
        "mdO": [*rows_q, "num_heads_q", "head_dim_v"],
    }


def _preprocess_shapes(wanted: Mapping[str, Any]) -> dict[str, list[Any]]:
    rows = ["total_q"] if wanted["layout"] == "varlen" else [*_QUERY]
    return {"mO": [*rows, "num_heads_q", "head_dim_v"], "mdO": [*rows, "num_heads_q", "head_dim_v"]}


def _postprocess_shapes(wanted: Mapping[str, Any]) -> dict[str, list[Any]]:
    rows = ["total_q"] if wanted["layout"] == "varlen" else [*_QUERY]
    return {"mdQ": [*rows, "num_heads_q", "head_dim"]}


_SHAPES: dict[str, Callable[[Mapping[str, Any]], dict[str, list[Any]]]] = {
    "forward": _forward_shapes,
    "split": _split_shapes,
    "combine": _combine_shapes,
    "bwd_preprocess": _preprocess_shapes,
    "bwd": _backward_shapes,
    "bwd_dq": _postprocess_shapes,
    "bwd_dkv": _postprocess_shapes,
}
