"""The identity of the native engine's C code: a digest of what runs for kernels of given operations.

The sources are read as streams of tokens (c_tokens) and cut into definitions. A definition reaches every one whose name
it mentions; from the engine's entries and the handlers of a kernel's operations on, what is reached counts, and nothing
else. Two things are choices, in which an alternative counts only if something that is reached asks for it:

* the table of handlers (an operation's handler counts where a kernel holds the operation);
* `case NAME:` in a switch, NAME of one of the enumerations in `CHOICES`: what stands behind it counts where a function
  that is reached names NAME otherwise than to compare with it. Their values come from nowhere else: a field of such a
  type is set by name, or copied.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fa4build.verify.c_tokens import is_word, preprocessed
from fa4build.verify.code_tokens import TokenError

CHOICES = ("OpKind", "WaitKind")
ENTRIES = ("sim_run", "sim_release", "chk_findings")
"""What Python calls."""
ALWAYS = ("branch", "leave", "nop", "fault")
"""Operations that the program of any kernel holds."""
HANDLER = "op_"
_KEYWORDS = frozenset(
    "auto bool break case char const continue default do double else enum extern float for goto if inline int long"
    " register return short signed sizeof static struct switch typedef union unsigned void volatile while".split()
)
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Definition:
    """A definition or declaration.

    Attributes:
        names: what it binds; of types also the names of their fields.
        mentions: names in it, but for those that only stand in choices.
        choices: (names of which one must be asked for, names behind them).
        is_code: a function with its body. is_local: to be seen in its own files alone. files: those it stands in.
    """

    sha256: str
    names: frozenset[str]
    mentions: frozenset[str]
    choices: tuple[tuple[frozenset[str], frozenset[str]], ...]
    is_code: bool
    is_local: bool
    files: set[str] = field(default_factory=set)


class CSources:
    """The C files of a folder.

    Raises: TokenError where a source is not understood.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted([*folder.glob("*.c"), *folder.glob("*.h")])
        texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
        headers = tuple((name, text) for name, text in texts.items() if name.endswith(".h"))
        self._definitions: dict[str, _Definition] = {}
        for name, text in texts.items():
            if name.endswith(".c"):
                for found in _definitions(text, headers):
                    self._definitions.setdefault(found.sha256, found).files.add(name)
        self._by_name: dict[str, list[_Definition]] = {}
        for each in self._definitions.values():
            for bound in each.names:
                self._by_name.setdefault(bound, []).append(each)

    def sha256(self, operations: Iterable[str]) -> str:
        """Digest of what runs for kernels of these operations of ops.h.

        Raises: TokenError where one has no handler.
        """
        reached = sorted(each.sha256 for each in self.reached(operations))
        return hashlib.sha256(json.dumps(reached).encode()).hexdigest()

    def reached(self, operations: Iterable[str]) -> list[_Definition]:
        """The definitions behind `sha256`."""
        walk = _Walk(self._by_name)
        for name in (*ENTRIES, *(f"{HANDLER}{operation}" for operation in {*operations, *ALWAYS})):
            if not any(each.is_code for each in self._by_name.get(name, ())):
                raise TokenError(f"the native engine has no function {name}; its code cannot be told.")
            walk.add(self._by_name[name])
        walk.add(each for each in self._definitions.values() if not each.names)
        return walk.finish()


