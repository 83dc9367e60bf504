"""Sweep decoding over batches and numbers of splits on a GPU: what is chosen beside the best that there is by hand.

    python benchmarks/decode_splits_on_device.py WHEEL_DIR --out decode_splits_h200.json
    python benchmarks/decode_splits_on_device.py WHEEL_DIR --chosen-only --seed 7

One new token a sequence, causal, bf16, a step captured in a CUDA graph, caches rotated beyond L2; every number of
splits that could be worth its while, and the one that `flash_attn_with_kvcache` chooses. A row says how long a step
takes, its share of the memory's bandwidth (keys and values read once), and the chosen time over the best. The worst
rows come first; so do the steepest falls of bandwidth from one batch to the next. With --seed, shapes are drawn.
"""

import argparse
import itertools
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "device"))

from compare_on_device import PEAK_BYTES_A_SECOND
from harness import reason, run_installed, setting, write

DEVICE = "cuda"
BATCHES = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22, 24, 28, 32, 33, 36, 40, 44, 48, 56, 64),
    *(66, 72, 80, 96, 112, 128, 132, 160, 192, 224, 256),
)
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 22, 24, 28, 32, 40, 48, 64, 96, 128)
# head_dim, key heads, query heads a key head, keys, layout
SHAPES = (
    (64, 8, 8, 32768, "varlen"),
    (64, 8, 8, 4096, "paged"),
    (64, 8, 4, 1024, "varlen"),
    (128, 8, 8, 16384, "varlen"),
    (128, 8, 4, 4096, "paged"),
    (128, 8, 4, 1024, "varlen"),
    (128, 1, 16, 8192, "varlen"),
    (128, 2, 8, 32768, "paged"),
    (128, 16, 1, 2048, "varlen"),
    (96, 8, 4, 8192, "varlen"),
    (256, 8, 8, 8192, "varlen"),
    (256, 4, 2, 2048, "paged"),
)
MAX_BYTES = 24 << 30  # of keys and values: larger steps say nothing that half of them does not
ROTATED_BYTES = 256 << 20  # several times the L2 cache
PAGE_SIZE = 64
WAVES = 7  # splits that make more CTAs than this many a multiprocessor are not tried
ROUNDS, SLOT_MS = 5, 0.6


def bytes_of(shape, batch):
    """Keys and values of a step."""
    head_dim, heads_kv, _, keys, _ = shape
    return 2 * batch * keys * heads_kv * head_dim * 2


