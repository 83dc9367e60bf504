"""Which kernel answers a problem on a device: a pure function with a trace. It reads no file and no environment.

Problem, Device, packs  ->  Decision (accepted entry, or a reason for each refused one)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .abi import OUTPUT_DTYPES, SIGNATURES, TARGETS, signature_name
from .errors import NoKernelError
from .evidence import LEVELS, backed_levels, named_levels
from .expressions import evaluate
from .packs import Entry, Pack, RefusedPack, newer_than, newest_of

OWN_FAMILY = "fa4"

EVIDENCE_LEVELS = LEVELS
"""What a kernel may have passed, in rising order."""

EQUAL_AXES = ("dtype", "head_dim", "head_dim_v", "mask", "layout")
"""Axes that say what is computed, compared for equality."""

# Axes that say nothing about whether a kernel fits: how it is done, or what the entry's own fields state.
# `when` is a rule over the extents of a call; what a GQA ratio excludes, it says.
_FREE_AXES = frozenset({"op", "arch", "cta_group", "deterministic", "qhead_per_kvhead", "when", *EQUAL_AXES})
_SPELLED_FEATURES = ("split", "softcap", "sink")
_SHOWN_ENTRIES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be computed.

    `features` are further axes that must be on: `softcap`, `sink`, ... `extents` are those of a call by their names in
    the operator's signature, for kernels whose rules read them; None leaves the rules aside.
    """

    op: str = "fwd"
    layout: str = "dense"
    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str = "full"
    deterministic: bool = False
    features: frozenset[str] = frozenset()
    extents: Mapping[str, int] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        head_dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"({self.head_dim}, {self.head_dim_v})"
        extras = "".join(f", {name}" for name in sorted(self.features)) + (
            ", deterministic" if self.deterministic else ""
        )
        return f"{self.op}, {self.layout}, {self.dtype}, head_dim {head_dims}, mask {self.mask}{extras}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where it is to run."""

    name: str
    compute_capability: tuple[int, int]
    sm_count: int = 0
    smem_optin_bytes: int = 0
    l2_bytes: int = 0

    @property
    def target(self) -> str | None:
        """The cubin target this device runs, or None when no pack can have one."""
        return next((name for name, capability in TARGETS.items() if capability == self.compute_capability), None)

    def __str__(self) -> str:
        major, minor = self.compute_capability
        return f"{self.name} (compute capability {major}.{minor}, target {self.target or 'none known here'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """One entry that was looked at; no reasons means that it fits."""

    pack: str
    entry: Entry
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The outcome and how it came about. `entry` and `pack` are None when nothing fits."""

    problem: Problem
    device: Device
    entry: Entry | None
    pack: Pack | None
    trace: tuple[Considered, ...]
    refused_packs: tuple[RefusedPack, ...] = ()

    def __str__(self) -> str:
        if self.entry is None or self.pack is None:
            return _no_kernel_text(self)
        origin = f"{self.pack.manifest.pack} {self.pack.manifest.version}"
        chosen = f"{self.entry.id} from {origin} (evidence: {evidence_text(self.entry)})"
        return "\n".join((f"{self.problem} on {self.device}: {chosen}", *_trace_lines(self)))


def dispatch(
    problem: Problem,
    device: Device,
    packs: Iterable[Pack | RefusedPack],
    *,
    evidence: str | None = None,
    claims: bool = False,
    family: str | None = None,
) -> Decision:
    """Choose the kernel for a problem. Never raises for a problem without one: see `chosen`.

    Args:
        evidence: the least an entry must have passed (EVIDENCE_LEVELS); None asks for nothing.
        claims: whether a level that nothing backs is enough for `evidence`. It never counts in the order.
        family: whose kernels are taken wherever one fits; None prefers none.
    Contract: of fitting entries with one id and family that of the newest pack counts alone. Among the rest those of
        `family` come first, then the one with most evidence, then our own before another family's, then one that is not
        deterministic where that was not asked for, then one that is made for some extents (`when`) before one for all,
        then the one whose id sorts first.
    """
    packs = tuple(packs)
    usable_packs = [pack for pack in packs if not isinstance(pack, RefusedPack)]
    looked_at = [
        (pack, entry, mismatches(problem, device, entry, evidence, claims))
        for pack in usable_packs
        for entry in pack.manifest.entries
    ]
    newest = newest_of((pack, entry) for pack, entry, reasons in looked_at if not reasons)
    trace: list[Considered] = []
    fitting: list[tuple[tuple[Any, ...], Pack, Entry]] = []
    for pack, entry, mismatched in looked_at:
        newer = None if mismatched else newer_than(pack, entry.id, newest)
        reasons = (f"is of version {pack.manifest.version}, and {newer} has it too",) if newer else mismatched
        trace.append(Considered(pack=pack.manifest.pack, entry=entry, reasons=reasons))
        if not reasons:
            own = pack.manifest.family
            is_slower = bool(entry.axes.get("deterministic")) and not problem.deterministic
            preferred = (family is not None and own != family, -evidence_level(entry), own != OWN_FAMILY)
            order = (*preferred, is_slower, not entry.axes.get("when"), entry.id)
            fitting.append((order, pack, entry))
    best = min(fitting, key=lambda item: item[0], default=None)
    return Decision(
        problem=problem,
        device=device,
        entry=best[2] if best else None,
        pack=best[1] if best else None,
        trace=tuple(trace),
        refused_packs=tuple(pack for pack in packs if isinstance(pack, RefusedPack)),
    )


