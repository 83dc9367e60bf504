"""What a cubin has passed, and where that is written down.

Evidence belongs to the bytes of a cubin, never to a name: a record counts only for the sha256 it was made with, so an
edited kernel starts with none. Three levels: `static` (facts read from the binary), `simulated` (run in the PTX
simulator), `silicon` (run on a GPU from the wheels). Static and simulated records lie in the cache directory
(`evidence/<level>/<sha256>.json`). Records from silicon are committed (`evidence/<arch>/*.json`), since few machines
can repeat them, and so is what the simulator has proven (`evidence/<arch>/simulated.json`), since it takes hours.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fa4build.errors import Fa4BuildError
from fa4build.files import write_atomically

LEVELS = ("static", "simulated", "silicon")
RECORD_SCHEMA = 1
SIMULATED_NAME = "simulated.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Summaries for one cubin, one per level; None = not shown at that level."""

    static: Mapping[str, Any] | None = None
    simulated: Mapping[str, Any] | None = None
    silicon: Mapping[str, Any] | None = None

    @property
    def level(self) -> str:
        """The highest level passed: `silicon`, `simulated`, `static` or `none`."""
        return next((level for level in reversed(LEVELS) if getattr(self, level) is not None), "none")

    def as_dict(self) -> dict[str, Any]:
        """JSON form, as the manifest holds it."""
        return {level: None if getattr(self, level) is None else dict(getattr(self, level)) for level in LEVELS}


def record_path(cache_root: Path, level: str, cubin_sha256: str) -> Path:
    """Where the builder keeps a static or simulated record of a cubin."""
    return cache_root / "evidence" / level / f"{cubin_sha256}.json"


def write_record(cache_root: Path, level: str, cubin_sha256: str, summary: Mapping[str, Any]) -> Path:
    """Keep what a cubin passed; replaces an older record of the same level."""
    path = record_path(cache_root, level, cubin_sha256)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": RECORD_SCHEMA, "cubin_sha256": cubin_sha256, "summary": dict(summary)}
    write_atomically(path, json.dumps(document, sort_keys=True, indent=1).encode() + b"\n")
    return path


def read_record(cache_root: Path, level: str, cubin_sha256: str) -> Mapping[str, Any] | None:
    """The summary kept for a cubin, or None. A damaged record counts as none: evidence is made again, never guessed."""
    try:
        document = json.loads(record_path(cache_root, level, cubin_sha256).read_bytes())
        if document["schema"] == RECORD_SCHEMA and document["cubin_sha256"] == cubin_sha256:
            return document["summary"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def known_records(cache_root: Path, level: str) -> dict[str, Mapping[str, Any]]:
    """Every summary of a level that the builder keeps, by cubin sha256; damaged records are left out."""
    digests = (path.stem for path in (cache_root / "evidence" / level).glob("*.json"))
    found = ((digest, read_record(cache_root, level, digest)) for digest in digests)
    return {digest: summary for digest, summary in found if summary is not None}


def write_simulated(path: Path, summaries: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """Commit simulated proofs, a line for each kernel.

    Args:
        summaries: kernel id -> (cubin sha256, summary). What all of them share is written once.
    """
    first = next((summary for _, summary in summaries.values()), {})
    shared = {key: x for key, x in first.items() if all(s.get(key) == x for _, s in summaries.values())}
    lines = []
    for name, (sha256, summary) in sorted(summaries.items()):
        own = {key: x for key, x in summary.items() if key not in shared}
        lines.append(f"{json.dumps(name)}: {json.dumps({'cubin_sha256': sha256, 'summary': own}, sort_keys=True)}")
    head = f'"schema": {RECORD_SCHEMA}, "level": "simulated",\n"shared": {json.dumps(shared, sort_keys=True)}'
    text = "{" + head + ',\n"kernels": {\n' + ",\n".join(lines) + "\n}}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())


def read_simulated(path: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """What `write_simulated` wrote; nothing where there is no file. Raises: Fa4BuildError for another file."""
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_bytes())
        if (record["schema"], record["level"]) != (RECORD_SCHEMA, "simulated"):
            raise ValueError(f"schema {record['schema']}, level {record['level']}")
        kernels = record["kernels"].items()
        return {name: (row["cubin_sha256"], {**record["shared"], **row["summary"]}) for name, row in kernels}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Fa4BuildError(
            f"{path}: not a record of simulated proofs ({error!r}). Remove it, or write it again with "
            "`fa4build verify --simulate --keep`."
        ) from error


def simulated_records(directories: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Committed summaries of simulated proofs, by cubin sha256. Raises: as `read_simulated`."""
    paths = (path for directory in directories for path in sorted(directory.rglob(SIMULATED_NAME)))
    return {sha256: summary for path in paths for sha256, summary in read_simulated(path).values()}


def silicon_records(directories: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Summaries of all committed records from GPUs by cubin sha256; of several for one cubin, the newest run counts.

    Raises:
        Fa4BuildError: a file is no record of schema 1.
    """
    newest: dict[str, dict[str, Any]] = {}
    found = (path for directory in directories if directory.is_dir() for path in directory.rglob("*.json"))
    for path in sorted(path for path in found if path.name != SIMULATED_NAME):
        for sha256, summary in _run_summaries(path).items():
            if sha256 not in newest or newest[sha256]["date"] <= summary["date"]:
                newest[sha256] = summary
    return newest


def _run_summaries(path: Path) -> dict[str, dict[str, Any]]:
    """Passed variants of one device run; a failed variant leaves no evidence."""
    try:
        run = json.loads(path.read_bytes())
        if run["schema"] != RECORD_SCHEMA:
            raise Fa4BuildError(
                f"{path}: device record of schema {run['schema']}, this fa4build reads {RECORD_SCHEMA}. "
                "Use the fa4build that wrote it, or record again with benchmarks/prove_on_device.py."
            )
        header = {name: run[name] for name in ("date", "device", "driver", "torch")}
        return {
            row["cubin_sha256"]: {**header, "cases": row["cases"], "worst_ratio": row["worst_ratio"]}
            for row in run["variants"]
            if row["passed"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise Fa4BuildError(
            f"{path}: not a device record ({error!r}). Remove it, or record again with benchmarks/prove_on_device.py."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a checkout knows of cubins, by sha256: from `silicon_records` and `simulated_records`."""

    silicon: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    simulated: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def committed_in(directories: Iterable[Path]) -> Committed:
    """Everything committed in these directories. Raises: Fa4BuildError for a damaged or foreign file."""
    directories = tuple(directories)
    return Committed(silicon=silicon_records(directories), simulated=simulated_records(directories))


def evidence_for(cubin_sha256: str, cache_root: Path, committed: Committed) -> Evidence:
    """All that is known of a cubin. What was simulated here comes before what was committed."""
    return Evidence(
        static=read_record(cache_root, "static", cubin_sha256),
        simulated=read_record(cache_root, "simulated", cubin_sha256) or committed.simulated.get(cubin_sha256),
        silicon=committed.silicon.get(cubin_sha256),
    )
