"""Arguments of a launch plan under other names: a foreign host function called as an operator's signature says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fa4build.codegen.plan_json import check_plan
from fa4build.codegen.plan_values import LaunchPlan
from fa4build.errors import LaunchPlanError


def with_names(plan: LaunchPlan, names: Mapping[str, str]) -> LaunchPlan:
    """`plan` with its arguments renamed wherever they occur: leaves, guards, spec, vectors.

    Args:
        names: old -> new; arguments that are not named keep theirs.
    Raises: LaunchPlanError when an old name does not exist, or two arguments would share one.
    """
    if not names:
        return plan
    known = [arg.name for arg in plan.args]
    if unknown := sorted(set(names) - set(known)):
        raise LaunchPlanError(f"no argument is called {', '.join(unknown)}; the host function takes {', '.join(known)}")
    renamed = [names.get(name, name) for name in known]
    if len(set(renamed)) != len(renamed):
        raise LaunchPlanError(f"two arguments would have one name: {', '.join(renamed)}")
    word = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, names)) + r")(?!\w)")

    def text(value: str) -> str:
        return word.sub(lambda match: names[match[1]], value)

    def leaf(value: str) -> str:
        head, dot, rest = value.partition(".")
        return f"{names.get(head, head)}{dot}{rest}"

    return check_plan(
        replace(
            plan,
            spec=_renamed_spec(plan.spec, names, leaf),
            args=tuple(replace(arg, name=name) for arg, name in zip(plan.args, renamed, strict=True)),
            nodes=tuple((*node[:2], leaf(node[2])) if node[0] == "in" else node for node in plan.nodes),
            guards=tuple(replace(guard, message=text(guard.message)) for guard in plan.guards),
            vectors=tuple(
                replace(vector, inputs={leaf(name): value for name, value in vector.inputs.items()})
                for vector in plan.vectors
            ),
        )
    )


def _renamed_spec(spec: Mapping[str, Any], names: Mapping[str, str], leaf: Any) -> dict[str, Any]:
    """`spec` with the tensors of its reserved keys renamed (see `plan_guards`)."""
    new = dict(spec)
    if "shapes" in new:
        new["shapes"] = {names.get(name, name): shape for name, shape in new["shapes"].items()}
    if "unit_strides" in new:
        new["unit_strides"] = [leaf(stride) for stride in new["unit_strides"]]
    return new
