"""Runs one kernel launch: a launch of the product's own plan, or a launch described by hand in tests."""

from dataclasses import dataclass, field

from fa4build.errors import SimulationError
from fa4build.simulate.checks.observer import Observer
from fa4build.simulate.hardware.engine import SCHEDULES, Engine
from fa4build.simulate.hardware.global_memory import GlobalMemory
from fa4build.simulate.hardware.scheduler import Scheduler
from fa4build.simulate.hardware.tensor_map import TensorMap, pack
from fa4build.simulate.instructions.cluster_launch_control import GridWork
from fa4build.simulate.instructions.ctas import SHARED_MAXIMUM, Cluster
from fa4build.simulate.program import program_for
from fa4build.simulate.ptx.parser import parse_module

INSTRUCTION_LIMIT = (
    20_000_000  # instructions of one gang without blocking, and 64 times that in all: far above any real kernel
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimLaunch:
    """A launch with its parameter block as bytes.

    Attributes:
        grid, block, cluster: extents.
        smem: dynamic shared bytes.
        parameters: the kernel's parameter block.
        dependent: launched as a programmatic dependent of the kernel in front: only behind griddepcontrol.wait is that
            one over. The native engine's checks ask for it; both engines run launches one after the other.
        free_sums: additions of floats to one address may happen in any order: the kernel is not deterministic.
        multiprocessors: the native engine has at least as many clusters in flight as so many have room for; 0: as
            `concurrent_clusters` says. The Python engine does not look at it.
        registers: registers a thread at launch (None: setmaxnreg budgets are not checked).
        shared_names: (name, start, size, stride) of shared fields relative to the dynamic base, for reports.
        by_warp: start with one gang per warp instead of lockstep.
        tensor_maps: maps decoded so far, by address.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    smem: int = 0
    parameters: bytes = b""
    dependent: bool = False
    free_sums: bool = False
    multiprocessors: int = 0
    registers: int | None = None
    shared_names: tuple[tuple[str, int, int, int], ...] = ()
    by_warp: bool = False
    tensor_maps: dict = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a run did: warp instructions executed, notes (warnings) of the checks."""

    kernel: str
    warp_instructions: int
    notes: tuple[str, ...] = ()


def run_launch(
    ptx: str,
    launch: SimLaunch,
    memory: GlobalMemory,
    *,
    checks: bool = False,
    allowed: tuple[str, ...] = (),
    schedule: str = "eager",
    seed: int = 0,
    contract: bool = True,
    concurrent_clusters: int = 1,
    recorder=None,
) -> RunReport:
    """Executes a kernel on the CPU.

    Args:
        ptx: module text.
        launch: what to run.
        memory: buffers that the parameters point into; results appear there.
        checks: report races, missing fences, uninitialised reads, leftovers at exit.
        allowed: rules (`R5-exit`, `R14`, ...) whose findings are notes instead of errors.
        schedule: `eager`, `late` or `random`: when asynchronous operations happen and how warps interleave.
        seed: of the random schedule.
        contract: fuse mul and add as ptxas does.
        concurrent_clusters: clusters in flight at once (kernels that wait for other clusters need more than 1).
        recorder: an observer instead of that of the checks (timing_trace); `attach(program)` gives it the program.

    Raises:
        SimulationError: the kernel does something wrong, or something the simulator does not know.
    """
    if schedule not in SCHEDULES:
        raise SimulationError(f"schedule {schedule!r} is unknown; allowed: {', '.join(SCHEDULES)}")
    module = parse_module(ptx)
    program = program_for(ptx, launch.kernel, contract=contract)
    _validate(launch, program.function)
    observer = _observer(checks, program, allowed) if recorder is None else recorder.attach(program)
    memory.begin_launch()
    instructions = 0
    work = GridWork(_cluster_origins(launch))
    index = 0
    while origins := [o for o in (work.take() for _ in range(concurrent_clusters)) if o is not None]:
        clusters = []
        for origin in origins:
            engine = Engine(schedule, seed + index)
            clusters.append(Cluster(launch, program, module, memory, engine, observer, work, index, origin))
            index += 1
        scheduler = Scheduler(
            clusters, schedule=schedule, seed=seed + index, limit=INSTRUCTION_LIMIT, kernel=launch.kernel
        )
        scheduler.run()
        _finish(launch, clusters, observer)
        instructions += scheduler.warp_instructions
    notes = () if observer is None else observer.notes()
    return RunReport(kernel=launch.kernel, warp_instructions=instructions, notes=notes)


def _observer(checks: bool, program, allowed: tuple[str, ...]):
    if not checks:
        return None
    return Observer(program, allowed)


def _validate(launch: SimLaunch, function) -> None:
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    if function.required_threads is not None and threads != function.required_threads:
        raise SimulationError(
            f"{launch.kernel}: launched with {threads} threads, the PTX requires {function.required_threads} (.reqntid)"
        )
    if not 1 <= threads <= 1024:
        raise SimulationError(f"{launch.kernel}: {threads} threads; a CTA has 1 to 1024")
    if len(launch.parameters) < function.parameter_bytes:
        raise SimulationError(
            f"{launch.kernel}: {len(launch.parameters)} parameter bytes given, the PTX declares "
            f"{function.parameter_bytes}; plan and PTX do not match"
        )
    if not 0 <= launch.smem <= SHARED_MAXIMUM:
        raise SimulationError(
            f"{launch.kernel}: {launch.smem} bytes of shared memory; a CTA has at most {SHARED_MAXIMUM}"
        )
    for axis in range(3):
        if launch.grid[axis] % launch.cluster[axis]:
            raise SimulationError(f"{launch.kernel}: grid {launch.grid} is not a multiple of cluster {launch.cluster}")


def _cluster_origins(launch: SimLaunch) -> list[tuple[int, int, int]]:
    steps = launch.cluster
    return [
        (x, y, z)
        for z in range(0, launch.grid[2], steps[2])
        for y in range(0, launch.grid[1], steps[1])
        for x in range(0, launch.grid[0], steps[0])
    ]


def _finish(launch: SimLaunch, clusters: list[Cluster], observer) -> None:
    """After the last warp: performs what is left of writes to global memory, and checks what must be over."""
    for cluster in clusters:
        while cluster.engine.advance():
            pass
        if observer is not None:
            observer.cluster_exit(cluster)


def parameter_block(function, params: list) -> bytes:
    """Lays parameters out as the PTX declares them.

    Args:
        function: the parsed entry.
        params: bytes, or a `TensorMap`, per declared parameter.

    Raises:
        SimulationError: count or size differ from the PTX.
    """
    if len(params) != len(function.parameters):
        raise SimulationError(
            f"{function.name}: {len(params)} parameters given, the PTX declares {len(function.parameters)}"
        )
    block = bytearray(function.parameter_bytes)
    for index, (declared, value) in enumerate(zip(function.parameters, params, strict=True)):
        data = pack(value) if isinstance(value, TensorMap) else bytes(value)
        if len(data) != declared.size:
            raise SimulationError(
                f"{function.name}: parameter {index} has {len(data)} bytes, the PTX declares {declared.size}"
            )
        block[declared.offset : declared.offset + declared.size] = data
    return bytes(block)
