"""The table: faults between clusters, between kernels and at the exit of a CTA, and what must be said about each.

The turns of a deterministic backward (kernels_src/scheduling/turns.py): before a CTA adds to a tile of dQ it waits for
a counter (load that acquires, loop, proxy fence); behind, it waits until its additions are performed, fences, and
counts itself (reduction that releases). Every part is taken out or weakened here.
"""

import re

from tests.simulate.mutations.edits import Edit, before, both, drop, drop_all, drop_wait
from tests.simulate.mutations.faults import Planted

_FENCE = r"fence\.proxy\.async\.global"
_UNORDERED = r"R16 .*cp\.reduce\.async\.bulk.*adds to dq_accum .* in no order"
_UNFENCED = r"R4 .*cp\.reduce\.async\.bulk.*writes dq_accum .*without a fence\.proxy\.async"


def replaced(pattern: str, text: str) -> Edit:
    """Every match of a pattern; at least one."""

    def edit(ptx: str) -> str:
        changed, count = re.subn(pattern, text, ptx)
        assert count, pattern
        return changed

    return edit


_SPIN = r"(ld\.acquire\.gpu\.global\.b32 (%r\d+)[^;]*;\s*)setp\.gt\.s32(\s+%p\d+), (%r\d+), \2;(\s*@%p\d+ bra[^;]*;)"

TURNS = (
    Planted(name="the load is relaxed", edit=replaced(r"ld\.acquire\.gpu", "ld.relaxed.gpu"), expected=_UNORDERED),
    Planted(
        name="the load acquires for its cluster alone",
        edit=replaced(r"ld\.acquire\.gpu", "ld.acquire.cluster"),
        expected=r"R1 .*reads dq_semaphore .*no release and acquire of a scope that holds both",
    ),
    Planted(name="no load", edit=replaced(_SPIN, "mov.b32 \\2, 99;"), expected=_UNORDERED),
    Planted(name="a load without a loop", edit=replaced(_SPIN, r"\1"), expected=_UNORDERED),
    Planted(
        name="one count too few is waited for",
        edit=replaced(_SPIN, r"\1{ .reg .b32 n; sub.s32 n, \4, 1; setp.gt.s32\3, n, \2; }\5"),
        expected=_UNORDERED,
    ),
    Planted(name="no proxy fence behind the load", edit=drop(_FENCE, 0), expected=_UNFENCED),
    Planted(name="no proxy fence before the release", edit=drop_all(_FENCE), expected=_UNFENCED),
    Planted(
        name="proxy fences of shared memory alone",
        edit=replaced(_FENCE, "fence.proxy.async.shared::cta"),
        expected=_UNFENCED,
    ),
    Planted(name="the reduction is relaxed", edit=replaced(r"red\.release", "red.relaxed"), expected=_UNORDERED),
    Planted(name="the reduction has no order", edit=replaced(r"red\.release\.gpu\.", "red."), expected=_UNORDERED),
    Planted(
        name="the reduction releases for its CTA alone",
        edit=replaced(r"red\.release\.gpu", "red.release.cta"),
        expected=r"R1 .*reads dq_semaphore .*no release and acquire of a scope that holds both",
    ),
    Planted(
        name="no reduction", edit=drop_all(r"red\.release"), expected=r"deadlock.*ld\.acquire.* waits for global word"
    ),
    Planted(
        name="the last additions were read, but are not performed",
        edit=replaced(r"cp\.async\.bulk\.wait_group(\s+0)", r"cp.async.bulk.wait_group.read\1"),
        expected=_UNORDERED,
    ),
    Planted(
        name="nobody waits for the last additions",
        edit=drop_all(r"cp\.async\.bulk\.wait_group"),
        expected=r"R2 .*st\.shared.*overwrites .*while the read by bulk",
    ),
)

KERNELS = (
    Planted(
        name="nobody waits for the kernel in front",
        edit=drop_all(r"griddepcontrol\.wait"),
        expected=r"R17 .*reads lse_partial at byte \d+ before griddepcontrol\.wait",
    ),
    Planted(
        name="a load before the wait for the kernel in front",
        edit=lambda ptx: drop(r"griddepcontrol\.wait")(before(r"st\.global", "griddepcontrol.wait;")(ptx)),
        expected=r"R17 .*ld\.global.*before griddepcontrol\.wait",
    ),
)

EXITS = (
    Planted(
        name="the last slots are not waited for",
        edit=both(*(drop_wait("10000000", which) for which in range(-10, -4))),  # of the load warp: six slots
        expected=r"R12 .*exits while the tcgen05\.commit by warp 12 .*is not known to be over",
    ),
    Planted(
        name="the last slot alone is not waited for",
        edit=drop_wait("10000000", -5),
        expected=r"R12 .*exits while the tcgen05\.commit by warp 12 .*is not known to be over",
    ),
)
