"""Contract of a bundle on a machine without a network.

In a network namespace without a route, pip installs from the bundle alone: from the directory of wheels, from the
locked requirements, from the index over file:// and over a web server inside the namespace. The runtime then finds its
packs, its launcher loads, `doctor` runs, and nothing needs to be writable. A pack that no trusted key signed is refused
there when the operator asks for trust.
"""

import os
import platform as host
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from fa4build.matrix.arch import arch_named
from fa4build.shipping.bundle import write_bundle
from fa4build.shipping.signing import new_key
from fa4build.shipping.wheel import prepare_pack_wheel, prepare_runtime_wheel
from tests.artifacts import COMPILER_CACHE, TOOLCHAIN, made_up_artifact
from tests.shipping.test_bundle import other_wheel

NAMESPACE = ("unshare", "--map-root-user", "--net")
HEADS = (64, 96, 128)


def namespaces_are_allowed() -> bool:
    """Some containers refuse them."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.skipif(not namespaces_are_allowed(), reason="this machine refuses network namespaces"),
    pytest.mark.skipif(host.machine() not in ("x86_64", "aarch64"), reason="no runtime wheel for this machine"),
]


@dataclass(frozen=True)
class Made:
    """A signed bundle, and its signer's public key where the operator keeps it."""

    root: Path
    store: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Packs of all three targets, the runtime for both hosts, and a stand-in for torch."""
    directory = tmp_path_factory.mktemp("bundle")
    _, public, key = new_key(directory / "store", "release")
    wheels = []
    for name in ("sm90", "sm100", "sm103"):
        arch = arch_named(name)
        artifacts = [made_up_artifact(head_dim=dim, target=arch.target) for dim in HEADS]
        options = {"arch": arch, "toolchain": TOOLCHAIN, "out_dir": directory / "dist", "sign": key}
        wheels.append(prepare_pack_wheel(artifacts, **options).write().path)
    for machine in ("x86_64", "aarch64"):
        prepared = prepare_runtime_wheel(machine, directory / "dist", compiler_cache=COMPILER_CACHE)
        wheels.append(prepared.write().path)
    bundle = write_bundle(directory / "out", wheels, include=[other_wheel(directory)], sign=key)
    return Made(root=bundle.path, store=public.parent)


def isolated(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a shell script in a network namespace without a route, with nothing of this environment but PATH."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PIP_CONFIG_FILE": os.devnull, **variables}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [*NAMESPACE, "sh", "-euc", script, "sh", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)


def test_the_namespace_has_no_route() -> None:
    """Otherwise the tests below would prove nothing."""
    code = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"
    done = isolated('"$1" -c "$2"', sys.executable, code)

    assert "Network is unreachable" in done.stderr


PROBE = """
import fa4_kernels, sys
from fa4_kernels import _launcher
from fa4_kernels.packs import PackReader, installed_packs
reader = PackReader()
print(sorted((p.manifest.pack, len([reader.read(p, e) for e in p.manifest.entries])) for p in installed_packs()))
"""
READ_BACK = "[('fa4-kernels-sm100a', 3), ('fa4-kernels-sm103a', 3), ('fa4-kernels-sm90a', 3)]"
PIP = '"$PYTHON" -m pip install --quiet --disable-pip-version-check --target "$SITE"'


@pytest.mark.parametrize(
    "install",
    [
        pytest.param(f"{PIP} --no-index --find-links wheels 'fa4-kernels[all]'", id="find-links"),
        pytest.param(
            f"{PIP} --no-index --find-links wheels --require-hashes --requirement requirements.txt", id="locked"
        ),
        pytest.param(f"{PIP} --index-url file://$PWD/simple/ 'fa4-kernels[all]'", id="index in place"),
        pytest.param(
            # The loopback device belongs to the namespace and is down at first.
            '"$PYTHON" -c "$UP"; "$PYTHON" -m http.server --bind 127.0.0.1 8000 >/dev/null 2>&1 & server=$!; '
            "sleep 1; "
            f"{PIP} --index-url http://127.0.0.1:8000/simple/ 'fa4-kernels[all]'; kill $server",
            id="index on a web server",
        ),
    ],
)
def test_installs_and_runs_without_a_network(made: Made, tmp_path: Path, install: str) -> None:
    """Every way that the operator's page names: extras pull in the packs, every kernel reads back, doctor reports."""
    up = (
        "import fcntl, socket, struct; s = socket.socket(); "
        "fcntl.ioctl(s, 0x8914, struct.pack('16sH14x', b'lo', 0x41))"  # SIOCSIFFLAGS: IFF_UP | IFF_RUNNING
    )
    script = f'cd "$1"; {install}; cd /; export PYTHONPATH="$SITE"; "$PYTHON" -c "$2"; "$PYTHON" -m fa4_kernels doctor'
    variables = {"PYTHON": sys.executable, "SITE": str(tmp_path / "site"), "UP": up}
    done = isolated(script, str(made.root), PROBE, **variables)
    lines = done.stdout.splitlines()

    assert lines[0] == READ_BACK, done.stderr
    assert "pack fa4-kernels-sm90a 0.1.0: 3 kernels for sm_90a" in lines
    if not Path("/dev/nvidiactl").exists():
        assert done.returncode == 1
        assert "not usable here: cannot open the CUDA driver libcuda.so.1" in done.stdout


