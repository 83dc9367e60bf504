"""The family `quack`: memory-bound kernels of quack-kernels, an optional package. The smallest example of a family.

Row length and dtype are compile-time constants of these kernels, so both are axes; the number of rows is not.
`rmsnorm_bwd` is compiled for an unknown number of rows, as the library does for a symbolic shape.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fa4build.compiling.compile_worker import HostFunction
from fa4build.families.interface import Family, Input, OpRecipe, Scalar
from fa4build.families.kernels import TORCH_WORKER, FamilyKernel, Pinned, kernel_family, licence_files, one_step

DISTRIBUTION = "quack-kernels"
ROW_LENGTHS = (1024, 2048, 4096, 8192)
DTYPES = ("bf16", "fp16")
_ROWS, _PER_ROW = ("rows", "n"), ("rows",)

# op -> tensors of the host function in its order, as (name, dtype, shape); "x" is the dtype of the axis.
TENSORS: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "rmsnorm": (("x", "x", _ROWS), ("weight", "f32", ("n",)), ("out", "x", _ROWS), ("rstd", "f32", _PER_ROW)),
    "rmsnorm_bwd": (
        ("x", "x", _ROWS),
        ("weight", "f32", ("n",)),
        ("dout", "x", _ROWS),
        ("rstd", "f32", _PER_ROW),
        ("dx", "x", _ROWS),
        ("dw_partial", "f32", ("num_sms", "n")),
    ),
    "softmax": (("x", "x", _ROWS), ("out", "x", _ROWS)),
    "softmax_bwd": (("dy", "x", _ROWS), ("y", "x", _ROWS), ("dx", "x", _ROWS)),
    "cross_entropy": (
        ("x", "x", _ROWS),
        ("target", "i64", _PER_ROW),
        ("loss", "f32", _PER_ROW),
        ("lse", "f32", _PER_ROW),
    ),
    "cross_entropy_bwd": (
        ("x", "x", _ROWS),
        ("target", "i64", _PER_ROW),
        ("dloss", "f32", _PER_ROW),
        ("dx", "x", _ROWS),
        ("lse", "f32", _PER_ROW),
    ),
}
RESULTS = {
    "rmsnorm": ("out", "rstd"),
    "rmsnorm_bwd": ("dx", "dw_partial"),
    "softmax": ("out",),
    "softmax_bwd": ("dx",),
    "cross_entropy": ("loss", "lse"),
    "cross_entropy_bwd": ("dx",),
}
SCALARS = {
    "rmsnorm": (Scalar(name="eps", default="1e-6"),),
    "rmsnorm_bwd": (),
    "softmax": (),
    "softmax_bwd": (),
    "cross_entropy": (Scalar(name="ignore_index", default="-100"),),
    "cross_entropy_bwd": (Scalar(name="ignore_index", default="-100"),),
}


def kernels(arch: str) -> Iterable[FamilyKernel]:
    """The declared matrix for one target."""
    for op in TENSORS:
        for dtype in DTYPES:
            for n in ROW_LENGTHS:
                yield FamilyKernel(
                    id=f"{op}-{arch}-{dtype}-n{n}",
                    op=op,
                    arch=arch,
                    function=f"{__name__}:compile_kernel",
                    payload={"op": op, "dtype": dtype, "n": n},
                    axes={"dtype": dtype, "n": n},
                )


def op_recipes(built: Sequence[FamilyKernel]) -> tuple[OpRecipe, ...]:
    """One kernel a call: results and workspaces are allocated, then it runs."""
    return tuple(_recipe(kernel) for kernel in built)


def _recipe(kernel: FamilyKernel) -> OpRecipe:
    dtype, n = str(kernel.axes["dtype"]), int(str(kernel.axes["n"]))
    tensors = [
        Input(name=name, dtype=_dtype(kind, dtype), shape=tuple(n if extent == "n" else extent for extent in shape))
        for name, kind, shape in TENSORS[kernel.op]
    ]
    recipe = one_step(kernel, [*tensors, *SCALARS[kernel.op]], RESULTS[kernel.op])
    if kernel.op != "rmsnorm_bwd":
        return recipe
    (step,) = recipe.steps  # its last argument is how many partial sums of dw there are
    return replace(recipe, steps=(replace(step, arguments=(*step.arguments, "num_sms")),))


def _dtype(kind: str, dtype: str) -> str:
    return dtype if kind == "x" else kind


def compile_kernel(request: Mapping[str, Any], options: str) -> HostFunction:
    """Compile one of them: the library's own compile function, with our compiler options."""
    import cutlass
    import cutlass.cute as cute

    from fa4build.families.tracing import name_kernels, use_target

    op, n = request["payload"]["op"], request["payload"]["n"]
    os.environ["QUACK_ARCH"] = request["target"][3:].rstrip("a")
    use_target(request["target"])
    dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[request["payload"]["dtype"]]
    real = cute.compile

    def compile_named(host: Any, *arguments: Any, **given: Any) -> Any:
        name_kernels(host, request["symbol"])
        return real(host, *arguments, **given | {"options": options, "no_jit_engine": True})

    cute.compile = compile_named
    compiled = _library_compile(op, dtype, n)
    return HostFunction(compiled=compiled, spec=_spec(op, request["payload"]["dtype"], n), names=NAMES[op])


