"""Why a mutant that no case kills is no fault: what the PTX manual, or the structure of a kernel, says.

A reason is an argument about kernels that it names, about changes of one kind in them, and about so many of these at
most; nothing checks the argument. What no reason covers is a hole in the checks or a case that is missing, and a
campaign fails on it. docs/mutation.md has the results.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """An argument.

    Attributes:
        name: short, for records.
        kernels: globs over the ids for which it was looked at.
        opcode, change: regular expressions that a mutant's match from their beginning.
        most: mutants of a kernel that it was argued for; of more it explains none.
        text: the argument.
        status: of the mutants: `survived` what reaches them, or `unreached`.
    """

    name: str
    kernels: tuple[str, ...]
    opcode: str
    change: str
    most: int
    text: str
    status: str = "survived"

    def covers(self, kernel: str, opcode: str, change: str, status: str) -> bool:
        """Whether it is an argument about such a change."""
        return (
            status == self.status
            and any(fnmatch.fnmatchcase(kernel, glob) for glob in self.kernels)
            and re.match(self.opcode, opcode) is not None
            and re.match(self.change, change) is not None
        )


_ANY = ("*",)
_SM90 = ("fwd-sm90a-*", "bwd-sm90a-*")
_SM100 = ("fwd-sm100a-*", "bwd-sm100a-*")
REASONS: tuple[Reason, ...] = (
    Reason(
        name="registers are the assembler's",
        kernels=_ANY,
        opcode=r"setmaxnreg\.inc",
        change="removed",
        most=1,
        text="PTX has as many registers as it declares. Without the increase ptxas keeps to what the launch gave and "
        "spills: slower, not wrong. A decrease that is missing starves the increase, and is killed.",
    ),
    Reason(
        name="equal initialisations",
        kernels=_ANY,
        opcode="elect",
        change=r"every lane is elected for mbarrier\.init",
        most=1,
        text="Lanes of one instruction initialise each barrier with one count. The manual leaves open what a second "
        "initialisation does; kernels of others do the same, and the simulator takes it for one.",
    ),
    Reason(
        name="more lanes wait",
        kernels=_ANY,
        opcode="elect",
        change=r"every lane is elected for (?:cp\.async\.bulk\.(?:commit|wait)|fence)",
        most=4,
        text="Lanes that have no bulk operations commit and wait for nothing; more lanes that look at a counter and "
        "fence order more, not less. The elected lane still does what it did.",
    ),
    Reason(
        name="the same lane",
        kernels=("bwd-sm90a-*", "bwd-sm100a-*"),
        opcode=r"bar\.warp\.sync",
        change="removed",
        most=2,
        text="The lane that has seen its turn come is the lane that adds to dQ: elect.sync gives the same lane each "
        "time (manual). The others touch nothing in between.",
    ),
    Reason(
        name="another fence stands between",
        kernels=_SM90,
        opcode=r"wgmma\.fence",
        change="removed",
        most=8,
        text="Registers of these products were last touched before an earlier wgmma.fence: that of the product before.",
    ),
    Reason(
        name="another commit or wait covers it",
        kernels=_SM90,
        opcode=r"wgmma\.(?:commit|wait)",
        change="(?:removed|one more)",
        most=10,
        text="The slot that is freed behind the wait is filled again only after the producer has waited for a slot "
        "that the same warps free later, behind a wait for everything. Without a commit of its own, a product is "
        "in the next group.",
    ),
    Reason(
        name="another commit or wait covers it (bulk)",
        kernels=_SM90,
        opcode=r"cp\.async\.bulk\.commit",
        change="removed",
        most=1,
        text="The next store of the same thread commits both, and what is waited for is everything.",
    ),
    Reason(
        name="barriers that nobody uses",
        kernels=("bwd-sm90a-*",),
        opcode=r"mbarrier\.init",
        change="",
        most=6,
        text="K and V are loaded once. Their two barriers for free slots are initialised, and nothing else names them.",
    ),
    Reason(
        name="slots are used once",
        kernels=("fwd-sm90a-*-varlen*",),
        opcode=r"mbarrier\.(?:try_wait|arrive)|bar\.warp\.sync",
        change="(?:removed|relaxed)",
        most=5,
        text="A CTA takes two tiles, and there are two slots for tiles and their queries: none is filled again. The "
        "wait for a free slot succeeds at once, and freeing it has no one to tell.",
    ),
    Reason(
        name="more than one block of keys on the diagonal",
        kernels=("fwd-sm90a-*-causal-varlen*",),
        opcode=r"mbarrier\.arrive|elect",
        change="",
        most=4,
        status="unreached",
        text="A tile of 128 rows meets the diagonal in one block of 128 keys behind the first. The loop "
        "over such blocks never turns a second time; it is there for windows.",
    ),
    Reason(
        name="a product is over for its whole warpgroup",
        kernels=("fwd-sm90a-*",),
        opcode=r"bar\.sync",
        change="removed",
        most=1,
        text="O takes the place of the tile's queries. The product that read them is one operation of four warps, and "
        "each has waited for it. Taken for granted, since the manual speaks of each warp's own groups.",
    ),
    Reason(
        name="nothing comes behind",
        kernels=_SM90,
        opcode=r"bar\.sync",
        change="arrives and does not wait",
        most=1,
        text="The last barrier evens out the arrivals of the ping-pong; what waits there touches nothing afterwards.",
    ),
    Reason(
        name="a later release covers it",
        kernels=_SM90,
        opcode=r"mbarrier\.(?:arrive|try_wait)",
        change="relaxed",
        most=3,
        text="The producer fills the slot only after it has also waited, acquiring, for a slot that the same warps "
        "free later with a release.",
    ),
    Reason(
        name="commits arrive in order",
        kernels=("fwd-sm100a-*",),
        opcode=r"mbarrier\.try_wait",
        change="removed",
        most=1,
        text="At the start of a piece of work, and at the end of a pair's load warp, the wait stands beside one for "
        "what the MMA warp freed by a later commit. Taken for granted: commits of one thread arrive in order.",
    ),
    Reason(
        name="the cluster barrier holds everyone",
        kernels=("*-2cta*",),
        opcode=r"bar\.sync",
        change="removed",
        most=1,
        text="At the end a barrier of the block stands directly before one of the cluster, for which all threads of "
        "both blocks wait.",
    ),
    Reason(
        name="the end of the grid",
        kernels=("fwd-sm100a-*",),
        opcode=r"cp\.async\.bulk\.wait_group|elect",
        change="(?:removed|one more|only reads|lane 0)",
        most=4,
        text="The last wait of the store warp is for the writes of O. That their source has been read was waited for "
        "before, and the writes themselves are over when the grid is.",
    ),
    Reason(
        name="equal stores",
        kernels=("fwd-sm100a-*",),
        opcode="elect",
        change=r"every lane is elected for cp\.async\.bulk\.tensor",
        most=2,
        text="Thirty-two lanes store the same tile to the same place, each in a group of its own that it waits for: "
        "slower, not wrong.",
    ),
    Reason(
        name="nobody else allocates",
        kernels=_SM100,
        opcode=r"tcgen05\.relinquish",
        change="removed",
        most=1,
        text="The permit matters to CTAs that wait to allocate on the same multiprocessor; this one frees all it has "
        "directly behind, and leaves.",
    ),
    Reason(
        name="tensor memory needs no release",
        kernels=_SM100,
        opcode=r"mbarrier\.(?:arrive|try_wait)",
        change="(?:relaxed|releases for its CTA)",
        most=60,
        text="What is handed on lies in tensor memory: tcgen05.fence on both sides and the order of execution that a "
        "relaxed arrival gives are enough (manual 9.7.16.6); or nothing is handed on, as in the first round of a ring.",
    ),
    Reason(
        name="nothing of the other CTA is acquired",
        kernels=("*-2cta*",),
        opcode=r"mbarrier\.try_wait",
        change="acquires for its CTA",
        most=40,
        text="What the wait hands on lies in its own CTA, or in tensor memory, for which the order of execution and "
        "tcgen05.fence are enough.",
    ),
    Reason(
        name="the fence publishes barriers",
        kernels=("*-2cta*",),
        opcode=r"barrier\.cluster\.arrive",
        change="relaxed",
        most=1,
        text="Behind the initialisation of barriers fence.mbarrier_init.release.cluster is the release; a relaxed "
        "arrival behind it is what the manual shows.",
    ),
    Reason(
        name="nothing was touched yet",
        kernels=_SM100,
        opcode=r"bar\.warp\.sync",
        change="removed",
        most=8,
        text="In the first round a slot is freed that the warp has not read: the message of the first block of keys "
        "carries no scale. No lane has anything that another speaks for.",
    ),
    Reason(
        name="another tcgen05 fence or wait covers it",
        kernels=_SM100,
        opcode=r"tcgen05\.(?:fence|wait)",
        change="removed",
        most=24,
        text="Around the allocation nothing is in tensor memory yet. Elsewhere the same warp fences or waits again "
        "before its next arrival, and registers of a load are waited for by what uses them (manual 9.7.16.6).",
    ),
)


def reasons_for(kernel: str, changes: Sequence[tuple[str, str, str]]) -> list[str]:
    """For each (opcode, change, status) of a kernel that was not killed, the name of the reason; empty where there is
    none."""
    names = [""] * len(changes)
    for reason in REASONS:
        covered = [n for n, change in enumerate(changes) if not names[n] and reason.covers(kernel, *change)]
        for number in covered if len(covered) <= reason.most else ():
            names[number] = reason.name
    return names
