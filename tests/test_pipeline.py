"""Contract of a build.

What is in the cache is not compiled again. A failed variant does not stop the others; the report has one outcome for
every variant, in the order of the matrix. Two builds at once share the work. A build that is killed loses nothing that
was finished. Registers that spill are a failure unless they are allowed.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from fa4build.compiling.compile import CompileOptions, CompileRequest, Cubin
from fa4build.compiling.executors import Finished
from fa4build.errors import CompileError, Fa4BuildError, LaunchPlanError, NotCachedError, RenderError
from fa4build.matrix.axes import Variant, parse_axes
from fa4build.matrix.variants import valid_variants
from fa4build.pipeline import Build, BuildReport, Event, Recipe, require_cached, shard
from fa4build.plan import plan_from_json
from fa4build.store.cache import Cache
from fa4build.store.keys import key_of

NAMES = tuple(f"fwd-sm90a-bf16-hd{head_dim}-{mask}" for head_dim in (64, 128, 256) for mask in ("full", "causal"))
VARIANTS = tuple(map(parse_axes, NAMES))

PLAN = plan_from_json(
    '{"format": "fa4build.launchplan", "version": 1, "origin": {"kind": "handwritten"}, "spec": {}, "args": [],'
    ' "nodes": [["const", "i64", 1]], "guards": [], "vectors": [], "launches": [{"kernel": "k_0", "grid": [0, 0, 0],'
    ' "block": [128, 1, 1], "cluster": [1, 1, 1], "smem": 0, "pdl": false, "cooperative": false, "params": []}]}'
)
CUBIN = Cubin(
    elf=b"\x7fELF",
    ptx=".version 9.4",
    target="sm_90a",
    symbols=("k_0",),
    registers=168,
    spill_bytes=0,
    local_bytes=0,
    shared_bytes=1024,
    ptxas="V13.4.59",
    plan=PLAN,
    log="ptxas info",
    cpu_seconds=1.5,
    peak_bytes=1 << 28,
)


def recipe_of(variant: Variant) -> Recipe:
    """A recipe without rendering: the key depends on the id alone."""
    inputs = {"id": variant.id}
    request = CompileRequest(name=variant.id, target="sm_90a", symbol="k", function="none:none", payload={})
    return Recipe(name=variant.id, key=key_of(inputs), inputs=inputs, request=request, options=CompileOptions())


@dataclass
class ScriptedExecutor:
    """Gives back what `results` says for a name, the last submitted first; counts what runs at a time."""

    capacity: int = 2
    results: dict[str, Cubin | Fa4BuildError] = field(default_factory=dict)
    on_wait: Callable[[], None] = lambda: None
    submitted: list[str] = field(default_factory=list)
    running: list[tuple[int, str]] = field(default_factory=list)
    most_at_a_time: int = 0

    def close(self) -> None:
        pass

    def submit(self, recipe: Recipe, work_dir: Path) -> int:
        self.submitted.append(recipe.name)
        self.running.append((len(self.submitted), recipe.name))
        self.most_at_a_time = max(self.most_at_a_time, len(self.running))
        return len(self.submitted)

    def wait(self) -> Finished:
        self.on_wait()
        job, name = self.running.pop()
        return Finished(job=job, result=self.results.get(name, CUBIN), seconds=1.0)


def build(
    cache: Cache,
    executor: ScriptedExecutor,
    variants: Iterable[Variant] = VARIANTS,
    recipe: Callable[[Variant], Recipe] = recipe_of,
    **options,
) -> tuple[BuildReport, list[Event]]:
    """A build of some variants, with the events it told."""
    events: list[Event] = []
    variants = tuple(variants)
    run = Build(cache=cache, executor=executor, total=len(variants), on_event=events.append, **options)
    return run.run(variants, recipe), events


def statuses(report: BuildReport) -> dict[str, str]:
    """Status by name."""
    return {outcome.name: outcome.status for outcome in report.outcomes}


def test_a_cold_build_compiles_everything_and_a_second_one_nothing(tmp_path):
    """Outcomes come in the order of the matrix, whatever order the compiles end in."""
    cache, executor = Cache(tmp_path), ScriptedExecutor()
    first, _ = build(cache, executor)
    second, _ = build(cache, executor)

    assert [outcome.name for outcome in first.outcomes] == list(NAMES)
    assert statuses(first) == dict.fromkeys(NAMES, "compiled")
    assert statuses(second) == dict.fromkeys(NAMES, "cached")
    assert sorted(executor.submitted) == sorted(NAMES)
    assert (first.exit_code, second.exit_code) == (0, 0)


def test_what_was_compiled_is_in_the_cache_with_its_facts(tmp_path):
    """Cubin, plan, PTX and log, and what later stages need to know without opening them."""
    cache = Cache(tmp_path)
    report, _ = build(cache, ScriptedExecutor(), VARIANTS[:1])
    entry = cache.get(report.outcomes[0].key)

    assert entry is not None
    assert (cache.read(entry, "cubin"), cache.read(entry, "ptx"), cache.read(entry, "log")) == (
        b"\x7fELF",
        b".version 9.4",
        b"ptxas info",
    )
    assert plan_from_json(cache.read(entry, "plan").decode()) == PLAN
    assert entry.facts == {
        "target": "sm_90a",
        "ptxas": "V13.4.59",
        "symbols": ["k_0"],
        "registers": 168,
        "spill_bytes": 0,
        "local_bytes": 0,
        "shared_bytes": 1024,
    }


def test_no_more_run_at_a_time_than_the_executor_takes(tmp_path):
    """And never fewer while there is work."""
    executor = ScriptedExecutor(capacity=3)
    build(Cache(tmp_path), executor)

    assert executor.most_at_a_time == 3


def test_a_failed_variant_does_not_stop_the_others(tmp_path):
    """It is reported with its message; it has no entry, so the next build tries it again."""
    cache = Cache(tmp_path)
    executor = ScriptedExecutor(results={NAMES[2]: CompileError("ptxas died")})
    report, _ = build(cache, executor)

    assert statuses(report) == {**dict.fromkeys(NAMES, "compiled"), NAMES[2]: "failed"}
    assert report.outcomes[2].message == "ptxas died"
    assert report.count("compiled") == 5
    executor.results.clear()
    assert statuses(build(cache, executor)[0])[NAMES[2]] == "compiled"


def test_a_variant_that_cannot_be_rendered_fails_alone(tmp_path):
    """Before it has a key."""

    def recipe(variant: Variant) -> Recipe:
        if variant.id == NAMES[0]:
            raise RenderError("names something undefined")
        return recipe_of(variant)

    report, _ = build(Cache(tmp_path), ScriptedExecutor(), recipe=recipe)

    assert (report.outcomes[0].status, report.outcomes[0].key, report.outcomes[0].exit_code) == ("failed", None, 4)
    assert report.count("compiled") == 5


def test_the_exit_code_is_that_of_the_first_failure(tmp_path):
    """In the order of the matrix: 9 for a launch plan, though a compile error (5) came earlier in time."""
    executor = ScriptedExecutor(
        capacity=6, results={NAMES[1]: LaunchPlanError("unknown op"), NAMES[4]: CompileError("ptxas died")}
    )
    report, events = build(Cache(tmp_path), executor)
    failures = [event.name for event in events if event.outcome is not None and event.outcome.status == "failed"]

    assert failures == [NAMES[4], NAMES[1]]
    assert report.exit_code == 9


def test_events_count_up_to_the_total(tmp_path):
    """One when a variant starts to compile, one for each outcome; cached ones have no start."""
    cache = Cache(tmp_path)
    build(cache, ScriptedExecutor(), VARIANTS[:2])
    _, events = build(cache, ScriptedExecutor())
    outcomes = [event for event in events if event.outcome is not None]
    starts = [event.name for event in events if event.outcome is None]

    assert [event.done for event in outcomes] == [1, 2, 3, 4, 5, 6]
    assert {event.total for event in events} == {6}
    assert starts == list(NAMES[2:])


def test_spills_are_a_failure_unless_allowed(tmp_path):
    """The entry is kept, so that allowing it later compiles nothing; and it stays a failure when it comes cached."""
    cache = Cache(tmp_path)
    executor = ScriptedExecutor(results={NAMES[0]: replace(CUBIN, spill_bytes=84)})
    first, _ = build(cache, executor, VARIANTS[:1])
    cached, _ = build(cache, executor, VARIANTS[:1])
    allowed, _ = build(cache, executor, VARIANTS[:1], allow_spills=True)

    assert [report.outcomes[0].status for report in (first, cached, allowed)] == ["failed", "failed", "cached"]
    assert "84 bytes of registers spill" in first.outcomes[0].message
    assert first.exit_code == CompileError.exit_code
    assert executor.submitted == [NAMES[0]]


def test_a_key_that_another_build_compiles_is_left_to_it(tmp_path):
    """Everything else is compiled first; then what the other one made is taken."""
    cache, other = Cache(tmp_path), Cache(tmp_path)
    held = recipe_of(VARIANTS[0])
    is_held = threading.Event()

    def compile_elsewhere() -> None:
        with other.lock(held.key):
            is_held.set()
            time.sleep(0.3)
            facts = {"spill_bytes": 0, "registers": 1}
            objects = {"cubin": b"x", "plan": b"{}", "ptx": b"", "log": b""}
            other.put(name=held.name, inputs=held.inputs, facts=facts, objects=objects)

    thread = threading.Thread(target=compile_elsewhere)
    executor = ScriptedExecutor()
    thread.start()
    assert is_held.wait(timeout=10)
    report, _ = build(cache, executor)
    thread.join()

    assert statuses(report) == {**dict.fromkeys(NAMES, "compiled"), NAMES[0]: "cached"}
    assert sorted(executor.submitted) == sorted(NAMES[1:])


def test_an_interrupted_build_keeps_what_was_finished_and_frees_the_rest(tmp_path):
    """Ctrl-C after the third compile: three entries, no lock held, and the next build goes on."""
    cache = Cache(tmp_path)
    waits = iter(range(100))

    def interrupt() -> None:
        if next(waits) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(cache, ScriptedExecutor(on_wait=interrupt))
    assert len(cache.entries()) == 3

    executor = ScriptedExecutor()
    report, _ = build(cache, executor)
    assert (report.count("cached"), report.count("compiled")) == (3, 3)
    assert len(executor.submitted) == 3


def test_a_damaged_entry_is_compiled_again(tmp_path):
    """It counts as absent, and is repaired."""
    cache = Cache(tmp_path)
    report, _ = build(cache, ScriptedExecutor(), VARIANTS[:1])
    entry = cache.get(report.outcomes[0].key)
    digest = entry.objects["cubin"].sha256
    path = tmp_path / "objects" / digest[:2] / digest
    path.chmod(0o644)
    path.write_bytes(b"\x7fELG")

    with pytest.warns(UserWarning, match="damaged"):
        again, _ = build(cache, ScriptedExecutor(), VARIANTS[:1])
    assert again.outcomes[0].status == "compiled"
    assert cache.verify() == ()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_are_disjoint_and_complete(count):
    """Over the whole matrix; sizes differ by one at most."""
    variants = valid_variants()
    parts = [shard(variants, index, count) for index in range(1, count + 1)]

    assert sorted(variant.id for part in parts for variant in part) == sorted(variant.id for variant in variants)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_asserting_that_everything_is_cached_names_what_is_not(tmp_path):
    """With its own exit code."""
    cache = Cache(tmp_path)
    build(cache, ScriptedExecutor(), VARIANTS[:4])
    found = [(recipe, cache.get(recipe.key)) for recipe in map(recipe_of, VARIANTS)]

    with pytest.raises(NotCachedError, match=f"2 of 6 variants are not in the cache: {NAMES[4]}, {NAMES[5]}") as error:
        require_cached(found)
    assert error.value.exit_code == 11
    assert [entry.name for entry in require_cached(found[:4])] == list(NAMES[:4])


def test_a_killed_compile_is_tried_again(tmp_path):
    """As often as asked for; what the compiler refuses is not."""
    killed, refused = CompileError("killed"), CompileError("ptxas died")
    killed.may_pass_again = True
    executor = ScriptedExecutor(results={NAMES[0]: killed, NAMES[1]: refused})
    report, _ = build(Cache(tmp_path), executor, VARIANTS[:3], retries=2)

    assert statuses(report) == {NAMES[0]: "failed", NAMES[1]: "failed", NAMES[2]: "compiled"}
    assert [executor.submitted.count(name) for name in NAMES[:3]] == [3, 1, 1]


def test_fail_fast_starts_nothing_after_a_failure(tmp_path):
    """What waits is skipped, and is built the next time; the exit code is the failure's."""
    cache = Cache(tmp_path)
    executor = ScriptedExecutor(capacity=1, results={NAMES[1]: CompileError("ptxas died")})
    report, _ = build(cache, executor, fail_fast=True)

    assert list(statuses(report).values()) == ["compiled", "failed", *["skipped"] * 4]
    assert (report.exit_code, report.count("skipped"), len(executor.submitted)) == (5, 4, 2)
    assert build(cache, ScriptedExecutor())[0].count("compiled") == 5
