"""FlashAttention backward for SM100 and SM103 with two CTAs for heads too wide for backward/sm100_2cta_hd128's plan.

With head dimensions (192, 128) dV and dK take 320 columns of tensor memory, and S, dP and dQ share the other 192: see
memory/tmem_layout.py. So one tile of queries is done after the other, and dP of a tile follows its S as soon as S is in
registers. Shared memory holds Q once: Q^T takes its place when S is computed, and dO^T that of dO when dP is.

Order of products for a tile: S, dP, dK, dV, dQ. dK stands before dV, whose dO^T arrives last; dQ waits for the exchange
of dS, which dV covers. (Orders with dQ beside the next tile's exponentials leave the loads of Q too little time, and
were slower in the timing model.)

Barriers of `BackwardSm100TwoCta._barriers` that say something else here:
    s_read: the warps whose half of S lies under dP have read it.
    qt_empty: Q may come; q_empty: Q^T may. dot_empty: dO may come; do_empty: dO^T may.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import arch

from kernels_src.backward.sm100 import TILE_M, _retyped
from kernels_src.backward.sm100_2cta import BackwardSm100TwoCta, _commit
from kernels_src.memory.tmem_layout import wide_backward_tmem
from kernels_src.mma.umma import fence_after_wait


class BackwardSm100Wide(BackwardSm100TwoCta):
    """Backward attention with pairs of CTAs for wide heads, one specialization; arguments as BackwardSm100TwoCta.

    head_dim = 192, head_dim_v = 128.
    """

    dq_columns = 16  # two KiB a warp, what shared memory has left

    def _plan_tmem(self):
        return wide_backward_tmem(TILE_M, self.head_dim, self.head_dim_v)

    # ------------------------------------------------------------------------------------------------------------
    # Device

    def _allocate_queries(self, tile, layouts):
        """Q, Q^T, dO, dO^T, dQ."""
        q, do = tile(layouts.q, self.dtype), tile(layouts.do, self.dtype)
        q_t, do_t = _retyped(q, layouts.q_t, self.dtype), _retyped(do, layouts.do_t, self.dtype)
        return q, q_t, do, do_t, tile(layouts.dq, Float32)

    # --- load -------------------------------------------------------------------------------------------------------

    @cute.jit
    def _load_role(self, bars, maps, shared, dpsum, lse_log2, problem, work):
        """Warp 13 of either CTA: its halves of everything. Bytes of both CTAs complete the leader's barriers."""
        pair = self._cluster_tile(work.n_block)
        k, k_t, v = self._key_copies(maps, shared, work)
        step, phase = self._first_step(problem, work), Int32(0)
        remaining = work.num_steps
        while remaining > 0:
            is_first = remaining == work.num_steps
            if is_first:
                self._load_k(bars, maps, k, pair)
            self._load_q(bars, maps, shared, step, work, bars.qt_empty, phase ^ 1)
            self._load_vector(bars.lse_full, bars.lse_empty, lse_log2, shared.lse_log2, step, work, phase)
            if is_first:
                self._load_v(bars, maps, v, pair)
            self._load_do(bars, maps, shared, step, work, bars.dot_empty, phase ^ 1)
            self._load_vector(bars.dpsum_full, bars.dpsum_empty, dpsum, shared.dpsum, step, work, phase)
            if is_first:
                self._load_k_t(bars, maps, k_t, pair)
            self._load_q_t(bars, maps, shared, step, work, bars.q_empty, phase)
            self._load_do_t(bars, maps, shared, step, work, bars.do_empty, phase)
            step, phase = self._next_step(step, work), phase ^ 1
            remaining = remaining - 1

    @cute.jit
    def _tail_role(self, bars, shared, problem, work):
        """Warp 15 of either CTA, packed sequences only: the same in this order of loads."""
        step, phase = self._first_step(problem, work), Int32(0)
        remaining = work.num_steps
        while remaining > 0:
            is_first = remaining == work.num_steps
            self._end_q(bars, shared, step, work, phase)
            if is_first:
                self._end_v(bars, shared, work)
            self._end_do(bars, shared, step, work, phase)
            if is_first:
                self._end_k_t(bars, shared, work)
            self._end_q_t(bars, shared, step, work, phase)
            self._end_do_t(bars, shared, step, work, phase)
            step, phase = self._next_step(step, work), phase ^ 1
            remaining = remaining - 1

    # --- matrix products --------------------------------------------------------------------------------------------

    @cute.jit
    def _mma_role(self, bars, shared, tmem, work):
        """Warp 12 of the leader: see the order of products above."""
        turn, accumulate = Int32(0), cutlass.Boolean(False)
        arch.mbarrier_wait(bars.k_full, 0)
        while turn < work.num_steps:
            self._pair_scores(bars, shared, tmem, turn)
            arch.mbarrier_wait(bars.v_full, 0)
            arch.mbarrier_wait(bars.s_read, turn & 1)
            fence_after_wait()
            self._pair_dp(bars, shared, tmem, turn)
            self._pair_dk(bars, shared, tmem, turn, accumulate)
            self._pair_dv(bars, shared, tmem, turn, accumulate)
            accumulate = cutlass.Boolean(True)
            if turn == work.num_steps - 1:
                _commit(bars.dv_full)
                _commit(bars.dk_full)
            arch.mbarrier_wait(bars.kt_full, 0)
            self._pair_dq(bars, shared, tmem, turn)
            if turn < work.num_steps - 1:
                arch.mbarrier_wait(bars.dq_empty, turn & 1)
                fence_after_wait()
            turn = turn + 1
