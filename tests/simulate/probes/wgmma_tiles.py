"""Probes of wgmma: operand layouts in shared memory and registers, element types, chained K steps.

Shared memory holds a fixed image of random numbers; each configuration reads its operands through its own descriptors,
so any image will do: what is tested is which bytes an element comes from, and what the unit computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa4build.simulate.hardware.smem_descriptor import SmemDescriptor, load_matrix
from fa4build.simulate.units.tensor_core import OPERAND_TYPES, mma_tile
from tests.simulate.probes.probe import (
    INPUT,
    OUTPUT,
    SHARED_BASE,
    THREAD,
    Probe,
    fill_shared,
    kernel_text,
    unwritten,
)

THREADS = 128
N = 64
_IMAGE_BYTES = 32768
_A_START, _B_START = 0, 16384  # offsets in the image
_FRAGMENT_WORDS = 4 * THREADS  # A registers of one K step, behind the image in the input
_STEPS = 2
_SWIZZLE_CODE = {0: 0, 128: 1, 64: 2, 32: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One chain of `_STEPS` wgmma. majors: `k` or `mn`. from_registers: A is a register fragment."""

    kind: str
    a_major: str
    b_major: str
    swizzle: int
    from_registers: bool = False

    @property
    def elem_bytes(self) -> int:
        return OPERAND_TYPES[self.kind].bits_type.itemsize


_CONFIGURATIONS = (
    *(Configuration(kind="bf16", a_major="k", b_major="k", swizzle=swizzle) for swizzle in (128, 64, 32, 0)),
    *(Configuration(kind="bf16", a_major="mn", b_major="mn", swizzle=swizzle) for swizzle in (128, 64, 32, 0)),
    Configuration(kind="bf16", a_major="k", b_major="mn", swizzle=128),
    Configuration(kind="f16", a_major="k", b_major="k", swizzle=128),
    Configuration(kind="tf32", a_major="k", b_major="k", swizzle=128),
    Configuration(kind="bf16", a_major="k", b_major="mn", swizzle=128, from_registers=True),
)


def _descriptor(config: Configuration, start: int, major: str, step: int) -> SmemDescriptor:
    """Descriptor of K step `step` of a 64-row operand at `start` of the image, laid out without gaps."""
    span = config.swizzle
    if major == "k" and span:
        # Inside the span the start advances by 32 bytes; a span of 32 bytes continues in the next block of 64 rows.
        advance = 32 * step if span > 32 else 64 * span * step
        leading, stride = 16, 8 * span
    elif major == "k":
        leading, stride, advance = 128, 256, 2048 * step
    elif span:
        per_step = 16 * span  # 16 k rows of one span
        leading, stride, advance = _STEPS * per_step, 8 * span, per_step * step
    else:
        leading, stride, advance = 128, 256, 2048 * step
    return SmemDescriptor(start=SHARED_BASE + start + advance, leading_bytes=leading, stride_bytes=stride, swizzle=span)


def _word(desc: SmemDescriptor) -> int:
    return (
        desc.start >> 4
        | desc.leading_bytes >> 4 << 16
        | desc.stride_bytes >> 4 << 32
        | _SWIZZLE_CODE[desc.swizzle] << 62
    )


def _opcode(config: Configuration) -> str:
    k = 32 // config.elem_bytes
    return f"wgmma.mma_async.sync.aligned.m64n{N}k{k}.f32.{config.kind}.{config.kind}"


