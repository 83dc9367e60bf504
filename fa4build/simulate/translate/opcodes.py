"""The opcode table: which rule executes an exact opcode string. What is in no table is a `SimulationError`.

Two kinds of rule. *Fused* rules write numpy expressions into the generated source of a straight-line run. *System*
rules make a closure `fn(gang, mask)` for what touches barriers, engines or the scheduler; it may return a `Wait` or
`Split`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from fa4build.errors import SimulationError


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table. `make(emitter or binder, instruction, match)`."""

    pattern: re.Pattern
    is_system: bool
    make: Callable


_RULES: list[Rule] = []


def fused(pattern: str) -> Callable:
    """Registers an expression rule for every opcode that `pattern` matches completely."""
    return _register(pattern, False)


def system(pattern: str) -> Callable:
    """Registers a closure rule for every opcode that `pattern` matches completely."""
    return _register(pattern, True)


def _register(pattern: str, is_system: bool) -> Callable:
    def add(make: Callable) -> Callable:
        _RULES.append(Rule(re.compile(pattern), is_system, make))
        return make

    return add


@cache
def _find(opcode: str) -> tuple[Rule, re.Match] | None:
    for rule in _RULES:
        if match := rule.pattern.fullmatch(opcode):
            return rule, match
    return None


def maker_of(opcode: str) -> Callable | None:
    """The function that executes an opcode, None where it is in no table."""
    found = _find(opcode)
    return None if found is None else found[0].make


def rule_for(opcode: str, line: int) -> tuple[Rule, re.Match]:
    """The rule of an opcode.

    Raises:
        SimulationError: the opcode, or one of its modifiers, is in no table.
    """
    found = _find(opcode)
    if found is None:
        raise SimulationError(
            f"PTX line {line}: opcode {opcode!r} is not in the simulator's table (unknown opcode or modifier); "
            "add a rule with its semantics and a test before trusting a run"
        )
    return found
