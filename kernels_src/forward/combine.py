"""Merges the partial results of split keys: out = sum_s 2^(lse_s - lse) out_s, in float32. Runs on every target.

A row belongs to `lanes_per_row` neighbouring lanes. They share out the splits' log-sum-exps to find the total one and
each split's weight, then walk the splits together, each lane summing its own columns. Every partial result is read
once, several at a time, since few rows leave a multiprocessor little else to do while it waits. Of splits that saw no
key (lse = -inf) nothing is read: their partial results were never written. In their place another split is read once
more and weighs nothing, so that no branch stands between the loads.

The kernel starts while the one before still runs (programmatic dependent launch), and waits for its end before it
reads. The next one, if launched so, may start at once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute import arch

from kernels_src.integers import select
from kernels_src.softmax import sink as attention_sink
from kernels_src.softmax.online_softmax import LN_2, LOG2_E

NUM_THREADS = 256
ELEMENTS = 4  # float32 elements of one 16-byte load
LOADED = 32  # registers that loads in flight fill at most
_WARP = 32


def _power_of_two(limit: int) -> int:
    """The largest up to `limit`."""
    return 1 << (limit.bit_length() - 1)


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
        self.splits_at_once = _power_of_two(min(self.lanes, LOADED * self.lanes // head_dim_v))
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
            min_blocks_per_mp=1,
            use_pdl=True,
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
        arch.griddepcontrol_launch_dependents()
        arch.griddepcontrol_wait()  # from here on memory is read and written
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
        num_splits, first_lane = lse_rows.shape[0], arch.lane_idx() - lane
        values.fill(0.0)
        for first in cutlass.range(0, num_splits, self.lanes, unroll=1):
            weight = Float32(0.0)
            if first + lane < num_splits:
                weight = self._weight(lse_rows[first + lane] * LOG2_E, reference)
            weighty = arch.vote_ballot_sync(weight != 0.0)
            if const_expr(self.lanes < _WARP):
                weighty = (weighty >> first_lane) & ((1 << self.lanes) - 1)
            source = first + select(weight != 0.0, lane, _lowest(weighty))
            for begin in cutlass.range(0, cutlass.min(self.lanes, num_splits - first), self.splits_at_once, unroll=1):
                lanes = [first_lane + begin + i for i in range(self.splits_at_once)]
                splits, weights = ([arch.shuffle_sync(x, i) for i in lanes] for x in (source, weight))
                parts = cute.make_rmem_tensor((cute.size(values), self.splits_at_once), Float32)
                parts.fill(0.0)
                if weighty != 0:
                    self._load(parts, out_rows, splits, lane)
                arch.sync_warp()  # keeps the sums, and with them the waiting, behind the last load
                for i in cutlass.range_constexpr(self.splits_at_once):
                    for j in cutlass.range_constexpr(cute.size(values)):
                        values[j] = values[j] + weights[i] * parts[j, i]

    @cute.jit
    def _weight(self, lse_log2, reference):
        """2^(lse - reference), 0 of a split without keys."""
        weight = Float32(0.0)
        if lse_log2 != -Float32.inf:
            weight = arch.exp2(lse_log2 - reference)
        return weight

    def _load(self, parts, out_rows, splits, lane):
        """This lane's columns of some splits."""
        for i, split in enumerate(splits):
            for piece in range(cute.size(parts, mode=[0]) // ELEMENTS):
                place = cute.local_tile(out_rows[split, None], (ELEMENTS,), (piece * self.lanes + lane,))
                cute.autovec_copy(place, cute.local_tile(parts[None, i], (ELEMENTS,), (piece,)))

    @cute.jit
    def _store(self, values, out_row, lane):
        for piece in cutlass.range_constexpr(cute.size(values) // ELEMENTS):
            converted = cute.make_rmem_tensor(ELEMENTS, self.dtype)
            for i in cutlass.range_constexpr(ELEMENTS):
                converted[i] = values[piece * ELEMENTS + i].to(self.dtype)
            cute.autovec_copy(converted, cute.local_tile(out_row, (ELEMENTS,), (piece * self.lanes + lane,)))


def _lowest(bits):
    """Number of the lowest bit that is set; 32 if there is none."""
    return Int32(arch.popc((bits - 1) & ~bits))
