"""Gathers equal elementwise calls of one generated node into one call on stacked arrays.

A softmax has hundreds of independent ex2, fma and conversions in a row, each on the lanes of a gang: most of their time
is the cost of a numpy call. Lines of a node are single assignments, so a pure line may run as soon as its inputs are
there: all others first, then the largest group of equal calls that is ready. Lines with effects keep their order.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict

import numpy as np

from fa4build.simulate.translate.node_scope import in_node_scope

BATCHED = ("fma32", "approximate", "bf16_bits", "f16_bits", "fmax", "fmin")
_SMALLEST = 4  # calls that are worth stacking
_LARGEST = 32  # then the arrays outgrow the first-level cache
_CALL = re.compile(rf"(t\d+) = ({'|'.join(BATCHED)})\(([^()]*)\)")
_VALUE = re.compile(r"[tk]\d+(?:\[[01]\])?")
_NAME = re.compile(r"\b[tk]\d+\b")
_PURE = re.compile(r"[tk]\d+ = (?!.*\(g\b)")


@in_node_scope
def stacked(arrays):
    """Arrays of equal length as the rows of one."""
    return np.concatenate(arrays).reshape(len(arrays), -1)


def batched(lines: list[str]) -> list[str]:
    """The lines in an order, and with calls merged, that give every name the same value."""
    groups = [_group(line) for line in lines]
    sizes: dict[tuple, int] = defaultdict(int)
    for group in groups:
        sizes[group] += 1
    if all(size < _SMALLEST for group, size in sizes.items() if group is not None):
        return lines
    followers, missing = _dependencies(lines)
    plain: list[int] = []
    waiting: dict[tuple, list[int]] = defaultdict(list)

    def is_ready(index: int) -> None:
        group = groups[index]
        if group is None or sizes[group] < _SMALLEST:
            heapq.heappush(plain, index)
        else:
            waiting[group].append(index)

    for index, count in enumerate(missing):
        if not count:
            is_ready(index)
    result: list[str] = []
    while plain or waiting:
        if plain:
            done = [heapq.heappop(plain)]
            result.append(lines[done[0]])
        else:
            group = max(waiting, key=lambda g: len(waiting[g]))
            done = waiting.pop(group)
            for first in range(0, len(done), _LARGEST):
                result += _merged([lines[i] for i in done[first : first + _LARGEST]])
        for index in done:
            for follower in followers[index]:
                missing[follower] -= 1
                if not missing[follower]:
                    is_ready(follower)
    return result


def _group(line: str) -> tuple | None:
    """Function, and the arguments that are no arrays; None for a line that is not gathered."""
    call = _CALL.fullmatch(line)
    if call is None:
        return None
    arguments = call[3].split(", ")
    return call[2], tuple(None if _VALUE.fullmatch(argument) else argument for argument in arguments)


def _dependencies(lines: list[str]) -> tuple[list[list[int]], list[int]]:
    """For each line those that need it, and how many it needs."""
    maker: dict[str, int] = {}
    followers: list[list[int]] = [[] for _ in lines]
    missing = [0] * len(lines)
    last_effect: int | None = None
    for index, line in enumerate(lines):
        is_pure = _PURE.match(line) is not None
        names = _NAME.findall(line)
        if " = " in line and _NAME.fullmatch(line.split(" = ", 1)[0]):
            target = names.pop(0)
        else:
            target = None
        needed = {maker[name] for name in names if name in maker}
        if not is_pure:
            if last_effect is not None:
                needed.add(last_effect)
            last_effect = index
        for other in needed:
            followers[other].append(index)
        missing[index] = len(needed)
        if target is not None:
            maker[target] = index
    return followers, missing


def _merged(calls: list[str]) -> list[str]:
    """One line for several calls; few are left as they are."""
    if len(calls) < _SMALLEST:
        return calls
    parsed = [call for call in map(_CALL.fullmatch, calls) if call is not None]
    columns = list(zip(*(call[3].split(", ") for call in parsed), strict=True))
    # Where all calls are the same one, their names share its value.
    separator = " = " if all(len(set(values)) == 1 for values in columns) else ", "
    arguments = [values[0] if len(set(values)) == 1 else f"stacked(({', '.join(values)}))" for values in columns]
    return [f"{separator.join(call[1] for call in parsed)} = {parsed[0][2]}({', '.join(arguments)})"]
