"""Converts a float32 gradient accumulator to the input type, times a factor (softmax_scale for dQ and dK, 1 for dV).

The scale is applied once, here, after the sum over all tiles. One CTA a tile of 128 rows of one head; bound by memory.
Runs on every target.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute import arch

from kernels_src.scheduling import padded_tiles
from kernels_src.scheduling.varlen_tiles import sequence_length

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
    def __call__(
        self,
        *,
        accumulator: cute.Tensor,
        gradient: cute.Tensor,
        cu_seqlens=None,
        seqused=None,
        scale: Float32,
        stream,
    ):
        if const_expr(cu_seqlens is None):
            batch, seqlen, num_heads, _ = gradient.shape
            grid = (cute.ceil_div(seqlen, TILE_M), num_heads, batch)
        else:
            grid = (cute.ceil_div(accumulator.shape[1], TILE_M), gradient.shape[1], 1)
        self.kernel(accumulator, gradient, cu_seqlens, seqused, scale).launch(
            grid=grid, block=(NUM_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, accumulator: cute.Tensor, gradient: cute.Tensor, cu_seqlens, seqused, scale: Float32):
        m_block, head, batch = arch.block_idx()
        if const_expr(cu_seqlens is None):
            target = gradient[batch, None, head, None]
            self._convert(accumulator[batch, head, None, None], target, m_block, target.shape[0], scale)
        else:
            sequence, tile = padded_tiles.sequence_of(m_block, cu_seqlens)
            # The rows of the gradient are counted from where row 0 of the accumulator's first tile would lie.
            first_row = (m_block - tile) * TILE_M
            target = cute.domain_offset((cu_seqlens[sequence] - first_row, 0), gradient[None, head, None])
            length = sequence_length(cu_seqlens, seqused, sequence)
            self._convert(accumulator[head, None, None], target, m_block, first_row + length, scale)

    @cute.jit
    def _convert(self, source, target, m_block, past_row, scale):
        """Rows of one tile up to `past_row`, 16 bytes a store."""
        thread = arch.thread_idx()[0]
        pieces = self.head_dim // ELEMENTS
        for step in cutlass.range(TILE_M * pieces // NUM_THREADS, unroll=4):
            index = step * NUM_THREADS + thread
            row, piece = m_block * TILE_M + index // pieces, index % pieces
            if row < past_row:
                values = cute.make_rmem_tensor((ELEMENTS,), Float32)
                cute.autovec_copy(cute.local_tile(source[row, None], (ELEMENTS,), (piece,)), values)
                for i in cutlass.range_constexpr(ELEMENTS):
                    values[i] = values[i] * scale
                converted = cute.make_rmem_tensor((ELEMENTS,), self.dtype)
                converted.store(values.load().to(self.dtype))
                cute.autovec_copy(converted, cute.local_tile(target[row, None], (ELEMENTS,), (piece,)))
