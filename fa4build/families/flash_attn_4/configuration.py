"""What flash-attn-4 4.0.0b36 decides from a problem, as far as a pack must know it before the call.

Tiles are figures of the library's `interface.py`; `compiling` compares them with what was compiled, so that a wrong
figure is a failed build and never a wrong workspace.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardTiles:
    """Rows of queries and of keys a block of the backward takes, and to what head dimensions are rounded up.

    `cluster` blocks share keys; `dkv_cluster_rounding` tells whether rows of keys are padded to whole clusters.
    """

    tile_m: int
    tile_n: int
    dim_multiple: int
    cluster: int = 1


def forward_tile_n_sm90(head_dim: int, head_dim_v: int, mask: str) -> int:
    """Keys a block of the SM90 forward takes: pages of that many rows are read by tensor maps, others row by row."""
    if head_dim <= 128:
        return 128
    if head_dim <= 192:
        return 96 if mask == "local" else 128 if head_dim_v <= 128 else 112
    return 64 if mask == "local" else 80


def backward_tiles(arch: str, head_dim: int, head_dim_v: int, mask: str) -> BackwardTiles:
    """Tiles of the backward. Raises: KeyError for head dimensions that are not declared."""
    if arch != "sm90a":
        cluster = 2 if head_dim >= 128 else 1
        return BackwardTiles(tile_m=128, tile_n=128, dim_multiple=32, cluster=cluster)
    return {
        (64, 64): BackwardTiles(tile_m=128, tile_n=128, dim_multiple=32),
        (128, 128): BackwardTiles(tile_m=80 if mask == "full" else 64, tile_n=128, dim_multiple=32),
        (192, 128): BackwardTiles(tile_m=64, tile_n=96, dim_multiple=64),
        (256, 256): BackwardTiles(tile_m=64, tile_n=48, dim_multiple=64),
    }[head_dim, head_dim_v]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthClass:
    """Queries that share one kernel: a rule for the dispatcher, and the number of query rows it is traced with.

    `rows` counts the rows of a tile: queries times the query heads that read one key head, where they are packed.
    """

    name: str
    rule: str
    rows: int


def forward_lengths(
    arch: str, head_dim: int, head_dim_v: int, mask: str, layout: str, ratio: int
) -> tuple[LengthClass, ...]:
    """The classes of query lengths that the library compiles apart; one where the length does not matter.

    SM90: none. SM100 (queries packed by `ratio`): up to one tile of 128 rows there is one Q stage (and, at equal head
    dimensions, alternating score buffers); up to two tiles, two Q stages in one persistent block; beyond, a whole
    cluster of 2 where the mask is full and head dimensions are 128 wide, and no persistence under a mask. At head
    dimension 256 there is one Q stage whatever the length.
    """
    if arch == "sm90a":
        return (LengthClass(name="", rule="", rows=1024 * ratio),)
    rows = {"varlen": "max_seqlen_q"}.get(layout, "seqlen_q") + (f" * {ratio}" if ratio > 1 else "")
    if head_dim_v == 256:
        return (
            LengthClass(name="decode", rule=f"{rows} <= 128", rows=128),
            LengthClass(name="", rule=f"{rows} > 128", rows=4096),
        )
    return (
        LengthClass(name="decode", rule=f"{rows} <= 128", rows=128),
        LengthClass(name="short", rule=f"128 < {rows} and {rows} <= 256", rows=256),
        LengthClass(name="", rule=f"{rows} > 256", rows=4096),
    )


def forward_cta_group(
    arch: str, head_dim: int, head_dim_v: int, mask: str, layout: str, length: LengthClass, page_size: int = 128
) -> int:
    """Blocks that share one matrix instruction in the forward: two where pages are tiles, and at head dimension 256."""
    if arch == "sm90a" or (layout == "paged" and page_size != 128):
        return 1
    if head_dim == head_dim_v == 256:
        return 2
    if layout == "varlen" or length.name:
        return 1
    return 2 if mask == "full" and head_dim in (128, 192) and head_dim_v == 128 else 1