def chosen(decision: Decision) -> tuple[Pack, Entry]:
    """Pack and entry of a decision.

    Raises: NoKernelError with the trace when nothing fits.
    """
    if decision.pack is None or decision.entry is None:
        raise NoKernelError(_no_kernel_text(decision))
    return decision.pack, decision.entry


def steps_of(problem: Problem) -> tuple[Problem, ...]:
    """The problems that kernels answer for a call: itself, or, where keys are split, the parts and their merge.

    Dense keys are split as packed ones, and a sink joins where parts are merged.
    """
    if problem.op != "fwd" or "split" not in problem.features:
        return (problem,)
    layout = "varlen" if problem.layout == "dense" else problem.layout
    parts = replace(problem, layout=layout, features=problem.features - {"sink"}, extents=None)
    return parts, combine_problem(problem.dtype, problem.head_dim_v, has_sink="sink" in problem.features)


def combine_problem(dtype: str, head_dim_v: int, *, has_sink: bool) -> Problem:
    """Merging the parts of a forward of this dtype."""
    features = frozenset({"sink"} if has_sink else ())
    output = OUTPUT_DTYPES[dtype]
    return Problem(op="fwd_combine", dtype=output, head_dim=head_dim_v, head_dim_v=head_dim_v, features=features)


def mismatches(
    problem: Problem, device: Device, entry: Entry, evidence: str | None = None, claims: bool = False
) -> tuple[str, ...]:
    """Every reason why an entry does not fit; empty if it does."""
    reasons = []
    if TARGETS.get(entry.target) != device.compute_capability:
        reasons.append(f"runs on {_capability_text(entry.target)}")
    if entry.op != problem.op:
        reasons.append(f"op is {entry.op}")
    for axis in EQUAL_AXES:
        if entry.axes.get(axis) != getattr(problem, axis):
            reasons.append(f"{axis} is {entry.axes.get(axis)}")
    reasons += _feature_mismatches(problem, entry.axes)
    if problem.deterministic and problem.op.startswith("bwd") and not entry.axes.get("deterministic"):
        reasons.append("is not deterministic")
    rule = entry.axes.get("when")
    if problem.extents is not None and rule and not evaluate(str(rule), problem.extents):
        reasons.append(f"needs {rule}")
    if signature_of(entry) not in SIGNATURES:
        reasons.append("is called in a way this fa4-kernels does not know; upgrade fa4-kernels")
    if evidence is not None and (lack := evidence_lack(entry, evidence, claims)):
        reasons.append(lack)
    return tuple(reasons)


def signature_of(entry: Entry) -> str:
    """Which argument list an entry is called with: `fwd/dense`, and one more field for each feature that is on."""
    features = (axis for axis in entry.axes.keys() - _FREE_AXES if entry.axes[axis])
    return signature_name(entry.op, str(entry.axes.get("layout")), str(entry.axes.get("dtype")), features)


def extents_of(operator: str, arguments: Sequence[Any], sm_count: int) -> dict[str, int]:
    """Extents of a call by their names in the signature `operator` (`fwd/dense`), read from the tensors' shapes."""
    extents = {"num_sms": sm_count}
    for (_, kind, _, *rest), argument in zip(SIGNATURES[operator], arguments, strict=False):
        if kind == "tensor":
            for name, extent in zip(rest[0], argument.shape, strict=True):
                extents.setdefault(name, extent)
    return extents


def evidence_level(entry: Entry) -> int:
    """Index into EVIDENCE_LEVELS of the highest the entry has passed, -1 for none."""
    return max((EVIDENCE_LEVELS.index(level) for level in levels_passed(entry)), default=-1)


def levels_passed(entry: Entry) -> tuple[str, ...]:
    """The evidence levels that a record in the manifest backs, lowest first."""
    return backed_levels(
        entry.evidence,
        kernel=entry.id,
        target=entry.target,
        cubin_sha256=entry.cubin.sha256,
        plan_sha256=entry.plan.sha256,
    )


def levels_claimed(entry: Entry) -> tuple[str, ...]:
    """The evidence levels that the manifest names and nothing in it backs, lowest first."""
    passed = levels_passed(entry)
    return tuple(level for level in named_levels(entry.evidence) if level not in passed)


def evidence_lack(entry: Entry, level: str, claims: bool = False) -> str:
    """Why an entry has not passed a level; empty if it has.

    Args:
        claims: whether a claim that nothing backs is enough.
    """
    least = EVIDENCE_LEVELS.index(level)
    if evidence_level(entry) >= least:
        return ""
    claimed = [name for name in levels_claimed(entry) if EVIDENCE_LEVELS.index(name) >= least]
    if claimed and claims:
        return ""
    return f"has no {level} evidence" + (f" ({claimed[-1]} is claimed, and nothing backs it)" if claimed else "")


