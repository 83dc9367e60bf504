"""Contract of rendering.

A rendered module is imports, literals and one call, equal for equal inputs, and different for every axis and every
number that its kernel takes. Its dependencies are exactly the files of `kernels_src` that importing it runs.
"""

import ast
import hashlib
import inspect
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4build.compiling.context import CUTLASS_TYPES, AttributePath, context_for, wired
from fa4build.compiling.render import (
    TEMPLATE,
    TEMPLATES_DIR,
    check_specialization,
    kernels_source_dir,
    literal,
    reachable_sources,
    render,
    render_template,
)
from fa4build.compiling.signature import TensorArg, signature_for
from fa4build.compiling.wiring import WIRINGS
from fa4build.errors import RenderError
from fa4build.matrix.tuning import Tuning, tuning_for
from fa4build.matrix.variants import KERNELS, parse_variant, written_variants

HOPPER = parse_variant("fwd-sm90a-bf16-hd128-causal")

# Fields of Tuning that the Hopper forward has no use for: roles and modes of other kernels.
NOT_ON_HOPPER = {
    "q_stages",
    "correction_registers",
    "producer_warpgroups",
    "exp2_frequency",
    "exp2_start",
    "max_offset",
    "max_with_load",
}


def source_of(variant, **changes):
    """The rendered source of a variant with a changed tuning."""
    return render(variant, replace(tuning_for(variant), **changes))


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant_id", ["fwd-sm90a-bf16-hd128-causal", "fwd-sm90a-fp16-hd64-full", "fwd-sm90a-bf16-hd256-local"]
)
def test_rendered_text_is_the_golden_file(variant_id, check_golden):
    """A change of what is rendered is seen in review as a change of these files."""
    check_golden(f"{variant_id}.py", source_of(parse_variant(variant_id)).text)


def test_every_written_variant_renders_and_no_two_alike():
    """The id in the header alone keeps texts apart; the digest is of the text."""
    sources = [source_of(variant) for variant in written_variants()]

    assert len(sources) == len({source.sha256 for source in sources})
    for source in sources:
        assert hashlib.sha256(source.text.encode()).hexdigest() == source.sha256
        assert source.variant.symbol == source.symbol


def test_rendering_twice_gives_the_same_source():
    """No time, no path, no order of a set."""
    assert source_of(HOPPER) == source_of(HOPPER)
    assert str(kernels_source_dir().parent) not in source_of(HOPPER).text


def perturbed(value):
    """Another legal value of the same type; register budgets stay multiples of 8."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return {"natural": "longest_first", "longest_first": "natural"}[value]
    return value + 8


@pytest.mark.parametrize("name", [field.name for field in fields(Tuning)])
def test_every_tuning_field_that_the_kernel_takes_changes_the_text(name):
    """Found by reflection: a new field is rendered, or listed above as meaningless to this kernel."""
    changed = {name: perturbed(getattr(tuning_for(HOPPER), name))}

    assert (name in NOT_ON_HOPPER) == (source_of(HOPPER).text == source_of(HOPPER, **changed).text)


def test_an_entry_takes_the_published_arguments_and_a_stream():
    """In order, and each handed to the kernel under its own name."""
    for variant in written_variants():
        module = ast.parse(source_of(variant).text)
        entry = next(node for node in module.body if isinstance(node, ast.FunctionDef))
        wiring = entry.body[0].value
        expected = [(arg.name, _annotation(arg)) for arg in signature_for(variant)]

        assert "entry" == entry.name
        assert [*expected, ("stream", None)] == [
            (arg.arg, ast.unparse(arg.annotation) if arg.annotation else None) for arg in entry.args.args
        ]
        names = [*(name for name, _ in expected), "stream"]
        assert names == [keyword.arg for keyword in wiring.keywords]
        assert names == [keyword.value.id for keyword in wiring.keywords]


def _annotation(arg):
    scalars = {"f32": "cutlass.Float32", "i32": "cutlass.Int32"}
    return "cute.Tensor" if isinstance(arg, TensorArg) else scalars[arg.dtype]


def test_the_header_names_the_variant_and_warns():
    """Whoever opens the file in a stack trace learns where it comes from."""
    first = source_of(HOPPER).text.splitlines()[0]

    assert "# Specialization fwd-sm90a-bf16-hd128-causal, written by fa4build: do not edit." == first


def test_an_unwritten_variant_is_a_render_error():
    """There is no kernel to render."""
    variant = parse_variant("fwd-sm90a-bf16-hd128-causal-varlen-softcap-sink")

    with pytest.raises(RenderError, match="fwd-sm90a-bf16-hd128-causal-varlen-softcap-sink: no kernel is written"):
        render(variant, tuning_for(variant))


# --- templates --------------------------------------------------------------------------------------------------------


def test_the_template_states_facts_and_holds_no_logic():
    """One for all kernels, without statement tags: a choice is a row of wiring.py, or made in context.py."""
    (template,) = TEMPLATES_DIR.iterdir()

    assert template.name == TEMPLATE
    assert "{%" not in template.read_text(encoding="utf-8")


def test_every_kernel_has_a_row_and_every_row_a_kernel():
    """A class that exists, and no argument twice."""
    assert {kernel.wiring for kernel in KERNELS} == set(WIRINGS)
    for wiring in WIRINGS.values():
        path = kernels_source_dir().parent / (wiring.module.replace(".", "/") + ".py")
        assert f"\nclass {wiring.kernel}" in path.read_text(encoding="utf-8")
        assert len({name for name, _ in wiring.fields}) == len(wiring.fields)


def test_a_number_that_a_variant_lacks_is_a_render_error_that_names_it():
    """Never an empty string."""
    values = context_for(HOPPER, tuning_for(HOPPER))
    del values["tile_n"]

    with pytest.raises(RenderError, match=r"ForwardSm90 takes tile_n, which is no axis or tuning value"):
        wired(values, WIRINGS["fwd_sm90"], literal)


def test_an_undefined_name_is_a_render_error_that_names_it():
    """Of the template's own names."""
    values = wired(context_for(HOPPER, tuning_for(HOPPER)), WIRINGS["fwd_sm90"], literal)
    del values["parameters"]

    with pytest.raises(RenderError, match=r"template specialization\.py\.j2: 'parameters' is undefined"):
        render_template(TEMPLATE, values)


