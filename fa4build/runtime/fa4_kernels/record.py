"""Misses: every problem that no installed kernel serves, for the builder (`fa4build matrix --from-misses`).

One line of JSON a miss, appended in one write, so that many processes may share a file. Writing never breaks a call:
what fails is told once.
"""

import json
import os
import warnings

from .dispatch import Decision

RECORD_FORMAT = "fa4-kernels miss"
RECORD_VERSION = 1


class RecordWarning(UserWarning):
    """Misses cannot be written where FA4_KERNELS_RECORD says."""


class MissRecorder:
    """Appends each miss of this process once to a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: set[str] = set()
        self._broken = False

    def note(self, decision: Decision) -> None:
        """Write the problem of a decision without a kernel, unless it is written already."""
        if decision.entry is not None or self._broken:
            return
        line = miss_line(decision)
        if line in self._seen:
            return
        self._seen.add(line)
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            self._broken = True
            warnings.warn(f"FA4_KERNELS_RECORD: misses are not recorded: {error}", RecordWarning, stacklevel=2)


def miss_line(decision: Decision) -> str:
    """One miss as JSON with a newline: what was asked for, and on which target."""
    problem = decision.problem
    names = ("op", "layout", "dtype", "head_dim", "head_dim_v", "mask", "deterministic")
    document = {
        "format": RECORD_FORMAT,
        "version": RECORD_VERSION,
        "compute_capability": list(decision.device.compute_capability),
        "target": decision.device.target,
        "problem": {name: getattr(problem, name) for name in names} | {"features": sorted(problem.features)},
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n"
