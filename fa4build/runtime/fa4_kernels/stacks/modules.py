"""Modules of other packages by their names: found, imported and looked up as installed ones, with our functions.

A finder at the front of `sys.meta_path` answers `import`, `importlib.util.find_spec` and `importlib.metadata`. Where a
package is installed, its modules are the installed ones with the attention functions replaced, after their import or at
once if that is past; version and everything else stay their own. Nothing is imported before the program does it.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from .. import counts
from ..errors import InputError, NoKernelError


class Facts(NamedTuple):
    """A package as callers know it.

    distribution, version: what importlib.metadata says where it is not installed. top_level: its importable names.
    modules: name -> the module here that has its functions, "" for a package that only holds others. Attention is in
        those that begin with flash_attn_, and replaced where the package is installed.
    """

    distribution: str
    version: str
    top_level: tuple[str, ...]
    modules: Mapping[str, str]

    def has_attention(self, module: str) -> bool:
        """Whether a module of this name has functions that run kernels."""
        return self.modules.get(module, "").startswith("flash_attn_")


_FA2 = {
    "flash_attn": "flash_attn_2",
    "flash_attn.flash_attn_interface": "flash_attn_2",
    "flash_attn.bert_padding": "padding",
    "flash_attn.layers": "",
    "flash_attn.layers.rotary": "rotary",
    "flash_attn.ops": "",
    "flash_attn.ops.triton": "",
    "flash_attn.ops.triton.rotary": "rotary",
}
_FA3 = {
    "flash_attn_interface": "flash_attn_3",
    "flash_attn_3": "",
    "flash_attn_3.flash_attn_interface": "flash_attn_3",
}
_FA4 = {"flash_attn": "", "flash_attn.cute": "flash_attn_4", "flash_attn.cute.interface": "flash_attn_4"}

MODULE_STACKS: Mapping[str, Facts] = MappingProxyType(
    {
        "flash_attn": Facts("flash-attn", "2.8.3", ("flash_attn",), _FA2),
        "flash_attn_interface": Facts("flash-attn-3", "3.0.0", ("flash_attn_interface", "flash_attn_3"), _FA3),
        "flash_attn.cute": Facts("flash-attn-4", "4.0.0b36", ("flash_attn",), _FA4),
    }
)


class _State:
    """Of the process: what is provided, and the functions of installed packages that were replaced."""

    def __init__(self) -> None:
        self.fallback: dict[str, bool] = {}
        self.originals: dict[tuple[str, str], Any] = {}
        self.told: set[tuple[str, str]] = set()


_state = _State()


class Names:
    """The modules of a stack, from the making of the object until `remove`."""

    def __init__(self, stack: str, *, fallback: bool = False) -> None:
        if fallback and not is_installed(stack):
            raise InputError(f"{stack} is not installed, so that no call can fall back to it. Leave fallback out")
        self.stack, self.fallback = stack, fallback
        _state.fallback[stack] = fallback
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        for name in _stacks_facts(stack).modules:
            module = sys.modules.get(name)
            if module is not None:
                _fill(module, stack) if _is_made_here(module) else _replace(module, stack)
        _forget_lookups()

    def remove(self) -> None:
        """Take the modules away, or give the installed ones their functions back. Names that a program has taken out
        of them stay with it."""
        if _state.fallback.pop(self.stack, None) is None:
            return
        if not _state.fallback and _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)
        for name in _stacks_facts(self.stack).modules:
            module = sys.modules.get(name)
            if module is not None and _is_made_here(module):
                _drop(name)
            elif module is not None:
                _restore(module, self.stack)
        for key in [key for key in _state.originals if key[0] == self.stack]:
            del _state.originals[key]
        _forget_lookups()


def _stacks_facts(stack: str) -> Facts:
    return MODULE_STACKS[stack]


def _provided_with(name: str) -> list[str]:
    """The stacks now provided that have a module of this name."""
    return [stack for stack in _state.fallback if name in _stacks_facts(stack).modules]


# --- functions that are called ----------------------------------------------------------------------------------------


def served_as(stack: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function of another package's interface, with its calls counted and, where that is wanted, with the installed
    package's own behind it: what raises NoKernelError or InputError has launched nothing and changed no tensor."""

    import torch  # as the caller has

    is_compiling = torch.compiler.is_compiling

    def decorate(ours: Callable[..., Any]) -> Callable[..., Any]:
        name = ours.__name__

        @functools.wraps(ours)
        def function(*arguments: Any, **options: Any) -> Any:
            try:
                results = ours(*arguments, **options)
            except (NoKernelError, InputError) as reason:
                original = _state.originals.get((stack, name)) if _state.fallback.get(stack) else None
                if original is None:
                    raise
                _tell(stack, name, str(reason).partition("\n")[0])
            else:
                if not is_compiling():
                    counts.answered(stack, name)
                return results
            return original(*arguments, **options)

        function.is_of_fa4_kernels = True  # type: ignore[attr-defined]
        return function

    return decorate


def _tell(stack: str, name: str, reason: str) -> None:
    """Count a call that goes to the installed package; the first of each function is a warning."""
    counts.kept(stack, name, reason)
    if (stack, name) not in _state.told:
        _state.told.add((stack, name))
        warnings.warn(
            f"{stack}: {name} is served by the installed package ({reason}); fa4_kernels.served() counts such calls",
            RuntimeWarning,
            stacklevel=4,
        )


def original_of(stack: str, name: str) -> Any:
    """The installed package's own function where calls may fall back to it, else None."""
    return _state.originals.get((stack, name)) if _state.fallback.get(stack) else None


# --- what is in a module ----------------------------------------------------------------------------------------------


