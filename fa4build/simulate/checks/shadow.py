"""Shadow state: who last wrote a granule and who has read it since.

One `Shadow` covers shared memory in 16-byte granules with byte masks, another tensor memory in (quarter of 32
lanes, column) cells. All methods work on arrays of granules.
"""

import numpy as np

from fa4build.simulate.checks.clocks import COMPONENTS

FULL = np.uint16(0xFFFF)


class Shadow:
    """Last write (component, count, proxy, instruction), bytes it wrote, reads since, bytes ever written."""

    def __init__(self, granules: int):
        self.writer = np.full(granules, -1, np.int32)
        self.written = np.zeros(granules, np.int32)
        self.by_async = np.zeros(granules, bool)
        self.write_site = np.zeros(granules, np.int32)
        self.write_mask = np.zeros(granules, np.uint16)
        self.used = 0  # components below this one have read something: the columns worth looking at
        self.reads = np.zeros((granules, COMPONENTS), np.int32)
        self.read_bits = np.zeros((granules, COMPONENTS), np.uint16)
        self.read_mask = np.zeros(granules, np.uint16)
        self.read_site = np.zeros(granules, np.int32)
        self.initialised = np.zeros(granules, np.uint16)
        self.write_lane = np.full(granules, -1, np.int16)  # lane of the newest generic write, and the warp's
        self.write_epoch = np.zeros(granules, np.int32)  # count of synchronisations of its lanes before it

    def unordered_write(self, where, bits, clock_rows) -> np.ndarray:
        """True where the last write to overlapping bytes is not in the clock (rows: one per granule, or one for
        all).
        """
        writer, count = self.writer[where], self.written[where]
        known = writer >= 0
        safe = np.where(known, writer, 0)
        seen = clock_rows[safe] if clock_rows.ndim == 1 else clock_rows[np.arange(len(safe)), safe]
        return known & (seen < count) & (self.write_mask[where] & bits != 0)

    def unordered_reads(self, where, bits, clock_rows) -> np.ndarray:
        """True where a read of overlapping bytes since the last write is not in the clock."""
        touched = self.read_mask[where] & bits != 0
        result = np.zeros(len(where), bool)
        if touched.any():
            used = self.used
            rows = clock_rows[:used] if clock_rows.ndim == 1 else clock_rows[touched, :used]
            chosen = where[touched]
            late = self.reads[chosen, :used] > rows
            if late.any():
                late &= self.read_bits[chosen, :used] & bits[touched, None] != 0
            result[touched] = late.any(axis=1)
        return result

    def first_reader(self, granule: int, clock: np.ndarray) -> int:
        """A component with an unordered read."""
        return int(np.flatnonzero(self.reads[granule] > clock)[0])

    def uninitialised(self, where, bits) -> np.ndarray:
        """True where some of the bytes were never written."""
        return bits & ~self.initialised[where] != 0

    def note_read(self, where, bits, components, counts, site: int) -> None:
        """Records reads."""
        self.used = max(self.used, int(np.max(components)) + 1)
        self.reads[where, components] = counts
        np.bitwise_or.at(self.read_bits, (where, components), bits)
        np.bitwise_or.at(self.read_mask, where, bits)
        self.read_site[where] = site

    def note_write(self, where, bits, components, counts, site: int, by_async: bool) -> None:
        """Records writes; bytes of an earlier write by the same component stay its own."""
        if not np.isscalar(components) and components[0] != components[-1]:
            for component in np.unique(components):
                mine = components == component
                self.note_write(where[mine], bits[mine], component, counts[mine], site, by_async)
            return
        components = components if np.isscalar(components) else components[0]
        same = self.writer[where] == components
        self.write_mask[where] = np.where(same, self.write_mask[where], np.uint16(0))
        np.bitwise_or.at(self.write_mask, where, bits)
        np.bitwise_or.at(self.initialised, where, bits)
        self.writer[where] = components
        self.written[where] = counts
        self.by_async[where] = by_async
        self.write_site[where] = site

    def forget_reads(self, where) -> None:
        """After a write of whole granules earlier reads matter no more."""
        self.reads[where, : self.used] = 0
        self.read_bits[where, : self.used] = 0
        self.read_mask[where] = 0
