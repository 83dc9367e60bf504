"""Proofs whose launches run in the native engine of the simulator: the same cases, runs and judgements.

Their word is no evidence yet: the engine that has proven every kernel is the Python one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fa4build.simulate import plan_launch
from fa4build.simulate.native.run import run_launch
from fa4build.verify.runs import Request
from fa4build.verify.simulated import Proof, prove

ENGINES = ("python", "native")


@contextmanager
def native_launches() -> Iterator[None]:
    """Launch plans run in the native engine meanwhile. For a process of its own: it holds for all of its threads."""
    before = plan_launch.run_launch
    plan_launch.run_launch = run_launch
    try:
        yield
    finally:
        plan_launch.run_launch = before


def prove_native(request: Request, tell: Callable[[str], None]) -> Proof:
    """As `verify.simulated.prove`, in the native engine."""
    with native_launches():
        return prove(request, tell, "native")
