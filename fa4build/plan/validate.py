"""A launch plan against the PTX and the cubin that it is shipped with.

Rules (their numbers are used in messages): V1 number, size and alignment of parameters as in PTX `.param`; V2 their
offsets and total size as in the cubin's parameter table; V3 block size as `.reqntid`, cluster as `.reqnctapercluster`
where PTX has one, dynamic shared memory within a block's limit; V4 tensor maps that hardware can use; V6 the kernel
reads no byte that the plan leaves undefined. V5 (no overlaps, no gaps but padding) is checked on reading and
extraction; V8 (equal to an interpretation of host code) and V9 (launches under conditions) are the extractor's.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from fa4build.errors import LaunchPlanError
from fa4build.plan.as_json import check_plan
from fa4build.plan.values import (
    MAP_ITEM_BYTES,
    TENSOR_ITEM_BITS,
    TYPE_BYTES,
    BytesTemplate,
    LaunchPlan,
    LaunchTemplate,
    ParamTemplate,
    TensorMapTemplate,
    result_type,
)

MAP_BYTES, MAP_ALIGN = 128, 64
MAX_DYNAMIC_SMEM = 232448  # bytes a block may opt in to on compute capability 9.0, 10.0 and 10.3

_EIATTR_PARAM_CBANK, _EIATTR_KPARAM_INFO, _EIFMT_SIZED = 0x0A, 0x17, 4

_ENTRY = re.compile(r"\.entry\s+(?P<name>[\w$]+)\s*\((?P<params>[^)]*)\)(?P<directives>[^{]*)\{", re.DOTALL)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[a-z]+)(?P<bits>\d+)"
    r"(?:\s+\.ptr(?:\s+\.\w+)*(?:\s+\.align\s+\d+)?)?\s+(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?"
)
_LOAD = re.compile(
    r"\bld\.param(?:\.\w+)*?(?:\.v(?P<count>[248]))?\.[a-z](?P<bits>\d+)\s[^;]*\[(?P<name>[\w$]+)(?:\+(?P<at>\d+))?\]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PtxEntry:
    """A kernel in PTX: parameters as (name, size, align), `.reqntid`, `.reqnctapercluster` (empty if absent), text."""

    params: tuple[tuple[str, int, int], ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTable:
    """A cubin's view, in bytes: (offset, size) of each parameter, start in the constant bank, total size."""

    params: tuple[tuple[int, int], ...]
    bank_base: int
    size: int


def validate_plan(plan: LaunchPlan, ptx: str, elf: bytes) -> None:
    """Check every launch of `plan` against the kernel's PTX and its parameter table in the cubin.

    Raises: LaunchPlanError that names the launch, the rule and both values.
    """
    check_plan(plan)
    entries, tables = read_ptx_entries(ptx), read_parameter_tables(elf)
    for launch in plan.launches:
        for what, found in (("PTX", entries), ("cubin", tables)):
            if launch.kernel not in found:
                raise LaunchPlanError(
                    f"plan launches {launch.kernel}; the {what} has {', '.join(sorted(found)) or 'none'}"
                )
        try:
            _check_params(launch, entries[launch.kernel])
            _check_offsets(launch, tables[launch.kernel])
            _check_sizes(launch, entries[launch.kernel])
            _check_maps(plan, launch)
            _check_reads(plan, launch, entries[launch.kernel])
        except LaunchPlanError as error:
            raise LaunchPlanError(
                f"{launch.kernel}: {error}. The plan is not this kernel's; rebuild the variant"
            ) from None


def read_ptx_entries(ptx: str) -> dict[str, PtxEntry]:
    """Kernels of a PTX text by name."""
    matches = list(_ENTRY.finditer(ptx))
    ends = [match.start() for match in matches[1:]] + [len(ptx)]
    return {
        match["name"]: PtxEntry(
            params=tuple(_ptx_param(param) for param in match["params"].split(",") if param.strip()),
            block=_dimensions(match["directives"], "reqntid"),
            cluster=_dimensions(match["directives"], "reqnctapercluster"),
            body=ptx[match.end() : end],
        )
        for match, end in zip(matches, ends, strict=True)
    }


def _ptx_param(text: str) -> tuple[str, int, int]:
    match = _PARAM.search(text)
    if match is None:
        raise LaunchPlanError(f"PTX parameter {text.strip()!r} is not understood")
    item = int(match["bits"]) // 8
    return match["name"], item * int(match["count"] or 1), int(match["align"] or item)


def _dimensions(directives: str, name: str) -> tuple[int, ...]:
    match = re.search(rf"\.{name}\s+([\d, ]+)", directives)
    numbers = tuple(int(x) for x in match[1].split(",")) if match else ()
    return (*numbers, 1, 1)[:3] if numbers else ()


def read_parameter_tables(elf: bytes) -> dict[str, ParameterTable]:
    """Parameter tables of a cubin's kernels by name.

    Raises: LaunchPlanError when the bytes are no ELF file or a table is damaged.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    prefix = ".nv.info."
    try:
        sections = [(s.name, s.data()) for s in ELFFile(io.BytesIO(elf)).iter_sections() if s.name.startswith(prefix)]
        return {name[len(prefix) :]: _parameter_table(data) for name, data in sections}
    except (ELFError, struct.error, ValueError) as error:
        raise LaunchPlanError(f"cubin of {len(elf)} bytes cannot be read ({error}); rebuild the variant") from None


def _parameter_table(section: bytes) -> ParameterTable:
    params: dict[int, tuple[int, int]] = {}
    base = size = 0
    for attribute, payload in _records(section):
        if attribute == _EIATTR_KPARAM_INFO:
            _, ordinal, offset, bits = struct.unpack("<IHHI", payload)
            params[ordinal] = (offset, bits >> 18)
        elif attribute == _EIATTR_PARAM_CBANK:
            _, base, size = struct.unpack("<IHH", payload)
    return ParameterTable(params=tuple(params[i] for i in sorted(params)), bank_base=base, size=size)


def _records(section: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of a section of attribute records; only sized ones have a payload behind the header."""
    position = 0
    while position < len(section):
        format_, attribute, value = struct.unpack_from("<BBH", section, position)
        position += 4
        size = value if format_ == _EIFMT_SIZED else 0
        yield attribute, section[position : position + size]
        position += size


