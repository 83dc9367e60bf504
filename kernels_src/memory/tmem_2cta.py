"""Tensor-memory plan of the backward kernel whose pairs of CTAs have two tiles of queries in flight.

Pure integers: runs as ordinary Python.
"""

from dataclasses import replace

from kernels_src.memory.tmem_layout import BackwardTmem, backward_tmem


def pipelined_backward_tmem(tile_m: int, head_dim: int, head_dim_v: int) -> BackwardTmem:
    """Plan the columns of a backward kernel with two CTAs of 128 keys each, where dQ of a tile of queries is computed
    beside the exponentials of the next.

    A CTA has half of the queries of dQ and so head_dim / 2 columns. They are the last ones of S: P takes the first half
    of S once all of S is in registers, and from then on the second half is free until the S after.
    Raises: ValueError when S, dP, dK and dV do not fit 512 columns, or dQ not half of S.
    """
    plan = backward_tmem(tile_m, head_dim, head_dim_v)
    if head_dim > tile_m:
        raise ValueError(f"dQ of head_dim {head_dim} needs {head_dim // 2} columns, half of S has {tile_m // 2}")
    return replace(plan, dq=plan.scores + tile_m - head_dim // 2, has_own_dq=False)
