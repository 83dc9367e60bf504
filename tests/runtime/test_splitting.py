"""The number of parts that keys are split into: as good as the best by hand on every shape recorded on an H200."""

import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")
from fa4_kernels import splitting
from fa4_kernels.splitting import Keys, Rows, chosen_splits, key_blocks, query_tiles

from fa4build.matrix.tuning import tuning_row_for
from fa4build.matrix.variants import parse_variant

RECORD = json.loads((Path(__file__).parents[2] / "benchmarks" / "decode_splits_h200.json").read_text())
SWEEP = [row for row in RECORD["rows"] if len(row["us"]) > 1]
HEAD_DIMS = {"hd64": (64, 64), "hd96": (96, 96), "hd128": (128, 128), "hd192x128": (192, 128), "hd256": (256, 256)}


def chosen(shape, batch, *, num_sms=132, major=9) -> int:
    """For one new token a sequence; shape as in the record."""
    head_dim, heads_kv, group, keys, _ = shape
    queries = Rows(batch, batch, 1, heads_kv * group, heads_kv)
    wanted = Keys(key_blocks(keys), (head_dim, head_dim), 2, "causal")
    return chosen_splits(queries, wanted, num_sms=num_sms, major=major)


def over_best(row) -> float:
    """Time of the recorded number nearest to the chosen one, over the best recorded time."""
    times = {int(parts): us for parts, us in row["us"].items() if parts != "0"}
    parts = chosen(row["shape"], row["batch"])
    return times[min(times, key=lambda tried: (abs(tried - parts), tried))] / min(times.values())


def test_no_recorded_shape_is_far_from_the_best_by_hand():
    """All batches from 1 to 256 of twelve shapes: 1.02 in geometric mean, 1.2 at worst (4.7 where 1 was chosen)."""
    ratios = [over_best(row) for row in SWEEP]

    assert len(ratios) > 400
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) <= 1.02
    assert max(ratios) <= 1.2


def test_recorded_bandwidth_has_no_cliff():
    """From one batch to the next, bytes a second with the chosen number never fall by over 1.3 times (4.9 before)."""
    shares = [(row["shape"], row["batch"], row["batch"] / row["us"]["0"]) for row in RECORD["rows"] if row["us"]]
    falls = [a[2] / b[2] for a, b in pairwise(shares) if a[0] == b[0]]

    assert max(falls) <= 1.3


@pytest.mark.parametrize("batch", [9, 12, 16, 17, 24])
def test_sequences_that_do_not_fill_the_device_are_split(batch):
    """8 KV heads of 64 over 32k keys: 72 to 192 tiles on 132 SMs, two a CTA unsplit, which left half of them idle."""
    assert chosen((64, 8, 8, 32768, "varlen"), batch) > 1


@pytest.mark.parametrize(
    ("batch", "keys", "expected"),
    [(1, 512, 1), (64, 512, 1), (1, 0, 1), (0, 8192, 1)],
)
def test_few_keys_or_no_queries_are_one_part(batch, keys, expected):
    """Up to 4 blocks of keys a second kernel costs more than it wins; nothing is no work."""
    assert chosen((128, 8, 4, keys, "varlen"), batch) == expected


def test_an_unknown_number_of_keys_is_one_part():
    """Nothing to choose from."""
    assert chosen_splits(Rows(1, 1, 1, 8, 8), Keys(key_blocks(None), (64, 64), 2, "full"), num_sms=132, major=9) == 1


@pytest.mark.parametrize("major", [9, 10, 12])
@pytest.mark.parametrize("num_sms", [1, 16, 132, 148])
def test_a_part_has_at_least_one_block(num_sms, major):
    """Never more parts than blocks of 128 keys, and at most 128."""
    for keys in (640, 1000, 4096, 1 << 20):
        assert 1 <= chosen((128, 1, 1, keys, "varlen"), 1, num_sms=num_sms, major=major) <= min(128, -(-keys // 128))


def test_query_tiles_hold_all_heads_of_a_kv_head():
    """32 query heads, 4 KV heads, 1 query: 8 rows, one tile a KV head and sequence. Unknown lengths: one more."""
    assert query_tiles(Rows(6, 6, 1, 32, 4), 128) == 4 * 6
    assert query_tiles(Rows(6, 6, None, 32, 4), 128) == 4 * 6
    assert query_tiles(Rows(3, 40, None, 32, 4), 128) == 4 * (2 + 3)


@pytest.mark.parametrize("mask", ["full", "causal", "local"])
@pytest.mark.parametrize("spelling", HEAD_DIMS)
def test_tiles_are_those_of_the_kernels(spelling, mask):
    """Rows of a tile and tiles a CTA as fa4build tunes the SM90 kernels over packed queries."""
    tuning = tuning_row_for(parse_variant(f"fwd-sm90a-bf16-{spelling}-{mask}-varlen")).tuning
    split = tuning_row_for(parse_variant(f"fwd-sm90a-bf16-{spelling}-{mask}-varlen-split")).tuning
    unsplit, parts = splitting._tiles_of(Keys(1, HEAD_DIMS[spelling], 2, mask), 9)

    assert (unsplit.rows, unsplit.per_cta) == (tuning.tile_m, 2 if tuning.persistent else 1)
    assert (parts.rows, parts.per_cta) == (split.tile_m, 1)
    assert dataclasses.asdict(split)["persistent"] is False


@pytest.mark.parametrize("spelling", HEAD_DIMS)
def test_tiles_of_blackwell_are_those_of_the_kernels(spelling):
    """Rows of all tiles of queries of a CTA, with and without split keys."""
    for end in ("varlen", "varlen-split"):
        tuning = tuning_row_for(parse_variant(f"fwd-sm100a-bf16-{spelling}-causal-{end}")).tuning
        tiles = splitting._tiles_of(Keys(1, HEAD_DIMS[spelling], 2, "causal"), 10)
        assert {part.rows for part in tiles} == {tuning.tile_m * tuning.q_stages}
        assert not tuning.persistent
