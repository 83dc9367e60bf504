"""Contract of what is in a family's keys (docs/decisions/key-before-compiling.md): everything its kernels are made of.

- An edit of adapter, kernel, helper, constant, package file, closure or declared data file is another key.
- A distribution that kernels come from is in the key with its version and its files as they are, and what it requires.
- What a compile reads beside these is refused, naming file, family and remedy; what it does not read does not matter.
- A changed family's old cubin is "not cached" for matrix, verify and wheel.
- Mistakes of authors get one clear error.
"""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fa4build.compiling.compile import CompileOptions, Cubin
from fa4build.compiling.executors import LocalExecutor
from fa4build.compiling.toolchain import Distribution, Toolchain, current_toolchain
from fa4build.errors import CompileError, NotCachedError, VariantError
from fa4build.families import FamilyKernel, Input, Pinned, Scalar, kernel_family, one_step
from fa4build.families.fa4 import recipe_for
from fa4build.families.kernels import Worker
from fa4build.matrix.selection import Selection
from fa4build.matrix.variants import parse_variant
from fa4build.pipeline import find_cached, require_cached, store
from fa4build.store.cache import Cache
from tests.kernels_toy.changing import edit, write_package

SM90 = Selection(arches=("sm90",))
BASE = Toolchain(
    dsl_version="1",
    backend="cu13",
    distributions=(Distribution(name="dsl", version="1", record_sha256="0"),),
    builder_sha256="0",
)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A directory that modules are imported from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def family_of(package: str):
    """The family of a package as its files are now."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    importlib.invalidate_caches()
    return importlib.import_module(f"{package}.adapter").FAMILY


def key(family, toolchain: Toolchain = BASE) -> str:
    """The key of the family's kernel for sm90a."""
    (kernel,) = family.expand(SM90)
    return family.recipe(kernel, family.toolchain(toolchain), CompileOptions()).key


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("adapter.py", "factor = 2.0", "factor = 3.0"),
        ("kernel.py", "+ SHIFT", "- SHIFT"),
        ("constants.py", "1.0", "9.0"),
        ("__init__.py", "", "print()"),
    ],
)
@pytest.mark.parametrize("is_reloaded", [True, False])
def test_an_edit_of_any_module_of_a_family_is_another_key(path, file, old, new, is_reloaded):
    """None of them is declared; also in a process that has imported the family before."""
    package = write_package(path, "edited")
    family = family_of("edited")
    before = key(family)

    assert key(family) == before
    edit(package / file, old, new)
    assert key(family_of("edited") if is_reloaded else family) != before


def test_a_package_is_the_same_wherever_it_lies(path, monkeypatch):
    """Names in a key are those of modules."""
    write_package(path / "a", "moved")
    write_package(path / "b", "moved")
    keys = []
    for name in "ab":
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(path / name))
            keys.append(key(family_of("moved")))

    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    "made",
    [
        "compile_it = lambda request, options: FACTOR",
        "import functools\ncompile_it = functools.partial(print, FACTOR)",
        "def make(factor):\n    return lambda request, options: factor\ncompile_it = make(FACTOR)",
    ],
    ids=["lambda", "partial", "closure"],
)
def test_a_function_that_is_made_is_known_by_its_module(path, made):
    """A lambda, a partial and a closure: what they close over comes from files."""
    file = path / "made.py"
    file.write_text(f"FACTOR = 2.0\n{made}\n")
    kernel = FamilyKernel(id="a-sm90a", op="a", arch="sm90a", function="made:compile_it")
    family = kernel_family(name="made", summary="", kernels=lambda arch: [replace(kernel, id=f"a-{arch}", arch=arch)])
    before = key(family)

    edit(file, "2.0", "3.0")
    assert key(family) != before


def test_a_declared_data_file_is_in_the_key(path):
    """By itself, or in a declared directory; two files of one name are two."""
    write_package(path, "withdata")
    for name in ("one", "two"):
        (path / name).mkdir()
        (path / name / "table.bin").write_bytes(name.encode())
    (plain,) = family_of("withdata").expand(SM90)

    def key_with(*sources):
        return key(kernel_family(name="d", summary="", kernels=lambda arch: [plain], sources=sources))

    first, second = (str(path / name / "table.bin") for name in ("one", "two"))
    keys = {key_with(), key_with(first), key_with(second), key_with(first, second), key_with(str(path / "one"))}
    assert len(keys) == 5
    before = key_with(first, second), key_with(str(path / "one"))
    (path / "one" / "table.bin").write_bytes(b"two")
    (path / "two" / "table.bin").write_bytes(b"one")
    assert not set(before) & {key_with(first, second), key_with(str(path / "one"))}