class _Walk:
    """Definitions reached so far, and choices that wait for one of their names."""

    def __init__(self, by_name: Mapping[str, list[_Definition]]) -> None:
        self._by_name, self._found = by_name, dict[int, _Definition]()
        self._waiting: list[_Definition] = []
        self._asked: set[str] = set()
        self._open: list[tuple[_Definition, frozenset[str], frozenset[str]]] = []

    def add(self, definitions: Iterable[_Definition]) -> None:
        """Reaches definitions."""
        for each in definitions:
            if id(each) not in self._found:
                self._found[id(each)] = each
                self._waiting.append(each)

    def finish(self) -> list[_Definition]:
        """Everything that is reached from them."""
        while self._waiting:
            while self._waiting:
                each = self._waiting.pop()
                self._follow(each, each.mentions)
                self._asked |= each.mentions if each.is_code else frozenset()
                self._open += [(each, *choice) for choice in each.choices]
            for definition, asked, behind in self._open:
                if asked & self._asked:
                    self._follow(definition, behind)
                    self._asked |= behind
            self._open = [choice for choice in self._open if not choice[1] & self._asked]
        return list(self._found.values())

    def _follow(self, origin: _Definition, names: Collection[str]) -> None:
        for name in names:
            if not origin.is_code and name.startswith(HANDLER):
                continue  # the table of handlers
            self.add(each for each in self._by_name.get(name, ()) if not each.is_local or origin.files <= each.files)


# --- definitions ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _cut(text: str, headers: tuple[tuple[str, str], ...]) -> tuple[tuple[str, ...], ...]:
    files = {**dict(headers), "": text}
    return tuple(map(tuple, _pieces(preprocessed("", files))))


def _definitions(text: str, headers: tuple[tuple[str, str], ...]) -> Iterator[_Definition]:
    """Of a source file, with all that its headers bring."""
    pieces = _cut(text, headers)
    choices = _names_of_choices(pieces)
    for piece in pieces:
        yield _definition(piece, choices)


def _pieces(tokens: list[str]) -> Iterator[list[str]]:
    """Definitions and declarations: up to a semicolon, or to the end of a function's body."""
    piece: list[str] = []
    depth, before_body = 0, ""
    for token in tokens:
        if token == "{" and not depth:
            before_body = next((each for each in reversed(piece) if not each.startswith("#")), "")
        piece.append(token)
        depth += (token in _OPENING) - (token in _CLOSING)
        if not depth and (token == ";" or (token == "}" and before_body == ")")):
            yield piece
            piece, before_body = [], ""
    if [each for each in piece if not each.startswith("#")]:
        raise TokenError(f"a C source ends within a definition: {' '.join(piece[:12])}")


def _names_of_choices(pieces: Iterable[tuple[str, ...]]) -> frozenset[str]:
    """Values of the enumerations in CHOICES; the first of each is what memory of zeros holds, and is no choice."""
    found: set[str] = set()
    for piece in pieces:
        if piece[:2] == ("typedef", "enum") and piece[-2] in CHOICES:
            values = [a for a, b in itertools.pairwise(piece) if is_word(a) and b in (",", "=", "}")]
            found.update(values[1:])
    return frozenset(found)


@functools.lru_cache(maxsize=16384)
def _parts(piece: tuple[str, ...], choices: frozenset[str]) -> tuple:
    text = "".join(f"{len(token)}:{token}" for token in piece)
    bare = _without_attributes(piece)
    head, is_code = _head(bare)
    names, mentions, chosen = _names(head, bare, is_code), frozenset(_words(_without_fields(bare))), ()
    if is_code:
        mentions, chosen = _mentions(_without_fields(bare), choices)
    elif _is_type(bare, head):
        mentions = frozenset(_words(_without_declared(bare)))
    is_local = "static" in head
    return hashlib.sha256(text.encode()).hexdigest(), names, mentions, chosen, is_code, is_local


def _definition(piece: tuple[str, ...], choices: frozenset[str]) -> _Definition:
    sha256, names, mentions, chosen, is_code, is_local = _parts(piece, choices)
    return _Definition(
        sha256=sha256, names=names, mentions=mentions, choices=chosen, is_code=is_code, is_local=is_local
    )


def _words(tokens: Iterable[str]) -> Iterator[str]:
    return (token for token in tokens if is_word(token) and token not in _KEYWORDS)


def _without_attributes(piece: tuple[str, ...]) -> list[str]:
    """Without `__attribute__((...))` and conditions of the preprocessor."""
    kept: list[str] = []
    place = 0
    while place < len(piece):
        if piece[place] == "__attribute__":
            place = _end_of_group(piece, place + 1) + 1
        else:
            kept += [] if piece[place].startswith("#") else [piece[place]]
            place += 1
    return kept


