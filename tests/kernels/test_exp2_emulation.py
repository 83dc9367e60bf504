"""Contract of the emulated power of two, and the tie between device code and host oracle.

The PTX of `exp2_emulated_pair`, run in the simulator, gives the bits of `fa4build.numerics.exp2.exp2_emulated` on every
input of its domain, special values included. Which columns of a score row use it depends on the column alone. The bound
on its error is tight.
"""

import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from fa4build.numerics.exp2 import error_curve, exp2_emulated
from fa4build.numerics.kernel_blocks import emulated_columns, polynomials
from fa4build.numerics.minimax import minimax_exp2
from fa4build.numerics.rounding import fma_f32
from fa4build.simulate import GlobalMemory, SimLaunch, run_launch

ROOT = Path(__file__).resolve().parents[2]
THREADS, SYMBOL = 1024, "toy_exp2"  # of tests/kernels/exp2_kernel.py, which imports the compiler
ROUND = 2 * THREADS
MILLION = 512 * ROUND  # 1,048,576


def inputs(count: int, seed: int) -> np.ndarray:
    """Special values first; then the domain evenly, the neighbourhood of integers, and all magnitudes."""
    rng = np.random.default_rng(seed)
    integers = np.arange(-130, 128, dtype=np.float32)
    special = np.array([0.0, -0.0, np.inf * -1, np.nan, -127.0, -126.0, 1e-45, -1e-45, 1e-38, -1e-38], dtype=np.float32)
    below, above = np.nextafter(integers, -np.inf), np.nextafter(integers, np.inf)
    listed = np.concatenate([special, integers, below, above[:-1]])
    third = (count - listed.size) // 3
    evenly = rng.uniform(-140.0, 127.0, count - listed.size - 2 * third)
    near = np.round(rng.uniform(-127.0, 126.0, third)) + np.ldexp(
        rng.uniform(-1, 1, third), rng.integers(-30, 0, third)
    )
    tiny = np.ldexp(rng.uniform(-1, 1, third), rng.integers(-140, 6, third))
    return np.concatenate([listed, np.concatenate([evenly, near, tiny]).astype(np.float32)])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """PTX by degree, compiled in a process of its own."""
    directory = tmp_path_factory.mktemp("exp2")
    command = [sys.executable, "-m", "tests.kernels.exp2_kernel", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True)
    return {degree: (directory / f"{degree}.ptx").read_text() for degree in polynomials()}


def simulated(ptx: str, x: np.ndarray) -> np.ndarray:
    """What the device code writes for x."""
    y = np.zeros_like(x)
    memory = GlobalMemory()
    addresses = memory.add("x", x, read_only=True), memory.add("y", y)
    parameters = b"".join(struct.pack("<QIxxxx", address, x.size) for address in addresses)
    launch = SimLaunch(
        kernel=f"{SYMBOL}_0",
        grid=(1, 1, 1),
        block=(THREADS, 1, 1),
        parameters=parameters + struct.pack("<I", x.size // ROUND),
    )
    run_launch(ptx, launch, memory)
    return y


@pytest.mark.dsl
@pytest.mark.parametrize("degree", sorted(polynomials()))
def test_device_code_and_oracle_agree_in_every_bit_on_a_million_inputs(kernels, degree):
    """1,048,576 inputs a degree; NaN and -inf give 0, as the oracle has it."""
    x = inputs(MILLION, seed=degree)
    device, host = simulated(kernels[degree], x), exp2_emulated(x, degree)

    assert 0 == np.count_nonzero(device.view(np.uint32) != host.view(np.uint32))


@pytest.mark.dsl
def test_another_degree_gives_other_bits(kernels):
    """The comparison above can fail."""
    x = inputs(8 * ROUND, seed=0)

    assert np.count_nonzero(simulated(kernels[4], x) != exp2_emulated(x, 3)) > x.size // 2


@pytest.mark.dsl
def test_the_block_uses_no_exponential_unit(kernels):
    """It exists to leave that unit alone; its additions and multiplications are packed."""
    for degree, ptx in kernels.items():
        assert "ex2" not in ptx
        assert degree == ptx.count("fma.rn.f32x2")
        assert 1 == ptx.count("add.rm.ftz.f32x2")


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (0.0, 1.0),
        (-0.0, 1.0),
        (1.0, 2.0),
        (-1.0, 0.5),
        (127.0, 2.0**127),
        (-126.0, 2.0**-126),
        (-127.0, 0.0),  # exponent field 0, mantissa 0
        (-1000.0, 0.0),
        (-np.inf, 0.0),  # a masked score
        (np.nan, 0.0),  # the clamp takes the other operand
        (1e-45, 1.0),
    ],
)
def test_integers_and_the_ends_of_the_domain_are_exact(x, expected):
    """The constant coefficient is 1."""
    for degree in polynomials():
        assert expected == exp2_emulated(np.float32([x]), degree)[0]


