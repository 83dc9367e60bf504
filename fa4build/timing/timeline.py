"""A picture of a timed launch: one row a warp, one for the tensor cores; filled where it works, thin where it waits.

A self-contained SVG that follows the reader's light or dark scheme. What is drawn is the end of the launch's steady
part by default, where one can see two or three blocks.
"""

from xml.sax.saxutils import escape

from fa4build.timing.replay import Interval, Timing

_WIDTH, _LEFT, _ROW, _TOP = 1200, 150, 16, 46
_STYLE = """
svg { background: #ffffff; font: 11px system-ui, sans-serif }
text { fill: #1f2328 } .axis { stroke: #8c959f; stroke-width: 0.5 } .wait { fill: #d0d7de }
.r0 { fill: #0969da } .r1 { fill: #bc4c00 } .r2 { fill: #1a7f37 } .r3 { fill: #8250df } .r4 { fill: #9a6700 }
.shared { fill: #0550ae } .tensor { fill: #cf222e }
@media (prefers-color-scheme: dark) {
svg { background: #0d1117 } text { fill: #e6edf3 } .axis { stroke: #6e7681 } .wait { fill: #30363d }
.r0 { fill: #58a6ff } .r1 { fill: #ffa657 } .r2 { fill: #3fb950 } .r3 { fill: #bc8cff } .r4 { fill: #d29922 }
.shared { fill: #79c0ff } .tensor { fill: #ff7b72 }
}"""


def timeline_svg(timing: Timing, *, start: float | None = None, end: float | None = None, title: str = "") -> str:
    """The picture of clocks [start, end).

    Args:
        start, end: None: the last 60 % to 90 % of the launch, at most 12 000 clocks.
        title: above the picture; empty: kernel and architecture.
    """
    if end is None:
        end = 0.9 * timing.cycles
    if start is None:
        start = max(0.6 * timing.cycles, end - 12_000)
    warps = [w for w in timing.warps if w.cta == timing.warps[0].cta and w.role != "other"]
    roles = list(dict.fromkeys(w.role for w in warps))
    height = _TOP + _ROW * (len(warps) + 1) + 30
    head = title or f"{timing.kernel} on {timing.arch}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        f"<title>{escape(head)}</title><style>{_STYLE}</style>",
        f'<text x="8" y="16">{escape(head)}</text>',
        f'<text x="8" y="32">{escape(_summary(timing))}</text>',
    ]
    parts += _products_row(timing, start, end)
    for row, warp in enumerate(warps, start=1):
        parts += _warp_row(warp, row, roles.index(warp.role) % 5, start, end)
    parts += _axis(start, end, _TOP + _ROW * (len(warps) + 1))
    return "\n".join([*parts, "</svg>", ""])


def _summary(timing: Timing) -> str:
    shares = sorted(timing.utilisation.items(), key=lambda pair: -pair[1])
    return f"{timing.cycles:.0f} clocks; in use: " + ", ".join(f"{unit} {share:.0%}" for unit, share in shares[:6])


def _x(clock: float, start: float, end: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - 10) * (clock - start) / (end - start)


def _bar(interval: Interval, row: int, style: str, start: float, end: float, thin: bool = False) -> str:
    low, high = max(interval.start, start), min(interval.end, end)
    if low >= high:
        return ""
    left, right = _x(low, start, end), _x(high, start, end)
    top, tall = (_TOP + _ROW * row + 6, 3) if thin else (_TOP + _ROW * row + 1, _ROW - 3)
    return f'<rect class="{style}" x="{left:.1f}" y="{top}" width="{max(right - left, 0.3):.1f}" height="{tall}"/>'


def _label(text: str, row: int) -> str:
    return f'<text x="8" y="{_TOP + _ROW * row + 11}">{escape(text)}</text>'


def _products_row(timing: Timing, start: float, end: float) -> list[str]:
    """Products by where operand A lies: Q K^T reads it from shared memory, P V from tensor memory."""
    parts = [_label("tensor cores", 0)]
    for product in timing.products:
        parts.append(_bar(product, 0, "tensor" if product.kind == "tensor memory" else "shared", start, end))
    return [part for part in parts if part]


def _warp_row(warp, row: int, colour: int, start: float, end: float) -> list[str]:
    parts = [_label(f"{warp.index} {warp.role}", row)]
    at = 0.0
    for wait in warp.waits:
        parts.append(_bar(Interval(start=at, end=wait.start, kind="busy"), row, f"r{colour}", start, end))
        parts.append(_bar(wait, row, "wait", start, end, thin=True))
        at = wait.end
    parts.append(_bar(Interval(start=at, end=warp.end, kind="busy"), row, f"r{colour}", start, end))
    return [part for part in parts if part]


def _axis(start: float, end: float, y: int) -> list[str]:
    step = next(s for s in (100, 200, 500, 1000, 2000, 5000, 10_000, 10**9) if (end - start) / s <= 14)
    parts = []
    tick = -(-start // step) * step
    while tick <= end:
        x = _x(tick, start, end)
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{y + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle">{tick:.0f}</text>')
        tick += step
    return parts
