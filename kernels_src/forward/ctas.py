"""How many CTAs share every matrix product of an SM100 kernel, and what that changes for a warp.

With two, every barrier that the issuing warp waits for lies in CTA 0, the leader, and counts both CTAs. The leader
alone issues products; their commits arrive in both.
Source: PTX ISA 9.7.16.5, issue granularity of cta_group::2.
"""

import cutlass.cute as cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import tcgen05

from kernels_src.mma.umma import commit, commit_to_pair, fence_after_wait, fence_before_arrive

LEADER = 0


@cute.jit
def arrive_warp(barrier):
    """One arrival for the whole warp, after all its lanes."""
    arch.sync_warp()
    with arch.elect_one():
        arch.mbarrier_arrive(barrier)


class OneCta:
    """A CTA issues its own products."""

    count, group, cluster = 1, tcgen05.CtaGroup.ONE, {}  # as the DSL and a launch spell it

    @cute.jit
    def meet(self):
        """All warps, with what they have done in tensor memory."""
        fence_before_arrive()
        arch.sync_threads()
        fence_after_wait()

    def rank(self):
        """Which of the CTAs that share a product this is."""
        return 0

    def is_issuing(self):
        """Whether this CTA issues the products."""
        return True

    def first_index(self):
        """Number of the first work item of this CTA."""
        return arch.block_idx()[0]

    def index_step(self):
        """From a work item to the next one of this CTA."""
        return arch.grid_dim()[0]

    def own_tile(self, number):
        """This CTA's part of tile `number` of a product's rows."""
        return number

    def commit(self, barrier):
        """Arrive on `barrier` when all products issued so far are complete."""
        commit(barrier)

    @cute.jit
    def expect(self, barrier, num_bytes: int):
        """The one arrival on a barrier that copies of `num_bytes` in every CTA complete. The whole warp calls."""
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(barrier, num_bytes)

    @cute.jit
    def arrive_issuer(self, barrier):
        """One arrival of the whole warp on a barrier that the issuing warp waits for."""
        arrive_warp(barrier)


class TwoCtas:
    """Two CTAs share every product: half of its rows lie in the tensor memory of either."""

    count, group, cluster = 2, tcgen05.CtaGroup.TWO, {"cluster": (2, 1, 1)}

    @cute.jit
    def meet(self):
        """All warps of both CTAs, with what they have done in tensor memory."""
        fence_before_arrive()
        arch.sync_threads()
        arch.cluster_arrive()
        arch.cluster_wait()
        fence_after_wait()

    def rank(self):
        return arch.make_warp_uniform(arch.block_idx_in_cluster())

    def is_issuing(self):
        return self.rank() == LEADER

    def first_index(self):
        return arch.block_idx()[0] // self.count

    def index_step(self):
        return arch.grid_dim()[0] // self.count

    def own_tile(self, number):
        return number * self.count + self.rank()

    def commit(self, barrier):
        commit_to_pair(barrier)

    @cute.jit
    def expect(self, barrier, num_bytes):
        if self.rank() == LEADER:
            with arch.elect_one():
                arch.mbarrier_arrive_and_expect_tx(barrier, num_bytes * self.count)

    @cute.jit
    def arrive_issuer(self, barrier):
        arch.sync_warp()
        with arch.elect_one():
            arch.mbarrier_arrive(barrier, LEADER)
