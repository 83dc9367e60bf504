"""Contract of families: what plugs into the core, and what the core makes of it.

- A family is found by name, by an entry point's text, or as `module:ATTRIBUTE`; anything else is refused with the list.
- Selections, keys, toolchain and notices of a family from a list of kernels; an untested version is refused.
- Recipes reach the manifest, sorted, and only with all of their kernels.
- Arguments of a launch plan take other names, or come from a tensor's extent, and the plan still means the same.
- The declared matrices: ids are unique, rules over lengths divide all lengths, every recipe's kernels are declared.
"""

import fnmatch
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fa4build.compiling.compile import CompileOptions
from fa4build.compiling.toolchain import Distribution, Toolchain
from fa4build.errors import LaunchPlanError, NothingSelectedError, ToolchainError, VariantError, WheelError
from fa4build.families import FamilyKernel, Input, Pinned, Scalar, kernel_family, one_step
from fa4build.families.flash_attn_4.configuration import backward_tiles, forward_lengths
from fa4build.families.flash_attn_4.matrix import on_request
from fa4build.families.kernels import licence_files
from fa4build.families.registry import BUILT_IN, family_named, family_names
from fa4build.families.sources import ingredients
from fa4build.matrix.arch import ARCHES
from fa4build.matrix.selection import Selection
from fa4build.plan import canonical_digest, evaluate, failed_guard, plan_from_json
from fa4build.plan.names import with_bindings, with_names, with_types
from fa4build.plan.values import LaunchPlan, Vector
from fa4build.runtime.fa4_kernels.abi import SIGNATURES
from fa4build.runtime.fa4_kernels.dispatch import signature_of
from fa4build.runtime.fa4_kernels.expressions import evaluate as evaluate_expression
from fa4build.shipping.coverage_family import cover_family
from fa4build.shipping.manifest import manifest_from_json, manifest_to_json
from fa4build.shipping.pack import build_pack
from fa4build.store.keys import key_of
from fa4build.verify.levels import family_kernels
from tests.artifacts import TOOLCHAIN, made_up_artifact

BASE = Toolchain(
    dsl_version="1",
    backend="cu13",
    distributions=(Distribution(name="dsl", version="1", record_sha256="0"),),
    builder_sha256="0",
)


COMPILE = "tests.kernels_toy.scale_family:compile_kernel"


def kernels(arch: str) -> list[FamilyKernel]:
    """Two for each target."""
    return [
        FamilyKernel(id=f"scale-{arch}-n{n}", op="scale", arch=arch, function=COMPILE, payload={"n": n}, axes={"n": n})
        for n in (64, 128)
    ]


def family(tmp_path: Path, **more: object):
    """A family with one source file."""
    source = tmp_path / "kernel.py"
    if not source.exists():
        source.write_text("pass\n")
    return kernel_family(name="toy", summary="Toys", kernels=kernels, sources=[str(source)], **more)


def test_every_built_in_family_is_found_by_its_name():
    """Also under the names that people say; `family_names` lists the canonical ones."""
    names = {name: family_named(name).name for name in BUILT_IN}

    assert {"fa4": "fa4", "flash-attn-4": "upstream", "quack": "quack"} == names
    assert family_named("flash-attn-4") is family_named("upstream")
    assert set(BUILT_IN) <= set(family_names())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", r"family 'nothing' is unknown. Allowed: .*fa4, flash-attn-4, quack"),
        ("no_such_module:FAMILY", "cannot be imported"),
        ("tests.kernels_toy.scale_family:NONE", "cannot be imported"),
        ("tests.kernels_toy.scale_family:X", "is a Input, a Family is expected"),
    ],
)
def test_what_is_no_family_is_refused(name, message):
    """With what is allowed, or why it cannot be used."""
    with pytest.raises(VariantError, match=message):
        family_named(name)


