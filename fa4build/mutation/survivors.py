"""Why a mutant that no case kills is no fault: what the PTX manual, or the structure of a kernel, says.

A reason is an argument about kernels that it names, and about changes of one kind in them; nothing checks the argument.
What no reason covers is a hole in the checks or a case that is missing, and a campaign fails on it. docs/mutation.md
has the arguments at length.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

from fa4build.mutation.mutants import Mutant


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """An argument.

    Attributes:
        name: short, for records.
        kernels: globs over ids for which it was looked at.
        opcode, change: regular expressions that the mutant's match from their beginning.
        text: the argument.
    """

    name: str
    kernels: tuple[str, ...]
    opcode: str
    change: str
    text: str

    def covers(self, kernel: str, mutant: Mutant) -> bool:
        """Whether it is an argument about this mutant."""
        return (
            any(fnmatch.fnmatchcase(kernel, glob) for glob in self.kernels)
            and re.match(self.opcode, mutant.opcode) is not None
            and re.match(self.change, mutant.change) is not None
        )


_ALL = ("*",)
REASONS: tuple[Reason, ...] = (
    Reason(
        name="registers are the assembler's",
        kernels=_ALL,
        opcode=r"setmaxnreg\.inc",
        change="removed",
        text="PTX has as many registers as it declares. Without the increase ptxas keeps to what the launch gave and "
        "spills: slower, not wrong. A decrease that is missing starves the increase, and is killed.",
    ),
)


def reason_for(kernel: str, mutant: Mutant) -> str:
    """The name of the reason that covers a mutant which was not killed; empty where there is none."""
    return next((reason.name for reason in REASONS if reason.covers(kernel, mutant)), "")
