"""FlashAttention forward for SM100 and SM103 with two CTAs for 512 query rows, which share every matrix product.

As forward/sm100.py. A product has 256 rows: 128 of a Q tile in either CTA, and its operand B comes half from either, so
a CTA loads and keeps half of every K tile (64 keys) and half of every V tile (half the columns), and the ring of both
holds twice as many blocks. Scores, probabilities and accumulators of a CTA's rows lie in its own tensor memory;
softmax, correction and stores are those of one CTA. q_full and kv_full count the bytes of both CTAs, p_ready and p_last
the warps of both: see forward/ctas.py.
Source: FlashAttention-4 (arXiv 2603.05451), pairs of CTAs.
"""

from kernels_src.forward.ctas import TwoCtas
from kernels_src.forward.sm100 import ForwardSm100


class ForwardSm100TwoCta(ForwardSm100):
    """Forward attention with pairs of CTAs, one specialization; arguments as ForwardSm100.

    kv_stages: slots of a CTA for its halves of K and V tiles; where they differ in size, half of the slots are K's.
    """

    ctas = TwoCtas()
