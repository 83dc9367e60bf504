"""LLVM-dialect types and their memory layout (x86-64 and aarch64 agree on everything that occurs here)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from fa4build.errors import LaunchPlanError

_SCALARS = {  # name -> (bytes, plan type the bits are held as)
    "i1": (1, "i1"),
    "i8": (1, "i8"),
    "i16": (2, "i16"),
    "i32": (4, "i32"),
    "i64": (8, "i64"),
    "f16": (2, "i16"),
    "bf16": (2, "i16"),
    "f32": (4, "f32"),
    "f64": (8, "f64"),
    "ptr": (8, "i64"),
}
_TOKEN = re.compile(r'"[^"]*"|[A-Za-z_][\w.]*|\d+|[<>(),]')
_VECTOR_SHAPE = re.compile(r"x(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlvmType:
    """A sized type. `leaves` are its scalars as (byte offset, plan type); a scalar has one leaf and no children.

    `children` are (byte offset, type, index of its first leaf) of a struct's or array's elements.
    """

    size: int
    align: int
    leaves: tuple[tuple[int, str], ...]
    children: tuple[tuple[int, LlvmType, int], ...] = ()
    is_scalar: bool = False


@lru_cache(maxsize=4096)
def parse_type(text: str) -> LlvmType:
    """The type that MLIR prints as `text`, with or without the `!llvm.` prefix.

    Raises: LaunchPlanError for a type that is not known.
    """
    tokens = _TOKEN.findall(text.replace("!llvm.", ""))
    try:
        found, rest = _parse(tokens)
    except (IndexError, ValueError, KeyError):
        raise LaunchPlanError(f"host code has the type {text!r}, which the extractor does not know") from None
    if rest:
        raise LaunchPlanError(f"host code has the type {text!r}; {' '.join(rest)} in it is not understood")
    return found


def _parse(tokens: list[str]) -> tuple[LlvmType, list[str]]:
    head, rest = tokens[0], tokens[1:]
    if head in ("struct", "array", "vector"):
        if rest[0] != "<":
            raise ValueError(head)
        return {"struct": _parse_struct, "array": _parse_array, "vector": _parse_vector}[head](rest[1:])
    if head == "ptr" and rest[:1] == ["<"]:
        rest = _expect(rest[2:], ">")
    size, held_as = _SCALARS[head]
    return LlvmType(size=size, align=size, leaves=((0, held_as),), is_scalar=True), rest


def _expect(tokens: list[str], token: str) -> list[str]:
    if tokens[0] != token:
        raise ValueError(tokens[0])
    return tokens[1:]


def _parse_struct(tokens: list[str]) -> tuple[LlvmType, list[str]]:
    if tokens[0].startswith('"'):
        tokens = _expect(tokens[1:], ",")
    is_packed = tokens[0] == "packed"
    tokens = _expect(tokens[1:] if is_packed else tokens, "(")
    members: list[LlvmType] = []
    while tokens[0] != ")":
        member, tokens = _parse(tokens[1:] if tokens[0] == "," else tokens)
        members.append(member)
    return _layout(members, is_packed=is_packed), _expect(tokens[1:], ">")


def _parse_array(tokens: list[str]) -> tuple[LlvmType, list[str]]:
    count, tokens = int(tokens[0]), _expect(tokens[1:], "x")
    element, tokens = _parse(tokens)
    return _layout([element] * count, is_packed=False), _expect(tokens, ">")


def _parse_vector(tokens: list[str]) -> tuple[LlvmType, list[str]]:
    """`vector<8xi32>`: stored like an array, aligned to its size rounded up to a power of two."""
    count, shape = int(tokens[0]), _VECTOR_SHAPE.fullmatch(tokens[1])
    if shape is None:
        raise ValueError(tokens[1])
    element, _ = _parse([shape[1]])
    size = 1 << (count * element.size - 1).bit_length()
    as_array = _layout([element] * count, is_packed=False)
    found = LlvmType(size=size, align=size, leaves=as_array.leaves, children=as_array.children)
    return found, _expect(tokens[2:], ">")


def _layout(members: list[LlvmType], *, is_packed: bool) -> LlvmType:
    """Members one after the other, each aligned to its own alignment unless packed."""
    end, align = 0, 1
    leaves: list[tuple[int, str]] = []
    children: list[tuple[int, LlvmType, int]] = []
    for member in members:
        own = 1 if is_packed else member.align
        offset = -(-end // own) * own
        children.append((offset, member, len(leaves)))
        leaves += [(offset + at, type_) for at, type_ in member.leaves]
        end, align = offset + member.size, max(align, own)
    return LlvmType(size=-(-end // align) * align, align=align, leaves=tuple(leaves), children=tuple(children))


def member_at(type_: LlvmType, path: tuple[int, ...]) -> tuple[int, LlvmType, int]:
    """(byte offset, type, index of first leaf) of the member that `path` names, as in extractvalue."""
    offset, first_leaf = 0, 0
    for index in path:
        at, type_, leaf = type_.children[index]
        offset, first_leaf = offset + at, first_leaf + leaf
    return offset, type_, first_leaf
