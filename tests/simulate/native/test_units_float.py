"""Contract: f32 arithmetic of the native units gives the bits of float_formats.py.

Every rounding, with and without ftz, for one value, for lanes and for packed pairs; NaN canonical; lanes outside the
mask keep what they hold. Inputs are all pairs of some 240 nasty patterns, and random ones.
"""

import ctypes

import numpy as np
import pytest

from fa4build.simulate.instructions.float_alu import compare_equ, compare_nan
from fa4build.simulate.units import float_formats as ff
from tests.simulate.native.units_library import ROUNDINGS, lanes, library, nasty_f32, one_by_one, random_f32, same

BINARY = {"add": ff.add_f32, "sub": ff.sub_f32, "mul": ff.mul_f32}


def pairs() -> tuple[np.ndarray, np.ndarray]:
    """All pairs of every second nasty pattern, then random ones."""
    nasty = nasty_f32()[::2]
    a, b = np.repeat(nasty, len(nasty)), np.tile(nasty, len(nasty))
    return np.concatenate([a, random_f32(1 << 15, 1)]), np.concatenate([b, random_f32(1 << 15, 2)])


def triples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random triples of nasty patterns; sums near cancellation, ties and the ends of the format; random ones."""
    rng = np.random.default_rng(3)
    a, b, c = (rng.choice(nasty_f32(), 1 << 15) for _ in range(3))
    x, y = random_f32(1 << 15, 4), random_f32(1 << 15, 5)
    z = ff.mul_f32(x, y) ^ np.uint32(0x80000000)
    z += rng.integers(0, 3, len(z), dtype=np.uint32)
    return np.concatenate([a, x, x]), np.concatenate([b, y, y]), np.concatenate([c, z, random_f32(len(x), 6)])


def as_pairs(x: np.ndarray) -> np.ndarray:
    """Neighbours as the halves of 64-bit words."""
    return x[: len(x) // 2 * 2].view(np.uint64)


@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", BINARY)
def test_a_binary_operation_rounds_as_python(name, rounding, ftz):
    """add, sub and mul, lanes and pairs."""
    a, b = pairs()
    expected = BINARY[name](a, b, rounding, ftz)
    args = (ROUNDINGS[rounding], int(ftz))

    same(lanes(f"{name}_f32_lanes", a, b, args=args), expected, a, b)
    packed = lanes(f"{name}_f32_pairs", as_pairs(a), as_pairs(b), args=args)
    same(packed.view(np.uint32), expected[: len(a) // 2 * 2], a, b)


@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_fma_rounds_once_as_python(rounding, ftz):
    """fma, lanes and pairs."""
    a, b, c = triples()
    expected = ff.fma_f32(a, b, c, rounding, ftz)
    args = (ROUNDINGS[rounding], int(ftz))

    same(lanes("fma_f32_lanes", a, b, c, args=args), expected, a, b, c)
    packed = lanes("fma_f32_pairs", as_pairs(a), as_pairs(b), as_pairs(c), args=args)
    same(packed.view(np.uint32), expected, a, b, c)


def test_one_value_equals_its_lane():
    """The scalar functions are the lanes' own."""
    a, b, c = (x[:2048] for x in triples())
    for rounding, code in ROUNDINGS.items():
        for ftz in (0, 1):
            for name, function in BINARY.items():
                same(one_by_one(f"{name}_f32", a, b, args=(code, ftz)), function(a, b, rounding, bool(ftz)), a, b)
            same(one_by_one("fma_f32", a, b, c, args=(code, ftz)), ff.fma_f32(a, b, c, rounding, bool(ftz)), a, b, c)


def test_fma_of_bf16_takes_the_low_halves():
    """fma.rn.f32.bf16 widens the first two operands exactly."""
    a, b, c = triples()
    expected = ff.fma_f32(ff.bf16_to_f32(a & 0xFFFF), ff.bf16_to_f32(b & 0xFFFF), c)
    same(lanes("fma_f32_bf16_lanes", a, b, c), expected, a, b, c)


