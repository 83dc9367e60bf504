"""Mutants of a kernel: its PTX with one synchronisation taken out, weakened, or off by one.

A rule names the opcodes that it is for and gives the ways in which such an operation can be wrong. Removing an
operation that writes registers leaves them as if it had succeeded at once: a wait is over, a counter is high enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from fa4build.errors import SimulationError
from fa4build.verify.mutation.operations import Operation, operations_of

NOTHING = "{ .reg .b32 none_; mov.b32 none_, 0; }"
"""In place of a statement, so that no branch is left around nothing."""
_ENOUGH = 0x3FFFFFFF  # what a removed load of a counter gives: every turn has come
_STEP = {"mbarrier": 1, "bar": 32, "barrier": 32, "setmaxnreg": 8}

Change = tuple[str, str]  # what was done; the statement then


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change. `number`: of the operation among those of the text; `edits`: (start, stop, text) in order."""

    number: int
    line: int
    opcode: str
    statement: str
    change: str
    edits: tuple[tuple[int, int, str], ...]

    def applied(self, ptx: str) -> str:
        """The text with the change."""
        for start, stop, text in reversed(self.edits):
            ptx = ptx[:start] + text + ptx[stop:]
        return ptx


def mutants_of(ptx: str) -> tuple[Mutant, ...]:
    """All mutants of a PTX text, in the order of their operations."""
    operations = operations_of(ptx)
    is_paired = any(op.opcode.startswith("barrier.cluster") for op in operations)
    return tuple(mutant for number in _places(operations) for mutant in _mutants(operations, number, is_paired))


