"""Merges the partial results of split keys: out = sum_s 2^(lse_s - lse) out_s, in float32. Runs on every target.

A row belongs to `lanes_per_row` neighbouring lanes. They share out the splits' log-sum-exps to find the total one, then
walk the splits together, each lane summing its own columns. Bound by memory: every partial result is read once.
Splits that saw no key (lse = -inf) are skipped, not multiplied: their partial results were never written.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute import arch

from kernels_src.softmax import sink as attention_sink
from kernels_src.softmax.online_softmax import LN_2, LOG2_E

NUM_THREADS = 256
ELEMENTS = 4  # float32 elements of one 16-byte load
_WARP = 32


def lanes_per_row(head_dim_v: int) -> int:
    """Neighbouring lanes that share a row: the largest power of two up to a warp that divides its 16-byte pieces."""
    pieces = head_dim_v // ELEMENTS
    return min(_WARP, pieces & -pieces)


class Combine:
    """Calling it is the host function `fwd_combine` of docs/formats.md.

    Args:
        symbol: prefix of the device entry, which is `<symbol>_0`.
        dtype: cutlass.BFloat16 or cutlass.Float16, of out.
        head_dim_v: columns of out, a multiple of 16.
    """

    def __init__(self, *, symbol: str, dtype, head_dim_v: int):
        self.dtype, self.head_dim_v = dtype, head_dim_v
        self.lanes = lanes_per_row(head_dim_v)
        self.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def __call__(
        self,
        out_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sink: cute.Tensor | None = None,
        stream=None,
    ):
        """Launches the kernel. Arguments: docs/formats.md section 1."""
        batch, seqlen_q, num_heads, _ = out.shape
        by_heads = cute.FastDivmodDivisorV2(num_heads)
        rows_per_cta = NUM_THREADS // self.lanes
        self.kernel(out_partial, lse_partial, out, lse, sink, by_heads).launch(
            grid=(cute.ceil_div(seqlen_q * num_heads, rows_per_cta), batch, 1),
            block=(NUM_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        out_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sink: cute.Tensor | None,
        by_heads: cute.FastDivmodDivisorV2,
    ):
        """One row a group of lanes; lanes of rows that do not exist work on the last row and store nothing."""
        block, batch, _ = arch.block_idx()
        thread = arch.thread_idx()[0]
        num_rows = out.shape[1] * out.shape[2]
        row = block * (NUM_THREADS // self.lanes) + thread // self.lanes
        query, head = divmod(cutlass.min(row, num_rows - 1), by_heads)
        lane = thread % self.lanes
        values = cute.make_rmem_tensor(self.head_dim_v // self.lanes, Float32)
        lse_rows, out_rows = lse_partial[None, batch, head, query], out_partial[None, batch, query, head, None]
        reference, total = self._total(lse_rows, lane)
        self._sum(values, out_rows, lse_rows, reference, lane)
        factor = Float32(1.0)
        if const_expr(sink is not None):
            reference, total, factor = attention_sink.join(reference, total, sink[head] * LOG2_E)
        is_empty = total == 0.0
        inverse = Float32(0.0) if is_empty else arch.rcp_approx(total) * factor
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = values[i] * inverse
        if row < num_rows:
            self._store(values, out[batch, query, head, None], lane)
            if lane == 0:
                logarithm = (reference + cute.math.log2(total, fastmath=True)) * LN_2
                lse[batch, head, query] = -Float32.inf if is_empty else logarithm

    @cute.jit
    def _total(self, lse_rows, lane):
        """(largest log-sum-exp of any split in powers of two, sum over splits of 2^(lse - that)); (-inf, 0) if there is
        none. The same in all lanes of the row."""
        num_splits = lse_rows.shape[0]
        largest = -Float32.inf
        for split in cutlass.range(lane, num_splits, self.lanes, unroll=1):
            largest = arch.fmax(largest, lse_rows[split])
        largest = self._over_row(largest, arch.fmax) * LOG2_E
        total = Float32(0.0)
        if largest != -Float32.inf:
            for split in cutlass.range(lane, num_splits, self.lanes, unroll=1):
                total = total + arch.exp2(lse_rows[split] * LOG2_E - largest)
        return largest, self._over_row(total, lambda a, b: a + b)

    def _over_row(self, value, combine):
        distance = self.lanes // 2
        while distance > 0:
            value = combine(value, arch.shuffle_sync_bfly(value, offset=distance))
            distance //= 2
        return value

    @cute.jit
    def _sum(self, values, out_rows, lse_rows, reference, lane):
        """values = this lane's columns of sum over splits of 2^(lse - reference) * partial result."""
        values.fill(0.0)
        for split in cutlass.range(lse_rows.shape[0], unroll=2):
            lse_log2 = lse_rows[split] * LOG2_E
            if lse_log2 != -Float32.inf:
                weight = arch.exp2(lse_log2 - reference)
                for piece in cutlass.range_constexpr(cute.size(values) // ELEMENTS):
                    part = cute.make_rmem_tensor(ELEMENTS, Float32)
                    place = piece * self.lanes + lane
                    cute.autovec_copy(cute.local_tile(out_rows[split, None], (ELEMENTS,), (place,)), part)
                    for i in cutlass.range_constexpr(ELEMENTS):
                        index = piece * ELEMENTS + i
                        values[index] = values[index] + weight * part[i]

    @cute.jit
    def _store(self, values, out_row, lane):
        for piece in cutlass.range_constexpr(cute.size(values) // ELEMENTS):
            converted = cute.make_rmem_tensor(ELEMENTS, self.dtype)
            for i in cutlass.range_constexpr(ELEMENTS):
                converted[i] = values[piece * ELEMENTS + i].to(self.dtype)
            cute.autovec_copy(converted, cute.local_tile(out_row, (ELEMENTS,), (piece * self.lanes + lane,)))
