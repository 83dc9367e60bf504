"""Contract: the multi-function unit in C gives the bits of mufu.py.

ex2 and rcp are checked for every mantissa of an octave and for nasty and random patterns, lg2 and the correctly rounded
functions for the latter; tanh, sin and cos also where float64 cannot decide, against 200 bits.
"""

import mpmath
import numpy as np
import pytest

from fa4build.simulate.units import mufu
from tests.simulate.native.units_library import lanes, nasty_f32, random_f32, same

MEASURED = {"ex2_ftz": mufu.ex2_ftz, "ex2": mufu.ex2, "lg2_ftz": mufu.lg2_ftz, "rcp_ftz": mufu.rcp_ftz}


def inputs(count: int = 1 << 18, seed: int = 21) -> np.ndarray:
    """Nasty patterns and their neighbours, random ones."""
    nasty = nasty_f32()
    return np.concatenate([nasty, nasty + np.uint32(1), nasty - np.uint32(1), random_f32(count, seed)])


def whole_numbers() -> np.ndarray:
    """-160 to 160 and the values beside them: octaves of ex2."""
    bits = np.arange(-160, 161).astype(np.float32).view(np.uint32).astype(np.int64)
    return np.concatenate([bits + d for d in (-2, -1, 0, 1, 2)]).clip(0, 2**32 - 1).astype(np.uint32)


@pytest.mark.parametrize("name", MEASURED)
def test_measured_functions_equal_python(name):
    """Every kind of input."""
    a = np.concatenate(
        [inputs(), whole_numbers(), random_f32(1 << 12, 22) & np.uint32(0x3FFFFFFF) | np.uint32(0x80000000)]
    )
    same(lanes(f"{name}_lanes", a, table=True), MEASURED[name](a), a)


OCTAVES = [("ex2_ftz", 0x3F800000), ("ex2_ftz", 0xC2FE0000), ("ex2", 0xC3000000), ("rcp_ftz", 0x3F800000),
           ("rcp_ftz", 0xFE800000), ("lg2_ftz", 0x3F000000)]  # fmt: skip


@pytest.mark.parametrize(("name", "first"), OCTAVES)
def test_an_octave_is_right_at_every_eleventh_mantissa(name, first):
    """All parts of the tables."""
    a = np.arange(first, first + (1 << 23), 11, dtype=np.uint64).astype(np.uint32)
    same(lanes(f"{name}_lanes", a, table=True), MEASURED[name](a), a)


@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("rsqrt", mufu.rsqrt_approx),
        ("sqrt_approx", mufu.sqrt_approx),
        ("sin", mufu.sin_approx),
        ("cos", mufu.cos_approx),
    ],
)
def test_correctly_rounded_functions_equal_python(name, function, ftz):
    """With and without ftz."""
    a = inputs(1 << 16, 23)
    same(lanes(f"{name}_lanes", a, args=(int(ftz),)), function(a, ftz), a)


def test_tanh_equals_python():
    """Small values, the range in which it bends, and where it is 1."""
    rng = np.random.default_rng(24)
    spread = rng.uniform(-11, 11, 1 << 16).astype(np.float32).view(np.uint32)
    a = np.concatenate([inputs(1 << 15, 25), spread])
    same(lanes("tanh_lanes", a), mufu.tanh_approx(a), a)


def beside(value: np.float32) -> tuple[np.float32, ...]:
    """It and its neighbours."""
    return np.nextafter(value, np.float32(-9)), value, np.nextafter(value, np.float32(9))


def hardest(function, values: np.ndarray, count: int) -> np.ndarray:
    """Of some values those whose results come closest to the middle between two f32."""
    exact = function(values.astype(np.float64))
    tail = exact.view(np.uint64) & np.uint64(0x1FFFFFFF)
    distance = np.abs(tail.astype(np.int64) - 0x10000000)
    return values[np.argsort(distance)[:count]]


@pytest.mark.parametrize(
    ("name", "function", "exact"),
    [("tanh", np.tanh, mpmath.tanh), ("sin", np.sin, mpmath.sin), ("cos", np.cos, mpmath.cos)],
)
def test_results_near_a_tie_are_rounded_by_more_bits(name, function, exact):
    """The nearest to ties among two million values, decided with 200 bits."""
    rng = np.random.default_rng(26)
    values = np.concatenate([rng.uniform(0.01, 9, 1 << 20), np.exp(rng.uniform(0, 80, 1 << 20))]).astype(np.float32)
    if name == "tanh":
        values = values[: 1 << 20]
    a = hardest(function, values, 300)
    with mpmath.workprec(200):
        wide = [exact(mpmath.mpf(float(x))) for x in a]
        nearest = [np.float32(float(mpmath.mpf(mpmath.nstr(w, 60)))) for w in wide]
        # float64 in between may round twice: take the f32 beside that is nearer to the exact value.
        best = [
            min(beside(n), key=lambda f, w=w: abs(mpmath.mpf(float(f)) - w)) for n, w in zip(nearest, wide, strict=True)
        ]
    args = () if name == "tanh" else (0,)
    same(
        lanes(f"{name}_lanes", a.view(np.uint32), args=args),
        np.array(best, np.float32).view(np.uint32),
        a.view(np.uint32),
    )