class Caches:
    """Keys and values of one shape, as many different ones as are needed to leave L2, cut from two large tensors."""

    def __init__(self, torch, shape, batches):
        self.torch, self.shape = torch, shape
        largest = max(bytes_of(shape, batch) for batch in batches)
        elements = (largest + ROTATED_BYTES) // 4
        self.flat = [torch.empty(elements, device=DEVICE, dtype=torch.bfloat16).normal_() for _ in range(2)]

    def step(self, attend, batch, num_splits):
        """(function that decodes once with each cache, how many there are)."""
        torch, (head_dim, heads_kv, group, keys, layout) = self.torch, self.shape
        size = batch * keys * heads_kv * head_dim
        count = max(1, min(self.flat[0].numel() // size, -(-ROTATED_BYTES // (4 * size))))
        q = torch.randn(batch, 1, heads_kv * group, head_dim, device=DEVICE, dtype=torch.bfloat16)
        lengths, table, rows = torch.full((batch,), keys, dtype=torch.int32, device=DEVICE), None, (batch, keys)
        if layout == "paged":
            rows = (batch * keys // PAGE_SIZE, PAGE_SIZE)
            table = torch.randperm(rows[0], device=DEVICE).int().view(batch, -1)
        caches = [
            tuple(x[i * size : (i + 1) * size].view(*rows, heads_kv, head_dim) for x in self.flat) for i in range(count)
        ]

        def run():
            for k, v in caches:
                attend(q, k, v, lengths, table, causal=True, num_splits=num_splits)

        return run, count


def median_us(torch, step, count):
    """Microseconds of one call, from replays of a captured step."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    spans, repeats = [], 1
    for turn in range(ROUNDS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        span = start.elapsed_time(end) / repeats
        if turn == 0:
            repeats = max(1, round(SLOT_MS / max(span, 1e-3)))
        else:
            spans.append(span)
    return 1e3 * statistics.median(spans) / count


def worthwhile(shape, batch, num_sms):
    """Numbers of splits to try by hand."""
    _, heads_kv, _, keys, _ = shape
    most = max(4, WAVES * num_sms // (batch * heads_kv))
    return [splits for splits in SPLITS if splits <= min(most, keys // 128)]


def measure(torch, fa4_kernels, shape, batches, by_hand):
    """A row for each batch: times by number of splits (0: the number that is chosen)."""
    peak = next((rate for name, rate in PEAK_BYTES_A_SECOND.items() if name in torch.cuda.get_device_name()), None)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    batches = [batch for batch in batches if bytes_of(shape, batch) <= MAX_BYTES]
    caches, rows = Caches(torch, shape, batches), []
    for batch in batches:
        tried = [0, *(worthwhile(shape, batch, num_sms) if by_hand else ())]
        row = {"shape": list(shape), "batch": batch, "us": {}}
        for splits in tried:
            try:
                step, count = caches.step(fa4_kernels.flash_attn_with_kvcache, batch, splits)
                row["us"][str(splits)] = round(median_us(torch, step, count), 2)
            except Exception as error:
                row.setdefault("errors", {})[str(splits)] = reason(error)
        by = {splits: us for splits, us in row["us"].items() if splits != "0"} or row["us"]
        if row["us"]:
            best = min(by, key=by.get)
            row |= {"best": best, "over_best": round(row["us"]["0"] / by[best], 3)}
            row["share"] = round(bytes_of(shape, batch) / row["us"]["0"] * 1e6 / peak, 3) if peak else None
        rows.append(row)
    return rows


def drawn(seed, count=24):
    """Shapes and batches from a seed: [(shape, batches)]."""
    draw = random.Random(seed)
    shapes = []
    for _ in range(count):
        shape = (
            draw.choice((64, 96, 128, 256)),
            draw.choice((1, 2, 4, 8, 16)),
            draw.choice((1, 2, 4, 8, 16)),
            draw.choice((1, 2, 4, 8, 16, 32, 64)) * 1024,
            draw.choice(("varlen", "paged")),
        )
        shapes.append((shape, sorted(draw.sample(range(1, 257), 8))))
    return shapes


def title(row):
    """hd64 8 x 8 heads, 32768 keys varlen, batch 12."""
    head_dim, heads_kv, group, keys, layout = row["shape"]
    return f"hd{head_dim} {heads_kv} x {group} heads, {keys} keys {layout}, batch {row['batch']}"


def falls(rows):
    """(times by which bytes a second fall from one batch to the next, title), steepest first."""
    found = []
    for row, later in itertools.pairwise(rows):
        if row["shape"] == later["shape"] and row.get("share") and later.get("share"):
            found.append((round(row["share"] / later["share"], 3), title(later)))
    return sorted(found, reverse=True)


def show(rows):
    """Worst rows first."""
    timed = [row for row in rows if "over_best" in row]
    for row in sorted(timed, key=lambda row: -row["over_best"])[:25]:
        times = f"{row['us']['0']:8.1f} us chosen, {row['us'][row['best']]:8.1f} with {row['best']:>3s}"
        print(f"{row['over_best']:6.2f} of the best ({times}), share {row['share'] or 0:.2f}: {title(row)}")
    for fall, name in falls(timed)[:10]:
        print(f"bandwidth falls {fall:5.2f} times to {name}")
    over = [row["over_best"] for row in timed]
    if over:
        mean = statistics.geometric_mean(over)
        print(f"{len(over)} rows, chosen over best: geometric mean {mean:.3f}, worst {max(over)}")
    for row in rows:
        for splits, text in row.get("errors", {}).items():
            print(f"error, {splits} splits: {title(row)}: {text}")


def child(arguments):
    import fa4_kernels
    import torch

    torch.manual_seed(1)
    record = setting(torch) | {"rows": [], "seed": arguments.seed}
    work = [(shape, BATCHES) for shape in SHAPES] if arguments.seed is None else drawn(arguments.seed)
    for shape, batches in work:
        try:
            with torch.no_grad():
                record["rows"] += measure(torch, fa4_kernels, shape, batches, not arguments.chosen_only)
        except Exception as error:
            record["rows"].append({"shape": list(shape), "batch": 0, "us": {}, "errors": {"0": reason(error)}})
        torch.cuda.empty_cache()
        write(record, arguments.out)
    show(record["rows"])
    return 1 if any("errors" in row for row in record["rows"]) else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel_dir")
    parser.add_argument("--out", default="decode_splits.json")
    parser.add_argument("--chosen-only", action="store_true", help="do not try numbers of splits by hand")
    parser.add_argument("--seed", type=int, help="draw shapes instead of the list above")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return child(arguments) if arguments.child else run_installed(__file__, arguments.wheel_dir)


if __name__ == "__main__":
    sys.exit(main())
