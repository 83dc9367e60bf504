"""Contract of CONTRIBUTING.md, "Where things are": every room of the builder is on the map, and what the map and the
list of changes name is there. A stranger finds the one room to open.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CHANGES = 10


def rows(heading: str) -> list[tuple[str, ...]]:
    """Cells of the table below a heading, without its head."""
    section = TEXT.split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table[2:]]


def rooms_in(cell: str) -> list[str]:
    """Paths of a cell: what stands in backticks with a slash."""
    return [name for name in re.findall(r"`([^`]+)`", cell) if "/" in name]


MAP = [room for row in rows("## Where things are") for room in rooms_in(row[0])]
TO_OPEN = {row[0]: rooms_in(row[1]) for row in rows("### Which room to open")}


def test_every_room_of_the_builder_is_on_the_map():
    """A new folder or module at the top of fa4build/ is described before it is used."""
    top = {path for path in (ROOT / "fa4build").iterdir() if path.name not in ("__init__.py", "__pycache__")}
    tracked = {p.relative_to(ROOT).as_posix() for p in top if p.is_file() or any(f.is_file() for f in sources(p))}

    assert tracked - {name.rstrip("/") for name in MAP} == set()


def sources(folder: Path) -> list[Path]:
    """Files below a folder but byte code: an emptied folder can stay behind with it."""
    return [path for path in folder.rglob("*") if "__pycache__" not in path.parts]


def test_what_is_on_the_map_exists():
    """Folders with a slash at the end, files without."""
    wrong = [name for name in MAP if not ((ROOT / name).is_dir() if name.endswith("/") else (ROOT / name).is_file())]

    assert MAP
    assert wrong == []


@pytest.mark.parametrize("change", TO_OPEN)
def test_a_change_has_one_room(change):
    """And the room is there."""
    (room,) = TO_OPEN[change]

    assert (ROOT / room).exists()


def test_the_usual_changes_are_listed():
    """Ten of them."""
    assert len(TO_OPEN) >= CHANGES
