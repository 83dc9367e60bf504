"""Discrete-event replay of a recorded run: instructions take issue slots and units, waits take as long as their causes.

For comparing pipelines with one another; what the numbers are worth is in docs/timing-model.md. One cluster is timed,
as if alone on its multiprocessors, with the copy latency and bandwidth of a chip where all load.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fa4build.errors import SimulationError
from fa4build.plan import LaunchPlan, evaluate
from fa4build.simulate.hardware.global_memory import GlobalMemory
from fa4build.simulate.plan_launch import plan_inputs, simulate_launch
from fa4build.timing import rates
from fa4build.timing.code import UNITS, Code
from fa4build.timing.trace import (
    ARRIVE,
    COMMIT,
    COPIES,
    DONE,
    EXIT,
    LOAD,
    PRODUCT,
    STORE,
    SYNC,
    TENSOR_WAIT,
    WAIT,
    Recorder,
)  # fmt: skip

_QUEUED = frozenset(UNITS.index(name) for name in ("tensor_memory_ld", "tensor_memory_st", "shared"))
_LD, _ST, _SHARED = (UNITS.index(name) for name in ("tensor_memory_ld", "tensor_memory_st", "shared"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Clocks [start, end) of something drawn in a timeline. `kind`: `wait`, `issue`, or what a product reads A from."""

    start: float
    end: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpTime:
    """One warp: when it ended, clocks spent waiting at barriers, instructions issued (all, and by unit), its waits."""

    cta: int
    index: int
    role: str
    end: float
    waited: float
    instructions: int
    counts: Mapping[str, int]
    waits: tuple[Interval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The replay of one launch on one cluster.

    cycles: from start to the last warp's exit. busy: unit -> clocks in use, averaged over its copies (sub-partitions,
    CTAs). products: intervals of the tensor core of CTA 0. tensor_flop: 2 * m * n * k of all products, per CTA.
    quick_cycles: the same with copies as quick as on an idle chip (timing.QUICK), where it was asked for.
    """

    kernel: str
    arch: str
    cycles: float
    busy: Mapping[str, float]
    warps: tuple[WarpTime, ...]
    products: tuple[Interval, ...]
    tensor_flop: float
    quick_cycles: float = 0.0

    @property
    def utilisation(self) -> dict[str, float]:
        """Unit -> share of the launch in which it was in use."""
        return {unit: clocks / self.cycles for unit, clocks in self.busy.items()}

    @property
    def critical(self) -> str:
        """The unit with the highest utilisation."""
        return max(self.busy, key=lambda unit: self.busy[unit])


@dataclass(slots=True)
class _Warp:
    cta: int
    index: int
    ops: list
    at: int = 0  # next op
    step: int = 0  # next step of a region
    time: float = 0.0  # earliest next issue
    issued: list = field(default_factory=list)
    late: dict = field(default_factory=dict)  # register -> time
    tensor: list = field(default_factory=lambda: [0.0, 0.0])  # last tensor-memory load, store
    product: object = None
    product_done: float = 0.0
    copies_done: float = 0.0
    waited: float = 0.0
    waits: list = field(default_factory=list)
    instructions: int = 0
    end: float = 0.0
    counts: dict = field(default_factory=dict)
    woken: float = 0.0  # when it last had waited at a barrier: of warps that could issue, the earliest goes first
    fresh: bool = True  # just chosen: it may issue once even if an earlier one could


class _Cta:
    """Resources of one CTA's multiprocessor."""

    def __init__(self) -> None:
        parts = range(rates.SUB_PARTITIONS)
        self.issue = [0.0 for _ in parts]
        self.free = [[0.0] * len(UNITS) for _ in parts]
        self.shared = self.debt = self.tensor = self.copy_in = self.copy_out = 0.0
        self.busy: dict[str, float] = {}
        self.products: list[Interval] = []

    def use(self, unit: str, clocks: float) -> None:
        """Counts clocks of a unit."""
        self.busy[unit] = self.busy.get(unit, 0.0) + clocks


