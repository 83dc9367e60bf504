"""Tools for system rules: operand access outside generated code, and the outcomes `Wait` and `Split`."""

from collections.abc import Callable

import numpy as np

from fa4build.simulate.hardware.gang import WARP, Fault, Gang
from fa4build.simulate.hardware.registers import DTYPES, to_kind
from fa4build.simulate.ptx.instructions import Address, Imm, Reg, Sink, Special, Symbol
from fa4build.simulate.translate.node_scope import merge, special, symbol


class Wait:
    """Why a gang cannot go on.

    `ready` is polled; `describe` is for the deadlock report; `blockers`: (CTA rank, warp) of those who released such a
    wait before; `resume`: the node to go on at.
    """

    __slots__ = ("blockers", "describe", "finish", "node", "ready", "resume")

    def __init__(
        self,
        ready: Callable[[], bool],
        describe: Callable[[], str],
        finish: Callable | None = None,
        blockers: Callable[[], set] = set,
    ):
        self.ready, self.describe, self.finish, self.blockers = ready, describe, finish, blockers
        self.resume: int | None = None
        self.node = -1


class Split:
    """The warps of a gang must go separate ways here: one key per warp, equal keys stay together. Nothing happened
    yet.
    """

    __slots__ = ("keys",)

    def __init__(self, keys: list):
        self.keys = keys


class Binder:
    """Binds the operands of one system instruction to access functions."""

    def __init__(self, program, site: int, ins):
        self.program, self.site, self.ins, self.line = program, site, ins, ins.line

    def fault(self, message: str) -> Fault:
        """An error at this instruction."""
        return Fault(message, self.site)

    def get(self, operand, kind: str) -> Callable[[Gang], np.ndarray]:
        """Reader of an operand as an array over all lanes of the gang."""
        if isinstance(operand, Reg):
            index, storage = operand.index, self.program.storage[operand.index]
            return lambda g: to_kind(g.regs[index], storage, kind)
        if isinstance(operand, Imm):
            index = self.program.constant(operand.value & ((1 << 8 * np.dtype(DTYPES[kind]).itemsize) - 1), kind)
            return lambda g: g.constants[index]
        if isinstance(operand, Special):
            return lambda g: special(g, operand.name, kind)
        if isinstance(operand, Symbol):
            return lambda g: symbol(g, operand.name, kind)
        raise self.fault(f"operand {operand} of {self.ins.opcode} cannot be read as {kind}")

    def put(self, operand, kind: str) -> Callable:
        """Writer of a destination: `fn(gang, mask, array)`; lanes outside the mask keep the old value."""
        if isinstance(operand, Sink):
            return lambda g, mask, value: None
        if not isinstance(operand, Reg):
            raise self.fault(f"operand {operand} of {self.ins.opcode} is not a destination")
        index, storage = operand.index, self.program.storage[operand.index]

        def write(g: Gang, mask, value) -> None:
            value = to_kind(value, kind, storage)
            g.regs[index] = value if mask is None else merge(mask, value, g.regs[index])

        return write

    def address(self, operand: Address, bits: int) -> Callable[[Gang], np.ndarray]:
        """Reader of the byte address `[base + offset]`."""
        dtype = np.dtype(f"u{bits // 8}").type
        if isinstance(operand.base, Imm):
            return self.get(Imm(operand.base.value + operand.offset), f"u{bits}")
        base, offset = self.get(operand.base, f"u{bits}"), dtype(operand.offset & ((1 << bits) - 1))
        return (lambda g: base(g) + offset) if operand.offset else base


def active_lanes(gang: Gang, mask) -> np.ndarray:
    """Positions of the active lanes."""
    return np.arange(gang.lanes) if mask is None else np.flatnonzero(mask)


def active_warps(gang: Gang, mask) -> list[int]:
    """Positions, in the gang, of warps with an active lane."""
    return list(range(len(gang.warps))) if mask is None else np.flatnonzero(gang.warp_any(mask)).tolist()


def one_value(array: np.ndarray, mask) -> int | None:
    """The common value of the active lanes, or None if they differ."""
    chosen = array if mask is None else array[mask]
    first = chosen[0]
    return int(first) if (chosen == first).all() else None


def uniform(array: np.ndarray, mask, what: str) -> int:
    """The common value of the active lanes.

    Raises:
        Fault: they differ.
    """
    value = one_value(array, mask)
    if value is None:
        chosen = array if mask is None else array[mask]
        raise Fault(f"{what} must be the same in all lanes; it takes {len(set(chosen.tolist()))} values")
    return value


def warp_uniform_split(gang: Gang, mask, *arrays) -> Split | None:
    """A `Split` when lanes agree inside each warp but warps disagree; None when all active lanes agree.

    Raises:
        Fault: lanes of one warp disagree.
    """
    if all(one_value(a, mask) is not None for a in arrays):
        return None
    keys: list[tuple | None] = []
    for k in range(len(gang.warps)):
        lanes = slice(WARP * k, WARP * k + WARP)
        part = None if mask is None else mask[lanes]
        if part is not None and not part.any():
            keys.append(None)
            continue
        keys.append(tuple(uniform(a[lanes], part, "operand of a converged instruction") for a in arrays))
    return Split(keys)


def require_converged(gang: Gang, mask, what: str) -> None:
    """Checks that every warp that is here is here with all its lanes that have not exited.

    Raises:
        Fault: names the lanes that execute and those that are elsewhere.
    """
    if mask is None:
        return
    present = mask if gang.exited is None else mask | gang.exited
    by_warp = present.reshape(-1, WARP)
    for k in np.flatnonzero(gang.warp_any(mask)):
        if not by_warp[k].all():
            here = np.flatnonzero(mask.reshape(-1, WARP)[k]).tolist()
            raise Fault(
                f"{what} needs all 32 lanes of warp {gang.warps[k].index}, but only lanes "
                f"{lane_ranges(here)} execute it; "
                "the others are elsewhere, so the hardware waits for ever or does something undefined"
            )


def lane_ranges(lanes: list[int]) -> str:
    """`0-3,7` for a sorted list."""
    parts: list[str] = []
    start = 0
    for k, lane in enumerate(lanes):
        if k + 1 == len(lanes) or lanes[k + 1] != lane + 1:
            first = lanes[start]
            parts.append(str(first) if first == lane else f"{first}-{lane}")
            start = k + 1
    return ",".join(parts)
