"""Shadow state: who last wrote a granule and who has read it since.

One `Shadow` covers shared memory in 16-byte granules with byte masks, another tensor memory in (quarter of 32
lanes, column) cells. All methods work on arrays of granules. A clock is a row of counts by component; where `slots`
are given, a matrix of them, of which granule i looks at row slots[i].
"""

import numpy as np

from fa4build.simulate.checks.clocks import COMPONENTS

FULL = np.uint16(0xFFFF)
_FIRST_COLUMNS = 16


class Shadow:
    """Last write (component, count, proxy, instruction), bytes it wrote, reads since, bytes ever written.

    Reads are kept by component, in columns that are given out as components come to read this memory.
    """

    def __init__(self, granules: int):
        self.writer = np.full(granules, -1, np.int32)
        self.written = np.zeros(granules, np.int32)
        self.by_async = np.zeros(granules, bool)
        self.write_site = np.zeros(granules, np.int32)
        self.write_mask = np.zeros(granules, np.uint16)
        self._column = np.full(COMPONENTS, -1, np.intp)  # of a component
        self._readers = np.zeros(0, np.intp)  # component of each column
        self._reads = np.zeros((granules, _FIRST_COLUMNS), np.int32)
        self._read_bits = np.zeros((granules, _FIRST_COLUMNS), np.uint16)
        self.read_mask = np.zeros(granules, np.uint16)
        self.read_site = np.zeros(granules, np.int32)
        self.initialised = np.zeros(granules, np.uint16)
        self.write_lane = np.full(granules, -1, np.int16)  # lane of the newest generic write, and the warp's
        self.write_epoch = np.zeros(granules, np.int32)  # count of synchronisations of its lanes before it

    def unordered_write(self, where, bits, clock, slots=None) -> np.ndarray:
        """True where the last write to overlapping bytes is not in the clock."""
        writer = self.writer[where]  # -1, nobody: the last component, but with a count that every clock has
        seen = clock[writer] if slots is None else clock[slots, writer]
        late = seen < self.written[where]
        if np.count_nonzero(late):
            late &= (writer >= 0) & (self.write_mask[where] & bits != 0)
        return late

    def unordered_reads(self, where, bits, clock, slots=None) -> np.ndarray:
        """True where a read of overlapping bytes since the last write is not in the clock."""
        result = np.zeros(len(where), bool)
        touched = np.flatnonzero(self.read_mask[where] & bits)
        if len(touched):
            readers, chosen = self._readers, where[touched]
            rows = clock[readers] if slots is None else clock[slots[touched, None], readers]
            late = self._reads[chosen, : len(readers)] > rows
            if np.count_nonzero(late):
                late &= self._read_bits[chosen, : len(readers)] & bits[touched, None] != 0
                result[touched] = late.any(axis=1)
        return result

    def first_reader(self, granule: int, clock: np.ndarray) -> tuple[int, int]:
        """(component, count) of an unordered read."""
        counts = self._reads[granule, : len(self._readers)]
        late = np.flatnonzero(counts > clock[self._readers])
        column = int(late[self._readers[late].argmin()])
        return int(self._readers[column]), int(counts[column])

    def uninitialised(self, where, bits) -> np.ndarray:
        """True where some of the bytes were never written."""
        return bits & ~self.initialised[where] != 0

    def note_read(self, where, bits, components, counts, site: int) -> None:
        """Records reads; `components` is one, of granules that are all different, or an array."""
        if np.ndim(components) == 0:
            column = self._columns(np.array([components]))[0]
            self._reads[where, column] = counts
            self._read_bits[where, column] |= bits
            self.read_mask[where] |= bits
        else:
            columns = self._columns(components)  # may widen the table
            flat = where * self._reads.shape[1] + columns
            self._reads.reshape(-1)[flat] = counts
            np.bitwise_or.at(self._read_bits.reshape(-1), flat, bits)
            np.bitwise_or.at(self.read_mask, where, bits)
        self.read_site[where] = site

    def _columns(self, components) -> np.ndarray:
        columns = self._column[components]
        if len(columns) and columns.min() < 0:
            for component in np.unique(components[columns < 0]).tolist():
                self._column[component] = len(self._readers)
                self._readers = np.append(self._readers, component)
            while len(self._readers) > self._reads.shape[1]:
                self._reads = np.concatenate([self._reads, np.zeros_like(self._reads)], axis=1)
                self._read_bits = np.concatenate([self._read_bits, np.zeros_like(self._read_bits)], axis=1)
            columns = self._column[components]
        return columns

    def note_write(self, where, bits, components, counts, site: int, by_async: bool) -> None:
        """Records writes; bytes of an earlier write by the same component stay its own.

        `components` is one, of granules that are all different, or an array.
        """
        if np.ndim(components) == 0:
            same = self.writer[where] == components
            self.write_mask[where] = np.where(same, self.write_mask[where], np.uint16(0)) | bits
            self.initialised[where] |= bits
            self.writer[where] = components
        else:
            before = self.writer[where]
            self.writer[where] = components
            if np.count_nonzero(self.writer[where] != components):  # two components in one granule: one after the other
                self.writer[where] = before
                for component in np.unique(components):
                    mine = components == component
                    self.note_write(where[mine], bits[mine], components[mine], counts[mine], site, by_async)
                return
            self.write_mask[where[before != components]] = 0
            np.bitwise_or.at(self.write_mask, where, bits)
            np.bitwise_or.at(self.initialised, where, bits)
        self.written[where] = counts
        self.by_async[where] = by_async
        self.write_site[where] = site

    def forget_reads(self, where) -> None:
        """After a write of whole granules earlier reads matter no more."""
        where = where[self.read_mask[where] != 0]
        if len(where):
            self._reads[where, : len(self._readers)] = 0
            self._read_bits[where, : len(self._readers)] = 0
            self.read_mask[where] = 0
