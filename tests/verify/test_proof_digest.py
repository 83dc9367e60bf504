"""Contract of the digest under which a proof is kept: it changes with what computes the proof, and with nothing else.

Every function that a proof runs is in it, so that none can change and leave old proofs standing. Comments, names, files
that move, rules for opcodes that a kernel does not hold, cases of other kinds of kernels and the timing model are not,
so that no proof is lost to them. Of the kernel: what its PTX and plan compute, not what labels and symbols are called.
"""

import ast
import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fa4build.cases.forward import Case
from fa4build.matrix.variants import parse_variant
from fa4build.plan import plan_to_json
from fa4build.simulate.native.coder import rule_of
from fa4build.simulate.ptx.parser import parse_module
from fa4build.simulate.translate import opcodes as table
from fa4build.simulate.translate.node_scope import NODE_SCOPE
from fa4build.verify import simulated
from fa4build.verify.code_identity import Tree, place_of
from fa4build.verify.identity import Prover, PtxForms, data_digests, own_tree, plan_sha256, ptx_form
from fa4build.verify.simulated import code_sha256, given, own_prover, request_for
from tests.simulate.mutations.kernels import NAMES, kept

ROOT = Path(__file__).resolve().parents[2]
HELD = json.loads((Path(__file__).parent / "proof_opcodes.json").read_text())
"""Opcodes of compiled kernels; those of the backwards are a few that stand for theirs."""
RULE_MODULES = sorted({rule.make.__module__ for rule in table._RULES})


def digests(prover: Prover | None = None, engine: str = "python") -> dict[str, str]:
    """The code of the proof of each kernel of `HELD`."""
    return {name: code_sha256(parse_variant(name), held, engine, prover) for name, held in HELD.items()}


@pytest.fixture(scope="module")
def before():
    """Digests of the code that runs here."""
    return digests()


@pytest.fixture
def copied(tmp_path):
    """A copy of the package's sources."""
    skipped = shutil.ignore_patterns("__pycache__", "*.so", "templates", "baselines", "report")
    return Path(shutil.copytree(ROOT / "fa4build", tmp_path / "fa4build", ignore=skipped))


def prover_of(package: Path, engine: str = "python", **options) -> Prover:
    """Proofs by the sources of a copy."""
    return Prover(given(), engine, tree=Tree(package, "fa4build"), data=package / "simulate", **options)


def lost(package: Path, before: dict[str, str], engine: str = "python", **options) -> set[str]:
    """Kernels of `HELD` whose proofs the sources of a copy do not know."""
    found = digests(prover_of(package, engine, **options), engine)
    return {name for name, digest in found.items() if digest != before[name]}


def path_of(package: Path, module: str) -> Path:
    """The file of a module in a copy."""
    return package.joinpath(*module.split(".")[1:]).with_suffix(".py")


def edit(path: Path, function: str) -> None:
    """Changes the first number in a function; one without any gets another statement."""
    source = path.read_text()
    (found,) = (node for node in ast.parse(source).body if getattr(node, "name", None) == function)
    statements = [part for part in found.body if not isinstance(getattr(part, "value", None), ast.Constant)]
    inside = [node for part in statements for node in ast.walk(part) if isinstance(node, ast.Constant)]
    number = next((node for node in inside if type(node.value) is int), None)
    lines = source.splitlines(keepends=True)
    if number is None:
        lines.insert(statements[0].lineno - 1, "    changed = 1\n")
    else:
        line = lines[number.lineno - 1].encode()
        changed = line[: number.col_offset] + str(number.value + 1).encode() + line[number.end_col_offset :]
        lines[number.lineno - 1] = changed.decode()
    path.write_text("".join(lines))


# --- all that a proof runs --------------------------------------------------------------------------------------------


class Seen:
    """Which functions of the package run, by module and line."""

    def __init__(self) -> None:
        self.places: set[tuple[str, int]] = set()
        self._codes: set[object] = set()

    def __call__(self, frame, event, argument) -> None:
        code = frame.f_code
        if code not in self._codes:
            self._codes.add(code)
            module = frame.f_globals.get("__name__", "")
            if module.startswith("fa4build.") and code.co_filename == frame.f_globals.get("__file__"):
                self.places.add((module, code.co_firstlineno))


