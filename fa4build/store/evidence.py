"""What a cubin has passed, and where that is written down.

Evidence belongs to the bytes of a cubin, never to a name: a record counts only for the sha256 it was made with, so an
edited kernel starts with none, and only in the form that `verify` writes: every field is checked on reading, and what
is no record is told and counts for nothing.

Three levels: `static` (facts read from the binary), `simulated` (run in the PTX simulator), `silicon` (run on a GPU
from the wheels). Static and simulated records lie in the cache directory (`evidence/<level>/<sha256>.json`). Records
from silicon are committed (`evidence/<arch>/*.json`), since few machines can repeat them, and so is what the simulator
has proven (`evidence/<arch>/simulated.json`), so that nobody has to prove the same bytes again.

A simulated record names the engine that ran and the orders (`schedules`) that it ran in; one without a name is of the
Python engine. Each engine's proofs are known by its own identity. A kernel has one record: a native one shows more, and
no Python one takes its place.
"""

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fa4build.cases.acceptance_set import acceptance_cases, acceptance_schedules
from fa4build.errors import Fa4BuildError
from fa4build.files import write_atomically
from fa4build.matrix.arch import ARCHES
from fa4build.runtime.fa4_kernels.evidence import LEVELS, RECORD_FIELD, record_digest, summary_fault
from fa4build.store.entries import CacheEntry

RECORD_SCHEMA = 2
"""Of the records in a cache. Schema 1 named no plan, PTX or cases, and counts for nothing."""

COMMITTED_SCHEMA = 1
SIMULATED_NAME = "simulated.json"
_NOT_COUNTED = "It counts for nothing; verify again."
_SHA256 = re.compile(r"[0-9a-f]{64}")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The very bytes that evidence is of: a kernel's id, and the sha256 of its cubin, launch plan and PTX."""

    kernel: str
    cubin_sha256: str
    plan_sha256: str
    ptx_sha256: str


class EvidenceWarning(UserWarning):
    """A record is there and counts for nothing."""


def subject_of(entry: CacheEntry) -> Subject:
    """The subject of a cached compile."""
    digests = {f"{name}_sha256": entry.objects[name].sha256 for name in ("cubin", "plan", "ptx")}
    return Subject(kernel=entry.name, **digests)


def record_path(cache_root: Path, level: str, cubin_sha256: str) -> Path:
    """Where the builder keeps a static or simulated record of a cubin."""
    return cache_root / "evidence" / level / f"{cubin_sha256}.json"


def write_record(cache_root: Path, level: str, subject: Subject, summary: Mapping[str, Any]) -> Path:
    """Keep what a kernel passed; replaces an older record of the same level."""
    path = record_path(cache_root, level, subject.cubin_sha256)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "schema": RECORD_SCHEMA,
        "level": level,
        "subject": asdict(subject),
        "summary": dict(summary),
        "cases": list(acceptance_cases(subject.kernel)) if level == "simulated" else [],
        "signatures": [],
        "record": record_digest(level, subject.kernel, subject.cubin_sha256, subject.plan_sha256, summary),
    }
    write_atomically(path, json.dumps(document, sort_keys=True, indent=1).encode() + b"\n")
    return path


def read_record(cache_root: Path, level: str, subject: Subject) -> Mapping[str, Any] | None:
    """The summary kept for a kernel, or None. What is no evidence counts as none, with an EvidenceWarning."""
    path = record_path(cache_root, level, subject.cubin_sha256)
    found = _read_document(path, level)
    if found is None:
        return None
    if found[0] != subject:
        warnings.warn(f"{path}: of another compile of {found[0].kernel}. {_NOT_COUNTED}", EvidenceWarning, stacklevel=2)
        return None
    return found[1]


def known_records(cache_root: Path, level: str) -> dict[str, Mapping[str, Any]]:
    """Every summary of a level that the builder keeps, by cubin sha256; what is no evidence is left out."""
    found = (_read_document(path, level) for path in sorted((cache_root / "evidence" / level).glob("*.json")))
    return {subject.cubin_sha256: summary for subject, summary in filter(None, found)}


