"""Contract of fa4build.verify.code_tokens and fa4build.verify.code_identity: code has the identity of what it computes.

The same on every Python that runs this project: the digest of awkward syntax stands here. Comments, layout, docstrings,
annotations that nothing reads, names of modules and of definitions, and what nobody reaches do not count.
All else does: a constant, an operator, which function an import means, a decorator, a field of a dataclass, what a
module does when it is imported. What has no identity is refused.
"""

import hashlib
import sys

import pytest

from fa4build.verify.code_identity import Tree
from fa4build.verify.code_tokens import TokenError, tokens_of

# Each is one statement; together they have what parsers of different versions cut, fold or spell in other ways.
AWKWARD = """
def literals(): return (1e999, -0.0, 0.0, 0x_ff, 10**400, 1j, -2.5e-310, b"\\x00\\xff", "\\ud800", "é", True, 1, None)
def strings(a, b): return f"{a}" "b" f"{b!r:>{a}}{{}}" 'c' f"{a=}" f'{f"{b}"}' f"" + f"{a:}" + u"u" "v"
def slices(x): return x[1], x[1:2], x[::3], x[1:2, ...], x[(1, 2)], x[:, None], x[(*x, 1)] if x else x[()]
def arguments(a, /, b=1, *c, d, e=2, **f): return lambda g, *h, i=3, **j: (a, b, c, d, e, f, g, h, i, j)
def bare(*, a, b=None, c): return print(*a, *b, **c, d=1, **{"e": 2})
def comprehensions(x): return [y for x in x if x for y in x], {a: b for a, b in x}, {a for a in x}, (a async for a in x)
def walrus(x): return [last := y for y in x], (n := 3) if (m := x) else not n
def comparisons(a, b): return a < b <= a != b is not a not in b, a @ b // a ** -b % ~a << b >> a & b, a ^ b, a and b
async def waits(a):
    async with a as b, a: await b
    async for c in a: yield c
    else: pass
def matches(x):
    match x:
        case 1 | "a" | -1.5 | b"b": return 0
        case [1, *rest] | (1, rest): return rest
        case {"k": v, **others} if v: return others
        case str(a) as whole: return a, whole
        case C(1, y=2) | None | True | False | M.N: return 3
        case _: pass
def tries(x):
    global G
    try: raise x from None
    except (A, B) as e: del e
    except C: pass
    else: G = 1
    finally: x.y, x[0], *z = 1, 2, 3
    while x: x -= 1; continue
    else: assert x, "m"
    with x as (a, b), y: pass
    def inner():
        nonlocal z
        z: int = 1
        w: int
        return z
    return inner
class Fields(Base, metaclass=Meta, key=1):
    "A docstring."
    a: int
    b: "str" = "x"
    c: ClassVar[dict[str, int]] = {**{}, 1: 2}
    @property
    def d(self) -> int: return self.a
    class Inner: ...
X, (Y, *Z) = V = 1, (2, 3)
T: dict = {}
T |= {1: 2}
for i in range(3): T[i] = i
"""
DIGEST = "17427b6d5a1e12de1832da77fbe1ddc7dfecdb1ac67acad46d76f0df7a3f1d46"


