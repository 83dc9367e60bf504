"""Expressions of recipes and dispatch rules: a small, total part of Python over integers and numbers.

Allowed are numbers, names, `+ - * // % **` (exponent a number of at most 64), comparisons, `and`, `or`, `not`,
`a if b else c`, and min, max, ceil_div, round_up. Nothing else can be said, so a pack cannot run code. A power has at
most _MAX_BITS bits, so it can keep no processor busy.
"""

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from .errors import PackError

Number = int | float | bool
_MAX_EXPONENT = 64
_MAX_LENGTH = 1000
_MAX_BITS = 4096

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.Not, ast.And, ast.Or)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_ALLOWED = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Name, ast.Load),
    *(ast.Constant, *_OPERATORS, *_COMPARISONS),
)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return -(-a // b) * b


def _power(base: Number, exponent: int | float) -> Number:
    if isinstance(base, int) and base.bit_length() * max(exponent, 0) > _MAX_BITS:
        raise ValueError(f"a power of more than {_MAX_BITS} bits")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError(f"{base} ** {exponent} is no real number")
    return result


class _BoundedPowers(ast.NodeTransformer):
    """`a ** b` becomes a call of _power, whose name no expression can say."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Pow):
            return node
        called = ast.Name("<power>", ast.Load())
        return ast.copy_location(ast.Call(called, [node.left, node.right], []), node)


FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "ceil_div": _ceil_div, "round_up": _round_up}


def evaluate(text: str, names: Mapping[str, Number]) -> Any:
    """The value of an expression.

    Raises: PackError when the text is none of ours or names something unknown.
    """
    code, used = _compiled(text)
    missing = used - names.keys()
    if missing:
        raise PackError(f"expression {text!r}: {', '.join(sorted(missing))} is unknown. Known: {sorted(names)}.")
    try:
        return eval(code, {"__builtins__": {}, "<power>": _power, **FUNCTIONS}, {name: names[name] for name in used})
    except (ArithmeticError, TypeError, ValueError, RecursionError) as error:
        raise PackError(f"expression {text!r} has no value: {error}.") from error


def names_in(text: str) -> frozenset[str]:
    """The names that an expression reads. Raises: PackError as `evaluate`."""
    return _compiled(text)[1]


@lru_cache(maxsize=4096)
def _compiled(text: str) -> tuple[Any, frozenset[str]]:
    if len(text) > _MAX_LENGTH:
        raise PackError(f"an expression of {len(text)} characters; allowed are {_MAX_LENGTH}.")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PackError(f"{text!r} is no expression: {error}.") from error
    functions = set()
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise PackError(f"expression {text!r}: {type(node).__name__} is not allowed.")
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS or node.keywords:
                raise PackError(f"expression {text!r}: allowed functions are {', '.join(FUNCTIONS)}.")
            functions.add(node.func)
        if isinstance(node, ast.Constant) and type(node.value) not in (int, float, bool):
            raise PackError(f"expression {text!r}: {node.value!r} is no number.")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not _is_small_number(node.right):
            raise PackError(f"expression {text!r}: an exponent is a number of at most {_MAX_EXPONENT}.")
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node not in functions}
    bounded = ast.fix_missing_locations(_BoundedPowers().visit(tree))
    return compile(bounded, "<recipe>", "eval"), frozenset(names)


def _is_small_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and abs(node.value) <= _MAX_EXPONENT
