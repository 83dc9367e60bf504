"""Into how many parts the keys of a call are split (split-KV), so that few queries over many keys keep a device busy.

The number is the one with the shortest time in a small model of a memory-bound launch: CTAs run in waves, one on an SM;
a wave takes as long as one of its CTAs alone (bytes in flight of one CTA) or as the memory needs for all of them,
whichever is longer; each wave and each part costs a little. The unsplit kernel is one of the candidates, with tiles of
its own: on SM90 it may take two tiles a CTA, so that it needs twice as many sequences to fill the device.
Measured on an H200 (benchmarks/decode_splits_h200.json): the number it chooses takes 1.01 of the best one's time
(geometric mean of 492 rows; 1.14 at worst). On SM100 and SM103 nothing was measured: the same form, scaled.
"""

from functools import lru_cache
from typing import NamedTuple

from .abi import WINDOW_UNBOUNDED

_MAX_CHOSEN = 128
_KEYS_A_BLOCK = 128
_FEW_BLOCKS = 4  # of keys, up to which a second kernel costs more than it can win
_EVERY_NUMBER_TO = 16  # candidates: all up to here, and those that fill whole waves or an even share of one
_WAVES = (1 / 4, 1 / 3, 1 / 2, 1, 2, 3, 4)


class Tiles(NamedTuple):
    """How a forward kernel over packed queries divides them. rows: (query, head of the group) pairs of a tile;
    per_cta: tiles a CTA takes in turn; block_us: time of 128 keys in a CTA alone, in microseconds."""

    rows: int
    per_cta: int
    block_us: float


class Memory(NamedTuple):
    """What a device moves. bytes_a_us: of all SMs together; speed: of one CTA, 1 on an H200."""

    bytes_a_us: float
    speed: float


# Fitted to benchmarks/decode_splits_h200.json; (192, 128) is interpolated. Tiles: fa4build's tuning rows of SM90.
_UNSPLIT_SM90 = {
    (64, 64): Tiles(192, 2, 1.5),
    (96, 96): Tiles(192, 1, 1.6),
    (128, 128): Tiles(128, 2, 1.4),
    (192, 128): Tiles(128, 1, 1.7),
    (256, 256): Tiles(128, 1, 2.1),
}
# Which masks have other tiles a CTA than causal ones (or other rows): (head_dims, mask) -> (rows, per_cta).
_OTHER_TILES_SM90 = {
    ((64, 64), "local"): (192, 1),
    ((96, 96), "full"): (192, 2),
    ((96, 96), "local"): (128, 2),
    ((256, 256), "full"): (128, 2),
}
_SPLIT_ROWS_SM90, _ROWS_SM100, _ROWS_SM100_WIDE = 64, 256, 128
_SPLIT_BLOCK_US, _SPLIT_COLUMN_US = 0.42, 0.00241  # of 128 keys: fixed, and a column of K or V
_WAVE_US, _TILE_US, _PART_US, _MERGE_US = 1.9, 1.6, 0.0727, 0.14
# SM100, SM103: 8 TB/s in place of 4.8, not measured.
_MEMORY = {9: Memory(4.9e6, 1.0), 10: Memory(8.1e6, 1.5)}


class Rows(NamedTuple):
    """The queries of a call. batch: sequences; total_q: tokens of all; max_seqlen_q: None where it is not known."""

    batch: int
    total_q: int
    max_seqlen_q: int | None
    num_heads_q: int
    num_heads_kv: int


class Keys(NamedTuple):
    """The keys of a call. blocks: of 128 keys that a sequence's queries see at most; head_dims: of K and V."""

    blocks: int
    head_dims: tuple[int, int]
    element_bytes: int
    mask: str


