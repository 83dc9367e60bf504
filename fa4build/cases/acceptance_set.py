"""What a proof in the simulator must consist of: the acceptance cases of one of our own variants, and the schedules.

Reading evidence needs their names and numbers alone; what runs them is `verify.simulated`.
"""

import functools

from fa4build.errors import VariantError
from fa4build.matrix.variants import parse_variant


@functools.cache
def acceptance_cases(kernel: str) -> tuple[str, ...]:
    """Names of the acceptance cases of one of our own variants, in order; () for a kernel of another family."""
    from fa4build.cases.of_variant import (  # with numpy, which reading a manifest does not need
        cases_of_variant,
        has_cases,
    )

    try:
        variant = parse_variant(kernel)
    except VariantError:
        return ()
    return tuple(case.name for case in cases_of_variant(variant)) if has_cases(variant) else ()


def acceptance_schedules(engine: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The schedules of every proof in an engine, and those of them with every check on."""
    from fa4build.cases.schedules import runs_of

    runs = runs_of(engine)
    return tuple(run.schedule for run in runs), tuple(run.schedule for run in runs if run.checks)
