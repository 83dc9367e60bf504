"""mbarriers, named barriers, the cluster barrier, fences and register budgets.

Source: ptx-semantics.md 7; PTX ISA 9.7.13, 9.7.19.5.
"""

from collections import Counter, deque

import numpy as np

from fa4build.simulate.hardware.gang import WARP, Fault
from fa4build.simulate.instructions.memory import RANK_SHIFT
from fa4build.simulate.instructions.operands import (
    Wait,
    active_lanes,
    active_warps,
    one_value,
    require_converged,
    uniform,
    warp_uniform_split,
)
from fa4build.simulate.translate.opcodes import system

_COUNT_LIMIT = (1 << 20) - 1


class Mbarrier:
    """Phase, pending arrivals and outstanding bytes of one barrier. `arrivals`: the last arrivals, for reports."""

    __slots__ = (
        "arrivals",
        "clock",
        "cta",
        "expected",
        "offset",
        "pending",
        "phase",
        "phases",
        "sources",
        "tx",
        "waits",
    )

    def __init__(self, cta, offset: int, expected: int):
        self.cta, self.offset, self.expected, self.pending = cta, offset, expected, expected
        self.phase = self.tx = self.waits = 0
        self.arrivals: deque = deque(maxlen=6)
        self.clock = None
        self.phases: dict = {}
        self.sources: dict[tuple[int, int], int] = {}  # (CTA rank, warp) that ever arrived or sent bytes -> PTX line

    @property
    def name(self) -> str:
        """Name for reports: the launch's name for that offset if it gave one."""
        return self.cta.name_of(self.offset)

    def state(self) -> str:
        """`phase 3, 1 of 2 arrivals pending, 16384 bytes outstanding`."""
        return f"phase {self.phase}, {self.pending} of {self.expected} arrivals pending, {self.tx} bytes outstanding"

    def arrive(self, count: int, who: str) -> None:
        """`count` arrivals.

        Raises:
            Fault: more than the phase still expects.
        """
        self.arrivals.append(f"{who} (phase {self.phase})")
        if count > self.pending:
            raise Fault(
                f"{count} arrivals at mbarrier {self.name}, but its phase {self.phase} expects only "
                f"{self.pending} more of {self.expected} "
                "(over-arrival: an arrival count is wrong, or a warp arrives twice)"
            )
        self.pending -= count
        self._complete()

    def expect(self, size: int) -> None:
        """Raises the outstanding bytes."""
        self._move(size)

    def complete_bytes(self, size: int, who: str) -> None:
        """Bytes of an asynchronous copy arrived."""
        self.arrivals.append(f"{who}: {size} bytes (phase {self.phase})")
        self._move(-size)
        self._complete()

    def _move(self, amount: int) -> None:
        self.tx += amount
        if abs(self.tx) > _COUNT_LIMIT:
            raise Fault(f"mbarrier {self.name}: {self.tx} outstanding bytes exceed the range +-(2^20 - 1)")

    def _complete(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected
            observer = self.cta.observer
            if observer is not None:
                observer.phase_completed(self)


def find_mbarrier(cta, address: int) -> Mbarrier:
    """The live barrier at a shared::cluster address.

    Raises:
        Fault: misaligned, no such CTA in the cluster, or not initialised.
    """
    rank, offset = address >> RANK_SHIFT, address & 0xFFFFFF
    ctas = cta.cluster.ctas
    if address & 7:
        raise Fault(f"mbarrier address 0x{address:x} is not a multiple of 8")
    if rank >= len(ctas):
        raise Fault(f"mbarrier address 0x{address:x} names CTA rank {rank}; the cluster has {len(ctas)} CTAs")
    if ctas[rank] is not cta and ctas[rank].threads_alive() == 0:
        raise Fault(
            f"mbarrier {ctas[rank].name_of(offset)} of CTA rank {rank}, which has exited: its shared memory is gone"
        )
    barrier = ctas[rank].mbarriers.get(offset)
    if barrier is None:
        raise Fault(f"no initialised mbarrier at {ctas[rank].name_of(offset)} (address 0x{address:x})")
    return barrier


def lanes_by_address(g, mask, address) -> Counter:
    """How many active lanes name each address."""
    chosen = address if mask is None else address[mask]
    first = chosen[0]
    if (chosen == first).all():
        return Counter({int(first): len(chosen)})
    return Counter(chosen.tolist())


@system(r"mbarrier\.init\.shared(?:::cta)?\.b64")
def _init(b, ins, match):
    address, count = b.address(ins.operands[0], 32), b.get(ins.operands[1], "u32")

    def run(g, mask) -> None:
        a, n = address(g), count(g)
        lanes = active_lanes(g, mask)
        # Lanes that write the same count to the same barrier in one instruction do it once.
        for target, expected in dict.fromkeys(zip(a[lanes].tolist(), n[lanes].tolist(), strict=True)):
            _create(b, g, mask, int(target) - int(g.cta.rank_bits), int(expected))

    return run


def _create(b, g, mask, offset: int, expected: int) -> None:
    if offset in g.cta.mbarriers:
        raise b.fault(f"mbarrier {g.cta.name_of(offset)} is initialised twice")
    if not 1 <= expected <= _COUNT_LIMIT:
        raise b.fault(f"mbarrier count {expected} is outside 1..2^20-1")
    if offset & 7:
        raise b.fault(f"mbarrier address 0x{offset:x} is not a multiple of 8")
    g.cta.mbarriers[offset] = Mbarrier(g.cta, offset, expected)
    if g.cta.observer is not None:
        g.cta.observer.barrier_created(g, mask, g.cta.mbarriers[offset], b.site)


@system(r"mbarrier\.inval\.shared(?:::cta)?\.b64")
def _inval(b, ins, match):
    address = b.address(ins.operands[0], 32)

    def run(g, mask) -> None:
        for a in lanes_by_address(g, mask, address(g)):
            find_mbarrier(g.cta, a)
            del g.cta.mbarriers[a & 0xFFFFFF]

    return run


_SCOPE = r"(?:\.(?:release|relaxed)\.(?:cta|cluster))?"


@system(rf"mbarrier\.arrive(\.expect_tx)?{_SCOPE}\.(shared|shared::cta|shared::cluster)\.b64")
def _arrive(b, ins, match):
    """Every active lane arrives. With expect_tx the operand is bytes and the count is 1."""
    put = b.put(ins.operands[0], "u64")
    address = b.address(ins.operands[1], 32)
    amount = b.get(ins.operands[2], "u32") if len(ins.operands) > 2 else None
    expects = match[1] is not None

    def run(g, mask) -> None:
        a = address(g)
        n = np.ones(g.lanes, np.uint32) if amount is None else amount(g)
        value = one_value(n, mask)
        if value is not None:
            groups = [(target, value, lanes) for target, lanes in lanes_by_address(g, mask, a).items()]
        else:
            groups = [(int(a[i]), int(n[i]), 1) for i in active_lanes(g, mask).tolist()]
        for target, operand, lanes in groups:
            barrier = find_mbarrier(g.cta, target)
            if g.cta.observer is not None:
                g.cta.observer.arrive(g, mask, barrier, b.site)
            for k in active_warps(g, mask):
                barrier.sources[g.cta.rank, g.warps[k].index] = b.line
            if expects:
                barrier.expect(operand * lanes)
            barrier.arrive(lanes if expects else operand * lanes, _who(g, mask, b))
        put(g, mask, np.zeros(g.lanes, np.uint64))

    return run


def _who(g, mask, b) -> str:
    warps = ",".join(str(g.warps[k].index) for k in active_warps(g, mask))
    return f"warp {warps} of CTA {g.cta.rank} at line {b.line}"


@system(rf"mbarrier\.(expect_tx|complete_tx){_SCOPE}\.(shared|shared::cta|shared::cluster)\.b64")
def _expect(b, ins, match):
    address, size = b.address(ins.operands[0], 32), b.get(ins.operands[1], "u32")

    def run(g, mask) -> None:
        a, n = address(g), size(g)
        for lane in active_lanes(g, mask).tolist():
            barrier = find_mbarrier(g.cta, int(a[lane]))
            if match[1] == "expect_tx":
                barrier.expect(int(n[lane]))
            else:
                barrier.complete_bytes(int(n[lane]), _who(g, mask, b))

    return run


@system(
    r"mbarrier\.(try_wait|test_wait)\.parity(?:\.(?:acquire|relaxed)\.(?:cta|cluster))?\.(?:shared|shared::cta)\.b64"
)
def _try_wait(b, ins, match):
    """With a time hint it blocks until the phase is over.

    Without, it reports the truth; a repeated miss becomes a wait.
    """
    put, address, parity = b.put(ins.operands[0], "p"), b.address(ins.operands[1], 32), b.get(ins.operands[2], "u32")
    blocks = len(ins.operands) == 4

    def run(g, mask):
        a, wanted = address(g), parity(g)
        split = warp_uniform_split(g, mask, a, wanted) if mask is None or g.active > 1 else None
        if split is not None:
            return split
        lane = active_lanes(g, mask)[0]
        want = int(wanted[lane]) & 1
        barrier = find_mbarrier(g.cta, int(a[lane]))
        passed = (barrier.phase & 1) != want
        if passed and not blocks and g.cta.cluster.scheduler.may_miss():
            passed = False
        elif passed:
            _observe(g, mask, barrier, want, b)
        poll = (b.site, barrier, barrier.phase)
        if passed or (not blocks and g.last_poll != poll):
            g.last_poll = None if passed else poll
            put(g, mask, np.full(g.lanes, passed))
            return None
        g.last_poll = None

        def finish() -> None:
            _observe(g, mask, barrier, want, b)
            put(g, mask, np.ones(g.lanes, bool))

        blocked_in = barrier.phase

        def ready() -> bool:
            if barrier.phase >= blocked_in + 2:
                raise b.fault(
                    f"waits for the end of phase {blocked_in} of mbarrier {barrier.name}, which is in phase "
                    f"{barrier.phase} "
                    "by now: a waiter two phases late sees the parity it waits for as not reached"
                )
            return barrier.phase > blocked_in

        return Wait(ready, lambda: _describe(barrier, want), finish, lambda: set(barrier.sources))

    return run


def _observe(g, mask, barrier: Mbarrier, parity: int, b) -> None:
    barrier.waits += 1
    if g.cta.observer is not None:
        g.cta.observer.wait_passed(g, mask, barrier, parity, b.site)


def _describe(barrier: Mbarrier, parity: int) -> str:
    last = "; last arrivals: " + "; ".join(barrier.arrivals) if barrier.arrivals else "; nobody has arrived"
    known = sorted({f"line {line}" for line in barrier.sources.values()})
    could = f"; arrivals so far came from {', '.join(known)}" if known else ""
    return f"mbarrier {barrier.name} of CTA {barrier.cta.rank}, parity {parity}: {barrier.state()}{last}{could}"


class NamedBarrier:
    """One of the 16 barriers of a CTA. `arrived`: warps of the current generation (twice if a warp arrives twice)."""

    __slots__ = ("arrived", "clock", "generation", "index", "members", "required", "where")

    def __init__(self, index: int):
        self.index, self.generation = index, 0
        self.required: int | None = None
        self.arrived: list[int] = []
        self.where: list[int] = []
        self.members: set[int] = set()  # warps that ever arrived
        self.clock = None


@system(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(\.aligned)?")
def _named(b, ins, match):
    """Arrival counts 32 per warp; `sync` then waits for the generation to be over."""
    number = b.get(ins.operands[0], "u32")
    count = b.get(ins.operands[1], "u32") if len(ins.operands) > 1 else None
    is_sync = match[1] == "sync"
    aligned = ins.opcode.startswith("bar.") or match[2] is not None

    def run(g, mask):
        ids = number(g)
        split = warp_uniform_split(g, mask, ids)
        if split is not None:
            return split
        if aligned:
            require_converged(g, mask, ins.opcode)
        index = uniform(ids, mask, "barrier number")
        required = g.cta.threads_alive() if count is None else uniform(count(g), mask, "thread count")
        if index > 15:
            raise b.fault(f"barrier number {index} is outside 0..15")
        if required % WARP or required == 0:
            raise b.fault(f"thread count {required} is not a positive multiple of 32")
        barrier = g.cta.named[index]
        generation = barrier.generation
        for k in active_warps(g, mask):
            _enter(g, barrier, g.warps[k].index, required, b)
        observer = g.cta.observer
        if observer is not None:
            observer.named_arrive(g, mask, barrier, generation, is_sync)
        if len(barrier.arrived) * WARP == barrier.required:
            barrier.generation += 1
            barrier.arrived, barrier.where, barrier.required = [], [], None
            if observer is not None:
                observer.named_completed(g, barrier, generation)
        if not is_sync:
            return None

        def finish() -> None:
            if observer is not None:
                observer.named_passed(g, mask, barrier, generation)

        if barrier.generation > generation:
            finish()
            return None
        return Wait(
            lambda: barrier.generation > generation,
            lambda: describe_named(barrier, g),
            finish,
            lambda: {(g.cta.rank, w) for w in barrier.members - set(barrier.arrived)},
        )

    return run


def _enter(g, barrier: NamedBarrier, warp: int, required: int, b) -> None:
    if barrier.required is None:
        barrier.required = required
    if required != barrier.required:
        raise b.fault(
            f"barrier {barrier.index}: warp {warp} gives thread count {required}, warps {barrier.arrived} "
            f"gave {barrier.required}"
        )
    if warp in barrier.arrived and g.cta.observer is not None:
        g.cta.observer.note(
            f"R14 barrier {barrier.index} at line {b.line}: a warp arrives twice in one generation; the "
            f"hardware counts both"
        )
    if len(barrier.arrived) * WARP >= required:
        raise b.fault(f"barrier {barrier.index}: more than {required} threads arrive")
    barrier.arrived.append(warp)
    barrier.members.add(warp)
    barrier.where.append(b.line)


def describe_named(barrier: NamedBarrier, g) -> str:
    """`named barrier 2: 4 of 8 warps arrived (0, 1, 2, 3)`."""
    here = ", ".join(f"warp {w} at line {n}" for w, n in zip(barrier.arrived, barrier.where, strict=True))
    return (
        f"named barrier {barrier.index}: {len(barrier.arrived) * WARP} of {barrier.required} threads arrived ({here})"
    )


class ClusterBarrier:
    """barrier.cluster: completes when every thread of the cluster that has not exited has arrived."""

    __slots__ = ("arrived", "clock", "cluster", "generation")

    def __init__(self, cluster):
        self.cluster, self.generation, self.arrived, self.clock = cluster, 0, 0, None

    def check(self) -> None:
        """Ends the phase if all have arrived; called after arrivals and exits."""
        if self.arrived and self.arrived >= sum(c.threads_alive() for c in self.cluster.ctas):
            self.generation += 1
            self.arrived = 0
            observer = self.cluster.observer
            if observer is not None:
                observer.cluster_completed(self)


@system(r"barrier\.cluster\.arrive(\.release|\.relaxed)?(\.aligned)?")
def _cluster_arrive(b, ins, match):
    def run(g, mask) -> None:
        barrier = g.cta.cluster.barrier
        for k in active_warps(g, mask):
            warp = g.warps[k]
            if warp.cluster_generation is not None and warp.cluster_generation == barrier.generation:
                raise b.fault(f"warp {warp.index} arrives twice at the cluster barrier in one phase")
            warp.cluster_generation = barrier.generation
        if g.cta.observer is not None:
            g.cta.observer.cluster_arrive(g, mask, barrier, match[1] == ".relaxed")
        barrier.arrived += g.active if mask is None else int(np.count_nonzero(mask))
        barrier.check()

    return run


@system(r"barrier\.cluster\.wait(?:\.acquire)?(\.aligned)?")
def _cluster_wait(b, ins, match):
    def run(g, mask):
        barrier = g.cta.cluster.barrier
        generations = {g.warps[k].cluster_generation for k in active_warps(g, mask)}
        if None in generations:
            raise b.fault("barrier.cluster.wait without an arrive before it")
        newest = max(generations)

        def finish() -> None:
            for k in active_warps(g, mask):
                g.warps[k].synced_cluster = True
            if g.cta.observer is not None:
                g.cta.observer.cluster_passed(g, mask, barrier)

        if barrier.generation > newest:
            finish()
            return None
        total = sum(c.threads_alive() for c in g.cta.cluster.ctas)
        return Wait(
            lambda: barrier.generation > newest,
            lambda: f"cluster barrier: {barrier.arrived} of {total} threads arrived",
            finish,
            lambda: {
                (c.rank, w.index)
                for c in g.cta.cluster.ctas
                for w in c.warps
                if w.cluster_generation != barrier.generation
            },
        )

    return run
