"""Contract of the wheels as others see them.

The same inputs give the same bytes from another directory, user mask, time zone, hash seed and Python release. The
tools that people check wheels with have nothing to say: twine, check-wheel-contents, auditwheel, abi3audit. Installed
without a network, the runtime imports, finds its pack, and reads every kernel of it.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform as host
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.artifacts import COMPILER_CACHE

ROOT = Path(__file__).resolve().parents[2]

WRITE = """
import os, sys
from pathlib import Path
from fa4build.matrix.arch import arch_named
from fa4build.shipping.wheel import write_pack_wheel, write_runtime_wheel
from tests.artifacts import COMPILER_CACHE, TOOLCHAIN, made_up_artifact

os.umask(int(sys.argv[2], 8))
out = Path(sys.argv[1])
axes = {(dim, mask, dtype) for dim in (64, 128, 256) for mask in ("full", "causal") for dtype in ("bf16", "fp16")}
artifacts = [made_up_artifact(head_dim=dim, mask=mask, dtype=dtype) for dim, mask, dtype in axes]
write_pack_wheel(artifacts, arch=arch_named("sm90"), toolchain=TOOLCHAIN, out_dir=out)
for machine in ("x86_64", "aarch64"):
    write_runtime_wheel(machine, out, compiler_cache=COMPILER_CACHE)
"""


def copy_checkout(source: Path, target: Path) -> Path:
    """What is needed of a checkout to write wheels."""
    target.mkdir(parents=True)
    for name in ("fa4build", "kernels_src", "tests"):
        shutil.copytree(source / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "pyproject.toml"):
        shutil.copy(source / name, target)
    return target


def write_wheels(
    out: Path, checkout: Path, *, umask: str = "022", python: str = sys.executable, **environment: str
) -> dict[str, bytes]:
    """All wheels, written by a process of its own from a checkout; file name -> bytes."""
    variables = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    command = [python, "-c", WRITE, str(out), umask]
    result = subprocess.run(command, cwd=out.parent, env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout, so that editing it while the tests run is no difference between two wheels."""
    return copy_checkout(ROOT, tmp_path_factory.mktemp("checkout") / "first")


@pytest.fixture(scope="module")
def dist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one pack wheel and both runtime wheels."""
    out = tmp_path_factory.mktemp("wheels") / "dist"
    write_wheels(out, checkout)
    return out


def tool(*command: str, **options: object) -> subprocess.CompletedProcess:
    """Run a program of this environment; it must succeed."""
    result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def test_names(dist: Path) -> None:
    """One pack for every host, one runtime for each host."""
    assert sorted(path.name for path in dist.iterdir()) == [
        "fa4_kernels-0.1.0-cp310-abi3-manylinux_2_28_aarch64.whl",
        "fa4_kernels-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl",
        "fa4_kernels_sm90a-0.1.0-py3-none-any.whl",
    ]


def test_bytes_do_not_depend_on_directory_user_time_zone_or_hash_seed(
    dist: Path, checkout: Path, tmp_path: Path
) -> None:
    """The axes of the artifacts come out of a set, so their order differs with the hash seed as well."""
    other = copy_checkout(checkout, tmp_path / "another" / "place")
    elsewhere = {"TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "12345", "LANG": "C", "SOURCE_DATE_EPOCH": "1000000000"}
    again = write_wheels(tmp_path / "out", other, umask="077", HOME=str(tmp_path), **elsewhere)

    assert again == {path.name: path.read_bytes() for path in sorted(dist.iterdir())}


def test_no_path_or_user_is_inside(dist: Path, checkout: Path) -> None:
    """Neither the checkout nor the home directory is named in any wheel."""
    for path in dist.iterdir():
        data = path.read_bytes()
        assert str(checkout).encode() not in data
        assert f"{Path.home()}/".encode() not in data


def test_twine_finds_nothing(dist: Path) -> None:
    """Metadata that an index accepts and can show."""
    pytest.importorskip("twine")
    result = tool("twine", "check", "--strict", *map(str, sorted(dist.iterdir())))

    assert result.stdout.count("PASSED") == 3


def test_check_wheel_contents_finds_nothing(dist: Path) -> None:
    """No stray, doubled or misplaced file."""
    pytest.importorskip("check_wheel_contents")
    result = tool("check_wheel_contents", *map(str, sorted(dist.iterdir())))

    assert result.stdout.count(": OK") == 3


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_auditwheel_agrees_with_the_tag(dist: Path, machine: str) -> None:
    """Consistent with the tag's platform or with an older, more compatible one."""
    pytest.importorskip("auditwheel")
    wheel = dist / f"fa4_kernels-0.1.0-cp310-abi3-manylinux_2_28_{machine}.whl"
    words = " ".join(tool("auditwheel", "show", str(wheel)).stdout.split())
    consistent = words.split('following platform tag: "manylinux_2_')[1].split('"')[0]
    glibc_minor, consistent_machine = consistent.split("_", maxsplit=1)

    assert consistent_machine == machine
    assert int(glibc_minor) <= 28


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_abi3audit_finds_nothing(dist: Path, machine: str) -> None:
    """Only functions of the stable ABI as of 3.10, which is what the tag cp310-abi3 says."""
    pytest.importorskip("abi3audit")
    wheel = dist / f"fa4_kernels-0.1.0-cp310-abi3-manylinux_2_28_{machine}.whl"
    result = subprocess.run(
        [sys.executable, "-m", "abi3audit", "--strict", "--verbose", str(wheel)], capture_output=True, text=True
    )
    words = " ".join((result.stdout + result.stderr).split())

    assert result.returncode == 0, words
    assert "1 extensions scanned; 0 ABI version mismatches and 0 ABI violations found" in words


