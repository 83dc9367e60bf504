"""Launch plans: the host half of a kernel as data (docs/formats.md, section 2).

The one place other parts import from. The pieces: `values` (what a plan is), `as_json` (reading and writing, with
every check), `evaluation` (numbers in, launches out), `render` (for people), `validate` (against PTX and cubin),
`guards` (what the host code does not check), `extract` (a plan from a compiled host function).
"""

from __future__ import annotations

from fa4build.plan.as_json import check_plan, plan_from_json, plan_to_json
from fa4build.plan.evaluation import canonical_digest, evaluate, failed_guard
from fa4build.plan.render import render_plan
from fa4build.plan.values import (
    Arg,
    BytesParam,
    BytesTemplate,
    Guard,
    Launch,
    LaunchPlan,
    LaunchTemplate,
    TensorMapParam,
    TensorMapTemplate,
    Vector,
    leaves,
)

__all__ = [
    "Arg",
    "BytesParam",
    "BytesTemplate",
    "Guard",
    "Launch",
    "LaunchPlan",
    "LaunchTemplate",
    "TensorMapParam",
    "TensorMapTemplate",
    "Vector",
    "canonical_digest",
    "check_plan",
    "evaluate",
    "failed_guard",
    "leaves",
    "plan_from_json",
    "plan_to_json",
    "render_plan",
]
