"""Sweeps: one function of one f32 over whole ranges of bit patterns, kept as digests of what the hardware wrote.

A sweep's kernel makes its inputs itself, x_i = first + step * i as bit patterns, so a recording needs no input, and of
the output only a SHA-256 for each segment: millions of results in a few kilobytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fa4build.numerics.exp2 import exp2_emulated
from fa4build.numerics.kernel_blocks import definitions, polynomials
from fa4build.simulate.units import mufu
from tests.simulate.probes.probe import INPUT, OUTPUT, THREAD, Probe, kernel_text, unwritten

THREADS = 1024
FIELD = 1 << 23  # bit patterns of one sign and exponent field
SIGN = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The bit patterns first, first + step, ...: `count` of them."""

    first: int
    step: int
    count: int

    def patterns(self) -> np.ndarray:
        """The inputs as u32."""
        places = np.arange(self.count, dtype=np.uint64) * np.uint64(self.step) + np.uint64(self.first)
        return places.astype(np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A kernel over segments.

    ptx: module text; the kernel reads first, step and count from its input and writes `results` words for each input.
    expected: u32 inputs (n,) -> u32 words (n, results).
    """

    name: str
    ptx: str
    results: int
    segments: tuple[Segment, ...]
    expected: Callable[[np.ndarray], np.ndarray]

    def probe(self, segment: Segment) -> Probe:
        """The launch for one segment."""
        return Probe(
            name=self.name,
            ptx=self.ptx,
            threads=THREADS,
            shared_bytes=0,
            input=np.array([segment.first, segment.step, segment.count], dtype=np.uint32),
            output=unwritten(segment.count * self.results),
            expected=lambda words: self.expected(segment.patterns()).reshape(-1),
        )


def digest(words: np.ndarray) -> str:
    """SHA-256 of u32 words, little endian."""
    return hashlib.sha256(np.ascontiguousarray(words, dtype="<u4")).hexdigest()


def _sweep_text(name: str, operations: list[str]) -> str:
    """A kernel that stores %r20 after each operation on %r10, for every input of the segment."""
    lines = "\n".join(
        f"{operation}\n\tst.global.b32 \t[%rd7+{4 * number}], %r20;" for number, operation in enumerate(operations)
    )
    body = f"""
\tld.global.b32 \t%r11, [{INPUT}];
\tld.global.b32 \t%r12, [{INPUT}+4];
\tld.global.b32 \t%r13, [{INPUT}+8];
\tmov.b32 \t%r3, {THREAD};
\tsetp.ge.u32 \t%p1, %r3, %r13;
\t@%p1 bra \t$L__end;
$L__next:
\tmad.lo.s32 \t%r10, %r3, %r12, %r11;
\tmul.wide.u32 \t%rd5, %r3, {4 * len(operations)};
\tadd.s64 \t%rd7, {OUTPUT}, %rd5;
{lines}
\tadd.s32 \t%r3, %r3, {THREADS};
\tsetp.lt.u32 \t%p1, %r3, %r13;
\t@%p1 bra \t$L__next;
$L__end:"""
    return kernel_text(name, THREADS, body)


def _bits(value: float) -> str:
    return f"0f{int(np.float32(value).view(np.uint32)):08X}"


def _emulation_text(degree: int) -> str:
    """`exp2_emulated_pair` for one element: the same operations without the packing, which sm_90a does not have."""
    constants = definitions("softmax/exp2_emulation.py", "ROUND_DOWN_TO_INTEGER", "SMALLEST_EXPONENT")
    shift, smallest = _bits(constants["ROUND_DOWN_TO_INTEGER"]), _bits(constants["SMALLEST_EXPONENT"])
    *lower, leading = polynomials()[degree]
    lines = [
        f"max.f32 \t%r14, %r10, {smallest};",
        f"add.rm.ftz.f32 \t%r15, %r14, {shift};",
        f"sub.rn.f32 \t%r16, %r15, {shift};",
        "sub.rn.f32 \t%r17, %r14, %r16;",
        f"mov.b32 \t%r18, {_bits(leading)};",
        *(f"fma.rn.f32 \t%r18, %r18, %r17, {_bits(coefficient)};" for coefficient in reversed(lower)),
        "shl.b32 \t%r19, %r15, 23;",
        "add.s32 \t%r20, %r19, %r18;",
    ]
    return "\n".join(f"\t{line}" for line in lines)


def _emulation_segments() -> tuple[Segment, ...]:
    """16,384 inputs of each binade from 2^-24 to 2^7 (positive) or 2^13 (negative), zero, subnormals, -inf and NaN."""
    positive, negative = [0, *range(103, 134)], [0, *range(103, 141), 255]
    firsts = [field * FIELD for field in positive] + [SIGN + field * FIELD for field in negative]
    return tuple(Segment(first=first, step=512, count=FIELD // 512) for first in firsts)


def _emulation_expected(patterns: np.ndarray) -> np.ndarray:
    x = patterns.view(np.float32)
    with np.errstate(all="ignore"):
        return np.stack([exp2_emulated(x, degree).view(np.uint32) for degree in sorted(polynomials())], axis=1)


EXP2_EMULATION = Sweep(
    name="exp2_emulation",
    ptx=_sweep_text("exp2_emulation", [_emulation_text(degree) for degree in sorted(polynomials())]),
    results=len(polynomials()),
    segments=_emulation_segments(),
    expected=_emulation_expected,
)

MUFU_ALL_FIELDS = Sweep(
    name="mufu_all_fields",
    ptx=_sweep_text("mufu_all_fields", [f"\t{f}.approx.ftz.f32 \t%r20, %r10;" for f in ("ex2", "rcp", "lg2")]),
    results=3,
    segments=tuple(Segment(first=field * FIELD, step=4096, count=FIELD // 4096) for field in range(512)),
    expected=lambda x: np.stack([mufu.ex2_ftz(x), mufu.rcp_ftz(x), mufu.lg2_ftz(x)], axis=1),
)

LG2_ALL_POSITIVE = Sweep(
    name="lg2_all_positive",
    ptx=_sweep_text("lg2_all_positive", ["\tlg2.approx.ftz.f32 \t%r20, %r10;"]),
    results=1,
    segments=tuple(Segment(first=field * FIELD, step=1, count=FIELD) for field in range(256)),
    expected=lambda x: mufu.lg2_ftz(x)[:, None],
)

SWEEPS = {sweep.name: sweep for sweep in (EXP2_EMULATION, MUFU_ALL_FIELDS, LG2_ALL_POSITIVE)}
