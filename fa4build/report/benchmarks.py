"""Measurements found in JSON files: any list of rows with a `seqlen` and at least one number beside it is a benchmark.

What names a problem (head_dim, causal, ...) separates panels; every other number is a series, ours or a peer's.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ABSCISSA = "seqlen"
PROBLEM = (
    "op", "pass", "direction", "dtype", "head_dim", "head_dim_v", "mask", "causal", "layout", "batch", "heads",
    "num_heads_q", "num_heads_kv", "seqlen_k", "deterministic", "window",
)  # fmt: skip
"""Keys that describe a problem, in the order in which a panel's title names them. Batch and heads follow seqlen."""

_NOT_IN_TITLES = ("batch", "heads", "num_heads_q", "num_heads_kv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One problem: series name -> ((seqlen, value), ...) by ascending seqlen."""

    title: str
    series: Mapping[str, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Simulated cycles a block of keys: case -> kernel (ours, upstream) -> cycles. source: name of the file."""

    source: str
    cases: Mapping[str, Mapping[str, float]]


def read_comparisons(paths: Iterable[Path]) -> tuple[Comparison, ...]:
    """Side-by-side runs of the timing model among these files: every case has `cycles_per_block` for its kernels."""
    found = []
    for path in sorted(paths, key=lambda path: path.name):
        cases = {name: _cycles(case) for name, case in _read(path).items()}
        if cases and all(cases.values()):
            found.append(Comparison(source=path.name, cases=cases))
    return tuple(found)


def _cycles(case: Any) -> dict[str, float]:
    if not isinstance(case, dict):
        return {}
    return {
        name: float(kernel["cycles_per_block"])
        for name, kernel in case.items()
        if isinstance(kernel, dict) and "cycles_per_block" in kernel
    }


def _read(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty for anything else."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One list of measurements.

    Attributes:
        source: name of the file. name: key of the list in it, e.g. `forward_tflops`.
        setting: what the file says of device, driver, date and versions.
    """

    source: str
    name: str
    setting: Mapping[str, str]
    panels: tuple[Panel, ...]


def read_benchmarks(paths: Iterable[Path]) -> tuple[Benchmark, ...]:
    """All lists of measurements in these files, sorted by file name. A file that is no JSON holds none."""
    found = []
    for path in sorted(paths, key=lambda path: path.name):
        document = _read(path)
        setting = _setting(document)
        for name, rows in _lists(document):
            found.append(Benchmark(source=path.name, name=name, setting=setting, panels=tuple(_panels(rows))))
    return tuple(found)


def _setting(document: Mapping[str, Any]) -> dict[str, str]:
    """Top-level words and numbers: device, driver, date, versions."""
    wanted = ("device", "driver", "date", "torch", "cuda", "python", "flash_attn_4", "cudnn")
    return {name: str(document[name]) for name in wanted if isinstance(document.get(name), (str, int, float))}


def _lists(document: Any, name: str = "") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(key, rows) of every list of measurements, at any depth."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _lists(value, key)
    elif isinstance(document, list) and document:
        if all(isinstance(row, dict) and ABSCISSA in row and _series_of(row) for row in document):
            yield name, document
        elif all(isinstance(row, dict) for row in document):
            for row in document:
                yield from (item for key, value in row.items() for item in _lists(value, key))


def _series_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Its measurements. A name of PROBLEM with a fractional value is one too: `deterministic` may name a kernel."""
    return {
        name: float(value)
        for name, value in row.items()
        if name != ABSCISSA and (isinstance(value, float) or (type(value) is int and name not in PROBLEM))
    }


def _panels(rows: list[dict[str, Any]]) -> Iterator[Panel]:
    groups: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        title = ", ".join(
            _words(name, row[name])
            for name in PROBLEM
            if name in row and not isinstance(row[name], float) and name not in _NOT_IN_TITLES
        )
        panel = groups.setdefault(title, {})
        for name, value in _series_of(row).items():
            panel.setdefault(name, []).append((int(row[ABSCISSA]), value))
    for title, series in groups.items():
        yield Panel(title=title, series={name: tuple(sorted(points)) for name, points in series.items()})


def _words(name: str, value: object) -> str:
    if name == "causal":
        return "causal" if value else "full"
    if isinstance(value, bool):
        return name if value else f"not {name}"
    return str(value) if isinstance(value, str) else f"{name} {value}"