@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("propagate", [False, True])
@pytest.mark.parametrize(("name", "function"), [("max", ff.max_f32), ("min", ff.min_f32)])
def test_max_and_min_choose_as_python(name, function, propagate, ftz):
    """NaN loses or wins; +0 is above -0."""
    a, b = pairs()
    expected = function(a, b, propagate, ftz)
    same(lanes(f"{name}_f32_lanes", a, b, args=(int(propagate), int(ftz))), expected, a, b)
    some = slice(0, None, 97)
    same(one_by_one(f"{name}_f32", a[some], b[some], args=(int(propagate), int(ftz))), expected[some], a[some], b[some])


@pytest.mark.parametrize("ftz", [False, True])
def test_division_and_roots_are_ieee(ftz):
    """div, rcp and sqrt with .rn; ftz flushes operands and result."""
    flush = ff.flush_subnormals if ftz else (lambda x: x)
    a, b = pairs()
    same(lanes("div_f32_lanes", a, b, args=(int(ftz),)), flush(ff.div_f32_rn(flush(a), flush(b))), a, b)
    one = np.full_like(a, 0x3F800000)
    same(lanes("rcp_rn_f32_lanes", a, args=(int(ftz),)), flush(ff.div_f32_rn(one, flush(a))), a)
    with np.errstate(all="ignore"):
        root = ff.canonical_nan(np.sqrt(flush(a).view(np.float32)).view(np.uint32))
    same(lanes("sqrt_f32_lanes", a, args=(int(ftz),)), flush(root), a)


def test_signs_keep_the_payload_of_a_nan():
    """neg, abs and copysign move bits; copysign takes the sign of its first operand."""
    a, b = pairs()
    for ftz in (0, 1):
        flushed = ff.flush_subnormals(a) if ftz else a
        same(lanes("neg_f32_lanes", a, args=(ftz,)), flushed ^ np.uint32(0x80000000), a)
        same(lanes("abs_f32_lanes", a, args=(ftz,)), flushed & np.uint32(0x7FFFFFFF), a)
    expected = (b & np.uint32(0x7FFFFFFF)) | (a & np.uint32(0x80000000))
    same(lanes("copysign_f32_lanes", a, b), expected, a, b)


ORDERED = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
OPPOSITE = {"ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
NUMBERS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "nan", "num")


def compared(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """As the rules of float_alu.py write it."""
    if name in ORDERED:
        return ORDERED[name](a, b)
    if name in OPPOSITE:
        return ~ORDERED[OPPOSITE[name]](a, b)
    return compare_equ(a, b) if name == "equ" else compare_nan(a, b, name)


@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_comparison_is_a_bit_for_each_lane(name, ftz):
    """setp in its ordered and unordered forms."""
    a, b = pairs()
    count = len(a) // 32 * 32
    a, b = a[:count].copy(), b[:count].copy()
    function = library().units_compare_f32_lanes
    function.restype = ctypes.c_uint32
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    number = NUMBERS.index(name)
    words = [function(a.ctypes.data + o, b.ctypes.data + o, number, int(ftz)) for o in range(0, a.nbytes, 128)]
    got = np.unpackbits(np.array(words, np.uint32).view(np.uint8), bitorder="little")
    x, y = (ff.flush_subnormals(v) if ftz else v for v in (a, b))

    same(got, compared(name, x.view(np.float32), y.view(np.float32)), a, b)


@pytest.mark.parametrize("mask", [0, 1, 0x80000000, 0xA5A5_0FF0, 0xFFFFFFFF])
def test_lanes_outside_the_mask_keep_what_they_hold(mask):
    """Also where the destination is a source."""
    a, b = random_f32(32, 7), random_f32(32, 8)
    inside = (mask >> np.arange(32) & 1).astype(bool)
    same(lanes("mul_f32_lanes", a, b, args=(0, 0), mask=mask, old=b), np.where(inside, ff.mul_f32(a, b), b), a, b)
    wide_a, wide_b = random_f32(64, 9).view(np.uint64), random_f32(64, 10).view(np.uint64)
    full = lanes("add_f32_pairs", wide_a, wide_b, args=(0, 0))
    same(lanes("add_f32_pairs", wide_a, wide_b, args=(0, 0), mask=mask, old=wide_b), np.where(inside, full, wide_b))
