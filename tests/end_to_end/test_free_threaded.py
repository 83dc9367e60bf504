"""Contract of the wheels for Python without an interpreter lock, on a free-threaded interpreter if there is one.

It installs the wheel of its own tag, keeps the lock off, and many threads may launch one kernel at once: no launch
mixes two calls. The launcher of either kind of interpreter is refused by the other with an error, not by a crash.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fa4build.shipping.launcher_build import FREE_THREADED_PLATFORMS, PLATFORMS
from fa4build.shipping.wheel import write_runtime_wheel
from tests.artifacts import COMPILER_CACHE

ROOT = Path(__file__).resolve().parents[2]
X86 = {platform.interpreters: platform for platform in (*PLATFORMS, *FREE_THREADED_PLATFORMS) if "x86" in platform.tag}
RELEASES = ("3.14t", "3.13t")
FREE_THREADED = next((path for path in (shutil.which(f"python{release}") for release in RELEASES) if path), None)

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="runs the launcher of x86_64")
with_free_threaded = pytest.mark.skipif(FREE_THREADED is None, reason=f"no {' or '.join(RELEASES)} interpreter here")


def site_of(interpreters: str, directory: Path) -> Path:
    """The wheel for these interpreters, unpacked as an installer would, whatever the tag says."""
    wheel = write_runtime_wheel(X86[interpreters], directory, compiler_cache=COMPILER_CACHE)
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel.path), str(directory / "site")], check=True)
    return directory / "site"


def run(python: str, site: Path, *arguments: str) -> subprocess.CompletedProcess:
    """An interpreter with a runtime and this checkout's tests on its path. Warnings are errors."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{site}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-W", "error", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@with_free_threaded
def test_threads_share_a_launch_without_a_lock(tmp_path: Path) -> None:
    """4 threads, 1500 rounds of 16 calls: 96000 launches, none torn, the interpreter lock off to the end."""
    release = run(FREE_THREADED, tmp_path, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])").stdout.strip()
    driver = tmp_path / "libcuda_fake.so"
    source = ROOT / "tests" / "runtime" / "fake_driver.c"
    compiler = [sys.executable, "-m", "ziglang", "cc", "-std=c11", "-O2", "-shared", "-fPIC", str(source)]
    subprocess.run([*compiler, "-o", str(driver)], check=True, timeout=120)
    site = site_of(f"{release}-{release}t", tmp_path)
    done = run(FREE_THREADED, site, str(Path(__file__).with_name("free_threaded_calls.py")), str(driver))

    assert (done.stdout, done.stderr) == ("96000 0 False\n", "")


@with_free_threaded
def test_a_free_threaded_interpreter_refuses_the_other_launcher(tmp_path: Path) -> None:
    """3.13 without a lock finds `_launcher.abi3.so`: importing it must say which wheel to install, and not crash."""
    done = run(FREE_THREADED, site_of("cp310-abi3", tmp_path), "-m", "fa4_kernels", "doctor")

    assert done.returncode == 1, done.stderr
    assert "free-threaded" in done.stdout
    assert "Install the fa4-kernels wheel for it: cp31" in done.stdout


def test_an_interpreter_with_a_lock_refuses_the_free_threaded_launcher(tmp_path: Path) -> None:
    """Even under a name that this interpreter looks for."""
    site = site_of("cp314-cp314t", tmp_path)
    launcher = site / "fa4_kernels" / X86["cp314-cp314t"].launcher_file
    launcher.rename(launcher.with_name("_launcher.abi3.so"))
    done = run(sys.executable, site, "-m", "fa4_kernels", "doctor")

    assert done.returncode == 1, done.stderr
    assert "undefined symbol: PyUnstable_Module_SetGIL" in done.stdout
    assert "Install the fa4-kernels wheel for it: cp310-abi3-manylinux_2_28_x86_64" in done.stdout
