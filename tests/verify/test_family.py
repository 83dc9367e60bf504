"""Contract of the proof of other families' kernels, and of the closure of their packs.

- A kernel is proven by its own operator, or by the first that calls it; one that nothing calls is unproven.
- Whole recipes run in the simulator; what passes becomes evidence of every kernel in it, a wrong answer withdraws it,
  and an unchanged proof is not run again.
- Coverage asks the rules of recipes at every boundary: two answers to one problem, a declared kernel that is absent and
  one that no recipe calls are told.
- flash-attn-4's cases are problems of their recipes: lengths, heads, pages and packed sequences that the rules allow.
"""

import dataclasses
import json

import pytest

from fa4build.families import Buffer, FamilyKernel, Input, OpRecipe, Step, kernel_family
from fa4build.families.proof import ProofCase
from fa4build.families.registry import family_named
from fa4build.matrix.selection import Selection
from fa4build.pipeline import build_matrix, find_cached
from fa4build.runtime.fa4_kernels.expressions import evaluate
from fa4build.runtime.fa4_kernels.packs import Entry, Manifest, Pack
from fa4build.shipping.coverage_family import cover_family
from fa4build.store.cache import Cache
from fa4build.store.evidence import read_record, subject_of
from fa4build.verify.family import operators_of
from fa4build.verify.levels import Options, family_kernels, verify
from tests.kernels_toy import scale_cases
from tests.kernels_toy.scale_family import FAMILY as TOY

NAME = "scale_rows-sm90a-bf16-n256"


def recipe(name: str, *kernels: str, when: str = "", **axes: object) -> OpRecipe:
    """An operator that calls these kernels."""
    tensor = Input(name="x", dtype="bf16", shape=("rows", 64))
    return OpRecipe(
        id=name,
        op="scale",
        target="sm_90a",
        inputs=(tensor,),
        buffers=(Buffer(name="out", dtype="bf16", shape=("rows", "64")),),
        steps=tuple(Step(kernel=kernel, arguments=("x", "out")) for kernel in kernels),
        results=("out",),
        when=when,
        axes=axes,
    )


def test_a_kernel_is_proven_by_its_own_operator_or_the_first_that_calls_it():
    """`both` calls a and helper, `a` only a; nothing calls the last kernel."""
    recipes = (recipe("both", "a", "helper"), recipe("a", "a"), recipe("late", "helper"))
    found = operators_of(recipes, ["a", "helper", "alone"])

    assert {"a": "a", "helper": "both"} == {name: operator.id for name, operator in found.items()}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The toy kernel, built."""
    pytest.importorskip("cutlass")
    cache = Cache(tmp_path_factory.mktemp("toy"))
    report = build_matrix(Selection(globs=(NAME,)), cache, 1, family=TOY)
    assert report.exit_code == 0, [outcome.message for outcome in report.outcomes]
    return cache


def draw_wrong(arguments, seed):
    """The right problem with an answer that is a tenth too large."""
    problem = scale_cases.draw(arguments, seed)
    answer, bound = problem.expected["out"]
    return dataclasses.replace(problem, expected={"out": (answer * 1.1, bound)})


def wrong_cases(operator):
    """One case that no kernel can pass."""
    return (ProofCase(name="rows", draw=f"{__name__}:draw_wrong", arguments={"rows": 3}),)


def proven(cache, tmp_path, cases, **options):
    """(report, whether there is evidence) of a verification of the toy kernel."""
    family = dataclasses.replace(TOY, cases=cases)
    kernels = family_kernels(family, (), (NAME,))
    report = verify(kernels, cache, Options(baseline_dir=tmp_path, **options), family=family)
    ((_, entry),) = find_cached(kernels, cache, family=family)
    return report, read_record(cache.root, "simulated", subject_of(entry))


def test_an_operator_is_proven_and_not_proven_again(cache, tmp_path):
    """Static and simulated in one go; the second time its proof is known; a wrong answer takes the evidence away."""
    report, evidence = proven(cache, tmp_path, scale_cases.cases)
    assert [(check.level, check.status) for check in report.checks] == [("static", "passed"), ("simulated", "passed")]
    assert (evidence["operator"], evidence["cases"], evidence["schedules"]) == (NAME, 1, ["eager", "late", "random"])
    assert 0 < evidence["worst_ratio"] <= 1

    again, _ = proven(cache, tmp_path, scale_cases.cases, static=False)
    assert [check.status for check in again.checks] == ["known"]

    wrong, evidence = proven(cache, tmp_path, wrong_cases, static=False)
    assert [check.status for check in wrong.checks] == ["failed"]
    assert "eager schedule: out is off by" in wrong.checks[0].failures[0]
    assert evidence is None


def test_kernels_without_cases_are_unproven(cache, tmp_path):
    """No failure and no evidence; that nothing was proven is exit code 10."""
    report, evidence = proven(cache, tmp_path, lambda recipe: (), static=False)

    assert [check.status for check in report.checks] == ["unproven"]
    assert "there are no acceptance cases for scale_rows of toy yet" in report.checks[0].notes[0]
    assert (report.exit_code, evidence) == (10, None)


# --- coverage ---------------------------------------------------------------------------------------------------------


def ruled(names: list[str], rules: dict[str, str]):
    """A family for sm90a: these kernels, and an operator for each rule."""

    def kernels(arch):
        return [FamilyKernel(id=name, op="scale", arch=arch, function="m:f") for name in names if arch == "sm90a"]

    return kernel_family(
        name="ruled",
        summary="Rules",
        kernels=kernels,
        sources=[__file__],
        op_recipes=lambda built: tuple(
            recipe(kernel.id, kernel.id, when=rules[kernel.id]) for kernel in built if kernel.id in rules
        ),
    )


def pack_of(family, *names: str, rules: dict[str, str]) -> Pack:
    """What the runtime would see of a wheel with these kernels."""
    base = {field.name: None for field in dataclasses.fields(Manifest)}
    entries = tuple(
        Entry(**{field.name: None for field in dataclasses.fields(Entry)} | {"id": name, "target": "sm_90a"})
        for name in names
    )
    recipes = tuple(recipe(name, name, when=rules[name]).document() for name in names if name in rules)
    return Pack(manifest=Manifest(**base | {"entries": entries, "recipes": recipes}), directory=None)


RULES = {"few-sm90a": "rows <= 8", "many-sm90a": "rows > 8 and rows <= 100"}


def test_a_complete_pack_is_closed():
    """Rows around 1, 8, 100 and 100 // 8: 1, 2, 7, 8 and 9, 11, 12, 13, 99, 100 are served, 101 is refused."""
    coverage = cover_family([pack_of(None, *RULES, rules=RULES)], ruled(list(RULES), RULES))

    assert coverage.is_closed
    assert {"few-sm90a": 4, "many-sm90a": 6} == coverage.served
    assert {"scale: no kernel of ruled is declared for such extents": 1} == coverage.refused


