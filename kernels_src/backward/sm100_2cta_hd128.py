"""FlashAttention backward for SM100 and SM103 with two CTAs for head dimension 128: two tiles of queries in flight.

Tensor memory holds S, dP, dV and dK, each 128 columns, and dQ of a tile where S of the next tile was, as soon as that S
is in registers (memory/pair_tmem.py). So dP of the next tile waits for nothing but dK, and dQ, whose dS comes by way of
the other CTA, runs beside the exponentials.

Order of products for query tiles t: S(t+1), dK(t), dP(t+1), dQ(t), dV(t+1). What may be late without a gap in the
products: P(t+1) until dQ(t) is done, dS(t+1) until S(t+2) is, the exchange of dS(t+1) until dP(t+2) is.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import arch

from kernels_src.backward.sm100 import FRAGMENT, HALF, TILE_M, WARPS_PER_GROUP
from kernels_src.backward.sm100_2cta import PAIR, BackwardSm100TwoCta, _commit, _rank
from kernels_src.memory.tmem_2cta import pipelined_backward_tmem
from kernels_src.mma.umma import fence_after_wait, fence_before_arrive
from kernels_src.pipelines.barriers import Barrier
from kernels_src.softmax import correction, gradients


class BackwardSm100Pipelined(BackwardSm100TwoCta):
    """Backward attention with pairs of CTAs, one specialization; arguments as BackwardSm100TwoCta.

    head_dim = head_dim_v = 128.
    """

    hands_over_late = True  # S of the tile after next waits until dQ is read

    def _plan_tmem(self):
        return pipelined_backward_tmem(TILE_M, self.head_dim, self.head_dim_v)

    # ------------------------------------------------------------------------------------------------------------
    # Device

    def _allocate_queries(self, tile, layouts):
        """Q, Q^T, dO, dO^T, dQ."""
        queries = (tile(layout, self.dtype) for layout in (layouts.q, layouts.q_t, layouts.do, layouts.do_t))
        return (*queries, tile(layouts.dq, Float32))

    def _barriers(self) -> dict[str, Barrier]:
        """As BackwardSm100TwoCta, and further:

        s_read: dQ may take the second half of S.
        ds_ready: dS is in tensor memory, for dK; it goes to shared memory after that, where dQ may still read the last.
        dq_full: besides, the dS in shared memory is read.
        qt_empty, qt_full: Q^T is loaded behind the next tile's Q, the order in which their places become free.
        """
        stored = PAIR * WARPS_PER_GROUP  # the warps with a CTA's own part of dS have stored it
        return super()._barriers() | {"exchange_ready": Barrier(1, PAIR + stored)}

    # --- load -------------------------------------------------------------------------------------------------------

    @cute.jit
    def _load_role(self, bars, maps, shared, dpsum, lse_log2, problem, work):
        """Warp 13 of either CTA: its halves of everything. Bytes of both CTAs complete the leader's barriers."""
        pair = self._cluster_tile(work.n_block)
        k, k_t, v = self._key_copies(maps, shared, work)
        step, phase = self._first_step(problem, work), Int32(0)
        previous = step
        remaining = work.num_steps
        while remaining > 0:
            is_first = remaining == work.num_steps
            if is_first:
                self._load_k(bars, maps, k, pair)
            self._load_q(bars, maps, shared, step, work, bars.q_empty, phase ^ 1)
            if remaining < work.num_steps:
                self._load_q_t(bars, maps, shared, previous, work, bars.qt_empty, phase)
            self._load_vector(bars.lse_full, bars.lse_empty, lse_log2, shared.lse_log2, step, work, phase)
            if is_first:
                self._load_v(bars, maps, v, pair)
            self._load_do(bars, maps, shared, step, work, bars.do_empty, phase ^ 1)
            self._load_vector(bars.dpsum_full, bars.dpsum_empty, dpsum, shared.dpsum, step, work, phase)
            self._load_do_t(bars, maps, shared, step, work, bars.dot_empty, phase ^ 1)
            if is_first:
                self._load_k_t(bars, maps, k_t, pair)
            previous, step, phase = step, self._next_step(step, work), phase ^ 1
            remaining = remaining - 1
        self._load_q_t(bars, maps, shared, previous, work, bars.qt_empty, phase)

    @cute.jit
    def _tail_role(self, bars, shared, problem, work):
        """Warp 15 of either CTA, packed sequences only: zeros to rows behind the sequence of all but K, whose scores
        there are masked, in the order in which they are loaded."""
        step, phase = self._first_step(problem, work), Int32(0)
        previous = step
        remaining = work.num_steps
        while remaining > 0:
            is_first = remaining == work.num_steps
            self._end_q(bars, shared, step, work, phase)
            if is_first:
                self._end_v(bars, shared, work)
            else:
                self._end_q_t(bars, shared, previous, work, phase ^ 1)
            self._end_do(bars, shared, step, work, phase)
            self._end_do_t(bars, shared, step, work, phase)
            if is_first:
                self._end_k_t(bars, shared, work)
            previous, step, phase = step, self._next_step(step, work), phase ^ 1
            remaining = remaining - 1
        self._end_q_t(bars, shared, previous, work, phase ^ 1)

    # --- matrix products --------------------------------------------------------------------------------------------

    @cute.jit
    def _mma_role(self, bars, shared, tmem, work):
        """Warp 12 of the leader: see the order of products above."""
        turn, accumulate = Int32(0), cutlass.Boolean(False)
        arch.mbarrier_wait(bars.k_full, 0)
        self._pair_scores(bars, shared, tmem, turn)
        arch.mbarrier_wait(bars.v_full, 0)
        self._pair_dp(bars, shared, tmem, turn)
        arch.mbarrier_wait(bars.s_read, 0)
        self._pair_dv(bars, shared, tmem, turn, accumulate)
        arch.mbarrier_wait(bars.kt_full, 0)
        remaining = work.num_steps - 1
        while remaining > 0:
            self._wait_dq_read(bars, turn)
            self._pair_scores(bars, shared, tmem, turn + 1)
            self._pair_dk(bars, shared, tmem, turn, accumulate)
            self._pair_dp(bars, shared, tmem, turn + 1)
            accumulate = cutlass.Boolean(True)
            arch.mbarrier_wait(bars.s_read, (turn + 1) & 1)
            fence_after_wait()
            self._pair_dq(bars, shared, tmem, turn)
            turn = turn + 1
            self._pair_dv(bars, shared, tmem, turn, accumulate)
            remaining = remaining - 1
        _commit(bars.dv_full)
        self._pair_dk(bars, shared, tmem, turn, accumulate)
        _commit(bars.dk_full)
        self._wait_dq_read(bars, turn)
        self._pair_dq(bars, shared, tmem, turn)

    @cute.jit
    def _wait_dq_read(self, bars, turn):
        """Until dQ of the tile before `turn`, if there is one, has left the columns of S."""
        arch.mbarrier_wait(bars.dq_empty, (turn & 1) ^ 1)
        fence_after_wait()

    # --- compute ----------------------------------------------------------------------------------------------------

    @cute.jit
    def _score_gradients(self, bars, full, empty, shared, tmem, weights, row, half, slot, turn):
        """dP^T -> dS^T of one tile: to tensor memory, for dK at once, and, when dQ of the tile before has read there,
        to shared memory."""
        arch.mbarrier_wait(full + slot.stage, slot.phase)
        arch.mbarrier_wait(bars.dp_full, turn & 1)
        fence_after_wait()
        column = self.tmem.dprobabilities + half * HALF
        load, source = correction.row_copies(self._columns_at(tmem, column, HALF), FRAGMENT, row, False)
        rounded = []
        for piece in cutlass.range_constexpr(HALF // FRAGMENT):
            values = cute.make_rmem_tensor((FRAGMENT,), Float32)
            cute.copy(load, source[None, None, piece], self._piece(values, 0, FRAGMENT))
            arch.fence_view_async_tmem_load()
            sums = cute.local_tile(shared.dpsum[None, slot.stage], (FRAGMENT,), (half * (HALF // FRAGMENT) + piece,))
            mine = cute.make_tensor(weights.iterator + piece * FRAGMENT, cute.make_layout(FRAGMENT))
            gradients.score_gradients(values, mine, sums)
            rounded.append(self._store_operand(values, 0, tmem, column + piece * (FRAGMENT // 2), row))
        arch.fence_view_async_tmem_store()
        fence_before_arrive()
        self._arrive_warp(empty + slot.stage)
        self._arrive_mma(bars.ds_ready)
        arch.mbarrier_wait(bars.dq_full, (turn & 1) ^ 1)
        line = self._ds_rows(shared, half)[row, None]
        for piece in cutlass.range_constexpr(HALF // FRAGMENT):
            cute.autovec_copy(rounded[piece], cute.local_tile(line, (FRAGMENT,), (piece,)))
        arch.fence_proxy("async.shared", space="cta")
        if half == _rank():
            self._arrive_mma(bars.exchange_ready)
        else:
            arch.sync_warp()  # one lane of the warp sends it all
