"""Closure of packs of another family: every problem that a declared operator answers is answered from the packs.

What can be asked are the operators' tensors and axes, with extents on both sides of every bound in their rules. A
problem must be answered by one recipe of the packs where one is declared, and never by two; kernels that no recipe of
their pack calls, and declared ones that are absent, are errors, as in `coverage`.
"""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from fa4build.families.interface import Family
from fa4build.matrix.arch import ARCHES
from fa4build.matrix.selection import Selection
from fa4build.runtime.fa4_kernels.expressions import evaluate
from fa4build.runtime.fa4_kernels.packs import Pack
from fa4build.shipping.coverage import Coverage

_Recipe = Mapping[str, Any]
_HEADS_KV = 2
_GROUPS = (1, 2, 3, 4, 5, 8, 16)  # query heads that read one key head
_SHOWN = 3


def cover_family(packs: Iterable[Pack], family: Family, requested: Iterable[Any] = ()) -> Coverage:
    """Ask every operator's rules about every class of problems.

    Args:
        packs: of this family, from `coverage.installed_form`.
        requested: kernels that must be there, whatever target the packs are for.
    """
    packs = tuple(packs)
    entries = {entry.id: entry for pack in packs for entry in pack.manifest.entries}
    targets = tuple(sorted({entry.target for entry in entries.values()}))
    default = family.expand(Selection())
    kernels = (*default, *(k for k in family.expand(Selection(globs=("*",))) if k.id in entries and k not in default))
    target_of = {arch.name: arch.target for arch in ARCHES}
    declared = [recipe.document() for recipe in family.op_recipes(kernels)]
    found = _groups(recipe for pack in packs for recipe in pack.manifest.recipes)
    served: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    missing = {kernel.id for kernel in kernels if target_of[kernel.arch] in targets} - entries.keys()
    missing |= {kernel.id for kernel in requested} - entries.keys()
    wrong = []
    for key, recipes in _groups(declared).items():
        for problem in _problems(recipes):
            counts["all"] += 1
            expected = _answers(recipes, problem)
            answers = _answers(found.get(key, ()), problem)
            if len(answers) > 1:
                wrong.append(f"{_told(recipes[0], problem)}: {' and '.join(answers[:_SHOWN])}")
            if answers:
                served[answers[0]] += 1
            elif not expected:
                refused[f"{recipes[0]['op']}: no kernel of {family.name} is declared for such extents"] += 1
            elif recipes[0]["target"] not in targets:
                counts["other target"] += 1
            else:
                counts["missing"] += 1
    called = {step["kernel"] for pack in packs for recipe in pack.manifest.recipes for step in recipe["steps"]}
    return Coverage(
        targets=targets,
        num_problems=counts["all"],
        served=dict(sorted(served.items())),
        composed=0,
        refused=dict(sorted(refused.items())),
        on_request=0,
        unwritten_problems=0,
        missing_problems=counts["missing"],
        other_targets=counts["other target"],
        unwritten=(),
        missing=tuple(sorted(missing)),
        wrong=tuple(wrong),
        alternatives=(),
        orphans=tuple(sorted(entries.keys() - called)),
    )


def _groups(recipes: Iterable[_Recipe]) -> dict[str, tuple[_Recipe, ...]]:
    """Recipes that only their rules tell apart: same op and target, tensors of the same types and shapes, same axes."""
    groups: defaultdict[str, list[_Recipe]] = defaultdict(list)
    for recipe in recipes:
        tensors = [[tensor["name"], tensor["dtype"], list(tensor["shape"])] for tensor in recipe["inputs"]]
        key = [recipe["op"], recipe["target"], tensors, dict(recipe["axes"])]
        groups[json.dumps(key, sort_keys=True)].append(recipe)
    return {key: tuple(found) for key, found in groups.items()}


def _problems(recipes: Sequence[_Recipe]) -> Iterator[dict[str, int]]:
    """Values for every name in the rules: around each number in them and each quotient of two, and counts of heads."""
    names, numbers = set(), {1}
    for recipe in recipes:
        for node in ast.walk(ast.parse(recipe["when"] or "True", mode="eval")):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Constant) and type(node.value) is int:
                numbers.add(node.value)
    quotients = {a // b for a in numbers for b in numbers if b > 0}
    around = tuple(sorted({number + step for number in quotients for step in (-1, 0, 1) if number + step > 0}))
    values = {
        "num_heads_kv": (_HEADS_KV,),
        "num_heads_q": tuple(_HEADS_KV * group for group in _GROUPS),
    }
    ordered = sorted(names)
    for combination in product(*(values.get(name, around) for name in ordered)):
        yield dict(zip(ordered, combination, strict=True))


def _answers(recipes: Sequence[_Recipe], problem: Mapping[str, int]) -> list[str]:
    return [recipe["id"] for recipe in recipes if not recipe["when"] or evaluate(recipe["when"], problem)]


def _told(recipe: _Recipe, problem: Mapping[str, int]) -> str:
    return ", ".join([f"{recipe['op']} on {recipe['target']}", *(f"{name} {value}" for name, value in problem.items())])