def test_a_selection_names_kernels_by_target_and_pattern(tmp_path):
    """In the order of declaration; a pattern without a match says what is near."""
    toy = family(tmp_path)
    select = toy.expand

    assert ["scale-sm90a-n64", "scale-sm90a-n128"] == [k.id for k in select(Selection(arches=("sm90",)))]
    assert ["scale-sm90a-n64", "scale-sm100a-n64", "scale-sm103a-n64"] == [
        k.id for k in select(Selection(globs=("*-n64",)))
    ]
    with pytest.raises(NothingSelectedError, match=r"'scale-sm90a-n65' matches no kernel of toy. Nearest: scale-sm90a"):
        select(Selection(globs=("scale-sm90a-n65",)))
    with pytest.raises(VariantError, match="--spec and --model describe variants of fa4"):
        select(Selection(specs=("x.toml",)))


def test_two_kernels_of_one_id_are_refused(tmp_path):
    """Ids name cache entries, work directories and manifest entries."""
    toy = kernel_family(name="toy", summary="", kernels=kernels, sources=[str(tmp_path)])
    twice = kernel_family(name="toy", summary="", kernels=lambda arch: kernels(arch) * 2, sources=[str(tmp_path)])

    assert toy.expand(Selection(arches=("sm90",)))
    with pytest.raises(VariantError, match="two kernels are called scale-sm90a-n128, scale-sm90a-n64"):
        twice.expand(Selection(arches=("sm90",)))


def key(toy, kernel: FamilyKernel, toolchain: Toolchain = BASE) -> str:
    """Key of a kernel, with sources as they are now."""
    toy.toolchain(BASE)
    recipe = toy.recipe(kernel, toolchain, CompileOptions())
    assert key_of(recipe.inputs) == recipe.key
    return recipe.key


