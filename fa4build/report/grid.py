"""The coverage grids: for a target and op, head dimension against dtype and mask, with how far each cell is proven."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fa4build.report.collect import VariantRow

STAGES = ("written", "outdated", "compiled", "static", "simulated", "silicon")
"""From least to most: has a kernel; compiled from other sources; compiled; and the three levels of proof."""

SIGNS = {"written": "○", "outdated": "◌", "compiled": "●", "static": "S", "simulated": "M", "silicon": "G"}
"""What a cell shows, so that it can be read without its colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """stage: the least of the cell's variants. title: their ids and stages, for the pointer. count: how many."""

    stage: str
    sign: str
    count: int
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """rows: (head dimension, a cell or None for each column)."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]


def stage_of(row: VariantRow) -> str:
    """How far a variant is. Proof of an outdated kernel does not count."""
    return row.level if row.state == "compiled" and row.level != "none" else row.state


def grids(rows: Sequence[VariantRow]) -> Iterator[Grid]:
    """One for each target and op that has kernels."""
    for arch, op in dict.fromkeys((row.arch, row.op) for row in rows):
        own = [row for row in rows if (row.arch, row.op) == (arch, op)]
        columns = tuple(dict.fromkeys(map(_column, own)))
        dims = sorted({(row.axes["head_dim"], row.axes["head_dim_v"]) for row in own})
        yield Grid(
            title=f"{op}, {arch}",
            columns=columns,
            rows=tuple(
                (
                    str(dim[0]) if dim[0] == dim[1] else f"{dim[0]}, {dim[1]}",
                    tuple(_cell([row for row in own if _is_in(row, dim, column)]) for column in columns),
                )
                for dim in dims
            ),
        )


def _column(row: VariantRow) -> str:
    return " ".join(str(row.axes[name]) for name in ("dtype", "mask") if name in row.axes)


def _is_in(row: VariantRow, dims: tuple[int, int], column: str) -> bool:
    return (row.axes["head_dim"], row.axes["head_dim_v"]) == dims and _column(row) == column


def _cell(rows: Sequence[VariantRow]) -> Cell | None:
    if not rows:
        return None
    stage = min(map(stage_of, rows), key=STAGES.index)
    return Cell(
        stage=stage, sign=SIGNS[stage], count=len(rows), title="\n".join(f"{row.id}: {stage_of(row)}" for row in rows)
    )
