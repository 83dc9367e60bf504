"""Reads MLIR's generic form: functions, blocks, operations and string globals of a lowered host module.

Only the syntax is known here. The generic form is one regular shape for all operations:

    %3 = "llvm.add"(%1, %2) <{overflowFlags = 0 : i32}> : (i32, i32) -> i32
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from fa4build.errors import LaunchPlanError

_OP = re.compile(
    r"\s*(?:(?P<result>%[\w#]+) = )?"
    r'"(?P<name>[\w.]+)"\((?P<operands>[^)]*)\)'
    r"(?:\[(?P<successors>[^\]]*)\])?"
    r"(?: <\{(?P<attributes>.*)\}>)?"
    r"(?: \{.*\})?"
    r" : \((?P<types>.*)\) -> (?P<result_type>.+)$"
)
_TOP_LEVEL = re.compile(r'  "(?P<name>[\w.]+)"\(\)(?: <\{(?P<attributes>.*)\}>)?(?P<region> \(\{)?')
_BLOCK = re.compile(r"\s*\^(?P<label>\w+)(?:\((?P<arguments>.*)\))?:")
_SYMBOL = re.compile(r'sym_name = "((?:[^"\\]|\\.)*)"')
_STRING = re.compile(r'[ {]value = "((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)")
_REFERENCE = re.compile(r'@(?:"((?:[^"\\]|\\.)*)"|([\w.$]+))')
_LARGEST_STRING = 4096  # characters: the embedded cubin is no text


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation. `types` and `attributes` are text; `line` counts from 1 in the module's generic form."""

    name: str
    result: str | None
    operands: tuple[str, ...]
    successors: tuple[str, ...]
    attributes: str
    types: str
    result_type: str
    line: int

    def attribute(self, name: str) -> str | None:
        """Text of an attribute up to the next comma at its level, None if absent."""
        return _attribute(self.attributes, name)

    def integers(self, name: str) -> tuple[int, ...]:
        """Numbers of an `array<i32: 0, 1>` attribute; empty if absent."""
        return _integers(self.attributes, name)

    def integer(self, name: str) -> int | None:
        """The number of a `name = 3 : i64` attribute, None if absent."""
        return _integer(self.attributes, name)

    def reference(self, name: str) -> str | None:
        """The symbol of a `name = @symbol` attribute, None if absent."""
        return _symbol(self.attributes, name)


# Remembered: an interpreted function asks again every time it comes by.


@lru_cache(maxsize=1 << 14)
def _attribute(attributes: str, name: str) -> str | None:
    match = re.search(rf"(?:^|[ {{]){name} = ", attributes)
    return None if match is None else _until_comma(attributes[match.end() :])


@lru_cache(maxsize=1 << 14)
def _integers(attributes: str, name: str) -> tuple[int, ...]:
    match = re.search(rf"{name} = array<i\d+(?:: ([^>]*))?>", attributes)
    return tuple(int(x) for x in match[1].split(", ")) if match and match[1] else ()


@lru_cache(maxsize=1 << 14)
def _integer(attributes: str, name: str) -> int | None:
    match = re.search(rf"(?:^|[ {{]){name} = (-?\d+)", attributes)
    return int(match[1]) if match else None


