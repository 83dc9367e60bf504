"""A fixed order in which the CTAs of a head add to a tile of dQ, so that the sum has the same bits in every run.

Every tile of 128 queries has a counter. A CTA waits until the counter says that all CTAs before it have added, and
counts itself when its addition is performed. An order must agree with the order in which CTAs start, or they wait for
ever; and with the order in which they come to a tile, or they wait in vain.
"""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch

from kernels_src.integers import minimum
from kernels_src.masking.block_range import CAUSAL, FULL

QUERIES_PER_COUNTER = 128


def starts_with_last_keys(mask: str) -> bool:
    """Whether the CTA with the last keys starts first. Under a causal mask or a window, a block of keys begins at its
    diagonal: the last block that a tile of queries sees comes to it first."""
    return mask != FULL


def rank(n_block, counter, *, tile_n, seqlen_q, seqlen_k, mask, window_right):
    """How many blocks of keys add to the 128 queries of `counter` before block `n_block` does.

    Args: n_block: one that masking.query_range lets visit these queries, and not only because it must visit some.
    Source: a block visits queries up to 128 (counter + 1) - 1 iff its first key, n_block * tile_n, is at most that plus
        seqlen_k - seqlen_q + window_right. Cost: about ten integer instructions.
    """
    if mask == FULL:
        return n_block
    right = 0 if mask == CAUSAL else window_right
    last_query = (counter + 1) * QUERIES_PER_COUNTER - 1
    num_blocks = (seqlen_k + tile_n - 1) // tile_n
    return minimum((last_query + (seqlen_k - seqlen_q) + right) // tile_n, num_blocks - 1) - n_block


def is_seen(n_block, *, tile_n, seqlen_q, seqlen_k, mask, window_left, window_right):
    """Whether a block of keys lies in the window of any query; one that does not visits a tile in vain."""
    if mask in (FULL, CAUSAL):
        return True
    first_query = n_block * tile_n - (seqlen_k - seqlen_q) - window_right
    past_query = minimum((n_block + 1) * tile_n, seqlen_k) - (seqlen_k - seqlen_q) + window_left
    return (first_query < seqlen_q) & (past_query > 0)


@cute.jit
def wait_turn(counter, target):
    """Blocks until the counter in global memory is at least `target`; what was added before is then visible to the copy
    engine. Contract: called by a whole warp."""
    with arch.elect_one():
        while arch.load(counter, Int32, sem="acquire", scope="gpu") < target:
            pass
        arch.fence_proxy("async.global")
    arch.sync_warp()


@cute.jit
def end_turn(counter):
    """Counts the caller. Contract: called by a whole warp whose elected lane knows its additions to be performed."""
    with arch.elect_one():
        arch.fence_proxy("async.global")
        arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