@functools.cache
def statements(module: str) -> list[range]:
    """Lines of the statements of a module."""
    found = []
    for statement in ast.parse(Path(sys.modules[module].__file__).read_text()).body:
        first = min([statement.lineno, *(part.lineno for part in getattr(statement, "decorator_list", []))])
        found.append(range(first, statement.end_lineno + 1))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_function_that_a_proof_runs_is_in_its_digest(name):
    """A small proof under a profiler; what only names variants and targets is in the digest as values."""
    kernel, seen = kept(name), Seen()
    before = sys.gettrace()
    sys.settrace(seen)
    try:
        report = kernel.report(kernel.ptx, Case(name="tiny", seqlen_q=2, seqlen_k=3), "python")
    finally:
        sys.settrace(before)
    assert report == ""

    held = ptx_form(kernel.ptx).opcodes
    functions = [simulated.prove, simulated.case_prover(parse_variant(name))]
    functions += [maker for maker in map(table.maker_of, held) if maker is not None]
    functions += [f for f in NODE_SCOPE.values() if str(getattr(f, "__module__", "")).startswith("fa4build.")]
    values = [place_of(each) for each in given()]
    reached = own_tree().reached(map(place_of, functions), values) | own_tree().reached(values, values)
    places = [
        (module, number)
        for module, line in sorted(seen.places)
        for number, lines in enumerate(statements(module))
        if line in lines and not is_named_only(module)
    ]

    assert len(places) > 200
    assert [(module, statements(module)[number]) for module, number in places if (module, number) not in reached] == []


def is_named_only(module: str) -> bool:
    """Modules that name variants and targets."""
    return module.rpartition(".")[2] in {"variants", "axes", "arch", "spec", "selection", "errors"}


def test_no_opcode_has_two_rules_and_no_name_two_functions():
    """Else the order of imports would say which one runs, and moved files could change it."""
    for opcode in {opcode for held in HELD.values() for opcode in held}:
        assert len([rule for rule in table._RULES if rule.pattern.fullmatch(opcode)]) == 1, opcode
    sources = "".join(path.read_text() for path in ROOT.glob("fa4build/simulate/**/*.py"))
    names = re.findall(r"^@in_node_scope\n(?:@.*\n)*def (\w+)", sources, re.M)
    assert len(names) > 40
    assert len(set(names)) == len(names)
    assert set(names) <= set(NODE_SCOPE)


def test_opcodes_are_those_that_the_parser_finds():
    """None is missed; words that are none do no harm."""
    for name in NAMES:
        ptx = kept(name).ptx
        parsed = {ins.opcode for entry in parse_module(ptx).entries.values() for ins in entry.instructions}
        assert parsed <= set(ptx_form(ptx).opcodes)


# --- edits of the code ------------------------------------------------------------------------------------------------


def test_a_comment_a_docstring_and_an_annotation_lose_no_proof(copied, before):
    """In every file."""
    for path in copied.rglob("*.py"):
        text = path.read_text()
        text = re.sub(r'^( +)"""(?=\w)', r'\1"""More. ', text, flags=re.M)
        text = re.sub(r"^( +def \w+\(self)(?=[,)])", r"\1: object", text, flags=re.M)
        path.write_text(f"# A comment.\n{text}\n# Another.\n\n")

    assert lost(copied, before) == set()


@pytest.mark.parametrize("module", RULE_MODULES, ids=lambda name: name.rpartition(".")[2])
def test_an_edited_rule_loses_the_proofs_of_kernels_with_its_opcodes(module, copied, before):
    """Of every module that has rules, the rule that the fewest kernels hold, and at least one."""
    makers = {name: {table.maker_of(opcode) for opcode in held} for name, held in HELD.items()}
    of_module = {maker for held in makers.values() for maker in held if maker.__module__ == module}
    held_by = {maker: {name for name, held in makers.items() if maker in held} for maker in of_module}
    rule = min(held_by, key=lambda maker: (len(held_by[maker]), maker.__name__))
    edit(path_of(copied, module), rule.__name__)

    assert lost(copied, before) == held_by[rule]


def test_every_rule_module_is_held_by_a_kernel_here():
    """Else the test above would leave one out."""
    assert {table.maker_of(opcode).__module__ for held in HELD.values() for opcode in held} == set(RULE_MODULES)


