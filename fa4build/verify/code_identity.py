"""The identity of Python code: a digest of a definition and of everything that it reaches.

`Tree` reads the source files of one package, runs nothing, and follows every name of a definition to the definition
that it means, through imports and re-exports. Definitions are numbered in the order in which they are reached, and
refer to each other by these numbers: what a file, a module or a definition is called does not matter, and neither does
what nobody reaches. Names of other packages stand for themselves.

What a name cannot say is what statements at the top of a module do besides binding names: a decorator of the package
that enters a function in a table, a call, a loop. `effects` finds those in every module that is imported on the way.
"""

import ast
import functools
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fa4build.verify.code_tokens import (
    Reference,
    TokenError,
    cannot_compute,
    is_for_type_checkers,
    tokens_of,
)

Place = tuple[str, str]
"""A definition by module and name."""
Unit = tuple[str, int]
"""A statement of a module, by its number."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)


def place_of(definition: Any) -> Place:
    """Where a function or class is defined."""
    return definition.__module__, definition.__qualname__


@dataclass(slots=True)
class _Module:
    """A source file: its statements, who binds which name (statement, which of its names), what the names of imports
    mean, and what is imported when it runs, at any depth."""

    statements: list[ast.stmt]
    bound: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    brought: set[tuple[str, str | None]] = field(default_factory=set)


class Tree:
    """The source files of a package.

    Args:
        root: the package's directory.
        package: its name in imports.
    """

    def __init__(self, root: Path, package: str) -> None:
        self._root, self._package = root, package
        self._modules: dict[str, _Module | None] = {}
        self._units: dict[Unit, tuple[bytes, tuple[Reference, ...]]] = {}
        self._written: dict[Reference, list[str | tuple[Unit, int]]] = {}

    def digest(self, roots: Iterable[Place], given: Sequence[Place] = ()) -> str:
        """Of definitions and all they reach, but for what is behind the given ones.

        Raises: TokenError: a definition does not exist, or its code has no identity.
        """
        return self._digest([unit for place in roots for unit, _ in self._definition(place)], given)[0]

    def reached(self, roots: Iterable[Place], given: Sequence[Place] = ()) -> set[Unit]:
        """The statements behind `digest`."""
        return set(self._digest([unit for place in roots for unit, _ in self._definition(place)], given)[1])

    def effects(
        self, roots: Iterable[Place], given: Sequence[Place], *, within: str, chosen: Collection[Place]
    ) -> list[list[Any]]:
        """Digests of what modules do when they are imported, with the names bound by it (a table may use them).

        Args:
            within: the package whose modules are looked into as soon as anything imports them; others only if a
                definition of theirs is reached.
            chosen: decorators that enter a function in a table from which the caller takes it one by one.
        """
        reached = {module for module, _ in self.reached(roots, given)}
        modules = self._imported(reached, f"{within}.")
        units = (unit for module in modules for unit in self._acting(module, set(chosen)))
        return sorted([self._names(unit), self._digest([unit], given)[0]] for unit in units)

    def name_of(self, unit: Unit) -> tuple[str, list[str]]:
        """Module, and the names that a statement binds."""
        return unit[0], self._names(unit)

    # --- walking

    def _digest(self, roots: list[Unit], given: Sequence[Place]) -> tuple[str, list[Unit]]:
        stops = {unit: str(number) for number, place in enumerate(given) for unit, _ in self._definition(place)}
        numbers: dict[Unit, int] = {}
        for unit in roots:
            numbers.setdefault(unit, len(numbers))
        digest, order = hashlib.sha256(), list(numbers)
        for unit in order:  # grows while it is walked
            own, references = self._unit(unit)
            digest.update(own)
            for reference in references:
                for part in self._parts(reference):
                    if isinstance(part, str):
                        digest.update(part.encode())
                    elif part[0] in stops:
                        digest.update(f"given {stops[part[0]]} {part[1]};".encode())
                    else:
                        if part[0] not in numbers:
                            numbers[part[0]] = len(numbers)
                            order.append(part[0])
                        digest.update(f"{numbers[part[0]]} {part[1]};".encode())
        return digest.hexdigest(), order

    def _parts(self, reference: Reference) -> list[str | tuple[Unit, int]]:
        """A reference as text and statements, each with which of its names is meant."""
        if reference not in self._written:
            self._written[reference] = list(self._followed(reference))
        return self._written[reference]

    def _followed(self, reference: Reference) -> Iterator[str | tuple[Unit, int]]:
        kind, module, name = reference
        if kind == "external":
            yield f"external {module} {name};"
        elif kind == "own":
            yield from self._definition((module, name))
        else:  # a module as a value: any of its names may be meant
            for each in sorted(self._module(module).bound):
                yield f"member {each};"
                yield from self._definition((module, each))

    def _unit(self, unit: Unit) -> tuple[bytes, tuple[Reference, ...]]:
        if unit not in self._units:
            module, number = unit
            statement = self._module(module).statements[number]
            lookup = functools.partial(self._meaning, module)
            try:
                tokens, references = tokens_of(statement, lookup)
            except TokenError as error:
                raise TokenError(f"{module}: {error}") from error
            text = "".join(f"{len(token)}:{token}" for token in tokens)
            self._units[unit] = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), references
        return self._units[unit]

    # --- names

    def _definition(self, place: Place) -> list[tuple[Unit, int]]:
        """The statements that bind a name, followed through imports. Raises: TokenError when there is none."""
        kind, module, name = self._target(*place)
        if kind != "own":
            raise TokenError(f"{place[0]}: {place[1]} is no definition of this package; its code cannot be told.")
        return [((module, number), which) for number, which in self._module(module).bound[name]]

    def _target(self, module: str, name: str) -> Reference:
        """`own` definition, `module`, or `external`, of a name at the top of a module."""
        found = self._module(module)
        if name in found.bound:
            return "own", module, name
        if name in found.imports:
            return self._imported_target(*found.imports[name])
        if self._path(f"{module}.{name}") is not None:
            return "module", f"{module}.{name}", ""
        raise TokenError(f"{module} has no {name}; its code cannot be told.")

    def _imported_target(self, module: str, name: str | None) -> Reference:
        if module != self._package and not module.startswith(f"{self._package}."):
            return "external", module, name or ""
        return ("module", module, "") if name is None else self._target(module, name)

    def _meaning(self, module: str, node: ast.expr, inner: ast.stmt | None) -> Reference | None:
        """What a Name or a chain of Attributes means in a module; `inner`: the import in a function that binds it."""
        if isinstance(node, ast.Attribute):
            base = self._meaning(module, node.value, inner)
            return self._target(base[1], node.attr) if base is not None and base[0] == "module" else None
        if not isinstance(node, ast.Name):
            return None
        if inner is not None:
            return self._imported_target(*_imports(inner, module)[node.id])
        found = self._module(module)
        return self._target(module, node.id) if node.id in found.bound or node.id in found.imports else None

    # --- what modules do

    def _imported(self, modules: set[str], within: str) -> set[str]:
        """Modules, and those of a package that they import, at any depth."""
        seen: set[str] = set()
        waiting = list(modules)
        while waiting:
            module = waiting.pop()
            if module not in seen and (module in modules or module.startswith(within)) and self._path(module):
                seen.add(module)
                waiting += [name for pair in self._module(module).brought for name in (pair[0], f"{pair[0]}.{pair[1]}")]
        return seen

    def _acting(self, module: str, chosen: set[Place]) -> Iterator[Unit]:
        """Statements that do more than bind names."""
        for number, statement in enumerate(self._module(module).statements):
            if isinstance(statement, _DEFINITIONS):
                makers = (self._maker(module, decorator) for decorator in statement.decorator_list)
                acts = any(maker is not None and maker not in chosen for maker in makers)
            else:
                acts = not (_only_binds(statement) or cannot_compute(statement) or is_for_type_checkers(statement))
            if acts:
                yield module, number

    def _maker(self, module: str, decorator: ast.expr) -> Place | None:
        """The decorator, if it is one of this package."""
        found = self._meaning(module, decorator.func if isinstance(decorator, ast.Call) else decorator, None)
        return found[1:] if found is not None and found[0] == "own" else None  # type: ignore[return-value]

    def _names(self, unit: Unit) -> list[str]:
        bound = self._module(unit[0]).bound
        return sorted(name for name, places in bound.items() if any(number == unit[1] for number, _ in places))

    # --- files

    def _module(self, module: str) -> _Module:
        if module not in self._modules:
            path = self._path(module)
            self._modules[module] = None if path is None else _read(path, module)
        found = self._modules[module]
        if found is None:
            raise TokenError(f"there is no source of {module}; its code cannot be told.")
        return found

    def _path(self, module: str) -> Path | None:
        first, *parts = module.split(".")
        base = self._root.joinpath(*parts)
        paths = (base / "__init__.py", base.parent / f"{base.name}.py") if parts else (base / "__init__.py",)
        return next((path for path in paths if path.is_file()), None) if first == self._package else None


def _read(path: Path, module: str) -> _Module:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return _analysed(path.read_bytes(), package)


_INNER_IMPORT = re.compile(rb"(?:^[ \t]+|[:;][ \t]*)(?:import|from)\b", re.M)


@functools.lru_cache(maxsize=1024)
def _analysed(source: bytes, package: str) -> _Module:
    found = _Module(ast.parse(source).body)
    any_inner = _INNER_IMPORT.search(source) is not None
    for number, statement in enumerate(found.statements):
        looks = any_inner or not isinstance(statement, (*_DEFINITIONS, ast.Assign))
        inside = list(filter(_is_import, ast.walk(statement))) if looks else []
        imported = [part for each in inside for part in _imports(each, f"{package}._").items()]
        if _is_import(statement) or is_for_type_checkers(statement):
            found.imports |= dict(imported)
        else:
            for which, name in enumerate(dict.fromkeys(_bound_by(statement))):
                found.bound.setdefault(name, []).append((number, which))
        if not is_for_type_checkers(statement):
            found.brought.update(where for _, where in imported)
            found.brought.update((alias.name, None) for part in inside for alias in part.names)
    return found


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, _IMPORTS)


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement at the top of a module binds, in order."""
    if isinstance(statement, _DEFINITIONS):
        yield statement.name
        return
    for part in ast.walk(statement):
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            yield part.id
        elif isinstance(part, _DEFINITIONS):
            yield part.name
        elif isinstance(part, _IMPORTS):
            yield from (alias.asname or alias.name.split(".")[0] for alias in part.names)


def _only_binds(statement: ast.stmt) -> bool:
    """Imports, and assignments to plain names."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    else:
        return isinstance(statement, _IMPORTS) or type(statement).__name__ == "TypeAlias"
    flat = [part for target in targets for part in getattr(target, "elts", [target])]
    return all(isinstance(part, ast.Name) for part in flat)


def _imports(statement: ast.AST, module: str) -> Mapping[str, tuple[str, str | None]]:
    """Name -> (module, name in it; None: the module itself) of an import that stands in a module."""
    if isinstance(statement, ast.Import):
        return {
            alias.asname or alias.name.split(".")[0]: (alias.name if alias.asname else alias.name.split(".")[0], None)
            for alias in statement.names
        }
    assert isinstance(statement, ast.ImportFrom)
    above = module.split(".")[: -statement.level] if statement.level else []
    base = ".".join([*above, *([statement.module] if statement.module else [])])
    if any(alias.name == "*" for alias in statement.names):
        raise TokenError(f"{module} imports * from {base}; what that is cannot be told. Name what is used.")
    return {alias.asname or alias.name: (base, alias.name) for alias in statement.names}
