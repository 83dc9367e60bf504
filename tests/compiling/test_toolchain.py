"""Contract of the toolchain's identity.

It is known without importing the compiler. It is the same wherever the same wheels were installed, and another one as
soon as a file in them differs. There is one version; anything else, and anything in the environment that would steer
the compiler, is refused with what to do.
"""

import base64
import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fa4build.compiling.toolchain import (
    DSL_VERSION,
    ENVIRONMENT,
    current_toolchain,
    damaged_files,
    record_sha256,
    refuse_steering,
    tree_sha256,
)
from fa4build.errors import ToolchainError

ROOT = Path(__file__).resolve().parents[2]
DSL_NAMES = ("nvidia_cutlass_dsl", "nvidia_cutlass_dsl_libs_base", "nvidia_cutlass_dsl_libs_cu13")


def install(site: Path, name: str, version: str, content: bytes = b"code") -> None:
    """A distribution of one file, as an installer leaves it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_bytes(content)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    rows = [f"{name}.py,sha256={digest},{len(content)}", f"{info.name}/RECORD,,"]
    (info / "RECORD").write_text("\n".join(rows) + "\n")


def install_all(site: Path, *, version: str = DSL_VERSION, leave_out: str = "") -> list[str]:
    """A whole toolchain; returns the search path."""
    for name in DSL_NAMES:
        if name != leave_out:
            install(site, name, version)
    if leave_out != "apache_tvm_ffi":
        install(site, "apache_tvm_ffi", "0.1.15.post2")
    return [str(site)]


def test_the_identity_names_every_distribution_of_the_compiler(tmp_path):
    """With version and contents; sorted."""
    toolchain = current_toolchain(install_all(tmp_path))

    assert [(item.name, item.version) for item in toolchain.distributions] == [
        ("apache-tvm-ffi", "0.1.15.post2"),
        ("nvidia-cutlass-dsl", "4.8.1"),
        ("nvidia-cutlass-dsl-libs-base", "4.8.1"),
        ("nvidia-cutlass-dsl-libs-cu13", "4.8.1"),
    ]
    assert (toolchain.dsl_version, toolchain.backend, toolchain.environment) == ("4.8.1", "cu13", ENVIRONMENT)


def test_the_identity_does_not_depend_on_where_the_compiler_is_installed(tmp_path):
    """Two directories, equal wheels."""
    one = current_toolchain(install_all(tmp_path / "one"))
    another = current_toolchain(install_all(tmp_path / "another"))

    assert one == another


def test_a_rebuilt_wheel_of_the_same_version_is_another_toolchain(tmp_path):
    """One byte in one file."""
    one = current_toolchain(install_all(tmp_path / "one"))
    path = install_all(tmp_path / "another", leave_out="nvidia_cutlass_dsl_libs_base")
    install(tmp_path / "another", "nvidia_cutlass_dsl_libs_base", DSL_VERSION, content=b"c0de")

    assert one != current_toolchain(path)


@pytest.mark.parametrize(
    ("version", "leave_out", "reason"),
    [
        pytest.param("4.8.1", "nvidia_cutlass_dsl", "is not installed", id="missing"),
        pytest.param("4.7.1", "", r"installed: .*4\.7\.1.*; tested: 4\.8\.1 only", id="another version"),
        pytest.param("4.8.1", "nvidia_cutlass_dsl_libs_cu13", "cu13 flavour .* is not installed", id="other flavour"),
        pytest.param("4.8.1", "apache_tvm_ffi", "apache-tvm-ffi is not installed", id="no tvm-ffi"),
    ],
)
def test_a_toolchain_that_is_not_the_tested_one_is_refused(tmp_path, version, leave_out, reason):
    """Each message says what to install."""
    with pytest.raises(ToolchainError, match=f"(?s){reason}.*pip install"):
        current_toolchain(install_all(tmp_path, version=version, leave_out=leave_out))


def test_parts_of_different_versions_are_refused(tmp_path):
    """A half-finished upgrade."""
    path = install_all(tmp_path, leave_out="nvidia_cutlass_dsl_libs_base")
    install(tmp_path, "nvidia_cutlass_dsl_libs_base", "4.9.0")

    with pytest.raises(ToolchainError, match=r"libs-base 4\.9\.0"):
        current_toolchain(path)


@pytest.mark.parametrize("record", [None, "one,two\n"], ids=["missing", "damaged"])
def test_a_distribution_of_unknown_contents_is_refused(tmp_path, record):
    """Without a RECORD nobody knows what is installed."""
    path = install_all(tmp_path)
    file = tmp_path / f"nvidia_cutlass_dsl-{DSL_VERSION}.dist-info" / "RECORD"
    file.unlink() if record is None else file.write_text(record)

    with pytest.raises(ToolchainError, match="RECORD"):
        current_toolchain(path)


def test_the_pinned_version_is_the_one_the_package_requires():
    """pyproject.toml and the constant say the same."""
    required = re.search(r"nvidia-cutlass-dsl\[cu13\]==([0-9.]+)", (ROOT / "pyproject.toml").read_text())

    assert required is not None
    assert required[1] == DSL_VERSION


RECORD = """a/b.py,sha256=AAAA,10
a/c.so,sha256=BBBB,20
a-1.dist-info/METADATA,sha256=CCCC,30
"""


@pytest.mark.parametrize(
    "added",
    [
        pytest.param("a/__pycache__/b.cpython-311.pyc,,", id="byte code"),
        pytest.param("a/__pycache__/b.cpython-312.pyc,sha256=DDDD,5", id="hashed byte code"),
        pytest.param("a-1.dist-info/RECORD,,", id="the record itself"),
        pytest.param("a-1.dist-info/INSTALLER,sha256=DDDD,4", id="name of the installer"),
        pytest.param("a-1.dist-info/REQUESTED,sha256=DDDD,0", id="whether it was asked for"),
        pytest.param("a-1.dist-info/direct_url.json,sha256=DDDD,4", id="where it came from"),
        pytest.param("../../../bin/a,sha256=DDDD,200", id="script with the path of its interpreter"),
    ],
)
def test_what_an_installer_adds_does_not_count(added):
    """pip and others leave different rows for the same wheel."""
    assert record_sha256(RECORD + added + "\n") == record_sha256(RECORD)


@pytest.mark.parametrize(
    "changed", [RECORD.replace("BBBB", "XXXX"), RECORD.replace("c.so", "d.so"), RECORD.split("\n", 1)[1]]
)
def test_what_the_wheel_brought_counts(changed):
    """Contents, names, and what is missing."""
    assert record_sha256(changed) != record_sha256(RECORD)


def test_files_changed_after_installation_are_found(tmp_path):
    """RECORD is about what was installed; somebody may have edited it since."""
    path = install_all(tmp_path)
    assert damaged_files("nvidia-cutlass-dsl", path) == ()
    (tmp_path / "nvidia_cutlass_dsl.py").write_bytes(b"edited")
    assert damaged_files("nvidia-cutlass-dsl", path) == ("nvidia_cutlass_dsl.py",)
    (tmp_path / "nvidia_cutlass_dsl.py").unlink()
    assert damaged_files("nvidia-cutlass-dsl", path) == ("nvidia_cutlass_dsl.py",)


@pytest.mark.parametrize(
    "name",
    ["CUTE_DSL_ARCH", "CUTE_DSL_LINEINFO", "CUTLASS_ANYTHING", "CUTE_EXPERIMENTAL_DSL_DEBUG", "FLASH_ATTENTION_ARCH"],
)
def test_variables_that_steer_the_compiler_are_refused(name):
    """They would have no effect, and the user should know."""
    with pytest.raises(ToolchainError, match=f"{name}=sm_80.*unset {name}"):
        refuse_steering({name: "sm_80", "PATH": "/bin"})


def test_ordinary_variables_and_pinned_values_are_not_refused():
    """Also a steering variable that says what we pin anyway."""
    refuse_steering({"PATH": "/bin", "HOME": "/", "CUDA_HOME": "/usr/local/cuda", **dict(ENVIRONMENT)})


def test_the_pinned_environment_is_sorted():
    """It is part of the key: one order."""
    assert list(ENVIRONMENT) == sorted(ENVIRONMENT)


def test_our_own_code_generator_is_part_of_the_identity(tmp_path):
    """An edited extractor gives other launch plans from the same cubin."""
    for name, text in (("one", "x = 1\n"), ("two", "x = 2\n"), ("three", "x = 1\n")):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "a.py").write_text(text)
    digests = [tree_sha256(tmp_path / name) for name in ("one", "two", "three")]

    assert digests[0] == digests[2] != digests[1]


def test_the_compiler_is_not_imported():
    """Looking things up in the cache must be quick."""
    code = (
        "import sys; from fa4build.compiling.toolchain import *; current_toolchain(); print('cutlass' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout == "False\n"
