"""Attention from the definition, two passes in float64: the oracle of online softmax."""

import numpy as np


def attention(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(O, lse) for scores (rows, keys) in natural-log units, -inf where hidden, and values (keys, head_dim_v)."""
    maxima = scores.max(axis=1, keepdims=True)
    safe = np.where(np.isneginf(maxima), 0.0, maxima)
    weights = np.exp(scores - safe)
    sums = weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (safe + np.log(sums))[:, 0]
    return weights @ values / np.where(sums == 0, 1.0, sums), lse
