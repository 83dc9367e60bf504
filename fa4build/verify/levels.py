"""`fa4build verify` without the printing: which levels of proof a selection of compiled kernels passes.

Static proof reads the binary (`verify.static`), simulated proof runs its PTX on every acceptance case
(`verify.simulated`), proof from silicon is a record made on a GPU machine (device/prove_forward.py) that is
checked against the cubins and kept. What is passed is written as evidence for the cubin's bytes (`evidence`), which
`wheel` puts into the manifest; what fails leaves none.
"""

import fnmatch
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fa4build.cases.of_variant import has_cases
from fa4build.errors import Fa4BuildError, FileError, SimulationError
from fa4build.families.interface import Family, OpRecipe
from fa4build.families.registry import DEFAULT as OWN_FAMILY
from fa4build.families.registry import family_named
from fa4build.files import write_atomically
from fa4build.matrix.arch import arch_named
from fa4build.matrix.axes import Variant
from fa4build.matrix.tuning import has_tuning, tuning_for
from fa4build.matrix.variants import (
    Selection,
    default_variants,
    expand_matrix,
    kernel_written,
    parse_variant,
    written_variants,
)
from fa4build.pipeline import find_cached, require_cached
from fa4build.store.cache import Cache
from fa4build.store.entries import CacheEntry
from fa4build.store.evidence import (
    COMMITTED_SCHEMA,
    SIMULATED_NAME,
    known_records,
    outranks,
    read_record,
    read_simulated,
    record_path,
    silicon_records,
    simulated_records,
    subject_of,
    write_record,
    write_simulated,
)
from fa4build.verify.chain import companions_of
from fa4build.verify.engines import DEFAULT as DEFAULT_ENGINE
from fa4build.verify.family import KernelFiles, OperatorRequest, operator_request, operators_of, prove_operator
from fa4build.verify.identity import PtxForms
from fa4build.verify.pool import End, Task, run_tasks
from fa4build.verify.runs import Link
from fa4build.verify.simulated import Proof, Request, covers, covers_kernel, prove, request_for
from fa4build.verify.static import (
    BASELINE_DIR,
    Baseline,
    StaticFigures,
    baseline_changes,
    baseline_path,
    broken_limits,
    compare,
    measure,
    read_baseline,
    updated_baseline,
    write_baseline,
)