def test_the_bundle_tries_itself(made: Made) -> None:
    """`verify.sh --install`, outside of a namespace: it makes its own."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHON": sys.executable}
    command = ["sh", str(made.root / "verify.sh"), "--install", "--key", str(made.store / "release.pub")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)

    assert done.returncode == 0, done.stderr
    assert "trial installation in a network namespace" in done.stdout
    assert "9 kernels of 3 packs read back, launcher loaded" in done.stdout
    assert "fa4_kernels doctor says:" in done.stdout


@pytest.fixture(scope="module")
def site(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation of the bundle."""
    site = tmp_path_factory.mktemp("installed") / "site"
    script = f"cd \"$1\"; {PIP} --no-index --find-links wheels 'fa4-kernels[all]'"
    done = isolated(script, str(made.root), PYTHON=sys.executable, SITE=str(site))
    assert done.returncode == 0, done.stderr
    return site


@pytest.mark.parametrize("mode", ["require", "warn", "off"])
def test_trust_is_checked_on_the_machine_that_runs(made: Made, site: Path, mode: str, tmp_path: Path) -> None:
    """With the signer's key in the store every kernel is there; without it, none, a warning, or all."""
    listing = '"$1" -m fa4_kernels list'
    variables = {"PYTHONPATH": str(site), "FA4_KERNELS_TRUST": mode}
    known = isolated(listing, sys.executable, FA4_KERNELS_TRUST_STORE=str(made.store), **variables)
    stranger = isolated(listing, sys.executable, FA4_KERNELS_TRUST_STORE=str(tmp_path), **variables)
    kept = {"require": 0, "warn": 9, "off": 9}[mode]

    assert len(known.stdout.splitlines()) == 9
    assert known.stderr == ""
    assert len(stranger.stdout.splitlines()) == kept
    assert ("trusted are the keys in" in stranger.stderr) == (mode != "off")


def test_nothing_needs_to_be_writable(site: Path) -> None:
    """HOME, site-packages, the temporary directory and everything else mounted read-only."""
    script = 'mount -o remount,bind,ro / 2>/dev/null || exit 77; export PYTHONPATH="$3"; "$1" -c "$2"; '
    script += '"$1" -m fa4_kernels explain --head-dim 96 --mask causal; touch "$3/x"'
    command = ["unshare", "--map-root-user", "--net", "--mount", "sh", "-euc", script]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    arguments = ["sh", sys.executable, PROBE, str(site)]
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip("this machine refuses to remount in a namespace")

    assert READ_BACK in done.stdout, done.stderr
    assert "fwd-sm90a-bf16-hd96-causal from fa4-kernels-sm90a" in done.stdout
    assert "Read-only file system" in done.stderr


def test_a_missing_pack_is_named(made: Made, tmp_path: Path) -> None:
    """Only the pack for sm_90a is installed, and the device is another: the message says which wheel to install."""
    script = f'cd "$1"; {PIP} --no-index --find-links wheels \'fa4-kernels[sm90]\'; cd /; export PYTHONPATH="$SITE"; '
    script += '"$PYTHON" -m fa4_kernels explain --capability 10.3 || true'
    done = isolated(script, str(made.root), PYTHON=sys.executable, SITE=str(tmp_path / "site"))

    assert "pip install 'fa4-kernels[sm103]'" in done.stdout