@pytest.fixture
def tree(tmp_path):
    """Writes modules of a package `p` and gives its tree."""

    def make(**modules: str) -> Tree:
        root = tmp_path / f"tree{len(list(tmp_path.iterdir()))}"
        for name, text in {"__init__": "", **modules}.items():
            path = root.joinpath(*name.split("__in__")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(text, encoding="utf-8")
        return Tree(root, "p")

    return make


def digest(tree: Tree, place: str = "a.f") -> str:
    """Of `module.name` of the package."""
    module, _, name = place.rpartition(".")
    return tree.digest([(f"p.{module}", name)])


# --- the same on every Python -----------------------------------------------------------------------------------------


def test_awkward_syntax_has_the_recorded_digest(tree):
    """Written down here, so that every Python that runs the tests compares with the same."""
    names = [line.split("(")[0].split()[-1] for line in AWKWARD.splitlines() if line.startswith(("def", "async"))]
    found = tree(a=AWKWARD)
    places = [("p.a", name) for name in (*names, "Fields", "Y", "T")]

    assert hashlib.sha256(found.digest(places).encode()).hexdigest() == DIGEST


def test_newer_syntax_is_told_apart_where_there_is_any(tree):
    """Type parameters (3.12) are part of a function; `except*` (3.11) is not `except`."""
    if sys.version_info < (3, 12):
        pytest.skip("this Python has no type parameters")
    generic = tree(a="def f[T](x): return x")
    starred = tree(a="def f(x):\n try: x()\n except* E: pass")

    assert digest(generic) != digest(tree(a="def f(x): return x"))
    assert digest(starred) != digest(tree(a="def f(x):\n try: x()\n except E: pass"))


def test_unknown_syntax_is_refused():
    """A node that a later Python brings cannot slip through."""
    import ast

    unknown = type("TemplateStr", (ast.expr,), {"_fields": ()})

    with pytest.raises(TokenError, match="TemplateStr is syntax without tokens"):
        tokens_of(ast.Expr(value=unknown()), lambda node, statement: None)


# --- what does not count ----------------------------------------------------------------------------------------------

PLAIN = "def f(x):\n    y = x + 1\n    return y\n"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("# why\ndef f(x):  # what\n\n    y = (x +\n         1)\n    return y", id="comments and layout"),
        pytest.param('"""M."""\ndef f(x):\n    """D."""\n    y = x + 1\n    "s"\n    return y', id="docstrings"),
        pytest.param("def f(x: int) -> 'int':\n    y: int = x + 1\n    z: str\n    return y", id="annotations"),
        pytest.param("def f(x):\n    y = x + 0x1\n    pass\n    return y", id="spelling"),
        pytest.param("import os\nZ = 3\ndef g(): return Z\n" + PLAIN, id="what is not reached"),
        pytest.param("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import x\n" + PLAIN, id="type checking"),
    ],
)
def test_what_cannot_compute_does_not_count(tree, text):
    """One at a time."""
    assert digest(tree(a=text)) == digest(tree(a=PLAIN))


USES = "from p.b import g\nimport p.c as c\n\ndef f(x): return g(x) + c.h(x)\n"
G, H = "K = 1\ndef g(x): return x * K\n", "def h(x): return h(x - 1) if x else 0\n"


@pytest.mark.parametrize(
    ("place", "modules"),
    [
        ("a.f", {"a": USES.replace("p.b", "p.moved__in__b".replace("__in__", ".")), "moved__in__b": G, "c": H}),
        ("new.f", {"new": USES.replace(" c\n", " d\n").replace("c.h", "d.h"), "b": G, "c": H}),
        ("a.f", {"a": "from .b import g as q\nfrom p import c\n\ndef f(x): return q(x) + c.h(x)\n", "b": G, "c": H}),
        ("a.f", {"a": USES.replace("p.b", "p"), "__init__": "from p.b import g\n", "b": G, "c": H}),
        ("a.f", {"a": f"{G}{H}\ndef f(x): return g(x) + h(x)\n"}),
        (
            "a.f",
            {"a": "def f(x):\n    from p.b import g\n    import p.c\n    return g(x) + p.c.h(x)\n", "b": G, "c": H},
        ),
        ("a.j", {"a": USES.replace("def f", "def j"), "b": G.replace("K", "L"), "c": H}),
    ],
    ids=["moved file", "renamed file", "other imports", "re-export", "one file", "inside", "renamed definitions"],
)
def test_names_of_files_modules_and_definitions_do_not_count(tree, place, modules):
    """What is reached is the same."""
    assert digest(tree(**modules), place) == digest(tree(a=USES, b=G, c=H))


# --- what counts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + 1", "x - 1"),
        ("x + 1", "x + 2"),
        ("x + 1", "x + 1.0"),
        ("x + 1", "x + True"),
        ("x + 1", "x + -0.0"),
        ("f(x)", "f(x=0)"),
        ("f(x)", "f(*x)"),
        ("f(x)", "f(x, /)"),
        ("return y", "return [y]"),
        ("return y", "return (y,)"),
        ("def f", "@cache\ndef f"),
        ("y = x + 1", "y = f'{x}'"),
        ("    return y", "    if x: pass\n    return y"),
    ],
)
def test_every_change_of_what_is_computed_counts(tree, old, new):
    """One at a time."""
    assert digest(tree(a=PLAIN.replace(old, new))) != digest(tree(a=PLAIN))


def test_what_is_reached_counts_at_any_depth(tree):
    """A constant two modules away; and a mutual recursion has a digest."""
    base = digest(tree(a=USES, b=G, c=H))

    assert digest(tree(a=USES, b=G.replace("1", "2"), c=H)) != base
    assert digest(tree(a=USES, b=G, c=H.replace("else 0", "else 1"))) != base
    circle = "def f(x): return g(x)\ndef g(x): return f(x - 1)\n"
    assert digest(tree(a=circle)) != digest(tree(a=circle.replace("- 1", "- 2")))


