"""Python code as tokens of what it computes: equal on every Python that runs this project, whatever the layout.

A walk of our own over the syntax tree, because `ast.dump`, `ast.unparse` and `repr` of a tree differ from one Python to
the next. Left out is what cannot compute: positions, comments, docstrings and other constants as statements, `pass`,
and annotations of arguments, results and variables (nothing in a proof reads them; `UNSEEN` is refused). Annotations in
a class body stay: dataclasses and named tuples are made of them. A node or a field that this module does not know is an
error, so that a new kind of syntax cannot slip through unseen.
"""

import ast
from collections.abc import Callable, Iterable, Iterator

from fa4build.errors import Fa4BuildError

Reference = tuple[str, ...]
"""What a name means outside the statement it stands in: see code_identity."""

_BODY = ("body", "orelse", "finalbody")
# Fields in an order of our own; what is None or empty is left out, so a field that a later Python adds does no harm.
_FIELDS = {
    **dict.fromkeys(("Return", "Expr", "Await", "Yield", "YieldFrom", "Starred", "MatchValue"), ("value",)),
    **dict.fromkeys(("Break", "Continue"), ()),
    **dict.fromkeys(("Global", "Nonlocal"), ("names",)),
    **dict.fromkeys(("For", "AsyncFor"), ("target", "iter", "body", "orelse")),
    **dict.fromkeys(("With", "AsyncWith"), ("items", "body")),
    **dict.fromkeys(("Try", "TryStar"), ("body", "handlers", "orelse", "finalbody")),
    **dict.fromkeys(("ListComp", "SetComp", "GeneratorExp"), ("generators", "elt")),
    **dict.fromkeys(("List", "Tuple", "Set"), ("elts",)),
    **dict.fromkeys(("While", "If", "IfExp"), ("test", "body", "orelse")),
    **dict.fromkeys(("MatchSequence", "MatchOr"), ("patterns",)),
    "Delete": ("targets",),
    "Assign": ("targets", "value"),
    "AugAssign": ("target", "op", "value"),
    "TypeAlias": ("name", "type_params", "value"),
    "Match": ("subject", "cases"),
    "Raise": ("exc", "cause"),
    "Assert": ("test", "msg"),
    "BoolOp": ("op", "values"),
    "NamedExpr": ("target", "value"),
    "BinOp": ("left", "op", "right"),
    "UnaryOp": ("op", "operand"),
    "Lambda": ("args", "body"),
    "Dict": ("keys", "values"),
    "DictComp": ("generators", "key", "value"),
    "Compare": ("left", "ops", "comparators"),
    "Call": ("func", "args", "keywords"),
    "Subscript": ("value", "slice"),
    "Slice": ("lower", "upper", "step"),
    "comprehension": ("target", "iter", "ifs", "is_async"),
    "ExceptHandler": ("type", "name", "body"),
    "arguments": ("posonlyargs", "args", "vararg", "kwonlyargs", "kw_defaults", "kwarg", "defaults"),
    "arg": ("arg",),
    "keyword": ("arg", "value"),
    "withitem": ("context_expr", "optional_vars"),
    "match_case": ("pattern", "guard", "body"),
    "MatchMapping": ("keys", "patterns", "rest"),
    "MatchClass": ("cls", "patterns", "kwd_attrs", "kwd_patterns"),
    "MatchStar": ("name",),
    "MatchAs": ("pattern", "name"),
    "TypeVar": ("name", "bound", "default_value"),
    "ParamSpec": ("name", "default_value"),
    "TypeVarTuple": ("name", "default_value"),
}
UNSEEN = frozenset(("__annotations__", "__doc__", "__module__", "co_firstlineno", "get_type_hints"))
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Lookup = Callable[[ast.expr, "ast.stmt | None"], "Reference | None"]
"""The reference of a Name or Attribute, None where it means nothing outside: a builtin, or an attribute of a value. The
statement is the import inside a function that binds it there, None where the module does."""


class TokenError(Fa4BuildError):
    """Code whose identity cannot be told."""


def tokens_of(statement: ast.stmt, lookup: Lookup) -> tuple[tuple[str, ...], tuple[Reference, ...]]:
    """Tokens of a statement of a module, and what they refer to in order. The name it defines is not among them.

    Raises: TokenError: syntax that is not known here, or a look at what the tokens leave out (`UNSEEN`).
    """
    writer = _Writer(lookup)
    writer.definition(statement, None) if isinstance(statement, _DEFINITIONS) else writer.node(statement)
    return tuple(writer.out), tuple(writer.references)


def cannot_compute(statement: ast.stmt) -> bool:
    """Docstrings, `...`, `pass`, and declarations of a variable's type alone."""
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_constant or isinstance(statement, ast.Pass)


def is_for_type_checkers(statement: ast.stmt) -> bool:
    """`if TYPE_CHECKING:` without an else."""
    test = statement.test if isinstance(statement, ast.If) and not statement.orelse else None
    return getattr(test, "id", None) == "TYPE_CHECKING" or getattr(test, "attr", None) == "TYPE_CHECKING"


