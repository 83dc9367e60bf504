"""Tensor memory: R1 to R3, R6-free, R7, R9 and R15, in the formal model of PTX ISA 9.7.16.6. Loads by `tcgen05.ld` are
complete after `tcgen05.wait::ld` only, stores after `wait::st`, products when a commit is seen. Where another thread's
access comes first, a barrier alone orders nothing: its thread must have fenced before it arrived
(`tcgen05.fence::before_thread_sync`; a commit does it itself), this one after it waited (`::after_thread_sync`).
`R7w`: the value of a load was used, and a barrier hands that on, but nothing says that the load is complete.
`R6-free`: `tcgen05.dealloc` while something that uses the columns is not known to be over.
"""

import numpy as np

from fa4build.simulate.checks.findings import place
from fa4build.simulate.checks.shadow import FULL, Shadow

QUARTERS, COLUMNS = 4, 512
_ALWAYS = np.iinfo(np.int32).max


class TensorShadow(Shadow):
    """A granule is a column of a quarter (32 lanes). `loads[i, w]`: newest tcgen05.ld of warp slot w since the last
    write, as the count that wait::ld completes; 0 = none."""

    def __init__(self, num_warps: int):
        super().__init__(QUARTERS * COLUMNS)
        self.loads = np.zeros((QUARTERS * COLUMNS, num_warps), np.int32)
        self.load_site = np.zeros(QUARTERS * COLUMNS, np.int32)


