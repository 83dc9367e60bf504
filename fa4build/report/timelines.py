"""Timelines of the timing model: drawings (SVG) that a timing run leaves in the cache, `timing/<variant id>.svg`."""

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

_FORBIDDEN = ("script", "foreignObject", "image", "iframe", "object", "embed")
_OUTSIDE = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """name: the variant's id. svg: an `<svg>` element that refers to nothing outside itself and runs nothing."""

    name: str
    svg: str


def read_timelines(cache_root: Path) -> tuple[Timeline, ...]:
    """Every timeline of a cache, by name. A drawing that is no SVG, runs code or refers elsewhere is left out."""
    found = []
    for path in sorted((cache_root / "timing").glob("*.svg")):
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
