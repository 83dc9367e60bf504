"""Where the coefficients of the emulated power of two come from: polynomials of least relative error on [0, 1].

    python -c 'from fa4build.numerics.minimax import minimax_exp2; print(minimax_exp2(5))'

prints the coefficients of `POLYNOMIALS` in kernels_src/softmax/exp2_emulation.py and their error. The constant is
fixed at 1, so that integers are exact. Method: Remez's exchange; with the constant fixed, an optimal polynomial of
degree n has an error that alternates at n + 1 points.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimax:
    """coefficients: lowest first, the first is 1. max_relative: largest |p(f) / 2^f - 1|, in exact arithmetic."""

    coefficients: tuple[float, ...]
    max_relative: float


def minimax_exp2(degree: int, exchanges: int = 20) -> Minimax:
    """The polynomial of this degree with p(0) = 1 and the least relative error against 2^f for f in [0, 1].

    Args: degree: 1 to 7 (beyond, float64 does not resolve the error). exchanges: far more than it takes to converge.
    """
    powers = np.arange(1, degree + 1)
    grid = np.linspace(0.0, 1.0, 100_001)
    alternating = (-1.0) ** np.arange(degree + 1)
    points = (1 - np.cos(np.pi * (np.arange(degree + 1) + 1) / (degree + 1))) / 2
    for _ in range(exchanges):
        # p(x) 2^-x - 1 = +-E at every point: linear in the coefficients and E.
        system = np.column_stack([points[:, None] ** powers / np.exp2(points)[:, None], -alternating])
        *higher, _ = np.linalg.solve(system, 1 - np.exp2(-points))
        error = (1 + grid[:, None] ** powers @ np.array(higher)) * np.exp2(-grid) - 1
        points = _largest_between_zeros(grid, error, degree + 1)
    return Minimax(coefficients=(1.0, *map(float, higher)), max_relative=float(np.abs(error).max()))


def _largest_between_zeros(grid: np.ndarray, error: np.ndarray, count: int) -> np.ndarray:
    """The point of largest error between any two changes of its sign: the last `count` of them, ascending."""
    pieces = np.split(np.arange(1, grid.size), np.flatnonzero(error[2:] * error[1:-1] < 0) + 1)
    return np.array([grid[piece[np.argmax(np.abs(error[piece]))]] for piece in pieces][-count:])
