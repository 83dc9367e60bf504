"""Constants and pure functions taken from the files of `kernels_src`, without importing them: they import the compiler.

Only what is ordinary Python can be taken: a table of literals, a function of integers or of arrays.
"""

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from fa4build.compiling.render import kernels_source_dir
from fa4build.errors import RenderError


@lru_cache(maxsize=16)
def definitions(module: str, *names: str) -> Mapping[str, Any]:
    """Top-level assignments and functions of a kernel module, evaluated alone.

    Args:
        module: path below `kernels_src`, `softmax/exp2_emulation.py`.
        names: what to take; a function may use other names that are taken, and builtins.
    Raises: RenderError when the file does not define one of them at its top level.
    """
    path = kernels_source_dir() / module
    tree = ast.parse(path.read_bytes())
    taken = [node for node in tree.body if _defined(node) in names]
    missing = sorted(set(names) - {_defined(node) for node in taken})
    if missing:
        raise RenderError(f"{path} does not define {', '.join(missing)}; the oracles are made for a kernel that does.")
    namespace: dict[str, Any] = {}
    exec(compile(ast.Module(body=taken, type_ignores=[]), str(path), "exec"), namespace)
    return {name: namespace[name] for name in names}


def _defined(node: ast.stmt) -> str | None:
    """The one name that a statement defines, if it is a plain assignment or a function."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def polynomials() -> Mapping[int, tuple[float, ...]]:
    """Coefficients of the emulated power of two by degree, lowest first."""
    return definitions("softmax/exp2_emulation.py", "POLYNOMIALS")["POLYNOMIALS"]


def keeps_reference() -> Callable[[Any, float], Any]:
    """The rule of conditional rescaling: (step_log2, threshold) -> keeps, elementwise on arrays."""
    return definitions("softmax/conditional_rescaling.py", "keeps_reference")["keeps_reference"]


def emulated_columns(frequency: int, first_fragment: int) -> tuple[int, ...]:
    """Columns of a 128-column score row that the kernel computes with the polynomial."""
    is_emulated = definitions("softmax/exp2_emulation.py", "is_emulated")["is_emulated"]
    return tuple(column for column in range(128) if is_emulated(column, frequency, first_fragment))
