"""What a hazard check costs: nanoseconds an event, the native checks beside the Python ones.

    python -m benchmarks.simulator_checks [--repeat N] [--kernels]

Each row is one kind of event, told again and again to both twins from the same record; `--kernels` adds whole kernels
(the forwards kept for tests/simulate/mutations, warp by warp), all their events together. The best of `--repeat` short
runs, so that other work on the machine counts for little. Those of the native checks include reading the record, about
1 ns a word. The goal is 110 ns for a load or store of a warp.
"""

import argparse
import time

import numpy as np

from fa4build.cases.forward import Case
from fa4build.cases.schedules import RUNS
from fa4build.simulate import launch
from fa4build.simulate.checks.observer import Observer
from fa4build.simulate.hardware.engine import AsyncOp
from fa4build.simulate.instructions.barriers import Mbarrier
from tests.simulate.mutations.kernels import kept
from tests.simulate.native import checks_library as native
from tests.simulate.native.checks_machine import BASE, Machine, gang_of, program
from tests.simulate.native.checks_recorder import RecordingObserver

EVENTS, WARPS, GRANULES = 400, 12, 2048


def _setting(observer):
    """A CTA of twelve warps with 32 KiB of shared memory, and an mbarrier."""
    machine = Machine(1, observer, num_clusters=1, shape=(1, WARPS, GRANULES))
    cta = machine.clusters[0].ctas[0]
    g = gang_of(cta, [0])
    barrier = Mbarrier(cta, BASE, 1)
    observer.barrier_created(g, None, barrier, 0)
    everything = (BASE + 16 + 4 * np.arange(4 * GRANULES - 32)).astype(np.uint32)
    for first in range(0, len(everything), 32):
        observer.shared_access(g, everything[first : first + 32], 4, None, 1, True)
    observer.warp_barrier(g, None)
    return cta, g, barrier


def _shared(size: int, step: int, is_write: bool):
    def make(observer):
        _, g, _ = _setting(observer)
        offsets = (BASE + 1024 + step * np.arange(32)).astype(np.uint32)
        return lambda k: observer.shared_access(g, offsets, size, None, k % 16, is_write)

    return make


def _meet(observer):
    _, g, _ = _setting(observer)
    return lambda k: observer.warp_barrier(g, None)


def _fence(observer):
    _, g, _ = _setting(observer)
    return lambda k: observer.fence(g, ".proxy.async.shared::cta", None)


def _arrive(observer):
    _, g, barrier = _setting(observer)

    def event(k: int) -> None:
        observer.arrive(g, None, barrier, 2)
        barrier.phase += 1
        barrier.phases["observed"] = barrier.phase
        observer.phase_completed(barrier)

    return event


def _passed(observer):
    cta, g, barrier = _setting(observer)
    observer.arrive(gang_of(cta, [1]), None, barrier, 2)
    barrier.phase = 1
    return lambda k: observer.wait_passed(g, None, barrier, 0, 3)