class TensorRules:
    """Checks one access of tensor memory, then records it."""

    def __init__(self, observer):
        self.observer = observer
        self.findings = observer.findings

    def ordered(self, state, slot: int, kind: str) -> None:
        """tcgen05.wait::ld or ::st (`ld`, `st`), or a tcgen05.fence (`before`, `after`) of a warp."""
        clocks = state.clocks
        if kind == "after":
            clocks.fence_after(slot)
        elif kind == "before":
            clocks.fence_before(slot, _own(clocks, slot))
        else:
            component = _channel(clocks, kind, slot)
            clocks.reach(slot, component, int(clocks.now[component]))

    def access(self, g, warp, address: int, width: int, is_write: bool, site: int) -> None:
        """tcgen05.ld or st of one warp: its quarter, `width` columns."""
        state = self.observer.state(g.cta.cluster)
        shadow, clocks, slot = state.tensor_shadow(g.cta.rank), state.clocks, state.slot(warp)
        column = address & 0xFFFF
        where = (address >> 16) // 32 * COLUMNS + np.arange(column, column + width)
        clock = clocks.g[slot]
        self._check_writes(g, state, shadow, where, slot, clock, site, "overwrites" if is_write else "reads")
        component = _channel(clocks, "st" if is_write else "ld", slot)
        if is_write:
            self._check_reads(g, state, shadow, where, slot, clock, site)
        else:
            self._check_written(g, shadow, where, site)
        clocks.now[component] += 1
        if is_write:
            self._note_write(shadow, where, component, int(clocks.now[component]), site, False)
            return
        shadow.loads[where, slot] = clocks.now[component]
        shadow.load_site[where] = site
        shadow.note_read(where, np.full(width, FULL), slot, int(clocks.now[slot]), site)

    def product_reads(self, g, warp, owner, block, clock, op, site: int) -> None:
        """A tcgen05.mma reads a (lane, lanes, column, columns) block of a CTA's tensor memory."""
        state = self.observer.state(g.cta.cluster)
        shadow, where = state.tensor_shadow(owner.rank), _cells(block)
        self._check_writes(g, state, shadow, where, state.slot(warp), clock, site, "reads")
        self._check_written(g, shadow, where, site)
        shadow.note_read(where, np.full(len(where), FULL), *op.token, site)

    def product_writes(self, g, warp, owner, block, clock, op, site: int) -> None:
        """A tcgen05.mma or cp writes a block."""
        state = self.observer.state(g.cta.cluster)
        shadow, where, slot = state.tensor_shadow(owner.rank), _cells(block), state.slot(warp)
        self._check_writes(g, state, shadow, where, slot, clock, site, "overwrites")
        self._check_reads(g, state, shadow, where, slot, clock, site)
        self._note_write(shadow, where, *op.token, site, True)

    def freed(self, g, warp, column: int, num_cols: int, site: int) -> None:
        """tcgen05.dealloc: all that used the columns, of every warp and of both CTAs of a pair, must be over: another
        CTA may own them next. The cells are undefined from now on.

        No tcgen05.fence is asked for: dealloc is no access, and what is over needs no order.
        """
        state = self.observer.state(g.cta.cluster)
        shadow, slot = state.tensor_shadow(g.cta.rank), state.slot(warp)
        where, clock = _cells((0, 32 * QUARTERS, column, num_cols)), state.clocks.g[slot]
        bits = np.full(len(where), FULL)
        written = shadow.unordered_write(where, bits, clock)
        read = shadow.unordered_reads(where, bits, clock)
        if np.count_nonzero(written):
            granule = _first(where, written)
            user, other = int(shadow.writer[granule]), int(shadow.write_site[granule])
            self._report_free(g, state, "R6-free", granule, f"write by {state.clocks.names[user]}", other, site)
        elif np.count_nonzero(read):
            granule = _first(where, read)
            (user, _), other = shadow.first_reader(granule, clock), int(shadow.read_site[granule])
            self._report_free(g, state, "R6-free", granule, f"read by {state.clocks.names[user]}", other, site)
        else:
            self._check_loads(g, state, shadow, where, slot, (clock, None), site, "frees")
        shadow.initialised[where] = 0
        shadow.forget_reads(where)
        shadow.writer[where], shadow.written[where] = -1, 0
        shadow.loads[where] = 0

    def _report_free(self, g, state, rule: str, granule: int, use: str, other: int, site: int) -> None:
        self.findings.error(
            rule,
            (site, other),
            f"{self._place(g, site)}: frees {_name(granule)} while the {use} at {self.findings.line(other)} "
            "is not known to be over",
        )

    def _note_write(self, shadow, where, component: int, count: int, site: int, by_async: bool) -> None:
        shadow.note_write(where, np.full(len(where), FULL), component, count, site, by_async)
        shadow.forget_reads(where)
        shadow.loads[where] = 0

    def _check_written(self, g, shadow, where, site: int) -> None:
        missing = shadow.uninitialised(where, np.full(len(where), FULL))
        if np.count_nonzero(missing):
            granule = _first(where, missing)
            self.findings.error("R9", (site,), f"{self._place(g, site)}: reads {_name(granule)}, never written")

    def _check_writes(self, g, state, shadow, where, slot: int, clock, site: int, verb: str) -> None:
        """The last write comes first: complete (R1, R3), and fenced (R15)."""
        bits = np.full(len(where), FULL)
        late = shadow.unordered_write(where, bits, clock)
        if np.count_nonzero(late):
            granule = _first(where, late)
            other = int(shadow.write_site[granule])
            self.findings.error(
                "R1" if verb == "reads" else "R3",
                (site, other),
                f"{self._place(g, site)}: {verb} {_name(granule)} while the write by "
                f"{state.clocks.names[shadow.writer[granule]]} at {self.findings.line(other)} "
                "is not known to be complete",
            )
            return
        unfenced = shadow.unordered_write(where, bits, _fenced(state.clocks, slot))
        if np.count_nonzero(unfenced):
            granule = _first(where, unfenced)
            event = int(shadow.writer[granule]), int(shadow.written[granule])
            self._report_fence(g, state, granule, slot, event, int(shadow.write_site[granule]), site, verb)

    def _check_reads(self, g, state, shadow, where, slot: int, clock, site: int) -> None:
        """Reads since the last write come first: over (R2), complete (R7w), and fenced (R15)."""
        bits, clocks = np.full(len(where), FULL), state.clocks
        late = shadow.unordered_reads(where, bits, clock)
        if np.count_nonzero(late):
            granule = _first(where, late)
            other = int(shadow.read_site[granule])
            self.findings.error(
                "R2",
                (site, other),
                f"{self._place(g, site)}: overwrites {_name(granule)} while the read by "
                f"{clocks.names[shadow.first_reader(granule, clock)[0]]} at {self.findings.line(other)} "
                "is not known to be over",
            )
            return
        fenced = _fenced(clocks, slot)
        self._check_loads(g, state, shadow, where, slot, (clock, fenced), site)
        fenced[: len(clocks.g)] = _ALWAYS  # how far a warp's program has come: R2 has seen to it
        unfenced = shadow.unordered_reads(where, bits, fenced)
        if np.count_nonzero(unfenced):
            granule = _first(where, unfenced)
            event, other = shadow.first_reader(granule, fenced), int(shadow.read_site[granule])
            self._report_fence(g, state, granule, slot, event, other, site, "overwrites")

    def _check_loads(self, g, state, shadow, where, slot: int, clocks_of, site: int, verb: str = "overwrites") -> None:
        """tcgen05.ld before a write: completed by wait::ld (R7w), and fenced (R15; not asked for where None)."""
        loads = shadow.loads[where]
        loaders = np.flatnonzero(loads.any(axis=0))
        components = [_channel(state.clocks, "ld", int(loader)) for loader in loaders]
        clock, fenced = clocks_of
        weak = loads[:, loaders] > clock[components]
        if np.count_nonzero(weak):
            row, which = np.argwhere(weak)[0].tolist()
            granule = int(where[row])
            other, loader = int(shadow.load_site[granule]), state.clocks.names[components[which]]
            self.findings.error(
                "R7w",
                (site, other),
                f"{self._place(g, site)}: {verb} {_name(granule)} after the {loader} "
                f"at {self.findings.line(other)} without a tcgen05.wait::ld in between: its value was used, but the "
                "load is not known to be complete",
            )
            return
        if fenced is None:
            return
        unfenced = loads[:, loaders] > fenced[components]
        if np.count_nonzero(unfenced):
            row, which = np.argwhere(unfenced)[0].tolist()
            granule, event = int(where[row]), (components[which], int(loads[row, loaders[which]]))
            self._report_fence(g, state, granule, slot, event, int(shadow.load_site[granule]), site, verb)

    def _report_fence(self, g, state, granule: int, slot: int, event, other: int, site: int, verb: str) -> None:
        """A barrier orders the event of another warp first, but a tcgen05.fence is missing on one of its sides."""
        component, count = event
        is_published = int(state.clocks.x[slot, component]) >= count
        rule, missing = (
            ("R15-after", "tcgen05.fence::after_thread_sync between that barrier and this instruction")
            if is_published
            else ("R15-before", "tcgen05.fence::before_thread_sync between that access and its thread's arrival")
        )
        self.findings.error(
            rule,
            (site, other),
            f"{self._place(g, site)}: {verb} {_name(granule)} after the access by {state.clocks.names[component]} at "
            f"{self.findings.line(other)}; a barrier orders the threads, but there is no {missing}",
        )

    def _place(self, g, site: int) -> str:
        return place(self.findings, g, site)


