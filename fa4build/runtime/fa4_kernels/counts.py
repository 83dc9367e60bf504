"""Who answered: calls that came through another package's name, by stack and function, and those that were not ours.

Counted by the plugs, not by our own functions, so that a direct call costs nothing.
"""

import threading
from collections import Counter
from typing import NamedTuple

_MAX_REASONS = 1024
_lock = threading.Lock()
_answered: Counter[tuple[str, str]] = Counter()
_kept: Counter[tuple[str, str, str]] = Counter()


class Served(NamedTuple):
    """answered: {(stack, function): calls}; kept: {(stack, function, reason): calls that the stack's own code ran}."""

    answered: dict[tuple[str, str], int]
    kept: dict[tuple[str, str, str], int]


def answered(stack: str, function: str) -> None:
    """One more call ran on our kernels."""
    with _lock:
        _answered[stack, function] += 1


def kept(stack: str, function: str, reason: str) -> None:
    """One more call went to the stack's own code. Reasons beyond _MAX_REASONS are counted together."""
    with _lock:
        key = (stack, function, reason)
        _kept[key if key in _kept or len(_kept) < _MAX_REASONS else (stack, function, "other reasons")] += 1


def served() -> Served:
    """The counts of this process so far."""
    with _lock:
        return Served(dict(_answered), dict(_kept))


def reset() -> None:
    """Start again from zero."""
    with _lock:
        _answered.clear()
        _kept.clear()
