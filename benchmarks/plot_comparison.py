"""Draw what compare_on_device.py measured.

    python benchmarks/plot_comparison.py compare.json comparison.svg

One panel per direction and mask, TFLOP/s over sequence length and head dim; a last one with decoding as a share of the
memory bandwidth. Libraries have the colours of `fa4build report`. Needs matplotlib. The same file gives the same bytes.
"""

import argparse
import json
from pathlib import Path

SERIES = {
    "fa4_kernels": ("ours", "#1f6fd1"),
    "fa4_kernels_deterministic": ("ours, deterministic", "#8fb7e8"),
    "flash_attn_4": ("flash-attn-4", "#e07b1a"),
    "cudnn": ("cuDNN", "#2a9d5c"),
    "fa2": ("FlashAttention-2", "#7d55c7"),
}
GOAL = 0.75  # of the bandwidth


def bars(axes, rows, direction, is_causal):
    """A group of bars a row."""
    rows = [row for row in rows if row["causal"] == is_causal]
    shown = {name: look for name, look in SERIES.items() if any(name in row for row in rows)}
    width = 0.8 / len(shown)
    for i, (name, (label, colour)) in enumerate(shown.items()):
        places = [place + i * width for place, row in enumerate(rows) if name in row]
        axes.bar(places, [row[name] for row in rows if name in row], width, label=label, color=colour)
    centre = (len(shown) - 1) * width / 2
    labels = [f"{row['seqlen'] // 1024}k\nhd{row['head_dim']}" for row in rows]
    axes.set_xticks([place + centre for place in range(len(rows))], labels, fontsize=7)
    axes.set_title(f"{direction}, {'causal' if is_causal else 'full'}", fontsize=9)
    axes.set_ylabel("TFLOP/s", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=6, ncols=len(shown), loc="upper left", frameon=False)
    axes.set_ylim(0, 1.2 * max(row[name] for row in rows for name in shown if name in row))


def decoding(axes, rows, batches):
    """Shares by query rows, a line for each layout and batch; numbers of splits as chosen."""
    rows = [row for row in rows if not row["num_splits"] and row.get("share") is not None]
    for layout, style in (("paged", "-o"), ("varlen", "--s")):
        for batch, colour in zip(batches, ("#444444", "#888888", "#bbbbbb"), strict=False):
            points = [(row["rows"], row["share"]) for row in rows if (row["layout"], row["batch"]) == (layout, batch)]
            if points:
                axes.plot(
                    *zip(*points, strict=True), style, color=colour, label=f"{layout}, batch {batch}", markersize=3
                )
    axes.axhline(GOAL, color="grey", linewidth=0.8, linestyle=":", label=f"goal, {GOAL:.0%}")
    axes.set_title("decoding over a KV cache of 16k tokens, GQA 64/8, head_dim 128, ours", fontsize=9)
    axes.set_xlabel("query tokens per sequence", fontsize=8)
    axes.set_ylabel("share of 4.8 TB/s", fontsize=8)
    axes.set_xticks((1, 2, 4, 8))
    axes.set_ylim(0, 1.05)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6, ncols=2, frameon=False)


def draw(record, path):
    """Writes the picture; its format is that of the name."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fa4build"
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 10), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=(1, 1, 0.8))
    for i, direction in enumerate(("forward", "backward")):
        rows = [row for row in record[f"{direction}_tflops"] if any(name in row for name in SERIES)]
        for j, is_causal in enumerate((False, True)):
            bars(figure.add_subplot(grid[i, j]), rows, direction, is_causal)
    batches = sorted({row["batch"] for row in record["decoding"]})
    decoding(figure.add_subplot(grid[2, :]), record["decoding"], batches)
    versions = f"driver {record['driver']}, torch {record['torch']}, cuDNN {record['cudnn']}"
    figure.suptitle(f"{record['device']}, {versions}; bf16, 32k tokens, MHA, heads x head_dim = 2048", fontsize=10)
    figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    draw(json.loads(arguments.record.read_text()), arguments.picture)


if __name__ == "__main__":
    main()