def test_what_a_worker_runs_before_is_in_the_key(path):
    """Its setup and its warm-up are code of the family like any other."""
    write_package(path, "warmed")
    (path / "warming.py").write_text("def setup():\n    return 1\n")
    (plain,) = family_of("warmed").expand(SM90)
    worker = Worker(setup="warming:setup")
    family = kernel_family(name="w", summary="", kernels=lambda arch: [plain], worker=worker)
    before = key(family)

    edit(path / "warming.py", "1", "2")
    assert key(family) != before


# --- distributions ----------------------------------------------------------------------------------------------------


def install(directory, name: str, version: str, text: str, requires: str = "") -> None:
    """What pip leaves behind of a wheel with one module."""
    module = name.replace("-", "_")
    info = directory / f"{module}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (directory / module).mkdir(exist_ok=True)
    (directory / module / "__init__.py").write_text(text)
    required = f"Requires-Dist: {requires}\n" if requires else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}")
    (info / "RECORD").write_text(f"{module}/__init__.py,sha256=x,1\n{module}-{version}.dist-info/RECORD,,\n")


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "imported"])
def test_files_of_a_package_that_kernels_come_from_are_in_the_key(path, is_pinned):
    """As flash-attn-4 and quack are: the files as they are, edited in place or not, and those of what it requires."""
    stem = "pinned" if is_pinned else "imported"
    install(path, f"library-{stem}", "1.0", "A = 1\n", requires=f"below-{stem} >= 1")
    install(path, f"below-{stem}", "2.0", "B = 1\n")
    (path / f"uses_{stem}.py").write_text("" if is_pinned else f"import library_{stem}\n")
    (path / f"uses_{stem}.py").open("a").write("def f(request, options): ...\n")
    kernel = FamilyKernel(id="a-sm90a", op="a", arch="sm90a", function=f"uses_{stem}:f")
    pinned = [Pinned(name=f"library-{stem}", tested=("1.0",))] if is_pinned else []
    family = kernel_family(name="lib", summary="", kernels=lambda arch: [kernel], distributions=pinned)
    keys = [key(family)]
    for module in (f"library_{stem}", f"below_{stem}"):
        edit(path / module / "__init__.py", "1", "2")
        keys.append(key(family))

    assert len(set(keys)) == 3


def test_the_argument_list_of_our_own_kernels_is_in_their_key(monkeypatch):
    """It is a table outside of code generation: extents and alignments reach the cubin, the text does not show them."""
    from fa4build.runtime.fa4_kernels import abi

    variant = parse_variant("fwd-sm90a-bf16-hd64-full")
    before = recipe_for(variant, BASE, CompileOptions()).key
    name = next(name for name in abi.SIGNATURES if name.startswith("fwd/dense"))
    changed = {
        signature: tuple((*row[:-1], row[-1] * 2) if row[1] == "tensor" else row for row in rows)
        for signature, rows in abi.SIGNATURES.items()
    }
    assert changed[name] != abi.SIGNATURES[name]
    monkeypatch.setattr(abi, "SIGNATURES", changed)

    assert recipe_for(variant, BASE, CompileOptions()).key != before


# --- the compile process ----------------------------------------------------------------------------------------------


