"""FlashAttention forward for SM100 and SM103 and head_dim 256, with two CTAs for 256 query rows.

As forward/sm100_2cta.py, but O of one Q tile takes half of tensor memory, so a CTA has one Q tile: see
forward/score_tiles.py. The registers of the idle warps go to softmax and correction.
"""

from kernels_src.forward.ctas import TwoCtas
from kernels_src.forward.score_tiles import AlternatingTiles
from kernels_src.forward.sm100 import ForwardSm100


class ForwardSm100Wide(ForwardSm100):
    """Forward attention with pairs of CTAs and one Q tile each, one specialization; arguments as ForwardSm100.

    head_dim = head_dim_v = 256.
    """

    ctas = TwoCtas()
    scores = AlternatingTiles()