@pytest.mark.parametrize(
    ("module", "function", "kinds"),
    [
        ("fa4build.simulate.hardware.scheduler", "Scheduler", "fwd bwd fwd_combine"),
        ("fa4build.simulate.checks.clocks", "merged", "fwd bwd fwd_combine"),
        ("fa4build.simulate.units.float_formats", "round_f64_to_f32", "fwd bwd fwd_combine"),
        ("fa4build.verify.runs", "memory_faults", "fwd bwd fwd_combine"),
        ("fa4build.plan.evaluation", "evaluate", "fwd bwd fwd_combine"),
        ("fa4build.cases.backward", "gradient_bounds", "bwd"),
        ("fa4build.cases.varlen", "draw_problem", "packed fwd_combine"),
        ("fa4build.cases.varlen_backward", "draw_backward_problem", "packed bwd"),
        ("fa4build.timing.rates", "instruction_cost", ""),
        ("fa4build.matrix.variants", "parse_variant", ""),
    ],
)
def test_an_edit_loses_the_proofs_of_the_kinds_that_it_decides(module, function, kinds, copied, before):
    """What is shared, all; cases of one kind, its own; the timing model and the names of variants, none."""
    edit(path_of(copied, module), function)

    expected = set()
    for name in HELD:
        op, is_packed = name.split("-")[0], any(word in name for word in ("varlen", "paged", "e4m3"))
        words = kinds.split()
        if "packed" in words and op != "fwd_combine":
            expected |= {name} if is_packed and (("bwd" in words) == (op == "bwd")) else set()
        elif op in words:
            expected.add(name)
    assert lost(copied, before) == expected


MOVES = {
    "fa4build.simulate.instructions.tcgen05": "fa4build.simulate.instructions.tensor",
    "fa4build.simulate.instructions.barriers": "fa4build.simulate.instructions.barriers",
    "fa4build.simulate.hardware.gang": "fa4build.simulate.hardware.lockstep",
    "fa4build.simulate.translate.opcodes": "fa4build.simulate.translate_.opcodes",
    "fa4build.cases.forward": "fa4build.cases.forward",
    "fa4build.cases.varlen": "fa4build.cases.packed",
    "fa4build.verify.runs": "fa4build.proof.runs",
    "fa4build.plan.values": "fa4build.plan.values",
}
ASK = """
import json, sys
from fa4build.matrix.variants import parse_variant
from fa4build.verify.simulated import code_sha256
held = json.load(sys.stdin)
print(json.dumps({name: code_sha256(parse_variant(name), ops, 'python') for name, ops in held.items()}))
"""


def test_moved_and_renamed_files_lose_no_proof(copied, before):
    """Modules of every kind move to other folders, imports follow; the copy itself says what its digests are."""
    rules = copied / "simulate" / "instructions" / "rules.py"
    rules.write_text("".join(f"import {module}  # noqa: F401\n" for module in reversed(RULE_MODULES)))
    for old, new in MOVES.items():
        target = path_of(copied, new)
        for folder in (target.parent, *target.parent.parents):
            if copied in folder.parents:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "__init__.py").touch()
        path_of(copied, old).rename(target)
    pattern = re.compile(r"\b(?:" + "|".join(map(re.escape, MOVES)) + r")\b(?!\.)")
    for path in copied.rglob("*.py"):
        path.write_text(pattern.sub(lambda match: MOVES[match[0]], path.read_text()))
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=copied.parent,
        input=json.dumps(HELD),
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == before


# --- tables and C -----------------------------------------------------------------------------------------------------


def test_a_byte_of_a_table_loses_every_proof(copied, before):
    """And the folder it lies in does not matter."""
    (table_file,) = copied.rglob("h200_ex2*.xz")
    moved = copied / "simulate" / "tables"
    moved.mkdir()
    table_file = table_file.rename(moved / table_file.name)
    assert lost(copied, before) == set()

    table_file.write_bytes(table_file.read_bytes()[:-1] + b"\0")
    assert lost(copied, before) == set(HELD)


