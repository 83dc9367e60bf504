"""From models, GPUs and a use to the variants that answer every layer, with the reason for each, and what has none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fa4build.errors import NothingSelectedError, VariantError
from fa4build.matrix.arch import ARCHES, Arch
from fa4build.matrix.axes import OPS, Variant, spell_head_dims
from fa4build.matrix.problems import variants_of
from fa4build.matrix.spec import EDITION, Spec
from fa4build.matrix.unwritten import why_unwritten
from fa4build.matrix.variants import kernel_written, refusals, use_rule
from fa4build.runtime.fa4_kernels.dispatch import Problem
from fa4build.runtime.fa4_kernels.errors import InputError
from fa4build.runtime.fa4_kernels.models.gpus import Gpu, gpu_named
from fa4build.runtime.fa4_kernels.models.layers import Model
from fa4build.runtime.fa4_kernels.models.needs import PartNeeds, Use, checked_use, needs_of
from fa4build.runtime.fa4_kernels.models.reading import read_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A variant of a plan. `reasons`: (model and part, what calls it, layers) for each part that does."""

    variant: Variant
    reasons: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unserved:
    """Layers of a part of a model that no kernel answers, on a GPU; `layers` is 0 where their number is not known."""

    model: str
    part: str
    gpu: str
    layers: int
    reason: str

    def __str__(self) -> str:
        layers = "1 layer" if self.layers == 1 else f"{self.layers or 'an unknown number of'} layers"
        return f"{self.model}, {self.part} on {self.gpu}: {layers}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which kernels models need.

    Attributes:
        planned: in the order of the axes' ids within each target. unserved: what stays without a kernel.
        notes: (model and part, what holds for some calls only).
        parts: (model, GPU, needs of each part), as they were read.
    """

    models: tuple[Model, ...]
    gpus: tuple[Gpu, ...]
    use: Use
    planned: tuple[Planned, ...]
    unserved: tuple[Unserved, ...]
    notes: tuple[tuple[str, str], ...]
    parts: tuple[tuple[Model, Gpu, PartNeeds], ...] = field(default=(), repr=False)

    @property
    def ids(self) -> tuple[str, ...]:
        """Of the planned variants."""
        return tuple(item.variant.id for item in self.planned)

    def spec(self) -> Spec:
        """The specification that selects them. Raises: NothingSelectedError if there are none."""
        names = ", ".join(model.name for model in self.models)
        if not self.planned:
            reasons = "; ".join(map(str, self.unserved)) or "the model has no attention"
            raise NothingSelectedError(
                f"{names}: no kernel can be planned: {reasons}. `fa4build list --grid` shows what exists."
            )
        return Spec(path=f"plan of {names}", select=self.ids, exclude=(), blocks=())


def plan_of_files(paths: Iterable[str], gpus: Iterable[str], use: Use) -> Plan:
    """The plan of `config.json` files.

    Args:
        gpus: names as `gpu_named` takes them; none is an error.
    Raises: VariantError for a file that is no configuration, a GPU or a use that is unknown.
    """
    gpus = tuple(gpus)
    if not gpus:
        raise VariantError("no GPU was given. Add --gpu H200, --gpu B200, ... or a target, --gpu sm90.")
    try:
        return plan_of([read_model(path) for path in paths], [gpu_named(name) for name in gpus], checked_use(use))
    except InputError as error:
        raise VariantError(str(error)) from error


def plan_of(models: Sequence[Model], gpus: Sequence[Gpu], use: Use) -> Plan:
    """The plan of models that were read. Raises: InputError for heads that cannot be shared as asked."""
    reasons: dict[Variant, dict[tuple[str, str], int]] = {}
    unserved: dict[Unserved, None] = {}
    notes: dict[tuple[str, str], None] = {}
    parts = [
        (model, gpu, part) for gpu in dict.fromkeys(gpus) for model in models for part in needs_of(model, gpu, use)
    ]
    for model, gpu, part in parts:
        where = f"{model.name}, {part.part.label}" if part.part.name else model.name
        place = {"model": model.name, "part": part.part.label, "gpu": gpu.name}
        notes |= dict.fromkeys((where, note) for note in part.notes)
        for lack in part.lacks:
            unserved[Unserved(**place, layers=lack.layers, reason=lack.reason)] = None
        for need in part.needs:
            found = kernels_for(need.problem, _arch_of(gpu).name)
            if isinstance(found, str):
                unserved[Unserved(**place, layers=need.layers, reason=f"{need.why}: {found}")] = None
                continue
            for variant in found:
                counts = reasons.setdefault(variant, {})
                counts[where, need.why] = counts.get((where, need.why), 0) + need.layers
    return Plan(
        models=tuple(models),
        gpus=tuple(dict.fromkeys(gpus)),
        use=use,
        planned=tuple(_planned(variant, counts) for variant, counts in _in_order(reasons)),
        unserved=tuple(unserved),
        notes=tuple(notes),
        parts=tuple(parts),
    )


def _in_order(reasons: dict[Variant, dict[tuple[str, str], int]]) -> list[tuple[Variant, dict[tuple[str, str], int]]]:
    places = [arch.name for arch in ARCHES]
    ops = list(OPS)
    return sorted(reasons.items(), key=lambda item: (places.index(item[0].arch), ops.index(item[0].op), item[0].id))


def _planned(variant: Variant, counts: dict[tuple[str, str], int]) -> Planned:
    return Planned(variant=variant, reasons=tuple((where, why, n) for (where, why), n in counts.items()))


def _arch_of(gpu: Gpu) -> Arch:
    return next(arch for arch in ARCHES if arch.target == gpu.target)


def kernels_for(problem: Problem, arch: str) -> tuple[Variant, ...] | str:
    """The written variants that answer a problem on a target, or why there are none.

    Where the dispatcher chooses one of two by the extents of a call, both; else the one that it takes first.
    """
    candidates = variants_of(problem, arch)
    valid = [variant for variant in candidates if not refusals(variant)]
    written = sorted(filter(kernel_written, valid), key=lambda variant: variant.id)
    if written:
        for_some = [variant for variant in written if use_rule(variant)]
        for_all = [variant for variant in written if not use_rule(variant)]
        return (*for_all[:1], *for_some)
    if (problem.head_dim, problem.head_dim_v) not in OPS[problem.op].head_dims:
        return _unknown_head_dim(problem)
    return why_unwritten(valid[0]) if valid else "; ".join(refusals(candidates[0]))


def _unknown_head_dim(problem: Problem) -> str:
    dims = OPS[problem.op].head_dims
    known = ", ".join(map(spell_head_dims, dims))
    wide_enough = [d for d in dims if d[0] >= problem.head_dim and d[1] >= problem.head_dim_v]
    asked = spell_head_dims((problem.head_dim, problem.head_dim_v))
    if not wide_enough:
        return f"no kernel has {asked}; there are {known}"
    padded = spell_head_dims(min(wide_enough, key=sum))
    advice = f"pad q, k, v with zeros to {padded} and pass softmax_scale: the same result, at the cost of {padded}"
    return f"no kernel has {asked}; there are {known} ({advice})"


# --- as a specification -----------------------------------------------------------------------------------------------


def spec_text(plan: Plan) -> str:
    """The specification (TOML) of a plan, with each kernel's reason as a comment, and what is left out.

    Raises: NothingSelectedError if nothing of it can be built.
    """
    plan.spec()
    models = ", ".join(model.name for model in plan.models)
    gpus = ", ".join(gpu.name for gpu in plan.gpus)
    lines = [f"# {models} on {gpus}: {plan.use}", f"edition = {EDITION}", "select = ["]
    for item in plan.planned:
        lines += [f'  "{item.variant.id}",  # {_said(item)}']
    lines.append("]")
    lines += [f"# without a kernel: {_one_line(str(lack))}" for lack in plan.unserved]
    lines += [f"# note: {_one_line(f'{where}: {note}')}" for where, note in plan.notes]
    return "\n".join(lines) + "\n"


def _said(item: Planned) -> str:
    return _one_line("; ".join(f"{where}: {why} ({layers} layers)" for where, why, layers in item.reasons))


def _one_line(text: str) -> str:
    return " ".join(text.split())
