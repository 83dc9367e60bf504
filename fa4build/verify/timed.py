"""`fa4build verify --timing`: kernels of the cache in the timing model, with a drawing of their warps each."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fa4build.errors import SimulationError
from fa4build.files import write_atomically
from fa4build.matrix.axes import Variant
from fa4build.matrix.tuning import tuning_for
from fa4build.pipeline import find_cached, require_cached
from fa4build.plan import plan_from_json
from fa4build.store.cache import Cache
from fa4build.timing.attention import BLOCK, Steady, time_backward, time_forward
from fa4build.timing.timeline import timeline_svg

OPS = ("fwd", "bwd")
MASKS = ("full", "causal")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedVariant:
    """A variant and its steady state; `svg`: where the drawing of its warps lies."""

    name: str
    steady: Steady
    svg: Path


def is_timed(variant: Variant) -> bool:
    """Whether there is a steady state to time: dense attention, full or causal, neither merged nor split."""
    return variant.op in OPS and variant.layout == "dense" and variant.mask in MASKS and not variant.split


def time_variants(variants: Iterable[Variant], cache: Cache) -> Iterator[TimedVariant]:
    """Times cached variants one by one, and keeps `timing/<id>.svg` in the cache.

    Raises: NotCachedError naming variants that are not compiled; SimulationError for one that the model cannot take.
    """
    chosen = tuple(variants)
    for variant in chosen:
        if not is_timed(variant):
            raise SimulationError(
                f"{variant.id}: the timing model takes dense {' and '.join(OPS)} kernels with mask "
                f"{' or '.join(MASKS)}; leave it out with a GLOB"
            )
    for variant, entry in zip(chosen, require_cached(find_cached(chosen, cache)), strict=True):
        plan = plan_from_json(cache.read(entry, "plan").decode())
        steady = _steady(variant, plan, cache.read(entry, "ptx").decode())
        path = cache.root / "timing" / f"{variant.id}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, timeline_svg(steady.timing, title=variant.id).encode(), 0o644)
        yield TimedVariant(name=variant.id, steady=steady, svg=path)


def _steady(variant: Variant, plan, ptx: str) -> Steady:
    shape = {
        "head_dim": variant.head_dim,
        "head_dim_v": variant.head_dim_v,
        "is_causal": variant.mask == "causal",
    }
    if variant.op == "bwd":
        return time_backward(plan, ptx, variant.arch, seqlen_k=BLOCK * variant.cta_group, **shape)
    return time_forward(plan, ptx, variant.arch, seqlen_q=_query_rows(variant), **shape)


def _query_rows(variant: Variant) -> int:
    """Query rows that one cluster takes at once."""
    tuning = tuning_for(variant)
    return tuning.tile_m * tuning.q_stages * variant.cta_group
