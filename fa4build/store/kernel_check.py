"""Whether a cubin and a launch plan are the kernel that they are said to be: one check for every door.

A digest proves that bytes are those that somebody stored, not that they are this kernel. So the cubin itself is read
wherever kernels enter a pack, a wheel, a bundle or a store: its target, its entries, their registers, stack, shared
memory and parameters must be those that the facts and the launch plan state, and the plan must be the one that was read
from this very cubin. What machine code computes is the business of `verify`.

The reader here is not `compiling.cubin`, which is part of every cache key and takes 4 ms a cubin; this one takes 0.2
ms. A test holds that both read the same.
"""

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fa4build.errors import LaunchPlanError, WheelError
from fa4build.plan import BytesTemplate, LaunchPlan, LaunchTemplate, plan_from_json
from fa4build.plan.validate import MAP_ALIGN, MAP_BYTES

_EM_CUDA, _SHT_NOBITS, _STT_FUNC = 190, 8, 2
_PARAM_CBANK, _BLOCK, _FRAME_SIZE, _PARAM, _REGISTERS = 0x0A, 0x10, 0x11, 0x17, 0x2F  # attributes of .nv.info
_SIZED = 4  # attributes of the other formats carry their value in the header itself
_SYSTEM_SHARED_BYTES = 1024  # the system's share of a block's shared memory, sm_90 and later; in the section's size
_HEADER, _SECTION, _PROGRAM_HEADER_BYTES = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQIIQQ"), 56


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What is said of a kernel; the fields are those of `manifest.Facts`."""

    id: str
    target: str
    symbols: tuple[str, ...]
    registers: int
    spill_bytes: int
    shared_bytes: int


def claim_of(kernel_id: str, facts: object) -> Claim:
    """The claim of `manifest.Facts`, or of the facts of a cache entry (a mapping).

    Raises: WheelError when facts are missing or of another type.
    """
    names = ("target", "symbols", "registers", "spill_bytes", "shared_bytes")
    try:
        values = {name: facts[name] if isinstance(facts, Mapping) else getattr(facts, name) for name in names}
        counts_hold = all(type(values[name]) is int for name in names[2:])
        if not counts_hold or not all(isinstance(item, str) for item in (values["target"], *values["symbols"])):
            raise TypeError("of another type")
        return Claim(id=kernel_id, **{**values, "symbols": tuple(values["symbols"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise WheelError(
            f"kernel {kernel_id}: its facts lack what every compile has ({error}). Build it again."
        ) from None


def claim_of_entry(name: str, inputs: Mapping[str, Any], facts: Mapping[str, Any]) -> Claim:
    """The claim of a cache entry: its name and facts, which must be those of the variant that its key is made of.

    Raises: WheelError as `claim_of`, and when name or target are another variant's.
    """
    claim = claim_of(name, facts)
    try:
        symbol, arch = str(inputs["source"]["symbol"]), str(inputs["source"]["variant"]["arch"])
    except (KeyError, TypeError) as error:
        raise WheelError(f"kernel {name}: its entry does not tell the variant ({error}). Build it again.") from None
    if (symbol, arch) != (name.replace("-", "_"), claim.target.replace("_", "")):
        raise WheelError(
            f"kernel {name}: its entry calls it {name} for {claim.target}, its key is made of {symbol} for {arch}. "
            "It is refused. Build it again."
        )
    return claim


@dataclass(frozen=True, slots=True, kw_only=True)
class CubinEntry:
    """One entry function, in bytes and registers a thread.

    `params` are (offset, size) from the start of the parameters, `base` is where these start in the constant bank;
    `block` is () where the kernel demands no block size.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    base: int
    params: tuple[tuple[int, int], ...]
    params_bytes: int
    block: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CubinContents:
    """Target (`sm_90a`) and entry functions by symbol."""

    target: str
    entries: Mapping[str, CubinEntry]


_passed: set[tuple[Claim, str, str]] = set()  # one command meets a kernel at several doors


def check_kernel(claim: Claim, cubin: bytes, plan: bytes, *, remedy: str) -> None:
    """Accept a kernel, or say what it is instead.

    Args:
        plan: the launch plan as JSON.
        remedy: a sentence for whoever reads the error.
    Raises: WheelError naming the kernel, what was found and what was expected.
    """
    digests = hashlib.sha256(cubin).hexdigest(), hashlib.sha256(plan).hexdigest()
    if (claim, *digests) in _passed:
        return
    try:
        problem = next(_problems(claim, read_contents(cubin), _plan(plan), digests[0]), None)
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        raise WheelError(f"kernel {claim.id}: {problem}. It is refused. {remedy}")
    _passed.add((claim, *digests))


