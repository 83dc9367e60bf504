"""How register bits are kept between instructions: one storage class per register, chosen once per function.

Registers are untyped in PTX; numpy arrays are not. Each register gets the class that most of its uses want, so that
re-interpreting (`.view`) is rare. Classes: `p` bool, `u16`, `u32`, `f32`, `u64`, `pair` (two f32 arrays: the halves of
a 64-bit register that holds packed floats), `b128` (two u64 arrays).
"""

import re

import numpy as np

from fa4build.simulate.ptx.instructions import Function, Pair, Reg, Vector

DTYPES = {
    "p": np.bool_, "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32,
    "f32": np.float32, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip
POISON_BITS = 0x7FC1_7FC1_7FC1_7FC1  # a NaN in f32, bf16 and f64: reads before writes show up in results

_FLOAT_OPCODE = re.compile(
    r"(add|sub|mul|fma|max|min|neg|abs|ex2|lg2|rcp|rsqrt|sqrt|div|tanh|sin|cos|selp|setp|mov)\b.*\.f32|wgmma\.mma.*|tcgen05\.ld\.red.*"
)
_PACKED_OPCODE = re.compile(r".*\.f32x2")


def storage_classes(function: Function) -> list[str]:
    """Storage class of every register of a function, by votes of the opcodes that touch it."""
    votes = [0] * len(function.register_names)
    moves: list[tuple[int, int]] = []
    for ins in function.instructions:
        _vote(ins, function.register_widths, votes, moves)
    for _ in range(4):
        for a, b in moves:
            if votes[a] == 0 and votes[b] != 0:
                votes[a] = 1 if votes[b] > 0 else -1
            elif votes[b] == 0 and votes[a] != 0:
                votes[b] = 1 if votes[a] > 0 else -1
    return [_class_of(width, vote) for width, vote in zip(function.register_widths, votes, strict=True)]


def _class_of(width: int, vote: int) -> str:
    if width == 1:
        return "p"
    if width <= 16:
        return "u16"
    if width == 32:
        return "f32" if vote > 0 else "u32"
    if width == 64:
        return "pair" if vote > 0 else "u64"
    return "b128"


def _vote(ins, widths, votes, moves) -> None:
    opcode = ins.opcode
    if opcode in ("mov.b32", "mov.b64", "mov.u32", "mov.u64") and len(ins.operands) == 2:
        _vote_move(ins, widths, votes, moves)
        return
    if opcode.startswith(("ld.", "st.", "selp.b", "tcgen05.ld.sync", "tcgen05.st", "mov.")):
        _vote_addresses(ins, widths, votes)
        return
    if opcode.startswith("cvt."):
        parts = opcode.split(".")
        _add(ins.operands[0], widths, votes, 1 if parts[-2] == "f32" else -1)
        for operand in ins.operands[1:]:
            _add(operand, widths, votes, 1 if parts[-1] == "f32" else -1)
        return
    is_float = bool(_FLOAT_OPCODE.fullmatch(opcode) or _PACKED_OPCODE.fullmatch(opcode))
    is_packed = bool(_PACKED_OPCODE.fullmatch(opcode))
    for operand in ins.operands:
        for reg in _registers(operand):
            wants_float = is_float and (widths[reg] == 32 or is_packed)
            votes[reg] += 1 if wants_float else -1


def _vote_move(ins, widths, votes, moves) -> None:
    dst, src = ins.operands
    if isinstance(dst, Reg) and isinstance(src, Reg):
        moves.append((dst.index, src.index))
        return
    packs = [o for o in (dst, src) if isinstance(o, Vector)]
    other = src if isinstance(dst, Vector) else dst
    if packs and isinstance(other, Reg) and widths[other.index] == 64:
        votes[other.index] += 1
        return
    if isinstance(dst, Reg) and getattr(src, "is_float", False) and widths[dst.index] == 32:
        votes[dst.index] += 1


def _vote_addresses(ins, widths, votes) -> None:
    for operand in ins.operands:
        base = getattr(operand, "base", None)
        if isinstance(base, Reg):
            votes[base.index] -= 4


def _add(operand, widths, votes, amount) -> None:
    for reg in _registers(operand):
        votes[reg] += amount


def _registers(operand):
    if isinstance(operand, Reg):
        yield operand.index
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from _registers(element)
    elif isinstance(operand, Pair):
        yield from _registers(operand.data)
        yield from _registers(operand.predicate)
    elif hasattr(operand, "base"):
        yield from _registers(operand.base)
        for coordinate in operand.coordinates or ():
            yield from _registers(coordinate)


def poison(storage: str, lanes: int):
    """A never-written register of that class."""
    if storage == "p":
        return np.zeros(lanes, np.bool_)
    if storage == "pair":
        half = poison("f32", lanes)
        return (half, half)
    if storage == "b128":
        half = poison("u64", lanes)
        return (half, half)
    dtype = np.dtype(DTYPES[storage])
    return np.full(lanes, POISON_BITS & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").view(dtype)


def select(value, index):
    """The lanes `index` (slice, index array or mask) of a stored register."""
    return (value[0][index], value[1][index]) if type(value) is tuple else value[index]


def concatenate(values: list):
    """Joins stored registers of one class lane-wise."""
    if type(values[0]) is tuple:
        return (np.concatenate([v[0] for v in values]), np.concatenate([v[1] for v in values]))
    return np.concatenate(values)


def to_kind(value, storage: str, kind: str):
    """A stored register as an array of another kind of the same width (no change of bits)."""
    if storage == kind:
        return value
    if storage == "pair":
        low, high = value
        packed = np.empty((len(low), 2), np.uint32)
        packed[:, 0] = low.view(np.uint32)
        packed[:, 1] = high.view(np.uint32)
        return packed.view(np.uint64)[:, 0].view(DTYPES[kind])
    if kind == "pair":
        halves = np.ascontiguousarray(value).view(np.float32).reshape(-1, 2)
        return (np.ascontiguousarray(halves[:, 0]), np.ascontiguousarray(halves[:, 1]))
    return value.view(DTYPES[kind])
