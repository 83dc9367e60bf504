"""The identity of a proof: a digest of what computes its outcome, and of nothing else.

* The kernel: its PTX without comments, positions, and names of labels and symbols; its plan without what it was
  compiled from; registers a thread; what its target and argument list say to a run.
* The code that runs and judges it, by what it computes (code_identity): the functions that prove this kind of kernel
  with all they reach, in one of the engines (engines); of its opcode table the rules of the opcodes that stand in this
  PTX.
* Of the native engine also its C sources, all of them, by their tokens, and the flags of the compiler.
* Tables of the simulator by their bytes.

Not in it: Python, numpy, the C compiler and the host. The simulator computes with integers and with single operations
of IEEE 754, which are exact in every version; what numpy does not fix to the bit (its random streams, exp and sums of
the reference) chooses other inputs for the same cases, or moves a reference by less than any bound allows for. A proof
made under one version is a proof under the next. Nor the timing model, which no proof reaches.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fa4build
from fa4build import simulate
from fa4build.files import write_atomically
from fa4build.simulate.instructions import rules  # noqa: F401  registers every opcode rule
from fa4build.simulate.native import build
from fa4build.simulate.native.coder import decodes, rule_of
from fa4build.simulate.translate.node_scope import in_node_scope
from fa4build.simulate.translate.opcodes import fused, maker_of, system
from fa4build.verify.code_identity import Place, Tree, place_of
from fa4build.verify.engines import DEFAULT, engine_named

PACKAGE = "fa4build"
_CHOSEN = (place_of(fused), place_of(system))
_CHOSEN_BY_NATIVE = (place_of(decodes), place_of(in_node_scope))
"""Decorators that enter a function in a table: rules, which a kernel's opcodes choose; the others that which only the
Python engine's own code takes from."""
_BUILDS = (place_of(build.library), place_of(build.default_folder))
"""How the C code comes to run: what it is made from counts, and how it is made by the flags alone."""

# --- PTX --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PtxForm:
    """What a PTX text computes: digest, exact opcodes (and some words that are none), and its entries in order.

    `entries`: what plans call them; another text with the same digest may use other names.
    """

    sha256: str
    opcodes: tuple[str, ...]
    entries: tuple[str, ...]


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_POSITION = re.compile(r"^\s*\.(?:loc|file)\b[^\n]*", re.M)
_OPCODE = re.compile(r"(?:[;{}]|^|(?<=[\w$])\s*:(?!:))\s*(?:@!?\s*[\w$%]+\s+)?([a-z][\w.:]*)", re.M)
_LABEL = re.compile(r"(?:^|[;{}])\s*([A-Za-z_$][\w$]*)\s*:(?!:)", re.M)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_SYMBOL = re.compile(
    r"\.(?:entry|func)\s+([\w$]+)|\.(?:param|shared|local|global|const)\b(?:\s*\.\w+(?:\s+\d+)?)*\s+([A-Za-z_$][\w$]*)"
)


def ptx_form(text: str) -> PtxForm:
    """The form of a PTX text. Texts for sm_100a and sm_103a that differ in the target's name alone have the same one,
    since the simulator executes both alike."""
    code = _POSITION.sub("", _COMMENT.sub(" ", _one_blackwell(text)))
    opcodes = tuple(sorted(set(_OPCODE.findall(code))))
    names = _renamed(code, {opcode.partition(".")[0] for opcode in opcodes})
    return PtxForm(
        sha256=_sha256(" ".join(names.split()).encode()), opcodes=opcodes, entries=tuple(_ENTRY.findall(code))
    )


def _one_blackwell(text: str) -> str:
    return text.replace("sm_103a", "sm_100a").replace("sm103a", "sm100a")


