"""A gang: warps of one CTA that run in lockstep, as one set of lanes.

A CTA starts as one gang of all its warps. Where warps take different ways the gang splits by warp; where lanes of a
warp do, the gang keeps a reconvergence stack (immediate post-dominators). Gangs that meet again are merged. Lockstep
is one legal interleaving of the warps, and one numpy operation then serves up to 16 warps.
"""

from typing import Any

import numpy as np

from fa4build.errors import SimulationError
from fa4build.simulate.hardware.registers import concatenate, poison, select

# Scheduler codes a node function may return instead of the next node.
BLOCKED, SPLIT, DEAD, PAUSED = -1, -2, -3, -4
_NOWHERE = -100
_ROLE_NODES = 20  # a branch apart that lasts this many nodes is taken for a choice of role
WARP = 32


class Fault(SimulationError):
    """An error inside a node; `site` is the instruction's index, for the message that the scheduler adds."""

    def __init__(self, message: str, site: int | None = None):
        super().__init__(message)
        self.site = site


class Gang:
    """Warps in lockstep. `mask` is None when all lanes are active; `stack` holds (node, mask, reconvergence node)."""

    __slots__ = (
        "active",
        "constants",
        "cta",
        "dead",
        "exited",
        "fenced",
        "hints",
        "lanes",
        "last_poll",
        "mask",
        "paused",
        "pc",
        "program",
        "reconverge",
        "regs",
        "special",
        "stack",
        "stop",
        "tids",
        "wait",
        "warps",
    )  # fmt: skip

    def __init__(self, cta, program, warps: list, regs: list):
        self.cta, self.program, self.warps, self.regs = cta, program, warps, regs
        self.lanes = self.active = WARP * len(warps)
        self.tids = np.concatenate([np.arange(WARP * w.index, WARP * w.index + WARP, dtype=np.uint32) for w in warps])
        self.constants = program.constant_arrays(self.lanes)
        self.pc = 0
        self.mask: np.ndarray | None = None
        self.exited: np.ndarray | None = None
        self.wait: Any = None
        self.last_poll: tuple | None = None
        self.fenced: Any = False  # registers as they were at the last wgmma.fence; None: unknown; False: no fence yet
        self.stack: list[tuple] = []
        self.reconverge = self.stop = _NOWHERE
        self.hints: list[int] = []
        self.paused = self.dead = False
        self.special: dict = {}

    def set_mask(self, mask) -> None:
        """Sets the active lanes; a full mask becomes None."""
        self.active = self.lanes if mask is None else int(np.count_nonzero(mask))
        self.mask = None if self.active == self.lanes else mask

    def aim(self) -> None:
        """Recomputes the node at which the run loop has to hand over to `reach_stop`."""
        if self.stack:
            self.stop = self.reconverge
        else:
            self.stop = self.hints[-1] if self.hints else _NOWHERE

    def push_divergence(self, taken, following: int, target: int, reconverge: int) -> int:
        """Lanes of a warp disagree on a branch: runs one side first, keeps the other and the meeting point."""
        everyone = self.mask
        rest = ~taken if everyone is None else everyone & ~taken
        sides = [(target, taken), (following, rest)]
        self.stack.append((reconverge, everyone, self.reconverge))
        self.reconverge = reconverge
        sides = [side for side in sides if side[0] != reconverge]
        for node, mask in sides[:-1]:
            self.stack.append((node, mask, reconverge))
        node, mask = sides[-1]
        self.set_mask(mask)
        self.aim()
        return node

    def reach_stop(self, node: int) -> int:
        """At a reconvergence point: takes the next pending side, or goes on with everyone; may pause for a merge."""
        while self.stack and node == self.reconverge:
            node, mask, self.reconverge = self.stack.pop()
            if self.exited is not None:
                mask = ~self.exited if mask is None else mask & ~self.exited
                if not mask.any():
                    node = self.reconverge if self.stack else node
                    continue
            self.set_mask(mask)
        self.aim()
        if not self.stack and node == self.stop:
            self.hints.pop()
            self.aim()
            self.pc, self.paused = node, True
            return PAUSED
        return node

    def leave(self) -> int:
        """Active lanes execute `ret`."""
        mask = np.ones(self.lanes, bool) if self.mask is None else self.mask
        self.exited = mask if self.exited is None else self.exited | mask
        self.cta.note_exit(self, mask)
        while self.stack:
            node, mask, self.reconverge = self.stack.pop()
            mask = ~self.exited if mask is None else mask & ~self.exited
            if mask.any() and not (self.stack and node == self.reconverge):
                self.set_mask(mask)
                self.aim()
                return self.reach_stop(node) if node == self.stop else node
        self.dead = True
        return DEAD

    def warp_any(self, mask):
        """Per warp: does any lane of the mask belong to it (None: all)."""
        return np.ones(len(self.warps), bool) if mask is None else mask.reshape(-1, WARP).any(axis=1)

    def subset(self, chosen: list[int]) -> "Gang":
        """A new gang of the warps at those positions, with their lanes of all live state."""
        lanes: Any = np.concatenate([np.arange(WARP * k, WARP * k + WARP) for k in chosen])
        if chosen == list(range(chosen[0], chosen[0] + len(chosen))):
            lanes = slice(WARP * chosen[0], WARP * (chosen[-1] + 1))
        regs: list = [None] * len(self.regs)
        for reg in self.live():
            value = self.regs[reg]
            if value is not None:
                regs[reg] = select(value, lanes)
        child = Gang(self.cta, self.program, [self.warps[k] for k in chosen], regs)
        child.pc, child.reconverge, child.hints = self.pc, self.reconverge, list(self.hints)
        child.stack = [(pc, None if m is None else m[lanes], rpc) for pc, m, rpc in self.stack]
        child.exited = None if self.exited is None else self.exited[lanes]
        child.fenced = False if self.fenced is False else None
        child.set_mask(None if self.mask is None else self.mask[lanes])
        child.aim()
        return child

    def live(self) -> set[int]:
        """Registers that matter at the current node or at any pending one."""
        live = set(self.program.live_registers(self.pc)) if self.pc < self.program.exit_node else set()
        for node, _, _ in self.stack:
            if node < self.program.exit_node:
                live |= set(self.program.live_registers(node))
        return live

    def shape(self) -> tuple:
        """Gangs of equal shape can be merged."""
        return (self.pc, self.reconverge, tuple((pc, rpc) for pc, _, rpc in self.stack), tuple(self.hints))


