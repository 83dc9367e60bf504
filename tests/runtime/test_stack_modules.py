"""Contract: a provided module is there for everyone who asks: import, find_spec, importlib.metadata, transformers, and
processes started later; it is taken away again; an installed package keeps its version and all but its attention.

`python -m fa4_kernels run` gives the same to a program that says nothing. Nothing imports torch before the program.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import fa4_kernels
import pytest
from fa4_kernels import InputError
from fa4_kernels import __main__ as command
from fa4_kernels.stacks import modules, workers

from tests.runtime.conftest import RUNTIME

GUIDE = RUNTIME.parents[1] / "docs" / "guide" / "switch-on.md"
STACKS = ("flash_attn", "flash_attn_interface", "flash_attn.cute")


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Each test begins and ends without provided modules."""
    yield
    assert modules._state.fallback == {}
    assert modules._FINDER not in sys.meta_path
    assert [name for name in sys.modules if name.startswith("flash_attn")] == []


@pytest.fixture
def provided():
    made = {}

    def provide(stack, **options):
        made[stack] = fa4_kernels.provide(stack, **options)
        return made[stack]

    yield provide
    for each in made.values():
        each.remove()


def run_python(*arguments, env=None, cwd=None):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=cwd)


# --- what is asked before an import -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stack", "module", "distribution", "version"),
    [
        ("flash_attn", "flash_attn", "flash-attn", "2.8.3"),
        ("flash_attn_interface", "flash_attn_interface", "flash-attn-3", "3.0.0"),
        ("flash_attn_interface", "flash_attn_3.flash_attn_interface", "flash_attn_3", "3.0.0"),
        ("flash_attn.cute", "flash_attn.cute.interface", "flash-attn-4", "4.0.0b36"),
    ],
)
def test_versions_and_specs_are_there_before_the_import(provided, stack, module, distribution, version):
    """TransformerEngine and transformers look at these first; underscores and hyphens are the same."""
    each = provided(stack)
    assert importlib.util.find_spec(module) is not None
    assert importlib.metadata.version(distribution) == version
    assert importlib.metadata.distribution(distribution).metadata["Name"] == distribution.replace("_", "-")
    top_level = module.partition(".")[0]
    assert top_level in importlib.metadata.distribution(distribution).read_text("top_level.txt").split()
    each.remove()
    each.remove()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(distribution)
    assert importlib.util.find_spec(top_level) is None


def test_modules_that_are_not_served_are_not_there(provided):
    """A program that asks for them gets Python's own error."""
    provided("flash_attn")
    assert importlib.util.find_spec("flash_attn.modules") is None
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.losses"):
        importlib.import_module("flash_attn.losses")


def test_one_stack_does_not_bring_another(provided):
    """FlashAttention-4 alone has a package flash_attn without FlashAttention-2's functions, as installed."""
    pytest.importorskip("torch")
    provided("flash_attn.cute")
    import flash_attn.cute

    assert not hasattr(flash_attn, "flash_attn_func")
    assert flash_attn.cute.__version__ == "4.0.0b36"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")
    provided("flash_attn")
    assert callable(flash_attn.flash_attn_func)
    assert flash_attn.__version__ == "2.8.3"


def test_removal_of_one_leaves_the_other(provided):
    """The package is made again without what was removed."""
    pytest.importorskip("torch")
    provided("flash_attn")
    four = provided("flash_attn.cute")

    four.remove()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.cute")
    assert callable(importlib.import_module("flash_attn").flash_attn_func)


def test_wrong_requests_are_refused():
    """An unknown name; a fallback to nothing; options that a stack does not have."""
    with pytest.raises(InputError, match=r"'flash_atn' is unknown\. Allowed: torch, transformers, flash_attn"):
        fa4_kernels.provide("flash_atn")
    with pytest.raises(InputError, match="flash_attn is not installed"):
        fa4_kernels.provide("flash_attn", fallback=True)
    with pytest.raises(InputError, match="leave them out for transformers"):
        fa4_kernels.provide("transformers", fallback=True)


# --- installed packages -----------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """flash-attn 2.7.1 in a directory on sys.path: its own padding, and an attention that says who it is."""
    pytest.importorskip("torch")
    package = tmp_path / "flash_attn"
    package.mkdir()
    own = "def flash_attn_func(*arguments, **options):\n    return 'theirs'\n"
    (package / "flash_attn_interface.py").write_text(own)
    (package / "__init__.py").write_text("__version__ = '2.7.1'\nfrom .flash_attn_interface import flash_attn_func\n")
    (package / "bert_padding.py").write_text("pad_input = 'theirs'\n")
    facts = tmp_path / "flash_attn-2.7.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.7.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]


@pytest.mark.parametrize("is_imported", [False, True])
def test_an_installed_package_keeps_all_but_its_attention(installed, provided, is_imported):
    """Whether it is imported before or after; removal gives its functions back."""
    if is_imported:
        importlib.import_module("flash_attn")
    each = provided("flash_attn")
    module = importlib.import_module("flash_attn")
    assert module.flash_attn_func.is_of_fa4_kernels
    assert importlib.import_module("flash_attn.flash_attn_interface").flash_attn_func is module.flash_attn_func
    assert importlib.import_module("flash_attn.bert_padding").pad_input == "theirs"
    assert module.__version__ == importlib.metadata.version("flash-attn") == "2.7.1"
    assert not hasattr(module, "flash_attn_kvpacked_func")  # what it does not have is not added
    each.remove()
    assert module.flash_attn_func() == "theirs"
    assert sys.modules["flash_attn.flash_attn_interface"].flash_attn_func() == "theirs"


