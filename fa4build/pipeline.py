"""From a selection to finished cache entries: look up, compile what is missing, report.

Nothing is lost when a build is killed: an entry is complete or absent, and the next build goes on where this one
stopped. A failed variant does not stop the others.
"""

import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal

from fa4build.compiling.compile import TIMEOUT_S, CompileOptions, Cubin
from fa4build.compiling.executors import Finished
from fa4build.compiling.toolchain import Toolchain, current_toolchain
from fa4build.errors import CompileError, Fa4BuildError, NotCachedError
from fa4build.families.interface import Buildable, Family, Recipe
from fa4build.families.registry import family_named
from fa4build.farm.executors import Executor, Settings, make_executor
from fa4build.matrix.selection import Selection
from fa4build.plan import plan_to_json
from fa4build.store.cache import Cache
from fa4build.store.entries import CacheEntry

_LOCK_RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one variant.

    Attributes:
        key: None if it could not even be rendered.
        status: `skipped` was not tried, because another failed and the build was told to stop then.
        seconds: wall time of the compile, 0 if there was none. `cpu_seconds`, `peak_bytes`: what it used.
        facts: of the cache entry; None if it failed.
        message, exit_code: of the error; empty and 0 if there was none.
    """

    name: str
    key: str | None
    status: Literal["cached", "compiled", "failed", "skipped"]
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    facts: dict | None = None
    message: str = ""
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """The outcomes in the order of the matrix, and the wall time of the whole build."""

    outcomes: tuple[Outcome, ...]
    seconds: float
    workers: int

    def count(self, status: str) -> int:
        """How many outcomes have this status."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def exit_code(self) -> int:
        """Exit code of the first failure, 0 if there is none."""
        return next((outcome.exit_code for outcome in self.outcomes if outcome.status == "failed"), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Progress of a build: a variant has started to compile (`outcome` is None), or has an outcome."""

    name: str
    outcome: Outcome | None
    done: int
    total: int


def recipe_for(
    variant: Buildable, toolchain: Toolchain, options: CompileOptions, *, family: Family | None = None
) -> Recipe:
    """A variant's key and compile request.

    Args:
        toolchain: the compiler's, without what the family adds.
        family: the one the variant belongs to; default: our own.
    Raises: RenderError, VariantError, ToolchainError.
    """
    family = family or family_named()
    return family.recipe(variant, family.toolchain(toolchain), options)


def shard(variants: tuple[Buildable, ...], index: int, count: int) -> tuple[Buildable, ...]:
    """Every `count`-th variant, the `index`-th part (from 1). The parts are disjoint and together are everything."""
    return variants[index - 1 :: count]


def find_cached(
    variants: Iterable[Buildable],
    cache: Cache,
    *,
    family: Family | None = None,
    toolchain: Toolchain | None = None,
    options: CompileOptions | None = None,
) -> tuple[tuple[Recipe, CacheEntry | None], ...]:
    """Each variant's recipe with its entry, None if it would have to be compiled. Compiles nothing, writes nothing."""
    family, options = family or family_named(), options or CompileOptions()
    whole = family.toolchain(toolchain or current_toolchain())
    recipes = [family.recipe(variant, whole, options) for variant in variants]
    cache.look_ahead(recipe.key for recipe in recipes)
    return tuple((recipe, cache.get(recipe.key)) for recipe in recipes)


def require_cached(found: Iterable[tuple[Recipe, CacheEntry | None]]) -> tuple[CacheEntry, ...]:
    """The entries, all of them. Raises: NotCachedError naming what is missing."""
    found = tuple(found)
    missing = tuple(recipe.name for recipe, entry in found if entry is None)
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise NotCachedError(
            f"{len(missing)} of {len(found)} variants are not in the cache: {shown}. {_how_to_build(missing)}", missing
        )
    return tuple(entry for _, entry in found if entry is not None)


def _how_to_build(names: tuple[str, ...]) -> str:
    """The command for a few, words for many: the whole matrix is never what was meant."""
    if len(names) > 3:
        return "Run `fa4build matrix` with the same selection."
    return f"Run: fa4build matrix {' '.join(f'--select {name}' for name in names)}"


def build_matrix(
    selection: Selection,
    cache: Cache,
    jobs: int | None = None,
    on_event: Callable[[Event], None] | None = None,
    *,
    options: CompileOptions | None = None,
    timeout_s: float = TIMEOUT_S,
    allow_spills: bool = False,
    part: tuple[int, int] = (1, 1),
    family: Family | None = None,
    executor: str = "local",
    scheduler: str | None = None,
    retries: int = 0,
    fail_fast: bool = False,
) -> BuildReport:
    """Bring every selected variant into the cache.

    Args:
        jobs: compiles at a time; default: one a core, as memory allows.
        on_event: called for each variant that starts to compile, and for each outcome.
        allow_spills: whether a kernel whose registers spill to memory passes; those of some families always do.
        part: (index, count): only this part of the matrix, see `shard`.
        family: whose matrix; default: our own.
        executor, scheduler: where compiles run, see `farm.executors`.
        retries: how often a compile that was killed, or ran out of time, is tried again.
        fail_fast: after the first failure start no other compile; what runs is finished.
    Raises: VariantError, NothingSelectedError; ToolchainError if the compiler is missing or cannot run. What goes wrong
        with one variant is an outcome.
    """
    family = family or family_named()
    variants = shard(family.expand(selection), *part)
    toolchain = family.toolchain(current_toolchain())
    settings = Settings(toolchain=toolchain, family=family, jobs=jobs, timeout_s=timeout_s, scheduler=scheduler)
    with closing(make_executor(executor, settings)) as running:
        build = Build(
            cache=cache,
            executor=running,
            on_event=on_event,
            allow_spills=allow_spills or family.may_spill,
            total=len(variants),
            retries=retries,
            fail_fast=fail_fast,
        )
        return build.run(variants, lambda variant: family.recipe(variant, toolchain, options or CompileOptions()))


@dataclass(slots=True, kw_only=True)
class Build:
    """One build under way. Works for any family: what it gets is a way from a variant to a recipe."""

    cache: Cache
    executor: Executor
    total: int
    on_event: Callable[[Event], None] | None = None
    allow_spills: bool = False
    retries: int = 0
    fail_fast: bool = False
    _tries: Counter[str] = field(default_factory=Counter)
    _outcomes: dict[str, Outcome] = field(default_factory=dict)
    _waiting: deque[Recipe] = field(default_factory=deque)
    _running: dict[int, tuple[Recipe, Callable[[], None]]] = field(default_factory=dict)

    def run(self, variants: Iterable[Buildable], recipe_of: Callable[[Buildable], Recipe]) -> BuildReport:
        """Look everything up, then compile what is missing."""
        started = time.monotonic()
        recipes = {variant.id: self._recipe(variant, recipe_of) for variant in variants}
        self.cache.look_ahead(recipe.key for recipe in recipes.values() if recipe is not None)
        for recipe in filter(None, recipes.values()):
            self._look_up(recipe)
        try:
            while self._waiting or self._running:
                self._stop_if_asked()
                self._start_compiles()
                if self._running:
                    self._finish(self.executor.wait())
                elif self._waiting:  # other processes are compiling all that is left
                    time.sleep(_LOCK_RETRY_S)
        finally:
            for _, release in self._running.values():
                release()
        return BuildReport(
            outcomes=tuple(self._outcomes[name] for name in recipes),
            seconds=time.monotonic() - started,
            workers=self.executor.capacity,
        )

    def _stop_if_asked(self) -> None:
        """After a failure, when that shall be the end: nothing waits any more."""
        if self.fail_fast and any(outcome.status == "failed" for outcome in self._outcomes.values()):
            while self._waiting:
                recipe = self._waiting.popleft()
                self._note(Outcome(name=recipe.name, key=recipe.key, status="skipped"))

    def _recipe(self, variant: Buildable, recipe_of: Callable[[Buildable], Recipe]) -> Recipe | None:
        """None for a variant that cannot be rendered, which has its outcome then."""
        try:
            return recipe_of(variant)
        except Fa4BuildError as error:
            self._note(
                Outcome(name=variant.id, key=None, status="failed", message=str(error), exit_code=error.exit_code)
            )
            return None

    def _look_up(self, recipe: Recipe) -> None:
        entry = self.cache.get(recipe.key)
        if entry is None:
            self._waiting.append(recipe)
        else:
            self._note(self._judged(recipe, entry, "cached"))

    def _start_compiles(self) -> None:
        """Fill the executor. A key that another process holds goes to the end: it is probably cached when we return."""
        for _ in range(len(self._waiting)):
            if len(self._running) >= self.executor.capacity:
                return
            recipe = self._waiting.popleft()
            release = self.cache.try_lock(recipe.key)
            if release is None:
                self._waiting.append(recipe)
                continue
            entry = self.cache.get(recipe.key)  # again: it may have been made while we waited
            if entry is not None:
                release()
                self._note(self._judged(recipe, entry, "cached"))
                continue
            try:
                job = self.executor.submit(recipe, self.cache.work_dir(recipe.name, recipe.key))
            except OSError as error:
                release()
                self._note(_failed(recipe, _not_kept(recipe, error), seconds=0.0))
                continue
            self._running[job] = (recipe, release)
            self._tell(recipe.name, None)

    def _finish(self, finished: Finished) -> None:
        recipe, release = self._running.pop(finished.job)
        try:
            if isinstance(finished.result, Fa4BuildError):
                if finished.result.may_pass_again and self._tries[recipe.key] < self.retries:
                    self._tries[recipe.key] += 1
                    self._waiting.append(recipe)
                    return
                self._note(_failed(recipe, finished.result, seconds=finished.seconds))
                return
            try:
                entry = store(self.cache, recipe, finished.result)
            except OSError as error:
                self._note(_failed(recipe, _not_kept(recipe, error), seconds=finished.seconds))
                return
            self._note(self._judged(recipe, entry, "compiled", seconds=finished.seconds, cubin=finished.result))
            shutil.rmtree(self.cache.work_dir(recipe.name, recipe.key), ignore_errors=True)
        finally:
            release()

    def _judged(
        self,
        recipe: Recipe,
        entry: CacheEntry,
        status: Literal["cached", "compiled"],
        seconds: float = 0.0,
        cubin: Cubin | None = None,
    ) -> Outcome:
        """The outcome of a complete entry: a failure if its registers spill, which nobody wants unknowingly."""
        spilled = entry.facts["spill_bytes"]
        if spilled and not self.allow_spills:
            error = CompileError(
                f"{recipe.name}: {spilled} bytes of registers spill to memory ({entry.facts['registers']} registers a "
                "thread). Give the kernel smaller tiles or more registers a role, or pass --allow-spills."
            )
            return _failed(recipe, error, seconds=seconds)
        return Outcome(
            name=recipe.name,
            key=recipe.key,
            status=status,
            seconds=seconds,
            cpu_seconds=cubin.cpu_seconds if cubin else 0.0,
            peak_bytes=cubin.peak_bytes if cubin else 0,
            facts=dict(entry.facts),
        )

    def _note(self, outcome: Outcome) -> None:
        self._outcomes[outcome.name] = outcome
        self._tell(outcome.name, outcome)

    def _tell(self, name: str, outcome: Outcome | None) -> None:
        if self.on_event is not None:
            self.on_event(Event(name=name, outcome=outcome, done=len(self._outcomes), total=self.total))


def store(cache: Cache, recipe: Recipe, cubin: Cubin) -> CacheEntry:
    """Put a finished compile into the cache."""
    names = ("target", "ptxas", "symbols", "registers", "spill_bytes", "local_bytes", "shared_bytes")
    facts = {name: getattr(cubin, name) for name in names}
    facts["symbols"] = list(cubin.symbols)
    objects = {
        "cubin": cubin.elf,
        "plan": plan_to_json(cubin.plan).encode(),
        "ptx": cubin.ptx.encode(),
        "log": cubin.log.encode(),
    }
    return cache.put(name=recipe.name, inputs=recipe.inputs, facts=facts, objects=objects)


def _not_kept(recipe: Recipe, error: OSError) -> CompileError:
    """A disk that is full, or a cache that cannot be written, fails one kernel; others may be smaller, or cached."""
    where = f"{error.filename}: " if error.filename else ""
    return CompileError(
        f"{recipe.name}: cannot be kept: {where}{error.strerror or error}. Make room there (fa4build cache prune), or "
        "give another --cache-dir."
    )


def _failed(recipe: Recipe, error: Fa4BuildError, *, seconds: float) -> Outcome:
    return Outcome(
        name=recipe.name,
        key=recipe.key,
        status="failed",
        seconds=seconds,
        message=str(error),
        exit_code=error.exit_code,
    )
