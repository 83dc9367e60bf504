"""Drawings of what was built and measured. Each takes values; where there is nothing to draw there is no drawing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa4build.report.benchmarks import Benchmark, Comparison
from fa4build.report.collect import ReportData, VariantRow
from fa4build.report.grid import kind_of
from fa4build.report.libraries import is_known, look_of
from fa4build.report.ratios import unit_of
from fa4build.report.style import INK, PAPER, SERIES, plotting, to_svg

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.6  # inches; the page shows drawings as wide as its column

MAIN_OPS = ("fwd", "bwd")

MIX = (
    "mma",
    "mufu",
    "fma",
    "alu",
    "shared_load",
    "shared_store",
    "tmem_load",
    "tmem_store",
    "tma",
    "mbarrier",
    "fence",
)
"""Classes shown in the instruction mix; the rest is `other`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """name: also the anchor in the page. caption: what to see. svg: the drawing."""

    name: str
    title: str
    caption: str
    svg: str


def build_plots(data: ReportData) -> tuple[Plot, ...]:
    """Registers, instruction mix, sizes, compression. Without anything compiled only packs are drawn."""
    rows = data.compiled()
    has_main = any(row.op in MAIN_OPS for row in rows)
    with plotting():
        drawn = (
            _registers(rows) if has_main else None,
            _instruction_mix(rows),
            _sizes(rows) if has_main else None,
            _compression(data),
        )
    return tuple(plot for plot in drawn if plot is not None)


def comparison_plots(comparisons: Sequence[Comparison]) -> tuple[Plot, ...]:
    """One drawing a side-by-side run of the timing model."""
    with plotting():
        return tuple(_comparison(comparison, number) for number, comparison in enumerate(comparisons, 1))


def benchmark_plots(benchmarks: Sequence[Benchmark]) -> tuple[Plot, ...]:
    """One drawing a list of measurements."""
    with plotting():
        return tuple(_benchmark(benchmark, number) for number, benchmark in enumerate(benchmarks, 1))


# --- what was built ---------------------------------------------------------------------------------------------------


