"""The coverage grids: for a target and op, what a kernel can do against head dim, and how far each is verified."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fa4build.report.collect import VariantRow

STAGES = (
    "implemented",
    "outdated",
    "simulated-elsewhere",
    "silicon-elsewhere",
    "compiled",
    "static",
    "simulated",
    "silicon",
)
"""From least to most: has a kernel; compiled from other sources; not compiled here, with a committed record; compiled;
and the three levels of tests."""

SIGNS = {
    "implemented": "○",
    "outdated": "◌",
    "simulated-elsewhere": "m",
    "silicon-elsewhere": "g",
    "compiled": "●",
    "static": "S",
    "simulated": "M",
    "silicon": "G",
}
"""What a mark shows, so that it can be read without its colour."""

# Axes beside layout that make a line of a grid, and how one says that they are on.
_KINDS = (("split", True, "split"), ("cta_group", 2, "2cta"), ("deterministic", True, "deterministic"))
_KINDS += (("softcap", True, "softcap"), ("sink", True, "sink"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One kernel. title: its id and stage, for the pointer."""

    stage: str
    sign: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Cells of marks.

    Attributes:
        columns: head dimensions.
        dtypes, masks: what the lines and columns of marks in every cell stand for.
        rows: (kind, a cell for each head dimension): the marks of a cell, line by line; None where there is no kernel.
            Lines after a kind's last data type are left out.
    """

    title: str
    columns: tuple[str, ...]
    dtypes: tuple[str, ...]
    masks: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[Mark | None, ...], ...]], ...]


def stage_of(row: VariantRow) -> str:
    """How far a variant is. Evidence of an outdated kernel does not count; committed records do, as such."""
    if row.state != "compiled":
        return f"{row.elsewhere}-elsewhere" if row.elsewhere else row.state
    return row.level if row.level != "none" else row.state


def kind_of(row: VariantRow) -> str:
    """Layout and features: `dense`, `varlen split`, `dense 2cta deterministic`."""
    features = [word for axis, value, word in _KINDS if row.axes.get(axis) == value]
    return " ".join((str(row.axes.get("layout", "dense")), *features))


def grids(rows: Sequence[VariantRow]) -> Iterator[Grid]:
    """One for each target and op that has kernels; none for ops whose kernels have no head dimension."""
    own: dict[tuple[str, str], list[VariantRow]] = {}
    for row in rows:
        if {"head_dim", "head_dim_v", "dtype"} <= set(row.axes):
            own.setdefault((row.arch, row.op), []).append(row)
    for (arch, op), members in own.items():
        yield _grid(f"{op}, {arch}", members)


def _grid(title: str, rows: Sequence[VariantRow]) -> Grid:
    dims = sorted({(row.axes["head_dim"], row.axes["head_dim_v"]) for row in rows})
    dtypes = tuple(dict.fromkeys(str(row.axes["dtype"]) for row in rows))
    masks = tuple(dict.fromkeys(str(row.axes.get("mask", "full")) for row in rows))
    marks = {}
    for row in rows:
        dim, mask = (row.axes["head_dim"], row.axes["head_dim_v"]), row.axes.get("mask", "full")
        marks[kind_of(row), dim, row.axes["dtype"], mask] = _mark(row)
    lines: dict[str, int] = {}  # kind -> how many of the data types it needs
    for row in rows:
        lines[kind_of(row)] = max(lines.get(kind_of(row), 0), dtypes.index(str(row.axes["dtype"])) + 1)
    return Grid(
        title=title,
        columns=tuple(str(first) if first == second else f"{first}x{second}" for first, second in dims),
        dtypes=dtypes,
        masks=masks,
        rows=tuple(
            (kind, tuple(tuple(marks.get((kind, dim, d, m)) for d in dtypes[:count] for m in masks) for dim in dims))
            for kind, count in lines.items()
        ),
    )


def _mark(row: VariantRow) -> Mark:
    stage = stage_of(row)
    return Mark(stage=stage, sign=SIGNS[stage], title=f"{row.id}: {stage}")
