"""Where the scores of a block lie in tensor memory, and in which order products follow from that.

There are two S tiles. Either each of two Q tiles has its own, or O of one Q tile takes half of tensor memory
(head_dim_v 256) and its blocks take turns.
Source: FlashAttention-4 (arXiv 2603.05451); PTX ISA 9.7.16.6, products of one thread complete in order.
"""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch

from kernels_src.pipelines.ring import Cursor


class OwnTiles:
    """An S tile for each of two Q tiles: one's softmax runs while the tensor core multiplies for the other."""

    num_q_tiles = 2

    def place(self, i, block_count):
        """(S tile of a block of Q tile `i`, parity of its barriers)."""
        return i, block_count & 1

    def tile(self, scores, place, tile_n: int):
        """The S tile that a softmax warpgroup reads; `scores` is the first of its Q tile."""
        return scores

    def wait_product(self, bars, i, block_count):
        """Blocks the correction until O holds the product of a block. Where S of a block comes after the product of
        the one before, who has seen statistics of it knows that."""

    def wait_output(self, bars, i, turn, block_count):
        """Blocks until O holds the last product of work item number `turn`, of block `block_count`."""
        arch.mbarrier_wait(bars.o_full + i, turn & 1)


class AlternatingTiles:
    """Two S tiles of one Q tile that take turns. Warps 4 - 7 idle.

    While the softmax warps work on a block, the tensor core makes S of the next one; its time, not theirs, bounds the
    kernel. S of block b + 1 is issued before O += P V of block b, so that seeing it says nothing of that product:
    o_full is signalled after every block, and the correction waits for it before it touches O.
    """

    num_q_tiles = 1

    def place(self, i, block_count):
        return block_count & 1, (block_count >> 1) & 1

    def tile(self, scores, place, tile_n: int):
        return cute.make_tensor(scores.iterator + place * tile_n, scores.layout)

    def wait_product(self, bars, i, block_count):
        arch.mbarrier_wait(bars.o_full + i, block_count & 1)

    def wait_output(self, bars, i, turn, block_count):
        self.wait_product(bars, i, block_count)

    @cute.jit
    def multiply_blocks(self, kernel, bars, tmem, queries, fK, fV, slot: Cursor, block_count, num_blocks):
        """The products of `num_blocks` blocks of a Q tile that is there: S of a block runs one ahead of O += P V.

        Args: kernel: the ForwardSm100 whose operands these are; slot: of the first K tile.
        Returns: (slot behind the last V tile, block_count behind the last block).
        """
        accumulate, remaining, k_slot = Int32(0), num_blocks, slot
        self._scores_of_block(kernel, bars, tmem, queries, fK, k_slot, block_count)
        while remaining > 1:
            v_slot = k_slot.next(kernel.k_stages)
            k_slot = v_slot.next(kernel.k_stages)
            self._scores_of_block(kernel, bars, tmem, queries, fK, k_slot, block_count + 1)
            self._output_of_block(kernel, bars, tmem, fV, v_slot, block_count, accumulate)
            accumulate, block_count, remaining = Int32(1), block_count + 1, remaining - 1
        last_slot = k_slot.next(kernel.k_stages)
        self._output_of_block(kernel, bars, tmem, fV, last_slot, block_count, accumulate)
        return last_slot.next(kernel.k_stages), block_count + 1

    def _scores_of_block(self, kernel, bars, tmem, queries, fK, slot, block_count):
        """S = Q K^T. Its S tile was last read as P, by a product issued before."""
        place, _ = self.place(0, block_count)
        keys = kernel.operand(fK[None, None, None, slot.stage])
        arch.mbarrier_wait(bars.kv_full + slot.stage, slot.phase)
        column = _column(kernel.tmem.scores, place)
        kernel.issue(kernel.mma_qk(), column, tmem, queries, keys, 0, kernel.head_dim // kernel.mma_k, 0)
        kernel.ctas.commit(bars.s_full + place)
        kernel.ctas.commit(bars.kv_empty + slot.stage)

    def _output_of_block(self, kernel, bars, tmem, fV, slot, block_count, accumulate):
        """O (+)= P V."""
        values = kernel.operand(fV[None, None, None, slot.stage])
        arch.mbarrier_wait(bars.kv_full + slot.stage, slot.phase)
        place, parity = self.place(0, block_count)
        columns = _column(kernel.tmem.probabilities, place), kernel.tmem.outputs[0]
        kernel.issue_product(bars, tmem, values, columns, place, parity, accumulate)
        kernel.ctas.commit(bars.o_full)
        kernel.ctas.commit(bars.kv_empty + slot.stage)


def _column(columns: tuple, place):
    """Column of the first or second S or P tile."""
    return columns[0] + place * (columns[1] - columns[0])