def _panels(rows: Sequence[VariantRow], height: float) -> "tuple[Figure, list[tuple[Axes, list[VariantRow]]]]":
    """A panel for each target of each main op, three in a line; the small kernels around them are in the table only."""
    from matplotlib.figure import Figure

    groups: dict[str, list[VariantRow]] = {}
    for row in rows:
        if row.op in MAIN_OPS:
            groups.setdefault(f"{row.op}, {row.arch}", []).append(row)
    columns = min(3, len(groups))
    lines = -(-len(groups) // columns)
    figure = Figure(figsize=(WIDTH, 0.6 + height * lines), layout="constrained")
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
    for ax in list(axes.flat)[len(groups) :]:
        ax.remove()
    panels = []
    for ax, (title, own) in zip(axes.flat, groups.items(), strict=False):
        ax.set_title(title)
        ax.set_xlabel("head dim")
        panels.append((ax, own))
    return figure, panels


def _registers(rows: Sequence[VariantRow]) -> Plot:
    """Registers a thread at launch against head_dim, a dot a variant."""
    figure, panels = _panels(rows, 1.9)
    masks = sorted({str(row.axes["mask"]) for _, own in panels for row in own})
    for ax, own in panels:
        dims = sorted({_dims(row) for row in own}, key=_dims_order)
        for number, mask in enumerate(masks):
            points = Counter(
                (dims.index(_dims(row)) + 0.22 * (number - (len(masks) - 1) / 2), row.facts["registers"])
                for row in own
                if str(row.axes["mask"]) == mask
            )
            areas = [14 + 4 * count for count in points.values()]
            x, y = zip(*points, strict=True) if points else ((), ())
            ax.scatter(x, y, s=areas, color=SERIES[number], label=mask, alpha=0.8, linewidths=0)
        ax.set_xticks(range(len(dims)), dims)
        ax.set_ylim(0, 264)
    panels[0][0].set_ylabel("registers per thread")
    figure.legend(*panels[0][0].get_legend_handles_labels(), ncols=4, loc="outside lower center")
    spilled = sum(bool(row.facts.get("spill_bytes")) for row in rows)
    return Plot(
        name="registers",
        title="Registers",
        caption=f"Registers per thread at launch, by head dim and mask. "
        f"A larger dot stands for more kernels. {spilled} of {len(rows)} kernels spill.",
        svg=to_svg(figure, "registers"),
    )


def _dims(row: VariantRow) -> str:
    first, second = row.axes["head_dim"], row.axes["head_dim_v"]
    return str(first) if first == second else f"{first}x{second}"


def _dims_order(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def _instruction_mix(rows: Sequence[VariantRow]) -> Plot | None:
    """PTX statements by class, one bar a head dimension of a target and op."""
    from matplotlib.figure import Figure

    shown = _representatives([row for row in rows if row.instructions is not None and row.op in MAIN_OPS])
    if not shown:
        return None
    figure = Figure(figsize=(WIDTH, 0.9 + 0.2 * len(shown)))
    ax = figure.subplots()
    left = [0] * len(shown)
    parts = [(name, [(row.instructions or {}).get(name, 0) for row in shown]) for name in MIX]
    total = [sum((row.instructions or {}).values()) for row in shown]
    parts.append(("other", [all_ - sum(counts[i] for _, counts in parts) for i, all_ in enumerate(total)]))
    for number, (name, counts) in enumerate(part for part in parts if any(part[1])):
        hatch = "" if number < len(SERIES) else "////"
        ax.barh(
            range(len(shown)),
            counts,
            left=left,
            color=SERIES[number % len(SERIES)],
            label=name,
            hatch=hatch,
            height=0.75,
            edgecolor=PAPER,
            linewidth=0,
        )
        left = [a + b for a, b in zip(left, counts, strict=True)]
    ax.set_yticks(range(len(shown)), [row.id for row in shown], fontsize=7.5)
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("PTX statements")
    figure.legend(ncols=6, loc="outside lower center")
    figure.set_layout_engine("constrained")
    return Plot(
        name="instruction-mix",
        title="Instruction mix",
        caption="PTX statements by unit, counted in the text and not in execution; they do not model speed. "
        "One kernel per head dim, dense and causal if there is one.",
        svg=to_svg(figure, "instruction-mix"),
    )


def _representatives(rows: Sequence[VariantRow]) -> list[VariantRow]:
    """For each target, op and head dimension one kernel: causal and with nothing else if there is such a one."""
    chosen: dict[tuple[str, str, str], VariantRow] = {}
    for row in sorted(rows, key=lambda row: (kind_of(row) != "dense", row.axes["mask"] != "causal")):
        chosen.setdefault((row.arch, row.op, _dims(row)), row)
    return [row for row in rows if chosen[row.arch, row.op, _dims(row)] is row]


def _sizes(rows: Sequence[VariantRow]) -> Plot:
    """Size of cubin and launch plan against head_dim."""
    figure, panels = _panels(rows, 1.7)
    for ax, own in panels:
        dims = sorted({_dims(row) for row in own}, key=_dims_order)
        for number, (name, label) in enumerate((("cubin", "cubin"), ("plan", "launch plan"))):
            values = [[row.sizes[name] / 1000 for row in own if _dims(row) == dim] for dim in dims]
            middle = [sum(of_dim) / len(of_dim) for of_dim in values]
            x = [i + 0.38 * (number - 0.5) for i in range(len(dims))]
            below = [max(0.0, mean - min(of_dim)) for mean, of_dim in zip(middle, values, strict=True)]
            above = [max(0.0, max(of_dim) - mean) for mean, of_dim in zip(middle, values, strict=True)]
            ax.bar(x, middle, width=0.36, color=SERIES[number], label=label)
            ax.errorbar(x, middle, yerr=[below, above], fmt="none", ecolor=INK, elinewidth=0.8, capsize=2)
        ax.set_xticks(range(len(dims)), dims)
    panels[0][0].set_ylabel("kB")
    figure.legend(*panels[0][0].get_legend_handles_labels(), ncols=2, loc="outside lower center")
    return Plot(
        name="sizes",
        title="Sizes",
        caption="Uncompressed size of what ships for a variant: mean, minimum and maximum per head dim.",
        svg=to_svg(figure, "sizes"),
    )


def _compression(data: ReportData) -> Plot | None:
    """Raw and packed bytes of every pack."""
    from matplotlib.figure import Figure

    if not data.packs:
        return None
    figure = Figure(figsize=(WIDTH, 0.7 + 0.45 * len(data.packs)))
    ax = figure.subplots()
    places = range(len(data.packs))
    ax.barh(
        places, [pack.raw_bytes / 1e6 for pack in data.packs], color=SERIES[1], height=0.6, label="kernels and plans"
    )
    ax.barh(
        places, [pack.packed_bytes / 1e6 for pack in data.packs], color=SERIES[0], height=0.6, label="as packed (xz)"
    )
    for place, pack in zip(places, data.packs, strict=True):
        ratio = f" {pack.raw_bytes / pack.packed_bytes:.1f} x smaller"
        ax.annotate(ratio, (pack.raw_bytes / 1e6, place), va="center", fontsize=8.5)
    ax.set_yticks(places, [f"{pack.name}\n{pack.kernels} kernels" for pack in data.packs])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.2)
    ax.set_xlabel("MB")
    figure.legend(ncols=2, loc="outside lower center")
    figure.set_layout_engine("constrained")
    return Plot(
        name="compression",
        title="Compression",
        caption="The kernels of a pack are compressed in solid groups: what variants share is stored once.",
        svg=to_svg(figure, "compression"),
    )


# --- benchmarks -------------------------------------------------------------------------------------------------------


def _benchmark(benchmark: Benchmark, number: int) -> Plot:
    """A panel a problem; the same colour is the same library in all of them."""
    from matplotlib.figure import Figure

    columns = min(3, len(benchmark.panels))
    lines = -(-len(benchmark.panels) // columns)
    figure = Figure(figsize=(WIDTH, 0.5 + 1.9 * lines))
    axes = figure.subplots(lines, columns, squeeze=False)
    names = list(dict.fromkeys(name for panel in benchmark.panels for name in panel.series))
    unknown = tuple(name for name in names if not is_known(name))
    for ax, panel in zip(axes.flat, benchmark.panels, strict=False):
        for name, points in panel.series.items():
            look = look_of(name, unknown)
            x, y = zip(*points, strict=True)
            ax.plot(x, y, look.style, marker="o", markersize=3, color=look.color, label=look.label)
        _seqlen_axis(ax, sorted({x for points in panel.series.values() for x, _ in points}))
        ax.set_title(panel.title, fontsize=8.5)
        ax.set_ylim(bottom=0)
    for ax in list(axes.flat)[len(benchmark.panels) :]:
        ax.remove()
    handles: dict[str, Artist] = {}
    for ax in figure.axes:
        handles.update(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(list(handles.values()), list(handles), ncols=4, loc="outside lower center")
    figure.supylabel(unit_of(benchmark.name), fontsize=8.5)
    figure.set_layout_engine("constrained")
    setting = ", ".join(f"{name} {value}" for name, value in benchmark.setting.items())
    name = f"benchmark-{number}"
    title = f"{benchmark.name.replace('_', ' ')} ({benchmark.source})"
    return Plot(name=name, title=title, caption=setting or "The file names no device.", svg=to_svg(figure, name))


def _comparison(comparison: Comparison, number: int) -> Plot:
    """Bars of cycles a block, a kernel a colour."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for case in comparison.cases.values() for name in case))
    figure = Figure(figsize=(WIDTH, 0.9 + 0.36 * len(comparison.cases)), layout="constrained")
    ax = figure.subplots()
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        measured = [(i, case[name]) for i, case in enumerate(comparison.cases.values()) if name in case]
        places = [i + height * (index - (len(names) - 1) / 2) for i, _ in measured]
        cycles = [of_case for _, of_case in measured]
        look = look_of(name, tuple(names))
        bars = ax.barh(places, cycles, height=0.9 * height, color=look.color, label=look.label)
        ax.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    ax.set_yticks(range(len(comparison.cases)), list(comparison.cases), fontsize=8)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.1)
    ax.set_xlabel("cycles per KV block")
    figure.legend(ncols=len(names), loc="outside lower center")
    name = f"timing-{number}"
    return Plot(
        name=name,
        title=f"Cycles in the timing model ({comparison.source})",
        caption="Steady state, both kernels in the same model. A case with one bar has no counterpart.",
        svg=to_svg(figure, name),
    )


def _seqlen_axis(ax: "Axes", values: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(values, [f"{value // 1024}k" if value % 1024 == 0 else str(value) for value in values])
    ax.tick_params(axis="x", which="minor", length=0, labelbottom=False)