def _read_document(path: Path, level: str) -> tuple[Subject, dict[str, Any]] | None:
    """What `write_record` wrote, every field checked; None, with a warning, for anything else."""
    try:
        document = json.loads(path.read_bytes())
        subject = Subject(**document["subject"])
        fault = _document_fault(document, level, subject, path.stem)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fault = f"{type(error).__name__}: {error}"
    if fault is None:
        return subject, document["summary"]
    warnings.warn(f"{path}: no record that `verify` wrote ({fault}). {_NOT_COUNTED}", EvidenceWarning, stacklevel=3)
    return None


def _document_fault(document: Mapping[str, Any], level: str, subject: Subject, cubin_sha256: str) -> str | None:
    """Why a document is no record of this cubin."""
    if set(document) != {"schema", "level", "subject", "summary", "cases", "signatures", "record"}:
        return f"its fields are {', '.join(sorted(document))}"
    if type(document["schema"]) is not int or (document["schema"], document["level"]) != (RECORD_SCHEMA, level):
        return f"schema {document['schema']}, level {document['level']}"
    digests = (subject.cubin_sha256, subject.plan_sha256, subject.ptx_sha256)
    if not all(isinstance(digest, str) and _SHA256.fullmatch(digest) for digest in digests):
        return "a digest in it is none"
    if subject.cubin_sha256 != cubin_sha256:
        return f"it is of cubin {subject.cubin_sha256[:16]}"
    if document["signatures"] != []:
        return "it is signed, which this fa4build cannot check"
    if fault := level_fault(level, subject.kernel, document["summary"]):
        return fault
    if level == "simulated" and document["cases"] != list(acceptance_cases(subject.kernel)):
        return "its cases are not those of the acceptance set"
    if document["record"] != record_digest(level, subject.kernel, *digests[:2], document["summary"]):
        return "its digest is of another summary"
    return None


def level_fault(level: str, kernel: str, summary: Any) -> str | None:
    """Why a summary is no evidence of this level for a kernel, or None.

    Simulated evidence must be of every acceptance case of the variant, under every schedule.
    """
    fault = summary_fault(level, summary, target_of(kernel))
    if fault is not None or level != "simulated":
        return fault
    cases = acceptance_cases(kernel)
    if not cases:  # of another family: proven by the cases of an operator
        return None if summary.get("operator") else "names no operator, and there are no acceptance cases for it"
    schedules, checked = acceptance_schedules(engine_of(summary))
    if summary["cases"] != len(set(cases)):
        return f"is of {summary['cases']} cases, the acceptance set has {len(set(cases))}"
    if (tuple(summary["schedules"]), tuple(summary["checked_schedules"])) != (schedules, checked):
        return f"is of the schedules {', '.join(summary['schedules'])}, needed are {', '.join(schedules)}"
    return None


def engine_of(summary: Mapping[str, Any]) -> str:
    """The engine of the simulator that a simulated summary is of."""
    return summary.get("engine", "python")


