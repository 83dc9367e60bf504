"""Loads every table of opcode rules."""

from fa4build.simulate.instructions import (  # noqa: F401
    async_copies,
    atomics,
    barriers,
    cluster_launch_control,
    fences,
    float_alu,
    integer_alu,
    memory,
    moves,
    tcgen05,
    tensor_copies,
    warp_ops,
    wgmma,
)