def test_a_missing_template_is_a_render_error():
    """With the directory it was looked for in."""
    with pytest.raises(RenderError, match=r"there is no template 'nothing\.py\.j2'"):
        render_template("nothing.py.j2", {})


@given(value=st.one_of(st.integers(), st.booleans(), st.text(), st.floats(allow_nan=False, allow_infinity=False)))
def test_a_literal_reads_back_as_the_same_value(value):
    """Same value and same type, for whatever a template may be given."""
    read = ast.literal_eval(literal(value))

    assert value == read
    assert type(value) is type(read)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), [1], (1, 2), b"x", object()])
def test_anything_else_is_no_literal(value):
    """Its text would not read back, or would hold more than a fact."""
    with pytest.raises(RenderError, match="is no literal"):
        literal(value)


def test_types_are_the_compilers_own():
    """Written as attribute paths, the one exception from plain literals."""
    assert "cutlass.BFloat16" == literal(AttributePath(path=CUTLASS_TYPES["bf16"]))
    assert {"bf16", "fp16", "e4m3", "e5m2"} == set(CUTLASS_TYPES)


# --- what a rendered module may hold ----------------------------------------------------------------------------------

GOOD = """
import cutlass
from kernels_src.forward import Forward
TILE = 128
DTYPE = cutlass.BFloat16

@jit
def entry(q, stream):
    Forward(tile=TILE, dtype=DTYPE)(q, stream)
"""


def test_imports_literals_and_one_call_are_allowed():
    """The whole of what a specialization is."""
    check_specialization(GOOD, name="x")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("TILE = 128", "TILE = 2 * 64", "line 4 of the rendered module, `TILE = 2 * 64`"),
        ("TILE = 128", "TILE = f(1)", "`TILE = f(1)`"),
        ("TILE = 128", "TILE = [1]", "`TILE = [1]`"),
        ("TILE = 128", "A = B = 1", "`A = B = 1`"),
        ("TILE = 128", "if TILE: pass", "`if TILE: pass`"),
        ("TILE = 128", "class A: pass", "`class A: pass`"),
        ("TILE = 128", "print('x')", "`print('x')`"),
        ("    Forward(", "    q = 1\n    Forward(", "line 10 of the rendered module"),
        ("    Forward(", "    return Forward(", "`return Forward("),
        ("(q, stream)\n", "(q + 1, stream)\n", "`Forward("),
        ("tile=TILE", "tile=128 + 1", "`Forward("),
        ("Forward(tile=TILE, dtype=DTYPE)(q, stream)", "forward(q, stream)", "`forward(q, stream)`"),
        ("@jit", "def other(): f()()\n\n@jit", "has 2 functions; it must have one"),
        ("@jit\ndef entry(q, stream):\n    Forward(tile=TILE, dtype=DTYPE)(q, stream)", "", "has 0 functions"),
        ("TILE = 128", "TILE = ", "the rendered module is no Python"),
        ("TILE = 128", "TILE = 0128", "the rendered module is no Python"),
        ("TILE = 128", "None = 128", "the rendered module is no Python"),
    ],
)
def test_anything_more_is_refused_with_its_line(old, new, message):
    """Expressions, statements, further functions: logic belongs in the kernel or in context.py."""
    assert old in GOOD
    with pytest.raises(RenderError) as caught:
        check_specialization(GOOD.replace(old, new), name="some-id")

    assert str(caught.value).startswith("some-id: ")
    assert message in str(caught.value)


