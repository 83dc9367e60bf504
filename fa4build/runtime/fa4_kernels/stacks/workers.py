"""Other processes: `python -m fa4_kernels run`, and the environment by which those that a process starts find the same.

A directory with a `sitecustomize.py` comes first on PYTHONPATH, and FA4_KERNELS_PROVIDE says what to provide. Python
reads both at its start, also in workers that multiprocessing spawns and in those of Ray on the same machine. For Ray on
others hand `environment(...)` to `ray.init(runtime_env={"env_vars": ...})`. Not read under `python -I`, `-E` and `-S`.
"""

import os
import runpy
import sys
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from ..errors import InputError
from .modules import MODULE_STACKS, Names, is_installed

VARIABLE = "FA4_KERNELS_PROVIDE"
_SITE = str(Path(__file__).resolve().with_name("site"))
_FALLBACK = ":fallback"


def environment(stacks: Iterable[str], *, fallback: bool = False, python_path: str = "") -> dict[str, str]:
    """The variables that a process needs to find `stacks` provided.

    Args:
        fallback: for those that are installed here. python_path: PYTHONPATH as it is.
    Raises: InputError for a stack that is no module.
    """
    words = []
    for stack in stacks:
        if stack not in MODULE_STACKS:
            raise InputError(f"{stack!r} cannot be provided to other processes. Allowed: {', '.join(MODULE_STACKS)}")
        words.append(stack + (_FALLBACK if fallback and is_installed(stack) else ""))
    paths = [path for path in python_path.split(os.pathsep) if path and path != _SITE]
    return {VARIABLE: ",".join(words), "PYTHONPATH": os.pathsep.join([_SITE, *paths])}


def provide_as_told(variables: MutableMapping[str, str]) -> list[Names]:
    """Provide what VARIABLE says; nothing without it."""
    words = [word for word in variables.get(VARIABLE, "").split(",") if word]
    known = [word for word in words if word.removesuffix(_FALLBACK) in MODULE_STACKS]
    if known != words:
        raise InputError(f"{VARIABLE} is {variables[VARIABLE]!r}. Allowed: {', '.join(MODULE_STACKS)}")
    return [Names(word.removesuffix(_FALLBACK), fallback=word.endswith(_FALLBACK)) for word in words]


class ForWorkers:
    """What is provided here, for processes that start from now on, too."""

    def __init__(self, names: Names) -> None:
        self._names: Names | None = names
        self._word = names.stack + (_FALLBACK if names.fallback else "")
        words = [word for word in _words() if word.removesuffix(_FALLBACK) != names.stack]
        _set_words([*words, self._word])

    def remove(self) -> None:
        """Here, and for processes that start from now on."""
        if self._names is None:
            return
        self._names.remove()
        self._names = None
        _set_words([word for word in _words() if word != self._word])


def _words() -> list[str]:
    return [word for word in os.environ.get(VARIABLE, "").split(",") if word]


def _set_words(words: list[str]) -> None:
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != _SITE]
    for name, value in (
        (VARIABLE, ",".join(words)),
        ("PYTHONPATH", os.pathsep.join([_SITE, *paths] if words else paths)),
    ):
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


def run(stacks: Iterable[str], program: list[str], *, fallback: bool = False, is_module: bool = False) -> None:
    """Run a script, or a module, as `python program...` does, with `stacks` provided to it and to what it starts.

    Raises: InputError for an unknown stack; else what the program raises.
    """
    os.environ.update(environment(stacks, fallback=fallback, python_path=os.environ.get("PYTHONPATH", "")))
    provide_as_told(os.environ)
    sys.argv[:] = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")