@pytest.mark.parametrize(
    "change",
    [
        {"payload": {"n": 65}},
        {"axes": {"n": 1}},
        {"function": "tests.kernels_toy.scale_family:kernels"},
        {"tuning": {"tile": 1}},
        {"op": "other"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_that_decides_a_compile_is_in_the_key(tmp_path, change):
    """Payload, axes, function, tuning, op; of the sources their content, not their place."""
    toy, kernel = family(tmp_path), kernels("sm90a")[0]

    assert key(toy, kernel) == key(toy, kernel)
    assert key(toy, kernel) != key(toy, replace(kernel, **change))


def test_an_edited_source_is_another_key(tmp_path):
    """And the same content in another directory is the same one."""
    kernel = kernels("sm90a")[0]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = family(tmp_path / "a"), family(tmp_path / "b")
    before = key(first, kernel)

    assert before == key(second, kernel)
    (tmp_path / "a" / "kernel.py").write_text("pass  # edited\n")
    assert before != key(first, kernel)


def test_sources_are_named_without_the_checkout():
    """A directory's files by the path below its parent."""
    here = Path(__file__).parents[1] / "kernels_toy"
    names = [name for name, _ in ingredients("toy", [COMPILE], [str(here)]).named]

    assert "sources/kernels_toy/scale_rows.py" in names
    assert "tests/kernels_toy/scale_family.py" in names
    assert names == sorted(names)


def test_an_untested_version_is_refused_with_the_tested_ones(tmp_path):
    """Before anything is compiled; a missing package likewise."""
    wrong = family(tmp_path, distributions=[Pinned(name="click", tested=("0.0.1", "0.0.2"))])
    missing = family(tmp_path, distributions=[Pinned(name="no-such-package", tested=("1",))])

    with pytest.raises(ToolchainError, match=r"click \S+ is installed; tested: 0.0.1, 0.0.2. Run: .*click==0.0.2"):
        wrong.toolchain(BASE)
    with pytest.raises(ToolchainError, match=r"needs no-such-package \(tested: 1\), not installed"):
        missing.toolchain(BASE)


def test_distributions_and_environment_join_the_toolchain(tmp_path):
    """So they are in every key, in the manifest and in the bill of materials."""
    from importlib.metadata import version

    toy = family(tmp_path, distributions=[Pinned(name="click", tested=(version("click"),))], environment={"X": "1"})
    whole = toy.toolchain(BASE)

    assert ["click", "dsl"] == [item.name for item in whole.distributions]
    assert ("X", "1") in whole.environment
    assert key(toy, kernels("sm90a")[0], whole) != key(toy, kernels("sm90a")[0])


def test_a_package_without_a_licence_text_is_refused():
    """What must be kept cannot be left out silently."""
    with pytest.raises(ToolchainError, match="no licence text is installed"):
        licence_files("no-such-package")


def recipe(kernel_id: str) -> dict:
    """One kernel, one result."""
    x = Input(name="x", dtype="bf16", shape=("rows", 8))
    out = Input(name="out", dtype="bf16", shape=("rows", 8))
    kernel = FamilyKernel(id=kernel_id, op="scale", arch="sm90a", function="m:f")
    return one_step(kernel, [x, Scalar(name="eps", default="1e-6"), out], results=["out"]).document()


def packed(*recipes: dict):
    """A pack of one kernel with recipes."""
    artifact = made_up_artifact()
    options = {"version": "1", "abi": "0" * 64, "toolchain": TOOLCHAIN}
    return build_pack([artifact], pack="p", family="toy", recipes=recipes, **options)


def test_recipes_round_trip_through_the_manifest():
    """As they were, under the family's name; a manifest without recipes has no such key."""
    name = made_up_artifact().facts.id
    manifest = packed(recipe(name)).manifest
    text = manifest_to_json(manifest)

    assert manifest_from_json(text) == manifest
    assert manifest.family == "toy"
    assert ["x", "eps", "out"] == manifest.recipes[0]["steps"][0]["arguments"]
    assert '"recipes"' not in manifest_to_json(packed().manifest)


def test_a_recipe_without_its_kernels_is_refused():
    """Naming the kernel; two recipes of one id too."""
    name = made_up_artifact().facts.id
    with pytest.raises(WheelError, match="needs other, which is not in the pack"):
        packed(recipe("other"))
    with pytest.raises(WheelError, match="two recipes share an id"):
        packed(recipe(name), recipe(name))


# --- names and bindings of a plan -------------------------------------------------------------------------------------


def toy_plan() -> LaunchPlan:
    """One launch of ceil(n / 32) blocks with x.ptr, x.shape[0] and n as parameters, and two examples."""
    nodes = [
        ["in", "i64", "x.ptr"],
        ["in", "i64", "x.shape[0]"],
        ["in", "i32", "n"],
        ["const", "i32", 31],
        ["add", "i32", 2, 3],
        ["const", "i32", 32],
        ["sdiv", "i32", 4, 5],
        ["const", "i32", 1],
        ["const", "i64", 16],
        ["urem", "i64", 0, 8],
        ["const", "i64", 0],
        ["eq", "i64", 9, 10],
        ["trunc", "i32", 1],
    ]
    param = {"kind": "bytes", "size": 16, "align": 8, "fields": [[0, 0], [8, 12], [12, 2]]}
    launch = {"kernel": "k_0", "grid": [6, 7, 7], "block": [32, 1, 1], "cluster": [1, 1, 1], "smem": 0, "pdl": False}
    document = {
        "format": "fa4build.launchplan",
        "version": 1,
        "origin": {"kind": "handwritten"},
        "spec": {"shapes": {"x": ["rows", 8]}, "unit_strides": ["x.stride[1]"]},
        "args": [
            {"name": "x", "kind": "tensor", "dtype": "bf16", "rank": 2},
            {"name": "n", "kind": "scalar", "dtype": "i32"},
        ],
        "nodes": nodes,
        "guards": [{"expr": 11, "message": "x.ptr must be aligned to 16 bytes", "source": "entry"}],
        "launches": [{**launch, "cooperative": False, "params": [param]}],
        "vectors": [],
    }
    plan = plan_from_json(json.dumps(document))
    inputs = [{"x.ptr": 4096 * k, "x.shape[0]": 100 * k, "n": 77 * k} for k in (1, 2)]
    return replace(plan, vectors=tuple(Vector(inputs=i, sha256=canonical_digest(evaluate(plan, i))) for i in inputs))


def test_a_plan_under_other_names_means_the_same():
    """Leaves, guards, spec and vectors are renamed; the launches of the renamed inputs are those of the old ones."""
    plan = toy_plan()
    renamed = with_names(plan, {"x": "q", "n": "count"})

    assert ["q", "count"] == [arg.name for arg in renamed.args]
    assert {"shapes": {"q": ["rows", 8]}, "unit_strides": ["q.stride[1]"]} == renamed.spec
    for old, new in zip(plan.vectors, renamed.vectors, strict=True):
        assert canonical_digest(evaluate(renamed, new.inputs)) == old.sha256
    wrong = {"q.ptr": 8, "q.shape[0]": 1, "count": 1}
    assert failed_guard(renamed, wrong) == "q.ptr must be aligned to 16 bytes"


def test_bytes_take_the_name_of_an_8_bit_float():
    """And nothing else does: sizes must agree."""
    plan = toy_plan()
    as_bytes = replace(plan, args=(replace(plan.args[0], dtype="u8"), *plan.args[1:]))

    assert with_types(as_bytes, {"x": "e4m3"}).args[0].dtype == "e4m3"
    with pytest.raises(LaunchPlanError, match="x cannot be called a tensor of e4m3: it is one of bf16"):
        with_types(plan, {"x": "e4m3"})
    with pytest.raises(LaunchPlanError, match="x cannot be called a tensor of f32"):
        with_types(as_bytes, {"x": "f32"})


def test_unknown_or_equal_names_are_refused():
    """A name that is not there, and two arguments of one name."""
    plan = toy_plan()
    first, second = (arg.name for arg in plan.args[:2])

    with pytest.raises(LaunchPlanError, match="no argument is called nothing"):
        with_names(plan, {"nothing": "x"})
    with pytest.raises(LaunchPlanError, match="two arguments would have one name"):
        with_names(plan, {first: second})


def test_a_bound_scalar_is_read_from_the_extent():
    """The plan without the scalar launches what the plan with it launches when both are equal."""
    plan = toy_plan()
    bound = with_bindings(plan, {"n": "x.shape[0]"})

    assert ["x"] == [arg.name for arg in bound.args]
    for rows in (1, 31, 32, 33, 2**31 - 32):
        alone = {"x.ptr": 64, "x.shape[0]": rows}
        assert evaluate(plan, {**alone, "n": rows}) == evaluate(bound, alone)
    for vector in bound.vectors:
        assert canonical_digest(evaluate(bound, vector.inputs)) == vector.sha256
    with pytest.raises(LaunchPlanError, match="no scalar argument is called x"):
        with_bindings(plan, {"x": "x.shape[0]"})


# --- declared matrices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flash-attn-4", "quack"])
@pytest.mark.parametrize("arch", [arch.name for arch in ARCHES])
@pytest.mark.parametrize("globs", [(), ("*",)], ids=["default", "everything"])
def test_every_declared_operator_has_its_kernels(name, arch, globs):
    """Each recipe's kernels are declared, and each kernel belongs to a recipe; also in the default matrix alone."""
    declared = family_named(name).expand(Selection(arches=(arch,), globs=globs))
    recipes = family_named(name).op_recipes(declared)
    used = {step.kernel for recipe in recipes for step in recipe.steps}

    assert used == {kernel.id for kernel in declared}
    assert len({recipe.id for recipe in recipes}) == len(recipes)


@pytest.mark.parametrize("arch", [arch.name for arch in ARCHES])
@pytest.mark.parametrize("ratio", [1, 4, 8])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_exactly_one_length_class_takes_each_length(arch, ratio, layout, head_dim):
    """Rules divide all lengths: none is left out, none has two kernels."""
    classes = forward_lengths(arch, head_dim, head_dim, "full", layout, ratio)
    for seqlen in (1, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 255, 256, 257, 5000):
        names = {"seqlen_q": seqlen, "max_seqlen_q": seqlen}
        assert 1 == sum(not c.rule or evaluate_expression(c.rule, names) for c in classes)


def test_functions_find_only_kernels_that_take_their_arguments():
    """Of upstream, dense forwards of 16-bit types without sink, cap or scales; others by recipe alone."""
    kernels = family_named("flash-attn-4").expand(Selection(globs=("*",)))
    found = [kernel for kernel in kernels if signature_of(entry_like(kernel)) in SIGNATURES]

    assert {"fwd/dense"} == {signature_of(entry_like(kernel)) for kernel in found}
    assert {"bf16", "fp16"} == {kernel.axes["dtype"] for kernel in found}
    assert not any(kernel.payload.get("sink") or kernel.payload.get("softcap") for kernel in found)
    assert {kernel.payload["call"] for kernel in kernels if kernel.op == "fwd"} == {"forward"}


def entry_like(kernel: FamilyKernel) -> SimpleNamespace:
    """What the dispatcher reads of a manifest's entry."""
    return SimpleNamespace(op=kernel.op, axes=kernel.axes)


def test_rare_kernels_of_upstream_are_built_on_request():
    """Without a glob none that has a reason against it; a glob takes them, and `verify` those that are named."""
    family = family_named("flash-attn-4")
    default = family.expand(Selection(arches=("sm100",)))
    everything = family.expand(Selection(arches=("sm100",), globs=("*",)))
    rare = "fwd-sm100a-fp16-hd128-causal-varlen-r1"

    assert {kernel.id for kernel in default} == {kernel.id for kernel in everything if not on_request(kernel)}
    assert {kernel.payload["dtype"] for kernel in default} == {"bf16", "e4m3"}
    assert {kernel.id for kernel in family_kernels(family, ("sm100",), ("fwd-*-hd128-causal-varlen-*",))} == {
        kernel.id for kernel in default if fnmatch.fnmatchcase(kernel.id, "fwd-*-hd128-causal-varlen-*")
    }
    assert rare in {kernel.id for kernel in everything}
    assert [kernel.id for kernel in family_kernels(family, (), (rare,))] == [rare]


@pytest.mark.parametrize("globs", [(), ("*",)], ids=["default", "everything"])
def test_the_declared_matrix_of_upstream_is_closed(globs):
    """At every boundary of the rules one operator answers, and never two; every kernel is called by one."""
    family = family_named("flash-attn-4")
    kernels = family.expand(Selection(arches=("sm100",), globs=globs))
    entries = tuple(SimpleNamespace(id=kernel.id, target="sm_100a") for kernel in kernels)
    recipes = tuple(recipe.document() for recipe in family.op_recipes(kernels))
    pack = SimpleNamespace(manifest=SimpleNamespace(entries=entries, recipes=recipes))
    coverage = cover_family([pack], replace(family, expand=lambda _: kernels))

    assert (coverage.wrong, coverage.missing_problems, coverage.is_closed) == ((), 0, True)
    assert coverage.served.keys() == {recipe["id"] for recipe in recipes}


def test_capped_kernels_are_told_apart_by_their_cap():
    """The cap is compiled in: a caller names it, and a call without one finds the kernel without."""
    family = family_named("flash-attn-4")
    ids = ("fwd-sm90a-bf16-hd128-causal-softcap50-r1", "fwd-sm90a-bf16-hd128-causal-r1")
    capped, plain = family.op_recipes(family.expand(Selection(globs=ids)))[::-1]

    assert (capped.axes["softcap"], "softcap" in plain.axes) == (50.0, False)


@pytest.mark.parametrize(
    ("dims", "mask", "tiles"),
    [
        ((64, 64), "full", (128, 128)),
        ((128, 128), "full", (80, 128)),
        ((128, 128), "causal", (64, 128)),
        ((256, 256), "full", (64, 48)),
    ],
)
def test_tiles_of_the_sm90_backward(dims, mask, tiles):
    """Figures of flash-attn-4 4.0.0b36 (design notes, section 1.6); the compile process compares them again."""
    found = backward_tiles("sm90a", *dims, mask)

    assert (found.tile_m, found.tile_n) == tiles


def test_the_tutorial_shows_the_files_that_are_tested():
    """Kernel and adapter stand in docs/package-your-own-kernel.md as they are; the adapter is short."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "package-your-own-kernel.md").read_text(encoding="utf-8")
    toy = root / "tests" / "kernels_toy"
    adapter = (toy / "scale_family.py").read_text(encoding="utf-8")

    assert (toy / "scale_rows.py").read_text(encoding="utf-8") in page
    assert (toy / "scale_cases.py").read_text(encoding="utf-8") in page
    assert adapter in page
    assert sum(bool(line.strip()) for line in adapter.splitlines()) <= 24
    assert sum(bool(line.strip()) and "import" not in line for line in adapter.splitlines()) <= 20
