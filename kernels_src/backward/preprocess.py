"""What the backward kernel needs per query row before it starts, and its accumulators set to zero.

For every query row: dpsum = sum_j dO[j] * O[j] (from O as stored, in float32) and the log-sum-exp in powers of two, so
that the main kernel recomputes P = 2^(scale_log2 * S - lse_log2) without a division. Rows that see no key, and the
padding rows up to a whole tile, get lse_log2 = +inf: P is 0 whatever S is, and the main kernel needs no row mask.

One CTA a tile of 128 rows of one head and sequence (scheduling.padded_tiles where sequences are packed). Bound by
memory: O and dO are read once, dq_accum is written once.
Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2, line 4. Runs on every target.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute import arch

from kernels_src.scheduling import padded_tiles
from kernels_src.scheduling.varlen_tiles import sequence_length

NUM_THREADS = 256
TILE_M = 128
ELEMENTS = 8  # 16-bit elements of one 16-byte load
LOG2_E = 1.4426950408889634


def lanes_per_row(head_dim_v: int) -> int:
    """Neighbouring threads that share a row: the largest power of two up to a warp that divides its 16-byte pieces."""
    pieces = head_dim_v // ELEMENTS
    return min(32, pieces & -pieces)


class BackwardPreprocess:
    """Calling it is the host function `bwd_preprocess` of docs/formats.md.

    Args:
        symbol: prefix of the device entry, which is `<symbol>_0`.
        dtype: cutlass.BFloat16 or cutlass.Float16, of out and dout.
        head_dim: columns of dq_accum, a multiple of 4. head_dim_v: columns of out and dout, a multiple of 8.
    """

    def __init__(self, *, symbol: str, dtype, head_dim: int, head_dim_v: int):
        self.dtype, self.head_dim, self.head_dim_v = dtype, head_dim, head_dim_v
        self.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def __call__(
        self,
        *,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dpsum: cute.Tensor,
        lse_log2: cute.Tensor,
        dq_accum: cute.Tensor,
        dq_semaphore: cute.Tensor,
        cu_seqlens_q=None,
        seqused_q=None,
        stream,
    ):
        if const_expr(cu_seqlens_q is None):
            batch, seqlen_q, num_heads, _ = out.shape
            grid = (cute.ceil_div(seqlen_q, TILE_M), num_heads, batch)
        else:
            grid = (dq_semaphore.shape[1], out.shape[1], 1)
        self.kernel(out, dout, lse, dpsum, lse_log2, dq_accum, dq_semaphore, cu_seqlens_q, seqused_q).launch(
            grid=grid, block=(NUM_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dpsum: cute.Tensor,
        lse_log2: cute.Tensor,
        dq_accum: cute.Tensor,
        dq_semaphore: cute.Tensor,
        cu_seqlens_q,
        seqused_q,
    ):
        m_block, head, batch = arch.block_idx()
        if const_expr(cu_seqlens_q is None):
            self._tile(
                out[batch, None, head, None],
                dout[batch, None, head, None],
                lse[batch, head, None],
                dpsum[batch, head, None],
                lse_log2[batch, head, None],
                dq_accum[batch, head, None, None],
                dq_semaphore[batch, head, None],
                m_block,
                out.shape[1],
            )
        else:
            sequence, tile = padded_tiles.sequence_of(m_block, cu_seqlens_q)
            # The rows of the inputs are counted from where row 0 of the workspace's first tile would lie.
            first = cu_seqlens_q[sequence] - (m_block - tile) * TILE_M
            length = sequence_length(cu_seqlens_q, seqused_q, sequence)
            self._tile(
                cute.domain_offset((first, 0), out[None, head, None]),
                cute.domain_offset((first, 0), dout[None, head, None]),
                cute.domain_offset((first,), lse[head, None]),
                dpsum[head, None],
                lse_log2[head, None],
                dq_accum[head, None, None],
                dq_semaphore[head, None],
                m_block,
                (m_block - tile) * TILE_M + length,
            )

    @cute.jit
    def _tile(self, out, dout, lse, dpsum, lse_log2, dq_accum, dq_semaphore, m_block, past_row):
        """Rows m_block * TILE_M .. of every tensor; those from `past_row` on do not exist in the inputs."""
        thread = arch.thread_idx()[0]
        self._row_sums(out, dout, dpsum, m_block, thread, past_row)
        if thread < TILE_M:
            row = m_block * TILE_M + thread
            value = Float32.inf
            if row < past_row:
                natural = lse[row]
                value = Float32.inf if natural == -Float32.inf else natural * Float32(LOG2_E)
            lse_log2[row] = value
        if thread == 0:
            dq_semaphore[m_block] = Int32(0)
        self._zero(dq_accum, m_block, thread)

    @cute.jit
    def _row_sums(self, out, dout, dpsum, m_block, thread, past_row):
        """dpsum of the tile's rows; rows beyond the sequence get 0. `lanes` threads share a row."""
        lanes = lanes_per_row(self.head_dim_v)
        lane = thread % lanes
        for step in cutlass.range(TILE_M * lanes // NUM_THREADS, unroll=4):
            row = m_block * TILE_M + step * (NUM_THREADS // lanes) + thread // lanes
            total = Float32(0.0)
            if row < past_row:
                for piece in cutlass.range_constexpr(self.head_dim_v // (ELEMENTS * lanes)):
                    total = total + self._dot(out, dout, row, piece * lanes + lane)
            distance = lanes // 2
            while const_expr(distance > 0):
                total = total + arch.shuffle_sync_bfly(total, offset=distance)
                distance = distance // 2
            if lane == 0:
                dpsum[row] = total

    @cute.jit
    def _dot(self, out, dout, row, piece) -> Float32:
        """Sum of the products of one 16-byte piece of a row, left to right, in float32.

        The multiply-add is written out: with sm_100 the compiler would choose one with 16-bit operands for fp16 alone.
        """
        values = cute.make_rmem_tensor((ELEMENTS,), self.dtype)
        gradients = cute.make_rmem_tensor((ELEMENTS,), self.dtype)
        cute.autovec_copy(cute.local_tile(out[row, None], (ELEMENTS,), (piece,)), values)
        cute.autovec_copy(cute.local_tile(dout[row, None], (ELEMENTS,), (piece,)), gradients)
        a, b = values.load().to(Float32), gradients.load().to(Float32)
        total = a[0] * b[0]
        for i in cutlass.range_constexpr(1, ELEMENTS):
            total = arch.inline_ptx(
                "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a[i], b[i], total]
            )
        return total

    @cute.jit
    def _zero(self, accumulator, m_block, thread):
        """Zeros to the tile's rows of the accumulator, 16 bytes a store, neighbouring threads side by side."""
        zeros = cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
        pieces = self.head_dim // 4
        for step in cutlass.range(TILE_M * pieces // NUM_THREADS, unroll=4):
            index = step * NUM_THREADS + thread
            row = m_block * TILE_M + index // pieces
            cute.autovec_copy(zeros, cute.local_tile(accumulator[row, None], (4,), (index % pieces,)))