@pytest.mark.skipif(host.machine() not in ("x86_64", "aarch64"), reason="no runtime wheel for this machine")
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
def test_installs_without_a_network_and_imports(dist: Path, tmp_path: Path) -> None:
    """pip alone, no index: the extra pulls in the pack; the import opens no socket, loads no torch and no compiler;
    the pack is found by its entry point and each of its kernels read; the launcher loads."""
    site = tmp_path / "site"
    # torch is the one requirement and comes from where the user has it, so dependencies are named here by hand.
    tool(
        *("pip", "install", "--quiet", "--no-index", "--no-deps", "--find-links", str(dist)),
        *("--target", str(site), "fa4-kernels", "fa4-kernels-sm90a"),
    )
    program = """
import json, sys
def refuse(event, arguments):
    if event.startswith("socket.") or event in ("subprocess.Popen", "os.mkdir"):
        raise SystemExit(f"{event}{arguments}")
sys.addaudithook(refuse)
import fa4_kernels
from fa4_kernels import _launcher
from fa4_kernels.packs import PackReader, installed_packs
reader = PackReader()
packs = {}
for pack in installed_packs():
    kernels = [reader.read(pack, entry)[0][:4] for entry in pack.manifest.entries]
    packs[pack.manifest.pack] = [str(pack.directory), len(kernels), set(kernels) == {b"\\x7fELF"}]
heavy = sorted({"torch", "cutlass", "fa4build", "numpy", "ziglang"} & set(sys.modules))
print(json.dumps({"version": fa4_kernels.__version__, "packs": packs, "heavy": heavy, "launcher": _launcher.__file__}))
"""
    command = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{program}"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)

    assert found["version"] == "0.1.0"
    assert found["heavy"] == []
    assert found["launcher"] == str(site / "fa4_kernels" / "_launcher.abi3.so")
    assert found["packs"] == {"fa4-kernels-sm90a": [str(site / "fa4_kernels_sm90a"), 12, True]}


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
def test_extra_resolves_to_the_pack(dist: Path) -> None:
    """`fa4-kernels[sm90]` names the pack of that target and nothing else beside torch."""
    from packaging.requirements import Requirement

    from fa4build.shipping.wheel_file import read_wheel

    wheel = read_wheel(dist / "fa4_kernels-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl")
    text = wheel.files[f"{wheel.dist_info}/METADATA"].decode().split("\n\n")[0]
    requirements = [Requirement(line.removeprefix("Requires-Dist: ")) for line in text.splitlines() if "Dist:" in line]
    chosen = {r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": "sm90"})}

    assert chosen == {"torch", "fa4-kernels-sm90a"}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.12", "3.13", "3.14"])
def test_bytes_do_not_depend_on_the_python_release(dist: Path, checkout: Path, tmp_path: Path, version: str) -> None:
    """Another interpreter with its own zlib, liblzma and json: equal bytes."""
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True).returncode:
        pytest.skip(f"no python{version} here")
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    other = str(tmp_path / "venv" / "bin" / "python")
    needed = ["click", "jinja2", "jsonschema", "packaging", "pyelftools", "filelock"]
    # The same compiler, for its version is an input.
    compiler = f"ziglang=={importlib.metadata.version('ziglang')}"
    subprocess.run([other, "-m", "pip", "install", "--quiet", *needed, compiler], check=True, timeout=300)

    assert write_wheels(tmp_path / "out", checkout, python=other) == {
        p.name: p.read_bytes() for p in sorted(dist.iterdir())
    }
    assert COMPILER_CACHE.is_dir()