def test_a_fallback_reaches_the_installed_function(installed, provided, monkeypatch):
    """Here for a tensor that is none."""
    monkeypatch.setattr(modules._state, "told", set())
    provided("flash_attn", fallback=True)
    with pytest.warns(RuntimeWarning, match="served by the installed package"):
        assert importlib.import_module("flash_attn").flash_attn_func(1, 2, 3) == "theirs"


def test_an_installed_package_that_cannot_be_imported_is_replaced(installed, provided):
    """Built for another torch, say; but not where calls are to fall back to it."""
    (installed / "flash_attn_interface.py").write_text("import flash_attn_2_cuda\n")
    provided("flash_attn", fallback=True)
    with pytest.raises(ModuleNotFoundError, match="flash_attn_2_cuda"):
        importlib.import_module("flash_attn")
    provided("flash_attn")
    with pytest.warns(UserWarning, match="cannot be imported"):
        module = importlib.import_module("flash_attn")
    assert module.flash_attn_func.is_of_fa4_kernels


def test_another_package_below_the_same_name_stays(tmp_path, monkeypatch, provided):
    """flash-attn-4 installs flash_attn.cute without a package around it; FlashAttention-2 is then ours."""
    pytest.importorskip("torch")
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("flash_attn_func = 'theirs'\n")
    monkeypatch.syspath_prepend(tmp_path)
    provided("flash_attn")
    assert importlib.import_module("flash_attn.cute").flash_attn_func == "theirs"
    assert importlib.import_module("flash_attn").flash_attn_func.is_of_fa4_kernels
    for name in ("flash_attn.cute", "flash_attn"):
        del sys.modules[name]


# --- what the guide shows ---------------------------------------------------------------------------------------------


def test_the_command_of_the_guide_prints_what_it_says(tmp_path):
    """docs/guide/switch-on.md: its program, its command, its output."""
    text = GUIDE.read_text(encoding="utf-8")
    (program,) = re.findall(r"<!-- file: program\.py -->\n```python\n(.*?)```", text, re.DOTALL)
    (arguments, output), *_ = re.findall(r"```console\n\$ python (.*?)\n(.*?)\n```", text)
    (tmp_path / "program.py").write_text(program)
    result = run_python(*arguments.split(), env={"PYTHONPATH": str(RUNTIME)}, cwd=tmp_path)
    assert (result.returncode, result.stdout.strip()) == (0, output), result.stderr


# --- other processes --------------------------------------------------------------------------------------------------

LOOK = """
import importlib.metadata, importlib.util, json, sys
def look():
    found = [importlib.metadata.version(name) for name in ("flash-attn", "flash-attn-3", "flash-attn-4")]
    return found + [importlib.util.find_spec("flash_attn") is not None, "torch" in sys.modules]
"""
SCRIPT = """
import json, multiprocessing, sys
from look import look
if __name__ == "__main__":
    found = [sys.argv[1:], look()]
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found.append(pool.apply(look))
    print(json.dumps(found))
"""
FOUND = ["2.8.3", "3.0.0", "4.0.0b36", True, False]


@pytest.fixture
def program(tmp_path):
    """A script and a module that say what they, and their workers, find."""
    (tmp_path / "look.py").write_text(LOOK)
    (tmp_path / "program.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path / "program.py"


@pytest.mark.parametrize("is_module", [False, True])
def test_run_provides_to_a_program_and_to_its_workers(program, is_module):
    """Arguments are the program's; workers of both methods find the same; nobody imports torch for it."""
    what = ["-m", "program"] if is_module else [program]
    result = run_python(
        "-m", "fa4_kernels", "run", *what, "--size", "3", env={"PYTHONPATH": str(RUNTIME)}, cwd=program.parent
    )

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [["--size", "3"], FOUND, FOUND, FOUND]


def test_the_environment_is_enough_for_a_process_of_any_parent(tmp_path):
    """For Ray and the like. A sitecustomize that was there is run, too; a wrong word is told, and ends nothing."""
    (tmp_path / "sitecustomize.py").write_text("print('the other')\n")
    code = "import importlib.util; print(importlib.util.find_spec('flash_attn_interface') is not None)"
    made = workers.environment(["flash_attn_interface"], python_path=str(tmp_path))
    result = run_python("-c", code, env=made)
    assert result.stdout.split("\n")[:2] == ["the other", "True"], result.stderr

    result = run_python("-c", code, env=made | {workers.VARIABLE: "flash_atn"})
    assert (result.returncode, result.stdout.split("\n")[:2]) == (0, ["the other", "False"])
    assert "nothing is provided to this process: FA4_KERNELS_PROVIDE is 'flash_atn'" in result.stderr


def test_provide_with_workers_sets_the_environment_and_removal_clears_it(monkeypatch, provided):
    """Two stacks, in either order."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.delenv(workers.VARIABLE, raising=False)
    first, second = (provided(stack, workers=True) for stack in STACKS[:2])
    assert os.environ[workers.VARIABLE] == "flash_attn,flash_attn_interface"
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [workers._SITE, "/elsewhere"]
    first.remove()
    assert os.environ[workers.VARIABLE] == "flash_attn_interface"
    second.remove()
    assert workers.VARIABLE not in os.environ
    assert os.environ["PYTHONPATH"] == "/elsewhere"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "run needs a script"),
        (["run", "nothing.py"], r"there is no script nothing\.py"),
        (["run", "--provide", "torch", "nothing.py"], "cannot provide torch"),
    ],
)
def test_run_says_what_is_wrong(capsys, arguments, message):
    """In one line; exit status 1."""
    assert command.main(arguments) == 1
    assert re.search(message, capsys.readouterr().err)


def test_site_directory_holds_one_file():
    """It comes first on PYTHONPATH: anything else in it would hide a module of the program."""
    assert [path.name for path in Path(workers._SITE).glob("*.py")] == ["sitecustomize.py"]