def _places(operations: Sequence[Operation]) -> list[int]:
    """Numbers of the operations to change, one by one. Of copies of an unrolled loop, and of elections for the same
    kind of step in a row, the first and the last; every barrier is one of its own."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, op in enumerate(operations):
        own = (str(number),) if op.opcode.startswith(("mbarrier.init", "setmaxnreg")) else ()
        alike.setdefault((op.opcode, op.around, *own), []).append(number)
    for _, group in groupby(enumerate(operations), key=lambda pair: pair[1].elects):
        numbers = [number for number, op in group if op.elects]
        alike[("in a row", str(numbers))] = numbers
    copies = {number for numbers in alike.values() for number in numbers[1:-1]}
    return [number for number in range(len(operations)) if number not in copies]


def _mutants(operations: Sequence[Operation], number: int, is_paired: bool) -> Iterator[Mutant]:
    op = operations[number]
    for change, text in _changes(op, is_paired):
        yield _mutant(number, op, change, ((op.start, op.stop, text),))
    wait = next((o for o in operations[number:] if o.opcode.startswith("barrier.cluster.wait")), None)
    if op.opcode.startswith("barrier.cluster.arrive") and wait is not None:
        edits = ((op.start, op.stop, NOTHING), (wait.start, wait.stop, NOTHING))
        yield _mutant(number, op, "removed with its wait", edits)


def _mutant(number: int, op: Operation, change: str, edits: tuple[tuple[int, int, str], ...]) -> Mutant:
    return Mutant(number=number, line=op.line, opcode=op.opcode, statement=op.text, change=change, edits=edits)


def _changes(op: Operation, is_paired: bool) -> Iterator[Change]:
    for pattern, rule in _RULES:
        if match := re.fullmatch(pattern, op.opcode):
            for change, text in rule(op, match):
                if is_paired or change != _CTA_WAIT:
                    yield change, text
            return
    raise SimulationError(f"PTX line {op.line}: no mutation rule for {op.opcode}; add one to fa4build/verify/mutation")


# --- statements -------------------------------------------------------------------------------------------------------


def _statement(op: Operation, *, opcode: str = "", operands: Sequence[str] | None = None, before: str = "") -> str:
    """The operation with another opcode or operands; `before`: statements that make new operands, in their scope."""
    given = op.operands if operands is None else operands
    text = f"{op.guard}{opcode or op.opcode} {', '.join(given)};"
    return f"{{ {before} {text} }}" if before else text


def _with_operand(op: Operation, which: int, text: str) -> str:
    return _statement(op, operands=[*op.operands[:which], text, *op.operands[which + 1 :]])


def _off_by(op: Operation, which: int, change: int) -> Change:
    """An integer operand plus `change`."""
    name = f"count {change:+d}"
    value = op.operands[which]
    if re.fullmatch(r"\d+", value):
        return name, _with_operand(op, which, str(int(value) + change))
    operands = [*op.operands[:which], "n_", *op.operands[which + 1 :]]
    return name, _statement(op, operands=operands, before=f".reg .b32 n_; add.s32 n_, {value}, {change};")


def _word(op: Operation, pattern: str, word: str) -> str:
    """The operation with a part of its opcode replaced."""
    return _statement(op, opcode=re.sub(pattern, word, op.opcode, count=1))


# --- rules ------------------------------------------------------------------------------------------------------------

_CTA_WAIT = "acquires for its CTA"


def _removed(op: Operation, match: re.Match) -> Iterator[Change]:
    yield "removed", NOTHING


def _init(op: Operation, match: re.Match) -> Iterator[Change]:
    yield from _removed(op, match)
    yield _off_by(op, 1, 1)
    yield _off_by(op, 1, -1)


def _arrive(op: Operation, match: re.Match) -> Iterator[Change]:
    yield "removed", f"{op.guard}mov.b64 {op.operands[0]}, 0;" if op.operands[0] != "_" else NOTHING
    yield "twice", f"{_statement(op)} {_statement(op)}"
    if match["order"] is None:
        scope = "cluster" if match["space"] == "::cluster" else "cta"
        yield "relaxed", _word(op, r"\.shared", f".relaxed.{scope}.shared")
        if match["space"] == "::cluster":
            yield "releases for its CTA", _word(op, r"\.shared", ".release.cta.shared")


def _expect(op: Operation, match: re.Match) -> Iterator[Change]:
    bytes_at = len(op.operands) - 1
    has_state = match["arrive"] is not None
    yield "removed", f"{op.guard}mov.b64 {op.operands[0]}, 0;" if has_state and op.operands[0] != "_" else NOTHING
    if has_state:
        plain = _statement(op, opcode=op.opcode.replace(".expect_tx", ""), operands=op.operands[:-1])
        yield "bytes not announced", plain
    for change in (16, -16):
        yield f"bytes {change:+d}", _off_by(op, bytes_at, change)[1]


def _wait(op: Operation, match: re.Match) -> Iterator[Change]:
    yield "removed", f"{op.guard}setp.eq.s32 {op.operands[0]}, 0, 0;"
    operands = [*op.operands[:2], "n_", *op.operands[3:]]
    flip = f".reg .b32 n_; xor.b32 n_, {op.operands[2]}, 1;"
    yield "the other parity", _statement(op, operands=operands, before=flip)
    if match["order"] is None:
        yield "relaxed", _word(op, r"\.shared", ".relaxed.cta.shared")
        yield _CTA_WAIT, _word(op, r"\.shared", ".acquire.cta.shared")


def _named(op: Operation, match: re.Match) -> Iterator[Change]:
    yield from _removed(op, match)
    if len(op.operands) > 1:
        yield _off_by(op, 1, 32)
        yield _off_by(op, 1, -32)
        if match["kind"] == "sync":
            yield "arrives and does not wait", _word(op, r"\.sync", ".arrive")


def _cluster_arrive(op: Operation, match: re.Match) -> Iterator[Change]:
    yield from _removed(op, match)
    if ".relaxed" not in op.opcode:
        yield "relaxed", _word(op, r"\.arrive(?:\.release)?", ".arrive.relaxed")


def _proxy_fence(op: Operation, match: re.Match) -> Iterator[Change]:
    yield from _removed(op, match)
    if match["space"]:
        other = ".shared::cta" if match["space"] == ".global" else ".global"
        yield f"of {other[1:]}", _statement(op, opcode=f"fence.proxy.async{other}")


def _scoped_fence(op: Operation, match: re.Match) -> Iterator[Change]:
    yield from _removed(op, match)
    yield from _narrower(op, match)


def _wait_group(op: Operation, match: re.Match) -> Iterator[Change]:
    yield from _removed(op, match)
    yield "one more may be open", _with_operand(op, 0, str(int(op.operands[0]) + 1))
    if "bulk" in op.opcode and ".read" not in op.opcode:
        yield "only reads are over", _statement(op, opcode=f"{op.opcode}.read")


def _commit(op: Operation, match: re.Match) -> Iterator[Change]:
    yield from _removed(op, match)
    if ".multicast" in op.opcode:
        for mask in (1, 2):
            yield f"to CTA {mask - 1} alone", _with_operand(op, 1, str(mask))


def _alloc(op: Operation, match: re.Match) -> Iterator[Change]:
    yield from _removed(op, match)
    half = f".reg .b32 n_; shr.u32 n_, {op.operands[1]}, 1;"
    yield "half the columns", _statement(op, operands=(op.operands[0], "n_"), before=half)


_NARROWER = {"sys": ("cluster", "cta"), "gpu": ("cluster", "cta"), "cluster": ("cta",), "cta": ()}


def _narrower(op: Operation, match: re.Match) -> Iterator[Change]:
    for scope in _NARROWER[match["scope"]]:
        yield f"scope {scope}", _word(op, rf"\.{match['scope']}\b", f".{scope}")


def _ordered(op: Operation, match: re.Match) -> Iterator[Change]:
    """Reductions, atomics, loads and stores that order something, or nothing but themselves."""
    if op.opcode.startswith(("ld", "atom")):
        kind = "b64" if op.opcode.endswith("64") else "b32"
        yield "removed", f"{op.guard}mov.{kind} {op.operands[0]}, {_ENOUGH};"
    else:
        yield from _removed(op, match)
    if match["order"] in ("release", "acquire", "acq_rel"):
        yield "relaxed", _word(op, match["order"], "relaxed")
    if match["scope"]:
        yield from _narrower(op, match)


def _volatile(op: Operation, match: re.Match) -> Iterator[Change]:
    yield from (("removed", f"{op.guard}mov.b32 {op.operands[0]}, 0;"),) if match[1] == "ld" else _removed(op, match)


_OF_A_THREAD = re.compile(
    r"tcgen05\.(?:mma|commit|cp|shift)|cp\.(?:reduce\.)?async\.bulk\.(?:tensor\.\dd\.)?(?:global|commit|wait)"
)


def _elect(op: Operation, match: re.Match) -> Iterator[Change]:
    """`elect.sync d|p, mask`. Lane 0 in the place of the elected one is a fault only where what is elected belongs to a
    thread, as a bulk group does; all else may be done by any lane, and an election orders no memory."""
    data, _, predicate = (part.strip() for part in op.operands[0].partition("|"))
    rest = f"mov.b32 {data}, 0;" if data != "_" else ""
    what = ".".join(op.elects.split(".")[:4]) or "nothing"
    yield f"every lane is elected for {what}", f"{{ setp.eq.s32 {predicate}, 0, 0; {rest} }}"
    if _OF_A_THREAD.match(op.elects):
        lane = f".reg .b32 n_; mov.u32 n_, %laneid; setp.eq.u32 {predicate}, n_, 0;"
        yield "lane 0 without an election", f"{{ {lane} {rest} }}"


def _registers(op: Operation, match: re.Match) -> Iterator[Change]:
    yield from _removed(op, match)
    yield _off_by(op, 0, 8)


def _load(op: Operation, match: re.Match) -> Iterator[Change]:
    yield "as of one CTA", _word(op, r"\.cta_group::2", "")


Rule = Callable[[Operation, re.Match], Iterator[Change]]
_ORDER = r"(?:\.(?P<order>release|acquire|acq_rel|relaxed))?(?:\.(?P<scope>cta|cluster|gpu|sys))?"
_SPACE = r"\.shared(?P<space>::cta|::cluster)?\.b64"
_RULES: tuple[tuple[str, Rule], ...] = (
    (r"mbarrier\.init\..*", _init),
    (r"mbarrier\.inval\..*", _removed),
    (rf"mbarrier(?P<arrive>\.arrive)?\.expect_tx{_ORDER}{_SPACE}", _expect),
    (r"mbarrier\.complete_tx\..*", _removed),
    (rf"mbarrier\.arrive(?:\.noComplete)?{_ORDER}{_SPACE}", _arrive),
    (rf"mbarrier\.(?:try|test)_wait\.parity{_ORDER}{_SPACE}", _wait),
    (r"bar\.warp\.sync", _removed),
    (r"barrier\.cluster\.arrive[\w.]*", _cluster_arrive),
    (r"barrier\.cluster\.wait[\w.]*", _removed),
    (r"bar(?:rier)?(?:\.cta)?\.(?P<kind>sync|arrive)(?:\.aligned)?", _named),
    (r"fence\.proxy\.async(?P<space>\.global|\.shared::\w+)?", _proxy_fence),
    (r"fence\.(?:acq_rel|sc|acquire|release)\.(?P<scope>cta|cluster|gpu|sys)", _scoped_fence),
    (r"fence\.(?:proxy|mbarrier_init)[\w.:]*|membar\.\w+", _removed),
    (r"cp\.async(?:\.bulk)?\.wait_group(?:\.read)?|wgmma\.wait_group[\w.]*", _wait_group),
    (r"cp\.async(?:\.bulk)?\.commit_group|cp\.async\.wait_all|cp\.async\.mbarrier\.[\w.:]+", _removed),
    (r"cp\.async\.bulk\.tensor\..*", _load),
    (r"clusterlaunchcontrol\..*", _removed),
    (r"wgmma\.(?:fence|commit_group)[\w.]*", _removed),
    (r"tcgen05\.commit\..*", _commit),
    (r"tcgen05\.alloc\..*", _alloc),
    (r"tcgen05\.(?:wait|fence|dealloc|relinquish).*", _removed),
    (r"griddepcontrol\.\w+", _removed),
    (rf"(?:red|atom|ld|st)(?:\.async)?{_ORDER}\.(?:global|shared)[\w.:]*", _ordered),
    (r"(ld|st)\.volatile\..*", _volatile),
    (r"elect\.sync", _elect),
    (r"setmaxnreg\..*", _registers),
)
