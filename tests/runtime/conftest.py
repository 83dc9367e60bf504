"""The runtime as users import it (`fa4_kernels`), its launcher compiled here, and a stand-in for the CUDA driver."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

RUNTIME = Path(__file__).resolve().parents[2] / "fa4build" / "runtime"
sys.path.insert(0, str(RUNTIME))


def compile_c(source: Path, output: Path, *flags: str) -> None:
    """Compile one C file with the compiler that the `ziglang` package brings."""
    command = [sys.executable, "-m", "ziglang", "cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", *flags]
    result = subprocess.run([*command, str(source), "-o", str(output)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    """The compiled module `fa4_kernels._launcher`, outside the source tree."""
    import fa4_kernels

    directory = tmp_path_factory.mktemp("launcher")
    include = "-I" + sysconfig.get_paths()["include"]
    shared = ("-shared", "-fPIC", "-fvisibility=hidden", include)
    compile_c(RUNTIME / "fa4_kernels" / "_launcher.c", directory / "_launcher.abi3.so", *shared)
    fa4_kernels.__path__.append(str(directory))
    from fa4_kernels import loader

    return loader._import_launcher()


@pytest.fixture(scope="session")
def fake_driver_path(tmp_path_factory):
    """The stand-in driver, compiled."""
    path = tmp_path_factory.mktemp("driver") / "libcuda_fake.so"
    compile_c(Path(__file__).with_name("fake_driver.c"), path, "-shared", "-fPIC")
    return path


@pytest.fixture
def fake(fake_driver_path):
    """Records and steering of the stand-in driver, reset."""
    from tests.runtime.fake import FakeDriver

    driver = FakeDriver(fake_driver_path)
    driver.reset()
    return driver
