"""Reads what the report shows into frozen values. Nothing is computed here that another part could have recorded."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa4build import __version__
from fa4build.errors import Fa4BuildError, ToolchainError
from fa4build.families.interface import Family
from fa4build.families.registry import family_named
from fa4build.matrix.axes import Variant
from fa4build.matrix.variants import refused_variants, valid_variants, variant_axes, written_variants
from fa4build.pipeline import find_cached
from fa4build.report.benchmarks import Benchmark, Comparison, read_benchmarks, read_comparisons
from fa4build.report.elsewhere import levels_elsewhere
from fa4build.report.ratios import Ratio, ratios
from fa4build.report.timelines import Timeline, read_timelines
from fa4build.shipping.pack import read_pack
from fa4build.store.cache import Cache
from fa4build.store.entries import CacheEntry
from fa4build.store.evidence import LEVELS, Committed, Evidence, committed_in, evidence_for, subject_of

STATES = ("compiled", "outdated", "implemented", "planned")
"""Of a valid variant: compiled as it would be now; compiled from other sources; has a kernel; has none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantRow:
    """A variant that has a kernel.

    Attributes:
        axes: every axis but op and arch. state: one of STATES.
        evidence: of its compiled cubin; no level for one that is not compiled.
        facts: registers, spill_bytes, shared_bytes, ... of the compile; empty without one.
        sizes: bytes of cubin, plan, ptx, log; empty without a compile.
        elsewhere: level that a committed record has for this id, where it is not compiled here; or empty.
    """

    id: str
    op: str
    arch: str
    axes: Mapping[str, Any]
    state: str
    evidence: Evidence
    facts: Mapping[str, Any]
    sizes: Mapping[str, int]
    elsewhere: str = ""

    @property
    def level(self) -> str:
        """`silicon`, `simulated`, `static`, or `none`."""
        return self.evidence.level

    @property
    def instructions(self) -> Mapping[str, int] | None:
        """PTX statements by class, from the static proof; None without it."""
        return None if self.evidence.static is None else self.evidence.static.get("instructions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much of one op on one target there is: valid combinations; of them implemented, compiled, verified at least
    to a level. elsewhere: not compiled here, with a committed record."""

    arch: str
    op: str
    valid: int
    implemented: int
    compiled: int
    static: int
    simulated: int
    silicon: int
    elsewhere: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRow:
    """A pack: bytes of its kernels and plans, and of the groups that hold them compressed."""

    name: str
    version: str
    kernels: int
    raw_bytes: int
    packed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """All that the page shows. `toolchain`: versions the compiled variants were made with, read from their entries.
    `commit`: of this fa4build, or empty. `about`: which kernels, in words."""

    version: str
    toolchain: Mapping[str, str]
    refused: int
    coverage: tuple[Coverage, ...]
    variants: tuple[VariantRow, ...]
    packs: tuple[PackRow, ...]
    benchmarks: tuple[Benchmark, ...]
    comparisons: tuple[Comparison, ...]
    timelines: tuple[Timeline, ...]
    commit: str = ""
    about: str = "every implemented kernel"

    @property
    def ratios(self) -> tuple[Ratio, ...]:
        """Ours against the best of the others, slowest first."""
        return ratios(self.benchmarks)

    def compiled(self) -> tuple[VariantRow, ...]:
        """Variants with a cubin, also outdated ones."""
        return tuple(row for row in self.variants if row.sizes)

    def as_dict(self) -> dict[str, Any]:
        """JSON form; timelines by name only, their drawings are for people."""
        document = {name: getattr(self, name) for name in ("version", "commit", "about", "toolchain", "refused")}
        document["coverage"] = [dataclasses.asdict(row) for row in self.coverage]
        document["variants"] = [_row_document(row) for row in self.variants]
        document["packs"] = [dataclasses.asdict(row) for row in self.packs]
        document["benchmarks"] = [dataclasses.asdict(row) for row in self.benchmarks]
        document["comparisons"] = [dataclasses.asdict(row) for row in self.comparisons]
        document["ratios"] = [dataclasses.asdict(row) for row in self.ratios]
        document["timelines"] = [timeline.name for timeline in self.timelines]
        return document


def collect(
    cache: Cache,
    *,
    packs: Iterable[Path] = (),
    evidence_dirs: Sequence[Path] = (),
    benchmarks: Sequence[Path] = (),
    timelines: Sequence[Path] = (),
    kernels: Sequence[Any] | None = None,
    family: Family | None = None,
    tell: Callable[[str], None] = lambda _: None,
    commit: str = "",
    about: str = "every implemented kernel",
) -> ReportData:
    """Read everything.

    Args:
        kernels: those that the page is about, of `family`; default: every written variant of our own.
        packs: wheels or packs of kernels. evidence_dirs: folders of committed records.
        benchmarks: JSON files with measurements; what holds none is passed over.
        timelines: folders of drawings, besides `timing` in the cache.
        tell: gets a line before each step that takes long.
    Raises: WheelError or Fa4BuildError for a pack or record that is damaged.
    """
    tell(f"reading the cache: {cache.root}")
    entries = cache.entries()
    family = family or family_named()
    kernels_shown = written_variants() if kernels is None else kernels
    tell("reading evidence")
    committed, elsewhere = committed_in(evidence_dirs), levels_elsewhere(evidence_dirs)
    tell(f"looking up {len(kernels_shown)} kernels")
    rows = tuple(_rows(cache, entries, committed, elsewhere, kernels_shown, family))
    tell("reading packs and measurements")
    found = [row for row in map(_pack_row, sorted(packs)) if row is not None]
    return ReportData(
        version=__version__,
        commit=commit,
        about=about,
        toolchain=_toolchain_of(entries),
        refused=len(refused_variants()),
        coverage=tuple(_coverage(rows, valid_variants() if kernels is None else kernels)),
        variants=rows,
        packs=tuple(found),
        benchmarks=read_benchmarks(benchmarks),
        comparisons=read_comparisons(benchmarks),
        timelines=read_timelines([cache.root / "timing", *timelines]),
    )


def _rows(
    cache: Cache,
    entries: Sequence[CacheEntry],
    committed: Committed,
    elsewhere: Mapping[str, str],
    kernels: Sequence[Any],
    family: Family,
) -> Iterable[VariantRow]:
    """A row for every kernel, in their order."""
    try:
        current = {recipe.name: entry for recipe, entry in find_cached(kernels, cache, family=family)}
    except ToolchainError:  # no compiler here, so no keys: what is in the cache may or may not be current
        current = {}
    newest = {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.last_use)}
    for kernel in kernels:
        entry = current.get(kernel.id)
        state = "compiled" if entry is not None else "outdated" if kernel.id in newest else "implemented"
        row = _row(kernel, state, entry or newest.get(kernel.id), cache.root, committed)
        yield row if state == "compiled" else dataclasses.replace(row, elsewhere=elsewhere.get(kernel.id, ""))


def _row(kernel: Any, state: str, entry: CacheEntry | None, cache_root: Path, committed: Committed) -> VariantRow:
    evidence = Evidence()
    if entry is not None:
        evidence = evidence_for(subject_of(entry), cache_root, committed)
    return VariantRow(
        id=kernel.id,
        op=kernel.op,
        arch=kernel.arch,
        axes=variant_axes(kernel) if isinstance(kernel, Variant) else dict(kernel.axes),
        state=state,
        evidence=evidence,
        facts={} if entry is None else dict(entry.facts),
        sizes={} if entry is None else {name: stored.size for name, stored in entry.objects.items()},
    )


def _coverage(rows: Sequence[VariantRow], valid: Sequence[Any]) -> Iterable[Coverage]:
    """By op and target, in the order of `valid`. A level counts what has it or a higher one."""
    for arch, op in dict.fromkeys((variant.arch, variant.op) for variant in valid):
        own = [row for row in rows if (row.arch, row.op) == (arch, op)]
        current = [row for row in own if row.state == "compiled"]
        at_least = {level: sum(row.level in LEVELS[LEVELS.index(level) :] for row in current) for level in LEVELS}
        yield Coverage(
            arch=arch,
            op=op,
            valid=sum((variant.arch, variant.op) == (arch, op) for variant in valid),
            implemented=len(own),
            compiled=len(current),
            elsewhere=sum(bool(row.elsewhere) for row in own),
            **at_least,
        )


def _pack_row(path: Path) -> PackRow | None:
    """None for a wheel that holds no kernels: the runtime's."""
    try:
        manifest = read_pack(path).manifest
    except Fa4BuildError:
        if path.name.startswith("fa4_kernels-"):
            return None
        raise
    return PackRow(
        name=manifest.pack,
        version=manifest.version,
        kernels=len(manifest.entries),
        raw_bytes=manifest.raw_bytes,
        packed_bytes=manifest.packed_bytes,
    )


def _toolchain_of(entries: Iterable[CacheEntry]) -> dict[str, str]:
    """Versions named in cache entries: the assembler's, and those of the compiler's distributions."""
    versions: dict[str, set[str]] = {}
    for entry in entries:
        if "ptxas" in entry.facts:
            versions.setdefault("ptxas", set()).add(str(entry.facts["ptxas"]))
        for distribution in entry.inputs.get("toolchain", {}).get("distributions", ()):
            versions.setdefault(distribution["name"], set()).add(distribution["version"])
    return {name: ", ".join(sorted(found)) for name, found in sorted(versions.items())}


def _row_document(row: VariantRow) -> dict[str, Any]:
    document = {name: getattr(row, name) for name in ("id", "op", "arch", "state", "level", "elsewhere")}
    return document | {
        "axes": dict(row.axes),
        "facts": dict(row.facts),
        "sizes": dict(row.sizes),
        "evidence": row.evidence.as_dict(),
    }
