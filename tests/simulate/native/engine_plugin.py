"""The simulator's other tests in the native engine: `pytest -p tests.simulate.native.engine_plugin tests/simulate`.

Some texts differ: they name the warps of a gang, or depend on warps that run in lockstep (README.md of the engine).
"""

import fa4build.simulate
from fa4build.simulate import launch, plan_launch
from fa4build.simulate.native.run import run_launch

_PYTHON = launch.run_launch


def _run(*args, recorder=None, **options):
    """The timing model records in the Python engine."""
    if recorder is not None:
        return _PYTHON(*args, recorder=recorder, **options)
    return run_launch(*args, **options)


launch.run_launch = plan_launch.run_launch = fa4build.simulate.run_launch = _run
