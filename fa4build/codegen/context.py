"""From a variant and its tuning to the values a template fills in. Every choice a template would need is made here."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fa4build.axes import Variant
from fa4build.tuning import AnyTuning

CUTLASS_TYPES = {
    "bf16": "cutlass.BFloat16",
    "fp16": "cutlass.Float16",
    "e4m3": "cutlass.Float8E4M3FN",
    "e5m2": "cutlass.Float8E5M2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributePath:
    """A dotted name that stands for itself in rendered text: the one value that is no plain literal."""

    path: str


def context_for(variant: Variant, tuning: AnyTuning) -> dict[str, object]:
    """Template values: `variant_id`, `symbol`, and every axis and tuning field under its own name.

    `dtype` is the compiler's type; `op` and `arch` are in the id and decide the template and the compile target.
    """
    return {
        "variant_id": variant.id,
        "symbol": variant.symbol,
        **asdict(variant),
        "dtype": AttributePath(path=CUTLASS_TYPES[variant.dtype]),
        **asdict(tuning),
    }
