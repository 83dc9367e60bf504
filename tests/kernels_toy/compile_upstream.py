"""Compiles host functions of the optional packages flash-attn-4 and quack, to extract launch plans from.

`python -m tests.kernels_toy.compile_upstream DIRECTORY ARCH SM_COUNT CASE...` with ARCH 90 or 100 writes, for each
module that the case compiles, CASE-INDEX.mlir (generic form), .ptx and .cubin, as for a device of SM_COUNT
multiprocessors. Nothing is launched: tensors are fake. Cases are in `CASES`.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fa4build.plan.extract.device_facts import StandInDevice, pretend


def launch_nothing(*_args: Any, **_kwargs: Any) -> None:
    """What callers get to call in place of a compiled function."""


class Recorder:
    """Stands in for `cute.compile`, keeping what it returns."""

    def __init__(self, compile_: Any) -> None:
        self._compile = compile_
        self.compiled: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.compiled.append(self._compile(*args, **kwargs))
        return launch_nothing

    def __getitem__(self, item: Any) -> Any:
        inner = self._compile[item]

        def call(*args: Any, **kwargs: Any) -> Any:
            self.compiled.append(inner(*args, **kwargs))
            return launch_nothing

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compile, name)


def attention(
    *,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    kv_heads: int = 8,
    is_varlen: bool = False,
    is_backward: bool = False,
    dtype: str = "bfloat16",
    seqlen: int = 1024,
    page_size: int = 0,
    has_sink: bool = False,
    **options: Any,
) -> Callable[[], None]:
    """A call of the forward or the backward on fake tensors: 2 sequences, 8 query heads."""

    def call() -> None:
        import torch
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

        kind = getattr(torch, dtype)
        wide = torch.bfloat16 if kind.itemsize == 1 else kind
        value_dim = head_dim_v or head_dim

        def tensor(*shape: int, of: torch.dtype = kind) -> torch.Tensor:
            return torch.empty(*shape, dtype=of, device="cuda")

        rows = (2 * seqlen,) if is_varlen else (2, seqlen)
        kv_rows = (64, page_size) if page_size else rows
        q = tensor(*rows, 8, head_dim)
        k, v = tensor(*kv_rows, kv_heads, head_dim), tensor(*kv_rows, kv_heads, value_dim)
        extra: dict[str, Any] = {}
        if is_varlen or page_size:
            starts = tensor(3, of=torch.int32)
            extra |= {"cu_seqlens_q": starts, "max_seqlen_q": seqlen} if is_varlen else {}
            extra |= {"cu_seqlens_k": starts, "max_seqlen_k": seqlen} if not page_size else {}
        if page_size:
            extra |= {"page_table": tensor(2, 32, of=torch.int32), "seqused_k": tensor(2, of=torch.int32)}
        if has_sink:
            extra["learnable_sink"] = tensor(8, of=torch.bfloat16)
        if not is_backward:
            _flash_attn_fwd(q, k, v, return_lse=True, **extra, **options)
            return
        out, dout = tensor(*rows, 8, value_dim, of=wide), tensor(*rows, 8, value_dim, of=wide)
        lse = tensor(*((8, 2 * seqlen) if is_varlen else (2, 8, seqlen)), of=torch.float32)
        _flash_attn_bwd(q, k, v, out, dout, lse, **extra, **options)

    return call


def quack(module: str, function: str, *shapes: tuple | None, **options: Any) -> Callable[[], None]:
    """A call of quack's `module.function` on fake tensors; a shape is bf16 unless another dtype's name leads it."""

    def call() -> None:
        import importlib

        import torch

        def tensor(shape: tuple | None) -> torch.Tensor | None:
            if shape is None:
                return None
            kind = getattr(torch, shape[0]) if isinstance(shape[0], str) else torch.bfloat16
            extents = shape[1:] if isinstance(shape[0], str) else shape
            return torch.empty(extents, dtype=kind, device="cuda")

        getattr(importlib.import_module(f"quack.{module}"), function)(*map(tensor, shapes), **options)

    return call


ROWS, ROW, COLUMN = (1024, 4096), ("float32", 4096), ("float32", 1024)
PARTIAL, SQUARE = ("float32", 132, 4096), (512, 512)

CASES: dict[str, Callable[[], None]] = {
    "fwd_full": attention(),
    "fwd_causal": attention(causal=True),
    "fwd_causal_gqa": attention(causal=True, kv_heads=2),
    "fwd_hd64": attention(head_dim=64, causal=True),
    "fwd_hd192_128": attention(head_dim=192, head_dim_v=128, causal=True),
    "fwd_hd256": attention(head_dim=256),
    "fwd_local": attention(window_size_left=256, window_size_right=0),
    "fwd_varlen": attention(is_varlen=True, causal=True),
    "fwd_paged": attention(page_size=128, causal=True),
    "fwd_split": attention(num_splits=4, causal=True),
    "fwd_softcap": attention(softcap=15.0, causal=True),
    "fwd_sink": attention(has_sink=True, causal=True),
    "fwd_fp8": attention(dtype="float8_e4m3fn"),
    "bwd_causal": attention(is_backward=True, causal=True),
    "bwd_full": attention(is_backward=True),
    "bwd_gqa": attention(is_backward=True, causal=True, kv_heads=2),
    "bwd_deterministic": attention(is_backward=True, causal=True, deterministic=True),
    "bwd_varlen": attention(is_backward=True, is_varlen=True, causal=True),
    "bwd_hd64": attention(is_backward=True, head_dim=64, causal=True),
    "bwd_hd256": attention(is_backward=True, head_dim=256),
    "bwd_hd192_128": attention(is_backward=True, head_dim=192, head_dim_v=128, causal=True),
    "quack_rmsnorm": quack("rmsnorm", "_rmsnorm_fwd", ROWS, ROW, ROWS, None, COLUMN, None, None, None, eps=1e-6),
    "quack_rmsnorm_bwd": quack("rmsnorm", "_rmsnorm_bwd", ROWS, ROW, ROWS, COLUMN, ROWS, PARTIAL, sm_count=132),
    "quack_softmax": quack("softmax", "_softmax_fwd", ROWS, ROWS),
    "quack_softmax_bwd": quack("softmax", "_softmax_backward", ROWS, ROWS, ROWS),
    "quack_cross_entropy": quack("cross_entropy", "cross_entropy_fwd", ROWS, ("int64", 1024)),
    "quack_cross_entropy_bwd": quack("cross_entropy", "cross_entropy_bwd", ROWS, ("int64", 1024), COLUMN, COLUMN),
    "quack_gemm": quack(
        "gemm", "gemm", SQUARE, SQUARE, SQUARE, None, None, tile_M=128, tile_N=128, cluster_M=2, cluster_N=1
    ),
}


def main(directory: Path, arch: str, sm_count: str, names: list[str]) -> None:
    """Compile the named cases, all by default; one that fails is reported and the others go on."""
    target = f"sm_{arch}a"
    os.environ |= {
        "FLASH_ATTENTION_ARCH": arch,
        "FLASH_ATTENTION_NUM_SMS": sm_count,
        "QUACK_ARCH": arch,
        "QUACK_CACHE_ENABLED": "0",
        "CUTE_DSL_ARCH": target,
        "CUTE_DSL_KEEP": "ptx,cubin",
        "CUTE_DSL_DUMP_DIR": str(directory),
    }
    import cutlass.cute as cute
    import cutlass.utils
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    pretend(cutlass.utils.HardwareInfo, StandInDevice(sm_count=int(sm_count), l2_bytes=52_428_815))
    torch.cuda.current_device = lambda: 0
    recorder = Recorder(cute.compile)
    cute.compile = recorder
    for name in names or CASES:
        recorder.compiled.clear()
        try:
            with FakeTensorMode():
                CASES[name]()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        for i, compiled in enumerate(recorder.compiled):
            text = compiled.ir_module.operation.get_asm(print_generic_op_form=True)
            (directory / f"{name}-{i}.mlir").write_text(text, encoding="utf-8")
            (directory / f"{name}-{i}.ptx").write_text(compiled.__ptx__, encoding="utf-8")
            (directory / f"{name}-{i}.cubin").write_bytes(compiled.__cubin__)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
