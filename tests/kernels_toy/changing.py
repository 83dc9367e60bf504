"""Families that are edited by tests: a package written into a directory, with one kernel that multiplies rows."""

from pathlib import Path

ADAPTER = """
from fa4build.families import FamilyKernel, Input, Scalar, kernel_family, one_step

X = Input(name="x", dtype="bf16", shape=("rows", 256))
OUT = Input(name="out", dtype="bf16", shape=("rows", 256))


def compile_kernel(request, options):
    from fa4build.families.tracing import compile_host
    from PACKAGE.kernel import Multiply
    factor = 2.0
    # EDIT
    return compile_host(Multiply(factor), [X, OUT], request, options)


def kernels(arch):
    yield FamilyKernel(id=f"multiply-{arch}-bf16", op="multiply", arch=arch, function="PACKAGE.adapter:compile_kernel")


FAMILY = kernel_family(
    name="changing",
    summary="",
    kernels=kernels,
    op_recipes=lambda built: tuple(one_step(kernel, [X, OUT], results=["out"]) for kernel in built),
)
"""

KERNEL = """
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute import arch

from PACKAGE.constants import SHIFT


class Multiply:
    def __init__(self, factor):
        self.factor = factor

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, out).launch(grid=(x.shape[0], 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        row, column = arch.block_idx()[0], arch.thread_idx()[0]
        while column < x.shape[1]:
            out[row, column] = (x[row, column].to(Float32) * self.factor + SHIFT).to(BFloat16)
            column += 128
"""


def write_package(directory: Path, name: str, edit: str = "", sources: str = "") -> Path:
    """Adapter, kernel and constants; `edit` goes into the compile function, `sources` into the family."""
    package = directory / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "constants.py").write_text("SHIFT = 1.0\n")
    (package / "kernel.py").write_text(KERNEL.replace("PACKAGE", name))
    adapter = ADAPTER.replace("PACKAGE", name).replace("    # EDIT\n", f"    {edit}\n" if edit else "")
    (package / "adapter.py").write_text(adapter.replace('summary="",', f'summary="", {sources}'))
    return package


def edit(path: Path, old: str, new: str) -> None:
    """Replace text in a file that must hold it."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