@pytest.mark.slow
def test_installed_builder_writes_the_same_bytes_as_a_checkout(dist: Path, checkout: Path, tmp_path: Path) -> None:
    """fa4build's own wheel carries all that is needed: launcher source, declarations, schemas, licence."""
    site = tmp_path / "site"
    source = copy_checkout(checkout, tmp_path / "source")
    (source / "README.md").write_text("# fa4build\n")
    tool("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path / "built"), str(source), timeout=300)
    (built,) = (tmp_path / "built").iterdir()
    tool("pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(built))
    (site / "LICENSE").write_text("the licence of another project, as some leave it here")
    shutil.copytree(checkout / "tests", site / "tests")

    assert write_wheels(tmp_path / "out", site) == {path.name: path.read_bytes() for path in sorted(dist.iterdir())}


def fa4build(*arguments: str, checkout: Path, **environment: str) -> subprocess.CompletedProcess:
    """The command line of a checkout, in a process of its own."""
    variables = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    command = [sys.executable, "-m", "fa4build.cli", *arguments]
    return subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True, timeout=300)


@pytest.mark.dsl
def test_a_kernel_built_twice_gives_the_same_wheel(checkout: Path, tmp_path: Path) -> None:
    """From source to wheel in two checkouts with two empty caches, another time zone, hash seed and home."""
    pytest.importorskip("cutlass")
    wheels = []
    for place, environment in (("a", {}), ("deep/er", {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "3", "HOME": "/nowhere"})):
        source = copy_checkout(checkout, tmp_path / place / "checkout")
        where = ["--cache-dir", str(tmp_path / place / "cache"), "--out", str(tmp_path / place / "dist")]
        selection = ["--select", "fwd-sm90a-bf16-hd64-full", "--no-runtime", "--jobs", "1"]
        result = fa4build("wheel", *selection, *where, checkout=source, **environment)
        assert result.returncode == 0, result.stderr
        (wheel,) = (tmp_path / place / "dist").iterdir()
        wheels.append(wheel.read_bytes())

    assert wheels[0] == wheels[1]


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_wheel_is_one_line_and_exit_code_8(dist: Path, checkout: Path, tmp_path: Path, damage: str) -> None:
    """No traceback: what is wrong, and what to do."""
    name = "fa4_kernels_sm90a-0.1.0-py3-none-any.whl"
    data = bytearray((dist / name).read_bytes())
    if damage == "truncated":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(bytes(data))
    result = fa4build("inspect", str(tmp_path / name), checkout=checkout)

    assert result.returncode == 8
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert f"{name}: " in result.stderr