def test_a_declared_kernel_that_is_absent_is_missing():
    """With the problems that it would answer."""
    coverage = cover_family([pack_of(None, "few-sm90a", rules=RULES)], ruled(list(RULES), RULES))

    assert (coverage.missing, coverage.missing_problems, coverage.is_closed) == (("many-sm90a",), 6, False)


def test_two_answers_are_wrong():
    """Rules that overlap: 8 rows are answered by both."""
    overlapping = {**RULES, "many-sm90a": "rows >= 8"}
    coverage = cover_family([pack_of(None, *RULES, rules=overlapping)], ruled(list(RULES), overlapping))

    assert coverage.wrong == ("scale on sm_90a, rows 8: few-sm90a and many-sm90a",)
    assert not coverage.is_closed


def test_a_kernel_that_no_recipe_calls_is_an_orphan():
    """It takes room in the wheel and is never reached."""
    names = [*RULES, "idle-sm90a"]
    coverage = cover_family([pack_of(None, *names, rules=RULES)], ruled(names, RULES))

    assert (coverage.orphans, coverage.is_closed) == (("idle-sm90a",), False)


# --- the cases of flash-attn-4 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_every_operator_of_upstream_has_cases_that_its_rule_allows(arch):
    """One and several key heads; lengths in the class of the kernel. Arguments are JSON, draws are named functions."""
    family = family_named("flash-attn-4")
    for operator in family.op_recipes(family.expand(Selection(arches=(arch,), globs=("*",)))):
        cases = family.cases(operator)
        assert cases
        for case in cases:
            arguments = json.loads(json.dumps(case.arguments))
            heads = arguments["heads_kv"]
            names = {
                "num_heads_kv": heads,
                "num_heads_q": heads * arguments["ratio"],
                "seqlen_q": max(arguments["queries"]),
                "max_seqlen_q": max(arguments["queries"]),
                "num_splits": arguments.get("num_splits", 1),
            }
            assert evaluate(operator.when or "True", names), (operator.id, case)


@pytest.mark.parametrize(
    "name",
    [
        "fwd-sm100a-bf16-hd64-causal-varlen-r4-short",
        "fwd-sm90a-fp16-hd64-local-paged-r8",
        "fwd-sm100a-e4m3-hd128-full-r1-decode",
        "bwd-sm100a-bf16-hd64-causal-varlen-r4",
    ],
)
def test_what_is_drawn_has_the_shapes_of_the_recipe(name):
    """Every input of the recipe, with equal extents under equal names, and finite answers but for empty rows of lse."""
    from fa4build.families.flash_attn_4 import cases as module

    family = family_named("flash-attn-4")
    operator = next(
        r
        for r in family.op_recipes(family.expand(Selection(arches=(name.split("-")[1],), globs=("*",))))
        if r.id == name
    )
    for case in family.cases(operator):
        assert isinstance(case, ProofCase)
        problem = getattr(module, case.draw.partition(":")[2])(case.arguments, 1)
        assert {tensor.name for tensor in operator.inputs} == problem.inputs.keys()
        extents: dict[str, int] = {}
        for tensor in operator.inputs:
            for extent, found in zip(tensor.shape, problem.inputs[tensor.name].shape, strict=True):
                expected = extent if isinstance(extent, int) else extents.setdefault(extent, found)
                assert found == expected, (tensor.name, extent)
        assert set(problem.expected) == set(operator.results)
