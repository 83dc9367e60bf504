"""C sources as a compiler's preprocessor leaves them, without one: a stream of tokens for each file.

Comments, layout, names of files and of macros are gone; what macros stand for is there. No compiler is asked, so that
the stream is the same on every host: where a condition asks for the compiler's or the host's own macros (`__FMA__`),
all branches stand in it behind their conditions. Headers of the system are left out.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fa4build.verify.code_tokens import TokenError

Hidden = frozenset[str]
Token = tuple[str, Hidden]
"""A token's text, and the macros that it came from: they are not replaced in it again."""

_PART = re.compile(
    r"""(?P<space>[^\S\n]+)|(?P<newline>\n)|(?P<text>[LuU]?"(?:\\.|[^"\\\n])*"|[LuU]?'(?:\\.|[^'\\\n])*')"""
    r"""|(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)|(?P<word>[A-Za-z_]\w*)"""
    r"""|(?P<sign>\.\.\.|<<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&^|]=|\#\#|.)"""
)
_COMMENT = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|//[^\n]*|/\*.*?\*/""", re.S)
_WORD = re.compile(r"[A-Za-z_]\w*")
_NOTHING: Hidden = frozenset()


def is_word(text: str) -> bool:
    """Whether a token is a name or a keyword."""
    return _WORD.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Macro:
    """`parameters`: None for one without a list; `...` stands as `__VA_ARGS__`. `body`: its tokens."""

    parameters: tuple[str, ...] | None
    body: tuple[str, ...]


def _lines(source: str) -> Iterator[tuple[bool, list[str]]]:
    """(whether a directive, tokens with " " for white space in directives) of every line."""
    spliced = source.replace("\\\n", "")
    text = _COMMENT.sub(lambda match: match[0] if match[0][0] in "\"'" else " ", spliced)
    for line in text.split("\n"):
        parts = [(match.lastgroup, match[0]) for match in _PART.finditer(line)]
        kept = [" " if kind == "space" else part for kind, part in parts]
        bare = [part for part in kept if part != " "]
        if bare and bare[0] == "#":
            yield True, kept[kept.index("#") + 1 :]
        elif bare:
            yield False, bare


