"""Which commit this fa4build is from: read from the files of a checkout, or from what the build of a package wrote.

No program is run: git need not be installed, and a command's start does not wait for it.
"""

import re
from pathlib import Path

COMMIT_FILE = Path(__file__).parents[1] / "commit.txt"
"""In an installed fa4build that was built from a checkout (packaging/commit_hook.py)."""

_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def commit() -> str | None:
    """The commit, 40 hexadecimal digits; None where there is none, as in an unpacked source archive."""
    return commit_of(Path(__file__).parents[2]) or _checked(_text(COMMIT_FILE))


def commit_of(root: Path) -> str | None:
    """The commit that a checkout stands on; changed files do not show. None where `root` is no checkout."""
    git = _git_directory(root)
    head = _text(git / "HEAD") if git else ""
    if not head.startswith("ref: "):
        return _checked(head)
    name = head.removeprefix("ref: ")
    common = git / (_text(git / "commondir") or ".")
    return _checked(_text(git / name) or _text(common / name) or _packed(common, name))


def _git_directory(root: Path) -> Path | None:
    """`.git`, or what it names in a worktree."""
    git = root / ".git"
    if git.is_dir():
        return git
    named = _text(git).removeprefix("gitdir: ")
    return root / named if named else None


def _packed(common: Path, name: str) -> str:
    lines = _text(common / "packed-refs").splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _checked(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None
