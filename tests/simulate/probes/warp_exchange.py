"""Probes of what lanes exchange: shuffles, votes, elections, and the fragments that stmatrix lays out."""

from __future__ import annotations

import numpy as np

from tests.simulate.probes.probe import (
    INPUT,
    OUTPUT,
    SHARED,
    THREAD,
    UNWRITTEN,
    Probe,
    dump_shared,
    fill_shared,
    kernel_text,
    unwritten,
)

LANES = 32

# (mode, b, c): whole warp, and segments of 8 and 4 lanes (c = (32 - width) << 8 | clamp; clamp 0 for `up`).
_SHUFFLES = tuple(
    (mode, b, (32 - width) << 8 | (0 if mode == "up" else 31))
    for mode in ("up", "down", "bfly", "idx")
    for width in (32, 8, 4)
    for b in (0, 1, 2, 3, 7, 16, 30)
)


def _shuffle_source(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """(lane read, whether it is in range), from the PTX manual's pseudo code (9.7.9.6)."""
    segment, clamp = c >> 8 & 31, c & 31
    highest, lowest = (lane & segment) | (clamp & ~segment), lane & segment
    if mode == "up":
        j, ok = lane - b, lane - b >= highest
    elif mode == "down":
        j, ok = lane + b, lane + b <= highest
    elif mode == "bfly":
        j, ok = lane ^ b, lane ^ b <= highest
    else:
        j = lowest | (b & ~segment)
        ok = j <= highest
    return (j if ok else lane), ok


def _shuffle_probe() -> Probe:
    name = "shuffles"
    lines = []
    for number, (mode, b, c) in enumerate(_SHUFFLES):
        lines.append(f"\tshfl.sync.{mode}.b32 \t%r20|%p2, %r10, {b}, {c}, -1;")
        lines.append("\tselp.b32 \t%r21, 1, 0, %p2;")
        lines.append(f"\tst.global.b32 \t[%rd6+{256 * number}], %r20;")
        lines.append(f"\tst.global.b32 \t[%rd6+{256 * number + 128}], %r21;")
    # idx with a different lane per thread: the input's low 5 bits.
    lines.append("\tand.b32 \t%r11, %r10, 31;\n\tshfl.sync.idx.b32 \t%r20, %r10, %r11, 31, -1;")
    lines.append(f"\tst.global.b32 \t[%rd6+{256 * len(_SHUFFLES)}], %r20;")
    body = f"""
\tmul.wide.u32 \t%rd5, {THREAD}, 4;
\tadd.s64 \t%rd7, {INPUT}, %rd5;
\tadd.s64 \t%rd6, {OUTPUT}, %rd5;
\tld.global.b32 \t%r10, [%rd7];
{chr(10).join(lines)}"""

    def expected(words: np.ndarray) -> np.ndarray:
        rows = []
        for mode, b, c in _SHUFFLES:
            sources = [_shuffle_source(mode, lane, b, c) for lane in range(LANES)]
            rows += [[int(words[lane]) for lane, _ in sources], [int(ok) for _, ok in sources]]
        rows.append([int(words[int(word) & 31]) for word in words])
        return np.array(rows, dtype=np.uint32).reshape(-1)

    return Probe(
        name=name,
        ptx=kernel_text(name, LANES, body),
        threads=LANES,
        shared_bytes=0,
        input=np.random.default_rng(21).integers(0, 2**32, LANES, dtype=np.uint64).astype(np.uint32),
        output=unwritten(LANES * (2 * len(_SHUFFLES) + 1)),
        expected=expected,
    )


_ELECT_MASKS = (0xFFFFFFFF, 0xFFFFFFE0, 0x80000000, 0x00010100)


def _vote_probe() -> Probe:
    """vote.sync.ballot of each input bit, elect.sync with whole and partial member masks."""
    name = "votes"
    lines = []
    for bit in range(8):
        lines.append(f"\tand.b32 \t%r11, %r10, {1 << bit};\n\tsetp.ne.b32 \t%p2, %r11, 0;")
        lines.append(f"\tvote.sync.ballot.b32 \t%r20, %p2, -1;\n\tst.global.b32 \t[%rd6+{128 * bit}], %r20;")
    for number, mask in enumerate(_ELECT_MASKS):
        offset = 128 * (8 + 2 * number)
        # Only the lanes of the mask may execute the election; the others skip it.
        lines.append(f"\tmov.b32 \t%r12, {mask};\n\tshr.u32 \t%r13, %r12, {THREAD};\n\tand.b32 \t%r13, %r13, 1;")
        lines.append(f"\tsetp.eq.b32 \t%p3, %r13, 0;\n\t@%p3 bra \t$L__skip{number};")
        lines.append(f"\telect.sync \t%r20|%p2, {mask};\n\tselp.b32 \t%r21, 1, 0, %p2;")
        lines.append(f"\tst.global.b32 \t[%rd6+{offset}], %r20;\n\tst.global.b32 \t[%rd6+{offset + 128}], %r21;")
        lines.append(f"$L__skip{number}:\n\tbar.warp.sync \t-1;")
    body = f"""
\tmul.wide.u32 \t%rd5, {THREAD}, 4;
\tadd.s64 \t%rd7, {INPUT}, %rd5;
\tadd.s64 \t%rd6, {OUTPUT}, %rd5;
\tld.global.b32 \t%r10, [%rd7];
{chr(10).join(lines)}"""

    def expected(words: np.ndarray) -> np.ndarray:
        rows = []
        for bit in range(8):
            ballot = sum((int(word) >> bit & 1) << lane for lane, word in enumerate(words))
            rows.append([ballot] * LANES)
        for mask in _ELECT_MASKS:
            leader = (mask & -mask).bit_length() - 1
            member = [mask >> lane & 1 for lane in range(LANES)]
            rows.append([leader if m else UNWRITTEN for m in member])
            rows.append([int(lane == leader) if m else UNWRITTEN for lane, m in enumerate(member)])
        return np.array(rows, dtype=np.uint32).reshape(-1)

    return Probe(
        name=name,
        ptx=kernel_text(name, LANES, body),
        threads=LANES,
        shared_bytes=0,
        input=np.random.default_rng(22).integers(0, 2**32, LANES, dtype=np.uint64).astype(np.uint32),
        output=unwritten(LANES * (8 + 2 * len(_ELECT_MASKS))),
        expected=expected,
    )


# (matrices, transposed, first byte, bytes between rows): rows 16 bytes wide, 16-byte aligned, in three pitches.
_STORES = ((1, False, 0, 16), (2, False, 256, 32), (4, False, 1024, 48), (4, True, 2816, 16), (2, True, 3584, 80))
_STORE_BYTES = 6144


def _fragment(words: np.ndarray, register: int) -> np.ndarray:
    """The 8 x 8 matrix of 16-bit elements that register `register` of 32 lanes holds (PTX 9.7.14.5.16)."""
    matrix = np.zeros((8, 8), dtype=np.uint16)
    for lane in range(LANES):
        word = int(words[LANES * register + lane])
        matrix[lane // 4, 2 * (lane % 4)], matrix[lane // 4, 2 * (lane % 4) + 1] = word & 0xFFFF, word >> 16
    return matrix


def _stmatrix_probe() -> Probe:
    name = "stmatrix"
    lines = []
    for count, transposed, start, pitch in _STORES:
        registers = ", ".join(f"%r{20 + j}" for j in range(count))
        trans = ".trans" if transposed else ""
        lines.append(f"\tmul.lo.s32 \t%r11, {THREAD}, {pitch};\n\tadd.s32 \t%r11, %r11, {SHARED};")
        lines.append(f"\tstmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 \t[%r11+{start}], {{{registers}}};")
    loads = "\n".join(f"\tld.global.b32 \t%r{20 + j}, [%rd7+{4 * LANES * j}];" for j in range(4))
    body = (
        fill_shared(LANES, _STORE_BYTES // 4, None)
        + f"""
\tmul.wide.u32 \t%rd5, {THREAD}, 4;
\tadd.s64 \t%rd7, {INPUT}, %rd5;
{loads}
{chr(10).join(lines)}
\tbar.sync \t0;"""
        + dump_shared(LANES, 0, _STORE_BYTES // 4)
    )

    def expected(words: np.ndarray) -> np.ndarray:
        memory = np.full(_STORE_BYTES, UNWRITTEN & 0xFF, dtype=np.uint8)
        for count, transposed, start, pitch in _STORES:
            for j in range(count):
                matrix = _fragment(words, j)
                for row, values in enumerate(matrix.T if transposed else matrix):
                    at = start + (8 * j + row) * pitch
                    memory[at : at + 16] = np.ascontiguousarray(values).view(np.uint8)
        return memory.view(np.uint32)

    return Probe(
        name=name,
        ptx=kernel_text(name, LANES, body),
        threads=LANES,
        shared_bytes=_STORE_BYTES,
        input=np.random.default_rng(23).integers(0, 2**32, 4 * LANES, dtype=np.uint64).astype(np.uint32),
        output=unwritten(_STORE_BYTES // 4),
        expected=expected,
    )


PROBES = (_shuffle_probe(), _vote_probe(), _stmatrix_probe())