class _Writer:
    """Writes the tokens of one statement."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._scopes: list[dict[str, ast.stmt | None]] = []
        self._in_class = False
        self.out: list[str] = []
        self.references: list[Reference] = []

    def node(self, node: ast.AST) -> None:
        """Writes a node of any kind."""
        kind = type(node).__name__
        special = getattr(self, f"_{kind}", None)
        if special is not None:
            special(node)
        elif isinstance(node, (ast.operator, ast.unaryop, ast.cmpop, ast.boolop)):
            self.out.append(kind)
        elif isinstance(node, _COMPREHENSIONS):
            self.node(node.generators[0].iter)  # it is evaluated outside, where its names may mean something else
            self._within(_stored(ast.iter_child_nodes(node)), lambda: self._fields(node, kind))
        else:
            self._fields(node, kind)

    def _fields(self, node: ast.AST, kind: str) -> None:
        if kind not in _FIELDS:
            raise TokenError(
                f"line {getattr(node, 'lineno', '?')}: {kind} is syntax without tokens; give it some in code_tokens"
            )
        self._group(kind, ((name, getattr(node, name, None)) for name in _FIELDS[kind]))

    def _group(self, kind: str, fields: Iterable[tuple[str, object]]) -> None:
        self.out += ("(", kind)
        for name, value in fields:
            if isinstance(value, list) and name in _BODY:
                value = [statement for statement in value if not cannot_compute(statement)]
            if value is None or value == [] or (name, value) == ("is_async", 0):
                continue
            self.out.append(f"{name}=")
            self._value(value)
        self.out.append(")")

    def _value(self, value: object) -> None:
        if isinstance(value, list):
            self.out.append("[")
            for item in value:
                self._value(item)
            self.out.append("]")
        elif isinstance(value, ast.AST):
            self.node(value)
        else:
            self.out.append("none" if value is None else _constant(value))

    def _within(self, names: dict[str, ast.stmt | None], write: Callable[[], None]) -> None:
        """Writes what sees these names of its own."""
        outer, self._in_class = self._in_class, False
        self._scopes.append(names)
        write()
        self._scopes.pop()
        self._in_class = outer

    # --- names

    def _reference(self, node: ast.expr) -> Reference | None:
        """What a name or a dotted name means outside this statement."""
        first = node
        while isinstance(first, ast.Attribute):
            first = first.value
        if not isinstance(first, ast.Name):
            return None
        for names in reversed(self._scopes):
            if first.id in names:
                bound = names[first.id]
                return None if bound is None else self._lookup(node, bound)
        return self._lookup(node, None)

    def _is_own(self, node: ast.Name) -> bool:
        return self._in_class and isinstance(node.ctx, ast.Store)

    def _Name(self, node: ast.Name) -> None:
        if node.id in UNSEEN:
            raise TokenError(f"line {node.lineno}: {node.id} is looked at, which the identity of code leaves out")
        found = None if self._is_own(node) else self._reference(node)
        if found is None or self._in_class:
            self.out += ("name", _constant(node.id))
        if found is not None:
            self._refer(found)

    def _refer(self, reference: Reference) -> None:
        self.out.append("reference")
        self.references.append(reference)

    def _Attribute(self, node: ast.Attribute) -> None:
        if node.attr in UNSEEN:
            raise TokenError(f"line {node.lineno}: {node.attr} is looked at, which the identity of code leaves out")
        found = self._reference(node)
        if found is not None:
            self._refer(found)
        else:
            self._group("Attribute", (("value", node.value), ("attr", node.attr)))

    # --- literals

    def _Constant(self, node: ast.Constant) -> None:
        self.out.append(_constant(node.value))

    def _JoinedStr(self, node: ast.JoinedStr) -> None:
        self.out += ("(", "JoinedStr", *self._joined(node), ")")

    def _joined(self, node: ast.JoinedStr) -> list[str]:
        """Parts with neighbouring constants as one: Pythons before 3.12 cut them elsewhere."""
        outer, self.out = self.out, []
        text = ""
        for part in _parts(node):
            if isinstance(part, str):
                text += part
                continue
            self.out += [_constant(text)] if text else []
            text = ""
            self._formatted(part)
        self.out += [_constant(text)] if text else []
        written, self.out = self.out, outer
        return written

    def _formatted(self, part: ast.FormattedValue) -> None:
        self.out += ("{", _constant(part.conversion))
        self.node(part.value)
        if part.format_spec is not None:
            self.out += self._joined(part.format_spec)  # type: ignore[arg-type]
        self.out.append("}")

    # --- definitions

    def _FunctionDef(self, node: ast.FunctionDef) -> None:
        self.definition(node, node.name)

    _AsyncFunctionDef = _ClassDef = _FunctionDef

    def definition(self, node: ast.stmt, name: str | None) -> None:
        """A function or class; without a name where what refers to it does so by its place."""
        kind = type(node).__name__
        head = [("name", name), ("decorators", node.decorator_list), ("type_params", getattr(node, "type_params", []))]
        if isinstance(node, ast.ClassDef):
            head += [("bases", node.bases), ("keywords", node.keywords)]
        self._group(kind, head)
        write = self._class_body if isinstance(node, ast.ClassDef) else self._function_body
        write(node)

    def _class_body(self, node: ast.ClassDef) -> None:
        outer, self._in_class = self._in_class, True
        self._group("of", [("body", node.body)])
        self._in_class = outer

    def _function_body(self, node: ast.FunctionDef) -> None:
        self._defaults(node.args)
        self._within(_bound(node), lambda: self._group("of", [("args", _bare(node.args)), ("body", node.body)]))

    def _defaults(self, args: ast.arguments) -> None:
        """They are evaluated where the function is defined."""
        self._group("defaults", [("positional", args.defaults), ("keywords", args.kw_defaults)])

    def _Lambda(self, node: ast.Lambda) -> None:
        self._defaults(node.args)
        self._within(_bound(node), lambda: self._group("Lambda", [("args", _bare(node.args)), ("result", node.body)]))

    def _AnnAssign(self, node: ast.AnnAssign) -> None:
        if self._in_class:
            fields = [("target", node.target), ("annotation", node.annotation), ("value", node.value)]
            self._group("Field", fields)
        elif node.value is not None:
            self._group("Assign", [("targets", [node.target]), ("value", node.value)])

    def _Import(self, node: ast.stmt) -> None:
        """Written where what it binds is used."""

    _ImportFrom = _Import

    def _MatchSingleton(self, node: ast.MatchSingleton) -> None:
        self.out += ("case", _constant(node.value))

    def _If(self, node: ast.If) -> None:
        if not is_for_type_checkers(node):
            self._fields(node, "If")


def _parts(node: ast.JoinedStr) -> Iterator[str | ast.FormattedValue]:
    """Text and formatted values, nested f-strings of implicit concatenation taken apart."""
    for value in node.values:
        if isinstance(value, ast.JoinedStr):
            yield from _parts(value)
        elif isinstance(value, ast.FormattedValue):
            yield value
        elif isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value
        else:
            raise TokenError(f"an f-string holds a {type(value).__name__}; give it tokens in code_tokens")


def _constant(value: object) -> str:
    """A literal with its type, the same on every Python: True is not 1, 1 is not 1.0, 0.0 is not -0.0."""
    if value is None or value is Ellipsis or isinstance(value, bool):
        return f"={value}"
    if isinstance(value, str):
        return f"s:{value}"
    if isinstance(value, bytes):
        return f"b:{value.hex()}"
    if isinstance(value, int):
        return f"i:{value:x}"
    if isinstance(value, float):
        return f"f:{value.hex()}"
    if isinstance(value, complex):
        return f"c:{value.real.hex()},{value.imag.hex()}"
    raise TokenError(f"a literal of type {type(value).__name__} has no tokens; give it some in code_tokens")


def _bare(args: ast.arguments) -> ast.arguments:
    """Arguments without defaults, but with which of them have one."""
    marks = [ast.Constant(value=default is not None) for default in args.kw_defaults]
    return ast.arguments(
        posonlyargs=args.posonlyargs,
        args=args.args,
        vararg=args.vararg,
        kwonlyargs=args.kwonlyargs,
        kw_defaults=marks,
        kwarg=args.kwarg,
        defaults=[ast.Constant(value=True) for _ in args.defaults],
    )


Names = dict[str, "ast.stmt | None"]
"""Names that a function binds for itself; for those that an import binds, the import."""

_LEAVES = (ast.Constant, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)


def _bound(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Names:
    """Names of a function's own."""
    args = node.args
    every = (*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg)))
    names: Names = {arg.arg: None for arg in every}
    names |= _stored([node.body] if isinstance(node, ast.Lambda) else node.body)
    return names


