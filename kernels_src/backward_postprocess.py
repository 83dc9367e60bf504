"""Converts a float32 gradient accumulator to the input type, times a factor (softmax_scale for dQ and dK, 1 for dV).

The scale is applied once, here, after the sum over all tiles. One CTA a tile of 128 rows of one head; bound by memory.
Runs on every target.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import arch

NUM_THREADS = 256
TILE_M = 128
ELEMENTS = 8  # elements of one 16-byte store


class BackwardPostprocess:
    """Calling it is the host function `bwd_postprocess` of docs/formats.md.

    Args:
        symbol: prefix of the device entry, which is `<symbol>_0`.
        dtype: cutlass.BFloat16 or cutlass.Float16, of the gradient.
        head_dim: columns of both, a multiple of 16.
    """

    def __init__(self, *, symbol: str, dtype, head_dim: int):
        self.dtype, self.head_dim = dtype, head_dim
        self.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def __call__(self, accumulator: cute.Tensor, gradient: cute.Tensor, scale: Float32, stream):
        batch, seqlen, num_heads, _ = gradient.shape
        self.kernel(accumulator, gradient, scale).launch(
            grid=(cute.ceil_div(seqlen, TILE_M), num_heads, batch), block=(NUM_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, accumulator: cute.Tensor, gradient: cute.Tensor, scale: Float32):
        m_block, head, batch = arch.block_idx()
        thread = arch.thread_idx()[0]
        source = accumulator[batch, head, None, None]
        target = gradient[batch, None, head, None]
        pieces = self.head_dim // ELEMENTS
        for step in cutlass.range(TILE_M * pieces // NUM_THREADS, unroll=4):
            index = step * NUM_THREADS + thread
            row, piece = m_block * TILE_M + index // pieces, index % pieces
            if row < target.shape[0]:
                values = cute.make_rmem_tensor((ELEMENTS,), Float32)
                cute.autovec_copy(cute.local_tile(source[row, None], (ELEMENTS,), (piece,)), values)
                for i in cutlass.range_constexpr(ELEMENTS):
                    values[i] = values[i] * scale
                converted = cute.make_rmem_tensor((ELEMENTS,), self.dtype)
                converted.store(values.load().to(self.dtype))
                cute.autovec_copy(converted, cute.local_tile(target[row, None], (ELEMENTS,), (piece,)))
