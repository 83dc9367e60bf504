"""Facts read back from a cubin, so that nothing is believed because it was asked for.

Reads our own compile output, through the ELF container (pyelftools) and the attribute records that the CUDA binary
utilities document. Machine code is not looked at. Spills are in no record of the file: they come from the assembler's
own report (`spills_from_log`).
"""

import io
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa4build.errors import CompileError

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

_EIATTR_FRAME_SIZE = 0x11
_EIATTR_REGCOUNT = 0x2F
_EIFMT_SIZED = 4  # the other formats carry their value in the header itself
_SYSTEM_SHARED_BYTES = 1024  # the system's share of a block's shared memory, sm_90 and later; in the section's size
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """One entry function: registers a thread, stack a thread and statically allocated shared memory a block (bytes)."""

    symbol: str
    registers: int
    local_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CubinFacts:
    """A whole cubin: its target as the assembler was told it (`sm_90a`), the assembler's version, its entries."""

    target: str
    ptxas: str
    kernels: tuple[KernelFacts, ...]


def read_cubin(elf: bytes, *, origin: str = "cubin") -> CubinFacts:
    """Read a cubin.

    The architecture number is in the ELF header's flags; the suffix (`a`, `f`) only in the assembler's note. Both must
    agree.

    Raises: CompileError when the bytes are no complete cubin, or contradict themselves; `origin` names them.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        file = ELFFile(io.BytesIO(elf))
        sections = {section.name: section for section in file.iter_sections()}
        if file.header["e_machine"] != "EM_CUDA":
            raise CompileError(f"{origin}: an ELF file for {file.header['e_machine']}, not a cubin.")
        _check_complete(file, len(elf))
        symbols = list(sections[".symtab"].iter_symbols())
        number = file.header["e_flags"] >> 8 & 0xFF
        ptxas, target = _tool_note(sections[".note.nv.tkinfo"].data())
        counts = _counts_by_symbol(sections[".nv.info"].data())
        kernels = [
            KernelFacts(
                symbol=symbol.name,
                registers=counts[index, _EIATTR_REGCOUNT],
                local_bytes=counts.get((index, _EIATTR_FRAME_SIZE), 0),
                shared_bytes=_static_shared_bytes(sections, symbol.name),
            )
            for index, symbol in enumerate(symbols)
            if symbol["st_info"]["type"] == "STT_FUNC" and f".nv.info.{symbol.name}" in sections
        ]
    except (ELFError, KeyError, IndexError, ValueError, AttributeError, struct.error) as error:
        raise CompileError(
            f"{origin}: {len(elf)} bytes that are no complete cubin ({type(error).__name__}: {error})."
        ) from error
    if re.fullmatch(rf"sm_{number}[af]?", target) is None:
        raise CompileError(f"{origin}: the ELF header says architecture {number}, the assembler's note {target!r}.")
    if not kernels:
        raise CompileError(f"{origin}: holds no entry function.")
    return CubinFacts(target=target, ptxas=ptxas, kernels=tuple(sorted(kernels, key=lambda kernel: kernel.symbol)))


# Long reports come wrapped, so a space may be a line's end with the next one's indentation.
_SPILLS = re.compile(
    r"Compiling\s+entry\s+function\s+'(?P<kernel>[^']+)'(?:(?!Compiling\s+entry).)*?"
    r"(?P<stores>\d+)\s+bytes\s+spill\s+stores,\s+(?P<loads>\d+)\s+bytes\s+spill\s+loads",
    re.DOTALL,
)


def spills_from_log(log: str) -> Mapping[str, int]:
    """Spilled bytes (stores plus loads) by entry function, from the assembler's verbose report in a compile log."""
    return {
        match["kernel"]: int(match["stores"]) + int(match["loads"]) for match in _SPILLS.finditer(_ANSI.sub("", log))
    }


def _tool_note(note: bytes) -> tuple[str, str]:
    """(version, target) from the assembler's note: `V13.4.59` and the `-arch` it ran with."""
    text = note.decode("latin-1")
    version = re.search(r"release [0-9.]+, (V[0-9.]+)", text)
    target = re.search(r"-arch (sm_\w+)", text)
    if version is None or target is None:
        raise ValueError("the assembler's note names no version or no -arch")
    return version[1], target[1]


def _counts_by_symbol(info: bytes) -> dict[tuple[int, int], int]:
    """(symbol index, attribute) -> number, from the records of `.nv.info`."""
    counts = {}
    for attribute, payload in _records(info):
        if attribute in (_EIATTR_REGCOUNT, _EIATTR_FRAME_SIZE):
            symbol, number = struct.unpack("<II", payload)
            counts[symbol, attribute] = number
    return counts


def _records(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Attribute records: a four-byte header (format, attribute, value or size), then the payload of sized ones."""
    position = 0
    while position < len(info):
        format_, attribute, value = struct.unpack_from("<BBH", info, position)
        position += 4
        size = value if format_ == _EIFMT_SIZED else 0
        if position + size > len(info):
            raise ValueError("an attribute record runs over the end of its section")
        yield attribute, info[position : position + size]
        position += size


def _static_shared_bytes(sections: Mapping[str, object], symbol: str) -> int:
    """Shared memory an entry declares itself; the section is there too when it only names what the launch brings."""
    name = f".nv.shared.{symbol}"
    return max(0, sections[name]["sh_size"] - _SYSTEM_SHARED_BYTES) if name in sections else 0


def _check_complete(file: "ELFFile", size: int) -> None:
    """Every section and the program headers must lie within the file."""
    ends = [file.header["e_phoff"] + file.header["e_phnum"] * file.header["e_phentsize"]]
    ends += [
        section["sh_offset"] + section["sh_size"]
        for section in file.iter_sections()
        if section["sh_type"] != "SHT_NOBITS"
    ]
    if max(ends) > size:
        raise ValueError(f"its parts end at byte {max(ends)}")
