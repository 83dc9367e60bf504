"""From a launch plan and named arrays to a run: the ABI of the product is what the simulator is launched through."""

from collections.abc import Callable, Collection, Mapping

import numpy as np

from fa4build.errors import SimulationError
from fa4build.plan import BytesParam, Launch, LaunchPlan, TensorMapParam, evaluate
from fa4build.simulate.hardware.global_memory import GlobalMemory
from fa4build.simulate.hardware.tensor_map import ELEMENT_TYPES, TensorMap
from fa4build.simulate.launch import RunReport, SimLaunch, parameter_block, run_launch
from fa4build.simulate.ptx.parser import parse_module

Launcher = Callable[..., RunReport]
"""An engine: what runs a launch, with the signature, the errors and the report of `launch.run_launch`."""


def simulate_launch(
    ptx: str,
    launch: Launch,
    memory: GlobalMemory,
    *,
    registers: int | None = None,
    by_warp: bool = False,
    free_sums: bool = False,
    multiprocessors: int = 0,
    engine: Launcher = run_launch,
    **options,
) -> RunReport:
    """Runs one launch of a plan.

    Args:
        ptx: module text holding `launch.kernel`.
        launch: from `evaluate(plan, inputs)`.
        memory: the buffers whose addresses went into the inputs.
        registers: registers a thread, from the cubin; None leaves setmaxnreg budgets unchecked.
        by_warp: no lockstep of warps.
        free_sums, multiprocessors: see `SimLaunch`.
        engine: what runs it; default: the Python engine.
        options: of the engine: checks, schedule, seed, contract, concurrent_clusters.

    Raises:
        SimulationError: see `run_launch`; also when plan and PTX disagree.
    """
    function = _entry(ptx, launch.kernel)
    block = parameter_block(function, [_parameter(p) for p in launch.params])
    described = SimLaunch(
        kernel=launch.kernel,
        grid=launch.grid,
        block=launch.block,
        cluster=launch.cluster,
        smem=launch.smem,
        parameters=block,
        dependent=launch.pdl,
        free_sums=free_sums,
        multiprocessors=multiprocessors,
        registers=registers,
        by_warp=by_warp,
    )
    return engine(ptx, described, memory, **options)


def _entry(ptx: str, kernel: str):
    entries = parse_module(ptx).entries
    if kernel not in entries:
        raise SimulationError(
            f"the plan launches {kernel}, the PTX holds {', '.join(sorted(entries))}; they do not belong together"
        )
    return entries[kernel]


def _parameter(param: BytesParam | TensorMapParam) -> bytes | TensorMap:
    if isinstance(param, BytesParam):
        return param.data
    return TensorMap(
        address=param.addr,
        dtype=param.dtype,
        dims=tuple(param.dims),
        strides=legal_strides(param),
        box=tuple(param.box),
        element_strides=tuple(param.elem_strides),
        swizzle=param.swizzle,
        interleave=param.interleave,
        l2_promotion=param.l2_promotion,
        oob_fill=param.oob_fill,
    )


def legal_strides(param: TensorMapParam) -> tuple[int, ...]:
    """Strides in bytes with those of dims of extent 1 replaced by the inner extent rounded up to 16, as the
    launcher does.

    Source: docs/formats.md, section 2.
    """
    inner = ELEMENT_TYPES[param.dtype].size_bytes
    strides = []
    for extent, following, stride in zip(param.dims[:-1], param.dims[1:], param.strides, strict=True):
        inner *= extent
        strides.append((inner + 15) // 16 * 16 if following == 1 else stride)
    return tuple(strides)


def plan_inputs(
    plan: LaunchPlan,
    memory: GlobalMemory,
    arrays: Mapping[str, np.ndarray],
    scalars: Mapping,
    *,
    unwritten: Collection[str] = (),
) -> dict:
    """Registers arrays in `memory` and returns the inputs of `evaluate`.

    Args:
        arrays: by argument name; strides in elements are read from them. A name of the plan that is absent is an error.
        scalars: scalar arguments and device facts (`dev.sm_count`, ...) by name.
        unwritten: tensors that hold nothing yet; reading them before they are written is a finding when checks are on.
    """
    inputs: dict = dict(scalars)
    for arg in plan.args:
        if arg.kind != "tensor":
            continue
        if arg.name not in arrays:
            raise SimulationError(f"the plan has a tensor argument {arg.name!r}; arrays given: {', '.join(arrays)}")
        array = arrays[arg.name]
        inputs[f"{arg.name}.ptr"] = memory.add_view(arg.name, array)
        if arg.name in unwritten:
            memory.mark_unwritten(inputs[f"{arg.name}.ptr"])
        for i, extent in enumerate(array.shape):
            inputs[f"{arg.name}.shape[{i}]"] = extent
            inputs[f"{arg.name}.stride[{i}]"] = array.strides[i] // array.itemsize
    return inputs


def simulate(
    plan: LaunchPlan,
    ptx: str,
    arrays: Mapping[str, np.ndarray],
    scalars: Mapping,
    *,
    unwritten: Collection[str] = (),
    **options,
) -> tuple[RunReport, ...]:
    """Evaluates a plan for concrete arrays and runs all its launches; outputs appear in the arrays.

    Args:
        plan: the launch plan that was extracted with the PTX.
        ptx: the PTX that the cubin was made from.
        arrays: host arrays by argument name (16-bit floats as u16 bits, fp8 as u8 bits).
        scalars: scalar arguments and device facts by name.
        unwritten: outputs; see `plan_inputs`.
        options: of `simulate_launch`.

    Raises:
        SimulationError: the kernel misbehaves, a guard fails, or plan and PTX disagree.
    """
    memory = GlobalMemory()
    inputs = plan_inputs(plan, memory, arrays, scalars, unwritten=unwritten)
    reports = []
    for launch in evaluate(plan, inputs):
        if not launch.is_empty:
            reports.append(simulate_launch(ptx, launch, memory, **options))
    return tuple(reports)
