"""Whether an install answers the layers of models: the dispatcher is asked about every problem, no kernel is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..dispatch import Decision, Device, Problem, dispatch, evidence_text, variant_id
from ..packs import Pack, RefusedPack
from .gpus import Gpu
from .layers import Model
from .needs import Need, PartNeeds, Use, needs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A problem of some layers and what the dispatcher says to it."""

    need: Need
    decision: Decision

    @property
    def kernel(self) -> str:
        """Id and evidence of the kernel that answers; empty where none does."""
        entry = self.decision.entry
        return "" if entry is None else f"{entry.id} ({evidence_text(entry)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartAnswers:
    """The answers of one part of a model."""

    model: Model
    part: PartNeeds
    answers: tuple[Answer, ...]

    @property
    def missing(self) -> tuple[Problem, ...]:
        """Problems without a kernel, each once, in order."""
        return tuple(dict.fromkeys(a.need.problem for a in self.answers if not a.kernel))

    @property
    def is_complete(self) -> bool:
        """Whether every layer of the part is answered."""
        return not (self.missing or self.part.lacks)


def answers_of(
    models: Sequence[Model], gpu: Gpu, use: Use, packs: Sequence[Pack | RefusedPack]
) -> tuple[PartAnswers, ...]:
    """What the packs say to each part of each model, for one use on one GPU.

    Raises: InputError for a use that a model's heads do not allow.
    """
    device = Device(name=gpu.name, compute_capability=gpu.compute_capability, sm_count=gpu.num_sms)
    found: dict[Problem, Decision] = {}

    def asked(problem: Problem) -> Decision:
        if problem not in found:
            found[problem] = dispatch(problem, device, packs)
        return found[problem]

    return tuple(
        PartAnswers(
            model=model,
            part=part,
            answers=tuple(Answer(need=need, decision=asked(need.problem)) for need in part.needs),
        )
        for model in models
        for part in needs_of(model, gpu, use)
    )


def missing_ids(parts: Sequence[PartAnswers], gpu: Gpu) -> tuple[str, ...]:
    """How the builder spells the kernels that are missing, each once."""
    return tuple(dict.fromkeys(variant_id(problem, gpu.target) for part in parts for problem in part.missing))
