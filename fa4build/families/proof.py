"""What an operator of a family must compute: problems with their answers, for a proof in the simulator.

A case is small and plain, since it crosses into the process that proves it: a function by name, and what it needs to
know. The function draws inputs, and says what comes out and how far off it may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofCase:
    """One problem of one operator.

    Attributes:
        draw: `module:name` of a function `(arguments, seed) -> Problem`; its module's file is part of the evidence.
        arguments: JSON.
        any_order: results whose sums are added up in any order, so that runs may differ in the last bits.
        tolerated: glob of kernel ids -> rules of the simulator (`R14`) that those kernels are known to break
            harmlessly; findings are notes. All globs that match count.
    """

    name: str
    draw: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    any_order: tuple[str, ...] = ()
    tolerated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A case with numbers.

    Attributes:
        inputs: the recipe's tensors by name, as bit patterns: unsigned integers of the element's size.
        scalars: those that have no default, or another value.
        expected: result -> (values in float64, largest absolute error allowed).
    """

    inputs: Mapping[str, np.ndarray]
    scalars: Mapping[str, int | float] = field(default_factory=dict)
    expected: Mapping[str, tuple[np.ndarray, float]]
