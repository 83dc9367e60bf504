"""How plots look: one matplotlib setting, and drawings whose colours follow the page's light and dark themes.

Drawings are made in placeholder colours that become CSS variables, so that one drawing serves both themes and print.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fa4build.errors import Fa4BuildError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Placeholder -> CSS variable. The numbers mean nothing; they must only differ from one another.
INK, MUTED, GRID, PAPER = "#010203", "#040506", "#070809", "#0a0b0c"
SERIES = ("#100001", "#100002", "#100003", "#100004", "#100005", "#100006", "#100007", "#100008")
_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"} | {
    color: f"series-{number}" for number, color in enumerate(SERIES, 1)
}
_COLOR = re.compile("|".join(_VARIABLES))
_REFERENCE = re.compile(r"""(?:url\(#|href="#)([^")]+)""")
_ID = re.compile(r' id="([^"]+)"')

_SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text: small, selectable, in the reader's font
    "svg.hashsalt": "fa4build",  # the same drawing has the same bytes
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
}


@contextmanager
def plotting() -> Iterator[None]:
    """Inside, matplotlib draws in the report's style.

    Raises: Fa4BuildError when matplotlib is not installed.
    """
    try:
        import matplotlib
        from cycler import cycler
    except ImportError as error:
        raise Fa4BuildError(
            "the report needs matplotlib, which is not installed. Run: pip install 'fa4build[report]'. "
            "`fa4build report --json` works without."
        ) from error
    with matplotlib.rc_context({**_SETTINGS, "axes.prop_cycle": cycler(color=SERIES)}):
        yield


def to_svg(figure: "Figure", name: str) -> str:
    """A drawing as an `<svg>` element for a page that holds others: `name` goes before every id that is used."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", pad_inches=0.05, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    used = set(_REFERENCE.findall(text))
    text = _ID.sub(lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", text)
    text = _REFERENCE.sub(lambda match: match[0].replace(match[1], f"{name}-{match[1]}"), text)
    return _COLOR.sub(lambda match: f"var(--{_VARIABLES[match[0]]})", text).strip()
