"""FlashAttention forward for SM100 and SM103 and head_dim 256, with two CTAs for 256 query rows.

As forward/sm100_2cta.py, but O of one Q tile takes half of tensor memory: a CTA has one Q tile, and two S tiles that
take turns. While the softmax warps work on a block, the tensor core makes S of the next one; its time, not theirs,
bounds the kernel. S of block b + 1 is issued before O += P V of block b, so that seeing it says nothing of that
product: o_full is signalled after every block, and the correction waits for it before it touches O.
Warps 4 - 7 idle; their registers go to softmax and correction.
Source: FlashAttention-4 (arXiv 2603.05451); PTX ISA 9.7.16.6, products of one thread complete in order.
"""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch

from kernels_src.forward.sm100 import CORRECTION_WARP, MMA_WARP
from kernels_src.forward.sm100_2cta import ForwardSm100TwoCta
from kernels_src.pipelines.ring import Cursor


class ForwardSm100Wide(ForwardSm100TwoCta):
    """Forward attention with pairs of CTAs and one Q tile each, one specialization; arguments as ForwardSm100TwoCta.

    head_dim = head_dim_v = 256.
    """

    num_q_tiles = 1
    issues_chains = True

    def _is_correcting(self, warp):
        return (warp >= CORRECTION_WARP) & (warp < MMA_WARP)

    def _score_place(self, i, block_count):
        return block_count & 1, (block_count >> 1) & 1

    def _scores_at(self, scores, place):
        return cute.make_tensor(scores.iterator + place * self.tile_n, scores.layout)

    def _wait_product(self, bars, i, block_count):
        arch.mbarrier_wait(bars.o_full + i, block_count & 1)

    def _wait_output(self, bars, i, turn, block_count):
        self._wait_product(bars, i, block_count)

    @cute.jit
    def _mma_role(self, bars, sQ, sK, sV, tmem, problem, tiles):
        """Warp 12 of the leader: S of a block runs one block ahead of O += P V."""
        mma_qk, mma_pv = self._mma_qk(), self._mma_pv()
        fQ, fK, fV = mma_qk.make_fragment_A(sQ), mma_qk.make_fragment_B(sK), mma_pv.make_fragment_B(sV)
        index, turn, block_count = self._first_index(), Int32(0), Int32(0)
        k_slot = Cursor(Int32(0), Int32(0))
        queries = self._operand(fQ[None, None, None, 0])
        while index < tiles.num_tiles:
            tile = self._tile_at(index, tiles)
            blocks = self._blocks(tile.m_block, problem)
            accumulate, remaining = Int32(0), blocks.end - blocks.begin
            arch.mbarrier_wait(bars.q_full, turn & 1)
            self._step_qk(bars, tmem, queries, fK, k_slot, block_count)
            while remaining > 1:
                v_slot = k_slot.next(self.k_stages)
                k_slot = v_slot.next(self.k_stages)
                self._step_qk(bars, tmem, queries, fK, k_slot, block_count + 1)
                self._step_pv(bars, tmem, fV, v_slot, block_count, accumulate)
                accumulate, block_count, remaining = Int32(1), block_count + 1, remaining - 1
            last_slot = k_slot.next(self.k_stages)
            self._step_pv(bars, tmem, fV, last_slot, block_count, accumulate)
            k_slot = last_slot.next(self.k_stages)
            block_count, turn = block_count + 1, turn + 1
            index = index + self._index_step()

    def _step_qk(self, bars, tmem, queries, fK, slot, block_count):
        """S of one block. Its S tile was last read as P, by a product issued before."""
        place, _ = self._score_place(0, block_count)
        keys = self._operand(fK[None, None, None, slot.stage])
        arch.mbarrier_wait(bars.kv_full + slot.stage, slot.phase)
        scores = self._column(self.tmem.scores, place)
        self._issue(self._mma_qk(), scores, tmem, queries, keys, 0, self.head_dim // self.mma_k, 0)
        self._commit(bars.s_full + place)
        self._commit(bars.kv_empty + slot.stage)

    def _step_pv(self, bars, tmem, fV, slot, block_count, accumulate):
        """O += P V of one block."""
        values = self._operand(fV[None, None, None, slot.stage])
        arch.mbarrier_wait(bars.kv_full + slot.stage, slot.phase)
        place, parity = self._score_place(0, block_count)
        columns = self._column(self.tmem.probabilities, place), self.tmem.outputs[0]
        self._issue_product(bars, tmem, values, columns, place, parity, accumulate)
        self._commit(bars.o_full)
        self._commit(bars.kv_empty + slot.stage)

    def _column(self, columns: tuple, place):
        """Column of the first or second S or P tile."""
        return columns[0] + place * (columns[1] - columns[0])