def _renamed(code: str, words: set[str]) -> str:
    """Labels and symbols as numbers, in the order in which they first occur. A name that an opcode starts with stays:
    two texts with one form differ by a renaming, and by nothing else."""
    found = _LABEL.findall(code) + [name for pair in _SYMBOL.findall(code) for name in pair if name]
    names = set(found) - words
    if not names:
        return code
    plain = sorted((name for name in names if not name.startswith("$")), key=len, reverse=True)
    pattern = "|".join([r"\$[\w$]+", *(rf"{re.escape(name)}(?![\w$])" for name in plain)])
    numbers: dict[str, str] = {}

    def number(match: re.Match) -> str:
        name = match[0]
        return numbers.setdefault(name, f"\0{len(numbers)}") if name in names else name

    return re.sub(rf"(?<![\w$%.:])(?:{pattern})", number, code)


class PtxForms:
    """Forms of PTX texts, kept in a directory (a text of 200 kB takes 10 ms).

    What is kept is found by the text's digest and by the identity of the code that makes forms, so it needs no version.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory, self._known = directory, {}

    def __call__(self, text: str) -> PtxForm:
        """The form of a text."""
        digest = _sha256(text.encode())
        if digest not in self._known:
            self._known[digest] = self._kept(digest) or self._made(digest, text)
        return self._known[digest]

    def _path(self, digest: str) -> Path | None:
        name = _sha256(f"{digest} {_form_identity()}".encode())
        return None if self._directory is None else self._directory / name[:2] / f"{name}.json"

    def _kept(self, digest: str) -> PtxForm | None:
        path = self._path(digest)
        try:
            row = json.loads(path.read_bytes()) if path else {}
            fields = {name: tuple(map(str, row[name])) for name in ("opcodes", "entries")}
            return PtxForm(sha256=str(row["sha256"]), **fields)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _made(self, digest: str, text: str) -> PtxForm:
        form, path = ptx_form(text), self._path(digest)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            row = {"sha256": form.sha256, "opcodes": form.opcodes, "entries": form.entries}
            write_atomically(path, json.dumps(row).encode())
        return form


@functools.cache
def _form_identity() -> str:
    return own_tree().digest([place_of(ptx_form)])


# --- plan -------------------------------------------------------------------------------------------------------------


def plan_sha256(text: str, ptx: PtxForm) -> str:
    """Digest of a plan without its origin, and with entries by their number in the PTX. What is no plan stands for
    itself: nothing will be proven with it."""
    try:
        plan = json.loads(_one_blackwell(text))
        plan.pop("origin", None)
    except (ValueError, AttributeError):
        return _sha256(_one_blackwell(text).encode())
    for launch in plan.get("launches", ()):
        if isinstance(launch, dict) and launch.get("kernel") in ptx.entries:
            launch["kernel"] = ptx.entries.index(launch["kernel"])
    return digest_of(plan)


# --- code -------------------------------------------------------------------------------------------------------------


class Prover:
    """The code of proofs in an engine, as it lies in a tree of sources.

    Args:
        given: functions and classes whose outcome a proof's digest holds as values; their code is left out.
        engine: by name.
        tree, data: sources and the simulator's other files; default: those that run here.
        flags: of the C compiler; default: those of here.
    """

    def __init__(
        self,
        given: Iterable[Any],
        engine: str = DEFAULT,
        *,
        tree: Tree | None = None,
        data: Path | None = None,
        flags: Sequence[str] = build.FLAGS,
    ) -> None:
        self._given = tuple(place_of(each) for each in given)
        self._is_native = engine == "native"
        self._launcher = place_of(engine_named(engine).run_launch)
        self._tree = tree or own_tree()
        self._data = data or Path(simulate.__file__).parent
        self._flags = tuple(flags)
        self._known: dict[Any, Any] = {}

    def sha256(self, functions: Sequence[Place], opcodes: Iterable[str]) -> str:
        """Digest of functions with all they reach, in a simulator that has rules for these opcodes alone."""
        roots, held = (*functions, self._launcher), frozenset(opcodes)
        return self._once(("proof", roots, held), lambda: self._proof(roots, held))

    def _proof(self, roots: tuple[Place, ...], opcodes: frozenset[str]) -> str:
        chosen = self._native_rules(opcodes) if self._is_native else self._rules(opcodes)
        return digest_of([self._once(("engine", roots), lambda: self._engine(roots)), chosen])

    def _engine(self, roots: tuple[Place, ...]) -> list[Any]:
        stops = (*self._given, *(_BUILDS if self._is_native else ()))
        effects = self._tree.effects(roots, stops, within=simulate.__name__, chosen=self._chosen)
        return [self._tree.digest(roots, stops), effects, data_digests(self._data)]

    @property
    def _chosen(self) -> tuple[Place, ...]:
        return (*_CHOSEN, *_CHOSEN_BY_NATIVE) if self._is_native else _CHOSEN

    def _rules(self, opcodes: Iterable[str]) -> list[tuple[str, str]]:
        makers = {opcode: maker_of(opcode) for opcode in opcodes}
        return sorted((opcode, self._rule(place_of(maker))) for opcode, maker in makers.items() if maker is not None)

    def _native_rules(self, opcodes: frozenset[str]) -> list[Any]:
        """Rules that decode, and the C code of the engine."""
        found = {opcode: rule_of(opcode) for opcode in opcodes}
        decoding = sorted((opcode, self._rule(place_of(rule[0]))) for opcode, rule in found.items() if rule is not None)
        return [decoding, self._once("C", lambda: _c_digests(self._data / "native")), self._flags]

    def _rule(self, place: Place) -> str:
        return self._once(place, lambda: self._tree.digest([place], self._given))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


@functools.cache
def own_tree() -> Tree:
    """The sources of this package."""
    return Tree(Path(fa4build.__file__).parent, PACKAGE)


_BUILT = frozenset((".pyc", ".pyo", ".so", ".o", ".a", ".pyd", ".dylib"))
_C = frozenset((".c", ".h"))
_NO_DATA = frozenset(("__pycache__", "native"))


def data_digests(directory: Path) -> list[tuple[str, str]]:
    """Name and digest of every file below a directory that is no Python and nothing built: tables by their bytes, C
    sources by their tokens. Folders do not matter. The native engine is left out, see `Prover`."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and not _NO_DATA & {*path.parts})
    kept = [path for path in files if path.suffix not in {".py", *_BUILT}]
    contents = (_c_tokens(path.read_text()) if path.suffix in _C else path.read_bytes() for path in kept)
    return sorted(zip((path.name for path in kept), map(_sha256, contents), strict=True))


