"""Which instructions were executed: asked for around runs, noted by the engine at the first execution of each.

The note is in the place of an instruction's handler until then, so it costs nothing (`run_first` of core_launch.c).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

Marks = dict[tuple[str, str], np.ndarray]
"""(PTX text, entry) -> one byte an instruction of the parsed function and one more for its end, 1 where some lane has
executed it. A branch counts where a lane has come to it."""

_watching: list[Marks] = []


@contextmanager
def executed_instructions() -> Iterator[Marks]:
    """What the native engine executes inside; the marks of all launches add up."""
    marks: Marks = {}
    _watching.append(marks)
    try:
        yield marks
    finally:
        _watching.pop()


def place_for_marks(ptx: str, entry: str, instructions: int) -> int | None:
    """Where the engine writes the marks of a launch; None where nobody asks."""
    if not _watching:
        return None
    return _watching[-1].setdefault((ptx, entry), np.zeros(instructions, np.uint8)).ctypes.data
