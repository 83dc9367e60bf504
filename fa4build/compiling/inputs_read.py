"""In the compile process: which files a compile has read, and whether all of them are in its cache key.

A key holds a kernel's declared sources, the distributions it is pinned to, and the builder. What a compile function
reads beside these (a helper module, a table of constants, an installed package) could change without a new key, and the
old cubin would be served for the new sources. So it is refused.

`watch` is called when the process starts, before any code of a family runs. It notes what is opened from then on; what
modules were loaded from is read at the end. Not seen: that a file is absent, the mere listing of a directory, and what
native code opens.
"""

# Text, not Path: this runs for every file that a process opens, and links must stay as they are.
# ruff: noqa: PTH100, PTH110, PTH112, PTH113, PTH120

from __future__ import annotations

import csv
import ctypes.util
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from fa4build.errors import CompileError

_BUILDER = Path(__file__).resolve().parents[1]
_OTHER_FAMILIES = _BUILDER / "families"
_SYSTEM = ("/proc/", "/sys/", "/dev/")
_PLUGIN_LIST = ".dist-info/entry_points.txt"
_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "socket.connect")

_TORCH_TAKES = ("numpy", "opt-einsum", "optree", "tqdm")
"""What `import torch` loads where it is installed, without requiring it: torch/hub.py, torch/backends/opt_einsum."""

_opened: dict[str, None] = {}  # in the order of their first opening
_ran: dict[str, None] = {}
_from_start: set[str] = set()  # what the interpreter loaded when it started, hooks of installed packages among it
_is_watched = False


def watch() -> None:
    """Note from now on what this process opens. Once a process: a hook cannot be taken back."""
    global _is_watched
    if not _is_watched:
        _is_watched = True
        _from_start.update(map(_real_file, _loaded()))
        sys.addaudithook(_note)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, (str, bytes, os.PathLike)) and not (flags or 0) & os.O_WRONLY:
            _opened.setdefault(os.path.abspath(os.fsdecode(path)))
    elif event == "ctypes.dlopen":
        if isinstance(arguments[0], str) and "/" in arguments[0]:
            _opened.setdefault(os.path.abspath(arguments[0]))
    elif event in _PROGRAMS and not _is_library_search():
        _ran.setdefault(f"{event} {arguments[0]!r}")


def _is_library_search() -> bool:
    """Whether `ctypes.util.find_library` asks: it runs ldconfig, the compiler's own packages call it on import."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != ctypes.util.__file__:
        frame = frame.f_back
    return frame is not None


def compiler_loads(load: Callable[[], object]) -> None:
    """Run `load`, which imports the compiler and nothing of a family: what it loads is the compiler's environment."""
    before = set(_loaded())
    ran = dict(_ran)
    load()
    _from_start.update(map(_real_file, set(_loaded()) - before))
    _ran.clear()
    _ran.update(ran)


def compile_without_stale_bytecode(directory: Path) -> None:
    """From now on, modules are compiled from their source: byte code is known by a time and a size only."""
    sys.pycache_prefix = str(directory / "bytecode")


def _loaded() -> Iterator[str]:
    """The files of all modules that are loaded."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            yield os.path.abspath(file)


def check_inputs(request: Mapping[str, Any], own_directories: Iterable[Path]) -> None:
    """Refuse a compile that read what its key does not hold.

    Args:
        request: `name`, `family`, `sources` ([path, sha256] of what the key holds) and `distributions` (names).
        own_directories: of this compile and of its server; what lies there was made by them.
    Raises: CompileError naming the file, the family and what to declare.
    """
    sources = {os.path.realpath(path): digest for path, digest in request["sources"]}
    ours = tuple(f"{os.path.realpath(path)}/" for path in own_directories)
    who = f"{request['name']}: family {request['family']}"
    for path in dict.fromkeys(map(_real_file, (*_loaded(), *_opened))):
        if not os.path.isfile(path) and path not in sources:
            continue  # looked for in vain, as parts of the import path are; or a directory
        if path in sources:
            if _digest(path) != sources[path]:
                raise CompileError(f"{who}: {path} was changed while the kernel was compiled from it. Build again.")
        elif path.endswith(_PLUGIN_LIST):
            continue  # whoever looks for plugins reads the lists of all distributions; a plugin in use is seen itself
        elif not path.startswith((*ours, *_SYSTEM)) and not _is_of_builder(path) and not _is_of_python(path):
            _check_installed(path, who, request)
    if _ran:
        raise CompileError(
            f"{who}: compiling runs a program or opens a connection ({next(iter(_ran))}); what that reads cannot be in "
            "the cache key. Do it in `kernels`, and pass what it finds in `payload`."
        )


def _real_file(path: str) -> str:
    """The file that a path leads to: byte code to its source, a member of an archive to the archive."""
    if path.endswith(".pyc"):
        try:
            path = importlib.util.source_from_cache(path)
        except ValueError:
            pass
    prefix = sys.pycache_prefix
    if prefix and path.startswith(f"{prefix}/"):
        path = path[len(prefix) :]
    while not os.path.exists(path) and os.path.isfile(os.path.dirname(path)):
        path = os.path.dirname(path)
    return os.path.realpath(path)


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _is_of_builder(path: str) -> bool:
    """Of fa4build itself; families are like anybody's, their files are in the keys of their own kernels."""
    return path.startswith(f"{_BUILDER}/") and not path.startswith(f"{_OTHER_FAMILIES}/")