def _library_compile(op: str, dtype: Any, n: int) -> Any:
    """Call the library's compile function of an op, without its cache."""
    import cutlass

    # by name: the package has functions of the same names
    rmsnorm, softmax, cross_entropy = (
        importlib.import_module(f"quack.{name}") for name in ("rmsnorm", "softmax", "cross_entropy")
    )
    f32, i64 = cutlass.Float32, cutlass.Int64
    calls: dict[str, Callable[[], Any]] = {
        "rmsnorm": lambda: rmsnorm._compile_rmsnorm_fwd.__wrapped__(
            dtype, dtype, None, f32, None, None, n, True, False, False, False
        ),
        "rmsnorm_bwd": lambda: rmsnorm._compile_rmsnorm_bwd.__wrapped__(
            n, dtype, dtype, dtype, f32, False, None, None, True
        ),
        "softmax": lambda: softmax.Softmax.compile.__wrapped__(dtype, dtype, n),
        "softmax_bwd": lambda: softmax.SoftmaxBackward.compile.__wrapped__(dtype, dtype, dtype, n),
        "cross_entropy": lambda: cross_entropy.CrossEntropy.compile.__wrapped__(
            dtype, i64, None, n, True, False, None, None
        ),
        "cross_entropy_bwd": lambda: cross_entropy.CrossEntropyBackward.compile.__wrapped__(dtype, i64, n, None),
    }
    return calls[op]()


# The library's parameter names -> ours.
NAMES = {
    "rmsnorm": {"mX": "x", "mW": "weight", "mO": "out", "mRstd": "rstd"},
    "rmsnorm_bwd": {"mX": "x", "mW": "weight", "mdO": "dout", "mRstd": "rstd", "mdX": "dx", "mdW": "dw_partial"},
    "softmax": {"mX": "x", "mO": "out"},
    "softmax_bwd": {"mdY": "dy", "mY": "y", "mdX": "dx"},
    "cross_entropy": {"mX": "x", "mTarget": "target", "mLoss": "loss", "mLSE": "lse"},
    "cross_entropy_bwd": {"mX": "x", "mTarget": "target", "mDLoss": "dloss", "mdX": "dx", "mLSE": "lse"},
}


def _spec(op: str, dtype: str, n: int) -> dict[str, Any]:
    """Row length and equal numbers of rows, guarded under the library's names."""
    theirs = {ours: name for name, ours in NAMES[op].items()}
    shapes = {theirs[name]: list(shape) for name, _, shape in TENSORS[op]}
    return {"dtype": dtype, "n": n, "shapes": shapes}


def _notices() -> dict[str, bytes]:
    return licence_files(DISTRIBUTION)


FAMILY: Family = kernel_family(
    name="quack",
    summary="Memory-bound kernels of quack",
    kernels=kernels,
    op_recipes=op_recipes,
    distributions=[Pinned(name=DISTRIBUTION, tested=("0.6.5",))],
    environment={"QUACK_CACHE_ENABLED": "0"},
    worker=TORCH_WORKER,
    notices=_notices,
    may_spill=True,
)