SIMULATION_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One level of proof of one variant.

    Attributes:
        level: `static` or `simulated`.
        status: `passed`; `known` (passed before, nothing it depends on has changed); `failed`; `unproven` (nobody has
            written down what it must compute: no failure, and no evidence either).
        summary: what goes into the evidence. details: what else is worth showing.
        failures: sentences, one for each thing that is wrong. notes: what is worth knowing and wrong with nothing.
    """

    name: str
    level: str
    status: str
    seconds: float
    summary: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Progress: a check has ended (`check`), or a running one says something (`message`, "" = it has started)."""

    name: str
    check: Check | None
    message: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """All checks, in the order of the matrix, level by level. `baseline_changes`: what --update-baseline wrote."""

    checks: tuple[Check, ...]
    digests: Mapping[str, str]
    seconds: float
    baseline_changes: tuple[str, ...] = ()

    def count(self, level: str, status: str) -> int:
        """How many checks of a level ended so."""
        return sum(check.level == level and check.status == status for check in self.checks)

    @property
    def exit_code(self) -> int:
        """10 when anything failed, or nothing at all was proven."""
        statuses = {check.status for check in self.checks}
        return SimulationError.exit_code if "failed" in statuses or statuses == {"unproven"} else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to verify.

    Attributes:
        static, simulate: which levels.
        seeds: of the adversarial schedules.
        fresh: simulate also what has passed before.
        nvdisasm: NVIDIA's disassembler, for the mix of machine instructions; None = leave that out.
        update_baseline: make the figures measured now the baseline.
        evidence_dirs: where committed proofs lie; what they cover is not simulated again.
        engine: of the simulator, `native` or `python`. What one has proven the other proves anew.
    """

    static: bool = True
    simulate: bool = True
    jobs: int = 1
    seeds: tuple[int, ...] = (1,)
    fresh: bool = False
    timeout_s: float = SIMULATION_TIMEOUT_S
    nvdisasm: Path | None = None
    update_baseline: bool = False
    baseline_dir: Path = BASELINE_DIR
    evidence_dirs: tuple[Path, ...] = ()
    engine: str = DEFAULT_ENGINE


Tell = Callable[[Event], None]


# --- what is verified -------------------------------------------------------------------------------------------------


def built_variants(arches: Sequence[str], globs: Sequence[str]) -> tuple[Variant, ...]:
    """Variants of the default matrix that any glob matches (none given: all), and written ones named in full, in order.

    Unlike a build, a glob here may also match variants that nobody has written: only what exists can be verified.

    Raises: NothingSelectedError or VariantError when a glob matches no written variant.
    """
    written = expand_matrix(Selection(arches=tuple(arches)))
    for glob in globs:
        if not any(fnmatch.fnmatchcase(variant.id, glob) for variant in written):
            expand_matrix(Selection(arches=tuple(arches), globs=(glob,)))  # knows best why there is none
    chosen = {v for v in written if not globs or any(fnmatch.fnmatchcase(v.id, glob) for glob in globs)}
    return tuple(v for v in written_variants() if v in chosen or v.id in globs)


def family_kernels(family: Family, arches: Sequence[str], globs: Sequence[str]) -> tuple[Any, ...]:
    """The default kernels of a family that any glob matches (none given: all), and those that globs name in full or
    match alone.

    Raises: NothingSelectedError, VariantError.
    """
    named = family.expand(Selection(arches=tuple(arches), globs=tuple(globs)))
    default = {kernel.id for kernel in family.expand(Selection(arches=tuple(arches)))}
    chosen = tuple(kernel for kernel in named if kernel.id in default or kernel.id in globs)
    return chosen or named


def verify(
    variants: Iterable[Any], cache: Cache, options: Options, tell: Tell | None = None, *, family: Family | None = None
) -> VerifyReport:
    """Verify cached variants, and keep what they pass as evidence.

    Args:
        family: the one that they belong to; default: our own. Kernels of others are proven by their operators.
    Raises: NotCachedError naming variants that are not compiled. A kernel that fails is no error: see the report.
    """
    started = time.monotonic()
    variants = tuple(variants)
    family = family or family_named()
    entries = require_cached(find_cached(variants, cache, family=family))
    forms = PtxForms(cache.root / "forms")
    run = _Run(cache=cache, options=options, tell=tell or (lambda event: None), total=0, family=family, form_of=forms)
    run.total = len(entries) * (options.static + options.simulate)
    changes = run.static(variants, entries) if options.static else ()
    if options.simulate:
        run.simulate(variants, entries) if run.is_own else run.simulate_operators(variants, entries)
    order = {variant.id: number for number, variant in enumerate(variants)}
    return VerifyReport(
        checks=tuple(sorted(run.checks, key=lambda check: (check.level != "static", order[check.name]))),
        digests={entry.name: entry.objects["cubin"].sha256 for entry in entries},
        seconds=time.monotonic() - started,
        baseline_changes=changes,
    )


@dataclass(slots=True, kw_only=True)
class _Run:
    """A verification under way: what has ended so far, and whom to tell."""

    cache: Cache
    options: Options
    tell: Tell
    total: int
    family: Family
    form_of: PtxForms
    checks: list[Check] = field(default_factory=list)

    @property
    def is_own(self) -> bool:
        """Whether these are kernels of this project, which have tuning rows and cases of their own."""
        return self.family.name == OWN_FAMILY

    def static(self, variants: Sequence[Any], entries: Sequence[CacheEntry]) -> tuple[str, ...]:
        """Check every binary; returns what changed in the baselines."""
        figures: dict[str, StaticFigures] = {}
        broken: dict[str, tuple[str, ...]] = {}
        seconds: dict[str, float] = {}
        for variant, entry in zip(variants, entries, strict=True):
            started = time.monotonic()
            try:
                figures[variant.id] = _measure(entry, self.cache, self.options.nvdisasm)
                tuning = tuning_for(variant) if self.is_own and has_tuning(variant) else None
                broken[variant.id] = broken_limits(
                    figures[variant.id], arch_named(variant.arch), tuning, may_spill=self.family.may_spill
                )
            except Fa4BuildError as error:
                broken[variant.id] = (str(error),)
            seconds[variant.id] = time.monotonic() - started
        changes = self._update_baselines(variants, figures, broken) if self.options.update_baseline else ()
        baselines: dict[str, Baseline] = {}
        for variant, entry in zip(variants, entries, strict=True):
            if variant.arch not in baselines:
                baselines[variant.arch] = read_baseline(self._baseline_path(variant.arch))
            measured, row = figures.get(variant.id), baselines[variant.arch].get(variant.id)
            check = _static_check(variant.id, measured, row, broken[variant.id], seconds[variant.id])
            self._note(check, entry)
        return changes

    def _update_baselines(
        self,
        variants: Sequence[Variant],
        figures: Mapping[str, StaticFigures],
        broken: Mapping[str, tuple[str, ...]],
    ) -> tuple[str, ...]:
        """Write the baseline of every target that occurs; kernels that break a limit keep their old row."""
        lines: list[str] = []
        for arch in sorted({variant.arch for variant in variants}):
            path = self._baseline_path(arch)
            old = read_baseline(path)
            good = {v.id: figures[v.id] for v in variants if v.arch == arch and not broken[v.id]}
            new = updated_baseline(old, good, known=self._known(arch))
            if new != old:
                write_baseline(path, new)
                lines += baseline_changes(old, new)
        return tuple(lines)

    def _baseline_path(self, arch: str) -> Path:
        """Each family has figures of its own; ours lie at the top."""
        directory = self.options.baseline_dir
        return baseline_path(arch, directory if self.is_own else directory / self.family.name)

    def _known(self, arch: str) -> Iterable[str]:
        known = written_variants() if self.is_own else self.family.expand(Selection(arches=(arch,), globs=("*",)))
        return (variant.id for variant in known)

    def simulate_operators(self, kernels: Sequence[Any], entries: Sequence[CacheEntry]) -> None:
        """Prove the operators of another family, each in a process; a kernel has what its operator has."""
        entry_of = {kernel.id: entry for kernel, entry in zip(kernels, entries, strict=True)}
        operators = operators_of(self.family.op_recipes(kernels), entry_of)
        proven_by: dict[str, list[str]] = {}
        for name in entry_of:
            cases = self.family.cases(operators[name]) if name in operators else ()
            if cases:
                proven_by.setdefault(operators[name].id, []).append(name)
            else:
                self._note(_unproven(name, self._why_unproven(name, operators)), entry_of[name])
        tasks = []
        for names in proven_by.values():
            request = self._operator_request(operators[names[0]], entry_of)
            known = [read_record(self.cache.root, "simulated", subject_of(entry_of[n])) for n in names]
            if not self.options.fresh and all(
                record is not None and covers_kernel(record, request) for record in known
            ):
                for name, record in zip(names, known, strict=True):
                    self._note(
                        Check(name=name, level="simulated", status="known", seconds=0.0, summary=record or {}),
                        entry_of[name],
                    )
            else:
                tasks.append(Task(name=request.recipe.id, function=prove_operator, argument=request))

        def end(end: End) -> None:
            for name in proven_by[end.name]:
                self._note(replace(_simulated_check(end), name=name), entry_of[name])

        self._run(tasks, end)

    def _why_unproven(self, name: str, operators: Mapping[str, OpRecipe]) -> str:
        if name in operators:
            return f"there are no acceptance cases for {operators[name].op} of {self.family.name} yet"
        return "no operator of which every kernel is selected calls it"

    def _operator_request(self, recipe: OpRecipe, entry_of: Mapping[str, CacheEntry]) -> OperatorRequest:
        kernels = {step.kernel: self._files(entry_of[step.kernel]) for step in recipe.steps}
        return operator_request(recipe, kernels, self.family.cases(recipe), self.options.seeds, self.options.engine)

    def _files(self, entry: CacheEntry) -> KernelFiles:
        texts = {name: self.cache.read(entry, name).decode() for name in ("ptx", "plan")}
        return KernelFiles(registers=entry.facts["registers"], **texts)

    def simulate(self, variants: Sequence[Variant], entries: Sequence[CacheEntry]) -> None:
        """Prove every variant in a process of its own, but those whose proof still holds.

        Kernels of equal PTX (most backwards of sm100a and sm103a) are simulated once: the second has what the first
        has passed, or runs its chain alone where its companions differ.
        """
        known = {} if self.options.fresh else self._known_proofs()
        requests: dict[str, Request] = {}
        entry_of: dict[str, CacheEntry] = {}
        waiting: list[str] = []
        before: dict[str, Check] = {}  # by variant: twins have chains of their own
        proven: dict[str, Check] = {}  # by what twins share
        for variant, entry in zip(variants, entries, strict=True):
            entry_of[variant.id] = entry
            if not has_cases(variant):
                why = f"there are no acceptance cases for {variant.op}, {variant.layout}, {variant.dtype} yet"
                self._note(_unproven(variant.id, why), entry)
                continue
            request = requests[variant.id] = self._request(variant, entry)
            summary = _best_known(request, known)
            if summary is not None:
                check = Check(name="", level="simulated", status="known", seconds=0.0, summary=summary)
                before[variant.id] = proven[request.sha256] = check
            elif request.sha256 not in {requests[name].sha256 for name in waiting}:
                waiting.append(variant.id)

        def end(end: End) -> None:
            check = _simulated_check(end)
            self._note(check, entry_of[end.name])
            proven[requests[end.name].sha256] = check

        first = [name for name in waiting if requests[name].sha256 not in proven]
        first.sort(key=lambda name: -len(requests[name].ptx))  # the longest kernels first, so that none is left alone
        self._run([Task(name=name, function=prove, argument=requests[name]) for name in first], end)
        rest = [(name, request) for name, request in requests.items() if name not in first]
        again = [(request, before.get(name) or proven[request.sha256]) for name, request in rest]
        self._run(list(self._left(again, entry_of)), end)

    def _known_proofs(self) -> dict[str, list[Mapping[str, Any]]]:
        """What has been proven before, here or in the checkout, by the digest of the proof."""
        committed = simulated_records(self.options.evidence_dirs)
        found: dict[str, list[Mapping[str, Any]]] = {}
        for summary in (*committed.values(), *known_records(self.cache.root, "simulated").values()):
            if "proof_sha256" in summary:
                found.setdefault(summary["proof_sha256"], []).append(summary)
        return found

    def _left(self, requests: Sequence[tuple[Request, Check]], entry_of: Mapping[str, CacheEntry]) -> Iterator[Task]:
        """Tasks for what an equal kernel, whose check is given, has not proven; what it has, or failed at, is noted."""
        for request, check in requests:
            name = request.variant_id
            summary = check.summary
            if check.status == "failed" or covers(summary, request):
                self._note(replace(check, name=name), entry_of[name])
            elif covers_kernel(summary, request):
                yield Task(name=name, function=prove, argument=replace(request, proven=summary))
            else:
                yield Task(name=name, function=prove, argument=request)

    def _run(self, tasks: Sequence[Task], on_end: Callable[[End], None]) -> None:
        run_tasks(
            tasks,
            jobs=self.options.jobs,
            timeout_s=self.options.timeout_s,
            on_message=lambda name, message: self._say(name, None, message),
            on_end=on_end,
        )

    def _request(self, variant: Variant, entry: CacheEntry) -> Request:
        files = self._files(entry)
        return request_for(
            variant,
            ptx=files.ptx,
            plan=files.plan,
            registers=files.registers,
            seeds=self.options.seeds,
            chain=self._chain(variant),
            form_of=self.form_of,
            engine=self.options.engine,
        )

    def _chain(self, variant: Variant) -> tuple[Link, ...]:
        """The kernels that make a whole gradient with this one; none where one of them is not compiled."""
        companions = [other for other in companions_of(variant) if kernel_written(other)]
        found = [entry for _, entry in find_cached(companions, self.cache) if entry is not None]
        if not found or len(found) < len(companions_of(variant)):
            return ()
        files = [(other.op, self._files(entry)) for other, entry in zip(companions, found, strict=True)]
        return tuple(Link(op=op, ptx=f.ptx, plan=f.plan, registers=f.registers) for op, f in files)

    def _note(self, check: Check, entry: CacheEntry) -> None:
        """Keep a finished check, write or withdraw its evidence, and tell."""
        self.checks.append(check)
        subject = subject_of(entry)
        before = read_record(self.cache.root, check.level, subject) if check.status in ("passed", "known") else None
        if check.status in ("passed", "known") and before != check.summary and not outranks(before, check.summary):
            write_record(self.cache.root, check.level, subject, check.summary)
        elif check.status == "failed":
            record_path(self.cache.root, check.level, subject.cubin_sha256).unlink(missing_ok=True)
        self._say(check.name, check, "")

    def _say(self, name: str, check: Check | None, message: str) -> None:
        self.tell(Event(name=name, check=check, message=message, done=len(self.checks), total=self.total))


def _best_known(request: Request, known: Mapping[str, Sequence[Mapping[str, Any]]]) -> Mapping[str, Any] | None:
    """Of the proofs of a kernel the one that shows most: kernels of one digest may stand in different chains."""
    found = known.get(request.sha256, ())
    return max(found, key=lambda summary: (covers(summary, request), covers_kernel(summary, request)), default=None)


def _measure(entry: CacheEntry, cache: Cache, nvdisasm: Path | None) -> StaticFigures:
    text = {name: cache.read(entry, name).decode() for name in ("ptx", "plan", "log")}
    return measure(cache.read(entry, "cubin"), text["ptx"], text["plan"], text["log"], nvdisasm=nvdisasm)


def _static_check(
    name: str,
    figures: StaticFigures | None,
    row: Mapping[str, int] | None,
    broken: tuple[str, ...],
    seconds: float,
) -> Check:
    """Limits and baseline of one variant as a check."""
    if figures is None:
        return Check(name=name, level="static", status="failed", seconds=seconds, failures=broken)
    differences = () if row is None else compare(figures, row)
    worse = [f"worse than the baseline: {difference}" for difference in differences if difference.is_worse]
    if worse:
        worse.append("If that is meant: fa4build verify --static --update-baseline, and commit the change.")
    within = [f"{d.figure} {d.baseline} -> {d.now}" for d in differences if not d.is_worse]
    notes = [f"unlike the baseline, within tolerance: {', '.join(within)}"] if within else []
    if row is None:
        notes.append("no baseline yet: fa4build verify --static --update-baseline writes one")
    failures = (*broken, *worse)
    return Check(
        name=name,
        level="static",
        status="failed" if failures else "passed",
        seconds=seconds,
        summary=figures.as_dict(),
        details={} if figures.sass is None else {"sass": dict(figures.sass)},
        failures=failures,
        notes=tuple(notes),
    )


def _unproven(name: str, why: str) -> Check:
    return Check(name=name, level="simulated", status="unproven", seconds=0.0, notes=(f"not simulated: {why}",))


def _simulated_check(end: End) -> Check:
    """What a proving process came to, as a check."""
    if end.error is not None:
        return Check(name=end.name, level="simulated", status="failed", seconds=end.seconds, failures=(str(end.error),))
    proof: Proof = end.result
    return Check(
        name=end.name,
        level="simulated",
        status="failed" if proof.failures else "passed",
        seconds=end.seconds,
        summary=proof.summary,
        details={"runs": [dict(run) for run in proof.runs]},
        failures=proof.failures,
        notes=tuple(sorted({note for run in proof.runs for note in run["notes"]})),
    )


def keep_simulated(report: VerifyReport, evidence_dir: Path) -> tuple[Path, ...]:
    """Add what has passed in the simulator to `<evidence_dir>/<arch>/simulated.json`; returns the files written.

    What failed is taken out, and so is what no longer belongs to the matrix; other kernels keep their lines.
    """
    written = {variant.id: variant.arch for variant in written_variants()}
    checks = [check for check in report.checks if check.level == "simulated" and check.name in written]
    paths = []
    for arch in sorted({written[check.name] for check in checks}):
        path = evidence_dir / arch / SIMULATED_NAME
        kept = {name: row for name, row in read_simulated(path).items() if name in written}
        for check in checks:
            if written[check.name] != arch or check.status == "unproven":
                continue
            sha256, before = kept.pop(check.name, ("", {}))
            if check.status != "failed":
                is_better = sha256 == report.digests[check.name] and outranks(before, check.summary)
                kept[check.name] = (report.digests[check.name], before if is_better else check.summary)
        write_simulated(path, kept)
        paths.append(path)
    return tuple(paths)


# --- records from GPUs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledRecord:
    """A record from a GPU that was accepted: where it lies now, what it proves, and what it says nothing about."""

    path: Path
    arch: str
    device: str
    proven: tuple[str, ...]
    missing: tuple[str, ...]


def install_record(record: Path, cache: Cache, evidence_dir: Path) -> InstalledRecord:
    """Check a record from a GPU against the cached cubins, and keep it as `<evidence_dir>/<arch>/<device>-<date>.json`.

    All of it must hold: every variant in it is compiled here to the very cubin that ran there, and passed there.

    Raises: Fa4BuildError when the file is no record; NotCachedError when a variant of it is not compiled;
        SimulationError naming the variants that failed there or have another cubin here. Nothing is kept then.
    """
    data, run = _read_run(record)
    rows = {row["id"]: row for row in run["variants"]}
    variants = [parse_variant(name) for name in sorted(rows)]
    if not variants:
        raise Fa4BuildError(f"{record}: the record holds no variant; nothing ran. Record again.")
    arch = arch_named(run["capability"])
    entries = require_cached(find_cached(variants, cache))
    digests = {entry.name: entry.objects["cubin"].sha256 for entry in entries}
    wrong = [f"{name}: failed on {run['device']}: {row['failures']}" for name, row in rows.items() if not row["passed"]]
    wrong += [
        f"{name}: ran as cubin {row['cubin_sha256'][:16]}, here it is {digests[name][:16]}; build the wheels from this "
        "cache and record again"
        for name, row in rows.items()
        if row["cubin_sha256"] != digests[name]
    ]
    if wrong:
        raise SimulationError(f"{record}: not kept.\n  " + "\n  ".join(wrong))
    device = "-".join(run["device"].lower().split())
    path = evidence_dir / arch.name / f"{device}-{run['date'].replace(':', '').replace('-', '')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    missing = tuple(v.id for v in default_variants() if v.arch == arch.name and v.id not in rows)
    return InstalledRecord(path=path, arch=arch.name, device=run["device"], proven=tuple(sorted(rows)), missing=missing)


def _read_run(record: Path) -> tuple[bytes, dict[str, Any]]:
    """Bytes and contents of a record; refused is what `evidence.silicon_records` would refuse later."""
    data = record.read_bytes()
    try:
        run = json.loads(data)
    except ValueError as error:
        raise FileError(
            f"{record}: is not JSON ({error}). Give a record that a script of --device-scripts wrote."
        ) from None
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / record.name
        copy.with_suffix(".json").write_bytes(data)
        silicon_records([Path(directory)])
    if run["schema"] != COMMITTED_SCHEMA or "capability" not in run or not all("id" in row for row in run["variants"]):
        raise Fa4BuildError(f"{record}: not a device record of schema {COMMITTED_SCHEMA}. Record again.")
    return data, run
