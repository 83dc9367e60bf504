"""Basic blocks, reconvergence points (immediate post-dominators) and register liveness of a function."""

from dataclasses import dataclass

from fa4build.simulate.ptx.instructions import Function, Instruction

BRANCHES = frozenset(["bra", "bra.uni"])
EXITS = frozenset(["ret", "exit"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Instructions [start, stop) with one entry; `successors` are block indices, the number of blocks meaning exit."""

    start: int
    stop: int
    successors: tuple[int, ...]


def basic_blocks(function: Function) -> tuple[Block, ...]:
    """Splits a function at branch targets and after branches and exits."""
    code = function.instructions
    leaders = {0}
    for i, ins in enumerate(code):
        if ins.opcode in BRANCHES:
            leaders.add(ins.operands[0].index)
        if ins.opcode in BRANCHES or ins.opcode in EXITS:
            leaders.add(i + 1)
    starts = sorted(s for s in leaders if s < len(code))
    number = {start: k for k, start in enumerate(starts)}
    number[len(code)] = len(starts)
    stops = [*starts[1:], len(code)]
    return tuple(
        Block(start=start, stop=stop, successors=_successors(code[stop - 1], stop, number, len(starts)))
        for start, stop in zip(starts, stops, strict=True)
    )


def _successors(last: Instruction, stop: int, number: dict[int, int], exit_block: int) -> tuple[int, ...]:
    if last.opcode in BRANCHES:
        target = number[last.operands[0].index]
        return (target,) if last.guard is None else tuple(dict.fromkeys((target, number[stop])))
    if last.opcode in EXITS:
        return (exit_block,) if last.guard is None else tuple(dict.fromkeys((exit_block, number[stop])))
    return (number[stop],)


def post_dominators(blocks: tuple[Block, ...]) -> tuple[int, ...]:
    """Immediate post-dominator of every block; `len(blocks)` is the exit.

    Blocks that never reach the exit get the exit.

    Source: Cooper, Harvey, Kennedy, "A Simple, Fast Dominance Algorithm", on the reversed graph.
    """
    exit_block = len(blocks)
    predecessors: list[list[int]] = [[] for _ in range(exit_block + 1)]
    for k, block in enumerate(blocks):
        for s in block.successors:
            predecessors[s].append(k)
    order = _reverse_postorder(exit_block, predecessors)
    rank = {block: i for i, block in enumerate(order)}
    parent: dict[int, int] = {exit_block: exit_block}
    changed = True
    while changed:
        changed = False
        for k in order[1:]:
            known = [s for s in blocks[k].successors if s in parent]
            new = known[0]
            for other in known[1:]:
                new = _intersect(new, other, parent, rank)
            if parent.get(k) != new:
                parent[k] = new
                changed = True
    return tuple(parent.get(k, exit_block) for k in range(exit_block))


def _reverse_postorder(root: int, edges: list[list[int]]) -> list[int]:
    order, seen, stack = [], {root}, [(root, iter(edges[root]))]
    while stack:
        node, it = stack[-1]
        for nxt in it:
            if nxt not in seen:
                seen.add(nxt)
                stack.append((nxt, iter(edges[nxt])))
                break
        else:
            order.append(node)
            stack.pop()
    return order[::-1]


def _intersect(a: int, b: int, parent: dict[int, int], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] > rank[b]:
            a = parent[a]
        while rank[b] > rank[a]:
            b = parent[b]
    return a


def live_in(blocks: tuple[Block, ...], uses: list[int], defs: list[int]) -> list[int]:
    """Registers live at the start of every block, as bit sets. `uses`: read before written; `defs`: surely written."""
    live = [0] * (len(blocks) + 1)
    changed = True
    while changed:
        changed = False
        for k in range(len(blocks) - 1, -1, -1):
            out = 0
            for s in blocks[k].successors:
                out |= live[s]
            new = uses[k] | (out & ~defs[k])
            if new != live[k]:
                live[k] = new
                changed = True
    return live
