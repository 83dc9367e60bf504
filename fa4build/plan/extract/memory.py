"""Memory of the symbolic machine: objects of scalar cells at invented, constant addresses.

Every object (a stack slot, a global, a caller's argument block) has an address of its own, so pointers are ordinary
64-bit constants and pointer arithmetic is constant folding. Addresses of caller tensors are inputs, never looked into.
A byte that was never written, or written with an undefined value, stays undefined.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4build.errors import LaunchPlanError
from fa4build.plan.builder import NodeTable
from fa4build.plan.values import TYPE_BYTES

_BASE = 0x5FA4_0000_0000_0000
_STEP = 1 << 24  # the largest object, and a multiple of every alignment


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryObject:
    """What was allocated: `name` for messages; `type_text` and `count` as in alloca, `align` in bytes."""

    name: str
    type_text: str
    count: int
    align: int


Cell = tuple[str, int]  # (plan type, node)
Contents = dict[int, Cell]


class Memory:
    """Objects, and the cells that hold a value by (object, byte offset)."""

    def __init__(self, table: NodeTable) -> None:
        self.table = table
        self.objects: list[MemoryObject] = []
        self._contents: dict[int, Contents] = {}
        self._named: dict[str, int] = {}

    def allocate(self, name: str, type_text: str = "i8", count: int = 1, align: int = 1) -> int:
        """Address of a new object with nothing in it."""
        self.objects.append(MemoryObject(name=name, type_text=type_text, count=count, align=align))
        self._contents[len(self.objects) - 1] = {}
        return _BASE + (len(self.objects) - 1) * _STEP

    def address_of(self, symbol: str) -> int:
        """Address of a global or function: one object per symbol."""
        if symbol not in self._named:
            self._named[symbol] = self.allocate(symbol)
        return self._named[symbol]

    def owns(self, address: int) -> bool:
        """True for an address inside an object."""
        return _BASE <= address < _BASE + len(self.objects) * _STEP

    def object_at(self, address: int) -> tuple[int, int]:
        """(object index, byte offset) of an address.

        Raises: LaunchPlanError for an address that belongs to no object.
        """
        if not self.owns(address):
            raise LaunchPlanError(f"host code follows the pointer {address:#x}, which is no memory of its own")
        return divmod(address - _BASE, _STEP)

    def store(self, address: int, type_: str, node: int | None) -> None:
        """Write one scalar; None makes its bytes undefined."""
        index, offset = self.object_at(address)
        contents = self._contents[index]
        size = TYPE_BYTES[type_]
        for at in range(offset - 7, offset + size):
            cell = contents.get(at)
            if cell is None or at + TYPE_BYTES[cell[0]] <= offset:
                continue
            if at < offset or at + TYPE_BYTES[cell[0]] > offset + size:
                raise LaunchPlanError(
                    f"host code overwrites part of the {cell[0]} at byte {at} of {self.objects[index].name}"
                )
            del contents[at]
        if node is not None:
            contents[offset] = (type_, node)

    def load(self, address: int, type_: str) -> int | None:
        """Read one scalar, None if it is undefined."""
        index, offset = self.object_at(address)
        contents = self._contents[index]
        cell = contents.get(offset)
        if cell is not None and cell[0] == type_:
            return cell[1]
        if cell is not None and {cell[0], type_} in ({"i32", "f32"}, {"i64", "f64"}):
            return self.table.op("bitcast", type_, cell[1])
        size = TYPE_BYTES[type_]
        overlapping = [
            at
            for at in range(offset - 7, offset + size)
            if at in contents and at + TYPE_BYTES[contents[at][0]] > offset
        ]
        if overlapping:
            raise LaunchPlanError(
                f"host code reads {size} bytes at byte {offset} of {self.objects[index].name}, "
                f"where a {contents[overlapping[0]][0]} was written; reads across cells are not understood"
            )
        return None

    def cells(self, address: int) -> Contents:
        """Everything written to the object at `address`, by byte offset."""
        return self._contents[self.object_at(address)[0]]

    def snapshot(self) -> dict[int, Contents]:
        """The present contents, to go back to or to merge with."""
        return {index: dict(contents) for index, contents in self._contents.items()}

    def restore(self, snapshot: dict[int, Contents]) -> None:
        """Go back to a snapshot. Objects that were allocated since stay, empty."""
        self._contents = {index: dict(snapshot.get(index, {})) for index in range(len(self.objects))}

    def merge(self, condition: int, if_true: dict[int, Contents]) -> None:
        """Join two branches: `if_true` where `condition` holds, the present contents where not.

        A byte that only one side wrote takes that side's value: on the other it was undefined.
        """
        for index, other in if_true.items():
            contents = self._contents[index]
            for offset, (type_, node) in other.items():
                mine = contents.get(offset)
                if mine is None:
                    self.store(_BASE + index * _STEP + offset, type_, node)
                elif mine[0] != type_:
                    raise LaunchPlanError(
                        f"two branches write a {type_} and a {mine[0]} to byte {offset} of {self.objects[index].name}"
                    )
                elif mine[1] != node:
                    contents[offset] = (type_, self.table.op("select", type_, condition, node, mine[1]))
