"""Loads every table of opcode rules."""

from fa4build.simulate import (
    async_copies,
    barriers,
    float_alu,
    integer_alu,
    memory,
    moves,
    tensor_copies,
    warp_ops,
    wgmma,
)  # noqa: F401
