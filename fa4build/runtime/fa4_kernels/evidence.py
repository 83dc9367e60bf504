"""What a kernel of a pack has passed, and whether anything backs it.

A manifest names levels (`static`, `simulated`, `silicon`) with a summary each. A level counts only if its summary has
every field that a record of that level has, within its range, and is sealed for this very kernel: `record` is the
digest over level, id, cubin, launch plan and summary. Anything else is a claim that nothing backs, and ranks as none.

The digest binds a summary to bytes; it does not say who made it. Who did is said by the signature of the pack
(`trust.py`); signatures of single records are not part of this version.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .abi import TARGETS

LEVELS = ("static", "simulated", "silicon")
"""What a kernel may have passed, in rising order."""

ENGINES = ("native", "python")
"""Of the simulator. A simulated summary names the one that ran; the first ones, all of the Python engine, do not."""

RECORD_FIELD = "record"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DATE = re.compile(r"20\d\d-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-5]\dZ")


def _count(value: object) -> bool:
    return type(value) is int and value >= 0


def _positive(value: object) -> bool:
    return type(value) is int and value >= 1


def _ratio(value: object) -> bool:
    """An error over what is allowed: at most 1 has passed; NaN has not."""
    return type(value) in (int, float) and 0 <= value <= 1


def _counts(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) and _count(n) for name, n in value.items())


def _numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _seeds(value: object) -> bool:
    return _numbers(value) and bool(value) and len(set(value)) == len(value)  # type: ignore[call-overload, arg-type]


def _words(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) and word for word in value)


def _digest(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _date(value: object) -> bool:
    return isinstance(value, str) and _DATE.fullmatch(value) is not None


_Rules = Mapping[str, Callable[[object], bool]]
_REQUIRED: Mapping[str, _Rules] = {
    "static": {
        "target": TARGETS.__contains__,
        **dict.fromkeys(("threads", "registers", "code_bytes"), _positive),
        **dict.fromkeys(("spill_bytes", "local_bytes", "shared_bytes", "tmem_columns"), _count),
        "budgets": _numbers,
        "instructions": _counts,
    },
    "simulated": {
        "proof_sha256": _digest,
        "cases": _positive,
        "seeds": _seeds,
        **dict.fromkeys(("schedules", "checked_schedules"), _words),
        **dict.fromkeys(("warp_instructions", "notes"), _count),
        **dict.fromkeys(("worst_ratio", "worst_lse_error"), _ratio),
    },
    "silicon": {
        "date": _date,
        **dict.fromkeys(("device", "driver", "torch"), _text),
        "capability": TARGETS.__contains__,
        "cases": _positive,
        "worst_ratio": _ratio,
    },
}
_OPTIONAL: Mapping[str, _Rules] = {
    "static": {},
    "simulated": {
        "chain_cases": _positive,
        "chain_sha256": _digest,
        "chain_worst_ratio": _ratio,
        "engine": ENGINES.__contains__,
        "operator": _text,
    },
    "silicon": {},
}


def record_digest(level: str, kernel: str, cubin_sha256: str, plan_sha256: str, summary: Mapping[str, Any]) -> str:
    """Sha256 (hex) over a summary and what it is of; the summary's own `record` is left out."""
    own = {name: value for name, value in summary.items() if name != RECORD_FIELD}
    text = json.dumps([level, kernel, cubin_sha256, plan_sha256, own], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def summary_fault(level: str, summary: object, target: str | None = None) -> str | None:
    """Why a summary is none of this level, or None: fields, types, ranges, and the GPU target if one is given."""
    if not isinstance(summary, Mapping):
        return "has no summary"
    required, allowed = _REQUIRED[level], {**_REQUIRED[level], **_OPTIONAL[level]}
    if missing := sorted(required.keys() - summary.keys()):
        return f"lacks {', '.join(missing)}"
    if unknown := sorted(summary.keys() - allowed.keys() - {RECORD_FIELD}):
        return f"has the unknown fields {', '.join(unknown)}"
    for name, holds in allowed.items():
        value = summary.get(name)
        if name in summary and not (isinstance(value, str | int | float | list | Mapping) and _holds(holds, value)):
            return f"says {name} = {str(value)[:40]!r}"
    told = summary.get("capability", summary.get("target"))
    if target is not None and told not in (None, target):
        return f"is of {told}, the kernel is for {target}"
    return None


def _holds(rule: Callable[[object], bool], value: object) -> bool:
    try:
        return rule(value)
    except TypeError:  # an unhashable value where a name is expected
        return False


def backed_levels(
    evidence: Mapping[str, Any], *, kernel: str, target: str, cubin_sha256: str, plan_sha256: str
) -> tuple[str, ...]:
    """The levels of a manifest entry that its records back, lowest first."""

    def is_backed(level: str) -> bool:
        summary = evidence.get(level)
        if summary_fault(level, summary, target) is not None:
            return False
        return summary.get(RECORD_FIELD) == record_digest(level, kernel, cubin_sha256, plan_sha256, summary)

    return tuple(level for level in LEVELS if is_backed(level))


def named_levels(evidence: Mapping[str, Any]) -> tuple[str, ...]:
    """The levels that a manifest entry says something of, backed or not."""
    return tuple(level for level in LEVELS if evidence.get(level) not in (None, False))
