"""Small made-up cubins and their launch plans: every part that is read is right, the machine code runs nowhere."""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EM_CUDA = 190
PARAMS_BASE = 0x210  # of the constant bank, as on sm_90
_SIZED = 4


@dataclass(frozen=True, kw_only=True)
class MadeUpEntry:
    """An entry function: registers and stack a thread, shared memory of its own, sizes of its parameters (align 4)."""

    registers: int = 168
    local_bytes: int = 0
    shared_bytes: int = 0
    params: tuple[int, ...] = (8, 4)
    block: tuple[int, int, int] = (384, 1, 1)


def made_up_cubin(entries: Mapping[str, MadeUpEntry], *, target: str = "sm_90a", code: bytes = b"code" * 40) -> bytes:
    """A cubin with these entries by symbol; `code` is the machine code of each."""
    strings, offsets = b"\0", {}
    for symbol in entries:
        offsets[symbol] = len(strings)
        strings += symbol.encode() + b"\0"
    symbols, counts = bytes(24), b""
    sections: list[tuple[str, int, bytes, int]] = []  # name, type, contents, size
    for index, (symbol, entry) in enumerate(entries.items(), 1):
        symbols += struct.pack("<IBBHQQ", offsets[symbol], 0x12, 0, 0, 0, len(code))
        counts += _attribute(0x2F, struct.pack("<II", index, entry.registers))
        counts += _attribute(0x11, struct.pack("<II", index, entry.local_bytes))
        shared = entry.shared_bytes + 1024
        sections += [
            (f".nv.info.{symbol}", 0x70000000, _parameters(entry), 0),
            (f".text.{symbol}", 1, code, 0),
            (f".nv.shared.{symbol}", 8, b"", shared),
        ]
    note = f"Cuda compilation tools, release 13.4, V13.4.59\0-O 3 -arch {target} \0".encode()
    whole = [
        ("", 0, b"", 0),
        (".strtab", 3, strings, 0),
        (".symtab", 2, symbols, 0),
        (".note.nv.tkinfo", 7, note, 0),
        (".nv.info", 0x70000000, counts, 0),
        *sections,
    ]
    return _elf(whole, number=int("".join(filter(str.isdigit, target))))


def _attribute(number: int, payload: bytes) -> bytes:
    return struct.pack("<BBH", _SIZED, number, len(payload)) + payload


def _parameters(entry: MadeUpEntry) -> bytes:
    found, end = b"", PARAMS_BASE
    for ordinal, size in enumerate(entry.params):
        found += _attribute(0x17, struct.pack("<IHHI", 0, ordinal, end - PARAMS_BASE, size << 18))
        end += size
    found += _attribute(0x0A, struct.pack("<IHH", 1, PARAMS_BASE, end - PARAMS_BASE))
    return found + _attribute(0x10, struct.pack("<III", *entry.block))


def _elf(sections: Sequence[tuple[str, int, bytes, int]], *, number: int) -> bytes:
    """Header, contents one after another, section names, section table."""
    names, body, rows = b"", b"", []
    sections = [*sections, (".shstrtab", 3, b"", 0)]
    for name, kind, data, size in sections:
        start = len(names)
        names += name.encode() + b"\0"
        rows.append([start, kind, 0, 0, 64 + len(body), size or len(data), 2 if kind == 2 else 0, 0, 1, 0])
        rows[-1][9] = 24 if kind == 2 else 0
        rows[-1][6] = 1 if kind == 2 else 0  # .symtab's names are in .strtab
        body += data
    rows[-1][4:6] = [64 + len(body), len(names)]
    body += names
    table = b"".join(struct.pack("<IIQQQQIIQQ", *row) for row in rows)
    ident = b"\x7fELF\2\1\1".ljust(16, b"\0")
    counts = (64, 56, 0, 64, len(rows), len(rows) - 1)
    head = struct.pack("<16sHHIQQQIHHHHHH", ident, 2, EM_CUDA, 1, 0, 0, 64 + len(body), number << 8, *counts)
    return head + body + table


def made_up_plan(
    cubin: bytes, symbols: Sequence[str], *, smem: int = 200_000, spec: Mapping[str, object] = {}
) -> bytes:
    """The launch plan of a cubin whose entries are as `MadeUpEntry` says by default."""
    launch = {"grid": [1, 1, 1], "block": [384, 1, 1], "cluster": [1, 1, 1], "smem": smem, "pdl": False}
    params = [
        {"kind": "bytes", "size": 8, "align": 4, "fields": [[0, 0]]},
        {"kind": "bytes", "size": 4, "align": 4, "fields": [[0, 1]]},
    ]
    document = {
        "format": "fa4build.launchplan",
        "version": 1,
        "origin": {"kind": "handwritten", "cubin_sha256": hashlib.sha256(cubin).hexdigest()},
        "spec": dict(spec),
        "args": [{"name": "q", "kind": "tensor", "dtype": "bf16", "rank": 4}],
        "nodes": [["in", "i64", "q.ptr"], ["const", "i32", 1]],
        "guards": [],
        "launches": [{**launch, "kernel": symbol, "cooperative": False, "params": params} for symbol in symbols],
        "vectors": [],
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
