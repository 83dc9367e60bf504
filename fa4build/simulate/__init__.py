"""PTX functional simulator: runs compiled kernels on the CPU to verify them before they ship. No execution backend.

`simulate(plan, ptx, arrays, scalars)` runs all launches of a plan; `simulate_launch` runs one; `GlobalMemory` holds the
buffers. From the outside in: `plan_launch` (plans to launches), `launch` (one launch), `program` (a function of PTX as
Python functions). Each folder reaches only those before it:

- `ptx/`: text to typed instructions.
- `units/`: bit formats and arithmetic units.
- `hardware/`: gangs (warps in lockstep, divergence), scheduler, memories, descriptors, the copy engine.
- `translate/`: the opcode table, and the writer of Python text.
- `instructions/`: a rule for each opcode; a new one is a rule in one of them. `ctas` is what the warps of a CTA share.
- `checks/`: the hazard observer.
"""

from fa4build.simulate.hardware.global_memory import GlobalMemory
from fa4build.simulate.launch import RunReport, SimLaunch, run_launch
from fa4build.simulate.plan_launch import plan_inputs, simulate, simulate_launch

__all__ = ["GlobalMemory", "RunReport", "SimLaunch", "plan_inputs", "run_launch", "simulate", "simulate_launch"]