class Replay:
    """One replay. Call `run` once."""

    def __init__(self, recorder: Recorder, arch: str, copies: rates.Copies = rates.LOADED):
        self.recorder, self.arch, self.copies = recorder, arch, copies
        self.rates = rates.rates_of(arch)
        self.code = Code(recorder.program, arch, recorder.broadcasts)
        self.ctas: dict[int, _Cta] = {}
        self.left = dict(recorder.contributions)
        self.over: dict = {}  # key -> when the phase ended
        self.latest: dict = {}  # key -> latest contribution so far
        self.waiting: dict = {}  # key -> warps
        self.heap: list = []
        self.serial = 0
        self.flop = 0.0

    def run(self) -> Timing:
        """Replays everything.

        Raises: SimulationError when warps wait for what no event completes.
        """
        warps = [self._warp(trace) for _, trace in sorted(self.recorder.warps.items())]
        for warp in warps:
            self._push(0.0, warp)
        while self.heap:
            *_, warp = heapq.heappop(self.heap)
            warp.fresh = True
            self._advance(warp)
        stuck = [w for w in warps if w.at < len(w.ops)]
        if stuck:
            names = ", ".join(f"warp {w.index} of CTA {w.cta}" for w in stuck)
            raise SimulationError(f"the timing model waits for ever: {names}; the recorded run is not complete")
        return self._result(warps)

    def _warp(self, trace) -> _Warp:
        self.ctas.setdefault(trace.cta, _Cta())
        return _Warp(cta=trace.cta, index=trace.index, ops=self._ops(trace.items))

    def _ops(self, items: list) -> list:
        """Nodes joined into regions; events stay."""
        ops: list = []
        first = last = None
        for item in [*items, None]:
            is_node = type(item) is int and item < self.recorder.program.exit_node
            if is_node and first is not None and item == last + 1:
                if self.code.block_of(item) == self.code.block_of(first):
                    last = item
                    continue
            if first is not None:
                ops.append(self.code.region(first, last))
                first = None
            if is_node:
                first = last = item
            elif type(item) is tuple:
                ops.append(item)
        return ops

    def _push(self, time: float, warp: _Warp) -> None:
        self.serial += 1
        heapq.heappush(self.heap, (time, warp.woken, self.serial, warp))

    def _advance(self, warp: _Warp) -> None:
        """Runs a warp until it must let others go first."""
        while warp.at < len(warp.ops):
            op = warp.ops[warp.at]
            if type(op) is tuple:
                if self.heap and self.heap[0][0] < warp.time:
                    self._push(warp.time, warp)
                    return
                warp.at += 1
                if not self._event(warp, op):
                    return
            elif not self._region(warp, op):
                return

    def _region(self, warp: _Warp, region) -> bool:
        """Issues steps; False when another warp comes first."""
        cta, part = self.ctas[warp.cta], warp.index % rates.SUB_PARTITIONS
        free, issued, steps, heap = cta.free[part], warp.issued, region.steps, self.heap
        for k in range(warp.step, len(steps)):
            step = steps[k]
            ready = warp.time
            if cta.issue[part] > ready:
                ready = cta.issue[part]
            for place, clocks in step.before:
                if issued[place] + clocks > ready:
                    ready = issued[place] + clocks
            for reg in step.outside:
                if warp.late.get(reg, 0.0) > ready:
                    ready = warp.late[reg]
            unit = step.unit
            if unit and unit not in _QUEUED and free[unit] > ready:
                ready = free[unit]
            if heap and (heap[0][0] < ready or (heap[0][0] == ready and not warp.fresh and heap[0][1] < warp.woken)):
                warp.step = k
                self._push(ready, warp)
                return False
            warp.fresh = False
            issued.append(self._issue(warp, cta, part, step, ready))
        late = {}
        for reg, places, regs in region.passed_on:
            times = [issued[p] + steps[p].clocks + steps[p].latency for p in places] + [
                warp.late.get(r, 0.0) for r in regs
            ]
            late[reg] = max(times, default=0.0)
        warp.late.update(late)
        warp.issued, warp.step = [], 0
        warp.at += 1
        return True

    def _issue(self, warp: _Warp, cta: _Cta, part: int, step, now: float) -> float:
        cta.issue[part] = now + 1.0
        warp.time = now + 1.0 + step.pause
        warp.instructions += 1
        unit = step.unit
        start = now
        if unit:
            if unit == _SHARED:
                start = max(now, cta.shared)
                cta.shared = start + step.clocks
                cta.debt += step.clocks
                cta.use("shared", step.clocks)
            else:
                free = cta.free[part]
                start = max(now, free[unit])
                free[unit] = start + step.clocks
                cta.use(UNITS[unit], step.clocks / rates.SUB_PARTITIONS)
                if unit == _LD or unit == _ST:
                    latency = step.latency if unit == _LD else rates.TENSOR_STORE_LATENCY.value
                    warp.tensor[unit - _LD] = start + step.clocks + latency
            warp.counts[unit] = warp.counts.get(unit, 0) + 1
        cta.use("issue", 1.0 / rates.SUB_PARTITIONS)
        for reg in step.late:
            warp.late[reg] = start + step.clocks + step.latency
        return start

    # --- events

    def _event(self, warp: _Warp, op: tuple) -> bool:
        """Performs an event at the warp's time; False when the warp is blocked."""
        kind, now = op[0], warp.time
        cta = self.ctas[warp.cta]
        if kind == WAIT:
            return self._wait(warp, op[1])
        if kind == ARRIVE:
            self._contribute(op[1], now + (rates.REMOTE_LATENCY.value if op[2] else 0.0))
        elif kind == SYNC:
            self._contribute(op[1], now)
            return self._wait(warp, op[1])
        elif kind == LOAD:
            self._load(cta, op, now)
        elif kind == PRODUCT:
            self._product(warp, op[1], now)
        elif kind == COMMIT:
            done = warp.copies_done if op[2] == "copies" else self._products_done(warp, now)
            for key in op[1]:
                self._contribute(key, max(done, now))
        elif kind == STORE:
            self._store(cta, op[1], now)
        elif kind == COPIES:
            warp.copies_done = op[1].done_at = op[1].read_at = now + rates.CP_ASYNC_LATENCY.value
        elif kind == DONE:
            times = [token.read_at if op[2] else token.done_at for token in op[1]]
            self._resume(warp, max(times, default=0.0))
        elif kind == TENSOR_WAIT:
            self._resume(warp, warp.tensor[0 if op[1] == "ld" else 1])
        elif kind == EXIT:
            warp.end = max(warp.end, now)
        return True

    def _resume(self, warp: _Warp, time: float) -> None:
        """The warp goes on at `time`, or at once."""
        if time > warp.time:
            warp.waited += time - warp.time
            warp.waits.append(Interval(start=warp.time, end=time, kind="wait"))
            warp.time = time

    def _wait(self, warp: _Warp, key) -> bool:
        wake = rates.NAMED_BARRIER_WAKE if key and key[0] == "named" else rates.MBARRIER_WAKE
        if key is None or key in self.over:
            test = warp.time + rates.BARRIER_TEST.value
            warp.time, start = test, warp.time
            if key is not None and self.over[key] + wake.value > test:
                warp.time = start
                self._resume(warp, self.over[key] + wake.value)
                warp.woken = warp.time
            return True
        self.waiting.setdefault(key, []).append(warp)
        return False

    def _contribute(self, key, time: float) -> None:
        self.latest[key] = max(self.latest.get(key, 0.0), time)
        self.left[key] -= 1
        if self.left[key]:
            return
        over = self.over[key] = self.latest[key]
        wake = rates.NAMED_BARRIER_WAKE if key[0] == "named" else rates.MBARRIER_WAKE
        for warp in self.waiting.pop(key, ()):
            self._resume(warp, over + wake.value)
            warp.woken = warp.time
            self._push(warp.time, warp)

    def _load(self, cta: _Cta, op: tuple, now: float) -> None:
        _, key, size, is_remote = op
        start = max(now, cta.copy_in)
        cta.copy_in = start + size / self.copies.bandwidth.value
        cta.use("copy_in", size / self.copies.bandwidth.value)
        latency = rates.REMOTE_LATENCY if is_remote else self.copies.latency
        if is_remote:
            cta.debt += size / self.rates.shared.value
            cta.use("shared", size / self.rates.shared.value)
        self._contribute(key, cta.copy_in + latency.value)

    def _store(self, cta: _Cta, transfer, now: float) -> None:
        clocks = transfer.size_bytes / self.rates.shared.value
        start = max(now, cta.copy_out)
        cta.copy_out = start + transfer.size_bytes / self.copies.bandwidth.value
        cta.use("copy_out", transfer.size_bytes / self.copies.bandwidth.value)
        cta.debt += clocks
        cta.use("shared", clocks)
        transfer.read_at = cta.copy_out + self.copies.latency.value / 2
        transfer.done_at = cta.copy_out + self.copies.latency.value

    def _product(self, warp: _Warp, product, now: float) -> None:
        """Reserves the tensor cores and the operands' shared-memory reads. Other shared traffic is made up for here."""
        group = [self.ctas[rank] for rank in product.shared_bytes] or [self.ctas[warp.cta]]
        if product.is_wgmma:
            clocks = rates.wgmma_cycles(product.n)
        else:
            clocks = rates.mma_cycles(product.m, product.n, product.cta_group, product.a_in_tensor_memory)
        start = max([now, *(cta.tensor for cta in group)])
        end = start + clocks
        for rank, size in product.shared_bytes.items():
            cta = self.ctas[rank]
            reading = size / self.rates.shared.value
            # A pipeline that is not full had time to serve the other traffic.
            cta.debt = max(0.0, cta.debt - max(0.0, start - max(cta.tensor, 0.0)))
            spare = max(0.0, clocks - reading)
            end = max(end, start + max(reading, clocks) + max(0.0, cta.debt - spare))
            cta.debt = 0.0
            cta.use("shared", reading)
        kind = "tensor memory" if product.a_in_tensor_memory else "shared memory"
        for cta in group:
            cta.tensor = end
            cta.use("tensor", clocks)
            if cta.products and cta.products[-1].end >= start and cta.products[-1].kind == kind:
                cta.products[-1] = Interval(start=cta.products[-1].start, end=end, kind=kind)
            else:
                cta.products.append(Interval(start=start, end=end, kind=kind))
        self.flop += 2.0 * product.m * product.n * 16 / len(self.ctas)
        product.done_at = end + (rates.WGMMA_LATENCY.value if product.is_wgmma else 0.0)
        warp.product = product
        warp.product_done = max(warp.product_done, end)

    def _products_done(self, warp: _Warp, now: float) -> float:
        """When a commit arrives: latency b of the table counts until the wait returns, so the wake-up is taken off."""
        if warp.product is None:
            return now
        latency = rates.mma_latency(warp.product.cta_group, warp.product.a_in_tensor_memory)
        return warp.product_done + latency - rates.MBARRIER_WAKE.value

    # --- the result

    def _result(self, warps: list[_Warp]) -> Timing:
        cycles = max(w.end for w in warps)
        units = sorted({unit for cta in self.ctas.values() for unit in cta.busy})
        busy = {u: sum(cta.busy.get(u, 0.0) for cta in self.ctas.values()) / len(self.ctas) for u in units}
        times = tuple(
            WarpTime(
                cta=w.cta,
                index=w.index,
                role=_role(w),
                end=w.end,
                waited=w.waited,
                instructions=w.instructions,
                counts={"issue": w.instructions} | {UNITS[unit]: n for unit, n in w.counts.items()},
                waits=tuple(w.waits),
            )
            for w in warps
        )
        first = self.ctas[min(self.ctas)]
        return Timing(
            kernel=self.recorder.program.function.name, arch=self.arch, cycles=cycles, busy=busy, warps=times,
            products=tuple(first.products), tensor_flop=self.flop,
        )  # fmt: skip


