"""FlashAttention forward for SM100 and SM103 and head_dim 256 over packed sequences: varlen and paged keys, split keys.

The roles and blocks of forward/sm100_varlen with the score tiles of forward/sm100_2cta_hd256: O of 128 rows takes half
of tensor memory, so a CTA has one tile of queries, and two S tiles that take turns. S of block b + 1 is issued before
O += P V of block b, so that seeing it says nothing of that product: o_full is signalled after every block, and the
correction waits for it before it touches O. Packed rows may belong to any sequence, so no two CTAs share a product;
blocks of 64 keys let five tiles of K and V be on their way beside the 64 KiB of Q. Warps 4 - 7 idle.
"""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch

from kernels_src.forward.sm100_2cta_hd256 import ForwardSm100Wide
from kernels_src.forward.sm100_varlen import ForwardSm100Packed, PackedProblem
from kernels_src.pipelines.ring import Cursor


class ForwardSm100WidePacked(ForwardSm100Packed):
    """Forward attention over packed queries with one Q tile a CTA, one specialization; arguments as ForwardSm100Packed.

    head_dim = head_dim_v = 256.
    """

    num_q_tiles = 1
    issues_chains = True

    # How one Q tile has two S tiles.
    _is_correcting = ForwardSm100Wide._is_correcting
    _score_place = ForwardSm100Wide._score_place
    _scores_at = ForwardSm100Wide._scores_at
    _wait_product = ForwardSm100Wide._wait_product
    _wait_output = ForwardSm100Wide._wait_output
    _step_qk = ForwardSm100Wide._step_qk
    _step_pv = ForwardSm100Wide._step_pv
    _column = ForwardSm100Wide._column

    def _tiles_used(self, work, problem):
        return Int32(1)

    @cute.jit
    def _packed_mma_role(self, bars, sQ, sK, sV, tmem, problem: PackedProblem, tiles_used):
        """Warp 12: S of a block runs one block ahead of O += P V."""
        mma_qk, mma_pv = self._mma_qk(), self._mma_pv()
        fQ, fK, fV = mma_qk.make_fragment_A(sQ), mma_qk.make_fragment_B(sK), mma_pv.make_fragment_B(sV)
        queries = self._operand(fQ[None, None, None, 0])
        work, block_count, accumulate = self._work(problem), Int32(0), Int32(0)
        k_slot = Cursor(Int32(0), Int32(0))
        arch.mbarrier_wait(bars.q_full, 0)
        self._step_qk(bars, tmem, queries, fK, k_slot, block_count)
        remaining = work.end - work.begin
        while remaining > 1:
            v_slot = k_slot.next(self.k_stages)
            k_slot = v_slot.next(self.k_stages)
            self._step_qk(bars, tmem, queries, fK, k_slot, block_count + 1)
            self._step_pv(bars, tmem, fV, v_slot, block_count, accumulate)
            accumulate, block_count, remaining = Int32(1), block_count + 1, remaining - 1
        self._step_pv(bars, tmem, fV, k_slot.next(self.k_stages), block_count, accumulate)