C = '#define F(x) ((x) + 1)\nint f(int a) {\n  return a / 2; // half\n}\nchar *s = "a // b";\n'


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("// half", "/* by\n two */", False),
        ("  return a / 2;", "return\n\n    a / 2 ;", False),
        ("{\n", "{", False),
        ("a / 2", "a / 3", True),
        ("a / 2", "a // 2", True),
        ("a // b", "a  // b", True),
        ("F(x)", "F (x)", True),
        ("+ 1)\n", "+ 1)", True),
        ("#define", "// #define", True),
    ],
)
def test_a_c_source_counts_by_its_tokens(tmp_path, old, new, counts):
    """Comments and white space do not count outside of texts and directives; built files do not at all."""

    def digest(text: str) -> list:
        (tmp_path / "engine.c").write_text(text)
        (tmp_path / "engine.so").write_text(text)
        return data_digests(tmp_path)

    assert (digest(C) != digest(C.replace(old, new))) == counts
    assert [name for name, _ in digest(C)] == ["engine.c"]


# --- the kernel -------------------------------------------------------------------------------------------------------

PTX = kept(NAMES[0]).ptx


@pytest.mark.parametrize(
    ("pattern", "new"),
    [
        pytest.param(r"\$L__BB0_(\d+)", r"$L__other_\1", id="labels"),
        pytest.param(r"fwd_sm90a_bf16_hd64_full_0", "another_name", id="entry and parameters"),
        pytest.param(r"__dynamic_shmem__0", "buffer", id="shared memory"),
        pytest.param(r"(?m)^(\$L__\w+:)", r"// reached\n\1 /* so */\n\t.loc\t1 2 3\n", id="comments and positions"),
        pytest.param(r"\t", "  ", id="white space"),
        pytest.param(r"(?m)\A", '\t.file\t1 "/a/b.py"\n', id="files"),
    ],
)
def test_names_comments_and_positions_of_a_ptx_do_not_count(pattern, new):
    """The text is another, its form the same."""
    other = re.sub(pattern, new, PTX)

    assert other != PTX
    assert ptx_form(other).sha256 == ptx_form(PTX).sha256


def test_all_else_of_a_ptx_counts():
    """An operand, an opcode, a target of a branch, a parameter; two labels that are swapped where they stand."""
    labels = re.findall(r"(?m)^(\$L__\w+):", PTX)
    first, second = labels[:2]
    swapped = PTX.replace(f"{first}:", "@:").replace(f"{second}:", f"{first}:").replace("@:", f"{second}:")
    others = [
        PTX.replace("_param_0+", "_param_1+", 1) if "_param_0+" in PTX else PTX.replace("_param_0]", "_param_1]", 1),
        PTX.replace("add.s32", "sub.s32", 1),
        re.sub(rf"bra\s+{re.escape(first)};", f"bra {second};", PTX, count=1),
        PTX.replace(", 1;", ", 2;", 1),
        swapped,
    ]

    forms = {ptx_form(text).sha256 for text in (PTX, *others)}
    assert len(forms) == 1 + len({text for text in others if text != PTX})
    assert len(forms) >= 5


def test_a_symbol_that_is_called_like_an_opcode_keeps_its_name():
    """Else two texts with other opcodes could have one form."""
    one = ".version 8.0\n.target sm_90a\n.shared .b8 add[4];\n.visible .entry k() { add.s32 %r1, add, 1; ret; }"

    assert ptx_form(one).sha256 != ptx_form(one.replace("add", "sub")).sha256


def test_targets_of_blackwell_are_one_and_others_are_not():
    """The simulator executes sm_100a and sm_103a alike."""
    forms = {target: ptx_form(PTX.replace("sm_90a", target)).sha256 for target in ("sm_90a", "sm_100a", "sm_103a")}

    assert forms["sm_100a"] == forms["sm_103a"] != forms["sm_90a"]


def test_of_a_plan_the_origin_and_the_name_of_the_entry_do_not_count():
    """Kernels that compute the same have one proof; a block of another size is another kernel."""
    kernel = kept(NAMES[0])
    plan = plan_to_json(kernel.plan)
    entry = ptx_form(kernel.ptx).entries[0]
    asked = {"ptx": kernel.ptx, "plan": plan, "registers": kernel.registers, "seeds": (1,)}
    base = request_for(parse_variant(kernel.name), **asked).sha256
    document = json.loads(plan)
    document["origin"]["cubin_sha256"] = "0" * 64
    named = {"ptx": kernel.ptx.replace(entry, "k"), "plan": json.dumps(document).replace(entry, "k")}
    document["launches"][0]["block"][0] += 1

    assert request_for(parse_variant(kernel.name), **{**asked, **named}).sha256 == base
    assert request_for(parse_variant(kernel.name), **{**asked, "plan": json.dumps(document)}).sha256 != base
    assert plan_sha256("no plan", ptx_form(kernel.ptx)) != plan_sha256("no other", ptx_form(kernel.ptx))


