"""The one data-dependent loop of host code: the search for the power of two that reaches a number.

    m = 2; l = 1
    while m < n:        # unsigned
        m = m * 2; l = l + 1

CuTe's fast division is prepared with it. After it, l = max(ceil(log2 n), 1). The loop is not matched by its operations
but by what they compute: it is executed for every m that its type can hold, and each value must turn out to be
unchanged, an arithmetic progression, or the powers of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fa4build.errors import LaunchPlanError
from fa4build.plan.builder import NodeTable
from fa4build.plan.values import INT_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One time through the block that decides: the condition to go on, and the block's values by name."""

    condition: int
    values: Mapping[str, Any]


def _search(table: NodeTable, condition: int) -> tuple[str, int, int]:
    """(type, log2 of the present power, node of the number) of a condition `power < number`, unsigned."""
    node = table.nodes[condition]
    if node[0] in ("ult", "ugt"):
        power, number = (node[2], node[3]) if node[0] == "ult" else (node[3], node[2])
        value = table.constant(power)
        if isinstance(value, int):
            bits = value & ((1 << INT_BITS[node[1]]) - 1)
            if bits and bits & (bits - 1) == 0:
                return node[1], bits.bit_length() - 1, number
    raise LaunchPlanError(
        "a loop depends on data; only the search for a power of two that reaches a number is understood"
    )


def search_length(table: NodeTable, condition: int) -> int:
    """How often the loop's condition can be evaluated before its power of two leaves the type.

    Raises: LaunchPlanError if the condition is not `2**k < number`.
    """
    type_, log2, _ = _search(table, condition)
    return INT_BITS[type_] - log2


def summarize_search(table: NodeTable, iterations: Sequence[Iteration]) -> dict[str, int | None]:
    """Value of every name when the loop is left, from all its iterations; names that follow no rule are left out.

    Raises: LaunchPlanError if some iteration's condition is not the next power of two against the same number.
    """
    type_, first_log2, number = _search(table, iterations[0].condition)
    for i, iteration in enumerate(iterations):
        if _search(table, iteration.condition) != (type_, first_log2 + i, number):
            raise LaunchPlanError("a loop depends on data and its power of two does not double every time")
    log2 = table.op("clog2", "i32", number)
    zero = table.const(0, "i32")
    rounds = table.op("smax", "i32", table.op("sub", "i32", log2, table.const(first_log2, "i32")), zero)
    reached = table.op("smax", "i32", log2, table.const(first_log2, "i32"))
    found: dict[str, int | None] = {}
    for name in iterations[0].values:
        sequence = [iteration.values[name] for iteration in iterations]
        if all(value == sequence[0] for value in sequence):
            found[name] = sequence[0]
            continue
        constants = [table.constant(node) if isinstance(node, int) else None for node in sequence]
        if all(isinstance(c, int) for c in constants):
            value_type = table.type_of(sequence[0])
            result = _progression(table, constants, value_type, rounds, (reached, first_log2))
            if result is not None:
                found[name] = result
    return found


def _progression(
    table: NodeTable, constants: Sequence[Any], type_: str, rounds: int, reached: tuple[int, int]
) -> int | None:
    """constants[rounds] as an expression, if the constants are an arithmetic progression or double every time."""
    start, step = constants[0], constants[1] - constants[0]
    modulus = 1 << INT_BITS[type_]
    if all((c - start - i * step) % modulus == 0 for i, c in enumerate(constants)):
        if step == 1 and start == reached[1]:
            return _resized(table, reached[0], type_)
        scaled = table.op("mul", type_, _resized(table, rounds, type_), table.const(step, type_))
        return table.op("add", type_, scaled, table.const(start, type_))
    if all((c - (start << i)) % modulus == 0 for i, c in enumerate(constants)):
        return table.op("shl", type_, table.const(start, type_), _resized(table, rounds, type_))
    return None


def _resized(table: NodeTable, node: int, type_: str) -> int:
    """An i32 node as another integer type."""
    if type_ == "i32":
        return node
    return table.op("zext" if INT_BITS[type_] > 32 else "trunc", type_, node)
