"""From what machines asked for in vain (FA4_KERNELS_RECORD) to a specification of what to build.

A recorded miss is a problem and a target. It becomes the variant that answers it, if the matrix has one and its kernel
is written; else it keeps the reason why not.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa4build.errors import NothingSelectedError, VariantError
from fa4build.matrix.arch import ARCHES
from fa4build.matrix.axes import Variant
from fa4build.matrix.spec import EDITION
from fa4build.matrix.variants import kernel_written, refusals
from fa4build.runtime.fa4_kernels.record import RECORD_FORMAT, RECORD_VERSION

_PROBLEM_FIELDS = ("op", "layout", "dtype", "head_dim", "head_dim_v", "mask", "deterministic", "features")
_FEATURES = ("split", "softcap", "sink")


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """One problem that no kernel answered. `features` are further axes that were asked for, whatever their names."""

    compute_capability: tuple[int, int]
    op: str
    layout: str
    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    deterministic: bool
    features: tuple[str, ...]

    def __str__(self) -> str:
        major, minor = self.compute_capability
        extras = (*self.features, *(["deterministic"] if self.deterministic else []))
        head_dims = f"head_dim {self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        words = (self.op, self.layout, self.dtype, head_dims, f"mask {self.mask}", *extras)
        return f"{', '.join(words)} on compute capability {major}.{minor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissPlan:
    """What to build, and what cannot be built. `buildable`: ids, sorted; `hopeless`: (miss, reason)."""

    buildable: tuple[str, ...]
    hopeless: tuple[tuple[Miss, str], ...]


def read_misses(path: Path) -> tuple[Miss, ...]:
    """The misses in a file, each once, in the order in which they were first recorded.

    Raises: VariantError for a line that is none; a last line without its end is a write under way, and left out.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VariantError(f"{path}: cannot be read as recorded misses: {error}.") from error
    whole, _, _ = text.rpartition("\n")
    lines = [(number, line) for number, line in enumerate(whole.splitlines(), 1) if line.strip()]
    return tuple(dict.fromkeys(_miss(line, f"{path}: line {number}") for number, line in lines))


def _miss(line: str, origin: str) -> Miss:
    try:
        document = json.loads(line)
        if document["format"] != RECORD_FORMAT:
            raise ValueError(f"format {document['format']!r}")
        if type(document["version"]) is not int or not 1 <= document["version"] <= RECORD_VERSION:
            raise VariantError(f"{origin}: version {document['version']!r} is newer than this fa4build reads.")
        major, minor = document["compute_capability"]
        values: dict[str, Any] = {name: document["problem"][name] for name in _PROBLEM_FIELDS}
        miss = Miss(compute_capability=(int(major), int(minor)), **values | {"features": tuple(values["features"])})
        hash(miss)
    except (ValueError, KeyError, TypeError) as error:
        raise VariantError(
            f"{origin}: no recorded miss ({type(error).__name__}: {error}). FA4_KERNELS_RECORD=path writes such files."
        ) from error
    return miss


def plan_for(misses: Iterable[Miss]) -> MissPlan:
    """The written variants that answer these misses, and the reasons why others have none."""
    buildable: set[str] = set()
    hopeless: list[tuple[Miss, str]] = []
    for miss in misses:
        found = _answer(miss)
        if isinstance(found, Variant):
            buildable.add(found.id)
        else:
            hopeless.append((miss, found))
    return MissPlan(buildable=tuple(sorted(buildable)), hopeless=tuple(hopeless))


def _answer(miss: Miss) -> Variant | str:
    """The written variant for a miss, or why there is none."""
    arch = next((arch for arch in ARCHES if arch.compute_capability == miss.compute_capability), None)
    if arch is None:
        known = ", ".join("{}.{}".format(*arch.compute_capability) for arch in ARCHES)
        return f"kernels are built for compute capability {known} only"
    strange = sorted(set(miss.features) - set(_FEATURES))
    if strange:
        return f"no kernel can be built with {', '.join(strange)}"
    candidates = [
        Variant(
            op=miss.op,
            arch=arch.name,
            dtype=miss.dtype,
            head_dim=miss.head_dim,
            head_dim_v=miss.head_dim_v,
            mask=miss.mask,
            layout=miss.layout,
            cta_group=cta_group,
            deterministic=miss.deterministic and miss.op == "bwd",  # every other op is anyway
            **{name: name in miss.features for name in _FEATURES},
        )
        for cta_group in arch.cta_groups
    ]
    valid = [variant for variant in candidates if not refusals(variant)]
    if not valid:
        return "; ".join(refusals(candidates[0]))
    written = next(filter(kernel_written, valid), None)
    return written or f"{valid[0].id} is valid, but its kernel is not written yet"


def spec_text(plan: MissPlan, origin: str) -> str:
    """A specification (TOML) of what can be built; the rest as comments, with reasons.

    Raises: NothingSelectedError if nothing of it can be built.
    """
    comments = [f"# not built: {miss}: {reason}" for miss, reason in plan.hopeless]
    if not (plan.buildable or plan.hopeless):
        raise NothingSelectedError(
            f"{origin}: holds no misses. FA4_KERNELS_RECORD={origin} records a line for each call without a kernel."
        )
    if not plan.buildable:
        raise NothingSelectedError(
            f"{origin}: none of these {len(plan.hopeless)} misses can be built:\n" + "\n".join(comments)
        )
    ids = "".join(f'  "{name}",\n' for name in plan.buildable)
    return f"# From {origin}\nedition = {EDITION}\nselect = [\n{ids}]\n" + "".join(f"{line}\n" for line in comments)
