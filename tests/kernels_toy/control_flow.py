"""Host functions whose control flow depends on their arguments: one that can be a plan, one that cannot."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute import arch


class ConditionalLaunch:
    """Launches only when `enabled`; the value comes from a pair, or from a branch."""

    def __init__(self, *, symbol: str):
        self.fill.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, pair: tuple[Float32, Int32], enabled: Boolean, ignored: None, stream: cuda.CUstream
    ):
        rows = x.shape[0]
        if pair[1] > 0:
            if pair[1] < rows:
                rows = pair[1]
        if enabled:
            self.fill(x, pair[0], rows).launch(grid=(cute.ceil_div(rows, 64), 1, 1), block=(64, 1, 1), stream=stream)

    @cute.kernel
    def fill(self, x: cute.Tensor, value: Float32, rows: Int32):
        row = arch.block_idx()[0] * 64 + arch.thread_idx()[0]
        if row < rows:
            for column in cutlass.range(x.shape[1], unroll=1):
                x[row, column] = value


class DataDependentLoop:
    """Adds up the digits of a number on the host: how often the loop runs depends on it."""

    def __init__(self, *, symbol: str):
        self.fill.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def __call__(self, x: cute.Tensor, number: Int32, stream: cuda.CUstream):
        total = Int32(0)
        while number > 0:
            total += number % 10
            number = number // 10
        self.fill(x, total).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def fill(self, x: cute.Tensor, value: Int32):
        x[arch.thread_idx()[0]] = Float32(value)