def test_two_imported_functions_that_are_swapped_count(tree):
    """Although all names and all modules are the same."""
    user = "from p.b import g, h\ndef f(x): return g(h(x))\n"
    straight, crossed = "def g(x): return -x\ndef h(x): return x + 1\n", "def h(x): return -x\ndef g(x): return x + 1\n"

    assert digest(tree(a=user, b=straight)) != digest(tree(a=user, b=crossed))
    assert digest(tree(a=user, b=straight)) != digest(tree(a=user.replace("g, h", "h as g, g as h"), b=straight))


def test_a_module_that_is_handed_on_is_reached_whole(tree):
    """`getattr(module, name)` may mean any name of it."""
    user = "from p import b\ndef f(n, x): return getattr(b, n)(x)\n"

    assert digest(tree(a=user, b=G)) != digest(tree(a=user, b=G.replace("x * K", "x + K")))
    assert digest(tree(a=user, b=G)) != digest(tree(a=user, b=G.replace("def g", "def q")))


def test_fields_of_a_class_count_with_their_annotations(tree):
    """A dataclass is made of them: `int` and `ClassVar[int]` are different classes."""
    base = "class f:\n    a: int\n"

    assert digest(tree(a=base)) != digest(tree(a=base.replace("int", "ClassVar[int]")))
    assert digest(tree(a=base)) != digest(tree(a=base.replace("a:", "b:")))
    assert digest(tree(a="b = 1\na = 1\n" + base)) != digest(tree(a="b = 1\na = 1\n" + base.replace("a:", "b:")))


def test_a_local_name_is_not_the_global_one(tree):
    """What hides a global does not reach it; what only looks so, does."""
    hides = "def f(g): return g(1)\ndef g(x): return x\n"
    outer = "def f(): return [g for g in g]\ng = (1,)\n"

    assert digest(tree(a=hides)) == digest(tree(a=hides.replace("return x", "return -x")))
    assert digest(tree(a=outer)) != digest(tree(a=outer.replace("(1,)", "(2,)")))


def test_a_given_definition_stands_for_itself(tree):
    """Its code does not count, that it is meant does."""
    given = [("p.b", "g")]
    base = tree(a=USES, b=G, c=H).digest([("p.a", "f")], given)

    assert base == tree(a=USES, b=G.replace("K = 1", "K = 2"), c=H).digest([("p.a", "f")], given)
    assert base != tree(a=USES.replace("g(x)", "K(x)").replace("import g", "import K"), b=G, c=H).digest(
        [("p.a", "f")], given
    )


TABLE = "T = {}\ndef enter(f):\n    T[f.__name__] = f\n    return f\ndef find(n): return T[n]\n"
ENTRIES = "from p.s.table import enter\n@enter\ndef one(x): return x + 1\n"


def test_what_a_module_does_on_import_is_an_effect(tree):
    """A function that a decorator enters in a table, by its own name; a call; not a plain assignment."""

    def effects(entries: str, **more: object) -> list:
        user = "from p.s.table import find\nfrom p.s import entries\ndef f(n): return find(n)\n"
        found = tree(a=user, s__in__table=TABLE, s__in__entries=entries)
        return found.effects([("p.a", "f")], [], within="p", chosen=more.get("chosen", ()))

    base = effects(ENTRIES)
    assert len(base) == 1
    assert base != effects(ENTRIES.replace("x + 1", "x + 2"))
    assert base != effects(ENTRIES.replace("def one", "def two"))
    assert base == effects(ENTRIES + "X = {1: 2}\nX |= {3: 4}\ndef free(): return 1\n")
    assert len(effects(ENTRIES + "enter(one)\n")) == 2
    assert effects(ENTRIES, chosen=[("p.s.table", "enter")]) == []


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ({"a": "def g(): pass\n"}, "p.a has no f"),
        ({"a": "from p.b import g\ndef f(): return g()\n"}, "there is no source of p.b"),
        ({"a": "from p.b import *\ndef f(): return g()\n", "b": G}, r"imports \* from p.b"),
        ({"a": "def f(g): return g.__annotations__\n"}, "__annotations__ is looked at"),
        ({"a": "def f(): return __doc__\n"}, "p.a: line 1: __doc__ is looked at"),
        ({"a": "from numpy import f\n"}, "f is no definition of this package"),
    ],
)
def test_code_without_an_identity_is_refused(tree, modules, said):
    """With the module."""
    with pytest.raises(TokenError, match=said):
        digest(tree(**modules))
