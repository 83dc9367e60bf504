"""A kernel around `exp2_emulated_pair` alone: `python -m tests.kernels.exp2_kernel DIR` writes DIR/<degree>.ptx.

Compiled for sm_100a. One block of 1024 threads; in each round a thread takes one pair of neighbours.
"""

import sys
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import arch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from kernels_src.softmax.exp2_emulation import POLYNOMIALS, exp2_emulated_pair

THREADS = 1024
SYMBOL = "toy_exp2"


class Exp2:
    """y = 2^x, elementwise; both have rounds * 2 * THREADS elements."""

    def __init__(self, degree: int):
        self.degree = degree
        self.kernel.set_name_prefix(SYMBOL, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, rounds: Int32, stream):
        self.kernel(x, y, rounds).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, rounds: Int32):
        thread, _, _ = arch.thread_idx()
        for i in cutlass.range(rounds, unroll=1):
            first = (i * THREADS + thread) * 2
            y[first], y[first + 1] = exp2_emulated_pair(x[first], x[first + 1], self.degree)


def main(directory: Path) -> None:
    """Compile every degree there is."""
    for degree in POLYNOMIALS:
        x, y = (make_fake_tensor(Float32, (cute.sym_int(),), stride=(1,), assumed_align=16) for _ in range(2))
        compiled = cute.compile(
            Exp2(degree), x, y, Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--gpu-arch sm_100a --enable-tvm-ffi --keep-ptx --dump-dir {directory}",
        )  # fmt: skip
        (directory / f"{degree}.ptx").write_text(compiled.__ptx__, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
