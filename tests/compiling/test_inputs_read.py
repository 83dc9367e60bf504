"""Contract: what an interpreter loads by itself when it starts is no undeclared input of a compile; later loads are.

Virtual environments and distributions put modules of their own beside the packages (`_virtualenv`, `sitecustomize`).
Each case runs in a fresh interpreter, because a hook that watches files cannot be taken back.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the compiler's environment is read from what is installed")

ROOT = Path(__file__).parents[2]
CHECK = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from fa4build.compiling import inputs_read
inputs_read.watch()
{then}
request = {{"name": "kernel", "family": "mine", "sources": [], "distributions": []}}
inputs_read.check_inputs(request, [])
"""


def checked(tmp_path: Path, then: str) -> subprocess.CompletedProcess[str]:
    """A compile's check after `then`, in an interpreter that starts with a `sitecustomize`."""
    (tmp_path / "sitecustomize.py").write_text("STARTED = True\n")
    (tmp_path / "helper.py").write_text("SCALE = 2\n")
    code = CHECK.format(root=str(ROOT), then=then)
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_what_the_interpreter_loads_when_it_starts_is_its_environment(tmp_path):
    """sitecustomize belongs to no distribution and no family."""
    done = checked(tmp_path, "assert sys.modules['sitecustomize'].STARTED")

    assert done.returncode == 0, done.stderr


def test_what_is_imported_later_must_be_declared(tmp_path):
    """The same directory, a module that no hook loaded."""
    done = checked(tmp_path, "import helper")

    assert f"compiling reads {tmp_path}/helper.py, which its cache key does not hold" in done.stderr


def test_a_program_is_refused_unless_it_looks_for_a_library(tmp_path):
    """ldconfig by ctypes.util.find_library, as the compiler's packages do on import; anything else is an input."""
    searched = checked(tmp_path, "import ctypes.util; ctypes.util.find_library('dl')")
    ran = checked(tmp_path, "import subprocess; subprocess.run(['/bin/true'])")

    assert searched.returncode == 0, searched.stderr
    assert "compiling runs a program or opens a connection (subprocess.Popen '/bin/true')" in ran.stderr


def test_lists_of_plugins_are_no_inputs(tmp_path):
    """Whoever looks for plugins reads the lists of all distributions: torch does when it is imported."""
    done = checked(tmp_path, "from importlib.metadata import entry_points; entry_points(group='torch.backends')")

    assert done.returncode == 0, done.stderr