def _channel(clocks, kind: str, slot: int) -> int:
    """Component of a warp's tcgen05.ld or st."""
    return clocks.component((f"tmem {kind}", slot), f"tcgen05.{kind} of {clocks.names[slot]}")


def _own(clocks, slot: int) -> list[int]:
    """Components of a warp's own tcgen05 instructions."""
    return [
        _channel(clocks, "ld", slot),
        _channel(clocks, "st", slot),
        clocks.component(("mma", slot), f"mma of {clocks.names[slot]}"),
    ]


def _fenced(clocks, slot: int) -> np.ndarray:
    """What a warp's tcgen05 instructions are ordered behind as far as fences go: its own need none."""
    fenced = clocks.t[slot].copy()
    fenced[_own(clocks, slot)] = _ALWAYS
    return fenced


def _cells(block: tuple[int, int, int, int]) -> np.ndarray:
    """Granules of a (lane, lanes, column, columns) block."""
    lane, lanes, column, columns = block
    quarters = np.arange(lane // 32, (lane + lanes + 31) // 32)
    return (quarters[:, None] * COLUMNS + np.arange(column, column + columns)).reshape(-1)


def _first(where, chosen) -> int:
    return int(where[np.flatnonzero(chosen)[0]])


def _name(granule: int) -> str:
    return f"tensor memory lanes {granule // COLUMNS * 32}.., column {granule % COLUMNS}"
