"""Kernels around `softcap.capped` and `sink.join`: `python -m tests.kernels.sink_kernel DIR` writes DIR/<name>.ptx.

Compiled for sm_100a. One block of 1024 threads, an element a thread.
"""

import sys
from pathlib import Path

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import arch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from kernels_src.softmax.sink import join
from kernels_src.softmax.softcap import capped

THREADS = 1024
SYMBOL = "toy_row"


class Capped:
    """out[0] = capped(a, b); the other arguments are not read."""

    def __init__(self):
        self.kernel.set_name_prefix(SYMBOL, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(a, b, c, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, out: cute.Tensor):
        i, _, _ = arch.thread_idx()
        out[i] = capped(a[i], b[i])


class Joined:
    """out = join(a, b, c): references, sums and factors one behind the other."""

    def __init__(self):
        self.kernel.set_name_prefix(SYMBOL, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(a, b, c, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, out: cute.Tensor):
        i, _, _ = arch.thread_idx()
        out[i], out[i + THREADS], out[i + 2 * THREADS] = join(a[i], b[i], c[i])


def main(directory: Path) -> None:
    """Compile both."""
    for name, kernel in {"capped": Capped, "joined": Joined}.items():
        fake = [make_fake_tensor(Float32, (cute.sym_int(),), stride=(1,), assumed_align=16) for _ in range(4)]
        compiled = cute.compile(
            kernel(), *fake, make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--gpu-arch sm_100a --enable-tvm-ffi --keep-ptx --dump-dir {directory}",
        )  # fmt: skip
        (directory / f"{name}.ptx").write_text(compiled.__ptx__, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