def _stored(nodes: Iterable[ast.AST]) -> Names:
    """Names that nodes bind in the function they stand in, but for those that it declares to be another's."""
    names: Names = {}
    others: set[str] = set()
    waiting = list(nodes)
    while waiting:
        part = waiting.pop()
        if isinstance(part, _LEAVES):
            continue
        if isinstance(part, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.split(".")[0]: part for alias in part.names}
        elif isinstance(part, ast.Global):
            others.update(part.names)
        elif (name := _stored_name(part)) is not None:
            names.setdefault(name, None)
        waiting += _same_function(part)
    return {name: statement for name, statement in names.items() if name not in others}


def _stored_name(part: ast.AST) -> str | None:
    """The name that a node binds by itself."""
    if isinstance(part, ast.Name):
        return None if isinstance(part.ctx, ast.Load) else part.id
    if isinstance(part, (*_DEFINITIONS, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        return part.name
    return part.rest if isinstance(part, ast.MatchMapping) else None


def _same_function(part: ast.AST) -> Iterator[ast.AST]:
    """What lies below a node and is of the same function: of definitions the head, of a comprehension a walrus."""
    if isinstance(part, _COMPREHENSIONS):
        return (below.target for below in ast.walk(part) if isinstance(below, ast.NamedExpr))
    if isinstance(part, _DEFINITIONS):
        return iter(part.decorator_list)
    return iter(()) if isinstance(part, ast.Lambda) else ast.iter_child_nodes(part)