def _plan(text: bytes) -> LaunchPlan:
    try:
        return plan_from_json(text.decode())
    except (LaunchPlanError, UnicodeDecodeError) as error:
        raise ValueError(f"its launch plan is none: {error}") from None


def _problems(claim: Claim, cubin: CubinContents, plan: LaunchPlan, sha256: str) -> Iterator[str]:
    """What is not as claimed, the plainest first."""
    if cubin.target != claim.target:
        yield f"its cubin is for {cubin.target}, expected is one for {claim.target}"
    found, prefix = sorted(cubin.entries), claim.id.replace("-", "_")
    wanted = sorted(f"{prefix}_{number}" for number in range(len(found)))
    for whose, symbols in (
        ("cubin has the entries", found),
        ("facts name the entries", sorted(claim.symbols)),
        ("launch plan launches", sorted({launch.kernel for launch in plan.launches})),
    ):
        if symbols != wanted:
            yield f"its {whose} {', '.join(symbols) or 'none'}, expected is {', '.join(wanted) or f'{prefix}_0'}"
    if plan.origin.get("cubin_sha256") != sha256:
        yield (
            f"its launch plan was read from cubin {str(plan.origin.get('cubin_sha256'))[:16] or 'unknown'}, "
            f"here is cubin {sha256[:16]}"
        )
    entries = cubin.entries.values()
    registers = max(entry.registers for entry in entries)
    if registers != claim.registers:
        yield f"its cubin takes {registers} registers a thread, its facts say {claim.registers}"
    if claim.spill_bytes and not any(entry.local_bytes for entry in entries):
        yield f"its facts say that {claim.spill_bytes} bytes of registers spill, its cubin has no stack to spill to"
    shared = max(launch.smem + cubin.entries[launch.kernel].shared_bytes for launch in plan.launches)
    if shared != claim.shared_bytes:
        yield f"cubin and launch plan take {shared} bytes of shared memory, its facts say {claim.shared_bytes}"
    for launch in plan.launches:
        yield from _launch_problems(launch, cubin.entries[launch.kernel])


def _launch_problems(launch: LaunchTemplate, entry: CubinEntry) -> Iterator[str]:
    """Parameters are aligned in the constant bank, not from their first byte: the base counts."""
    if entry.block and entry.block != tuple(launch.block):
        yield f"its launch plan has blocks of {launch.block} threads, its cubin of {entry.block}"
    end, packed = entry.base, []
    for param in launch.params:
        size, align = (param.size, param.align) if isinstance(param, BytesTemplate) else (MAP_BYTES, MAP_ALIGN)
        start = -(-end // align) * align
        packed.append((start - entry.base, size))
        end = start + size
    if (tuple(packed), end - entry.base) != (entry.params, entry.params_bytes):
        yield (
            f"its launch plan packs {len(packed)} parameters in {end - entry.base} bytes, its cubin takes "
            f"{len(entry.params)} in {entry.params_bytes}, at other places"
        )


# --- reading ----------------------------------------------------------------------------------------------------------


def read_contents(cubin: bytes) -> CubinContents:
    """What a cubin says of itself. Raises: ValueError when the bytes are no complete cubin."""
    try:
        return _contents(cubin)
    except (struct.error, KeyError, IndexError, ValueError) as error:
        torn = isinstance(error, struct.error | IndexError)
        reason = "cut short" if torn else f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"its {len(cubin)} bytes are no complete cubin ({reason}), expected is an ELF file") from None


def _contents(cubin: bytes) -> CubinContents:
    number, sections = _sections(cubin)
    target = _target(_data(cubin, sections[".note.nv.tkinfo"]), number)
    symbols = _symbols(cubin, sections)
    counts: dict[tuple[int, int], int] = {}
    for attribute, payload in _attributes(_data(cubin, sections[".nv.info"])):
        if attribute in (_REGISTERS, _FRAME_SIZE):
            index, count = struct.unpack("<II", payload)
            counts[index, attribute] = count
    entries = {
        symbol: _entry(cubin, sections, symbol, counts[index, _REGISTERS], counts.get((index, _FRAME_SIZE), 0))
        for index, symbol in symbols
        if f".nv.info.{symbol}" in sections
    }
    if not entries:
        raise ValueError("no entry function")
    return CubinContents(target=target, entries=entries)


