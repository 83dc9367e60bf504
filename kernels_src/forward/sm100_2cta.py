"""FlashAttention forward for SM100 and SM103 with two CTAs for 512 query rows, which share every matrix product.

As forward/sm100.py, whose roles it uses. A product has 256 rows: 128 of a Q tile in either CTA, and its operand B comes
half from either, so a CTA loads and keeps half of every K tile (64 keys) and half of every V tile (half the columns),
and the ring of both holds twice as many blocks. Scores, probabilities and accumulators of a CTA's rows lie in its own
tensor memory; softmax, correction and stores are those of one CTA.

Every barrier that the issuing warp waits for lies in CTA 0, the leader, and counts both CTAs: q_full and kv_full the
bytes of both, p_ready and p_last the warps of both. The leader alone issues products; their commits (s_full, o_full,
q_empty, kv_empty) arrive in both.
Source: FlashAttention-4 (arXiv 2603.05451), pairs of CTAs; PTX ISA 9.7.16.5, issue granularity of cta_group::2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute import arch
from cutlass.cute.nvgpu import tcgen05

from kernels_src.forward.sm100 import ForwardSm100
from kernels_src.mma.umma import commit_to_pair, fence_after_wait, fence_before_arrive

LEADER = 0


class ForwardSm100TwoCta(ForwardSm100):
    """Forward attention with pairs of CTAs, one specialization; arguments as ForwardSm100.

    kv_stages: slots of a CTA for its halves of K and V tiles; where they differ in size, half of the slots are K's.
    """

    num_ctas, group, cluster = 2, tcgen05.CtaGroup.TWO, {"cluster": (2, 1, 1)}

    def _ring_sizes(self, kv_stages: int) -> tuple[int, int]:
        return kv_stages - kv_stages // 2, kv_stages // 2

    @cute.jit
    def _meet(self):
        fence_before_arrive()
        arch.sync_threads()
        arch.cluster_arrive()
        arch.cluster_wait()
        fence_after_wait()

    def _rank(self):
        return arch.make_warp_uniform(arch.block_idx_in_cluster())

    def _is_issuing(self):
        return self._rank() == LEADER

    def _first_index(self):
        return arch.block_idx()[0] // self.num_ctas

    def _index_step(self):
        return arch.grid_dim()[0] // self.num_ctas

    def _m_tile(self, m_block, i):
        return super()._m_tile(m_block, i) * self.num_ctas + self._rank()

    def _commit(self, barrier):
        commit_to_pair(barrier)

    @cute.jit
    def _drain(self, bars, k_slot, v_slot, turn):
        """Waits until every slot is free: a commit of the leader must not arrive in a CTA that has left."""
        for _ in cutlass.range_constexpr(self.k_stages):
            arch.mbarrier_wait(bars.kv_empty + k_slot.stage, k_slot.phase ^ 1)
            k_slot = k_slot.next(self.k_stages)
        if const_expr(not self.shares_ring):
            for _ in cutlass.range_constexpr(self.v_stages):
                arch.mbarrier_wait(bars.kv_empty + self._v_barrier(v_slot), v_slot.phase ^ 1)
                v_slot = v_slot.next(self.v_stages)
        for i in cutlass.range_constexpr(self.num_q_tiles):
            arch.mbarrier_wait(bars.q_empty + i, (turn & 1) ^ 1)

    @cute.jit
    def _expect(self, barrier, num_bytes):
        if self._rank() == LEADER:
            with arch.elect_one():
                arch.mbarrier_arrive_and_expect_tx(barrier, num_bytes * self.num_ctas)

    @cute.jit
    def _arrive_issuer(self, barrier):
        arch.sync_warp()
        with arch.elect_one():
            arch.mbarrier_arrive(barrier, LEADER)