def _c_digests(directory: Path) -> list[str]:
    """Digests of the C sources in a directory by their tokens; names of files do not matter."""
    return sorted(_sha256(_c_tokens(path.read_text())) for path in directory.iterdir() if path.suffix in _C)


_C_PART = re.compile(
    r"""(?P<gone>//[^\n]*|/\*.*?\*/|\\\n)|(?P<newline>\n)|(?P<space>[^\S\n]+)"""
    r"""|(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<word>\w+)|(?P<sign>(?:(?!//|/\*)[^\w\s"'])+|.)""",
    re.S,
)


def _c_tokens(source: str) -> bytes:
    """Tokens of a C source without comments and white space; within a directive white space is one blank."""
    tokens: list[str] = []
    in_directive, is_first = False, True
    for part in _C_PART.finditer(source):
        if part.lastgroup == "newline":
            tokens += ["\n"] if in_directive else []
            in_directive, is_first = False, True
        elif part.lastgroup in ("space", "gone"):
            tokens += [" "] if in_directive and tokens[-1] != " " else []
        else:
            in_directive |= is_first and part[0].startswith("#")
            is_first = False
            tokens.append(part[0])
    return "".join(f"{len(token)}:{token}" for token in tokens).encode()


def digest_of(parts: Any) -> str:
    """Digest of plain data."""
    return _sha256(json.dumps(parts, sort_keys=True).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