_MUFU = UNITS.index("mufu")


def _role(warp: _Warp) -> str:
    """A name by what the warp does."""
    kinds = {op[0] for op in warp.ops if type(op) is tuple}
    if PRODUCT in kinds:
        return "product and softmax" if warp.counts.get(_MUFU, 0) > 64 else "product"
    if LOAD in kinds:
        return "load"
    if warp.counts.get(_MUFU, 0) > 64:
        return "softmax"
    if STORE in kinds:
        return "reduce" if warp.counts.get(_LD) else "store"
    return "correction" if warp.counts.get(_LD) else "other"


def time_plan(
    plan: LaunchPlan,
    ptx: str,
    arrays: Mapping[str, np.ndarray],
    scalars: Mapping,
    arch: str,
    *,
    launch: int | None = None,
) -> tuple[Timing, ...]:
    """Runs a plan as `simulate` does, each launch recorded and replayed. Keep the grids to one cluster.

    Args:
        arch: whose rates: sm90a, sm100a, sm103a.
        launch: time only the launch of that number; None: all.
    Raises: SimulationError as `simulate`, or when a launch has more than one cluster.
    """
    memory = GlobalMemory()
    inputs = plan_inputs(plan, memory, arrays, scalars)
    timings = []
    for number, described in enumerate(evaluate(plan, inputs)):
        if described.is_empty:
            continue
        if launch is not None and number != launch:
            simulate_launch(ptx, described, memory)
            continue
        timings.append(time_launch(ptx, described, memory, arch))
    return tuple(timings)


def time_launch(ptx: str, launch, memory: GlobalMemory, arch: str) -> Timing:
    """Records and replays one launch of one cluster."""
    clusters = int(np.prod(launch.grid)) // int(np.prod(launch.cluster))
    if clusters != 1:
        raise SimulationError(
            f"{launch.kernel}: the timing model takes one cluster, this launch has {clusters}; use fewer rows and heads"
        )
    recorder = Recorder()
    simulate_launch(ptx, launch, memory, by_warp=True, recorder=recorder)
    quick = Replay(recorder, arch, rates.QUICK).run()
    return replace(Replay(recorder, arch).run(), quick_cycles=quick.cycles)