def outranks(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> bool:
    """Whether a simulated summary stays where another one of the same kernel would replace it."""
    return one is not None and (engine_of(one), engine_of(other)) == ("native", "python")


def target_of(kernel: str) -> str | None:
    """`sm_90a` for an id with the field `sm90a`; None if no field names a target."""
    return next((arch.target for arch in ARCHES if arch.name in kernel.split("-")), None)


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
    head = f'"schema": {COMMITTED_SCHEMA}, "level": "simulated",\n"shared": {json.dumps(shared, sort_keys=True)}'
    text = "{" + head + ',\n"kernels": {\n' + ",\n".join(lines) + "\n}}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())


def read_simulated(path: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """What `write_simulated` wrote; nothing where there is no file. Raises: Fa4BuildError for another file."""
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_bytes())
        if (record["schema"], record["level"]) != (COMMITTED_SCHEMA, "simulated"):
            raise ValueError(f"schema {record['schema']}, level {record['level']}")
        kernels = record["kernels"].items()
        return {name: (row["cubin_sha256"], {**record["shared"], **row["summary"]}) for name, row in kernels}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Fa4BuildError(
            f"{path}: not a record of simulated proofs ({error!r}). Remove it, or write it again with "
            "`fa4build verify --simulate --keep`."
        ) from error


def simulated_records(directories: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Committed summaries of simulated proofs, by cubin sha256. Rows that are no evidence are left out, and told: one
    for all of a file.

    Raises: as `read_simulated`.
    """
    paths = (path for directory in directories for path in sorted(directory.rglob(SIMULATED_NAME)))
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        faults: list[str] = []
        for kernel, (sha256, summary) in read_simulated(path).items():
            digest_fault = None if isinstance(sha256, str) and _SHA256.fullmatch(sha256) else "its digest is none"
            fault = digest_fault or level_fault("simulated", kernel, summary)
            if fault is None:
                found[sha256] = summary
            else:
                faults.append(f"{kernel}: {fault}")
        if faults:
            more = f" Nor do {len(faults) - 1} more of its records." if len(faults) > 1 else ""
            warnings.warn(f"{path}: {faults[0]}. {_NOT_COUNTED}{more}", EvidenceWarning, stacklevel=2)
    return found


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
        if run["schema"] != COMMITTED_SCHEMA:
            raise Fa4BuildError(
                f"{path}: device record of schema {run['schema']}, this fa4build reads {COMMITTED_SCHEMA}. "
                "Use the fa4build that wrote it, or record again with the scripts of fa4build verify --device-scripts."
            )
        found = [_silicon_row(run, row) for row in run["variants"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Fa4BuildError(
            f"{path}: not a device record ({error!r}). Remove it, or record again with the scripts of "
            "fa4build verify --device-scripts."
        ) from error
    return dict(row for row in found if row is not None)


def _silicon_row(run: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Cubin digest and summary of one variant of a run; None if it failed. Raises: ValueError, KeyError, TypeError."""
    kernel, sha256, target = row["id"], row["cubin_sha256"], target_of(row["id"])
    if not _SHA256.fullmatch(sha256) or type(row["passed"]) is not bool or target is None:
        raise ValueError(f"{kernel}: a digest, a target or `passed` is none")
    if run.get("capability", target) != target:
        raise ValueError(f"{kernel} on {run['capability']}, which does not run it")
    if not row["passed"]:
        return None
    summary = {name: run[name] for name in ("date", "device", "driver", "torch")}
    summary |= {"capability": target, "cases": row["cases"], "worst_ratio": row["worst_ratio"]}
    fault = summary_fault("silicon", summary, target) or ("has failures" if row.get("failures") else None)
    if fault is not None:
        raise ValueError(f"{kernel} {fault}")
    return sha256, summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a checkout knows of cubins, by sha256: from `silicon_records` and `simulated_records`."""

    silicon: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    simulated: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def committed_in(directories: Iterable[Path]) -> Committed:
    """Everything committed in these directories. Raises: Fa4BuildError for a damaged or foreign file."""
    directories = tuple(directories)
    return Committed(silicon=silicon_records(directories), simulated=simulated_records(directories))


def evidence_for(subject: Subject, cache_root: Path, committed: Committed) -> Evidence:
    """All that is known of a kernel, sealed for it. What was simulated here comes before what was committed,
    unless that is of the native engine and this is not."""
    simulated = read_record(cache_root, "simulated", subject)
    of_checkout = committed.simulated.get(subject.cubin_sha256)
    if simulated is None or outranks(of_checkout, simulated):
        simulated = of_checkout
    found = {
        "static": read_record(cache_root, "static", subject),
        "simulated": simulated,
        "silicon": committed.silicon.get(subject.cubin_sha256),
    }
    return Evidence(**{level: _sealed(level, subject, summary) for level, summary in found.items()})


def _sealed(level: str, subject: Subject, summary: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A summary with the digest that binds it to the kernel, as a manifest carries it."""
    if summary is None:
        return None
    digest = record_digest(level, subject.kernel, subject.cubin_sha256, subject.plan_sha256, summary)
    return {**summary, RECORD_FIELD: digest}
