"""R1 to R5 and R9: ordering and initialisation of shared and global memory accesses. Tensor memory: tensor_rules."""

import numpy as np

from fa4build.errors import SimulationError
from fa4build.simulate.checks.findings import place
from fa4build.simulate.checks.shadow import FULL
from fa4build.simulate.hardware.gang import WARP


class MemoryRules:
    """Checks one access, then records it."""

    def __init__(self, observer, tensor_rules):
        self.observer, self.tensor_rules = observer, tensor_rules
        self.findings = observer.findings

    # --- generic shared accesses --------------------------------------------------------------------------------------

    def generic_access(self, g, offset, size: int, mask, site: int, is_write: bool) -> None:
        """Lanes read or write `size` bytes each at `offset` of their own CTA's shared memory."""
        state = self.observer.state(g.cta.cluster)
        shadow, rank = state.shared[g.cta.rank], g.cta.rank
        granule = (offset >> np.uint32(4)).astype(np.int64)
        inside = granule < len(shadow.writer)
        if not inside.all():
            return  # out of bounds: the access itself reports it
        bits = (((1 << size) - 1) << (offset & np.uint32(15)).astype(np.int64)).astype(np.uint16)
        slots = self._lane_slots(g, state, mask)
        clock = state.clocks.g
        if np.count_nonzero(state.barrier_bytes[rank][granule] & bits):
            what = "write to" if is_write else "read of"
            self.findings.error("R5", (site,), f"{self._place(g, site)}: generic {what} the bytes of an mbarrier")
        self._report_write_order(
            g, state, shadow, granule, shadow.unordered_write(granule, bits, clock, slots), site, is_write
        )
        counts = state.clocks.now[slots]
        lanes = (g.tids if mask is None else g.tids[mask]).astype(np.int16) & 31
        self._note_lane_race(g, state, shadow, granule, bits, slots, lanes, site, is_write)
        if is_write:
            bad = shadow.unordered_reads(granule, bits, clock, slots)
            if np.count_nonzero(bad):
                first = int(np.flatnonzero(bad)[0])
                self._report_read_order(g, state, shadow, int(granule[first]), clock[slots[first]], site)
            shadow.note_write(granule, bits, slots, counts, site, False)
            shadow.write_lane[granule], shadow.write_epoch[granule] = lanes, state.clocks.lane_epochs[slots]
            return
        missing = shadow.uninitialised(granule, bits)
        if np.count_nonzero(missing):
            where = 16 * int(granule[np.flatnonzero(missing)[0]])
            self.findings.error(
                "R9",
                (site,),
                f"{self._place(g, site)}: reads shared memory never written, {g.cta.name_of(where)}",
            )
        shadow.note_read(granule, bits, slots, counts, site)

    def _note_lane_race(self, g, state, shadow, granule, bits, slots, lanes, site: int, is_write: bool) -> None:
        """R10: another lane of the same warp wrote these bytes and the lanes have not synchronised since."""
        own = (shadow.writer[granule] == slots) & (shadow.write_mask[granule] & bits != 0)
        stale = own & (shadow.write_epoch[granule] == state.clocks.lane_epochs[slots])
        # A granule holds words of several lanes: only a write of a whole granule tells which lane it was.
        whole = shadow.write_mask[granule] == bits
        racy = stale & whole & (shadow.write_lane[granule] != lanes) & (shadow.write_lane[granule] >= 0)
        if np.count_nonzero(racy):
            first = int(np.flatnonzero(racy)[0])
            where, verb = int(granule[first]), "overwrites" if is_write else "reads"
            self.findings.note(
                ("R10", site),
                f"R10 {self._place(g, site)}: lane {lanes[first]} {verb} {g.cta.name_of(16 * where)}, which lane "
                f"{shadow.write_lane[where]} of the same warp wrote at "
                f"{self.findings.line(int(shadow.write_site[where]))}; "
                "no bar.warp.sync, shuffle or barrier orders the two lanes",
            )

    def _lane_slots(self, g, state, mask) -> np.ndarray:
        key = ("clock slots", g.cta.rank)
        slots = g.special.get(key)
        if slots is None:
            slots = g.special[key] = np.repeat([state.slot(w) for w in g.warps], WARP)
        return slots if mask is None else slots[mask]

    def _place(self, g, site: int) -> str:
        return place(self.findings, g, site)

    def _report_write_order(self, g, state, shadow, where, bad, site: int, is_write: bool) -> None:
        if not np.count_nonzero(bad):
            return
        granule = int(where[np.flatnonzero(bad)[0]])
        writer = state.clocks.names[shadow.writer[granule]]
        other = int(shadow.write_site[granule])
        rule, verb = ("R3", "writes") if is_write else ("R1", "reads")
        self.findings.error(
            rule,
            (site, other),
            f"{self._place(g, site)}: {verb} {g.cta.name_of(16 * granule)} while the write by {writer} at "
            f"{self.findings.line(other)} "
            "is not known to be complete",
        )

    def _report_read_order(self, g, state, shadow, granule: int, clock, site: int) -> None:
        reader = state.clocks.names[shadow.first_reader(granule, clock)[0]]
        other = int(shadow.read_site[granule])
        self.findings.error(
            "R2",
            (site, other),
            f"{self._place(g, site)}: overwrites {g.cta.name_of(16 * granule)} while the read by {reader} "
            f"at {self.findings.line(other)} "
            "is not known to be over",
        )

    # --- asynchronous operations --------------------------------------------------------------------------------------

    def channel_component(self, state, warp, channel) -> int:
        """Clock component through which an operation's completion is seen."""
        if isinstance(channel, str):
            slot = state.slot(warp)
            return state.clocks.component((channel, slot), f"{channel} of {state.clocks.names[slot]}")
        name = f"asynchronous copies of mbarrier {channel.name} of CTA {channel.cta.rank}"
        return state.clocks.component(("mbarrier", channel.cta.rank, channel.offset), name)

    def asynchronous(self, g, warp, op, channel, reads, writes, site: int) -> None:
        """An operation is issued by `warp`: it may touch its operands from now until its completion is seen."""
        state = self.observer.state(g.cta.cluster)
        clocks = state.clocks
        component = self.channel_component(state, warp, channel)
        if isinstance(channel, str):
            clocks.now[component] += 1
            count = int(clocks.now[component])
        else:
            count = channel.phase + 1
        op.token = (component, count)
        slot = state.slot(warp)
        g_clock, p_clock = clocks.g[slot].copy(), clocks.p[slot].copy()
        if channel == "mma":
            # Products of one thread run in order: each sees the accumulators of the ones before.
            g_clock[component] = p_clock[component] = count
        is_generic = channel == "cp.async"
        for space, owner, where in reads:
            if space == "smem":
                self._async_read(g, state, state.shared[owner.rank], where, (g_clock, p_clock), op, site)
            elif space == "tmem":
                self.tensor_rules.product_reads(g, warp, owner, where, g_clock, op, site)
            else:
                self._global_range(g, space, owner, where, site, False)
        for space, owner, where in writes:
            if space == "smem":
                self._async_write(
                    g, state, state.shared[owner.rank], where, (g_clock, p_clock), op, site, not is_generic
                )
            elif space == "tmem":
                self.tensor_rules.product_writes(g, warp, owner, where, g_clock, op, site)
            else:
                self._global_range(g, space, owner, where, site, True)

    def _async_read(self, g, state, shadow, where, clocks, op, site: int) -> None:
        bits = np.full(len(where), FULL)
        bad = shadow.unordered_write(where, bits, clocks[0])
        self._report_write_order(g, state, shadow, where, bad, site, False)
        self._check_proxy(g, shadow, where, bits, bad, clocks[1], site, "reads")
        missing = shadow.uninitialised(where, bits)
        if np.count_nonzero(missing):
            granule = int(where[np.flatnonzero(missing)[0]])
            self.findings.error(
                "R9", (site,), f"{self._place(g, site)}: reads {g.cta.name_of(16 * granule)}, never written"
            )
        component, count = op.token
        shadow.note_read(where, bits, component, count, site)

    def _check_proxy(self, g, shadow, where, bits, already, p_clock, site: int, verb: str) -> None:
        """R4: ordered, but the generic write has no fence.proxy.async behind it."""
        hidden = shadow.unordered_write(where, bits, p_clock) & ~shadow.by_async[where] & ~already
        if np.count_nonzero(hidden):
            granule = int(where[np.flatnonzero(hidden)[0]])
            other = int(shadow.write_site[granule])
            self.findings.error(
                "R4",
                (site, other),
                f"{self._place(g, site)}: the asynchronous proxy {verb} {g.cta.name_of(16 * granule)} "
                f"written by {self.findings.line(other)} "
                "without a fence.proxy.async in between",
            )

    def _async_write(self, g, state, shadow, where, clocks, op, site: int, by_async: bool) -> None:
        bits = np.full(len(where), FULL)
        if np.count_nonzero(state.barrier_bytes[g.cta.rank][where] & bits):
            self.findings.error(
                "R5", (site,), f"{self._place(g, site)}: an asynchronous write covers the bytes of an mbarrier"
            )
        bad = shadow.unordered_write(where, bits, clocks[0])
        self._report_write_order(g, state, shadow, where, bad, site, True)
        if by_async:
            self._check_proxy(g, shadow, where, bits, bad, clocks[1], site, "overwrites")
        late = shadow.unordered_reads(where, bits, clocks[0])
        if np.count_nonzero(late):
            self._report_read_order(g, state, shadow, int(where[np.flatnonzero(late)[0]]), clocks[0], site)
        component, count = op.token
        shadow.note_write(where, bits, component, count, site, by_async)
        shadow.forget_reads(where)

    # --- global memory ------------------------------------------------------------------------------------------------

    def global_access(self, g, address, size: int, site: int, is_write: bool) -> None:
        """Initialisation of buffers that were registered as unwritten."""
        memory = g.cta.memory
        if not memory.has_unwritten or not len(address):
            return
        try:
            touched = list(memory.split(address, size, "access"))
        except SimulationError:
            return  # out of bounds: the access itself reports it
        for buffer, _, offsets in touched:
            if buffer.written is None:
                continue
            words = offsets[:, None] // 4 + np.arange(max(size // 4, 1))
            self._mark(g, buffer, words, site, is_write)

    def _mark(self, g, buffer, words, site: int, is_write: bool) -> None:
        owners = buffer.written[words]
        if is_write:
            me = 1 + g.cta.cluster.index * len(g.cta.cluster.ctas) + g.cta.rank
            twice = (owners > 0) & (owners != me)
            if twice.any():
                first = int(words[twice].reshape(-1)[0])
                text = f"writes {buffer.name} at byte {4 * first}, which another CTA of this launch has written"
                self.findings.error("R3", (site, "global"), f"{self._place(g, site)}: {text}")
            buffer.written[words] = me
        elif not owners.all():
            first = int(words[owners == 0].reshape(-1)[0])
            self.findings.error(
                "R9",
                (site,),
                f"{self._place(g, site)}: reads {buffer.name} at byte {4 * first}, never written",
            )

    def _global_range(self, g, space: str, owner, size, site: int, is_write: bool) -> None:
        """A contiguous range ("gmem", address, size), or the global side of a tensor box ("box", plan, _)."""
        memory = g.cta.memory
        if not memory.has_unwritten:
            return
        if space == "gmem":
            self.global_access(g, np.arange(owner, owner + size, 4).astype(np.uint64), 4, site, is_write)
            return
        addresses = owner.global_addresses if owner.valid is None else owner.global_addresses[owner.valid]
        self.global_access(g, addresses.astype(np.uint64), owner.unit_bytes, site, is_write)
