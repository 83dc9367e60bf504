"""How a proof in the simulator runs a kernel: schedules, and tensors poisoned, fenced off and looked at again."""

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4build.cases.bits import FP8_NAN
from fa4build.cases.forward import Case, window_of
from fa4build.cases.schedules import Run
from fa4build.errors import SimulationError
from fa4build.matrix.arch import arch_named
from fa4build.matrix.axes import Variant
from fa4build.matrix.variants import parse_variant
from fa4build.plan import Launch, LaunchPlan, evaluate, failed_guard
from fa4build.simulate import GlobalMemory, plan_inputs, simulate_launch
from fa4build.verify.engines import DEFAULT, engine_named
from fa4build.verify.pool import now_in

POISON = 0x7FC1  # a quiet NaN in bfloat16, in float16, and twice in float32
_GUARD = {1: FP8_NAN, 2: POISON, 4: POISON << 16 | POISON}
_L2_BYTES = 50 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Another compiled kernel of a chain, by its op. `registers` a thread, at launch."""

    op: str
    ptx: str
    plan: str
    registers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A kernel to prove, as plain data for another process.

    `sha256` is over all that the outcome of the kernel alone depends on but the seeds: a proof with more seeds covers
    one with fewer. `chain`: the kernels that run with it (verify/chain.py); empty where not all of them are compiled.
    `chain_sha256`: over them and `sha256`. `proven`: the summary of a proof of the kernel alone; its chain is left.
    `engine`: by name (verify/engines.py).
    """

    variant_id: str
    ptx: str
    plan: str
    registers: int
    seeds: tuple[int, ...]
    sha256: str
    chain: tuple[Link, ...] = ()
    chain_sha256: str = ""
    proven: Mapping[str, Any] | None = None
    engine: str = DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A tensor (`view`) and the memory it lies in (`whole`, the same where there is nothing around it)."""

    whole: np.ndarray
    view: np.ndarray


def poisoned(shape: tuple[int, ...], dtype: type, padded: bool) -> Buffer:
    """NaN everywhere. Padded: one more of every inner extent and 16 bytes or more a row, strides multiples of 16."""
    if padded:
        row = 16 // np.dtype(dtype).itemsize
        around = (*(int(i > 0) for i in range(len(shape) - 1)), row + -shape[-1] % row)
    else:
        around = (0,) * len(shape)
    # A tensor without elements lies in memory that has some: numpy would give it strides of 0.
    extents = [max(extent, 1) + more for extent, more in zip(shape, around, strict=True)]
    whole = np.full(extents, _GUARD[dtype().itemsize], dtype)
    return Buffer(whole=whole, view=whole[tuple(slice(extent) for extent in shape)])


def filled(bits: np.ndarray, padded: bool) -> Buffer:
    """A tensor that holds these bits."""
    buffer = poisoned(bits.shape, bits.dtype.type, padded)
    buffer.view[...] = bits
    return buffer


def memory_faults(
    buffers: Mapping[str, Buffer], before: Mapping[str, np.ndarray], outputs: tuple[str, ...]
) -> Iterator[str]:
    """Inputs and everything around outputs must be as they were."""
    for name, buffer in buffers.items():
        changed = buffer.whole != before[name]
        if name in outputs:
            changed[tuple(slice(extent) for extent in buffer.view.shape)] = False
        if changed.any():
            place = tuple(np.argwhere(changed)[0].tolist())
            what = "outside" if name in outputs else "into"
            yield f"wrote {what} {name}: {int(changed.sum())} elements, first at index {place} of {buffer.whole.shape}"


def scalars_for(variant: Variant, case: Case, run: Run) -> dict[str, int | float]:
    """Scalar arguments of forward and backward, and device facts."""
    window_left, window_right = window_of(case, variant.mask)
    return {
        "softmax_scale": softmax_scale(variant),
        "window_left": window_left,
        "window_right": window_right,
        **device_scalars(variant, run),
    }


def device_scalars(variant: Variant, run: Run) -> dict[str, int]:
    """What a kernel is told of the device."""
    return {
        "num_sms": run.num_sms,
        "dev.sm_count": run.num_sms,
        "dev.smem_optin": arch_named(variant.arch).smem_bytes,
        "dev.l2_bytes": _L2_BYTES,
    }


def softmax_scale(variant: Variant) -> float:
    """1/sqrt(head_dim) as the single-precision argument holds it."""
    return float(np.float32(variant.head_dim**-0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a run did besides its results: instructions, notes of the checks, faults seen in memory."""

    warp_instructions: int
    notes: tuple[str, ...]
    faults: tuple[str, ...]


def execute(
    request: Request,
    plan: LaunchPlan,
    buffers: Mapping[str, Buffer],
    outputs: tuple[str, ...],
    scalars: Mapping[str, int | float],
    run: Run,
    seed: int,
    unwritten: Collection[str],
) -> Ran:
    """One run; results appear in the buffers.

    Args: unwritten: outputs that hold nothing yet; with checks, reading one before it is written is an error.
    Raises: SimulationError as the simulator, and when the plan refuses.
    """
    now_in(f"the {run.schedule} schedule")
    before = {name: buffer.whole.copy() for name, buffer in buffers.items()}
    memory = GlobalMemory()
    views = {name: buffer.view for name, buffer in buffers.items()}
    inputs = plan_inputs(plan, memory, views, scalars, unwritten=unwritten)
    refusal, launches = _evaluated(_One(plan), tuple(inputs.items()))
    if refusal is not None:
        raise SimulationError(f"the plan refuses a problem it must take: {refusal}")
    engine = engine_named(request.engine).run_launch
    variant = parse_variant(request.variant_id)
    reports = [
        simulate_launch(
            request.ptx,
            launch,
            memory,
            registers=request.registers,
            by_warp=run.by_warp,
            multiprocessors=run.num_sms,
            free_sums=variant.op == "bwd" and not variant.deterministic,
            checks=run.checks,
            schedule=run.schedule,
            seed=seed,
            concurrent_clusters=run.concurrent_clusters,
            engine=engine,
        )
        for launch in launches
        if not launch.is_empty
    ]
    return Ran(
        warp_instructions=sum(report.warp_instructions for report in reports),
        notes=tuple(note for report in reports for note in report.notes),
        faults=tuple(memory_faults(buffers, before, outputs)),
    )


class _One:
    """A plan that equals itself alone: its nodes take longer to compare than to evaluate."""

    def __init__(self, plan: LaunchPlan):
        self.plan = plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _One) and other.plan is self.plan

    def __hash__(self) -> int:
        return id(self.plan)


@functools.lru_cache(maxsize=8)  # runs of a case that differ in their order alone have equal inputs
def _evaluated(one: _One, inputs: tuple[tuple[str, int | float], ...]) -> tuple[str | None, tuple[Launch, ...]]:
    """(the guard that refuses, the launches) of a plan for these inputs."""
    values = dict(inputs)
    refusal = failed_guard(one.plan, values)
    return refusal, () if refusal is not None else evaluate(one.plan, values)
