"""Tensor maps: the 128-byte descriptors of TMA copies, as values.

Packing equals what `cuTensorMapEncodeTiled` writes into the first 64 bytes; the driver's bookkeeping behind them and
the two bits whose meaning is unknown (1 and 21 of word 1) are written as zero and ignored when reading.

Source: ptx-semantics.md 8.6 (bit layout compared with the driver), docs/formats.md section 2 (names).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from fa4build.errors import SimulationError
from fa4build.simulate.hardware.swizzle import SPANS

SIZE_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementType:
    """How one element type is written in the descriptor: its size, its code, and the tf32 flag."""

    size_bytes: int
    code: int
    is_tf32: bool = False


ELEMENT_TYPES = {
    "u8": ElementType(size_bytes=1, code=0),
    "u16": ElementType(size_bytes=2, code=1),
    "u32": ElementType(size_bytes=4, code=2),
    "i32": ElementType(size_bytes=4, code=3),
    "u64": ElementType(size_bytes=8, code=4),
    "i64": ElementType(size_bytes=8, code=5),
    "f16": ElementType(size_bytes=2, code=6),
    "f32": ElementType(size_bytes=4, code=7),
    "f32_ftz": ElementType(size_bytes=4, code=8),
    "f64": ElementType(size_bytes=8, code=9),
    "bf16": ElementType(size_bytes=2, code=10),
    "tf32": ElementType(size_bytes=4, code=7, is_tf32=True),
    "tf32_ftz": ElementType(size_bytes=4, code=8, is_tf32=True),
}
_TYPE_NAMES = {(t.code, t.is_tf32): name for name, t in ELEMENT_TYPES.items()}
_INTERLEAVES = (0, 16, 32)
_PROMOTIONS = (0, 64, 128, 256)
_FILLS = ("zero", "nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """One tiled tensor map, dimensions innermost first.

    address: global byte address, a multiple of 16. dims: extents in elements, 1..2^32. strides: bytes between
    neighbours of dims 1.., multiples of 16 below 2^40; of a dim of extent 1 anything, see `repaired`.
    box: elements copied per dimension, 1..256. element_strides: 1..8. swizzle, interleave, l2_promotion: bytes,
    0 = none. oob_fill: `zero` or `nan`.
    """

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int = 0
    interleave: int = 0
    l2_promotion: int = 0
    oob_fill: str = "zero"

    def __post_init__(self) -> None:
        problem = _first_problem(self)
        if problem:
            raise SimulationError(f"tensor map: {problem}")

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_TYPES[self.dtype].size_bytes

    @property
    def box_bytes(self) -> int:
        """Bytes of one full box: what a load adds to its mbarrier, out-of-bounds elements included."""
        elements = 1
        for extent in self.box:
            elements *= extent
        return elements * self.element_bytes


def _first_problem(tmap: TensorMap) -> str | None:
    """What `cuTensorMapEncodeTiled` would refuse, in words; None if nothing. Source: CUDA driver API, tensor maps."""
    if tmap.dtype not in ELEMENT_TYPES:
        return f"element type {tmap.dtype!r} is unknown; allowed: {', '.join(ELEMENT_TYPES)}"
    rank = len(tmap.dims)
    if not 1 <= rank <= 5:
        return f"rank {rank} is not in 1..5"
    lengths = (len(tmap.strides) + 1, len(tmap.box), len(tmap.element_strides))
    if lengths != (rank, rank, rank):
        return f"rank {rank} needs {rank - 1} strides and {rank} box and element-stride entries; got {tmap}"
    if tmap.address % 16 or not 0 <= tmap.address < 2**64:
        return f"address {tmap.address:#x} is not a 64-bit multiple of 16"
    for name, values, low, high in (
        ("dims", tmap.dims, 1, 2**32),
        ("box", tmap.box, 1, 256),
        ("element_strides", tmap.element_strides, 1, 8),
    ):
        if not all(low <= value <= high for value in values):
            return f"{name} {values} must lie in {low}..{high}"
    used = [stride for stride, extent in zip(tmap.strides, tmap.dims[1:], strict=True) if extent > 1]
    if not all(_is_legal_stride(stride) for stride in used):
        return f"strides {tmap.strides} must be multiples of 16 bytes below 2^40 (dims {tmap.dims})"
    for name, value, allowed in (
        ("swizzle", tmap.swizzle, SPANS),
        ("interleave", tmap.interleave, _INTERLEAVES),
        ("l2_promotion", tmap.l2_promotion, _PROMOTIONS),
        ("oob_fill", tmap.oob_fill, _FILLS),
    ):
        if value not in allowed:
            return f"{name} {value!r} is not one of {allowed}"
    inner_bytes = tmap.box[0] * ELEMENT_TYPES[tmap.dtype].size_bytes
    if tmap.interleave == 0 and inner_bytes % 16:
        return f"inner box of {inner_bytes} bytes is not a multiple of 16"
    if tmap.interleave == 0 and tmap.swizzle and inner_bytes > tmap.swizzle:
        return f"inner box of {inner_bytes} bytes exceeds the swizzle span of {tmap.swizzle}"
    return None


def _is_legal_stride(stride: int) -> bool:
    return 0 <= stride < 2**40 and stride % 16 == 0


def repaired(tmap: TensorMap) -> TensorMap:
    """The map with a legal stride for every dim of extent 1: the bytes of the inner dims, rounded up to 16.

    Such a stride is never used to reach an element, but the encoder checks it. Source: docs/formats.md section 2.
    """
    strides = list(tmap.strides)
    inner_bytes = tmap.dims[0] * tmap.element_bytes
    for d, extent in enumerate(tmap.dims[1:]):
        if extent == 1:
            strides[d] = (inner_bytes + 15) // 16 * 16
        inner_bytes *= extent
        if inner_bytes >= 2**40:
            inner_bytes = 16  # past what a stride can hold any legal one does; the launcher takes this one
    return replace(tmap, strides=tuple(strides))


def _bits(word: int, low: int, width: int) -> int:
    return (word >> low) & ((1 << width) - 1)


def pack(tmap: TensorMap) -> bytes:
    """The 128 bytes of a tensor map.

    Raises: SimulationError if the stride of a dim of extent 1 cannot be encoded; `repaired` gives it a legal one.
    Source: ptx-semantics.md 8.6.
    """
    if not all(_is_legal_stride(stride) for stride in tmap.strides):
        raise SimulationError(f"tensor map: strides {tmap.strides} cannot be encoded; pass the map through `repaired`")
    element = ELEMENT_TYPES[tmap.dtype]
    pad = 5 - tmap.rank
    strides = [stride >> 4 for stride in tmap.strides] + [0] * pad
    last = [extent - 1 for extent in tmap.dims] + [0] * pad
    box = [extent - 1 for extent in tmap.box] + [0] * pad
    steps = [step - 1 for step in tmap.element_strides] + [0] * pad
    low = [stride & 0xFFFFFFFF for stride in strides]
    kind = (
        (tmap.rank - 1) << 4
        | element.code << 7
        | _INTERLEAVES.index(tmap.interleave) << 11
        | SPANS.index(tmap.swizzle) << 13
        | _FILLS.index(tmap.oob_fill) << 15
        | int(element.is_tf32) << 16
        | _PROMOTIONS.index(tmap.l2_promotion) << 17
    )
    words = (
        tmap.address,
        kind | low[0] << 32,
        low[1] | low[2] << 32,
        low[3] | sum((stride >> 32) << (32 + 4 * d) for d, stride in enumerate(strides)),
        last[0] | last[1] << 32,
        last[2] | last[3] << 32,
        last[4] | sum(step << (32 + 3 * d) for d, step in enumerate(steps)) | box[0] << 56,
        sum(extent << (8 * d) for d, extent in enumerate(box[1:])),
    )
    return struct.pack("<8Q", *words).ljust(SIZE_BYTES, b"\0")


def unpack(data: bytes) -> TensorMap:
    """Reads a 128-byte tensor map; only the first 64 bytes carry meaning.

    Raises: SimulationError if the length, a code or a value is not one that `pack` writes.
    Source: ptx-semantics.md 8.6.
    """
    if len(data) != SIZE_BYTES:
        raise SimulationError(f"tensor map: {len(data)} bytes given, a tensor map has {SIZE_BYTES}")
    words = struct.unpack("<8Q", data[:64])
    kind = words[1]
    rank = _bits(kind, 4, 3) + 1
    if rank > 5:
        raise SimulationError(f"tensor map: rank {rank} is not in 1..5; the bytes are no tensor map")
    code, is_tf32 = _bits(kind, 7, 4), bool(_bits(kind, 16, 1))
    if (code, is_tf32) not in _TYPE_NAMES:
        raise SimulationError(f"tensor map: element type code {code} (tf32 flag {int(is_tf32)}) is unknown")
    interleave = _bits(kind, 11, 2)
    if interleave >= len(_INTERLEAVES):
        raise SimulationError(f"tensor map: interleave code {interleave} is unknown; allowed: 0, 1, 2")
    low = (words[1] >> 32, words[2] & 0xFFFFFFFF, words[2] >> 32, words[3] & 0xFFFFFFFF)
    strides = [(low[d] | _bits(words[3], 32 + 4 * d, 4) << 32) << 4 for d in range(4)]
    last = [_bits(words[4 + d // 2], 32 * (d % 2), 32) for d in range(5)]
    box = [_bits(words[6], 56, 8), *(_bits(words[7], 8 * d, 8) for d in range(4))]
    return TensorMap(
        address=words[0],
        dtype=_TYPE_NAMES[code, is_tf32],
        dims=tuple(extent + 1 for extent in last[:rank]),
        strides=tuple(strides[: rank - 1]),
        box=tuple(extent + 1 for extent in box[:rank]),
        element_strides=tuple(_bits(words[6], 32 + 3 * d, 3) + 1 for d in range(rank)),
        swizzle=SPANS[_bits(kind, 13, 2)],
        interleave=_INTERLEAVES[interleave],
        l2_promotion=_PROMOTIONS[_bits(kind, 17, 2)],
        oob_fill=_FILLS[_bits(kind, 15, 1)],
    )