def merge_gangs(gangs: list[Gang]) -> Gang:
    """One gang out of several of equal shape."""
    first = gangs[0]
    warps = [w for g in gangs for w in g.warps]
    order = sorted(range(len(warps)), key=lambda k: warps[k].index)
    in_order = order == list(range(len(warps)))
    lanes = None if in_order else np.concatenate([np.arange(WARP * k, WARP * k + WARP) for k in order])

    def join(values: list):
        joined = concatenate(values)
        return joined if in_order else select(joined, lanes)

    regs: list = [None] * len(first.regs)
    for reg in first.live():
        values = [g.regs[reg] for g in gangs]
        if any(v is not None for v in values):
            storage = first.program.storage[reg]
            regs[reg] = join([poison(storage, g.lanes) if v is None else v for g, v in zip(gangs, values, strict=True)])

    def join_masks(masks: list):
        if all(m is None for m in masks):
            return None
        return join([np.ones(g.lanes, bool) if m is None else m for g, m in zip(gangs, masks, strict=True)])

    merged = Gang(first.cta, first.program, [warps[k] for k in order], regs)
    merged.pc, merged.reconverge, merged.hints = first.pc, first.reconverge, list(first.hints)
    merged.stack = [(pc, join_masks([g.stack[i][1] for g in gangs]), rpc) for i, (pc, _, rpc) in enumerate(first.stack)]
    merged.fenced = False if all(g.fenced is False for g in gangs) else None
    if any(g.exited is not None for g in gangs):
        merged.exited = join([np.zeros(g.lanes, bool) if g.exited is None else g.exited for g in gangs])
    merged.set_mask(join_masks([g.mask for g in gangs]))
    merged.aim()
    return merged


def diverge(gang: Gang, taken, following: int, target: int, reconverge: int, is_uniform: bool, line: int) -> int:
    """A branch on which active lanes disagree: splits the gang by warp, then diverges inside warps."""
    rest = ~taken if gang.mask is None else gang.mask & ~taken
    kinds = gang.warp_any(taken) + 2 * gang.warp_any(rest)
    if is_uniform and (kinds == 3).any():
        raise Fault(f"bra.uni at line {line}: lanes of one warp disagree")
    if target == following:
        return following  # around an empty block: both ways are one
    present = sorted(set(kinds.tolist()) - {0})
    if len(present) == 1:
        return gang.push_divergence(taken, following, target, reconverge) if present[0] == 3 else 0
    kinds = np.where(kinds == 0, present[0], kinds)
    gang.pc = following
    # Both ways are still open, so registers live on either side are kept.
    gang.stack.append((target, None, _NOWHERE))
    children = []
    for kind in present:
        chosen = np.flatnonzero(kinds == kind).tolist()
        child = gang.subset(chosen)
        child.stack.pop()
        if not child.stack and reconverge != gang.program.exit_node:
            child.hints.append(reconverge)
        child.aim()
        child.pc = target if kind == 1 else following
        if reconverge - following > _ROLE_NODES:
            for warp in child.warps:
                warp.role = child.program.line_of(child.pc)
        if kind == 3:
            lanes = np.concatenate([np.arange(WARP * k, WARP * k + WARP) for k in chosen])
            child.pc = child.push_divergence(taken[lanes], following, target, reconverge)
        children.append(child)
    gang.cta.replace(gang, children)
    return SPLIT


def exit_lanes(gang: Gang) -> int:
    """Node function of the end of the kernel."""
    return gang.leave()


def place(gang: Gang) -> str:
    """`CTA (0, 0, 0), role of line 118, warps 0-3`: a role is named by the PTX line at which its warps branched
    apart.
    """
    warps = [w.index for w in gang.warps]
    span = f"warp {warps[0]}" if len(warps) == 1 else f"warps {warps[0]}-{warps[-1]}"
    role = gang.warps[0].role
    note = f"role of line {role}, " if role is not None else ""
    return f"CTA {gang.cta.ctaid}, {note}{span}"
