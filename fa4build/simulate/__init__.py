"""PTX functional simulator: runs compiled kernels on the CPU to verify them before they ship. No execution backend.

`simulate(plan, ptx, arrays, scalars)` runs all launches of a plan; `simulate_launch` runs one; `GlobalMemory`
holds the buffers.
"""

from fa4build.simulate.global_memory import GlobalMemory
from fa4build.simulate.launch import RunReport, SimLaunch, run_launch
from fa4build.simulate.plan_launch import plan_inputs, simulate, simulate_launch

__all__ = ["GlobalMemory", "RunReport", "SimLaunch", "plan_inputs", "run_launch", "simulate", "simulate_launch"]
