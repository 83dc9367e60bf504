"""Two kernels launched by one host function: a cluster launch and a dependent launch, over scalars of several types."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute import arch


class TwoLaunches:
    """First kernel: clusters of two blocks write scale * i. Second, if it pays (n > 256 threads), adds offset."""

    def __init__(self, *, symbol: str):
        self.fill.set_name_prefix(symbol + "_fill", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.shift.set_name_prefix(symbol + "_shift", remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def __call__(self, x: cute.Tensor, scale: Float32, offset: Int64, limit: Int32, stream: cuda.CUstream):
        blocks = cute.ceil_div(x.shape[0], 128)
        even = (blocks + 1) // 2 * 2
        if limit < 0:
            limit = x.shape[0]
        self.fill(x, scale).launch(grid=(even, 1, 1), block=(128, 1, 1), cluster=(2, 1, 1), stream=stream)
        self.shift(x, offset, limit).launch(grid=(blocks, 1, 1), block=(128, 1, 1), use_pdl=True, stream=stream)

    @cute.kernel
    def fill(self, x: cute.Tensor, scale: Float32):
        index = arch.block_idx()[0] * 128 + arch.thread_idx()[0]
        if index < x.shape[0]:
            x[index] = scale * Float32(index)

    @cute.kernel
    def shift(self, x: cute.Tensor, offset: Int64, limit: Int32):
        arch.griddepcontrol_wait()
        index = arch.block_idx()[0] * 128 + arch.thread_idx()[0]
        if index < limit:
            x[index] = x[index] + Float32(offset)
