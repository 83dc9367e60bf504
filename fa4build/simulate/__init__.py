"""PTX functional simulator: runs compiled kernels on the CPU to verify them before they ship. No execution backend.

`simulate(plan, ptx, arrays, scalars)` runs all launches of a plan; `simulate_launch` runs one; `GlobalMemory` holds the
buffers. From the outside in: `plan_launch` (plans to launches), `launch` (one launch), `scheduler` and `machine`
(CTAs and
clusters), `gang` (warps in lockstep, divergence), `translate` and `emitter` (PTX to Python functions), `ptx/` (the
parser). Opcodes: `integer_alu`, `float_alu`, `moves`, `memory`, `warp_ops`, `barriers`, `fences`, `async_copies`,
`tensor_copies`,
`wgmma`, `tcgen05`, `atomics`, `cluster_launch_control`; a new one is a rule in one of them. `checks/`: the hazard
observer.
"""

from fa4build.simulate.global_memory import GlobalMemory
from fa4build.simulate.launch import RunReport, SimLaunch, run_launch
from fa4build.simulate.plan_launch import plan_inputs, simulate, simulate_launch

__all__ = ["GlobalMemory", "RunReport", "SimLaunch", "plan_inputs", "run_launch", "simulate", "simulate_launch"]
