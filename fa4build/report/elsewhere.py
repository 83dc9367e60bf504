"""What committed records say of kernels that are not compiled here: levels by id, without the bytes to hold them to."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fa4build.store.evidence import SIMULATED_NAME


def levels_elsewhere(directories: Iterable[Path]) -> dict[str, str]:
    """Id -> `simulated` or `silicon`. A run on a GPU counts only if it was of the cubin that was simulated last: the
    simulations are kept current, and older bytes say nothing of what would be built now."""
    simulated: dict[str, str] = {}
    ran: set[tuple[str, str]] = set()
    for path in sorted(path for folder in directories if folder.is_dir() for path in folder.rglob("*.json")):
        document = _read(path)
        if path.name == SIMULATED_NAME:
            simulated |= {name: str(row.get("cubin_sha256")) for name, row in document.get("kernels", {}).items()}
        else:
            ran |= {(str(row.get("id")), str(row.get("cubin_sha256"))) for row in _passed(document)}
    return {name: "silicon" if (name, digest) in ran else "simulated" for name, digest in simulated.items()}


def _passed(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = document.get("variants")
    return [row for row in rows if isinstance(row, dict) and row.get("passed")] if isinstance(rows, list) else []


def _read(path: Path) -> dict[str, Any]:
    """A file's JSON object; damaged files are told where evidence is read."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