def _entry(cubin: bytes, sections: "_Sections", symbol: str, registers: int, local_bytes: int) -> CubinEntry:
    params: dict[int, tuple[int, int]] = {}
    block: tuple[int, ...] = ()
    base = size = 0
    for attribute, payload in _attributes(_data(cubin, sections[f".nv.info.{symbol}"])):
        if attribute == _PARAM:
            _, ordinal, offset, bits = struct.unpack("<IHHI", payload)
            params[ordinal] = (offset, bits >> 18)
        elif attribute == _PARAM_CBANK:
            _, base, size = struct.unpack("<IHH", payload)
        elif attribute == _BLOCK:
            block = struct.unpack("<III", payload)
    if not sections[f".text.{symbol}"][2]:
        raise ValueError(f"no machine code of {symbol}")
    shared = sections.get(f".nv.shared.{symbol}", (0, 0, 0))[2]
    return CubinEntry(
        registers=registers,
        local_bytes=local_bytes,
        shared_bytes=max(0, shared - _SYSTEM_SHARED_BYTES),
        base=base,
        params=tuple(params[ordinal] for ordinal in sorted(params)),
        params_bytes=size,
        block=block,
    )


_Sections = Mapping[str, tuple[int, int, int]]  # name -> type, offset, size


def _sections(cubin: bytes) -> tuple[int, _Sections]:
    """The architecture number, and every section; all of them lie within the file."""
    ident, _, machine, _, _, programs, table, flags, _, program_bytes, num_programs, entry_bytes, count, names = (
        _HEADER.unpack_from(cubin)
    )
    if ident[:6] != b"\x7fELF\2\1" or machine != _EM_CUDA or entry_bytes != _SECTION.size:
        raise ValueError("not a 64-bit ELF file for CUDA")
    rows = [_SECTION.unpack_from(cubin, table + index * _SECTION.size) for index in range(count)]
    ends = [row[4] + row[5] for row in rows if row[1] != _SHT_NOBITS]
    if num_programs and program_bytes != _PROGRAM_HEADER_BYTES:
        raise ValueError(f"program headers of {program_bytes} bytes")
    if (end := max([*ends, programs + num_programs * program_bytes])) > len(cubin):
        raise ValueError(f"its parts end at byte {end}")
    texts = _data(cubin, (rows[names][1], rows[names][4], rows[names][5]))
    found = {_text(texts, row[0]): (row[1], row[4], row[5]) for row in rows}
    if len(found) != len(rows):
        raise ValueError("two sections of one name")
    return flags >> 8 & 0xFF, found


def _symbols(cubin: bytes, sections: _Sections) -> list[tuple[int, str]]:
    """(index, name) of every function."""
    names = _data(cubin, sections[".strtab"])
    rows = enumerate(struct.iter_unpack("<IBBHQQ", _data(cubin, sections[".symtab"])))
    return [(index, _text(names, row[0])) for index, row in rows if row[1] & 0xF == _STT_FUNC]


def _target(note: bytes, number: int) -> str:
    """The assembler's `-arch`, which alone tells the suffix; the ELF header must tell the same number."""
    match = re.search(rb"-arch (sm_(\d+)[af]?)\b", note)
    if match is None or int(match[2]) != number:
        told = "nothing" if match is None else match[1].decode()
        raise ValueError(f"the ELF header says architecture {number}, the assembler's note {told}")
    return match[1].decode()


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Attribute records: a header of four bytes (format, attribute, value or size), then the payload of sized ones."""
    position = 0
    while position < len(info):
        format_, attribute, value = struct.unpack_from("<BBH", info, position)
        position += 4
        size = value if format_ == _SIZED else 0
        if position + size > len(info):
            raise ValueError("an attribute runs over the end of its section")
        yield attribute, info[position : position + size]
        position += size


def _data(cubin: bytes, section: tuple[int, int, int]) -> bytes:
    return cubin[section[1] : section[1] + section[2]]


def _text(names: bytes, start: int) -> str:
    return names[start : names.index(b"\0", start)].decode()
