"""Vector clocks of one cluster.

A component is anything whose events are ordered by a plain count: the program of a warp, the phases of an mbarrier,
the bulk copies, cp.async, wgmma or MMAs of a warp, its tensor-memory stores. An access stamped (component, count)
happened before whoever's clock holds that component at count or more. Each warp has two clocks: G, everything before
it, and P, the generic-proxy writes that the asynchronous proxy is known to see (`fence.proxy.async` sets P to G).
Tensor memory has two more. X: tcgen05 work that its warps have published (`tcgen05.fence::before_thread_sync`, or a
commit) and a barrier has handed on; T: what the warp's own tcgen05 instructions are ordered behind
(`tcgen05.fence::after_thread_sync` sets T to X). Sources: ptx-semantics.md 13.1 (the idea of Triton's ConSan, refined);
PTX ISA 9.7.16.6 for X and T.
"""

import numpy as np

from fa4build.errors import SimulationError

COMPONENTS = 512  # more than 2 CTAs x 16 warps x 6 channels + 200 mbarriers


class Clocks:
    """`g[w]`, `p[w]`, `x[w]`, `t[w]`: clocks of warp slot w. `now[c]`: newest count of a component."""

    def __init__(self, num_warps: int):
        self.g = np.zeros((num_warps, COMPONENTS), np.int32)
        self.p = np.zeros((num_warps, COMPONENTS), np.int32)
        self.x = np.zeros((num_warps, COMPONENTS), np.int32)
        self.t = np.zeros((num_warps, COMPONENTS), np.int32)
        self.now = np.zeros(COMPONENTS, np.int32)
        self.lane_epochs = np.zeros(num_warps, np.int32)  # how often the lanes of a warp have synchronised
        self.names: list[str] = []
        self._index: dict[object, int] = {}
        for w in range(num_warps):
            self.component(("warp", w), f"warp slot {w}")
            self.now[w] = self.g[w, w] = 1

    def component(self, key: object, name: str) -> int:
        """Index of a component, made on first use."""
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.names)
            if index == COMPONENTS:
                raise SimulationError(f"hazard checks: more than {COMPONENTS} clock components in one cluster")
            self.names.append(name)
        return index

    def tick(self, warp: int) -> None:
        """What the warp does from now on is not covered by clocks taken before."""
        self.now[warp] += 1
        self.g[warp, warp] = self.now[warp]

    def snapshot(self, warp: int) -> "Clock":
        """The clock of a warp now (a release); ticks it."""
        clock = Clock(self.g[warp].copy(), self.p[warp].copy(), self.x[warp].copy())
        self.tick(warp)
        return clock

    def join(self, warp: int, clock: "Clock | None") -> None:
        """The warp now comes after everything in the clock (an acquire)."""
        if clock is not None:
            np.maximum(self.g[warp], clock.g, out=self.g[warp])
            np.maximum(self.p[warp], clock.p, out=self.p[warp])
            np.maximum(self.x[warp], clock.x, out=self.x[warp])

    def reach(self, warp: int, component: int, count: int) -> None:
        """The warp saw the first `count` events of an asynchronous component, in both proxies."""
        self.g[warp, component] = max(self.g[warp, component], count)
        self.p[warp, component] = max(self.p[warp, component], count)

    def fence_async(self, warp: int) -> None:
        """fence.proxy.async by a warp."""
        np.maximum(self.p[warp], self.g[warp], out=self.p[warp])
        self.tick(warp)

    def fence_before(self, warp: int, components: list[int]) -> None:
        """tcgen05.fence::before_thread_sync: the warp's tensor-memory accesses so far go with its next arrivals."""
        self.x[warp, components] = self.now[components]

    def fence_after(self, warp: int) -> None:
        """tcgen05.fence::after_thread_sync: the warp's next tcgen05 instructions come after all it was handed."""
        np.maximum(self.t[warp], self.x[warp], out=self.t[warp])


class Clock:
    """The clocks g, p and x carried by a synchronisation object."""

    __slots__ = ("g", "p", "x")

    def __init__(self, g: np.ndarray, p: np.ndarray, x: np.ndarray):
        self.g, self.p, self.x = g, p, x

    def merge(self, other: "Clock") -> None:
        """Everything before either."""
        np.maximum(self.g, other.g, out=self.g)
        np.maximum(self.p, other.p, out=self.p)
        np.maximum(self.x, other.x, out=self.x)

    def copy(self) -> "Clock":
        """An independent copy."""
        return Clock(self.g.copy(), self.p.copy(), self.x.copy())


def merged(old: Clock | None, new: Clock) -> Clock:
    """`old` with `new` merged in; a copy of `new` if there was none."""
    if old is None:
        return new.copy()
    old.merge(new)
    return old
