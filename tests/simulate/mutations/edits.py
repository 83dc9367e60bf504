"""Edits of PTX text that each plant one fault. An edit that finds nothing to change is an error of the test."""

import re
from collections.abc import Callable

Edit = Callable[[str], str]


def _nth(pattern: str, which: int, ptx: str) -> re.Match:
    found = list(re.finditer(pattern, ptx, re.MULTILINE))
    if not -len(found) <= which < len(found):
        raise AssertionError(f"{pattern!r} occurs {len(found)} times; number {which} was to be changed")
    return found[which]


def substitute(pattern: str, replacement: str, which: int = 0) -> Edit:
    """Replace the `which`-th match (negative: from the end); groups of the pattern can be named in the replacement."""

    def edit(ptx: str) -> str:
        match = _nth(pattern, which, ptx)
        return ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :]

    return edit


def substitute_all(pattern: str, replacement: str) -> Edit:
    """Replace every match, of which there is one at least."""

    def edit(ptx: str) -> str:
        changed, count = re.subn(pattern, replacement, ptx, flags=re.MULTILINE)
        assert count, pattern
        return changed

    return edit


NOTHING = "{ .reg .b32 none; mov.b32 none, 0; }"
"""In place of a statement, so that no branch is left around nothing."""


def drop(pattern: str, which: int = 0) -> Edit:
    """Remove one statement: the pattern is its beginning, after any predicate."""
    return substitute(rf"^\s*(?:@!?%\w+\s+)?{pattern}[^;]*;", NOTHING, which)


def drop_all(pattern: str) -> Edit:
    """Remove every statement that begins so."""

    def edit(ptx: str) -> str:
        changed, count = re.subn(rf"^\s*(?:@!?%\w+\s+)?{pattern}[^;]*;", NOTHING, ptx, flags=re.MULTILINE)
        assert count, pattern
        return changed

    return edit


def after(pattern: str, text: str, which: int = 0) -> Edit:
    """Insert text behind a statement that begins so."""
    return substitute(rf"^(\s*(?:@!?%\w+\s+)?{pattern}[^;]*;)", rf"\1\n{text}", which)


def before(pattern: str, text: str, which: int = 0) -> Edit:
    """Insert text before a statement that begins so; a predicate of the statement stays with it."""
    return substitute(rf"^(\s*(?:@!?%\w+\s+)?{pattern}[^;]*;)", rf"{text}\n\1", which)


def drop_wait(pattern: str, which: int = 0) -> Edit:
    """Remove one blocking wait: the whole `{ ... }` loop of inline assembly around an `mbarrier.try_wait`."""

    return lambda ptx: _without_wait(ptx, _nth(rf"mbarrier\.try_wait[^;]*{pattern}[^;]*;", which, ptx))


def drop_wait_before(pattern: str, which: int = 0) -> Edit:
    """Remove the last blocking wait before the `which`-th match of a pattern."""

    def edit(ptx: str) -> str:
        place = _nth(pattern, which, ptx).start()
        return _without_wait(ptx, list(re.finditer(r"mbarrier\.try_wait[^;]*;", ptx[:place]))[-1])

    return edit


def _without_wait(ptx: str, wait: re.Match) -> str:
    start = ptx.rindex("{", 0, wait.start())
    end = ptx.index("\n", ptx.index("}", wait.end()))
    return ptx[:start] + ptx[end:]


def both(*edits: Edit) -> Edit:
    """Several edits, in order."""

    def edit(ptx: str) -> str:
        for one in edits:
            ptx = one(ptx)
        return ptx

    return edit


def moved(pattern: str, anchor: str, which: int = 0) -> Edit:
    """Move the `which`-th match of `pattern` to directly behind the last `anchor` before it."""

    def edit(ptx: str) -> str:
        match = _nth(pattern, which, ptx)
        place = list(re.finditer(anchor, ptx[: match.start()]))[-1].end()
        return ptx[:place] + "\n" + match[0] + "\n" + ptx[place : match.start()] + ptx[match.end() :]

    return edit