@pytest.mark.parametrize(("degree", "bound"), [(3, 8.77e-5), (4, 2.97e-6), (5, 1.45e-7)])
def test_the_bound_on_the_error_is_tight(degree, bound):
    """Reached to within 2 % on one period, never exceeded."""
    _, error = error_curve(degree, points=1 << 20)

    assert 0.98 * bound < np.abs(error).max() <= bound


@pytest.mark.parametrize("degree", [4, 5])
def test_coefficients_are_the_minimax_polynomial_in_float32(degree):
    """The table holds what `minimax_exp2` computes, to one unit in the last place."""
    table, computed = np.float32(polynomials()[degree]), np.float32(minimax_exp2(degree).coefficients)

    assert np.array_equal(table.astype(np.float64), polynomials()[degree])  # nothing is lost on the device
    assert np.abs(table.view(np.int32) - computed.view(np.int32)).max() <= 1


def test_the_exchange_levels_the_error():
    """At the optimum of degree n the error alternates in sign at n + 1 points of equal height."""
    for degree in (1, 2, 3, 4, 5):
        found = minimax_exp2(degree)
        f = np.linspace(0, 1, 100_001)
        error = np.polynomial.polynomial.polyval(f, found.coefficients) * np.exp2(-f) - 1
        pieces = np.split(error[1:], np.flatnonzero(error[2:] * error[1:-1] < 0) + 1)
        heights = [np.abs(piece).max() for piece in pieces]

        assert degree + 1 == len(heights)
        assert max(heights) == pytest.approx(found.max_relative, rel=1e-12)
        assert min(heights) == pytest.approx(max(heights), rel=1e-4)


def test_fused_multiply_add_rounds_once():
    """Against exact rationals, at sums that lie next to the middle of two float32."""
    a, b = (
        np.float32([1 + 2**-12, 1 + 2**-23, 1.0, 1 - 2**-24]),
        np.float32([1 + 2**-12, 1 + 2**-23, 2**-24, 1 - 2**-24]),
    )
    for c in np.float32([1.0, -0.5, 2**-24, 2.0]):
        exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(c)) for x, y in zip(a, b, strict=True)]
        assert [nearest_float32(value) for value in exact] == fma_f32(a, b, c).tolist()


def nearest_float32(value: Fraction) -> float:
    """The float32 next to a rational, ties to even mantissa."""
    guess = np.float32(float(value))
    candidates = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return float(min(candidates, key=lambda f: (abs(Fraction(float(f)) - value), int(f.view(np.uint32)) & 1)))


@pytest.mark.parametrize(
    ("frequency", "first_fragment", "columns"),
    [
        (0, 0, ()),
        # of each 10 columns the last 4, in fragments 1 and 2: 12 of 32 each, 18.75 %
        (10, 1, tuple(32 * f + 10 * g + o for f in (1, 2) for g in (0, 1, 2) for o in (6, 7, 8, 9))),
        (16, 1, (44, 45, 46, 47, 60, 61, 62, 63, 76, 77, 78, 79, 92, 93, 94, 95)),  # 12.5 %
        (32, 1, (60, 61, 62, 63, 92, 93, 94, 95)),  # 6.25 %
    ],
)
def test_which_columns_are_emulated(frequency, first_fragment, columns):
    """The last 4 of each `frequency` columns of a fragment; the last fragment never, so that a NaN always shows."""
    assert columns == emulated_columns(frequency, first_fragment)


def test_pairs_are_emulated_together():
    """The device code looks at the even column alone and treats the odd one alike."""
    for frequency in range(4, 33, 2):
        columns = set(emulated_columns(frequency, 0))
        assert all((column ^ 1) in columns for column in columns)