def _ours(stack: str, module: str) -> dict[str, Any]:
    """What a module of this name has, by name."""
    source = _stacks_facts(stack).modules[module]
    if not source:
        return {}
    made = importlib.import_module(f"{__package__}.{source}")
    return {name: getattr(made, name) for name in made.MODULES[module]}


def _fill(module: ModuleType, stack: str) -> None:
    """Put everything into a module that was made here."""
    vars(module).update(_ours(stack, module.__name__))
    if module.__name__ == stack:
        module.__version__ = _stacks_facts(stack).version  # type: ignore[attr-defined]


def _replace(module: ModuleType, stack: str) -> None:
    """Put the attention functions into an installed module, and keep its own."""
    if not _stacks_facts(stack).has_attention(module.__name__):
        return
    for name, function in _ours(stack, module.__name__).items():
        own = getattr(module, name, None)
        if own is None or not hasattr(function, "is_of_fa4_kernels") or hasattr(own, "is_of_fa4_kernels"):
            continue
        _state.originals.setdefault((stack, name), own)
        setattr(module, name, function)


def _restore(module: ModuleType, stack: str) -> None:
    for name in vars(module).copy():
        own = _state.originals.get((stack, name))
        if own is not None and getattr(vars(module)[name], "is_of_fa4_kernels", False):
            setattr(module, name, own)


def _is_made_here(module: ModuleType) -> bool:
    return isinstance(getattr(module.__spec__, "loader", None), _Maker)


def _drop(name: str) -> None:
    """Forget a module that was made here; another stack's import makes it again."""
    module = sys.modules.pop(name)
    parent, _, last = name.rpartition(".")
    holder = sys.modules.get(parent)
    if holder is not None and vars(holder).get(last) is module:
        delattr(holder, last)


# --- finding ----------------------------------------------------------------------------------------------------------


class _Maker(importlib.abc.Loader):
    """Loads a module that is installed nowhere."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """The usual module."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill it for every stack that has it."""
        for stack in _provided_with(module.__name__):
            _fill(module, stack)


class _Replacer:
    """Loads an installed module, then replaces its attention functions."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the installed one's loader."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """An installed module that cannot be imported is as good as none, unless calls are to fall back to it."""
        stacks = _provided_with(module.__name__)
        try:
            self._loader.exec_module(module)
        except ImportError as error:
            if any(_state.fallback[stack] for stack in stacks):
                raise
            warnings.warn(f"the installed {module.__name__} cannot be imported ({error}); ours is used", stacklevel=2)
            for stack in stacks:
                _fill(module, stack)
        else:
            for stack in stacks:
                _replace(module, stack)


class _Finder:
    """For sys.meta_path."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The installed module with ours in it, or ours; None for a name that is not provided."""
        stacks = _provided_with(name)
        if not stacks:
            return None
        spec = _installed_spec(name, path, target)
        if spec is not None and spec.loader is not None and spec.origin is not None:
            if any(_stacks_facts(stack).has_attention(name) for stack in stacks):
                spec.loader = _Replacer(spec.loader)  # type: ignore[assignment]
            return spec
        made = importlib.machinery.ModuleSpec(name, _Maker(), origin="fa4_kernels", is_package=_is_package(name))
        if spec is not None and made.submodule_search_locations is not None:  # a namespace, which holds other packages
            made.submodule_search_locations = list(spec.submodule_search_locations or ())
        return made

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """Those of the stacks that are not installed."""
        wanted = getattr(context, "name", None)
        for stack in list(_state.fallback):
            facts = _stacks_facts(stack)
            if (wanted is None or _normal(wanted) == facts.distribution) and not is_installed(stack):
                yield _Distribution(facts)

    def invalidate_caches(self) -> None:
        """Nothing is kept."""


_FINDER: Any = _Finder()


def _is_package(name: str) -> bool:
    return any(known.startswith(f"{name}.") for facts in MODULE_STACKS.values() for known in facts.modules)


def _others() -> Iterator[Any]:
    return (finder for finder in sys.meta_path if finder is not _FINDER)


def _installed_spec(
    name: str, path: Sequence[str] | None, target: ModuleType | None = None
) -> importlib.machinery.ModuleSpec | None:
    for finder in _others():
        find = getattr(finder, "find_spec", None)
        spec: importlib.machinery.ModuleSpec | None = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


class _Distribution(importlib.metadata.Distribution):
    """What importlib.metadata reads about a package."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def read_text(self, filename: str) -> str | None:
        """METADATA and top_level.txt."""
        if filename == "METADATA":
            fields = f"Name: {self._facts.distribution}\nVersion: {self._facts.version}\n"
            return f"Metadata-Version: 2.1\n{fields}Summary: the interface of this package on fa4-kernels\n"
        return "\n".join(self._facts.top_level) if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        """There is no file."""
        return path


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def is_installed(stack: str) -> bool:
    """Whether the package is installed, by its distribution's name."""
    context = importlib.metadata.DistributionFinder.Context(name=_stacks_facts(stack).distribution)
    finders = (getattr(finder, "find_distributions", None) for finder in _others())
    return any(True for find in finders if find is not None for _ in find(context))


# --- those who have looked before -------------------------------------------------------------------------------------


def _forget_lookups() -> None:
    """transformers remembers which packages there are, and the functions that it took out of them."""
    looked = sys.modules.get("transformers.utils.import_utils")
    for name, function in vars(looked).copy().items() if looked is not None else ():
        is_about = "flash_attn" in name or name in ("_package_distribution_mapping", "_is_package_available")
        if is_about and hasattr(function, "cache_clear"):
            function.cache_clear()
    used = sys.modules.get("transformers.modeling_flash_attention_utils")
    if used is not None and hasattr(used, "_loaded_implementation"):
        used._loaded_implementation = None  # type: ignore[attr-defined]
