"""What a family's kernels are made of, found without running any of it: files and installed distributions.

The file of a compile function's module is a source, and so is every module that it imports, packages' `__init__` among
them, as far as imports are statements. Modules of installed distributions bring the whole distribution instead. What is
found in no such way is refused in the compile process (`compiling.inputs_read`), so nothing rests on this being
complete.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.metadata import PathDistribution
from pathlib import Path

from fa4build.compiling import inputs_read
from fa4build.compiling.toolchain import record_sha256
from fa4build.errors import VariantError

_BUILDER = Path(__file__).resolve().parents[1]
_FAMILIES = Path(__file__).resolve().parent
_PACKAGE_FILES = ("__init__.py",)

Stamp = tuple[str, int, int]  # path, modification time in ns, size in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredients:
    """What a kernel is made of.

    Attributes:
        named: (name, sha256), sorted: a part of the key. Names are the same wherever the files lie.
        files: (path, sha256): the same files where they lie here.
        distributions: names of the installed distributions among `named`.
    """

    named: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, str], ...]
    distributions: tuple[str, ...]


def ingredients(
    family: str, functions: Sequence[str], sources: Sequence[str], distributions: Sequence[str] = ()
) -> Ingredients:
    """Everything that a kernel is made of: imports of its functions' modules, declared sources and distributions.

    Args:
        functions: `module:name` each: what compiles it, and what its compile process runs before.
        sources: files, or directories of which every file counts.
        distributions: names of installed distributions; what these require counts too.
    Raises: VariantError for a function whose module is not found, and for a source that is not there.
    """
    files, found = _modules_of([module_of(family, function) for function in functions])
    files |= {f"sources/{name}": path for name, path in declared_files(family, sources)}
    wanted = inputs_read.requirements([*distributions, *found])
    kept = {name: one for name, one in wanted.items() if name not in inputs_read.environment() or name in distributions}
    paths = tuple((path, _sha256(_stamp(path))) for path in dict.fromkeys(map(str, files.values())))
    digests = dict(paths)
    named = [(name, digests[str(path)]) for name, path in files.items()]
    named += [(f"{name}-{one.version}", _content_sha256(one)) for name, one in kept.items()]
    return Ingredients(named=tuple(sorted(named)), files=paths, distributions=tuple(sorted(kept)))


def declared_files(family: str, sources: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """(name, path) of every declared file. A name is the path below its source's parent; equal ones are numbered.

    Raises: VariantError naming a source that is neither file nor directory.
    """
    seen: dict[str, int] = {}
    for source in map(Path, sources):
        if not source.exists():
            raise VariantError(
                f"family {family}: its source {source} does not exist. Name files or directories that do, most safely "
                'relative to the adapter: Path(__file__).with_name("kernel.py").'
            )
        for path in sorted(filter(_is_content, source.rglob("*"))) if source.is_dir() else (source,):
            name = path.relative_to(source.parent).as_posix()
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name} ({seen[name]})"), path.resolve()


def _is_content(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")


# --- imports ----------------------------------------------------------------------------------------------------------


def module_of(family: str, function: str) -> str:
    """The module of `module:name`. Raises: VariantError unless it is found, and has a file."""
    module, _, attribute = function.partition(":")
    found = [name for name, _ in _located(module)] if module else []
    if not attribute or not found or found[-1] != module:
        raise VariantError(
            f"family {family}: its compile function is {function!r}; `module:name` is expected, of a module that has a "
            "file and can be imported: run where its package is, or set PYTHONPATH."
        )
    return module


def _modules_of(modules: Iterable[str]) -> tuple[dict[str, Path], set[str]]:
    """Name -> file of the modules that these reach by import statements, and the distributions among them."""
    files: dict[str, Path] = {}
    distributions: set[str] = set()
    seen: set[str] = set()
    waiting = list(modules)
    while waiting:
        for name, path in _located(waiting.pop()):
            if name in seen:
                continue
            seen.add(name)
            owner = inputs_read.owner_of(str(path))
            if owner is not None and not path.is_relative_to(_FAMILIES):
                distributions.add(owner[0])
            elif not _is_of_compiler(path):
                is_package = path.name in _PACKAGE_FILES
                files["/".join(name.split(".")) + ("/__init__.py" if is_package else path.suffix)] = path
                waiting.extend(_imports(_stamp(path), name if is_package else name.rpartition(".")[0]))
    return files, distributions


def _is_of_compiler(path: Path) -> bool:
    """Python's own, or of fa4build outside its families: these are in every key, or in none."""
    if path.is_relative_to(_BUILDER):
        return not path.is_relative_to(_FAMILIES)
    paths = sysconfig.get_paths()
    return any(path.is_relative_to(Path(paths[name]).resolve()) for name in ("stdlib", "platstdlib"))


def _located(module: str) -> Iterator[tuple[str, Path]]:
    """(name, file) of a module and of every package above it, from the top; those without a file are left out.

    Finders are asked, nothing is imported: `importlib.util.find_spec` would import the packages above.
    """
    search: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = _spec(name, search)
        if spec is None:
            return
        if spec.has_location and spec.origin:
            yield name, Path(spec.origin).resolve()
        if spec.submodule_search_locations is None:
            return
        search = list(spec.submodule_search_locations)


def _spec(name: str, search: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, search)
        except (AttributeError, ImportError):
            continue
        except KeyError:  # a namespace below a package that is not imported: its finder looks for that package
            return _namespace(name, search or ())
        if spec is not None:
            return spec
    return None


def _namespace(name: str, search: Sequence[str]) -> ModuleSpec:
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(Path(entry, name.rpartition(".")[2])) for entry in search]
    return spec


@lru_cache(maxsize=4096)
def _imports(stamp: Stamp, package: str) -> tuple[str, ...]:
    """Every name that a file's import statements give, absolute; some of them are no modules."""
    try:
        tree = ast.parse(Path(stamp[0]).read_bytes())
    except (SyntaxError, ValueError):  # an extension module, or what the compile itself will complain about
        return ()
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(dict.fromkeys(name for name in names if name))


# --- contents ---------------------------------------------------------------------------------------------------------


def _stamp(path: Path | str) -> Stamp:
    stat = Path(path).stat()
    return str(path), stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=65536)
def _sha256(stamp: Stamp) -> str:
    return hashlib.sha256(Path(stamp[0]).read_bytes()).hexdigest()


def _content_sha256(distribution: PathDistribution) -> str:
    """Digest of an installed distribution: what RECORD says of its files, and the Python files as they are.

    The latter, because people edit what is installed. Raises: VariantError when there is no RECORD.
    """
    record = distribution.read_text("RECORD")
    if record is None:
        raise VariantError(f"{distribution.name} has no RECORD, so its contents are unknown. Reinstall it with pip.")
    digest = hashlib.sha256(record_sha256(record).encode())
    for file in sorted(distribution.files or ()):
        path = Path(str(file.locate()))
        if file.suffix == ".py" and ".." not in file.parts:
            content = _sha256(_stamp(path)) if path.is_file() else "missing"
            digest.update(f"{file.as_posix()} {content}\n".encode())
    return digest.hexdigest()
