"""Timelines of the timing model: its drawings (SVG), from `<cache>/timing/` and from folders that the user names.

They go into the page as pictures: their style sheets reach nothing else there, and no browser runs code in a picture.
"""

import base64
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_FORBIDDEN = ("script", "foreignObject", "image", "iframe", "object", "embed")
_OUTSIDE = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """name: of the file, a variant's id. svg: an `<svg>` element that refers to nothing outside itself."""

    name: str
    svg: str

    @property
    def address(self) -> str:
        """The picture as a `data:` address."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}"


def read_timelines(folders: Iterable[Path]) -> tuple[Timeline, ...]:
    """Every timeline, by name. A drawing that is no SVG, runs code or refers elsewhere is left out."""
    found = []
    for path in sorted((path for folder in folders for path in folder.glob("*.svg")), key=lambda path: path.name):
        svg = inline_svg(path.read_text(encoding="utf-8"))
        if svg is not None:
            found.append(Timeline(name=path.stem, svg=svg))
    return tuple(found)


def inline_svg(text: str) -> str | None:
    """The element alone, without XML header and DOCTYPE; None if it must not go into a page."""
    try:
        root = ET.fromstring(text)
    except ET.ParseError:
        return None
    if root.tag.rpartition("}")[2] != "svg":
        return None
    for element in root.iter():
        if str(element.tag).rpartition("}")[2] in _FORBIDDEN:
            return None
        for name, value in element.attrib.items():
            plain = name.rpartition("}")[2].lower()
            if plain.startswith("on") or (plain in ("href", "src") and _OUTSIDE.match(value)):
                return None
    return text[text.index("<svg") :].strip()
