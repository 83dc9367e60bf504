"""PTX parser: text to a `Module`. Anything it does not know is a `SimulationError` with the line.

Covers what the CuTe DSL emits: entries, block-scoped registers and labels of inline assembly, local arrays, one dynamic
shared symbol. No device functions, no module-level data.
"""

import hashlib
import re
from bisect import bisect_right
from functools import lru_cache

from fa4build.errors import SimulationError
from fa4build.simulate.ptx.instructions import (
    Address,
    Function,
    Guard,
    Imm,
    Instruction,
    Module,
    Pair,
    Parameter,
    Reg,
    SharedSymbol,
    Sink,
    Special,
    Symbol,
    Target,
    Vector,
)

_WIDTHS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32,
    "s32": 32, "f32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "b128": 128,
}  # fmt: skip
_SPECIAL = re.compile(r"%(?:(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]|\w+)")
_SPECIAL_NAMES = frozenset(
    "laneid warpid nwarpid smid nsmid gridid cluster_ctarank cluster_nctarank clock clock64 globaltimer lanemask_eq "
    "lanemask_lt lanemask_le lanemask_gt lanemask_ge dynamic_smem_size total_smem_size is_explicit_cluster".split()
)
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_ENTRY = re.compile(r"(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$%]+)\s*\(")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+\S+\s+(?:\.align\s+\d+\s+)?)?([\w$%]+)\s*(?:\[(\d+)\])?"
)
_REG_DECL = re.compile(r"\.reg\s*\.(\w+)\s+(.*)", re.S)
_ARRAY = re.compile(r"\.(?:local|shared)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$%]+)\s*(?:\[(\d*)\])?$")
_INTEGER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_STATEMENT = re.compile(r"(?:@(!?)\s*([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_NUMBERED = re.compile(r"(.*?)(\d+)$")


class _Scope:
    """Names declared inside one `{ }`: single registers, numbered families and labels."""

    def __init__(self, parent):
        self.parent = parent
        self.registers: dict[str, tuple[str, int]] = {}
        self.families: dict[str, tuple[int, int]] = {}
        self.labels: dict[str, int] = {}
        self.serial = 0 if parent is None else id(self)


class _Body:
    """State while one function body is parsed."""

    def __init__(self, symbols: frozenset[str]):
        self.scope = _Scope(None)
        self.symbols = symbols
        self.names: list[str] = []
        self.widths: list[int] = []
        self.index: dict[tuple[int, str], int] = {}
        self.statements: list[tuple] = []
        self.local_symbols: dict[str, int] = {}
        self.local_bytes = 0
        self.operand_cache: dict[tuple[int, str], object] = {}


def parse_module(text: str) -> Module:
    """Parses PTX text; results are cached by content.

    Raises:
        SimulationError: truncated or malformed text, unknown directive, undeclared register, missing label.
    """
    return _parse_cached(text)


@lru_cache(maxsize=16)
def _parse_cached(text: str) -> Module:
    digest = hashlib.sha256(text.encode()).hexdigest()
    clean = _strip_comments(text)
    newlines = [i for i, c in enumerate(clean) if c == "\n"]

    def line_at(position: int) -> int:
        return bisect_right(newlines, position - 1) + 1

    version = re.search(r"^\s*\.version\s+([\d.]+)", clean, re.M)
    target = re.search(r"^\s*\.target\s+(\w+)", clean, re.M)
    if version is None or target is None:
        raise SimulationError("not a PTX module: no .version/.target directive; expected text as written by --keep-ptx")
    shared = _shared_symbols(clean)
    entries: dict[str, Function] = {}
    position = 0
    while match := _ENTRY.search(clean, position):
        function, position = _parse_entry(clean, match, shared, line_at)
        entries[function.name] = function
    if not entries:
        raise SimulationError("PTX module has no .entry: nothing to simulate")
    if func := re.search(r"^\s*(?:\.visible\s+|\.extern\s+|\.weak\s+)?\.func\b", clean, re.M):
        raise SimulationError(f"PTX line {line_at(func.start())}: device functions (.func) are not supported")
    return Module(target=target[1], version=version[1], entries=entries, shared_symbols=shared, sha256=digest)


def _strip_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def _shared_symbols(clean: str) -> tuple[SharedSymbol, ...]:
    found = []
    for match in re.finditer(r"^\s*(?:\.extern\s+|\.visible\s+)?(\.shared\b[^;]*);", clean, re.M):
        array = _ARRAY.match(match[1].strip())
        if array is None:
            raise SimulationError(f"cannot read shared declaration {match[1].strip()!r}")
        size = int(array[4] or 0) * _WIDTHS[array[2]] // 8
        found.append(SharedSymbol(array[3], size, int(array[1] or 1)))
    return tuple(found)


def _parse_entry(clean, match, shared, line_at) -> tuple[Function, int]:
    name, start = match[1], match.end()
    close = clean.find(")", start)
    open_brace = clean.find("{", close)
    if close < 0 or open_brace < 0:
        raise SimulationError(f"PTX line {line_at(start)}: entry {name}: text ends inside the header (truncated file?)")
    parameters = _parse_parameters(clean[start:close], line_at(start))
    header = clean[close + 1 : open_brace]
    threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", header)
    count = None if threads is None else int(threads[1]) * int(threads[2] or 1) * int(threads[3] or 1)
    body = _Body(frozenset(p.name for p in parameters) | frozenset(s.name for s in shared))
    end = _parse_body(clean, open_brace + 1, body, line_at, name)
    function = Function(
        name=name,
        parameters=parameters,
        register_names=tuple(body.names),
        register_widths=tuple(body.widths),
        instructions=tuple(_resolve(body, statement) for statement in body.statements),
        required_threads=count,
        local_symbols=body.local_symbols,
        local_bytes=body.local_bytes,
    )
    return function, end


def _parse_parameters(text: str, line: int) -> tuple[Parameter, ...]:
    result, offset = [], 0
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = _PARAM.fullmatch(part)
        if match is None or match[2] not in _WIDTHS:
            raise SimulationError(f"PTX line {line}: cannot read parameter {part!r}")
        element = _WIDTHS[match[2]] // 8
        size = element * int(match[4] or 1)
        align = int(match[1] or element)
        offset = (offset + align - 1) // align * align
        result.append(Parameter(match[3], offset, size, align))
        offset += size
    return tuple(result)


def _parse_body(clean, position, body: _Body, line_at, name) -> int:
    """Reads statements up to the function's closing brace; returns the position after it."""
    blank = re.compile(r"[\s;]*")
    depth = 1
    while True:
        space = blank.match(clean, position)
        position = space.end() if space else position
        if position >= len(clean):
            raise SimulationError(f"PTX line {line_at(position)}: text ends inside entry {name} (truncated file?)")
        if clean[position] == "{":
            body.scope = _Scope(body.scope)
            depth, position = depth + 1, position + 1
            continue
        if clean[position] == "}":
            depth, position = depth - 1, position + 1
            if depth == 0:
                return position
            body.scope = body.scope.parent
            continue
        if label := _LABEL.match(clean, position):
            body.scope.labels[label[1]] = len(body.statements)
            position = label.end()
            continue
        end = clean.find(";", position)
        if end < 0:
            raise SimulationError(f"PTX line {line_at(position)}: text ends inside entry {name} (truncated file?)")
        _parse_statement(clean[position:end].strip(), body, line_at(position))
        position = end + 1


def _parse_statement(text: str, body: _Body, line: int) -> None:
    if text.startswith("."):
        _parse_directive(text, body, line)
        return
    match = _STATEMENT.fullmatch(text)
    if match is None:
        raise SimulationError(f"PTX line {line}: cannot read statement {text[:120]!r}")
    negated, predicate, opcode, rest = match.groups()
    guard = None
    if predicate is not None:
        register = _lookup(body, predicate)
        if register is None or body.widths[register.index] != 1:
            raise SimulationError(f"PTX line {line}: guard {predicate!r} is not a declared predicate register")
        guard = Guard(register.index, negated == "!")
    if opcode in ("bra", "bra.uni"):
        operands: tuple = (rest.strip(),)
    else:
        operands = tuple(_operand(part, body, line) for part in _split(rest))
    body.statements.append((opcode, operands, guard, line, " ".join(text.split()), body.scope))


def _parse_directive(text: str, body: _Body, line: int) -> None:
    if declaration := _REG_DECL.fullmatch(text):
        width = _WIDTHS.get(declaration[1])
        if width is None:
            raise SimulationError(f"PTX line {line}: unknown register type .{declaration[1]}")
        for item in (i.strip() for i in declaration[2].split(",")):
            family = re.fullmatch(r"([\w$%]+)<(\d+)>", item)
            if family:
                body.scope.families[family[1]] = (int(family[2]), width)
            else:
                body.scope.registers[item] = (item, width)
        return
    if text.startswith(".local") and (array := _ARRAY.fullmatch(text)):
        align = int(array[1] or 1)
        offset = (body.local_bytes + align - 1) // align * align
        body.local_symbols[array[3]] = offset
        body.local_bytes = offset + int(array[4] or 1) * _WIDTHS[array[2]] // 8
        return
    if text.split()[0] in (".pragma", ".loc", ".file"):
        return
    raise SimulationError(f"PTX line {line}: unknown directive {text[:80]!r}")


def _split(text: str) -> list[str]:
    """Splits operands at commas outside brackets and braces."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _operand(text: str, body: _Body, line: int):
    key = (id(body.scope), text)
    cached = body.operand_cache.get(key)
    if cached is None:
        cached = body.operand_cache[key] = _parse_operand(text, body, line)
    return cached


def _parse_operand(text: str, body: _Body, line: int):
    if text == "_":
        return Sink()
    if text.startswith("{"):
        return Vector(tuple(_operand(part, body, line) for part in _split(text[1:-1])))
    if text.startswith("["):
        return _parse_address(text[1:-1], body, line)
    if "|" in text:
        data, predicate = (part.strip() for part in text.split("|"))
        return Pair(_operand(data, body, line), _operand(predicate, body, line))
    return _scalar(text, body, line)


def _parse_address(text: str, body: _Body, line: int) -> Address:
    parts = _split(text)
    if len(parts) == 2:
        coordinates = _operand(parts[1], body, line)
        return Address(_scalar(parts[0], body, line), 0, coordinates.elements)
    match = re.fullmatch(r"([^+]+?)\s*(?:\+\s*(-?\w+))?", text.strip())
    if match is None or len(parts) != 1:
        raise SimulationError(f"PTX line {line}: cannot read address [{text}]")
    offset = int(match[2], 0) if match[2] else 0
    return Address(_scalar(match[1].strip(), body, line), offset)


def _scalar(text: str, body: _Body, line: int):
    if _INTEGER.match(text):
        digits = text.rstrip("U")
        is_octal = re.fullmatch(r"[-+]?0[0-7]+", digits)
        return Imm(int(digits, 8) if is_octal else int(digits, 0))
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
        return Imm(int(text[2:], 16), is_float=True)
    register = _lookup(body, text)
    if register is not None:
        return register
    if text in body.symbols or text in body.local_symbols:
        return Symbol(text)
    if text.startswith("%") and _SPECIAL.fullmatch(text) and ("." in text or text[1:] in _SPECIAL_NAMES):
        return Special(text[1:])
    raise SimulationError(f"PTX line {line}: {text!r} is not a declared register, symbol, special register or number")


def _lookup(body: _Body, name: str) -> Reg | None:
    """Finds a register by name, innermost scope first, and numbers it on first use."""
    numbered = _NUMBERED.fullmatch(name)
    scope = body.scope
    while scope is not None:
        width = None
        if name in scope.registers:
            width = scope.registers[name][1]
        elif numbered and numbered[1] in scope.families and int(numbered[2]) < scope.families[numbered[1]][0]:
            width = scope.families[numbered[1]][1]
        if width is not None:
            key = (scope.serial, name)
            if key not in body.index:
                body.index[key] = len(body.names)
                body.names.append(name)
                body.widths.append(width)
            return Reg(body.index[key])
        scope = scope.parent
    return None


def _resolve(body: _Body, statement: tuple) -> Instruction:
    opcode, operands, guard, line, text, scope = statement
    if opcode in ("bra", "bra.uni"):
        label = operands[0]
        while scope is not None and label not in scope.labels:
            scope = scope.parent
        if scope is None:
            raise SimulationError(f"PTX line {line}: branch to unknown label {label!r}")
        operands = (Target(scope.labels[label]),)
    return Instruction(opcode, operands, guard, line, text)
