"""What changed since an earlier report: kernels that came or went, evidence, registers, sizes, and speed."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa4build.errors import Fa4BuildError
from fa4build.report.collect import ReportData
from fa4build.store.evidence import LEVELS

_LEVELS = ("none", *LEVELS)
_FACTS = (("registers", "registers"), ("spill_bytes", "bytes spilled"), ("shared_bytes", "bytes of shared memory"))
_SIZE_SHARE = 0.02  # of a cubin, from which its size counts as changed
_SPEED_SHARE = 0.03  # of a ratio; rounds of one benchmark differ by less


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference. what: `registers`, ...; is_worse: whether somebody should look at it."""

    subject: str
    what: str
    before: str
    after: str
    is_worse: bool


def read_earlier(path: Path) -> dict[str, Any]:
    """The document of `fa4build report --json`. Raises: Fa4BuildError for anything else."""
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise Fa4BuildError(
            f"{path}: is not JSON ({error}). Give a file that `fa4build report --json` wrote."
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get("variants"), list):
        raise Fa4BuildError(f"{path}: is no report. Give a file that `fa4build report --json` wrote.")
    return document


def changes(data: ReportData, earlier: Mapping[str, Any]) -> tuple[Change, ...]:
    """What differs, the worse things first, then in the order of the matrix."""
    before = {str(row.get("id")): row for row in earlier["variants"] if isinstance(row, dict)}
    now = {str(row["id"]): row for row in data.as_dict()["variants"]}
    found = [change for name in {**now, **before} for change in _of_kernel(name, before.get(name), now.get(name))]
    found += _of_speed(data, earlier)
    return tuple(sorted(found, key=lambda change: not change.is_worse))


def _of_kernel(name: str, before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> Iterator[Change]:
    if before is None or now is None:
        yield Change(
            subject=name,
            what="kernel",
            before="none" if before is None else "there",
            after="none" if now is None else "there",
            is_worse=now is None,
        )
        return
    old, new = str(before.get("level", "none")), str(now["level"])
    if old != new and {old, new} <= set(_LEVELS):
        yield Change(
            subject=name, what="evidence", before=old, after=new, is_worse=_LEVELS.index(new) < _LEVELS.index(old)
        )
    if not (before.get("facts") and now["facts"]):
        return
    for fact, words in _FACTS:
        old_value, new_value = before["facts"].get(fact), now["facts"].get(fact)
        if old_value != new_value and isinstance(old_value, int) and isinstance(new_value, int):
            yield Change(
                subject=name, what=words, before=str(old_value), after=str(new_value), is_worse=new_value > old_value
            )
    yield from _of_size(name, before.get("sizes", {}).get("cubin"), now["sizes"].get("cubin"))


def _of_size(name: str, before: Any, now: Any) -> Iterator[Change]:
    if isinstance(before, int) and isinstance(now, int) and before and abs(now / before - 1) >= _SIZE_SHARE:
        yield Change(subject=name, what="bytes of cubin", before=str(before), after=str(now), is_worse=now > before)


def _of_speed(data: ReportData, earlier: Mapping[str, Any]) -> Iterator[Change]:
    """Rows whose ratio to the best other library moved."""
    rows = (row for row in earlier.get("ratios", ()) if isinstance(row, dict))
    before = {(row.get("list"), row.get("problem"), row.get("seqlen")): row.get("ratio") for row in rows}
    for row in data.ratios:
        old = before.get(row.key)
        if isinstance(old, float) and abs(row.ratio / old - 1) >= _SPEED_SHARE:
            yield Change(
                subject=f"{row.list}, {row.problem}, seqlen {row.seqlen}",
                what="ours / best other",
                before=f"{old:.2f}",
                after=f"{row.ratio:.2f}",
                is_worse=row.ratio < old,
            )