def evidence_text(entry: Entry) -> str:
    """`static, simulated`, `none`, or `none; claimed: silicon`."""
    passed, claimed = ", ".join(levels_passed(entry)) or "none", ", ".join(levels_claimed(entry))
    return f"{passed}; claimed: {claimed}" if claimed else passed


def _feature_mismatches(problem: Problem, axes: Mapping[str, object]) -> list[str]:
    """Features are on or off in a cubin. One that is on and not asked for computes something else."""
    reasons = [f"was built without {name}" for name in sorted(problem.features) if not axes.get(name)]
    for axis in sorted(axes.keys() - _FREE_AXES - problem.features):
        if axes[axis]:
            reasons.append(f"was built with {axis}" + ("" if axes[axis] is True else f" = {axes[axis]}"))
    return reasons


def _capability_text(target: str) -> str:
    if target not in TARGETS:
        return f"{target}, which this fa4-kernels does not know"
    major, minor = TARGETS[target]
    return f"compute capability {major}.{minor} only"


def _trace_lines(decision: Decision) -> list[str]:
    """The nearest entries first, the rest as a count."""
    ordered = sorted(decision.trace, key=lambda item: (len(item.reasons), item.entry.id))
    lines = [
        f"  {item.entry.id} ({item.pack}): {'; '.join(item.reasons) or 'fits'}" for item in ordered[:_SHOWN_ENTRIES]
    ]
    if len(ordered) > _SHOWN_ENTRIES:
        lines.append(f"  and {len(ordered) - _SHOWN_ENTRIES} more, which differ in at least as much")
    lines += [f"  pack {pack.name} is not used: {pack.reason}" for pack in decision.refused_packs]
    return lines


def _no_kernel_text(decision: Decision) -> str:
    head = f"no kernel for {decision.problem} on {decision.device}."
    considered = f"Considered: {len(decision.trace)} kernels" + (
        ":" if decision.trace or decision.refused_packs else "."
    )
    return "\n".join((head, considered, *_trace_lines(decision), f"What to do: {_next_step(decision)}"))


def _next_step(decision: Decision) -> str:
    target, problem = decision.device.target, decision.problem
    if target is None:
        return f"use a GPU of compute capability {', '.join(f'{a}.{b}' for a, b in TARGETS.values())}."
    short = target.replace("_", "").rstrip("a")
    if not any(item.entry.target == target for item in decision.trace):
        pack = f"fa4-kernels-{target.replace('_', '')}"
        return f"install the pack for this GPU, {pack}: pip install 'fa4-kernels[{short}]'."
    unknown = sorted(problem.features.difference(_SPELLED_FEATURES))
    if unknown:
        return f"call without {', '.join(unknown)}: no kernel can be built with it yet."
    if (problem.head_dim, problem.head_dim_v) not in HEAD_DIMS:
        return _pad_advice(problem)
    return (
        "build it and install the new pack (add a --select or --arch for the kernels that the old pack has): "
        f"fa4build wheel --select '{variant_id(problem, target)}'."
    )


HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
"""(head_dim, head_dim_v) that fa4build has forward and backward kernels for."""


def _pad_advice(problem: Problem) -> str:
    """Which head dim to pad to, or that there is none."""
    wide = [dims for dims in HEAD_DIMS if dims[0] >= problem.head_dim and dims[1] >= problem.head_dim_v]
    known = ", ".join(str(a) if a == b else f"({a}, {b})" for a, b in HEAD_DIMS)
    if not wide:
        return f"no kernel has this head_dim; there are {known}. Use another attention implementation for this call."
    to, to_v = min(wide, key=sum)
    padded = f"q, k and v with zeros to head_dim {to}" if to == to_v else f"q and k to {to} and v to {to_v}, with zeros"
    return f"no kernel has this head_dim; there are {known}. Pad {padded}, pass softmax_scale, and cut the output."


def _takes_two_ctas(problem: Problem, target: str) -> bool:
    """Whether two CTAs share the work of the only kernel of a problem: its accumulators do not fit one."""
    is_wide_forward = problem.op == "fwd" and problem.layout == "dense" and problem.head_dim == 256
    is_wide_backward = problem.op == "bwd" and problem.head_dim > 128
    return target != "sm_90a" and (is_wide_forward or is_wide_backward)


def variant_id(problem: Problem, target: str) -> str:
    """How the builder spells the kernel for a problem, `fwd-sm90a-bf16-hd128-causal`."""
    head_dims = f"hd{problem.head_dim}" + ("" if problem.head_dim == problem.head_dim_v else f"x{problem.head_dim_v}")
    fields = [problem.op, target.replace("_", ""), problem.dtype, head_dims]
    fields += [problem.mask] if problem.op in ("fwd", "bwd") else []
    fields += [] if problem.layout == "dense" else [problem.layout]
    fields += ["split"] if "split" in problem.features else []
    fields += ["2cta"] if _takes_two_ctas(problem, target) else []
    fields += ["deterministic"] if problem.deterministic and problem.op == "bwd" else []
    return "-".join((*fields, *(name for name in ("softcap", "sink") if name in problem.features)))