def test_forms_are_kept_and_made_again_when_damaged(tmp_path, monkeypatch):
    """By the text's digest; what cannot be read counts as absent."""
    form = PtxForms(tmp_path)(PTX)
    (path,) = tmp_path.rglob("*.json")
    monkeypatch.setattr("fa4build.verify.identity.ptx_form", lambda text: pytest.fail("was kept"))
    assert PtxForms(tmp_path)(PTX) == form
    monkeypatch.undo()

    path.write_bytes(b'{"sha256": 1}')
    assert PtxForms(tmp_path)(PTX) == form
    assert json.loads(path.read_bytes())["sha256"] == form.sha256


def test_the_code_of_many_kernels_is_digested_once():
    """What is known is not computed again: a thousand kernels cost what one does."""
    own_prover("python").sha256([place_of(simulated.prove)], ["add.s32"])
    known = len(own_prover("python")._known)
    for _ in range(1000):
        own_prover("python").sha256([place_of(simulated.prove)], ["add.s32"])

    assert len(own_prover("python")._known) == known


# --- the native engine ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def native():
    """Digests of the native engine's proofs, by the code that runs here."""
    return digests(engine="native")


def test_the_engines_have_proofs_of_their_own(before, native):
    """No kernel's proof in one is its proof in the other."""
    assert native.keys() == before.keys()
    assert not any(native[name] == before[name] for name in before)


@pytest.mark.parametrize("name", ["core_wgmma.c", "units_mma.c", "checks_sync.c", "core.h"])
def test_a_changed_constant_of_the_native_engine_loses_every_proof(name, copied, before, native):
    """All of its C sources are in every digest; the Python engine's proofs do not know of them."""
    path = copied / "simulate" / "native" / name
    path.write_text(re.sub(r"\b2\b", "3", path.read_text(), count=1))

    assert lost(copied, native, "native") == set(HELD)
    assert lost(copied, before) == set()


def test_prose_and_names_of_the_native_engine_lose_nothing(copied, native):
    """Comments, layout, the name of a file."""
    path = copied / "simulate" / "native" / "core_wgmma.c"
    path.write_text("/* new */\n" + path.read_text().replace(" {\n", " { // here\n\n"))
    path.rename(path.with_name("core_products.c"))

    assert lost(copied, native, "native") == set()


def test_the_flags_of_the_c_compiler_are_in_the_digest(copied, native):
    """As they decide how floats are computed."""
    assert lost(copied, native, "native", flags=("-O3", "-ffast-math")) == set(HELD)


def test_an_edited_rule_of_the_native_engine_loses_the_proofs_with_its_opcodes(copied, native):
    """How wgmma is decoded: kernels of sm90a that multiply with it, and no other."""
    path = copied / "simulate" / "native" / "decode_barriers.py"
    edit(path, "_cluster_arrive")
    holding = {name for name, held in HELD.items() if any(o.startswith("barrier.cluster.arrive") for o in held)}

    assert lost(copied, native, "native") == holding
    assert set() < holding < set(HELD)


@pytest.mark.parametrize("name", NAMES)
def test_the_python_of_a_native_proof_is_in_its_digest(name):
    """Every function that a small proof runs, but what only names variants and targets, and what builds the engine."""
    kernel, seen = kept(name), Seen()
    before = sys.gettrace()
    sys.settrace(seen)
    try:
        report = kernel.report(kernel.ptx, Case(name="tiny", seqlen_q=2, seqlen_k=3), "native")
    finally:
        sys.settrace(before)
    assert report == ""

    prover = own_prover("native")
    held = ptx_form(kernel.ptx).opcodes
    rules = [rule[0] for rule in map(rule_of, held) if rule is not None]
    roots = [place_of(simulated.prove), place_of(simulated.case_prover(parse_variant(name))), prover._launcher]
    roots += [place_of(rule) for rule in rules]
    values = [place_of(each) for each in given()]
    reached = own_tree().reached(roots, values) | own_tree().reached(values, values)
    missing = [
        (module, statements(module)[number])
        for module, line in sorted(seen.places)
        for number, lines in enumerate(statements(module))
        if line in lines and not is_named_only(module) and (module, number) not in reached
    ]

    assert missing == []