def _configuration_text(number: int, config: Configuration) -> str:
    registers = ", ".join(f"%r{100 + i}" for i in range(N // 2))
    lines = ["\twgmma.fence.sync.aligned;"]
    for step in range(_STEPS):
        b_word = _word(_descriptor(config, _B_START, config.b_major, step))
        # %r8 is 0: the first step replaces D, the others add to it.
        lines.append(f"\tmov.b64 \t%rd21, {b_word};\n\tsetp.{'eq' if step else 'ne'}.b32 \t%p2, %r8, 0;")
        majors = [config.b_major] if config.kind != "tf32" else []
        if config.from_registers:
            a = "{" + ", ".join(f"%r{40 + 4 * step + j}" for j in range(4)) + "}"
        else:
            lines.append(f"\tmov.b64 \t%rd20, {_word(_descriptor(config, _A_START, config.a_major, step))};")
            a = "%rd20"
            majors = [config.a_major, *majors] if majors else []
        transposes = "".join(f", {int(major == 'mn')}" for major in majors)
        lines.append(f"\t{_opcode(config)} \t{{{registers}}}, {a}, %rd21, %p2, 1, 1{transposes};")
    lines.append("\twgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned \t0;")
    for i in range(0, N // 2, 4):
        vector = ", ".join(f"%r{100 + i + j}" for j in range(4))
        lines.append(f"\tst.global.v4.b32 \t[%rd6+{4 * (N // 2) * THREADS * number + 4 * i}], {{{vector}}};")
    return "\n".join(lines)


def _d_fragment(d: np.ndarray) -> np.ndarray:
    """(64, N) -> registers (128, N/2) in thread order. Source: ptx-semantics.md 10."""
    thread, register = np.arange(THREADS)[:, None], np.arange(N // 2)[None, :]
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + 2 * (thread % 4) + register % 2
    return d[row, column]


def _a_matrix(words: np.ndarray) -> np.ndarray:
    """A registers (128, 4) of one K step -> (64, 16) 16-bit patterns. Source: ptx-semantics.md 10."""
    thread, register = np.arange(THREADS)[:, None], np.arange(4)[None, :]
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)
    k = 2 * (thread % 4) + 8 * (register // 2)
    a = np.zeros((64, 16), dtype=np.uint16)
    a[row, k], a[row, k + 1] = words & 0xFFFF, words >> 16
    return a


def _expected(words: np.ndarray) -> np.ndarray:
    window = np.zeros(SHARED_BASE + _IMAGE_BYTES, dtype=np.uint8)
    window[SHARED_BASE:] = words[: _IMAGE_BYTES // 4].view(np.uint8)
    fragments = words[_IMAGE_BYTES // 4 :].reshape(_STEPS, 4, THREADS)
    results = []
    for config in _CONFIGURATIONS:
        d, size = None, config.elem_bytes
        for step in range(_STEPS):
            b = load_matrix(
                window, _descriptor(config, _B_START, config.b_major, step), N, 32 // size, size, config.b_major
            )
            if config.from_registers:
                a = _a_matrix(fragments[step].T)
            else:
                desc = _descriptor(config, _A_START, config.a_major, step)
                a = load_matrix(window, desc, 64, 32 // size, size, config.a_major)
            d = mma_tile(a, b, d, config.kind)
        results.append(_d_fragment(d).reshape(-1))
    return np.concatenate(results)


def _probe() -> Probe:
    name = "wgmma_tiles"
    fragment_loads = "\n".join(
        f"\tld.global.b32 \t%r{40 + 4 * step + j}, [%rd7+{_IMAGE_BYTES + 4 * THREADS * (4 * step + j)}];"
        for step in range(_STEPS)
        for j in range(4)
    )
    text = "\n".join(_configuration_text(number, config) for number, config in enumerate(_CONFIGURATIONS))
    body = (
        fill_shared(THREADS, _IMAGE_BYTES // 4, INPUT)
        + f"""
\tmov.b32 \t%r8, 0;
\tmul.wide.u32 \t%rd5, {THREAD}, 4;
\tadd.s64 \t%rd7, {INPUT}, %rd5;
\tmul.wide.u32 \t%rd5, {THREAD}, {4 * (N // 2)};
\tadd.s64 \t%rd6, {OUTPUT}, %rd5;
{fragment_loads}
{text}"""
    )
    # Normal numbers of both signs; as f16 the same bits are numbers of about the same size.
    rng = np.random.default_rng(41)
    values = rng.standard_normal(_IMAGE_BYTES // 2 + 2 * _STEPS * _FRAGMENT_WORDS).astype(np.float32)
    halves = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return Probe(
        name=name,
        ptx=kernel_text(name, THREADS, body),
        threads=THREADS,
        shared_bytes=_IMAGE_BYTES,
        input=halves.view(np.uint32),
        output=unwritten(len(_CONFIGURATIONS) * THREADS * N // 2),
        expected=_expected,
    )


PROBES = (_probe(),)
