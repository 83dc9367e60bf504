"""One PTX function as a table of fixed-size records, the form in which the native engine reads it.

A warp's registers are one block of bytes. A register of 16 or 32 bits takes 128 bytes (32 lanes of u32, the upper half
of a 16-bit one zero), of 64 bits 256 (32 lanes of u64), of 128 bits 512 (low words, then high words), a predicate 4
(one bit a lane). An operand is an offset into that block, or, with bit 0 set, into the block of constants; bit 1 says
that it is 64 bits wide; -1 is none. Record i is instruction i of the function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import numpy as np

from fa4build.errors import SimulationError
from fa4build.simulate.instructions.ctas import PARAMETER_WINDOW
from fa4build.simulate.ptx.instructions import Address, Function, Imm, Reg, Sink, Special, Symbol

RECORD = np.dtype(
    [
        ("run", "<u8"),  # address of the handler, filled in by the engine
        ("op", "<u2"),
        ("size", "u1"),
        ("count", "u1"),
        ("flags", "<u4"),
        ("guard", "<i4"),  # -1, or the predicate's offset, plus 1 when negated
        ("target", "<i4"),
        ("reconverge", "<i4"),
        ("line", "<i4"),
        ("o", "<i4", (6,)),
        ("list", "<i4"),  # first entry in the table of operand lists
        ("length", "<i4"),
        ("list2", "<i4"),
        ("length2", "<i4"),
        ("imm", "<i8", (2,)),
    ]
)
NONE = -1
CONSTANT, WIDE = 1, 2
HALF = 1  # of a destination of any width: it has 16 bits
WIDTHS = {"p": 1, "u8": 16, "s8": 16, "u16": 16, "s16": 16, "u32": 32, "s32": 32, "f32": 32, "u64": 64, "s64": 64,
          "pair": 64, "b128": 128}  # fmt: skip
SLOT_BYTES = {1: 4, 16: 128, 32: 128, 64: 256, 128: 512}
_POISON = 0x7FC1_7FC1_7FC1_7FC1
# Values that differ between warps or CTAs: the engine fills their slots when a warp starts, by these numbers.
SPECIALS = (
    *("tid.x", "tid.y", "tid.z", "laneid", "warpid", "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_ge"),
    *("lanemask_gt", "ntid.x", "ntid.y", "ntid.z", "ctaid.x", "ctaid.y", "ctaid.z", "nctaid.x", "nctaid.y", "nctaid.z"),
    *("clusterid.x", "clusterid.y", "clusterid.z", "nclusterid.x", "nclusterid.y", "nclusterid.z"),
    *("cluster_ctaid.x", "cluster_ctaid.y", "cluster_ctaid.z"),
    *("cluster_nctaid.x", "cluster_nctaid.y", "cluster_nctaid.z", "cluster_ctarank", "cluster_nctarank", "nwarpid"),
    *("dynamic_smem_size", "smid", "gridid", "shared window"),
)
CLOCKS = ("clock", "clock64", "globaltimer")


@cache
def operations() -> dict[str, int]:
    """Number of every operation by name, as `ops.h` lists them."""
    text = (Path(__file__).parent / "ops.h").read_text(encoding="utf-8")
    return {name: number for number, name in enumerate(re.findall(r"^\s*OP\((\w+)\)", text, re.MULTILINE))}


def storage_width(width: int) -> int:
    """Bits of the slot that holds a register of `width` bits; those of 8 bits live in one of 16."""
    return 1 if width == 1 else max(width, 16)


@dataclass(slots=True)
class Constants:
    """Immediates, each once per width, as bytes of 32 equal lanes."""

    offsets: dict[tuple[int, int], int] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)

    def place(self, bits: int, width: int) -> int:
        """Offset of a value."""
        width = 32 if width == 16 else width
        key = (bits, width)
        if key not in self.offsets:
            self.data.extend(b"\0" * (-len(self.data) % 128))
            self.offsets[key] = len(self.data)
            self.data.extend(_lanes(bits, width))
        return self.offsets[key]


def _lanes(bits: int, width: int) -> bytes:
    if width == 1:
        return (0xFFFFFFFF if bits else 0).to_bytes(4, "little")
    if width == 128:
        low, high = bits & (1 << 64) - 1, bits >> 64 & (1 << 64) - 1
        return low.to_bytes(8, "little") * 32 + high.to_bytes(8, "little") * 32
    return bits.to_bytes(width // 8, "little") * 32


class Coder:
    """Writes records. A rule of the decoding tables asks it for operands and calls `emit` once.

    Args: slots: byte offset of every register of the function in a warp's block.
    """

    def __init__(self, function: Function, slots: list[int], size: int, shared_names: frozenset[str]):
        self.function, self.slots, self.size = function, slots, size
        self.shared_names = shared_names
        self.constants = Constants()
        self.specials: dict[tuple[str, int], int] = {}
        self.lists: list[int] = []
        self._list_places: dict[tuple[int, ...], int] = {}
        self.rows: list[tuple] = []  # RECORD, but for what is known of its place
        count = len(function.instructions) + 1
        self.guards, self.targets, self.meetings = [NONE] * count, [NONE] * count, [NONE] * count
        self.lines = [ins.line for ins in function.instructions] + [0]
        self.contracted: dict[int, int] = {}
        self.texts: list[str] = []
        self.index = 0

    @property
    def _opcode(self) -> str:
        return self.function.instructions[self.index].opcode

    # --- operands -------------------------------------------------------------------------------------------------

    def width_of(self, operand, otherwise: int) -> int:
        """Bits of the slot behind an operand."""
        if isinstance(operand, Reg):
            return storage_width(self.function.register_widths[operand.index])
        return otherwise

    def src(self, operand, kind: str) -> int:
        """An operand that is read as `kind`.

        Raises: ValueError where the register has another width.
        """
        width = WIDTHS[kind]
        if isinstance(operand, Reg):
            return self._register(operand.index, width, kind)
        if isinstance(operand, Imm):
            bits = 8 if kind[1:] == "8" else width
            return self.constant(operand.value & (1 << bits) - 1, width)
        if isinstance(operand, Special):
            return self._special(operand.name, width)
        if isinstance(operand, Symbol):
            return self._symbol(operand.name, width)
        raise ValueError(f"operand {operand} cannot be read as {kind}")

    def constant(self, bits: int, width: int) -> int:
        """A constant operand."""
        return self.constants.place(bits & (1 << width) - 1, width) | CONSTANT | (WIDE if width == 64 else 0)

    def _register(self, index: int, width: int, kind: str) -> int:
        have = storage_width(self.function.register_widths[index])
        if have != width:
            raise ValueError(f"a {have}-bit register is used as {kind}")
        return self.slots[index] | (WIDE if have == 64 else 0)

    def _special(self, name: str, width: int) -> int:
        if name not in SPECIALS or width not in (32, 64):
            raise ValueError(f"special register %{name} is not modelled here")
        key = (name, width)
        if key not in self.specials:
            self.specials[key] = self.size
            self.size += SLOT_BYTES[width]
        return self.specials[key] | (WIDE if width == 64 else 0)

    def _symbol(self, name: str, width: int) -> int:
        if name in self.shared_names:
            return self._special("shared window", width)
        for parameter in self.function.parameters:
            if parameter.name == name:
                return self.constant(PARAMETER_WINDOW + parameter.offset, width)
        return self.constant(self.function.local_symbols[name], width)

    def dst(self, operand, kind: str) -> int:
        """A destination of `kind`, or NONE for the sink."""
        if isinstance(operand, Sink):
            return NONE
        if not isinstance(operand, Reg):
            raise ValueError(f"{operand} is not a destination register")
        return self._register(operand.index, WIDTHS[kind], kind)

    def any_register(self, operand) -> int:
        """A destination whatever its width, bit 0 set for 16 bits; NONE for the sink."""
        if isinstance(operand, Sink):
            return NONE
        width = self.width_of(operand, 0)
        if width not in (16, 32, 64):
            raise ValueError(f"{operand} cannot be loaded to")
        return self.slots[operand.index] | {16: HALF, 32: 0, 64: WIDE}[width]

    def address(self, operand: Address, bits: int) -> tuple[int, int]:
        """(base operand, byte offset) of `[base + offset]`."""
        if isinstance(operand.base, Imm):
            return self.constant(operand.base.value + operand.offset, bits), 0
        return self.src(operand.base, f"u{bits}"), operand.offset

    def listed(self, entries: list[int] | tuple[int, ...]) -> tuple[int, int]:
        """(first, length) of a list of operands; equal lists are kept once."""
        key = tuple(entries)
        if key not in self._list_places:
            self._list_places[key] = len(self.lists)
            self.lists.extend(key)
        return self._list_places[key], len(key)

    # --- records --------------------------------------------------------------------------------------------------

    def emit(
        self,
        operation: str,
        *operands: int,
        size: int = 0,
        count: int = 0,
        flags: int = 0,
        imm: int = 0,
        imm2: int = 0,
        entries: list[int] | tuple[int, ...] = (),
        entries2: list[int] | tuple[int, ...] = (),
    ) -> None:
        """Writes the record of the current instruction.

        Raises: SimulationError for an operation that the rule of its opcode does not name.
        """
        if operation not in _OF_ANY_OPCODE and operation not in operations_of(self._opcode):
            raise SimulationError(
                f"the rule of {self._opcode} emits {operation}, which it does not name; see `decodes`"
            )
        places = (*operands, *[NONE] * (6 - len(operands)))
        numbers = (_signed(imm), _signed(imm2))
        listed = (*self.listed(entries), *self.listed(entries2))
        self.rows.append((operations()[operation], size, count, flags, places, listed, numbers))

    def records(self) -> np.ndarray:
        """All instructions as RECORD."""
        made = np.zeros(len(self.rows), RECORD)
        columns = list(zip(*self.rows, strict=True))
        for name, column in zip(("op", "size", "count", "flags", "o"), columns, strict=False):
            made[name] = column
        lists = np.array(columns[5], np.int32)
        made["list"], made["length"], made["list2"], made["length2"] = lists.T
        made["imm"] = columns[6]
        made["guard"], made["target"], made["reconverge"] = self.guards, self.targets, self.meetings
        made["line"] = self.lines
        return made

    def emit_fault(self, text: str) -> None:
        """A record that ends the run with this text if it is ever executed."""
        self.emit("fault", imm=len(self.texts))
        self.texts.append(text)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


# --- the tables of decoding rules ---------------------------------------------------------------------------------


_RULES: list[tuple[re.Pattern, Callable, str]] = []
_OF_ANY_OPCODE = frozenset(("branch", "leave", "nop", "fault"))


def decodes(pattern: str, emits: str) -> Callable:
    """Registers `make(coder, instruction, match)` for every opcode that `pattern` matches completely.

    Args: emits: the operations that it may emit, as words with `*` and `?`; `\\1` is the first group of the match. A
        proof depends on these alone (verify/identity.py), so that `Coder.emit` refuses others.
    """

    def add(make: Callable) -> Callable:
        _RULES.append((re.compile(pattern), make, emits))
        return make

    return add


@cache
def _found(opcode: str) -> tuple[Callable, re.Match, str] | None:
    for pattern, make, emits in _RULES:
        if match := pattern.fullmatch(opcode):
            return make, match, emits
    return None


def rule_of(opcode: str) -> tuple[Callable, re.Match] | None:
    """The decoding rule of an opcode, None if the native engine has none."""
    found = _found(opcode)
    return None if found is None else found[:2]


@cache
def operations_of(opcode: str) -> frozenset[str]:
    """The operations that instructions of an opcode may become, but for those of any opcode; none without a rule."""
    found = _found(opcode)
    if found is None:
        return frozenset()
    words = found[1].expand(found[2]).split()
    return frozenset(name for name in operations() if any(fnmatchcase(name, word) for word in words)) - _OF_ANY_OPCODE


def elements(operand) -> tuple:
    """The elements of a vector operand, or the operand alone."""
    return getattr(operand, "elements", (operand,))
