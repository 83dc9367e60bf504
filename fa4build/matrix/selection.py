"""What a user picks out of a matrix, for any family of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa4build.matrix.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a user picks out of the matrix. Everything given must hold at once; nothing given is the default matrix.

    Attributes:
        arches: names or aliases of targets; empty is all.
        globs: patterns over ids (`*`, `?`, `[..]`); a variant is taken if any matches; empty is all.
        specs: specifications, or the paths of their files; what they name adds up.
        alone: the kernels that are named and no others, not even those that they are launched together with.
    """

    arches: tuple[str, ...] = ()
    globs: tuple[str, ...] = ()
    specs: tuple[Spec | Path | str, ...] = ()
    alone: bool = False

    @property
    def names_nothing(self) -> bool:
        """Whether it is the default matrix of every target."""
        return not (self.arches or self.globs or self.specs)
