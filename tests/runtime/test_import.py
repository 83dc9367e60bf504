"""Contract: importing fa4_kernels is free of effects, and the package needs nothing of fa4build.

No torch, no launcher, no socket, no file written, no environment read, until a tensor function is asked for.
"""

import ast
import subprocess
import sys

import pytest

from tests.runtime.conftest import RUNTIME

PACKAGE = RUNTIME / "fa4_kernels"
FILES = sorted(PACKAGE.rglob("*.py"))


def run_python(code):
    """Output of a fresh interpreter that finds the package in the source tree."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(RUNTIME)!r})\n{code}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env={})
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_has_no_effects():
    """An audit hook sees no socket, no process, no write, and no look at the environment by this package."""
    code = """
import builtins
seen = []
def hook(event, args):
    if event.split('.')[0] in ('socket', 'subprocess', 'ctypes') or event in ('os.mkdir', 'os.rename', 'os.remove'):
        seen.append(event)
    if event == 'open' and isinstance(args[1], str) and set(args[1]) & set('wax+'):
        seen.append(args)
sys.dont_write_bytecode = True
sys.addaudithook(hook)
import fa4_kernels
print(seen, 'torch' in sys.modules, any('_launcher' in name for name in sys.modules))
"""
    assert run_python(code) == "[] False False"


def test_import_is_light():
    """The modules that come in are the package's own two and nothing of the standard library that is slow to import."""
    own = run_python("import fa4_kernels; print(sorted(m for m in sys.modules if m.startswith('fa4_kernels')))")

    assert own == "['fa4_kernels', 'fa4_kernels.errors']"


def test_an_unknown_name_is_an_attribute_error():
    """The lazy names do not swallow typing mistakes."""
    import fa4_kernels

    with pytest.raises(AttributeError, match="no attribute 'flash_attn_fun'"):
        fa4_kernels.flash_attn_fun  # noqa: B018


TAKE_TENSORS = (
    *("allocation.py", "answers.py", "api.py", "attention.py", "autograd.py", "calls.py", "flops.py", "gradients.py"),
    *("hf.py", "observers.py", "ops.py", "packed.py", "problems.py", "recipes.py", "scalars.py", "sdpa.py"),
    "torch_backend.py",
    *(f"stacks/{name}.py" for name in ("cache", "flash_attn_2", "flash_attn_3", "flash_attn_4")),
    *(f"stacks/{name}.py" for name in ("padding", "raw", "rotary")),
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nothing_of_the_builder_is_imported(path):
    """Absolute imports are the standard library and torch; torch only in the modules that take tensors, or inside a
    function; transformers only inside a function of hf.py."""
    tree = ast.parse(path.read_text())
    top_level = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module.split(".")[0]]
        else:
            continue
        for name in names:
            is_inside = id(node) not in top_level
            is_for_hf = name == "transformers" and path.name == "hf.py" and is_inside
            is_at_start = name == "fa4_kernels" and path.name == "sitecustomize.py" and is_inside
            assert name in sys.stdlib_module_names or name == "torch" or is_for_hf or is_at_start
            assert name != "torch" or path.relative_to(PACKAGE).as_posix() in TAKE_TENSORS or is_inside


def test_the_tables_match_the_c_enums():
    """Order of ops, types and dtypes in plan.py is that of the enums in _plan.h."""
    import re

    from fa4_kernels import plan

    text = (PACKAGE / "_plan.h").read_text()
    words = {prefix: re.findall(rf"\b{prefix}_([A-Z0-9]+)\b(?=[,\s])", text) for prefix in ("OP", "TYPE", "DTYPE")}

    def in_order(found, count):
        return tuple(dict.fromkeys(word.lower() for word in found))[:count]

    assert in_order(words["OP"], len(plan.OPS)) == plan.OPS
    assert in_order(words["TYPE"], len(plan.TYPES)) == plan.TYPES
    assert in_order(words["DTYPE"], len(plan.TENSOR_DTYPES)) == plan.TENSOR_DTYPES
