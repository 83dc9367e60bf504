"""Drawings that need nothing built: what the numerics and the rooflines say."""

from collections.abc import Callable

from fa4build.report.plots import WIDTH, Plot
from fa4build.report.style import MUTED, SERIES, plotting, to_svg


def model_plots() -> tuple[Plot, ...]:
    """All of them, in the page's order."""
    makers: tuple[Callable[[], Plot], ...] = (_exp2_error, _rescale_rates, _forward_roofline, _tile_bounds)
    with plotting():
        return tuple(make() for make in makers)


def _exp2_error() -> Plot:
    """|relative error| of the emulated exp2 over one period, by degree."""
    import numpy as np
    from matplotlib.figure import Figure

    from fa4build.numerics.exp2 import error_curve
    from fa4build.numerics.kernel_blocks import polynomials

    figure = Figure(figsize=(WIDTH, 2.6))
    ax = figure.subplots()
    for color, degree in zip(SERIES, sorted(polynomials()), strict=False):
        x, error = error_curve(degree, points=400)
        ax.semilogy(x[1:], np.maximum(np.abs(error[1:]), 1e-9), color=color, label=f"degree {degree}")
    ax.axhline(2.0**-9, color=MUTED, linestyle="--", linewidth=1)
    ax.annotate("half a unit of bf16, at least", (0.01, 2.0**-9), xytext=(0, 3), textcoords="offset points", fontsize=8)
    ax.set_ylim(1e-9, 1e-2)
    ax.set_xlim(0, 1)
    ax.set_xlabel("fraction of x")
    ax.set_ylabel("|relative error|")
    figure.legend(ncols=3, loc="outside lower center")
    figure.set_layout_engine("constrained")
    return Plot(
        name="exp2-error",
        title="Error of the polynomial exp2",
        caption="Over one period; it repeats. Degree 3, which the kernels use, stays far below bf16's rounding of P.",
        svg=to_svg(figure, "exp2-error"),
    )


def _rescale_rates() -> Plot:
    """Share of warps and rows that rescale, by threshold."""
    from matplotlib.figure import Figure

    from fa4build.numerics.experiments import FLAT, PEAKED, RISING, STEEP, rescale_rates

    thresholds = tuple(float(value) for value in range(13))
    figure = Figure(figsize=(WIDTH, 2.6))
    axes = figure.subplots(1, 2, sharey=True)
    for color, scores in zip(SERIES, (FLAT, PEAKED, RISING, STEEP), strict=False):
        rates = rescale_rates(scores, thresholds, seeds=(0,))
        axes[0].plot(thresholds, [100 * rate.rows for rate in rates], color=color, label=scores.name)
        axes[1].plot(thresholds, [100 * rate.warps for rate in rates], color=color)
    for ax, title in zip(axes, ("rows", "warps (any of 32 rows)"), strict=True):
        ax.axvline(8, color=MUTED, linestyle="--", linewidth=1)
        ax.set_title(title)
        ax.set_xlabel("threshold, log2 units")
        ax.set_ylim(0, 102)
    axes[0].set_ylabel("% of steps that rescale")
    figure.legend(ncols=2, loc="outside lower center")
    figure.set_layout_engine("constrained")
    return Plot(
        name="rescale-rates",
        title="How often the output is rescaled",
        caption="256 rows, 8192 keys in blocks of 128, scores in log2 units. The kernels use threshold 8 (dashed) for "
        "16-bit types and 0 for fp8.",
        svg=to_svg(figure, "rescale-rates"),
    )


def _forward_roofline() -> Plot:
    """Share of the tensor core's peak that a forward can reach, by head_dim and emulated share."""
    from matplotlib.figure import Figure

    from fa4build.timing.rates import forward_tile_bounds

    dims = tuple(range(32, 257, 16))
    figure = Figure(figsize=(WIDTH, 2.6))
    ax = figure.subplots()
    lines = [("sm90a", 0.0), ("sm100a", 0.0), ("sm100a", 0.125), ("sm100a", 0.25), ("sm103a", 0.0)]
    for color, (arch, emulated) in zip(SERIES, lines, strict=False):
        shares = []
        for dim in dims:
            bounds = forward_tile_bounds(arch, 128, 128, dim, dim, emulated)
            products = bounds["qk"] + bounds["pv"]
            shares.append(100 * products / max(products, bounds["mufu"], bounds["fma"]))
        label = arch if not emulated else f"{arch}, {100 * emulated:g} % emulated"
        ax.plot(dims, shares, color=color, label=label, linestyle="--" if emulated else "-")
    ax.set_xticks((32, 64, 96, 128, 192, 256))
    ax.set_xlabel("head dim")
    ax.set_ylabel("% of tensor peak")
    ax.set_ylim(0, 104)
    figure.legend(ncols=3, loc="outside lower center")
    figure.set_layout_engine("constrained")
    return Plot(
        name="forward-roofline",
        title="Roofline of the forward",
        caption="Tensor-core time over the time of the busiest unit, perfect overlap. Below 100 % exponentials bound "
        "the tile; each that moves to the FMA pipe helps.",
        svg=to_svg(figure, "forward-roofline"),
    )


def _tile_bounds() -> Plot:
    """Cycles a tile occupies each unit on sm_100a, forward and backward."""
    from matplotlib.figure import Figure

    from fa4build.numerics.roofline import backward_bounds, forward_bounds

    tiles = [(f"forward hd{dim}", forward_bounds("sm100a", 128, 128, dim)) for dim in (64, 128)]
    tiles += [
        (f"backward hd{dim}, {ctas} CTA", backward_bounds("sm100a", dim, ctas)) for dim in (64, 128) for ctas in (1, 2)
    ]
    figure = Figure(figsize=(WIDTH, 2.6))
    ax = figure.subplots()
    for number, unit in enumerate(("mma", "shared", "exp")):
        places = [index + 0.27 * (number - 1) for index in range(len(tiles))]
        values = [getattr(bounds, unit) for _, bounds in tiles]
        bars = ax.bar(
            places,
            values,
            width=0.25,
            color=SERIES[number],
            label={"mma": "tensor core", "exp": "exponentials", "shared": "shared memory"}[unit],
        )
        ax.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    ax.set_xticks(range(len(tiles)), [name.replace(", ", "\n").replace(" hd", "\nhd") for name, _ in tiles])
    ax.set_ylabel("cycles")
    ax.grid(axis="x", visible=False)
    figure.legend(ncols=3, loc="outside lower center")
    figure.set_layout_engine("constrained")
    return Plot(
        name="tile-bounds",
        title="What one 128 x 128 tile occupies (sm_100a)",
        caption="Least cycles by unit, by counting. In the 1-CTA backward shared memory takes 30 % (head dim 128) to "
        "50 % (64) longer than the tensor core; a pair of CTAs brings that to 5 % at head dim 128.",
        svg=to_svg(figure, "tile-bounds"),
    )
