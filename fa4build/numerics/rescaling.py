"""Oracle of conditional rescaling: the recurrence of reference points over blocks of keys, and what it does to the
output.

Scores here are in log2 units (already times softmax scale times log2 e), one row a query. The rule itself is the
kernels'
own (`kernels_src/softmax/conditional_rescaling.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fa4build.numerics.kernel_blocks import keeps_reference
from fa4build.numerics.rounding import round_to_format

ROWS_OF_A_WARP = 32  # on Blackwell a thread holds a row; a warp rescales when any of its rows does


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """references: (blocks, rows), in force while a block is added. moved: (blocks - 1, rows), whether it moved
    there.
    """

    references: np.ndarray
    moved: np.ndarray

    @property
    def row_share(self) -> float:
        """Share of (row, block) steps after the first block that rescale."""
        return float(self.moved.mean())

    @property
    def warp_share(self) -> float:
        """Share of (warp, block) steps in which any row of the warp rescales."""
        blocks, rows = self.moved.shape
        return float(self.moved.reshape(blocks, rows // ROWS_OF_A_WARP, ROWS_OF_A_WARP).any(axis=2).mean())


def block_maxima(scores: np.ndarray, block: int = 128) -> np.ndarray:
    """Largest score of every row in every block of keys, (blocks, rows)."""
    rows, keys = scores.shape
    return scores.reshape(rows, keys // block, block).max(axis=2).T


def recurrence(maxima: np.ndarray, threshold: float) -> Recurrence:
    """Reference points of every row, block after block.

    Args: maxima: from `block_maxima`, finite, rows a multiple of 32. threshold: log2 units, at least 0.
    """
    keeps = keeps_reference()
    references, moved = [maxima[0]], []
    for maximum in maxima[1:]:
        raised = np.maximum(references[-1], maximum)
        kept = keeps(references[-1] - raised, threshold)
        moved.append(~kept)
        references.append(np.where(kept, references[-1], raised))
    return Recurrence(references=np.array(references), moved=np.array(moved))


def attention_with_lag(
    scores: np.ndarray,
    values: np.ndarray,
    probabilities: Sequence[str],
    threshold: float,
    max_offset: float = 0.0,
    block: int = 128,
) -> list[np.ndarray]:
    """O / l as the kernels form it: P rounded to a type before the product, its sum not; all else in float64.

    Args:
        scores: (rows, keys); values: (keys, columns).
        probabilities: types of P, names of `FORMATS`. max_offset: P is stored times 2^max_offset.
    Returns: (rows, columns) for each type. What differs from exact attention is the rounding of P alone.
    """
    references = recurrence(block_maxima(scores, block), threshold).references
    outputs = [np.zeros((scores.shape[0], values.shape[1])) for _ in probabilities]
    row_sum = np.zeros(scores.shape[0])
    for index, reference in enumerate(references):
        factor = np.exp2(references[max(index - 1, 0)] - reference)
        keys = slice(index * block, (index + 1) * block)
        exact = np.exp2(scores[:, keys] - (reference - max_offset)[:, None])
        for output, name in zip(outputs, probabilities, strict=True):
            output *= factor[:, None]
            output += round_to_format(exact, name) @ values[keys]
        row_sum = row_sum * factor + exact.sum(axis=1)
    return [output / row_sum[:, None] for output in outputs]


def attention_with_shift(scores: np.ndarray, values: np.ndarray, probability: str, shift: np.ndarray) -> np.ndarray:
    """Two-pass softmax whose reference is each row's maximum minus `shift` (rows,): what a lag does, without a
    recurrence.
    """
    exact = np.exp2(scores - scores.max(axis=1, keepdims=True) + shift[:, None])
    return round_to_format(exact, probability) @ values / exact.sum(axis=1, keepdims=True)


def exact_attention(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Float64 softmax, two passes."""
    weights = np.exp2(scores - scores.max(axis=1, keepdims=True))
    return weights @ values / weights.sum(axis=1, keepdims=True)


def relative_l2(approximate: np.ndarray, exact: np.ndarray) -> float:
    """|approximate - exact| / |exact|, Euclidean over all elements."""
    return float(np.linalg.norm(approximate - exact) / np.linalg.norm(exact))
