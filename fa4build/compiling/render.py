"""Renders specialization modules: imports, literal constants and one call, which a check of the result enforces.

A rendered module holds no path and no date, so equal inputs give equal text.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import jinja2

from fa4build.compiling.context import AttributePath, context_for, wired
from fa4build.compiling.wiring import WIRINGS
from fa4build.errors import RenderError
from fa4build.matrix.axes import Variant
from fa4build.matrix.tuning import AnyTuning
from fa4build.matrix.variants import kernel_for

KERNELS_PACKAGE = "kernels_src"
_PACKAGE_DIR = Path(__file__).resolve().parent.parent
TEMPLATES_DIR = Path(__file__).resolve().parent / "templates"
TEMPLATE = "specialization.py.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """A rendered specialization module, and all of our kernel code that it reaches.

    Attributes:
        text: the module, to be written to a real file and imported from there.
        sha256: of the text in UTF-8.
        symbol: prefix of the kernels' symbols.
        dependencies: (path below the directory that holds `kernels_src`, sha256 of its bytes), sorted by path.
    """

    variant: Variant
    text: str
    sha256: str
    symbol: str
    dependencies: tuple[tuple[str, str], ...]


def kernels_source_dir() -> Path:
    """The `kernels_src` directory: beside the package in a checkout, inside it when installed.

    A process that imports rendered modules *appends* its parent to `sys.path`: in front, modules of an installed
    fa4build would hide those of the standard library.
    Raises: RenderError if there is none.
    """
    candidates = (_PACKAGE_DIR.parent / KERNELS_PACKAGE, _PACKAGE_DIR / KERNELS_PACKAGE)
    for candidate in candidates:
        if (candidate / "__init__.py").is_file():
            return candidate
    raise RenderError(f"no {KERNELS_PACKAGE} directory at {' or '.join(map(str, candidates))}. Reinstall fa4build.")


def render(variant: Variant, tuning: AnyTuning, *, source_dir: Path | None = None) -> KernelSource:
    """The specialization module of a variant.

    Args:
        source_dir: the `kernels_src` directory, `kernels_source_dir()` if left out.
    Raises: RenderError if no kernel is written, a template names something undefined, the text is more than imports,
        literals and one call, or an import of `kernels_src` leads nowhere.
    """
    kernel = kernel_for(variant)
    if kernel is None:
        raise RenderError(f"{variant.id}: no kernel is written for this variant. `fa4build list` shows which are.")
    text = render_template(TEMPLATE, wired(context_for(variant, tuning), WIRINGS[kernel.wiring], literal))
    module = check_specialization(text, name=variant.id)
    return KernelSource(
        variant=variant,
        text=text,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        symbol=variant.symbol,
        dependencies=reachable_sources(module, source_dir or kernels_source_dir()),
    )


# --- templates --------------------------------------------------------------------------------------------------------


def literal(value: object) -> str:
    """Python source of a constant.

    Raises: RenderError for what is no int, bool, str, finite float or attribute path.
    """
    if isinstance(value, AttributePath):
        return value.path
    if type(value) is str:
        return json.dumps(value, ensure_ascii=False)  # double quotes, as the formatter writes them
    if type(value) in (int, bool) or (type(value) is float and math.isfinite(value)):
        return repr(value)
    raise RenderError(f"{value!r} is no literal. Kernels take int, bool, str, finite float and dtypes.")


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES_DIR),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # the result is Python, not HTML
        auto_reload=False,  # a process reads a template once, not a time stamp for every kernel
    )
    return environment


def render_template(template: str, values: dict[str, object]) -> str:
    """The text of a template with these values. Raises: RenderError if it cannot be read or names something else."""
    try:
        return _environment().get_template(template).render(values)
    except jinja2.TemplateNotFound as error:
        raise RenderError(f"there is no template {template!r} in {TEMPLATES_DIR}.") from error
    except jinja2.TemplateError as error:
        raise RenderError(f"template {template}: {error}.") from error


# --- what a rendered module may hold ----------------------------------------------------------------------------------


def check_specialization(text: str, *, name: str) -> ast.Module:
    """The syntax tree of a module, refused if it is more than imports, literals and one function of one call.

    Raises: RenderError naming the line.
    """
    try:
        module = _tree_of(_LITERALS.sub(r"\1 = 0", _COMMENTS.sub("#", text)))
    except SyntaxError as error:
        raise RenderError(f"{name}: the rendered module is no Python: {error}.") from error
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    for node in module.body:
        if not (isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef) or _is_constant(node)):
            raise _not_allowed(name, text, node)
    if len(functions) != 1:
        raise RenderError(f"{name}: the rendered module has {len(functions)} functions; it must have one, `entry`.")
    body = functions[0].body
    if len(body) != 1 or not isinstance(body[0], ast.Expr) or not _is_wiring(body[0].value):
        raise _not_allowed(name, text, body[-1])
    return module


# Lines in which the modules of one kernel differ. Each stays a line and a statement of its kind, so a tree without them
# is as good; parsing one for every variant takes a quarter of a matrix that is all cached.
_COMMENTS = re.compile(r"^#.*$", re.MULTILINE)
_LITERALS = re.compile(r'^(\w+) = (?:True|False|-?(?:0|[1-9]\d*)(?:\.\d+)?|"[^"\\\n]*")$', re.MULTILINE)


@lru_cache(maxsize=256)
def _tree_of(text: str) -> ast.Module:
    return ast.parse(text)


def _not_allowed(name: str, text: str, node: ast.stmt) -> RenderError:
    line = text.splitlines()[node.lineno - 1].strip()
    return RenderError(
        f"{name}: line {node.lineno} of the rendered module, `{line}`, is no import, literal or single call. "
        "Make the choice in context.py, or in the kernel."
    )


def _is_constant(node: ast.stmt) -> bool:
    if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
        return False
    return isinstance(node.value, ast.Constant) or _is_dotted(node.value)


def _is_dotted(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_dotted(node.value))


def _is_wiring(node: ast.expr) -> bool:
    """`Kernel(constants)(arguments)`: names go in, nothing is computed."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Call)):
        return False
    calls = (node.func, node)
    return _is_dotted(node.func.func) and all(_takes_names(call) for call in calls)