# name -> (line in the compile function, `sources` of the family, what the error says or None)
COMPILES = {
    "plain": ("", "", None),
    "by_name": ("factor = __import__('importlib').import_module('far' + 'away').F", "", r"reads \S+/faraway\.py"),
    "by_name_declared": (
        "factor = __import__('importlib').import_module('far' + 'away').F",
        "sources=[__file__.replace('by_name_declared/adapter', 'faraway')],",
        None,
    ),
    "data": ("factor = float(open(__file__.replace('adapter.py', 'n.txt')).read())", "", r"reads \S+/data/n\.txt"),
    "data_declared": (
        "factor = float(open(__file__.replace('adapter.py', 'n.txt')).read())",
        "sources=[__file__.replace('adapter.py', 'n.txt')],",
        None,
    ),
    "executed": ("exec(open(__file__.replace('adapter.py', 'n.txt')).read())", "", r"reads \S+/executed/n\.txt"),
    "foreign": (
        "__import__('importlib').import_module('not_' + 'pinned')",
        "",
        r"Pinned\(name='not-pinned', tested=\('3'",
    ),
    "program": ("__import__('subprocess').run(['true'])", "", "runs a program"),
    "nothing": ("return None", "", r"returned None; it must return a HostFunction"),
    "odd_dtype": (
        "return compile_host(Multiply(2.0), [Input(name='x', dtype='bfloat16', shape=(1,))], request, options)",
        "",
        r"x has dtype 'bfloat16'\. Allowed: bf16, fp16",
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Every family of COMPILES compiled: name -> (family, recipe, Cubin or error)."""
    directory = tmp_path_factory.mktemp("compiled")
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(directory))
    (directory / "faraway.py").write_text("F = 2.0\n")
    install(directory, "not-pinned", "3", "A = 1\n")
    toolchain, found = current_toolchain(), {}
    with LocalExecutor(toolchain, jobs=1, timeout_s=120) as executor:
        for name, (line, sources, _) in COMPILES.items():
            (write_package(directory, name, line, sources) / "n.txt").write_text("5\n")
            family = family_of(name)
            (kernel,) = family.expand(SM90)
            recipe = family.recipe(kernel, family.toolchain(toolchain), CompileOptions())
            executor.submit(recipe.request, recipe.options, directory / "work" / name)
            found[name] = family, recipe, executor.wait().result
    yield found
    patch.undo()


@pytest.mark.parametrize("name", COMPILES)
def test_what_a_compile_reads_is_in_its_key_or_refused(results, name):
    """Naming the file, the family and what to declare."""
    message = COMPILES[name][2]
    result = results[name][2]

    if message is None:
        assert isinstance(result, Cubin), result
    else:
        assert isinstance(result, CompileError), result
        with pytest.raises(CompileError, match=message):
            raise result
        if "reads" in message:
            assert "`sources` of family changing" in str(result)


def test_the_old_cubin_of_a_changed_family_is_not_cached(results, tmp_path):
    """`matrix --assert-cached`, `verify` and `wheel` take entries by today's key alone."""
    family, recipe, cubin = results["plain"]
    cache = Cache(tmp_path)
    store(cache, recipe, cubin)
    kernels = family.expand(SM90)
    (adapter,) = (Path(path) for path, _ in recipe.request.sources if path.endswith("plain/adapter.py"))

    assert require_cached(find_cached(kernels, cache, family=family))
    text = adapter.read_text()
    try:
        adapter.write_text(f"{text}# edited\n")
        with pytest.raises(NotCachedError, match="multiply-sm90a-bf16"):
            require_cached(find_cached(kernels, cache, family=family))
    finally:
        adapter.write_text(text)


# --- mistakes of authors ----------------------------------------------------------------------------------------------


def test_a_source_that_is_not_there_is_named_with_its_family(path):
    """Where one is expected, and how to name it."""
    write_package(path, "lost", sources="sources=['/nonexistent.py'],")

    with pytest.raises(VariantError, match=r"family changing: its source /nonexistent\.py does not exist\. Name files"):
        key(family_of("lost"))


@pytest.mark.parametrize("function", ["nowhere:f", "os.path", "builtins:print", "tests.nowhere:f", ":f", "nowhere."])
def test_a_function_whose_module_has_no_file_is_refused(function):
    """Then nothing says what its kernel is made of."""
    kernel = FamilyKernel(id="a-sm90a", op="a", arch="sm90a", function=function)

    with pytest.raises(VariantError, match=r"family f: its compile function is .*`module:name` is expected"):
        key(kernel_family(name="f", summary="", kernels=lambda arch: [kernel]))


@pytest.mark.parametrize("name", ["CapsName", "with-dash", "", "1st", "a b", "../x"])
def test_a_family_name_of_another_form_is_refused(name):
    """It names distributions and manifests."""
    with pytest.raises(VariantError, match="a name is lower-case letters, digits and _"):
        kernel_family(name=name, summary="", kernels=lambda arch: [])


@pytest.mark.parametrize(
    "kernel_id", ["Bad Id!", "a-sm90a-", "a", "a-bf16-sm90a", "../a-sm90a", "a-sm90a-n0.5", "1-sm90a"]
)
def test_a_kernel_id_of_another_form_is_refused(kernel_id):
    """It names directories, entries and symbols."""
    kernel = FamilyKernel(id=kernel_id, op="a", arch="sm90a", function="m:f")

    with pytest.raises(VariantError, match=r"is no kernel id\. Fields"):
        kernel_family(name="f", summary="", kernels=lambda arch: [kernel]).expand(SM90)


def test_the_type_of_a_scalar_stays_out_of_the_recipe():
    """The launch plan has it; manifests are as they were."""
    kernel = FamilyKernel(id="a-sm90a", op="a", arch="sm90a", function="m:f")
    x = Input(name="x", dtype="bf16", shape=("rows", 8))
    (scalar,) = one_step(kernel, [x, Scalar(name="n", dtype="i32")], results=[]).document()["scalars"]

    assert scalar == {"name": "n", "default": None}