@cache
def _python_directories() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(f"{os.path.realpath(paths[name])}/" for name in ("stdlib", "platstdlib"))


def _is_of_python(path: str) -> bool:
    """Of the standard library, by place; not what is installed below it."""
    return path.startswith(_python_directories()) and not re.search(r"/(site|dist)-packages/", path)


def _check_installed(path: str, who: str, request: Mapping[str, Any]) -> None:
    is_of_a_family = path.startswith(f"{_OTHER_FAMILIES}/")
    owner = None if is_of_a_family else owner_of(path)
    if owner is not None and (owner[0] in {*request["distributions"], *environment()} or owner[0] in _at_start()):
        return
    if owner is None and not is_of_a_family and path in _from_start:
        return  # sitecustomize, or what a tool that makes environments put beside the packages: the interpreter's own
    raise CompileError(
        f"{who}: compiling reads {path}, which its cache key does not hold: an edit would leave the old cubin in use. "
        f"{_remedy(path, owner, request['family'])}"
    )


def _remedy(path: str, owner: tuple[str, str] | None, family: str) -> str:
    if owner is not None:
        return f"Add Pinned(name={owner[0]!r}, tested=({owner[1]!r},)) to `distributions` of family {family}."
    return f"Add {path!r}, or its directory, to `sources` of family {family}."


@cache
def _at_start() -> frozenset[str]:
    """The distributions that interpreter and compiler loaded from, some of them without requiring them."""
    return frozenset(owner[0] for path in _from_start if (owner := owner_of(path)) is not None)


# --- installed distributions ------------------------------------------------------------------------------------------


def normalised(name: str) -> str:
    """A distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, PathDistribution]:
    """Every distribution on the path by its normalised name; the first on the path wins."""
    return dict(_installed(tuple(sys.path)))


@cache
def _installed(search_path: tuple[str, ...]) -> Mapping[str, PathDistribution]:
    found: dict[str, PathDistribution] = {}
    for entry in search_path:
        for name, path in _metadata_in(os.path.realpath(entry or ".")).items():
            found.setdefault(name, PathDistribution(path))
    return found


@cache
def _metadata_in(root: str) -> Mapping[str, Path]:
    paths = sorted(Path(root).glob("*.dist-info")) if os.path.isdir(root) else []
    return {normalised(path.name.removesuffix(".dist-info").rpartition("-")[0]): path for path in paths}


def requirements(names: Iterable[str]) -> dict[str, PathDistribution]:
    """These distributions and all that they require, as far as they are installed; extras where one is asked for."""
    known, seen = installed(), set[tuple[str, str]]()
    waiting = [(normalised(name), "") for name in names]
    while waiting:
        name, extra = wanted = waiting.pop()
        if name in known and wanted not in seen:
            seen.add(wanted)
            waiting += _required(known[name], extra)
    return {name: known[name] for name, _ in seen}


def _required(distribution: PathDistribution, extra: str) -> Iterator[tuple[str, str]]:
    """(distribution, extra) that one with this extra ("": with none) requires on this machine."""
    for line in distribution.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            name = normalised(requirement.name)
            yield from ((name, asked) for asked in ("", *requirement.extras))


def environment() -> frozenset[str]:
    """The compiler's own environment: it, fa4build and torch, and what these require.

    The compiler is in every key. The others (numpy among them) serve its host code; a key does not hold them.
    """
    return _environment(tuple(sys.path))


@cache
def _environment(search_path: tuple[str, ...]) -> frozenset[str]:
    compilers = [name for name in _installed(search_path) if name.startswith("nvidia-cutlass-dsl")]
    return frozenset(requirements([*compilers, "apache-tvm-ffi", "pyelftools", "fa4build", "torch", *_TORCH_TAKES]))


def owner_of(path: str) -> tuple[str, str] | None:
    """(distribution, version) that an installed file belongs to, as its RECORD says; None for any other file."""
    for entry in sys.path:
        root = os.path.realpath(entry or ".")
        if path.startswith(f"{root}/") and (owner := _owners_in(root).get(path)) is not None:
            return owner
    return None


@cache
def _owners_in(root: str) -> Mapping[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for name, distribution in _installed((root,)).items():
        owner = (name, distribution.version)  # parses the metadata: once, not for every row
        for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
            if row and not row[0].startswith(("..", "/")):
                found[f"{root}/{row[0]}"] = owner
    return found
