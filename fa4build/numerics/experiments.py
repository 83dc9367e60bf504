"""Experiments on random scores: how often rows rescale, and what lagging references cost in accuracy.

256 rows of 8192 keys in blocks of 128, scores in log2 units, values N(0, 1) with 128 columns. One draw has a spread
that a single published figure does not show, so every experiment is repeated over fixed seeds and gives all results.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fa4build.numerics.rescaling import (
    Recurrence,
    attention_with_lag,
    attention_with_shift,
    block_maxima,
    exact_attention,
    recurrence,
    relative_l2,
)

ROWS, KEYS, COLUMNS = 256, 8192, 128
RESCALE_SEEDS = tuple(range(8))
ERROR_SEEDS = tuple(range(4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How scores are drawn: sigma * N(0, 1) + rise * (key / keys), log2 units."""

    name: str
    sigma: float
    rise: float = 0.0

    def draw(self, rng: np.random.Generator, rows: int = ROWS, keys: int = KEYS) -> np.ndarray:
        """(rows, keys) float64."""
        return self.sigma * rng.standard_normal((rows, keys)) + self.rise * np.arange(keys) / keys


FLAT = Scores(name="N(0, 1.5²)", sigma=1.5)
PEAKED = Scores(name="N(0, 6²)", sigma=6.0)
RISING = Scores(name="N(0, 1.5²) + rise of 24", sigma=1.5, rise=24.0)
STEEP = Scores(name="N(0, 1.5²) + rise of 96", sigma=1.5, rise=96.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RescaleRates:
    """Shares of steps that rescale, mean over seeds: of rows, and of warps of 32 rows."""

    rows: float
    warps: float


def rescale_rates(
    scores: Scores, thresholds: Sequence[float], seeds: Sequence[int] = RESCALE_SEEDS
) -> tuple[RescaleRates, ...]:
    """How often rows and warps rescale at each threshold, on the same draws."""
    runs: list[list[Recurrence]] = []
    for seed in seeds:
        maxima = block_maxima(scores.draw(np.random.default_rng(seed)))
        runs.append([recurrence(maxima, threshold) for threshold in thresholds])
    return tuple(
        RescaleRates(
            rows=float(np.mean([run.row_share for run in of_one])),
            warps=float(np.mean([run.warp_share for run in of_one])),
        )
        for of_one in zip(*runs, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """A setting of the rescale rule: threshold and offset of P, log2 units."""

    threshold: float
    max_offset: float = 0.0


def probability_errors(
    scores: Scores, probabilities: Sequence[str], lags: Sequence[Lag], seeds: Sequence[int] = ERROR_SEEDS
) -> dict[tuple[str, Lag], float]:
    """Relative L2 error of the output from rounding P to each type, mean over seeds, by (type, lag)."""
    errors: dict[tuple[str, Lag], list[float]] = {(name, lag): [] for lag in lags for name in probabilities}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        drawn, values = scores.draw(rng), rng.standard_normal((KEYS, COLUMNS))
        exact = exact_attention(drawn, values)
        for lag in lags:
            outputs = attention_with_lag(drawn, values, probabilities, lag.threshold, lag.max_offset)
            for name, output in zip(probabilities, outputs, strict=True):
                errors[name, lag].append(relative_l2(output, exact))
    return {setting: float(np.mean(found)) for setting, found in errors.items()}


def shift_errors(
    scores: Scores, probability: str, max_shift: float, seeds: Sequence[int] = ERROR_SEEDS
) -> tuple[float, float]:
    """The same for one shift of the reference: none, and drawn evenly from [0, max_shift) for each row. No
    recurrence.
    """
    without: list[float] = []
    shifted: list[float] = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        drawn, values = scores.draw(rng), rng.standard_normal((KEYS, COLUMNS))
        exact = exact_attention(drawn, values)
        for shift, errors in ((np.zeros(ROWS), without), (rng.uniform(0, max_shift, ROWS), shifted)):
            errors.append(relative_l2(attention_with_shift(drawn, values, probability, shift), exact))
    return float(np.mean(without)), float(np.mean(shifted))
