"""The synchronisation of a kernel: every statement of its PTX that orders anything, with its place in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_HEADS = (
    *(r"mbarrier\.", r"bar(?:rier)?\.", r"fence\.", r"membar\.", r"griddepcontrol\.", r"setmaxnreg\.", r"elect\.sync"),
    *(r"cp\.async\.(?:bulk\.)?(?:commit_group|wait_group|wait_all)", r"cp\.async\.mbarrier\.arrive"),
    *(r"cp\.async\.bulk\.tensor\.[\w.:]*\.cta_group::2", r"clusterlaunchcontrol\.try_cancel"),
    *(r"wgmma\.(?:fence|commit_group|wait_group)", r"tcgen05\.(?:commit|wait|fence|alloc|dealloc|relinquish)"),
    *(r"(?:red|atom)\.", r"ld\.(?:acquire|volatile)", r"st\.(?:release|volatile)"),
)
_SYNC = re.compile(rf"(?:{'|'.join(_HEADS)})[\w.:]*\Z")
_STATEMENT = re.compile(
    rf"(?<![\w.%$])(?P<guard>@!?\s*[\w$%]+\s+)?(?P<opcode>(?:{'|'.join(_HEADS)})[\w.:]*)(?P<operands>[^;]*);"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A statement that synchronises.

    Attributes:
        start, stop: of its text, with its guard and its semicolon.
        line: of the PTX, from 1.
        guard: `@%p1 ` with a blank behind, or empty.
        operands: as they stand between commas.
        elects: of an election: the first opcode behind it that acts for the warp; else empty.
        around: the text around it without registers, labels and numbers: equal for the copies of an unrolled loop.
    """

    start: int
    stop: int
    line: int
    guard: str
    opcode: str
    operands: tuple[str, ...]
    elects: str = ""
    around: str = ""

    @property
    def text(self) -> str:
        """The statement in one line."""
        return f"{self.guard}{self.opcode} {', '.join(self.operands)}".strip() + ";"


def synchronises(opcode: str) -> bool:
    """Whether an opcode is one of those that order something."""
    return _SYNC.match(opcode) is not None


def operations_of(ptx: str) -> tuple[Operation, ...]:
    """Every operation of a PTX text that synchronises, in the order of the text."""
    return tuple(_operations(_COMMENT.sub(_blanks, ptx)))


def _blanks(comment: re.Match) -> str:
    return re.sub(r"[^\n]", " ", comment[0])


def _operations(code: str) -> Iterator[Operation]:
    line, counted = 1, 0
    for match in _STATEMENT.finditer(code):
        start = match.start()
        line, counted = line + code.count("\n", counted, start), start
        opcode = match["opcode"]
        yield Operation(
            start=start,
            stop=match.end(),
            line=line,
            guard=" ".join(match["guard"].split()) + " " if match["guard"] else "",
            opcode=opcode,
            operands=split_operands(match["operands"]),
            elects=_acting_behind(code, match.end()) if opcode == "elect.sync" else "",
            around=_around(code, start, match.end()),
        )


_ACTS = re.compile(r"(?<![\w.%$])((?:tcgen05|cp|mbarrier|red|atom|st|fence|wgmma|setmaxnreg|bar|barrier)\.[\w.:]+)")


def _acting_behind(code: str, place: int) -> str:
    found = _ACTS.search(code, place)
    return found[1] if found else ""


_NEAR = 100  # characters on either side
_NAME = re.compile(r"[%$][\w$]+|\b\d+\b")


def _around(code: str, start: int, stop: int) -> str:
    """Cut names at the ends are left out."""
    words = _NAME.sub("#", code[max(0, start - _NEAR) : stop + _NEAR]).split()
    return " ".join(words[1:-1])


def split_operands(text: str) -> tuple[str, ...]:
    """Operands of a statement: commas outside brackets and braces part them."""
    parts, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    parts.append(text[start:])
    return tuple(part for part in (" ".join(each.split()) for each in parts) if part)