@lru_cache(maxsize=1 << 14)
def _symbol(attributes: str, name: str) -> str | None:
    match = re.search(rf"(?:^|[ {{]){name} = ", attributes)
    symbol = _REFERENCE.match(attributes, match.end()) if match else None
    return None if symbol is None else unescape(symbol[1]).decode() if symbol[1] is not None else symbol[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Operations in order, the last a terminator; `arguments` are (name, type)."""

    label: str
    arguments: tuple[tuple[str, str], ...]
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function with a body. The first block is the entry."""

    name: str
    blocks: Mapping[str, Block]
    entry: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """Functions with bodies by name, names of declared ones, and the text of string globals."""

    functions: Mapping[str, Function]
    declared: frozenset[str]
    strings: Mapping[str, str]
    globals: frozenset[str]


def unescape(text: str) -> bytes:
    r"""Bytes of an MLIR string: `\0A` is a byte in hexadecimal, `\"` and `\\` are themselves."""

    def byte(match: re.Match[bytes]) -> bytes:
        return bytes([int(match[1], 16)]) if len(match[1]) == 2 else match[1]

    return _ESCAPE.sub(byte, text.encode())


def _until_comma(text: str) -> str:
    depth = 0
    for i, letter in enumerate(text):
        if letter in "<([{":
            depth += 1
        elif letter in ">)]}":
            depth -= 1
        elif letter == "," and depth == 0:
            return text[:i]
    return text


@lru_cache(maxsize=1 << 14)
def split_types(text: str) -> tuple[str, ...]:
    """`i32, !llvm.struct<(i32, i32)>` -> its two types."""
    found = []
    while text:
        head = _until_comma(text)
        found.append(head.strip())
        text = text[len(head) + 1 :]
    return tuple(found)


def parse_module(text: str) -> Module:
    """The module that `text`, MLIR's generic form, holds.

    Raises: LaunchPlanError with the line for anything of another shape, e.g. a module that was not lowered to LLVM.
    """
    lines = iter(enumerate(text.split("\n"), start=1))
    _, first = next(lines)
    if not first.startswith('"builtin.module"'):
        raise LaunchPlanError(f"host module starts with {first[:60]!r}; MLIR's generic form of a module is needed")
    functions: dict[str, Function] = {}
    declared: set[str] = set()
    strings: dict[str, str] = {}
    global_names: set[str] = set()
    for number, line in lines:
        match = _TOP_LEVEL.match(line)
        if match is None:
            continue  # the closing line of the module
        name, attributes = match["name"], match["attributes"] or ""
        body = _region(lines) if match["region"] else []
        symbol = _SYMBOL.search(attributes)
        label = unescape(symbol[1]).decode() if symbol else ""
        if name == "llvm.func":
            if body:
                functions[label] = _parse_function(label, body)
            else:
                declared.add(label)
        elif name == "llvm.mlir.global":
            global_names.add(label)
            if len(attributes) <= _LARGEST_STRING and (value := _STRING.search(attributes)):
                strings[label] = unescape(value[1]).rstrip(b"\0").decode(errors="replace")
        elif name not in ("llvm.mlir.global_dtors", "llvm.mlir.global_ctors"):
            raise LaunchPlanError(
                f"host module, line {number}: {name} at the top; only lowered LLVM code is understood"
            )
    return Module(functions=functions, declared=frozenset(declared), strings=strings, globals=frozenset(global_names))


def _region(lines: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    """Lines up to the one that closes a top-level operation's region."""
    body: list[tuple[int, str]] = []
    for number, line in lines:
        if line.startswith("  })"):
            return body
        body.append((number, line))
    raise LaunchPlanError("host module ends inside a function")


def _parse_function(name: str, body: list[tuple[int, str]]) -> Function:
    blocks: dict[str, Block] = {}
    label, ops = "bb0", list[Op]()
    arguments: tuple[tuple[str, str], ...] = ()
    for number, line in body:
        match = _BLOCK.match(line)
        if match is None:
            ops.append(_parse_op(number, line))
            continue
        if ops:
            blocks[label] = Block(label=label, arguments=arguments, ops=tuple(ops))
        label, ops = match["label"], []
        arguments = tuple(_argument(item) for item in split_types(match["arguments"] or ""))
    blocks[label] = Block(label=label, arguments=arguments, ops=tuple(ops))
    return Function(name=name, blocks=blocks, entry=next(iter(blocks)))


def _argument(text: str) -> tuple[str, str]:
    name, type_ = text.split(": ", 1)
    return name, type_


def _parse_op(number: int, line: str) -> Op:
    match = _OP.match(line)
    if match is None:
        raise LaunchPlanError(f"host module, line {number}: {line.strip()[:120]!r} is not an operation in generic form")
    operands, successors = match["operands"], match["successors"]
    return Op(
        name=match["name"].removeprefix("llvm."),
        result=match["result"],
        operands=tuple(operands.split(", ")) if operands else (),
        successors=tuple(s.lstrip("^") for s in successors.split(", ")) if successors else (),
        attributes=match["attributes"] or "",
        types=match["types"],
        result_type=match["result_type"],
        line=number,
    )
