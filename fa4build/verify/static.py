"""What can be said of a compiled kernel without running it: figures from cubin, PTX and plan, and what they must be.

Two questions. Is it what was asked for: right target, no spills, no local memory, register budgets that fit, shared and
tensor memory within the target's, parameters as the plan packs them? And is it as lean as it was: no figure worse than
the stored baseline (fa4build/verify/baselines/<arch>.json)? Instruction counts are counts in the text, not of
execution: a tripwire for a change nobody meant, not a model of speed.
"""

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fa4build.compiling.cubin import CubinFacts, read_cubin, spills_from_log
from fa4build.errors import Fa4BuildError, SimulationError
from fa4build.files import write_atomically
from fa4build.matrix.arch import Arch
from fa4build.matrix.tuning import AnyTuning
from fa4build.plan import LaunchPlan, plan_from_json
from fa4build.plan.validate import validate_plan

BASELINE_DIR = Path(__file__).parent / "baselines"
BASELINE_SCHEMA = 1

# First match decides. The classes follow the units that bound attention, so that targets can be compared: matrix,
# exponential, FMA pipe, the rest of the arithmetic, the memories, and what orders them.
_CLASSES: tuple[tuple[str, str], ...] = (
    ("mma", r"(wgmma\.mma_async|tcgen05\.mma|mma\.sync)\b"),
    (
        "fence",
        r"(fence|membar|wgmma\.(fence|commit_group|wait_group)|tcgen05\.(fence|wait)|cp\.async\.(bulk\.)?(commit|wait)_group)\b",
    ),
    ("tma", r"cp\.(reduce\.)?async\.bulk\."),
    ("async_copy", r"cp\.async\."),
    ("tmem_load", r"tcgen05\.ld\b"),
    ("tmem_store", r"tcgen05\.st\b"),
    ("mbarrier", r"mbarrier\.|tcgen05\.commit"),
    ("barrier", r"(bar|barrier)\."),
    ("mufu", r"(ex2|lg2|rcp|rsqrt|sqrt|tanh|sin|cos)\.approx"),
    ("fma", r"(fma|mul|add|sub)\.[\w.]*f(16|32|64|16x2|32x2)\b"),
    ("shared_load", r"(ld\.shared|ldmatrix)"),
    ("shared_store", r"(st\.shared|stmatrix)"),
    ("global", r"(ld|st|red|atom)\.[\w.]*(global|gpu)"),
    ("branch", r"(bra|ret|exit|brx|call)\b"),
    ("alu", r""),
)
CLASSES = tuple(name for name, _ in _CLASSES)
_CLASSIFIER = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _CLASSES))
_STATEMENT = re.compile(r"^(?:[\w$%]+\s*:\s*)*(?:@!?\s*[\w$%]+\s+)?(?P<opcode>[a-z][a-z0-9_]*(?:\.[\w:]+)*)(?:\s|$)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

SMALL_COUNT = 8
"""Counts may grow by this many instructions before the relative tolerance matters: hoisting one address is no event."""

TOLERANCES = {
    "registers": 0.0,
    "spill_bytes": 0.0,
    "local_bytes": 0.0,
    "shared_bytes": 0.0,
    "tmem_columns": 0.0,
    "code_bytes": 0.02,
    **{f"instructions.{name}": 0.02 for name in CLASSES},
    "instructions.mma": 0.0,
}
"""How much worse (relative) a figure may be than the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticFigures:
    """One compiled kernel in numbers.

    Attributes:
        registers: of a thread at launch. budgets: what setmaxnreg asks for later, ascending; () = no role changes it.
        shared_bytes: of a block, static and dynamic. tmem_columns: allocated, 0 without tensor memory.
        code_bytes: machine code. instructions: PTX statements by class (CLASSES).
        sass: machine instructions by opcode, None where no disassembler was given.
    """

    target: str
    threads: int
    registers: int
    budgets: tuple[int, ...]
    spill_bytes: int
    local_bytes: int
    shared_bytes: int
    tmem_columns: int
    code_bytes: int
    instructions: Mapping[str, int]
    sass: Mapping[str, int] | None = None

    def as_dict(self) -> dict[str, object]:
        """JSON form, without the machine code's mix: evidence must not depend on an optional tool."""
        names = (name for name in self.__dataclass_fields__ if name not in ("instructions", "sass"))
        document = {name: getattr(self, name) for name in names}
        return {**document, "budgets": list(self.budgets), "instructions": dict(self.instructions)}

    def flat(self) -> dict[str, int]:
        """The figures that have a tolerance, by name: `registers`, `instructions.mma`."""
        own = {name: getattr(self, name) for name in TOLERANCES if "." not in name}
        return own | {f"instructions.{name}": count for name, count in self.instructions.items()}


# --- reading ----------------------------------------------------------------------------------------------------------


def measure(elf: bytes, ptx: str, plan_text: str, log: str, *, nvdisasm: Path | None = None) -> StaticFigures:
    """Read everything there is to read, and check that the plan is this kernel's.

    Raises: CompileError for a damaged cubin, LaunchPlanError when plan, PTX and cubin disagree; SimulationError when
        tensor memory is allocated in a size that the text does not show.
    """
    plan = plan_from_json(plan_text)
    validate_plan(plan, ptx, elf)
    facts = read_cubin(elf)
    opcodes = tuple(_opcodes(ptx))
    return StaticFigures(
        target=facts.target,
        threads=max(launch.block[0] * launch.block[1] * launch.block[2] for launch in plan.launches),
        registers=max(kernel.registers for kernel in facts.kernels),
        budgets=tuple(sorted({int(count) for count in re.findall(r"setmaxnreg\.[\w.]+\s+(\d+)", ptx)})),
        spill_bytes=sum(spills_from_log(log).values()),
        local_bytes=max(kernel.local_bytes for kernel in facts.kernels),
        shared_bytes=_shared_bytes(facts, plan),
        tmem_columns=tmem_columns(ptx),
        code_bytes=_code_bytes(elf),
        instructions=_counts_by_class(opcodes),
        sass=None if nvdisasm is None else _sass_mix(elf, nvdisasm),
    )


def _opcodes(ptx: str) -> Iterable[str]:
    """Opcode of every statement, without predicates, labels and operands."""
    body = _COMMENT.sub("", ptx)
    for statement in re.split(r"[;{}]", body):
        match = _STATEMENT.match(statement.strip())
        if match is not None:
            yield match["opcode"]


def _counts_by_class(opcodes: Iterable[str]) -> dict[str, int]:
    counts = dict.fromkeys(CLASSES, 0)
    for opcode in opcodes:
        counts[_CLASSIFIER.match(opcode).lastgroup or "alu"] += 1
    return counts


def tmem_columns(ptx: str) -> int:
    """Tensor memory columns that all `tcgen05.alloc` of an entry ask for together; of several entries, the most.

    Raises: SimulationError when a size is neither a literal nor a register that its entry sets once, to a literal.
    """
    return max(_entry_tmem_columns(entry) for entry in ptx.split(".entry"))


def _entry_tmem_columns(entry: str) -> int:
    total = 0
    for operand in re.findall(r"tcgen05\.alloc[\w.:]*\s+\[[^\]]*\],\s*([%\w]+)", entry):
        literal = operand
        if operand.startswith("%"):
            values = re.findall(rf"mov\.[bus]32\s+{re.escape(operand)},\s*([^;\s]+);", entry)
            literal = values[0] if len(values) == 1 else operand
        if not literal.isdigit():
            raise SimulationError(f"tcgen05.alloc of {operand} columns: the number is not a literal; write it as one.")
        total += int(literal)
    return total


def _shared_bytes(facts: CubinFacts, plan: LaunchPlan) -> int:
    static = {kernel.symbol: kernel.shared_bytes for kernel in facts.kernels}
    return max(launch.smem + static[launch.kernel] for launch in plan.launches)


def _code_bytes(elf: bytes) -> int:
    """Size of all `.text.` sections: one for each entry."""
    import io

    from elftools.elf.elffile import ELFFile

    sections = ELFFile(io.BytesIO(elf)).iter_sections()
    return sum(section["sh_size"] for section in sections if section.name.startswith(".text."))


def _sass_mix(elf: bytes, nvdisasm: Path) -> dict[str, int]:
    """Machine instructions by opcode (`HGMMA`, `MUFU`), as NVIDIA's disassembler prints them.

    Raises: Fa4BuildError when the disassembler fails.
    """
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(elf)
        file.flush()
        command = [str(nvdisasm), "--print-code", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise Fa4BuildError(f"{nvdisasm} failed ({done.returncode}): {done.stderr.strip()[:500]}")
    counts: dict[str, int] = {}
    for opcode in re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", done.stdout, re.MULTILINE):
        counts[opcode] = counts.get(opcode, 0) + 1
    return dict(sorted(counts.items()))


# --- what must hold ---------------------------------------------------------------------------------------------------


def broken_limits(
    figures: StaticFigures, arch: Arch, tuning: AnyTuning | None, *, may_spill: bool = False
) -> tuple[str, ...]:
    """Absolute rules a kernel breaks, one sentence each; () when it keeps them all.

    Args:
        tuning: register budgets of the roles; None for kernels without roles.
        may_spill: registers and local memory may lie in memory: kernels of others are as their authors wrote them.
    """
    found = []
    if figures.target != arch.target:
        found.append(f"cubin is for {figures.target}; {arch.name} needs {arch.target}")
    if figures.spill_bytes and not may_spill:
        found.append(f"{figures.spill_bytes} bytes of registers spill; 0 are allowed")
    if figures.local_bytes and not may_spill:
        found.append(f"{figures.local_bytes} bytes of local memory a thread; 0 are allowed")
    if figures.shared_bytes > arch.smem_bytes:
        found.append(f"{figures.shared_bytes} bytes of shared memory; {arch.name} has {arch.smem_bytes}")
    if figures.tmem_columns > arch.tmem_columns:
        found.append(f"{figures.tmem_columns} columns of tensor memory; {arch.name} has {arch.tmem_columns}")
    if figures.registers * figures.threads > arch.register_file:
        found.append(
            f"{figures.registers} registers x {figures.threads} threads; {arch.name} has {arch.register_file} registers"
        )
    return (*found, *(_broken_budgets(figures, tuning) if tuning is not None else ()))


def _broken_budgets(figures: StaticFigures, tuning: AnyTuning) -> Iterable[str]:
    """setmaxnreg only moves registers: the roles share what the block had at launch, and ask for the tuning's."""
    roles = {tuning.consumer_registers, tuning.correction_registers, tuning.producer_registers} - {0}
    asked = set(figures.budgets)
    if unknown := asked - roles:
        yield f"setmaxnreg asks for {sorted(unknown)} registers; the roles' budgets are {sorted(roles)}"
    if asked and (silent := roles - asked - {figures.registers}):
        yield f"no setmaxnreg for the budgets {sorted(silent)}; the kernel has {sorted(asked)}"
    if asked and tuning.registers > figures.registers * figures.threads:
        yield (
            f"the roles need {tuning.registers} registers; the block is launched with {figures.registers} x "
            f"{figures.threads} threads = {figures.registers * figures.threads}, so setmaxnreg would wait for ever"
        )


# --- baseline ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One figure that is not what the baseline says."""

    figure: str
    baseline: int
    now: int

    @property
    def is_worse(self) -> bool:
        """Beyond the tolerance; less is always better."""
        return self.now > self.baseline + self.allowance

    @property
    def allowance(self) -> int:
        """By how much it may grow: the relative tolerance, for counts with one at least SMALL_COUNT."""
        tolerance = TOLERANCES[self.figure]
        least = SMALL_COUNT if tolerance and self.figure.startswith("instructions.") else 0
        return max(least, int(tolerance * self.baseline))

    def __str__(self) -> str:
        return f"{self.figure} {self.baseline} -> {self.now} (up to +{self.allowance} is accepted)"


Baseline = Mapping[str, Mapping[str, int]]
"""Figures by variant id."""


def baseline_path(arch_name: str, directory: Path = BASELINE_DIR) -> Path:
    """Where the baseline of a target lies."""
    return directory / f"{arch_name}.json"


def read_baseline(path: Path) -> Baseline:
    """The stored baseline; empty when there is none.

    Raises: Fa4BuildError when the file is none, or of another schema.
    """
    try:
        document = json.loads(path.read_bytes())
        if document["schema"] != BASELINE_SCHEMA:
            raise ValueError(f"schema {document['schema']}, this fa4build reads {BASELINE_SCHEMA}")
        return {name: {str(k): int(v) for k, v in row.items()} for name, row in document["variants"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Fa4BuildError(
            f"{path}: not a baseline ({error}). Restore it, or write it anew with fa4build verify --update-baseline."
        ) from error


def compare(figures: StaticFigures, row: Mapping[str, int]) -> tuple[Difference, ...]:
    """Every figure that differs from its baseline, better or worse. A figure the baseline lacks counts as 0 there."""
    return tuple(
        Difference(figure=name, baseline=row.get(name, 0), now=now)
        for name, now in figures.flat().items()
        if now != row.get(name, 0)
    )


def updated_baseline(old: Baseline, measured: Mapping[str, StaticFigures], known: Iterable[str]) -> Baseline:
    """The baseline with the rows of measured variants replaced; zeros are left out.

    Args:
        known: ids that exist; rows of others are dropped.
    """
    known = set(known)
    kept = {name: row for name, row in old.items() if name in known}
    new = {name: {figure: n for figure, n in figures.flat().items() if n} for name, figures in measured.items()}
    return dict(sorted({**kept, **new}.items()))


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Write a baseline: one line a variant, so that a change reads well in a diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in baseline.items())
    write_atomically(path, f'{{"schema": {BASELINE_SCHEMA}, "variants": {{\n{rows}\n}}}}\n'.encode())


def baseline_changes(old: Baseline, new: Baseline) -> tuple[str, ...]:
    """What an update would change, one line a variant."""
    lines = []
    for name in sorted(set(old) | set(new)):
        before, after = old.get(name, {}), new.get(name, {})
        if not before or not after:
            lines.append(f"{name}: {'new' if after else 'removed'}")
        elif before != after:
            figures = sorted(figure for figure in {*before, *after} if before.get(figure, 0) != after.get(figure, 0))
            lines.append(f"{name}: " + ", ".join(f"{f} {before.get(f, 0)} -> {after.get(f, 0)}" for f in figures))
    return tuple(lines)