def _size_and_align(param: ParamTemplate) -> tuple[int, int]:
    return (param.size, param.align) if isinstance(param, BytesTemplate) else (MAP_BYTES, MAP_ALIGN)


def _check_params(launch: LaunchTemplate, entry: PtxEntry) -> None:
    ours = [_size_and_align(param) for param in launch.params]
    theirs = [(size, align) for _, size, align in entry.params]
    if len(ours) != len(theirs):
        raise LaunchPlanError(f"V1: the plan has {len(ours)} parameters, PTX {len(theirs)}")
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine != other:
            raise LaunchPlanError(f"V1: parameter {i} has (size, align) {mine} in the plan, {other} in PTX")


def _check_offsets(launch: LaunchTemplate, table: ParameterTable) -> None:
    """Parameters are aligned in the constant bank, not from their first byte: the base counts."""
    end = table.bank_base
    if len(table.params) != len(launch.params):
        raise LaunchPlanError(f"V2: the plan has {len(launch.params)} parameters, the cubin {len(table.params)}")
    for i, (param, (offset, size)) in enumerate(zip(launch.params, table.params, strict=True)):
        own_size, align = _size_and_align(param)
        start = -(-end // align) * align
        if (start - table.bank_base, own_size) != (offset, size):
            raise LaunchPlanError(
                f"V2: parameter {i} is at {start - table.bank_base} with {own_size} bytes in the plan, "
                f"at {offset} with {size} in the cubin"
            )
        end = start + own_size
    if end - table.bank_base != table.size:
        raise LaunchPlanError(
            f"V2: parameters take {end - table.bank_base} bytes in the plan, {table.size} in the cubin"
        )


def _check_sizes(launch: LaunchTemplate, entry: PtxEntry) -> None:
    if entry.block and launch.block != entry.block:
        raise LaunchPlanError(f"V3: block is {launch.block} in the plan, .reqntid {entry.block} in PTX")
    if entry.cluster and launch.cluster != entry.cluster:
        raise LaunchPlanError(f"V3: cluster is {launch.cluster} in the plan, .reqnctapercluster {entry.cluster} in PTX")
    if launch.smem > MAX_DYNAMIC_SMEM:
        raise LaunchPlanError(
            f"V3: {launch.smem} bytes of dynamic shared memory; at most {MAX_DYNAMIC_SMEM} are allowed"
        )


def _check_maps(plan: LaunchPlan, launch: LaunchTemplate) -> None:
    for i, param in enumerate(launch.params):
        if isinstance(param, TensorMapTemplate):
            _check_map(plan, param, f"V4: tensor map {i}")


def _check_map(plan: LaunchPlan, param: TensorMapTemplate, place: str) -> None:
    """Ranges of single fields were checked on reading; here is what they must be together."""
    item = MAP_ITEM_BYTES[param.dtype]
    inner = param.box[0] * item
    if inner % 16:
        raise LaunchPlanError(f"{place} has an inner box of {inner} bytes; multiples of 16 are allowed")
    if param.swizzle and inner > param.swizzle:
        raise LaunchPlanError(f"{place} has an inner box of {inner} bytes and swizzle {param.swizzle}; it must fit")
    if param.interleave and len(param.dims) < 3:
        raise LaunchPlanError(f"{place} is interleaved and has {len(param.dims)} dimensions; at least 3 are needed")
    dtype = _pointed_dtype(plan, param.addr)
    if dtype is not None and TENSOR_ITEM_BITS[dtype] != 8 * item:
        raise LaunchPlanError(f"{place} has {param.dtype} elements over a tensor of {dtype}")


def _pointed_dtype(plan: LaunchPlan, node: int) -> str | None:
    """Dtype of the tensor whose pointer an address is, None if it is computed from more than that."""
    leaf = plan.nodes[node]
    dtypes = {f"{arg.name}.ptr": arg.dtype for arg in plan.args if arg.kind == "tensor"}
    return dtypes.get(leaf[2]) if leaf[0] == "in" else None


def _check_reads(plan: LaunchPlan, launch: LaunchTemplate, entry: PtxEntry) -> None:
    defined = {name: _defined_bytes(plan, p) for (name, _, _), p in zip(entry.params, launch.params, strict=True)}
    for match in _LOAD.finditer(entry.body):
        if match["name"] not in defined:
            continue  # a parameter of a device function
        start = int(match["at"] or 0)
        read = range(start, start + int(match["bits"]) // 8 * int(match["count"] or 1))
        missing = [byte for byte in read if byte not in defined[match["name"]]]
        if missing:
            raise LaunchPlanError(
                f"V6: the kernel reads byte {missing[0]} of {match['name']}, which the plan does not define"
            )


def _defined_bytes(plan: LaunchPlan, param: ParamTemplate) -> set[int]:
    """Bytes that a kernel may load; of a tensor map none: only its address is of use."""
    if isinstance(param, TensorMapTemplate):
        return set()
    return {offset + i for offset, node in param.fields for i in range(TYPE_BYTES[result_type(plan.nodes[node])])}
