"""Jobs for the tests of the fork server: each is called with its work directory in a fresh child."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

SEEN: list[str] = []


def setup() -> dict[str, str]:
    """Nothing to import; tells the process that the children come from."""
    return {"server_pid": str(os.getpid())}


def warm() -> None:
    """What the server does ahead of several jobs."""
    SEEN.append("warmed")


def broken_setup() -> dict[str, str]:
    """A compiler that cannot be loaded."""
    raise ImportError("libcompiler.so: cannot open shared object file")


def remember(work_dir: Path) -> None:
    """Leave a trace in the process, and write what traces there are."""
    SEEN.append(work_dir.name)
    (work_dir / "seen").write_text(" ".join(SEEN))


def talk(work_dir: Path) -> None:
    """Print on both streams, from Python and from a child process of its own."""
    print("to stdout")
    print("to stderr", file=sys.stderr)
    sys.stdout.flush()
    subprocess.run(["echo", "from a tool"], check=True)


def environment(work_dir: Path) -> None:
    """Write the environment."""
    (work_dir / "environment").write_text("\n".join(f"{name}={value}" for name, value in sorted(os.environ.items())))


def import_blocked(work_dir: Path) -> None:
    """Import the module that the tests block."""
    import colorsys  # noqa: F401


def fail(work_dir: Path) -> None:
    """An ordinary error."""
    raise ValueError("tile_m 7 is odd")


def segfault(work_dir: Path) -> None:
    """Crash as a compiler does."""
    ctypes.string_at(0)


def hang(work_dir: Path) -> None:
    """Never end, with a tool running. Writes both process numbers first."""
    tool = subprocess.Popen(["sleep", "600"])
    (work_dir / "pids.tmp").write_text(f"{os.getpid()} {tool.pid}")
    (work_dir / "pids.tmp").rename(work_dir / "pids")
    time.sleep(600)


def run(work_dir: Path) -> None:
    """A compile that takes long, but for the third one."""
    if work_dir.name != "3":
        time.sleep(30)
