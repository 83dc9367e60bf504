"""Contract: `units_mma` gives the bits of tensor_core.mma_tile.

Every operand type, shapes of wgmma and tcgen05 and odd ones, products from subnormal to overflowing, zeros, infinities
and NaN in each operand; rows that are masked stay.
"""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4build.simulate.units.tensor_core import OPERAND_TYPES, mma_tile
from tests.simulate.native.units_library import library, same

TYPES = ("bf16", "f16", "tf32", "e4m3", "e5m2")
# Sign, exponent and mantissa bits of each type's patterns.
LAYOUT = {"bf16": (16, 8, 7), "f16": (16, 5, 10), "tf32": (32, 8, 23), "e4m3": (8, 4, 3), "e5m2": (8, 5, 2)}
CONTENTS = ("normal", "wide", "any", "tiny", "low", "small", "high", "huge", "sparse")


def operand(rng, kind: str, shape: tuple[int, int], content: str) -> np.ndarray:
    """Bit patterns. normal: near 1; wide: many exponents; any: also infinities and NaN; tiny, huge: the format's ends;
    low, small, high: products beside the least and the largest f32; sparse: mostly zeros of both signs.
    """
    width, exponent_bits, mantissa_bits = LAYOUT[kind]
    top = (1 << exponent_bits) - 1
    bias = top >> 1
    low, high = {
        "normal": (bias - 2, bias + 2), "wide": (1, top - 1), "any": (0, top), "tiny": (0, 2),
        "low": (bias // 2 - 9, bias // 2 - 5), "small": (bias // 2 - 3, bias // 2 + 3),
        "high": (bias + bias // 2, bias + bias // 2), "huge": (top - 3, top - 1),
        "sparse": (bias - 3, bias + 3),
    }[content]  # fmt: skip
    low, high = max(low, 0), max(high, 1)
    exponent = rng.integers(low, high + 1, shape, dtype=np.uint64)
    mantissa = rng.integers(0, 1 << mantissa_bits, shape, dtype=np.uint64)
    sign = rng.integers(0, 2, shape, dtype=np.uint64)
    if content == "sparse":
        zero = rng.random(shape) < 0.9
        exponent, mantissa = np.where(zero, 0, exponent), np.where(zero, 0, mantissa)
    bits = sign << np.uint64(width - 1) | exponent << np.uint64(mantissa_bits) | mantissa
    return bits.astype(OPERAND_TYPES[kind].bits_type)


def accumulator(rng, shape: tuple[int, int], content: str) -> np.ndarray:
    """f32 patterns of the same kinds."""
    return operand(rng, "tf32", shape, content).astype(np.uint32)


def mma(a, b, c, kind: str, b_kind: str | None = None, rows: np.ndarray | None = None, stride: int | None = None):
    """`units_mma` on copies; `c` None: not accumulated, over poison."""
    m, k = a.shape
    n = b.shape[0]
    stride = stride or n
    d = np.full((m, stride), 0x7FC1_7FC1, np.uint32)
    if c is not None:
        d[:, :n] = c
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    mask = None if rows is None else ctypes.c_void_p(rows.ctypes.data)
    status = library().units_mma(
        m, n, k, TYPES.index(kind), ctypes.c_void_p(a.ctypes.data), TYPES.index(b_kind or kind),
        ctypes.c_void_p(b.ctypes.data), ctypes.c_void_p(d.ctypes.data), ctypes.c_ssize_t(stride), int(c is not None),
        mask,
    )  # fmt: skip
    assert status == 0
    return d


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("m", "n", "steps"), [(64, 8, 1), (64, 256, 1), (64, 128, 4), (128, 64, 2), (256, 256, 1), (3, 41, 2)]
)
def test_shapes_of_instructions_and_odd_ones(kind, m, n, steps):
    """Ordinary values, accumulated and not."""
    rng = np.random.default_rng(m * n)
    k = OPERAND_TYPES[kind].k_step * steps
    a, b = operand(rng, kind, (m, k), "normal"), operand(rng, kind, (n, k), "normal")
    c = accumulator(rng, (m, n), "normal")
    same(mma(a, b, c, kind), mma_tile(a, b, c, kind))
    same(mma(a, b, None, kind), mma_tile(a, b, None, kind))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("a_content", CONTENTS)
@pytest.mark.parametrize("b_content", CONTENTS)
def test_every_range_of_exponents(kind, a_content, b_content):
    """Products that underflow, overflow, cancel, or are not finite."""
    rng = np.random.default_rng(CONTENTS.index(a_content) * 9 + CONTENTS.index(b_content))
    k = 2 * OPERAND_TYPES[kind].k_step
    a, b = operand(rng, kind, (24, k), a_content), operand(rng, kind, (40, k), b_content)
    for c_content in ("normal", "any", "tiny", "sparse"):
        c = accumulator(rng, (24, 40), c_content)
        same(mma(a, b, c, kind), mma_tile(a, b, c, kind))
    same(mma(a, b, None, kind), mma_tile(a, b, None, kind))


@pytest.mark.parametrize("kind", TYPES)
def test_one_infinity_or_nan_touches_only_its_row_or_column(kind):
    """A single one in A, in B, and in C."""
    rng = np.random.default_rng(31)
    k = OPERAND_TYPES[kind].k_step
    _, exponent_bits, mantissa_bits = LAYOUT[kind]
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    for odd in (infinity, infinity | (1 << mantissa_bits) - 1):
        for where in "abc":
            a, b = operand(rng, kind, (16, k), "normal"), operand(rng, kind, (48, k), "sparse")
            c = accumulator(rng, (16, 48), "normal")
            {"a": a, "b": b, "c": c}[where][5, 3] = 0x7F800000 if where == "c" else odd
            same(mma(a, b, c, kind), mma_tile(a, b, c, kind))


@pytest.mark.parametrize(("kind", "b_kind"), [("e4m3", "e5m2"), ("e5m2", "e4m3")])
def test_8_bit_types_mix(kind, b_kind):
    """kind::f8f6f4 with two types."""
    rng = np.random.default_rng(32)
    a, b = operand(rng, kind, (64, 64), "wide"), operand(rng, b_kind, (32, 64), "wide")
    c = accumulator(rng, (64, 32), "normal")
    same(mma(a, b, c, kind, b_kind), mma_tile(a, b, c, kind, b_kind))


def test_masked_rows_and_the_columns_behind_n_stay():
    """D inside a wider array, half of its rows suppressed."""
    rng = np.random.default_rng(33)
    a, b = operand(rng, "bf16", (64, 16), "normal"), operand(rng, "bf16", (24, 16), "normal")
    rows = rng.integers(0, 2**32, 2, dtype=np.uint32)
    on = np.unpackbits(rows.view(np.uint8), bitorder="little").astype(bool)
    c = accumulator(rng, (64, 24), "normal")
    d = mma(a, b, c, "bf16", rows=rows, stride=40)
    same(d[:, :24], np.where(on[:, None], mma_tile(a, b, c, "bf16"), c))
    assert (d[:, 24:] == 0x7FC17FC1).all()


@pytest.mark.parametrize(
    ("m", "n", "k", "a_type", "b_type"),
    [(0, 8, 16, 0, 0), (64, 0, 16, 0, 0), (64, 257, 16, 0, 0), (64, 8, 8, 0, 0), (64, 8, -16, 0, 0), (64, 8, 16, 0, 2)],
)
def test_arguments_that_do_not_fit_are_refused(m, n, k, a_type, b_type):
    """-1, and nothing is touched."""
    assert library().units_mma(m, n, k, a_type, None, b_type, None, None, ctypes.c_ssize_t(n), 1, None) == -1


@given(
    kind=st.sampled_from(TYPES), seed=st.integers(0, 2**32 - 1), m=st.integers(1, 20), n=st.integers(1, 70),
    steps=st.integers(1, 2), a=st.sampled_from(CONTENTS), b=st.sampled_from(CONTENTS), c=st.sampled_from(CONTENTS),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_any_shape_and_content(kind, seed, m, n, steps, a, b, c):
    """Small random products."""
    rng = np.random.default_rng(seed)
    k = steps * OPERAND_TYPES[kind].k_step
    a_bits, b_bits = operand(rng, kind, (m, k), a), operand(rng, kind, (n, k), b)
    start = accumulator(rng, (m, n), c)
    same(mma(a_bits, b_bits, start, kind), mma_tile(a_bits, b_bits, start, kind))
