"""Contract: conversions of the native units give the bits of float_formats.py and moves.py.

Widening is checked for every code; narrowing for nasty and random patterns, and for values on and beside the ties of
the target format. Packed forms put their first source in the upper half.
"""

import ctypes

import numpy as np
import pytest

from fa4build.simulate.instructions.moves import to_integer
from fa4build.simulate.units import float_formats as ff
from tests.simulate.native.units_library import lanes, library, nasty_f32, one_by_one, random_f32, same

CODES_16 = np.arange(1 << 16, dtype=np.uint32)
CODES_8 = np.arange(256, dtype=np.uint32)
MODES = {"rzi": 1, "rni": 0, "rmi": 2, "rpi": 3}


def around(values: np.ndarray) -> np.ndarray:
    """Patterns, the middle between each and the next, and the neighbours of both."""
    values = np.sort(values.astype(np.int64))
    points = np.concatenate([values, (values[1:] + values[:-1]) // 2])
    return np.concatenate([points + d for d in (-1, 0, 1)]).clip(0, 2**32 - 1).astype(np.uint32)


def inputs(codes: np.ndarray) -> np.ndarray:
    """All ties of a format given by the f32 patterns of its positive codes, both signs; nasty and random patterns."""
    ties = around(codes & np.uint32(0x7FFFFFFF))
    return np.concatenate([ties, ties | np.uint32(0x80000000), nasty_f32(), random_f32(1 << 16, 11)])


BF16, F16 = ff.bf16_to_f32(CODES_16), ff.f16_to_f32(CODES_16)


@pytest.mark.parametrize(
    ("name", "code", "function"),
    [("bf16", BF16[:0x8000:7], ff.f32_to_bf16_rn), ("f16", F16[:0x8000:3], ff.f32_to_f16_rn)],
)
def test_narrowing_to_16_bits_rounds_ties_to_even(name, code, function):
    """Lanes, packed lanes."""
    a = inputs(code)
    b = a[::-1].copy()
    same(lanes(f"cvt_{name}_lanes", a), function(a).astype(np.uint32), a)
    packed = function(a).astype(np.uint32) << np.uint32(16) | function(b)
    same(lanes(f"cvt_{name}x2_lanes", a, b), packed, a, b)


def test_narrowing_one_value_also_cuts_and_saturates():
    """rn and rz, with and without .satfinite."""
    a = np.concatenate([inputs(F16[:0x8000:191])[::5], nasty_f32()])
    table = [("bf16", 0, ff.f32_to_bf16_rn, 0x7F7F), ("bf16", 1, ff.f32_to_bf16_rz, 0x7F7F),
             ("f16", 0, ff.f32_to_f16_rn, 0x7BFF), ("f16", 1, ff.f32_to_f16_rz, 0x7BFF)]  # fmt: skip
    for name, rounding, function, limit in table:
        plain = one_by_one(f"f32_to_{name}", a, args=(rounding, 0), result=ctypes.c_uint16)
        same(plain, function(a), a)
        saturated = one_by_one(f"f32_to_{name}", a, args=(rounding, 1), result=ctypes.c_uint16)
        same(saturated, ff.saturate_finite_16(function(a), limit), a)


def test_widening_of_16_bits_is_exact_for_every_code():
    """A NaN of f16 becomes canonical, one of bf16 keeps its payload; the upper half of a word is ignored."""
    noise = CODES_16 | np.uint32(0xABCD0000)
    same(lanes("cvt_f32_bf16_lanes", noise), BF16, CODES_16)
    same(lanes("cvt_f32_f16_lanes", noise), F16, CODES_16)
    same(one_by_one("bf16_to_f32", CODES_16), BF16, CODES_16)
    same(one_by_one("f16_to_f32", CODES_16), F16, CODES_16)


@pytest.mark.parametrize(
    ("name", "narrow", "widen"),
    [
        ("e4m3", ff.f32_to_e4m3_rn_satfinite, ff.e4m3_to_f32),
        ("e5m2", ff.f32_to_e5m2_rn_satfinite, ff.e5m2_to_f32),
    ],
)
def test_8_bit_formats_saturate_and_widen_exactly(name, narrow, widen):
    """Every code; all ties."""
    same(one_by_one(f"{name}_to_f32", CODES_8), widen(CODES_8), CODES_8)
    a = inputs(widen(CODES_8[:0x80]))
    same(one_by_one(f"f32_to_{name}", a[:4000], result=ctypes.c_uint8), narrow(a[:4000]), a)
    b = a[::-1].copy()
    packed = narrow(a).astype(np.uint32) << np.uint32(8) | narrow(b)
    same(lanes(f"cvt_{name}x2_lanes", a, b), packed, a, b)


def near_integers() -> np.ndarray:
    """Halves, wholes and their neighbours, limits of the integer types, nasty and random patterns."""
    halves = np.arange(-40, 41).astype(np.float32) / 2
    limits = np.array([2.0**e for e in (15, 16, 22, 23, 24, 31, 32, 62, 63, 64, 65)], np.float32)
    points = np.concatenate([halves, limits, -limits, limits - 0.5, 0.5 - limits]).view(np.uint32).astype(np.int64)
    near = np.concatenate([points + d for d in (-1, 0, 1)]).clip(0, 2**32 - 1).astype(np.uint32)
    return np.concatenate([near, nasty_f32(), random_f32(1 << 11, 12)])


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("mode", MODES)
def test_integers_saturate_and_nan_is_zero(mode, kind):
    """cvt.{rzi,rni,rmi,rpi}."""
    a = near_integers()
    bits = int(kind[1:])
    with np.errstate(all="ignore"):
        expected = to_integer(a.view(np.float32), mode, kind).view(f"u{bits // 8}").astype(np.uint64)
    got = one_by_one("f32_to_integer", a, args=(MODES[mode], bits, int(kind[0] == "s")), result=ctypes.c_uint64)
    same(got, expected, a)


@pytest.mark.parametrize("ftz", [0, 1])
@pytest.mark.parametrize(
    ("mode", "function"), [("rzi", np.trunc), ("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_rounding_to_whole_floats_keeps_the_sign(mode, function, ftz):
    """cvt.*.f32.f32: -0.3 becomes -0."""
    a = np.concatenate([near_integers(), random_f32(1 << 14, 13)])
    flushed = ff.flush_subnormals(a) if ftz else a
    with np.errstate(all="ignore"):
        expected = ff.canonical_nan(function(flushed.view(np.float32)).view(np.uint32))
    same(lanes("round_f32_lanes", a, args=(MODES[mode], ftz)), expected, a)
    same(one_by_one("round_f32", a[:2000], args=(MODES[mode], ftz)), expected[:2000], a)


def test_integers_become_the_nearest_float():
    """cvt.rn.f32 of 64-bit values, ties to even."""
    rng = np.random.default_rng(14)
    wild = rng.integers(0, 2**64, 4000, dtype=np.uint64) >> rng.integers(0, 60, 4000, dtype=np.uint64)
    ties = (np.uint64(2**24 + 1) << np.arange(39, dtype=np.uint64)) + np.uint64(1)
    values = np.concatenate(
        [wild, ties, ties - np.uint64(1), ties - np.uint64(2), np.array([0, 2**64 - 1, 2**63], np.uint64)]
    )
    unsigned, signed = library().units_u64_to_f32, library().units_s64_to_f32
    unsigned.restype = signed.restype = ctypes.c_uint32
    unsigned.argtypes, signed.argtypes = [ctypes.c_uint64], [ctypes.c_int64]
    same([unsigned(v) for v in values.tolist()], values.astype(np.float32).view(np.uint32), values)
    back = values.view(np.int64)
    same([signed(v) for v in back.tolist()], back.astype(np.float32).view(np.uint32), values)
