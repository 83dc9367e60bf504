"""Contract of the aarch64 runtime wheel, run on another machine by an emulator, with the Python of Debian for aarch64.

The launcher imports, the dispatcher explains, doctor refuses without a driver, and with a stand-in driver compiled for
aarch64 a kernel is taken from its pack and loaded. Slow: it downloads the interpreter. It shows neither speed nor a
GPU.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fa4build.shipping.wheel import write_runtime_wheel
from tests.artifacts import COMPILER_CACHE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="needs qemu-aarch64 (Debian: qemu-user)"),
    pytest.mark.skipif(shutil.which("apt-get") is None, reason="takes the interpreter from Debian"),
]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("libc6", "libgcc-s1", "libexpat1", "zlib1g", "libssl3", "libffi8", "liblzma5", "libbz2-1.0", "libuuid1")
PYTHON = ("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib")
FAMILY = ["fwd-sm90a-bf16-hd128-causal", "fwd-sm90a-bf16-hd64-full"]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an aarch64 interpreter and its libraries; apt keeps its state beside it."""
    base = tmp_path_factory.mktemp("aarch64")
    for name in ("state/lists/partial", "cache/archives/partial", "debs", "root"):
        (base / name).mkdir(parents=True)
    (base / "status").touch()
    options = {"APT::Architecture": "arm64", "APT::Architectures": "arm64", "Dir::State": base / "state"}
    options |= {"Dir::Cache": base / "cache", "Dir::State::status": base / "status"}
    apt = ["apt-get", "--quiet", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
    for command in ([*apt, "update"], [*apt, "download", *PACKAGES, *PYTHON]):
        done = subprocess.run(command, cwd=base / "debs", capture_output=True, text=True, timeout=240)
        if done.returncode:
            pytest.skip(f"no aarch64 interpreter to be had here: {done.stderr.strip()[-200:]}")
    for path in (base / "debs").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(path), str(base / "root")], check=True, timeout=60)
    return base / "root"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip installs it for aarch64, a pack, and the stand-in driver for aarch64."""
    from tests.runtime.fake import write_pack

    directory = tmp_path_factory.mktemp("wheel")
    site = directory / "site"
    wheel = write_runtime_wheel("aarch64", directory, compiler_cache=COMPILER_CACHE).path
    target = ["--platform", "manylinux_2_28_aarch64", "--python-version", "3.11", "--only-binary", ":all:"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", *target]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, timeout=120)
    sys.path.insert(0, str(ROOT / "fa4build" / "runtime"))
    write_pack(site / "fa4_kernels_test", FAMILY)
    info = site / "fa4_kernels_test-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fa4-kernels-test\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[fa4_kernels.packs]\nfa4-kernels-test = fa4_kernels_test\n")
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.28", "-std=c11", "-O1"]
    source = ROOT / "tests" / "runtime" / "fake_driver.c"
    driver = [*compiler, "-shared", "-fPIC", str(source), "-o", str(site / "libcuda_fake.so")]
    subprocess.run(driver, check=True, timeout=300)
    return site


def run(system: Path, site: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The emulated interpreter with the wheel on its path."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["qemu-aarch64", "-L", str(system), str(system / "usr" / "bin" / "python3.11"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_the_launcher_imports(system: Path, site: Path) -> None:
    """On an aarch64 interpreter, from the wheel."""
    done = run(system, site, "-c", "import platform; from fa4_kernels import _launcher; print(platform.machine())")

    assert done.stdout == "aarch64\n", done.stderr


def test_doctor_refuses_without_a_driver(system: Path, site: Path) -> None:
    """Packs are listed, the missing driver is named, status 1."""
    done = run(system, site, "-m", "fa4_kernels", "doctor")

    assert done.returncode == 1
    assert "pack fa4-kernels-test 0.1.0: 2 kernels for sm_90a" in done.stdout
    assert "not usable here: cannot open the CUDA driver libcuda.so.1" in done.stdout


def test_the_dispatcher_explains(system: Path, site: Path) -> None:
    """The trace of a choice, and the wheel to install where there is none."""
    chosen = run(system, site, "-m", "fa4_kernels", "explain", "--mask", "causal")
    refused = run(system, site, "-m", "fa4_kernels", "explain", "--capability", "10.3")

    assert (chosen.returncode, refused.returncode) == (0, 1)
    assert "fwd-sm90a-bf16-hd128-causal from fa4-kernels-test 0.1.0" in chosen.stdout
    assert "pip install 'fa4-kernels[sm103]'" in refused.stdout


def test_a_kernel_is_loaded_through_the_driver(system: Path, site: Path) -> None:
    """Plan decoded, library loaded, functions found: all of the launcher but the launch itself."""
    code = (
        "import sys; from fa4_kernels.loader import Runtime; "
        "runtime = Runtime(driver_path=sys.argv[1], stream_of=lambda ordinal: 0); "
        "print(runtime.driver_version, runtime.device(0).target, *runtime.preload([0]))"
    )
    done = run(system, site, "-c", code, str(site / "libcuda_fake.so"))

    assert done.stdout == f"(13, 0) sm_90a {' '.join(FAMILY)}\n", done.stderr