# --- dependencies -----------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(tmp_path):
    """A small `kernels_src`: forward reaches softmax.online, by it masks.causal; island is reached by nothing."""
    files = {
        "__init__.py": "",
        "forward.py": "import cutlass\nfrom kernels_src.softmax import online\n",
        "softmax/__init__.py": "",
        "softmax/online.py": "from ..masks.causal import limit\nfrom . import constants as c\n",
        "softmax/constants.py": "LOG2_E = 1.4426950408889634\n",
        "masks/__init__.py": "ANY = 1\n",
        "masks/causal.py": "def limit():\n    import kernels_src.late\n",
        "late.py": "from kernels_src import forward\nfrom kernels_src.masks import ANY\n",
        "island.py": "",
    }
    root = tmp_path / "kernels_src"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def reached(kernels, text="from kernels_src.forward import Forward"):
    """Paths and digests that a module's text reaches."""
    return dict(reachable_sources(ast.parse(text), kernels))


def test_dependencies_are_the_files_reached_through_imports(kernels):
    """Absolute, relative, inside functions, in circles; packages' __init__ too; nothing else."""
    assert [
        "kernels_src/__init__.py",
        "kernels_src/forward.py",
        "kernels_src/late.py",
        "kernels_src/masks/__init__.py",
        "kernels_src/masks/causal.py",
        "kernels_src/softmax/__init__.py",
        "kernels_src/softmax/constants.py",
        "kernels_src/softmax/online.py",
    ] == list(reached(kernels))


def test_digests_are_of_the_bytes(kernels):
    """SHA-256, so that any edit shows."""
    expected = hashlib.sha256(b"LOG2_E = 1.4426950408889634\n").hexdigest()

    assert expected == reached(kernels)["kernels_src/softmax/constants.py"]


def test_an_edit_of_a_reached_file_changes_one_digest_and_of_any_other_none(kernels):
    """Editing one building block rebuilds what reaches it, and only that."""
    before = reached(kernels)
    (kernels / "island.py").write_text("X = 1\n")
    assert before == reached(kernels)

    (kernels / "masks" / "causal.py").write_text("def limit():\n    import kernels_src.late  # edited\n")
    after = reached(kernels)
    assert ["kernels_src/masks/causal.py"] == [path for path in after if after[path] != before[path]]


@pytest.mark.parametrize(
    "text", ["import kernels_src.nothing", "from kernels_src.softmax.nothing import x", "from kernels_src.no import x"]
)
def test_an_import_that_leads_nowhere_is_a_render_error(kernels, text):
    """Otherwise a key would be formed over less than what is compiled."""
    with pytest.raises(RenderError, match=r"import of kernels_src[a-z.]*: there is no "):
        reached(kernels, text)


def test_a_kernel_file_that_is_no_python_is_a_render_error(kernels):
    """With its path."""
    (kernels / "forward.py").write_text("def (:\n")

    with pytest.raises(RenderError, match=r"forward\.py: is no Python"):
        reached(kernels)


def test_real_kernels_depend_on_kernel_files_alone():
    """Every path is below kernels_src, exists, and the kernel's own file is among them."""
    dependencies = dict(source_of(HOPPER).dependencies)
    root = kernels_source_dir().parent

    assert "kernels_src/forward/sm90.py" in dependencies
    for path, digest in dependencies.items():
        assert hashlib.sha256((root / path).read_bytes()).hexdigest() == digest
        assert path.startswith("kernels_src/")


def test_render_is_a_function_of_variant_and_tuning():
    """Its only other input is where the kernels lie."""
    assert ["variant", "tuning", "source_dir"] == list(inspect.signature(render).parameters)
