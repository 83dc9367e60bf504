"""Global memory as guarded, named buffers: an access outside every buffer is an error that names the nearest one."""

import numpy as np

from fa4build.errors import SimulationError

_FIRST_ADDRESS = 0x7000_0000_0000
_GAP = 1 << 32  # far larger than any wrong index: a stray address never lands in another buffer


class Buffer:
    """`data`: u8 array; `views[size]`: the same bytes as unsigned integers of `size` bytes."""

    __slots__ = ("base", "data", "name", "read_only", "size", "views", "written")

    def __init__(self, name: str, base: int, data: np.ndarray, read_only: bool):
        self.name, self.base, self.data, self.read_only = name, base, data, read_only
        self.size = len(data)
        # Per 4 bytes, for buffers that start out unwritten: 0 never, -1 in an earlier launch, else 1 + number of
        # the CTA.
        self.written: np.ndarray | None = None
        self.views = {1: data}
        for size in (2, 4, 8):
            usable = self.size // size * size
            self.views[size] = data[:usable].view(f"u{size}")


class GlobalMemory:
    """Buffers at simulated addresses. Arrays are shared, not copied: results appear in them."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._next = _FIRST_ADDRESS
        self._last: Buffer | None = None
        self._roots: dict[int, int] = {}
        self.has_unwritten = False

    def add(self, name: str, array: np.ndarray, *, read_only: bool = False) -> int:
        """Makes an array visible to kernels.

        Args:
            name: used in error messages.
            array: contiguous; its memory is what kernels read and write.
            read_only: writes by the kernel are errors.
        Returns: the address of its first byte, a multiple of 256.
        """
        if not array.flags.c_contiguous:
            raise SimulationError(f"buffer {name} is not contiguous; pass its contiguous base and strides instead")
        data = array.reshape(-1).view(np.uint8)
        buffer = Buffer(name, self._next, data, read_only)
        self.buffers.append(buffer)
        self._next += (len(data) + _GAP) // 256 * 256
        return buffer.base

    def mark_unwritten(self, address: int) -> None:
        """The buffer at an address holds nothing yet: reading it before the kernel writes it is an error when
        checks are on.
        """
        buffer = self.find(address, 1, "mark")
        buffer.written = np.zeros((buffer.size + 3) // 4, np.int32)
        self.has_unwritten = True

    def begin_launch(self) -> None:
        """What earlier launches wrote may be overwritten by any CTA."""
        for buffer in self.buffers:
            if buffer.written is not None:
                buffer.written[buffer.written != 0] = -1

    def add_view(self, name: str, array: np.ndarray) -> int:
        """Makes the memory behind an array visible and returns the address of its first element.

        A strided view registers the contiguous array it was cut from (once for all its views).
        """
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        start = root.__array_interface__["data"][0]
        known = self._roots.get(start)
        if known is None:
            known = self._roots[start] = self.add(name, root)
        return known + array.__array_interface__["data"][0] - start

    def find(self, address: int, size: int, what: str) -> Buffer:
        """The buffer that holds [address, address + size).

        Raises:
            SimulationError: no buffer does; names the nearest one and the distance.
        """
        last = self._last
        if last is not None and 0 <= address - last.base <= last.size - size:
            return last
        for buffer in self.buffers:
            if 0 <= address - buffer.base <= buffer.size - size:
                self._last = buffer
                return buffer
        raise SimulationError(
            f"{what} of {size} bytes at global address 0x{address:x} is out of bounds: {self._nearest(address)}"
        )

    def _nearest(self, address: int) -> str:
        if not self.buffers:
            return "no buffer is registered"
        distance = lambda b: max(b.base - address, address - (b.base + b.size) + 1, 0)  # noqa: E731
        buffer = min(self.buffers, key=distance)
        offset = address - buffer.base
        return f"nearest buffer is {buffer.name} ({buffer.size} bytes), byte offset {offset}"

    def split(self, addresses: np.ndarray, size: int, what: str):
        """Yields (buffer, positions, byte offsets) for an array of u64 addresses, each access `size` bytes."""
        low, high = int(addresses.min()), int(addresses.max())
        first = self.find(low, size, what)
        if high - first.base <= first.size - size:
            yield first, slice(None), (addresses - np.uint64(first.base)).astype(np.int64)
            return
        rest = np.arange(len(addresses))
        while len(rest):
            buffer = self.find(int(addresses[rest[0]]), size, what)
            offsets = addresses[rest].astype(np.int64) - buffer.base
            inside = (offsets >= 0) & (offsets <= buffer.size - size)
            yield buffer, rest[inside], offsets[inside]
            rest = rest[~inside]

    def read_bytes(self, address: int, size: int) -> np.ndarray:
        """`size` consecutive bytes."""
        buffer = self.find(address, size, "read")
        offset = address - buffer.base
        return buffer.data[offset : offset + size]

    def gather(self, addresses: np.ndarray, element: int, what: str = "read") -> np.ndarray:
        """Elements of `element` bytes (1, 2, 4, 8) at u64 addresses, aligned to the element."""
        out = np.empty(addresses.shape, f"u{element}")
        flat, result = addresses.reshape(-1), out.reshape(-1)
        if len(flat):
            for buffer, where, offsets in self.split(flat, element, what):
                result[where] = buffer.views[element][offsets // element]
        return out

    def scatter(self, addresses: np.ndarray, values: np.ndarray, element: int, what: str = "write") -> None:
        """Writes elements at u64 addresses."""
        flat, source = addresses.reshape(-1), values.reshape(-1)
        if len(flat):
            for buffer, where, offsets in self.split(flat, element, what):
                if buffer.read_only:
                    raise SimulationError(f"{what} to read-only buffer {buffer.name} at byte offset {int(offsets[0])}")
                buffer.views[element][offsets // element] = source[where]
