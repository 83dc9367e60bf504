"""The values a PTX module is parsed into.

Registers are containers of 1, 16, 32, 64 or 128 bits, numbered densely per function; the opcode decides how their
bits are read.
"""

from dataclasses import dataclass, field

PREDICATE_WIDTH = 1


@dataclass(frozen=True, slots=True)
class Reg:
    """A register operand: dense index within its function."""

    index: int


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate.

    Integers keep their sign; a float immediate (`0fXXXXXXXX`, `0dXXXXXXXXXXXXXXXX`) keeps its IEEE bits.
    """

    value: int
    is_float: bool = False


@dataclass(frozen=True, slots=True)
class Special:
    """A read-only special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A shared, local or parameter symbol used as a value."""

    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """The `_` destination: the result is dropped."""


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, ...}`."""

    elements: tuple


@dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`: a data destination and a predicate destination."""

    data: object
    predicate: object


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, or `[base, {coordinates}]` for tensor copies (base is then the tensor map)."""

    base: object
    offset: int = 0
    coordinates: tuple | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A branch target: index of an instruction in the function (its length means the end)."""

    index: int


@dataclass(frozen=True, slots=True)
class Guard:
    """`@p` or `@!p`."""

    register: int
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One statement of a function body."""

    opcode: str
    operands: tuple
    guard: Guard | None
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter: byte offset in the parameter block, size and alignment in bytes."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True, slots=True)
class SharedSymbol:
    """A shared variable; `size` 0 is the dynamic (extern) one."""

    name: str
    size: int
    align: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One `.entry`: parameters, registers (name and width by index), instructions in order."""

    name: str
    parameters: tuple[Parameter, ...]
    register_names: tuple[str, ...]
    register_widths: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    required_threads: int | None
    local_symbols: dict = field(default_factory=dict)
    local_bytes: int = 0

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameter block in bytes."""
        return max((p.offset + p.size for p in self.parameters), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One PTX file. `sha256` is the digest of its text."""

    target: str
    version: str
    entries: dict[str, Function]
    shared_symbols: tuple[SharedSymbol, ...]
    sha256: str
