"""The tables of the multi-function unit as files beside the library: mapped, not computed again in every process.

`mufu` makes them from the measured differences in about half a second; a proof of one kernel takes less than two.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np

from fa4build.errors import SimulationError
from fa4build.simulate.native.build import default_folder
from fa4build.simulate.units import lg2_unit, mufu

_MAKERS: dict[str, tuple[Callable[[], np.ndarray], type]] = {
    "ex2": (mufu.ex2_table, np.int32),
    "rcp_delta": (mufu._rcp_delta, np.int8),
    "squares": (lg2_unit.squares, np.int64),
}


@cache
def _sources_digest() -> str:
    """Of all that the tables are made from."""
    found = hashlib.sha256()
    folder = resources.files("fa4build.simulate")
    for name in (
        "units/mufu.py",
        "units/lg2_unit.py",
        "data/h200_ex2_1to2_delta.npy.xz",
        "data/h200_rcp_1to2_delta.npy.xz",
    ):
        found.update(folder.joinpath(name).read_bytes())
    return found.hexdigest()[:32]


@cache
def table(name: str) -> np.ndarray:
    """`ex2`, `rcp_delta` or `squares`, read only."""
    return load(name, default_folder())


def load(name: str, folder: Path) -> np.ndarray:
    """A table from its file in a folder; made there if it is missing.

    Raises: SimulationError where `mufu` gives another type than the engine reads.
    """
    make, dtype = _MAKERS[name]
    path = folder / f"{name}-{_sources_digest()}.npy"
    if not path.is_file():
        values = make()
        if values.dtype != dtype:
            raise SimulationError(f"the table {name} has {values.dtype}; the native engine reads {np.dtype(dtype)}")
        _write(path, np.ascontiguousarray(values))
    return np.load(path, mmap_mode="r")


def _write(path: Path, values: np.ndarray) -> None:
    """The whole file or none, also with several writers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npy", delete=False) as scratch:
        np.save(scratch, values)
    Path(scratch.name).replace(path)