def _copy(observer):
    cta, g, barrier = _setting(observer)
    target = [("smem", cta, np.arange(BASE // 16 + 64, BASE // 16 + 64 + 512))]

    def event(k: int) -> None:
        observer.issue(g, g.warps[0], AsyncOp("copy", []), barrier, [], target, 4)
        barrier.phase += 1
        observer.phase_completed(barrier)
        observer.wait_passed(g, None, barrier, 0, 3)

    return event


def _product(observer):
    cta, g, _ = _setting(observer)
    operands = [("smem", cta, np.arange(BASE // 16 + 64 + 512 * k, BASE // 16 + 64 + 512 * k + 512)) for k in range(2)]
    target = [("tmem", cta, (0, 128, 0, 128))]
    observer.issue(g, g.warps[0], AsyncOp("product", []), "mma", [], target, 5)
    return lambda k: observer.issue(g, g.warps[0], AsyncOp("product", []), "mma", operands, target, 5)


def _tensor_load(observer):
    _, g, _ = _setting(observer)
    observer.tmem_access(g, g.warps[0], 0, 32, True, 6)
    observer.tmem_wait(g, None, "st")
    return lambda k: observer.tmem_access(g, g.warps[0], 0, 32, False, 7)


ROWS = {
    "shared load, 32 x 4 bytes": _shared(4, 4, False),
    "shared load, 32 x 16 bytes": _shared(16, 16, False),
    "shared load, 32 rows": _shared(4, 128, False),
    "shared store, 32 x 4 bytes": _shared(4, 4, True),
    "shared store, 32 x 16 bytes": _shared(16, 16, True),
    "shared store, 32 rows": _shared(4, 128, True),
    "bar.warp.sync, shfl": _meet,
    "fence.proxy.async": _fence,
    "mbarrier.arrive": _arrive,
    "mbarrier wait passed": _passed,
    "bulk copy, 8 KiB, and its wait": _copy,
    "tcgen05.mma, 2 x 8 KiB, N 128": _product,
    "tcgen05.ld, 32 columns": _tensor_load,
}


def _python_ns(make, repeat: int) -> float:
    best = float("inf")
    for _ in range(repeat):
        event = make(Observer(program(), ()))
        start = time.process_time_ns()
        for k in range(EVENTS):
            event(k)
        best = min(best, (time.process_time_ns() - start) / (EVENTS))
    return best


def _replay_ns(words: np.ndarray, buffers, repeat: int) -> float:
    """Nanoseconds of one replay, the best."""
    best = float("inf")
    for _ in range(repeat):
        with native.Launch(buffers) as checks:
            start = time.process_time_ns()
            status, done = checks.replay(words)
            best = min(best, time.process_time_ns() - start)
            assert (status, done.refused) == (native.OK, 0)
    return best


def _native_ns(make, repeat: int) -> float:
    """One event, by the difference between many of them and none."""
    count = 25 * EVENTS if make in (_meet, _fence, _arrive, _passed) else EVENTS
    observer = RecordingObserver(program(), ())
    event = make(observer)
    before = len(observer.recording.words)
    for k in range(count):
        event(k)
    words = np.frombuffer(observer.recording.words, np.int64)
    return max(_replay_ns(words, (), repeat) - _replay_ns(words[:before], (), repeat), 0) / count


class _TimedObserver(Observer):
    """The Python checks with a clock around every hook."""

    spent = events = 0

    def __getattribute__(self, name: str):
        value = super().__getattribute__(name)
        if name not in _HOOKS:
            return value

        def timed(*arguments):
            start = time.thread_time_ns()
            try:
                return value(*arguments)
            finally:
                _TimedObserver.spent += time.thread_time_ns() - start
                _TimedObserver.events += 1

        return timed


_HOOKS = frozenset(
    {"shared_access", "global_access", "issue", "tmem_access", "tmem_wait", "tmem_freed", "ops_waited"}
    | {"copies_so_far", "products_so_far", "deferred_arrive", "barrier_created", "arrive", "wait_passed"}
    | {"named_arrive", "named_completed", "named_passed", "cluster_arrive", "cluster_completed", "cluster_passed"}
    | {"fence", "atomic", "acquire"}
)


def _kernel_rows(repeat: int) -> None:
    from fa4build.verify import simulated

    simulated.RUNS = RUNS[2:]
    for name, q, k in (("fwd-sm90a-bf16-hd64-full", 200, 756), ("fwd-sm100a-bf16-hd128-full", 200, 500)):
        kernel, case = kept(name), Case(name="measured", seqlen_q=q, seqlen_k=k)
        launch.Observer = _TimedObserver
        _TimedObserver.spent = _TimedObserver.events = 0
        kernel.report(kernel.ptx, case, "python")
        RecordingObserver.made.clear()
        launch.Observer = RecordingObserver
        kernel.report(kernel.ptx, case, "python")
        recording = RecordingObserver.made[0]
        rows = [(base, size, None if w is None else w.copy()) for _, base, size, w in recording.buffers]
        nanoseconds = _replay_ns(np.frombuffer(recording.words, np.int64), rows, repeat) / recording.events
        _print(f"{name}, {recording.events} events", nanoseconds, _TimedObserver.spent / _TimedObserver.events)


def _print(name: str, native_ns: float, python_ns: float) -> None:
    print(f"{name:50} {native_ns:10,.0f} {python_ns:12,.0f} {python_ns / max(native_ns, 1):8,.0f} x", flush=True)


def main() -> None:
    """Prints a row for each kind of event."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--kernels", action="store_true", help="also whole kernels")
    arguments = parser.parse_args()
    print(f"{'ns an event':50} {'native':>10} {'Python':>12}")
    for name, make in ROWS.items():
        _print(name, _native_ns(make, arguments.repeat), _python_ns(make, 3))
    if arguments.kernels:
        _kernel_rows(9)


if __name__ == "__main__":
    main()