def _end_of_group(tokens: Collection[str], start: int) -> int:
    """Where the bracket closes that opens at `start`."""
    depth = 0
    for place in range(start, len(tokens)):
        depth += (tokens[place] in _OPENING) - (tokens[place] in _CLOSING)  # type: ignore[index]
        if not depth:
            return place
    raise TokenError("a bracket of a C source has no end")


def _head(tokens: list[str]) -> tuple[list[str], bool]:
    """What stands before a body or a value, and whether it is a function with its body."""
    depth = 0
    for place, token in enumerate(tokens):
        if not depth and token == "=":
            return tokens[:place], False
        if not depth and token == "{" and tokens[place - 1] == ")":
            return tokens[:place], True
        depth += (token in _OPENING) - (token in _CLOSING)
    return tokens, False


def _names(head: list[str], tokens: list[str], is_code: bool) -> frozenset[str]:
    """The name of a function; of a type all that stands in it; of a variable what stands before its value."""
    if "(" in head and not _is_type(tokens, head):
        before = head[head.index("(") - 1]
        if is_word(before) and before not in _KEYWORDS:
            return frozenset([before])
        if is_code:
            raise TokenError(f"a function of the C sources has no name: {' '.join(head[:12])}")
    return frozenset(_words(tokens if _is_type(tokens, head) else head))


def _is_type(tokens: list[str], head: list[str]) -> bool:
    return tokens[:1] == ["typedef"] or (tokens[0] in ("struct", "union", "enum") and "{" in head)


def _without_fields(tokens: list[str]) -> list[str]:
    """Without the names behind `.` and `->`."""
    return [token for before, token in zip(["", *tokens], tokens, strict=False) if before not in (".", "->")]


def _without_declared(tokens: list[str]) -> list[str]:
    """Of a type: without the names that it gives, as of fields; what is left are types and constants."""
    ends = frozenset((",", ";", "[", ":", ")", "=", "}"))
    return [token for token, after in zip(tokens, [*tokens[1:], ";"], strict=True) if after not in ends]


def _mentions(tokens: list[str], choices: frozenset[str]) -> tuple[frozenset[str], tuple]:
    """Names in a function, and its choices: names behind `case NAME:`, by the names that lead there."""
    plain: set[str] = set()
    arms: list[tuple[set[str], set[str]]] = []
    stack: list[tuple[int, tuple[set[str], set[str]] | None]] = []  # depth and arm of the switches around
    depth, place = 0, 0
    current: tuple[set[str], set[str]] | None = None
    falls = False  # the arm before runs on into this one
    while place < len(tokens):
        token = tokens[place]
        if token == "case" and (current is None or depth == stack[-1][0]):
            if current is None or not stack or stack[-1][0] != depth:
                stack.append((depth, current))
            label = tokens[place + 1 : tokens.index(":", place)]
            led = set(label) & choices if len(label) == 1 else set()
            if current is not None and falls:
                led |= current[0] if led and current[0] else set()
                led = led if current[0] else set()
            current, falls = (led, set()), True
            arms.append(current)
            plain.update(set(_words(label)) - choices)
            place = tokens.index(":", place) + 1
            continue
        if token == "default" and stack and depth == stack[-1][0]:
            current, falls = (set(), set()), True
            arms.append(current)
        elif token in ("break", "return", "continue", "goto") and stack and depth == stack[-1][0]:
            falls = False
        depth += (token in _OPENING) - (token in _CLOSING)
        if stack and depth < stack[-1][0]:
            current = stack.pop()[1]
        elif is_word(token) and token not in _KEYWORDS:
            compares = place and tokens[place - 1] in ("==", "!=") and token in choices
            if not compares:
                (plain if current is None or not current[0] else current[1]).add(token)
        place += 1
    return frozenset(plain), tuple((frozenset(led), frozenset(behind)) for led, behind in arms if led and behind)
