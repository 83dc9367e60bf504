"""Contract of `fa4build verify --device-scripts DIR`: whoever has fa4build has the scripts that verify on a GPU.

They stand alone: every module they import is the standard library's, torch's, the wheels', or one of them.
"""

import ast
import sys

import pytest

from fa4build.cli import main
from fa4build.errors import WheelError
from fa4build.verify.device_scripts import device_scripts, write_device_scripts

MAY_IMPORT = {"torch", "fa4_kernels", "numpy", "transformers", "flash_attn"}


def test_the_scripts_are_written_with_their_readme(tmp_path, capsys):
    """The whole folder, byte by byte; writing it again changes nothing."""
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--device-scripts", str(tmp_path / "device")])
    written = {path.name: path.read_bytes() for path in (tmp_path / "device").iterdir()}

    assert ended.value.code == 0
    assert written == {path.name: path.read_bytes() for path in device_scripts()}
    assert {"README.md", "prove_forward.py", "harness.py"} < written.keys()
    assert f"{len(written) - 1} scripts" in capsys.readouterr().out
    assert len(write_device_scripts(tmp_path / "device")) == len(written) - 1


def test_other_files_are_not_replaced(tmp_path):
    """A file of such a name with other contents: refused, and nothing is written."""
    (tmp_path / "sanitize.py").write_text("mine")

    with pytest.raises(WheelError, match=r"sanitize\.py: there is another file of this name"):
        write_device_scripts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["sanitize.py"]


@pytest.mark.parametrize("script", [path for path in device_scripts() if path.suffix == ".py"], ids=lambda p: p.name)
def test_a_script_stands_alone(script):
    """On a GPU machine there is no fa4build."""
    own = {path.stem for path in device_scripts()}
    imported = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])

    assert imported - own - MAY_IMPORT - set(sys.stdlib_module_names) == set()


def test_the_readme_names_every_script_that_is_run():
    """A script that has a command line is on the list."""
    readme = next(path for path in device_scripts() if path.name == "README.md").read_text(encoding="utf-8")
    run = [p.name for p in device_scripts() if p.suffix == ".py" and "__main__" in p.read_text(encoding="utf-8")]

    assert run
    assert [name for name in run if f"`{name}`" not in readme] == []
