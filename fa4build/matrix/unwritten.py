"""Why a valid variant has no kernel: the smallest combination of its axis values that no kernel of its target has."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from fa4build.matrix.axes import AXES, OPTIONAL_AXES, Variant, spell_head_dims
from fa4build.matrix.variants import KERNELS, Kernel

_MOST_NAMED = 3


def why_unwritten(variant: Variant) -> str:
    """`no fwd kernel of sm100a has softcap with hd96 and varlen`."""
    rows = [k for k in KERNELS if variant.op in k.axes["op"] and variant.arch in k.axes.get("arch", (variant.arch,))]
    values = _values(variant)
    for size in range(1, len(values) + 1):
        for chosen in itertools.combinations(values, size):
            if not any(all(_has(row, axis, value) for axis, value, _ in chosen) for row in rows):
                first, *others = (word for _, _, word in chosen)
                return f"no {variant.op} kernel of {variant.arch} has {first}" + (
                    f" with {' and '.join(others)}" if others else ""
                )
    return f"no kernel implements {variant.id}"


def _values(variant: Variant) -> list[tuple[str, object, str]]:
    """(axis, value, how people say it): what was asked for beside the plain form first, then what everything has."""
    extras = [(axis, getattr(variant, axis)) for axis in OPTIONAL_AXES if axis != "mask"]
    said = [(a, v, a if v is True else str(v)) for a, v in extras if v != AXES[a][0]]
    plain = [("head_dims", variant.head_dims, spell_head_dims(variant.head_dims))]
    return [*said, *plain, ("dtype", variant.dtype, variant.dtype), ("mask", variant.mask, f"mask {variant.mask}")] + [
        (a, v, f"{a} {v}") for a, v in extras if v == AXES[a][0]
    ]


def _has(row: Kernel, axis: str, value: object) -> bool:
    return axis not in row.axes or value in row.axes[axis]


def summary_of(left_out: Iterable[Variant], num_named: int) -> str:
    """One line about variants without a kernel: how many, and the reasons by how often they hold."""
    reasons = Counter(map(why_unwritten, left_out))
    total = reasons.total()
    said = [f"{reason} ({count})" if len(reasons) > 1 else reason for reason, count in reasons.most_common(_MOST_NAMED)]
    rest = f"; and {len(reasons) - _MOST_NAMED} more reasons" if len(reasons) > _MOST_NAMED else ""
    return f"skipped {total} of {num_named + total} matching variants, which have no kernel: {'; '.join(said)}{rest}"