def query_tiles(queries: Rows, rows: int) -> int:
    """Upper bound of the tiles of `rows` query rows, with the query heads of a KV head in one tile.

    Without `max_seqlen_q` every sequence is counted with a part of a tile more than its rows need.
    """
    if not queries.num_heads_kv:
        return 0
    group = queries.num_heads_q // queries.num_heads_kv
    if queries.max_seqlen_q is None:
        return queries.num_heads_kv * (queries.total_q * group // rows + queries.batch)
    return queries.num_heads_kv * queries.batch * -(-queries.max_seqlen_q * group // rows)


def visible_keys(window: tuple[int, int], max_seqlen_q: int | None, max_seqlen_k: int | None) -> int | None:
    """Upper bound of the keys that the queries of a sequence see together; None where it is not known."""
    if max_seqlen_q is None or max_seqlen_k is None or WINDOW_UNBOUNDED in window:
        return max_seqlen_k
    return min(max_seqlen_k, sum(window) + max_seqlen_q)


def key_blocks(num_keys: int | None) -> int:
    """Blocks of 128 keys; 0 where the number is not known."""
    return 0 if num_keys is None else -(-num_keys // _KEYS_A_BLOCK)


@lru_cache(maxsize=4096)
def chosen_splits(queries: Rows, keys: Keys, *, num_sms: int, major: int) -> int:
    """The number of parts with the shortest modelled time; 1 where keys are few or of unknown number.

    Args:
        num_sms, major: of the device; major of its compute capability.
    """
    unsplit, split = _tiles_of(keys, major)
    work = query_tiles(queries, split.rows)
    if keys.blocks <= _FEW_BLOCKS or not work:
        return 1
    memory = _MEMORY.get(major, _MEMORY[10])
    times = {
        parts: _time_us(queries, keys, split if parts > 1 else unsplit, parts, num_sms, memory)
        for parts in _candidates(work, keys.blocks, num_sms)
    }
    return min(times, key=times.__getitem__)


def _candidates(work: int, blocks: int, num_sms: int) -> list[int]:
    """Numbers of parts worth a look, ascending; of those that give a part equally many blocks, the smallest."""
    wanted = {*range(1, _EVERY_NUMBER_TO + 1), *(int(waves * num_sms) // work for waves in _WAVES)}
    most = min(_MAX_CHOSEN, blocks)
    by_share: dict[int, int] = {}
    for parts in sorted(parts for parts in wanted if 1 <= parts <= most):
        by_share.setdefault(-(-blocks // parts), parts)
    return sorted(by_share.values())


def _tiles_of(keys: Keys, major: int) -> tuple[Tiles, Tiles]:
    """Of the kernel that does not split, and of the one that does."""
    split_us = _SPLIT_BLOCK_US + _SPLIT_COLUMN_US * sum(keys.head_dims) * keys.element_bytes / 2
    if major != 9:
        rows = _ROWS_SM100_WIDE if keys.head_dims[1] == 256 else _ROWS_SM100
        return Tiles(rows, 1, split_us), Tiles(rows, 1, split_us)
    unsplit = _UNSPLIT_SM90.get(keys.head_dims, Tiles(128, 1, split_us))
    rows, per_cta = _OTHER_TILES_SM90.get((keys.head_dims, keys.mask), unsplit[:2])
    return Tiles(rows, per_cta, unsplit.block_us), Tiles(_SPLIT_ROWS_SM90, 1, split_us)


def _time_us(queries: Rows, keys: Keys, tiles: Tiles, parts: int, num_sms: int, memory: Memory) -> float:
    """Modelled time of a launch, without what all launches have in common."""
    ctas = -(-query_tiles(queries, tiles.rows) // tiles.per_cta) * parts
    blocks = tiles.per_cta * -(-keys.blocks // parts)
    alone_us = blocks * tiles.block_us / memory.speed
    bytes_us = blocks * _KEYS_A_BLOCK * sum(keys.head_dims) * keys.element_bytes / memory.bytes_a_us
    waves, rest = divmod(ctas, num_sms)
    streaming = waves * _longer(num_sms * bytes_us, alone_us) + (_longer(rest * bytes_us, alone_us) if rest else 0.0)
    fixed = tiles.per_cta * _TILE_US + (ctas - 1) // num_sms * _WAVE_US
    return streaming + fixed + (_MERGE_US + _PART_US * parts if parts > 1 else 0.0)


def _longer(a: float, b: float) -> float:
    """The longer of two times that overlap, a little more where they are alike."""
    return (a**3 + b**3) ** (1 / 3)
