"""Read by Python at its start, where fa4_kernels.stacks.workers has put it on the path: provides what the environment
says, then runs the sitecustomize that Python would have found without it. A fault is told, and ends no process."""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  nothing else is imported at each start


def _provide():
    try:
        if importlib.util.find_spec("fa4_kernels") is None:
            sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))  # noqa: PTH120
        from fa4_kernels.stacks.workers import provide_as_told

        provide_as_told(os.environ)
    except Exception as error:
        sys.stderr.write("fa4_kernels: nothing is provided to this process: {}\n".format(error))  # noqa: UP032


def _run_the_other():
    others = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_provide()
_run_the_other()