def _takes_names(call: ast.Call) -> bool:
    values = (*call.args, *(keyword.value for keyword in call.keywords))
    return all(isinstance(value, ast.Name) for value in values)


# --- dependencies -----------------------------------------------------------------------------------------------------


_Import = tuple[str, bool]  # dotted name, and whether it must be a module
_Stamp = tuple[str, int, int]  # path below the root, modification time in ns, size in bytes


def reachable_sources(module: ast.Module, source_dir: Path) -> tuple[tuple[str, str], ...]:
    """Every file of `kernels_src` that importing this module runs, with its digest: (relative path, sha256), sorted.

    Imports are read from the syntax tree, also inside functions; nothing is executed.
    Raises: RenderError if an import of `kernels_src` leads to no file.
    """
    imports = _imported_modules(module, package="")
    return _closure(tuple(imports), source_dir.parent, _stamps(source_dir))


def _stamps(source_dir: Path) -> tuple[_Stamp, ...]:
    """Every Python file of the directory as it is now: in the caches' keys, so that an edited file is read again."""
    # Entries of the system as they come: a Path for each file doubles the time of a warm run.
    root_length = len(str(source_dir.parent)) + 1
    stamps: list[_Stamp] = []
    waiting = [str(source_dir)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    stat = entry.stat()
                    stamps.append((entry.path[root_length:], stat.st_mtime_ns, stat.st_size))
                elif entry.name != "__pycache__" and entry.is_dir():
                    waiting.append(entry.path)
    return tuple(sorted(stamps))


@lru_cache(maxsize=64)
def _closure(imports: tuple[_Import, ...], root: Path, stamps: tuple[_Stamp, ...]) -> tuple[tuple[str, str], ...]:
    known = {stamp[0]: stamp for stamp in stamps}
    found: dict[str, str] = {}
    waiting = list(imports)
    while waiting:
        for relative in _files_of(*waiting.pop(), known=known):
            if relative not in found:
                source = _read_source(root, known[relative])
                found[relative] = source.sha256
                waiting.extend(source.imports)
    return tuple(sorted(found.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    sha256: str
    imports: tuple[_Import, ...]


@lru_cache(maxsize=4096)
def _read_source(root: Path, stamp: _Stamp) -> _Source:
    path = root / stamp[0]
    content = path.read_bytes()
    package = ".".join(path.relative_to(root).parent.parts)
    try:
        tree = ast.parse(content)
    except SyntaxError as error:
        raise RenderError(f"{path}: is no Python: {error}.") from error
    imports = tuple(_imported_modules(tree, package=package))
    return _Source(sha256=hashlib.sha256(content).hexdigest(), imports=imports)


def _imported_modules(tree: ast.Module, *, package: str) -> list[_Import]:
    """What a tree imports of `kernels_src`; `package` is where its relative imports start.

    `from a import b` gives `a`, and `a.b` as a name that need not be a module.
    """
    imports: list[_Import] = []
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            imports.extend((alias.name, True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, package)
            imports.append((module, True))
            imports.extend((f"{module}.{alias.name}", False) for alias in node.names)
    return [(name, is_module) for name, is_module in imports if name.split(".")[0] == KERNELS_PACKAGE]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement below a node, at any depth; not its expressions, which import nothing."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(node, block, ()):
            yield statement
            yield from _statements(statement)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _files_of(name: str, is_module: bool, *, known: Container[str]) -> list[str]:
    """The files of a module and of every package above it, as paths below the root."""
    parts = name.split(".")
    files: list[str] = []
    for depth in range(1, len(parts) + 1):
        stem = "/".join(parts[:depth])
        file = next((path for path in (f"{stem}/__init__.py", f"{stem}.py") if path in known), None)
        if file is not None:
            files.append(file)
        elif is_module or depth < len(parts):
            raise RenderError(f"import of {name}: there is no {stem}.py and no such package.")
    return files
