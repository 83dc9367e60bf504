"""Faults between lanes of a warp, planted in the forward of sm100a (`faults_sm100`): what one lane alone says, and who
issues. Its softmax warps hand P, row scales and slots on by one elected lane, behind a bar.warp.sync.
"""

from tests.simulate.mutations.edits import both, drop, drop_all, substitute, substitute_all
from tests.simulate.mutations.faults import Planted

ELECT = r"elect\.sync\s+(%r\w+|_)\|(%p\d+), [^;]*;"
BRANCH = r"(?=\s*not\.pred[^;]*;\s*@%p\d+ bra\s+\$\w+;(?:[^;]*;)"
MMA_ELECT, COMMIT_ELECT = rf"{ELECT}{BRANCH}{{0,40}}?\s*tcgen05\.mma)", rf"{ELECT}{BRANCH}{{0,4}}?\s*tcgen05\.commit)"
MEET = r"bar\.warp\.sync\s+-1;"


def by_lane(n: int) -> str:
    """In place of an election: lane n, whatever the others do."""
    return rf"{{ .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 \2, lane, {n}; mov.u32 \1, {n}; }}"


PLANTED_LANES = (
    Planted(
        name="no warp meets before one of its lanes arrives",
        edit=drop_all(r"bar\.warp\.sync"),
        expected=r"R1 .*tcgen05\.mma.*reads tensor memory .*while the write by tcgen05\.st of warp \d",
    ),
    Planted(
        name="no warp meets, and lane 0 is taken for the elected one",
        edit=both(drop_all(r"bar\.warp\.sync"), substitute_all(ELECT, by_lane(0))),
        expected=r"R1 .*one lane's arrival does not speak for the others",
    ),
    Planted(
        name="one of the softmax's announcements without its warp",
        edit=drop(r"bar\.warp\.sync", 1),
        expected=r"R1 |R2 |R7w ",
    ),
    Planted(
        name="a vote in place of every bar.warp.sync",
        edit=substitute_all(MEET, "{ .reg .b32 v; vote.sync.ballot.b32 v, 1, -1; }"),
        expected=r"R1 .*tcgen05\.mma.*reads tensor memory",
    ),
    Planted(
        name="an election in place of every bar.warp.sync",
        edit=substitute_all(MEET, "{ .reg .pred e; elect.sync _|e, -1; }"),
        expected=r"R1 .*tcgen05\.mma.*reads tensor memory",
    ),
    Planted(
        name="products by lane 3, commits by the elected lane",
        edit=substitute(MMA_ELECT, by_lane(3)),
        expected=r"R7-lane .*thread \d+ of the warp issues this behind tcgen05 products of thread \d+",
    ),
    Planted(
        name="a commit by lane 3",
        edit=substitute(COMMIT_ELECT, by_lane(3)),
        expected=r"R7-lane .*tcgen05\.commit.*behind tcgen05 products of thread",
    ),
)
