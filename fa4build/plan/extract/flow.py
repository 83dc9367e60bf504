"""Control flow of one host function: where it can only fail, where branches meet again, which branches are loops."""

from __future__ import annotations

from functools import cached_property

from fa4build.plan.extract.mlir_text import Function, Op

EXIT = ""  # the virtual block after every return


class Flow:
    """Facts about the blocks of a function, found once when asked for."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.successors = {label: block.ops[-1].successors for label, block in function.blocks.items()}
        self._joins: dict[str, str] = {}

    @cached_property
    def _definitions(self) -> dict[str, Op]:
        return {op.result: op for block in self.function.blocks.values() for op in block.ops if op.result}

    @cached_property
    def failing(self) -> frozenset[str]:
        """Blocks from which every path traps or returns a constant other than 0: an error is being reported."""
        failing: set[str] = {label for label in self.successors if self._ends_in_failure(label)}
        is_growing = True
        while is_growing:
            is_growing = False
            for label, following in self.successors.items():
                if label not in failing and following and all(s in failing for s in following):
                    failing.add(label)
                    is_growing = True
        return frozenset(failing)

    def _ends_in_failure(self, label: str) -> bool:
        last = self.function.blocks[label].ops[-1]
        if last.name == "unreachable":
            return True
        if last.name != "return" or len(last.operands) != 1:
            return False
        source = self._definitions.get(last.operands[0])
        return source is not None and source.name == "mlir.constant" and source.integer("value") not in (0, None)

    def join(self, label: str) -> str:
        """The nearest block that every path from `label` reaches, failing paths aside; EXIT if that is the return."""
        if label not in self._joins:
            self._joins = self._immediate_postdominators()
        return self._joins[label]

    def _immediate_postdominators(self) -> dict[str, str]:
        """Cooper, Harvey, Kennedy, "A Simple, Fast Dominance Algorithm", on the reversed graph."""
        edges = {
            label: [s for s in following if s not in self.failing] or [EXIT]
            for label, following in self.successors.items()
            if label not in self.failing
        }
        predecessors: dict[str, list[str]] = {label: [] for label in (EXIT, *edges)}
        for label, following in edges.items():
            for successor in following:
                predecessors[successor].append(label)
        order = self._postorder(EXIT, predecessors)
        rank = {label: i for i, label in enumerate(order)}
        parent = {EXIT: EXIT}
        is_changing = True
        while is_changing:
            is_changing = False
            for label in reversed(order[:-1]):
                known = [s for s in edges[label] if s in parent]
                best = known[0]
                for other in known[1:]:
                    best = self._meet(best, other, parent, rank)
                if parent.get(label) != best:
                    parent[label] = best
                    is_changing = True
        return parent

    @staticmethod
    def _postorder(root: str, edges: dict[str, list[str]]) -> list[str]:
        order: list[str] = []
        seen = {root}
        stack = [(root, iter(edges[root]))]
        while stack:
            label, following = stack[-1]
            successor = next((s for s in following if s not in seen), None)
            if successor is None:
                order.append(label)
                stack.pop()
            else:
                seen.add(successor)
                stack.append((successor, iter(edges[successor])))
        return order

    @staticmethod
    def _meet(a: str, b: str, parent: dict[str, str], rank: dict[str, int]) -> str:
        while a != b:
            while rank[a] < rank[b]:
                a = parent[a]
            while rank[b] < rank[a]:
                b = parent[b]
        return a

    def returns_to(self, start: str, label: str) -> bool:
        """True if a path from `start` comes back to `label` before the join of `label`: its branch is a loop's."""
        join = self.join(label)
        seen, stack = set(), [start]
        while stack:
            block = stack.pop()
            if block == label:
                return True
            if block == join or block in seen:
                continue
            seen.add(block)
            stack += self.successors[block]
        return False