class _Reader:
    """Reads one file with the headers that it includes."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files, self.macros = files, dict[str, _Macro]()
        self.tokens: list[str] = []

    def read(self, name: str) -> None:
        """Appends the tokens of a file. Raises: TokenError for what is not understood."""
        waiting: list[str] = []
        branches: list[bool | None] = []  # taken, not taken, or both (None)
        for is_directive, parts in _lines(self._files[name]):
            if not is_directive:
                if False not in branches:
                    waiting += parts
                continue
            self._flush(waiting)
            self._directive(name, [p for p in parts if p != " "], parts, branches)
        self._flush(waiting)

    def _flush(self, waiting: list[str]) -> None:
        self.tokens += expanded(waiting, self.macros)
        waiting.clear()

    def _directive(self, name: str, parts: list[str], spaced: list[str], branches: list[bool | None]) -> None:
        kind, rest = (parts[0], parts[1:]) if parts else ("", [])
        if kind in ("if", "ifdef", "ifndef"):
            branches.append(self._condition(name, kind, rest))
        elif kind in ("else", "elif"):
            if kind == "elif" and branches[-1] is not None:
                raise TokenError(f"{name}: #elif behind a condition of its own is not understood")
            branches[-1] = None if branches[-1] is None else not branches[-1]
        if kind in ("if", "ifdef", "ifndef", "else", "elif", "endif"):
            if branches[-1] is None and False not in branches:
                self.tokens.append(f"#{' '.join(parts)}")
            if kind == "endif":
                branches.pop()
        elif False in branches:
            pass
        elif kind == "define":
            self._define(rest, spaced)
        elif kind == "undef":
            self.macros.pop(rest[0], None)
        elif kind == "include":
            included = "".join(rest).strip('"')
            if included in self._files:
                self.read(included)
        elif kind:
            raise TokenError(f"{name}: #{kind} is not understood")

    def _condition(self, name: str, kind: str, rest: list[str]) -> bool | None:
        words = [part for part in rest if is_word(part) and part != "defined"]
        if words == ["__cplusplus"]:
            return kind == "ifndef"
        if words and all(word.startswith("__") for word in words):
            return None
        if kind == "if" or len(rest) != 1:
            raise TokenError(f"{name}: #{kind} {' '.join(rest)} is not understood")
        return (rest[0] in self.macros) == (kind == "ifdef")

    def _define(self, rest: list[str], spaced: list[str]) -> None:
        macro, body, parameters = rest[0], rest[1:], None
        after = spaced[spaced.index(macro) + 1 : spaced.index(macro) + 2]
        if after == ["("]:
            close = body.index(")")
            named = [part for part in body[1:close] if part != ","]
            parameters = tuple("__VA_ARGS__" if part == "..." else part for part in named)
            body = body[close + 1 :]
        self.macros[macro] = _Macro(parameters=parameters, body=tuple(body))


def preprocessed(name: str, files: Mapping[str, str]) -> list[str]:
    """Tokens of a file with its macros replaced and its own headers read in.

    Args: files: texts of all sources by name.
    Raises: TokenError where the preprocessor does what is not understood here.
    """
    reader = _Reader(files)
    reader.read(name)
    return reader.tokens


# --- macros -----------------------------------------------------------------------------------------------------------


def expanded(tokens: list[str], macros: Mapping[str, _Macro]) -> list[str]:
    """Tokens with every macro replaced, as the standard says it (by D. Prosser's sets of hidden names)."""
    if not any(token in macros for token in tokens):
        return tokens[:]
    return [text for text, _ in _expanded([(token, _NOTHING) for token in tokens], macros)]


def _expanded(tokens: list[Token], macros: Mapping[str, _Macro]) -> list[Token]:
    waiting, done = tokens[::-1], list[Token]()
    while waiting:
        text, hidden = waiting.pop()
        macro = None if text in hidden else macros.get(text)
        if macro is None or (macro.parameters is not None and not (waiting and waiting[-1][0] == "(")):
            done.append((text, hidden))
            continue
        arguments: dict[str, list[Token]] = {}
        if macro.parameters is not None:
            given, closing = _arguments(waiting, text)
            arguments = _bound(macro, given)
            hidden &= closing
        waiting += _substituted(macro.body, arguments, hidden | {text}, macros)[::-1]
    return done


def _arguments(waiting: list[Token], name: str) -> tuple[list[list[Token]], Hidden]:
    """Takes `( a , b )` off the end of what waits, and what the closing one hides."""
    waiting.pop()
    found, depth = [list[Token]()], 0
    while waiting:
        token = waiting.pop()
        if token[0] == ")" and not depth:
            return found, token[1]
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token[0] == "," and not depth:
            found.append([])
        else:
            found[-1].append(token)
    raise TokenError(f"the arguments of the macro {name} have no end")


def _bound(macro: _Macro, given: list[list[Token]]) -> dict[str, list[Token]]:
    named = macro.parameters or ()
    if named[-1:] != ("__VA_ARGS__",):
        return dict(zip(named, given, strict=False))
    fixed = len(named) - 1
    rest: list[Token] = []
    for each in given[fixed:]:
        rest += [*([(",", _NOTHING)] if rest else []), *each]
    return {**dict(zip(named, given[:fixed], strict=False)), "__VA_ARGS__": rest}


def _substituted(
    body: tuple[str, ...], arguments: dict[str, list[Token]], hidden: Hidden, macros: Mapping[str, _Macro]
) -> list[Token]:
    """A macro's body with its arguments in it: as they are beside `#` and `##`, else with their own macros replaced."""
    made: list[Token] = []
    place, glue = 0, False
    while place < len(body):
        text = body[place]
        place += 1
        if text == "##":
            glue = True
            continue
        if text == "#" and place < len(body) and body[place] in arguments:
            part = [('"' + " ".join(t for t, _ in arguments[body[place]]) + '"', _NOTHING)]
            place += 1
        elif text == "__VA_OPT__":
            close = _closing(body, place)
            inner = body[place + 1 : close] if arguments.get("__VA_ARGS__") else ()
            part = _substituted(tuple(inner), arguments, _NOTHING, macros)
            place = close + 1
        elif text in arguments:
            beside = glue or (place < len(body) and body[place] == "##")
            part = arguments[text] if beside else _expanded(arguments[text], macros)
        else:
            part = [(text, _NOTHING)]
        if glue and made and part:
            made[-1] = (made[-1][0] + part[0][0], made[-1][1] & part[0][1])
            part = part[1:]
        made += part
        glue = False
    return [(text, names | hidden) for text, names in made]


def _closing(body: tuple[str, ...], opening: int) -> int:
    depth = 0
    for place in range(opening, len(body)):
        depth += (body[place] == "(") - (body[place] == ")")
        if not depth:
            return place
    raise TokenError("__VA_OPT__ has no end")
